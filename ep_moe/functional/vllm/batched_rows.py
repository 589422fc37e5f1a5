"""Tokens of one process packed as rows by expert, and the experts' outputs weighted and summed.

Letters: T tokens, H hidden, K top-k, E experts of all ranks, L local experts, C `max_num_tokens`, G scale groups.
"""

from typing import Any, NamedTuple

import torch
from torch.library import custom_op

from ep_moe.config import DTYPES, Layout
from ep_moe.functional.common import check_like, mapped_ids, operator_arguments
from ep_moe.functional.vllm.formats import RowFormat
from ep_moe.functional.vllm.quantize import divided, no_token, quantize_batched
from ep_moe.layout import TokenRows, merge_repeats, pack, weighted_sum
from ep_moe.quant import as_bytes, get_scheme, quantize

_IDS = (torch.int32, torch.int64)


class PrepareCall(NamedTuple):
    """The arguments of the operator that packs."""

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


def prepare(call: PrepareCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
        values, found = quantize_batched(values, static, counts, rows.dtype, call.per_token, call.block_shape)
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
    """The static scale as `quantize_batched` takes it: that of each row, 1 where there is none."""
    assert call.a1_scale is not None
    if call.rows.per == "tensor":
        return call.a1_scale
    scale = call.a1_scale.reshape(-1, 1).expand(token_to_row.shape)
    found = _by_row(token_to_row, scale.contiguous(), experts, height)
    return torch.where(found == 0, 1.0, found)


def finalize(
    output: torch.Tensor,
    fused_expert_output: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    weights_on_input: bool,
    first: int,
) -> None:
    """`BatchedPrepareAndFinalize.finalize`. Local."""
    y = fused_expert_output
    if y.dim() != 3:
        raise ValueError(f"fused_expert_output is {tuple(y.shape)}; [experts, max tokens, hidden] needed")
    num_local, height, hidden = y.shape
    _check_routing(topk_ids, topk_weights, topk_ids.shape[0])
    tokens = topk_ids.shape[0]
    if tuple(output.shape) != (tokens, hidden) or not output.is_floating_point():
        raise ValueError(f"output is {tuple(output.shape)} {output.dtype}; {(tokens, hidden)} of any float needed")
    if tokens > height:
        raise ValueError(f"topk_ids have {tokens} tokens, which exceeds the {height} rows of an expert")
    ids, weights = _local(topk_ids, topk_weights, expert_map, first, num_local)
    chosen = torch.zeros(tokens, num_local + 1, dtype=torch.int32, device=ids.device)
    columns = torch.where(ids >= 0, ids, num_local).long()
    chosen.scatter_(1, columns, 1)
    place = (chosen.cumsum(0, dtype=torch.int32) - 1).gather(1, columns)
    token_to_row = torch.where(ids >= 0, ids * height + place, -1).to(torch.int32)
    out = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
    weighted_sum(y.reshape(-1, hidden), token_to_row, None if weights_on_input else weights, out=out)
    if out is not output:
        output.copy_(out)


def _prepare(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return prepare(PrepareCall(*arguments))


def _prepare_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = PrepareCall(*arguments)
    rows, shape = call.rows, (call.num_local_experts, call.max_num_tokens, call.a1.shape[1])
    scale = (0,) if rows.dtype is None else rows.scale_shape(*shape)
    new = call.a1.new_empty
    return (
        new(shape, dtype=rows.dtype or call.a1.dtype),
        new(scale, dtype=torch.float32),
        new(call.num_experts, dtype=torch.int32),
    )


def _finalize_fake(*arguments: Any) -> None:
    """It returns nothing; the real call checks its arguments."""
    del arguments


prepare_op = custom_op(
    "ep_moe::batched_prepare",
    _prepare,
    mutates_args=(),
    schema=f"({operator_arguments(PrepareCall)}) -> (Tensor, Tensor, Tensor)",
)
prepare_op.register_fake(_prepare_fake)
finalize_op = custom_op(
    "ep_moe::batched_finalize",
    finalize,
    mutates_args=("output",),
    schema="(Tensor(a!) output, Tensor fused_expert_output, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, "
    "bool weights_on_input, SymInt first) -> ()",
)
finalize_op.register_fake(_finalize_fake)
