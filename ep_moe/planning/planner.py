"""Compares ways to run a model on a number of GPUs: EP size, redundant experts, transport and layout.

Letters: T tokens on each rank, K top-k, E logical experts, P physical experts, R ranks that share the experts.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from ep_moe.config import Layout
from ep_moe.fields import Field, check_fields
from ep_moe.planning.hardware import Hardware
from ep_moe.planning.times import LayerShape, LayerTimes, collective_us, experts_us, nvlink_us, rows_of_experts
from ep_moe.planning.traffic import Traffic, recorded, traffic, uniform

# layers, and parameters outside of routed experts, of models whose layers are presets of the benchmarks
MODELS: dict[str, dict[str, float]] = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
REDUNDANT_SHARE = 8  # one expert in so many gets a copy, as DeepSeek-V3 is deployed: 32 of 256
SLOTS = 2  # rounds that a transport keeps open
MODEL_BYTES = 2  # of a parameter outside of the experts, and of a value in a buffer
GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A model and its load.

    Args:
        shape: of its MoE layers, which are all alike. moe_layers: how many. other_params: outside of routed experts.
        gpus: in all; EP sizes divide them. tokens: T of a pass, also the size of buffers.
        target_ms: the most for all MoE layers of a pass; 0 is no target.
        measured: [layers, any] loads of experts, instead of uniform routing.
    """

    shape: LayerShape
    moe_layers: Annotated[int, Field(at_least=1)]
    other_params: Annotated[float, Field(at_least=0)]
    gpus: Annotated[int, Field(at_least=1)]
    tokens: Annotated[int, Field(at_least=1)]
    target_ms: Annotated[float, Field(at_least=0)] = 0.0
    measured: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def loads(self) -> tuple[float, ...]:
        """[E], the part of all (token, expert) pairs that each expert gets."""
        count = self.shape.num_experts
        return recorded(self.measured, count) if self.measured else uniform(count)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to run a job, predicted.

    Args:
        ep_size: R. redundant: P - E. times: of one layer, on the slowest rank.
        pass_ms: of all MoE layers of a pass. tokens_per_sec: of a GPU, if MoE layers were all.
        weights_gib: of one rank, with its copy of what is not an expert. buffers_gib: of its exchange and batches.
        imbalance: rows of the busiest rank by the mean. fits: memory and target.
    """

    ep_size: int
    redundant: int
    transport: str
    layout: str
    times: LayerTimes
    pass_ms: float
    tokens_per_sec: float
    weights_gib: float
    buffers_gib: float
    imbalance: float
    fits_memory: bool
    fits_target: bool

    @property
    def fits(self) -> bool:
        """Whether memory and time are within their limits."""
        return self.fits_memory and self.fits_target

    def row(self) -> dict[str, Any]:
        """The candidate as one flat JSON object."""
        row = dataclasses.asdict(self)
        times = row.pop("times") | {"layer_us": self.times.whole_us}
        return row | times | {"fits": self.fits}


def plan(hw: Hardware, job: Job) -> list[Candidate]:
    """Every way to run a job, those that fit first, then by time, then by memory. Local."""
    found = [_predict(hw, job, *choice) for choice in _choices(hw, job)]
    return sorted(found, key=lambda c: (not c.fits, not c.fits_memory, c.pass_ms, c.weights_gib + c.buffers_gib))


def best_of_size(hw: Hardware, job: Job, ep_size: int) -> Candidate:
    """The fastest candidate for an EP size, whether or not it fits. Local."""
    found = [_predict(hw, job, *choice) for choice in _of_size(hw, job, ep_size)]
    return min(found, key=lambda c: (c.pass_ms, c.weights_gib + c.buffers_gib))


def _choices(hw: Hardware, job: Job) -> Iterator[tuple[int, int, str, str]]:
    for ranks in range(1, job.gpus + 1):
        if job.gpus % ranks == 0 and (ranks <= hw.gpus_per_node or ranks % hw.gpus_per_node == 0):
            yield from _of_size(hw, job, ranks)


def _of_size(hw: Hardware, job: Job, ranks: int) -> Iterator[tuple[int, int, str, str]]:
    """EP size, redundant experts, transport, layout: without copies or the fewest that are possible, and with some."""
    num_experts = job.shape.num_experts
    least = -num_experts % ranks
    more = least + ranks * math.ceil(max(num_experts // REDUNDANT_SHARE - least, 0) / ranks)
    for redundant in sorted({least, more}) if ranks > 1 else (0,):
        for transport in _transports(hw, ranks):
            for layout in Layout:
                yield ranks, redundant, transport, layout.value


def _transports(hw: Hardware, ranks: int) -> list[str]:
    """The names of transports that can serve so many ranks."""
    if ranks == 1:
        return ["local"]
    if ranks <= hw.gpus_per_node:
        return ["peer", "collective"]
    return ["collective", "hierarchical"]


def _predict(hw: Hardware, job: Job, ranks: int, redundant: int, transport: str, layout: str) -> Candidate:
    shape, load = job.shape, traffic(job.loads, job.shape.num_topk, ranks, redundant, hw.gpus_per_node)
    if transport == "local":
        dispatch, combine = _local_us(hw, shape, job.tokens, load)
    elif transport == "peer":
        dispatch, combine = nvlink_us(hw, shape, job.tokens, load, packs=layout != "flat")
    else:
        dispatch, combine = collective_us(hw, shape, job.tokens, load, ranks, per_node=transport == "hierarchical")
    experts = experts_us(hw, shape, *rows_of_experts(shape, job.tokens, ranks, load))
    times = LayerTimes(dispatch_us=dispatch, experts_us=experts, combine_us=combine, rest_us=hw.layer_us)
    pass_ms = times.whole_us * job.moe_layers / 1e3
    local_experts = (shape.num_experts + redundant) // ranks
    weights = local_experts * job.moe_layers * shape.expert_bytes + job.other_params * MODEL_BYTES
    buffers = _buffer_bytes(shape, job.tokens, ranks, local_experts, transport, layout)
    return Candidate(
        ep_size=ranks,
        redundant=redundant,
        transport=transport,
        layout=layout,
        times=times,
        pass_ms=pass_ms,
        tokens_per_sec=job.tokens / pass_ms * 1e3,
        weights_gib=weights / GIB,
        buffers_gib=buffers / GIB,
        imbalance=load.imbalance,
        fits_memory=(weights + buffers) / GIB <= hw.gpu_memory_gib * hw.memory_share,
        fits_target=not job.target_ms or pass_ms <= job.target_ms,
    )


def _local_us(hw: Hardware, shape: LayerShape, tokens: int, load: Traffic) -> tuple[float, float]:
    """One rank: rows are packed and summed, nothing travels and no rank waits."""
    times = nvlink_us(hw, shape, tokens, load)
    return times[0] - hw.dispatch_us, times[1] - hw.combine_us


def _buffer_bytes(shape: LayerShape, tokens: int, ranks: int, local_experts: int, transport: str, layout: str) -> float:
    """Peer-visible memory, O(R * T * H) for each slot of a one-sided transport, and one batch with its results."""
    received = ranks * tokens
    peer = SLOTS * received * (shape.payload_bytes + shape.return_bytes) if transport == "peer" else 0
    rows = {
        "flat": received,
        "compact": received * min(shape.num_topk, local_experts),
        "batched": received * local_experts,
    }[layout]
    inner = received * min(shape.num_topk, local_experts) * shape.intermediate * MODEL_BYTES
    return peer + rows * (shape.payload_bytes + shape.return_bytes) + inner
