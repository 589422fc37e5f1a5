"""Allocation of a batch, shared by all implementations of packing, which then fill it.

Letters: N received token rows, K top-k, V stored values of a row, G scale groups, L local experts, C rows of an
expert in BATCHED.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ep_moe.config import Layout
from ep_moe.layout.base import Batched, Compact, ExpertBatch, Flat, Packed, TokenRows
from ep_moe.quant import QuantScheme


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The empty tensors of a batch, and the sizes that determine where rows go."""

    layout: Layout
    num_local_experts: int
    max_rows: int  # upper bound of the rows of all experts
    alignment: int  # of an expert's first row in COMPACT, else 1
    height: int  # rows that share a matrix of scales: C in BATCHED, all rows in COMPACT, N in FLAT
    x: torch.Tensor  # [L or 1, height, V]; in FLAT the received rows themselves if they are contiguous
    scale: torch.Tensor | None  # [L or 1, height, G], rows contiguous
    row_index: torch.Tensor | None  # [max_rows] int32, FLAT

    @property
    def num_rows(self) -> int:
        """The capacity in rows."""
        return self.x.shape[0] * self.x.shape[1] if self.row_index is None else self.row_index.shape[0]

    def finish(
        self,
        rows: TokenRows,
        scheme: QuantScheme,
        dtype: torch.dtype,
        expert_row_start: torch.Tensor,
        expert_num_tokens: torch.Tensor,
        token_to_row: torch.Tensor,
    ) -> Packed:
        """The batch, once the tensors are filled. Local, no host sync."""
        common: dict[str, Any] = {
            "scheme": scheme,
            "dtype": dtype,
            "expert_row_start": expert_row_start,
            "expert_num_tokens": expert_num_tokens,
            "row_index": self.row_index,
            "expected_rows": math.ceil(self.max_rows / max(self.num_local_experts, 1)),
        }
        batch: ExpertBatch
        if self.layout is Layout.BATCHED:
            batch = Batched(x=self.x, scale=self.scale, **common)
        elif self.layout is Layout.COMPACT:
            batch = Compact(x=self.x[0], scale=None if self.scale is None else self.scale[0], **common)
        else:
            batch = Flat(
                x=self.x[0],
                scale=None if self.scale is None else self.scale[0],
                local_topk_ids=rows.local_topk_ids,
                topk_weights=rows.topk_weights,
                token_to_row=token_to_row,
                **common,
            )
        return Packed(batch=batch, token_to_row=token_to_row, topk_weights=rows.topk_weights)


class Counts(NamedTuple):
    """Where rows go, except for their order within a block of tokens."""

    before: torch.Tensor  # [blocks, L] int32, rows of each expert in earlier blocks
    expert_num_tokens: torch.Tensor  # [L] int32
    expert_row_start: torch.Tensor  # [L] int32


Place = Callable[[Frame, Counts], None]  # fills the counts, and ids and weights of the rows that are packed


def compact_rows(max_rows: int, num_local_experts: int, alignment: int) -> int:
    """The rows of a batch in COMPACT: the most that `max_rows` rows can occupy with alignment.

    Example: 10 rows on 3 experts with alignment 4, each of which may leave 3 unused: 10 + 3 * 3 = 19, so 16 rows.
    """
    used_experts = min(num_local_experts, max_rows)
    return (max_rows + used_experts * (alignment - 1)) // alignment * alignment


def make_frame(
    rows: TokenRows,
    layout: Layout,
    *,
    num_local_experts: int,
    capacity: int,
    alignment: int = 1,
    max_rows: int | None = None,
) -> Frame:
    """Allocate a batch for `rows`: COMPACT has `compact_rows` of `max_rows`. Local, no host sync."""
    (num_tokens, num_topk), num_values = rows.local_topk_ids.shape, rows.x.shape[1]
    if max_rows is None:
        max_rows = num_tokens * min(num_topk, num_local_experts)
    alignment = alignment if layout is Layout.COMPACT else 1
    experts, height = 1, num_tokens
    if layout is Layout.BATCHED:
        experts, height = num_local_experts, capacity
    elif layout is Layout.COMPACT:
        height = compact_rows(max_rows, num_local_experts, alignment)
    like: dict[str, Any] = {"device": rows.x.device}
    pooled = layout is Layout.FLAT
    if pooled and rows.x.is_contiguous():
        x = rows.x.unsqueeze(0)
    else:
        x = torch.empty(experts, height, num_values, dtype=rows.x.dtype, **like)
    scale = None
    if rows.scale is not None:
        scale = torch.empty(experts, rows.scale.shape[1], height, dtype=rows.scale.dtype, **like).transpose(1, 2)
    return Frame(
        layout=layout,
        num_local_experts=num_local_experts,
        max_rows=max_rows,
        alignment=alignment,
        height=height,
        x=x,
        scale=scale,
        row_index=torch.empty(max_rows, dtype=torch.int32, **like) if pooled else None,
    )
