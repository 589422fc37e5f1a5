"""vLLM's `BatchedPrepareAndFinalize`: tokens of one process to rows by expert, and back.

Letters: T tokens, H hidden, K top-k, E experts of all ranks, L local experts, C `max_num_tokens`, G scale groups.
"""

from typing import Any, NamedTuple

import torch

from ep_moe.config import DTYPES, Layout
from ep_moe.functional.call import Operation, Written, with_arguments
from ep_moe.functional.common import check_like, mapped_ids
from ep_moe.functional.vllm.formats import FusedMoEActivationFormat, RowFormat, check_least
from ep_moe.functional.vllm.quantize import QuantizeCall, divided, no_token, quantize_batched
from ep_moe.layout import TokenRows, merge_repeats, pack, weighted_sum
from ep_moe.quant import as_bytes, get_scheme, quantize

_IDS = (torch.int32, torch.int64)


class PrepareCall(NamedTuple):
    """The arguments of `prepare` that have a meaning here, and those of the constructor."""

    a1: torch.Tensor
    a1_scale: torch.Tensor | None
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    num_experts: int
    expert_map: torch.Tensor | None
    weights_on_input: bool
    dtype: torch.dtype | None
    per_token: bool
    block_shape: list[int] | None
    max_num_tokens: int
    num_local_experts: int
    first: int

    @property
    def rows(self) -> RowFormat:
        """The format of the packed rows."""
        return RowFormat.of(self.dtype, self.per_token, self.block_shape)


class BatchedPrepareAndFinalize:
    """Tokens [T, H] packed as [L, C, H], with their counts, and the experts' outputs weighted and summed.

    Nothing is sent: each rank packs the tokens of its own experts out of all tokens. `ep_moe.engines.vllm` has a class
    on vLLM's bases that sends tokens between ranks.

    Args:
        max_num_tokens: C, the most tokens of a call. num_local_experts: L. num_dispatchers: told to callers.
        rank: experts [rank * L, rank * L + L) are local, unless a call has an `expert_map`.
    Errors: ValueError for sizes below 1 and a negative rank.
    """

    activation_format = FusedMoEActivationFormat.BatchedExperts

    def __init__(self, max_num_tokens: int, num_local_experts: int, num_dispatchers: int, rank: int) -> None:
        check_least(max_num_tokens=(max_num_tokens, 1), num_local_experts=(num_local_experts, 1))
        check_least(num_dispatchers=(num_dispatchers, 1), rank=(rank, 0))
        self.max_num_tokens, self.num_local_experts, self.rank = max_num_tokens, num_local_experts, rank
        self.num_dispatchers_ = num_dispatchers
        self._expert_map: torch.Tensor | None = None

    def max_num_tokens_per_rank(self) -> int | None:
        """C."""
        return self.max_num_tokens

    def topk_indices_dtype(self) -> torch.dtype | None:
        """None: int32 and int64 both do."""
        return None

    def num_dispatchers(self) -> int:
        """What the constructor was given."""
        return self.num_dispatchers_

    @with_arguments(
        PrepareCall,
        "self a1 a1_scale a2_scale topk_weights topk_ids num_experts expert_map apply_router_weight_on_input "
        "quant_config",
    )
    def prepare(given: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, None, None]:  # noqa: N805
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
        made, config = given.self, given.quant_config
        scale = getattr(config, "a1_scale", None) if given.a1_scale is None else given.a1_scale
        rows = config.quant_dtype, bool(config.per_act_token_quant), config.block_shape
        own = made.max_num_tokens, made.num_local_experts, made.rank * made.num_local_experts
        made._expert_map = given.expert_map
        packed, scale, counts = _PREPARE(PrepareCall._make((given.a1, scale, *given[4:9], *rows, *own)))
        return packed, None if config.quant_dtype is None else scale, counts, None, None

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
        tensors = output, fused_expert_output, topk_weights, topk_ids, self._expert_map
        _FINALIZE(FinalizeCall(*tensors, apply_router_weight_on_input, self.rank * self.num_local_experts))


def _local(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, expert_map: torch.Tensor | None, first: int, num_local: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Local ids [T, K] int32, each at most once in a row, -1 none, and their weights."""
    weights = topk_weights.float()
    if expert_map is None:
        return merge_repeats(topk_ids, weights, first=first, last=first + num_local)
    return merge_repeats(mapped_ids(topk_ids, expert_map), weights, first=0, last=num_local)


def _check(call: PrepareCall) -> None:
    a1, ids, tokens = call.a1, call.topk_ids, call.a1.shape[0]
    if a1.dim() != 2 or a1.dtype not in DTYPES.values():
        found = f"{tuple(a1.shape)} {a1.dtype}"
        raise ValueError(f"a1 is {found}; [tokens, hidden] of {', '.join(DTYPES)} needed")
    if tokens > call.max_num_tokens:
        raise ValueError(f"a1 has {tokens} tokens, which exceeds max_num_tokens ({call.max_num_tokens})")
    _check_routing(ids, call.topk_weights, tokens)
    if call.expert_map is not None:
        check_like(call.expert_map, "expert_map", (call.num_experts,), _IDS)
    elif call.first + call.num_local_experts > call.num_experts:
        last = call.first + call.num_local_experts
        raise ValueError(f"num_experts ({call.num_experts}) is less than the end of the local experts ({last})")
    rows, scale = call.rows, call.a1_scale
    if scale is None:
        return
    if rows.per not in ("tensor", "token"):
        what = "quant_config has no quant_dtype" if rows.dtype is None else f"block_shape ({call.block_shape}) is given"
        raise ValueError(f"a1_scale is given, {what}, which takes none")
    counts = (1, tokens) if rows.per == "token" else (1,)
    if scale.numel() not in counts or scale.dtype != torch.float32:
        needed = " or ".join(map(str, counts))
        raise ValueError(f"a1_scale is {tuple(scale.shape)} {scale.dtype}; {needed} float32 numbers needed")


def _check_routing(ids: torch.Tensor, weights: torch.Tensor, tokens: int) -> None:
    if ids.dim() != 2 or ids.shape[0] != tokens or ids.dtype not in _IDS:
        raise ValueError(f"topk_ids are {tuple(ids.shape)} {ids.dtype}; ({tokens}, K) int32 or int64 needed")
    if weights.shape != ids.shape or not weights.is_floating_point():
        raise ValueError(f"topk_weights are {tuple(weights.shape)} {weights.dtype}; {tuple(ids.shape)} floats needed")


def _prepare(call: PrepareCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`BatchedPrepareAndFinalize.prepare`; scales are empty if nothing is quantized. Local."""
    _check(call)
    rows, x, local, height = call.rows, call.a1, call.num_local_experts, call.max_num_tokens
    ids, weights = _local(call.topk_ids, call.topk_weights, call.expert_map, call.first, local)
    each = call.weights_on_input and ids.shape[1] > 1  # rows of a token differ
    if call.weights_on_input and not each:
        x = x * call.topk_weights.to(x.dtype)
    dynamic = rows.per == "tensor" and call.a1_scale is None  # each expert's rows have a scale
    late = rows.dtype is not None and (each or dynamic)
    scheme, scale = get_scheme("none"), None
    if rows.dtype is not None and not late:
        scheme = rows.scheme()
        x, scale = _quantized(call, x)
    packed = pack(
        TokenRows(x=x, scale=scale, local_topk_ids=ids, topk_weights=weights),
        Layout.BATCHED,
        scheme=scheme,
        dtype=call.a1.dtype,
        num_local_experts=local,
        capacity=height,
    )
    values, counts = packed.batch.x, packed.batch.expert_num_tokens
    if each:
        values = values * _by_row(packed.token_to_row, weights, local, height).to(values.dtype)
    values = _without_empty(values, counts)
    found = packed.batch.scale
    if late:
        static = None if call.a1_scale is None else _static_of_rows(call, packed.token_to_row, local, height)
        assert rows.dtype is not None
        given = QuantizeCall(values, static, counts, rows.dtype, call.per_token, call.block_shape)
        values, found = quantize_batched(given)
        values = _without_empty(values, counts)
    if found is not None and rows.per == "tensor" and not late:
        assert call.a1_scale is not None
        found = call.a1_scale.reshape(1, 1, 1).repeat(local, 1, 1)
    expert_num_tokens = torch.zeros(call.num_experts, dtype=torch.int32, device=x.device)
    expert_num_tokens[:local] = counts
    return values, values.new_empty(0, dtype=torch.float32) if found is None else found.contiguous(), expert_num_tokens


def _without_empty(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows that are no token become zero, in place."""
    as_bytes(values).masked_fill_(no_token(counts, *values.shape[:2]).unsqueeze(2), 0)
    return values


def _quantized(call: PrepareCall, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [T, H] and their scales [T, G], before they are packed."""
    rows = call.rows
    if call.a1_scale is None:
        found = quantize(x, rows.scheme())
        return found.values, found.scale
    assert rows.dtype is not None
    scale = call.a1_scale.reshape(-1, 1)
    return divided(x, scale, rows.dtype), scale.expand(x.shape[0], 1).contiguous()


def _by_row(token_to_row: torch.Tensor, values: torch.Tensor, experts: int, height: int) -> torch.Tensor:
    """values [T, K] float32 at the rows that their tokens have: [L, C, 1], zeros elsewhere."""
    place = torch.where(token_to_row >= 0, token_to_row, experts * height).long().reshape(-1)
    at = values.new_zeros(experts * height + 1).scatter_(0, place, values.reshape(-1))
    return at[:-1].view(experts, height, 1)


def _static_of_rows(call: PrepareCall, token_to_row: torch.Tensor, experts: int, height: int) -> torch.Tensor:
    """The static scale of each row, 1 where there is none, or the one of all."""
    assert call.a1_scale is not None
    if call.rows.per == "tensor":
        return call.a1_scale
    scale = call.a1_scale.reshape(-1, 1).expand(token_to_row.shape)
    found = _by_row(token_to_row, scale.contiguous(), experts, height)
    return torch.where(found == 0, 1.0, found)


class FinalizeCall(NamedTuple):
    """The arguments of `finalize`, the map of the last `prepare` and the first local expert."""

    output: Written
    fused_expert_output: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None
    weights_on_input: bool
    first: int


def _finalize(call: FinalizeCall) -> None:
    """`BatchedPrepareAndFinalize.finalize`. Local."""
    output, y, topk_ids = call.output, call.fused_expert_output, call.topk_ids
    if y.dim() != 3:
        raise ValueError(f"fused_expert_output is {tuple(y.shape)}; [experts, max tokens, hidden] needed")
    num_local, height, hidden = y.shape
    _check_routing(topk_ids, call.topk_weights, topk_ids.shape[0])
    tokens = topk_ids.shape[0]
    if tuple(output.shape) != (tokens, hidden) or not output.is_floating_point():
        raise ValueError(f"output is {tuple(output.shape)} {output.dtype}; {(tokens, hidden)} of any float needed")
    if tokens > height:
        raise ValueError(f"topk_ids have {tokens} tokens, which exceeds the {height} rows of an expert")
    ids, weights = _local(topk_ids, call.topk_weights, call.expert_map, call.first, num_local)
    chosen = torch.zeros(tokens, num_local + 1, dtype=torch.int32, device=ids.device)
    columns = torch.where(ids >= 0, ids, num_local).long()
    chosen.scatter_(1, columns, 1)
    place = (chosen.cumsum(0, dtype=torch.int32) - 1).gather(1, columns)
    token_to_row = torch.where(ids >= 0, ids * height + place, -1).to(torch.int32)
    out = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
    weighted_sum(y.reshape(-1, hidden), token_to_row, None if call.weights_on_input else weights, out=out)
    if out is not output:
        output.copy_(out)


def _new_rows(call: PrepareCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, shape = call.rows, (call.num_local_experts, call.max_num_tokens, call.a1.shape[1])
    scale, new = (0,) if rows.dtype is None else rows.scale_shape(*shape), call.a1.new_empty
    values = new(shape, dtype=rows.dtype or call.a1.dtype)
    return values, new(scale, dtype=torch.float32), new(call.num_experts, dtype=torch.int32)


_Prepared = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_PREPARE: Operation[PrepareCall, _Prepared] = Operation(
    "batched_prepare", PrepareCall, _prepare, new=_new_rows, num_results=3
)
_FINALIZE: Operation[FinalizeCall, None] = Operation("batched_finalize", FinalizeCall, _finalize, result="output")
