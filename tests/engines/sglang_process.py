"""One rank of one version of SGLang: all cases, one after another, since importing SGLang takes 15 seconds.

Run as `python sglang_process.py WORLD RANK PORT CHECKPOINTS [CASE ...]`, with SGLang, its dependencies and a folder of
entry points on PYTHONPATH and EP_MOE_SGLANG=1. It prints a line per case; the last one is "all cases passed".
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import sglang_twins
import torch
from safetensors.torch import load_file

sglang_twins.install()

import sglang  # noqa: E402
import sglang_cases  # noqa: E402
import sglang_formats  # noqa: E402
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

WORLD, RANK, PORT = (int(text) for text in sys.argv[1:4])
CHECKPOINTS = Path(sys.argv[4])
OLD = sglang.__version__ == "0.5.17"
MAX_TOKENS = 64
FLOAT32_LIMIT, ROUNDED_LIMIT = 1e-5, 1e-2
OURS = "ep_moe_adopted"  # of a method's class that computes here
SCALED = ("fp8_block", "fp8_tensor", "fp8_modelopt", "fp8_token", "int8_block", "int8_token")
ROUNDED = tuple(f"qwen3_moe_{form}" for form in (*SCALED, "nvfp4", "nvfp4_modelopt", "mxfp8_inverse"))  # tokens too
ONE_LAYER = ("deepseek_v3",)  # the others have two with experts
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
class Engine:
    """A model of SGLang's own class, loaded by its own loader; its MoE blocks are called one by one."""

    name: str
    a2a: str
    model: Any = None

    @property
    def blocks(self) -> dict[int, Any]:
        """The MoE blocks by layer."""
        return {layer: made.mlp for layer, made in enumerate(self.model.model.layers) if hasattr(made.mlp, "experts")}

    @property
    def experts(self) -> list[FusedMoE]:
        """The layers of routed experts."""
        return [block.experts for block in self.blocks.values()]

    @property
    def state(self) -> Any:
        """Of our first layer."""
        return self.experts[0].quant_method.ep_moe

    @property
    def group(self) -> Any:
        """The ranks, as our transports know them."""
        return self.state.group

    @property
    def plugin(self) -> Any:
        """What our layers of this process share."""
        return self.state.plugin

    def use(self, layout: Layout | None) -> None:
        """Load the parameters again with another layout, as SGLang does after a reload of weights."""
        self.plugin.config = dataclasses.replace(self.plugin.config, layout=layout)
        for layer in self.experts:
            layer.quant_method.process_weights_after_loading(layer)

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

    def check_ours(self) -> None:
        """Every layer of experts is ours."""
        ours = [hasattr(type(layer.quant_method), OURS) for layer in self.experts]
        assert len(ours) == (1 if self.name in ONE_LAYER else 2), ours
        assert all(ours), ours

    def check(self, first: int = 9, padded: int = 0) -> float:
        """Compare the output of every block with the reference; return the largest error.

        Args: first: rows of rank 0 if ranks have rows of their own.
        """
        worst = 0.0
        for layer, (given, wanted) in torch.load(CHECKPOINTS / self.name / "blocks.pt").items():
            mine = self.rows_of(given.shape[0], first)
            difference = self.call(self.blocks[layer], given[mine], padded) - wanted[mine]
            if difference.numel() == 0:
                continue
            if self.name in ROUNDED:
                relative = difference.norm(dim=-1) / wanted[mine].norm(dim=-1)
                worst = max(worst, float(relative.nan_to_num(9).max()))
            else:
                worst = max(worst, float(difference.abs().nan_to_num(9).max()))
        limit = ROUNDED_LIMIT if self.name in ROUNDED else FLOAT32_LIMIT
        assert worst < limit, f"{self.name}: {worst:.2e} is not below {limit:g}"
        return worst


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
def engine(name: str, a2a: str, *more: str) -> Iterator[Engine]:
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
    made = Engine(name, a2a)
    try:
        load, device = LoadConfig(load_format="safetensors"), DeviceConfig("cpu")
        made.model = get_model(model_config=config, load_config=load, device_config=device)
        yield made
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def next_port() -> int:
    """A port that no earlier engine of this process has used."""
    global PORT
    PORT += 1
    return PORT


def say(text: str) -> None:
    """A line of the report."""
    print(f"rank {RANK} of {WORLD}: {text} ({time.monotonic() - START:.1f} s)", flush=True)


def attempt(case: Callable[..., None], *args: Any, name: str = "") -> None:
    """Run a case; one that fails is noted, so that a run shows all that do."""
    name = name or case.__name__
    try:
        case(*args)
        say(f"{name}: ok")
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 all of them are shown, and the process fails
        FAILED.append(name)
        traceback.print_exc()
        say(f"{name}: FAILED")


def family(name: str, a2a: str, *more: str) -> Iterator[Engine]:
    """A model in every layout, with uneven rows, none on one rank, and rows of padding; then what the caller adds."""
    with engine(name, a2a, *more) as made:
        made.check_ours()
        for layout in (None, *Layout):
            made.use(layout)
            for extend in (True, False) if layout is None else (True,):
                dp_attention.set_is_extend_in_batch(extend)
                text = f"{'prompts' if extend else 'decode'}, " if layout is None else ""
                say(f"{name}, a2a {a2a}, {text}layout {layout.value if layout else 'auto'}: {made.check():.1e}")
        made.use(None)
        if a2a == "deepep":
            say(f"{name}, a2a {a2a}, all rows on one rank: {made.check(first=0):.1e}")
        say(f"{name}, a2a {a2a}, 5 rows of padding: {made.check(padded=5):.1e}")
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
            attempt(sglang_formats.formats_are_refused)
            attempt(sglang_formats.config_objects)
            attempt(sglang_cases.backend_by_name, arguments, publish)


def two_batches() -> None:
    """SGLang's operations of two batches in turns."""
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
            say(f"{name}, a2a {a2a}, {'prompts' if extend else 'decode'}: {made.check():.1e}")
        tensors = load_file(CHECKPOINTS / name / "model.safetensors")
        made.model.load_weights((key, tensor) for key, tensor in tensors.items() if ".experts." in key)
        made.use(None)
        say(f"{name}, a2a {a2a}, loaded again: {made.check():.1e}")
        attempt(sglang_formats.swaps_are_seen, made, name=f"swaps_are_seen in {name}")
        if form == "awq":  # zero points move with their experts
            attempt(sglang_cases.parameters_stay, made, 8)
        if form == "nvfp4_modelopt":
            attempt(sglang_formats.rows_in_turns, made)
    if form == "int4_group":
        attempt(sglang_formats.runner_is_needed, functools.partial(engine, name, a2a))


def equal_rows() -> None:
    """Ranks with equal rows, each of which sends a slice."""
    for made in family("qwen3_moe_even", "none"):
        attempt(sglang_cases.few_equal_rows, made)
        attempt(sglang_cases.factor_of_the_router, made)


def dead_rank() -> None:
    """The last case of a process."""
    with engine("qwen3_moe_even", "deepep") as made:
        if RANK < WORLD - 1:
            attempt(sglang_cases.dead_rank, made)
        if not FAILED:
            say("all cases passed")
        os._exit(len(FAILED))


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
    CASES |= {"qwen3_moe_two_batches": two_batches, "dead_rank": dead_rank}


FAILED: list[str] = []

if __name__ == "__main__":
    START = time.monotonic()
    faulthandler.dump_traceback_later(float(os.environ["EP_MOE_ENGINE_SECS"]), exit=True)
    sglang_twins.install_twins()
    load_plugins()
    for case in [name for name in CASES if name in (sys.argv[5:] or CASES)]:
        attempt(CASES[case], name=case)
    if FAILED:
        sys.exit(f"failed: {', '.join(FAILED)}")
    say("all cases passed")
