"""DeepEP's exchanges of a row per token and rank: V1's normal kernels, and V2's `ElasticBuffer`.

A token is sent once to each rank, summed there by its experts' weights, then over the ranks. Rows arrive by source rank
and token, as `ep_moe.layout` wants them (V2 sorts them for `deterministic=True`). A combine sums the ranks' rows in
float32 and applies no weights: V1 in rank order, V2 in the order of each rank's last column among the token's ids.
`dispatch` waits on the host until the counts of all ranks have arrived.

Letters: T tokens on this rank, N received rows, K top-k, H hidden, R ranks.
"""

import abc
import dataclasses
import math
from typing import Any

import torch

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.layout import TokenRows
from ep_moe.transport.deepep.exchange import Arrived, Outgoing, without_fill
from ep_moe.transport.deepep.library import Library
from ep_moe.transport.deepep.payload import padded, pair, read_pair
from ep_moe.transport.payload import RowFormat, round_up

MOST_TOPK = 32  # one lane of a warp each
WIDTH_MULTIPLE = 256  # V2's combine and V1's between nodes give each lane of a warp 16 bytes

# V1
NODE_RANKS = 8  # of a node (NUM_MAX_NVL_PEERS); more ranks are whole nodes
SIZES_OF_A_NODE = (2, 4, 8)  # for which the intranode kernels are compiled (SWITCH_RANKS)
MOST_LOCAL_EXPERTS = 1024
MOST_ROW_BYTES = 16368  # half a row and a barrier of 8 bytes share 8192 bytes of shared memory

# V2
MOST_ELASTIC_EXPERTS, MOST_ELASTIC_LOCAL_EXPERTS = 2048, 256
SMS_WITHOUT_ESTIMATE = 24


@dataclasses.dataclass(slots=True)
class _Round:
    format: RowFormat
    handle: Any
    received: Any
    topk_ids: torch.Tensor  # [N, K] local
    topk_weights: torch.Tensor  # [N, K] float32
    num_pairs: int
    keep: Any = None
    combined: torch.Tensor | None = None
    event: Any = None


class PerRank(abc.ABC):
    """See `Exchange`. width: elements of a row, H or more."""

    most_topk = MOST_TOPK
    sum_order: str
    casts = False
    _asynchronous: str  # the argument with which `combine` returns an event

    def __init__(self, buffer: Any, config: TransportConfig, num_experts: int, width: int) -> None:
        self._buffer, self._config, self._num_experts, self._width = buffer, config, num_experts, width

    @abc.abstractmethod
    def send(self, outgoing: Outgoing) -> _Round:
        """See `Exchange.send`. Host wait for the counts of all ranks."""

    def receive(self, round_: _Round) -> Arrived:
        """See `Exchange.receive`. Local."""
        values, scale = read_pair(round_.format, round_.received)
        rows = TokenRows(
            x=values,
            scale=scale,
            local_topk_ids=round_.topk_ids.int(),
            topk_weights=torch.where(round_.topk_ids >= 0, round_.topk_weights, 0.0),  # V2 leaves others as they came
        )
        return Arrived(rows=rows, num_pairs=round_.num_pairs)

    def count(self, round_: _Round) -> int:
        """See `Exchange.count`. Local."""
        return round_.topk_ids.shape[0]

    def send_back(self, round_: _Round, rows: torch.Tensor) -> None:
        """See `Exchange.send_back`."""
        round_.keep, round_.received = padded(rows, self._width), None
        options = {self._asynchronous: True}
        with without_fill():
            round_.combined, _, round_.event = self._buffer.combine(x=round_.keep, handle=round_.handle, **options)

    def receive_back(self, round_: _Round) -> torch.Tensor:
        """See `Exchange.receive_back`. No host sync."""
        round_.event.current_stream_wait()
        round_.keep = None
        assert round_.combined is not None
        return round_.combined[:, : self._config.hidden]

    def destroy(self) -> None:
        """See `Exchange.destroy`."""
        self._buffer.destroy()


def check_normal(num_ranks: int, hidden: int, num_local: int) -> int:
    """The width of rows. Errors: ValueError for sizes that the normal kernels do not serve."""
    whole_nodes = num_ranks > NODE_RANKS and num_ranks % NODE_RANKS == 0
    if num_ranks not in SIZES_OF_A_NODE and not whole_nodes:
        raise ValueError(f"num_ranks ({num_ranks}): DeepEP's normal kernels serve 2, 4, 8 and multiples of 8 ranks")
    if num_local > MOST_LOCAL_EXPERTS:
        raise ValueError(f"experts of a rank ({num_local}) exceed {MOST_LOCAL_EXPERTS}")
    width = round_up(hidden, WIDTH_MULTIPLE) if whole_nodes else hidden
    if 2 * width > MOST_ROW_BYTES:
        raise ValueError(f"hidden ({hidden}) exceeds {MOST_ROW_BYTES // 2} in DeepEP's normal kernels")
    return width


class Normal(PerRank):
    """V1's normal kernels. Their host wait for counts is bounded by DeepEP alone (100 s)."""

    sum_order = "ranks-rounded"
    _asynchronous = "async_finish"

    def __init__(self, library: Library, group: EPGroup, config: TransportConfig, num_local: int) -> None:
        kind, num_ranks = library.buffer_class, group.num_ranks
        width = check_normal(num_ranks, config.hidden, num_local)
        if config.num_sms:
            kind.set_num_sms(config.num_sms - config.num_sms % 2)  # of all buffers of the process
        queues = [kind.get_dispatch_config(num_ranks), kind.get_combine_config(num_ranks)]
        buffer = kind(
            group=group.process_group,
            num_nvl_bytes=max(queue.get_nvl_buffer_size_hint(2 * width, num_ranks) for queue in queues),
            num_rdma_bytes=0
            if num_ranks <= NODE_RANKS
            else max(queue.get_rdma_buffer_size_hint(2 * width, num_ranks) for queue in queues),
            explicitly_destroy=True,
        )
        super().__init__(buffer, config, num_local * num_ranks, width)

    def send(self, outgoing: Outgoing) -> _Round:
        """See `Exchange.send`."""
        with without_fill():
            per_rank, per_node, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(
                topk_idx=outgoing.topk_ids, num_experts=self._num_experts
            )
            received, ids, weights, counts, handle, _ = self._buffer.dispatch(
                x=pair(outgoing.format, outgoing.x, self._width),
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=outgoing.topk_ids,
                topk_weights=outgoing.topk_weights.contiguous(),
            )
        return _Round(outgoing.format, handle, received, ids, weights, sum(counts))


class Elastic(PerRank):
    """V2's `ElasticBuffer`. Its host wait for counts is bounded by the group's timeout."""

    sum_order = "last-columns-rounded"
    _asynchronous = "async_with_compute_stream"

    def __init__(self, library: Library, group: EPGroup, config: TransportConfig, num_local: int) -> None:
        for name, value, most in (
            ("experts of a rank", num_local, MOST_ELASTIC_LOCAL_EXPERTS),
            ("experts of all ranks", num_local * group.num_ranks, MOST_ELASTIC_EXPERTS),
        ):
            if value > most:
                raise ValueError(f"{name} ({value}) exceed {most}, the most of DeepEP's ElasticBuffer")
        width, timeout = round_up(config.hidden, WIDTH_MULTIPLE), max(math.ceil(group.config.timeout_secs), 1)
        buffer = library.buffer_class(
            group=group.process_group,
            num_max_tokens_per_rank=config.max_tokens_per_rank,
            hidden=width,
            num_topk=min(config.max_topk, MOST_TOPK),
            deterministic=True,
            num_cpu_timeout_secs=timeout,
            num_gpu_timeout_secs=timeout,
            explicitly_destroy=True,
        )
        super().__init__(buffer, config, num_local * group.num_ranks, width)

    def send(self, outgoing: Outgoing) -> _Round:
        """See `Exchange.send`."""
        # DeepEP's estimate of SMs divides by the ways to choose K of all experts
        estimated = outgoing.topk_ids.shape[1] <= self._num_experts
        with without_fill():
            received, ids, weights, handle, _ = self._buffer.dispatch(
                x=pair(outgoing.format, outgoing.x, self._width),
                topk_idx=outgoing.topk_ids,
                topk_weights=outgoing.topk_weights.contiguous(),
                num_experts=self._num_experts,
                num_max_tokens_per_rank=self._config.max_tokens_per_rank,
                num_sms=self._config.num_sms or (0 if estimated else SMS_WITHOUT_ESTIMATE),
                do_cpu_sync=True,
            )
        num_pairs = sum(handle.num_recv_tokens_per_expert_list)
        return _Round(outgoing.format, handle, received, ids, weights, num_pairs)
