"""Compiles and loads the kernels of rounds before the first one, in threads.

Letters: T tokens on this rank.
"""

import concurrent.futures
import os
from collections.abc import Iterator
from typing import Any

import torch
import triton

from ep_moe.kernel_launch.kernel import Kernel, Tensors
from ep_moe.kernels.exchange.combine_send import Results
from ep_moe.quant import Quantized, QuantScheme, as_bytes, get_scheme
from ep_moe.routing import Routing
from ep_moe.transport.one_sided.combine_launcher import CombineLauncher
from ep_moe.transport.one_sided.dispatch_launcher import DispatchLauncher
from ep_moe.transport.one_sided.kernel_context import KernelContext
from ep_moe.transport.one_sided.round_plan import RoundPlans, distinct_sizes
from ep_moe.transport.round_kind import RoundKind

_MOST_COMPILERS = 8  # threads
_Call = tuple[Kernel, Tensors, tuple[int, ...]]


def warm_up(
    kinds: tuple[RoundKind, ...],
    context: KernelContext,
    plans: RoundPlans,
    dispatches: DispatchLauncher,
    combines: CombineLauncher,
) -> None:
    """Compile the kernels of these kinds of rounds, for every T, and load them onto the GPU. Local."""
    calls: list[_Call] = []
    for kind in kinds:
        for rows in distinct_sizes(context.config.max_tokens_per_rank):
            calls += _kernels_of(kind, rows, context, plans, dispatches, combines)
    workers = min(_MOST_COMPILERS, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool, triton.AsyncCompileMode(pool):
        for kernel, tensors, numbers in calls:
            kernel.compile(tensors, numbers)
    for kernel, tensors, numbers in calls:
        kernel.load(tensors, numbers)


def _kernels_of(
    kind: RoundKind,
    rows: int,
    context: KernelContext,
    plans: RoundPlans,
    dispatches: DispatchLauncher,
    combines: CombineLauncher,
) -> Iterator[_Call]:
    """The kernels of a round with T = `rows`, with arguments to compile for, of which only the dtypes matter."""
    like: dict[str, Any] = {"device": context.device}
    config, scheme = context.config, get_scheme(kind.scheme)
    x: torch.Tensor | Quantized = torch.zeros(rows, config.hidden, dtype=config.dtype, **like)
    if kind.quantized:
        x = _empty_quantized(rows, config.hidden, scheme, context.device)
    ids = torch.full((rows, kind.num_topk), -1, dtype=kind.ids_dtype, **like)
    routing = Routing(topk_ids=ids, topk_weights=torch.zeros(rows, kind.num_topk, dtype=torch.float32, **like))
    count = torch.zeros(1, dtype=torch.int32, **like) if kind.counted else None
    plan = plans.make(
        rows,
        kind.num_topk,
        kind.layout,
        scheme,
        quantized=kind.quantized,
        has_num_tokens=kind.counted,
        max_num_tokens=config.max_tokens_per_rank,
    )
    inputs = dispatches.inputs_of(plan, x, routing, num_tokens=count)
    batch, shared = dispatches.no_batch, None
    if scheme.payload.quantized:
        batch = batch._replace(out_scale_ptr=as_bytes(torch.empty(16, dtype=scheme.payload.scale_dtype, **like)))
    if kind.shared_dtype is not None:
        shared = torch.empty(16, dtype=kind.shared_dtype, **like)
    whole, halves = ((True, True),), ((True, False), (False, True))
    for send, receive in halves if kind.split_dispatch else whole:
        kernel = dispatches.kernel_of(0, inputs, send=send, receive=receive)
        filled = batch if receive else dispatches.no_batch
        yield kernel, (inputs.tokens, filled), (*inputs.strides, *inputs.tag, context.timeout_ns)
    for send, receive in halves if kind.split_combine else whole:
        added, empty = shared if receive else None, combines.unused
        kernel = combines.kernel_of(0, plan, poisoned=not send, shared=added, send=send, receive=receive)
        yield kernel, (Results(empty, empty if added is None else added, empty),), (0, 0, context.timeout_ns)


def _empty_quantized(rows: int, hidden: int, scheme: QuantScheme, device: torch.device) -> Quantized:
    """Rows in a scheme's format, of any values. Errors: ValueError if the scheme has none. Local."""
    payload = scheme.payload
    if payload.dtype is None:
        raise ValueError(f"scheme '{scheme.name}' has no quantized form")
    values = torch.empty(rows, payload.row_values(hidden), dtype=payload.dtype, device=device)
    scale = torch.empty(rows, payload.num_groups(hidden), dtype=payload.scale_dtype, device=device)
    return Quantized(values=values, scale=scale, scheme=scheme)
