"""An engine's own HTTP server as `serve_engine` drives it, asked through OpenAI's completions API.

The model's tokenizer has a word for each id, which is its number: an answer's text names its tokens.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import socket
import time
import types
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
START = "spawn"  # a fork of a turn hangs where it starts the printing of stacks again
ASKS_AGAIN_SECS = 0.2  # whether the server is ready
ENDS_SECS = 10.0


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer for the config in `folder`, whose words are the numbers of their ids."""
    import tokenizers
    import transformers

    count = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = tokenizers.models.WordLevel({str(number): number for number in range(count)}, unk_token="0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


class HttpServer:
    """The engine of `serve_engine`. `module.serve` is the server, which runs in a process of its own."""

    def __init__(self, module: types.ModuleType, folder: Path, options: argparse.Namespace) -> None:
        import openai

        write_tokenizer(folder)
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        self.version, self._model = importlib.metadata.version(options.engine), str(folder)
        process = multiprocessing.get_context(START).Process
        self._process = process(target=module.serve, args=(folder, options, port))
        self._process.start()
        self._wait(f"http://{HOST}:{port}/health")
        self._client = openai.AsyncOpenAI(base_url=f"http://{HOST}:{port}/v1", api_key="none", max_retries=0)

    def _wait(self, url: str) -> None:
        """Until the server is ready. Errors: RuntimeError if it ends."""
        while self._process.is_alive():
            try:
                with urllib.request.urlopen(url, timeout=ENDS_SECS):
                    return
            except OSError:  # also an answer that says not yet
                time.sleep(ASKS_AGAIN_SECS)
        raise RuntimeError(f"the server ended before it was ready, with exit code {self._process.exitcode}")

    async def _ask(self, prompt: list[int], rank: int | None, **sampling: Any) -> Any:
        placed = {} if rank is None else {"routed_dp_rank": rank}  # SGLang's
        return await self._client.completions.create(
            model=self._model,
            prompt=prompt,
            temperature=0.0,
            extra_body={"ignore_eos": True, **placed},
            extra_headers={} if rank is None else {"X-data-parallel-rank": str(rank)},  # vLLM's
            **sampling,
        )

    async def stream(self, prompt: list[int], new_tokens: int, rank: int | None) -> AsyncIterator[list[int]]:
        """Greedy tokens, as they come."""
        async for chunk in await self._ask(prompt, rank, max_tokens=new_tokens, stream=True):
            for choice in chunk.choices:
                yield [int(word) for word in choice.text.split()]

    async def first_logprobs(self, prompt: list[int], count: int, rank: int | None) -> dict[int, float]:
        """The most probable tokens after a prompt, and the logarithms of their probabilities."""
        found = await self._ask(prompt, rank, max_tokens=1, logprobs=count)
        return {int(word): value for word, value in found.choices[0].logprobs.top_logprobs[0].items()}

    def close(self) -> None:
        self._process.terminate()
        self._process.join(ENDS_SECS)
        self._process.kill()
