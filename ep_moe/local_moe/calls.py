"""The experts of one rank applied to tokens that it holds, without transport, group or placement.

Letters: T tokens, H hidden, K top-k, L local experts, E experts of all ranks.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ep_moe.config import Layout
from ep_moe.experts import Experts
from ep_moe.kernel_launch.plan_cache import PlanCache
from ep_moe.layout import Flat, Packed, pack_routed, weighted_sum
from ep_moe.layout.base import PackingSizes, packable
from ep_moe.quant import Quantized, QuantScheme, quantize
from ep_moe.routing import Routing
from ep_moe.weights import ExpertWeights

if TYPE_CHECKING:
    from ep_moe.kernel_launch.sequence import LaunchSequence
    from ep_moe.local_moe.joined import JoinedCall
    from ep_moe.local_moe.routed import RoutedPacking

_MOST_SEQUENCES = 64  # of a kind
_MOST_PLANS = 4096  # of kinds of calls, and of those with certain weights


def local_moe(
    x: torch.Tensor | Quantized,
    routing: Routing,
    weights: ExpertWeights,
    experts: Experts,
    *,
    layout: Layout = Layout.COMPACT,
    local_expert_offset: int = 0,
    num_local_experts: int | None = None,
    num_experts: int | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Merge repeated experts, pack, compute the local experts, and sum their weighted outputs in float32.

    Example: with experts [4, 8) on this rank, `local_expert_offset` is 4 and `num_local_experts` 4. The result is this
    rank's part of the sum; over all ranks the parts add up to the layer's output.

    Args:
        x: [T, H] in the model's dtype, quantized here if the scheme of `weights` quantizes tokens; or `Quantized`. Or
            [T * K, H], a row for each expert of a token; not in layout FLAT.
        routing: ids of all E experts, [T, K]. Ids outside [local_expert_offset, local_expert_offset +
            num_local_experts), including -1 and ids of no expert, are ignored, as in FlashInfer.
        weights: of the L local experts. experts: the implementation that computes them.
        num_local_experts: L, by default that of `weights`.
        num_experts: E, by default L; tiles are chosen for T * K / E rows per expert.
        dtype: the model's; by default that of x, and required if x is `Quantized`.
        out: optional result, [T, H] in the model's dtype.
    Returns: `out`, or [T, H] in the model's dtype; a token without a local expert is zero.
    Errors: ValueError, with the value and the limit, for arguments that do not fit each other.
    Local, on the current stream. On a GPU no host sync, and safe in CUDA graphs, if `experts` is.
    """
    routing, tokens_in_sum = _of_rows(x, routing)
    chosen = layout, local_expert_offset, num_local_experts, num_experts, dtype, tokens_in_sum
    plans, kind_key = _plans(), _key_of(x, routing, weights, chosen)
    key = kind_key, id(weights), id(experts), out if out is None else (out.shape, out.stride(), out.dtype, out.device)
    ids, factors = routing.topk_ids, routing.topk_weights
    call: JoinedCall | None = plans.get(key)
    if call is not None:
        result = call(call.inputs(x, ids, factors, weights.w13_input_scale), out)
        if result is not None:
            return result
    kind = _kind_of(kind_key, x, routing, weights, chosen)
    if call is None and out is not None:
        _check_out(out, weights.w2.values, kind.sizes)
    packing = kind.packing
    batch = None if packing is None else packing.pack(x, ids, factors, weights.w13_input_scale)
    if packing is not None and batch is not None:
        result = packing.weighted_sum(experts(batch, weights), batch, out)
        if call is None:
            call = kind.joined(packing.inputs(x, ids, factors, weights.w13_input_scale), weights, experts, out)
            if call is not None:
                plans.keep(key, call, owners=(weights, experts), alive=_schemes(x))
        return result
    packed = _pack(x, routing, weights, kind.sizes)
    if isinstance(packed.batch, Flat):
        return experts(packed.batch, weights, out=out)
    summed = -1, tokens_in_sum * routing.topk_ids.shape[1]
    rows, factors = packed.token_to_row.reshape(summed), packed.topk_weights.reshape(summed)
    return weighted_sum(experts(packed.batch, weights), rows, factors, out=out)


def repeated_call(
    x: torch.Tensor | Quantized,
    routing: Routing,
    weights: ExpertWeights,
    experts: Experts,
    *,
    before: "LaunchSequence | None" = None,
    out: torch.Tensor | None = None,
    **options: Any,
) -> "JoinedCall | None":
    """The launches of a call of `local_moe` that has returned, for callers that know which later calls are like it.

    Args:
        before: launches that come first, in whose workspace "ids" and "weights" are those of the routing, and "tokens"
            those of x, if it has them.
        The others: of the call, but a layout; later ones differ in addresses and values of tensors alone.
    Returns: None if not all of the call is repeated launches, which it is on GPUs if rows have no gaps.
    Local; nothing is launched.
    """
    routing, tokens_in_sum = _of_rows(x, routing)
    chosen = _Chosen(tokens_in_sum=tokens_in_sum, **options)
    kind = _kind_of(_key_of(x, routing, weights, chosen), x, routing, weights, chosen)
    if kind.packing is None:
        return None
    tensors = kind.packing.inputs(x, routing.topk_ids, routing.topk_weights, weights.w13_input_scale)
    return kind.joined(tensors, weights, experts, out, before)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertRows:
    """The local experts' outputs before they are weighted and summed."""

    y: torch.Tensor  # [rows, H] in the model's dtype; rows that no token has are undefined
    token_to_row: torch.Tensor  # [T, K] int32, the row that computes token t's k-th expert, -1 none
    topk_weights: torch.Tensor  # [T, K] float32, of those rows, 0 where there is none


def local_rows(
    x: torch.Tensor | Quantized,
    routing: Routing,
    weights: ExpertWeights,
    experts: Experts,
    **options: Any,
) -> ExpertRows:
    """`local_moe` without its last step, the weighted sum.

    Args and errors: as of `local_moe`, but a layout, and `out`.
    Returns: T * min(K, L) rows; a repeated expert has one row, at its first place, and the sum of its weights.
    Local, on the current stream. On a GPU no host sync, and safe in CUDA graphs, if `experts` is.
    """
    chosen = _Chosen(**options)
    kind = _kind_of(_key_of(x, routing, weights, chosen), x, routing, weights, chosen)
    packing = kind.packing
    if packing is not None:
        batch = packing.pack(x, routing.topk_ids, routing.topk_weights, weights.w13_input_scale)
        if batch is not None:
            token_to_row, topk_weights = (packing.view(batch, name) for name in ("token_to_row", "topk_weights"))
            return ExpertRows(y=experts(batch, weights), token_to_row=token_to_row, topk_weights=topk_weights)
    packed = _pack(x, routing, weights, kind.sizes)
    y = experts(packed.batch, weights)
    return ExpertRows(y=y, token_to_row=packed.token_to_row, topk_weights=packed.topk_weights)


def _of_rows(x: torch.Tensor | Quantized, routing: Routing) -> tuple[Routing, int]:
    """The routing of the rows of x, and how many of them have one sum."""
    num_rows, ids = (x if isinstance(x, torch.Tensor) else x.values).shape[0], routing.topk_ids
    if num_rows == ids.shape[0] or num_rows != ids.numel():
        return routing, 1
    apart = ids.reshape(-1, 1), routing.topk_weights.reshape(-1, 1)
    return Routing(topk_ids=apart[0], topk_weights=apart[1]), ids.shape[1]


class _Chosen(NamedTuple):
    """The arguments of `local_moe` that are numbers, and how many rows of x have one sum."""

    layout: Layout = Layout.COMPACT
    local_expert_offset: int = 0
    num_local_experts: int | None = None
    num_experts: int | None = None
    dtype: torch.dtype | None = None
    tokens_in_sum: int = 1


class _Kind:
    """Calls whose tokens and routing have the same shapes and dtypes, packed by launches unless `packing` is None."""

    def __init__(self, packing: "RoutedPacking | None", sizes: PackingSizes) -> None:
        self.packing, self.sizes = packing, sizes
        self._sequences = PlanCache["LaunchSequence"](_MOST_SEQUENCES)  # one for all layers of a model

    def joined(
        self,
        tensors: Sequence[torch.Tensor],
        weights: ExpertWeights,
        experts: Experts,
        out: torch.Tensor | None,
        routing: "LaunchSequence | None" = None,
    ) -> "JoinedCall | None":
        """The call with these weights, of packing's `inputs`; None if a part is no launch of a loaded kernel."""
        packing = self.packing
        if packing is None:
            return None
        from ep_moe.local_moe.joined import JoinedCall, join, repeated_experts  # Triton exists only on Linux

        computed = repeated_experts(experts, packing.template.signature, weights)
        summed = None if computed is None else packing.sum_launch(computed.dtype, out)
        if computed is None or summed is None:
            return None
        key = id(computed.sequence), id(summed), id(routing)
        sequence = self._sequences.get(key)
        if sequence is None:
            sequence = join(packing, computed, summed, tensors, routing)
            if sequence is None:
                return None
            self._sequences.keep(key, sequence, alive=(computed.sequence, summed, routing))
        return JoinedCall(sequence, computed, packing)


@functools.cache
def _plans() -> PlanCache[Any]:
    """Kinds of calls, by `_key_of`, and calls with certain weights and experts."""
    return PlanCache(_MOST_PLANS)


def _schemes(x: torch.Tensor | Quantized) -> tuple[QuantScheme, ...]:
    """The scheme of tokens whose id is in a key."""
    return (x.scheme,) if isinstance(x, Quantized) else ()


def _key_of(
    x: torch.Tensor | Quantized, routing: Routing, weights: ExpertWeights, chosen: tuple[Any, ...]
) -> tuple[object, ...]:
    """Cache key of a kind: type, scheme, shapes, strides and dtypes of tensors, and the other arguments."""
    ids = routing.topk_ids
    routed = routing.signature or (ids.shape, ids.dtype, ids.device, ids.stride(), routing.topk_weights.stride())
    of_weights = id(weights.scheme), weights.num_local_experts, weights.w13_input_scale is None
    if isinstance(x, Quantized):
        values, scale = x.values, x.scale
        tokens: tuple[object, ...] = values.shape, values.stride(), values.device, scale.stride(), id(x.scheme)
    else:
        tokens = x.shape, x.stride(), x.device, x.dtype
    return tokens, routed, of_weights, chosen


def _kind_of(
    key: object, x: torch.Tensor | Quantized, routing: Routing, weights: ExpertWeights, chosen: tuple[Any, ...]
) -> _Kind:
    """The kind of a call, by its `_key_of`, made and checked once for all of its calls."""
    plans = _plans()
    kind: _Kind | None = plans.get(key)
    if kind is None:
        sizes = _check(x, routing, weights, chosen)
        kind = plans.keep(key, _Kind(_new_packing(x, routing, sizes), sizes), alive=(weights.scheme, *_schemes(x)))
    return kind


def _new_packing(x: torch.Tensor | Quantized, routing: Routing, sizes: PackingSizes) -> "RoutedPacking | None":
    if not routing.topk_ids.is_cuda or not packable(x, routing.topk_ids, routing.topk_weights, sizes):
        return None
    from ep_moe.local_moe.routed import RoutedPacking

    return RoutedPacking(x, routing.topk_ids, routing.topk_weights, sizes)


def _check(
    x: torch.Tensor | Quantized, routing: Routing, weights: ExpertWeights, chosen: tuple[Any, ...]
) -> PackingSizes:
    """Check the arguments of `local_moe`; what they ask for."""
    layout, first, num_local_experts, num_experts, dtype, tokens_in_sum = chosen
    num_local = weights.num_local_experts if num_local_experts is None else num_local_experts
    num_total = num_local if num_experts is None else num_experts
    num_rows, num_topk = routing.topk_ids.shape
    model_dtype = x.dtype if isinstance(x, torch.Tensor) else dtype
    if model_dtype is None:
        raise ValueError("dtype is needed if x is Quantized, which does not contain the model's dtype")
    if dtype not in (None, model_dtype):
        raise ValueError(f"x is {model_dtype}, dtype says {dtype}")
    if num_local != weights.num_local_experts:
        raise ValueError(f"num_local_experts ({num_local}) is not that of the weights ({weights.num_local_experts})")
    if first < 0 or (num_experts is not None and first + num_local > num_experts):
        raise ValueError(f"local experts [{first}, {first + num_local}) are not in [0, num_experts ({num_experts}))")
    values = x.values if isinstance(x, Quantized) else x
    if values.shape[0] != num_rows:
        raise ValueError(f"topk_ids has {num_rows} rows, x is {tuple(values.shape)}")
    for name, tensor in (("topk_ids", routing.topk_ids), ("w13", weights.w13.values)):
        if tensor.device != values.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {values.device}")
    if tokens_in_sum > 1 and layout is Layout.FLAT:
        raise ValueError(f"x is {tuple(values.shape)}, {tokens_in_sum} rows a token, which layout flat does not sum")
    return PackingSizes(
        layout=layout,
        scheme=weights.scheme,
        dtype=model_dtype,
        first=first,
        num_local_experts=num_local,
        capacity=num_rows,
        static=weights.w13_input_scale is not None,
        # not as packing assumes, that all of a token's experts are local, which would choose tiles for too many rows
        expected_rows=max(math.ceil(num_rows * num_topk / max(num_total, 1)), 1),
        tokens_in_sum=tokens_in_sum,
    )


def _check_out(out: torch.Tensor, w2: torch.Tensor, sizes: PackingSizes) -> None:
    needed = sizes.capacity // sizes.tokens_in_sum, w2.shape[1]
    if (tuple(out.shape), out.dtype, out.device) != (needed, sizes.dtype, w2.device):
        found = f"{tuple(out.shape)} {out.dtype} on {out.device}"
        raise ValueError(f"out is {found}; {needed} {sizes.dtype} on {w2.device} needed")


def _pack(x: torch.Tensor | Quantized, routing: Routing, weights: ExpertWeights, sizes: PackingSizes) -> Packed:
    """Quantize and pack any tokens of any layout."""
    if weights.scheme.payload.quantized and isinstance(x, torch.Tensor):
        x = quantize(x, weights.scheme, static_scale=weights.w13_input_scale)
    packed = pack_routed(
        x,
        routing.topk_ids,
        routing.topk_weights,
        sizes.layout,
        scheme=weights.scheme,
        dtype=sizes.dtype,
        first=sizes.first,
        num_local_experts=sizes.num_local_experts,
        capacity=sizes.capacity,
    )
    return dataclasses.replace(packed, batch=dataclasses.replace(packed.batch, expected_rows=sizes.expected_rows))
