"""A layer of ten experts on one to four ranks, its tokens, and what it computes in float64."""

import itertools
import pkgutil
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from ep_moe.config import ActivationConfig, Layout, MoEConfig, RoutingConfig, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement, create_placement
from ep_moe.quant import StoredMatrix, get_scheme, quantize_weight
from ep_moe.routing import route
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from ep_moe.transport import create_transport
from ep_moe.weights import ExpertWeights

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK = 48, 32, 10, 3
TOKENS = (9, 0, 17, 4)  # of four ranks; fewer ranks share the same 30 tokens
ROUTING = RoutingConfig(method=2, num_topk=NUM_TOPK, num_group=5, topk_group=3, routed_scaling_factor=2.5)


def whole_weights(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """w13, w2, their biases, every expert different."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE), (2 * INTERMEDIATE,), (HIDDEN,))
    return tuple((torch.randn(NUM_EXPERTS, *shape, generator=generator) / 5).to(dtype) for shape in shapes)


def local_weights(
    placement: Placement, rank: int, scheme: str = "none", dtype: torch.dtype = torch.float32
) -> ExpertWeights:
    """One rank's share of `whole_weights`."""
    w13, w2, b13, b2 = (tensor[list(placement.local_experts(rank))] for tensor in whole_weights(dtype))
    if scheme == "none":
        return ExpertWeights(w13=StoredMatrix(w13), w2=StoredMatrix(w2), w13_bias=b13, w2_bias=b2)
    q13, q2 = (quantize_weight(w, get_scheme(scheme)) for w in (w13, w2))
    return ExpertWeights(w13=q13, w2=q2, w13_bias=b13, w2_bias=b2, scheme=get_scheme(scheme))


def tokens(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """All 30 tokens and their router logits."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(TOKENS), HIDDEN, generator=generator).to(dtype)
    return x, torch.randn(sum(TOKENS), NUM_EXPERTS, generator=generator)


def tokens_of(group: EPGroup, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the 30 tokens, and their router logits."""
    counts = TOKENS if group.num_ranks == 4 else [30 // group.num_ranks] * group.num_ranks
    x, logits = (tensor.split(counts)[group.rank] for tensor in tokens(dtype))
    return x, logits


def layer_on(
    group: EPGroup,
    placement_name: str = "linear",
    scheme: str = "none",
    layout: Layout = Layout.COMPACT,
    dtype: torch.dtype = torch.float32,
) -> ExpertParallelMoE:
    """The layer of this rank."""
    placement = create_placement(placement_name, NUM_EXPERTS, group.num_ranks)
    config = MoEConfig(
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=NUM_EXPERTS,
        routing=ROUTING,
        activation=ActivationConfig(kind="swiglu", alpha=1.702, beta=1.0, limit=1.5),
        scheme=scheme,
        layout=layout,
    )
    transport = create_transport(
        "auto", group, placement, TransportConfig(hidden=HIDDEN, max_tokens_per_rank=30, dtype=dtype)
    )
    return ExpertParallelMoE(
        config,
        local_weights(placement, group.rank, scheme, dtype),
        transport,
        routing_bias=torch.linspace(-0.2, 0.2, NUM_EXPERTS),
        shared_experts=lambda x: x * 0.5,
    )


def random_layer(
    group: EPGroup, transport: str, *, hidden: int = 512, inner: int = 256, experts: int = 16, **sizes: Any
) -> ExpertParallelMoE:
    """A layer without routing, of bfloat16 experts that differ, on this group's device; `sizes` of its transport."""
    placement = Placement.linear(experts, group.num_ranks)
    generator = torch.Generator(group.device).manual_seed(group.rank)
    shape = placement.num_local_experts(group.rank), 2 * inner, hidden
    w13 = torch.randn(shape, generator=generator, device=group.device).bfloat16() / 16
    weights = ExpertWeights(w13=StoredMatrix(w13), w2=StoredMatrix(w13[:, :inner].mT.contiguous()))
    exchange = create_transport(transport, group, placement, TransportConfig(hidden=hidden, **sizes))
    return ExpertParallelMoE(MoEConfig(hidden=hidden, intermediate=inner, num_experts=experts), weights, exchange)


def run_layer(group: EPGroup, placement: str, scheme: str, layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """This rank's outputs, by logits and by ids, [2, T, H]."""
    layer = layer_on(group, placement, scheme, layout, dtype)
    x, logits = tokens_of(group, dtype)
    routing = route(logits, ROUTING, routing_bias=layer.routing_bias)
    return torch.stack([layer(x, logits), layer.forward_routed(x, routing.topk_ids, routing.topk_weights)])


def expected(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A plain loop over tokens in float64, whole weights, no scheme."""
    x, logits = tokens(dtype)
    routing = route(logits, ROUTING, routing_bias=torch.linspace(-0.2, 0.2, NUM_EXPERTS))
    w13, w2, b13, b2 = (tensor.double() for tensor in whole_weights(dtype))
    out = x.double() * 0.5
    for token in range(x.shape[0]):
        for expert, weight in zip(routing.topk_ids[token].tolist(), routing.topk_weights[token].tolist(), strict=True):
            gate, up = (w13[expert] @ x[token].double() + b13[expert]).chunk(2)
            gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
            inner = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
            out[token] += weight * (w2[expert] @ inner + b2[expert])
    return out


def sent_to_rank_1(layer: ExpertParallelMoE, logits: torch.Tensor) -> torch.Tensor:
    """Which tokens [T] have an expert on rank 1."""
    ids = layer.placement.to_physical(route(logits, ROUTING, routing_bias=layer.routing_bias).topk_ids)
    first, last = layer.placement.starts[1:3]
    return ((ids >= first) & (ids < last)).any(1)


def fail_on_rank_1(
    group: EPGroup, layer: ExpertParallelMoE, call: Callable[..., torch.Tensor], where: str, before: int, first: int
) -> tuple[bool, bool]:
    """Rank 1 runs out of memory once, in the function of this name after `before` of its calls.

    Returns whether the others' results are NaN for the tokens from `first` on that they sent it, and there alone, and
    whether the next call is right.
    """
    x, logits = tokens_of(group)
    sound = call(x, logits)
    if group.rank == 1:
        real, calls = pkgutil.resolve_name(where), itertools.count()

        def fails(*args: Any, **options: Any) -> Any:
            if next(calls) == before:
                raise torch.OutOfMemoryError("no memory")
            return real(*args, **options)

        with mock.patch(where, fails), pytest.raises(torch.OutOfMemoryError, match="no memory"):
            call(x, logits)
        is_nan = True
    else:
        lost = sent_to_rank_1(layer, logits)
        lost[:first] = False
        found = call(x, logits)
        is_nan = torch.equal(found.isnan().all(1), lost)
        # of other bits, for rank 1's tokens are not in the batch
        assert worst_row_error(found[~lost], sound[~lost]) < ROW_ERROR_LIMITS["float32"]
    return is_nan, torch.equal(call(x, logits), sound)
