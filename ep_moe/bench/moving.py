"""`ep-moe bench moving`: steps of decode-like passes while a `Rebalancer` moves experts, beside the same steps without.

Letters: A MoE layers, T tokens per rank, H hidden, K top-k, E logical experts, R ranks.
"""

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ep_moe.balance import plan_placement
from ep_moe.balance.rebalancer import Rebalancer
from ep_moe.balance.reports import status_entries, status_of_ranks
from ep_moe.bench import harness
from ep_moe.bench.configs import MovingBenchConfig
from ep_moe.bench.harness import Figures, Work, field_values
from ep_moe.bench.loads import draw_ids, named_load, token_shares
from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.config import EngineConfig, TransportConfig
from ep_moe.engines.common.model import counting_table
from ep_moe.experts import experts_name
from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement
from ep_moe.profiling.timing import capture
from ep_moe.quant import get_scheme
from ep_moe.report.records import OURS
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from ep_moe.testing.random_experts import RandomExperts
from ep_moe.transport import TRANSPORTS, create_transport

STILL = "without_moving"
LOADS = 8  # that follow each other; each is as uneven, on other experts
STEPS_PER_SYNC = 16  # as in decoding: so far the host is ahead at most
WARMUP = 32


def moving_rank_main(group: EPGroup, engine: EngineConfig, config: MovingBenchConfig) -> dict[str, Any]:
    """One rank's part. Returns the report, the same on every rank: `ok`, and one row.

    Errors: ValueError for one rank, which has nothing to move. Collective.
    """
    if group.num_ranks == 1:
        raise ValueError("bench moving needs at least 2 ranks")
    prepare = _MovingBench(group, engine, config).prepare
    return harness.measure_all("moving", group, [None], lambda _, stack: prepare(stack))


class _MovingBench:
    """The layers of this rank, on one transport, and loads that change."""

    def __init__(self, group: EPGroup, engine: EngineConfig, config: MovingBenchConfig) -> None:
        self._group, self._config, self._engine = group, config, engine
        preset, self._scheme = LAYER_PRESETS[config.preset], get_scheme(engine.scheme)
        assert preset.sizes.routing is not None
        self._num_topk = preset.sizes.routing.num_topk
        self._moe = preset.moe(engine, routing=None)
        dtype, device = engine.torch_dtype, group.device
        self._random = [
            RandomExperts(self._moe, dtype, device, bias=preset.bias, seed=config.seed + index)
            for index in range(config.layers)
        ]
        generator = torch.Generator(device).manual_seed(config.seed * 1000 + group.rank + 1)
        options: dict[str, Any] = {"generator": generator, "device": device}
        linear = Placement.linear(self._moe.num_experts, group.num_ranks)
        self._x = torch.randn(config.tokens, self._moe.hidden, **options).to(dtype)
        self._ids = torch.stack(
            [
                draw_ids(token_shares(named_load("zipf", linear, seed), self._num_topk), config.tokens, generator)
                for seed in range(LOADS)
            ]
        )
        weights = torch.rand(config.tokens, self._num_topk, **options) + 0.1
        self._weights = weights / weights.sum(1, keepdim=True)
        self._topk_ids = self._ids[0].clone()  # of the pass that runs
        self._out = torch.zeros(config.layers, *self._x.shape, dtype=dtype, device=device)
        self._layers: list[ExpertParallelMoE] = []
        self._replay: Callable[[], object] = self._pass
        self._figures: dict[str, dict[str, float]] = {}

    def prepare(self, stack: contextlib.ExitStack) -> Work:
        """The layers, in a loop with and without a rebalancer. Collective."""
        group, config, moe, engine = self._group, self._config, self._moe, self._engine
        even = [[1.0] * moe.num_experts]
        copies = min(config.redundant_experts, moe.num_experts * (group.num_ranks - 1))
        placement = Placement.linear(moe.num_experts, group.num_ranks)
        if copies:
            [placement] = plan_placement(even, moe.num_experts + copies, group.num_ranks).placements
        sizes = TransportConfig(hidden=moe.hidden, max_tokens_per_rank=config.tokens, dtype=engine.torch_dtype)
        transport = create_transport(engine.transport, group, placement, sizes)
        stack.callback(transport.destroy)
        for random in self._random:
            weights = random.local(placement.local_experts(group.rank), self._scheme)
            table = counting_table(placement, group)
            self._layers.append(ExpertParallelMoE(moe, weights, transport, placement=table, experts=engine.experts))
        group.wait_for_all("weights")  # ranks differ in time to make them, and the next collective has a timeout
        graph = group.device.type == "cuda" and not harness.waits_on_host(transport, group.device)
        limit = ROW_ERROR_LIMITS["fp8" if self._scheme.weight.quantized else engine.dtype]
        return Work(
            what=f"{config.preset}, {engine.scheme}, {config.layers} layers, a rebalance every {config.every} steps",
            shapes={
                "preset": config.preset,
                "layers": config.layers,
                "tokens_per_rank": config.tokens,
                **field_values(moe, "hidden", "intermediate", "num_experts"),
                "num_topk": self._num_topk,
                "redundant_experts": copies,
            },
            setup={
                **field_values(engine, "dtype", "scheme"),
                "transport": harness.implementation_name(transport, TRANSPORTS),
                "experts": experts_name(self._layers[0].experts),
                **field_values(engine, "layout"),
                "nodes": harness.num_nodes(group),
                "graph": graph,
                **field_values(config, "every", "steps", "seed"),
            },
            check=functools.partial(self._run_both, graph, limit),
            time=lambda name: self._figures[name],
            whole="step_us",
            limit=limit,
        )

    def _pass(self) -> torch.Tensor:
        for layer, out in zip(self._layers, self._out, strict=True):
            out.copy_(layer.forward_routed(self._x, self._topk_ids, self._weights))
        return self._out

    def _run_both(self, graph: bool, limit: float) -> tuple[Figures, list[str]]:
        """Both loops, and the errors of a pass behind each. Collective."""
        group = self._group
        self._pass()
        if graph:
            self._replay = capture(self._pass, group.device).replay
        errors = {}
        for _ in range(WARMUP):
            self._replay()
        self._figures[STILL] = self._spread(self._loop(None)[0], "")
        errors[STILL] = {"worst_row_error": self._error()}
        self._figures[OURS] = self._move()
        errors[OURS] = {"worst_row_error": self._error()}
        errors = harness.largest_of_ranks(group, {name: errors[name] for name in (OURS, STILL)})
        return errors, harness.broken_limits(errors, dict.fromkeys(errors, {"worst_row_error": limit}))

    def _move(self) -> dict[str, float]:
        """Figures of the loop with a rebalancer. Collective."""
        group, config = self._group, self._config
        before = _device_bytes(group.device)
        rebalancer = Rebalancer(self._layers, group, every=config.every, min_gain=0.0)
        try:
            steps, active = self._loop(rebalancer)
            rebalancer.finish()
            status = rebalancer.status
            peak = _device_bytes(group.device, peak=True) - before
        finally:
            rebalancer.destroy()
        ranks = group.all_gather_object({"peak": peak, **status_entries(status)})
        found = status_of_ranks(ranks)
        if found["last_error"]:
            raise RuntimeError(f"a rebalance failed: {found['last_error']}")
        figures = self._spread(steps, "") | {
            "rebalances_count": found["rebalances"],
            "moved_experts_count": found["moved_experts"],
            "moved_bytes": found["moved_bytes"],
            "last_rebalance_ms": found["seconds"] * 1e3,
            "allowed_bytes": rebalancer.max_bytes,
        }
        moving, others = ([us for us, on in zip(steps, active, strict=True) if on is state] for state in (True, False))
        figures |= self._spread(moving, "moving_") if moving else {}
        figures |= self._spread(others, "idle_") if others else {}
        if group.device.type == "cuda":
            figures["peak_bytes"] = max(rank["peak"] for rank in ranks)
        return figures

    @staticmethod
    def _spread(steps: list[float], prefix: str) -> dict[str, float]:
        return {f"{prefix}step_us": statistics.median(steps), f"{prefix}step_max_us": max(steps)}

    def _loop(self, rebalancer: Rebalancer | None) -> tuple[list[float], list[bool]]:
        """Microseconds of each step on the slowest rank, and whether a rebalance was under way. Collective.

        A step ends when the device has computed its passes; the host is ahead, as in decoding.
        """
        group, config = self._group, self._config
        on_cuda = group.device.type == "cuda"
        times, active, spans = list[float](), list[bool](), list[torch.cuda.Event]()
        group.barrier()
        for step in range(config.steps):
            if step % STEPS_PER_SYNC == 0:
                times += _between(spans)
                spans = [_recorded()] if on_cuda else []
            start = time.perf_counter()
            if step % config.every == 0:
                self._topk_ids.copy_(self._ids[step // config.every % LOADS])
            if rebalancer is not None:
                rebalancer.step()
            active.append(rebalancer is not None and rebalancer.is_active)
            self._replay()
            if on_cuda:
                spans.append(_recorded())
            else:
                times.append((time.perf_counter() - start) * 1e6)
        times += _between(spans)
        group.wait_for_all("steps")
        return [max(ranks) for ranks in zip(*group.all_gather_object(times), strict=True)], active

    def _error(self) -> float:
        """The worst row of a pass over all layers, against float32 experts. Collective, host sync."""
        self._replay()
        rows = torch.linspace(0, len(self._x) - 1, min(self._config.sample_rows, len(self._x)), device=self._x.device)
        sample, worst = rows.long(), 0.0
        for random, out in zip(self._random, self._out, strict=True):
            chosen = self._topk_ids[sample], self._weights[sample]
            expected = random.expected_output(self._x[sample], *chosen, self._scheme)
            worst = harness.largest((worst, worst_row_error(out[sample], expected)))
        self._group.wait_for_all("check")  # ranks differ in time to compute what is expected
        return worst


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(events: list[torch.cuda.Event]) -> list[float]:
    """Microseconds from each event to the next. Host sync."""
    if events:
        events[-1].synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]


def _device_bytes(device: torch.device, *, peak: bool = False) -> int:
    """Memory in use on the device: torch's tensors, or the most there were since the last call without `peak`, and all
    that torch has not allocated, such as symmetric memory. 0 on a CPU. Host sync."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if peak:
        return others + torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return others + torch.cuda.memory_allocated(device)
