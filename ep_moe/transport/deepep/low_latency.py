"""DeepEP V1's low-latency kernels: a row for each (token, expert), weights applied where the token came from.

Letters: T tokens on this rank, N received rows, K top-k, H hidden, R ranks, L experts of a rank, M max_tokens_per_rank,
C = R * M rows of an expert, W elements of a row, the least width of DeepEP's kernels that holds H.

The two buffers of the library alternate between operations, and their places in memory follow from M, W and the number
of experts: these are the same in all operations, also in rounds of other formats. An operation clears the flags of the
one before: a `send` first completes what is in flight.

An expert's rows arrive in any order. They are read in the order of (source rank, token) that `src_info` and
`layout_range` tell. The weights do not travel: the source multiplies each row by its weight. A FLAT batch needs
ids and weights at the experts' rank, since its experts apply the weights: if a header asks for one, ranks also gather
their ids and weights. That rank then returns a token's sum as the row of the token's first expert there and zeros for
the others, which the source gives the weights 1 and 0.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.group.collectives import all_gather_single
from ep_moe.layout import TokenRows
from ep_moe.transport.deepep.exchange import Arrived, Outgoing, without_fill
from ep_moe.transport.deepep.library import Library
from ep_moe.transport.deepep.payload import padded, read_words, words
from ep_moe.transport.payload import RowFormat, round_up

# widths for which DeepEP compiles its kernels (SWITCH_HIDDEN, csrc/kernels/launch.cuh): those of 1.2.1, and one more of
# 2.1, the version that brought `ElasticBuffer`
WIDTHS = (2048, 2560, 4096, 5120, 6144, 7168, 8192)
WIDTH_OF_2 = 3072
MOST_TOPK = 11  # of the kernels of 1.2.1 and 2.1; older builds hold 9 and say so themselves
GROUP = 128  # elements that share a scale in DeepEP's cast


def low_latency_width(hidden: int, has_v2: bool) -> int:
    """W for H. Errors: ValueError above the widest."""
    wide = [width for width in (*WIDTHS, *[WIDTH_OF_2] * has_v2) if width >= hidden]
    if not wide:
        raise ValueError(f"hidden ({hidden}) exceeds {WIDTHS[-1]}, the widest row of DeepEP's low-latency kernels")
    return min(wide)


@dataclasses.dataclass(slots=True)
class _Round:
    format: RowFormat
    topk_ids: torch.Tensor  # [T, K]
    topk_weights: torch.Tensor  # [T, K] float32, those of the combine
    handle: Any
    received: Any  # [L, C, W] bfloat16, or e4m3 and scales
    hook: Callable[[], None]
    keep: Any  # tensors that an operation in flight reads
    num_tokens: int  # of all ranks, the most rows of an expert
    lists: torch.Tensor | None  # [R, T of the rank that has most, 2 K] int32, ids and weights, if this batch is FLAT
    place: torch.Tensor | None = None  # [N] int64, row of [L * C] that each of `Arrived.rows` came from
    zeros: torch.Tensor | None = None  # rows that are returned as zeros
    combined: torch.Tensor | None = None  # [T, W]


class LowLatency:
    """See `Exchange`. cast: DeepEP casts to fp8_block; its values are not those of `ep_moe.quant` bit for bit."""

    most_topk = MOST_TOPK
    sum_order = "columns"

    def __init__(
        self, library: Library, group: EPGroup, config: TransportConfig, num_local: int, *, cast: bool = False
    ) -> None:
        self.casts = cast
        self.width = low_latency_width(config.hidden, library.has_v2)
        if config.num_sms:
            raise ValueError(f"num_sms ({config.num_sms}): DeepEP's low-latency kernels choose their SMs; use 0")
        self._num_local, self._rank, self._num_ranks = num_local, group.rank, group.num_ranks
        self._group = group.process_group
        self._num_experts = num_local * group.num_ranks
        self._max_tokens = round_up(
            config.max_tokens_per_rank, 4
        )  # the scales' columns need R * M to be a multiple of 4
        shape = (self._max_tokens, self.width, group.num_ranks, self._num_experts)
        self._buffer = library.buffer_class(
            group=self._group,
            num_rdma_bytes=library.buffer_class.get_low_latency_rdma_size_hint(*shape),
            low_latency_mode=True,
            num_qps_per_rank=num_local,
            explicitly_destroy=True,
        )
        depth = getattr(self._buffer, "nvshmem_qp_depth", math.inf)
        if depth < 2 * (self._max_tokens + 1):
            self._buffer.destroy()
            raise ValueError(
                f"max_tokens_per_rank ({config.max_tokens_per_rank}) exceeds {(int(depth) // 2 - 1) // 4 * 4}, which "
                f"NVSHMEM_QP_DEPTH ({depth}) allows; set it to {2 * (self._max_tokens + 1)} or more"
            )
        self._in_flight: Callable[[], None] | None = None

    def send(self, outgoing: Outgoing) -> _Round:
        """See `Exchange.send`. Does not wait for other ranks, but for an operation of another slot in flight."""
        self._complete(self._in_flight)
        ids, weights = outgoing.topk_ids, outgoing.topk_weights
        cast = isinstance(outgoing.x, torch.Tensor) and outgoing.format.num_groups > 0
        rows = words(outgoing.format, outgoing.x, self.width)
        with without_fill():
            received, _, handle, _, hook = self._buffer.low_latency_dispatch(
                x=rows,
                topk_idx=ids,
                num_max_dispatch_tokens_per_rank=self._max_tokens,
                num_experts=self._num_experts,
                use_fp8=cast,
                return_recv_hook=True,
            )
        self._in_flight = hook
        flat = [bool(header.flat) for header in outgoing.headers]
        lists = self._gather_lists(outgoing) if any(flat) else None
        return _Round(
            format=outgoing.format,
            topk_ids=ids,
            topk_weights=self._source_weights(ids, weights, flat) if any(flat) else weights,
            handle=handle,
            received=received,
            hook=hook,
            keep=(rows, ids, weights),
            num_tokens=sum(header.num_tokens for header in outgoing.headers),
            lists=lists if flat[self._rank] else None,
        )

    def receive(self, round_: _Round) -> Arrived:
        """See `Exchange.receive`. Host sync for the number of rows."""
        self._complete(round_.hook)
        place, ids, weights = self._expert_rows(round_) if round_.lists is None else self._flat_rows(round_)
        if isinstance(round_.received, tuple):
            values, scales = round_.received
            hidden = round_.format.hidden
            x = values.view(torch.uint8).view(-1, self.width)[place][:, :hidden].view(values.dtype)
            height = self._num_ranks * self._max_tokens
            scale = scales[place // height, place % height][:, : round_.format.num_groups]
        else:
            x, scale = read_words(round_.format, round_.received.view(-1, self.width)[place])
        round_.place, round_.keep = place, None
        rows = TokenRows(x=x, scale=scale, local_topk_ids=ids, topk_weights=weights, max_expert_rows=round_.num_tokens)
        return Arrived(rows=rows, num_pairs=ids.shape[0] * min(ids.shape[1], self._num_local))

    def count(self, round_: _Round) -> int:
        """See `Exchange.count`."""
        if round_.place is None:
            self.receive(round_)
        assert round_.place is not None
        return round_.place.shape[0]

    def send_back(self, round_: _Round, rows: torch.Tensor) -> None:
        """See `Exchange.send_back`. Rows of no token are not sent, and stay as they are."""
        self._complete(self._in_flight)
        assert round_.place is not None
        height = self._num_ranks * self._max_tokens
        x = torch.empty(self._num_local, height, self.width, dtype=torch.bfloat16, device=round_.topk_ids.device)
        flat = x.view(-1, self.width)
        if round_.zeros is not None:
            flat[round_.zeros] = 0
        flat[round_.place] = padded(rows, self.width)
        with without_fill():
            round_.combined, _, round_.hook = self._buffer.low_latency_combine(
                x=x,
                topk_idx=round_.topk_ids,
                topk_weights=round_.topk_weights,
                handle=round_.handle,
                return_recv_hook=True,
            )
        self._in_flight = round_.hook
        round_.keep, round_.received = x, None

    def receive_back(self, round_: _Round) -> torch.Tensor:
        """See `Exchange.receive_back`. No host sync."""
        self._complete(round_.hook)
        assert round_.combined is not None
        round_.keep = None
        return round_.combined[:, : round_.format.hidden]

    def destroy(self) -> None:
        """See `Exchange.destroy`."""
        self._buffer.destroy()

    def _complete(self, hook: Callable[[], None] | None) -> None:
        """Receive the operation in flight, if it is this one."""
        if hook is not None and hook is self._in_flight:
            self._in_flight = None
            hook()

    def _source_weights(self, ids: torch.Tensor, weights: torch.Tensor, flat: list[bool]) -> torch.Tensor:
        """The combine's weights: of experts on a FLAT rank 1 for a token's first and 0 for its others."""
        owner = torch.where(ids >= 0, ids // self._num_local, -1)
        result = weights.clone()
        is_flat = torch.tensor([*flat, False], device=ids.device)[owner]
        for column in range(ids.shape[1]):
            again = (owner[:, :column] == owner[:, column : column + 1]).any(1)
            result[:, column] = torch.where(is_flat[:, column], (~again).float(), weights[:, column])
        return result

    def _gather_lists(self, outgoing: Outgoing) -> torch.Tensor:
        """Every rank's ids and weights, padded with -1. Collective."""
        ids, weights = outgoing.topk_ids, outgoing.topk_weights
        num_tokens, num_topk = ids.shape
        most = max(header.num_tokens for header in outgoing.headers)
        mine = torch.full((most, 2 * num_topk), -1, dtype=torch.int32, device=ids.device)
        mine[:num_tokens, :num_topk] = ids.int()
        mine[:num_tokens, num_topk:] = weights.contiguous().view(torch.int32)
        everyone = torch.empty(self._num_ranks, *mine.shape, dtype=torch.int32, device=ids.device)
        all_gather_single(everyone.view(-1, 2 * num_topk), mine, group=self._group)
        return everyone

    def _row_of(self, round_: _Round) -> torch.Tensor:
        """[L, R * M] int64: the row of an expert that holds the token r * M + t, -1 none. No host sync."""
        source_token, ranges = round_.handle[0], round_.handle[1]
        begin, count = ranges >> 32, ranges & 0xFFFFFFFF  # [L, R]
        row = torch.arange(source_token.shape[1], device=source_token.device)
        inside = (row >= begin.unsqueeze(2)) & (row < (begin + count).unsqueeze(2))  # [L, R, C]
        source = inside.int().argmax(1)
        token = torch.where(inside.any(1), source * self._max_tokens + source_token, source_token.shape[1])
        table = torch.full((token.shape[0], token.shape[1] + 1), -1, dtype=torch.int64, device=row.device)
        table.scatter_(1, token, row.expand_as(token))
        return table[:, :-1]

    def _expert_rows(self, round_: _Round) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Place, ids [N, 1] and weights [N, 1] of the received rows, by expert, source rank and token."""
        table = self._row_of(round_)
        expert, token = torch.nonzero(table >= 0, as_tuple=True)
        place = expert * table.shape[1] + table[expert, token]
        weights = torch.ones(place.shape[0], 1, dtype=torch.float32, device=place.device)
        return place, expert.int().unsqueeze(1), weights

    def _flat_rows(self, round_: _Round) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Place, ids [N, K] and weights [N, K] of the tokens that have an expert here, by source rank and token."""
        lists, table, num_local = round_.lists, self._row_of(round_), self._num_local
        assert lists is not None
        num_topk = lists.shape[2] // 2
        local = lists[..., :num_topk] - self._rank * num_local
        here = (lists[..., :num_topk] >= 0) & (local >= 0) & (local < num_local)
        rank, token = torch.nonzero(here.any(2), as_tuple=True)
        ids = torch.where(here, local, -1)[rank, token]
        weights = lists[..., num_topk:].contiguous().view(torch.float32)[rank, token]
        chosen = ids >= 0
        rows = ids.clamp(min=0).long()
        rows = rows * table.shape[1] + table[rows, (rank * self._max_tokens + token).unsqueeze(1)]
        first = chosen.int().argmax(1, keepdim=True)
        others = chosen.scatter(1, first, value=False)
        round_.zeros = rows[others]
        return rows.gather(1, first).squeeze(1), ids, torch.where(chosen, weights, 0.0)
