"""The grouped GEMMs in Triton.

Letters: L local experts, H hidden, I intermediate, G scale groups, Q row tiles of all experts.
"""

from typing import Any

import torch
import triton

from ep_moe.experts.formats import Between
from ep_moe.experts.grouped_gemm import CallShape, GroupedGemm
from ep_moe.experts.launching import num_programs
from ep_moe.experts.prepared_rows import (
    MOST_SCALED_ROWS,
    PREPARED_COLUMNS,
    group_loads,
    inner_order,
    inner_width,
    parts,
    prepared_width,
    shuffles,
)
from ep_moe.experts.tile_tables import default_table, log_once
from ep_moe.experts.tuning import ExpertTiles, GemmTiles, fit_stages, fit_steps
from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernels.device import Device
from ep_moe.kernels.gemm.arguments import Codes, Epilogue, RowGroups, Scales, Sizes, TileShape
from ep_moe.kernels.gemm.grouped import _first_gemm_kernel, _second_gemm_kernel
from ep_moe.kernels.gemm.tokens import _prepare_rows_kernel

_PREPARED_ROWS = 16  # that a program prepares at a time
_PREPARES_PER_SM = 8  # programs
_ONE_GROUP = 1 << 30  # columns in a group of zero points per channel


def codes_of(shape: CallShape, tiles: ExpertTiles, scales: Scales, *, second: bool) -> Codes:
    """How the kernels of one of the GEMMs decode weights of this shape."""
    gemm = tiles.second if second else tiles.first
    products = parts(shape, gemm)
    ready = inner_order(shape, tiles) if second else prepared_width(shape, tiles)
    stored = shape.scheme.weight
    sums = shape.intermediate if second else shape.hidden
    scaled = scales.WEIGHT in ("fold", "block")
    shuffled = shuffles(shape, gemm)
    pairs = shuffled and shape.decodes_pairs(folded=scales.WEIGHT == "fold")
    return Codes(
        KIND=shape.format.kind,
        PACKED=stored.packed,
        PAIRS=pairs and not triton.knobs.runtime.interpret and not Device.of(shape.device).hip,
        ZERO=stored.zero_point,
        GROUPS=max(gemm.block_k // products // (stored.group_width or _ONE_GROUP), 1),
        SCALES=group_loads(shape, gemm, sums, stored.scale_dtype) if scaled else "single",
        ZEROS=group_loads(shape, gemm, sums, stored.dtype) if stored.zero_point else "single",
        SHUFFLED=shuffled,
        ROWS_PREPARED=ready > 0,
        PARTS=products,
        DIVIDE=stored.global_scale == "divisor",
    )


def scales_of(shape: CallShape, tiles: ExpertTiles, between: Between, *, second: bool) -> Scales:
    """Where the kernels of one of the GEMMs apply the scales."""
    gemm, aligned = (tiles.second, True) if second else (tiles.first, shape.halves_aligned)
    rows, stored = shape.scheme.payload, shape.scheme.weight
    grouped = stored.granularity in ("group", "block")
    weight: str = stored.granularity
    if grouped:
        within = stored.group_width % (gemm.block_k // parts(shape, gemm)) == 0
        few = within and tiles.block_m <= MOST_SCALED_ROWS and rows.family != "micro" and tiles.backend != "hopper"
        weight = "fold" if shape.decodes and not few else "block"
    if rows.family == "micro":
        x = "row" if second and between is Between.NVFP4 else "none"
    else:
        x = "none" if not rows.quantized else "group" if rows.granularity == "group" else "row"
    return Scales(
        X=x,
        WEIGHT=weight,
        VECTOR=shape.decodes or (grouped and not (aligned and stored.block[0] % gemm.block_n == 0)),
        GROUP_N=stored.block[0] if grouped else 1,
        GROUP_K=stored.group_width or (_ONE_GROUP if stored.zero_point else 1),
        STATIC=between is Between.STATIC,
    )


def _registers(gemm: GemmTiles) -> int:
    """The most registers of a thread with which `programs_per_sm` programs share an SM's 65536."""
    return min(65536 // (32 * gemm.num_warps * gemm.programs_per_sm) // 8 * 8, 255)


def _prepare(
    kernel: Any,
    sizes: Sizes,
    numbers: tuple[Any, ...],
    epilogue: Epilogue,
    shape: CallShape,
    tiles: ExpertTiles,
    between: Between,
    *,
    second: bool,
) -> Kernel:
    """Prepare one of the GEMMs, which takes `numbers` behind the sizes."""
    gemm, sums, columns = tiles.second if second else tiles.first, sizes.K, sizes.N
    most = shape.max_tiles(tiles.block_m) * triton.cdiv(columns, gemm.block_n)
    scales = scales_of(shape, tiles, between, second=second)
    settings: tuple[Any, ...] = (sizes, *numbers)
    options = {"num_warps": gemm.num_warps, "num_stages": gemm.num_stages}
    if shape.decodes and not Device.of(shape.device).hip:
        options["maxnreg"] = _registers(gemm)
    return Kernel(
        kernel,
        num_programs(shape.device, gemm.programs_per_sm, most),
        settings=settings,
        constants={
            "TILE": TileShape(
                BLOCK_M=tiles.block_m,
                BLOCK_N=gemm.block_n,
                BLOCK_K=gemm.block_k // parts(shape, gemm),
                GROUP_M=tiles.group_m,
                SWAP=gemm.swap,
                EVEN_N=columns % gemm.block_n == 0,
                EVEN_K=sums % gemm.block_k == 0,
            ),
            "SCALES": scales,
            "CODES": codes_of(shape, tiles, scales, second=second),
            "EPILOGUE": epilogue,
        },
        options=options,
        device=shape.device,
        early=not shape.decodes,  # with them gpt-oss-120b took 20 % longer at 4 tokens
    )


def _default(shape: CallShape) -> ExpertTiles:
    """Triton's tiles for calls of shapes without a table of their own."""
    stored, gated = shape.scheme.weight, shape.activation.kind.gated
    shared_kib = Device.of(shape.device).shared_bytes // 1024
    if shape.decodes:
        table = default_table(
            shape.row_dtype,
            gated=gated,
            shared_kib=shared_kib,
            weight_bits=shape.weight_bits,
            fp8_weights=stored.family == "scaled" and stored.dtype == torch.float8_e4m3fn,
        )
        tiles = table.choose(shape.expected_rows)
        if all(_sums_within_groups(shape, gemm) for gemm in (tiles.first, tiles.second)):
            return tiles
        return fit_steps(tiles, stored.group_width, across=True)
    blocked = stored.granularity == "block"
    table = default_table(
        shape.row_dtype,
        gated=gated,
        shared_kib=shared_kib,
        group_k=stored.group_width,
        whole_blocks=not blocked or (stored.block[0] % 128 == 0 and shape.halves_aligned),
    )
    return table.choose(shape.expected_rows)


def _sums_within_groups(shape: CallShape, gemm: GemmTiles) -> bool:
    """True if no product over K crosses from one scale of weights to the next."""
    return shape.scheme.weight.group_width % (gemm.block_k // parts(shape, gemm)) == 0


def _launchable(tiles: ExpertTiles, shape: CallShape) -> ExpertTiles:
    """The tiles with as many stages as fit the GPU."""
    device, stored = Device.of(shape.device), shape.scheme.weight
    widths, gated = (8 * shape.row_dtype.itemsize, shape.weight_bits), shape.activation.kind.gated
    paired = shape.decodes_pairs(folded=stored.granularity in ("group", "block"))
    decoding = {"rearranged": stored.packed > 1 and not paired, "paired": paired}
    return fit_stages(tiles, device.shared_bytes, *widths, gated=gated, **decoding, warp_groups=device.warp_groups)


def _checked(tiles: ExpertTiles, shape: CallShape, source: str) -> ExpertTiles:
    """The tiles. Errors: ValueError if a step of a reduction would cross from one scale to the next.

    A step over weights that are decoded together with their scales may have several whole groups.
    """
    source = source and f"{source}: "
    width, micro = shape.scheme.weight.group_width, shape.scheme.payload.family == "micro"
    for name, gemm in (("first", tiles.first), ("second", tiles.second)):
        if micro and (gemm.block_k % width or gemm.block_n % width):
            raise ValueError(
                f"{source}block_n ({gemm.block_n}) and block_k ({gemm.block_k}) of the {name} GEMM are not multiples "
                f"of the {width} columns that share a scale in scheme '{shape.scheme.name}'"
            )
        within = _sums_within_groups(shape, gemm)
        if not micro and not within and not (shape.decodes and gemm.block_k % width == 0):
            raise ValueError(
                f"{source}block_k ({gemm.block_k}) of the {name} GEMM does not divide the {width} columns "
                f"that share a scale in scheme '{shape.scheme.name}'"
            )
    return tiles


class TritonGemms:
    """Both GEMMs as persistent Triton kernels; a `Backend`."""

    name = "triton"

    def obstacle(self, shape: CallShape) -> str | None:
        """None: they compute every format. Local."""
        return None

    def tiles(self, shape: CallShape, wanted: ExpertTiles | None = None, source: str = "") -> ExpertTiles:
        """The wanted tiles, or the default ones, with as many stages as fit the GPU.

        Those of a table that do not fit with one stage are replaced by the default ones; the log has the reason once.
        Errors: ValueError if a step of a reduction would cross from one scale to the next, RuntimeError for tiles of
        no table that do not fit. Local.
        """
        if wanted is None:
            return self.default_tiles(shape)
        checked = _checked(wanted, shape, source)
        try:
            return _launchable(checked, shape)
        except RuntimeError as error:
            if not source:
                raise
            log_once(f"{source}: tiles for another GPU are not used, defaults are: {error}")
            return self.default_tiles(shape)

    def default_tiles(self, shape: CallShape) -> ExpertTiles:
        """The tiles for calls of shapes without a table of their own. Local."""
        return _launchable(_default(shape), shape)

    def workspace(self, shape: CallShape, tiles: ExpertTiles) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Rows that are prepared for weights decoded in registers; programs count tiles by themselves. Local."""
        width, rows = prepared_width(shape, tiles), shape.max_tiles(tiles.block_m) * tiles.block_m
        pieces: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if width:
            pieces["packed"] = (rows, width), shape.row_dtype
        if shape.format.rows == torch.float16:
            pieces["packed_scale"] = (rows,), torch.float32
        return pieces

    def gather(self, shape: CallShape, tiles: ExpertTiles) -> Kernel | None:
        """`_prepare_rows_kernel`, for weights that are decoded in registers. Local."""
        width = prepared_width(shape, tiles)
        if not width:
            return None
        stored, columns = shape.scheme.payload, max(tiles.first.block_k, PREPARED_COLUMNS)
        pieces = shape.max_tiles(tiles.block_m) * (tiles.block_m // _PREPARED_ROWS) * (width // columns)
        return Kernel(
            _prepare_rows_kernel,
            num_programs(shape.device, _PREPARES_PER_SM, pieces),
            settings=(shape.hidden, shape.x_stride, shape.scale_height, *shape.scale_strides),
            constants={
                "PIECES": RowGroups(BLOCK_M=tiles.block_m, ROWS=_PREPARED_ROWS, BLOCK=columns),
                "GROUP": stored.block[1] if stored.family == "micro" else 0,
                "ORDER": shape.scheme.weight.packed if shuffles(shape, tiles.first) else 0,
            },
            options={"num_warps": 4},
            device=shape.device,
            early=True,
        )

    def first(self, shape: CallShape, tiles: ExpertTiles, between: Between) -> GroupedGemm:
        """`_first_gemm_kernel` for calls of this shape. Local."""
        width, rows = prepared_width(shape, tiles), shape.max_tiles(tiles.block_m) * tiles.block_m
        epilogue = shape.epilogue(between, order=inner_order(shape, tiles) if between.fused else 0)
        height, (block, row, group) = (1, (1, 0, 0)) if width else (shape.scale_height, shape.scale_strides)
        sizes = Sizes(
            K=shape.hidden,
            N=shape.intermediate,
            w_stride=shape.scheme.weight.row_values(shape.hidden),
            x_stride=width or shape.x_stride,
            x_scale_stride_row=row,
            out_stride=inner_width(shape, tiles) if between.fused else shape.intermediate,
        )
        numbers = shape.shared, height, block, group, rows
        return _prepare(_first_gemm_kernel, sizes, numbers, epilogue, shape, tiles, between, second=False)

    def second(self, shape: CallShape, tiles: ExpertTiles, between: Between) -> GroupedGemm:
        """`_second_gemm_kernel` for calls of this shape. Local."""
        sizes = Sizes(
            K=shape.intermediate,
            N=shape.hidden,
            w_stride=shape.scheme.weight.row_values(shape.intermediate),
            x_stride=inner_width(shape, tiles),
            x_scale_stride_row=None,
            out_stride=None,
        )
        rows = shape.max_tiles(tiles.block_m) * tiles.block_m
        return _prepare(_second_gemm_kernel, sizes, (rows,), Epilogue(), shape, tiles, between, second=True)
