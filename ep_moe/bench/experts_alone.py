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
from ep_moe.bench.harness import Contender, Row, field_values
from ep_moe.bench.oracle import Expert, RandomExperts, expected_output
from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.config import EngineConfig, Layout
from ep_moe.experts import EXPERTS, create_experts
from ep_moe.group import EPGroup
from ep_moe.layout import ExpertBatch, pack_routed
from ep_moe.quant import QuantScheme, get_scheme, quantize
from ep_moe.report.records import OURS
from ep_moe.routing import Routing
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
        weights = {OURS: self._weights}
        contenders = {
            OURS: self._contender(
                ids,
                x,
                layout=self._engine.layout,
                scheme=self._scheme,
                prepare=lambda batch: functools.partial(self._experts, batch, self._weights),
                make_expert=self._random.expert,
            )
        }
        if self._grouped is not None:  # on the same rows in bfloat16; its oracle uses its own weights
            weights[GROUPED] = self._grouped.weights
            contenders[GROUPED] = self._contender(
                ids,
                x.to(DTYPE),
                layout=Layout.COMPACT,
                scheme=self._grouped.weights.scheme,
                prepare=functools.partial(self._grouped.prepare, row_expert=ids.long().sort().values),
                make_expert=self._grouped.expert,
            )
        checked = harness.check(self._alone, contenders, graph=self._device.type == "cuda")
        row = harness.make_row(
            checked.broken,
            shapes={
                "preset": config.preset,
                "rows_per_expert": rows,
                "num_local_experts": config.num_local_experts,
                **field_values(moe, "hidden", "intermediate"),
            },
            setup={
                **field_values(self._engine, "dtype", "scheme"),
                "experts": harness.implementation_name(self._experts, EXPERTS),
                **field_values(self._engine, "layout"),
                "activation": moe.activation.kind.value,
                "bias": self._bias,
                **field_values(config, "seed", "warmup", "repeats"),
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
            figures["weight_gbs"] = weights[name].num_bytes / figures["call_us"] / 1e3  # every expert has rows
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

    def _contender(
        self,
        ids: torch.Tensor,
        x: torch.Tensor,
        *,
        layout: Layout,
        scheme: QuantScheme,
        prepare: Callable[[ExpertBatch], Callable[[], torch.Tensor]],
        make_expert: Callable[[int], Expert],
    ) -> Contender:
        """Experts on the tokens as a transport would lay them out, to be checked on all rows of sampled experts.

        Args:
            prepare: makes the call that computes a batch. make_expert: makes an expert of the call for the oracle.
        """
        num_local, device = self._config.num_local_experts, self._device
        routing = Routing(topk_ids=ids.unsqueeze(1), topk_weights=torch.ones(len(ids), 1, device=device))
        static_scale = self._weights.w13_input_scale
        packed = pack_routed(
            quantize(x, scheme, static_scale=static_scale) if scheme.payload.quantized else x,
            routing.topk_ids,
            routing.topk_weights,
            layout,
            scheme=scheme,
            dtype=x.dtype,
            first=0,
            num_local_experts=num_local,
            capacity=len(ids),
        )
        batch = dataclasses.replace(packed.batch, expected_rows=math.ceil(len(ids) / num_local))
        # row of the output that is token n's; for FLAT the experts return one row per token, in token order
        flat = layout is Layout.FLAT
        place = torch.arange(len(ids), device=device) if flat else packed.token_to_row[:, 0].long()
        # the first and the last expert are among the sampled
        chosen = torch.linspace(0, num_local - 1, min(self._config.sample_experts, num_local), device=device).long()
        sample = torch.nonzero(torch.isin(ids.long(), chosen)).squeeze(1)

        def expected() -> torch.Tensor:
            sampled = (x[sample], routing.topk_ids[sample], routing.topk_weights[sample])
            return expected_output(*sampled, make_expert, activation=self._moe.activation, scheme=scheme)

        return Contender(
            call=prepare(batch),
            sample=sample,
            expected=expected,
            limit=ROW_ERROR_LIMITS["fp8" if scheme.weight.quantized else str(x.dtype).removeprefix("torch.")],
            rows=lambda output: output.reshape(-1, self._moe.hidden)[place],
        )
