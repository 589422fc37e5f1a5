"""What a number format is: a `QuantScheme` says how activations and weights become narrow numbers and scales.

Letters: T rows, H row width, G scale groups of a row, V stored values of a row (H, or H / 2 where two numbers share a
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

    Real value = stored value * scale, of a weight with a second scale (stored value * scale) * second scale.

    Args:
        name: what configs and the command line call it.
        dtype: of the stored values; None leaves the model's own dtype.
        activation: what shares a scale among activations: nothing is scaled, a tensor, a token (row), or
            a group of `block[1]` neighbors in a row.
        weight: the same for weights [N, K]: a tensor, an output channel (row), or a block of `block` = (n, k).
        block: rows and columns of a weight block; its columns are the activation group too.
        scale_dtype: of the scales.
        power_of_two: every scale is a power of two.
        packed: numbers of a row in one stored value.
        weight_global_scale: weights have a second scale, float32, one for each matrix, that multiplies them: modelopt's
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
        """True where values carry scales."""
        return self.dtype is not None

    def num_groups(self, width: int) -> int:
        """Scales that one row of `width` activations carries: 0, 1 or ceil(width / group)."""
        if self.activation == "none":
            return 0
        return math.ceil(width / self.block[1]) if self.activation == "group" else 1

    def row_values(self, width: int) -> int:
        """V, the stored values of a row of `width` numbers. Errors: ValueError where numbers that share one are odd."""
        if width % self.packed:
            raise ValueError(f"scheme '{self.name}' stores {self.packed} numbers in one, a row of {width} has one over")
        return width // self.packed

    def row_width(self, num_values: int) -> int:
        """The numbers of a row of `num_values` stored values: what `row_values` takes."""
        return num_values * self.packed

    def values_bytes(self, hidden: int, dtype: torch.dtype) -> int:
        """Bytes of one token's values; `dtype` is the model's, theirs where the scheme is not quantized.

        Example: hidden 2880 is 1440 bytes in "nvfp4", 2880 in the other quantized schemes.
        """
        return self.row_values(hidden) * (self.dtype or dtype).itemsize

    def scale_bytes(self, hidden: int) -> int:
        """Bytes of one token's scales, without any padding. Example: hidden 2880 in "mxfp8" has 90, one each."""
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
    """Activations in a quantized format, ready to travel.

    `values` [T, V] in the scheme's dtype; `scale` [T, G] in its scale dtype, any strides: G = 1 per token, and per
    tensor the same number in every row (a row that travels takes its scale along).
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
    """View numbers of one byte as uint8, for which every device can index and every kernel load; others as they are.

    Local, no copy.
    """
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
