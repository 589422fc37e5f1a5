"""`ep-moe bench layer`: one expert-parallel MoE layer, checked and timed beside all-gather and reduce-scatter.

Letters: T tokens per rank, H hidden, K top-k, E logical experts, R ranks.
"""

import contextlib
import functools
from typing import Any

import torch

from ep_moe.bench import harness
from ep_moe.bench.configs import LayerBenchConfig
from ep_moe.bench.gathered import GatheredMoE
from ep_moe.bench.harness import Contender, Figures, Work, field_values
from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.config import EngineConfig, RoutingMethod, TransportConfig
from ep_moe.experts import experts_name
from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE, Phases
from ep_moe.layer.micro_batches import row_slices
from ep_moe.placement import create_placement
from ep_moe.profiling.timing import By, medians, slowest, spread, time_calls, time_phases
from ep_moe.profiling.trace import PhaseRanges, Trace
from ep_moe.quant import get_scheme
from ep_moe.report.records import GATHERED, OURS, PHASES
from ep_moe.routing import BIASED_METHODS, route
from ep_moe.testing import ROW_ERROR_LIMITS
from ep_moe.testing.random_experts import RandomExperts
from ep_moe.testing.whole_rounds import compare_rows
from ep_moe.transport import TRANSPORTS, Transport, create_transport

TRACED_CALLS = 3
OVERLAPPED = "micro_batches"
SKEW = 0.5  # standard deviation of an expert's popularity, added to logits of standard deviation 1


def layer_rank_main(group: EPGroup, engine: EngineConfig, config: LayerBenchConfig) -> dict[str, Any]:
    """One rank's part. Returns the report, the same on every rank: `ok`, and a row for each number of tokens.

    Stops at the first wrong result, which is not timed.
    Errors: ValueError if graphs are to be timed with a transport that cannot be captured. Collective.
    """
    trace = None if config.trace is None else Trace(group, config.trace)
    report = harness.measure_all("layer", group, config.tokens, _LayerBench(group, engine, config, trace).prepare)
    if trace is not None:
        trace.write()
    return report


class _LayerBench:
    """The weights of one layer on this rank, measured for one number of tokens after another."""

    def __init__(self, group: EPGroup, engine: EngineConfig, config: LayerBenchConfig, trace: Trace | None) -> None:
        self._group, self._engine, self._config, self._trace = group, engine, config, trace
        self._moe, self._scheme = config.moe(engine), get_scheme(engine.scheme)
        assert self._moe.routing is not None
        self._placement = create_placement(engine.placement, self._moe.num_experts, group.num_ranks)
        if config.graph:
            self._check_capturable()
        harness.tell(group, f"bench layer: {config.preset}, {self._moe.num_experts} experts on {group.num_ranks} ranks")
        bias = LAYER_PRESETS[config.preset].bias
        self._experts = RandomExperts(self._moe, engine.torch_dtype, group.device, bias=bias, seed=config.seed)
        self._weights = self._experts.local(self._placement.local_experts(group.rank), self._scheme)
        self._routing = self._moe.routing
        biased = self._routing.method in BIASED_METHODS
        self._routing_bias = 0.01 * self._normal(self._moe.num_experts, salt=1) if biased else None
        self._route = functools.partial(route, config=self._routing, routing_bias=self._routing_bias)
        self._nodes = harness.num_nodes(group)
        group.wait_for_all("weights")  # ranks differ in time to make weights, and the next collective has a timeout

    def _make_transport(self, num_tokens: int, num_sms: int = 0) -> Transport:
        sizes = TransportConfig(
            hidden=self._moe.hidden,
            max_tokens_per_rank=num_tokens,
            dtype=self._engine.torch_dtype,
            num_sms=num_sms,
        )
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

    def prepare(self, num_tokens: int, stack: contextlib.ExitStack) -> Work:
        """The layer and the baseline, to be measured for T tokens per rank. Collective."""
        group, moe, engine, config = self._group, self._moe, self._engine, self._config
        x = self._normal(num_tokens, moe.hidden, salt=2, rank=group.rank).to(engine.torch_dtype)
        logits = self._normal(num_tokens, moe.num_experts, salt=3, rank=group.rank)
        if config.routing == "skewed":
            logits += SKEW * self._normal(moe.num_experts, salt=4)
        parts = row_slices(num_tokens, config.micro_batches)
        transports = [self._make_transport(num_tokens)]
        if len(parts) > 1:
            transports.append(self._make_transport(parts[0].stop, config.num_sms))
        for made in transports:
            stack.callback(made.destroy)
        options: dict[str, Any] = {"experts": engine.experts, "routing_bias": self._routing_bias}
        layer, *others = (ExpertParallelMoE(moe, self._weights, made, **options) for made in transports)
        sample = torch.linspace(0, num_tokens - 1, min(config.sample_rows, num_tokens), device=x.device).long()
        limit = ROW_ERROR_LIMITS["fp8" if self._scheme.weight.quantized else engine.dtype]

        @functools.cache
        def expected() -> torch.Tensor:
            routing = self._route(logits[sample])
            return self._experts.expected_output(x[sample], routing.topk_ids, routing.topk_weights, self._scheme)

        layers: dict[str, Any] = {OURS: layer, GATHERED: GatheredMoE(layer, group)}
        calls = {name: functools.partial(made, x, logits) for name, made in layers.items()}
        for other in others:
            overlapped = functools.partial(other.forward_micro_batches, num_micro_batches=len(parts))
            calls[OVERLAPPED] = functools.partial(overlapped, x, logits)
        contenders = {
            name: Contender(call=call, sample=sample, expected=expected, limit=limit) for name, call in calls.items()
        }

        def check() -> tuple[Figures, list[str]]:
            figures, broken = harness.check(group, contenders, graph=config.graph)
            for other in others:
                one_by_one = torch.cat([other(x[rows], logits[rows]) for rows in parts])
                wrong = compare_rows("micro-batches against calls of each", calls[OVERLAPPED](), one_by_one)
                broken += [text for texts in group.all_gather_object(wrong) for text in texts]
            return figures, broken

        return Work(
            what=f"{num_tokens} tokens of each rank",
            shapes={
                "preset": config.preset,
                "tokens_per_rank": num_tokens,
                **field_values(moe, "hidden", "intermediate", "num_experts"),
                **field_values(self._routing, "num_topk"),
            },
            setup={
                **field_values(engine, "dtype", "scheme"),
                "transport": harness.implementation_name(transports[0], TRANSPORTS),
                "experts": experts_name(layer.experts),
                **field_values(engine, "layout", "placement"),
                "routing_method": RoutingMethod(self._routing.method).name.lower(),
                **field_values(config, "routing", "seed"),
                "nodes": self._nodes,
                **field_values(config, "graph", "warmup", "repeats"),
                **(field_values(config, OVERLAPPED, "num_sms") if others else {}),
            },
            check=check,
            time=lambda name: self._time(layers.get(name), contenders[name], num_tokens),
            known=self._load(logits),
            limit=limit,
        )

    def _time(self, layer: Any, made: Contender, num_tokens: int) -> dict[str, float]:
        """Microseconds of the whole call, then of its phases in separate calls, then of its graph. Collective.

        Of calls and phases also the host's time, in calls of their own. Our layer's calls are traced last. Without a
        layer, of a call whose phases overlap, only the call and its graph are timed.
        """
        group, run = self._group, field_values(self._config, "warmup", "repeats")
        if layer is None:
            figures = harness.time_whole(group, made.call, name="call", **run)
            if made.graph is not None:
                figures |= harness.time_whole(group, made.graph.replay, name="graph_call", **run)
            return figures
        samples = {"call": time_calls(made.call, group, **run), "host": time_calls(made.call, group, **run, by="host")}
        unwatched = layer.phases

        def watched(phases: Phases) -> None:
            layer.phases = phases
            made.call()

        clocks: dict[str, By] = {"": "events", "host_": "host"}
        for prefix, by in clocks.items():
            phases = time_phases(watched, group, repeats=self._config.repeats, by=by)
            samples |= {f"{prefix}{name}": phases[name] for name in PHASES}
        samples = slowest(group, samples, whole="call")
        figures = spread("call", samples.pop("call")) | medians(samples)
        if made.graph is not None:
            figures |= harness.time_whole(group, made.graph.replay, name="graph_call", **run)
        if self._trace is not None and isinstance(layer, ExpertParallelMoE):
            self._trace.record(f"{num_tokens} tokens", lambda: watched(PhaseRanges()), calls=TRACED_CALLS)
            if made.graph is not None:
                self._trace.record(f"{num_tokens} tokens, graph", made.graph.replay, calls=TRACED_CALLS)
        layer.phases = unwatched
        return figures | {"tokens_per_sec": group.num_ranks * num_tokens / figures["call_us"] * 1e6}

    def _load(self, logits: torch.Tensor) -> dict[str, float]:
        """Load imbalance: most tokens of an expert, and most rows of a rank, over the mean. Collective."""
        ids, starts = self._placement.to_physical(self._route(logits).topk_ids).long(), self._placement.starts
        counts = self._group.all_reduce_sum(torch.bincount(ids.flatten(), minlength=self._placement.num_physical))
        ranks = torch.stack([counts[a:b].sum() for a, b in zip(starts[:-1], starts[1:], strict=True)])
        loads = {"expert_load_ratio": counts, "rank_load_ratio": ranks}
        return {name: float(load.max() / load.double().mean()) for name, load in loads.items()}
