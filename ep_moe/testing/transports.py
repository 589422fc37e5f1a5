"""Checks that a transport must pass, for our own and for anybody's: run them on every rank of a group.

Letters: T tokens on a rank, K top-k, H hidden, L local experts. The expectation is made by plain loops over all ranks'
inputs and shares no code with packing or exchange.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.layout import Batched, Compact, ExpertBatch, Flat, weighted_sum
from ep_moe.placement import Placement
from ep_moe.quant import Quantised, dequantise_rows, get_scheme, quantise
from ep_moe.routing import Routing
from ep_moe.testing.cases import CaseInputs, TransportCase, transport_cases
from ep_moe.testing.compare import assert_same_bits
from ep_moe.transport import Transport

TransportFactory = Callable[[EPGroup, Placement, TransportConfig], Transport]


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Make every `torch.empty` start as NaN (the largest value where a dtype has none): unwritten memory shows."""
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=only_warned)
        torch.utils.deterministic.fill_uninitialized_memory = was_filling  # type: ignore[attr-defined]


def expert_function(values: torch.Tensor, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """A stand-in for expert `expert` that no other expert computes: [n, H] float32 -> [n, H] in `dtype`."""
    return (values * (expert + 1.5) - expert).to(dtype)


def _payload(inputs: CaseInputs, case: TransportCase) -> tuple[torch.Tensor, torch.Tensor | None]:
    scheme = get_scheme(case.scheme)
    if not scheme.quantised:
        assert isinstance(inputs.x, torch.Tensor)
        return inputs.x, None
    quantised = inputs.x if isinstance(inputs.x, Quantised) else quantise(inputs.x, scheme)
    return quantised.values, quantised.scale


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
    """Raise AssertionError unless the batch holds just the tokens of this rank's experts, bit for bit, in order."""
    everyone = [case.inputs(source) for source in range(case.num_ranks)]
    payloads = [_payload(inputs, case) for inputs in everyone]
    placement, hidden, layout = case.make_placement(), case.hidden, case.layout_of(rank)
    expected_type = {Layout.BATCHED: Batched, Layout.COMPACT: Compact, Layout.FLAT: Flat}[layout]
    assert type(batch) is expected_type, f"batch is {type(batch).__name__}, asked for {layout.value}"
    assert batch.num_local_experts == placement.num_local_experts(rank)
    x = batch.x.reshape(-1, hidden)
    for local in range(batch.num_local_experts):
        wanted = _rows_of_expert(case, everyone, placement.starts[rank] + local)
        what = f"{case.name}, rank {rank}, expert {local}"
        start, count = int(batch.expert_row_start[local]), int(batch.expert_num_tokens[local])
        assert count == len(wanted), f"{what}: {count} rows, expected {len(wanted)}"
        if layout is Layout.BATCHED:
            capacity = case.num_ranks * case.config.max_tokens_per_rank
            assert batch.x.shape == (batch.num_local_experts, capacity, hidden)
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
            assert_same_bits(batch.scale.reshape(-1, groups)[rows], scales, f"{what}, scales")
    _check_scale_strides(batch)
    if isinstance(batch, Flat):
        _check_token_rows(batch, case, everyone, rank)


def _check_token_rows(batch: Flat, case: TransportCase, everyone: list[CaseInputs], rank: int) -> None:
    """The rows of FLAT are the tokens that have an expert here, in order, each once; others may stand between them."""
    first, last = case.make_placement().starts[rank : rank + 2]
    ids: list[list[int]] = []
    weights: list[list[float]] = []
    for inputs in everyone:
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
    expected = torch.tensor(ids, dtype=torch.int32).reshape(-1, case.num_topk)
    used = (batch.local_topk_ids >= 0).any(1)
    assert_same_bits(batch.local_topk_ids[used], expected, f"{case.name}, rank {rank}, local_topk_ids")
    merged = torch.where(expected >= 0, torch.tensor(weights).reshape(-1, case.num_topk), 0.0)
    assert_same_bits(batch.topk_weights[used], merged, f"{case.name}, rank {rank}, topk_weights")


def _merged_weights(ids: list[int], weights: torch.Tensor) -> list[float]:
    """For each column the weight of its expert: the float32 sum, in column order, over all places of that expert."""
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
    assert (scale is not None) == scheme.quantised
    if scale is None or scale.numel() == 0:
        return
    groups = scheme.num_groups(batch.hidden)
    assert scale.shape == (*batch.x.shape[:-1], groups)
    rows = batch.x.shape[-2]
    expected = (rows * groups, 1, rows) if isinstance(batch, Batched) else (1, rows)
    strides = [
        (found, want) for found, want, size in zip(scale.stride(), expected, scale.shape, strict=True) if size > 1
    ]
    assert all(found == want for found, want in strides), f"scale strides {scale.stride()}, expected {expected}"


def compute_experts(batch: ExpertBatch, first_expert: int) -> torch.Tensor:
    """Apply `expert_function` to every row; all other rows of the result are NaN. FLAT is weighed and summed."""
    x = batch.x.reshape(-1, batch.hidden)
    scale = None if batch.scale is None else batch.scale.reshape(-1, batch.scale.shape[-1])
    num_rows = x.shape[0] if batch.row_index is None else batch.row_index.shape[0]
    y = torch.full((num_rows, batch.hidden), float("nan"), dtype=batch.dtype, device=x.device)
    for local in range(batch.num_local_experts):
        start, count = int(batch.expert_row_start[local]), int(batch.expert_num_tokens[local])
        if not count:
            continue
        rows = _rows_in_batch(batch, local)
        values = x[rows].float() if scale is None else dequantise_rows(x[rows], scale[rows], batch.scheme)
        y[start : start + count] = expert_function(values, first_expert + local, batch.dtype)
    if isinstance(batch, Flat):
        return weighted_sum(y, batch.token_to_row, batch.topk_weights)
    return y.reshape(*batch.x.shape[:-1], batch.hidden)


def expected_output(case: TransportCase, rank: int) -> torch.Tensor:
    """What combine must return on `rank` [T, H]: sums in column order on each expert rank, then in rank order."""
    inputs, placement = case.inputs(rank), case.make_placement()
    values, scale = _payload(inputs, case)
    real = values.float() if scale is None else dequantise_rows(values, scale, get_scheme(case.scheme))
    total = torch.zeros(case.tokens[rank], case.hidden)
    for token in range(case.tokens[rank]):
        ids = inputs.routing.topk_ids[token].tolist()
        weights = inputs.routing.topk_weights[token]
        for owner in range(case.num_ranks):
            mine = [e for e in dict.fromkeys(ids) if placement.starts[owner] <= e < placement.starts[owner + 1]]
            if not mine:
                continue
            partial = torch.zeros(case.hidden)
            merged = _merged_weights(ids, weights)
            for expert in mine:
                weight = torch.tensor(merged[ids.index(expert)])
                partial = partial + weight * expert_function(real[token], expert, case.dtype).float()
            total[token] = total[token] + partial.to(case.dtype).float()
    if inputs.shared is not None:
        total = total + inputs.shared.float()
    return total.to(case.dtype)


def check_round(transport: Transport, case: TransportCase, device: torch.device, slot: int = 0) -> None:
    """Run one round of `case` on this rank and compare batch and result bit for bit.

    Errors: AssertionError says what is wrong, after the round is over, so that no other rank waits for it. Collective.
    """
    rank = transport.rank
    inputs = case.inputs(rank).to(device)
    wrong = ""
    with poisoned_memory():
        dispatched = transport.dispatch(
            inputs.x, inputs.routing, layout=case.layout_of(rank), scheme=get_scheme(case.scheme), slot=slot
        )
        try:
            check_batch(dispatched.batch, case, rank)
            y = compute_experts(dispatched.batch, case.make_placement().starts[rank])
        except (AssertionError, IndexError, ValueError) as error:
            wrong = f"{case.name}, rank {rank}: {error}"
            y = torch.zeros(dispatched.batch.output_shape, dtype=case.dtype, device=device)
        out = torch.full((case.tokens[rank], case.hidden), float("nan"), dtype=case.dtype, device=device)
        result = transport.combine(y, dispatched, shared=inputs.shared, out=out)
    assert not wrong, wrong
    assert result.data_ptr() == out.data_ptr(), f"{case.name}: combine did not use out"
    assert_same_bits(out, expected_output(case, rank), f"{case.name}, rank {rank}, combined")


def check_refusals(make: TransportFactory, group: EPGroup) -> None:
    """Bad input on one rank is a ValueError on every rank that names it, and the next round works. Collective."""
    case = TransportCase(name="refusals", tokens=(5,) * group.num_ranks)
    transport = make(group, case.make_placement(), case.config)
    for culprit in sorted({0, group.num_ranks - 1}):
        for message, (x, routing, scheme) in _bad_inputs(case, culprit, group).items():
            inputs = case.inputs(group.rank).to(group.device)
            sent = (x, routing) if group.rank == culprit else (inputs.x, inputs.routing)
            name = scheme if group.rank == culprit else "none"
            try:
                transport.dispatch(*sent, layout=case.layout, scheme=get_scheme(name))
            except ValueError as error:
                assert message in str(error), f"rank {group.rank}: {error}, expected {message}"
            else:
                raise AssertionError(f"rank {group.rank} took what rank {culprit} had to refuse: {message}")
            check_round(transport, case, group.device)
        try:
            if group.rank == culprit:
                transport.refuse(ValueError("of my own"))
            inputs = case.inputs(group.rank).to(group.device)
            transport.dispatch(inputs.x, inputs.routing, layout=case.layout, scheme=get_scheme("none"))
        except ValueError as error:
            words = "of my own" if group.rank == culprit else f"rank {culprit} refused its input"
            assert words in str(error), f"rank {group.rank}: {error}, expected {words}"
        else:
            raise AssertionError(f"rank {group.rank} did not learn that rank {culprit} refuses")
        check_round(transport, case, group.device)
    transport.destroy()


def _bad_inputs(case: TransportCase, culprit: int, group: EPGroup) -> dict[str, tuple[torch.Tensor, Routing, str]]:
    """What the culprit dispatches, tokens, routing and scheme, by the words that this rank must read of it."""
    inputs = case.inputs(culprit).to(group.device)
    x, ids, weights = inputs.x, inputs.routing.topk_ids, inputs.routing.topk_weights
    assert isinstance(x, torch.Tensor)
    twice = Routing(topk_ids=torch.cat([ids, ids]), topk_weights=torch.cat([weights, weights]))
    refused = f"on rank {culprit}" if group.rank == culprit else f"rank {culprit} refused its input"
    bad = {
        f"num_tokens (10) exceeds max_tokens_per_rank (5) on rank {culprit}": (torch.cat([x, x]), twice, "none"),
        f"topk_ids has 2 ids outside [-1, num_experts (8)) on rank {culprit}": (
            x,
            Routing(topk_ids=_with_bad_ids(ids), topk_weights=weights),
            "none",
        ),
        refused: (x.double(), inputs.routing, "none"),
    }
    if group.num_ranks > 1:
        fewer = Routing(topk_ids=ids[:, :1].contiguous(), topk_weights=weights[:, :1].contiguous())
        bad["disagree on the payload"] = (x, fewer, "none")
        bad["ranks disagree on the payload"] = (x, inputs.routing, "fp8_token")
    return bad


def _with_bad_ids(ids: torch.Tensor) -> torch.Tensor:
    spoilt = ids.clone()
    spoilt[0, 0], spoilt[1, 1] = 8, -2
    return spoilt


def check_slots(make: TransportFactory, group: EPGroup) -> None:
    """Two open rounds keep apart, and a call out of order is a RuntimeError that changes nothing. Collective."""
    cases = [TransportCase(name=f"slot-{slot}", tokens=(7 + slot,) * group.num_ranks) for slot in range(2)]
    placement, scheme = cases[0].make_placement(), get_scheme("none")
    transport = make(group, placement, cases[1].config)
    inputs = [case.inputs(group.rank).to(group.device) for case in cases]
    for slot, brought in enumerate(inputs):
        transport.dispatch_send(brought.x, brought.routing, layout=Layout.COMPACT, scheme=scheme, slot=slot)
    try:
        transport.dispatch_send(inputs[0].x, inputs[0].routing, layout=Layout.COMPACT, scheme=scheme, slot=1)
    except RuntimeError as error:
        assert "slot 1 waits for dispatch_recv" in str(error), str(error)
    else:
        raise AssertionError("a second dispatch_send on an open slot went through")
    opened = [transport.dispatch_recv(slot=slot) for slot in range(2)]
    first = placement.starts[group.rank]
    for dispatched in opened:
        transport.combine_send(compute_experts(dispatched.batch, first), dispatched)
    for case, dispatched in zip(cases, opened, strict=True):
        result = transport.combine_recv(dispatched)
        assert_same_bits(result, expected_output(case, group.rank), f"{case.name}, rank {group.rank}")
    transport.destroy()


def check_abandon(make: TransportFactory, group: EPGroup) -> None:
    """Where one rank abandons a round, the others get NaN for what they sent there, and the next round works.

    Collective.
    """
    case = TransportCase(name="abandon", tokens=(6,) * group.num_ranks, num_topk=8)
    transport = make(group, case.make_placement(), case.config)
    inputs = case.inputs(group.rank).to(group.device)
    for stage in ("dispatch_recv", "combine_send", "combine_recv"):
        transport.dispatch_send(inputs.x, inputs.routing, layout=case.layout, scheme=get_scheme("none"))
        if group.rank > 0 or stage != "dispatch_recv":
            dispatched = transport.dispatch_recv()
        if group.rank > 0 or stage == "combine_recv":
            transport.combine_send(
                compute_experts(dispatched.batch, case.make_placement().starts[group.rank]), dispatched
            )
        if group.rank == 0:
            transport.abandon()
        elif stage == "combine_recv":
            result = transport.combine_recv(dispatched)
            assert_same_bits(result, expected_output(case, group.rank), f"{case.name}, {stage}, rank {group.rank}")
        else:
            result = transport.combine_recv(dispatched)
            assert bool(result.isnan().all()), f"abandoned in {stage}: rank {group.rank} got numbers"
        check_round(transport, case, group.device)
    transport.destroy()


def check_transport(make: TransportFactory, group: EPGroup) -> dict[str, str]:
    """Run every case, the refusals, the slots and abandoned rounds on this rank.

    Args:
        make: builds the transport from (group, placement, config), as `ep_moe.transport.create_transport` does.
        group: 1 to 8 ranks.
    Returns: for each check its name and "" or what went wrong on this rank. A transport that fails on one rank in the
    middle of a round may cost the others theirs: that is raised, as the lost peer that it is. Collective.
    """
    checks: dict[str, Callable[[], None]] = {
        case.name: _case_check(make, group, case) for case in transport_cases(group.num_ranks)
    }
    checks["refusals"] = lambda: check_refusals(make, group)
    checks["slots"] = lambda: check_slots(make, group)
    checks["abandon"] = lambda: check_abandon(make, group)
    outcomes = {}
    for name, check in checks.items():
        try:
            check()
            outcomes[name] = ""
        except PeerLostError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a transport of somebody else raises is its outcome
            outcomes[name] = f"{type(error).__name__}: {error}"
        group.barrier()
    return outcomes


def _case_check(make: TransportFactory, group: EPGroup, case: TransportCase) -> Callable[[], None]:
    def check() -> None:
        transport = make(group, case.make_placement(), case.config)
        try:
            for _ in range(2):  # the second round meets what the first left behind
                check_round(transport, case, group.device)
        finally:
            transport.destroy()

    return check
