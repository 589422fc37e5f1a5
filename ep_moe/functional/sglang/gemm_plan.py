"""`invoke_fused_moe_kernel` as one sequence of launches: lists of rows by expert, quantization, the GEMM.

Letters: N rows of a weight.
"""

from typing import Any

import torch

from ep_moe.experts.tuning import ExpertTiles
from ep_moe.functional.plans import quotients
from ep_moe.functional.sglang.pairs import GemmCall
from ep_moe.kernel_launch.sequence import LaunchSequence, joined
from ep_moe.local_moe.listed_pairs import sorted_pairs
from ep_moe.local_moe.pair_lists import PairLists
from ep_moe.local_moe.row_gemm import RowLists, gemm_by_kernels
from ep_moe.quant import Quantized, QuantScheme, StoredMatrix
from ep_moe.quant.triton import largest_or_scale, quantize_sequence


class GemmPlan:
    """The lists of calls like a first one, of at least one pair, and their launches once a call has returned.

    Args: block: sorted pairs that have one expert.
    """

    def __init__(self, call: GemmCall, scheme: QuantScheme, block: int) -> None:
        device, most = call.A.device, call.sorted_token_ids.shape[0]
        num_pairs, num_experts = call.topk_ids.numel(), call.B.shape[0]
        self._num_pairs, self._num_experts = num_pairs, num_experts
        self._scheme, self._weighted = scheme, call.mul_routed_weight
        self._numbers = quotients(call.top_k, num_pairs, device)
        self._pairs = sorted_pairs(num_pairs, most, block, device)
        self._lists = PairLists(num_pairs, num_experts, torch.int32, self._numbers.stride(0), device).sequence
        self._quantizing: LaunchSequence | None = None
        if scheme.payload.quantized:
            self._quantizing = quantize_sequence(call.A, scheme.payload, static=call.A_scale is not None)
        self._whole: LaunchSequence | None = None

    def _listed(self, call: GemmCall) -> list[torch.Tensor]:
        """Sorted pairs, the experts of their blocks and how many count; weights and numbers of pairs."""
        weights = call.topk_weights
        if weights.dtype != torch.float32 or not weights.is_contiguous():
            weights = weights.float().contiguous()
        sort = call.sorted_token_ids, call.expert_ids, call.num_tokens_post_padded
        return [*sort, weights, self._numbers]

    def _tokens(self, call: GemmCall) -> list[torch.Tensor]:
        """The inputs of quantization."""
        number = largest_or_scale(call.A, self._scheme.payload, call.A_scale)
        return [call.A] if number is None else [call.A, number]

    def run(
        self, call: GemmCall, weight: StoredMatrix, c: torch.Tensor, tiles: ExpertTiles | None, *, again: bool
    ) -> None:
        """A first call, checked, into c [rows, N]; `again`: later ones read and write in place."""
        *sort, weights, numbers = self._listed(call)
        found = self._pairs.workspace.views(self._pairs.run(dict(zip(self._pairs.given, sort, strict=True))))
        views = self._lists.workspace.views(
            self._lists.run({"ids": found["ids"], "weights": weights.view(-1), "numbers": numbers})
        )
        count, x = self._num_pairs, call.A
        rows = RowLists(
            expert_row_start=views["expert_row_start"],
            expert_num_tokens=views["expert_num_tokens"],
            source=views["source"][:count],
            target=views["target"][:count],
            factor=views["factor"][:count] if self._weighted else None,
            zeros=found["listed"],
            expected_rows=max(-(-count // self._num_experts), 1),
        )
        tokens: torch.Tensor | Quantized = x
        if self._quantizing is not None:
            sequence = self._quantizing
            memory = sequence.run(dict(zip(sequence.given, self._tokens(call), strict=True)))
            values, scale = (sequence.workspace.view(memory, name) for name in ("values", "values_scale"))
            tokens = Quantized(values=values, scale=scale.t(), scheme=self._scheme)
        gemm = gemm_by_kernels(tokens, rows, weight, self._scheme, bias=call.bias, out=c, tiles=tiles)
        if again:
            self._whole = self._join(gemm, x.device)

    def _join(self, gemm: LaunchSequence, device: torch.device) -> LaunchSequence | None:
        """All launches as one sequence, None if one is not loaded."""
        before = [] if self._quantizing is None else [self._quantizing]
        of_pairs, of_lists, of_gemm = range(len(before), len(before) + 3)
        listed = {"row_start": "expert_row_start", "num_tokens": "expert_num_tokens"}
        listed |= {name: name for name in ("source", "target", "factor")}
        names = {name: f"{of_lists}:{piece}" for name, piece in listed.items()}
        names["zeros"] = f"{of_pairs}:listed"
        if before:
            names |= {"x": "0:values", "x_scale": "0:values_scale:stored"}
        names = {name: whole for name, whole in names.items() if name in gemm.given}
        parts: list[tuple[LaunchSequence, dict[str, str]]] = [(part, {}) for part in (*before, self._pairs)]
        parts.append((self._lists, {"ids": f"{of_pairs}:ids"}))
        given = [f"{number}:{name}" for number, (part, _) in enumerate(parts) for name in part.given]
        given.remove(f"{of_lists}:ids")
        given += [f"{of_gemm}:{name}" for name in gemm.given if name not in names]
        whole = joined([*parts, (gemm, names)], [], (*given,), {}, device)
        return whole if whole.load() else None

    def again(self, call: GemmCall) -> bool:
        """Launch a later call; False, with nothing launched, without launches or if a tensor is not aligned."""
        if self._whole is None:
            return False
        tensors: list[Any] = [*self._listed(call), call.B, call.B_scale, call.bias, call.C]
        if self._quantizing is not None:
            tensors[:0] = self._tokens(call)
        else:
            tensors.insert(5, call.A)
        addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
        return self._whole.repeat(addresses) is not None
