"""`ep-moe bench balance`: a layer with an uneven load, before and after its experts are placed for it, and an even one.

Letters: T tokens per rank, H hidden, K top-k, E logical experts, R ranks.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import torch

from ep_moe.balance import RecordedLoad, balancedness, plan_placement, rank_loads
from ep_moe.bench import harness
from ep_moe.bench.configs import RECORDED, BalanceBenchConfig, BalancePoint
from ep_moe.bench.harness import Contender, Figures, Work, field_values
from ep_moe.bench.loads import draw_ids, named_load, token_shares
from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.config import EngineConfig, MoEConfig, TransportConfig
from ep_moe.engines.common.model import counting_table
from ep_moe.experts import experts_name
from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement
from ep_moe.quant import get_scheme
from ep_moe.report.records import OURS
from ep_moe.testing import ROW_ERROR_LIMITS
from ep_moe.testing.random_experts import RandomExperts
from ep_moe.transport import TRANSPORTS, create_transport
from ep_moe.weights import ExpertWeights

BEFORE, EVEN = "linear", "uniform"  # the baselines: experts in order, and in order with an even load


def balance_rank_main(group: EPGroup, engine: EngineConfig, config: BalanceBenchConfig) -> dict[str, Any]:
    """One rank's part. Returns the report, the same on every rank: `ok`, a row for each layer, load and number of
    tokens, and `rank_load_before` and `rank_load`, the pairs of token and expert on each rank in each row.

    Errors: ValueError for a file of load that cannot be read. Collective.
    """
    bench = _BalanceBench(group, engine, config)
    report = harness.measure_all("balance", group, config.points, bench.prepare)
    return report | {"rank_load_before": bench.rank_load[BEFORE], "rank_load": bench.rank_load[OURS]}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Tokens:
    """Tokens x [T, H] of this rank with the experts [T, K] of their choice; `load`: OURS or EVEN."""

    load: str
    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


class _BalanceBench:
    """Layers of this rank, measured with one load and number of tokens after another."""

    def __init__(self, group: EPGroup, engine: EngineConfig, config: BalanceBenchConfig) -> None:
        self._group, self._engine, self._config = group, engine, config
        self._recorded = None if config.load is None else RecordedLoad.read(config.load)
        self._nodes = harness.num_nodes(group)
        self._weights: dict[str, tuple[Any, ExpertWeights]] = {}  # the last ones by contender, and what they are of
        self.rank_load: dict[str, list[list[float]]] = {BEFORE: [], OURS: [], EVEN: []}

    def prepare(self, point: BalancePoint, stack: contextlib.ExitStack) -> Work:
        """The layer on a point, and the two baselines. Collective."""
        group, config, engine = self._group, self._config, self._engine
        moe, scheme = self._sizes(point), get_scheme(point.scheme)
        sizes = LAYER_PRESETS[point.preset]
        assert sizes.sizes.routing is not None
        num_topk = min(sizes.sizes.routing.num_topk, moe.num_experts)
        linear = Placement.linear(moe.num_experts, group.num_ranks)
        shares = token_shares(self._load(point, linear), num_topk)
        copies = min(point.redundant_experts, moe.num_experts * (group.num_ranks - 1))
        [planned] = plan_placement([shares.tolist()], moe.num_experts + copies, group.num_ranks).placements
        random = RandomExperts(moe, engine.torch_dtype, group.device, bias=sizes.bias, seed=config.seed)
        layers = {}
        for name, placement in {BEFORE: linear, OURS: planned}.items():
            of = (point.preset, point.scheme, placement)
            if self._weights.get(name, (None,))[0] != of:
                self._weights.pop(name, None)  # before the next ones are made
                self._weights[name] = of, random.local(placement.local_experts(group.rank), scheme)
            layers[name] = self._layer(moe, self._weights[name][1], placement, point.tokens, stack)
        group.wait_for_all("weights")  # ranks differ in time to make them, and the next collective has a timeout
        even = token_shares([1.0] * moe.num_experts, num_topk)
        tokens = {
            load: self._draw(load, which, point.tokens, moe) for load, which in {OURS: shares, EVEN: even}.items()
        }
        case = _Case(group, config, random, point.scheme, engine.dtype)
        case.add(OURS, layers[OURS], tokens[OURS])
        case.add(BEFORE, layers[BEFORE], tokens[OURS])
        case.add(EVEN, layers[BEFORE], tokens[EVEN])
        for name, rows in case.rank_rows.items():
            self.rank_load[name].append(rows)
        return Work(
            what=f"{point.preset}, {point.scheme}, {point.routing} load, {copies} copies, {point.tokens} tokens",
            shapes={
                "preset": point.preset,
                "tokens_per_rank": point.tokens,
                **field_values(moe, "hidden", "intermediate", "num_experts"),
                "num_topk": num_topk,
                "redundant_experts": copies,
            },
            setup={
                "dtype": engine.dtype,
                "scheme": point.scheme,
                "transport": harness.implementation_name(layers[OURS].transport, TRANSPORTS),
                "experts": experts_name(layers[OURS].experts),
                **field_values(engine, "layout"),
                "routing": point.routing,
                "nodes": self._nodes,
                "graph": case.graph,
                **field_values(config, "seed", "warmup", "repeats"),
            },
            check=case.check,
            time=case.time,
            limit=case.limit,
        )

    def _sizes(self, point: BalancePoint) -> MoEConfig:
        """The preset's layer, which is given the experts of tokens, with as many experts as the load is of."""
        engine = dataclasses.replace(self._engine, scheme=point.scheme)
        changes = {} if self._recorded is None else {"num_experts": self._recorded.model.num_experts}
        return LAYER_PRESETS[point.preset].moe(engine, routing=None, **(changes if point.routing == RECORDED else {}))

    def _load(self, point: BalancePoint, linear: Placement) -> list[float]:
        """How often tokens choose each expert; of a file, in the layer that loads ranks least evenly."""
        if point.routing != RECORDED:
            return named_load(point.routing, linear, self._config.seed)
        assert self._recorded is not None
        worst = min(self._recorded.load, key=lambda layer: balancedness(rank_loads([layer], [linear])))
        return [float(tokens) for tokens in worst]

    def _layer(
        self, moe: MoEConfig, weights: ExpertWeights, placement: Placement, tokens: int, stack: contextlib.ExitStack
    ) -> ExpertParallelMoE:
        dtype = self._engine.torch_dtype
        sizes = TransportConfig(hidden=moe.hidden, max_tokens_per_rank=tokens, dtype=dtype)
        transport = create_transport(self._engine.transport, self._group, placement, sizes)
        stack.callback(transport.destroy)
        table = counting_table(placement, self._group)
        return ExpertParallelMoE(moe, weights, transport, placement=table, experts=self._engine.experts)

    def _draw(self, load: str, shares: torch.Tensor, num_tokens: int, moe: MoEConfig) -> _Tokens:
        seed = self._config.seed * 1000 + self._group.rank + 1
        generator = torch.Generator(self._group.device).manual_seed(seed)
        options: dict[str, Any] = {"generator": generator, "device": generator.device}
        x = torch.randn(num_tokens, moe.hidden, **options).to(self._engine.torch_dtype)
        ids = draw_ids(shares, num_tokens, generator)
        weights = torch.rand(ids.shape, **options) + 0.1
        return _Tokens(load=load, x=x, topk_ids=ids, topk_weights=weights / weights.sum(1, keepdim=True))


class _Case:
    """Layers on tokens, checked and timed."""

    def __init__(
        self, group: EPGroup, config: BalanceBenchConfig, random: RandomExperts, scheme: str, dtype: str
    ) -> None:
        self._group, self._config, self._random, self._scheme = group, config, random, get_scheme(scheme)
        self.limit = ROW_ERROR_LIMITS["fp8" if self._scheme.weight.quantized else dtype]
        self.graph = group.device.type == "cuda"
        self.rank_rows: dict[str, list[float]] = {}  # pairs of token and expert on each rank
        self._contenders: dict[str, Contender] = {}
        self._expected: dict[str, torch.Tensor] = {}  # by load
        self._ours_us = 0.0

    def add(self, name: str, layer: ExpertParallelMoE, tokens: _Tokens) -> None:
        """Add a contender. Collective."""
        num_tokens, device = len(tokens.x), self._group.device
        sample = torch.linspace(0, num_tokens - 1, min(self._config.sample_rows, num_tokens), device=device).long()
        self._contenders[name] = Contender(
            call=functools.partial(layer.forward_routed, tokens.x, tokens.topk_ids, tokens.topk_weights),
            sample=sample,
            expected=functools.partial(self._expect, tokens, sample),
            limit=self.limit,
        )
        self.graph &= not harness.waits_on_host(layer.transport, device)
        ids = layer.positions.to_physical(tokens.topk_ids).long()
        counts = self._group.all_reduce_sum(torch.bincount(ids.flatten(), minlength=layer.placement.num_physical))
        ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))[list(layer.placement.starts)]
        self.rank_rows[name] = ends.diff().tolist()

    def _expect(self, tokens: _Tokens, sample: torch.Tensor) -> torch.Tensor:
        if tokens.load not in self._expected:
            chosen = tokens.topk_ids[sample], tokens.topk_weights[sample]
            self._expected[tokens.load] = self._random.expected_output(tokens.x[sample], *chosen, self._scheme)
        return self._expected[tokens.load]

    def check(self) -> tuple[Figures, list[str]]:
        """See `Work`. Collective."""
        return harness.check(self._group, self._contenders, graph=self.graph)

    def time(self, name: str) -> dict[str, float]:
        """Microseconds of the call, in a CUDA graph if it can be, and how balanced its ranks are. Collective."""
        made = self._contenders[name]
        call = made.call if made.graph is None else made.graph.replay
        run = field_values(self._config, "warmup", "repeats")
        figures = harness.time_whole(self._group, call, name="call", **run)
        figures["balancedness_ratio"] = balancedness([self.rank_rows[name]])
        if name == OURS:
            self._ours_us = figures["call_us"]
        elif name == EVEN:
            figures["time_ratio"] = self._ours_us / figures["call_us"]
        return figures
