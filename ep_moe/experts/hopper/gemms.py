"""The grouped GEMMs in Gluon, for Hopper.

Letters: L local experts, H hidden, I intermediate, G scale groups, Q row tiles of all experts, W rows of an expert's
weights.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ep_moe.experts.formats import Between
from ep_moe.experts.grouped_gemm import CallShape, GroupedGemm
from ep_moe.experts.hopper.decoded import DecodedGemms
from ep_moe.experts.hopper.described import SHARED_BYTES, DescribedGemm, descriptor, pairs_of, rows_of
from ep_moe.experts.hopper.shapes import BLOCK, CAPABILITY, LEAST_ROWS, STEP_BYTES, is_hopper, obstacle
from ep_moe.experts.launching import num_programs
from ep_moe.experts.tile_tables import log_once
from ep_moe.experts.tuning import HOPPER_TILES, ExpertTiles
from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernels.gemm.arguments import Codes, Epilogue, RowGroups, Scales
from ep_moe.kernels.hopper.arguments import FEW_ROWS, HALF_N, ROWS, Pipeline
from ep_moe.kernels.hopper.gather import _gather_rows_kernel
from ep_moe.kernels.hopper.grouped import _hopper_gemm_kernel
from ep_moe.kernels.hopper.overlap import THREADS

_GATHERED_ROWS, _GATHERED_BYTES = 4, 2048  # of a row, that a program copies at a time
_GATHERS_PER_SM = 8  # programs
_DECODED = DecodedGemms()
_NO_CODES = Codes(**{**dict.fromkeys(Codes._fields, False), "KIND": "none", "PACKED": 1, "GROUPS": 1})


class _HopperGemm(DescribedGemm):
    """One of the GEMMs for calls of one shape."""

    def __init__(
        self,
        shape: CallShape,
        constants_of: Mapping[str, Any],
        *,
        column_tiles: int,
        settings: tuple[int, ...],
    ) -> None:
        pipeline = constants_of["PIPE"]
        self._tma_scales = constants_of["SCALES"].X == "group" and not pipeline.COPIED_SCALES
        self._block_m, self._block_k = pipeline.BLOCK_M, pipeline.BLOCK_K
        self._interleaved = constants_of["EPILOGUE"].ALTERNATING
        programs = num_programs(shape.device, 1, shape.max_tiles(self._block_m) * column_tiles)
        super().__init__(_hopper_gemm_kernel, programs, constants_of, shape.device, settings=settings, early=True)

    def arranged(self, tensors: tuple[Any, ...], describe: Callable[[str, Any], Any]) -> tuple[Any, ...]:
        """The kernel's arguments from those of a `GroupedGemm`. Local."""
        operands, out, scalars, rows, tiles = tensors
        scales = None if self._tma_scales else operands.x_scale
        return (
            describe("x", operands.x),
            describe("w", operands.w),
            describe("x_scale", operands.x_scale) if self._tma_scales else None,
            describe("out", out.data),
            operands._replace(x=None, w=None, x_scale=scales, w_zero=None),
            out,
            scalars,
            rows._replace(row_index=None),
            tiles,
        )

    def describe(self, name: str, tensor: torch.Tensor) -> TensorDescriptor:
        """The descriptor of one of the tensors. Local."""
        if name == "x_scale":  # [G, rows]
            return descriptor(tensor, 1, self._block_m)
        if name == "out":
            return descriptor(rows_of(tensor), self._block_m // 2, HALF_N.value)
        if name == "x":
            return descriptor(rows_of(tensor), self._block_m // 2, self._block_k)
        rows = rows_of(tensor)
        return descriptor(pairs_of(rows) if self._interleaved else rows, HALF_N.value, self._block_k)


class HopperGemms:
    """Both GEMMs in Gluon, on Hopper; a `Backend` that takes some calls.

    Args:
        least_rows: expected of an expert, below which the calls are left to others; None: those of `LEAST_ROWS`.
        anywhere: take calls whatever the device is, to compile their kernels.
        overlap: the second GEMM begins while the first one ends, if no kernel is between them. It then reads the
            counters that the first one writes, and cannot be launched without it.
    """

    name = "hopper"

    def __init__(self, *, least_rows: int | None = None, anywhere: bool = False, overlap: bool = True) -> None:
        self._least_rows, self._anywhere, self._overlap = least_rows, anywhere, overlap

    def tiles(self, shape: CallShape, wanted: ExpertTiles | None = None, source: str = "") -> ExpertTiles | None:
        """The wanted tiles, if they are for this backend; else those of calls that it takes, and None for others, the
        reason of which is logged once. Local."""
        if wanted is not None and wanted.backend == self.name:
            return dataclasses.replace(self.default_tiles(shape), group_m=wanted.group_m)
        least = self._least_rows
        if least is None:
            by_bytes = LEAST_ROWS[shape.gathered]
            least = _DECODED.least_rows(shape) if shape.decodes else by_bytes.get(shape.row_dtype.itemsize, 0)
        if shape.expected_rows < least:
            return None
        reason = self.obstacle(shape)
        if reason is not None:
            log_once(f"Triton's kernels serve calls that Hopper's do not: {reason}")
        return self.default_tiles(shape) if reason is None else None

    def default_tiles(self, shape: CallShape) -> ExpertTiles:
        """Tiles of which the expected rows of an expert fill half, or of 128 rows; or for decoded weights. Local."""
        if shape.decodes:
            return _DECODED.default_tiles(shape)
        rows = next((rows for rows in FEW_ROWS if 2 * shape.expected_rows <= rows), ROWS.value)
        return dataclasses.replace(HOPPER_TILES, block_m=rows)

    def obstacle(self, shape: CallShape) -> str | None:
        """Why the kernels do not compute calls of this shape, however many rows they have. Local."""
        if not self._anywhere and not is_hopper(shape.device):
            return f"{shape.device} has not compute capability {CAPABILITY}"
        return _DECODED.obstacle(shape) if shape.decodes else obstacle(shape)

    def workspace(self, shape: CallShape, tiles: ExpertTiles) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Counters of drawn tiles, and of stored parts of row tiles; gathered rows. Local."""
        if shape.decodes:
            return _DECODED.workspace(shape, tiles)
        pieces: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "next_tile": ((2,), torch.int32),
            "stored": ((shape.max_tiles(tiles.block_m),), torch.int32),
        }
        if shape.gathered:
            rows, payload = shape.max_tiles(tiles.block_m) * tiles.block_m, shape.scheme.payload
            pieces["packed"] = (rows, shape.hidden), shape.row_dtype
            if payload.quantized:
                pieces["packed_scale"] = (payload.num_groups(shape.hidden), rows), torch.float32
        return pieces

    def gather(self, shape: CallShape, tiles: ExpertTiles) -> Kernel | None:
        """The kernel that gathers rows into the order of the tile list; None if they are neighbors. Local."""
        if shape.decodes:
            return _DECODED.gather(shape, tiles)
        if not shape.gathered:
            return None
        groups = shape.scheme.payload.num_groups(shape.hidden)
        rows, block = shape.max_tiles(tiles.block_m) * tiles.block_m, _GATHERED_BYTES // shape.row_dtype.itemsize
        return Kernel(
            _gather_rows_kernel,
            num_programs(shape.device, _GATHERS_PER_SM, rows // _GATHERED_ROWS),
            settings=(shape.hidden, shape.x_stride, shape.scale_height, *shape.scale_strides, rows),
            constants={
                "PIECES": RowGroups(BLOCK_M=tiles.block_m, ROWS=_GATHERED_ROWS, BLOCK=block),
                "G": groups,
                "GROUPS": triton.next_power_of_2(max(groups, 1)),
            },
            options={"num_warps": 4},
            device=shape.device,
        )

    def first(self, shape: CallShape, tiles: ExpertTiles, between: Between) -> GroupedGemm:
        """`_hopper_gemm_kernel` for w13 @ x. Local."""
        if shape.decodes:
            return _DECODED.first(shape, tiles, between)
        stored = (shape.scheme.activation.dtype or shape.dtype) if between.fused else torch.float32
        return _prepare(shape, tiles, between, shape.epilogue(between), stored, second=False, overlap=self._overlap)

    def second(self, shape: CallShape, tiles: ExpertTiles, between: Between) -> GroupedGemm:
        """`_hopper_gemm_kernel` for w2 @ intermediate. Local."""
        if shape.decodes:
            return _DECODED.second(shape, tiles, between)
        return _prepare(shape, tiles, between, Epilogue(), shape.dtype, second=True, overlap=self._overlap)


def _fits_one_wave(shape: CallShape, block_m: int, columns: int) -> bool:
    """True if no SM gets two tiles of 128 columns: wider ones would leave SMs without one."""
    row_tiles = shape.num_experts * triton.cdiv(shape.expected_rows, block_m)
    tiles = row_tiles * triton.cdiv(columns, HALF_N.value)
    return num_programs(shape.device, 1, tiles + 1) > tiles


def _prepare(
    shape: CallShape,
    tiles: ExpertTiles,
    between: Between,
    epilogue: Epilogue,
    stored: torch.dtype,
    *,
    second: bool,
    overlap: bool,
) -> _HopperGemm:
    """Prepare one of the GEMMs, whose result is stored in `stored`."""
    sums, columns = shape.hidden, shape.intermediate
    if second:
        sums, columns = columns, sums
    block_m = tiles.block_m
    gated, weight, payload = epilogue.GATED, shape.scheme.weight, shape.scheme.payload
    block_k, grouped = STEP_BYTES // shape.row_dtype.itemsize, payload.granularity == "group"
    halves = 1 if second and _fits_one_wave(shape, block_m, columns) else 2
    stored_halves = 1 if gated else halves
    column_tiles = triton.cdiv(columns, HALF_N.value * stored_halves)
    half_bytes = block_m // 2 * HALF_N.value * stored.itemsize
    stage_bytes = STEP_BYTES * (block_m + halves * HALF_N.value) + 4 * block_m * grouped
    buffers = stored_halves if 2 * stored_halves * half_bytes + 3 * stage_bytes <= SHARED_BYTES else 1
    stages = min((SHARED_BYTES - 2 * buffers * half_bytes) // stage_bytes, 8)
    rows = shape.max_tiles(block_m) * block_m
    arrivals = (
        triton.cdiv(shape.intermediate, HALF_N.value * (1 if shape.activation.kind.gated else 2)) * 2 * THREADS.value
    )
    pipeline = Pipeline(
        N=columns,
        W=columns * (2 if gated else 1),
        BLOCK_K=block_k,
        STEPS=triton.cdiv(sums, block_k),
        HALVES=halves,
        COLUMN_TILES=column_tiles,
        W_BLOCKS=triton.cdiv(columns * (2 if gated else 1), BLOCK),
        BLOCK_M=block_m,
        GROUP_M=tiles.group_m,
        FIRST=not second,
        PACKED=second or shape.gathered,
        COPIED_SCALES=grouped and not second,
        SCALE_ROWS=payload.num_groups(sums) if grouped and shape.rows_apart and not second else 0,
        STAGES=stages,
        OUT_BUFFERS=buffers,
        ARRIVALS=arrivals if overlap and between.fused else 0,
        ALPHA=shape.shared.alpha,
        BETA=shape.shared.beta,
        LIMIT=shape.shared.limit,
    )
    scales = Scales(
        X="none" if not payload.quantized else "group" if grouped else "row",
        WEIGHT=weight.granularity,
        VECTOR=False,
        GROUP_N=BLOCK,
        GROUP_K=BLOCK,
        STATIC=between is Between.STATIC and second,
    )
    constants = {"PIPE": pipeline, "SCALES": scales, "CODES": _NO_CODES, "EPILOGUE": epilogue}
    settings = rows if second or shape.gathered else shape.scale_strides[2], rows
    return _HopperGemm(shape, constants, column_tiles=column_tiles, settings=settings)
