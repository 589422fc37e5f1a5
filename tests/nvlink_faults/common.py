"""Rounds that are easy to check, and ways to lose a rank.

All values are small integers and powers of two, so that float32 sums are exact in any order. Letters: T tokens on this
rank, H hidden, K top-k, E experts, R ranks.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from helpers import lost

from ep_moe.config import GroupConfig, Layout, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.group.joining import num_gpu_ranks
from ep_moe.launch import RankFailedError, launch
from ep_moe.placement import Placement
from ep_moe.quant import get_scheme
from ep_moe.routing import Routing

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETING else "cuda"
NUM_RANKS = 3 if INTERPRETING else min(num_gpu_ranks(), 4)  # with two ranks no third one could be blamed
CAN_RUN = NUM_RANKS >= 2
CONFIG = GroupConfig(timeout_secs=5.0 if INTERPRETING else 20.0, heartbeat_secs=0.25)  # a GPU's ranks compile first
NO_RANK_LOST = GroupConfig(timeout_secs=60.0, heartbeat_secs=0.25)  # for tests without a lost rank
SLACK_SECS = 5.0  # for a machine whose cores the ranks share
HIDDEN, NUM_TOKENS, MAX_TOKENS, NUM_TOPK, EXPERTS_PER_RANK = 16, 2, 4, 2, 2
LOST_ROUND = 1
PRELOADED = ("pytest", "nvlink.common", "nvlink.ready", "nvlink_faults.common")  # what ranks import
KIND: dict[str, Any] = {"layout": Layout.COMPACT, "scheme": get_scheme("none")}


def on_ranks(check: Callable[..., Any], *args: Any, num_ranks: int = NUM_RANKS, config: GroupConfig = CONFIG) -> Any:
    """Run `check(group, *args)` on ranks; returns what each returns, or the RankFailedError."""
    ready = {"grace_secs": 60.0, "preload": PRELOADED if INTERPRETING else []}
    try:
        return launch(_prepared, check, *args, num_ranks=num_ranks, config=config, device=DEVICE, **ready)
    except RankFailedError as error:
        return error


def _prepared(group: EPGroup, check: Callable[..., Any], *args: Any) -> Any:
    if INTERPRETING:
        from nvlink.common import hurried  # imports Triton, which not every machine has

        return hurried(group, check, *args)
    return check(group, *args)


def make_transport(group: EPGroup, **options: Any) -> Any:
    """A transport of float32 with one slot, unless `options` say otherwise; `nvshmem` if they choose its stores."""
    from ep_moe.transport.one_sided import NvlinkTransport, NvshmemTransport  # needs Triton

    placement = Placement.linear(EXPERTS_PER_RANK * group.num_ranks, group.num_ranks)
    sizes = {"hidden": HIDDEN, "max_tokens_per_rank": MAX_TOKENS, "max_topk": NUM_TOPK, "num_slots": 1}
    kind = NvshmemTransport if "nvshmem_stores" in options else NvlinkTransport
    return kind(group, placement, TransportConfig(**{**sizes, "dtype": torch.float32, **options}))


def inputs(rank: int, round_: int, num_ranks: int) -> tuple[torch.Tensor, Routing]:
    """Tokens of a rank; each goes to two ranks, and in three rounds to all experts."""
    num_experts = EXPERTS_PER_RANK * num_ranks
    token = torch.arange(NUM_TOKENS)[:, None]
    x = (torch.arange(HIDDEN) + 16 * token + 64 * rank + round_).float()
    first = (token + rank + 2 * round_) % num_experts
    ids = torch.cat([first, (first + EXPERTS_PER_RANK + 1) % num_experts], 1).int()
    return x, Routing(topk_ids=ids, topk_weights=torch.tensor([[1.0, 0.5]]).expand(NUM_TOKENS, -1).contiguous())


def expert(values: torch.Tensor, index: int) -> torch.Tensor:
    """The output of an expert, different for each."""
    return values * (index + 2) - 8 * index


def expected(rank: int, round_: int, active: tuple[bool, ...]) -> torch.Tensor:
    """The expected result of a round on a rank: the sum over the experts of active ranks."""
    x, routing = inputs(rank, round_, len(active))
    out = torch.zeros(NUM_TOKENS, HIDDEN)
    for token, ids in enumerate(routing.topk_ids.tolist()):
        for index, weight in zip(ids, routing.topk_weights[token].tolist(), strict=True):
            if active[index // EXPERTS_PER_RANK]:
                out[token] += weight * expert(x[token], index)
    return out


def expected_counts(rank: int, round_: int, active: tuple[bool, ...]) -> list[int]:
    """The number of tokens from active ranks for each expert of a rank."""
    ids = [i for s, there in enumerate(active) if there for i in inputs(s, round_, len(active))[1].topk_ids.flatten()]
    return [ids.count(index) for index in range(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK)]


def brought(transport: Any, round_: int, device: str = DEVICE) -> tuple[torch.Tensor, Routing]:
    """The `inputs` of this rank on a device."""
    x, routing = inputs(transport.rank, round_, transport.num_ranks)
    return x.to(device), Routing(topk_ids=routing.topk_ids.to(device), topk_weights=routing.topk_weights.to(device))


def begin(transport: Any, round_: int, *, device: str = DEVICE, **options: Any) -> Any:
    """The dispatch of a round."""
    return transport.dispatch(*brought(transport, round_, device), **KIND, **options)


def send(transport: Any, round_: int, **options: Any) -> None:
    """The sending half of a round's dispatch."""
    transport.dispatch_send(*brought(transport, round_), **KIND, **options)


def compute(transport: Any, dispatched: Any, unused: float = 1.0) -> torch.Tensor:
    """The experts' output for a batch; `unused` in rows without a token."""
    batch = dispatched.batch
    y = torch.full(batch.output_shape, unused, device=batch.x.device)
    ranges = zip(batch.expert_row_start.tolist(), batch.expert_num_tokens.tolist(), strict=True)
    for local, (start, count) in enumerate(ranges):
        y[start : start + count] = expert(batch.x[start : start + count], EXPERTS_PER_RANK * transport.rank + local)
    return y


def finish(transport: Any, dispatched: Any) -> tuple[torch.Tensor, list[int]]:
    """The experts and the combine: the result on the CPU, and the number of tokens of each expert."""
    y, counts = compute(transport, dispatched, float("nan")), dispatched.batch.expert_num_tokens.tolist()
    out = torch.ones(NUM_TOKENS, HIDDEN, device=y.device)  # NaN is what a lost round must write
    return transport.combine(y, dispatched, out=out).cpu(), counts


def run_round(transport: Any, round_: int) -> tuple[torch.Tensor, list[int]]:
    """A whole round."""
    return finish(transport, begin(transport, round_))


def check_round(transport: Any, round_: int) -> None:
    """Assert that a round among all active ranks gives the expected result."""
    active = transport.active_ranks
    out, counts = run_round(transport, round_)
    assert counts == expected_counts(transport.rank, round_, active), f"round {round_}: {counts}"
    assert torch.equal(out, expected(transport.rank, round_, active)), f"round {round_}: {out}"


@contextlib.contextmanager
def blindfolded(transport: Any) -> Iterator[None]:
    """The host does not read the kernels' reports, as when a CUDA graph is replayed."""
    poll, transport._faults.poll = transport._faults.poll, lambda **_: None
    try:
        yield
    finally:
        transport._faults.poll = poll


def be_lost(how: str, secs: float = 1000.0) -> None:
    """`lost.be_lost`, once this rank's kernels have ended."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    lost.be_lost(how, secs)
