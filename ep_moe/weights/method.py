"""`Method`: one record of what a quantization means, for checkpoints and for parameters that engines load from them.

`ep_moe.weights.methods` reads it from a `quantization_config`. A checkpoint has tensors "X.weight_scale", an engine's
layer a parameter "w13_weight_scale": both names follow from the suffixes here.
Letters: E stacked experts, L local experts, N and K rows and columns of a weight, G scale groups of a row, P elements
of one int32, I intermediate.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Literal

import torch

from ep_moe.quant import SCHEMES, QuantScheme, TensorFormat, get_scheme, with_block
from ep_moe.weights.packing import elements_per_int32

Packing = Literal["plain", "int32", "gptq", "gptq_v2", "awq"]
SCALE_NAMES = {torch.bfloat16: "", torch.float16: "_f16", torch.float32: "_f32"}  # behind the name of a scheme
_PER_CHANNEL = {"fp8_tensor": "fp8_tensor_channel", "fp8_w8a16_tensor": "fp8_w8a16"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """How a checkpoint stores its quantized weights: X.weight has a tensor for each part, by suffix of X.

    Args:
        name: in errors.
        scheme: that of layers with such weights. Integers with 16-bit scales get the dtype of the scales on disk.
        disk: the format on disk, if it differs from `scheme.weight`.
        packing: "plain" as `StoredMatrix` has them; "int32" [N, K / P], of compressed-tensors; "gptq" [K / P, N] and
            zero points minus 1 [G, N / P], "gptq_v2" without that 1; "awq" [K, N / 8].
        values: suffix of the tensors with values; one of another dtype than the packing's is not quantized.
        weight: suffix of the weight's name.
        parts: suffix of each needed part, of those of `StoredMatrix`.
        order: suffix of the group of each column, if it may exist: columns in another order than groups.
        ordered: the config says that columns have another order: `order` must exist.
        input_scale: suffix of static activation scales, which every expert must have.
        dropped: suffixes of tensors that are not needed and not read.
        middle_zero: zero points are stored, and every one must be the middle of the range.
        rules: modules that are stored otherwise: a regex that matches the start of their name, and their method, None
            if they are not quantized; the first that matches counts.
    """

    name: str
    scheme: QuantScheme
    disk: TensorFormat | None = None
    packing: Packing = "plain"
    values: str = ".weight"
    weight: str = ".weight"
    parts: Mapping[str, str]
    order: str | None = None
    ordered: bool = False
    input_scale: str | None = None
    dropped: tuple[str, ...] = ()
    middle_zero: bool = False
    rules: tuple[tuple[str, "Method | None"], ...] = ()

    def of(self, module: str) -> "Method | None":
        """The method of a module of this name; None if it is not quantized. Local."""
        return next((other for pattern, other in self.rules if re.match(pattern, module)), self)

    @property
    def stored(self) -> TensorFormat:
        """The format on disk."""
        return self.disk or self.scheme.weight

    @property
    def names(self) -> dict[str, str]:
        """The engines' names of the parameters with values and other parts, behind "w13_" and "w2_".

        Example: {"values": "weight", "scale": "weight_scale_inv"} for fp8 in blocks, {"values": "qweight", "zero":
        "qzeros", "scale": "scales"} for GPTQ.
        """
        if self.values == "_blocks":
            return {"values": "weight", "scale": "weight_scale"}
        suffixes = {"values": self.values, **self.parts}
        return {part: suffix[1:] if suffix[:1] == "." else f"weight{suffix}" for part, suffix in suffixes.items()}

    @property
    def bits(self) -> int:
        """Of an integer in an int32."""
        return 8 // self.stored.packed

    @property
    def values_dtype(self) -> torch.dtype | None:
        """Of the values on disk."""
        return self.stored.dtype if self.packing == "plain" else torch.int32

    def for_scale(self, dtype: torch.dtype) -> "Method":
        """The method for tensors whose scales have that dtype."""
        if self.scheme.weight.family != "integer" or dtype not in SCALE_NAMES or self.stored.scale_dtype == dtype:
            return self
        return dataclasses.replace(self, scheme=get_scheme(f"{self.scheme.name}{SCALE_NAMES[dtype]}"))

    def weight_shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """[..., N, K] for values of that shape on disk."""
        per = elements_per_int32(self.bits)
        if self.packing == "plain":
            if self.values == "_blocks":  # [E, N, G, 16]
                values = (*values[:-2], math.prod(values[-2:]))
            return (*values[:-1], self.stored.row_width(values[-1]))
        rows, columns = values
        if self.packing == "int32":
            return rows, columns * per
        return (columns * per, rows) if self.packing == "awq" else (columns, rows * per)

    def part_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The shapes on disk that each part of a weight [..., N, K] may have.

        Errors: ValueError for groups that do not divide K, and rows that do not fill an int32.
        """
        scale, per = self.stored.scale_shape(shape), elements_per_int32(self.bits)
        rows = shape[-2]
        one = shape[:-2]
        found: dict[str, tuple[tuple[int, ...], ...]] = {
            "global_scale": (one, (*one, 1)),
            "order": (shape[-1:],),
            "input_scale": ((), (1,)),
        }
        grouped = self.stored.granularity in ("group", "block")
        groups = scale[-1] if grouped else 1
        if self.packing in ("plain", "int32"):
            found["scale"] = (scale,) if grouped else (scale, (*scale, 1))
            found["zero"] = ((math.ceil(rows / per), groups),)
            return found
        if rows % per:
            raise ValueError(f"rows ({rows}) are not a multiple of the {per} zero points of an int32")
        return found | {"scale": ((groups, rows),), "zero": ((groups, rows // per),)}


def scheme_of_halves(scheme: QuantScheme, intermediate: int) -> QuantScheme:
    """The scheme that holds a gate and an up half [I, K] with scales of their own as one matrix [gate; up].

    Blocks get gcd(block rows, I) rows, so that none spans both halves; a scale for each half becomes one for each
    channel. Example: with I = 192, blocks of 128 x 128 become 64 x 128. Local.
    """
    if scheme.weight.granularity == "block":
        rows, columns = scheme.weight.block
        found = math.gcd(rows, intermediate)
        return scheme if found == rows else with_block(scheme, found, columns)
    return SCHEMES[_PER_CHANNEL[scheme.name]] if scheme.name in _PER_CHANNEL else scheme


def scales_of_halves(
    scale: torch.Tensor, stored: TensorFormat, wanted: TensorFormat, rows: int, halves: int = 1
) -> torch.Tensor:
    """The scales of a matrix as `wanted` has them, from those of its halves; a view if they are the same.

    Args:
        scale: as `stored` has them: [...] per tensor and [..., 2] if there are two halves, in blocks of n rows
            [..., halves * ceil(rows / halves / n), G], else those of `wanted`.
        rows: of the whole matrix.
    Local.
    """
    if stored.granularity == "tensor" and wanted.granularity == "channel":
        each = scale if halves > 1 else scale.unsqueeze(-1)
        return each.repeat_interleave(rows // halves, dim=-1)
    if stored.granularity != "block" or stored.block == wanted.block:
        return scale
    repeated = scale.unflatten(-2, (halves, -1)).repeat_interleave(stored.block[0] // wanted.block[0], dim=-2)
    return repeated[..., : math.ceil(rows / halves / wanted.block[0]), :].flatten(-3, -2)


def shared_scale(halves: torch.Tensor, stored: TensorFormat) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The global scales [L] of w13, and constants for `PerExpert`, of those of the gate and the up half [L, 2].

    If the halves have different ones, the first GEMM multiplies each half by its own, and the scales of the matrices
    are 1. Local; host sync.
    """
    if torch.equal(halves[:, 0], halves[:, 1]):
        return halves[:, 0], {}
    gate, up = (halves.reciprocal() if stored.global_scale == "divisor" else halves).t().contiguous()
    return torch.ones_like(gate), {"w13_gate_output_scale": gate, "w13_output_scale": up}
