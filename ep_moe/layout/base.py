"""The dataclasses of the layouts: rows as they arrive, and as experts compute on them.

Letters: N received token rows, K top-k, H hidden, V stored values of a row (H, or H / 2 if two share a byte), G
scale groups, L local experts, C = R * M rows per expert in BATCHED.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ep_moe.config import Layout
from ep_moe.kernel_launch.allocation import Workspace
from ep_moe.quant import Quantized, QuantScheme


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenRows:
    """Tokens as they arrive at a rank, before any packing: a row for each (source rank, source token), or for each of
    its experts here.

    An expert occurs at most once in a row of `local_topk_ids` (`merge_repeats`).
    """

    x: torch.Tensor  # [N, V] in the model's dtype or the scheme's
    scale: torch.Tensor | None  # [N, G] in the scheme's scale dtype, None if the scheme has no scales
    local_topk_ids: torch.Tensor  # [N, K] int32, local expert, -1 none or on another rank
    topk_weights: torch.Tensor  # [N, K] float32, 0 where the id is -1
    max_expert_rows: int | None = None  # the most rows of any expert, if the host knows a bound below N


ADDRESSED = ("x", "scale", "expert_row_start", "expert_num_tokens", "row_index", "token_to_row", "topk_weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertBatch:
    """The fields of all layouts. Row i of expert e is `expert_row_start[e] + i`, for i < `expert_num_tokens[e]`.

    If `row_index` is set, `x` is a pool of rows, and that row of the batch is row `row_index[expert_row_start[e] + i]`
    of it. Rows that belong to no token have undefined values, possibly NaN, and are never read.

    It has no slots, because a `BatchTemplate` sets all fields at once, and leaves out tensors until they are read.
    """

    x: torch.Tensor  # the subclass documents the shape
    scale: torch.Tensor | None  # x's shape with G instead of V, in the scheme's scale dtype; rows contiguous
    scheme: QuantScheme
    dtype: torch.dtype  # the model's, also of the experts' output
    expert_row_start: torch.Tensor  # [L] int32
    expert_num_tokens: torch.Tensor  # [L] int32
    row_index: torch.Tensor | None  # [rows] int32
    expected_rows: int  # hint known on the host: average rows of a local expert, rounded up

    # Batches of one template differ in the addresses and values of their tensors alone: experts compare templates.
    # No field, so that a copy by `dataclasses.replace` has none.
    template: ClassVar["BatchTemplate | None"] = None
    memory: ClassVar[torch.Tensor | None] = None  # of the tensors that the template allocates

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> torch.Tensor:
            """Make a tensor that the template has left out; called for missing attributes only."""
            template = self.template
            if template is None or name not in template.left_out:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            tensor = self.__dict__[name] = template.view(self.memory, name)
            return tensor

    @property
    def addressed(self) -> tuple[str, ...]:
        """The names of the tensors that kernels read, of `ADDRESSED`, in an order of the template. Local."""
        if self.template is not None:
            return self.template.addressed
        return tuple(name for name in ADDRESSED if getattr(self, name, None) is not None)

    @property
    def addresses(self) -> list[int]:
        """The addresses of `addressed`, without making tensors that were left out. Local."""
        template, memory = self.template, self.memory
        if template is not None and memory is not None:
            found = [*map(memory.data_ptr().__add__, template.offsets), *template.shared]
            return found + [getattr(self, name).data_ptr() for name in template.given] if template.given else found
        return [getattr(self, name).data_ptr() for name in self.addressed]

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batched(ExpertBatch):
    """`x` [L, C, V], `scale` [L, C, G] with strides (C*G, 1, C); expert e starts at e*C.

    As in PPLX, DeepEP low latency, vLLM BatchedExperts and SGLang masked, except for the order of scales (PPLX).
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compact(ExpertBatch):
    """`x` [rows, V], `scale` [rows, G] with strides (1, rows); starts are an aligned prefix sum.

    `rows` is an upper bound known on the host; the experts may use fewer. As DeepGEMM contiguous.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
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


class BatchTemplate:
    """Makes batches that differ in the addresses and values of their tensors alone, in a fraction of the time that a
    constructor and an allocation of each tensor take.

    Args:
        kind: the class of the batches.
        signature: of the batches, hashable; templates may share one if the shapes and dtypes of all tensors are equal.
        fields: their common fields.
        workspace: the memory of the others, by the names of fields; other names are ignored. The last two
            dimensions of a scale are swapped in it.
        given: fields whose tensors each batch is given.

    Attributes:
        left_out: the fields that become tensors when they are read.
        addressed: see `ExpertBatch.addressed`: first those in a batch's memory, at `offsets`, then those of all
            batches, at the addresses `shared`, then those `given`.
    """

    def __init__(
        self,
        kind: type[ExpertBatch],
        signature: object,
        fields: Mapping[str, Any],
        workspace: Workspace,
        given: tuple[str, ...] = (),
    ) -> None:
        self._kind, self.signature, self._workspace, self.given = kind, signature, workspace, given
        self._fields = {**fields, "template": self}
        names = {field.name for field in dataclasses.fields(kind)} - {*fields, *given}
        self.left_out = frozenset(names)
        shared = [name for name in ADDRESSED if fields.get(name) is not None]
        self.addressed = (*(name for name in ADDRESSED if name in names), *shared, *given)
        self.offsets = [workspace.offset_of(name) for name in ADDRESSED if name in names]
        self.shared = [fields[name].data_ptr() for name in shared]
        self.allocate = workspace.allocate

    def batch(self, memory: torch.Tensor, **given: torch.Tensor) -> ExpertBatch:
        """A batch in memory that `allocate` returned, with the tensors `given`. Local."""
        batch = object.__new__(self._kind)
        fields = batch.__dict__
        fields.update(self._fields, memory=memory, **given)
        return batch

    def view(self, memory: torch.Tensor, name: str) -> torch.Tensor:
        """A tensor that was left out. Local."""
        tensor = self._workspace.view(memory, name)
        return tensor.transpose(-1, -2) if name == "scale" else tensor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PackingSizes:
    """How tokens are packed; the first six as of `ep_moe.layout.pack_routed`."""

    layout: Layout
    scheme: QuantScheme
    dtype: torch.dtype
    first: int
    num_local_experts: int
    capacity: int
    static: bool  # tokens are quantized with a scale of the weights
    expected_rows: int  # hint of the batches
    tokens_in_sum: int = 1  # so many tokens in a row have one sum; divides their number


def packable(
    x: torch.Tensor | Quantized, topk_ids: torch.Tensor, topk_weights: torch.Tensor, sizes: PackingSizes
) -> bool:
    """Whether `RoutedPacking` packs such tokens: there are some, columns of all rows are next to each other, and rows
    are whole words of 32 bits, before and after quantization. FLAT ones are not quantized by the caller."""
    values = x.values if isinstance(x, Quantized) else x
    if not values.numel() or not sizes.num_local_experts or values.dim() != 2:
        return False
    if sizes.layout is Layout.FLAT and values is not x:
        return False
    row_bytes, stride_bytes = (count * values.element_size() for count in (values.shape[1], values.stride(0)))
    dense = values.stride(1) == topk_ids.stride(1) == topk_weights.stride(1) == 1
    if values is x:
        dense = dense and sizes.scheme.payload.values_bytes(values.shape[1], values.dtype) % 4 == 0
    return dense and row_bytes % 4 == 0 and stride_bytes % min(row_bytes & -row_bytes, 16) == 0
