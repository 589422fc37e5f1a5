"""The dataclasses of the layouts: rows as they arrive, and as experts compute on them.

Letters: N received token rows, K top-k, H hidden, V stored values of a row (H, or H / 2 if two share a byte), G
scale groups, L local experts, C = R * M rows per expert in BATCHED.
"""

import dataclasses

import torch

from ep_moe.quant import QuantScheme


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenRows:
    """Tokens as they arrive at a rank, one row for each (source rank, source token), before any packing.

    An expert occurs at most once in a row of `local_topk_ids` (`merge_repeats`).
    """

    x: torch.Tensor  # [N, V] in the model's dtype or the scheme's
    scale: torch.Tensor | None  # [N, G] in the scheme's scale dtype, None if the scheme has no scales
    local_topk_ids: torch.Tensor  # [N, K] int32, local expert, -1 none or on another rank
    topk_weights: torch.Tensor  # [N, K] float32, 0 where the id is -1


class _Signed:
    """An attribute of batches that is no field, so that a copy by `dataclasses.replace` has none.

    Batches with the same signature differ in the addresses and values of their tensors alone, and experts look for
    nothing else. A transport may set it, by `sign`.
    """

    __slots__ = ("signature",)
    signature: object

    def sign(self, signature: object) -> None:
        """Set the signature, which is hashable. Local."""
        object.__setattr__(self, "signature", signature)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertBatch(_Signed):
    """The fields of all layouts. Row i of expert e is `expert_row_start[e] + i`, for i < `expert_num_tokens[e]`.

    If `row_index` is set, `x` is a pool of rows, and that row of the batch is row `row_index[expert_row_start[e] + i]`
    of it. Rows that belong to no token have undefined values, possibly NaN, and are never read.
    """

    x: torch.Tensor  # the subclass documents the shape
    scale: torch.Tensor | None  # x's shape with G instead of V, in the scheme's scale dtype; rows contiguous
    scheme: QuantScheme
    dtype: torch.dtype  # the model's, also of the experts' output
    expert_row_start: torch.Tensor  # [L] int32
    expert_num_tokens: torch.Tensor  # [L] int32
    row_index: torch.Tensor | None  # [rows] int32
    expected_rows: int  # hint known on the host: average rows of a local expert, rounded up

    @property
    def hidden(self) -> int:
        """H."""
        return self.scheme.payload.row_width(self.x.shape[-1])

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.expert_num_tokens.shape[0]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of the experts' output: x's, with H; or [rows of row_index, H] if rows come from a pool."""
        rows = self.x.shape[:-1] if self.row_index is None else self.row_index.shape
        return (*rows, self.hidden)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Batched(ExpertBatch):
    """`x` [L, C, V], `scale` [L, C, G] with strides (C*G, 1, C); expert e starts at e*C.

    As in PPLX, DeepEP low latency, vLLM BatchedExperts and SGLang masked, except for the order of scales (PPLX).
    """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compact(ExpertBatch):
    """`x` [rows, V], `scale` [rows, G] with strides (1, rows); starts are an aligned prefix sum.

    `rows` is an upper bound known on the host; the experts may use fewer. As DeepGEMM contiguous.
    """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flat(ExpertBatch):
    """`x` [N, V], the received rows themselves; `row_index` lists them expert by expert (DeepEP normal, vLLM Standard).

    The experts apply the weights here: their output is [N, H], row n the weighted sum over this rank's experts.
    Entries of `row_index` that belong to no expert are undefined.
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
    """A batch, and what the sum of its results needs."""

    batch: ExpertBatch
    token_to_row: torch.Tensor  # [N, K] int32, the row that computes token n's k-th expert, -1 none
    topk_weights: torch.Tensor  # [N, K] float32, those of the rows that were packed
