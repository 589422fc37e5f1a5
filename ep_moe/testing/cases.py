"""The rounds that every transport must carry: a list of cases, and their inputs.

Letters: T tokens on a rank, K top-k, H hidden, E experts, R ranks, M max_tokens_per_rank.
"""

import dataclasses
import functools
import math
import zlib

import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.placement import Placement, create_placement
from ep_moe.quant import Quantized, as_bytes, get_scheme, quantize
from ep_moe.routing import Routing

_placement = functools.lru_cache(maxsize=8)(create_placement)
ROUTINGS = ("uniform", "holes", "no_expert", "repeats", "one_expert", "one_rank")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransportCase:
    """One round of a group.

    `routing` is one of ROUTINGS, in order: different experts at random; the same with a third of the ids -1; all ids
    -1; ids that repeat within a row; all tokens to one expert; all tokens to experts of the last rank that has any.
    """

    name: str
    tokens: tuple[int, ...]  # T of each rank
    hidden: int = 64
    num_topk: int = 4
    num_experts: int = 8
    layout: Layout = Layout.COMPACT
    scheme: str = "none"
    dtype: torch.dtype = torch.bfloat16
    routing: str = "uniform"
    placement: str = "linear"
    row_alignment: int = 16
    id_dtype: torch.dtype = torch.int32
    quantized_input: bool = False
    shared: bool = False
    mixed_layouts: bool = False  # every rank asks for another layout, `layout` is ignored
    rows: tuple[int, ...] = ()  # input rows per rank, if `num_tokens` on the device says that only T are tokens
    max_num_tokens: int | None = None  # bound of the round, by default the largest of `rows`
    room: int = 1  # M, if no rank has as many rows

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.tokens)

    @property
    def config(self) -> TransportConfig:
        """The transport's config: M is the largest number of input rows of a rank, at least `room`."""
        return TransportConfig(
            hidden=self.hidden,
            max_tokens_per_rank=max(*self.tokens, *self.rows, self.room),
            dtype=self.dtype,
            row_alignment=self.row_alignment,
        )

    @property
    def bound(self) -> int | None:
        """`max_num_tokens` of the round."""
        return max(self.rows) if self.max_num_tokens is None and self.rows else self.max_num_tokens

    def layout_of(self, rank: int) -> Layout:
        """The layout that a rank asks for."""
        return list(Layout)[rank % len(Layout)] if self.mixed_layouts else self.layout

    def make_placement(self) -> Placement:
        """Which rank owns which experts."""
        return _placement(self.placement, self.num_experts, self.num_ranks)

    def inputs(self, rank: int) -> "CaseInputs":
        """The input of one rank, on the CPU, the same on every rank and machine."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.name}/{rank}".encode()))
        num_tokens = self.tokens[rank]
        x = torch.randn(num_tokens, self.hidden, generator=generator).to(self.dtype)
        scores = torch.rand(num_tokens, self.num_experts, generator=generator)
        ids = self._ids(scores, generator)
        weights = torch.rand(num_tokens, self.num_topk, generator=generator) + 0.1
        shared = torch.randn(num_tokens, self.hidden, generator=generator).to(self.dtype)
        scheme = get_scheme(self.scheme)
        return CaseInputs(
            x=quantize(x, scheme) if self.quantized_input else x,
            routing=Routing(topk_ids=ids.to(self.id_dtype), topk_weights=weights),
            shared=shared if self.shared else None,
        )

    def num_rows(self, rank: int) -> int:
        """Input rows of a rank: T, or more, of which only the first T are tokens."""
        return self.rows[rank] if self.rows else self.tokens[rank]

    def _ids(self, scores: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        num_tokens, k = scores.shape[0], self.num_topk
        if self.routing == "repeats":
            return torch.randint(0, max(self.num_experts // 3, 1), (num_tokens, k), generator=generator)
        if self.routing == "one_expert":
            return torch.cat([torch.full((num_tokens, 1), 1), torch.full((num_tokens, k - 1), -1)], dim=1)
        if self.routing == "no_expert":
            return torch.full((num_tokens, k), -1)
        if self.routing == "one_rank":
            placement = self.make_placement()
            last = max(r for r in range(self.num_ranks) if placement.num_local_experts(r))
            span = placement.num_local_experts(last)
            return placement.starts[last] + torch.randint(0, span, (num_tokens, k), generator=generator)
        ids = scores.argsort(dim=1)[:, :k]
        if ids.shape[1] < k:
            ids = torch.cat([ids, torch.full((num_tokens, k - ids.shape[1]), -1)], dim=1)
        if self.routing == "holes":
            ids = torch.where(torch.rand(num_tokens, k, generator=generator) < 0.34, -1, ids)
        return ids


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CaseInputs:
    """The input of one rank to a round. Ids are physical."""

    x: torch.Tensor | Quantized  # [T, H]
    routing: Routing
    shared: torch.Tensor | None  # [T, H]

    def to(self, device: torch.device) -> "CaseInputs":
        """The same on a device."""
        x = self.x
        if isinstance(x, Quantized):
            moved: torch.Tensor | Quantized = Quantized(
                values=x.values.to(device), scale=x.scale.to(device), scheme=x.scheme
            )
        else:
            moved = x.to(device)
        routing = Routing(topk_ids=self.routing.topk_ids.to(device), topk_weights=self.routing.topk_weights.to(device))
        return CaseInputs(x=moved, routing=routing, shared=None if self.shared is None else self.shared.to(device))

    def with_rows(self, num_rows: int) -> "CaseInputs":
        """The same, padded to `num_rows` with rows that are no tokens: NaN, and ids that no rank owns."""
        more = num_rows - self.routing.topk_ids.shape[0]

        def extend(tensor: torch.Tensor, value: float) -> torch.Tensor:
            wide = as_bytes(tensor)
            spare = torch.full((more, *wide.shape[1:]), value if wide is tensor else 255, dtype=wide.dtype)
            return torch.cat([wide, spare.to(wide.device)]).view(tensor.dtype)

        x = self.x
        if isinstance(x, Quantized):
            scale = extend(x.scale, math.nan)
            padded: torch.Tensor | Quantized = Quantized(values=extend(x.values, 255), scale=scale, scheme=x.scheme)
        else:
            padded = extend(x, math.nan)
        routing = Routing(
            topk_ids=extend(self.routing.topk_ids, 10**6), topk_weights=extend(self.routing.topk_weights, math.nan)
        )
        return CaseInputs(
            x=padded, routing=routing, shared=None if self.shared is None else extend(self.shared, math.nan)
        )


def _uneven(num_ranks: int) -> tuple[int, ...]:
    return (13, 1, 30, 6, 17, 2, 9, 21)[:num_ranks]


def _narrow_cases(uneven: tuple[int, ...], idle: tuple[int, ...]) -> list[TransportCase]:
    """Formats with values or scales of at most one byte; some rows are no multiple of 16 bytes or 4 scales."""
    layouts = {
        "nvfp4": tuple(Layout),
        "mxfp8": tuple(Layout),
        "int8_token": (Layout.COMPACT,),
        "fp8_block_ue8m0": (Layout.BATCHED,),
    }
    cases = [
        TransportCase(
            name=f"{layout.value}-{scheme}-hidden-48{'-quantized-input' * quantized}",
            tokens=uneven,
            layout=layout,
            scheme=scheme,
            hidden=48,
            quantized_input=quantized,
        )
        for scheme in layouts
        for layout in layouts[scheme]
        for quantized in (False, True)
    ]
    return [
        *cases,
        TransportCase(
            name="nvfp4-hidden-2880", tokens=uneven, scheme="nvfp4", hidden=2880, num_topk=10, num_experts=13
        ),
        TransportCase(name="mxfp8-hidden-2880", tokens=uneven, scheme="mxfp8", hidden=2880, dtype=torch.float16),
        TransportCase(name="int8_token-hidden-2880", tokens=uneven, scheme="int8_token", hidden=2880, shared=True),
        TransportCase(name="nvfp4-zero-tokens-on-one-rank", tokens=idle, scheme="nvfp4", hidden=48, num_topk=1),
        TransportCase(name="mxfp8-mixed-layouts", tokens=uneven, scheme="mxfp8", mixed_layouts=True, routing="holes"),
    ]


def _counted_cases(uneven: tuple[int, ...], idle: tuple[int, ...]) -> list[TransportCase]:
    """`num_tokens` on the device says how many rows are tokens: some, on one rank none, on the last all."""
    rows = tuple(count + 3 * (rank < len(uneven) - 1) for rank, count in enumerate(uneven))
    cases = [
        TransportCase(
            name=f"{layout.value}-{scheme}-of-more-rows",
            tokens=idle,
            rows=rows,
            layout=layout,
            scheme=scheme,
            shared=True,
        )
        for layout, scheme in zip(Layout, ("none", "fp8_block", "mxfp8"), strict=True)
    ]
    return [
        *cases,
        TransportCase(name="fp8_tensor-of-more-rows", tokens=uneven, rows=rows, scheme="fp8_tensor"),
        TransportCase(
            name="quantized-input-of-more-rows", tokens=idle, rows=rows, scheme="fp8_block", quantized_input=True
        ),
        TransportCase(name="no-token-of-all-rows", tokens=(0,) * len(rows), rows=rows, layout=Layout.FLAT),
    ]


def transport_cases(num_ranks: int) -> list[TransportCase]:
    """The cases for a group of `num_ranks` (1 to 8) ranks; names are unique."""
    if not 1 <= num_ranks <= 8:
        raise ValueError(f"num_ranks ({num_ranks}) is not in [1, 8]")
    uneven = _uneven(num_ranks)
    idle = tuple(0 if rank == num_ranks // 2 else count for rank, count in enumerate(uneven))
    cases = [
        TransportCase(name=f"{layout.value}-{scheme}", tokens=uneven, layout=layout, scheme=scheme)
        for layout in Layout
        for scheme in ("none", "fp8_block", "fp8_token", "fp8_tensor")
    ]
    cases += [
        TransportCase(name=f"{layout.value}-{routing}", tokens=uneven, layout=layout, routing=routing, shared=True)
        for layout in Layout
        for routing in ROUTINGS[1:]
    ]
    odd = [
        TransportCase(name="zero-tokens-on-one-rank", tokens=idle),
        TransportCase(name="zero-tokens-on-all-ranks", tokens=(0,) * num_ranks),
        TransportCase(name="one-token", tokens=(1,) + (0,) * (num_ranks - 1), num_topk=8),
        TransportCase(name="hidden-2880-top-10-of-13", tokens=uneven, hidden=2880, num_topk=10, num_experts=13),
        TransportCase(name="fewer-experts-than-ranks", tokens=uneven, num_experts=max(num_ranks - 1, 1), num_topk=1),
    ]
    cases += [
        dataclasses.replace(case, name=f"{layout.value}-{case.name}", layout=layout, scheme="fp8_block")
        for layout in Layout
        for case in odd
    ]
    cases += [
        TransportCase(name="mixed-layouts", tokens=uneven, mixed_layouts=True, scheme="fp8_block", shared=True),
        TransportCase(name="float32", tokens=uneven, dtype=torch.float32, shared=True),
        TransportCase(name="float16", tokens=uneven, dtype=torch.float16, id_dtype=torch.int64),
        TransportCase(name="round-robin", tokens=uneven, num_experts=11, placement="round_robin"),
        TransportCase(name="top-1", tokens=uneven, num_topk=1, hidden=16),
        TransportCase(name="top-6-of-7-hidden-48", tokens=uneven, num_topk=6, num_experts=7, hidden=48),
        TransportCase(name="aligned-128", tokens=uneven, row_alignment=128, scheme="fp8_block", hidden=144),
        TransportCase(name="unaligned", tokens=uneven, row_alignment=1),
        TransportCase(
            name="quantized-input-block", tokens=uneven, scheme="fp8_block", hidden=336, quantized_input=True
        ),
        TransportCase(name="quantized-input-tensor", tokens=uneven, scheme="fp8_tensor", quantized_input=True),
        TransportCase(name="many-tokens", tokens=(257,) * num_ranks, num_experts=32, num_topk=8, scheme="fp8_block"),
    ]
    return [*cases, *_narrow_cases(uneven, idle), *_counted_cases(uneven, idle)]
