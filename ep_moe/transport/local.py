"""One rank that owns every expert: no tokens move, with the same layouts and arithmetic as all transports.

Letters: T tokens, K top-k, H hidden, P physical experts.
"""

import dataclasses
from typing import NoReturn

import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.layout import Flat, pack_routed, weighted_sum
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, QuantScheme, quantize
from ep_moe.routing import Routing
from ep_moe.transport.base import Dispatched, Handle, Transport
from ep_moe.transport.checks import (
    bad_ids_message,
    check_dispatch,
    check_expert_output,
    check_results,
    first_tokens,
    is_bad_id,
)
from ep_moe.transport.layer_tag import NO_LAYER, LayerTag
from ep_moe.transport.slots import Slots


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalHandle(Handle):
    """The map from tokens to batch rows that the combine of a local round needs."""

    token_to_row: torch.Tensor  # [T, K] int32
    topk_weights: torch.Tensor  # [T, K] float32, repeats merged


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    round: int
    num_rows: int  # rows of x, of which the first are tokens
    dispatched: Dispatched
    rows: torch.Tensor | None = None  # [T, H], weighted sums


class LocalTransport(Transport):
    """The transport of a group of one rank.

    Args:
        group: of one rank; tensors are on its device.
        placement: of all experts on that rank.
        config: sizes and dtype.
    """

    def __init__(self, group: EPGroup, placement: Placement, config: TransportConfig) -> None:
        group.check_open()
        if group.num_ranks != 1:
            raise ValueError(f"the local transport serves 1 rank, the group has {group.num_ranks}")
        if placement.num_ranks != 1:
            raise ValueError(f"the placement spreads experts over {placement.num_ranks} ranks, the group has 1")
        self.config, self.placement = config, placement
        self.rank, self.num_ranks, self.device = 0, 1, group.device
        self.num_rounds = 0
        self._group = group
        self._slots: Slots[_Round] = Slots(config.num_slots)

    @property
    def open_slots(self) -> tuple[int, ...]:
        """See `Transport.open_slots`. Local."""
        return self._slots.open

    def dispatch_send(
        self,
        x: torch.Tensor | Quantized,
        routing: Routing,
        *,
        layout: Layout,
        scheme: QuantScheme,
        slot: int = 0,
        num_tokens: torch.Tensor | None = None,
        max_num_tokens: int | None = None,
        layer: LayerTag = NO_LAYER,
    ) -> None:
        """See `Transport.dispatch_send`. Local; host sync to check that all ids are in range."""
        self._group.check()
        self._slots.expect(slot, "dispatch_send")
        round_, self.num_rounds = self.num_rounds, self.num_rounds + 1
        config, num_physical = self.config, self.placement.num_physical
        check_dispatch(
            x,
            routing,
            layout=layout,
            scheme=scheme,
            config=config,
            rank=0,
            device=self.device,
            num_tokens=num_tokens,
            max_num_tokens=max_num_tokens,
            layer=layer,
        )
        num_rows = routing.topk_ids.shape[0]
        if num_tokens is not None:
            x, routing = first_tokens(x, routing, num_tokens, rank=0)
        bad = is_bad_id(routing.topk_ids, num_physical)
        if bool(bad.any()):
            examples = routing.topk_ids[bad]
            raise ValueError(bad_ids_message(examples.numel(), int(examples.max()), num_physical, 0))
        if scheme.payload.quantized and not isinstance(x, Quantized):
            x = quantize(x, scheme)
        packed = pack_routed(
            x,
            routing.topk_ids,
            routing.topk_weights,
            layout,
            scheme=scheme,
            dtype=config.dtype,
            first=0,
            num_local_experts=num_physical,
            capacity=config.max_tokens_per_rank if max_num_tokens is None else max_num_tokens,
            alignment=config.row_alignment,
        )
        handle = LocalHandle(
            slot=slot, round=round_, token_to_row=packed.token_to_row, topk_weights=packed.topk_weights
        )
        dispatched = Dispatched(batch=packed.batch, handle=handle)
        self._slots.advance(slot, "dispatch_send", _Round(round=round_, num_rows=num_rows, dispatched=dispatched))

    def dispatch_recv(self, *, slot: int = 0) -> Dispatched:
        """See `Transport.dispatch_recv`. Local."""
        self._group.check()
        state = self._slots.expect(slot, "dispatch_recv")
        assert state is not None
        self._slots.advance(slot, "dispatch_recv", state)
        return state.dispatched

    def combine_send(self, y: torch.Tensor, dispatched: Dispatched) -> None:
        """See `Transport.combine_send`. Local."""
        self._group.check()
        handle = dispatched.handle
        assert isinstance(handle, LocalHandle)
        state = self._slots.expect(handle.slot, "combine_send", handle.round)
        assert state is not None
        check_expert_output(y, dispatched.batch)
        flat = isinstance(dispatched.batch, Flat)
        rows = y if flat else weighted_sum(y, handle.token_to_row, handle.topk_weights)
        self._slots.advance(handle.slot, "combine_send", dataclasses.replace(state, rows=rows))

    def combine_recv(
        self, dispatched: Dispatched, *, shared: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Transport.combine_recv`. Local."""
        self._group.check()
        handle = dispatched.handle
        state = self._slots.expect(handle.slot, "combine_recv", handle.round)
        assert state is not None
        assert state.rows is not None
        shape = (state.num_rows, self.config.hidden)
        check_results(shape, self.config, self.device, shared=shared, out=out)
        result, tokens = state.rows.new_empty(shape) if out is None else out, slice(state.rows.shape[0])
        own_row = torch.arange(state.rows.shape[0], dtype=torch.int32, device=self.device).unsqueeze(1)
        weighted_sum(state.rows, own_row, None, shared=None if shared is None else shared[tokens], out=result[tokens])
        self._slots.advance(handle.slot, "combine_recv", None)
        return result

    def refuse(self, error: ValueError, *, slot: int = 0) -> NoReturn:
        """See `Transport.refuse`. Local."""
        self._group.check()
        self._slots.expect(slot, "dispatch_send")
        self.num_rounds += 1
        raise error

    def abandon(self, *, slot: int = 0) -> None:
        """See `Transport.abandon`. Local."""
        self._group.check()
        if self._slots.stage(slot)[1] is not None:
            self._slots.close(slot)

    def check(self) -> None:
        """See `Transport.check`. Other errors were raised by the calls themselves."""
        self._slots.check_open()
        self._group.check()

    def destroy(self) -> None:
        """See `Transport.destroy`. Local."""
        self._slots.destroy()
