"""The launches of one grouped GEMM by itself: the tile list and `_first_gemm_kernel` without an activation.

Letters: L experts, N and K rows and columns of a weight, M listed rows.
"""

import dataclasses
import functools
import threading
from collections.abc import Mapping

import torch

from ep_moe.config import ActivationConfig, ActivationKind
from ep_moe.experts.grouped_gemm import Between, CallShape, GroupedGemm
from ep_moe.experts.launching import num_programs
from ep_moe.experts.requantize import prepare_tile_list
from ep_moe.experts.row_gemm import RowLists
from ep_moe.experts.triton import TritonExperts
from ep_moe.experts.tuning import ExpertTiles
from ep_moe.kernel_launch.repeated import RepeatedLaunch
from ep_moe.kernels.gemm.arguments import ExpertScalars, Operands, Rows, Stored, TileList
from ep_moe.kernels.rows.zero import _zero_rows_kernel
from ep_moe.quant import Quantized, QuantScheme, StoredMatrix, as_bytes

_MOST_PREPARED = 256  # launches that are kept, of all threads
_ZERO_BLOCK = 1024  # columns that a program stores at a time
_ZERO_PROGRAMS_PER_SM = 8
_ALIGNED = 4  # int32 in 16 bytes: launches are repeated with tensors that are so aligned
_NO_SCALARS = ExpertScalars(None, None, None, None, None, None)
_NO_ACTIVATION = ActivationConfig(kind=ActivationKind.IDENTITY)

Dtypes = tuple[torch.dtype | None, ...]


@functools.lru_cache(maxsize=_MOST_PREPARED)
def _prepared(
    thread: int, shape: CallShape, tiles: ExpertTiles | None, dtypes: Dtypes
) -> tuple[RepeatedLaunch, RepeatedLaunch | None, GroupedGemm, int, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]:
    """The launches of calls of a shape whose tensors have these dtypes: the tile list, the gather if there is one, and
    the GEMM; the most row tiles, and the workspace of what is gathered."""
    del thread, dtypes  # launches keep their arguments, and are for tensors of the same dtypes
    experts = TritonExperts(shape.activation, tiles=tiles)
    chosen = experts.choose_backend(shape)[1]
    # no second GEMM sums the result in an order of its own
    chosen = dataclasses.replace(chosen, second=dataclasses.replace(chosen.second, swap=False))
    most = shape.max_tiles(chosen.block_m)
    listed = prepare_tile_list(shape.num_experts, most, chosen.block_m, shape.device)
    packed = experts.backend.workspace(shape, chosen)
    first = experts.backend.first(shape, chosen, Between.ROUND)
    return listed, experts.backend.gather(shape, chosen), first, most, packed


@functools.lru_cache(maxsize=_MOST_PREPARED)
def _prepared_zeros(thread: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> RepeatedLaunch:
    """The launch that makes rows of a matrix zeros."""
    del thread, dtype
    return RepeatedLaunch(
        _zero_rows_kernel,
        num_programs(device, _ZERO_PROGRAMS_PER_SM, shape[0]),
        settings=tuple(shape),
        constants={"BLOCK": _ZERO_BLOCK},
        options={},
        device=device,
    )


def gemm_by_kernels(
    x: torch.Tensor | Quantized,
    rows: RowLists,
    weight: StoredMatrix,
    scheme: QuantScheme,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tiles: ExpertTiles | None,
) -> None:
    """`ep_moe.experts.row_gemm.gemm_rows` by kernels, with checked arguments."""
    values, scale = (x.values, x.scale) if isinstance(x, Quantized) else (x, None)
    values = values if values.stride(1) == 1 else values.contiguous()
    parts = weight.map(torch.Tensor.contiguous)
    bias = None if bias is None else bias.contiguous()
    num_experts, num_columns = weight.values.shape[:2]
    shape = CallShape(
        device=values.device,
        scheme=scheme,
        dtype=out.dtype,
        activation=_NO_ACTIVATION,
        num_experts=num_experts,
        hidden=scheme.weight.row_width(weight.values.shape[2]),
        intermediate=num_columns,
        expected_rows=rows.expected_rows,
        max_rows=rows.source.shape[0],
        rows_apart=False,
        gathered=True,
        x_stride=values.stride(0),
        scale_height=1 if scale is None else max(scale.shape[0], 1),
        scale_strides=(0, 0, 0) if scale is None else (0, scale.stride(0), scale.stride(1)),
        static_scale=False,
        limited=False,
        up_first=False,
    )
    given = (parts.scale, parts.zero, parts.global_scale, bias, rows.factor)
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in given)
    listed, gather, gemm, most, workspace = _prepared(threading.get_ident(), shape, tiles, dtypes)
    sizes = [-(-size // _ALIGNED) * _ALIGNED for size in (most, num_experts, 1)]
    memory = torch.empty(sum(sizes), dtype=torch.int32, device=values.device)
    tile_expert, first_tile, num_tiles = memory.split(sizes)
    tile_list = TileList(tile_expert, first_tile, num_tiles, None, None)
    where = Rows(rows.expert_row_start, rows.expert_num_tokens, rows.source, rows.target, rows.factor)
    if rows.zeros is not None:
        _prepared_zeros(threading.get_ident(), out.shape, out.dtype, out.device)((out, as_bytes(rows.zeros)))
    listed((Rows(None, rows.expert_num_tokens, None), tile_list))
    weight_scale = parts.scale
    if weight_scale is not None and weight_scale.dtype == torch.float8_e8m0fnu:  # which Triton has not
        weight_scale = as_bytes(weight_scale)
    x_scale = None if scale is None else as_bytes(scale)
    if gather is not None:
        pieces = {
            name: torch.empty(*piece[:1], dtype=piece[1], device=values.device) for name, piece in workspace.items()
        }
        packed = Stored(pieces["packed"], pieces.get("packed_scale"))
        gather((values, x_scale, packed, where._replace(out_index=None, factor=None), tile_list))
        values, x_scale = packed
    operands = Operands(values, x_scale, parts.values, weight_scale, parts.zero, parts.global_scale, bias)
    gemm((operands, Stored(out, None), _NO_SCALARS, where, tile_list))
