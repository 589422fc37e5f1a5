"""The work between a front end and the ranks: generations in, tokens of each out, all ranks in step.

    leader = Leader(StoreRanks(...), limits)  # in a process of its own; `follow(channel, group, rows)` on each rank
    ticket = leader.submit(generation, on_progress)  # from any thread
    leader.run()  # until `close` or an error

The leader's process is no rank, so that its work delays none; `OneRank(rows)` is a rank in its own thread. It knows
nothing of HTTP or text: `ep_moe.serving.http` is one front end, and any other may take its place.
"""

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ep_moe.balance import rank_loads
from ep_moe.balance.reports import status_of_ranks
from ep_moe.engines.transformers.decoding.passes import RowsMade, RowsPlan
from ep_moe.group.waiting import SLICE_SECS
from ep_moe.placement import Placement
from ep_moe.serving.ranks import CannotScaleError, Ranks, RanksChangedError, ServerEndedError
from ep_moe.serving.scheduler import Generation, Limits, Progress, Scheduler

OnProgress = Callable[[Progress], None]
PREFILL, DECODE = "prefill", "decode"
LOAD_SECS = 2.0  # between two reports of the experts' load
WINDOW_SECS = 60.0  # of which `recent_rank_load` is
MOST_HELD_SECS = 0.02  # that a first plan waits for requests that have come and are not submitted yet


class DrainingError(RuntimeError):
    """The server takes no new generations: it has been asked to end, and finishes those that it has."""


def waits_by_source(before: Sequence[Sequence[float]], now: Sequence[Sequence[float]]) -> list[list[float]]:
    """[rank][source], seconds that each rank has waited for each source between two reports.

    Ranks that report one number end each collective at about the same time, so that a rank has waited for another as
    much longer as it has waited in all. Example: of 3.0, 0.5 and 2.5 s, 2.5 and 2.0 s were for rank 1.

    Args:
        before, now: by rank, as of `RowsMade.waited`; before the first report [0.0].
    """
    if all(len(each) == 1 for each in now):
        waited = [new - old for [old], [new] in zip(before, now, strict=True)]
        return [[max(mine - theirs, 0.0) for theirs in waited] for mine in waited]
    return [
        [new - (old[source] if len(old) > 1 else 0.0) for source, new in enumerate(each)]
        for old, each in zip(before, now, strict=True)
    ]


class Leader:
    """The queue, the plans, and who gets which tokens.

    Attributes:
        limits: of the queue and of all ranks' rows.
        on_plan: called after each plan with PREFILL or DECODE and its seconds, in the thread of `run`.
        on_start: called with the seconds that a sequence has waited for its row, in that thread.
        load: [layer][expert], tokens that went to each expert so far, at most LOAD_SECS old while there is work.
        rank_load: [layer][rank], the same by the ranks that had the experts at the time; copies with equal shares.
        owners: [layer][expert], the ranks that have it. rebalancing: the entries of `status_of_ranks`, {} without a
            rebalancer. As old as `load`.
        num_heals, heal_secs: how often ranks were lost and the others went on, and the time without plans in all.
        num_moved: sequences that have lost their row by that, and go on elsewhere.
        waits: [rank][source], seconds that rounds of a rank have waited for a source rank so far, as old as `load`.
    """

    def __init__(self, ranks: Ranks, limits: Limits) -> None:
        self.limits = limits
        self._ranks = ranks
        self.on_plan: Callable[[str, float], None] = lambda kind, secs: None
        self.on_start: Callable[[float], None] = lambda secs: None
        self.load: list[list[int]] = []
        self.rank_load: list[list[float]] = []
        self._place(limits.placements)
        self.rebalancing: dict[str, Any] = {}
        self.waits = [[0.0] * limits.num_ranks for _ in range(limits.num_ranks)]
        self._waited = [[0.0]] * limits.num_ranks  # as of the last report
        self._loads: dict[int, list[list[int]]] = {}  # by rank, as of the last report
        self._load_due = 0.0
        self.num_heals = self.num_moved = 0
        self.heal_secs = 0.0
        # `rank_load`, one before the window, and those in it
        self._reports = collections.deque[tuple[float, list[list[float]]]]()
        self._scheduler = Scheduler(limits)
        self._watchers: dict[int, OnProgress] = {}
        self._sent: collections.deque[tuple[RowsPlan, float]] = collections.deque()  # with the time
        self._received = 0.0  # time of the last plan's results
        self._coming = 0  # requests that will submit generations
        self._held_until: float | None = None  # the next plan
        self._prefill_secs = MOST_HELD_SECS  # of the last one
        self._changed = threading.Condition()
        self._failure: ServerEndedError | None = None
        self._closing = self._regroups = False
        self._drain_until: float | None = None

    @property
    def failure(self) -> ServerEndedError | None:
        """The error that has ended the server; None while it runs."""
        return self._failure

    @property
    def draining(self) -> bool:
        """Whether the server has been asked to end."""
        return self._drain_until is not None

    @property
    def lost(self) -> dict[int, str]:
        """Ranks that do not take part now, and why."""
        return dict(self._ranks.lost)

    @property
    def num_ranks(self) -> int:
        """Ranks that take part now."""
        return len(self._ranks.seats)

    @property
    def ranks(self) -> list[tuple[str, str]]:
        """The state of each rank of the launch, and its error if it is "lost": it is started again, or awaits `scale`.

        Others are "serving", "leaving" until they have ended, "loading" (it joins when it is ready) or "left".
        """
        seats, wanted, lost, ending = self._ranks.seats, self._ranks.wanted, self.lost, self._ranks.ending
        found = list[tuple[str, str]]()
        for rank in range(self.limits.num_ranks):
            if rank in seats:
                state = "serving" if rank in wanted else "leaving"
            elif rank in ending:
                state = "leaving"
            else:
                state = "lost" if rank in lost else "loading" if rank in wanted else "left"
            found.append((state, lost[rank] if state == "lost" else ""))
        return found

    @property
    def num_running(self) -> int:
        """Sequences that have a row now."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Generations that wait for a row."""
        return self._scheduler.num_waiting

    @property
    def recent_rank_load(self) -> list[list[float]]:
        """`rank_load` of the last minute of the ranks that take part now: since the last report before it, or since
        the first one if there is none."""
        reports, seats = list(self._reports), self._ranks.seats
        last = reports[-1][1] if reports else self.rank_load
        first = reports[0][1] if len(reports) > 1 else [[0.0] * len(layer) for layer in last]
        return [[new[seat] - old[seat] for seat in seats] for old, new in zip(first, last, strict=True)]

    def usage(self, rank: int) -> tuple[int, int]:
        """Rows of a rank that have a sequence now, and the positions that these have filled."""
        return self._scheduler.usage(rank)

    def prefix_tokens(self, rank: int) -> int:
        """Tokens in the prefix cache of a rank."""
        return self._scheduler.prefix_tokens(rank)

    def most_new_tokens(self, prompt: tuple[int, ...]) -> int:
        """The most new tokens after a prompt. Errors: BadRequestError for one that is not served. Any thread."""
        return self._scheduler.most_new_tokens(prompt)

    def submit(self, generation: Generation, on_progress: OnProgress) -> int:
        """Queue a generation; returns the ticket that `cancel` takes.

        Args:
            on_progress: called in the thread of `run`, and must not block; the last call has `finish` or `error`.
        Errors: BadRequestError, QueueFullError, DrainingError, ServerEndedError. Any thread.
        """
        with self._changed:
            self._check_open()
            ticket = self._scheduler.submit(generation)
            self._watchers[ticket] = on_progress
            self._changed.notify()
        return ticket

    def _check_open(self) -> None:
        if self._failure is not None or self._closing:
            raise ServerEndedError(str(self._failure or "the server is closed"))
        if self.draining:
            raise DrainingError("the server is about to end and takes no new requests")

    def scale(self, ranks: Collection[int]) -> None:
        """Have these ranks of the launch serve, and no others: returns at once; `ranks` tells how far they are.

        A rank that is to go hands its experts over, and its sequences go on elsewhere. One that is to come, after it
        has left or was lost, is started, and joins when it has loaded the model.

        Errors: CannotScaleError while ranks regroup, and for ranks that end together; ValueError for no rank, or one
        that the launch has not; DrainingError, ServerEndedError. Any thread.
        """
        most = self.limits.num_ranks
        if not ranks or not {*ranks} <= {*range(most)}:
            raise ValueError(f"ranks {sorted(ranks)} must be one or more of the launch, 0 to {most - 1}")
        with self._changed:
            self._check_open()
            if self._regroups:
                raise CannotScaleError("ranks regroup just now, after a loss or to scale: ask again in some seconds")
            self._ranks.scale(frozenset(ranks))
            self._changed.notify()

    def expect(self) -> Callable[[], None]:
        """Note that a request has come; returns what to call, once or more, when it has submitted its generations, or
        submits none. A prefill waits a little for those that come, so that all start together. Any thread."""
        with self._changed:
            self._coming += 1
        expected = [1]

        def done() -> None:
            with self._changed:
                self._coming -= sum(expected)
                expected.clear()
                self._changed.notify()

        return done

    def cancel(self, ticket: int) -> bool:
        """End a generation and free its row; False if it has ended already. Any thread."""
        with self._changed:
            self._watchers.pop(ticket, None)
            return self._scheduler.cancel(ticket)

    def close(self) -> None:
        """End `run` here and `follow` on the ranks; sequences that run are cut off. Any thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def drain(self, secs: float) -> None:
        """Refuse new generations, and `close` once those that run or wait have ended, after `secs` at the latest.

        Takes no lock, so that a signal handler may call it. Any thread.
        """
        self._drain_until = time.monotonic() + secs

    def run(self) -> None:
        """Carry out plans until `close`. Errors: ServerEndedError; those of the model if the rank is here.

        However it ends, every generation gets its last progress, and `submit` raises ServerEndedError from then on.
        """
        error, more = ServerEndedError("the server is closed"), True
        try:
            while more or self._sent:
                try:
                    more = more and self._send()
                    if self._sent:
                        self._receive()
                    elif more and self._ranks.changes:
                        self._regroup()
                except RanksChangedError:
                    self._regroup()
            if self.draining:
                error = ServerEndedError("the server was asked to end, and this request was not done in time")
            self._ranks.close()
        except Exception as failure:
            error = (
                failure
                if isinstance(failure, ServerEndedError)
                else ServerEndedError(f"rank 0: {type(failure).__name__}: {failure}")
            )
            raise
        finally:
            self._end(error)

    def _send(self) -> bool:
        """Send plans as far ahead as allowed; waits while there is nothing to do. False once the server is closed."""
        while len(self._sent) < self._ranks.most_sent and not self._ranks.changes:
            with self._changed:
                if self._closing or (self._drain_until is not None and time.monotonic() >= self._drain_until):
                    return False
                held = self._held_secs()
                plan = None if held else self._scheduler.next_plan()
                if plan is None and not self._sent:
                    if self.draining and not held:
                        return False
                    self._changed.wait(held or SLICE_SECS)
            if plan is not None:
                now = time.perf_counter()
                if now >= self._load_due:
                    plan, self._load_due = dataclasses.replace(plan, load=True), now + LOAD_SECS
                self._ranks.send(plan)
                self._sent.append((plan, now))
            elif self._sent:
                break
            else:
                self._ranks.check()  # a rank may be lost while the server is idle
        return True

    def _held_secs(self) -> float:
        """How long the next plan waits for requests that have come, because they may start with it; 0 for not at all.

        While the ranks are at work it waits until they are done. If nothing runs, for half of a prefill at most.
        Streams do not wait.
        """
        scheduler = self._scheduler
        if self._coming and scheduler.may_start:
            if self._sent:
                return SLICE_SECS
            if scheduler.num_waiting and not scheduler.decodes:
                now = time.monotonic()
                if self._held_until is None:
                    self._held_until = now + min(MOST_HELD_SECS, self._prefill_secs / 2)
                if now < self._held_until:
                    return self._held_until - now
        self._held_until = None
        return 0.0

    def _receive(self) -> None:
        """Wait for the results of the oldest plan, and hand out its tokens."""
        made = self._ranks.receive()
        plan, sent = self._sent.popleft()
        start, self._received = max(sent, self._received), time.perf_counter()
        if plan.load:
            self._report_load(made, start)
        with self._changed:
            found = self._scheduler.take(made)
        self._hand_out(found)
        waits, self._scheduler.waits = self._scheduler.waits, []
        for wait in waits:
            self.on_start(wait)
        if any(plan.chunks):
            self._prefill_secs = self._received - start
        self.on_plan(PREFILL if any(plan.chunks) else DECODE, self._received - start)

    def _hand_out(self, found: Sequence[tuple[int, Progress]]) -> None:
        """Tell those who have asked."""
        with self._changed:
            watchers = [self._watchers.get(ticket) for ticket, _ in found]
            for ticket, progress in found:
                if progress.finish or progress.error is not None:
                    self._watchers.pop(ticket, None)
        for watcher, (_, progress) in zip(watchers, found, strict=True):
            if watcher is not None:
                with contextlib.suppress(RuntimeError):  # a front end that has ended; `close` ends the ranks
                    watcher(progress)

    def _regroup(self) -> None:
        """Go on without some ranks, or with others: its time is that in which no plan is carried out."""
        start, before = time.perf_counter(), self._ranks.seats
        self._regroups = True
        done = self._ranks.regroup()
        self._regroups = False
        with self._changed:
            found, moved = self._scheduler.regroup(done.seats, done.answers, done.forgotten, done.errors)
        self._sent.clear()
        self._place(done.placements or self._placements)
        self.rebalancing = {}
        self._loads = {rank: load for rank, load in self._loads.items() if rank in done.answers}
        self._waited = [[0.0]] * len(done.seats)
        self.num_moved += moved
        if not {*before} <= done.answers.keys() | {*done.left}:  # ranks of before are lost
            self.num_heals, self.heal_secs = self.num_heals + 1, self.heal_secs + time.perf_counter() - start
        self._hand_out(found)

    def _report_load(self, made: Sequence[RowsMade], start: float) -> None:
        """Take what ranks report with the results of a plan that began then."""
        seats, new = self._ranks.seats, [[0] * len(layer) for layer in made[0].load]
        for seat, each in zip(seats, made, strict=True):
            before = self._loads.get(seat, [[0] * len(layer) for layer in each.load])
            new = [
                [total + now - then for total, now, then in zip(*layers, strict=True)]
                for layers in zip(new, each.load, before, strict=True)
            ]
            self._loads[seat] = each.load
        load = [[a + b for a, b in zip(*layers, strict=True)] for layers in zip(self.load or new, new, strict=True)]
        load = load if self.load else new
        so_far = self.rank_load or [[0.0] * self.limits.num_ranks for _ in new]
        self.rank_load = [list(layer) for layer in so_far]
        for layer, ranks in zip(self.rank_load, rank_loads(new, self._placements), strict=True):
            for seat, tokens in zip(seats, ranks, strict=True):
                layer[seat] += tokens
        self.load = load
        self._reports.append((start, self.rank_load))
        while len(self._reports) > 1 and self._reports[1][0] <= start - WINDOW_SECS:
            self._reports.popleft()
        waited = [each.waited for each in made]
        waits = waits_by_source(self._waited, waited)
        self.waits = [list(row) for row in self.waits]
        for seat, row in zip(seats, waits, strict=True):
            for source, secs in zip(seats, row, strict=True):
                self.waits[seat][source] += secs
        self._waited = waited
        if made[0].rebalancing:
            self.rebalancing = status_of_ranks([each.rebalancing for each in made])
            self._place(made[0].placements)

    def _place(self, placements: Sequence[Placement]) -> None:
        """Take the placements of the ranks that take part."""
        seats, self._placements = self._ranks.seats, placements
        self.owners = [[[seats[rank] for rank in ranks] for ranks in layer.owners()] for layer in placements]

    def _end(self, error: ServerEndedError) -> None:
        with self._changed:
            self._failure = error
            watchers, self._watchers = list(self._watchers.values()), {}
        for watcher in watchers:
            with contextlib.suppress(RuntimeError):  # a front end that has ended already
                watcher(Progress(error=error))
