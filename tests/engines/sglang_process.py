"""All cases of one rank of one version of SGLang, by `engine_process`."""

import argparse
import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import engine_cases
import sglang_twins
import torch
from engine_process import CHECKPOINTS, MAX_TOKENS, RANK, WORLD, Engine, attempt, dead_rank, main, next_port, report
from safetensors.torch import load_file

sglang_twins.install()

import sglang  # noqa: E402
import sglang_cases  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.configs.device_config import DeviceConfig  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.eplb import expert_location  # noqa: E402
from sglang.srt.layers import dp_attention  # noqa: E402
from sglang.srt.layers.moe import utils  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_loader import get_model  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from ep_moe.config import Layout  # noqa: E402

OLD = sglang.__version__ == "0.5.17"
SCALED = ("fp8_block", "fp8_tensor", "fp8_modelopt", "fp8_token", "int8_block", "int8_token")
ROUNDED = tuple(f"qwen3_moe_{form}" for form in (*SCALED, "nvfp4", "nvfp4_modelopt", "mxfp8_inverse"))  # tokens too
FORMATS: dict[str, tuple[str, ...]] = {  # of packed weights and others that have one case: a2a, and more options
    "fp8_token": ("none", "--quantization", "w8a8_fp8"),
    "int8_token": ("deepep", "--quantization", "w8a8_int8"),
    "int8_block": ("none",),
    "fp8_modelopt": ("none",),
    "int4_group": ("deepep",),
    "int4_channel": ("none",),
    "int8_packed": ("none",),
    "gptq": ("deepep",),
    "gptq_static": ("none",),
    "gptq8": ("none",),
    "gptq_zp": ("none", "--quantization", "moe_wna16"),
    "awq": ("deepep",),
    "nvfp4_modelopt": ("deepep",),
    "nvfp4": ("none",),
    "nvfp4_w4a16": ("none",),
    "mxfp8_inverse": ("deepep",),
}
if OLD:  # it refuses weights alone in NVFP4, and loads zero points of moe_wna16 on one rank
    del FORMATS["nvfp4_w4a16"]
    if WORLD > 1:
        del FORMATS["gptq_zp"]


@dataclasses.dataclass
class SglangEngine(Engine):
    """A model of SGLang, whose MoE blocks are called one by one."""

    a2a: str = "none"

    @property
    def blocks(self) -> dict[int, Any]:
        """The MoE blocks by layer."""
        return {layer: made.mlp for layer, made in enumerate(self.model.model.layers) if hasattr(made.mlp, "experts")}

    @property
    def experts(self) -> list[FusedMoE]:
        """The layers of routed experts."""
        return [block.experts for block in self.blocks.values()]

    def rows_of(self, total: int, first: int) -> slice:
        """This rank's rows of all: with rows of its own, rank 0 has the first and the last rank the others."""
        if self.a2a == "none" or WORLD == 1:
            return slice(0, total)
        return slice(0, first) if RANK == 0 else slice(first, total)

    def call(self, block: Any, rows: torch.Tensor, padded: int = 0) -> torch.Tensor:
        """A block's output [T, H], summed over ranks as the model around the block does; `padded` rows follow."""
        count, route = rows.shape[0], block.topk.forward

        def routed(*args: Any, **options: Any) -> Any:
            if not padded or OLD:  # whose router masks padding on GPUs alone
                output = route(*args, **options)
                output.topk_ids[count:] = -1
                return output
            return route(*args, **options | {"num_token_non_padded": torch.tensor(count, dtype=torch.int32)})

        rows = torch.cat([rows, torch.full((padded, rows.shape[1]), 1e3)])
        batch = types.SimpleNamespace(num_token_non_padded=None, forward_mode=ForwardMode.EXTEND, attn_cp_metadata=None)
        with torch.no_grad(), mock.patch.object(block.topk, "forward", routed):
            output = block(rows.clone(), batch)
            if self.a2a == "none" and WORLD > 1 and not reduces(block):
                output = parallel_state.get_tp_group().all_reduce(output)
        return output[: output.shape[0] - padded]

    def check(self, first: int = 9, padded: int = 0) -> float:
        """Compare the output of every block with the reference; return the largest error.

        Args: first: rows of rank 0 if ranks have rows of their own.
        """
        pairs = []
        for layer, (given, wanted) in torch.load(CHECKPOINTS / self.name / "blocks.pt").items():
            mine = self.rows_of(given.shape[0], first)
            pairs.append((self.call(self.blocks[layer], given[mine], padded), wanted[mine]))
        return self.compare(pairs, rounded=self.name in ROUNDED)


def reduces(block: Any) -> bool:
    """Whether a block sums its output over ranks itself: in 0.5.23 the layer around it does."""
    return OLD or getattr(block, "reduce_results", False)


def arguments(name: str, a2a: str, *more: str) -> ServerArgs:
    """SGLang's options, from its command line."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = {
        "--model-path": str(CHECKPOINTS / name),
        "--device": "cpu",
        "--dtype": "float32",
        "--tp-size": str(WORLD),
        "--ep-size": str(WORLD),
        "--attention-backend": "triton" if "gpt_oss" in name else "torch_native",
        "--moe-a2a-backend": a2a,
        "--chunked-prefill-size": str(MAX_TOKENS),
        "--max-running-requests": "8",
    }
    words = [word for pair in given.items() for word in pair]
    flags = ["--skip-tokenizer-init", "--disable-shared-experts-fusion"]
    return ServerArgs.from_cli_args(parser.parse_args([*words, *flags, *more]))


def publish(args: ServerArgs) -> None:
    """Make options those of this process, as SGLang's scheduler does."""
    if OLD:
        runtime_context.publish(args, role="scheduler")
        utils.initialize_moe_config(args)
    else:
        runtime_context.publish(args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=RANK))
        utils.initialize_moe_config()


@contextlib.contextmanager
def engine(name: str, a2a: str, *more: str) -> Iterator[SglangEngine]:
    """SGLang's ranks and the model of a checkpoint."""
    args = arguments(name, a2a, *more)
    publish(args)
    config = ModelConfig.from_server_args(args)
    config.dtype = torch.float32  # SGLang runs MXFP4 in bfloat16 alone
    parallel_state.init_distributed_environment(
        world_size=WORLD,
        rank=RANK,
        local_rank=RANK,
        backend="gloo",
        distributed_init_method=f"tcp://127.0.0.1:{next_port()}",
    )
    sizes = (WORLD, WORLD) if OLD else ()
    parallel_state.initialize_model_parallel(*sizes, backend="gloo")
    dp_attention.initialize_dp_attention(*((args, config) if OLD else (args,)))
    if OLD:  # its blocks ask where logical experts are
        found = expert_location.ExpertLocationMetadata.init_trivial(args, config, RANK)
        expert_location.set_global_expert_location_metadata(found, allow_overwrite=True)
    made = SglangEngine(name, a2a=a2a)
    try:
        load, device = LoadConfig(load_format="safetensors"), DeviceConfig("cpu")
        made.model = get_model(model_config=config, load_config=load, device_config=device)
        yield made
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def family(name: str, a2a: str, *more: str) -> Iterator[SglangEngine]:
    """A model in every layout, with uneven rows, none on one rank, and rows of padding; then what the caller adds."""
    with engine(name, a2a, *more) as made:
        made.check_ours()
        for layout in (None, *Layout):
            made.use(layout)
            for extend in (True, False) if layout is None else (True,):
                dp_attention.set_is_extend_in_batch(extend)
                text = f"{'prompts' if extend else 'decode'}, " if layout is None else ""
                report(f"{name}, a2a {a2a}, {text}layout {layout.value if layout else 'auto'}: {made.check():.1e}")
        made.use(None)
        if a2a == "deepep":
            report(f"{name}, a2a {a2a}, all rows on one rank: {made.check(first=0):.1e}")
        report(f"{name}, a2a {a2a}, 5 rows of padding: {made.check(padded=5):.1e}")
        yield made


def qwen3_moe() -> None:
    """The first family, and what is tested with one alone."""
    for made in family("qwen3_moe_even", "deepep"):
        attempt(sglang_cases.faults_are_seen, made)
        attempt(sglang_cases.parameters_stay, made)
        attempt(sglang_cases.layout_of_the_step, made)
        attempt(sglang_cases.hooks_of_the_dispatcher, made)
        attempt(sglang_cases.load_is_recorded, made)
        if WORLD > 1:
            attempt(sglang_cases.balanced, made)
        attempt(sglang_cases.bad_input, made, MAX_TOKENS)
        attempt(sglang_cases.bound_of_the_step, made)
        attempt(sglang_cases.other_layers, made)
        if WORLD == 1:
            attempt(sglang_cases.hooks_are_checked)
            attempt(sglang_cases.formats_are_refused)
            attempt(sglang_cases.config_objects)
            attempt(sglang_cases.backend_by_name, arguments, publish)


def two_batches() -> None:
    """SGLang's operations of two batches that alternate."""
    with engine("qwen3_moe_even", "deepep", "--enable-two-batch-overlap") as made:
        attempt(sglang_cases.two_batches, made)


def plain(name: str, a2a: str) -> None:
    """A family without cases of its own."""
    for _ in family(name, a2a):
        pass


def packed(form: str, a2a: str, *more: str) -> None:
    """A format in the layouts of both kinds of steps; swapped experts are seen."""
    name = f"qwen3_moe_{form}"
    with engine(name, a2a, *more) as made:
        made.check_ours()
        made.use(None)
        for extend in (True, False):
            dp_attention.set_is_extend_in_batch(extend)
            report(f"{name}, a2a {a2a}, {'prompts' if extend else 'decode'}: {made.check():.1e}")
        tensors = load_file(CHECKPOINTS / name / "model.safetensors")
        made.model.load_weights((key, tensor) for key, tensor in tensors.items() if ".experts." in key)
        made.use(None)
        report(f"{name}, a2a {a2a}, loaded again: {made.check():.1e}")
        matrix = made.state.weights.w13
        attempt(engine_cases.swaps_are_seen, made, matrix, False, name=f"swaps_are_seen in {name}")
        if form == "awq":  # zero points move with their experts
            attempt(sglang_cases.parameters_stay, made, 8)
        if form == "nvfp4_modelopt":
            attempt(sglang_cases.rows_in_turns, made)
    if form == "int4_group":
        attempt(sglang_cases.runner_is_needed, functools.partial(engine, name, a2a))


def equal_rows() -> None:
    """Ranks with equal rows, each of which computes its experts' part."""
    for made in family("qwen3_moe_even", "none"):
        attempt(sglang_cases.few_equal_rows, made)
        attempt(sglang_cases.factor_of_the_router, made)


def last_rank_ends() -> None:
    """The others name it."""
    dead_rank(engine("qwen3_moe_even", "deepep"), sglang_cases.dead_rank)


CASES: dict[str, Callable[[], None]] = {
    "qwen3_moe": qwen3_moe,
    "qwen3_moe_equal_rows": equal_rows,
    **{
        f"qwen3_moe_{form}": functools.partial(plain, f"qwen3_moe_{form}", "deepep")
        for form in ("fp8_block", "fp8_tensor", "fp8_token")
    },
    **{f"{form}_format": functools.partial(packed, form, *options) for form, options in FORMATS.items()},
    "deepseek_v3": functools.partial(plain, "deepseek_v3", "deepep"),
    "gpt_oss_mxfp4": functools.partial(plain, "gpt_oss_mxfp4", "none"),
    "deepseek_v3_equal_rows": functools.partial(plain, "deepseek_v3", "none"),
}
if WORLD == 1:  # SGLang does not load unquantized gpt-oss on several expert-parallel ranks
    CASES["gpt_oss"] = functools.partial(plain, "gpt_oss", "none")
else:
    CASES |= {"qwen3_moe_two_batches": two_batches, "dead_rank": last_rank_ends}


if __name__ == "__main__":
    sglang_twins.install_twins()
    load_plugins()
    main(CASES)
