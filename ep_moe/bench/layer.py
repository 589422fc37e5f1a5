"""`ep-moe bench layer`: one expert-parallel MoE layer, checked and timed beside all-gather and reduce-scatter.

Letters: T tokens per rank, H hidden, K top-k, E logical experts, R ranks.
"""

import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ep_moe.bench.bounds import broken_bounds, largest
from ep_moe.bench.experts import RandomExperts, expected_output
from ep_moe.bench.gathered import GatheredMoE
from ep_moe.bench.presets import LAYER_PRESETS, LayerPreset
from ep_moe.bench.records import report_outcome
from ep_moe.bench.timing import Captured, PhaseTimes, capture, slowest, time_calls
from ep_moe.config import EngineConfig, MoEConfig, RoutingMethod, TransportConfig
from ep_moe.experts import EXPERTS
from ep_moe.fields import check_fields
from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE, Phases
from ep_moe.placement import Placement, create_placement
from ep_moe.quant import get_scheme
from ep_moe.routing import BIASED_METHODS, route
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from ep_moe.transport import TRANSPORTS, CollectiveTransport, LocalTransport, create_transport

PHASES = ("route", "dispatch", "experts", "combine")
OURS, BASELINE = "ep_moe", "allgather_reducescatter"
ROUTINGS = ("uniform", "skewed")
SKEW = 0.5  # standard deviation of an expert's popularity, added to logits of standard deviation 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerBenchConfig:
    """Measurements of `ep-moe bench layer`.

    Args:
        preset: sizes, a name of LAYER_PRESETS.
        tokens: T, one measurement for each.
        hidden, intermediate, num_experts, num_topk: override the preset's; 0 keeps the preset's.
        routing: "uniform" logits, or "skewed" ones that favour some experts on all ranks.
        seed: of experts, tokens and logits.
        warmup, repeats: untimed and timed calls.
        sample_rows: checked tokens per rank.
        graph: time the replay of CUDA graphs too.
    Errors: ValueError names the value and the limit.
    """

    preset: str = "deepseek-v3"
    tokens: tuple[int, ...] = (128, 4096)
    hidden: int = 0
    intermediate: int = 0
    num_experts: int = 0
    num_topk: int = 0
    routing: str = "uniform"
    seed: int = 0
    warmup: int = 5
    repeats: int = 20
    sample_rows: int = 16
    graph: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.preset not in LAYER_PRESETS:
            raise ValueError(f"preset ({self.preset!r}) is not one of {', '.join(LAYER_PRESETS)}")
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing ({self.routing!r}) is not one of {', '.join(ROUTINGS)}")
        if not self.tokens or min(self.tokens) < 1:
            raise ValueError(f"tokens ({self.tokens}) must be one or more numbers of at least 1")
        least = {"hidden": 0, "intermediate": 0, "num_experts": 0, "num_topk": 0, "seed": 0, "warmup": 1}
        for name, limit in (least | {"repeats": 1, "sample_rows": 1}).items():
            if getattr(self, name) < limit:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least {limit}")

    @property
    def sizes(self) -> LayerPreset:
        """The preset with the overrides."""
        preset = LAYER_PRESETS[self.preset]
        names = ("hidden", "intermediate", "num_experts")
        given = {name: getattr(self, name) for name in names if getattr(self, name)}
        routing = preset.routing
        if self.num_topk:
            routing = dataclasses.replace(routing, num_topk=self.num_topk)
        return dataclasses.replace(preset, routing=routing, **given)

    def moe(self, engine: EngineConfig) -> MoEConfig:
        """The layer's config. Errors: ValueError for sizes that do not fit each other."""
        return self.sizes.moe(engine)


def layer_rank_main(group: EPGroup, engine: EngineConfig, config: LayerBenchConfig) -> dict[str, Any]:
    """One rank's part. Returns the report, the same on every rank: `ok`, and a row for each number of tokens.

    Stops at the first wrong result, which is not timed.
    Errors: ValueError if graphs are to be timed with a transport that cannot be captured. Collective.
    """
    moe = config.moe(engine)
    placement = create_placement(engine.placement, moe.num_experts, group.num_ranks)
    if config.graph:
        _check_capturable(group, engine, moe, placement)
    experts = RandomExperts(moe, engine.torch_dtype, group.device, bias=config.sizes.bias, seed=config.seed)
    tell(group, f"bench layer: {config.preset}, {moe.num_experts} experts on {group.num_ranks} ranks")
    bench = _LayerBench(group, engine, config, placement, experts)
    rows: list[dict[str, Any]] = []
    for num_tokens in config.tokens:
        rows.append(bench.measure(num_tokens))
        if not rows[-1]["ok"]:
            break
    return report_outcome("layer", group.device, group.num_ranks, rows)


def tell(group: EPGroup, text: str) -> None:
    """Print progress to standard error, on rank 0 only. Local."""
    if group.rank == 0:
        print(text, file=sys.stderr, flush=True)


def num_nodes(group: EPGroup) -> int:
    """The number of machines of the group. Collective."""
    return 1 + max(group.all_gather_object(group.node))


def _check_capturable(group: EPGroup, engine: EngineConfig, moe: MoEConfig, placement: Placement) -> None:
    """Raise before any work if a round waits on the host; makes a transport to see the choice of "auto". Collective."""
    sizes = TransportConfig(hidden=moe.hidden, max_tokens_per_rank=1, dtype=engine.torch_dtype)
    transport = create_transport(engine.transport, group, placement, sizes)
    transport.destroy()
    reads_back = isinstance(transport, LocalTransport) and group.device.type == "cuda"
    if reads_back or isinstance(transport, CollectiveTransport):
        raise ValueError(
            f"graph: transport {implementation_name(transport, TRANSPORTS)!r} waits on the host in each round, which "
            f"no CUDA graph can capture"
        )


class _LayerBench:
    """The weights of one layer on this rank, measured for one number of tokens after another."""

    def __init__(
        self,
        group: EPGroup,
        engine: EngineConfig,
        config: LayerBenchConfig,
        placement: Placement,
        experts: RandomExperts,
    ) -> None:
        self._group, self._engine, self._config = group, engine, config
        self._moe, self._placement, self._experts = config.moe(engine), placement, experts
        self._scheme = get_scheme(engine.scheme)
        self._weights = experts.local(placement.local_experts(group.rank), self._scheme)
        self._routing_bias = self._make_routing_bias()
        self._limit = ROW_ERROR_LIMITS["fp8" if self._scheme.weight.quantized else engine.dtype]
        self._num_nodes = num_nodes(group)
        group.wait_for_all("weights")  # ranks differ in time to make weights, and the next collective has a timeout

    def _make_routing_bias(self) -> torch.Tensor | None:
        assert self._moe.routing is not None
        if self._moe.routing.method not in BIASED_METHODS:
            return None
        return 0.01 * self._normal(self._moe.num_experts, salt=1)

    def _normal(self, *shape: int, salt: int, rank: int = -1) -> torch.Tensor:
        """Normally distributed float32 values of a rank, or the same on all ranks for rank -1."""
        seed = (self._config.seed * 1000 + salt) * 1000 + rank + 1
        generator = torch.Generator(self._group.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self._group.device)

    def measure(self, num_tokens: int) -> dict[str, Any]:
        """Check, then time, the layer and the baseline for T tokens per rank; returns the row. Collective."""
        group, engine, config, moe = self._group, self._engine, self._config, self._moe
        x = self._normal(num_tokens, moe.hidden, salt=2, rank=group.rank).to(engine.torch_dtype)
        logits = self._normal(num_tokens, moe.num_experts, salt=3, rank=group.rank)
        if config.routing == "skewed":
            logits += SKEW * self._normal(moe.num_experts, salt=4)
        sizes = TransportConfig(hidden=moe.hidden, max_tokens_per_rank=num_tokens, dtype=engine.torch_dtype)
        transport = create_transport(engine.transport, group, self._placement, sizes)
        layer = ExpertParallelMoE(
            moe, self._weights, transport, experts=engine.experts, routing_bias=self._routing_bias
        )
        gathered = GatheredMoE(
            moe,
            self._weights,
            self._placement,
            group,
            layer.experts,
            num_tokens=num_tokens,
            dtype=engine.torch_dtype,
            routing_bias=self._routing_bias,
            phases=layer.phases,
        )
        try:
            return self._row(layer, gathered, x, logits)
        finally:
            transport.destroy()

    def _row(
        self, layer: ExpertParallelMoE, gathered: GatheredMoE, x: torch.Tensor, logits: torch.Tensor
    ) -> dict[str, Any]:
        group, num_tokens = self._group, x.shape[0]
        tell(group, f"{num_tokens} tokens of each rank: check")
        errors, graphs = self._check({OURS: layer, BASELINE: gathered}, x, logits)
        bounds = {f"{name} {what}": (e, self._limit) for name in errors for what, e in errors[name].items()}
        broken = broken_bounds(bounds)
        row: dict[str, Any] = {
            "ok": not broken,
            "broken": broken,
            "row_error_limit": self._limit,
            "shapes": self._shapes(num_tokens),
            "setup": self._setup(layer),
            "figures": errors[OURS] | self._load(logits),
            "baselines": {BASELINE: errors[BASELINE]},
        }
        if not row["ok"]:
            return row
        ours, theirs = row["figures"], row["baselines"][BASELINE]
        tell(group, f"{num_tokens} tokens of each rank: time")
        ours |= self._time(layer, graphs.get(OURS), x, logits)
        theirs |= self._time(gathered, graphs.get(BASELINE), x, logits)
        for figures in (ours, theirs):
            figures["tokens_per_sec"] = group.num_ranks * num_tokens / figures["call_us"] * 1e6
        theirs["speedup_ratio"] = theirs["call_us"] / ours["call_us"]
        if self._config.graph:
            theirs["graph_speedup_ratio"] = theirs["graph_call_us"] / ours["graph_call_us"]
        return row

    def _check(
        self, layers: Mapping[str, ExpertParallelMoE | GatheredMoE], x: torch.Tensor, logits: torch.Tensor
    ) -> tuple[dict[str, dict[str, float]], dict[str, Captured]]:
        """The worst row error of each layer on a sample of tokens, over all ranks, and of its graph on all tokens.

        Returns: errors by layer and name, and the graphs if they are to be timed. Collective.
        """
        assert self._moe.routing is not None
        count = min(self._config.sample_rows, x.shape[0])
        sample = torch.linspace(0, x.shape[0] - 1, count, device=x.device).long()
        with self._group.guard("check"):
            outputs = {name: layer(x, logits).clone() for name, layer in layers.items()}
        routing = route(logits[sample], self._moe.routing, routing_bias=self._routing_bias)
        expected = expected_output(
            x[sample],
            routing.topk_ids,
            routing.topk_weights,
            self._experts.expert,
            activation=self._moe.activation,
            scheme=self._scheme,
        )
        self._group.wait_for_all("check")
        errors = {name: {"worst_row_error": worst_row_error(y[sample], expected)} for name, y in outputs.items()}
        graphs: dict[str, Captured] = {}
        for name, layer in layers.items() if self._config.graph else ():
            with self._group.guard("check graph"):
                graphs[name] = capture(functools.partial(layer, x, logits), self._group.device)
                errors[name]["worst_graph_row_error"] = worst_row_error(graphs[name].replayed(), outputs[name])
        ranks = self._group.all_gather_object(errors)
        return {
            name: {what: largest(rank[name][what] for rank in ranks) for what in errors[name]} for name in layers
        }, graphs

    def _time(
        self,
        watched: ExpertParallelMoE | GatheredMoE,
        graph: Captured | None,
        x: torch.Tensor,
        logits: torch.Tensor,
    ) -> dict[str, float]:
        """Microseconds of the whole call, then of its phases in separate calls, then of its graph. Collective."""
        group, config = self._group, self._config

        def run() -> torch.Tensor:
            return watched(x, logits)

        with group.guard("time"):
            samples = {"call": time_calls(run, group, warmup=config.warmup, repeats=config.repeats)}
        unwatched: Phases = watched.phases
        times = PhaseTimes(group.device)
        times.start_call()
        watched.phases = times
        with group.guard("time phases"):
            time_calls(run, group, warmup=1, repeats=config.repeats, on_call=times.start_call)
        watched.phases = unwatched
        phases = {name: values[1:] for name, values in times.samples_us().items()}  # without the warm-up
        timings = slowest(group, samples | {name: phases[name] for name in PHASES}, whole="call")
        figures = timings["call"].figures("call") | {f"{name}_us": timings[name].median_us for name in PHASES}
        if graph is None:
            return figures
        with group.guard("time graph"):
            replays = time_calls(graph.replay, group, warmup=config.warmup, repeats=config.repeats)
        return figures | slowest(group, {"graph_call": replays}, whole="graph_call")["graph_call"].figures("graph_call")

    def _load(self, logits: torch.Tensor) -> dict[str, float]:
        """Load imbalance: most tokens of an expert, and most rows of a rank, over the mean. Collective."""
        assert self._moe.routing is not None
        ids = self._placement.to_physical(
            route(logits, self._moe.routing, routing_bias=self._routing_bias).topk_ids
        ).long()
        counts = self._group.all_reduce_sum(torch.bincount(ids.flatten(), minlength=self._placement.num_physical))
        starts = self._placement.starts
        ranks = torch.stack([counts[a:b].sum() for a, b in zip(starts[:-1], starts[1:], strict=True)])
        return {
            "expert_load_ratio": float(counts.max() / counts.double().mean()),
            "rank_load_ratio": float(ranks.max() / ranks.double().mean()),
        }

    def _shapes(self, num_tokens: int) -> dict[str, int | str]:
        sizes = self._config.sizes
        return {
            "preset": self._config.preset,
            "tokens_per_rank": num_tokens,
            "hidden": sizes.hidden,
            "intermediate": sizes.intermediate,
            "num_experts": sizes.num_experts,
            "num_topk": sizes.routing.num_topk,
        }

    def _setup(self, layer: ExpertParallelMoE) -> dict[str, int | str | bool]:
        engine, config = self._engine, self._config
        return {
            "dtype": engine.dtype,
            "scheme": engine.scheme,
            "transport": implementation_name(layer.transport, TRANSPORTS),
            "experts": implementation_name(layer.experts, EXPERTS),
            "layout": engine.layout.value,
            "placement": engine.placement,
            "routing_method": RoutingMethod(config.sizes.routing.method).name.lower(),
            "routing": config.routing,
            "seed": config.seed,
            "nodes": self._num_nodes,
            "graph": config.graph,
            "warmup": config.warmup,
            "repeats": config.repeats,
        }


def implementation_name(implementation: object, known: Mapping[str, Any]) -> str:
    """The name in `known` of an implementation that "auto" chose, by its class or its class's prefix. Local."""
    made_by = type(implementation)
    names = [name for name, maker in known.items() if maker is made_by]
    names += [name for name in known if made_by.__name__.lower().startswith(name)]
    return names[0] if names else made_by.__name__
