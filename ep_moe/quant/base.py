"""What a number format is: a `QuantScheme` says how activations and weights become narrow numbers and scales.

Letters: T rows, H row width, G scale groups of a row, N and K rows and columns of a weight.
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

    Real value = stored value * scale, scales are float32.

    Args:
        name: what configs and the command line call it.
        dtype: of the stored values; None leaves the model's own dtype.
        activation: what shares a scale among activations: nothing is scaled, a tensor, a token (row), or
            a group of `block[1]` neighbours in a row.
        weight: the same for weights [N, K]: a tensor, an output channel (row), or a block of `block` = (n, k).
        block: rows and columns of a weight block; its columns are the activation group too.
    """

    name: str
    dtype: torch.dtype | None = None
    activation: ActivationGranularity = "none"
    weight: WeightGranularity = "none"
    block: tuple[int, int] = (128, 128)

    @property
    def quantised(self) -> bool:
        """True where values carry scales."""
        return self.dtype is not None

    def num_groups(self, width: int) -> int:
        """Scales that one row of `width` activations carries: 0, 1 or ceil(width / group)."""
        if self.activation == "none":
            return 0
        return math.ceil(width / self.block[1]) if self.activation == "group" else 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Quantised:
    """Activations in a quantised format, ready to travel.

    `values` [T, H] in the scheme's dtype; `scale` [T, G] float32, any strides: G = 1 per token, and per tensor the
    same number in every row (a row that travels takes its scale along).
    """

    values: torch.Tensor
    scale: torch.Tensor
    scheme: QuantScheme

    def __post_init__(self) -> None:
        if not self.scheme.quantised:
            raise ValueError(f"scheme '{self.scheme.name}' has no quantised form")
        if self.values.dtype != self.scheme.dtype:
            raise ValueError(f"values are {self.values.dtype}, scheme '{self.scheme.name}' stores {self.scheme.dtype}")
        if self.values.dim() != 2:
            raise ValueError(f"values {tuple(self.values.shape)} must have 2 dimensions")
        expected = (self.values.shape[0], self.scheme.num_groups(self.values.shape[1]))
        if tuple(self.scale.shape) != expected or self.scale.dtype != torch.float32:
            raise ValueError(
                f"scale is {tuple(self.scale.shape)} {self.scale.dtype}, scheme '{self.scheme.name}' on values "
                f"{tuple(self.values.shape)} needs {expected} torch.float32"
            )
