"""Pauses of a server's streams when ranks are killed and come back: `python tests/serving/pauses.py` (no test).

Options after `--` are those of `ep-moe serve`, by default 4 CPU ranks of the shipped model; a model has to read bytes.
Clients ask for streams all the time. For each death it prints the longest time between two tokens of a stream that
began before the other ranks went on, and after that; tokens per second before, between and after; and memory in use on
GPUs. At the end: how many texts are those of the first requests. Python's path needs the folders of tests, as `environ`
of `tests/helpers/processes.py` sets them.
"""

import argparse
import dataclasses
import http.client
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from helpers.processes import ranks_of
from test_chaos import PROMPT
from test_serve import Server, started

FOUND_SECS = 120.0


@dataclasses.dataclass
class Streams:
    """What clients have seen.

    Attributes:
        chunks: for each stream, the time of each chunk, and the tokens of its answer before it.
        texts: for each stream, its whole answers.
    """

    server: Server
    new_tokens: int
    chunks: list[list[tuple[float, int]]]
    texts: list[list[str]]
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)

    def keep_asking(self, number: int) -> None:
        while not self.ended.is_set():
            self.texts[number].append(self._ask(number))

    def _ask(self, number: int) -> str:
        body = {"prompt": f"{number} {PROMPT}"[:64], "max_tokens": self.new_tokens, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0.8 * (number % 2), "seed": number}
        address, text = self.server.client.base_url, ""
        client = http.client.HTTPConnection(address.host, address.port or 80, timeout=FOUND_SECS)
        client.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        for line in client.getresponse():
            if line.startswith((b"data: {", b"{")):
                chunk = json.loads(line.removeprefix(b"data: "))
                if "choices" not in chunk:
                    os.write(2, f"stream {number}: {chunk}\n".encode())
                    os._exit(1)
                self.chunks[number].append((time.monotonic(), len(text)))
                text += chunk["choices"][0]["text"]
        client.close()
        return text

    def longest_pause(self, after: float, begun_before: float, begun_after: float = 0.0) -> float:
        """The longest time between chunks of an answer that ends after a time and began between two."""
        return max(
            (
                second - first
                for chunks in self.chunks
                for (first, _), (second, before) in zip(chunks[:-1], chunks[1:], strict=True)
                if before and second > after and begun_after <= first < begun_before
            ),
            default=0.0,
        )

    def rate(self, begin: float, end: float) -> float:
        """Tokens per second between two times."""
        pairs = [pair for chunks in self.chunks for pair in zip(chunks[:-1], chunks[1:], strict=True)]
        return sum(max(new - old, 0) for (_, old), (when, new) in pairs if begin < when <= end) / (end - begin)


def memory() -> str:
    """MiB in use on each GPU."""
    if shutil.which("nvidia-smi") is None:
        return "no GPU"
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.replace("\n", " ")


def wait_for(server: Server, place: int, text: str) -> float:
    """When the server has written a line with this text, behind its first `place` lines."""
    deadline = time.monotonic() + FOUND_SECS
    while not any(text in line for line in server.errors[place:]):
        assert time.monotonic() < deadline, server.errors[place:]
        time.sleep(0.005)
    return time.monotonic()


def strike(server: Server, streams: Streams, index: int, quiet_secs: float) -> None:
    """Kill a rank, and say what its death and its return cost."""
    time.sleep(quiet_secs)
    before, process, place, killed = (
        memory(),
        ranks_of(server.process.pid)[1 + index],
        len(server.errors),
        time.monotonic(),
    )
    os.kill(process, signal.SIGKILL)
    healed = wait_for(server, place, " go on")
    without = memory()
    back = wait_for(server, place, "go on as before")
    time.sleep(quiet_secs)
    end = time.monotonic()
    print(f"the others go on {healed - killed:.2f} s after the death,", end=" ")
    print(f"longest pause {streams.longest_pause(killed, healed):.2f} s;", end=" ")
    print(f"back after {back - killed:.2f} s, longest pause {streams.longest_pause(healed, end, healed):.2f} s")
    rates = streams.rate(killed - quiet_secs, killed), streams.rate(healed, back), streams.rate(back, end)
    print("  tokens/s before, between, after:", *(f"{rate:.0f}" for rate in rates))
    print(f"  MiB before: {before}, between: {without}, after: {memory()}")
    print(*(f"  | {line}" for line in server.errors[place:] if "serving.access" not in line), sep="\n", flush=True)


def scale(server: Server, streams: Streams, num_ranks: int, quiet_secs: float) -> None:
    """Have so many ranks serve, and say what that costs."""
    time.sleep(quiet_secs)
    begin = time.monotonic()
    server.ranks(num_ranks=num_ranks)
    while not server.ranks()["done"]:
        assert time.monotonic() - begin < FOUND_SECS, server.ranks()
        time.sleep(0.05)
    done = time.monotonic()
    time.sleep(quiet_secs)
    end = time.monotonic()
    print(
        f"{num_ranks} ranks {done - begin:.2f} s later, longest pause {streams.longest_pause(begin, end):.2f} s;",
        end=" ",
    )
    print(f"MiB: {memory()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--kills", type=int, nargs="*", default=[3, 1, 0], help="ranks, by the order of their start")
    parser.add_argument("--scale", type=int, nargs="*", default=[], help="numbers of ranks, after the kills")
    parser.add_argument("--quiet-secs", type=float, default=3.0)
    parser.add_argument("options", nargs="*")
    asked = parser.parse_args()
    options = asked.options or ["--nproc", "4", "--max-rows", "4"]
    with tempfile.TemporaryDirectory() as folder, started(Path(folder), "--restarts", "1000", *options) as server:
        numbers = range(asked.streams)
        streams = Streams(server, asked.new_tokens, [[] for _ in numbers], [[] for _ in numbers])
        threads = [threading.Thread(target=streams.keep_asking, args=(number,), daemon=True) for number in numbers]
        for thread in threads:
            thread.start()
        while not all(streams.texts):
            time.sleep(0.1)
        for index in asked.kills:
            strike(server, streams, index, asked.quiet_secs)
        for num_ranks in asked.scale:
            scale(server, streams, num_ranks, asked.quiet_secs)
        streams.ended.set()
        for thread in threads:
            thread.join()
        equal = [text == texts[0] for texts in streams.texts for text in texts[1:]]
        print(f"{sum(equal)} of {len(equal)} later texts equal the first of their prompt")
        server.process.terminate()
        print("exit code and processes left:", *server.ended()[::2])


if __name__ == "__main__":
    main()
