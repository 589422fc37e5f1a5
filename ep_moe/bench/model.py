"""`ep-moe bench model`: a model with random weights generates text, beside transformers' own expert parallelism.

Both serve the same sequences, each in its own way: transformers gives all of them to every rank, ep_moe gives each rank
a share. Letters: B sequences per rank, R ranks, P prompt tokens, N new tokens, H hidden, E experts, V vocabulary.
"""

import contextlib
import logging
import statistics
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Shard
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from ep_moe.bench import harness
from ep_moe.bench.configs import CHECKED_TOKENS, ModelBenchConfig, spreads_dense
from ep_moe.bench.generation import System, generate, host_time, time_generation
from ep_moe.bench.harness import Figures, Work, field_values
from ep_moe.bench.presets import MODEL_PRESETS
from ep_moe.bench.random_model import experts_of, fill_with_random_numbers, intermediate_of, num_experts_of
from ep_moe.config import EngineConfig
from ep_moe.engines.transformers import distributed_config, register, shard_experts
from ep_moe.engines.transformers.decoding import decoder_of
from ep_moe.engines.transformers.experts import find_experts
from ep_moe.experts import experts_name
from ep_moe.group import EPGroup
from ep_moe.quant import SCHEMES
from ep_moe.report.records import OURS
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from ep_moe.transport import TRANSPORTS

BASELINE_LIMIT_FACTOR = 2  # transformers rounds after every step, weights and partial sums included; we keep float32
RELATED_ERROR = 0.2  # of a rank's median row of logits; bfloat16 gives about 0.02 for 8 layers, another model about 1.4
OWN, HOOK = "transformers_ep", "transformers_ep_hook"
_log = logging.getLogger(__name__)


def transformers_config(config: ModelBenchConfig) -> PreTrainedConfig:
    """The model's transformers config."""
    return AutoConfig.for_model(
        **MODEL_PRESETS[config.preset],
        num_hidden_layers=config.layers,
        max_position_embeddings=max(config.prompt_tokens + config.new_tokens, 4096),
    )


def model_rank_main(group: EPGroup, engine: EngineConfig, config: ModelBenchConfig) -> dict[str, Any]:
    """One rank's part. Returns the report, the same on every rank: `ok` and one row; a wrong result is not timed.

    On ranks over which transformers cannot spread the model there is no baseline, and `left_out` of the row says why.
    Errors: ValueError as `ModelBenchConfig.check_ranks`; RuntimeError for the CPU on a machine with visible GPUs, which
    transformers' expert parallelism would use. Collective.
    """
    config.check_ranks(group.num_ranks)
    if group.device.type == "cpu" and torch.cuda.device_count():
        raise RuntimeError(
            "transformers' expert parallelism uses GPUs if it sees any: set CUDA_VISIBLE_DEVICES= to keep it on the CPU"
        )
    transformers_logging.set_verbosity_error()  # else it reports every weight as missing, as they are filled later
    transformers_logging.disable_progress_bar()
    return harness.measure_all("model", group, [config], _ModelBench(group, engine, config).prepare)


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

    def prepare(self, config: ModelBenchConfig, stack: contextlib.ExitStack) -> Work:
        """Build the models, to be checked and timed. Collective."""
        group, engine, systems = self._group, self._engine, self._build()
        session, sizes = systems[OURS].model.ep_moe, systems[OURS].model.config
        stack.callback(session.destroy)
        run = {"tokens": group.num_ranks * config.batch * config.new_tokens, "new_tokens": config.new_tokens}
        return Work(
            what=f"{config.preset}, {config.layers} layers",
            shapes={
                **field_values(config, "preset", "layers"),
                "sequences_per_rank": config.batch,
                **field_values(config, "prompt_tokens", "new_tokens"),
                "hidden": sizes.hidden_size,
                "intermediate": intermediate_of(sizes),
                "num_experts": num_experts_of(sizes),
                "num_topk": sizes.num_experts_per_tok,
            },
            setup={
                "dtype": engine.dtype,
                "transport": harness.implementation_name(session.transport, TRANSPORTS),
                "experts": experts_name(session.layers[0].experts),
                **field_values(engine, "layout", "placement"),
                "baseline_experts": config.baseline_experts,
                "baseline_dense": _dense(systems[OWN].model) if OWN in systems else "none",
                "seed": config.seed,
                "nodes": harness.num_nodes(group),
                **field_values(config, "hook", "repeats"),
                "graph": bool(getattr(decoder_of(systems[OURS].model, config.decode_graphs), "graphs", False)),
            },
            check=lambda: self._check(systems),
            time=lambda name: (
                time_generation(systems[name], group, **run, repeats=config.repeats) | host_time(systems[name], group)
            ),
            whole="generate_secs",
            limit=self._limit,
            left_out={} if OWN in systems else {OWN: config.why_no_baseline(group.num_ranks)},
        )

    def _limits(self, system: str) -> dict[str, float]:
        """The limit of each error of a system; worst logits only in float32, where no expert choice flips."""
        block = self._limit * (1 if system == OURS else BASELINE_LIMIT_FACTOR)
        limits = {"worst_block_row_error": block, "median_first_logits_error": RELATED_ERROR}
        if self._engine.dtype == "float32":
            limits["worst_first_logits_error"] = self._limit * self._config.layers
        return limits

    def _build(self) -> dict[str, System]:
        """The models by name, all with the same weights. Collective."""
        group, engine, config = self._group, self._engine, self._config
        harness.tell(group, f"bench model: {config.preset}, {config.layers} layers, on {group.num_ranks} ranks")
        ranks = group.num_ranks
        own: dict[str, Any] = {"ep_size": ranks} if spreads_dense() else {"enable_expert_parallel": True}
        systems = {}
        if not config.why_no_baseline(ranks):  # as transformers itself spreads it; one rank has all
            systems[OWN] = self._load(OWN, DistributedConfig(tp_size=ranks, **own) if ranks > 1 else None)
        ours: dict[str, Any] = {"transport": engine.transport, "experts": engine.experts, "layout": engine.layout}
        ours["max_tokens_per_rank"] = config.max_tokens_per_rank
        if config.hook:
            register(**ours)
            systems[HOOK] = self._load(HOOK, distributed_config(transformers_config(config), ranks))
        harness.tell(group, f"build {OURS}")
        model = self._build_whole()
        shard_experts(model.eval(), group, placement=engine.placement, **ours)
        prompts = self._prompts[self._mine]
        return {OURS: System(model=model, prompts=prompts, decode_graphs=config.decode_graphs), **systems}

    def _build_whole(self, **options: Any) -> Any:
        """The model with all its experts on this rank. Local."""
        with torch.device(self._group.device):
            config, dtype = transformers_config(self._config), self._engine.torch_dtype
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
        fill_with_random_numbers(model, self._config.seed)
        return model

    def _load(self, name: str, spread: DistributedConfig | None) -> System:
        """Load an empty model, as transformers spreads models while loading them; then fill it. Collective."""
        harness.tell(self._group, f"build {name}")
        experts = {"experts_implementation": self._config.baseline_experts}
        with self._group.guard(f"build {name}"):
            if spread is None:
                model = self._build_whole(**experts)
            else:
                config, classes = transformers_config(self._config), cast("Any", MODEL_FOR_CAUSAL_LM_MAPPING)
                model = classes[type(config)].from_pretrained(
                    None,
                    config=config,
                    state_dict={},
                    distributed_config=spread,
                    dtype=self._engine.torch_dtype,
                    **experts,
                )
                fill_with_random_numbers(model, self._config.seed)
        self._group.wait_for_all(f"build {name}")
        return System(model=model.eval(), prompts=self._prompts)

    def _check(self, systems: dict[str, System]) -> tuple[Figures, list[str]]:
        """The worst row error of each system's MoE blocks against float32 experts, over all ranks. Collective.

        Every rank has its own tokens: ours gets those, transformers those of all ranks, so that rows returned to the
        wrong rank are detected. All systems' blocks get the same input, and each is compared with the experts that its
        own router chose: of equal scores, which bfloat16 has, routers choose differently.
        Returns: these errors and the figures of `_compare`, and the broken limits.
        """
        group, model, engine, seed = self._group, systems[OURS].model, self._engine, self._config.seed
        generator = torch.Generator(group.device).manual_seed(seed)
        shape = (group.num_ranks * CHECKED_TOKENS, model.config.hidden_size)
        everyones = torch.randn(shape, generator=generator, device=group.device).to(engine.torch_dtype)
        mine = slice(group.rank * CHECKED_TOKENS, (group.rank + 1) * CHECKED_TOKENS)
        x = everyones[mine]
        found = {name: [0.0] for name in systems}
        with torch.inference_mode(), group.guard("check"):
            for name, module in find_experts(model).items():
                experts = experts_of(model.config, module, name, seed, x.dtype, x.device)
                for key, system in systems.items():
                    shown, part = (x, slice(None)) if key == OURS else (everyones, mine)
                    returned, (_, weights, ids) = _routed(_block(system.model, name), shown, ours=key != OWN)
                    output = returned[0][part]
                    expected = experts.expected_output(x, ids[part], weights[part].float(), SCHEMES["none"])
                    found[key].append(error := worst_row_error(output, expected))
                    if not error <= self._limits(key)["worst_block_row_error"]:
                        rows = (~output.isfinite()).any(-1).nonzero().flatten().tolist()
                        found_in = f"{name} of {key} on rank {group.rank}"
                        _log.warning("%s has a row error of %.3g; rows that are not finite: %s", found_in, error, rows)
        worst = {name: {"worst_block_row_error": harness.largest(values)} for name, values in found.items()}
        errors = harness.largest_of_ranks(group, worst)
        for name, related in self._compare(systems).items() if OWN in systems else ():
            errors[name] |= related
        return errors, harness.broken_limits(errors, {name: self._limits(name) for name in errors})

    def _compare(self, systems: dict[str, System]) -> Figures:
        """The first step's logits of each system against transformers' own, row by row, and the share of equal tokens.

        In bfloat16 some expert choices flip, and texts differ from the first different token on: these figures then
        show that the models have the same weights, not how exact they are. The median reported is the largest of all
        ranks' medians, so that one wrong rank is detected.

        Returns: figures by name of each system but transformers' own. Collective.
        """
        found = {}
        for name, system in systems.items():
            with torch.inference_mode(), self._group.guard(f"compare {name}"):
                logits = system.model(system.prompts, logits_to_keep=1).logits[:, -1].float()
                new = generate(system, self._config.new_tokens)
            rows = slice(None) if name == OURS else self._mine
            found[name] = (logits[rows].cpu(), new[rows].cpu())
        expected, tokens = found.pop(OWN)
        related, same = {}, {}
        for name, (logits, new) in found.items():
            errors = torch.tensor([worst_row_error(a, e) for a, e in zip(logits, expected, strict=True)]).double()
            related[name] = {
                # of an even count the mean of the middle two, unlike torch's `median`
                "median_first_logits_error": float(errors.quantile(0.5)),
                "worst_first_logits_error": float(errors.max()),
            }
            same[name] = float((new == tokens).double().mean())
        ranks = self._group.all_gather_object(same)
        shares = {name: {"same_tokens_share": statistics.fmean(rank[name] for rank in ranks)} for name in same}
        worst = harness.largest_of_ranks(self._group, related)
        return {name: worst[name] | shares[name] for name in related}


def _dense(model: Any) -> str:
    """Whether a matrix outside the experts is spread over ranks: "tensor_parallel", or else "replicated"."""
    spread = any(
        isinstance(parameter, DTensor)
        and parameter.dim() == 2
        and any(isinstance(placement, Shard) for placement in parameter.placements)
        for parameter in model.parameters()
    )
    return "tensor_parallel" if spread else "replicated"


def _block(model: Any, experts_name: str) -> Any:
    """The MoE block around an experts module: the router and the experts."""
    return model.get_submodule(experts_name.rpartition(".")[0])


def _routed(
    block: Any, x: torch.Tensor, *, ours: bool
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The hidden states [1, T, H] of an MoE block, and the logits, weights and ids [T, K] that its router chose."""
    calls: list[tuple[Any, ...]] = []
    router = getattr(block, "gate", None) or block.router
    hook = router.register_forward_hook(lambda *call: calls.append(call))
    try:
        returned = block(x.unsqueeze(0))
    finally:
        hook.remove()
    _, args, chosen = calls[0]
    if not ours:  # transformers made the ids those of this rank's experts, by a hook or by another `forward`
        chosen = type(router).forward(router, *args)
    return returned[0] if isinstance(returned, tuple) else returned, chosen
