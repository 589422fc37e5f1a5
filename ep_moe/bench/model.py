"""`ep-moe bench model`: a model with random weights generates, beside transformers' own expert parallelism.

Both serve the same sequences, the way each is meant to: transformers shows all of them to every rank, ep_moe gives
each rank a share. Letters: B sequences of each rank, R ranks, P prompt tokens, N new tokens, H hidden, E experts,
V vocabulary.
"""

import dataclasses
import statistics
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from ep_moe.bench.experts import Expert, expected_output
from ep_moe.bench.generation import System, generate, time_generation
from ep_moe.bench.layer import implementation_name, tell
from ep_moe.bench.presets import MODEL_PRESETS
from ep_moe.bench.random_model import expert_values, fill_with_random_numbers
from ep_moe.bench.records import device_name, versions
from ep_moe.config import ActivationConfig, EngineConfig
from ep_moe.engines.transformers import distributed_config, register, shard_experts
from ep_moe.engines.transformers.experts import find_experts
from ep_moe.experts import EXPERTS
from ep_moe.group import EPGroup
from ep_moe.quant import SCHEMES
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from ep_moe.transport import TRANSPORTS

CHECKED_TOKENS = 64  # that each MoE block is shown for the check
BASELINE_LIMIT_FACTOR = 2  # transformers rounds after every step, weights and partial sums included; we keep float32
RELATED_ERROR = 0.2  # of the median row of logits; bfloat16 makes about 0.02 of 8 layers, another model about 1.4
OURS, OWN, HOOK = "ep_moe", "transformers_ep", "transformers_ep_hook"
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelBenchConfig:
    """What `ep-moe bench model` measures.

    Args:
        preset: sizes, a name of MODEL_PRESETS. layers: how many, whatever the model has.
        batch: B, sequences of each rank. prompt_tokens: P. new_tokens: N of each sequence, at least 2.
        repeats: timed generations. seed: of weights and prompts.
        baseline_experts: transformers' implementation of the experts in its own expert parallelism.
        hook: measure transformers' expert parallelism with the exchange of ep_moe plugged into it too.
    Errors: ValueError names the value and the limit.
    """

    preset: str = "qwen3-30b"
    layers: int = 8
    batch: int = 16
    prompt_tokens: int = 128
    new_tokens: int = 64
    repeats: int = 3
    seed: int = 0
    baseline_experts: str = "grouped_mm"
    hook: bool = False

    def __post_init__(self) -> None:
        if self.preset not in MODEL_PRESETS:
            raise ValueError(f"preset ({self.preset!r}) is not one of {', '.join(MODEL_PRESETS)}")
        if self.baseline_experts not in EXPERTS_IMPLEMENTATIONS:
            known = ", ".join(EXPERTS_IMPLEMENTATIONS)
            raise ValueError(f"baseline_experts ({self.baseline_experts!r}) is not one of {known}")
        least = {"layers": 1, "batch": 1, "prompt_tokens": 1, "new_tokens": 2, "repeats": 1, "seed": 0}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least {limit}")

    @property
    def max_tokens_per_rank(self) -> int:
        """The most tokens that a rank brings to a forward pass."""
        return max(self.batch * self.prompt_tokens, CHECKED_TOKENS)

    def transformers_config(self) -> Qwen3MoeConfig:
        """The model's config as transformers has it."""
        return Qwen3MoeConfig(
            **MODEL_PRESETS[self.preset],
            num_hidden_layers=self.layers,
            norm_topk_prob=True,
            max_position_embeddings=max(self.prompt_tokens + self.new_tokens, 4096),
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )


def model_rank_main(group: EPGroup, engine: EngineConfig, config: ModelBenchConfig) -> dict[str, Any]:
    """One rank's part. Returns the report, the same on every rank: `ok` and one row; a wrong result is not timed.

    Errors: RuntimeError for one rank, for a CPU beside GPUs, which transformers' expert parallelism would take, and
    for a number of experts that does not divide by the ranks. Collective.
    """
    _check_machine(group, config)
    transformers_logging.set_verbosity_error()  # a report of every weight as missing, before it gets its numbers
    transformers_logging.disable_progress_bar()
    bench = _ModelBench(group, engine, config)
    row = bench.run()
    return {
        "ok": row["ok"],
        "bench": "model",
        "gpu": device_name(group.device),
        "world_size": group.num_ranks,
        "versions": versions(group.device),
        "rows": [row],
    }


def _check_machine(group: EPGroup, config: ModelBenchConfig) -> None:
    num_experts = MODEL_PRESETS[config.preset]["num_experts"]
    if group.num_ranks == 1:
        raise RuntimeError("expert parallelism of one rank is none: use at least 2 (--nproc)")
    if num_experts % group.num_ranks:
        raise RuntimeError(
            f"transformers spreads {num_experts} experts over ranks that divide them, not over {group.num_ranks}"
        )
    if group.device.type == "cpu" and torch.cuda.device_count():
        raise RuntimeError(
            "transformers' expert parallelism takes GPUs where it sees any: CUDA_VISIBLE_DEVICES= keeps it on the CPU"
        )


class _ModelBench:
    """The models of one run, checked against each other and timed."""

    def __init__(self, group: EPGroup, engine: EngineConfig, config: ModelBenchConfig) -> None:
        self._group, self._engine, self._config = group, engine, config
        self._limit = ROW_ERROR_LIMITS[engine.dtype]
        generator = torch.Generator().manual_seed(config.seed)
        vocabulary = MODEL_PRESETS[config.preset]["vocab_size"]
        shape = (group.num_ranks * config.batch, config.prompt_tokens)
        self._prompts = torch.randint(vocabulary, shape, generator=generator).to(group.device)  # of all ranks
        self._mine = slice(group.rank * config.batch, (group.rank + 1) * config.batch)

    def run(self) -> dict[str, Any]:
        """Build, check, time; returns the row. Collective."""
        systems = self._build()
        tell(self._group, "check")
        errors = self._check(systems)
        first, tokens = self._compare(systems)
        ours, own = errors[OURS], {name: error for name, error in errors.items() if name != OURS}
        exact = ours <= self._limit and all(error <= BASELINE_LIMIT_FACTOR * self._limit for error in own.values())
        row: dict[str, Any] = {
            "ok": exact and first["median"] <= RELATED_ERROR,
            "row_error_limit": self._limit,
            "shapes": self._shapes(),
            "setup": self._setup(systems[OURS].model),
            "figures": {
                "worst_block_row_error": ours,
                "median_first_logits_error": first["median"],
                "worst_first_logits_error": first["worst"],
                "same_tokens_share": tokens,
            },
            "baselines": {name: {"worst_block_row_error": error} for name, error in own.items()},
        }
        if row["ok"]:
            row["figures"] |= self._time(OURS, systems[OURS])
            for name, figures in row["baselines"].items():
                figures |= self._time(name, systems[name])
                figures["speedup_ratio"] = row["figures"]["tokens_per_sec"] / figures["tokens_per_sec"]
        systems[OURS].model.ep_moe.destroy()
        return row

    def _build(self) -> dict[str, System]:
        """The models by name, all with the same weights. Collective."""
        group, engine, config = self._group, self._engine, self._config
        tell(group, f"bench model: {config.preset}, {config.layers} layers, on {group.num_ranks} ranks")
        systems = {OWN: System(model=self._load_own(), prompts=self._prompts)}
        if config.hook:
            systems[HOOK] = System(model=self._load_hook(), prompts=self._prompts)
        tell(group, f"build {OURS}")
        with torch.device(group.device):
            model: Any = Qwen3MoeForCausalLM._from_config(config.transformers_config(), dtype=engine.torch_dtype)
        fill_with_random_numbers(model, config.seed)
        shard_experts(
            model.eval(),
            group,
            transport=engine.transport,
            experts=engine.experts,
            placement=engine.placement,
            layout=engine.layout,
            max_tokens_per_rank=config.max_tokens_per_rank,
        )
        return {OURS: System(model=model, prompts=self._prompts[self._mine]), **systems}

    def _load_own(self) -> PreTrainedModel:
        """The model as transformers itself spreads it."""
        num_ranks = self._group.num_ranks
        # until 5.18 a flag, from 5.19 on a size
        sized = "ep_size" in DistributedConfig.__dataclass_fields__
        own: dict[str, Any] = {"ep_size": num_ranks} if sized else {"enable_expert_parallel": True}
        return self._load(OWN, DistributedConfig(tp_size=num_ranks, **own), self._config.baseline_experts)

    def _load_hook(self) -> PreTrainedModel:
        """The same with our exchange and our experts plugged in."""
        engine = self._engine
        register(
            transport=engine.transport,
            experts=engine.experts,
            layout=engine.layout,
            max_tokens_per_rank=self._config.max_tokens_per_rank,
        )
        hook = distributed_config(self._config.transformers_config(), self._group.num_ranks)
        return self._load(HOOK, hook, self._config.baseline_experts)

    def _load(self, name: str, spread: DistributedConfig, experts: str) -> PreTrainedModel:
        """transformers spreads a model while it loads it, here from nothing; numbers come after. Collective."""
        tell(self._group, f"build {name}")
        with self._group.guard(f"build {name}"):
            model = Qwen3MoeForCausalLM.from_pretrained(
                None,
                config=self._config.transformers_config(),
                state_dict={},
                distributed_config=spread,
                experts_implementation=experts,
                dtype=self._engine.torch_dtype,
            )
            fill_with_random_numbers(model, self._config.seed)
        self._group.wait_for_all(f"build {name}")
        return model.eval()

    def _check(self, systems: dict[str, System]) -> dict[str, float]:
        """The worst row's error of each system's MoE blocks against float32 experts, over all ranks. Collective.

        All ranks show every block the same tokens. Routers then see the same numbers in all systems and choose alike,
        which they would not at the end of a whole model: a rounding that tips one over changes all that follows.
        """
        hidden = systems[OURS].model.config.hidden_size
        generator = torch.Generator(self._group.device).manual_seed(self._config.seed)
        x = torch.randn(CHECKED_TOKENS, hidden, generator=generator, device=self._group.device)
        x = x.to(self._engine.torch_dtype)
        errors = {name: [0.0] for name in systems}
        with torch.inference_mode(), self._group.guard("check"):
            for name in find_experts(systems[OURS].model):
                outputs = {key: _block(system.model, name)(x.unsqueeze(0))[0] for key, system in systems.items()}
                expected = self._expected(systems[OURS].model, name, x)
                for key, output in outputs.items():
                    errors[key].append(worst_row_error(output, expected))
        ranks = self._group.all_gather_object(errors)
        return {name: float(torch.tensor([rank[name] for rank in ranks]).double().max()) for name in systems}

    def _expected(self, model: Any, name: str, x: torch.Tensor) -> torch.Tensor:
        """A block's output by experts made again from their seeds, in float32; the router is the model's."""
        shapes = model.config.hidden_size, model.config.moe_intermediate_size
        _, weights, ids = _block(model, name).gate(x)

        def expert(index: int) -> Expert:
            hidden, intermediate = shapes
            wanted = {"gate_up_proj": (2 * intermediate, hidden), "down_proj": (hidden, intermediate)}
            w13, w2 = (
                expert_values(f"{name}.{key}", index, shape, self._config.seed, x.device).to(x.dtype)
                for key, shape in wanted.items()
            )
            return Expert(w13=w13, w2=w2)

        return expected_output(x, ids, weights.float(), expert, activation=ActivationConfig(), scheme=SCHEMES["none"])

    def _compare(self, systems: dict[str, System]) -> tuple[dict[str, float], float]:
        """The first step's logits of ours against transformers' own, row by row, and the share of equal tokens.

        In bfloat16 routers tip over here and there, and from the first other token on texts go their own ways: these
        two figures tell that the models are related, not how exact they are. Collective.
        """
        found = {}
        for name in (OURS, OWN):
            system = systems[name]
            with torch.inference_mode(), self._group.guard(f"compare {name}"):
                logits = system.model(system.prompts, logits_to_keep=1).logits[:, -1].float()
                new = generate(system, self._config.new_tokens)
            rows = slice(None) if name == OURS else self._mine
            found[name] = (logits[rows].cpu(), new[rows].cpu())
        errors = [worst_row_error(a, e) for a, e in zip(found[OURS][0], found[OWN][0], strict=True)]
        same = (found[OURS][1] == found[OWN][1]).double().mean()
        ranks = self._group.all_gather_object((errors, float(same)))
        everywhere = torch.tensor([error for rank, _ in ranks for error in rank], dtype=torch.float64)
        logits_errors = {"median": float(everywhere.median()), "worst": float(everywhere.max())}
        return logits_errors, statistics.fmean(share for _, share in ranks)

    def _time(self, name: str, system: System) -> dict[str, float]:
        """Tokens per second and what they are made of, on the slowest rank. Collective."""
        config, group = self._config, self._group
        tell(group, f"time {name}")
        secs = time_generation(system, group, new_tokens=config.new_tokens, repeats=config.repeats)
        return {
            "tokens_per_sec": group.num_ranks * config.batch * config.new_tokens / secs.whole,
            "generate_secs": secs.whole,
            "prefill_ms": secs.first_token * 1e3,
            "decode_step_ms": secs.other_tokens / (config.new_tokens - 1) * 1e3,
        }

    def _shapes(self) -> dict[str, int | str]:
        config, sizes = self._config, MODEL_PRESETS[self._config.preset]
        return {
            "preset": config.preset,
            "layers": config.layers,
            "sequences_per_rank": config.batch,
            "prompt_tokens": config.prompt_tokens,
            "new_tokens": config.new_tokens,
            "hidden": sizes["hidden_size"],
            "intermediate": sizes["moe_intermediate_size"],
            "num_experts": sizes["num_experts"],
            "num_topk": sizes["num_experts_per_tok"],
        }

    def _setup(self, model: Any) -> dict[str, int | str | bool]:
        engine, session = self._engine, model.ep_moe
        return {
            "dtype": engine.dtype,
            "transport": implementation_name(session.transport, TRANSPORTS),
            "experts": implementation_name(session.layers[0].experts, EXPERTS),
            "layout": engine.layout.value,
            "placement": engine.placement,
            "baseline_experts": self._config.baseline_experts,
            "seed": self._config.seed,
        }


def _block(model: Any, experts_name: str) -> Any:
    """The MoE block around an experts module: the router and the experts."""
    return model.get_submodule(experts_name.rpartition(".")[0])
