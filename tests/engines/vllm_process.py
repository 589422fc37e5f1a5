"""All cases of one rank of one version of vLLM, by `engine_process`; EP_MOE_ENGINE_DEVICE=cuda puts models on a GPU."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import vllm
import vllm_cases
import vllm_twins
from engine_process import CHECKPOINTS, MAX_TOKENS, RANK, WORLD, Engine, attempt, dead_rank, main, next_port, report
from prompts import prompts
from vllm.config import DeviceConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader import get_model
from vllm_twins import DEVICE

from ep_moe.config import Layout

SCALED = ("fp8_block", "fp8_tensor", "fp8_modelopt", "fp8_token", "int8_token")
ROUNDED = tuple(
    f"qwen3_moe_{form}" for form in (*SCALED, "nvfp4", "nvfp4_modelopt", "mxfp8", "mxfp8_modelopt")
)  # tokens too
OLD = vllm.__version__ == "0.26.0"
CHECKPOINT = {"gptq_rows": "gptq", "awq_rows": "awq"}  # of forms that share one
PLAIN = "fp8_modelopt int4_group int4_channel int4_zp int8_packed int8_packed_zp gptq gptq8 gptq_static awq"
PLAIN += " nvfp4_w4a16 nvfp4 nvfp4_modelopt mxfp4 mxfp8 mxfp8_modelopt"
FORMATS: dict[str, dict[str, str]] = {form: {} for form in PLAIN.split()}  # those that have one case: more options
FORMATS |= {form: {"quantization": "moe_wna16"} for form in CHECKPOINT}
if not OLD:
    del FORMATS["gptq_static"]  # it refuses desc_act
if WORLD > 1:
    del FORMATS["awq_rows"]  # it loads zero points of moe_wna16 on one rank
else:  # two ranks run the others
    FORMATS = {form: FORMATS[form] for form in ("int4_group", "awq_rows", "nvfp4")}


@dataclasses.dataclass
class VllmEngine(Engine):
    """A model of vLLM, on ranks with data or tensor parallelism."""

    dp: int = 1
    config: Any = None

    @property
    def experts(self) -> list[Any]:
        """The layers of routed experts."""
        return [module for module in self.model.modules() if isinstance(module, RoutedExperts)]

    @property
    def rank(self) -> int:
        """This rank among those with rows of their own."""
        return RANK % self.dp

    def forward(self, indices: list[int], padded: int = 0) -> list[torch.Tensor]:
        """Logits of prompts; with data parallelism a rank has those of its own, and `padded` rows behind them."""
        mine = indices[self.rank :: self.dp]
        lengths = [len(prompts()[index]) for index in mine] + [padded] * bool(padded)
        ids = torch.cat([*(prompts()[index] for index in mine), torch.zeros(padded, dtype=torch.int64)])
        vllm_twins.LENGTHS[:] = lengths
        counts = [sum(len(prompts()[index]) for index in indices[rank :: self.dp]) + padded for rank in range(self.dp)]
        context: dict[str, Any] = {"num_tokens": len(ids), "batch_descriptor": BatchDescriptor(len(ids))}
        if self.dp > 1:
            context["num_tokens_across_dp"] = torch.tensor(counts, dtype=torch.int32)
        if padded:
            context["is_padding"] = (torch.arange(len(ids)) >= len(ids) - padded).to(DEVICE)
        positions = torch.cat([torch.arange(length) for length in lengths])
        with torch.no_grad(), set_forward_context(None, self.config, **context):
            logits = self.model.compute_logits(self.model(ids.to(DEVICE), positions.to(DEVICE)))
        return list(logits.split(lengths))[: len(mine)]

    def check(self, padded: int = 0) -> float:
        """Compare the logits of all prompts with the reference; return the largest error."""
        reference = torch.load(CHECKPOINTS / self.name / "reference.pt", map_location=DEVICE)
        found = self.forward(list(range(len(reference))), padded)
        pairs = zip(found, reference[self.rank :: self.dp], strict=True)
        return self.compare(pairs, rounded=self.name in ROUNDED)


@contextlib.contextmanager
def engine(name: str, *, tp: int = 1, **options: Any) -> Iterator[VllmEngine]:
    """vLLM's ranks and the model of a checkpoint."""
    dp = WORLD // tp
    port = next_port(10)
    config = EngineArgs(
        model=str(CHECKPOINTS / name),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=8,
        enable_expert_parallel=WORLD > 1,
        tensor_parallel_size=tp,
        **options,
    ).create_engine_config()
    config.device_config = DeviceConfig(device=DEVICE)
    if dp > 1:
        parallel = config.parallel_config
        parallel.data_parallel_size, parallel.data_parallel_rank = dp, RANK
        parallel.data_parallel_master_ip, parallel.data_parallel_master_port = "127.0.0.1", port
        parallel._data_parallel_master_port_list = [port + step for step in range(1, 5)]
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=tp,
            rank=RANK % tp,
            distributed_init_method=f"tcp://127.0.0.1:{port + 5}",
            local_rank=RANK,
            backend="gloo",
        )
        parallel_state.initialize_model_parallel(tp, 1)
        made = VllmEngine(name, dp=dp, config=config)
        try:
            made.model = get_model(vllm_config=config)
            yield made
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def family(name: str, tp: int = 1) -> Iterator[VllmEngine]:
    """A model in every layout, with and without rows of padding; then what the caller adds."""
    with engine(name, tp=tp) as made:
        made.check_ours()
        for layout in (None, *Layout):
            made.use(layout)
            error = made.check()
            report(f"{name}, tp {tp}, layout {'auto' if layout is None else layout.value}: {error:.1e}")
        report(f"{name}, tp {tp}, 5 rows of padding: {made.check(padded=5):.1e}")
        yield made


def qwen3_moe() -> None:
    """The first family, and what is tested with one alone."""
    for made in family("qwen3_moe"):
        cases = vllm_cases
        for case in (cases.faults_are_seen, cases.parameters_stay, cases.ranks_without_rows):
            attempt(case, made)
        if WORLD > 1:
            attempt(cases.two_slots, made)
            attempt(cases.bad_input, made, MAX_TOKENS)
            attempt(cases.workspace_is_locked, made, MAX_TOKENS)
        else:
            attempt(cases.nothing_is_sent, made)
            attempt(cases.crossed, made)
            attempt(cases.hooks_are_checked)
            attempt(cases.formats_are_refused)
        attempt(cases.other_layers, made)


def deepseek_v3(tp: int = 1) -> None:
    """Groups, a bias, a shared expert."""
    for made in family("deepseek_v3", tp):
        attempt(vllm_cases.shared_experts_in_order, made)
        if made.dp > 1:
            attempt(vllm_cases.balanced, made)
        else:
            attempt(vllm_cases.nothing_is_sent, made)


def plain(name: str) -> None:
    """A family without cases of its own."""
    for _ in family(name):
        pass


def packed(form: str, **options: Any) -> None:
    """A format in one layout of each kind, and what is tested with such weights alone."""
    name = f"qwen3_moe_{CHECKPOINT.get(form, form)}"
    with engine(name, **options) as made:
        made.check_ours()
        report(f"{form}, layout auto: {made.check():.1e}")
        made.use(Layout.FLAT)
        report(f"{form}, layout flat: {made.check():.1e}")
        attempt(vllm_cases.reloaded, made, name=f"reloaded in {form}")
        if (
            form != "fp8_modelopt"
        ):  # of which vLLM counts one scale twice, and processes weights before the last is there
            attempt(vllm_cases.reloaded_in_place, made, name=f"reloaded_in_place in {form}")
        attempt(vllm_cases.swaps_are_seen, made, name=f"swaps_are_seen in {form}")
        if form == "awq":  # zero points move with their experts
            attempt(vllm_cases.parameters_stay, made)


def last_rank_ends() -> None:
    """The others name it."""
    dead_rank(engine("qwen3_moe"), vllm_cases.dead_rank)


CASES: dict[str, Callable[[], None]] = {
    "qwen3_moe": qwen3_moe,
    **{f"qwen3_moe_{form}": functools.partial(plain, f"qwen3_moe_{form}") for form in SCALED if form != "fp8_modelopt"},
    **{f"qwen3_moe_{form}": functools.partial(packed, form, **options) for form, options in FORMATS.items()},
    "deepseek_v3": deepseek_v3,
    "gpt_oss": functools.partial(plain, "gpt_oss"),
    "gpt_oss_mxfp4": functools.partial(plain, "gpt_oss_mxfp4"),
}
if WORLD > 1:
    CASES |= {"deepseek_v3_tp": functools.partial(deepseek_v3, tp=WORLD), "dead_rank": last_rank_ends}


if __name__ == "__main__":
    vllm_twins.install()
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    main(CASES)
