"""`invoke_fused_moe_kernel` as one sequence of launches: lists of rows by expert, quantization, the GEMM.

Letters: T tokens, K top-k, E experts, N and C rows and columns of a weight, M sorted pairs, P pairs.
"""

from typing import Any, NamedTuple

import torch

from ep_moe.experts.tuning import ExpertTiles
from ep_moe.functional.plans import quotients
from ep_moe.kernel_launch.sequence import LaunchSequence, joined
from ep_moe.local_moe.listed_pairs import sorted_pairs
from ep_moe.local_moe.pair_lists import PairLists
from ep_moe.local_moe.row_gemm import RowLists, gemm_by_kernels
from ep_moe.quant import Quantized, QuantScheme, StoredMatrix
from ep_moe.quant.triton import largest_or_scale, quantize_sequence


class GemmArguments(NamedTuple):
    """The arguments of a call that a plan reads."""

    a: torch.Tensor  # [T, C]
    b: torch.Tensor
    b_scale: torch.Tensor | None
    bias: torch.Tensor | None
    c: torch.Tensor  # rows of N
    a_scale: torch.Tensor | None
    topk_weights: torch.Tensor  # [P], in any shape and float dtype
    sorted_token_ids: torch.Tensor  # [M]
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor  # [1] or [2]


class GemmPlan:
    """The lists of calls of one kind, and their launches once a call has returned.

    Kernels find the expert of each pair, and those of the layouts sort the pairs by expert.

    Args:
        given: of a first call. num_pairs, num_experts: P and E, at least 1. block: sorted pairs of an expert. top_k:
            pairs that share a row of A. weighted: rows are multiplied by the pairs' weights. scheme: of tokens and
            weight.
    Local; nothing is launched.
    """

    def __init__(
        self,
        given: GemmArguments,
        scheme: QuantScheme,
        *,
        num_pairs: int,
        num_experts: int,
        block: int,
        top_k: int,
        weighted: bool,
    ) -> None:
        device, most = given.a.device, given.sorted_token_ids.shape[0]
        self._num_pairs, self._num_experts = num_pairs, num_experts
        self._scheme, self._weighted = scheme, weighted
        self._numbers = quotients(top_k, num_pairs, device)
        self._pairs = sorted_pairs(num_pairs, most, block, device)
        self._lists = PairLists(num_pairs, num_experts, torch.int32, self._numbers.stride(0), device).sequence
        self._quantizing: LaunchSequence | None = None
        if scheme.payload.quantized:
            self._quantizing = quantize_sequence(given.a, scheme.payload, static=given.a_scale is not None)
        self._whole: LaunchSequence | None = None

    def _listed(self, given: GemmArguments) -> list[torch.Tensor]:
        """Sorted pairs, the experts of their blocks and how many count; weights and numbers of pairs."""
        weights = given.topk_weights
        if weights.dtype != torch.float32 or not weights.is_contiguous():
            weights = weights.float().contiguous()
        sort = given.sorted_token_ids, given.expert_ids, given.num_tokens_post_padded
        return [*sort, weights, self._numbers]

    def _tokens(self, given: GemmArguments) -> list[torch.Tensor]:
        """What quantization is given."""
        number = largest_or_scale(given.a, self._scheme.payload, given.a_scale)
        return [given.a] if number is None else [given.a, number]

    def run(
        self, given: GemmArguments, weight: StoredMatrix, c: torch.Tensor, tiles: ExpertTiles | None, *, repeats: bool
    ) -> None:
        """A first call, with checked arguments.

        Args: c: [rows, N] contiguous, is written. repeats: later calls like this one read and write in place.
        """
        *sort, weights, numbers = self._listed(given)
        found = self._pairs.workspace.views(self._pairs.run(dict(zip(self._pairs.given, sort, strict=True))))
        views = self._lists.workspace.views(
            self._lists.run({"ids": found["ids"], "weights": weights.view(-1), "numbers": numbers})
        )
        count, x = self._num_pairs, given.a
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
            memory = sequence.run(dict(zip(sequence.given, self._tokens(given), strict=True)))
            values, scale = (sequence.workspace.view(memory, name) for name in ("values", "values_scale"))
            tokens = Quantized(values=values, scale=scale.t(), scheme=self._scheme)
        gemm = gemm_by_kernels(tokens, rows, weight, self._scheme, bias=given.bias, out=c, tiles=tiles)
        if repeats:
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

    def repeat(self, given: GemmArguments) -> bool:
        """Launch a later call; False, with nothing launched, if no first one was in place or tensors are not aligned.

        Local, on the current stream, no host sync.
        """
        if self._whole is None:
            return False
        tensors: list[Any] = [*self._listed(given), given.b, given.b_scale, given.bias, given.c]
        if self._quantizing is not None:
            tensors[:0] = self._tokens(given)
        else:
            tensors.insert(5, given.a)
        addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
        return self._whole.repeat(addresses) is not None
