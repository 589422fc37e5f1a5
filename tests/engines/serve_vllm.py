"""vLLM as `serve_engine` drives it: its asynchronous engine, as its server does, or `vllm.LLM` in this process."""

import argparse
import importlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import serve_http

# both sides: no code of others is sought on the network
ENVIRON = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # vLLM's default; what was imported need not be again
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it imports FlashInfer whether or not it is there
}
SWITCH = "EP_MOE_VLLM"


def preload() -> None:
    """Import what each process of vLLM imports."""
    import serve_models

    serve_models.stand_in_numba()
    for name in ("v1.engine.async_llm", "v1.worker.gpu_worker", "model_executor.warmup.kernel_warmup"):
        importlib.import_module(f"vllm.{name}")


def make(folder: Path, options: argparse.Namespace) -> "Vllm | InProcess":
    """Start the engine."""
    return InProcess(folder, options) if options.in_process else Vllm(folder, options)


def arguments(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """vLLM's options of a run."""
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": list(options.graph_sizes)}
    if not options.compile:
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    found: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": not options.http,
        "load_format": "dummy",
        "generation_config": "vllm",
        "seed": 0,
        "max_model_len": options.max_tokens + 512,
        "max_num_batched_tokens": options.max_tokens,
        "max_num_seqs": max(options.requests),
        "enable_prefix_caching": False,
        "gpu_memory_utilization": options.memory,
        "enable_expert_parallel": options.nproc > 1,
        "compilation_config": compilation,
    }
    if options.ranks == "dp":
        found["data_parallel_size"] = options.nproc
    else:
        found["tensor_parallel_size"] = options.nproc
    if options.attention:
        found["attention_backend"] = options.attention
    if options.moe_backend:
        found["moe_backend"] = options.moe_backend
    return found | ({"enable_sleep_mode": True} if options.sleep else {}) | dict(options.set)


def serve(folder: Path, options: argparse.Namespace, port: int) -> None:
    """Run vLLM's HTTP server until it is ended."""
    import serve_models

    serve_models.stand_in_numba()
    import uvloop
    from vllm.entrypoints.openai.api_server import run_server
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    vars(found).update(arguments(folder, options), host=serve_http.HOST, port=port, uvicorn_log_level="warning")
    validate_parsed_serve_args(found)
    uvloop.run(run_server(found))


class Vllm:
    """The engine of `serve_engine`."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.version, self._sent = vllm.__version__, 0
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(folder, options), disable_log_stats=True))

    def _ask(self, prompt: list[int], rank: int | None, **sampling: Any) -> AsyncIterator[Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.DELTA}
        self._sent += 1
        return self._engine.generate(
            {"prompt_token_ids": prompt},
            SamplingParams(**greedy, **sampling),
            request_id=str(self._sent),
            data_parallel_rank=rank,
        )

    async def stream(self, prompt: list[int], new_tokens: int, rank: int | None) -> AsyncIterator[list[int]]:
        """Greedy tokens, as they come."""
        async for output in self._ask(prompt, rank, max_tokens=new_tokens):
            yield list(output.outputs[0].token_ids)

    async def first_logprobs(self, prompt: list[int], count: int, rank: int | None) -> dict[int, float]:
        """The most probable tokens after a prompt, and the logarithms of their probabilities."""
        found: dict[int, float] = {}
        async for output in self._ask(prompt, rank, max_tokens=1, logprobs=count):
            for one in output.outputs[0].logprobs or []:
                found |= {token: value.logprob for token, value in one.items()}
        return found

    async def sleep(self) -> None:
        """Keep the weights in the host's memory, and bring them back."""
        await self._engine.sleep(level=1)
        await self._engine.wake_up()

    def close(self) -> None:
        self._engine.shutdown()


class InProcess:
    """`vllm.LLM`: its scheduler, and one rank's worker, run in this process; the steps of all requests are one call."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm

        self.version = vllm.__version__
        self._engine = vllm.LLM(**arguments(folder, options), disable_log_stats=False)

    def answers(self, prompts: list[list[int]], new_tokens: int) -> list[tuple[list[int], float, float]]:
        """Of each request the greedy tokens, and the seconds to the first and to the last, by vLLM's own clock."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        asked, began = [{"prompt_token_ids": prompt} for prompt in prompts], time.monotonic()
        found = self._engine.generate(asked, sampling, use_tqdm=False)
        return [
            (list(one.outputs[0].token_ids), one.metrics.first_token_ts - began, one.metrics.last_token_ts - began)
            for one in found
        ]

    def close(self) -> None:
        """Nothing of it outlives the process."""
