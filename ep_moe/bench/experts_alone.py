"""`ep-moe bench experts` and `formats`: one rank's experts, no exchange, checked and timed beside torch's grouped GEMM.

Letters: N rows of all experts, E logical experts, L local experts, H hidden, I intermediate.
"""

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from ep_moe.bench import harness
from ep_moe.bench.configs import ExpertsBenchConfig, FormatsBenchConfig
from ep_moe.bench.grouped import DTYPE, GroupedExperts, has_grouped_gemm
from ep_moe.bench.harness import Contender, Work, field_values
from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.config import EngineConfig, Layout
from ep_moe.experts import Experts, create_experts, experts_name
from ep_moe.group import EPGroup
from ep_moe.layout import ExpertBatch
from ep_moe.local_moe import local_moe
from ep_moe.profiling.timing import spread
from ep_moe.quant import get_scheme
from ep_moe.report.records import OURS, device_name
from ep_moe.routing import Routing
from ep_moe.testing import ROW_ERROR_LIMITS
from ep_moe.testing.random_experts import SEED_STRIDE, RandomExperts
from ep_moe.weights import ExpertWeights

Samples = dict[str, dict[str, list[float]]]  # microseconds of calls, by figure and system
GROUPED, PLAIN, DEEPGEMM = "grouped_mm", "triton", "deepgemm"
PEAKS = {"NVIDIA H200": (4.8e6, 989e6)}  # bytes from memory and 16-bit operations in a microsecond


def experts_rank_main(group: EPGroup, engine: EngineConfig, config: ExpertsBenchConfig) -> dict[str, Any]:
    """Measure on the only rank. Returns the report: `ok`, and a report row for each scheme and number of rows.

    Stops at the first wrong result, which is not timed.
    Errors: ValueError for more than one rank. Host sync.
    """
    if group.num_ranks != 1:
        raise ValueError(f"bench experts measures one rank alone, there are {group.num_ranks}")
    beside = None
    if config.beside == DEEPGEMM:
        from ep_moe.bench.deepgemm import DeepGemmBaseline  # imports Triton, which only Linux has

        beside = DeepGemmBaseline(engine, LAYER_PRESETS[config.preset], group.device)
    harness.tell(group, f"bench experts: {config.preset}, {config.num_local_experts} experts on {group.device}")
    # without a process group: one rank needs no all-reduce before a timed call, whose launch would delay the call
    alone = EPGroup.single(group.device)
    schemes = config.schemes if isinstance(config, FormatsBenchConfig) else (engine.scheme,)
    made: dict[str, _ExpertsBench] = {}

    def prepare(point: tuple[str, int, str], stack: contextlib.ExitStack) -> Work:
        scheme, rows, counts = point
        if scheme not in made:
            made.clear()  # the memory of the last scheme's weights
            made[scheme] = _ExpertsBench(alone, dataclasses.replace(engine, scheme=scheme), config, beside)
        return made[scheme].prepare(rows, counts)

    return harness.measure_all("experts", alone, itertools.product(schemes, config.rows, config.counts), prepare)


class _ExpertsBench:
    """The weights of one rank, measured for one number of rows after another."""

    def __init__(self, group: EPGroup, engine: EngineConfig, config: ExpertsBenchConfig, beside: Any) -> None:
        self._group, self._engine, self._config, self._beside = group, engine, config, beside
        self._run = field_values(config, "warmup", "repeats")
        preset, self._scheme = LAYER_PRESETS[config.preset], get_scheme(engine.scheme)
        self._moe, self._bias = preset.moe(engine), preset.bias
        self._random, self._weights = dict[str, RandomExperts](), dict[str, ExpertWeights]()
        schemes = {OURS: (engine.torch_dtype, self._scheme)}
        if has_grouped_gemm(group.device):  # experts of the same seed in bfloat16
            schemes[GROUPED] = (DTYPE, get_scheme("none"))
        for name, (dtype, scheme) in schemes.items():
            made = RandomExperts(self._moe, dtype, group.device, bias=preset.bias, seed=config.seed)
            self._random[name], self._weights[name] = made, made.local(range(config.num_local_experts), scheme)
        self._experts = create_experts(engine.experts, self._moe.activation, group.device)

    def prepare(self, rows: int, counts: str) -> Work:
        """The experts and the baselines, to be measured for `rows` rows per expert on average."""
        config, moe, engine = self._config, self._moe, self._engine
        ids, x = self._tokens(rows, counts)
        backends: list[str] = []

        def add(name: str, experts: Experts) -> Contender:
            def call_on(batch: ExpertBatch) -> Callable[[], torch.Tensor]:
                find = getattr(experts, "backend_of", None)
                backends.append(find(batch, self._weights[OURS]) if find else "torch")
                return functools.partial(experts, batch, self._weights[OURS])

            return self._contender(name, ids, x, engine.layout, call_on)

        contenders = {OURS: add(OURS, self._experts)}
        if backends == ["hopper"]:  # beside the kernels that serve every GPU
            contenders[PLAIN] = add(PLAIN, create_experts(PLAIN, moe.activation, self._group.device))
        if GROUPED in self._weights:
            grouped = functools.partial(GroupedExperts, weights=self._weights[GROUPED], activation=moe.activation)
            contenders[GROUPED] = self._contender(GROUPED, ids, x.to(DTYPE), Layout.COMPACT, grouped)
        beside = None
        if self._beside is not None:
            beside = self._beside.prepare(rows, x, ids, self._experts, self._weights[OURS])
            contenders[DEEPGEMM] = dataclasses.replace(contenders[OURS], call=beside.theirs, rows=beside.rows)
        timed = {name: made for name, made in contenders.items() if name != DEEPGEMM}
        samples = functools.cache(lambda: self._samples(timed))
        gemms = functools.cache(lambda: beside.samples(self._group, **self._run) if beside else {})
        return Work(
            what=f"{engine.scheme}, {rows} rows of each expert, {counts}",
            shapes={
                "preset": config.preset,
                "rows_per_expert": rows,
                "counts": counts,
                "num_local_experts": config.num_local_experts,
                **field_values(moe, "hidden", "intermediate"),
            },
            setup={
                **field_values(engine, "dtype", "scheme"),
                "experts": experts_name(self._experts),
                "backend": backends[0],
                **field_values(engine, "layout"),
                "activation": moe.activation.kind.value,
                "bias": self._bias,
                **field_values(config, "seed", "warmup", "repeats"),
                **(beside.setup if beside else {}),
            },
            check=functools.partial(harness.check, self._group, contenders, graph=self._group.device.type == "cuda"),
            time=lambda name: (self._figures(name, samples(), x) if name in timed else {}) | _spread(name, gemms()),
            limit=contenders[OURS].limit,
        )

    def _samples(self, contenders: Mapping[str, Contender]) -> Samples:
        """Microseconds of calls of each system, on a GPU of replays of its graph, by "call" and, with rests between
        them, "rested_call"."""
        rests: dict[str, Callable[[], None] | None] = {"call": None}
        if self._config.rest_ms:
            rests["rested_call"] = functools.partial(_rest, self._group.device, self._config.rest_ms)
        calls = {name: made.graph.replay if made.graph else made.call for name, made in contenders.items()}
        return {
            kind: harness.time_in_turns(self._group, calls, **self._run, on_call=rest) for kind, rest in rests.items()
        }

    def _figures(self, name: str, samples: Samples, x: torch.Tensor) -> dict[str, float]:
        """Microseconds of a call, and the rates of arithmetic and memory."""
        figures = _spread(name, samples)
        products = x.numel() * self._moe.intermediate * (3 if self._moe.activation.kind.gated else 2)
        figures["tflops"] = 2 * products / figures["call_us"] / 1e6
        weights = self._weights[GROUPED if name == GROUPED else OURS]
        if peaks := PEAKS.get(device_name(self._group.device)):
            rate = peaks[1] * 2 / weights.w13.values.itemsize  # of products; as fp8 twice that of 16 bits
            figures["floor_us"] = max(weights.num_bytes / peaks[0], 2 * products / rate)
        figures["weight_gbs"] = weights.num_bytes / figures["call_us"] / 1e3  # as if every expert had rows
        return figures

    def _tokens(self, rows: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of one expert each, in random order: ids [N] int32, and x [N, H]."""
        counts, device = self._config.row_counts(rows, kind), self._group.device
        ids = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts)
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(self._config.seed))]
        other_seed = (self._config.seed + 1) * SEED_STRIDE - 1  # no expert's seed: tokens must not equal weights
        generator = torch.Generator(device).manual_seed(other_seed)
        x = torch.randn(len(ids), self._moe.hidden, generator=generator, device=device)
        return ids.to(device), x.to(self._engine.torch_dtype)

    def _contender(
        self,
        name: str,
        ids: torch.Tensor,
        x: torch.Tensor,
        layout: Layout,
        call_on: Callable[[ExpertBatch], Callable[[], torch.Tensor]],
    ) -> Contender:
        """Experts on the tokens as a transport would lay them out, to be checked on all rows of sampled experts.

        Args:
            call_on: makes the call that computes a batch.
        """
        num_local, made = self._config.num_local_experts, GROUPED if name == GROUPED else OURS
        weights = self._weights[made]
        routing = Routing(topk_ids=ids.unsqueeze(1), topk_weights=torch.ones(len(ids), 1, device=ids.device))
        batches: list[ExpertBatch] = []

        def place(y: torch.Tensor | None = None) -> torch.Tensor:
            """The rows of the tokens [N, H] in the experts' output: their sums, as each has one expert of weight 1."""

            def experts(batch: ExpertBatch, *args: object, **options: object) -> torch.Tensor:
                batches[:] = [batch]
                return x.new_zeros(batch.output_shape) if y is None else y

            return local_moe(x, routing, weights, cast(Experts, experts), layout=layout)

        place()  # for the batch
        # the first and the last expert are among the sampled
        chosen = torch.linspace(0, num_local - 1, min(self._config.sample_experts, num_local), device=ids.device).long()
        sample = torch.nonzero(torch.isin(ids.long(), chosen)).squeeze(1)

        def expected() -> torch.Tensor:
            routed = (routing.topk_ids[sample], routing.topk_weights[sample])
            return self._random[made].expected_output(x[sample], *routed, weights.scheme)

        limit = ROW_ERROR_LIMITS["fp8" if weights.scheme.weight.quantized else str(x.dtype).removeprefix("torch.")]
        return Contender(call=call_on(batches[0]), sample=sample, expected=expected, limit=limit, rows=place)


def _spread(name: str, samples: Samples) -> dict[str, float]:
    """The figures of one system."""
    return {
        key: us for kind, found in samples.items() if name in found for key, us in spread(kind, found[name]).items()
    }


def _rest(device: torch.device, rest_ms: float) -> None:
    """Wait until the device is idle, and then for some time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    time.sleep(rest_ms / 1e3)
