"""The seam of expert kernels: a `Backend` prepares the two grouped GEMMs for the shape of a call, and a prepared
`GroupedGemm` is launched with the tensors of each call of that shape.

Letters: L local experts, H hidden, I intermediate, G scale groups, Q row tiles of all experts.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Protocol

import torch

from ep_moe.config import ActivationConfig
from ep_moe.experts.serves import Serves
from ep_moe.experts.tuning import ExpertTiles
from ep_moe.kernel_launch.repeated import Repeat, RepeatedLaunch
from ep_moe.kernels.gemm.arguments import ExpertScalars, Operands, Rows, Stored, TileList
from ep_moe.layout import Batched, ExpertBatch
from ep_moe.quant import QuantScheme
from ep_moe.weights import ExpertWeights


class Between(enum.Enum):
    """How the intermediate is stored between the GEMMs; `fused` is done by the first GEMM, else by further kernels."""

    ROUND = "none"  # to the model's dtype
    GROUP = "group"  # requantized in groups that lie within a tile
    STATIC = "static"  # requantized by scales that are given, one for each expert
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
        """What `scheme` asks for, if tiles of the first GEMM have `block_n` columns; `static` if scales are given."""
        stored, width = scheme.activation, scheme.activation.block[1]
        if stored.granularity == "none":
            return cls.ROUND
        if stored.family == "micro":
            return cls.MXFP8 if stored.global_scale == "none" else cls.NVFP4
        if stored.granularity == "token":
            return cls.TOKEN
        if stored.granularity == "tensor":
            return cls.STATIC if static else cls.TENSOR
        return cls.GROUP if width & (width - 1) == 0 and width <= block_n else cls.WIDE_GROUP

    def num_scales(self, scheme: QuantScheme, width: int) -> int:
        """Scales that are stored for each row of the intermediate, of `width` columns."""
        if self in (Between.STATIC, Between.MXFP8):
            return 0
        return 1 if self is Between.NVFP4 else scheme.activation.num_groups(width)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallShape:
    """The properties of a call that determine its launches, besides addresses; calls of equal shapes share them.

    Args:
        device: of the tensors. scheme: of tokens and weights. dtype: the model's.
        activation: between the GEMMs.
        num_experts, hidden, intermediate: L, H and I.
        expected_rows: the batch's hint. max_rows: rows of all experts together, or of each one if `rows_apart`.
        x_stride: between rows of the pool, in elements.
        scale_height: rows in a block of the pool's scales. scale_strides: between blocks, rows and groups.
        static_scale: the intermediate's scales are given.
        gathered: rows come from a pool by `row_index`.
        limited: the activation has a limit, one for all experts or one for each.
        up_first: w13 is [up; gate]. alternating: its gate and up rows take turns.
    """

    device: torch.device
    scheme: QuantScheme
    dtype: torch.dtype
    activation: ActivationConfig
    num_experts: int
    hidden: int
    intermediate: int
    expected_rows: int
    max_rows: int
    rows_apart: bool
    x_stride: int
    scale_height: int
    scale_strides: tuple[int, int, int]
    static_scale: bool
    gathered: bool
    limited: bool
    up_first: bool
    alternating: bool

    @classmethod
    def of(cls, batch: ExpertBatch, weights: ExpertWeights, activation: ActivationConfig) -> "CallShape":
        """The shape of a call; rows of the batch's pool have no gaps between their columns."""
        height, strides = 1, (0, 0, 0)
        if batch.scale is not None:
            scale = batch.scale
            height = max(scale.shape[-2], 1)
            strides = (scale.stride(0) if scale.dim() == 3 else 0, scale.stride(-2), scale.stride(-1))
        apart = isinstance(batch, Batched) and batch.row_index is None
        rows = batch.x if batch.row_index is None else batch.row_index
        return cls(
            device=batch.x.device,
            scheme=weights.scheme,
            dtype=batch.dtype,
            activation=activation,
            num_experts=batch.num_local_experts,
            hidden=batch.hidden,
            intermediate=weights.scheme.weight.row_width(weights.w2.values.shape[2]),
            expected_rows=batch.expected_rows,
            max_rows=rows.shape[1] if apart else rows.shape[0],
            rows_apart=apart,
            x_stride=batch.x.stride(-2),
            scale_height=height,
            scale_strides=strides,
            static_scale=weights.w2_input_scale is not None,
            gathered=batch.row_index is not None,
            limited=activation.limit is not None or weights.per_expert.limit is not None,
            up_first=weights.up_first,
            alternating=weights.alternating,
        )

    @property
    def widens_rows(self) -> bool:
        """True if rows are decoded to 16 bits, which represent their values, before they are multiplied."""
        rows = self.scheme.payload
        return rows.family == "micro" or (rows.quantized and self.scheme.weight.family == "integer")

    @property
    def row_dtype(self) -> torch.dtype:
        """Of the rows as they are multiplied. Float16 represents an e4m3, and an integer of 4 bits times its scale."""
        if self.widens_rows:
            return torch.bfloat16 if self.scheme.payload.family == "micro" else torch.float16
        return self.scheme.payload.dtype or self.dtype

    @property
    def decodes(self) -> bool:
        """True if weights are decoded to the dtype of the rows before they are multiplied."""
        return self.scheme.weight.dtype is not None and self.scheme.weight.dtype != self.row_dtype

    def decodes_pairs(self, *, folded: bool) -> bool:
        """True if weights are decoded two at once to 16 bits. folded: whether with the scales of their groups."""
        stored, bits16 = self.scheme.weight, self.decodes and self.row_dtype.itemsize == 2
        if any(stored.row_values(width) % 4 for width in (self.hidden, self.intermediate)):
            return False  # they are loaded in words
        if stored.family == "micro":
            return bits16 and self.row_dtype == torch.bfloat16 and (folded or stored.packed == 2)
        if stored.family == "integer" and stored.packed == 2:
            exact = (self.row_dtype, torch.bfloat16) if self.row_dtype == torch.float16 else (self.row_dtype,)
            return bits16 and (not folded or stored.scale_dtype in exact)
        return bits16 and stored.dtype == torch.int8 and not folded

    @property
    def weight_bits(self) -> int:
        """Bits of a stored element of the weights."""
        stored = self.scheme.weight
        return 8 * (stored.dtype or self.dtype).itemsize // stored.packed

    @property
    def halves_aligned(self) -> bool:
        """True if no block of scales of w13 spans both the gate and the up half."""
        return not self.activation.kind.gated or self.intermediate % self.scheme.weight.block[0] == 0

    def max_tiles(self, block_m: int) -> int:
        """The most row tiles that all experts together can have, Q at most."""
        if self.rows_apart:
            return self.num_experts * math.ceil(self.max_rows / block_m)
        return min(self.max_rows // block_m + self.num_experts, self.max_rows)


class GroupedGemm(Protocol):
    """One of the two GEMMs of all experts over the tile list, prepared for calls of one shape."""

    def __call__(self, tensors: tuple[Operands, Stored, ExpertScalars, Rows, TileList], /) -> None:
        """Compute a GEMM with its bias and what follows it; `ep_moe.kernels.gemm.arguments` describes the tensors, of
        which the second group is written.

        Local, on the current stream, no host sync, CUDA-graph safe after its first call.
        """
        ...

    @property
    def repeat(self) -> Repeat | None:
        """The same with the addresses of the tensors that are there, in the order of a call; all are aligned to 16
        bytes. None until a call has loaded the kernel: each call then passes tensors."""
        ...


class Backend(Protocol):
    """An implementation of both GEMMs.

    The first one reads the batch's rows and stores the intermediate, rows in the order of the tile list, in the dtype
    of the scheme's activation or the model if `between.fused`, else in float32; the second one reads it and stores the
    batch's rows in the model's dtype, and touches no row that holds no token.
    """

    serves: Serves

    def workspace(self, shape: CallShape, tiles: ExpertTiles) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Further tensors of a call, by name: "next_tile", and what `gather` writes: "packed", "packed_scale"."""
        ...

    def gather(self, shape: CallShape, tiles: ExpertTiles) -> RepeatedLaunch | None:
        """Prepare the kernel that copies rows of the pool into the order of the tile list, in the form in which the
        first GEMM reads them; None if that reads the pool.

        It takes x, its scales, `Stored` "packed" and "packed_scale", `Rows` with the index of rows, and `TileList`.
        """
        ...

    def first(self, shape: CallShape, tiles: ExpertTiles, between: Between) -> GroupedGemm:
        """Prepare w13 @ x, its bias, the activation and what `between` says, if it is fused."""
        ...

    def second(self, shape: CallShape, tiles: ExpertTiles, between: Between) -> GroupedGemm:
        """Prepare w2 @ intermediate and its bias."""
        ...


class PreferredBackend(Backend, Protocol):
    """A backend of some calls, which is asked before the one that computes all.

    Attributes:
        default_tiles: of the calls that it takes, unless a table has others.
    """

    default_tiles: ExpertTiles

    def tiles(self, shape: CallShape) -> ExpertTiles | None:
        """The tiles of both GEMMs for calls of this shape; None leaves them to another backend. Local."""
        ...

    def obstacle(self, shape: CallShape) -> str | None:
        """The reason why it computes no calls of this shape, whatever their rows; None if it does. Local."""
        ...
