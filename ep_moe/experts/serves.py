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
        weights: (dtype of the stored weights, None for the model's own; granularity of their scales).
        activations: between the GEMMs.
        dtypes: of the model, and so of the output.
        capability, fp8_capability: of the first GPUs that it runs on, with the model's own weights and with fp8.
    """

    name: str
    weights: frozenset[tuple[torch.dtype | None, str]]
    activations: frozenset[ActivationKind]
    dtypes: frozenset[torch.dtype]
    capability: tuple[int, int]
    fp8_capability: tuple[int, int]

    def computes(self, scheme: QuantScheme) -> bool:
        """True if the backend has kernels for weights and tokens in `scheme`. Local.

        They multiply values of one dtype and apply float32 scales, and requantize the intermediate as the payload.
        """
        rows, weight = scheme.payload, scheme.weight
        return (
            rows == scheme.activation
            and rows.dtype == weight.dtype
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
        if (stored.granularity == "block") != (scheme.activation.granularity == "group"):
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
            needed = self.fp8_capability if stored.quantized else self.capability
            found = torch.cuda.get_device_capability(device)
            if found < needed:
                what = "fp8" if stored.quantized else "a model that is not quantized"
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
            activations=frozenset(ActivationKind),
            dtypes=frozenset(DTYPES.values()),
            capability=(0, 0),
            fp8_capability=FP8_CAPABILITY,
        ),
    )
}
