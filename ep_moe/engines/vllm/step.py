"""What a rank brings to a round: which rows are its own, which are padding, and how many any rank has."""

from typing import Any

import torch
import vllm.envs as envs
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.platforms import current_platform
from vllm.v1.worker import ubatching

from ep_moe.engines.common.rows import RowShare


def share_of(parallel: Any) -> RowShare:
    """The share of this rank; `parallel`: vLLM's FusedMoEParallelConfig. Local."""
    alike = parallel.ep_size // max(parallel.dp_size, 1) if parallel.use_ep else 1
    split = parallel.is_sequence_parallel
    return RowShare(sharers=1 if split else alike, rank=parallel.ep_rank % alike, chunks=alike if split else 1)


def current_slot() -> int:
    """The slot of the calling micro-batch. Local."""
    return int(ubatching.dbo_current_ubatch_id())


def in_micro_batch() -> bool:
    """Whether the caller is one of two micro-batches that alternate. Local."""
    return bool(ubatching.dbo_enabled())


def tokens_of_ranks(num_rows: int) -> tuple[int, int]:
    """Tokens of this step before they are shared: the most of any data-parallel rank, and of all of them.

    Args:
        num_rows: rows that the layer is called with, for engines without data parallelism.
    Local, no device sync: the engine has the counts on the host.
    """
    metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
    if metadata is None:
        return num_rows, num_rows
    counts = metadata.num_tokens_across_dp_cpu
    return int(counts.max()), int(counts.sum())


def shared_experts_beside() -> bool:
    """Whether vLLM runs shared experts of this step on its auxiliary stream, beside the routed ones; if not, they run
    between the halves of the combine.

    vLLM asks without their rows. Those of the forward context count, before sequence parallelism spreads them; if it
    names none, the answer is no. Local, no device sync.
    """
    context = get_forward_context() if is_forward_context_available() else None
    described: Any = getattr(context, "batch_descriptor", None)
    mask: Any = getattr(context, "is_padding", None)
    if in_micro_batch() or envs.VLLM_DISABLE_SHARED_EXPERTS_STREAM or not current_platform.is_cuda():
        return False
    if described is None and mask is None:
        return False
    rows = mask.shape[0] if described is None else described.num_tokens
    return bool(rows <= envs.VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD)


def without_padding(topk_ids: torch.Tensor, share: RowShare) -> torch.Tensor:
    """The ids [T, K], -1 in rows that are padding, if the engine names any. Local, no device sync."""
    context = get_forward_context() if is_forward_context_available() else None
    mask: torch.Tensor | None = getattr(context, "is_padding", None)
    num_rows, offset = topk_ids.shape[0], getattr(ubatching, "dbo_current_ubatch_token_offset", None)
    if mask is None or (offset is None and ubatching.dbo_enabled()):
        return topk_ids  # in 0.26 the start of a micro-batch is unknown
    first = 0 if offset is None else offset()
    if share.chunks > 1:
        first += share.rank * num_rows
    mask = mask[first : first + num_rows]
    missing = num_rows - mask.shape[0]  # rows that sequence parallelism has added behind the last one
    padded = mask if missing <= 0 else torch.nn.functional.pad(mask, (0, missing), value=True)
    return topk_ids.masked_fill(padded.unsqueeze(1), -1)
