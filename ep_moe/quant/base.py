"""Number formats: a `TensorFormat` describes how one tensor is stored as narrow values and scales, a `QuantScheme` the
formats of a layer's tokens and weights; `Quantized` are stored tokens, a `StoredMatrix` is a stored weight.

Letters: T rows, H row width, G scale groups of a row, V stored values of a row (H, or H / 2 if two elements share a
byte), N and K rows and columns of a weight.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import torch

from ep_moe.fields import shown

Family = Literal["none", "scaled", "micro", "integer"]
Granularity = Literal["none", "tensor", "token", "channel", "group", "block"]
GlobalScale = Literal["none", "multiplier", "divisor"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorFormat:
    """How one tensor is stored: activations [T, H], or weights [..., N, K], of which each leading index is a matrix.

    Real value = (stored value - zero) * scale, and that times or divided by the global scale.

    Args:
        family: the rule that relates values to scales, by the name of a module of `ep_moe.quant`; "none" leaves the
            model's own dtype; "integer" stores unsigned integers of 8 / `packed` bits, whose zero is the middle
            of their range (8 of 4 bits, 128 of 8) unless zero points are stored.
        dtype: of the stored values; None in the family "none".
        packed: elements of a row in one stored value, the first in its lowest bits.
        granularity: what shares a scale: a whole tensor (matrix), a token or a channel (one row of activations or
            weights), a group of `block[1]` neighbors in a row, or a block of `block` = (n, k) rows and columns.
        scale_dtype: of the scales. power_of_two: every scale is a power of two.
        zero_point: each scale has a zero point beside it, in `dtype`, unpacked.
        global_scale: a second, float32 scale of each weight matrix, or of each row of activations that are not sent:
            a multiplier, as modelopt's `weight_scale_2`, or a divisor, as compressed-tensors' `weight_global_scale`.
    Errors: ValueError for values without a family or a granularity, or one of these without values; for zero points
        outside of "integer", or a global scale outside of "micro".
    """

    family: Family = "none"
    dtype: torch.dtype | None = None
    packed: int = 1
    granularity: Granularity = "none"
    block: tuple[int, int] = (1, 1)
    scale_dtype: torch.dtype = torch.float32
    power_of_two: bool = False
    zero_point: bool = False
    global_scale: GlobalScale = "none"

    def __post_init__(self) -> None:
        if not (self.family == "none") == (self.dtype is None) == (self.granularity == "none"):
            raise ValueError(
                f"family '{self.family}', dtype {self.dtype} and granularity '{self.granularity}' do not fit each other"
            )
        if self.zero_point and self.family != "integer":
            raise ValueError(f"family '{self.family}' has no zero points, 'integer' has")
        if self.global_scale != "none" and self.family != "micro":
            raise ValueError(f"family '{self.family}' has no global scale, 'micro' has")

    @property
    def quantized(self) -> bool:
        """True if values carry scales."""
        return self.family != "none"

    @property
    def group_width(self) -> int:
        """Neighbors of a row that share a scale, if scales are per group or block, else 0."""
        return self.block[1] if self.granularity in ("group", "block") else 0

    def num_groups(self, width: int) -> int:
        """Scales that one row of `width` activations carries: 0, 1 or ceil(width / group)."""
        if self.granularity == "none":
            return 0
        return math.ceil(width / self.block[1]) if self.granularity in ("group", "block") else 1

    def row_values(self, width: int) -> int:
        """V, the stored values of a row of `width` elements. Errors: ValueError if `packed` does not divide `width`."""
        if width % self.packed:
            raise ValueError(f"width ({width}) is not a multiple of the {self.packed} elements of a stored value")
        return width // self.packed

    def row_width(self, num_values: int) -> int:
        """The elements of a row of `num_values` stored values, the inverse of `row_values`."""
        return num_values * self.packed

    def values_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        """Bytes of one token's values; `dtype` is the model's, used if the format is not quantized.

        Example: hidden 2880 is 1440 bytes in "nvfp4", 2880 in the payloads of the other quantized schemes.
        """
        return self.row_values(hidden) * (self.dtype or dtype).itemsize

    def scale_bytes(self, hidden: int) -> int:
        """Bytes of one token's scales, without padding. Example: hidden 2880 in "mxfp8" has 90 scales of one byte."""
        return self.num_groups(hidden) * self.scale_dtype.itemsize

    def tile(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns that share a scale in a matrix [rows, columns], at least 1 each."""
        if self.granularity in ("group", "block"):
            return self.block
        return max(rows, 1) if self.granularity == "tensor" else 1, max(columns, 1)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a weight of `shape` [..., N, K] in a quantized format.

        Returns: per tensor [...], per channel [..., N], per group or block [..., ceil(N/n), ceil(K/k)].
        Errors: ValueError for integers in groups that do not divide the columns; the last group of others may be short.
        """
        *lead, rows, columns = shape
        if self.family == "integer" and self.granularity == "group" and columns % self.block[1]:
            raise ValueError(f"groups of {self.block[1]} do not divide a row of {columns}")
        if self.granularity == "tensor":
            return tuple(lead)
        if self.granularity in ("token", "channel"):
            return (*lead, rows)
        return (*lead, math.ceil(rows / self.block[0]), math.ceil(columns / self.block[1]))

    def parts(self, shape: tuple[int, ...], dtype: torch.dtype) -> "dict[str, tuple[tuple[int, ...], torch.dtype]]":
        """Shape and dtype of each tensor of a `StoredMatrix` that holds a weight of `shape` [..., N, K].

        Args:
            dtype: the model's, of the values if the format is not quantized.
        Errors: as of `row_values` and `scale_shape`.
        """
        parts = {"values": ((*shape[:-1], self.row_values(shape[-1])), self.dtype or dtype)}
        if self.quantized:
            parts["scale"] = (self.scale_shape(shape), self.scale_dtype)
        if self.zero_point:
            parts["zero"] = (self.scale_shape(shape), self.dtype or dtype)
        if self.global_scale != "none":
            parts["global_scale"] = (shape[:-2], torch.float32)
        return parts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantScheme:
    """The formats of a layer's tokens and expert weights.

    Args:
        name: in configs and on the command line.
        payload: of the tokens that travel, and so the input of the first GEMM.
        activation: of the input that the second GEMM sees.
        weight: of both weights.
    Errors: ValueError for tokens in the family "integer", which is for weights alone.
    """

    name: str
    payload: TensorFormat = TensorFormat()
    activation: TensorFormat = TensorFormat()
    weight: TensorFormat = TensorFormat()

    def __post_init__(self) -> None:
        for part, stored in (("payload", self.payload), ("activation", self.activation)):
            if stored.family == "integer":
                raise ValueError(f"scheme '{self.name}': {part} in family 'integer', which is for weights alone")


@dataclasses.dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A weight, or a stack of them, as a `TensorFormat` stores it; `TensorFormat.parts` has shapes and dtypes.

    Errors: ValueError for a part that is no tensor.
    """

    values: torch.Tensor  # [..., N, V]
    _: dataclasses.KW_ONLY
    scale: torch.Tensor | None = None  # [...], [..., N] or [..., ceil(N/n), ceil(K/k)]
    zero: torch.Tensor | None = None  # as scale
    global_scale: torch.Tensor | None = None  # [...]

    def __post_init__(self) -> None:
        for name in ("values", "scale", "zero", "global_scale"):
            part = getattr(self, name)
            if not isinstance(part, torch.Tensor) and (part is not None or name == "values"):
                raise ValueError(f"{name} is a {type(part).__name__} ({shown(part)}), not a tensor")

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], stored: TensorFormat, dtype: torch.dtype, device: torch.device | str
    ) -> "StoredMatrix":
        """Allocate a weight of `shape` [..., N, K]; `dtype` is the model's. Local."""
        parts = stored.parts(shape, dtype)
        return cls(**{name: torch.empty(size, dtype=kind, device=device) for name, (size, kind) in parts.items()})

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are not None, by name."""
        named = {"values": self.values, "scale": self.scale, "zero": self.zero, "global_scale": self.global_scale}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "StoredMatrix":
        """The matrix with every tensor replaced by the function's result."""
        return StoredMatrix(**{name: function(tensor) for name, tensor in self.tensors.items()})

    def __getitem__(self, index: int | slice) -> "StoredMatrix":
        """The matrix, or stack of them, at `index` of the first dimension: views."""
        return self.map(lambda tensor: tensor[index])

    def copy_(self, source: "StoredMatrix") -> None:
        """Copy each tensor from that of `source`, in the same format."""
        for name, tensor in self.tensors.items():
            tensor.copy_(getattr(source, name))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """Activations in a scheme's payload format, ready for dispatch.

    `values` [T, V] in the format's dtype; `scale` [T, G] in its scale dtype, any strides: G = 1 per token, and also per
    tensor, then the same scale in every row, since each row is sent with its scales.
    """

    values: torch.Tensor
    scale: torch.Tensor
    scheme: QuantScheme

    def __post_init__(self) -> None:
        stored = self.scheme.payload
        if not stored.quantized:
            raise ValueError(f"scheme '{self.scheme.name}' has no quantized form")
        if self.values.dtype != stored.dtype:
            raise ValueError(f"values are {self.values.dtype}, scheme '{self.scheme.name}' stores {stored.dtype}")
        if self.values.dim() != 2:
            raise ValueError(f"values {tuple(self.values.shape)} must have 2 dimensions")
        expected = (self.values.shape[0], stored.num_groups(self.hidden))
        if tuple(self.scale.shape) != expected or self.scale.dtype != stored.scale_dtype:
            raise ValueError(
                f"scale is {tuple(self.scale.shape)} {self.scale.dtype}, scheme '{self.scheme.name}' on values "
                f"{tuple(self.values.shape)} needs {expected} {stored.scale_dtype}"
            )

    @property
    def hidden(self) -> int:
        """H."""
        return self.scheme.payload.row_width(self.values.shape[1])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View one-byte dtypes as uint8, which every device can index and every kernel can load; others are unchanged.

    Local, no copy.
    """
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
