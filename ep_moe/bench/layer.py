"""`ep-moe bench layer`: one expert-parallel MoE layer, checked and timed beside all-gather and reduce-scatter.

Letters: T tokens per rank, H hidden, K top-k, E logical experts, R ranks.
"""

import functools
from typing import Any

import torch

from ep_moe.bench import harness
from ep_moe.bench.configs import LayerBenchConfig
from ep_moe.bench.gathered import GatheredMoE
from ep_moe.bench.harness import Contender, Row, field_values
from ep_moe.bench.oracle import RandomExperts, expected_output
from ep_moe.bench.timing import Captured, PhaseTimes, slowest, time_calls, time_phases
from ep_moe.config import EngineConfig, RoutingMethod, TransportConfig
from ep_moe.experts import EXPERTS
from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import create_placement
from ep_moe.quant import get_scheme
from ep_moe.report.records import GATHERED, OURS, PHASES
from ep_moe.routing import BIASED_METHODS, route
from ep_moe.testing import ROW_ERROR_LIMITS
from ep_moe.transport import TRANSPORTS, Transport, create_transport

SKEW = 0.5  # standard deviation of an expert's popularity, added to logits of standard deviation 1


def layer_rank_main(group: EPGroup, engine: EngineConfig, config: LayerBenchConfig) -> dict[str, Any]:
    """One rank's part. Returns the report, the same on every rank: `ok`, and a row for each number of tokens.

    Stops at the first wrong result, which is not timed.
    Errors: ValueError if graphs are to be timed with a transport that cannot be captured. Collective.
    """
    return harness.measure_all("layer", group, config.tokens, _LayerBench(group, engine, config).measure)


class _LayerBench:
    """The weights of one layer on this rank, measured for one number of tokens after another."""

    def __init__(self, group: EPGroup, engine: EngineConfig, config: LayerBenchConfig) -> None:
        self._group, self._engine, self._config = group, engine, config
        self._moe, self._scheme = config.moe(engine), get_scheme(engine.scheme)
        assert self._moe.routing is not None
        self._routing = self._moe.routing
        self._placement = create_placement(engine.placement, self._moe.num_experts, group.num_ranks)
        if config.graph:
            self._check_capturable()
        harness.tell(group, f"bench layer: {config.preset}, {self._moe.num_experts} experts on {group.num_ranks} ranks")
        bias = config.sizes.bias
        self._experts = RandomExperts(self._moe, engine.torch_dtype, group.device, bias=bias, seed=config.seed)
        self._weights = self._experts.local(self._placement.local_experts(group.rank), self._scheme)
        biased = self._routing.method in BIASED_METHODS
        self._routing_bias = 0.01 * self._normal(self._moe.num_experts, salt=1) if biased else None
        self._limit = ROW_ERROR_LIMITS["fp8" if self._scheme.weight.quantized else engine.dtype]
        self._nodes = harness.num_nodes(group)
        group.wait_for_all("weights")  # ranks differ in time to make weights, and the next collective has a timeout

    def _make_transport(self, num_tokens: int) -> Transport:
        sizes = TransportConfig(hidden=self._moe.hidden, max_tokens_per_rank=num_tokens, dtype=self._engine.torch_dtype)
        return create_transport(self._engine.transport, self._group, self._placement, sizes)

    def _check_capturable(self) -> None:
        """Raise before any work if a round waits on the host; makes a transport to see the choice of "auto"."""
        transport = self._make_transport(1)
        transport.destroy()
        if harness.waits_on_host(transport, self._group.device):
            name = harness.implementation_name(transport, TRANSPORTS)
            raise ValueError(
                f"graph: transport {name!r} waits on the host in each round, which no CUDA graph can capture"
            )

    def _normal(self, *shape: int, salt: int, rank: int = -1) -> torch.Tensor:
        """Normally distributed float32 values of a rank, or the same on all ranks for rank -1."""
        seed = (self._config.seed * 1000 + salt) * 1000 + rank + 1
        generator = torch.Generator(self._group.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self._group.device)

    def measure(self, num_tokens: int) -> Row:
        """Check, then time, the layer and the baseline for T tokens per rank; returns the row. Collective."""
        group, moe = self._group, self._moe
        x = self._normal(num_tokens, moe.hidden, salt=2, rank=group.rank).to(self._engine.torch_dtype)
        logits = self._normal(num_tokens, moe.num_experts, salt=3, rank=group.rank)
        if self._config.routing == "skewed":
            logits += SKEW * self._normal(moe.num_experts, salt=4)
        transport = self._make_transport(num_tokens)
        try:
            layer = ExpertParallelMoE(
                moe, self._weights, transport, experts=self._engine.experts, routing_bias=self._routing_bias
            )
            return self._row(layer, GatheredMoE(layer, group), x, logits)
        finally:
            transport.destroy()

    def _row(self, layer: ExpertParallelMoE, gathered: GatheredMoE, x: torch.Tensor, logits: torch.Tensor) -> Row:
        group, num_tokens = self._group, x.shape[0]
        timed: dict[str, ExpertParallelMoE | GatheredMoE] = {OURS: layer, GATHERED: gathered}
        harness.tell(group, f"{num_tokens} tokens of each rank: check")
        checked = harness.check(group, self._contenders(timed, x, logits), graph=self._config.graph)
        ours, theirs = checked.errors[OURS] | self._load(logits), checked.errors[GATHERED]
        row = harness.make_row(
            checked.broken,
            shapes={
                "preset": self._config.preset,
                "tokens_per_rank": num_tokens,
                **field_values(self._config.sizes, "hidden", "intermediate", "num_experts"),
                "num_topk": self._routing.num_topk,
            },
            setup=self._setup(layer),
            figures=ours,
            baselines={GATHERED: theirs},
            limit=self._limit,
        )
        if not row["ok"]:
            return row
        harness.tell(group, f"{num_tokens} tokens of each rank: time")
        for name, figures in {OURS: ours, GATHERED: theirs}.items():
            figures |= self._time(timed[name], checked.graphs.get(name), x, logits)
            figures["tokens_per_sec"] = group.num_ranks * num_tokens / figures["call_us"] * 1e6
        theirs["speedup_ratio"] = theirs["call_us"] / ours["call_us"]
        if self._config.graph:
            theirs["graph_speedup_ratio"] = theirs["graph_call_us"] / ours["graph_call_us"]
        return row

    def _contenders(
        self, layers: dict[str, ExpertParallelMoE | GatheredMoE], x: torch.Tensor, logits: torch.Tensor
    ) -> dict[str, Contender]:
        """The layers, to be checked on a sample of this rank's tokens."""
        count = min(self._config.sample_rows, x.shape[0])
        sample = torch.linspace(0, x.shape[0] - 1, count, device=x.device).long()

        @functools.cache
        def expected() -> torch.Tensor:
            routing = route(logits[sample], self._routing, routing_bias=self._routing_bias)
            return expected_output(
                x[sample],
                routing.topk_ids,
                routing.topk_weights,
                self._experts.expert,
                activation=self._moe.activation,
                scheme=self._scheme,
            )

        return {
            name: Contender(
                call=functools.partial(layer, x, logits), sample=sample, expected=expected, limit=self._limit
            )
            for name, layer in layers.items()
        }

    def _time(
        self, layer: ExpertParallelMoE | GatheredMoE, graph: Captured | None, x: torch.Tensor, logits: torch.Tensor
    ) -> dict[str, float]:
        """Microseconds of the whole call, then of its phases in separate calls, then of its graph. Collective."""
        group, repeats = self._group, self._config.repeats
        run = functools.partial(layer, x, logits)
        with group.guard("time"):
            samples = {"call": time_calls(run, group, warmup=self._config.warmup, repeats=repeats)}
        unwatched = layer.phases

        def watched(times: PhaseTimes) -> None:
            layer.phases = times
            run()

        with group.guard("time phases"):
            phases = time_phases(watched, group, repeats=repeats)
        layer.phases = unwatched
        timings = slowest(group, samples | {name: phases[name] for name in PHASES}, whole="call")
        figures = timings["call"].figures("call") | {f"{name}_us": timings[name].median_us for name in PHASES}
        if graph is None:
            return figures
        with group.guard("time graph"):
            return figures | harness.time_whole(
                group, graph.replay, name="graph_call", warmup=self._config.warmup, repeats=repeats
            )

    def _load(self, logits: torch.Tensor) -> dict[str, float]:
        """Load imbalance: most tokens of an expert, and most rows of a rank, over the mean. Collective."""
        routing, starts = route(logits, self._routing, routing_bias=self._routing_bias), self._placement.starts
        ids = self._placement.to_physical(routing.topk_ids).long()
        counts = self._group.all_reduce_sum(torch.bincount(ids.flatten(), minlength=self._placement.num_physical))
        ranks = torch.stack([counts[a:b].sum() for a, b in zip(starts[:-1], starts[1:], strict=True)])
        loads = {"expert_load_ratio": counts, "rank_load_ratio": ranks}
        return {name: float(load.max() / load.double().mean()) for name, load in loads.items()}

    def _setup(self, layer: ExpertParallelMoE) -> dict[str, int | str | bool]:
        return {
            **field_values(self._engine, "dtype", "scheme"),
            "transport": harness.implementation_name(layer.transport, TRANSPORTS),
            "experts": harness.implementation_name(layer.experts, EXPERTS),
            **field_values(self._engine, "layout", "placement"),
            "routing_method": RoutingMethod(self._routing.method).name.lower(),
            **field_values(self._config, "routing", "seed"),
            "nodes": self._nodes,
            **field_values(self._config, "graph", "warmup", "repeats"),
        }
