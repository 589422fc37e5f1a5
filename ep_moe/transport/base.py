"""The interface that every token exchange implements.

Letters: T tokens on this rank, K top-k, H hidden, R ranks, M max_tokens_per_rank.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypedDict

import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.layout import ExpertBatch
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, QuantScheme
from ep_moe.routing import Routing
from ep_moe.transport.layer_tag import NO_LAYER, LayerTag

if TYPE_CHECKING:
    from typing import Unpack


@dataclasses.dataclass(kw_only=True, slots=True)  # not frozen: that makes a constructor take twice as long
class Handle:
    """Identifies a round to its combine. Made by a dispatch, valid for one combine.

    A transport may keep more state in a subclass; callers pass it back unchanged.
    """

    slot: int
    round: int  # counts the rounds of this transport from 0, the same on every rank


@dataclasses.dataclass(kw_only=True, slots=True)
class Dispatched:
    """The result of a dispatch: the batch for the experts and the handle for the combine."""

    batch: ExpertBatch
    handle: Handle


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoundKind:
    """The key of a round's compiled kernels, for a transport that compiles them in `warmup`; no user makes one."""

    num_topk: int  # K
    scheme: str = "none"  # of the payload
    layout: Layout = Layout.BATCHED  # of the batch
    ids_dtype: torch.dtype = torch.int32  # of topk_ids, or int64
    counted: bool = False  # `num_tokens` is not None
    quantized: bool = False  # x is `Quantized` already
    shared_dtype: torch.dtype | None = None  # of `shared` in the combine, None if there is none
    split_dispatch: bool = False  # dispatch_send and dispatch_recv are called separately
    split_combine: bool = False  # combine_send and combine_recv are called separately


class RoundOptions(TypedDict, total=False):
    """The options of `Transport.dispatch_send`, which describes them; `layout` and `scheme` are required there."""

    layout: Layout
    scheme: QuantScheme
    num_tokens: torch.Tensor | None
    max_num_tokens: int | None
    layer: LayerTag


def no_tokens(config: TransportConfig, num_topk: int, device: torch.device) -> tuple[torch.Tensor, Routing]:
    """x [0, H] and its routing [0, K]. Local."""
    like: dict[str, Any] = {"device": device}
    ids = torch.empty(0, num_topk, dtype=torch.int32, **like)
    weights = torch.empty(0, num_topk, dtype=torch.float32, **like)
    return torch.empty(0, config.hidden, dtype=config.dtype, **like), Routing(topk_ids=ids, topk_weights=weights)


class Transport(Protocol):
    """Moves tokens to the ranks of their experts and the weighted sums back.

    Ids are physical: rank r owns [placement.starts[r], placement.starts[r + 1]). Every rank of the group takes part in
    every round, even with zero tokens. The calls on a slot are dispatch_send, dispatch_recv, combine_send and
    combine_recv, in that order, from one thread at a time; `config.num_slots` rounds may be open at once. A round that
    cannot continue is ended by `refuse` or `sit_out` in place of its dispatch_send, or by `abandon` after it.

    Once the transport or its group is destroyed every call except `destroy` raises RuntimeError.

    Attributes:
        num_rounds: how many rounds this rank has begun. A dispatch that raises without changing it has sent nothing:
            the other ranks wait until this rank repeats the call or calls `sit_out`.
    """

    config: TransportConfig
    placement: Placement
    rank: int
    num_ranks: int
    device: torch.device  # of x, ids and results
    num_rounds: int
    num_layers: int = 0

    @property
    def ranks_per_sum(self) -> int:
        """The order of sums: rows of so many consecutive ranks are summed in float32 and rounded to the config's dtype,
        then these sums are added in float32, both in order. 1 adds all ranks' rows in rank order. Local.
        """
        return 1

    @property
    def open_slots(self) -> tuple[int, ...]:
        """The slots that hold an open round. Local."""
        return ()

    def number_layer(self) -> int:
        """Register one more layer that uses this transport; returns its number, from 0.

        A layer has the same number on all ranks if they create their layers in the same order. Local.
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
        max_num_tokens: int | None = None,
        layer: LayerTag = NO_LAYER,
    ) -> None:
        """Quantize once (a `Quantized` x is sent as it is) and send each token once to every rank that needs it.

        Args:
            x: [T, H], T <= M, in the config's dtype, or `Quantized` in `scheme`. With one rank and FLAT the experts
                may read this tensor in place.
            routing: physical topk_ids [T, K] int32 or int64, -1 none; topk_weights [T, K] float32.
            layout: of this rank's batch; ranks may differ. scheme: of the payload, the same on all ranks.
            num_tokens: optional, one int32 on the device: how many of the T rows are tokens. Only the first
                `num_tokens` rows are sent; the other rows of combine's result are undefined, but in a contiguous,
                aligned `out` they are not written.
            max_num_tokens: optional bound, T <= max_num_tokens <= M, on the rows that any rank brings to this round,
                the same on all ranks; None is M. The batch is allocated for so many rows of each rank, or a few more.
            layer: the layer that the round belongs to, compared between all ranks.
        Errors: bad input of any kind raises ValueError before any payload is sent: on the rank that passed it, and on
        all others with that rank's name; the next round works. Ranks whose `layer` differs are named by a ValueError
        on all of them, and so are ranks with another scheme, K or `max_num_tokens` (for which the batch would be of
        another size). A slot that does not exist is a ValueError on this rank alone, which may call again. A transport
        that does not wait for the others raises in `check` on the other ranks, and on this rank if only the device
        knows the bad value (ids, `num_tokens`, `layer`); that round gives NaN. `PeerLostError` names a rank that does
        not answer within the deadline. Collective.
        """
        ...

    def dispatch_recv(self, *, slot: int = 0) -> Dispatched:
        """Wait for the tokens of all ranks and lay them out. Errors: `PeerLostError`. Collective."""
        ...

    def combine_send(self, y: torch.Tensor, dispatched: Dispatched) -> None:
        """Weight and sum each token's local experts in float32, send one row per (token, rank) in the config's dtype.

        Args:
            y: the experts' output for `dispatched.batch`; in FLAT it is the weighted sum already. It may be sent in
                place: do not write to it before combine_recv has returned. If it was allocated on another stream than
                the current one, the caller records that (`Tensor.record_stream`), as for x and routing.
        Errors: ValueError, with the slot unchanged, for a y that does not fit the batch. Collective.
        """
        ...

    def combine_recv(
        self, dispatched: Dispatched, *, shared: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum the ranks' rows in float32, in the order of `ranks_per_sum`, add `shared`, round.

        Args:
            shared: [T, H] in the config's dtype or float32, the shared experts' output.
            out: optional result, [T, H] in the config's dtype.
        Returns: [T, H] in the config's dtype; a token without experts gets zeros (or `shared`).
        Errors: ValueError, with the slot unchanged, if shared or out do not fit. Collective.
        """
        ...

    def refuse(self, error: ValueError, *, slot: int = 0) -> NoReturn:
        """Join a round with zero tokens and an error flag, in place of dispatch_send, because this rank's input is bad.

        Every rank raises ValueError: this rank `error` itself, the others as in `dispatch_send`. The next round works.
        Collective.
        """
        ...

    def send_nothing(
        self,
        *,
        num_topk: int,
        scheme: QuantScheme,
        slot: int = 0,
        max_num_tokens: int | None = None,
        layer: LayerTag = NO_LAYER,
    ) -> None:
        """Join a round with zero tokens, in place of dispatch_send, because this rank has failed; `abandon` ends it.

        Args: as of `sit_out`. Errors: those of `dispatch_send`. Collective.
        """
        x, routing = no_tokens(self.config, num_topk, self.device)
        self.dispatch_send(
            x, routing, layout=Layout.FLAT, scheme=scheme, slot=slot, max_num_tokens=max_num_tokens, layer=layer
        )

    def sit_out(
        self,
        *,
        num_topk: int,
        scheme: QuantScheme,
        slot: int = 0,
        max_num_tokens: int | None = None,
        layer: LayerTag = NO_LAYER,
    ) -> None:
        """Join a round with zero tokens and compute nothing, in place of dispatch_send, because this rank has failed.

        The other ranks get NaN for the tokens that they sent here, and the next round works.

        Args:
            num_topk: K of the round. scheme: of its payload. max_num_tokens: of the round, as of `dispatch_send`.
        Errors: those of `dispatch_send` and `abandon`. Collective.
        """
        self.send_nothing(num_topk=num_topk, scheme=scheme, slot=slot, max_num_tokens=max_num_tokens, layer=layer)
        self.abandon(slot=slot)

    def abandon(self, *, slot: int = 0) -> None:
        """End an open round, at any of its calls, because its experts cannot be computed here.

        This rank returns NaN rows to the source ranks, so that none mistakes them for a result. It needs no memory on
        the device, but what other libraries allocate. A slot that is not open is left unchanged.
        Errors: `PeerLostError`. Collective.
        """
        ...

    def warmup(self, kinds: Sequence[RoundKind]) -> None:
        """Compile and load the kernels of these rounds; a transport that has no kernels of its own does nothing.

        Collective: every rank passes the same.
        """
        del kinds

    def check(self) -> None:
        """Wait for the rounds that this rank has begun and ended, and raise their errors.

        A rank that only replays CUDA graphs, without eager calls, learns of a lost rank here alone. With `on_peer_loss`
        "mask" it also votes here on the ranks that stay active. The others drop a rank that does not vote within
        `timeout_secs`, so it must call this more often than that. Rounds that it replays before the vote give NaN.
        Errors: ValueError for a round that a rank refused, `PeerLostError`. Local, host sync; collective if a rank
        was lost and the others continue.
        """
        ...

    def destroy(self) -> None:
        """Free the transport's memory. Local; calling it twice is fine."""
        ...

    def dispatch(
        self, x: torch.Tensor | Quantized, routing: Routing, *, slot: int = 0, **options: "Unpack[RoundOptions]"
    ) -> Dispatched:
        """`dispatch_send` and `dispatch_recv`. Collective."""
        self.dispatch_send(x, routing, slot=slot, **options)
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
