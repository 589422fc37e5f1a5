"""vLLM's `BatchedPrepareAndFinalize`: tokens of one process to rows by expert, and back.

Letters: T tokens, H hidden, K top-k, E experts of all ranks, L local experts, C `max_num_tokens`, G scale groups.
"""

from typing import Any

import torch

from ep_moe.functional.vllm.batched_rows import PrepareCall, finalize, finalize_op, prepare, prepare_op
from ep_moe.functional.vllm.config import FusedMoEActivationFormat
from ep_moe.functional.vllm.formats import RowFormat


class BatchedPrepareAndFinalize:
    """Tokens [T, H] packed as [L, C, H], with their counts, and the experts' outputs weighted and summed.

    Nothing is sent: each rank packs the tokens of its own experts out of all tokens. `ep_moe.engines.vllm` has a class
    on vLLM's bases that sends tokens between ranks.

    Args:
        max_num_tokens: C, the most tokens of a call. num_local_experts: L. num_dispatchers: told to callers.
        rank: experts [rank * L, rank * L + L) are local, unless a call has an `expert_map`.
    Errors: ValueError for sizes below 1 and a negative rank.
    """

    def __init__(self, max_num_tokens: int, num_local_experts: int, num_dispatchers: int, rank: int) -> None:
        for name, number, least in (
            ("max_num_tokens", max_num_tokens, 1),
            ("num_local_experts", num_local_experts, 1),
            ("num_dispatchers", num_dispatchers, 1),
            ("rank", rank, 0),
        ):
            if number < least:
                raise ValueError(f"{name} ({number}) must be at least {least}")
        self.max_num_tokens, self.num_local_experts, self.rank = max_num_tokens, num_local_experts, rank
        self.num_dispatchers_ = num_dispatchers
        self._expert_map: torch.Tensor | None = None

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        """BatchedExperts."""
        return FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int | None:
        """C."""
        return self.max_num_tokens

    def topk_indices_dtype(self) -> torch.dtype | None:
        """None: int32 and int64 both do."""
        return None

    def num_dispatchers(self) -> int:
        """What the constructor was given."""
        return self.num_dispatchers_

    def prepare(
        self,
        a1: torch.Tensor,
        a1_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Pack the tokens of the local experts, quantized if the config says so.

        Args:
            a1: [T, H] float32, bfloat16 or float16; it is not changed.
            a1_scale: static scales in place of those of the data: one number, or [T, 1] with a scale per token.
            a2_scale: not read; it belongs to the experts.
            topk_weights, topk_ids: [T, K], int32 or int64 ids; ids of no local expert, as -1, are left out. An expert
                that a token has twice is one row with the sum of the weights.
            num_experts: E. expert_map: [E] integers, the local number of each expert, -1 none; `finalize` uses that of
                the last call.
            apply_router_weight_on_input: multiply rows by their weights, of any K.
            quant_config: vLLM's or our `FusedMoEQuantConfig`; newer ones have an `a1_scale`, which serves if the
                argument is None.
        Returns: rows [L, C, H], in token order, then zeros; their scales [L, C, G] or [L, 1, 1], or None;
        expert_num_tokens [E] int32, of which the first L are the local experts' and the others zero; None; None.
        Errors: ValueError names the argument, its value and what is needed.
        Local, on the current stream. On a GPU no host sync, safe in CUDA graphs; an operator under torch.compile.
        """
        del a2_scale
        rows = RowFormat.of_config(quant_config)
        call = PrepareCall(
            a1,
            getattr(quant_config, "a1_scale", None) if a1_scale is None else a1_scale,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            rows.dtype,
            rows.per == "token",
            None if rows.block is None else list(rows.block),
            self.max_num_tokens,
            self.num_local_experts,
            self.rank * self.num_local_experts,
        )
        self._expert_map = expert_map
        packed, scale, counts = prepare_op(*call) if torch.compiler.is_compiling() else prepare(call)
        return packed, None if rows.dtype is None else scale, counts, None, None

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> None:
        """output [T, H] = the sum of the local experts' outputs of each token, in float32, rounded once.

        Args:
            output: any float dtype, written; zero for a token without a local expert.
            fused_expert_output: [L, C, H]; rows that are no token are not read, and nothing is changed.
            topk_weights, topk_ids: as of `prepare`. apply_router_weight_on_input: the sum is not weighted.
        Errors: ValueError names the argument, its value and what is needed.
        Local, on the current stream. On a GPU no host sync, safe in CUDA graphs; an operator under torch.compile.
        """
        run = finalize_op if torch.compiler.is_compiling() else finalize
        first = self.rank * self.num_local_experts
        run(output, fused_expert_output, topk_weights, topk_ids, self._expert_map, apply_router_weight_on_input, first)
