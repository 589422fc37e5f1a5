"""Packing and unpacking as Triton kernels, without host sync; launches do not depend on the ids.

Safe in CUDA graphs. Runs on a CPU under TRITON_INTERPRET=1.

Letters: N received token rows, K top-k, H hidden, G scale groups, L local experts, C rows of an expert in BATCHED.
"""

import dataclasses
import math

import torch
import triton

from ep_moe.config import Layout
from ep_moe.kernel_launch.constants import constants
from ep_moe.kernel_launch.repeated import RepeatedLaunch
from ep_moe.kernels.rows.permute import (
    Ids,
    ScaleGroups,
    Words,
    _count_rows_kernel,
    _merge_repeats_kernel,
    _pack_rows_kernel,
    _sum_counts_kernel,
    _weighted_sum_kernel,
)
from ep_moe.layout.base import Packed, TokenRows
from ep_moe.layout.frame import Frame, make_frame
from ep_moe.quant import QuantScheme, as_bytes

_MERGE_IDS = 1024  # ids that one program merges
_BLOCK_COMPARISONS = 4096  # of ids, by which a token's program finds its rows' order within the block of tokens
_BLOCK_TOKENS = 64  # the most tokens of a block
_COUNTED_EXPERTS = 32  # experts that one program counts
_SUMMED_COUNTS = 4096  # counts that are summed at a time
UNIT_WORDS = 4  # 32-bit words in one 16-byte access
_COPIED_WORDS = 2048  # the most words that one program copies
_SUMMED_BY_THREAD = 8  # columns: one 16-byte access in the narrower dtypes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Places:
    """Where rows go, except for their order within a block of tokens."""

    expert_row_start: torch.Tensor  # [L] int32
    expert_num_tokens: torch.Tensor  # [L] int32
    before: torch.Tensor  # [blocks, L] int32, rows of each expert in earlier blocks
    block_tokens: int


def merge_repeats(
    ids: torch.Tensor, weights: torch.Tensor, *, first: int = 0, last: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ep_moe.layout.merge_repeats` in one launch. Local, on the current stream, no host sync."""
    num_tokens, num_topk = ids.shape
    if ids.stride(1) != 1:
        ids = ids.contiguous()
    if weights.stride(1) != 1:
        weights = weights.contiguous()
    local_ids = torch.empty(num_tokens, num_topk, dtype=torch.int32, device=ids.device)
    local_weights = torch.empty(num_tokens, num_topk, dtype=torch.float32, device=ids.device)
    if local_ids.numel() == 0:
        return local_ids, local_weights
    columns = triton.next_power_of_2(num_topk)
    tokens = max(_MERGE_IDS // columns, 1)
    with torch.cuda.device_of(ids):
        _merge_repeats_kernel[(triton.cdiv(num_tokens, tokens),)](
            ids,
            weights,
            local_ids,
            local_weights,
            num_tokens,
            first,
            torch.iinfo(torch.int32).max if last is None else last,
            ids.stride(0),
            weights.stride(0),
            K=num_topk,
            COLUMNS=columns,
            TOKENS=tokens,
        )
    return local_ids, local_weights


def _ids_constants(experts: int, num_topk: int, tokens: int) -> Ids:
    """How kernels read ids [N, K] in blocks of so many tokens."""
    return constants(Ids, L=experts, K=num_topk, COLUMNS=triton.next_power_of_2(num_topk), TOKENS=tokens)


def _count_rows(ids: torch.Tensor, frame: Frame) -> _Places:
    """Count the rows of every expert, in total and in the blocks of tokens before each block. Two launches."""
    (num_tokens, num_topk), experts, device = ids.shape, frame.num_local_experts, ids.device
    columns = triton.next_power_of_2(num_topk)
    tokens = min(max(_BLOCK_COMPARISONS // columns**2, 1), _BLOCK_TOKENS)
    blocks = triton.cdiv(num_tokens, tokens)
    before = torch.empty(blocks, experts, dtype=torch.int32, device=device)
    starts_and_counts = torch.empty(2, experts, dtype=torch.int32, device=device)
    places = _Places(
        expert_row_start=starts_and_counts[0],
        expert_num_tokens=starts_and_counts[1],
        before=before,
        block_tokens=tokens,
    )
    if experts == 0:
        return places
    if blocks:
        _count_rows_kernel[(blocks, triton.cdiv(experts, _COUNTED_EXPERTS))](
            ids,
            before,
            num_tokens,
            IDS=_ids_constants(experts, num_topk, tokens),
            EXPERTS=_COUNTED_EXPERTS,
        )
    padded = triton.next_power_of_2(experts)
    _sum_counts_kernel[(1,)](
        before,
        places.expert_num_tokens,
        places.expert_row_start,
        blocks,
        frame.height,
        frame.alignment,
        L=experts,
        EXPERTS=padded,
        BLOCKS=max(_SUMMED_COUNTS // padded, 1),
        BATCHED=frame.layout is Layout.BATCHED,
    )
    return places


def row_unit(x: torch.Tensor) -> int:
    """The unit, in 32-bit words, by which rows [N, V] are copied: the largest of 4, 2 and 1 that divides a row.

    Example: 48 elements of "nvfp4" are 24 bytes, copied 8 at a time.

    Errors: ValueError if a row is not a multiple of 4 bytes. Local, no host sync.
    """
    row_bytes = x.shape[1] * x.element_size()
    if row_bytes % 4:
        raise ValueError(f"a row of {row_bytes} bytes is not a multiple of 4")
    return math.gcd(row_bytes // 4, UNIT_WORDS)


def as_words(x: torch.Tensor) -> torch.Tensor:
    """View rows [N, V] as int32 words [N, W], each row aligned to `row_unit`; unaligned rows are copied first.

    Errors: ValueError if a row is not a multiple of 4 bytes. Local, no host sync.
    """
    unit_bytes = 4 * row_unit(x)
    if x.stride(1) != 1 or x.stride(0) * x.element_size() % unit_bytes or x.data_ptr() % unit_bytes:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.int32)


def copy_block(row_words: int) -> tuple[int, int]:
    """The words of a row that one program copies, and its warps: at least 16 bytes for every thread."""
    words = min(max(triton.next_power_of_2(row_words), 32 * UNIT_WORDS), _COPIED_WORDS)
    return words, min(words // (32 * UNIT_WORDS), 4)


def pack(
    rows: TokenRows,
    layout: Layout,
    *,
    scheme: QuantScheme,
    dtype: torch.dtype,
    num_local_experts: int,
    capacity: int,
    alignment: int = 1,
    max_rows: int | None = None,
) -> Packed:
    """`ep_moe.layout.pack` in three launches.

    Errors: ValueError for more than C received rows in BATCHED, whichever experts they go to: N <= C always fits and
    can be checked without a host sync. Local, on the current stream, no host sync.
    """
    num_tokens, num_topk = rows.local_topk_ids.shape
    if layout is Layout.BATCHED and num_tokens > capacity:
        raise ValueError(f"an expert may have {num_tokens} rows, which exceeds capacity ({capacity})")
    frame = make_frame(
        rows,
        layout,
        num_local_experts=num_local_experts,
        capacity=capacity,
        alignment=alignment,
        max_rows=max_rows,
    )
    ids = rows.local_topk_ids.contiguous()
    with torch.cuda.device_of(ids):
        places = _count_rows(ids, frame)
        token_to_row = torch.empty(num_tokens, num_topk, dtype=torch.int32, device=ids.device)
        _copy_rows(rows, ids, frame, places, token_to_row)
    return frame.finish(
        rows,
        scheme=scheme,
        dtype=dtype,
        expert_row_start=places.expert_row_start,
        expert_num_tokens=places.expert_num_tokens,
        token_to_row=token_to_row,
    )


def _copy_rows(rows: TokenRows, ids: torch.Tensor, frame: Frame, places: _Places, token_to_row: torch.Tensor) -> None:
    """Fill the frame and `token_to_row`. One launch."""
    num_tokens, num_topk = ids.shape
    if num_tokens == 0:
        return
    copy = frame.x.data_ptr() != rows.x.data_ptr()
    x = as_words(rows.x) if copy else None
    row_words = rows.x.shape[1] * rows.x.element_size() // 4
    unit = row_unit(rows.x) if copy else UNIT_WORDS
    scale = None if rows.scale is None else as_bytes(rows.scale)
    groups = 0 if scale is None else scale.shape[1]
    words, num_warps = copy_block(row_words)
    _pack_rows_kernel[(num_tokens, triton.cdiv(row_words, words) if copy else 1)](
        ids,
        places.before,
        places.expert_row_start,
        x,
        scale,
        token_to_row,
        frame.row_index,
        frame.x.view(-1, frame.x.shape[-1]).view(torch.int32) if copy else None,
        None if frame.scale is None else as_bytes(frame.scale),
        frame.height,
        frame.num_rows,
        0 if x is None else x.stride(0) // unit,
        *((0, 0) if scale is None else scale.stride()),
        IDS=_ids_constants(frame.num_local_experts, num_topk, places.block_tokens),
        WORDS=constants(Words, ROW=row_words, UNIT=unit, BLOCK=words),
        SCALES=constants(ScaleGroups, G=groups, GROUPS=triton.next_power_of_2(max(groups, 1))),
        num_warps=num_warps,
    )


def prepare_weighted_sum(
    summed: torch.Size, hidden: int, device: torch.device, *, shared_stride: int = 0, out_stride: int
) -> RepeatedLaunch:
    """Prepare `weighted_sum` for a token_to_row of this shape; it takes y, token_to_row, weights, shared and out."""
    num_tokens, num_topk = summed
    block = min(max(triton.next_power_of_2(hidden), 32 * _SUMMED_BY_THREAD), 128 * _SUMMED_BY_THREAD)
    return RepeatedLaunch(
        _weighted_sum_kernel,
        (num_tokens, triton.cdiv(hidden, block)),
        settings=(shared_stride, out_stride),
        constants={"H": hidden, "K": num_topk, "BLOCK": block},
        options={"num_warps": block // (32 * _SUMMED_BY_THREAD), "enable_fp_fusion": False},
        device=device,
    )


def weighted_sum(
    y: torch.Tensor,
    token_to_row: torch.Tensor,
    topk_weights: torch.Tensor | None,
    *,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ep_moe.layout.weighted_sum` in one launch. Local, on the current stream, no host sync."""
    y, token_to_row = y.reshape(-1, y.shape[-1]).contiguous(), token_to_row.contiguous()
    num_tokens, hidden = token_to_row.shape[0], y.shape[1]
    target = out if out is not None and out.stride(1) == 1 else y.new_empty(num_tokens, hidden)
    if shared is not None and shared.stride(1) != 1:
        shared = shared.contiguous()
    if target.numel():
        weights = None if topk_weights is None else topk_weights.contiguous()
        stride = 0 if shared is None else shared.stride(0)
        launch = prepare_weighted_sum(
            token_to_row.shape, hidden, y.device, shared_stride=stride, out_stride=target.stride(0)
        )
        launch.through_triton((y, token_to_row, weights, shared, target))
    return target if out is None or target is out else out.copy_(target)
