"""The grouped GEMMs in Gluon for Hopper whose weights are decoded in registers.

Letters: L local experts, H hidden, I intermediate, Q row tiles of all experts, W rows of an expert's weights.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ep_moe.experts.formats import Between
from ep_moe.experts.grouped_gemm import CallShape, GroupedGemm
from ep_moe.experts.hopper.described import (
    MAXNREG,
    REGISTERS,
    SHARED_BYTES,
    DescribedGemm,
    descriptor,
    pairs_of,
    rows_of,
)
from ep_moe.experts.hopper.shapes import TMA_BYTES
from ep_moe.experts.launching import num_programs
from ep_moe.experts.prepared_rows import inner_order, inner_width
from ep_moe.experts.triton import TritonGemms, codes_of, scales_of
from ep_moe.experts.tuning import HOPPER_TILES, ExpertTiles, GemmTiles
from ep_moe.kernels.gemm.arguments import Epilogue
from ep_moe.kernels.hopper.decoded import HALF, WORDS, DecodedPipeline, _decoded_gemm_kernel

_WORD_BYTES = 4
_MOST_STAGES = 12
_MOVED_BYTES = 10240  # in which two warp groups move results between threads
_MOST_ROWS_OF_TWO = 64  # of a tile, with which two programs share an SM
_MAXNREG_OF_TWO, _REGISTERS_OF_TWO = 80, 96  # of a thread, of its second warp group
_TILE_ROWS = (16, 32, 64, 128, 256)
# expected of an expert, below which Triton's kernels are as fast: for codes that these decode in few instructions, or
# for few tiles; and for all others
_FEW_ROWS, _FEWEST_ROWS = 17, 2
_FEW_TILES = 4 * 132  # two for each program


class _DecodedGemm(DescribedGemm):
    """One of the GEMMs for calls of one shape."""

    def __init__(
        self, shape: CallShape, tiles: ExpertTiles, between: Between, epilogue: Epilogue, *, second: bool
    ) -> None:
        gemm = tiles.second if second else tiles.first
        sums, columns = (shape.intermediate, shape.hidden) if second else (shape.hidden, shape.intermediate)
        rows = 2 if epilogue.GATED else 1
        stride = inner_width(shape, tiles) if not second and between.fused else columns
        column_tiles = triton.cdiv(stride, HALF.value * (1 if epilogue.GATED else 2))
        stage_bytes = 2 * HALF.value * WORDS.value * _WORD_BYTES + 2 * tiles.block_m * gemm.block_k
        scales = scales_of(shape, tiles, between, second=second)
        alone = gemm.programs_per_sm == 1
        constants = {
            "PIPE": DecodedPipeline(
                N=columns,
                W=columns * rows,
                K=sums,
                BLOCK_K=gemm.block_k,
                STEPS=triton.cdiv(sums, gemm.block_k),
                ROW_WORDS=shape.scheme.weight.row_values(sums) // _WORD_BYTES,
                COLUMN_TILES=column_tiles,
                BLOCK_M=tiles.block_m,
                GROUP_M=tiles.group_m,
                FIRST=not second,
                OUT_STRIDE=stride,
                STAGES=min((SHARED_BYTES // gemm.programs_per_sm - _MOVED_BYTES) // stage_bytes, _MOST_STAGES),
                AHEAD=alone,
                WORKER_REGISTERS=REGISTERS if alone else _REGISTERS_OF_TWO,
                ALPHA=shape.shared.alpha,
                BETA=shape.shared.beta,
                LIMIT=shape.shared.limit,
            ),
            "SCALES": scales,
            "CODES": codes_of(shape, tiles, scales, second=second),
            "EPILOGUE": epilogue,
        }
        self._tiles, self._block_k, self._interleaved = tiles, gemm.block_k, epilogue.ALTERNATING
        programs = num_programs(shape.device, gemm.programs_per_sm, shape.max_tiles(tiles.block_m) * column_tiles)
        maxnreg = MAXNREG if alone else _MAXNREG_OF_TWO
        super().__init__(_decoded_gemm_kernel, programs, constants, shape.device, maxnreg=maxnreg)

    def arranged(self, tensors: tuple[Any, ...], describe: Callable[[str, Any], Any]) -> tuple[Any, ...]:
        """The kernel's arguments from those of a `GroupedGemm`. Local."""
        operands, out, scalars, rows, tiles = tensors
        x, w = describe("x", operands.x), describe("w", operands.w)
        return x, w, operands._replace(w=None), out, scalars, rows._replace(row_index=None), tiles

    def describe(self, name: str, tensor: torch.Tensor) -> TensorDescriptor:
        """The descriptor of x or w, whose elements are words. Local."""
        if name == "x":
            return descriptor(rows_of(tensor), self._tiles.block_m, self._block_k)
        words = rows_of(tensor).view(torch.int32)
        return descriptor(pairs_of(words) if self._interleaved else words, HALF.value, WORDS.value)


class DecodedGemms(TritonGemms):
    """Both GEMMs with weights that are decoded in registers; rows are prepared by Triton's kernel."""

    def least_rows(self, shape: CallShape) -> int:
        """Rows expected of an expert, below which calls are left to Triton's kernels. Local."""
        columns = HALF.value * (1 if shape.activation.kind.gated else 2)
        few = shape.num_experts * triton.cdiv(shape.intermediate, columns) < _FEW_TILES
        return _FEW_ROWS if few or shape.format.kind == "uint4" else _FEWEST_ROWS

    def default_tiles(self, shape: CallShape) -> ExpertTiles:
        """Tiles of 128 rows of weights, in steps of 64 bytes of them. Local."""
        block_m = next((rows for rows in _TILE_ROWS if shape.expected_rows <= rows), _TILE_ROWS[-1])
        first = GemmTiles(
            block_n=HALF.value * (1 if shape.activation.kind.gated else 2),
            block_k=WORDS.value * _WORD_BYTES * shape.scheme.weight.packed,
            swap=True,
            programs_per_sm=2 if block_m <= _MOST_ROWS_OF_TWO else 1,
        )
        second = dataclasses.replace(first, block_n=2 * HALF.value)
        return dataclasses.replace(HOPPER_TILES, block_m=block_m, first=first, second=second)

    def obstacle(self, shape: CallShape) -> str | None:
        """Why the kernels do not compute calls of this shape, however many rows they have. Local."""
        weight, tiles = shape.scheme.weight, self.default_tiles(shape)
        grouped = weight.granularity in ("group", "block")
        if not shape.decodes_pairs(folded=grouped):
            return f"they do not compute scheme '{shape.scheme.name}' in {shape.dtype}"
        step = tiles.first.block_k
        narrowest = step // WORDS.value
        if grouped and (weight.group_width < narrowest or (step % weight.group_width and weight.group_width % step)):
            return f"groups of {weight.group_width} columns do not fit steps of {step}, or are less than {narrowest}"
        for name, width in (("hidden", shape.hidden), ("intermediate", shape.intermediate)):
            if weight.row_values(width) % TMA_BYTES:
                return f"rows of weights of {name} ({width}) columns are no multiple of {TMA_BYTES} bytes"
        return None

    def workspace(self, shape: CallShape, tiles: ExpertTiles) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Prepared rows, and counters of drawn tiles. Local."""
        return {**super().workspace(shape, tiles), "next_tile": ((2,), torch.int32)}

    def first(self, shape: CallShape, tiles: ExpertTiles, between: Between) -> GroupedGemm:
        """`_decoded_gemm_kernel` for w13 @ x. Local."""
        epilogue = shape.epilogue(between, order=inner_order(shape, tiles) if between.fused else 0)
        return _DecodedGemm(shape, tiles, between, epilogue, second=False)

    def second(self, shape: CallShape, tiles: ExpertTiles, between: Between) -> GroupedGemm:
        """`_decoded_gemm_kernel` for w2 @ intermediate. Local."""
        return _DecodedGemm(shape, tiles, between, Epilogue(), second=True)
