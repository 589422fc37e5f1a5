"""A part of a group's ranks, such as those of one node: with collectives of its own, and the whole group's losses."""

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.group.base import EPGroup
from ep_moe.group.errors import PeerLostError
from ep_moe.group.joining import RankPlace


def split_process_group(
    process_group: dist.ProcessGroup,
    parts: tuple[tuple[int, ...], ...],
    ranks: tuple[int, ...],
    timeout_secs: float,
) -> dist.ProcessGroup:
    """A process group of `ranks`, which is one of `parts`; ranks are those of `process_group`. Collective."""
    timeout = datetime.timedelta(seconds=2 * timeout_secs + 30)  # the last resort: the group's waits end earlier
    world = dist.distributed_c10d._get_default_group()
    if world.bound_device_id is not None:  # NCCL then makes communicators by a split, in which every rank takes part
        made = dist.split_group(process_group, [list(part) for part in parts], timeout=timeout)
    else:
        world_ranks = dist.get_process_group_ranks(process_group)
        members = [world_ranks[rank] for rank in ranks]
        made = dist.new_group(members, timeout=timeout, use_local_synchronization=True)
    assert made is not None
    return made


class GroupPart(EPGroup):
    """Some ranks of a group, numbered from 0. Made by `EPGroup.split`.

    It has no heartbeats of its own: waits count as waits of the whole group, and a `PeerLostError` names ranks of the
    whole group, also those of other parts.

    Attributes:
        whole: the group. ranks: of `whole`, by rank here.
        place: phase and round of `whole` that waits here belong to; None while none is under way.
    """

    def __init__(self, whole: EPGroup, ranks: tuple[int, ...], process_group: dist.ProcessGroup) -> None:
        rank = ranks.index(whole.rank)
        place = RankPlace(rank=rank, num_ranks=len(ranks), local_rank=rank, local_num_ranks=len(ranks), node=whole.node)
        super().__init__(
            place, device=whole.device, config=whole.config, backend=whole.backend, process_group=process_group
        )
        self.whole, self.ranks = whole, ranks
        self.place: tuple[str, int] | None = None

    def _place_of(self, phase: str, round_: int) -> tuple[str, int]:
        return (f"{phase} of a part", round_) if self.place is None else self.place

    def wait(self, work: "dist.Work | torch.cuda.Event", *, phase: str, round: int) -> None:  # noqa: A002
        """See `EPGroup.wait`. Collective, host sync."""
        self.check_open()
        phase, round_ = self._place_of(phase, round)
        self.whole.wait(work, phase=phase, round=round_)

    @contextlib.contextmanager
    def guard(self, phase: str, round: int | None = None) -> Iterator[None]:  # noqa: A002
        """See `EPGroup.guard`. Host sync on CUDA."""
        self.check_open()
        with self.whole.guard(*self._place_of(phase, self._next_round(phase) if round is None else round)):
            yield

    def explain(self, error: Exception) -> Exception:
        """See `EPGroup.explain`. Local."""
        return self.whole.explain(error)

    def check(self) -> None:
        """See `EPGroup.check`. Local, no sync."""
        self.check_open()
        self.whole.check()

    @property
    def destroyed(self) -> bool:
        """Whether this part or the whole group is destroyed."""
        return self._destroyed or self.whole.destroyed

    def check_open(self) -> None:
        """See `EPGroup.check_open`. Local."""
        super().check_open()
        self.whole.check_open()

    @contextlib.contextmanager
    def waiting(self, phase: str, round: int) -> Iterator[None]:  # noqa: A002
        """See `EPGroup.waiting`. Local."""
        with self.whole.waiting(*self._place_of(phase, round)):
            yield

    def find_missing(self, phase: str, round: int) -> tuple[tuple[int, ...], str]:  # noqa: A002
        """See `EPGroup.find_missing`; ranks of other parts, which the caller cannot name, are blamed here. Local."""
        place = self._place_of(phase, round)
        missing, reason = self.whole.find_missing(*place)
        mine = self._of_part(missing)
        if missing and not mine:
            self.whole.blame(missing, *place, reason)
        return mine, reason

    def blame(self, ranks: tuple[int, ...], phase: str, round: int | None, reason: str) -> PeerLostError:  # noqa: A002
        """See `EPGroup.blame`. A rank that waits for another part is not to blame, so heartbeats come first.

        Args:
            ranks: of this part; the error has those of the whole group.
        """
        phase, round_ = self._place_of(phase, round or 0)
        missing, evidence = self.whole.find_missing(phase, round_)
        named = missing or tuple(self.ranks[rank] for rank in ranks)
        return self.whole.blame(named, phase, round_, evidence if missing else reason)

    @property
    def failure(self) -> PeerLostError | None:
        """The whole group's failure, with its ranks."""
        return self.whole.failure

    @property
    def gone_ranks(self) -> tuple[int, ...]:
        """See `EPGroup.gone_ranks`; ranks of this part."""
        return self._of_part(self.whole.gone_ranks)

    @property
    def left_ranks(self) -> tuple[int, ...]:
        """See `EPGroup.left_ranks`; ranks of this part."""
        return self._of_part(self.whole.left_ranks)

    def connect_store(self) -> Any:
        """See `EPGroup.connect_store`. Ranks of other parts call it as often. Local."""
        self.check_open()
        return dist.PrefixStore(f"part/{'-'.join(map(str, self.ranks))}", self.whole.connect_store())

    def report_failure(self, error: BaseException) -> None:
        """See `EPGroup.report_failure`. Local."""
        self.whole.report_failure(error)

    def wait_for_all(self, phase: str) -> None:
        """See `EPGroup.wait_for_all`: waits for the whole group, all of whose parts call it. Collective."""
        self.check_open()
        self.whole.wait_for_all(phase)

    def destroy(self) -> None:
        """Destroy the process group; the whole group stays. Calling it twice is fine. Local."""
        if self._destroyed:
            return
        self._destroyed = True
        if dist.is_initialized() and self.process_group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self.process_group)
        self.process_group = None

    def _of_part(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.ranks.index(rank) for rank in ranks if rank in self.ranks)
