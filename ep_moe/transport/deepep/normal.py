"""DeepEP V1's normal kernels: a token once per rank, summed there by its experts' weights, then over the ranks.

Letters: T tokens on this rank, N received rows, K top-k, H hidden, R ranks.

Inside a node, rows arrive by source rank and token, as `ep_moe.layout` wants them, and the combine sums the ranks' rows
in rank order in float32. `dispatch` waits on the host until the counts of all ranks have arrived.
"""

import dataclasses
from typing import Any

import torch

from ep_moe.group import EPGroup
from ep_moe.layout import TokenRows
from ep_moe.transport.deepep.exchange import Arrived, Outgoing, Sizes, without_fill
from ep_moe.transport.deepep.library import Library
from ep_moe.transport.deepep.payload import PayloadFormat, padded, round_up

NODE_RANKS = 8  # of a node (NUM_MAX_NVL_PEERS); more ranks are whole nodes
SIZES_OF_A_NODE = (2, 4, 8)  # for which the intranode kernels are compiled (SWITCH_RANKS)
MOST_TOPK = 32  # one lane of a warp each
MOST_LOCAL_EXPERTS = 1024
MOST_ROW_BYTES = 16368  # half a row and a barrier of 8 bytes share 8192 bytes of shared memory


def check_normal(num_ranks: int, sizes: Sizes) -> int:
    """The width of rows. Errors: ValueError for sizes that the normal kernels do not serve."""
    whole_nodes = num_ranks > NODE_RANKS and num_ranks % NODE_RANKS == 0
    if num_ranks not in SIZES_OF_A_NODE and not whole_nodes:
        raise ValueError(f"num_ranks ({num_ranks}): DeepEP's normal kernels serve 2, 4, 8 and multiples of 8 ranks")
    if sizes.num_local_experts > MOST_LOCAL_EXPERTS:
        raise ValueError(f"experts of a rank ({sizes.num_local_experts}) exceed {MOST_LOCAL_EXPERTS}")
    width = round_up(sizes.hidden, 256) if whole_nodes else sizes.hidden
    if 2 * width > MOST_ROW_BYTES:
        raise ValueError(f"hidden ({sizes.hidden}) exceeds {MOST_ROW_BYTES // 2} in DeepEP's normal kernels")
    return width


@dataclasses.dataclass(slots=True)
class _Round:
    format: PayloadFormat
    handle: Any
    received: Any
    topk_ids: torch.Tensor  # [N, K] local
    topk_weights: torch.Tensor  # [N, K] float32
    num_pairs: int
    keep: Any = None
    combined: torch.Tensor | None = None
    event: Any = None


class Normal:
    """See `Exchange`."""

    sum_order = "ranks-rounded"
    casts = False

    def __init__(self, library: Library, group: EPGroup, sizes: Sizes) -> None:
        self._width = check_normal(group.num_ranks, sizes)
        self._sizes, kind = sizes, library.buffer_class
        self._num_experts = sizes.num_local_experts * group.num_ranks
        if sizes.num_sms:
            kind.set_num_sms(sizes.num_sms - sizes.num_sms % 2)  # of all buffers of the process
        row_bytes, num_ranks = 2 * self._width, group.num_ranks
        configs = [kind.get_dispatch_config(num_ranks), kind.get_combine_config(num_ranks)]
        self._buffer = kind(
            group=group.process_group,
            num_nvl_bytes=max(config.get_nvl_buffer_size_hint(row_bytes, num_ranks) for config in configs),
            num_rdma_bytes=0
            if num_ranks <= NODE_RANKS
            else max(config.get_rdma_buffer_size_hint(row_bytes, num_ranks) for config in configs),
            explicitly_destroy=True,
        )

    def send(self, outgoing: Outgoing) -> _Round:
        """See `Exchange.send`. Host wait for the counts of all ranks, bounded by DeepEP alone (100 s)."""
        ids, weights = outgoing.topk_ids, outgoing.topk_weights.contiguous()
        per_rank, per_node, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(
            topk_idx=ids, num_experts=self._num_experts
        )
        with without_fill():
            received, local_ids, local_weights, counts, handle, _ = self._buffer.dispatch(
                x=outgoing.format.pair(outgoing.x, self._width),
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids,
                topk_weights=weights,
            )
        return _Round(
            format=outgoing.format,
            handle=handle,
            received=received,
            topk_ids=local_ids,
            topk_weights=local_weights,
            num_pairs=sum(counts),
        )

    def receive(self, round_: _Round) -> Arrived:
        """See `Exchange.receive`. Local."""
        return arrived(round_.format, round_.received, round_.topk_ids, round_.topk_weights, round_.num_pairs)

    def count(self, round_: _Round) -> int:
        """See `Exchange.count`. Local."""
        return round_.topk_ids.shape[0]

    def send_back(self, round_: _Round, rows: torch.Tensor) -> None:
        """See `Exchange.send_back`."""
        round_.keep, round_.received = padded(rows, self._width), None
        with without_fill():
            round_.combined, _, round_.event = self._buffer.combine(
                x=round_.keep, handle=round_.handle, async_finish=True
            )

    def receive_back(self, round_: _Round) -> torch.Tensor:
        """See `Exchange.receive_back`. No host sync."""
        round_.event.current_stream_wait()
        round_.keep = None
        assert round_.combined is not None
        return round_.combined[:, : self._sizes.hidden]

    def destroy(self) -> None:
        """See `Exchange.destroy`."""
        self._buffer.destroy()


def arrived(
    format_: PayloadFormat, received: Any, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_pairs: int
) -> Arrived:
    """Rows with the ids that are local, and weights that are 0 elsewhere: V2 leaves those as they came. Local."""
    values, scale = format_.read_pair(received)
    rows = TokenRows(
        x=values,
        scale=scale,
        local_topk_ids=topk_ids.int(),
        topk_weights=torch.where(topk_ids >= 0, topk_weights, 0.0),
    )
    return Arrived(rows=rows, num_pairs=num_pairs)
