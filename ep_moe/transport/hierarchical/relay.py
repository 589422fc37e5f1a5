"""Forwarding inside a node: rows that arrived for the node are one more round of a transport between its ranks.

Letters: N nodes, G ranks of a node, K top-k, H hidden, L local experts, M max_tokens_per_rank.

All rows that a node gets from one other node in one chunk are a round of the inner transport: its source rank g is the
relay that got them, in the order of source tokens. Rounds of (node, chunk) and blocks of g together say which row is
which, so that rows can be put into the order of source ranks and tokens without more metadata.
"""

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.group.parts import GroupPart, split
from ep_moe.group.symmetric import why_unreachable
from ep_moe.layout import Flat, TokenRows, merge_repeats, weighted_sum
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, QuantScheme, get_scheme
from ep_moe.routing import Routing
from ep_moe.transport.base import Dispatched, Handle, RoundKind
from ep_moe.transport.collective import CollectiveTransport
from ep_moe.transport.hierarchical.network import NodeGrid
from ep_moe.transport.host_sync import PackedHandle
from ep_moe.transport.payload import RowFormat

if TYPE_CHECKING:
    from ep_moe.transport.one_sided import NvlinkTransport

MOST_ONE_SIDED_SLOTS = 64  # they share the programs that may wait on a GPU, 400 on an H200

_log = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True, slots=True)
class Forwarded:
    """A round inside the node: the rows of one source node and one chunk.

    `counts`: by relay, the rows that it has. `blocks`: by relay, where those for this rank lie among the received
    rows, and how many there may be. `places`: by relay, where they begin among the rows of all rounds.
    """

    node: int
    slot: int
    rows: slice  # of the source node's rows to this relay
    counts: tuple[int, ...]
    dispatched: Dispatched | None = None
    blocks: tuple[tuple[slice, int], ...] = ()
    places: tuple[int, ...] = ()

    @property
    def batch(self) -> Flat:
        """The received rows."""
        assert self.dispatched is not None
        assert isinstance(self.dispatched.batch, Flat)
        return self.dispatched.batch


class Relay:
    """The rounds inside this rank's node, on the one-sided transport if ranks reach each other's memory.

    Args:
        group: of all ranks. At least 2 ranks on each node.
        config: of the whole transport. inside: "peer", "collective", or "auto".

    Attributes:
        inner: the transport of these rounds; None in a node without experts.
    Collective.
    """

    inner: "CollectiveTransport | NvlinkTransport | None"

    def __init__(
        self, group: EPGroup, grid: NodeGrid, placement: Placement, config: TransportConfig, inside: str
    ) -> None:
        part = split(group, grid.nodes)
        self._part, self._grid = part, grid
        part.place = group.next_gather  # in which `make_relay` meets the other nodes, some of which make nothing
        self.first, self.last = grid.experts(placement)[grid.node]
        self._chunk_rows = min(config.chunk_rows, config.max_tokens_per_rank)
        self._chunks = -(-config.max_tokens_per_rank // self._chunk_rows)
        self.inner = None
        own = placement.starts[grid.rank - grid.local_rank :][: grid.ranks_per_node + 1]
        slots = config.num_slots * grid.num_nodes * self._chunks
        inner = dataclasses.replace(
            config, max_tokens_per_rank=self._chunk_rows, num_slots=slots, row_alignment=1, ranks_per_node=0
        )
        self._one_sided = _reaches(part, inside, slots)
        # gloo's messages are copied to their places by the host, once they have come
        self.waits_on_host = not self._one_sided or group.device.type != "cuda" or group.backend == "gloo"
        if self.last == self.first:
            return  # no token comes to a node without experts
        local = Placement(tuple(range(self.last - self.first)), tuple(start - self.first for start in own))
        if self._one_sided:
            from ep_moe.transport.one_sided import NvlinkTransport  # it needs Triton

            self.inner = NvlinkTransport(part, local, inner)
        else:
            self.inner = CollectiveTransport(part, local, inner)

    def enter(self, phase: str, round_: int) -> None:
        """From now on waits inside the node belong to this phase and round of the whole transport. Local."""
        self._part.place = (phase, round_)

    def plan(self, slot: int, counts: tuple[tuple[int, ...], ...]) -> list[Forwarded]:
        """The rounds inside the node that one round of the whole transport needs, the same on all ranks of the node.

        They are in the order in which they run: those of this node first, which need no network, then chunk by chunk.

        Args:
            counts: [N][G], the rows that each relay of this node gets from each node. Local.
        """
        step, base, own = self._chunk_rows, slot * self._grid.num_nodes * self._chunks, self._grid.node
        found = [
            Forwarded(
                node=node,
                slot=base + node * self._chunks + chunk,
                rows=slice(chunk * step, min((chunk + 1) * step, by_relay[self._grid.local_rank])),
                counts=tuple(min(max(count - chunk * step, 0), step) for count in by_relay),
            )
            for node, by_relay in enumerate(counts)
            for chunk in range(-(-max(by_relay) // step))
        ]
        return sorted(found, key=lambda rows: (rows.node != own, rows.rows.start, rows.node))

    def send(self, forwarded: Forwarded, rows: torch.Tensor, row_format: RowFormat, scheme: QuantScheme) -> None:
        """Send the rows of a round to the ranks of the node that need them.

        Args:
            rows: [n, row_bytes] uint8, all that this relay has of the round's source node.
        Collective in the node; no wait on GPUs with one-sided stores.
        """
        assert self.inner is not None
        values, scale, routing = row_format.read(rows[forwarded.rows])
        ids, weights = merge_repeats(routing.topk_ids, routing.topk_weights, first=self.first, last=self.last)
        self.inner.dispatch_send(
            values if scale is None else Quantized(values=values, scale=scale, scheme=scheme),
            Routing(topk_ids=ids, topk_weights=weights),
            layout=Layout.FLAT,
            scheme=scheme,
            slot=forwarded.slot,
            max_num_tokens=max(forwarded.counts),
        )

    def receive(self, rounds: list[Forwarded]) -> None:
        """Receive the rows of all rounds, and find their places in the order of source ranks and tokens.

        Collective in the node.
        """
        for forwarded in rounds:
            assert self.inner is not None
            forwarded.dispatched = self.inner.dispatch_recv(slot=forwarded.slot)
            forwarded.blocks = _blocks(forwarded, self._grid.ranks_per_node)
        places: dict[int, list[int]] = {id(forwarded): [] for forwarded in rounds}
        place = 0
        for _, relay, _, forwarded in self._in_order(rounds):
            places[id(forwarded)].append(place)
            place += forwarded.blocks[relay][1]
        for forwarded in rounds:
            forwarded.places = tuple(places[id(forwarded)])

    def _in_order(self, rounds: list[Forwarded]) -> list[tuple[int, int, int, Forwarded]]:
        """(node, relay, chunk's first row, round) of every block, in the order of source ranks and tokens."""
        blocks = [
            (forwarded.node, relay, forwarded.slot, forwarded)
            for forwarded in rounds
            for relay in range(self._grid.ranks_per_node)
        ]
        return sorted(blocks, key=lambda block: block[:3])

    def gather(self, rounds: list[Forwarded], empty: TokenRows) -> TokenRows:
        """The received rows of all rounds, by source rank and token; rows without an expert here may lie between them.

        Args:
            empty: no rows, with the dtypes and widths of these.
        Local, a copy of the rows.
        """
        parts = [(rows.batch, rows.blocks[g][0]) for _, g, _, rows in self._in_order(rounds)]
        if not parts:
            return empty

        def joined(name: str) -> torch.Tensor:
            tensors = [getattr(batch, name)[piece] for batch, piece in parts]
            if tensors[0].element_size() > 1:
                return torch.cat(tensors)
            return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)

        return TokenRows(
            x=joined("x"),
            scale=None if empty.scale is None else joined("scale"),
            local_topk_ids=joined("local_topk_ids"),
            topk_weights=joined("topk_weights"),
        )

    def send_back(
        self,
        forwarded: Forwarded,
        y: torch.Tensor | None,
        maps: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Send this rank's sums of a round's rows to their relays.

        Args:
            y: the experts' output for the batch of all rounds; None sends NaN, which needs no memory, and no rows that
                have been received.
            maps: token_to_row and topk_weights [rows of all rounds, K], in the order of `gather`; None if y has a
                weighted sum for each of these rows already.
        Collective in the node, no wait.
        """
        assert self.inner is not None
        if y is None:
            round_ = self.inner.send_nan(slot=forwarded.slot)
            handle = Handle(slot=forwarded.slot, round=round_)
            forwarded.dispatched = Dispatched(batch=None, handle=handle)  # type: ignore[arg-type]
            return
        assert forwarded.dispatched is not None
        pool, like = forwarded.batch, self.inner.config
        num_rows = pool.x.shape[0]
        places = [
            (block, slice(place, place + count))
            for (block, count), place in zip(forwarded.blocks, forwarded.places, strict=True)
        ]
        if maps is None:
            rows = torch.empty(num_rows, like.hidden, dtype=like.dtype, device=y.device)
            for source, packed in places:
                rows[source] = y[packed]
        else:
            index = torch.full((num_rows, maps[0].shape[1]), -1, dtype=torch.int32, device=y.device)
            weights = torch.zeros(index.shape, dtype=torch.float32, device=y.device)
            for source, packed in places:
                index[source], weights[source] = maps[0][packed], maps[1][packed]
            rows = weighted_sum(y, index, weights)
        self.inner.combine_send(rows, forwarded.dispatched)

    def sum(self, forwarded: Forwarded, out: torch.Tensor) -> None:
        """Sum the node's rows of a round, in rank order in float32, rounded once.

        Args:
            out: [n, H] in the model's dtype, written: a row for each that this relay had sent.
        Collective in the node.
        """
        assert self.inner is not None
        assert forwarded.dispatched is not None
        self.inner.combine_recv(forwarded.dispatched, out=out)

    def warmup(self, kinds: Sequence[RoundKind]) -> None:
        """See `Transport.warmup`. All ranks of all nodes wait for each other once, whatever their nodes use.

        Collective in the whole group.
        """
        if self.inner is None or not self._one_sided:
            self._part.wait_for_all("compile")
        else:
            self.inner.warmup(list(dict.fromkeys(map(_inner_kind, kinds))))


def make_relay(
    group: EPGroup, grid: NodeGrid, placement: Placement, config: TransportConfig, inside: str
) -> Relay | None:
    """The rounds inside this rank's node; None if it has one rank. Arguments as of `Relay`.

    Errors: RuntimeError, on the ranks of all nodes, if a node cannot make them. Collective in the whole group.
    """
    if inside not in ("auto", "peer", "nvlink", "collective"):
        raise ValueError(f"inside ({inside!r}) is not one of auto, peer, nvlink, collective")
    if grid.ranks_per_node == 1:
        return None
    relay, problem = None, ""
    try:
        relay = Relay(group, grid, placement, config, inside)
    except PeerLostError:
        raise
    except RuntimeError as error:
        problem = str(error)
    problems = {rank: text for rank, text in enumerate(group.all_gather_object(problem)) if text}
    if problems:
        if relay is not None and relay.inner is not None:
            relay.inner.destroy()
        first = min(problems)
        raise RuntimeError(f"rounds inside the node of rank {first} cannot be made: {problems[first]}")
    return relay


def _inner_kind(kind: RoundKind) -> RoundKind:
    """The rounds inside a node that a round of the whole transport needs: FLAT, in halves, of rows as they arrived."""
    return RoundKind(
        num_topk=kind.num_topk,
        scheme=kind.scheme,
        layout=Layout.FLAT,
        quantized=get_scheme(kind.scheme).payload.quantized,
        split_dispatch=True,
        split_combine=True,
    )


def _blocks(forwarded: Forwarded, num_relays: int) -> tuple[tuple[slice, int], ...]:
    """By relay, the rows that were received from it, and how many there may be."""
    assert forwarded.dispatched is not None
    handle = forwarded.dispatched.handle
    if isinstance(handle, PackedHandle):
        ends = itertools.accumulate(handle.recv_counts)
        return tuple((slice(end - n, end), n) for end, n in zip(ends, handle.recv_counts, strict=True))
    # one-sided: the first tokens of all relays, then the second
    return tuple((slice(g, g + n * num_relays, num_relays), n) for g, n in enumerate(forwarded.counts))


def _reaches(part: GroupPart, inside: str, slots: int) -> bool:
    """Whether rounds inside the node are one-sided; the same on all ranks of the node. Collective."""
    if inside != "auto":
        return inside in ("peer", "nvlink")
    if part.device.type != "cuda":
        return False
    reason = why_unreachable(part)
    if not reason and slots > MOST_ONE_SIDED_SLOTS:
        reason = f"{slots} rounds may be open, the most is {MOST_ONE_SIDED_SLOTS}: raise chunk_rows"
    if part.whole.rank == 0:
        _log.info("transport 'hierarchical' is %s inside nodes", f"'collective': {reason}" if reason else "'peer'")
    return not reason
