"""Launchers of the Triton kernels that plan and write the send buffer, and read messages of a fixed size. They run on a
CPU under TRITON_INTERPRET=1.

Letters: T tokens on this rank, K top-k, R ranks, P physical experts, G scale groups.
"""

import functools
from typing import Any

import torch
import triton

from ep_moe.kernel_launch.kernel import constants_of
from ep_moe.kernels.rows.permute import ScaleGroups, Words
from ep_moe.kernels.rows.wire import (
    Destinations,
    Messages,
    SentTokens,
    WireRow,
    _find_destinations_kernel,
    _read_messages_kernel,
    _write_header_kernel,
    _write_rows_kernel,
)
from ep_moe.layout.triton import UNIT_WORDS, as_words, copy_block, row_unit
from ep_moe.quant import Quantized, as_bytes
from ep_moe.routing import Routing
from ep_moe.transport.headers import HEADER_WORDS
from ep_moe.transport.payload import WORD_BYTES, RowFormat, SendPlan

_PLACES = 2048  # (token, rank) pairs per program
_SUMMED_COUNTS = 2048  # counts that are summed at a time
_READ_ROWS = 32  # rows of messages per program
_MOST_CONSTANTS = 256  # that are kept, for shapes
_UNIT_BYTES = WORD_BYTES * UNIT_WORDS  # of one access


def plan_send(
    topk_ids: torch.Tensor,
    owner: torch.Tensor,
    *,
    fingerprint: int,
    layer: tuple[int, int],
    header: torch.Tensor,
    num_tokens: torch.Tensor | None = None,
) -> SendPlan:
    """`ep_moe.transport.collective.send_plan.plan_send` in two launches. Local, on the current stream, no host sync."""
    if topk_ids.stride(1) != 1:
        topk_ids = topk_ids.contiguous()
    (num_rows, num_topk), num_ranks, device = topk_ids.shape, header.shape[0], topk_ids.device
    ranks, columns = triton.next_power_of_2(num_ranks), triton.next_power_of_2(num_topk)
    tokens = min(max(_PLACES // max(ranks, columns), 1), 128)
    blocks = triton.cdiv(num_rows, tokens)
    plan = SendPlan(
        place=torch.empty(num_rows, num_ranks, dtype=torch.int32, device=device),
        block_start=torch.empty(blocks, num_ranks, dtype=torch.int32, device=device),
        block_tokens=tokens,
    )
    counts = torch.empty(blocks * (2 * num_ranks + 2), dtype=torch.int32, device=device)
    with torch.cuda.device_of(topk_ids):
        if blocks:
            _find_destinations_kernel[(blocks,)](
                topk_ids,
                owner,
                plan.place,
                counts,
                num_tokens,
                num_rows,
                owner.shape[0],
                topk_ids.stride(0),
                R=num_ranks,
                RANKS=ranks,
                K=num_topk,
                COLUMNS=columns,
                TOKENS=tokens,
                enable_fp_fusion=False,
            )
        _write_header_kernel[(1,)](
            counts,
            plan.block_start,
            header,
            num_tokens,
            blocks,
            num_rows,
            fingerprint,
            *layer,
            R=num_ranks,
            RANKS=ranks,
            BLOCKS=max(_SUMMED_COUNTS // ranks, 1),
            WORDS=HEADER_WORDS,
            enable_fp_fusion=False,
        )
    return plan


def write_rows(x: torch.Tensor | Quantized, routing: Routing, plan: SendPlan, *, buffer: torch.Tensor) -> torch.Tensor:
    """`ep_moe.transport.collective.send_plan.write_rows` in one launch. Local, on the current stream, no host sync."""
    values, scale = (x.values, as_bytes(x.scale)) if isinstance(x, Quantized) else (x, None)
    words, unit, ids, weights = as_words(values), row_unit(values), routing.topk_ids, routing.topk_weights
    if ids.stride(1) != 1:
        ids = ids.contiguous()
    if weights.stride(1) != 1:
        weights = weights.contiguous()
    (num_tokens, num_ranks), num_topk = plan.place.shape, ids.shape[1]
    groups = 0 if scale is None else scale.shape[1]
    token_to_row = torch.empty_like(plan.place)
    if num_tokens == 0:
        return token_to_row
    copied, num_warps = copy_block(words.shape[1])
    with torch.cuda.device_of(words):
        _write_rows_kernel[(num_tokens, triton.cdiv(words.shape[1], copied))](
            plan.place,
            plan.block_start,
            SentTokens(words, words if scale is None else scale, ids, weights),
            buffer.view(torch.int32),
            buffer if scale is None else buffer.view(scale.dtype),
            token_to_row,
            words.stride(0) // unit,
            *((0, 0) if scale is None else scale.stride()),
            ids.stride(0),
            weights.stride(0),
            **_write_constants(
                num_ranks,
                plan.block_tokens,
                Words(words.shape[1], unit, copied),
                groups,
                0 if scale is None else scale.element_size(),
                (buffer.shape[1] // _UNIT_BYTES, num_topk),
            ),
            num_warps=num_warps,
            enable_fp_fusion=False,
        )
    return token_to_row


@functools.lru_cache(maxsize=_MOST_CONSTANTS)
def _write_constants(
    num_ranks: int, block_tokens: int, words: Words, groups: int, scale_bytes: int, row: tuple[int, int]
) -> dict[str, Any]:
    """Those of `_write_rows_kernel` for scales of so many bytes; `row` is its 16-byte units and K."""
    (units, num_topk), scale_words = row, triton.cdiv(groups * scale_bytes, WORD_BYTES)
    constants = {
        "TO": Destinations(R=num_ranks, RANKS=triton.next_power_of_2(num_ranks), TOKENS=block_tokens),
        "WORDS": words,
        "SCALES": ScaleGroups(G=groups, GROUPS=triton.next_power_of_2(max(groups, 1))),
        "ROW": WireRow(units, words.ROW + scale_words, num_topk, triton.next_power_of_2(num_topk)),
    }
    return constants_of(_write_rows_kernel, constants)


def read_messages(
    messages: torch.Tensor,
    row_format: RowFormat,
    *,
    rank: int,
    head: int,
    token_to_row: torch.Tensor,
    owner: torch.Tensor,
    kept: torch.Tensor,
    nan_row: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ep_moe.transport.collective.messages.read_messages` in one launch. Local, on the current stream, no host
    sync."""
    (num_ranks, height, row_bytes), num_tokens = messages.shape, token_to_row.shape[0]
    num_topk, rows, device = row_format.num_topk, num_ranks * height, messages.device
    ids = torch.empty(rows, num_topk, dtype=torch.int32, device=device)
    columns = torch.empty(num_tokens, num_ranks + 1, dtype=torch.int32, device=device)
    with torch.cuda.device_of(messages):
        _read_messages_kernel[(triton.cdiv(rows, _READ_ROWS),)](
            messages.view(torch.int32),
            messages.view(torch.int64),
            token_to_row,
            owner,
            kept,
            ids,
            columns,
            nan_row,
            height - head,
            num_tokens,
            owner.shape[0],
            **_read_constants(rank, num_ranks, head, row_format.ids_at, row_bytes, num_topk, len(nan_row)),
            enable_fp_fusion=False,
        )
    return ids, columns


@functools.lru_cache(maxsize=_MOST_CONSTANTS)
def _read_constants(
    rank: int, num_ranks: int, head: int, ids_at: int, row_bytes: int, num_topk: int, hidden: int
) -> dict[str, Any]:
    """Those of `_read_messages_kernel` for rows of so many bytes, whose ids are at byte `ids_at`."""
    columns = triton.next_power_of_2(num_topk)
    constants = {
        "FROM": Messages(OWN=rank, R=num_ranks, RANKS=triton.next_power_of_2(num_ranks + 1), HEAD=head),
        "ROW": WireRow(row_bytes // _UNIT_BYTES, ids_at // WORD_BYTES, num_topk, columns),
        "WORDS": HEADER_WORDS,
        "HIDDEN": hidden,
        "ROWS_AT_ONCE": _READ_ROWS,
    }
    return constants_of(_read_messages_kernel, constants)
