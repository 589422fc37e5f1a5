"""`ep-moe bench experts`: the experts of one rank, no exchange, checked and timed beside torch's grouped GEMM.

Letters: N rows of all experts, E logical experts, L local experts, H hidden, I intermediate.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from ep_moe.bench.bounds import broken_bounds
from ep_moe.bench.experts import SEED_STRIDE, Expert, RandomExperts, expected_output
from ep_moe.bench.grouped import DTYPE, GroupedExperts, has_grouped_gemm
from ep_moe.bench.layer import implementation_name, tell
from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.bench.records import report_outcome
from ep_moe.bench.timing import Captured, capture, slowest, time_calls
from ep_moe.config import EngineConfig, Layout
from ep_moe.experts import EXPERTS, create_experts
from ep_moe.fields import check_fields
from ep_moe.group import EPGroup
from ep_moe.layout import Packed, pack_routed
from ep_moe.quant import QuantScheme, get_scheme, quantize
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error

OURS, GROUPED = "ep_moe", "grouped_mm"
LEAST_SHARE, MOST_SHARE = 0.7, 1.3  # range of an expert's rows over the average


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsBenchConfig:
    """Measurements of `ep-moe bench experts`.

    Args:
        preset: sizes, a name of LAYER_PRESETS.
        ep_size: ranks that would share the E experts: L = ceil(E / ep_size) are measured.
        rows: per expert on average, one measurement for each.
        seed: of experts, tokens and rows per expert.
        warmup, repeats: untimed and timed calls.
        sample_experts: experts that are checked, all rows of each.
    Errors: ValueError names the value and the limit.
    """

    preset: str = "deepseek-v3"
    ep_size: int = 8
    rows: tuple[int, ...] = (4, 16, 64, 512)
    seed: int = 0
    warmup: int = 5
    repeats: int = 50
    sample_experts: int = 8

    def __post_init__(self) -> None:
        check_fields(self)
        if self.preset not in LAYER_PRESETS:
            raise ValueError(f"preset ({self.preset!r}) is not one of {', '.join(LAYER_PRESETS)}")
        if not self.rows or min(self.rows) < 1:
            raise ValueError(f"rows ({self.rows}) must be one or more numbers of at least 1")
        for name, limit in {"ep_size": 1, "seed": 0, "warmup": 1, "repeats": 1, "sample_experts": 1}.items():
            if getattr(self, name) < limit:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least {limit}")
        if self.ep_size > LAYER_PRESETS[self.preset].num_experts:
            experts = LAYER_PRESETS[self.preset].num_experts
            raise ValueError(f"ep_size ({self.ep_size}) exceeds the {experts} experts of {self.preset}")

    @property
    def num_local_experts(self) -> int:
        """L."""
        return math.ceil(LAYER_PRESETS[self.preset].num_experts / self.ep_size)

    def row_counts(self, rows: int) -> torch.Tensor:
        """Rows of each expert, [L] int64 on the CPU: `rows` times 0.7 to 1.3, and at least 1. Local."""
        generator = torch.Generator().manual_seed(self.seed * SEED_STRIDE + rows)
        shares = torch.rand(self.num_local_experts, generator=generator) * (MOST_SHARE - LEAST_SHARE) + LEAST_SHARE
        return (shares * rows).round().clamp(min=1).long()


def experts_rank_main(group: EPGroup, engine: EngineConfig, config: ExpertsBenchConfig) -> dict[str, Any]:
    """Measure on the only rank. Returns the report: `ok`, and a report row for each number of rows.

    Stops at the first wrong result, which is not timed.
    Errors: ValueError for more than one rank. Host sync.
    """
    if group.num_ranks != 1:
        raise ValueError(f"bench experts measures one rank alone, there are {group.num_ranks}")
    tell(group, f"bench experts: {config.preset}, {config.num_local_experts} experts on {group.device}")
    bench = _ExpertsBench(group.device, engine, config)
    rows: list[dict[str, Any]] = []
    for num_rows in config.rows:
        tell(group, f"{num_rows} rows of each expert: check and time")
        rows.append(bench.measure(num_rows))
        if not rows[-1]["ok"]:
            break
    return report_outcome("experts", group.device, group.num_ranks, rows)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Contender:
    """An implementation to check, then time; row `place[n]` of its output is token n's."""

    call: Callable[[], torch.Tensor]
    place: torch.Tensor  # [N] int64
    weight_bytes: int
    limit: float
    x: torch.Tensor  # [N, H]; this and the next two are for the oracle
    make_expert: Callable[[int], Expert]
    scheme: QuantScheme

    def rows(self, output: torch.Tensor) -> torch.Tensor:
        """The tokens' rows [N, H] of an output, in token order; a copy without padding rows. Local."""
        return output.reshape(-1, self.x.shape[1])[self.place]


class _ExpertsBench:
    """The weights of one rank, measured for one number of rows after another."""

    def __init__(self, device: torch.device, engine: EngineConfig, config: ExpertsBenchConfig) -> None:
        self._device, self._engine, self._config = device, engine, config
        # without a process group: one rank needs no all-reduce before a timed call, whose launch would delay the call
        self._alone = EPGroup.single(device)
        self._sizes = LAYER_PRESETS[config.preset]
        self._moe, self._scheme = self._sizes.moe(engine), get_scheme(engine.scheme)
        self._random = RandomExperts(self._moe, engine.torch_dtype, device, bias=self._sizes.bias, seed=config.seed)
        self._weights = self._random.local(range(config.num_local_experts), self._scheme)
        self._experts = create_experts(engine.experts, self._moe.activation, device)
        self._grouped = GroupedExperts(self._weights, self._moe.activation) if has_grouped_gemm(device) else None

    def measure(self, rows: int) -> dict[str, Any]:
        """Check, then time, the experts and the baseline for `rows` rows per expert on average; returns the row."""
        ids, x = self._tokens(rows)
        ours = self._ours(ids, x)
        others = {} if self._grouped is None else {GROUPED: self._theirs(self._grouped, ids, x)}
        contenders, errors, graphs = {OURS: ours, **others}, {}, {}
        for name, contender in contenders.items():
            errors[name], graphs[name] = self._check(contender, ids)
        figures, baselines = errors[OURS], {name: errors[name] for name in others}
        bounds = {f"{n} {what}": (e, contenders[n].limit) for n in errors for what, e in errors[n].items()}
        broken = broken_bounds(bounds)
        row: dict[str, Any] = {
            "ok": not broken,
            "broken": broken,
            "row_error_limit": ours.limit,
            "shapes": self._shapes(rows),
            "setup": self._setup(),
            "figures": figures,
            "baselines": baselines,
        }
        if row["ok"]:
            for name, times in errors.items():
                times |= self._time(contenders[name], graphs[name])
            for times in baselines.values():
                times["speedup_ratio"] = times["call_us"] / figures["call_us"]
        return row

    def _tokens(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of one expert each, in random order: ids [N] int32, and x [N, H]."""
        counts = self._config.row_counts(rows)
        ids = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts)
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(self._config.seed))]
        other_seed = (self._config.seed + 1) * SEED_STRIDE - 1  # no expert's seed: tokens must not equal weights
        generator = torch.Generator(self._device).manual_seed(other_seed)
        x = torch.randn(len(ids), self._moe.hidden, generator=generator, device=self._device)
        return ids.to(self._device), x.to(self._engine.torch_dtype)

    def _pack(self, ids: torch.Tensor, x: torch.Tensor, layout: Layout, scheme: QuantScheme) -> Packed:
        """The tokens as a transport would lay them out, with its `expected_rows`."""
        static_scale = self._weights.w13_input_scale
        packed = pack_routed(
            quantize(x, scheme, static_scale=static_scale) if scheme.payload.quantized else x,
            ids.unsqueeze(1),
            torch.ones(len(ids), 1, device=self._device),
            layout,
            scheme=scheme,
            dtype=x.dtype,
            first=0,
            num_local_experts=self._config.num_local_experts,
            capacity=len(ids),
        )
        expected_rows = math.ceil(len(ids) / self._config.num_local_experts)
        return dataclasses.replace(packed, batch=dataclasses.replace(packed.batch, expected_rows=expected_rows))

    def _ours(self, ids: torch.Tensor, x: torch.Tensor) -> _Contender:
        packed = self._pack(ids, x, self._engine.layout, self._scheme)
        flat = self._engine.layout is Layout.FLAT  # for FLAT the experts return one row per token, in token order
        return _Contender(
            call=lambda: self._experts(packed.batch, self._weights),
            place=torch.arange(len(ids), device=self._device) if flat else packed.token_to_row[:, 0].long(),
            weight_bytes=self._weights.num_bytes,
            limit=ROW_ERROR_LIMITS["fp8" if self._scheme.weight.quantized else self._engine.dtype],
            x=x,
            make_expert=self._random.expert,
            scheme=self._scheme,
        )

    def _theirs(self, grouped: GroupedExperts, ids: torch.Tensor, x: torch.Tensor) -> _Contender:
        """The baseline on the same rows in bfloat16, COMPACT; its oracle uses the baseline's weights."""
        unquantized = get_scheme("none")
        packed = self._pack(ids, x.to(DTYPE), Layout.COMPACT, unquantized)
        row_end = packed.batch.expert_num_tokens.cumsum(0).int()
        row_expert = ids.long().sort().values
        return _Contender(
            call=lambda: grouped(packed.batch.x, row_end, row_expert),
            place=packed.token_to_row[:, 0].long(),
            weight_bytes=grouped.num_bytes,
            limit=ROW_ERROR_LIMITS["bfloat16"],
            x=x.to(DTYPE),
            make_expert=grouped.expert,
            scheme=unquantized,
        )

    def _check(self, contender: _Contender, ids: torch.Tensor) -> tuple[dict[str, float], Captured | None]:
        """The worst row error of sampled experts, including the first and the last, against float32.

        Returns: errors by name, on a GPU also the error of a graph of the call on all rows, and this graph.
        """
        num_local = self._config.num_local_experts
        count = min(self._config.sample_experts, num_local)
        chosen = torch.linspace(0, num_local - 1, count, device=self._device).long()
        sample = torch.nonzero(torch.isin(ids.long(), chosen)).squeeze(1)
        output = contender.rows(contender.call())
        expected = expected_output(
            contender.x[sample],
            ids[sample].unsqueeze(1),
            torch.ones(len(sample), 1, device=self._device),
            contender.make_expert,
            activation=self._moe.activation,
            scheme=contender.scheme,
        )
        errors = {"worst_row_error": worst_row_error(output[sample], expected)}
        if self._device.type != "cuda":
            return errors, None
        graph = capture(contender.call, self._device)
        errors["worst_graph_row_error"] = worst_row_error(contender.rows(graph.replayed()), output)
        return errors, graph

    def _time(self, contender: _Contender, graph: Captured | None) -> dict[str, float]:
        """Microseconds of the whole call (on a GPU the replay of its graph), and the rates that follow."""
        config, timed = self._config, contender.call if graph is None else graph.replay
        samples = time_calls(timed, self._alone, warmup=config.warmup, repeats=config.repeats)
        figures = slowest(self._alone, {"call": samples}, whole="call")["call"].figures("call")
        matrices = 3 if self._moe.activation.kind.gated else 2
        products = contender.x.numel() * self._moe.intermediate * matrices
        figures["tflops"] = 2 * products / figures["call_us"] / 1e6
        figures["weight_gbs"] = contender.weight_bytes / figures["call_us"] / 1e3  # every expert has rows
        return figures

    def _shapes(self, rows: int) -> dict[str, int | str]:
        return {
            "preset": self._config.preset,
            "rows_per_expert": rows,
            "num_local_experts": self._config.num_local_experts,
            "hidden": self._moe.hidden,
            "intermediate": self._moe.intermediate,
        }

    def _setup(self) -> dict[str, int | str | bool]:
        engine = self._engine
        return {
            "dtype": engine.dtype,
            "scheme": engine.scheme,
            "experts": implementation_name(self._experts, EXPERTS),
            "layout": engine.layout.value,
            "activation": self._moe.activation.kind.value,
            "bias": self._sizes.bias,
            "seed": self._config.seed,
            "warmup": self._config.warmup,
            "repeats": self._config.repeats,
        }
