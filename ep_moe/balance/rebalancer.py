"""Moving experts of a model while it runs, by the load that its layers count.

Letters: A MoE layers, E logical experts, P positions (physical experts), L positions of this rank, R ranks.
"""

import collections
import concurrent.futures
import dataclasses
import enum
import itertools
import json
import logging
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ep_moe.balance.carrier import ALIGNMENT, Carrier, Copy, ExpertRows, Parcel, copy_all
from ep_moe.balance.load import balancedness, rank_loads
from ep_moe.balance.pieces import Piece, pieces_of
from ep_moe.balance.plan import plan_placement
from ep_moe.balance.votes import Votes
from ep_moe.fields import shown, typed
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.group.symmetric import why_unreachable
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement
from ep_moe.routing import PositionTable

MOST_BYTES = 1 << 30  # of spare memory by default: what is copied in one step takes less than 1 ms on a GPU
_STEPS_PER_VOTE = 4
_SWITCH_SECS = 2e-5  # how long the planning thread may keep the interpreter from the main thread
_SHARED = ("w13_input_scale",)  # of all experts

_log = logging.getLogger(__name__)


class RebalanceState(enum.Enum):
    """What a `Rebalancer` does at the moment. The values are texts for logs and metrics."""

    IDLE = "idle"
    PLANNING = "planning"
    MOVING = "moving"
    FAILED = "failed"  # the last rebalance; the next one may begin


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RebalanceStatus:
    """What a `Rebalancer` has done, the same on all ranks but for `moved_bytes` and `seconds`.

    Args:
        state: at the moment.
        steps: calls of `step`.
        rebalances: that have moved experts and are complete. declined: whose plans gained less than `min_gain`.
        failures: rebalances that failed. last_error: of the last rebalance if it failed, else "".
        moved_experts: that all ranks have received so far. moved_bytes: that this rank has received from others.
        seconds: from the begin of the last complete rebalance to its end.
        balancedness_before, balancedness_after: of the last plan, whether it was carried out or declined, by the load
            that it was made from; None before the first one and for placements of the caller.
    """

    state: RebalanceState = RebalanceState.IDLE
    steps: int = 0
    rebalances: int = 0
    declined: int = 0
    failures: int = 0
    last_error: str = ""
    moved_experts: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    balancedness_before: float | None = None
    balancedness_after: float | None = None


class Rebalancer:
    """Moves experts between the ranks of layers that run, so that the fullest rank gets less load.

    Every rank calls `step` between forward passes, equally often. A rebalance then takes many steps: rank 0 gets the
    counts of all ranks and plans in a thread; the experts that a plan moves are copied, a part of a layer at a time,
    into spare memory of the ranks that get them; once it has arrived everywhere, all ranks overwrite the positions
    and the table of that layer in the same call of `step`. Tensors keep their addresses: captured CUDA graphs
    compute with the new placement.

    Args:
        layers: of one model, whose `positions` are a `PositionTable(counted=True, changing=True)` each, as those of
            `ep_moe.engines.transformers.from_pretrained` are. Layers that share weights and table with these, as
            those of decode passes do, change with them.
        group: the ranks.
        every: a rebalance begins each time that `step` has been called this often, unless one is under way; None:
            only after `request`.
        min_gain: plans that lower the load of the layers' fullest ranks by less than this part are declined.
        max_moves: the most experts that a rebalance moves; None: as many as the plan gains by.
        max_bytes: spare memory of a rank. By default the bytes of one layer's positions, at most 1 GiB, but of two
            experts at least, which change places inside a rank. What a layer moves is split if it exceeds it.
        num_groups, ranks_per_node: as of `plan_placement`; `ranks_per_node` is by default the group's.
        mapped: store weights in memory of the other ranks, which all ranks have mapped; False: send them by
            collectives of their own, which takes half of `max_bytes` for outgoing weights. By default True on GPUs
            that reach each other.
    Errors: ValueError, on every rank, for bad arguments, layers that cannot be changed, ranks whose layers, placements
        or arguments differ, and a `max_bytes` below an expert. Collective, host sync.
    """

    def __init__(
        self,
        layers: Sequence[ExpertParallelMoE],
        group: EPGroup,
        *,
        every: int | None = None,
        min_gain: float = 0.05,
        max_moves: int | None = None,
        max_bytes: int | None = None,
        num_groups: int = 1,
        ranks_per_node: int | None = None,
        mapped: bool | None = None,
    ) -> None:
        self._layers, self._group, self._rank = tuple(layers), group, group.rank
        self._every, self._min_gain = every, min_gain
        ranks_per_node = group.local_num_ranks if ranks_per_node is None else ranks_per_node
        self._options: dict[str, Any] = {"num_groups": num_groups, "ranks_per_node": ranks_per_node}
        self._options["max_moves"] = max_moves
        group.check()
        error, form, rows = "", list[Any](), list[ExpertRows]()
        try:
            self._check_arguments(max_bytes, mapped)
            rows = [_rows_of(layer, index, group) for index, layer in enumerate(self._layers)]
            placements = [layer.placement for layer in self._layers]
            form = [every, float(min_gain), max_moves, max_bytes, num_groups, ranks_per_node, mapped]
            form += [[each.form for each in rows], zlib.crc32(repr([_key(each) for each in placements]).encode())]
        except ValueError as refusal:
            error = str(refusal)
        _agree(group, error, form)
        self._rows, self._tables = tuple(rows), tuple(_table_of(layer) for layer in self._layers)
        wanted = group.device.type == "cuda" if mapped is None else mapped
        unreachable = why_unreachable(group) if wanted else ""
        if mapped and unreachable:
            raise RuntimeError(f"mapped is True, but {unreachable}")
        self.mapped = wanted and not unreachable
        starts = placements[0].starts
        largest, halves = max(each.num_bytes for each in rows), 1 if self.mapped else 2
        if max_bytes is None:
            most_positions = max(end - start for start, end in itertools.pairwise(starts))
            max_bytes = max(min(largest * most_positions, MOST_BYTES), 2 * largest * halves)
        self.max_bytes = max_bytes
        if max_bytes // halves < largest:
            raise ValueError(
                f"max_bytes ({max_bytes}) is below {halves * largest}, the bytes of {halves} expert{'s' * (halves > 1)}"
            )
        self._starts, self._num_experts = starts, placements[0].num_experts
        self._rank_of = [rank for rank in range(group.num_ranks) for _ in placements[0].local_experts(rank)]
        self._count_bytes = -(-len(self._layers) * self._num_experts * 8 // ALIGNMENT) * ALIGNMENT
        spare = max(max_bytes // halves // ALIGNMENT * ALIGNMENT, self._count_bytes * group.num_ranks)
        self._carrier = Carrier(group, spare, mapped=self.mapped)
        self._votes = Votes(group)
        self._planner = concurrent.futures.ThreadPoolExecutor(1, "ep_moe-plan") if group.rank == 0 else None
        self._status = RebalanceStatus()
        self._work: Callable[[], bool] | None = None  # polled in each step until all ranks have said that it is done
        self._then: Callable[[], None] | None = None
        self._tick, self._requested = 0, False
        self._pieces = collections.deque[Piece]()
        self._given: list[Piece] | None = None  # by `request`
        self._counts: torch.Tensor | None = None  # at the begin of the last rebalance
        self._snapshot: torch.Tensor | None = None
        self._plan: concurrent.futures.Future[bytes] | None = None
        self._switch_secs = sys.getswitchinterval()
        self._begun, self._published, self._destroyed = 0.0, False, False
        self._warm_up()

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Load the kernels of a rebalance and pin its host memory, which would hold up the first one's passes."""
        counts, parcel = torch.stack([table.counts for table in self._tables]), self._carrier.spare
        torch.where((counts - counts < 0).any(), counts, counts)
        pinned = [self._carrier.read(counts) for _ in range(self._group.num_ranks if self._planner else 0)]
        for rows in self._rows:
            if self._starts[self._rank] < self._starts[self._rank + 1]:
                copy_all(rows.copies(0, parcel[: rows.num_bytes]))
        self._carrier.wait()
        del pinned  # the allocator keeps it
        self._group.barrier()  # a rank that is ahead may store into the memory of another

    def _check_arguments(self, max_bytes: int | None, mapped: bool | None) -> None:
        limits = {"every": self._every, "max_moves": self._options["max_moves"], "max_bytes": max_bytes}
        for name, value in limits.items():
            if value is not None and typed(value, int, name) < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        if not 0 <= typed(self._min_gain, float, "min_gain") < 1:
            raise ValueError(f"min_gain ({self._min_gain}) is not in [0, 1)")
        if mapped not in (None, False, True):
            raise ValueError(f"mapped ({shown(mapped)}) is not True, False or None")
        if not self._layers:
            raise ValueError("there are no layers")
        first = None
        for index, layer in enumerate(self._layers):
            if not isinstance(layer, ExpertParallelMoE):
                raise ValueError(f"layers[{index}] ({shown(layer)}) is no ExpertParallelMoE")
            _table_of(layer, index)
            sizes = layer.placement.num_experts, layer.placement.starts
            first = first or sizes
            if sizes != first:
                raise ValueError(f"layers[{index}] has num_experts and starts {sizes}, layers[0] {first}")
        if len({id(layer.positions) for layer in self._layers}) < len(self._layers):
            raise ValueError("two layers have the same table of positions")
        table = self._layers[0].placement
        load = torch.ones(1, table.num_experts)  # the planner checks its own arguments
        plan_placement(load, table.num_physical, self._group.num_ranks, previous=[table], **self._options)

    @property
    def status(self) -> RebalanceStatus:
        """What has been done so far. Local, no host sync."""
        return self._status

    @property
    def is_active(self) -> bool:
        """Whether a rebalance is wanted or under way; the same on all ranks. Local."""
        return self._requested or self._work is not None

    def request(self, placements: Sequence[Placement] | None = None) -> None:
        """Begin a rebalance in the next `step`, if none is under way.

        Every rank calls it between the same two steps.

        Args:
            placements: those to bring about, one for each layer; by default they are planned.
        Errors: ValueError, on every rank, for placements that do not fit the layers, differ between ranks, cannot be
            reached with `max_bytes`, or come while a rebalance is under way: the old ones stay valid. Local without
            placements, with them collective, host sync.
        """
        self._check_open()
        if placements is None:
            self._requested = self._requested or self._work is None
            return
        error, pieces, form = "", list[Piece](), list[Any]()
        try:
            if self.is_active:
                raise ValueError("a rebalance is under way; placements can be requested once it is complete")
            pieces = self._pieces_to(placements)
            form = [zlib.crc32(repr([_key(each) for each in placements]).encode())]
        except ValueError as refusal:
            error = str(refusal)
        _agree(self._group, error, form)
        self._given, self._requested = pieces, True

    def _pieces_to(self, placements: Sequence[Placement]) -> list[Piece]:
        """The way from the placements now to others. Errors: ValueError."""
        if len(placements) != len(self._layers):
            raise ValueError(f"there are {len(placements)} placements for {len(self._layers)} layers")
        found, halves = list[Piece](), 1 if self.mapped else 2
        for index, (layer, target) in enumerate(zip(self._layers, placements, strict=True)):
            if not isinstance(target, Placement):
                raise ValueError(f"placements[{index}] ({shown(target)}) is no Placement")
            sizes = target.num_experts, target.starts
            if sizes != (self._num_experts, self._starts):
                raise ValueError(
                    f"placements[{index}] has num_experts and starts {sizes}, the layers "
                    f"{(self._num_experts, self._starts)}"
                )
            most = self.max_bytes // halves // self._rows[index].num_bytes
            found += pieces_of(index, layer.placement, target, most, sends_too=not self.mapped)
        return found

    @torch.inference_mode()
    def step(self) -> None:
        """Do what is to be done between two forward passes; every rank calls it equally often.

        While no rebalance is under way it only counts. While one is, it polls; every fourth call exchanges a word with
        the store, and waits for a rank that is four calls behind. If no plan can be made, the rebalance ends on all
        ranks: the log and `status` have the error, and layers stay as their last piece left them.
        Errors: PeerLostError within the group's timeout if a rank is lost; each layer has then the placement before or
        after its last change. RuntimeError once this, or the group, is destroyed. Not inside a capture; no host sync.
        """
        self._check_open()
        self._set(steps=self._status.steps + 1)
        due = self._requested or (self._every is not None and self._status.steps % self._every == 0)
        if self._work is None and not due:
            return
        try:
            self._group.check()
            if self._work is None:
                self._begin()
                return
            ready, place = self._work(), self._tick % _STEPS_PER_VOTE
            self._tick += 1
            if place == 0:
                self._votes.cast(ready)
            elif place == _STEPS_PER_VOTE - 1 and self._votes.read():
                assert self._then is not None
                self._then()
        except PeerLostError as error:
            self._fail(str(error))
            raise

    def finish(self) -> None:
        """Call `step` until no rebalance is under way. Collective, host sync."""
        while self.is_active:
            self.step()
            time.sleep(1e-4)

    def destroy(self) -> None:
        """End a rebalance that is under way, and free the spare memory; placements stay. Calling it twice is fine.

        Every rank calls it after the same `step`. Local, host sync."""
        if self._destroyed:
            return
        # methods in attributes keep this object, and with it the layers' weights, until garbage is collected
        self._destroyed, self._work, self._then, self._requested = True, None, None, False
        if self._planner is not None:
            self._planner.shutdown()
            sys.setswitchinterval(self._switch_secs)
        if not self._group.destroyed and self._group.failure is None:
            self._carrier.wait()
        self._carrier.destroy()

    def _check_open(self) -> None:
        if self._destroyed:
            raise RuntimeError(f"the Rebalancer of rank {self._rank} is destroyed")

    def _set(self, **changes: Any) -> None:
        self._status = dataclasses.replace(self._status, **changes)

    def _enter(self, work: Callable[[], bool], then: Callable[[], None]) -> None:
        """Poll `work` from the next step on; all ranks call `then` in the same step, once it is true on all."""
        self._work, self._then, self._tick = work, then, 0

    def _begin(self) -> None:
        """Begin with the moves that were requested, or send the counts of this rank to rank 0."""
        self._begun, self._requested, given = time.monotonic(), False, self._given
        self._given = None
        self._set(state=RebalanceState.PLANNING, last_error="")
        if given is not None:
            self._set(balancedness_before=None, balancedness_after=None)
            self._pieces.extend(given)
            self._next()
            return
        counts = torch.stack([table.counts for table in self._tables])
        new = counts if self._counts is None else counts - self._counts
        # counts that have been reset since are all of this time
        self._snapshot = counts if self._counts is None else torch.where((new < 0).any(), counts, new)
        self._counts = counts
        everywhere = range(self._group.num_ranks)
        parcels = [Parcel(source=rank, target=0, num_bytes=self._count_bytes) for rank in everywhere]
        self._carrier.begin(parcels, self._copies_of_counts)
        self._enter(self._carrier.poll, self._plan_counts)

    def _copies_of_counts(self, number: int, memory: torch.Tensor) -> list[Copy]:
        del number
        assert self._snapshot is not None
        return [(memory[: 8 * self._snapshot.numel()].view(torch.int64), self._snapshot.flatten())]

    def _plan_counts(self) -> None:
        """Rank 0 reads the counts of all ranks and plans; the others have nothing to do."""
        if self._planner is None:
            self._enter(lambda: True, self._follow)
            return
        planner, shape = self._planner, (len(self._layers), self._num_experts)
        counts = [
            self._carrier.read(parcel[: 8 * shape[0] * shape[1]].view(torch.int64).view(shape))
            for parcel in self._carrier.incoming.values()
        ]
        self._plan = None

        def work() -> bool:
            if self._plan is None:
                if not self._carrier.poll():
                    return False
                self._switch_secs = sys.getswitchinterval()
                sys.setswitchinterval(min(_SWITCH_SECS, self._switch_secs))
                self._plan = planner.submit(self._message, torch.stack(counts).sum(0))
            elif not self._published and self._plan.done():
                sys.setswitchinterval(self._switch_secs)
                self._votes.publish(self._plan.result())
                self._published = True
            return self._published

        self._published = False
        self._enter(work, self._follow)

    def _message(self, load: torch.Tensor) -> bytes:
        """The plan for a load [A, E], or the error, for all ranks; runs in the thread."""
        try:
            now = [layer.placement for layer in self._layers]
            plan = plan_placement(load, now[0].num_physical, self._group.num_ranks, previous=now, **self._options)
            loads = [rank_loads(load.tolist(), placements) for placements in (now, plan.placements)]
            before, after = (sum(max(ranks) for ranks in each) for each in loads)
            declined = after >= before or after > before * (1 - self._min_gain)
            pieces = [] if declined else self._pieces_to(plan.placements)
            balanced = [balancedness(each) for each in loads]
            error = ""
        except Exception as failure:  # noqa: BLE001 - all ranks report it
            _log.debug("planning failed", exc_info=True)
            error, pieces, balanced = f"{type(failure).__name__}: {failure}", [], [0.0, 0.0]
        moves = [dataclasses.astuple(piece) for piece in pieces]
        return json.dumps([error, balanced, moves]).encode()

    def _follow(self) -> None:
        """Read the plan, and begin with its first piece."""
        error, (before, after), moves = json.loads(self._votes.text())
        self._snapshot = None
        if error:
            self._fail(error)
            return
        self._set(balancedness_before=before, balancedness_after=after)
        if not moves:
            self._log_once("declined: balancedness %.3f would become %.3f", before, after)
            self._set(state=RebalanceState.IDLE, declined=self._status.declined + 1)
            self._work = None
            return
        self._pieces.extend(
            Piece(layer=layer, positions=tuple(positions), sources=tuple(sources), idle=tuple(idle))
            for layer, positions, sources, idle in moves
        )
        self._next()

    def _next(self) -> None:
        """Begin to send the experts of the next piece."""
        if not self._pieces:
            self._end()
            return
        self._set(state=RebalanceState.MOVING)
        piece = self._pieces[0]
        rows, rank_of = self._rows[piece.layer], self._rank_of
        parcels = [
            Parcel(source=rank_of[source], target=rank_of[position], num_bytes=rows.num_bytes)
            for position, source in zip(piece.positions, piece.sources, strict=True)
        ]
        first = self._starts[self._rank]
        self._carrier.begin(parcels, lambda number, memory: rows.copies(piece.sources[number] - first, memory))
        self._enter(self._carrier.poll, self._change)

    def _change(self) -> None:
        """Overwrite the positions of this rank, and the table; all ranks are in the same step."""
        piece = self._pieces.popleft()
        rows, table, first = self._rows[piece.layer], self._tables[piece.layer], self._starts[self._rank]
        incoming = self._carrier.incoming
        into = [
            (row, part)
            for number, memory in incoming.items()
            for part, row in rows.copies(piece.positions[number] - first, memory)
        ]
        table.update(piece.after(table.placement))
        copy_all(into)
        foreign = sum(self._rank_of[piece.sources[number]] != self._rank for number in incoming)
        self._set(
            moved_experts=self._status.moved_experts + len(piece.positions),
            moved_bytes=self._status.moved_bytes + foreign * rows.num_bytes,
        )
        done: Callable[[], bool] = lambda: True  # noqa: E731
        if self._group.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._group.device))
            done = event.query
        self._enter(done, self._next)

    def _end(self) -> None:
        self._work = None
        status, seconds = self._status, time.monotonic() - self._begun
        self._set(state=RebalanceState.IDLE, rebalances=status.rebalances + 1, seconds=seconds)
        self._log_once(
            "complete in %.2f s: %d experts moved so far, %d bytes to rank 0; balancedness was %s, becomes %s",
            seconds,
            status.moved_experts,
            status.moved_bytes,
            *(
                "?" if each is None else f"{each:.3f}"
                for each in (status.balancedness_before, status.balancedness_after)
            ),
        )

    def _fail(self, error: str) -> None:
        self._work = None
        self._pieces.clear()
        self._set(state=RebalanceState.FAILED, failures=self._status.failures + 1, last_error=error)
        _log.error(
            "rebalance of experts failed on rank %d; layers stay as their last piece left them: %s", self._rank, error
        )

    def _log_once(self, message: str, *values: Any) -> None:
        if self._rank == 0:
            _log.info(f"rebalance of experts {message}", *values)


def _key(placement: Placement) -> tuple[Any, ...]:
    return placement.physical_to_logical, placement.starts, placement.idle


def _table_of(layer: ExpertParallelMoE, index: int = 0) -> PositionTable:
    table = layer.positions
    if not isinstance(table, PositionTable) or not table.changing or not table.counted:
        raise ValueError(f"layers[{index}] has no PositionTable(counted=True, changing=True): its placement is fixed")
    return table


def _rows_of(layer: ExpertParallelMoE, index: int, group: EPGroup) -> ExpertRows:
    """What a position owns. Errors: ValueError."""
    named = {name: each for name, each in layer.weights.named_tensors.items() if name not in _SHARED}
    num_positions = layer.placement.num_local_experts(group.rank)
    for name, tensor in named.items():
        if tensor.device != group.device or not tensor.dim() or tensor.shape[0] != num_positions:
            raise ValueError(
                f"{name} of layers[{index}] is {tuple(tensor.shape)} on {tensor.device}, expected rows of "
                f"{num_positions} experts on {group.device}"
            )
    try:
        return ExpertRows(named)
    except ValueError as error:
        raise ValueError(f"layers[{index}]: {error}") from None


def _agree(group: EPGroup, error: str, form: list[Any]) -> None:
    """Raise ValueError on every rank if one has an error, or ranks differ in `form`. Collective, host sync."""
    found = group.all_gather_object((error, repr(form)))
    if error:
        raise ValueError(error)
    for rank, (theirs, other) in enumerate(found):
        if theirs:
            raise ValueError(f"rank {rank} raised ValueError: {theirs}")
        if other != found[0][1]:
            raise ValueError(f"rank 0 and rank {rank} have other layers, placements or arguments of rebalances")
