"""Checks of what a caller passes to a transport, and that all ranks pass the same; shared by all transports.

Letters: T tokens on this rank, K top-k, H hidden, M max_tokens_per_rank, P physical experts.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.fields import shown
from ep_moe.group import EPGroup
from ep_moe.layout import ExpertBatch
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, QuantScheme
from ep_moe.routing import Routing
from ep_moe.tensors import check_tensor
from ep_moe.transport.layer_tag import NO_LAYER, LayerTag


class DispatchArguments(NamedTuple):
    """What a caller passes to `Transport.dispatch_send`, which describes it; of any type until it is checked."""

    x: torch.Tensor | Quantized
    routing: Routing
    layout: Layout
    scheme: QuantScheme
    num_tokens: torch.Tensor | None = None
    max_num_tokens: int | None = None
    layer: LayerTag = NO_LAYER


def check_dispatch(arguments: DispatchArguments, config: TransportConfig, rank: int, device: torch.device) -> None:
    """Raise ValueError, with the value and the limit, for bad input that shows without reading the ids.

    Local, no host sync.
    """
    x, routing, layout, scheme, num_tokens, max_num_tokens, layer = arguments
    if not isinstance(scheme, QuantScheme):
        raise ValueError(f"scheme ({scheme!r}) is not a QuantScheme")
    if not isinstance(routing, Routing):
        raise ValueError(f"routing ({shown(routing)}) is no Routing on rank {rank}")
    if not isinstance(layer, LayerTag):
        raise ValueError(f"layer ({shown(layer)}) is no LayerTag on rank {rank}")
    tensors = {"x": x.values, "scale": x.scale} if isinstance(x, Quantized) else {"x": x}
    if num_tokens is not None:
        tensors["num_tokens"] = num_tokens
    for name, tensor in tensors.items():
        check_tensor(tensor, name)
    tensors |= {"topk_ids": routing.topk_ids, "topk_weights": routing.topk_weights}  # dense, as `Routing` checks
    if not isinstance(layout, Layout):
        raise ValueError(f"layout ({layout!r}) is not one of {', '.join(member.value for member in Layout)}")
    values = x.values if isinstance(x, Quantized) else x
    shape = tuple(x.shape) if isinstance(x, torch.Tensor) else (values.shape[0], x.hidden)
    if len(shape) != 2 or shape[1] != config.hidden:
        raise ValueError(f"x is {shape} on rank {rank}, expected [num_tokens, hidden ({config.hidden})]")
    num_rows = values.shape[0]
    if num_rows > config.max_tokens_per_rank:
        raise ValueError(too_many_tokens_message(num_rows, config.max_tokens_per_rank, rank))
    if not bound_fits(max_num_tokens, num_rows, config):
        raise ValueError(
            f"max_num_tokens ({max_num_tokens!r}) is not in [rows of x ({num_rows}), max_tokens_per_rank "
            f"({config.max_tokens_per_rank})] on rank {rank}"
        )
    if isinstance(x, Quantized):
        if x.scheme is not scheme and x.scheme != scheme:
            raise ValueError(f"x is quantized as '{x.scheme.name}' on rank {rank}, the dispatch names '{scheme.name}'")
    elif x.dtype != config.dtype:
        raise ValueError(f"x is {x.dtype} on rank {rank}, the transport carries {config.dtype}")
    if routing.topk_ids.shape[0] != num_rows:
        raise ValueError(f"topk_ids has {routing.topk_ids.shape[0]} rows on rank {rank}, x has {num_rows}")
    if routing.topk_ids.shape[1] > config.max_topk:
        raise ValueError(f"num_topk ({routing.topk_ids.shape[1]}) exceeds max_topk ({config.max_topk}) on rank {rank}")
    if num_tokens is not None:
        check_num_tokens(num_tokens, rank, device)
    for name, tensor in tensors.items():
        check_device(tensor, name, rank, device)


def check_device(tensor: torch.Tensor, name: str, rank: int, device: torch.device) -> None:
    """Raise ValueError unless a tensor is on the transport's device. Local, no host sync."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} on rank {rank}, the transport on {device}")


def check_num_tokens(num_tokens: torch.Tensor, rank: int, device: torch.device) -> None:
    """Raise ValueError unless `num_tokens` is one int32 on the transport's device. Local, no host sync."""
    check_tensor(num_tokens, "num_tokens")
    if num_tokens.dtype != torch.int32 or num_tokens.numel() != 1:
        raise ValueError(f"num_tokens is {tuple(num_tokens.shape)} {num_tokens.dtype}, needed is 1 number of int32")
    check_device(num_tokens, "num_tokens", rank, device)


def first_tokens(
    x: torch.Tensor | Quantized, routing: Routing, num_tokens: torch.Tensor, *, rank: int
) -> tuple[torch.Tensor | Quantized, Routing]:
    """Cut a dispatch to its first `num_tokens` rows. Host sync.

    Errors: ValueError if num_tokens is negative or exceeds the rows.
    """
    count, rows = int(num_tokens), routing.topk_ids.shape[0]
    if not 0 <= count <= rows:
        raise ValueError(f"num_tokens ({count}) is not in [0, rows of x ({rows})] on rank {rank}")
    if isinstance(x, Quantized):
        x = Quantized(values=x.values[:count], scale=x.scale[:count], scheme=x.scheme)
    else:
        x = x[:count]
    return x, Routing(topk_ids=routing.topk_ids[:count], topk_weights=routing.topk_weights[:count])


def bound_fits(max_num_tokens: int | None, num_rows: int, config: TransportConfig) -> bool:
    """Whether a bound on the round's rows is one: None, or an int of at least T and at most M. Local."""
    return max_num_tokens is None or (
        type(max_num_tokens) is int and num_rows <= max_num_tokens <= config.max_tokens_per_rank
    )


def count_rows(x: object) -> int:
    """The number of rows of a refused dispatch, as its header tells the other ranks; 0 if x has no rows."""
    values = x.values if isinstance(x, Quantized) else x
    return values.shape[0] if isinstance(values, torch.Tensor) and values.dim() else 0


def is_bad_id(topk_ids: torch.Tensor, num_physical: int) -> torch.Tensor:
    """A bool mask of the ids outside [-1, P). Local, no host sync."""
    return (topk_ids < -1) | (topk_ids >= num_physical)


def too_many_tokens_message(num_tokens: int, max_tokens_per_rank: int, rank: int) -> str:
    """The message of every transport for T above M."""
    return f"num_tokens ({num_tokens}) exceeds max_tokens_per_rank ({max_tokens_per_rank}) on rank {rank}"


def bad_ids_message(count: int, example: int, num_physical: int, rank: int) -> str:
    """The message of every transport for ids that no rank owns. example: one of them, clamped to int32 by some."""
    more = " or more" if example == torch.iinfo(torch.int32).max else ""
    return (
        f"topk_ids has {count} ids outside [-1, num_experts ({num_physical})) on rank {rank}, such as {example}{more}"
    )


def check_expert_output(y: torch.Tensor, batch: ExpertBatch) -> None:
    """Raise ValueError if `y` is not the experts' output for `batch`. Local, no host sync."""
    check_tensor(y, "expert output")
    if tuple(y.shape) != batch.output_shape or y.dtype != batch.dtype or y.device != batch.x.device:
        raise ValueError(
            f"expert output is {tuple(y.shape)} {y.dtype} on {y.device}, the {type(batch).__name__} batch needs "
            f"{batch.output_shape} {batch.dtype} on {batch.x.device}"
        )


def check_results(
    shape: tuple[int, int],
    config: TransportConfig,
    device: torch.device,
    *,
    shared: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Raise ValueError if `shared` or `out` does not fit a round of `shape` [T, H]. Local, no host sync."""
    for name, tensor in (("shared", shared), ("out", out)):
        if tensor is None:
            continue
        check_tensor(tensor, name)
        if tuple(tensor.shape) != shape or tensor.device != device:
            raise ValueError(f"{name} is {tuple(tensor.shape)} on {tensor.device}, the round has {shape} on {device}")
    if out is not None and out.dtype != config.dtype:
        raise ValueError(f"out is {out.dtype}, the transport carries {config.dtype}")


def compare_ranks(group: EPGroup, kind: type, placement: Placement, config: TransportConfig) -> None:
    """Raise ValueError if ranks differ in kind, config or placement, or if that is for another number of ranks.

    The message holds the differing fields, with this rank's value and the other's. Collective, host sync.
    """
    options = {field.name: str(getattr(config, field.name)) for field in dataclasses.fields(config)}
    options["transport"] = kind.__name__
    maps = {"starts": placement.starts, "physical_to_logical": placement.physical_to_logical}
    for rank, (their_options, their_maps) in enumerate(group.all_gather_object((options, maps))):
        differences = [*_option_differences(options, their_options), *_map_differences(maps, their_maps)]
        if differences:
            raise ValueError(
                f"rank {group.rank} and rank {rank} make the transport differently: {'; '.join(differences)}"
            )
    if placement.num_ranks != group.num_ranks:
        raise ValueError(
            f"the placement spreads experts over {placement.num_ranks} ranks, the group has {group.num_ranks}"
        )


def _option_differences(own: dict[str, str], theirs: dict[str, str]) -> Iterator[str]:
    for name, mine in own.items():
        if mine != theirs[name]:
            yield f"{name} ({mine} and {theirs[name]})"


def _map_differences(own: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """The first element at which the tuples of two placements differ: a whole tuple has hundreds of elements."""
    for name, mine in own.items():
        other = theirs[name]
        if len(mine) != len(other):
            yield f"length of the placement's {name} ({len(mine)} and {len(other)})"
        elif mine != other:
            place = next(i for i, pair in enumerate(zip(mine, other, strict=True)) if pair[0] != pair[1])
            yield f"the placement's {name}[{place}] ({mine[place]} and {other[place]})"
