"""DeepEP V2, `ElasticBuffer`: a token once per rank, summed there by its experts' weights, then over the ranks.

Letters: T tokens on this rank, N received rows, K top-k, H hidden, R ranks.

`deterministic=True` sorts received rows by source rank and token. The combine sums the ranks' rows in float32 in the
order of each rank's last column among the token's ids; it applies no weights. `dispatch` waits on the host for the
counts of all ranks.
"""

import dataclasses
import math
from typing import Any

import torch

from ep_moe.group import EPGroup
from ep_moe.transport.deepep.exchange import Arrived, Outgoing, Sizes, without_fill
from ep_moe.transport.deepep.library import Library
from ep_moe.transport.deepep.normal import arrived
from ep_moe.transport.deepep.payload import PayloadFormat, padded, round_up

MOST_TOPK = 32  # one lane of a warp each
MOST_EXPERTS, MOST_LOCAL_EXPERTS = 2048, 256
SMS_WITHOUT_ESTIMATE = 24
WIDTH_MULTIPLE = 256  # the combine gives each lane of a warp 16 bytes


@dataclasses.dataclass(slots=True)
class _Round:
    format: PayloadFormat
    handle: Any
    received: Any
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    keep: Any = None
    combined: torch.Tensor | None = None
    event: Any = None


class Elastic:
    """See `Exchange`."""

    sum_order = "last-columns-rounded"
    casts = False

    def __init__(self, library: Library, group: EPGroup, sizes: Sizes) -> None:
        self._sizes, self._num_experts = sizes, sizes.num_local_experts * group.num_ranks
        for name, value, most in (
            ("experts of a rank", sizes.num_local_experts, MOST_LOCAL_EXPERTS),
            ("experts of all ranks", self._num_experts, MOST_EXPERTS),
        ):
            if value > most:
                raise ValueError(f"{name} ({value}) exceed {most}, the most of DeepEP's ElasticBuffer")
        self._width = round_up(sizes.hidden, WIDTH_MULTIPLE)
        timeout = max(math.ceil(sizes.timeout_secs), 1)
        self._buffer = library.buffer_class(
            group=group.process_group,
            num_max_tokens_per_rank=sizes.max_tokens,
            hidden=self._width,
            num_topk=min(sizes.max_topk, MOST_TOPK),
            deterministic=True,
            num_cpu_timeout_secs=timeout,
            num_gpu_timeout_secs=timeout,
            explicitly_destroy=True,
        )

    def send(self, outgoing: Outgoing) -> _Round:
        """See `Exchange.send`. Host wait for the counts of all ranks, bounded by the group's timeout."""
        with without_fill():
            received, ids, weights, handle, _ = self._buffer.dispatch(
                x=outgoing.format.pair(outgoing.x, self._width),
                topk_idx=outgoing.topk_ids,
                topk_weights=outgoing.topk_weights.contiguous(),
                num_experts=self._num_experts,
                num_max_tokens_per_rank=self._sizes.max_tokens,
                num_sms=self._num_sms(outgoing.topk_ids.shape[1]),
                do_cpu_sync=True,
            )
        return _Round(format=outgoing.format, handle=handle, received=received, topk_ids=ids, topk_weights=weights)

    def receive(self, round_: _Round) -> Arrived:
        """See `Exchange.receive`. Local."""
        num_pairs = sum(round_.handle.num_recv_tokens_per_expert_list)
        return arrived(round_.format, round_.received, round_.topk_ids, round_.topk_weights, num_pairs)

    def count(self, round_: _Round) -> int:
        """See `Exchange.count`. Local."""
        return round_.topk_ids.shape[0]

    def send_back(self, round_: _Round, rows: torch.Tensor) -> None:
        """See `Exchange.send_back`."""
        round_.keep, round_.received = padded(rows, self._width), None
        with without_fill():
            round_.combined, _, round_.event = self._buffer.combine(
                x=round_.keep, handle=round_.handle, async_with_compute_stream=True
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

    def _num_sms(self, num_topk: int) -> int:
        """SMs of a round, 0 for DeepEP's estimate, which divides by the ways to choose K of all experts."""
        return self._sizes.num_sms or (SMS_WITHOUT_ESTIMATE if num_topk > self._num_experts else 0)
