"""The transport over an installed DeepEP, whichever of its interfaces that is.

Letters: T tokens on this rank, N received rows, K top-k, H hidden, R ranks, P physical experts.

Before a round's rows are sent, ranks gather a header of 80 bytes: bad input, another layer or another format is an
error on every rank while DeepEP has not been called. It is one small collective and one host sync in each round; the
tokens are quantized meanwhile. DeepEP's payload has no place for it: V1's low-latency rows carry no metadata, the
others' ids and weights exist for tokens alone.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.layout import Packed, merge_repeats
from ep_moe.placement import Placement
from ep_moe.quant import Quantized
from ep_moe.routing import Routing
from ep_moe.transport.base import Dispatched
from ep_moe.transport.checks import DispatchArguments
from ep_moe.transport.deepep.exchange import Exchange, Outgoing, check_common
from ep_moe.transport.deepep.library import Library, find_library
from ep_moe.transport.deepep.low_latency import LowLatency
from ep_moe.transport.deepep.per_rank import Elastic, Normal
from ep_moe.transport.headers import Header, find_bad_ids, gather_headers
from ep_moe.transport.host_sync import HostSyncTransport, OpenRound, Tokens, sum_experts
from ep_moe.transport.payload import RowFormat

EXCHANGES: dict[str, Callable[..., Exchange]] = {"low_latency": LowLatency, "normal": Normal, "v2": Elastic}
CAST_SCHEME = "fp8_block"
FEWEST_EXPERTS = 2  # of all ranks: a low-latency kernel has an SM for each and traps with one


@dataclasses.dataclass(kw_only=True, slots=True)
class _Round(OpenRound):
    work: Any  # the mode's own state


class DeepEPTransport(HostSyncTransport[_Round]):
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

    _waiting = "DeepEP"

    def __init__(
        self,
        group: EPGroup,
        placement: Placement,
        config: TransportConfig,
        *,
        mode: str = "auto",
        cast: bool = False,
    ) -> None:
        super().__init__(group, placement, config)
        check_common(config.dtype, group)
        library = _agreed_library(group, mode, config.max_tokens_per_rank)
        if cast and library.mode != "low_latency":
            raise ValueError(f"cast: DeepEP casts in mode 'low_latency' alone, the mode is {library.mode!r}")
        self.mode, self._destroyed = library.mode, False
        counts = [placement.num_local_experts(rank) for rank in range(group.num_ranks)]
        most = max(*counts, FEWEST_EXPERTS // group.num_ranks)
        ids = [rank * most + local for rank, count in enumerate(counts) for local in range(count)]
        self._deepep_ids = torch.tensor([*ids, -1], dtype=library.topk_idx_dtype, device=group.device)  # [P + 1]
        with self._calling("making of DeepEP's buffers", 0):
            options = {"cast": cast} if cast else {}
            self._exchange: Exchange = EXCHANGES[library.mode](library, group, config, most, **options)
        self.sum_order = self._exchange.sum_order

    def _check_tokens(self, arguments: DispatchArguments) -> None:
        super()._check_tokens(arguments)
        num_topk, most = arguments.routing.topk_ids.shape[1], self._exchange.most_topk
        if num_topk > most:
            raise ValueError(f"num_topk ({num_topk}) exceeds {most}, the most of DeepEP's {self.mode} kernels")

    def _send(self, tokens: Tokens, slot: int) -> _Round:
        sizes, config = tokens.sizes, self.config
        cast = self._exchange.casts and sizes.scheme.name == CAST_SCHEME and not isinstance(tokens.x, Quantized)
        num_topk = tokens.routing.topk_ids.shape[1]
        row_format = RowFormat.of(sizes.scheme, config.dtype, config.hidden, num_topk)
        header = self._header(tokens, row_format, cast)
        ids, weights = self._library_ids(tokens.routing)
        x = tokens.x if cast else tokens.quantized()
        round_ = self._count_round()
        headers = gather_headers(self._group, header, round_)
        self._compare(headers, round_, row_format)
        outgoing = Outgoing(x=x, format=row_format, topk_ids=ids, topk_weights=weights, headers=headers)
        with self._calling("dispatch", round_):
            work = self._exchange.send(outgoing)
        return _Round(round=round_, sizes=sizes, work=work)

    def _header(self, tokens: Tokens, row_format: RowFormat, cast: bool) -> torch.Tensor:
        """This rank's header as int64 words. No host sync."""
        ids, sizes = tokens.routing.topk_ids, tokens.sizes
        header = Header(
            num_tokens=sizes.num_tokens,
            fingerprint=row_format.fingerprint(sizes.most, cast=cast),
            layer=tokens.layer.words[0],
            settings=tokens.layer.words[1],
            flat=int(sizes.layout is Layout.FLAT),
        )
        words = torch.tensor(header, dtype=torch.int64, device=ids.device)
        for name, word in zip(("bad_ids", "bad_id"), find_bad_ids(ids, self.placement.num_physical), strict=True):
            words[Header._fields.index(name)] = word
        return words

    def _receive(self, state: _Round) -> Packed:
        with self._calling("dispatch", state.round):
            arrived = self._exchange.receive(state.work)
        return self._pack(arrived.rows, state.sizes, arrived.num_pairs)

    def _send_results(self, state: _Round, y: torch.Tensor, dispatched: Dispatched) -> None:
        rows = sum_experts(y, dispatched)
        with self._calling("combine", state.round):
            self._exchange.send_back(state.work, rows)

    def _receive_results(self, state: _Round) -> tuple[torch.Tensor, torch.Tensor]:
        with self._calling("combine", state.round):
            sums = self._exchange.receive_back(state.work).contiguous()  # rounded by DeepEP
        return sums, torch.arange(state.sizes.num_tokens, dtype=torch.int32, device=self.device).unsqueeze(1)

    def _send_refusal(self, num_tokens: int, round_: int) -> None:
        words = Header(num_tokens=num_tokens, refused=1)
        gather_headers(self._group, torch.tensor(words, dtype=torch.int64, device=self.device), round_)

    def _end(self, state: _Round, call: str, slot: int) -> None:
        with self._calling("abandoned round", state.round):
            if call != "combine_recv":
                shape = (self._exchange.count(state.work), self.config.hidden)
                nothing = torch.full(shape, float("nan"), dtype=self.config.dtype, device=self.device)
                self._exchange.send_back(state.work, nothing)
            self._exchange.receive_back(state.work)

    def check(self) -> None:
        """See `Transport.check`. On a GPU this waits, within the deadline, for what DeepEP's kernels have begun."""
        super().check()
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self.device))
            self._group.wait(done, phase="combine", round=max(self.num_rounds - 1, 0))

    def destroy(self) -> None:
        """See `Transport.destroy`. Open rounds are dropped; the group stays.

        DeepEP waits here for the other ranks' `destroy`. Once a rank is lost its buffers are left to the process's end.
        """
        if not self._destroyed and self._group.failure is None:
            self._exchange.destroy()
        self._destroyed = True
        self._slots.destroy()

    def _library_ids(self, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        """DeepEP's ids [T, K] and weights [T, K] with repeats merged: some kernels trap on an expert that repeats."""
        ids, weights = merge_repeats(routing.topk_ids, routing.topk_weights)
        num_physical = self.placement.num_physical
        known = torch.where((ids >= 0) & (ids < num_physical), ids, num_physical)
        return self._deepep_ids[known.long()].contiguous(), weights

    @contextlib.contextmanager
    def _calling(self, phase: str, round_: int) -> Iterator[None]:
        """Call DeepEP: name the rank that is lost if it fails for that, else tell the others of an error here."""
        self._group.check()
        try:
            with self._group.waiting(phase, round_), self._group.explained():
                yield
        except (PeerLostError, ValueError):  # a ValueError is of sizes, which are the same on all ranks
            raise
        except Exception as error:
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
