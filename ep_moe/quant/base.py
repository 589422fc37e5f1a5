"""Number formats: a `QuantScheme` describes how activations and weights are stored as narrow values and scales.

Letters: T rows, H row width, G scale groups of a row, V stored values of a row (H, or H / 2 if two elements share a
byte), N and K rows and columns of a weight.
"""

import dataclasses
import math
from typing import Literal

import torch

ActivationGranularity = Literal["none", "tensor", "token", "group"]
WeightGranularity = Literal["none", "tensor", "channel", "block"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantScheme:
    """One number format of expert weights and of the tokens that reach them.

    Real value = stored value * scale; of a weight with a global scale, (stored value * scale) * global scale.

    Args:
        name: in configs and on the command line.
        dtype: of the stored values; None leaves the model's own dtype.
        activation: granularity of activation scales: none, one per tensor, per token (row), or per group of
            `block[1]` neighbors in a row.
        weight: the same for weights [N, K]: per tensor, per output channel (row), or per block of `block` = (n, k).
        block: rows and columns of a weight block; its columns are also the activation group.
        scale_dtype: of the scales.
        power_of_two: every scale is a power of two.
        packed: elements of a row in one stored value.
        weight_global_scale: each weight matrix has a second, float32 scale that multiplies it: modelopt's
            `weight_scale_2`, the reciprocal of compressed-tensors' `weight_global_scale`.
    """

    name: str
    dtype: torch.dtype | None = None
    activation: ActivationGranularity = "none"
    weight: WeightGranularity = "none"
    block: tuple[int, int] = (128, 128)
    scale_dtype: torch.dtype = torch.float32
    power_of_two: bool = False
    packed: int = 1
    weight_global_scale: bool = False

    @property
    def quantized(self) -> bool:
        """True if values carry scales."""
        return self.dtype is not None

    def num_groups(self, width: int) -> int:
        """Scales that one row of `width` activations carries: 0, 1 or ceil(width / group)."""
        if self.activation == "none":
            return 0
        return math.ceil(width / self.block[1]) if self.activation == "group" else 1

    def row_values(self, width: int) -> int:
        """V, the stored values of a row of `width` elements. Errors: ValueError if `packed` does not divide `width`."""
        if width % self.packed:
            raise ValueError(f"scheme '{self.name}' stores {self.packed} numbers in one, a row of {width} has one over")
        return width // self.packed

    def row_width(self, num_values: int) -> int:
        """The elements of a row of `num_values` stored values, the inverse of `row_values`."""
        return num_values * self.packed

    def values_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        """Bytes of one token's values; `dtype` is the model's, used if the scheme is not quantized.

        Example: hidden 2880 is 1440 bytes in "nvfp4", 2880 in the other quantized schemes.
        """
        return self.row_values(hidden) * (self.dtype or dtype).itemsize

    def scale_bytes(self, hidden: int) -> int:
        """Bytes of one token's scales, without padding. Example: hidden 2880 in "mxfp8" has 90 scales of one byte."""
        return self.num_groups(hidden) * self.scale_dtype.itemsize

    def weight_scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a weight's scales; `ep_moe.quant.weight_scale_shape` has the arguments."""
        *lead, rows, columns = shape
        if self.weight == "tensor":
            return tuple(lead)
        if self.weight == "channel":
            return (*lead, rows)
        return (*lead, math.ceil(rows / self.block[0]), math.ceil(columns / self.block[1]))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """Activations in a quantized format, ready for dispatch.

    `values` [T, V] in the scheme's dtype; `scale` [T, G] in its scale dtype, any strides: G = 1 per token, and also per
    tensor, then the same scale in every row, since each row is sent with its scales.
    """

    values: torch.Tensor
    scale: torch.Tensor
    scheme: QuantScheme

    def __post_init__(self) -> None:
        if not self.scheme.quantized:
            raise ValueError(f"scheme '{self.scheme.name}' has no quantized form")
        if self.values.dtype != self.scheme.dtype:
            raise ValueError(f"values are {self.values.dtype}, scheme '{self.scheme.name}' stores {self.scheme.dtype}")
        if self.values.dim() != 2:
            raise ValueError(f"values {tuple(self.values.shape)} must have 2 dimensions")
        expected = (self.values.shape[0], self.scheme.num_groups(self.hidden))
        if tuple(self.scale.shape) != expected or self.scale.dtype != self.scheme.scale_dtype:
            raise ValueError(
                f"scale is {tuple(self.scale.shape)} {self.scale.dtype}, scheme '{self.scheme.name}' on values "
                f"{tuple(self.values.shape)} needs {expected} {self.scheme.scale_dtype}"
            )

    @property
    def hidden(self) -> int:
        """H."""
        return self.scheme.row_width(self.values.shape[1])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View one-byte dtypes as uint8, which every device can index and every kernel can load; others are unchanged.

    Local, no copy.
    """
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
