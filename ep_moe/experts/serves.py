"""What each backend of expert kernels computes, declared in a module that imports no kernels."""

import dataclasses

import torch

from ep_moe.config import DTYPES, ActivationKind
from ep_moe.quant import FP8_CAPABILITY, QuantScheme


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Serves:
    """What a backend of kernels computes; "torch" experts compute everything.

    Args:
        name: of the backend, in configs.
        weights: (dtype of the stored weights, None for the model's own; granularity of their scales), if tokens have
            the same dtype.
        decoded: (family; dtype; granularity) of weights that are decoded to the model's dtype, which tokens have.
        activations: between the GEMMs.
        dtypes: of the model, and so of the output.
        capability, fp8_capability: of the first GPUs that it runs on, the second if values or scales are fp8.
    """

    name: str
    weights: frozenset[tuple[torch.dtype | None, str]]
    decoded: frozenset[tuple[str, torch.dtype, str]]
    activations: frozenset[ActivationKind]
    dtypes: frozenset[torch.dtype]
    capability: tuple[int, int]
    fp8_capability: tuple[int, int]

    def computes(self, scheme: QuantScheme) -> bool:
        """True if the backend has kernels for weights and tokens in `scheme`. Local.

        They multiply values of one dtype and apply float32 scales, and requantize the intermediate as the payload; or
        weights are decoded for tokens in the model's own dtype.
        """
        rows, weight = scheme.payload, scheme.weight
        if rows != scheme.activation:
            return False
        if not rows.quantized and weight.dtype is not None:
            return (weight.family, weight.dtype, weight.granularity) in self.decoded
        return (
            rows.dtype == weight.dtype
            and (weight.dtype, weight.granularity) in self.weights
            and {rows.family, weight.family} <= {"none", "scaled"}
        )

    def check(
        self,
        scheme: QuantScheme,
        *,
        activation: ActivationKind | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Raise for what this backend does not compute; None is not checked.

        Errors: ValueError for a scheme, an activation or a dtype, RuntimeError for a GPU that is too old. Local.
        """
        stored, other = scheme.weight, 'experts="torch" does'
        if not self.computes(scheme):
            raise ValueError(
                f"'{self.name}' experts do not compute scheme '{scheme.name}' ({stored.dtype}, "
                f"scales {stored.scale_dtype}); {other}"
            )
        grouped = scheme.activation.granularity == "group"
        if scheme.activation.quantized and (stored.granularity == "block") != grouped:
            raise ValueError(
                f"scheme '{scheme.name}' scales weights per {stored.granularity} and activations per "
                f"{scheme.activation.granularity}; '{self.name}' experts take blocks with groups, and neither without "
                "the other"
            )
        if activation is not None and activation not in self.activations:
            raise ValueError(f"'{self.name}' experts do not compute activation '{activation.value}'; {other}")
        if dtype is not None and dtype not in self.dtypes:
            raise ValueError(f"'{self.name}' experts do not compute in {dtype}; {other}")
        if device is not None and device.type == "cuda":
            fp8 = torch.float8_e4m3fn in (stored.dtype, stored.scale_dtype)
            needed = self.fp8_capability if fp8 else self.capability
            found = torch.cuda.get_device_capability(device)
            if found < needed:
                what = f"scheme '{scheme.name}'" if stored.quantized else "a model that is not quantized"
                raise RuntimeError(
                    f"{what} in '{self.name}' experts needs compute capability {needed}, "
                    f"{torch.cuda.get_device_name(device)} has {found}; 'torch' experts do without"
                )


SERVES: dict[str, Serves] = {  # by name; "auto" takes the first that computes what it is asked for
    serves.name: serves
    for serves in (
        Serves(
            name="triton",
            weights=frozenset(
                [(None, "none"), *((torch.float8_e4m3fn, per) for per in ("tensor", "channel", "block"))]
            ),
            decoded=frozenset(
                [
                    *(("scaled", torch.float8_e4m3fn, per) for per in ("tensor", "channel", "block")),
                    *(("scaled", torch.int8, per) for per in ("channel", "group")),
                    *(("integer", torch.uint8, per) for per in ("channel", "group")),
                    *(("micro", dtype, "group") for dtype in (torch.uint8, torch.float8_e4m3fn)),
                ]
            ),
            activations=frozenset(ActivationKind),
            dtypes=frozenset(DTYPES.values()),
            capability=(0, 0),
            fp8_capability=FP8_CAPABILITY,
        ),
    )
}
