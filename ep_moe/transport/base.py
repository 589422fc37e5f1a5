"""The seam of token exchange: what a transport promises, whoever moves the bytes.

Letters: T tokens on this rank, K top-k, H hidden, R ranks, M max_tokens_per_rank.
"""

import dataclasses
from typing import NoReturn, Protocol

import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.layout import ExpertBatch
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, QuantScheme
from ep_moe.routing import Routing
from ep_moe.transport.layer_tag import NO_LAYER, LayerTag


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Handle:
    """What a transport needs to bring a round home. Made by a dispatch, spent by its combine.

    A transport may keep more in a subclass; callers pass it back untouched.
    """

    slot: int
    round: int  # counts the rounds of this transport from 0, the same on every rank


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """The outcome of a dispatch: the batch for the experts and the handle for the combine."""

    batch: ExpertBatch
    handle: Handle


class Transport(Protocol):
    """Moves tokens to the ranks of their experts and the weighted sums back.

    Ids are physical: rank r owns [placement.starts[r], placement.starts[r + 1]). Every rank of the group takes part in
    every round, with zero tokens too. A slot goes dispatch_send, dispatch_recv, combine_send, combine_recv, in that
    order, and serves one thread at a time; `config.num_slots` rounds may be open at once. A round that cannot go on is
    ended by `refuse` or `sit_out` in place of its dispatch_send, or by `abandon` after it.

    Once the transport or its group is destroyed every call is a RuntimeError, but for `destroy`.

    Attributes:
        num_rounds: how many rounds this rank has begun. A dispatch that raises and leaves it as it was has told the
            others nothing: they wait until it is made again, or for `sit_out`.
    """

    config: TransportConfig
    placement: Placement
    rank: int
    num_ranks: int
    device: torch.device  # where x, ids and results live
    num_rounds: int
    num_layers: int = 0

    def number_layer(self) -> int:
        """Count one layer more that uses this transport; returns its number, from 0.

        Ranks that make their layers in the same order give the same layer the same number. Local.
        """
        self.num_layers += 1
        return self.num_layers - 1

    def dispatch_send(
        self,
        x: "torch.Tensor | Quantized",
        routing: Routing,
        *,
        layout: Layout,
        scheme: QuantScheme,
        slot: int = 0,
        num_tokens: torch.Tensor | None = None,
        layer: LayerTag = NO_LAYER,
    ) -> None:
        """Quantize once (a `Quantized` is taken as it is) and send each token once to every rank that needs it.

        Args:
            x: [T, H], T <= M, in the config's dtype, or `Quantized` in `scheme`. With one rank and FLAT the experts
                may read it where it lies.
            routing: physical topk_ids [T, K] int32 or int64, -1 none; topk_weights [T, K] float32.
            layout: of this rank's batch; ranks may differ. scheme: of the payload, the same on all ranks.
            num_tokens: optional, one int32 on the device: how many of the T rows are tokens. The round is that of these
                rows, and what combine returns holds anything in the others.
            layer: which layer the round is of, compared between all ranks.
        Errors: ValueError, before any payload is sent, on the rank that passed bad input, of whatever type, and, naming
        that rank, on all others; the next round works. Ranks whose `layer` differs are named by a ValueError on all of
        them. A slot that does not exist is a ValueError on this rank alone, which may call again. A transport that does
        not wait for the others raises on the others, and on this rank for what only the device knows (ids,
        `num_tokens`, `layer`), in `check`: that round gives NaN. `PeerLostError` names a rank that does not answer
        within the deadline. Collective.
        """
        ...

    def dispatch_recv(self, *, slot: int = 0) -> Dispatched:
        """Wait for the tokens of all ranks and lay them out. Errors: `PeerLostError`. Collective."""
        ...

    def combine_send(self, y: torch.Tensor, dispatched: Dispatched) -> None:
        """Weigh and sum each token's local experts in float32, send one row per (token, rank) in the config's dtype.

        Args:
            y: the experts' output for `dispatched.batch`; FLAT outputs are weighed and summed already. It may travel
                as it lies: nobody writes to it before combine_recv has returned. If it was allocated on another
                stream than the current one, the caller records that (`Tensor.record_stream`), as for x and routing.
        Errors: ValueError, with the slot as it was, for a y that does not fit the batch. Collective.
        """
        ...

    def combine_recv(
        self, dispatched: Dispatched, *, shared: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum the ranks' rows in rank order in float32, add `shared`, round once.

        Args:
            shared: [T, H] in the config's dtype or float32, the shared experts' output.
            out: optional result, [T, H] in the config's dtype.
        Returns: [T, H] in the config's dtype; a token without experts gets zeros (or `shared`).
        Errors: ValueError, with the slot as it was, where shared or out do not fit. Collective.
        """
        ...

    def refuse(self, error: ValueError, *, slot: int = 0) -> NoReturn:
        """Join a round with no tokens and an error flag, in place of dispatch_send, because this rank's input is bad.

        Every rank raises ValueError, this one `error` itself, the others as in `dispatch_send`, and the next round
        works. Collective.
        """
        ...

    def sit_out(self, *, num_topk: int, scheme: QuantScheme, slot: int = 0, layer: LayerTag = NO_LAYER) -> None:
        """Join a round with no tokens and compute nothing, in place of dispatch_send, because this rank has failed.

        The other ranks get NaN for the tokens that they sent here, and the next round works.

        Args:
            num_topk: K of the round. scheme: of its payload.
        Errors: those of `dispatch_send` and `abandon`. Collective.
        """
        config, device = self.config, self.device
        x = torch.empty(0, config.hidden, dtype=config.dtype, device=device)
        nobody = Routing(
            topk_ids=torch.empty(0, num_topk, dtype=torch.int32, device=device),
            topk_weights=torch.empty(0, num_topk, device=device),
        )
        self.dispatch_send(x, nobody, layout=Layout.FLAT, scheme=scheme, slot=slot, layer=layer)
        self.abandon(slot=slot)

    def abandon(self, *, slot: int = 0) -> None:
        """End an open round whose experts cannot be computed here, whatever it waits for.

        This rank's rows go home as NaN: the others get a result that cannot be taken for one. A slot that is not open
        stays as it is. Errors: `PeerLostError`. Collective.
        """
        ...

    def check(self) -> None:
        """Wait for the rounds that this rank has begun and ended, and raise what went wrong in them.

        A rank that replays CUDA graphs and makes no eager call learns of a lost rank here alone. With `on_peer_loss`
        "mask" it also votes here on who goes on. The others leave out a rank that does not vote within
        `timeout_secs`, so such a rank calls this more often than that. Rounds that it replays before the vote give NaN.
        Errors: ValueError for a round that a rank refused, `PeerLostError`. Local, host sync; collective where a rank
        was lost and others go on.
        """
        ...

    def destroy(self) -> None:
        """Free what the transport holds. Local; calling it twice is fine."""
        ...

    def dispatch(
        self,
        x: "torch.Tensor | Quantized",
        routing: Routing,
        *,
        layout: Layout,
        scheme: QuantScheme,
        slot: int = 0,
        num_tokens: torch.Tensor | None = None,
        layer: LayerTag = NO_LAYER,
    ) -> Dispatched:
        """`dispatch_send` and `dispatch_recv`. Collective."""
        self.dispatch_send(x, routing, layout=layout, scheme=scheme, slot=slot, num_tokens=num_tokens, layer=layer)
        return self.dispatch_recv(slot=slot)

    def combine(
        self,
        y: torch.Tensor,
        dispatched: Dispatched,
        *,
        shared: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`combine_send` and `combine_recv`. Collective."""
        self.combine_send(y, dispatched)
        return self.combine_recv(dispatched, shared=shared, out=out)
