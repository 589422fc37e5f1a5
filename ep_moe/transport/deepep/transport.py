"""The transport over an installed DeepEP, whichever of its interfaces that is.

Letters: T tokens on this rank, N received rows, K top-k, H hidden, R ranks, P physical experts.

Before a round's rows are sent, ranks gather a header of 64 bytes: bad input, another layer or another format is an
error on every rank while DeepEP has not been called. It is one small collective and one host sync in each round; the
tokens are quantized meanwhile. DeepEP's payload has no place for it: V1's low-latency rows carry no metadata, the
others' ids and weights exist for tokens alone.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.layout import Flat, merge_repeats, pack, weighted_sum
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, QuantScheme, quantize
from ep_moe.routing import Routing
from ep_moe.transport.agreement import compare_ranks
from ep_moe.transport.base import Dispatched, Handle, Transport
from ep_moe.transport.checks import check_dispatch, check_expert_output, check_results, count_rows, first_tokens
from ep_moe.transport.deepep import elastic, low_latency, normal
from ep_moe.transport.deepep.exchange import Exchange, Outgoing, Sizes, all_gather, check_common
from ep_moe.transport.deepep.library import Library, find_library
from ep_moe.transport.deepep.payload import PayloadFormat
from ep_moe.transport.deepep.round_header import RoundHeader, compare_headers, fingerprint, write_header
from ep_moe.transport.layer_tag import NO_LAYER, LayerTag
from ep_moe.transport.slots import Slots

MOST_TOPK = {"low_latency": low_latency.MOST_TOPK, "normal": normal.MOST_TOPK, "v2": elastic.MOST_TOPK}
CAST_SCHEME = "fp8_block"
FEWEST_EXPERTS = 2  # of all ranks: a low-latency kernel has an SM for each and traps with one


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeepEPHandle(Handle):
    """The maps by which a combine returns each received row."""

    token_to_row: torch.Tensor  # [N, 1 or K] int32
    topk_weights: torch.Tensor  # [N, 1 or K] float32; 1 where the source applies the weights


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    round: int
    num_rows: int  # rows of x, of which the first `num_tokens` are tokens
    num_tokens: int
    layout: Layout
    scheme: QuantScheme
    most: int  # tokens of any rank
    work: Any  # the mode's own state


class DeepEPTransport(Transport):
    """Exchange by DeepEP: "low_latency" and "normal" are V1's kernels, "v2" is `ElasticBuffer`.

    Args:
        group: the ranks, with a process group.
        placement: which physical experts each rank owns; ranks may own different numbers.
        config: sizes and dtype, the same on all ranks. The dtype is bfloat16. `num_sms` is not for "low_latency".
        mode: "auto" is "v2" if the library has it, else "low_latency" for M up to 256, else "normal".
        cast: "low_latency" alone: DeepEP itself casts tokens of scheme fp8_block, which halves the bytes on the wire;
            its values differ from `ep_moe.quant` in the last bit. Otherwise a token of any scheme is sent as
            `ep_moe.quant` rounds it, in "low_latency" in a row as wide as in bfloat16.

    Attributes:
        mode: the mode in use.
        sum_order: the order of sums, which DeepEP decides ("columns", "ranks-rounded", "last-columns-rounded").

    The constructor is collective: it compares the configs of all ranks. A dispatch waits for headers on the host, so it
    cannot be captured in a CUDA graph. Errors: RuntimeError says which DeepEP is found and what it lacks, ValueError
    names a size that the mode cannot carry.
    """

    def __init__(
        self,
        group: EPGroup,
        placement: Placement,
        config: TransportConfig,
        *,
        mode: str = "auto",
        cast: bool = False,
    ) -> None:
        compare_ranks(group, placement, config)
        if config.on_peer_loss != "raise":
            raise ValueError(f"on_peer_loss ({config.on_peer_loss!r}) needs transport 'nvlink': DeepEP waits for all")
        check_common(config.dtype, group)
        library = _agreed_library(group, mode, config.max_tokens_per_rank)
        if cast and library.mode != "low_latency":
            raise ValueError(f"cast: DeepEP casts in mode 'low_latency' alone, the mode is {library.mode!r}")
        self.config, self.placement, self.mode = config, placement, library.mode
        self.rank, self.num_ranks, self.device = group.rank, group.num_ranks, group.device
        self.num_rounds, self._destroyed = 0, False
        self._group, self._slots = group, Slots[_Round](config.num_slots)
        counts = [placement.num_local_experts(rank) for rank in range(group.num_ranks)]
        most = max(*counts, FEWEST_EXPERTS // group.num_ranks)
        sizes = Sizes(
            num_local_experts=most,
            max_tokens=config.max_tokens_per_rank,
            hidden=config.hidden,
            max_topk=config.max_topk,
            num_sms=config.num_sms,
            timeout_secs=group.config.timeout_secs,
            topk_idx_dtype=library.topk_idx_dtype,
        )
        ids = [rank * most + local for rank, count in enumerate(counts) for local in range(count)]
        self._deepep_ids = torch.tensor([*ids, -1], dtype=library.topk_idx_dtype, device=group.device)  # [P + 1]
        with self._calling("making of DeepEP's buffers", 0):
            self._exchange: Exchange = _make_exchange(library, group, sizes, cast=cast)
        self.sum_order = self._exchange.sum_order

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
        """See `Transport.dispatch_send`. Waits for the headers of all ranks, and in DeepEP for their counts."""
        self._group.check()
        self._slots.expect(slot, "dispatch_send")
        config, num_physical = self.config, self.placement.num_physical
        try:
            check_dispatch(
                x,
                routing,
                layout=layout,
                scheme=scheme,
                config=config,
                rank=self.rank,
                device=self.device,
                num_tokens=num_tokens,
                max_num_tokens=max_num_tokens,
                layer=layer,
            )
            self._check_topk(routing)
        except ValueError as error:
            self.refuse(error, slot=slot, num_tokens=count_rows(x))
        num_rows = routing.topk_ids.shape[0]
        if num_tokens is not None:
            try:
                x, routing = first_tokens(x, routing, num_tokens, rank=self.rank)
            except ValueError as error:
                self.refuse(error, slot=slot)
        most = config.max_tokens_per_rank if max_num_tokens is None else max_num_tokens
        count, num_topk = routing.topk_ids.shape
        cast = self._exchange.casts and scheme.name == CAST_SCHEME and not isinstance(x, Quantized)
        payload = PayloadFormat.of(scheme, config.dtype, config.hidden)
        header = RoundHeader(
            num_tokens=count,
            fingerprint=fingerprint(payload, num_topk, most, cast),
            layer=layer.words[0],
            settings=layer.words[1],
            flat=int(layout is Layout.FLAT),
        )
        ids, weights = self._library_ids(routing)
        if scheme.payload.quantized and not isinstance(x, Quantized) and not cast:
            x = quantize(x, scheme)  # here, since it may run out of memory: no rank waits for this one yet
        round_, self.num_rounds = self.num_rounds, self.num_rounds + 1
        headers = self._swap_headers(write_header(header, routing.topk_ids, num_physical), round_)
        compare_headers(headers, self.rank, round_, num_physical=num_physical, max_tokens=config.max_tokens_per_rank)
        with self._calling("dispatch", round_):
            work = self._exchange.send(
                Outgoing(x=x, format=payload, topk_ids=ids, topk_weights=weights, headers=headers)
            )
        state = _Round(
            round=round_,
            num_rows=num_rows,
            num_tokens=count,
            layout=layout,
            scheme=scheme,
            most=most,
            work=work,
        )
        self._slots.advance(slot, "dispatch_send", state)

    def dispatch_recv(self, *, slot: int = 0) -> Dispatched:
        """See `Transport.dispatch_recv`. Host sync for the number of rows."""
        self._group.check_open()
        state = self._slots.expect(slot, "dispatch_recv")
        assert state is not None
        with self._calling("dispatch", state.round):
            arrived = self._exchange.receive(state.work)
        first, last = self.placement.starts[self.rank], self.placement.starts[self.rank + 1]
        packed = pack(
            arrived.rows,
            state.layout,
            scheme=state.scheme,
            dtype=self.config.dtype,
            num_local_experts=last - first,
            capacity=self.num_ranks * state.most,
            alignment=self.config.row_alignment,
            max_rows=arrived.num_pairs,
        )
        handle = DeepEPHandle(
            slot=slot, round=state.round, token_to_row=packed.token_to_row, topk_weights=packed.topk_weights
        )
        self._slots.advance(slot, "dispatch_recv", state)
        return Dispatched(batch=packed.batch, handle=handle)

    def combine_send(self, y: torch.Tensor, dispatched: Dispatched) -> None:
        """See `Transport.combine_send`."""
        handle = dispatched.handle
        assert isinstance(handle, DeepEPHandle)
        state = self._slots.expect(handle.slot, "combine_send", handle.round)
        assert state is not None
        check_expert_output(y, dispatched.batch)
        flat = isinstance(dispatched.batch, Flat)
        rows = y if flat else weighted_sum(y, handle.token_to_row, handle.topk_weights)
        with self._calling("combine", state.round):
            self._exchange.send_back(state.work, rows)
        self._slots.advance(handle.slot, "combine_send", state)

    def combine_recv(
        self, dispatched: Dispatched, *, shared: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Transport.combine_recv`. DeepEP has rounded the sum; `shared` is added to that, and rounded again."""
        self._group.check_open()
        handle = dispatched.handle
        state = self._slots.expect(handle.slot, "combine_recv", handle.round)
        assert state is not None
        shape = (state.num_rows, self.config.hidden)
        check_results(shape, self.config, self.device, shared=shared, out=out)
        with self._calling("combine", state.round):
            sums = self._exchange.receive_back(state.work).contiguous()
        result, tokens = sums.new_empty(shape) if out is None else out, slice(state.num_tokens)
        own_row = torch.arange(state.num_tokens, dtype=torch.int32, device=self.device).unsqueeze(1)
        weighted_sum(sums, own_row, None, shared=None if shared is None else shared[tokens], out=result[tokens])
        self._slots.advance(handle.slot, "combine_recv", None)
        return result

    def refuse(self, error: ValueError, *, slot: int = 0, num_tokens: int = 0) -> NoReturn:
        """See `Transport.refuse`. `num_tokens`: this rank's token count in the header."""
        self._group.check()
        self._slots.expect(slot, "dispatch_send")
        round_, self.num_rounds = self.num_rounds, self.num_rounds + 1
        words = RoundHeader(num_tokens=num_tokens, refused=1)
        self._swap_headers(torch.tensor(words, dtype=torch.int64, device=self.device), round_)
        raise error

    def abandon(self, *, slot: int = 0) -> None:
        """See `Transport.abandon`."""
        self._group.check_open()
        call, state = self._slots.stage(slot)
        if state is None:
            return
        with self._calling("abandoned round", state.round):
            if call != "combine_recv":
                shape = (self._exchange.count(state.work), self.config.hidden)
                nothing = torch.full(shape, float("nan"), dtype=self.config.dtype, device=self.device)
                self._exchange.send_back(state.work, nothing)
            self._exchange.receive_back(state.work)
        self._slots.close(slot)

    def check(self) -> None:
        """See `Transport.check`. On a GPU this waits, within the deadline, for what DeepEP's kernels have begun."""
        self._slots.check_open()
        self._group.check()
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
            self._group.wait(done, phase="combine", round=max(self.num_rounds - 1, 0))

    def destroy(self) -> None:
        """See `Transport.destroy`. Open rounds are dropped; the group stays.

        DeepEP waits here for the other ranks' `destroy`. Once a rank is lost its buffers are left to the process's end.
        """
        if not self._destroyed and self._group.failure is None:
            self._exchange.destroy()
        self._destroyed = True
        self._slots.destroy()

    def _check_topk(self, routing: Routing) -> None:
        """Raise ValueError for a K that the mode's kernels do not hold."""
        num_topk, most = routing.topk_ids.shape[1], MOST_TOPK[self.mode]
        if num_topk > most:
            raise ValueError(f"num_topk ({num_topk}) exceeds {most}, the most of DeepEP's {self.mode} kernels")

    def _library_ids(self, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        """DeepEP's ids [T, K] and weights [T, K] with repeats merged: some kernels trap on an expert that repeats."""
        ids, weights = merge_repeats(routing.topk_ids, routing.topk_weights)
        num_physical = self.placement.num_physical
        known = torch.where((ids >= 0) & (ids < num_physical), ids, num_physical)
        return self._deepep_ids[known.long()].contiguous(), weights

    def _swap_headers(self, mine: torch.Tensor, round_: int) -> list[RoundHeader]:
        """The headers of all ranks. One host sync."""
        everyone = mine.new_empty(self.num_ranks, mine.shape[0])
        try:
            work = all_gather(everyone.view(-1), mine, group=self._group.process_group, async_op=True)
        except RuntimeError as error:  # if the connection is already broken, the call fails and not the wait
            cause = self._group.explain(error)
            if cause is error:
                raise
            raise cause from error
        self._group.wait(work, phase="dispatch", round=round_)
        return [RoundHeader(*words) for words in everyone.tolist()]

    @contextlib.contextmanager
    def _calling(self, phase: str, round_: int) -> Iterator[None]:
        """Call DeepEP: name the rank that is lost if it fails for that, else tell the others of an error here."""
        self._group.check()
        try:
            with self._group.waiting(phase, round_):
                yield
        except (PeerLostError, ValueError):  # a ValueError is of sizes, which are the same on all ranks
            raise
        except Exception as error:
            cause = self._group.explain(error)
            if cause is not error:
                raise cause from error
            self._group.report_failure(error)
            raise


def _agreed_library(group: EPGroup, mode: str, max_tokens_per_rank: int) -> Library:
    """The library, if all ranks find one in the same mode; else every rank raises. Collective, host sync."""
    library, problem = None, ""
    try:
        library = find_library(mode, max_tokens_per_rank)
    except RuntimeError as error:
        problem = str(error)
    found = group.all_gather_object((problem, "" if library is None else library.mode))
    problems = {rank: text for rank, (text, _) in enumerate(found) if text}
    if library is None or problems:
        rank = group.rank if problem else min(problems)
        raise RuntimeError(f"{problems[rank]} (rank {rank}; {len(problems)} of {group.num_ranks} ranks)")
    modes = [name for _, name in found]
    if len(set(modes)) > 1:
        raise RuntimeError(f"ranks have different versions of DeepEP: their modes are {', '.join(modes)}")
    return library


def _make_exchange(library: Library, group: EPGroup, sizes: Sizes, *, cast: bool) -> Exchange:
    """The mode's exchange. Errors: ValueError for sizes that it does not carry, before any buffer is made."""
    if library.mode == "low_latency":
        return low_latency.LowLatency(library, group, sizes, cast=cast)
    if library.mode == "normal":
        return normal.Normal(library, group, sizes)
    return elastic.Elastic(library, group, sizes)
