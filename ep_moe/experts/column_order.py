"""Tokens with their columns in the order of each expert's w13, for weights of GPTQ's act-order: slow, by torch.

Letters: N received token rows, H hidden, V stored values of a row, L local experts, C rows of an expert in BATCHED.
"""

import dataclasses
import functools
import logging

import torch

from ep_moe.layout import Batched, Compact, ExpertBatch
from ep_moe.quant import as_bytes

_PORTION_BYTES = 1 << 26  # of columns that are gathered at a time, as int64
_log = logging.getLogger(__name__)


@functools.cache
def warn_slow() -> None:
    """Say, once, what weights in act-order cost. Local."""
    _log.warning("columns of w13 lie in an order of each expert (act-order): tokens are copied in it before each call")


def in_column_order(batch: ExpertBatch, order: torch.Tensor) -> ExpertBatch:
    """A copy of a batch whose rows have column order[e, k] of their token as column k, e their expert.

    Args:
        order: [L, H] int64. The payload has one value for each column, and no scale for some of the columns alone.
    Returns: the same rows, COMPACT if they come from a pool by `row_index`, else in the same layout. Rows of no token
        have undefined values. Local, on the current stream, no host sync, CUDA-graph safe.
    """
    values, scale = as_bytes(batch.x), batch.scale
    if batch.row_index is not None:
        pool = batch.row_index.long().clamp(0, max(values.flatten(0, -2).shape[0] - 1, 0))
        values = values.flatten(0, -2)[pool]
        scale = None if scale is None else as_bytes(scale.flatten(0, -2))[pool].view(scale.dtype)
    rows = values.flatten(0, -2)
    ordered, step = torch.empty_like(rows), max(_PORTION_BYTES // (8 * rows.shape[1]), 1)
    for first in range(0, rows.shape[0], step):
        part = slice(first, first + step)
        number = torch.arange(first, first + rows[part].shape[0], device=rows.device).unsqueeze(1)
        ends = batch.expert_row_start + batch.expert_num_tokens
        expert = ((number >= batch.expert_row_start) & (number < ends)).int().argmax(1)
        torch.gather(rows[part], 1, order[expert], out=ordered[part])
    x = ordered.view(values.shape).view(batch.x.dtype)
    if isinstance(batch, Batched) and batch.row_index is None:
        return dataclasses.replace(batch, x=x)
    return Compact(
        x=x,
        scale=scale,
        scheme=batch.scheme,
        dtype=batch.dtype,
        expert_row_start=batch.expert_row_start,
        expert_num_tokens=batch.expert_num_tokens,
        row_index=None,
        expected_rows=batch.expected_rows,
    )
