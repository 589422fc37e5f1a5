"""Which of an engine's rows a rank sends, and the round in which it sends them.

Letters: T rows on this rank, H hidden, K top-k.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ep_moe.config import Layout
from ep_moe.group import PeerLostError
from ep_moe.quant import Quantized, QuantScheme, quantize
from ep_moe.routing import Routing, apply_weights_to_input
from ep_moe.transport import Dispatched, Transport


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowShare:
    """The part of the engine's rows that a rank sends.

    Args:
        sharers: ranks with equal rows, which send a slice each. rank: of this rank among them, or in its chunks.
        chunks: ranks of a sequence-parallel group, over which the engine has spread the rows already.
    """

    sharers: int = 1
    rank: int = 0
    chunks: int = 1

    def most(self, num_rows: int) -> int:
        """The most rows that a rank sends if its engine has `num_rows`. Local."""
        return -(-num_rows // (self.sharers * self.chunks))

    def own(self, num_rows: int) -> slice:
        """The rows that this rank sends, of those that it is called with. Local."""
        if self.sharers == 1:
            return slice(0, num_rows)
        part = -(-num_rows // self.sharers)
        return slice(min(self.rank * part, num_rows), min((self.rank + 1) * part, num_rows))


def rows_to_send(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    share: RowShare,
    scheme: QuantScheme,
    weights_on_input: bool = False,
    input_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor | Quantized, Routing]:
    """This rank's rows and their routing, as `Transport.dispatch_send` takes them.

    Args:
        x: [T, H]. topk_ids: [T, K], -1 none. topk_weights: [T, K], any float dtype. scheme: of the payload.
        weights_on_input: multiply rows by their weight; K must be 1. input_scale: [1] float32, static, of the tokens.
    Errors: ValueError for tensors that do not fit each other. Local, no host sync.
    """
    own = share.own(x.shape[0])
    routing = Routing(
        topk_ids=topk_ids[own].contiguous(), topk_weights=topk_weights[own].to(torch.float32).contiguous()
    )
    rows: torch.Tensor | Quantized = x[own]
    if weights_on_input:
        rows, routing = apply_weights_to_input(rows, routing)
    if input_scale is not None and isinstance(rows, torch.Tensor):
        return quantize(rows, scheme, static_scale=input_scale), routing
    return rows, routing


def send_rows(
    transport: Transport,
    rows: Callable[[], tuple[torch.Tensor | Quantized, Routing]],
    *,
    num_topk: int,
    layout: Layout,
    slot: int,
    halves: bool,
    **options: Any,
) -> Dispatched | None:
    """Begin a round with this rank's rows, or end it for all ranks if this one fails.

    Args:
        rows: makes them. num_topk: K. halves: receive later, with `dispatch_recv`.
        options: more of `Transport.dispatch_send`; the same on all ranks, also on one that fails.
    Returns: what arrives, None if it is received later.
    Errors: a ValueError of `rows` and those of `Transport.dispatch_send` are errors on all ranks. After any other
    failure of this rank the other ranks get NaN for its part. Collective.
    """
    begun = transport.num_rounds
    try:
        try:
            x, routing = rows()
        except ValueError as error:
            transport.refuse(error, slot=slot)
        send = transport.dispatch_send if halves else transport.dispatch
        return send(x, routing, layout=layout, slot=slot, **options)
    except PeerLostError:
        raise
    except Exception:
        end_round(transport, slot)  # perhaps an earlier one, which a failure in the engine's code left open
        if transport.num_rounds == begun:
            transport.sit_out(num_topk=num_topk, slot=slot, **options)
        raise


def end_round(transport: Transport, slot: int) -> None:
    """End the round of a slot, if one is open, after a failure of this rank: the other ranks get NaN for its part."""
    if slot in transport.open_slots:
        transport.abandon(slot=slot)


def whole_output(share: RowShare, own: torch.Tensor | None, output: torch.Tensor) -> None:
    """Complete the rows of an output [T, H] that ranks with equal rows will sum: others' rows become zero.

    Args: own: [own rows, H], copied into this rank's rows; None if they are in place already. Local.
    """
    kept = share.own(output.shape[0])
    if own is not None:
        output[kept].copy_(own)
    if share.sharers > 1:
        output[: kept.start].zero_()
        output[kept.stop :].zero_()
