"""Compiling and loading the kernels of a layer's calls before other ranks wait for them.

Letters: T tokens on this rank, H hidden, K top-k, E logical experts, R ranks, M max_tokens_per_rank.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch

from ep_moe.experts import KERNELS, Experts, experts_name
from ep_moe.layer.base import Layer
from ep_moe.local_moe import local_moe
from ep_moe.logs import log_step
from ep_moe.routing import PositionTable, Routing, route, to_physical
from ep_moe.transport.base import RoundKind


def warm_up(
    layer: Layer, *, num_topk: int | None, padded: bool, overlapped: Callable[..., torch.Tensor] | None
) -> None:
    """See `ExpertParallelMoE.warmup`; `overlapped` is `forward_micro_batches`, if that is warmed up too.

    What needs no other rank is compiled first, before the rounds.
    """
    transport, routing = layer.transport, layer.config.routing
    if num_topk is None:
        if routing is None:
            raise ValueError("num_topk is needed: the layer has no routing config, which would contain it")
        num_topk = routing.num_topk
    if not 1 <= num_topk <= transport.config.max_topk:
        raise ValueError(f"num_topk ({num_topk}) is not in [1, max_topk ({transport.config.max_topk})]")
    if transport.device.type != "cuda":
        return
    sizes = row_counts(transport.config.max_tokens_per_rank)
    counts = counts_of(layer)
    before = None if counts is None else counts.clone()
    with torch.no_grad():
        compute_alone(layer, num_topk, sizes)
        log_step("parts of kernels compiled", 1, 3)  # of the experts, of the exchange, of whole rounds
        transport.warmup(round_kinds(layer, num_topk, padded=padded, micro_batches=overlapped is not None))
        log_step("parts of kernels compiled", 2, 3)
        run_rounds(layer, num_topk, sizes, padded=padded, overlapped=overlapped)
        log_step("parts of kernels compiled", 3, 3)
    if counts is not None and before is not None:
        counts.copy_(before)
    transport.check()


def counts_of(layer: Layer) -> torch.Tensor | None:
    """How often tokens chose each expert, if the layer counts them. Local."""
    table = layer.positions
    return table.lanes if isinstance(table, PositionTable) and table.counted else None


def row_counts(max_tokens: int) -> list[int]:
    """The T that are run: powers of two up to M, and M. Local."""
    powers = itertools.takewhile(lambda power: power < max_tokens, (1 << exponent for exponent in itertools.count()))
    return [*powers, max_tokens]


def round_kinds(layer: Layer, num_topk: int, *, padded: bool, micro_batches: bool = False) -> list[RoundKind]:
    """The rounds of the layer's calls, as far as a transport can compile them without their tensors. Local."""
    if layer.weights.w13_input_scale is not None:  # the layer itself quantizes; only `run_rounds` compiles this case
        return []
    split = layer.shared_experts is not None
    whole = RoundKind(
        num_topk=num_topk,
        scheme=layer.scheme.name,
        layout=layer.config.layout,
        shared_dtype=layer.transport.config.dtype if split else None,
        split_dispatch=split,
    )
    kinds = [whole]
    if padded:
        kinds.append(dataclasses.replace(whole, counted=True))
    if micro_batches:
        kinds.append(dataclasses.replace(whole, split_dispatch=True, split_combine=True))
    return kinds


def compute_alone(layer: Layer, num_topk: int, sizes: Sequence[int]) -> None:
    """Route T tokens, and compute this rank's experts for T tokens of which none has an expert. Local."""
    config, positions = layer.config, layer.positions
    nothing = torch.zeros(1, dtype=torch.int32, device=layer.transport.device)
    limits = (None,) if counts_of(layer) is None else (None, nothing)

    def experts(rows: int) -> None:
        # `local_moe` chooses tiles for T * K / L rows per expert, as many as R ranks with T tokens each send
        local_moe(*_tokens(layer, rows, num_topk), layer.weights, layer.experts, layout=config.layout)

    run_compiled(experts, sizes, layer.experts)
    for rows in sizes:
        x, routing = _tokens(layer, rows, num_topk)
        for ids_dtype, limit in itertools.product((torch.int32, torch.int64), limits):
            to_physical(routing.topk_ids.to(ids_dtype), positions, num_tokens=limit)
        if config.routing is None:
            continue
        for dtype in dict.fromkeys((torch.float32, x.dtype)):
            logits = torch.zeros(rows, config.num_experts, dtype=dtype, device=x.device)
            for limit in limits:
                route(logits, config.routing, routing_bias=layer.routing_bias, placement=positions, num_tokens=limit)


def run_compiled(call: Callable[[int], object], sizes: Sequence[int], experts: Experts) -> None:
    """Call with each T; if the experts are kernels, all are compiled first, in threads. Local."""
    if experts_name(experts) in KERNELS:
        from ep_moe.kernel_launch.kernel import compiling_ahead  # Triton exists only on Linux

        with compiling_ahead():
            for rows in sizes:
                call(rows)
    for rows in sizes:
        call(rows)


def run_rounds(
    layer: Layer,
    num_topk: int,
    sizes: Sequence[int],
    *,
    padded: bool,
    overlapped: Callable[..., torch.Tensor] | None = None,
) -> None:
    """Call the layer, and then `overlapped` in two parts, with T tokens of which none has an expert. Collective."""
    for rows in sizes:
        x, routing = _tokens(layer, rows, num_topk)
        for counted in (False, True)[: 1 + padded]:
            count = torch.full((1,), rows, dtype=torch.int32, device=x.device) if counted else None
            layer.run(x, (routing.topk_ids, routing.topk_weights), count, None)
    if overlapped is not None:
        for rows in sizes:
            x, routing = _tokens(layer, 2 * rows, num_topk)
            overlapped(x, (routing.topk_ids, routing.topk_weights))


def _tokens(layer: Layer, rows: int, num_topk: int) -> tuple[torch.Tensor, Routing]:
    config, device = layer.transport.config, layer.transport.device
    ids = torch.full((rows, num_topk), -1, dtype=torch.int32, device=device)
    routing = Routing(topk_ids=ids, topk_weights=torch.zeros(rows, num_topk, dtype=torch.float32, device=device))
    return torch.zeros(rows, config.hidden, dtype=config.dtype, device=device), routing
