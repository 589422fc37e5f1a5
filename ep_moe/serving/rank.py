"""A rank's part of a server: it carries out the front end's plans, and tells what they have made."""

import queue
from collections.abc import Callable
from typing import Any, Protocol

from ep_moe.engines.transformers.decoding.passes import RowsMade, RowsPlan
from ep_moe.group import EPGroup
from ep_moe.group.waiting import SLICE_SECS
from ep_moe.serving.channel import RankChannel


class Rows(Protocol):
    """What a rank does with plans; `RowDecoder` is one."""

    def run(self, plan: RowsPlan) -> RowsMade:
        """Carry out this rank's part. Collective."""
        ...


def follow(channel: RankChannel, group: EPGroup, rows: Rows, *, check: Callable[[], None] = lambda: None) -> None:
    """Carry out the front end's plans until it closes.

    Args:
        check: called now and then while there is no plan.
    Errors: those of the model and of `check`; PeerLostError; ValueError for bytes that no front end has sent.
    Collective.
    """
    round_ = 0
    while True:
        round_ += 1
        with group.waiting("plan", round_):
            order = _next(channel, group, check)
        if order is None:
            return
        epoch, plan = order
        channel.answer(epoch, rows.run(plan))


def _next(channel: RankChannel, group: EPGroup, check: Callable[[], None]) -> tuple[int, Any] | None:
    """Wait for the next order, without a timeout."""
    while True:
        check()
        group.check()
        try:
            return channel.receive(SLICE_SECS)
        except queue.Empty:
            continue
        except RuntimeError as error:
            raise group.explain(error) from error
