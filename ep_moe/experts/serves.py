"""What each backend of expert kernels computes, declared in a module that imports no kernels."""

import dataclasses

import torch

from ep_moe.config import DTYPES, ActivationKind
from ep_moe.quant import FP8_CAPABILITY, QuantScheme, TensorFormat

Kind = tuple[str, torch.dtype | None, str]  # of a `TensorFormat`: family, dtype and granularity


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Serves:
    """What a backend of kernels computes; "torch" experts compute everything.

    Args:
        name: of the backend, in configs.
        pairs: (tokens, weights), each as (family, dtype, granularity); dtype None is the model's own.
        activations: between the GEMMs.
        dtypes: of the model, and so of the output.
        capability, fp8_capability: of the first GPUs that it runs on, the second if values or scales are fp8.
    """

    name: str
    pairs: frozenset[tuple[Kind, Kind]]
    activations: frozenset[ActivationKind]
    dtypes: frozenset[torch.dtype]
    capability: tuple[int, int]
    fp8_capability: tuple[int, int]

    def computes(self, scheme: QuantScheme) -> bool:
        """True if the backend has kernels for weights and tokens in `scheme`. Local.

        The intermediate is requantized as the payload, in its family "micro" also with a global scale for each row.
        """
        rows, weight = scheme.payload, scheme.weight
        if dataclasses.replace(scheme.activation, global_scale=rows.global_scale) != rows:
            return False
        if rows.granularity == "group" and rows.group_width != weight.group_width:
            return False
        unpacked = rows.quantized and weight.family == "integer" and weight.packed == 1  # 8 bits do not fit e4m3
        return (_kind(rows), _kind(weight)) in self.pairs and not unpacked

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
        grouped = scheme.activation.granularity == "group"
        if scheme.activation.family == stored.family == "scaled" and (stored.granularity == "block") != grouped:
            raise ValueError(
                f"scheme '{scheme.name}' scales weights per {stored.granularity} and activations per "
                f"{scheme.activation.granularity}; '{self.name}' experts take blocks with groups, and neither without "
                "the other"
            )
        if not self.computes(scheme):
            raise ValueError(
                f"'{self.name}' experts do not compute scheme '{scheme.name}' ({stored.dtype}, "
                f"scales {stored.scale_dtype}); {other}"
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


def _kind(stored: TensorFormat) -> Kind:
    return stored.family, stored.dtype, stored.granularity


def _triton_pairs() -> frozenset[tuple[Kind, Kind]]:
    """Values of one dtype are multiplied as they are stored; weights of others are decoded to what tokens become."""
    own: Kind = ("none", None, "none")
    e4m3, int8, codes = torch.float8_e4m3fn, torch.int8, torch.uint8
    pairs: list[tuple[Kind, Kind]] = [(own, own)]
    for dtype in (e4m3, int8):
        pairs += [
            (("scaled", dtype, x), ("scaled", dtype, w)) for x in ("tensor", "token") for w in ("tensor", "channel")
        ]
        pairs.append((("scaled", dtype, "group"), ("scaled", dtype, "block")))
    pairs += [(own, ("scaled", e4m3, per)) for per in ("tensor", "channel", "block")]
    pairs += [(own, ("scaled", int8, per)) for per in ("channel", "group")]
    pairs += [(own, ("integer", codes, per)) for per in ("channel", "group")]
    pairs += [(("scaled", e4m3, "token"), ("integer", codes, per)) for per in ("channel", "group")]
    pairs += [(own, ("micro", dtype, "group")) for dtype in (e4m3, codes)]
    pairs += [(("micro", x, "group"), ("micro", w, "group")) for x, w in ((e4m3, e4m3), (e4m3, codes), (codes, codes))]
    return frozenset(pairs)


_TRITON = Serves(
    name="triton",
    pairs=_triton_pairs(),
    activations=frozenset(ActivationKind),
    dtypes=frozenset(DTYPES.values()),
    capability=(0, 0),
    fp8_capability=FP8_CAPABILITY,
)
SERVES: dict[str, Serves] = {  # by name; "auto" takes the first that computes what it is asked for
    "triton": _TRITON,
    "hopper": dataclasses.replace(_TRITON, name="hopper"),  # calls that Hopper's kernels do not take are Triton's
}
