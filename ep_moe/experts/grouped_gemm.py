"""The seam of expert kernels: a `Backend` prepares the two grouped GEMMs for the shape of a call, and a prepared
`GroupedGemm` is launched with the tensors of each call of that shape.

Letters: L local experts, H hidden, I intermediate, G scale groups, Q row tiles of all experts.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Protocol

import torch

from ep_moe.config import ActivationConfig
from ep_moe.experts.formats import Between, FormatRow, decodes_pairs, row_of
from ep_moe.experts.tuning import ExpertTiles
from ep_moe.kernel_launch.cuda_driver import DriverKernel
from ep_moe.kernel_launch.kernel import Kernel, Run
from ep_moe.kernels.gemm.arguments import Epilogue, ExpertScalars, Operands, Rows, Shared, Stored, TileList
from ep_moe.layout import Batched, ExpertBatch
from ep_moe.quant import QuantScheme
from ep_moe.weights import ExpertWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallShape:
    """The properties of a call that determine its launches, besides addresses; calls of equal shapes share them.

    It has no slots: derived values are found once.

    Args:
        device: of the tensors. scheme: of tokens and weights. dtype: the model's.
        activation: between the GEMMs.
        num_experts, hidden, intermediate: L, H and I.
        expected_rows: the batch's hint. max_rows: rows of all experts together, or of each one if `rows_apart`.
        x_stride: between rows of the pool, in elements.
        scale_height: rows in a block of the pool's scales. scale_strides: between blocks, rows and groups.
        static_scale: the intermediate's scales are among the arguments.
        gathered: rows come from a pool by `row_index`.
        limited: the activation has a limit, one for all experts or one for each.
        up_first: w13 is [up; gate]. alternating: its gate and up rows are interleaved.
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

    @functools.cached_property
    def format(self) -> FormatRow:
        """How kernels compute the scheme."""
        return row_of(self.scheme)

    @functools.cached_property
    def row_dtype(self) -> torch.dtype:
        """Of the rows as they are multiplied."""
        return self.format.rows or self.scheme.payload.dtype or self.dtype

    @functools.cached_property
    def decodes(self) -> bool:
        """True if weights are decoded to the dtype of the rows before they are multiplied."""
        return self.format.kind != "none"

    def decodes_pairs(self, *, folded: bool) -> bool:
        """True if weights are decoded two at once to 16 bits. folded: whether with the scales of their groups."""
        whole_words = all(self.scheme.weight.row_values(width) % 4 == 0 for width in (self.hidden, self.intermediate))
        return self.decodes and whole_words and decodes_pairs(self.scheme, self.row_dtype, folded=folded)

    def epilogue(self, between: Between, *, order: int = 0) -> Epilogue:
        """Of the first GEMM; `Epilogue.ORDER` is `order`."""
        activation = self.activation.kind
        return Epilogue(
            ACTIVATION=activation.value,
            UP_FIRST=self.up_first,
            GATED=activation.gated,
            ALTERNATING=self.alternating,
            LIMITED=self.limited,
            REQUANTIZE=between.value if between.fused else "none",
            POWER_OF_TWO=self.scheme.activation.power_of_two,
            ORDER=order,
        )

    @functools.cached_property
    def shared(self) -> Shared:
        """Numbers of the activation."""
        limit = math.inf if self.activation.limit is None else self.activation.limit
        return Shared(float(self.activation.alpha), float(self.activation.beta), float(limit))

    @functools.cached_property
    def weight_bits(self) -> int:
        """Bits of a stored element of the weights."""
        stored = self.scheme.weight
        return 8 * (stored.dtype or self.dtype).itemsize // stored.packed

    @functools.cached_property
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
        """Compute a GEMM with its bias and epilogue; `ep_moe.kernels.gemm.arguments` describes the tensors, of which
        the second group is written.

        Local, on the current stream, no host sync, CUDA-graph safe after its first call.
        """
        ...

    @property
    def run(self) -> Run | None:
        """The same with the addresses of the tensors that are not None, in the order of a call, aligned to 16 bytes.
        None until a call has loaded the kernel."""
        ...

    @property
    def driver(self) -> DriverKernel | None:
        """The loaded kernel, of which `run` is a launch; None if it goes through Triton's launcher."""
        ...


class Backend(Protocol):
    """An implementation of both GEMMs.

    The first one reads the batch's rows and stores the intermediate, rows in the order of the tile list, in the dtype
    of the scheme's activation or the model if `between.fused`, else in float32; the second one reads it and stores the
    batch's rows in the model's dtype, and touches no row that holds no token.

    Attributes:
        name: in configs and tables.
    """

    name: str

    def obstacle(self, shape: CallShape) -> str | None:
        """The reason why it computes no calls of this shape, whatever their rows; None if it does. Local."""
        ...

    def tiles(self, shape: CallShape, wanted: ExpertTiles | None = None, source: str = "") -> ExpertTiles | None:
        """The tiles of both GEMMs for calls of this shape; None leaves them to the next backend.

        Args: wanted: tiles of a table that names no backend, which are Triton's. source: the table, for errors. Local.
        """
        ...

    def default_tiles(self, shape: CallShape) -> ExpertTiles:
        """Its own tiles for calls of this shape, if there is no obstacle. Local."""
        ...

    def workspace(self, shape: CallShape, tiles: ExpertTiles) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Further tensors of a call, by name: "next_tile", and the output of `gather`: "packed", "packed_scale"."""
        ...

    def gather(self, shape: CallShape, tiles: ExpertTiles) -> Kernel | None:
        """Prepare the kernel that copies rows of the pool into the order of the tile list, in the form in which the
        first GEMM reads them; None if that reads the pool.

        It takes x, its scales, `Stored` "packed" and "packed_scale", `Rows` with the index of rows, and `TileList`.
        """
        ...

    def first(self, shape: CallShape, tiles: ExpertTiles, between: Between) -> GroupedGemm:
        """Prepare w13 @ x, its bias, the activation and `between`, if it is fused."""
        ...

    def second(self, shape: CallShape, tiles: ExpertTiles, between: Between) -> GroupedGemm:
        """Prepare w2 @ intermediate and its bias."""
        ...
