"""`ep-moe bench serve`: a server of OpenAI's protocol, ours or another one, measured by its clients.

Each level is a number of clients that ask again once they are answered, or that many at most at a rate of Poisson
arrivals. Times are those that the client sees: to the first text (TTFT), per token after it (TPOT), between chunks
(ITL), and to the end. Tokens are those of the server's own usage.
"""

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import openai

from ep_moe.bench.configs import ServeBenchConfig
from ep_moe.environment import client_key
from ep_moe.report.records import now

PERCENTILES = (50, 90, 99)
_TIMES = {
    "ttft_ms": "to the first text",
    "tpot_ms": "per token after it",
    "itl_ms": "between chunks",
    "e2e_ms": "whole",
}
_SHOWN_ERRORS = 5
MOST_ERROR_CHARS = 200


@dataclasses.dataclass(kw_only=True)
class Answer:
    """What a client saw of one request, in seconds since its start; `error` if it got no whole answer."""

    chunks: list[float] = dataclasses.field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    error: str = ""

    def times(self) -> dict[str, list[float]]:
        """Milliseconds under the names of `_TIMES`."""
        first, last = self.chunks[0], self.chunks[-1]
        after = self.new_tokens - 1
        return {
            "ttft_ms": [first * 1e3],
            "tpot_ms": [(last - first) / after * 1e3] if after > 0 else [],
            "itl_ms": [(late - early) * 1e3 for early, late in zip(self.chunks, self.chunks[1:], strict=False)],
            "e2e_ms": [self.end * 1e3],
        }


def bench_serve(config: ServeBenchConfig) -> dict[str, Any]:
    """Measure every level; returns the report: `ok` if every request was answered whole, and a row for each level.

    Errors: RuntimeError for a server that does not answer a first request; ValueError for a text that is too short.
    """
    return asyncio.run(_bench(config))


async def _bench(config: ServeBenchConfig) -> dict[str, Any]:
    key = client_key() or "none"
    async with openai.AsyncOpenAI(
        base_url=config.url, api_key=key, max_retries=0, timeout=config.timeout_secs
    ) as client:
        try:
            model = config.model or (await client.models.list()).data[0].id
        except (openai.OpenAIError, IndexError) as error:
            raise RuntimeError(f"url ({config.url!r}) does not name its models: {error}") from None
        first = await _ask(client, config, model, prompts(config, 1)[0])
        if first.error:
            raise RuntimeError(f"url ({config.url!r}) does not answer: {first.error}")
        rows = [await _level(client, config, model, *level) for level in config.levels]
    more = {"url": config.url, "model": model, "date": now(), "new_tokens": config.new_tokens}
    return {"ok": not any(row["failed"] for row in rows), **more, "rows": rows}


def prompts(config: ServeBenchConfig, count: int) -> list[str]:
    """Prompts of `prompt_chars` characters from random places of the text. Errors: ValueError for a short text."""
    text = Path(config.text).read_text(encoding="utf-8", errors="replace")
    if len(text) < config.prompt_chars:
        raise ValueError(f"text has {len(text)} characters, prompt_chars ({config.prompt_chars}) needs as many")
    places = numpy.random.default_rng(config.seed).integers(0, len(text) - config.prompt_chars + 1, count)
    return [text[place : place + config.prompt_chars] for place in places]


async def _level(
    client: openai.AsyncOpenAI, config: ServeBenchConfig, model: str, concurrency: int, rate: float
) -> dict[str, Any]:
    """Send the requests of one level; returns its row."""
    asked = prompts(config, config.requests)
    gaps = numpy.random.default_rng(config.seed).exponential(1 / rate if rate else 0.0, len(asked))
    permits, start = asyncio.Semaphore(concurrency), time.perf_counter()

    async def one(prompt: str, due: float) -> Answer:
        await asyncio.sleep(max(start + due - time.perf_counter(), 0.0))
        async with permits:
            return await _ask(client, config, model, prompt)

    answers = await asyncio.gather(*map(one, asked, numpy.cumsum(gaps)))
    secs = time.perf_counter() - start
    return {"concurrency": concurrency, "rate": rate, **summary(answers, secs)}


def summary(answers: Sequence[Answer], secs: float) -> dict[str, Any]:
    """The figures of answers that took `secs` together: percentiles in milliseconds, rates per second."""
    right = [answer for answer in answers if not answer.error]
    errors = [answer.error for answer in answers if answer.error]
    times: dict[str, dict[str, float]] = {}
    for name in _TIMES:
        found = [value for answer in right for value in answer.times()[name]]
        if found:
            values = numpy.percentile(found, PERCENTILES)
            times[name] = {f"p{at}": float(value) for at, value in zip(PERCENTILES, values, strict=True)}
            times[name]["mean"] = float(numpy.mean(found))
    return {
        "requests": len(answers),
        "failed": len(errors),
        "errors": sorted(set(errors))[:_SHOWN_ERRORS],
        "secs": secs,
        "requests_per_sec": len(right) / secs,
        "prompt_tokens": sum(answer.prompt_tokens for answer in right),
        "new_tokens": sum(answer.new_tokens for answer in right),
        "tokens_per_sec": sum(answer.new_tokens for answer in right) / secs,
        **times,
    }


async def _ask(client: openai.AsyncOpenAI, config: ServeBenchConfig, model: str, prompt: str) -> Answer:
    answer, start = Answer(), time.perf_counter()
    try:
        asked = client.completions.with_streaming_response.create(
            model=model,
            prompt=prompt,
            max_tokens=config.new_tokens,
            temperature=config.temperature,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True} if config.ignore_eos else None,
        )
        async with asked as response:
            async for text, usage in _parts(response.iter_bytes()):
                if text:
                    answer.chunks.append(time.perf_counter() - start)
                if usage is not None:
                    answer.prompt_tokens, answer.new_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.end = time.perf_counter() - start
        if not answer.chunks or not answer.new_tokens:
            answer.error = "the answer has no text, or no usage"
    except openai.OpenAIError as error:
        body = getattr(error, "body", None)  # OpenAI's error object
        answer.error = str(body.get("message", body) if isinstance(body, dict) else error)[:MOST_ERROR_CHARS]
    return answer


class _StreamError(openai.OpenAIError):
    def __init__(self, body: Any) -> None:
        super().__init__(str(body))
        self.body = body


async def _parts(body: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, Any]]:
    """Text and usage of each event. Read here: openai's objects of 32 streams take longer than a fast server's passes.

    Errors: _StreamError for one of the server.
    """
    rest = b""
    async for part in body:
        *lines, rest = (rest + part).split(b"\n")  # a text may have other characters that end lines
        for line in lines:
            name, _, content = line.partition(b":")
            if name != b"data" or content.strip() == b"[DONE]":
                continue
            chunk = json.loads(content)
            if chunk.get("error"):
                raise _StreamError(chunk["error"])
            yield "".join(choice["text"] or "" for choice in chunk["choices"]), chunk.get("usage")


def plot_serve(report: dict[str, Any], path: Path) -> None:
    """Draw throughput and times against the level.

    Errors: RuntimeError without matplotlib, or for a file that cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("a plot needs matplotlib; install: pip install 'ep-moe[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report["rows"]
    by_rate = len({row["rate"] for row in rows}) > 1
    levels = [row["rate"] if by_rate else row["concurrency"] for row in rows]
    figure, (rates, times) = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    rates.plot(levels, [row["tokens_per_sec"] for row in rows], "o-", color="C0")
    rates.set_ylabel("new tokens/s")
    for name, color in (("ttft_ms", "C0"), ("tpot_ms", "C1")):
        for at, style in (("p50", "o-"), ("p99", "o:")):
            values = [row.get(name, {}).get(at) for row in rows]
            times.plot(levels, values, style, color=color, label=f"{name.removesuffix('_ms').upper()} {at}")
    times.set_ylabel("ms")
    times.set_yscale("log")
    times.legend(fontsize=8)
    for axes in (rates, times):
        axes.set_xlabel("requests/s" if by_rate else "clients")
        axes.set_xscale("log", base=2)
        axes.set_xticks(levels, [f"{level:g}" for level in levels])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.suptitle(f"{report['model']} at {report['url']}", fontsize=9)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise RuntimeError(f"plot ({str(path)!r}) cannot be written: {error}") from None
    finally:
        pyplot.close(figure)
