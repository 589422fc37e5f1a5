"""SGLang as `serve_engine` drives it: its `Engine`, which is its server without HTTP, or that server."""

import argparse
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import serve_http

ENVIRON = {
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_SKIP_P2P_CHECK": "1",  # it starts processes without our stand-ins
    "EP_MOE_SERVE_STAND_INS": "sglang",
}
SWITCH = "EP_MOE_SGLANG"


def stand_ins() -> None:
    """Empty modules for the packages that nothing here calls, in each process before it imports SGLang. Its compiled
    kernels, which the first import loads, normalize by themselves where FlashInfer has no such module."""
    import time_sglang

    sys.modules["flashinfer.norm"] = None  # type: ignore[assignment]
    time_sglang._without_others()


def preload() -> None:
    """Nothing: SGLang's modules use CUDA when they are imported, and turns are forked."""


def make(folder: Path, options: argparse.Namespace) -> "Sglang":
    """Start the engine."""
    return Sglang(folder, options)


def arguments(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """SGLang's options of a run: tensor parallel x expert parallel, or with data-parallel attention."""
    found: dict[str, Any] = {
        "model_path": str(folder),
        "skip_tokenizer_init": not options.http,
        "load_format": "dummy",
        "random_seed": 0,
        "context_length": options.max_tokens + 512,
        "chunked_prefill_size": options.max_tokens,
        "max_running_requests": max(options.requests),
        "disable_radix_cache": True,
        "mem_fraction_static": options.memory,
        "tp_size": options.nproc,
        "ep_size": options.nproc,
        "moe_runner_backend": options.moe_backend or "triton",
        "attention_backend": options.attention or "triton",
        "sampling_backend": "pytorch",
        "disable_shared_experts_fusion": True,
        "cuda_graph_bs_decode": list(options.graph_sizes),
        "disable_prefill_cuda_graph": not options.compile,
        "log_level": "info",
    }
    if options.ranks == "dp":
        found |= {"dp_size": options.nproc, "enable_dp_attention": True}
    return found | dict(options.set)


def serve(folder: Path, options: argparse.Namespace, port: int) -> None:
    """Run SGLang's HTTP server until it is ended."""
    stand_ins()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    address = {"host": serve_http.HOST, "port": port, "log_level_http": "warning"}
    launch_server(ServerArgs(**arguments(folder, options), **address))


class Sglang:
    """The engine of `serve_engine`."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        stand_ins()
        import sglang

        self.version = sglang.__version__
        self._engine = sglang.Engine(**arguments(folder, options))

    async def stream(self, prompt: list[int], new_tokens: int, rank: int | None) -> AsyncIterator[list[int]]:
        """Greedy tokens, as they come."""
        sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        found: Any = await self._engine.async_generate(
            input_ids=prompt, sampling_params=sampling, stream=True, routed_dp_rank=rank
        )
        seen = 0
        async for output in found:
            tokens, count = list(output["output_ids"]), output["meta_info"]["completion_tokens"]
            yield tokens[seen:] if len(tokens) == count else tokens  # all so far, or those since the last
            seen = count

    async def first_logprobs(self, prompt: list[int], count: int, rank: int | None) -> dict[int, float]:
        """The most probable tokens after a prompt, and the logarithms of their probabilities."""
        found: Any = await self._engine.async_generate(
            input_ids=prompt,
            sampling_params={"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
            return_logprob=True,
            top_logprobs_num=count,
            routed_dp_rank=rank,
        )
        return {token: value for value, token, _ in found["meta_info"]["output_top_logprobs"][0]}

    def close(self) -> None:
        self._engine.shutdown()
