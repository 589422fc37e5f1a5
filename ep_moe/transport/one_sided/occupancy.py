"""How many programs may wait on a GPU at once, and which rounds of this process are open on it at the same time.

Receivers stay resident on a GPU while they wait for other ranks. The programs that those ranks wait for must fit beside
them, in any order of launches, or ranks wait for each other until the timeout. Programs of one size fit however they
are distributed over multiprocessors (SMs). A program that needs a whole SM does not fit while every SM has a receiver,
and a GPU spreads programs over SMs before it packs them.
"""

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import triton

from ep_moe.kernels.device import Device
from ep_moe.transport.slots import Slot

REGISTERS = 128  # per thread: four programs of 4 warps share an SM; with fewer, kernels spill
AMD_REGISTERS = 256  # the most of a thread: no option bounds them
WIDE_REGISTERS = 232  # of a program of 8 warps, which uses most of an SM
NCCL_SMS = 32  # that NCCL's kernels may take: each of their programs, of up to 640 threads, takes a whole SM
_WARPS = 4
_REGISTER_UNIT = 256  # a warp's registers are allocated in such units
_ON_A_CPU = 8  # receivers of a launch in the interpreter

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """How many programs may wait on a GPU."""

    device: Device

    @property
    def programs_of_an_sm(self) -> int:
        """Programs of the exchange that an SM holds at once: 4 on Hopper and Blackwell.

        Their few KB of shared memory do not limit that.
        """
        threads, most = self.device.warp_size, AMD_REGISTERS if self.device.hip else REGISTERS
        of_a_warp = -(-most * threads // _REGISTER_UNIT) * _REGISTER_UNIT
        return min(self.device.registers // (_WARPS * of_a_warp), self.device.threads // (_WARPS * threads))

    @property
    def places(self) -> int:
        """Receivers that always fit at once, beside an NCCL kernel that was launched before them."""
        return max((self.device.num_sms - NCCL_SMS) * self.programs_of_an_sm, 1)

    @property
    def most_leaving_one_sm_empty(self) -> int:
        """Receivers that always leave an SM empty beside NCCL's, however they are distributed."""
        return max(self.device.num_sms - NCCL_SMS - 1, 0)

    def most_receivers(self, num_slots: int) -> int:
        """The most receivers of one launch: those of all slots always fit at once, beside NCCL's programs.

        So rounds never wait for a free place on an SM; other programs get one at the latest when rounds end. An empty
        SM is not guaranteed: it needs at most `most_leaving_one_sm_empty` receivers in all open rounds except the one
        whose turn it is (`TransportConfig.num_sms`). Example: 132 SMs give 400, 200, 133 and 100 receivers with 1, 2, 3
        and 4 slots; an SM stays empty with 99, 49 and 33 in each of 2, 3 and 4.
        Errors: RuntimeError if num_slots exceeds `places`.
        """
        if num_slots > self.places:
            raise RuntimeError(f"num_slots ({num_slots}) exceeds {self.places}, the programs that may wait on this GPU")
        return self.places // num_slots


def most_receivers(device: torch.device, num_slots: int) -> int:
    """`Occupancy.most_receivers` of a device; a few in the interpreter. Local."""
    return Occupancy(device=Device.of(device)).most_receivers(num_slots) if device.type == "cuda" else _ON_A_CPU


_Begun = tuple[int, int, Callable[[int], int]]  # a round's stream, its T, and the receivers of a launch for T tokens


class DeviceRounds(dict[Slot[Any], _Begun]):
    """The last round of each slot of this process's transports on one GPU."""


@functools.cache
def rounds_on(index: int) -> DeviceRounds:
    """The rounds on a GPU of this process: the same object for all transports. Local."""
    return DeviceRounds()


class OpenRounds:
    """The open rounds of one transport, checked against those of the process's other transports on the same GPU.

    Warns, once, if rounds are open on several streams and their receivers may fill the GPU: ranks that begin them in
    different orders may then wait for each other. Rounds on one stream never wait at the same time: a transport for
    decode and one for prefill that are used in turn do not compete for SMs.

    Args:
        device_rounds: those of all transports on the GPU (`rounds_on`).
        receivers_of: gives the number of receivers of a launch for T tokens.
        current_stream: gives a GPU's current stream, as an integer, by the GPU's index.
    """

    def __init__(
        self,
        device: torch.device,
        occupancy: Occupancy,
        device_rounds: DeviceRounds,
        receivers_of: Callable[[int], int],
        current_stream: Callable[[int], int],
    ) -> None:
        self._device, self._occupancy, self._warned = device, occupancy, False
        self._receivers_of, self._current_stream, self._index = receivers_of, current_stream, device.index or 0
        self._all, self._used = device_rounds, set[Slot[Any]]()
        self._end = weakref.finalize(self, _forget, self._all, self._used)

    @classmethod
    def on(cls, device: torch.device, receivers_of: Callable[[int], int]) -> "OpenRounds":
        """Those of a transport on this GPU, beside the process's others. Local."""
        current_stream = triton.runtime.driver.active.get_current_stream
        return cls(
            device, Occupancy(device=Device.of(device)), rounds_on(device.index or 0), receivers_of, current_stream
        )

    def begin(self, slot: Slot[Any], num_tokens: int) -> None:
        """Record a round of T tokens whose kernels run on the current stream; it ends when its slot is closed.

        Local, no host sync.
        """
        begun = self._current_stream(self._index), num_tokens, self._receivers_of
        if slot not in self._all:
            self._used.add(slot)
        self._all[slot] = begun
        if len(self._all) > 1 and not self._warned:
            self._warn_if_full(begun)

    def destroy(self) -> None:
        """Remove all rounds of the transport. Local; calling it twice is fine."""
        self._end()

    def _warn_if_full(self, begun: _Begun) -> None:
        occupancy = self._occupancy
        others = [each for slot, each in list(self._all.items()) if each[0] != begun[0] and slot.state is not None]
        if not others:
            return
        receivers, *theirs = (receivers_of(num_tokens) for _, num_tokens, receivers_of in (begun, *others))
        taken = sum(theirs)
        if taken <= occupancy.most_leaving_one_sm_empty and taken + receivers <= occupancy.places:
            return
        self._warned = True
        _log.warning(
            "%s: rounds are open on other streams, whose %d waiting programs, and %d more now, may occupy all SMs "
            "(%d fit, %d leave one empty). Ranks that begin them in different orders may wait for each other: begin "
            "them in one order on all ranks, or set num_sms to at most %d",
            self._device,
            taken,
            receivers,
            occupancy.places,
            occupancy.most_leaving_one_sm_empty,
            occupancy.most_leaving_one_sm_empty // len(others),
        )


def _forget(rounds: DeviceRounds, slots: set[Slot[Any]]) -> None:
    for slot in slots:
        rounds.pop(slot, None)
    slots.clear()
