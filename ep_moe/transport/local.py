"""One rank that owns every expert: no tokens move, with the same layouts and arithmetic as all transports.

Letters: T tokens, K top-k, H hidden, P physical experts.
"""

import dataclasses

import torch

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.layout import Packed, TokenRows, merge_repeats
from ep_moe.placement import Placement
from ep_moe.quant import Quantized
from ep_moe.transport.base import Dispatched
from ep_moe.transport.checks import DispatchArguments, bad_ids_message, is_bad_id
from ep_moe.transport.host_sync import HostSyncTransport, OpenRound, Tokens, sum_experts


@dataclasses.dataclass(kw_only=True, slots=True)
class _Round(OpenRound):
    packed: Packed
    rows: torch.Tensor | None = None  # [T, H], weighted sums


class LocalTransport(HostSyncTransport[_Round]):
    """The transport of a group of one rank. A dispatch syncs with the host to check that all ids are in range.

    Args:
        group: of one rank; tensors are on its device.
        placement: of all experts on that rank.
        config: sizes and dtype.
    """

    def __init__(self, group: EPGroup, placement: Placement, config: TransportConfig) -> None:
        if group.num_ranks != 1:
            raise ValueError(f"the local transport serves 1 rank, the group has {group.num_ranks}")
        super().__init__(group, placement, config)

    def _checked(self, arguments: DispatchArguments) -> Tokens:
        tokens, num_physical = super()._checked(arguments), self.placement.num_physical
        ids = tokens.routing.topk_ids
        bad = ids[is_bad_id(ids, num_physical)]
        if bad.numel():
            raise ValueError(bad_ids_message(bad.numel(), int(bad.max()), num_physical, 0))
        return tokens

    def _send(self, tokens: Tokens, slot: int) -> _Round:
        x = tokens.quantized()
        ids, weights = merge_repeats(tokens.routing.topk_ids, tokens.routing.topk_weights)
        rows = TokenRows(
            x=x.values if isinstance(x, Quantized) else x,
            scale=x.scale if isinstance(x, Quantized) else None,
            local_topk_ids=ids,
            topk_weights=weights,
        )
        packed = self._pack(rows, tokens.sizes)
        return _Round(round=self._count_round(), sizes=tokens.sizes, packed=packed)

    def _receive(self, state: _Round) -> Packed:
        return state.packed

    def _send_results(self, state: _Round, y: torch.Tensor, dispatched: Dispatched) -> None:
        state.rows = sum_experts(y, dispatched)

    def _receive_results(self, state: _Round) -> tuple[torch.Tensor, torch.Tensor]:
        assert state.rows is not None
        return state.rows, torch.arange(state.sizes.num_tokens, dtype=torch.int32, device=self.device).unsqueeze(1)

    def _send_refusal(self, num_tokens: int, round_: int) -> None:
        """There is no other rank."""

    def _end(self, state: _Round, call: str, slot: int) -> None:
        """No other rank waits for results."""
