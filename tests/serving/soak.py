"""A server over many requests: `python tests/serving/soak.py` (no test: it takes minutes).

Starts `ep-moe serve` with the shipped model on 2 CPU ranks, asks for completions, chats, log-probabilities, several
choices and streams, of which some clients leave, and prints the resident memory of every process at equal intervals.
With `--secs 60 --clients 64` all clients ask for streams for so long, leave three of ten, and compare every text with
the one that the server gave when nobody else asked; another text or an error ends it with exit code 1.
"""

import argparse
import asyncio
import collections
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai

from ep_moe.app.start import SHIPPED_TEXT

NEW_TOKENS = 24


def processes(root: int) -> dict[int, str]:
    """The process and all its descendants that serve, with the end of their command lines."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found, front = {}, [root]
    while front:
        pid = front.pop()
        found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[-60:].strip()
        front += [child for child, parent in parents.items() if parent == pid]
    return found


def resident(pids: list[int]) -> list[float]:
    """Resident memory of each process in MiB, pages shared with others included."""
    page = os.sysconf("SC_PAGE_SIZE") / 2**20
    return [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in pids]


def body(chance: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    """The path and body of a request, of one of several kinds."""
    text = "".join(chance.choice("abcdefgh ijklmnop.,") for _ in range(chance.randint(1, 60)))
    more: dict[str, Any] = {"max_tokens": chance.randint(1, 4), "temperature": chance.choice((0, 1)), "seed": number}
    kind = number % 8
    if kind == 0:
        return "chat/completions", more | {"messages": [{"role": "user", "content": text}], "top_p": 0.9}
    if kind == 1:
        more |= {"logprobs": 3, "echo": True}
    elif kind == 2:
        more |= {"n": 2, "stop": ["e", "the "], "presence_penalty": 0.5}
    elif kind == 3:
        more |= {"logit_bias": {str(number % 256): 5}, "min_tokens": 1}
    elif kind == 4:
        more |= {"temperature": 9}  # refused
    elif kind == 5:
        more |= {"regex": f"(a|b){{1,3}}{number % 1000}"}  # each of them another grammar
    return "completions", more | {"prompt": text}


async def ask(client: openai.AsyncOpenAI, number: int) -> str:
    """One request, every other one a stream, of which a third are left; returns what became of it."""
    chance = random.Random(number)
    path, asked = body(chance, number)
    call: Any = client.chat.completions if path == "chat/completions" else client.completions
    prompt = {name: asked.pop(name) for name in ("prompt", "messages") if name in asked}
    try:
        if chance.randrange(2):
            await call.create(model="", extra_body=asked, **prompt)
            return "answered"
        leaves = not chance.randrange(3)
        more = asked | {"max_tokens": 60} if leaves else asked
        async with await call.create(model="", stream=True, extra_body=more, **prompt) as stream:
            async for _ in stream:
                if leaves:
                    return "left"
        return "streamed"
    except openai.APIStatusError as error:
        return str(error.status_code)


async def soak(url: str, pids: list[int], total: int, every: int, clients: int) -> None:
    """Ask `total` times, and print the memory after each `every`."""
    counts = collections.Counter[str]()
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        for first in range(0, total, every):
            numbers = iter(range(first, min(first + every, total)))

            async def work(numbers: Any = numbers) -> None:
                for number in numbers:
                    counts[await ask(client, number)] += 1

            await asyncio.gather(*(work() for _ in range(clients)))
            print(first + every, [round(each, 1) for each in resident(pids)], dict(counts), flush=True)


async def hold(url: str, clients: int, secs: float) -> None:
    """Ask for streams for so long; exits with 1 after a wrong text or an error."""
    text = SHIPPED_TEXT.read_text()
    prompts = [text[500 * place :][:40] for place in range(12)]
    counts = collections.Counter[str]()
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:

        async def say(prompt: str, leave_after: int = NEW_TOKENS) -> str:
            said = ""
            async with await client.completions.create(
                model="", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, stream=True
            ) as stream:
                async for chunk in stream:
                    said += chunk.choices[0].text
                    if len(said) >= leave_after:
                        break
            return said

        expected = {prompt: await say(prompt) for prompt in prompts}
        end = time.monotonic() + secs

        async def work(seed: int) -> None:
            chance = random.Random(seed)
            while time.monotonic() < end:
                prompt, leaves = chance.choice(prompts), chance.random() < 0.3
                try:
                    said = await say(prompt, chance.randrange(1, 20) if leaves else NEW_TOKENS)
                except (openai.OpenAIError, OSError) as error:
                    counts[f"error: {error}"] += 1
                    continue
                right = expected[prompt].startswith(said) if leaves else expected[prompt] == said
                counts[("left" if leaves else "answered") if right else "wrong"] += 1

        await asyncio.gather(*(work(seed) for seed in range(clients)))
    print(dict(counts), flush=True)
    if counts.keys() - {"left", "answered"}:
        raise SystemExit(1)


def main() -> None:
    """Start the server, ask, and end it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=1000)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--secs", type=float, default=0.0)
    asked = parser.parse_args()
    command = [sys.executable, "-m", "ep_moe", "serve", "--device", "cpu", "--nproc", str(asked.nproc), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        for line in server.stderr:
            found = re.search(r"serving .* at (http://\S+/v1)", line)
            if found:
                break
        else:
            raise SystemExit("the server has not started")
        drain = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        known = processes(server.pid)
        for pid, name in known.items():
            print(pid, name)
        try:
            if asked.secs:
                asyncio.run(hold(found[1], asked.clients, asked.secs))
            else:
                asyncio.run(soak(found[1], list(known), asked.requests, asked.every, asked.clients))
        finally:
            server.terminate()
            server.wait(60)
            drain.wait(60)


if __name__ == "__main__":
    main()
