"""One round of a case and its expected result, computed by loops over all ranks' inputs without packing or exchange.

Letters: T tokens on a rank, K top-k, H hidden, L local experts.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.layout import Batched, Compact, ExpertBatch, Flat, weighted_sum
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, as_bytes, dequantize_rows, get_scheme, quantize
from ep_moe.testing.cases import CaseInputs, TransportCase
from ep_moe.testing.compare import assert_same_bits
from ep_moe.transport import Transport

TransportFactory = Callable[[EPGroup, Placement, TransportConfig], Transport]  # as `create_transport` with a name


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every `torch.empty` with NaN (or a dtype's largest value), so that unwritten memory is detected."""
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    # torch.use_deterministic_algorithms tells torch.compile too, whose import takes two seconds
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(was_on, warn_only=only_warned)
        torch.utils.deterministic.fill_uninitialized_memory = was_filling  # type: ignore[attr-defined]


def expert_function(values: torch.Tensor, expert: int | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A stand-in for expert `expert`, one or [n, 1], different for each: [n, H] float32 -> [n, H] in `dtype`."""
    return (values * (expert + 1.5) - expert).to(dtype)


def _payload(inputs: CaseInputs, case: TransportCase) -> tuple[torch.Tensor, torch.Tensor | None]:
    scheme = get_scheme(case.scheme)
    if not scheme.payload.quantized:
        assert isinstance(inputs.x, torch.Tensor)
        return inputs.x, None
    quantized = inputs.x if isinstance(inputs.x, Quantized) else quantize(inputs.x, scheme)
    return quantized.values, quantized.scale


def _rows_of_expert(case: TransportCase, everyone: list[CaseInputs], expert: int) -> list[tuple[int, int]]:
    """(source rank, source token) of every row that the physical expert must compute, in order."""
    return [
        (rank, token)
        for rank, inputs in enumerate(everyone)
        for token, ids in enumerate(inputs.routing.topk_ids.tolist())
        if expert in ids
    ]


def _rows_in_batch(batch: ExpertBatch, expert: int) -> list[int]:
    """Rows of `batch.x`, seen as [rows, H], that hold the expert's tokens."""
    start, count = int(batch.expert_row_start[expert]), int(batch.expert_num_tokens[expert])
    rows = list(range(start, start + count))
    return rows if batch.row_index is None else batch.row_index[rows].tolist()


def check_batch(batch: ExpertBatch, case: TransportCase, rank: int) -> None:
    """Raise AssertionError unless the batch holds exactly the tokens of this rank's experts, bit for bit, in order."""
    everyone = [case.inputs(source) for source in range(case.num_ranks)]
    payloads = [_payload(inputs, case) for inputs in everyone]
    placement, hidden, layout = case.make_placement(), case.hidden, case.layout_of(rank)
    expected_type = {Layout.BATCHED: Batched, Layout.COMPACT: Compact, Layout.FLAT: Flat}[layout]
    assert type(batch) is expected_type, f"batch is {type(batch).__name__}, asked for {layout.value}"
    assert batch.num_local_experts == placement.num_local_experts(rank)
    num_values = get_scheme(case.scheme).payload.row_values(hidden)
    assert batch.hidden == hidden, f"hidden is {batch.hidden}, expected {hidden}"
    x, most = batch.x.reshape(-1, num_values), case.num_ranks * case.config.max_tokens_per_rank
    for local in range(batch.num_local_experts):
        wanted = _rows_of_expert(case, everyone, placement.starts[rank] + local)
        what = f"{case.name}, rank {rank}, expert {local}"
        start, count = int(batch.expert_row_start[local]), int(batch.expert_num_tokens[local])
        assert count == len(wanted), f"{what}: {count} rows, expected {len(wanted)}"
        if layout is Layout.BATCHED:
            capacity = batch.x.shape[1]
            least = most if case.bound is None else case.num_ranks * case.bound
            assert least <= capacity <= most, f"{what}: {capacity} rows, expected [{least}, {most}]"
            assert batch.x.shape == (batch.num_local_experts, capacity, num_values)
            assert start == local * capacity
        if layout is Layout.COMPACT:
            assert start % case.row_alignment == 0, f"{what}: start {start} is not aligned"
        rows = _rows_in_batch(batch, local)
        if not wanted:
            continue
        assert_same_bits(x[rows], torch.stack([payloads[r][0][t] for r, t in wanted]), f"{what}, values")
        if batch.scale is not None:
            groups = batch.scale.shape[-1]
            scales = torch.stack([payloads[r][1][t] for r, t in wanted])  # type: ignore[index]
            assert batch.scale.dtype == scales.dtype, f"{what}: scales are {batch.scale.dtype}, not {scales.dtype}"
            found = as_bytes(batch.scale).reshape(-1, groups)[rows]
            assert_same_bits(found, as_bytes(scales), f"{what}, scales")
    _check_scale_strides(batch)
    if isinstance(batch, Flat):
        _check_token_rows(batch, case, everyone, rank)


def _check_token_rows(batch: Flat, case: TransportCase, everyone: list[CaseInputs], rank: int) -> None:
    """FLAT holds each token that has an expert here once, in any order; unused rows may lie between them."""
    first, last = case.make_placement().starts[rank : rank + 2]
    places: dict[tuple[int, int], int] = {}  # (source, token): its row
    for local in range(last - first):
        wanted = _rows_of_expert(case, everyone, first + local)
        for place, row in zip(wanted, _rows_in_batch(batch, local), strict=True):
            assert places.setdefault(place, row) == row, f"{case.name}, rank {rank}: token {place} has several rows"
    ids: list[list[int]] = []
    weights: list[list[float]] = []
    rows: list[int] = []
    for source, inputs in enumerate(everyone):
        for token, token_ids in enumerate(inputs.routing.topk_ids.tolist()):
            if any(first <= expert < last for expert in token_ids):
                seen = [expert in token_ids[:column] for column, expert in enumerate(token_ids)]
                ids.append(
                    [
                        expert - first if first <= expert < last and not repeat else -1
                        for expert, repeat in zip(token_ids, seen, strict=True)
                    ]
                )
                weights.append(_merged_weights(token_ids, inputs.routing.topk_weights[token]))
                rows.append(places[source, token])
    expected = torch.tensor(ids, dtype=torch.int32).reshape(-1, case.num_topk)
    assert sorted(rows) == (batch.local_topk_ids >= 0).any(1).nonzero().flatten().tolist()
    assert_same_bits(batch.local_topk_ids[rows], expected, f"{case.name}, rank {rank}, local_topk_ids")
    merged = torch.where(expected >= 0, torch.tensor(weights).reshape(-1, case.num_topk), 0.0)
    assert_same_bits(batch.topk_weights[rows], merged, f"{case.name}, rank {rank}, topk_weights")


def _merged_weights(ids: list[int], weights: torch.Tensor) -> list[float]:
    """For each column the weight of its expert: the float32 sum, in column order, over all columns with that expert."""
    merged = []
    for expert in ids:
        total = torch.zeros(())
        for column, other in enumerate(ids):
            if other == expert:
                total = total + weights[column]
        merged.append(float(total))
    return merged


def _check_scale_strides(batch: ExpertBatch) -> None:
    scheme, scale = batch.scheme, batch.scale
    assert (scale is not None) == scheme.payload.quantized
    if scale is None or scale.numel() == 0:
        return
    groups = scheme.payload.num_groups(batch.hidden)
    assert scale.shape == (*batch.x.shape[:-1], groups)
    rows = batch.x.shape[-2]
    expected = (rows * groups, 1, rows) if isinstance(batch, Batched) else (1, rows)
    strides = [
        (found, want) for found, want, size in zip(scale.stride(), expected, scale.shape, strict=True) if size > 1
    ]
    assert all(found == want for found, want in strides), f"scale strides {scale.stride()}, expected {expected}"


def token_rows(batch: ExpertBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows that hold tokens, by expert: their expert, row of the batch and row of `x`, each [n]. Host sync."""
    counts = batch.expert_num_tokens.long()
    expert = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    nth = torch.arange(len(expert), device=counts.device) - (counts.cumsum(0) - counts)[expert]
    place = batch.expert_row_start.long()[expert] + nth
    return expert, place, place if batch.row_index is None else batch.row_index[place].long()


def compute_experts(batch: ExpertBatch, first_expert: int) -> torch.Tensor:
    """Apply `expert_function` to every token row; other rows of the result are NaN. FLAT gets the weighted sum."""
    x, (expert, place, source) = as_bytes(batch.x.reshape(-1, batch.x.shape[-1])), token_rows(batch)
    scale = None
    if batch.scale is not None:
        scale = as_bytes(batch.scale).reshape(-1, batch.scale.shape[-1])[source].view(batch.scheme.payload.scale_dtype)
    values = dequantize_rows(x[source].view(batch.x.dtype), scale, batch.scheme)
    num_rows = x.shape[0] if batch.row_index is None else batch.row_index.shape[0]
    y = torch.full((num_rows, batch.hidden), float("nan"), dtype=batch.dtype, device=x.device)
    y[place] = expert_function(values, (first_expert + expert).float().unsqueeze(1), batch.dtype)
    if isinstance(batch, Flat):
        return weighted_sum(y, batch.token_to_row, batch.topk_weights)
    return y.reshape(*batch.x.shape[:-1], batch.hidden)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """What one expert adds to a token; a token's parts are in the order of their experts' first columns."""

    owner: int  # rank
    weight: torch.Tensor  # [] float32, repeats merged
    row: torch.Tensor  # [H] float32, the expert's output


def _rank_rows(case: TransportCase, parts: list[_Part]) -> dict[int, torch.Tensor]:
    """For each rank, by its last column, the weighted sum of its experts in column order, rounded: [H] float32."""
    rows: dict[int, torch.Tensor] = {}
    for part in parts:
        so_far = rows.pop(part.owner, torch.zeros(case.hidden))
        rows[part.owner] = so_far + part.weight * part.row
    return {owner: row.to(case.dtype).float() for owner, row in rows.items()}


def _by_rank(case: TransportCase, parts: list[_Part], ranks_per_sum: int = 1) -> torch.Tensor:
    """Each rank's sum, added in rank order; the sums of `ranks_per_sum` ranks are rounded before they are added."""
    rows, total = _rank_rows(case, parts), torch.zeros(case.hidden)
    for first in range(0, case.num_ranks, ranks_per_sum):
        together = torch.zeros(case.hidden)
        for owner in range(first, first + ranks_per_sum):
            together = together + rows.get(owner, 0)
        total = total + together.to(case.dtype).float()
    return total


def _by_last_column(case: TransportCase, parts: list[_Part]) -> torch.Tensor:
    """Each rank's sum, added in the order of the ranks' last columns."""
    total = torch.zeros(case.hidden)
    for row in _rank_rows(case, parts).values():
        total = total + row
    return total


def _by_column(case: TransportCase, parts: list[_Part]) -> torch.Tensor:
    """Each expert's row times its weight, with fused multiply-add, in column order; a FLAT rank's sum is one row."""
    rows, total = _rank_rows(case, parts), torch.zeros(case.hidden)
    done = set()
    for part in parts:
        if case.layout_of(part.owner) is not Layout.FLAT:
            total = (total.double() + part.weight.double() * part.row.double()).float()
        elif part.owner not in done:
            total = total + rows[part.owner]
        done.add(part.owner)
    return total


# by the name in a transport's `sum_order`: the sum, and whether it is rounded before `shared` is added
SUM_ORDERS: dict[str, tuple[Callable[[TransportCase, list[_Part]], torch.Tensor], bool]] = {
    "ranks": (_by_rank, False),
    "ranks-rounded": (_by_rank, True),
    "last-columns-rounded": (_by_last_column, True),
    "columns": (_by_column, True),
}


def declared_order(transport: Transport) -> str:
    """The name of the transport's order of sums, its attribute `sum_order`; "ranks", as of `Transport`, if none."""
    return getattr(transport, "sum_order", "ranks")


def expected_output(case: TransportCase, rank: int, transport: Transport | None = None) -> torch.Tensor:
    """The expected result of combine on `rank` [T, H]: sums in column order on each expert rank, then in rank order.

    Args:
        transport: its order of sums is used (`sum_order`, `Transport.ranks_per_sum`).
    """
    if transport is None:
        return _expected_output(case, rank, "ranks", 1).clone()
    return _expected_output(case, rank, declared_order(transport), getattr(transport, "ranks_per_sum", 1)).clone()


@functools.lru_cache(maxsize=4)  # the loops take as long as a round, and rounds of a case follow each other
def _expected_output(case: TransportCase, rank: int, order: str, ranks_per_sum: int) -> torch.Tensor:
    inputs, placement = case.inputs(rank), case.make_placement()
    values, scale = _payload(inputs, case)
    real = values.float() if scale is None else dequantize_rows(values, scale, get_scheme(case.scheme))
    y = [expert_function(real, expert, case.dtype).float() for expert in range(case.num_experts)]
    total = torch.zeros(case.tokens[rank], case.hidden)
    add, rounded = SUM_ORDERS[order]
    if add is _by_rank:
        add = functools.partial(_by_rank, ranks_per_sum=ranks_per_sum)
    owners = [owner for owner in range(case.num_ranks) for _ in range(placement.num_local_experts(owner))]
    for token in range(case.tokens[rank]):
        ids = inputs.routing.topk_ids[token].tolist()
        merged = _merged_weights(ids, inputs.routing.topk_weights[token])
        parts = [
            _Part(owner=owners[expert], weight=torch.tensor(merged[ids.index(expert)]), row=y[expert][token])
            for expert in dict.fromkeys(ids)
            if expert >= 0
        ]
        total[token] = add(case, parts)
    if rounded:
        total = total.to(case.dtype).float()
    if inputs.shared is not None:
        total = total + inputs.shared.float()
    return total.to(case.dtype)


def check_round(
    transport: Transport,
    case: TransportCase,
    device: torch.device,
    slot: int = 0,
    *,
    halves: tuple[bool, bool] = (False, False),
) -> None:
    """Run one round of `case` on this rank and compare batch and result bit for bit.

    Args:
        halves: whether dispatch and combine are called as their two halves (send, recv); ranks may differ.
    Errors: AssertionError after the round is complete, so that no other rank waits for this one. Collective.
    """
    rank = transport.rank
    num_rows, num_tokens = case.num_rows(rank), case.tokens[rank]
    inputs = case.inputs(rank).with_rows(num_rows).to(device)
    count = torch.tensor([num_tokens], dtype=torch.int32, device=device) if case.rows else None
    how: dict[str, Any] = {"layout": case.layout_of(rank), "scheme": get_scheme(case.scheme), "slot": slot}
    how |= {"num_tokens": count, "max_num_tokens": case.bound}
    wrong = ""
    with poisoned_memory():
        if halves[0]:
            transport.dispatch_send(inputs.x, inputs.routing, **how)
            dispatched = transport.dispatch_recv(slot=slot)
        else:
            dispatched = transport.dispatch(inputs.x, inputs.routing, **how)
        try:
            check_batch(dispatched.batch, case, rank)
            y = compute_experts(dispatched.batch, case.make_placement().starts[rank])
        except (AssertionError, IndexError, ValueError) as error:
            wrong = f"{case.name}, rank {rank}: {error}"
            y = torch.zeros(dispatched.batch.output_shape, dtype=case.dtype, device=device)
        out = torch.full((num_rows, case.hidden), float("nan"), dtype=case.dtype, device=device)
        if halves[1]:
            transport.combine_send(y, dispatched)
            result = transport.combine_recv(dispatched, shared=inputs.shared, out=out)
        else:
            result = transport.combine(y, dispatched, shared=inputs.shared, out=out)
    transport.check()
    assert not wrong, wrong
    assert result.data_ptr() == out.data_ptr(), f"{case.name}: combine did not use out"
    expected = expected_output(case, rank, transport)
    assert_same_bits(out[:num_tokens], expected, f"{case.name}, rank {rank}, combined")
    assert bool(out[num_tokens:].isnan().all()), f"{case.name}, rank {rank}: combine wrote rows beyond num_tokens"
