"""A step of SGLang: the most rows of any step, the rows of this one, and its layout."""

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import (
    get_dp_global_num_tokens,
    get_is_extend_in_batch,
    is_dp_attention_enabled,
    is_dp_max_padding,
    mask_dp_pad_moe_topk_ids,
)
from sglang.srt.runtime_context import get_exec, get_model, get_parallel, get_schedule, get_spec

from ep_moe.config import Layout
from ep_moe.engines.common.rows import RowShare
from ep_moe.transport import Transport

# SGLang's own upper limit of running requests without an option: it is known only once the KV cache has its size
MOST_REQUESTS = 4096


def most_tokens() -> int:
    """The most rows that this rank sends in a step, before SGLang knows its number of requests. Local.

    Rows are those of a data-parallel rank, of which each of its attention-parallel ranks sends a part, in both modes:
    with a2a "deepep" SGLang spreads them, with "none" we take a slice of those of all ranks.
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


def bound(num_rows: int, share: RowShare, transport: Transport) -> int | None:
    """The most rows that any rank sends in this step, equal on all ranks; None if unknown. Local, no device sync.

    Args: num_rows: that the layer is called with. share: this rank's part of them.
    """
    if share.sharers > 1 or transport.num_ranks == 1:
        return share.most(num_rows)
    counts = get_dp_global_num_tokens() if is_dp_attention_enabled() else None
    if not counts:
        return None
    width = get_parallel().attn_tp_size
    return min(-(-max(counts) // width) * width, transport.config.max_tokens_per_rank)


def layout_of(layouts: tuple[Layout, ...]) -> Layout:
    """The layout of this step: the last if any rank has a prompt in it, which all ranks know, else the first. Local."""
    return layouts[-1] if get_is_extend_in_batch() else layouts[0]


def without_padding(topk_ids: torch.Tensor) -> torch.Tensor:
    """The ids, -1 in rows with which SGLang fills up those of data-parallel ranks, if it wants them masked. Local."""
    if not (topk_ids.is_cuda and envs.SGLANG_OPT_MASK_DP_PAD_MOE.get() and is_dp_max_padding()):
        return topk_ids
    masked = topk_ids.clone()
    mask_dp_pad_moe_topk_ids(masked)
    return masked
