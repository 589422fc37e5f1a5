"""A step of SGLang: the most rows of any step, the rows of this one, and its layout."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import (
    get_dp_global_num_tokens,
    get_is_extend_in_batch,
    is_dp_attention_enabled,
    is_dp_max_padding,
    mask_dp_pad_moe_topk_ids,
)
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.runtime_context import get_exec, get_model, get_parallel, get_schedule, get_spec

from ep_moe.config import Layout
from ep_moe.transport import Transport

# SGLang's own upper limit of running requests without an option: it is known only once the KV cache has its size
MOST_REQUESTS = 4096

_halved: list[list[int] | None] = []  # rows of all data-parallel ranks, while halves of a step alternate


def most_tokens() -> int:
    """The most rows that this rank sends in a step, before SGLang knows its number of requests. Local.

    Rows are those of a data-parallel rank, which a2a "deepep" spreads over its attention-parallel ranks. With "none"
    nothing is sent, and every rank has as many times this as there are ranks.
    """
    schedule, graph = get_schedule(), get_exec().graph.cuda_graph_config
    chunk = schedule.chunked_prefill_size
    context_length = getattr(get_model(), "context_length", None) or 0
    prefill = chunk if chunk and chunk > 0 else max(schedule.max_prefill_tokens, context_length)
    requests = schedule.max_running_requests or MOST_REQUESTS
    captured = getattr(getattr(graph, "decode", None), "max_bs", None) or 0
    decode = max(requests, captured) * max(get_spec().speculative_num_draft_tokens or 1, 1)
    rows = prefill + decode if schedule.enable_mixed_chunk else max(prefill, decode)
    return -(-rows // get_parallel().attn_tp_size)


def bound(num_rows: int, transport: Transport) -> int | None:
    """The most rows that any rank sends in this step, equal on all ranks; None if unknown. Local, no device sync."""
    if transport.num_ranks == 1:
        return num_rows
    counts = (_halved[-1] if _halved else get_dp_global_num_tokens()) if is_dp_attention_enabled() else None
    if not counts:
        return None
    width = get_parallel().attn_tp_size
    return min(-(-max(counts) // width) * width, transport.config.max_tokens_per_rank)


@contextlib.contextmanager
def halved() -> Iterator[None]:
    """In it `bound` is that of the whole step, whose two halves alternate: neither has more rows. Local."""
    _halved.append(get_dp_global_num_tokens())
    try:
        yield
    finally:
        _halved.pop()


def layout_of(layouts: tuple[Layout, ...]) -> Layout:
    """The layout of this step: the last if any rank has a prompt in it, which all ranks know, else the first. Local."""
    return layouts[-1] if get_is_extend_in_batch() else layouts[0]


def standard(topk_output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The router's ids and weights. Errors: ValueError for another format of its output. Local."""
    if not TopKOutputChecker.format_is_standard(topk_output):
        raise ValueError(f"the router's output is {topk_output.format}, needed is the standard one")
    return topk_output.topk_ids, topk_output.topk_weights


def without_padding(topk_ids: torch.Tensor) -> torch.Tensor:
    """The ids, -1 in rows with which SGLang fills up those of data-parallel ranks, if it wants them masked. Local."""
    if not (topk_ids.is_cuda and envs.SGLANG_OPT_MASK_DP_PAD_MOE.get() and is_dp_max_padding()):
        return topk_ids
    masked = topk_ids.clone()
    mask_dp_pad_moe_topk_ids(masked)
    return masked
