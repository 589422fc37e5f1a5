"""A round's results are sent to the source ranks once, whatever fails in between or is launched again.

A source rank restores its sentinels when it has read a row: results sent again would be taken for the next round's.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_moe.group import EPGroup
from ep_moe.transport.slots import CLOSED
from nvlink_faults.common import (
    DEVICE,
    EXPERTS_PER_RANK,
    HIDDEN,
    NO_RANK_LOST,
    NUM_RANKS,
    NUM_TOKENS,
    begin,
    check_round,
    expected,
    finish,
    inputs,
    make_transport,
    on_ranks,
    send,
)

CULPRIT = 1
# the call that a slot waits for when it is abandoned, and the part of the first `abandon` that fails
FAILURES = (
    ("dispatch_recv", "discard"),
    ("dispatch_recv", "send"),
    ("combine_send", "receive"),
    ("combine_recv", "receive"),
)
READ_SECS = 0.5  # for others to read results that a failed call may have sent
WHOLE, SEND, RECEIVE = (True, True), (True, False), (False, True)
# the launches of a combine; the last is one too many
LAUNCHES = {
    "whole-again": (WHOLE, WHOLE),
    "send-after-whole": (WHOLE, SEND),
    "send-again": (SEND, RECEIVE, SEND),
    "send-again-at-once": (SEND, SEND),
    "whole-after-halves": (SEND, RECEIVE, WHOLE),
    "receive-again": (SEND, RECEIVE, RECEIVE),
}


def failing_once(call: Callable[..., Any], when: Callable[..., bool] = lambda *_, **__: True) -> Callable[..., Any]:
    """The same, but it raises the first time that it is called so."""
    failed: list[bool] = []

    def once(*args: Any, **options: Any) -> Any:
        if not failed and when(*args, **options):
            failed.append(True)
            raise torch.OutOfMemoryError("as of a full GPU")
        return call(*args, **options)

    return once


def begin_until(transport: Any, round_: int, stage: str) -> Any:
    """Run a round on slot 0 until it waits for `stage`; returns its batch if it has one."""
    send(transport, round_)
    if stage == "dispatch_recv":
        return None
    dispatched = transport.dispatch_recv()
    if stage == "combine_recv":
        transport.combine_send(torch.ones(dispatched.batch.output_shape, device=DEVICE), dispatched)
    return dispatched


def abandon_twice(group: EPGroup) -> list[str]:
    """The culprit abandons rounds, and its first call fails; returns the errors in them or in the next round."""
    transport, round_, wrong = make_transport(group), 0, []
    dispatches, combines = transport._dispatches, transport._combines
    launches = dispatches.receive, combines.send, combines.receive
    for stage, failure in FAILURES:
        if group.rank == CULPRIT:
            begin_until(transport, round_, stage)
            if failure == "discard":
                dispatches.receive = failing_once(dispatches.receive)
            elif failure == "send":
                combines.send = failing_once(combines.send)
            else:
                combines.receive = failing_once(combines.receive)
            with pytest.raises(torch.OutOfMemoryError):
                transport.abandon()
            time.sleep(READ_SECS)
            transport.abandon()
            dispatches.receive, combines.send, combines.receive = launches
        else:
            out, _ = finish(transport, begin(transport, round_))
            wrong += judge(out, group.rank, round_, stage, group.num_ranks)
        transport.check()
        group.barrier()
        check_round(transport, round_ + 1)
        round_ += 2
    transport.destroy()
    return wrong


def judge(out: torch.Tensor, rank: int, round_: int, stage: str, num_ranks: int) -> list[str]:
    """Tokens sent to the culprit are NaN, or its ones if it had sent results; the others are right."""
    ids = inputs(rank, round_, num_ranks)[1].topk_ids
    went = (ids // EXPERTS_PER_RANK == CULPRIT).any(1)
    wanted = expected(rank, round_, (True,) * num_ranks)
    right = torch.equal(out[~went], wanted[~went])
    right = right and bool(out[went].isnan().all() if stage != "combine_recv" else out[went].isfinite().all())
    return [] if right else [f"round {round_}, {stage}: {out}"]


def test_abandon_goes_on_where_it_failed() -> None:
    ended = on_ranks(abandon_twice, config=NO_RANK_LOST)
    assert ended == [[]] * NUM_RANKS, ended


def launch_combine(transport: Any, y: torch.Tensor | None, send: bool, receive: bool, out: torch.Tensor) -> None:
    """Launch halves of the combine of slot 0's round, whatever the slot waits for."""
    round_ = transport._slots.find(0).state
    if receive:
        transport._combines.receive(round_, y, send=send, out=out)
    else:
        transport._combines.send(round_, y)


def launch_again(group: EPGroup) -> list[str]:
    """The culprit's kernels run once too often, as when a graph is replayed; returns the errors."""
    transport, wrong = make_transport(group), []
    for index, (name, launches) in enumerate(LAUNCHES.items()):
        dispatched, out = begin(transport, 2 * index), None
        if group.rank == CULPRIT:
            out = torch.ones(NUM_TOKENS, HIDDEN, device=DEVICE)
            y = torch.ones(dispatched.batch.output_shape, device=DEVICE)
            for send, receive in launches[:-1]:
                launch_combine(transport, y, send, receive, out)
        else:
            finish(transport, dispatched)
        group.barrier()  # the others have this round's results
        if group.rank == CULPRIT:
            (send, receive), again = launches[-1], torch.ones(NUM_TOKENS, HIDDEN, device=DEVICE)
            launch_combine(transport, 7 * y, send, receive, again)
            if receive and not bool(again.isnan().all()):
                wrong.append(f"{name}: {again}")
            if name == "send-again-at-once":
                launch_combine(transport, None, False, True, out)
            entry = transport._slots.find(0)
            entry.next, entry.state = CLOSED
            if not bool(out.isfinite().all()):
                wrong.append(f"{name}: {out}")
            with pytest.raises(RuntimeError, match=f"rank {CULPRIT} has run round {2 * index} out of order"):
                transport.check()
        transport.check()
        group.barrier()
        check_round(transport, 2 * index + 1)
    transport.destroy()
    return wrong


def test_a_combine_that_runs_twice_sends_nothing() -> None:
    ended = on_ranks(launch_again, config=NO_RANK_LOST)
    assert ended == [[]] * NUM_RANKS, ended
