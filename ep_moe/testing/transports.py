"""Checks that every transport must pass, those of ep_moe and of other packages: run them on every rank of a group.

Letters: T tokens on a rank, K top-k, H hidden.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ep_moe.config import Layout
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.quant import get_scheme
from ep_moe.routing import Routing
from ep_moe.testing.cases import TransportCase, transport_cases
from ep_moe.testing.compare import assert_same_bits
from ep_moe.testing.refusals import arguments_of, check_layers, check_refusals, refused_round
from ep_moe.testing.rounds import (
    TransportFactory,
    check_round,
    compute_experts,
    expected_output,
)
from ep_moe.transport import Dispatched, Transport
from ep_moe.transport.base import RoundKind


def check_sit_out(make: TransportFactory, group: EPGroup) -> None:
    """If a rank sits a round out, the others lose only the tokens that they sent it; the next round works.

    Collective.
    """
    case = TransportCase(name="sit-out", tokens=(6,) * group.num_ranks, scheme="fp8_block", num_topk=2)
    transport = make(group, case.make_placement(), case.config)
    scheme, last, starts = get_scheme(case.scheme), group.num_ranks - 1, case.make_placement().starts
    inputs = case.inputs(group.rank).to(group.device)
    before = transport.num_rounds
    if group.rank == last:
        transport.sit_out(num_topk=case.num_topk, scheme=scheme)
    else:
        dispatched = transport.dispatch(inputs.x, inputs.routing, layout=case.layout, scheme=scheme)
        y = compute_experts(dispatched.batch, starts[group.rank])
        out = torch.ones(case.tokens[group.rank], case.hidden, dtype=case.dtype, device=group.device)
        result = transport.combine(y, dispatched, out=out)
        lost = (inputs.routing.topk_ids >= starts[last]).any(1)
        assert bool(lost.any()), "no token went to the rank that sits out"
        wanted = (
            expected_output(case, group.rank, transport).to(group.device).masked_fill(lost.unsqueeze(1), float("nan"))
        )
        assert_same_bits(result[~lost], wanted[~lost], f"{case.name}, rank {group.rank}")
        assert bool(result[lost].isnan().all()), f"rank {group.rank} got numbers from a rank that sat out"
    assert transport.num_rounds == before + 1, "the round was not counted"
    transport.check()
    check_round(transport, case, group.device)
    transport.destroy()


def check_destroyed(make: TransportFactory, group: EPGroup) -> None:
    """Every call on a destroyed transport raises RuntimeError that says so. Collective."""
    case = TransportCase(name="destroyed", tokens=(2,) * group.num_ranks)
    transport = make(group, case.make_placement(), case.config)
    check_round(transport, case, group.device)
    arguments, scheme = arguments_of(case, group), get_scheme("none")
    dispatched = transport.dispatch(arguments.x, arguments.routing, layout=case.layout, scheme=scheme)
    y = compute_experts(dispatched.batch, transport.placement.starts[group.rank])
    group.barrier()
    transport.destroy()
    calls: dict[str, Callable[[], object]] = {
        "dispatch_send": lambda: transport.dispatch_send(
            arguments.x, arguments.routing, layout=case.layout, scheme=scheme
        ),
        "dispatch_recv": transport.dispatch_recv,
        "combine": lambda: transport.combine(y, dispatched),
        "combine_recv": lambda: transport.combine_recv(dispatched),
        "refuse": lambda: transport.refuse(ValueError("of my own")),
        "sit_out": lambda: transport.sit_out(num_topk=1, scheme=scheme),
        "abandon": transport.abandon,
        "check": transport.check,
    }
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            assert "destroyed" in str(error), f"{name}: {error}"
        else:
            raise AssertionError(f"{name} on a destroyed transport raised nothing")
    transport.destroy()


def check_num_tokens(make: TransportFactory, group: EPGroup) -> None:
    """One transport carries rounds with the same number of rows and different numbers of tokens. Collective."""
    rows = (6,) * group.num_ranks
    cases = [
        TransportCase(name=f"{count}-of-6", tokens=(count, *(6 - count,) * (group.num_ranks - 1)), rows=rows)
        for count in (2, 0, 6)
    ]
    transport = make(group, cases[0].make_placement(), cases[0].config)
    for case in cases:
        check_round(transport, case, group.device)
    transport.destroy()


def check_bounds(make: TransportFactory, group: EPGroup) -> None:
    """Rounds with and without `max_num_tokens` give the same bits, one after the other and open at the same time.

    Ranks with different bounds all get an error, and the next round works. Collective.
    """
    few, room = (3, *(1,) * (group.num_ranks - 1)), 80
    whole = TransportCase(name="bounds", tokens=few, room=room, num_topk=3)
    transport = make(group, whole.make_placement(), whole.config)
    for layout, name in zip(Layout, ("none", "fp8_block", "none"), strict=True):
        case = dataclasses.replace(whole, layout=layout, scheme=name)
        check_round(transport, case, group.device)
        for number, bound in enumerate((3, 17, room, None, 40)):
            check_round(
                transport,
                dataclasses.replace(case, max_num_tokens=bound),
                group.device,
                number % 2,
                halves=(True, True),
            )
    idle = TransportCase(name="bounds, no tokens", tokens=(0,) * group.num_ranks, room=room, max_num_tokens=0)
    check_round(transport, idle, group.device)
    arguments = arguments_of(whole, group)
    scheme, inputs, first = get_scheme("none"), whole.inputs(group.rank).to(group.device), transport.placement.starts
    opened = []
    for slot, bound in enumerate((3, None)):
        options: dict[str, Any] = {"layout": Layout.COMPACT, "scheme": scheme, "slot": slot, "max_num_tokens": bound}
        transport.dispatch_send(inputs.x, inputs.routing, **options)
    for slot in range(2):
        dispatched = transport.dispatch_recv(slot=slot)
        transport.combine_send(compute_experts(dispatched.batch, first[group.rank]), dispatched)
        opened.append(dispatched)
    for dispatched in opened:
        expected = expected_output(whole, group.rank, transport)
        assert_same_bits(transport.combine_recv(dispatched), expected, "open bounds")
    last = group.num_ranks - 1
    for bound in (None, 40) if group.num_ranks > 1 else ():
        mine = arguments._replace(max_num_tokens=bound if group.rank == last else 5)
        message = refused_round(transport, whole, mine, group)
        words = ("ranks disagree", "max_num_tokens must be the same", f"rank {last}")
        assert all(word in message for word in words), f"rank {group.rank}: {message!r}, expected {words}"
        check_round(transport, whole, group.device)
    if group.rank == last:
        transport.sit_out(num_topk=whole.num_topk, scheme=scheme, max_num_tokens=5)
    else:
        dispatched = transport.dispatch(inputs.x, inputs.routing, layout=Layout.FLAT, scheme=scheme, max_num_tokens=5)
        transport.combine(compute_experts(dispatched.batch, first[group.rank]), dispatched)
    transport.check()
    check_round(transport, whole, group.device)
    transport.destroy()


def check_halves(make: TransportFactory, group: EPGroup) -> None:
    """Whole calls and halves (send, recv) mix, on different ranks and on the same rank. Collective."""
    case = TransportCase(name="halves", tokens=(4,) * group.num_ranks, scheme="fp8_block")
    transport = make(group, case.make_placement(), case.config)
    for number in range(4):
        mine = (number + group.rank) % 4
        check_round(transport, case, group.device, number % 2, halves=(mine % 2 == 1, mine >= 2))
    transport.destroy()


def check_slots(make: TransportFactory, group: EPGroup) -> None:
    """Two open rounds do not mix, and a call out of order raises RuntimeError and has no effect. Collective."""
    cases = [TransportCase(name=f"slot-{slot}", tokens=(7 + slot,) * group.num_ranks) for slot in range(2)]
    placement, scheme = cases[0].make_placement(), get_scheme("none")
    transport = make(group, placement, cases[1].config)
    inputs = [case.inputs(group.rank).to(group.device) for case in cases]
    for slot, arguments in enumerate(inputs):
        transport.dispatch_send(arguments.x, arguments.routing, layout=Layout.COMPACT, scheme=scheme, slot=slot)
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
        expected = expected_output(case, group.rank, transport)
        assert_same_bits(result, expected, f"{case.name}, rank {group.rank}")
    transport.check()
    transport.destroy()


def check_abandon(make: TransportFactory, group: EPGroup) -> None:
    """If one rank abandons a round, the others get NaN for the tokens that they sent it, and the next round works.

    In both slots at once, with and without scales, which a combine does not have. Collective.
    """
    by_scheme = {"none": ("combine_send", "dispatch_recv"), "fp8_token": ("dispatch_recv", "combine_recv")}
    for scheme, stages in by_scheme.items():
        case = TransportCase(name=f"abandon {scheme}", tokens=(2,) * group.num_ranks, num_topk=8, scheme=scheme)
        transport = make(group, case.make_placement(), case.config)
        for stage in stages:
            _abandon_both(transport, case, stage, group)
            for slot in (0, 1):
                check_round(transport, case, group.device, slot)
        transport.destroy()


def _abandon_both(transport: Transport, case: TransportCase, stage: str, group: EPGroup) -> None:
    """Rank 0 abandons the rounds of slots 0 and 1 when they wait for `stage`; the others end theirs."""
    inputs, found = case.inputs(group.rank).to(group.device), list[Dispatched]()
    for slot in (0, 1):
        scheme = get_scheme(case.scheme)
        transport.dispatch_send(inputs.x, inputs.routing, layout=case.layout, scheme=scheme, slot=slot)
        if group.rank > 0 or stage != "dispatch_recv":
            found.append(transport.dispatch_recv(slot=slot))
    if group.rank == 0 and stage != "combine_recv":
        for slot in (0, 1):
            transport.abandon(slot=slot)
        return
    for dispatched in found:
        transport.combine_send(compute_experts(dispatched.batch, case.make_placement().starts[group.rank]), dispatched)
    for slot, dispatched in enumerate(found):
        if group.rank == 0:
            transport.abandon(slot=slot)
        elif stage == "combine_recv":
            expected = expected_output(case, group.rank, transport)
            assert_same_bits(transport.combine_recv(dispatched), expected, f"{case.name}, {stage}, rank {group.rank}")
        else:
            ones = torch.ones(case.tokens[group.rank], case.hidden, dtype=case.dtype, device=group.device)
            result = transport.combine_recv(dispatched, out=ones)
            assert bool(result.isnan().all()), f"abandoned in {stage}: rank {group.rank} got numbers"


def check_nan_weights(make: TransportFactory, group: EPGroup) -> None:
    """A NaN among the weights reaches its own token's result alone: not the next rounds' tokens, and none if its id is
    -1. Collective.
    """
    scheme, rank = get_scheme("none"), group.rank
    for layout in Layout:
        name = f"NaN weights, {layout.value}"
        case = TransportCase(
            name=name, tokens=(3,) * group.num_ranks, num_topk=8, num_experts=16, routing="holes", layout=layout
        )
        transport = make(group, case.make_placement(), case.config)
        first, inputs = transport.placement.starts[rank], case.inputs(rank).to(group.device)
        ids, weights = inputs.routing.topk_ids, inputs.routing.topk_weights
        # each expert of a rank is chosen, so that no later round has more rows of a token
        everywhere = torch.arange(8, device=ids.device, dtype=ids.dtype).expand(3, 8)
        for chosen in (everywhere, everywhere + 8):
            routing = Routing(topk_ids=chosen.contiguous(), topk_weights=torch.full_like(weights, float("nan")))
            dispatched = transport.dispatch(inputs.x, routing, layout=layout, scheme=scheme)
            result = transport.combine(compute_experts(dispatched.batch, first), dispatched)
            assert bool(result.isnan().all()), f"{name}, rank {rank}: numbers"
        check_round(transport, case, group.device)
        routing = Routing(topk_ids=ids, topk_weights=weights.masked_fill(ids < 0, float("nan")))
        dispatched = transport.dispatch(inputs.x, routing, layout=layout, scheme=scheme)
        result = transport.combine(compute_experts(dispatched.batch, first), dispatched)
        assert_same_bits(result, expected_output(case, rank, transport), f"{name} of no expert, rank {rank}")
        transport.check()
        transport.destroy()


def check_defaults(make: TransportFactory, group: EPGroup) -> None:
    """A transport is the same whatever torch's default device and dtype are: engines set them while they make a model.

    Collective.
    """
    for layout, scheme in itertools.product(Layout, ("none", "fp8_block")):
        name = f"defaults, {layout.value}, {scheme}"
        tokens, experts = tuple(range(2, 2 + group.num_ranks)), 2 * group.num_ranks
        case = TransportCase(name=name, tokens=tokens, num_topk=2, num_experts=experts, scheme=scheme, layout=layout)
        placement, config = case.make_placement(), case.config
        with engine_defaults():
            transport = make(group, placement, config)
            transport.warmup([RoundKind(num_topk=2, scheme=scheme, layout=layout)])
        check_round(transport, case, group.device)
        transport.check()
        transport.destroy()


@contextlib.contextmanager
def engine_defaults() -> Iterator[None]:
    """A default device without memory and a default dtype of 16 bits: what depends on them fails. Local."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


# by name; each takes a factory and the group, on every rank
CHECKS: dict[str, Callable[[TransportFactory, EPGroup], None]] = {
    "refusals": check_refusals,
    "slots": check_slots,
    "abandon": check_abandon,
    "num_tokens": check_num_tokens,
    "bounds": check_bounds,
    "halves": check_halves,
    "layers": check_layers,
    "sit_out": check_sit_out,
    "nan_weights": check_nan_weights,
    "defaults": check_defaults,
    "destroyed": check_destroyed,
}


def check_transport(make: TransportFactory, group: EPGroup, *, share: tuple[int, int] = (0, 1)) -> dict[str, str]:
    """Run every case and every check of this module on this rank.

    Args:
        make: builds the transport from (group, placement, config), as `ep_moe.transport.create_transport` does.
        group: 1 to 8 ranks.
        share: (i, n) runs every n-th of them from the i-th on, so that n groups share the work; the same on all ranks.
    Returns: for each check its name and "" or the error on this rank. If a transport fails on one rank in the middle of
    a round, the others may wait for it in vain: they raise PeerLostError. Collective.
    """
    first, step = share
    if not 0 <= first < step:
        raise ValueError(f"share ({first}, {step}) must be (i, n) with 0 <= i < n")
    checks: dict[str, Callable[[], None]] = {
        case.name: _case_check(make, group, case) for case in transport_cases(group.num_ranks)
    }
    checks |= {name: functools.partial(check, make, group) for name, check in CHECKS.items()}
    outcomes = {}
    for name, check in list(checks.items())[first::step]:
        try:
            check()
            outcomes[name] = ""
        except PeerLostError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of a transport under test is an outcome
            outcomes[name] = f"{type(error).__name__}: {error}"
        group.barrier()
    return outcomes


def _case_check(make: TransportFactory, group: EPGroup, case: TransportCase) -> Callable[[], None]:
    def check() -> None:
        transport = make(group, case.make_placement(), case.config)
        try:
            for halves in (False, True):  # the second round runs on the buffers as the first left them
                check_round(transport, case, group.device, halves=(halves, halves))
        finally:
            transport.destroy()

    return check
