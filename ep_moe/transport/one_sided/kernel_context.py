"""Sizes, memory and options that all launches of a transport's kernels share, on this rank."""

import dataclasses
from typing import Any

import torch

from ep_moe.config import ALIGNMENT, TransportConfig
from ep_moe.kernels.exchange.round_state import Halves
from ep_moe.kernels.exchange.wire_layout import Ranks
from ep_moe.transport.one_sided.memory import PeerMemory
from ep_moe.transport.one_sided.occupancy import REGISTERS, WIDE_REGISTERS
from ep_moe.transport.one_sided.slot_state import SlotStates
from ep_moe.transport.one_sided.tuning import Tuning


@dataclasses.dataclass(kw_only=True, slots=True)
class KernelContext:
    """Sizes, memory and options of a transport's launches."""

    config: TransportConfig
    ranks: Ranks
    device: torch.device
    memory: PeerMemory
    states: SlotStates
    tuning: Tuning
    timeout_ns: int
    early: bool  # `Device.early_launch`

    def halves(self, *, send: bool, receive: bool) -> Halves:
        """The constants of a launch of one half or both."""
        return Halves(send, receive, self.early)

    def options(self, num_warps: int) -> dict[str, Any]:
        """Options of the compiler."""
        options: dict[str, Any] = {"num_warps": num_warps, "maxnreg": WIDE_REGISTERS if num_warps > 4 else REGISTERS}
        if self.memory.libraries:
            options["extern_libs"] = self.memory.libraries
        return {**options, "launch_pdl": True} if self.early else options


def is_aligned(rows: torch.Tensor) -> bool:
    """Whether rows can be moved in 16-byte pieces in place: each contiguous, ALIGNMENT elements or a multiple apart."""
    at_pieces = rows.data_ptr() % 16 == 0 and rows.stride(0) % ALIGNMENT == 0
    return at_pieces and (rows.stride(1) == 1 or rows.shape[1] == 1)


def aligned_rows(rows: torch.Tensor) -> torch.Tensor:
    """The rows themselves, or a copy that `is_aligned`."""
    return rows if is_aligned(rows) else rows.clone(memory_format=torch.contiguous_format)
