"""Bytes of ranks on their way into spare memory of others, beside the forward passes.

Letters: L positions of this rank, R ranks.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from ep_moe.group import EPGroup
from ep_moe.group.collectives import begin_all_to_all
from ep_moe.group.parts import split
from ep_moe.group.symmetric import SymmetricBuffer

ALIGNMENT = 16  # of parcels and of the tensors in them
_COPIES_PER_STEP, _BYTES_PER_STEP = 64, 64 << 20  # that begin in a call of `poll`, once earlier ones have arrived
Copy = tuple[torch.Tensor, torch.Tensor]  # target and source, of equal shapes and dtypes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """One tensor of experts as integers, and where its row is in a parcel."""

    rows: torch.Tensor  # [L, ...]
    offset: int
    num_bytes: int  # of a row

    def inside(self, parcel: torch.Tensor) -> torch.Tensor:
        """The row in a parcel."""
        part = parcel[self.offset : self.offset + self.num_bytes]
        return part.view(self.rows.dtype).view(self.rows.shape[1:])


class ExpertRows:
    """The tensors of a layer's experts, whose first dimension is positions, as parcels of bytes: one for each expert.

    Args: tensors: by name, [L, ...], of any dtypes and strides.
    Attributes: num_bytes: of a parcel. form: names, dtypes and shapes of rows, which ranks compare.
    Errors: ValueError for a tensor whose rows share memory. Local.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._parts, end = list[_Rows](), 0
        for name, tensor in tensors.items():
            if tensor.shape[0] > 1 and tensor.stride(0) == 0:
                raise ValueError(f"{name} is one row that all experts share: its experts cannot be moved")
            rows = _as_integers(tensor)
            num_bytes = rows[0].numel() * rows.element_size() if len(rows) else _row_bytes(tensor)
            self._parts.append(_Rows(rows=rows, offset=end, num_bytes=num_bytes))
            end += aligned(num_bytes)
        self.num_bytes = end
        self.form = [f"{name} {each.dtype} {tuple(each.shape[1:])}" for name, each in tensors.items()]

    def copies(self, index: int, parcel: torch.Tensor) -> list[Copy]:
        """Copies into a parcel of the expert at `index` of L. Local."""
        return [(part.inside(parcel), part.rows[index]) for part in self._parts]


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.element_size() * torch.Size(tensor.shape[1:]).numel()


def aligned(num_bytes: int) -> int:
    """Rounded up to `ALIGNMENT`. Local."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """A view [L, n] of the widest integers that rows consist of, or [L, ...] of those of its items' size."""
    tensor = tensor.detach()
    if not tensor.shape[0] or not tensor[0].is_contiguous():
        return tensor.view(_INTEGERS[tensor.element_size()])
    flat = (tensor[:, None] if tensor.dim() == 1 else tensor.flatten(1)).view(torch.uint8)
    sizes = flat.shape[1], flat.stride(0), flat.storage_offset(), flat.data_ptr()
    widest = next(size for size in (8, 4, 2, 1) if not any(number % size for number in sizes))
    return flat.view(_INTEGERS[widest])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """Bytes that one rank sends another, or itself. All ranks have equal lists of them.

    Args:
        source, target: ranks. num_bytes: a multiple of `ALIGNMENT`.
    """

    source: int
    target: int
    num_bytes: int


class Carrier:
    """Spare memory for what comes from other ranks, and the copies into it, on a stream of their own.

    Args:
        group: the ranks. num_bytes: the most that a rank gets at once; unless `mapped`, it sends as much at most.
        mapped: all ranks map the spare memory, and store into it; else it is sent by a collective of a process group
            of its own, out of a second buffer.
    Attributes:
        spare: the memory, [num_bytes] uint8. incoming: the parcels in it that this rank gets, by their number.
    Errors: RuntimeError if the machine lacks the memory. Collective, host sync.
    """

    def __init__(self, group: EPGroup, num_bytes: int, *, mapped: bool) -> None:
        self.incoming: dict[int, torch.Tensor] = {}
        self._group, self._part, self._symmetric = group, group, None
        self._stream = torch.cuda.Stream(group.device) if group.device.type == "cuda" else None
        self._pending = collections.deque[Copy]()
        self._work: dist.Work | None = None
        self._event: torch.cuda.Event | None = None
        self._round = 0
        if mapped:
            self._symmetric = SymmetricBuffer(group, num_bytes)
            self.spare = self._symmetric.local
            self._outgoing = [self._symmetric.part(rank) for rank in range(group.num_ranks)]
        else:
            self.spare, outgoing = (torch.empty(num_bytes, dtype=torch.uint8, device=group.device) for _ in range(2))
            self._outgoing = [outgoing]
            if group.process_group is not None:
                self._part = split(group, (tuple(range(group.num_ranks)),))
        self.begin([], _nothing)  # makes the communicator
        self.wait()

    def begin(self, parcels: Sequence[Parcel], copies_of: Callable[[int, torch.Tensor], Sequence[Copy]]) -> None:
        """Begin to send, behind what is on the current stream, after earlier parcels have arrived on all ranks.

        Args:
            parcels: of all ranks. copies_of: copies of a parcel of this rank, by its number and memory.
        Collective, no wait.
        """
        rank, num_ranks = self._group.rank, self._group.num_ranks
        sent = [[0] * num_ranks for _ in range(num_ranks)]  # bytes from a rank to another
        firsts = []  # of each parcel, behind others from its source to its target
        for parcel in parcels:
            firsts.append(sent[parcel.source][parcel.target])
            sent[parcel.source][parcel.target] += parcel.num_bytes
        incoming, outgoing = [from_[rank] for from_ in sent], sent[rank]
        copies = list[Copy]()
        for number, (parcel, first) in enumerate(zip(parcels, firsts, strict=True)):
            before = sum(from_[parcel.target] for from_ in sent[: parcel.source])
            if parcel.source == rank:
                if self._symmetric is None:
                    memory, place = self._outgoing[0], sum(outgoing[: parcel.target]) + first
                else:
                    memory, place = self._outgoing[parcel.target], before + first
                copies += copies_of(number, memory[place : place + parcel.num_bytes])
        self.incoming = {
            number: self.spare[place : place + parcel.num_bytes]
            for number, (parcel, first) in enumerate(zip(parcels, firsts, strict=True))
            if parcel.target == rank
            for place in (sum(incoming[: parcel.source]) + first,)
        }
        self._round += 1
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._group.device))
        if self._symmetric is not None:
            self._pending.extend(copies)
            self.poll()
            return
        with torch.cuda.stream(self._stream):
            copy_all(copies)
            total = self.spare[: sum(incoming)], self._outgoing[0][: sum(outgoing)]
            self._work = begin_all_to_all(self._part, *total, incoming, outgoing)
            self._record()

    def poll(self) -> bool:
        """Go on, for a moment; whether all that this rank sends, and gets by a collective, has arrived. Local, no host
        sync."""
        if self._pending and (self._event is None or self._event.query()):  # hosts are many passes ahead of devices
            left = _BYTES_PER_STEP
            with torch.cuda.stream(self._stream):
                for _ in range(_COPIES_PER_STEP):
                    if not self._pending or left <= 0:
                        break
                    target, source = self._pending.popleft()
                    target.copy_(source, non_blocking=True)
                    left -= source.numel() * source.element_size()
                self._record()
        if self._work is not None:
            if not self._work.is_completed():
                return False
            self._part.wait(self._work, phase="rebalance", round=self._round)  # raises what has gone wrong
            self._work = None
        return not self._pending and (self._event is None or self._event.query())

    def wait(self) -> None:
        """Wait until `poll` is true. Host sync."""
        while not self.poll():
            self._group.check()
            time.sleep(1e-4)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to the host; complete as soon as `poll` is true. Local, no host sync."""
        if self._stream is None:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            self._record()
        return host

    def destroy(self) -> None:
        """Free the memory. Local; calling it twice is fine."""
        self._pending.clear()
        self.incoming, self._outgoing, self.spare = {}, [], torch.empty(0, dtype=torch.uint8, device="cpu")
        if self._symmetric is not None:
            self._symmetric.destroy()

    def _record(self) -> None:
        if self._stream is not None:
            self._event = torch.cuda.Event()
            self._event.record(self._stream)


def _nothing(number: int, memory: torch.Tensor) -> Sequence[Copy]:
    del number, memory
    return ()


def copy_all(copies: Iterable[Copy]) -> None:
    """Copy tensors (target, source) on the current stream, all of a dtype by one launch. Local, no host sync."""
    of_dtype = collections.defaultdict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]](lambda: ([], []))
    for target, source in copies:
        targets, sources = of_dtype[target.dtype]
        targets.append(target)
        sources.append(source)
    for targets, sources in of_dtype.values():
        torch._foreach_copy_(targets, sources)
