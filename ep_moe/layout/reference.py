"""Packing and unpacking in plain torch: the CPU implementation, and the reference for the kernels' tests.

Letters: N received token rows, K top-k, H hidden, G scale groups, L local experts, C rows of an expert in BATCHED.
"""

from typing import Any

import torch

from ep_moe.config import Layout
from ep_moe.layout.base import Packed, TokenRows
from ep_moe.layout.frame import Frame, make_frame
from ep_moe.quant import QuantScheme, as_bytes


def merge_repeats(
    ids: torch.Tensor, weights: torch.Tensor, *, first: int = 0, last: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ep_moe.layout.merge_repeats`. Local, no host sync."""
    here = (ids >= max(first, 0)) if last is None else (ids >= max(first, 0)) & (ids < last)
    merged_ids, merged_weights = torch.where(here, ids - first, -1).int(), torch.where(here, weights, 0.0)
    for column in range(1, ids.shape[1]):
        for earlier in range(column):
            repeat = (merged_ids[:, column] >= 0) & (merged_ids[:, earlier] == merged_ids[:, column])
            merged_weights[:, earlier] += torch.where(repeat, merged_weights[:, column], 0.0)
            merged_weights[:, column].masked_fill_(repeat, 0.0)
            merged_ids[:, column].masked_fill_(repeat, -1)
    return merged_ids, merged_weights


def _place_rows(ids: torch.Tensor, frame: Frame) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (expert_row_start [L], expert_num_tokens [L], token_to_row [N, K]), all int32."""
    experts, flat = frame.num_local_experts, ids.reshape(-1).long()
    key = torch.where(flat >= 0, flat, experts)
    counts = torch.bincount(key, minlength=experts + 1)[:experts]
    if frame.layout is Layout.BATCHED:
        starts = torch.arange(experts, device=flat.device) * frame.height
    else:
        aligned = (counts + frame.alignment - 1) // frame.alignment * frame.alignment
        starts = torch.cumsum(aligned, 0) - aligned
    order = torch.argsort(key, stable=True)
    sorted_key = key[order]
    first_of_expert = torch.cat([torch.cumsum(counts, 0) - counts, counts.sum().reshape(1)])
    index_in_expert = torch.arange(flat.numel(), device=flat.device) - first_of_expert[sorted_key]
    start_of_key = torch.cat([starts, starts.new_zeros(1)])
    row = torch.empty_like(flat)
    row[order] = start_of_key[sorted_key] + index_in_expert
    token_to_row = torch.where(flat >= 0, row, -1).reshape(ids.shape)
    return starts.int(), counts.int(), token_to_row.int()


def pack(rows: TokenRows, layout: Layout, *, scheme: QuantScheme, dtype: torch.dtype, **sizes: Any) -> Packed:
    """`ep_moe.layout.pack`, whose other arguments are `sizes`. Local, reads counts back to the host."""
    frame = make_frame(rows, layout, **sizes)
    starts, counts, token_to_row = _place_rows(rows.local_topk_ids, frame)
    host_counts = counts.tolist()
    largest, limits = max(host_counts, default=0), {"max_expert_rows": rows.max_expert_rows}
    if layout is Layout.BATCHED:
        limits = {"capacity": sizes["capacity"], **limits}
    for name, limit in limits.items():
        if limit is not None and largest > limit:
            raise ValueError(f"an expert has {largest} rows, which exceeds {name} ({limit})")
    if sum(host_counts) > frame.max_rows:
        raise ValueError(f"experts have {sum(host_counts)} rows, which exceeds max_rows ({frame.max_rows})")
    _copy_rows(rows, frame, token_to_row)
    return frame.finish(rows, scheme, dtype, starts, counts, token_to_row)


def _copy_rows(rows: TokenRows, frame: Frame, token_to_row: torch.Tensor) -> None:
    """Fill the frame with each token's values and scales."""
    token, column = torch.nonzero(token_to_row >= 0, as_tuple=True)
    row = token_to_row[token, column].long()
    if frame.row_index is not None:
        frame.row_index[row] = token.int()
        if frame.scale is not None and rows.scale is not None:
            frame.scale[0].copy_(rows.scale)
        if frame.x.data_ptr() != rows.x.data_ptr():
            frame.x[0].copy_(rows.x)
        return
    as_bytes(frame.x).view(-1, frame.x.shape[-1])[row] = as_bytes(rows.x)[token]
    if frame.scale is not None and rows.scale is not None:
        height = max(frame.height, 1)
        as_bytes(frame.scale)[row // height, row % height] = as_bytes(rows.scale)[token]


def weighted_sum(
    y: torch.Tensor,
    token_to_row: torch.Tensor,
    topk_weights: torch.Tensor | None,
    *,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ep_moe.layout.weighted_sum`. Local, on the current stream; host sync for the number of valid ids."""
    y = y.reshape(-1, y.shape[-1])
    total = torch.zeros(token_to_row.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for column in range(token_to_row.shape[1]):
        token = torch.nonzero(token_to_row[:, column] >= 0).squeeze(1)
        part = y[token_to_row[token, column].long()].float()
        total[token] += part if topk_weights is None else topk_weights[token, column].unsqueeze(1) * part
    if shared is not None:
        total += shared.float()
    return total.to(y.dtype) if out is None else out.copy_(total)
