"""Parts of a group: some of its ranks, with collectives of their own."""

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ep_moe.group.base import EPGroup
from ep_moe.group.errors import PeerLostError
from ep_moe.group.joining import RankPlace


def split(group: EPGroup, parts: tuple[tuple[int, ...], ...]) -> "GroupPart":
    """The part of a group's ranks that this one is in; made once, destroyed with the group.

    Args:
        parts: ranks in ascending order; every rank of the group is in one of them.
    Errors: ValueError if this rank is in none; RuntimeError for a group that is alone; PeerLostError. Collective.
    """
    group.check()
    if group.process_group is None:
        raise RuntimeError("a group that is alone has no parts")
    if parts not in group.parts:
        ranks = next((part for part in parts if group.rank in part), ())
        if not ranks:
            raise ValueError(f"rank {group.rank} is in none of the parts {parts}")
        with group.guard("split"):
            process_group = _split_process_group(group.process_group, parts, ranks, group.config.timeout_secs)
        group.parts[parts] = GroupPart(group, ranks, process_group)
    part = group.parts[parts]
    assert isinstance(part, GroupPart)
    return part


class GroupPart(EPGroup):
    """Some ranks of a group, such as those of one node, numbered from 0. Made by `split`.

    It has collectives of its own but no heartbeats: waits count as waits of the whole group, and a `PeerLostError`
    names ranks of the whole group, also those of other parts.

    Attributes:
        whole: the group. ranks: of `whole`, by rank here.
        place: phase and round of `whole` that waits here belong to; None while none is under way.
    """

    def __init__(self, whole: EPGroup, ranks: tuple[int, ...], process_group: dist.ProcessGroup) -> None:
        rank = ranks.index(whole.rank)
        place = RankPlace(rank=rank, num_ranks=len(ranks), local_rank=rank, local_num_ranks=len(ranks), node=whole.node)
        options: dict[str, Any] = {"config": whole.config, "backend": whole.backend, "watch": whole.watch}
        super().__init__(place, device=whole.device, process_group=process_group, **options)
        if self.watch is not None:
            self.watch.abort_too(process_group)
        self.whole, self.ranks = whole, ranks
        self._name = f"part/{len(whole.parts)}/{'-'.join(map(str, ranks))}"  # parts of two splits may be equal
        self.place: tuple[str, int] | None = None

    def _place_of(self, phase: str, round_: int) -> tuple[str, int]:
        return (f"{phase} of a part", round_) if self.place is None else self.place

    @contextlib.contextmanager
    def guard(self, phase: str, round: int | None = None) -> Iterator[None]:  # noqa: A002
        self.check_open()
        with self.whole.guard(*self._place_of(phase, self._next_round(phase) if round is None else round)):
            yield

    def check_open(self) -> None:
        self.whole.check_open()
        super().check_open()

    def find_missing(self, phase: str, round: int) -> tuple[tuple[int, ...], str]:  # noqa: A002
        """As `EPGroup.find_missing`; missing ranks of other parts, which the caller cannot name, are blamed. Local."""
        place = self._place_of(phase, round)
        missing, reason = self.whole.find_missing(*place)
        mine = self._of_part(missing)
        if missing and not mine:
            self.whole.blame(missing, *place, reason)
        return mine, reason

    def blame(self, ranks: tuple[int, ...], phase: str, round: int | None, reason: str) -> PeerLostError:  # noqa: A002
        """As `EPGroup.blame`, by ranks of this part. A rank that waits for another part is not to blame, so that ranks
        without heartbeats come first."""
        phase, round_ = self._place_of(phase, round or 0)
        missing, evidence = self.whole.find_missing(phase, round_)
        named = missing or tuple(self.ranks[rank] for rank in ranks)
        return self.whole.blame(named, phase, round_, evidence if missing else reason)

    @property
    def gone_ranks(self) -> tuple[int, ...]:
        return self._of_part(self.whole.gone_ranks)

    @property
    def left_ranks(self) -> tuple[int, ...]:
        return self._of_part(self.whole.left_ranks)

    def connect_store(self) -> Any:
        self.check_open()
        return dist.PrefixStore(self._name, self.whole.connect_store())

    def _connect(self, name: str) -> Any:
        return dist.PrefixStore(self._name, self.whole._connect(name))

    def report_failure(self, error: BaseException) -> None:
        self.whole.report_failure(error)

    def wait_for_all(self, phase: str) -> None:
        """As `EPGroup.wait_for_all`, for the whole group: all of its parts call it. Collective."""
        self.check_open()
        self.whole.wait_for_all(phase)

    def destroy(self) -> None:
        """Destroy the process group; the whole group stays. Calling it twice is fine. Local."""
        if self.destroyed:
            return
        self.destroyed = True
        if dist.is_initialized() and self.process_group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self.process_group)
        self.process_group = None

    def _of_part(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.ranks.index(rank) for rank in ranks if rank in self.ranks)


def _split_process_group(
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
