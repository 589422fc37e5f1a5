"""The number formats that the experts' kernels compute, a row each, in a module that imports no kernels."""

import dataclasses
import enum
import functools

import torch

from ep_moe.quant import QuantScheme

KERNELS = ("triton", "hopper")  # names of the experts that are kernels; "torch" experts compute every format
_MOST_SCHEMES = 256  # whose row is remembered
_E4M3, _INT8, _CODES, _E8M0 = torch.float8_e4m3fn, torch.int8, torch.uint8, torch.float8_e8m0fnu


class Between(enum.Enum):
    """How the intermediate is stored between the GEMMs; `fused` is done by the first GEMM, else by further kernels."""

    ROUND = "none"  # to the model's dtype
    GROUP = "group"  # requantized in groups that lie within a tile
    STATIC = "static"  # requantized by scales among the arguments, one for each expert
    TOKEN = "token"  # requantized with a scale for each row
    TENSOR = "tensor"  # requantized with a scale for all rows of an expert
    WIDE_GROUP = "wide group"  # requantized in groups that do not lie within a tile
    MXFP8 = "mxfp8"  # rounded to MXFP8, whose numbers bfloat16 represents: stored so
    NVFP4 = "nvfp4"  # rounded to NVFP4 with a global scale for each row; what that multiplies is stored in bfloat16

    @property
    def fused(self) -> bool:
        """True if the first GEMM stores what the second reads; else it stores float32."""
        return self in (Between.ROUND, Between.GROUP, Between.STATIC, Between.MXFP8)

    @classmethod
    def of(cls, scheme: QuantScheme, block_n: int, *, static: bool) -> "Between":
        """For tiles of the first GEMM that have `block_n` columns; `static` if scales are among the arguments."""
        found, width = row_of(scheme).between, scheme.activation.group_width
        if found is cls.TENSOR and static:
            return cls.STATIC
        return cls.WIDE_GROUP if found is cls.GROUP and (width & (width - 1) or width > block_n) else found

    def num_scales(self, scheme: QuantScheme, width: int) -> int:
        """Scales that are stored for each row of the intermediate, of `width` columns."""
        if self in (Between.STATIC, Between.MXFP8):
            return 0
        return 1 if self is Between.NVFP4 else scheme.activation.num_groups(width)


@dataclasses.dataclass(frozen=True, slots=True)
class FormatRow:
    """Tokens and weights that kernels multiply.

    Args:
        tokens: family, dtype (None is the model's own) and granularity; the intermediate is requantized so.
        weights: family, dtype and elements in a stored value. per: what shares a scale of weights.
        between: how the intermediate is stored, if no scales are among the arguments and groups lie within a tile.
        kind: `Codes.KIND` of weights that are decoded to the dtype of the rows.
        rows: the dtype in which rows are multiplied; None: as they are stored.
    """

    tokens: tuple[str, torch.dtype | None, str]
    weights: tuple[str, torch.dtype | None, int]
    per: tuple[str, ...]
    between: Between = Between.ROUND
    kind: str = "none"
    rows: torch.dtype | None = None

    def takes(self, scheme: QuantScheme) -> bool:
        """True for schemes of these tokens and weights. Local."""
        tokens, weights = scheme.payload, scheme.weight
        return (
            (tokens.family, tokens.dtype, tokens.granularity) == self.tokens
            and (weights.family, weights.dtype, weights.packed) == self.weights
            and weights.granularity in self.per
        )


_OWN = ("none", None, "none")
_TOKEN, _MXFP8, _NVFP4 = ("scaled", _E4M3, "token"), ("micro", _E4M3, "group"), ("micro", _CODES, "group")
FORMATS = (
    FormatRow(_OWN, ("none", None, 1), ("none",)),
    *(
        row
        for dtype in (_E4M3, _INT8)
        for row in (
            FormatRow(("scaled", dtype, "tensor"), ("scaled", dtype, 1), ("tensor", "channel"), Between.TENSOR),
            FormatRow(("scaled", dtype, "token"), ("scaled", dtype, 1), ("tensor", "channel"), Between.TOKEN),
            FormatRow(("scaled", dtype, "group"), ("scaled", dtype, 1), ("block",), Between.GROUP),
        )
    ),
    FormatRow(_OWN, ("scaled", _E4M3, 1), ("tensor", "channel", "block"), kind="float8"),
    FormatRow(_OWN, ("scaled", _INT8, 1), ("channel", "group"), kind="int8"),
    FormatRow(_OWN, ("integer", _CODES, 1), ("channel", "group"), kind="uint8"),
    FormatRow(_OWN, ("integer", _CODES, 2), ("channel", "group"), kind="uint4"),
    # float16 represents an e4m3, and an integer of 4 bits times its scale
    FormatRow(_TOKEN, ("integer", _CODES, 2), ("channel", "group"), Between.TOKEN, "uint4", torch.float16),
    FormatRow(_OWN, ("micro", _E4M3, 1), ("group",), kind="float8"),
    FormatRow(_OWN, ("micro", _CODES, 2), ("group",), kind="e2m1"),
    FormatRow(_MXFP8, ("micro", _E4M3, 1), ("group",), Between.MXFP8, "float8", torch.bfloat16),
    FormatRow(_MXFP8, ("micro", _CODES, 2), ("group",), Between.MXFP8, "e2m1", torch.bfloat16),
    FormatRow(_NVFP4, ("micro", _CODES, 2), ("group",), Between.NVFP4, "e2m1", torch.bfloat16),
)


def _find(scheme: QuantScheme) -> FormatRow | None:
    tokens = scheme.payload
    if dataclasses.replace(scheme.activation, global_scale=tokens.global_scale) != tokens:
        return None
    if tokens.granularity == "group" and tokens.group_width != scheme.weight.group_width:
        return None
    return next((row for row in FORMATS if row.takes(scheme)), None)


def kernels_compute(scheme: QuantScheme) -> bool:
    """True if there are kernels for tokens and weights in `scheme`. Local."""
    return _find(scheme) is not None


@functools.lru_cache(maxsize=_MOST_SCHEMES)
def row_of(scheme: QuantScheme, name: str = "triton") -> FormatRow:
    """The row of a scheme. Errors: ValueError, in the words of the experts of this name, if there is none. Local."""
    found, stored = _find(scheme), scheme.weight
    if found is not None:
        return found
    grouped = scheme.activation.granularity == "group"
    if scheme.activation.family == stored.family == "scaled" and (stored.granularity == "block") != grouped:
        raise ValueError(
            f"scheme '{scheme.name}' scales weights per {stored.granularity} and activations per "
            f"{scheme.activation.granularity}; '{name}' experts take blocks with groups, and neither without the other"
        )
    raise ValueError(
        f"'{name}' experts do not compute scheme '{scheme.name}' ({stored.dtype}, scales {stored.scale_dtype}); "
        'experts="torch" does'
    )


def holds_e4m3(scheme: QuantScheme) -> bool:
    """True if tokens, weights or their scales are e4m3, which some GPUs have no instructions for. Local."""
    return any(_E4M3 in (each.dtype, each.scale_dtype) for each in (scheme.payload, scheme.activation, scheme.weight))


def decodes_pairs(scheme: QuantScheme, rows: torch.dtype, *, folded: bool) -> bool:
    """True if weights whose rows are whole words are decoded two at once to `rows`, 16 bits. Local.

    Args: folded: whether with the scales of their groups.
    """
    stored, kind = scheme.weight, row_of(scheme).kind
    if kind == "uint4":
        exact = (rows, torch.bfloat16) if rows == torch.float16 else (rows,)
        return rows.itemsize == 2 and (not folded or stored.scale_dtype in exact)
    if kind == "int8":
        return rows.itemsize == 2 and not folded
    return rows == torch.bfloat16 and (kind == "e2m1" or (folded and stored.scale_dtype == _E8M0))
