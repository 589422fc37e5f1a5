"""Launchers of the Triton kernels that plan and write the send buffer, and read messages of a fixed size. They run on a
CPU under TRITON_INTERPRET=1.

Letters: T tokens on this rank, K top-k, R ranks, P physical experts, G scale groups.
"""

import functools
from typing import Any

import torch
import triton

from ep_moe.kernel_launch.kernel import constants_of
from ep_moe.kernels.rows.permute import Placed, ScaleGroups, Words
from ep_moe.kernels.rows.wire import (
    Destinations,
    Lists,
    Message,
    MessageShape,
    ReadMessages,
    SentTokens,
    WireRow,
    _find_destinations_kernel,
    _read_messages_kernel,
    _write_header_kernel,
    _write_message_kernel,
    _write_rows_kernel,
)
from ep_moe.layout import Place, merge_repeats
from ep_moe.layout.frame import Counts, Frame
from ep_moe.layout.triton import UNIT_WORDS, PlaceShape, as_words, copy_block, is_one_launch, row_unit
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


def _dense(routing: Routing) -> list[torch.Tensor]:
    """Ids and weights, whose columns are next to each other."""
    return [t if t.stride(1) == 1 else t.contiguous() for t in (routing.topk_ids, routing.topk_weights)]


def write_rows(x: torch.Tensor | Quantized, routing: Routing, plan: SendPlan, *, buffer: torch.Tensor) -> torch.Tensor:
    """`ep_moe.transport.collective.send_plan.write_rows` in one launch. Local, on the current stream, no host sync."""
    values, scale = (x.values, as_bytes(x.scale)) if isinstance(x, Quantized) else (x, None)
    words, unit, (ids, weights) = as_words(values), row_unit(values), _dense(routing)
    num_tokens, num_ranks = plan.place.shape
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
                (num_ranks, plan.block_tokens),
                Words(words.shape[1], unit, copied),
                (0, 0) if scale is None else (scale.shape[1], scale.element_size()),
                (buffer.shape[1] // _UNIT_BYTES, ids.shape[1]),
            ),
            num_warps=num_warps,
            enable_fp_fusion=False,
        )
    return token_to_row


def write_message(
    x: torch.Tensor | Quantized,
    routing: Routing,
    message: torch.Tensor,
    *,
    fingerprint: int,
    layer: tuple[int, int],
    num_physical: int,
    head: int,
    num_tokens: torch.Tensor | None,
) -> None:
    """`ep_moe.transport.collective.messages.write_message` in one launch. Local, on the current stream, no host
    sync."""
    values, scale = (x.values, as_bytes(x.scale)) if isinstance(x, Quantized) else (x, None)
    words, unit, (ids, weights) = as_words(values), row_unit(values), _dense(routing)
    copied, num_warps = copy_block(words.shape[1])
    scales = message if scale is None else message.view(scale.dtype)
    with torch.cuda.device_of(words):
        _write_message_kernel[(words.shape[0] + 1, triton.cdiv(words.shape[1], copied))](
            SentTokens(words, words if scale is None else scale, ids, weights),
            Message(message.view(torch.int32), scales, message.view(torch.int64), num_tokens),
            words.shape[0],
            num_physical,
            fingerprint,
            *layer,
            words.stride(0) // unit,
            *((0, 0) if scale is None else scale.stride()),
            ids.stride(0),
            weights.stride(0),
            **_message_constants(
                head,
                Words(words.shape[1], unit, copied),
                (0, 0) if scale is None else (scale.shape[1], scale.element_size()),
                (message.shape[1] // _UNIT_BYTES, ids.shape[1]),
            ),
            num_warps=num_warps,
            enable_fp_fusion=False,
        )


def _row_constants(words: Words, scales: tuple[int, int], row: tuple[int, int]) -> dict[str, Any]:
    """How a row of `row` = (16-byte units, K) is written; `scales` is how many a token has, and their bytes."""
    (groups, scale_bytes), (units, num_topk) = scales, row
    scale_words = triton.cdiv(groups * scale_bytes, WORD_BYTES)
    return {
        "WORDS": words,
        "SCALES": ScaleGroups(G=groups, GROUPS=triton.next_power_of_2(max(groups, 1))),
        "ROW": WireRow(units, words.ROW + scale_words, num_topk, triton.next_power_of_2(num_topk)),
    }


@functools.lru_cache(maxsize=_MOST_CONSTANTS)
def _write_constants(
    to: tuple[int, int], words: Words, scales: tuple[int, int], row: tuple[int, int]
) -> dict[str, Any]:
    """Those of `_write_rows_kernel` for `to` = (ranks, tokens of a block); see `_row_constants`."""
    destinations = Destinations(R=to[0], RANKS=triton.next_power_of_2(to[0]), TOKENS=to[1])
    return constants_of(_write_rows_kernel, {"TO": destinations, **_row_constants(words, scales, row)})


@functools.lru_cache(maxsize=_MOST_CONSTANTS)
def _message_constants(head: int, words: Words, scales: tuple[int, int], row: tuple[int, int]) -> dict[str, Any]:
    """Those of `_write_message_kernel`; see `_row_constants`."""
    return constants_of(_write_message_kernel, {"HEAD": head, **_row_constants(words, scales, row)})


def read_messages(
    messages: torch.Tensor,
    row_format: RowFormat,
    *,
    rank: int,
    head: int,
    columns: torch.Tensor,
    owner: torch.Tensor,
    own: tuple[int, int],
    kept: torch.Tensor,
    nan_row: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, Place | None]:
    """`ep_moe.transport.collective.messages.read_messages` in two launches, or as a part of packing a few rows: then
    ids, weights and columns are written by what it returns. Local, on the current stream, no host sync."""
    (num_ranks, height, row_bytes), num_topk = messages.shape, row_format.num_topk
    shape = torch.Size((num_ranks * height, num_topk))
    ids = torch.empty(shape, dtype=torch.int32, device=messages.device)
    weights = row_format.read(messages.view(shape[0], row_bytes))[2].topk_weights
    read = ReadMessages(messages.view(torch.int32), messages.view(torch.int64), owner, kept, ids, columns, nan_row)

    def launch(programs: int, placed: Placed, settings: tuple[int, ...], lists: PlaceShape | None) -> None:
        with torch.cuda.device_of(messages):
            _read_messages_kernel[(programs,)](
                read,
                placed,
                height - head,
                len(columns),
                owner.shape[0],
                *settings,
                **_read_constants(
                    (rank, num_ranks, head, row_format.ids_at), (row_bytes, num_topk, len(nan_row)), lists
                ),
                enable_fp_fusion=False,
            )

    if not is_one_launch(shape):
        launch(triton.cdiv(shape[0], _READ_ROWS), Placed(*[None] * len(Placed._fields)), (0,) * 5, None)
        return *merge_repeats(ids, weights, first=own[0], last=own[1]), None
    local_ids = torch.empty_like(ids)
    local_weights = torch.empty(shape, dtype=torch.float32, device=messages.device)

    def place(frame: Frame, counts: Counts) -> None:
        placed = Placed(ids, weights, local_ids, local_weights, *counts)
        lists = PlaceShape.of(shape, own, (num_topk, weights.stride(0)), frame)
        assert lists is not None
        launch(1, placed, (*own, weights.stride(0), frame.height, frame.alignment), lists)

    return local_ids, local_weights, place


@functools.lru_cache(maxsize=_MOST_CONSTANTS)
def _read_constants(
    of: tuple[int, int, int, int], row: tuple[int, int, int], lists: PlaceShape | None
) -> dict[str, Any]:
    """Those of `_read_messages_kernel` by (rank, ranks, head, the byte of a row's ids), (bytes of a row, K, H) and the
    lists that it makes."""
    (rank, num_ranks, head, ids_at), (row_bytes, num_topk, hidden) = of, row
    counted = {} if lists is None else lists.constants
    shape = MessageShape(
        OWN=rank,
        R=num_ranks,
        RANKS=triton.next_power_of_2(num_ranks + 1),
        HEAD=head,
        WORDS=HEADER_WORDS,
        HIDDEN=hidden,
        ROWS_AT_ONCE=_READ_ROWS,
    )
    constants = {
        "FROM": shape,
        "ROW": WireRow(row_bytes // _UNIT_BYTES, ids_at // WORD_BYTES, num_topk, triton.next_power_of_2(num_topk)),
        "IDS": counted.pop("IDS", None),
        "LISTS": Lists(**counted) if counted else None,
    }
    return constants_of(_read_messages_kernel, constants)
