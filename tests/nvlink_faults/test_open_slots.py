"""on_peer_loss "mask", rounds open on two slots: a loss found on one ends the open rounds of both, on every rank."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lost import record, recorded

from ep_moe.group import EPGroup
from ep_moe.launch import RankFailedError
from nvlink_faults.common import (
    CONFIG,
    DEVICE,
    HIDDEN,
    NUM_RANKS,
    NUM_TOKENS,
    be_lost,
    begin,
    blindfolded,
    compute,
    expected,
    expected_counts,
    finish,
    make_transport,
    on_ranks,
    send,
)

VICTIM = 1
OPEN_ROUND, FOUND_ROUND = 2, 3  # the round that is open on slot 0 at the loss, and that which finds it on slot 1
WITHOUT = tuple(rank != VICTIM for rank in range(NUM_RANKS))
# how far each rank is with slot 0's round when the loss is found, a fourth as the third; "blind" sends after it and
# before the agreement
PROGRESS = {
    "all-sent": ("sent", "sent", "sent"),
    "sent-and-not": ("sent", "sent", "late"),
    "sent-and-blind": ("sent", "late", "blind"),
    "received-and-sent": ("received", "sent", "sent"),
    "returned-and-sent": ("returned", "returned", "sent"),
}


def advance(transport: Any, progress: str) -> Any:
    """Run slot 0's round up to its stage before the loss; returns the batch if it has been received.

    A barrier separates the halves, so that no rank waits for one that will not send.
    """
    dispatched = None
    group, step = transport._group, ["late", "blind", "sent", "received", "returned"].index(progress)
    if step >= 2:
        send(transport, OPEN_ROUND)
    group.barrier()
    if step >= 3:
        dispatched = transport.dispatch_recv(slot=0)
    if step >= 4:
        transport.combine_send(compute(transport, dispatched), dispatched)
    group.barrier()
    return dispatched


def bring_home(transport: Any, progress: str, dispatched: Any) -> torch.Tensor:
    """Finish slot 0's round from its stage; returns the result."""
    dispatched = dispatched or transport.dispatch_recv(slot=0)
    out = torch.ones(NUM_TOKENS, HIDDEN, device=DEVICE)
    if progress == "returned":
        return transport.combine_recv(dispatched, out=out).cpu()
    return transport.combine(compute(transport, dispatched), dispatched, out=out).cpu()


def lose_a_rank_between(group: EPGroup, progress: str, folder: Path) -> None:
    """Open a round on slot 0, lose the victim, find it on slot 1, end the open round, run more on both slots."""
    transport, mine = make_transport(group, on_peer_loss="mask", num_slots=2), PROGRESS[progress][min(group.rank, 2)]
    send(transport, 0)
    bring_home(transport, "sent", None)
    finish(transport, begin(transport, 1, slot=1))
    dispatched = advance(transport, mine)
    if group.rank == VICTIM:
        be_lost("SIGKILL")
    found = begin(transport, FOUND_ROUND, slot=1)
    lost = transport.combine(compute(transport, found), found, out=torch.ones(NUM_TOKENS, HIDDEN, device=DEVICE))
    lost = lost.cpu()
    if mine == "blind":
        with blindfolded(transport):
            send(transport, OPEN_ROUND)
    transport.check()
    start = time.monotonic()
    if mine == "late":
        send(transport, OPEN_ROUND)
    out = bring_home(transport, mine, dispatched)
    secs = time.monotonic() - start
    transport.check()
    for round_ in range(FOUND_ROUND + 1, FOUND_ROUND + 5):
        dispatched = begin(transport, round_, slot=round_ % 2)
        after, counts = finish(transport, dispatched)
        assert counts == expected_counts(group.rank, round_, WITHOUT), (round_, counts)
        assert torch.equal(after, expected(group.rank, round_, WITHOUT)), (round_, after)
    transport.check()
    record(folder, group.rank, (lost, out, secs, transport._faults._members._number, transport.active_ranks))
    transport.destroy()


@pytest.mark.parametrize("progress", PROGRESS)
def test_a_loss_ends_the_open_rounds_of_all_slots(tmp_path: Path, progress: str) -> None:
    ended = on_ranks(lose_a_rank_between, progress, tmp_path)
    assert isinstance(ended, RankFailedError), ended
    assert ended.rank == VICTIM, ended
    told = recorded(tmp_path)
    assert set(told) == set(range(NUM_RANKS)) - {VICTIM}
    for rank, (lost, out, secs, agreements, active) in told.items():
        assert bool(lost.isnan().all()), (rank, lost)
        assert bool(out.isnan().all()), (rank, out)
        assert secs < CONFIG.timeout_secs - 1, (rank, secs)
        assert (agreements, active) == (1, WITHOUT), rank
