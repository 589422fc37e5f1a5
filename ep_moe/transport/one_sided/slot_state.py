"""The memory of a transport's slots that no peer sees, for kernels and for the host.

Letters: R ranks, S slots, M max_tokens_per_rank, L the most experts that a rank owns.
"""

import dataclasses
from collections.abc import Sequence

import torch

from ep_moe.config import TransportConfig
from ep_moe.kernels.exchange.round_state import (
    ACTIVE,
    BEGUN,
    DONE,
    RECEIVED_ONCE,
    RESUME,
    RUNS,
    SENT,
    SENT_ONCE,
    SlotState,
)
from ep_moe.kernels.exchange.wire_layout import Ranks

_STATE_WORDS = 64
_ENDED = SENT_ONCE.value + RECEIVED_ONCE.value  # value of RUNS if nothing is left to combine


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeStatistics:
    """Counters of this rank's kernels, on the device: reading them waits for the kernels."""

    expert_tokens: torch.Tensor  # [L] int64, the rows for each local expert in all rounds, also in refused ones
    waited_ns: torch.Tensor  # [R] int64, the nanoseconds that each rank was waited for in all rounds
    last_waited_ns: torch.Tensor  # [slots, R] int64, the same in the last phase of each slot


class SlotStates:
    """The states of a transport's slots.

    Attributes:
        slots: by slot, the tensors that kernels take.
        reports: [S + 1, 4] int64 that kernels write and the host reads without a sync: each slot's `report_ptr`, and
            last `news_ptr` (`round_state.report`).
    """

    def __init__(self, config: TransportConfig, device: torch.device, ranks: Ranks) -> None:
        shape, pinned = (config.num_slots + 1, 4), device.type == "cuda"  # rows are aligned to 16 bytes
        self.reports = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned, device="cpu")
        num_ranks, max_experts = ranks.R, ranks.L
        rows = num_ranks * config.max_tokens_per_rank

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.slots = [
            SlotState(
                state_ptr=zeros(_STATE_WORDS),
                dest_rank_mask_ptr=zeros(config.max_tokens_per_rank),
                rows_ptr=zeros(rows * config.max_topk),
                weights_ptr=zeros(rows * config.max_topk, dtype=torch.float32),
                num_rows_ptr=zeros(max_experts),
                row_start_ptr=zeros(max_experts),
                rows_seen_ptr=zeros(max_experts, dtype=torch.int64),
                waited_ptr=zeros(2, num_ranks, dtype=torch.int64),
                token_to_row_ptr=zeros(rows * config.max_topk),
                local_ids_ptr=zeros(rows * config.max_topk),
                pooled_weights_ptr=zeros(rows * config.max_topk, dtype=torch.float32),
                row_index_ptr=zeros(rows * min(config.max_topk, max_experts)),  # always valid, even if a round is lost
                report_ptr=self.reports[slot],
                news_ptr=self.reports[-1],
            )
            for slot in range(config.num_slots)
        ]
        for slot in self.slots:
            slot.state_ptr[RUNS.value] = _ENDED
        self.resume((True,) * num_ranks, (0,) * config.num_slots)

    def statistics(self, num_local_experts: int) -> ExchangeStatistics:
        """Rows received and time waited for each rank, since the transport was created. Local, no host sync."""
        return ExchangeStatistics(
            expert_tokens=torch.stack([slot.rows_seen_ptr for slot in self.slots]).sum(0)[:num_local_experts],
            waited_ns=torch.stack([slot.waited_ptr[1] for slot in self.slots]).sum(0),
            last_waited_ns=torch.stack([slot.waited_ptr[0] for slot in self.slots]),
        )

    @torch.inference_mode()  # which alone may write tensors that were made in it
    def resume(self, active: Sequence[bool], epochs: Sequence[int]) -> None:
        """Continue with some ranks.

        Args:
            active: by rank, whether it takes part in rounds.
            epochs: by slot, the first epoch that is exchanged, int32; 0 if all are.
        Local, on the current stream.
        """
        bits = sum(1 << rank if rank < 31 else -1 << rank for rank, alive in enumerate(active) if alive)  # int32
        for slot, epoch in zip(self.slots, epochs, strict=True):
            slot.state_ptr[ACTIVE.value] = bits
            slot.state_ptr[RESUME.value] = epoch

    def begun(self) -> tuple[int, ...]:
        """The epoch of the last round that each slot has begun to send, int32. Local, host sync.

        Ranks agree to resume after the latest of them. A round that was sent and not yet received counts: some of its
        rows went to ranks that may be lost, and the source rank would wait for their results.
        """
        return tuple(int(slot.state_ptr[SENT.value]) for slot in self.slots)

    @torch.inference_mode()
    def catch_up(self, epochs: Sequence[int]) -> None:
        """Set each slot's last round to the given epoch, int32. Local, on the current stream."""
        for slot, epoch in zip(self.slots, epochs, strict=True):
            for word in (SENT, BEGUN, DONE):
                slot.state_ptr[word.value] = epoch
            slot.state_ptr[RUNS.value] = _ENDED

    def destroy(self) -> None:
        """Free everything. Local; calling it twice is fine."""
        self.slots = []
