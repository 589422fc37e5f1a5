"""Later calls of vLLM's batched experts as the launches of a first one.

Letters: E experts.
"""

from typing import Any

import torch

from ep_moe.experts import Experts
from ep_moe.experts.kernels import RepeatedCall, signature_of
from ep_moe.functional.plans import CopiedScale
from ep_moe.functional.vllm.batched_call import BatchedCall
from ep_moe.layout import ExpertBatch
from ep_moe.local_moe.joined import repeated_experts
from ep_moe.weights import ExpertWeights


class BatchedPlan:
    """The launches of a call that has returned, for calls that differ from it in addresses and values alone.

    Args: call: of the experts, with `weights`. row_start: [E] int32. scale: the caller's of the intermediate.
    """

    def __init__(
        self, call: RepeatedCall, weights: ExpertWeights, row_start: torch.Tensor, scale: torch.Tensor | None
    ) -> None:
        self._sequence, self._weights, self._kept = call.sequence, call.weights, weights
        self._row_start, self._scale = row_start, CopiedScale(weights.w2_input_scale, scale)

    @classmethod
    def of(
        cls, call: BatchedCall, batch: ExpertBatch, weights: ExpertWeights, experts: Experts
    ) -> "BatchedPlan | None":
        """The plan of a call that has returned; None if its launches copied tensors, or are not loaded. Local."""
        scale, given = batch.scale, call.a1q_scale
        in_place = scale is None or (given is not None and scale.data_ptr() == given.data_ptr())
        if not in_place or not call.output.is_contiguous() or call.expert_num_tokens.stride(0) != 1:
            return None
        repeated = repeated_experts(experts, signature_of(batch), weights)
        return None if repeated is None else cls(repeated, weights, batch.expert_row_start, call.a2_scale)

    def repeat(self, call: BatchedCall) -> bool:
        """Launch a later call; False, with nothing launched, if a tensor is not aligned to 16 bytes.

        Local, on the current stream, no host sync.
        """
        counts = call.expert_num_tokens
        if counts.dtype != torch.int32:
            counts = counts.to(torch.int32)
        if not self._scale.update(call.a2_scale):
            return False
        tensors: list[Any] = [call.hidden_states, call.a1q_scale, self._row_start, counts, call.output, *self._weights]
        return self._sequence.repeat([each.data_ptr() for each in tensors if each is not None]) is not None
