"""Compiles and loads the kernels of rounds before the first one, in threads.

Letters: T tokens on this rank.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ep_moe.kernel_launch.kernel import Kernel, Numbers, Tensors, compiling_ahead
from ep_moe.kernels.exchange.combine_send import Results
from ep_moe.quant import Quantized, QuantScheme, as_bytes, get_scheme
from ep_moe.routing import Routing
from ep_moe.transport.base import RoundKind
from ep_moe.transport.one_sided.combine_launcher import CombineLauncher
from ep_moe.transport.one_sided.dispatch_launcher import DispatchLauncher
from ep_moe.transport.one_sided.round_plan import distinct_sizes

_Call = tuple[Kernel, Tensors, Numbers]


def warm_up(kinds: tuple[RoundKind, ...], dispatches: DispatchLauncher, combines: CombineLauncher) -> None:
    """Compile the kernels of these kinds of rounds, for every T, and load them onto the GPU. Local."""
    calls: list[_Call] = []
    for kind in kinds:
        for rows in distinct_sizes(dispatches.context.config.max_tokens_per_rank):
            calls += _kernels_of(kind, rows, dispatches, combines)
    with compiling_ahead():
        for kernel, tensors, numbers in calls:
            kernel.compile(tensors, numbers)
    for kernel, tensors, numbers in calls:
        kernel.load(tensors, numbers)


def _kernels_of(kind: RoundKind, rows: int, dispatches: DispatchLauncher, combines: CombineLauncher) -> Iterator[_Call]:
    """The kernels of a round with T = `rows`, with arguments to compile for, of which only the dtypes matter."""
    context = dispatches.context
    like: dict[str, Any] = {"device": context.device}
    config, scheme = context.config, get_scheme(kind.scheme)
    x: torch.Tensor | Quantized = torch.zeros(rows, config.hidden, dtype=config.dtype, **like)
    if kind.quantized:
        x = _empty_quantized(rows, config.hidden, scheme, context.device)
    ids = torch.full((rows, kind.num_topk), -1, dtype=kind.ids_dtype, **like)
    routing = Routing(topk_ids=ids, topk_weights=torch.zeros(rows, kind.num_topk, dtype=torch.float32, **like))
    count = torch.zeros(1, dtype=torch.int32, **like) if kind.counted else None
    round_ = dispatches.begin((0, 0, 0), x, routing, kind.layout, scheme, count)
    nothing = dispatches.batch_of(None)
    batch, shared = nothing, None
    if scheme.payload.quantized:
        batch = nothing._replace(out_scale_ptr=as_bytes(torch.empty(16, dtype=scheme.payload.scale_dtype, **like)))
    if kind.shared_dtype is not None:
        shared = torch.empty(16, dtype=kind.shared_dtype, **like)
    whole, halves, empty = ((True, True),), ((True, False), (False, True)), combines.unused
    for send, receive in halves if kind.split_dispatch else whole:
        kernel = dispatches.kernel_of(round_, send=send, receive=receive)
        yield kernel, *dispatches.arguments_of(round_, batch if receive else nothing)
    for send, receive in halves if kind.split_combine else whole:
        added = shared if receive and shared is not None else empty
        dtype = kind.shared_dtype if receive else None
        kernel = combines.kernel_of(round_, poisoned=not send, shared_dtype=dtype, send=send, receive=receive)
        yield kernel, (Results(empty, added, empty),), (0, 0, context.timeout_ns)


def _empty_quantized(rows: int, hidden: int, scheme: QuantScheme, device: torch.device) -> Quantized:
    """Rows in a scheme's format, of any values. Errors: ValueError if the scheme has none. Local."""
    payload = scheme.payload
    if payload.dtype is None:
        raise ValueError(f"scheme '{scheme.name}' has no quantized form")
    values = torch.empty(rows, payload.row_values(hidden), dtype=payload.dtype, device=device)
    scale = torch.empty(rows, payload.num_groups(hidden), dtype=payload.scale_dtype, device=device)
    return Quantized(values=values, scale=scale, scheme=scheme)
