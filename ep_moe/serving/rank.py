"""A rank's part of a server: it carries out the front end's plans, and tells what they have made."""

import queue
from collections.abc import Callable
from typing import Any, Protocol

from ep_moe.engines.transformers.decoding.passes import RowsMade, RowsPlan
from ep_moe.group import STILL_THERE, EPGroup, PeerLostError
from ep_moe.group.waiting import SLICE_SECS
from ep_moe.serving.channel import Joined, Lost, Membership, RankChannel


class Rows(Protocol):
    """What a rank does with plans; `RowDecoder` is one."""

    def run(self, plan: RowsPlan) -> RowsMade:
        """Carry out this rank's part. Collective."""
        ...


class Member:
    """A rank of a server that cannot go on without the others.

    Attributes:
        group: its ranks. rows: None until it has joined others.
        regroups: whether it can go on with other ranks.
    """

    regroups = False

    def __init__(self, group: EPGroup, rows: Rows | None) -> None:
        self.group, self.rows = group, rows

    def regroup(self, epoch: int, seats: tuple[int, ...], deaths: tuple[int, ...]) -> Joined:
        """Go on with these ranks, in a new `group` (`EPGroup.regroup`); a plan that had failed has no effect on `rows`.
        Collective."""
        raise RuntimeError(f"rank {self.group.rank} cannot go on with other ranks")

    def hand_over(self, leaving: tuple[int, ...]) -> None:
        """Give what these ranks of `group` have to its others; `regroup` follows there. Collective."""
        raise RuntimeError(f"rank {self.group.rank} cannot go on with other ranks")


def follow(channel: RankChannel, member: Member, *, check: Callable[[], None] = lambda: None) -> None:
    """Carry out the front end's orders until it closes, or has this rank leave.

    A member that regroups reports lost ranks, and waits for the next membership.

    Args:
        check: called now and then while there is no plan.
    Errors: those of the model and of `check`; ValueError for bytes that no front end has sent; PeerLostError unless the
    member regroups. Collective.
    """
    epoch, number, waits = 0, 0, member.rows is None  # waits: for the next membership, and carries out nothing before
    while True:
        number += 1
        try:
            if waits:
                order = _next(channel, check)
            else:
                with member.group.waiting("plan", number):
                    order = _next(channel, check, member.group)
            if order is None:
                return
            if isinstance(order[1], Membership):
                epoch, number, waits = order[0], 0, True
                if order[1].leaving and member.rows is not None:
                    member.hand_over(order[1].leaving)
                if member.group.seat in order[1].leaving:
                    return
                joined = member.regroup(epoch, order[1].seats, order[1].deaths)
                channel.answer(epoch, joined)
                waits = False
            elif order[0] == epoch and not waits:
                assert member.rows is not None
                channel.answer(epoch, member.rows.run(order[1]))
        except Exception as error:
            if not _report(channel, epoch, member, error):
                raise
            waits = True


def _report(channel: RankChannel, epoch: int, member: Member, error: Exception) -> bool:
    """Tell the front end of a lost rank, which may be this one; False if this one cannot go on.

    Errors: the loss behind an error, if there is one and this rank cannot go on.
    """
    cause = member.group.latest.explain(error)  # kept nowhere: its traceback has the frames of the pass that failed
    can_report = member.regroups and not channel.is_gone
    if isinstance(cause, PeerLostError) and can_report:
        there = cause.reason.startswith(STILL_THERE)
        channel.answer(epoch, Lost(seats=cause.seats, text=str(cause), still_there=there))
        return True
    channel.fails = True
    if cause is not error:
        raise cause from error
    if can_report:  # now: a process without memory may never end, and is killed then
        seat = member.group.latest.seat
        text = f"rank {seat} failed: {type(error).__name__}: {error}"
        channel.answer(epoch, Lost(seats=(seat,), text=text, still_there=False))
    return False


def _next(channel: RankChannel, check: Callable[[], None], group: EPGroup | None = None) -> tuple[int, Any] | None:
    """Wait for the next order, without a timeout."""
    while True:
        check()
        if group is not None:
            group.check()
        try:
            return channel.receive(SLICE_SECS)
        except queue.Empty:
            continue
