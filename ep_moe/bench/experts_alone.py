"""`ep-moe bench experts`: the experts of one rank, no exchange, checked and timed beside torch's grouped GEMM.

Letters: N rows of all experts, E logical experts, L local experts, H hidden, I intermediate.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ep_moe.bench import harness
from ep_moe.bench.configs import SEED_STRIDE, ExpertsBenchConfig
from ep_moe.bench.grouped import DTYPE, GroupedExperts, has_grouped_gemm
from ep_moe.bench.harness import OURS, Contender, Row, words
from ep_moe.bench.oracle import Expert, RandomExperts, expected_output
from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.config import EngineConfig, Layout
from ep_moe.experts import EXPERTS, create_experts
from ep_moe.group import EPGroup
from ep_moe.layout import Packed, pack_routed
from ep_moe.quant import QuantScheme, get_scheme, quantize
from ep_moe.testing import ROW_ERROR_LIMITS

GROUPED = "grouped_mm"


def experts_rank_main(group: EPGroup, engine: EngineConfig, config: ExpertsBenchConfig) -> dict[str, Any]:
    """Measure on the only rank. Returns the report: `ok`, and a report row for each number of rows.

    Stops at the first wrong result, which is not timed.
    Errors: ValueError for more than one rank. Host sync.
    """
    if group.num_ranks != 1:
        raise ValueError(f"bench experts measures one rank alone, there are {group.num_ranks}")
    harness.tell(group, f"bench experts: {config.preset}, {config.num_local_experts} experts on {group.device}")
    return harness.measure_all("experts", group, config.rows, _ExpertsBench(group.device, engine, config).measure)


class _ExpertsBench:
    """The weights of one rank, measured for one number of rows after another."""

    def __init__(self, device: torch.device, engine: EngineConfig, config: ExpertsBenchConfig) -> None:
        self._device, self._engine, self._config = device, engine, config
        # without a process group: one rank needs no all-reduce before a timed call, whose launch would delay the call
        self._alone = EPGroup.single(device)
        sizes = LAYER_PRESETS[config.preset]
        self._moe, self._scheme, self._bias = sizes.moe(engine), get_scheme(engine.scheme), sizes.bias
        self._random = RandomExperts(self._moe, engine.torch_dtype, device, bias=sizes.bias, seed=config.seed)
        self._weights = self._random.local(range(config.num_local_experts), self._scheme)
        self._experts = create_experts(engine.experts, self._moe.activation, device)
        self._grouped = GroupedExperts(self._weights, self._moe.activation) if has_grouped_gemm(device) else None

    def measure(self, rows: int) -> Row:
        """Check, then time, the experts and the baseline for `rows` rows per expert on average; returns the row."""
        config, moe = self._config, self._moe
        harness.tell(self._alone, f"{rows} rows of each expert: check and time")
        ids, x = self._tokens(rows)
        contenders, weight_bytes = {OURS: self._ours(ids, x)}, {OURS: self._weights.num_bytes}
        if self._grouped is not None:
            contenders[GROUPED] = self._theirs(self._grouped, ids, x)
            weight_bytes[GROUPED] = self._grouped.num_bytes
        checked = harness.check(self._alone, contenders, graph=self._device.type == "cuda")
        row = harness.make_row(
            checked.broken,
            shapes={
                "preset": config.preset,
                "rows_per_expert": rows,
                "num_local_experts": config.num_local_experts,
                **words(moe, "hidden", "intermediate"),
            },
            setup={
                **words(self._engine, "dtype", "scheme"),
                "experts": harness.implementation_name(self._experts, EXPERTS),
                **words(self._engine, "layout"),
                "activation": moe.activation.kind.value,
                "bias": self._bias,
                **words(config, "seed", "warmup", "repeats"),
            },
            figures=checked.errors[OURS],
            baselines={name: found for name, found in checked.errors.items() if name != OURS},
            limit=contenders[OURS].limit,
        )
        if not row["ok"]:
            return row
        products = x.numel() * moe.intermediate * (3 if moe.activation.kind.gated else 2)
        for name, figures in checked.errors.items():
            # on a GPU the replay of the call's graph
            timed = checked.graphs[name].replay if name in checked.graphs else contenders[name].call
            figures |= harness.time_whole(self._alone, timed, name="call", warmup=config.warmup, repeats=config.repeats)
            figures["tflops"] = 2 * products / figures["call_us"] / 1e6
            figures["weight_gbs"] = weight_bytes[name] / figures["call_us"] / 1e3  # every expert has rows
        for theirs in row["baselines"].values():
            theirs["speedup_ratio"] = theirs["call_us"] / row["figures"]["call_us"]
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
        num_local, static_scale = self._config.num_local_experts, self._weights.w13_input_scale
        packed = pack_routed(
            quantize(x, scheme, static_scale=static_scale) if scheme.payload.quantized else x,
            ids.unsqueeze(1),
            torch.ones(len(ids), 1, device=self._device),
            layout,
            scheme=scheme,
            dtype=x.dtype,
            first=0,
            num_local_experts=num_local,
            capacity=len(ids),
        )
        batch = dataclasses.replace(packed.batch, expected_rows=math.ceil(len(ids) / num_local))
        return dataclasses.replace(packed, batch=batch)

    def _ours(self, ids: torch.Tensor, x: torch.Tensor) -> Contender:
        packed = self._pack(ids, x, self._engine.layout, self._scheme)
        flat = self._engine.layout is Layout.FLAT  # for FLAT the experts return one row per token, in token order
        return self._contender(
            functools.partial(self._experts, packed.batch, self._weights),
            torch.arange(len(ids), device=self._device) if flat else packed.token_to_row[:, 0].long(),
            functools.partial(self._expected, ids, x, self._random.expert, self._scheme),
            ids,
            limit=ROW_ERROR_LIMITS["fp8" if self._scheme.weight.quantized else self._engine.dtype],
        )

    def _theirs(self, grouped: GroupedExperts, ids: torch.Tensor, x: torch.Tensor) -> Contender:
        """The baseline on the same rows in bfloat16, COMPACT; its oracle uses the baseline's weights."""
        unquantized = get_scheme("none")
        packed = self._pack(ids, x.to(DTYPE), Layout.COMPACT, unquantized)
        row_end = packed.batch.expert_num_tokens.cumsum(0).int()
        row_expert = ids.long().sort().values
        return self._contender(
            functools.partial(grouped, packed.batch.x, row_end, row_expert),
            packed.token_to_row[:, 0].long(),
            functools.partial(self._expected, ids, x.to(DTYPE), grouped.expert, unquantized),
            ids,
            limit=ROW_ERROR_LIMITS["bfloat16"],
        )

    def _contender(
        self,
        call: Callable[[], torch.Tensor],
        place: torch.Tensor,
        expected: Callable[[torch.Tensor], torch.Tensor],
        ids: torch.Tensor,
        *,
        limit: float,
    ) -> Contender:
        """To be checked on all rows of sampled experts, including the first and the last.

        Args:
            place: [N] int64, row of the output that is token n's. expected: makes the rows of some tokens.
        """
        num_local = self._config.num_local_experts
        count = min(self._config.sample_experts, num_local)
        chosen = torch.linspace(0, num_local - 1, count, device=self._device).long()
        sample = torch.nonzero(torch.isin(ids.long(), chosen)).squeeze(1)
        return Contender(
            call=call,
            sample=sample,
            expected=lambda: expected(sample),
            limit=limit,
            rows=lambda output: output.reshape(-1, self._moe.hidden)[place],
        )

    def _expected(
        self,
        ids: torch.Tensor,
        x: torch.Tensor,
        make_expert: Callable[[int], Expert],
        scheme: QuantScheme,
        sample: torch.Tensor,
    ) -> torch.Tensor:
        ones = torch.ones(len(sample), 1, device=self._device)
        chosen = ids[sample].unsqueeze(1)
        return expected_output(x[sample], chosen, ones, make_expert, activation=self._moe.activation, scheme=scheme)
