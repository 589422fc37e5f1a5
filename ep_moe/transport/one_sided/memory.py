"""The memory of a slot of the one-sided exchange: regions that peers write to, and tensors of this rank alone.

Letters: H hidden, K top-k, R ranks, M max_tokens_per_rank, L the most experts that a rank owns.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.group.symmetric import SymmetricBuffer
from ep_moe.kernels.exchange import round_state as device_code
from ep_moe.placement import Placement

REGION_ALIGNMENT_BYTES = 256
WORD_BYTES = 8
STATE_WORDS = 64
_ENDED = device_code.SENT_ONCE.value + device_code.RECEIVED_ONCE.value  # value of RUNS if nothing is left to combine
SCALE_SHARE = 4  # scales take at most a fourth of the bytes of 8-bit values: one float32 for 16 elements


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Regions:
    """Bytes of each region of a slot, in the order of `ep_moe.kernels.exchange.round_state`."""

    headers: int
    flags: int
    entries: int
    values: int
    scales: int
    word_rows: int
    combine_headers: int
    returned: int

    @classmethod
    def of(cls, config: TransportConfig, num_ranks: int, max_experts: int, word_tokens: int) -> "Regions":
        """The sizes for a config: O(R * M * H)."""
        rows = num_ranks * config.max_tokens_per_rank
        row_bytes = config.hidden * config.dtype.itemsize
        scale_bytes = max(config.hidden // SCALE_SHARE, 16)
        words = (row_bytes + scale_bytes + 8 * config.max_topk) // 4 + 2
        return cls(
            headers=num_ranks * (device_code.HEADER_WORDS.value + max_experts) * WORD_BYTES,
            flags=rows * WORD_BYTES,
            entries=rows * 8 * config.max_topk,
            values=rows * row_bytes,
            scales=rows * scale_bytes,
            word_rows=num_ranks * word_tokens * words * WORD_BYTES,
            combine_headers=num_ranks * WORD_BYTES,
            returned=rows * row_bytes,
        )

    @property
    def offsets(self) -> tuple[int, ...]:
        """The byte offset of each region, and last that of the next slot."""
        sizes = (-(-size // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES for size in dataclasses.astuple(self))
        return (0, *itertools.accumulate(sizes))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlotMemory:
    """One slot's memory on this rank."""

    peers: tuple[int, ...]  # addresses at which each rank's memory of this slot is mapped here
    state: torch.Tensor  # [STATE_WORDS] int32
    dest_rank_mask: torch.Tensor  # [M] int32
    waited_ns: torch.Tensor  # [2, R] int64: wait for each source rank in this round, and in all rounds
    rows_seen: torch.Tensor  # [L] int64
    num_rows: torch.Tensor  # [L] int32
    row_start: torch.Tensor  # [L] int32
    rows: torch.Tensor  # [R * M * max_topk] int32
    row_weights: torch.Tensor  # the same, float32
    token_to_row: torch.Tensor  # the same, int32: fields of a FLAT batch, as the next two
    local_ids: torch.Tensor
    pooled_weights: torch.Tensor  # float32
    row_index: torch.Tensor  # [R * M * min(max_topk, L)] int32: always valid pool rows, even if a round is lost
    values: torch.Tensor  # uint8, the region of received rows
    scales: torch.Tensor  # uint8
    returned: torch.Tensor  # uint8


class ExchangeMemory:
    """The symmetric memory of a transport, by slot.

    Args:
        word_tokens: up to this T a rank sends rows as LL words.
    Errors: RuntimeError if the machine lacks the memory. Collective.
    """

    def __init__(self, group: EPGroup, placement: Placement, config: TransportConfig, *, word_tokens: int) -> None:
        num_ranks, device = group.num_ranks, group.device
        self.max_experts = max(placement.num_local_experts(rank) for rank in range(num_ranks))
        self.max_experts = max(self.max_experts, 1)
        self.regions = Regions.of(config, num_ranks, self.max_experts, word_tokens)
        *offsets, slot_bytes = self.regions.offsets
        self.num_bytes = config.num_slots * slot_bytes + REGION_ALIGNMENT_BYTES
        self.buffer = SymmetricBuffer(group, self.num_bytes)
        self.abort = self.buffer.local[config.num_slots * slot_bytes :][:WORD_BYTES].view(torch.int64)
        self.offsets = tuple(offsets)
        aborts = [address + config.num_slots * slot_bytes for address in self.buffer.addresses]
        self.aborts = torch.tensor(aborts, dtype=torch.int64, device=device)
        self.slots = []
        for slot in range(config.num_slots):
            peers = tuple(address + slot * slot_bytes for address in self.buffer.addresses)
            self.slots.append(self._make_slot(config, slot * slot_bytes, num_ranks, peers, device))
        self.urgent = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.reset((True,) * num_ranks, (0,) * config.num_slots)
        group.barrier()  # no rank sends results before all ranks have written the sentinel

    def _make_slot(
        self, config: TransportConfig, start: int, num_ranks: int, peers: tuple[int, ...], device: torch.device
    ) -> SlotMemory:
        experts, rows = self.max_experts, num_ranks * config.max_tokens_per_rank
        offsets = self.regions.offsets

        def region(index: int, size: int) -> torch.Tensor:
            return self.buffer.local[start + offsets[index] :][:size]

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        state = zeros(STATE_WORDS)
        state[device_code.RUNS.value] = _ENDED
        return SlotMemory(
            peers=peers,
            state=state,
            dest_rank_mask=zeros(config.max_tokens_per_rank),
            waited_ns=zeros(2, num_ranks, dtype=torch.int64),
            rows_seen=zeros(experts, dtype=torch.int64),
            num_rows=zeros(experts),
            row_start=zeros(experts),
            rows=zeros(rows * config.max_topk),
            row_weights=zeros(rows * config.max_topk, dtype=torch.float32),
            token_to_row=zeros(rows * config.max_topk),
            local_ids=zeros(rows * config.max_topk),
            pooled_weights=zeros(rows * config.max_topk, dtype=torch.float32),
            row_index=zeros(rows * min(config.max_topk, experts)),
            values=region(3, self.regions.values),
            scales=region(4, self.regions.scales),
            returned=region(7, self.regions.returned),
        )

    def reset(self, active: Sequence[bool], resume: Sequence[int]) -> None:
        """Fill the results' region with the sentinel (all ones) and clear the abort words, while no rank sends.

        Args:
            active: by rank, whether it takes part in rounds.
            resume: by slot, the first epoch that is exchanged, int32; 0 if all are.
        Local, on the current stream.
        """
        bits = sum(1 << rank if rank < 31 else -1 << rank for rank, alive in enumerate(active) if alive)  # int32
        for slot, epoch in zip(self.slots, resume, strict=True):
            slot.returned.fill_(0xFF)
            slot.state[device_code.ACTIVE.value] = bits
            slot.state[device_code.RESUME.value] = epoch
        self.urgent[0] = 0
        self.abort.zero_()

    def begun(self) -> tuple[int, ...]:
        """The epoch of the last round that each slot has begun to send, int32. Local, host sync.

        Ranks agree to resume after the latest of them. A round that was sent and not yet received counts: some of its
        rows went to ranks that may be lost, and the source rank would wait for their results.
        """
        return tuple(int(slot.state[device_code.SENT.value]) for slot in self.slots)

    def catch_up(self, epochs: Sequence[int]) -> None:
        """Set each slot's last round to the given epoch, int32. Local, on the current stream."""
        for slot, epoch in zip(self.slots, epochs, strict=True):
            slot.state[device_code.SENT.value] = epoch
            slot.state[device_code.BEGUN.value] = epoch
            slot.state[device_code.DONE.value] = epoch
            slot.state[device_code.RUNS.value] = _ENDED

    def end_waits(self, word: int) -> None:
        """Write an abort word that ends all waits of this rank. Local; no CUDA call, which could block on them."""
        self.urgent[0] = word

    def destroy(self) -> None:
        """Free everything. Local; calling it twice is fine."""
        self.slots = []
        self.abort = torch.zeros(1, dtype=torch.int64)
        self.buffer.destroy()
