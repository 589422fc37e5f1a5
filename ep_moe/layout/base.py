"""What rows look like as they arrive, and as experts compute on them: the dataclasses of the layouts.

Letters: N received token rows, K top-k, H hidden, V stored values of a row (H, or H / 2 where two share a byte), G
scale groups, L local experts, C = R * M rows per expert in BATCHED.
"""

import dataclasses

import torch

from ep_moe.quant import QuantScheme


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenRows:
    """Tokens as they arrive at a rank, one row for each (source rank, source token), before any packing.

    An expert stands at most once in a row of `local_topk_ids` (`merge_repeats`).
    """

    x: torch.Tensor  # [N, V] in the model's dtype or the scheme's
    scale: torch.Tensor | None  # [N, G] in the scheme's scale dtype, None where it does not scale
    local_topk_ids: torch.Tensor  # [N, K] int32, local expert, -1 none here
    topk_weights: torch.Tensor  # [N, K] float32, 0 where the id is -1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertBatch:
    """What every layout carries. Row i of expert e is `expert_row_start[e] + i`, for i < `expert_num_tokens[e]`.

    Where `row_index` is set, that row of the batch reads row `row_index[expert_row_start[e] + i]` of `x`, a pool.
    Rows that belong to no token hold anything, NaN included, and are never read.
    """

    x: torch.Tensor  # the subclass says the shape
    scale: torch.Tensor | None  # of the scheme's scale dtype, a last dimension of G instead of V, rows contiguous
    scheme: QuantScheme
    dtype: torch.dtype  # the model's, which the experts' output has
    expert_row_start: torch.Tensor  # [L] int32
    expert_num_tokens: torch.Tensor  # [L] int32
    row_index: torch.Tensor | None  # [rows] int32
    expected_rows: int  # host hint: rows of an average local expert, rounded up

    @property
    def hidden(self) -> int:
        """H."""
        return self.scheme.row_width(self.x.shape[-1])

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.expert_num_tokens.shape[0]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of the experts' output: x's, with H; or [rows of row_index, H] where rows come from a pool."""
        rows = self.x.shape[:-1] if self.row_index is None else self.row_index.shape
        return (*rows, self.hidden)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Batched(ExpertBatch):
    """`x` [L, C, V], `scale` [L, C, G] with strides (C*G, 1, C); expert e starts at e*C.

    The same as PPLX, DeepEP low latency, vLLM BatchedExperts and SGLang masked, but for the order of scales (PPLX).
    """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compact(ExpertBatch):
    """`x` [rows, V], `scale` [rows, G] with strides (1, rows); starts are an aligned prefix sum.

    `rows` is a bound that the host knows; it may exceed what the experts use.
    The same as DeepGEMM contiguous.
    """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flat(ExpertBatch):
    """`x` [N, V], the received rows themselves; `row_index` lists them expert by expert (DeepEP normal, vLLM Standard).

    The experts weigh and sum here: their output is [N, H], row n the weighted sum over this rank's experts. Entries of
    `row_index` that are no expert's row hold anything.
    """

    local_topk_ids: torch.Tensor  # [N, K] int32, -1 none
    topk_weights: torch.Tensor  # [N, K] float32
    token_to_row: torch.Tensor  # [N, K] int32, row of the batch that computes this token's k-th expert, -1 none

    @property
    def output_shape(self) -> tuple[int, ...]:
        """[N, H]: a row for each received token."""
        return self.x.shape[0], self.hidden


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A batch and the way back: `token_to_row` [N, K] int32 is the row that computes token n's k-th expert, -1 none."""

    batch: ExpertBatch
    token_to_row: torch.Tensor
