"""Faults in the ranks of a server, of every kind in every phase, while ranks leave and come: each stream has the text
of an undisturbed run.

`EP_MOE_CHAOS_SECS` is how long faults follow each other, `EP_MOE_CHAOS_SEED` their order.
"""

import contextlib
import http.client
import itertools
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from faulty import FOLDER, KINDS, PHASES
from helpers.processes import is_running, ranks_of, wait_until_gone
from test_serve import Server, started

from ep_moe.app.start import SHIPPED_MODEL

SECS, SEED = float(os.environ.get("EP_MOE_CHAOS_SECS", "40")), int(os.environ.get("EP_MOE_CHAOS_SEED", "0"))
NUM_STREAMS, NUM_RANKS = 16, 4
TIMEOUT_SECS = 3.0
FAULTY = Path(__file__).with_name("faulty.py")
PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form, and void; "
PHASE_SECS = 8.0  # for a rank to reach the step of its fault
FOUND_SECS = 120.0  # for ranks to come back, on a busy machine

pytestmark = pytest.mark.chaos


def ask(server: Server, number: int, pauses: list[float]) -> str:
    """The text of a stream, greedy or seeded; its prompt takes one prefill or several.

    Args:
        pauses: gets the seconds between two of its chunks.
    """
    body = {
        "prompt": f"{number} {PROMPT * (1 + 3 * (number % 4 == 0))}",
        "max_tokens": 24 + 8 * (number % 3),
        "temperature": 0.8 * (number % 2),
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }
    address = server.client.base_url
    client = http.client.HTTPConnection(address.host, address.port or 80, timeout=SECS + FOUND_SECS)
    text, last = "", 0.0
    try:
        client.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        for line in client.getresponse():
            if line.startswith((b"data: {", b"{")):  # an event, or an error before the first one
                now = time.monotonic()
                pauses += [now - last] if last else []
                chunk, last = json.loads(line.removeprefix(b"data: ")), now
                text += "".join(choice["text"] for choice in chunk["choices"]) if "choices" in chunk else str(chunk)
    finally:
        client.close()
    return text


def together(call: Callable[[int], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    return threads


def texts_of(server: Server) -> list[str]:
    """Those of all streams at once."""
    found: dict[int, str] = {}
    for thread in together(lambda number: found.update({number: ask(server, number, [])})):
        thread.join()
    return [found[number] for number in range(NUM_STREAMS)]


def lost(server: Server) -> dict[str, str]:
    """What /health says of lost ranks."""
    return server.client.get("/../health", cast_to=dict[str, Any]).get("lost", {})


def descriptors(process: int) -> dict[str, str]:
    """What each open descriptor of a process is."""
    found = {}
    for path in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found[path.name] = str(path.readlink())
    return found


class Chaos:
    """Faults, one after another, in a server's ranks.

    Attributes:
        scaled: how often a rank was to leave or to come.
    """

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._folder, self._chance = server, folder, random.Random(SEED)
        self.scaled = 0
        self._faulty: set[int] = set()  # processes that have had one
        self._stopped: list[tuple[float, int]] = []  # when they continue

    def _ranks(self) -> list[int]:
        """Ranks without a fault so far, of which some may still load the model."""
        return [each for each in ranks_of(self._server.process.pid)[1:] if each not in self._faulty]

    def cases(self) -> Iterator[tuple[str, str]]:
        """Each kind in each phase, in any order."""
        while True:
            cases = list(itertools.product(KINDS, PHASES))
            yield from self._chance.sample(cases, len(cases))

    def run(self, until: float) -> None:
        for kind, phase in self.cases():
            while time.monotonic() < until and (len(self._ranks()) < 3 or len(lost(self._server)) > 1):
                self.resume()
                time.sleep(0.1)
            if time.monotonic() >= until:
                return
            if self._chance.random() < 0.5:  # the fault comes while a rank leaves or comes
                self.scale(NUM_RANKS - self._chance.randint(0, 1))
            self._strike(kind, phase)
            time.sleep(self._chance.random())
            self.resume()

    def scale(self, num_ranks: int) -> bool:
        """Have so many ranks serve; False if ranks regroup just now."""
        try:
            self._server.ranks(num_ranks=num_ranks)
        except openai.ConflictError:
            return False
        self.scaled += 1
        return True

    def _strike(self, kind: str, phase: str) -> None:
        """Have a fault in a rank; in one that heals, by the death of another."""
        victim, other = self._chance.sample(self._ranks(), 2)
        order = self._folder / str(victim)
        order.with_suffix(".new").write_text(f"{kind} {phase} {self._chance.randint(1, 3)}")
        order.with_suffix(".new").rename(order)
        if phase in ("joining", "healing"):
            self._faulty.add(other)
            os.kill(other, signal.SIGKILL)
        deadline = time.monotonic() + PHASE_SECS
        while order.exists() and is_running(victim) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not order.exists():
            self._faulty.add(victim)
        order.unlink(missing_ok=True)
        if kind == "stop":
            self._stopped.append((time.monotonic() + TIMEOUT_SECS + 1, victim))

    def resume(self, all_of_them: bool = False) -> None:
        """Continue ranks that have been stopped for longer than the timeout: they must be gone, or end."""
        now = time.monotonic()
        for when, process in [*self._stopped]:
            if all_of_them or when < now:
                self._stopped.remove((when, process))
                if is_running(process):
                    os.kill(process, signal.SIGCONT)

    def left(self) -> list[int]:
        """Processes that have had a fault and are still there."""
        return wait_until_gone(sorted(self._faulty), TIMEOUT_SECS + 10)


def test_a_checkpoint_and_restarts_that_are_gone_end_the_server(tmp_path: Path) -> None:
    """Rank 1 dies, comes back and dies again; the model's files have been removed: an error names both causes."""
    model = shutil.copytree(SHIPPED_MODEL, tmp_path / "model")
    with started(tmp_path, "--restarts", "1", "--model", str(model)) as server:
        os.kill(ranks_of(server.process.pid)[2], signal.SIGKILL)
        while not any("go on as before" in line for line in server.errors):
            time.sleep(0.1)
        loaded = [line for line in server.errors if "layers of experts read" in line]
        assert [f" rank {rank} INFO " in line for rank, line in enumerate(loaded)] == [True, True], loaded
        stream: list[str] = []
        thread = threading.Thread(target=lambda: stream.append(ask(server, 4, [])))
        thread.start()
        while not server.running():
            time.sleep(0.02)
        shutil.rmtree(model)
        os.kill(ranks_of(server.process.pid)[2], signal.SIGKILL)
        thread.join()
        code, last, left = server.ended()
        assert any("rank 1 was killed by SIGKILL: it is not started again" in line for line in server.errors)
        assert any("on no rank (rank 1 " in line and "cannot be read again" in line for line in server.errors)
        for text in (stream[0], last):
            assert "rank 1 was killed by SIGKILL; then rank 0: " in text
        assert (code, left) == (1, [])


@pytest.mark.parametrize("kind", ["stop", "hang"])
def test_a_single_rank_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    options = "--nproc", "1", "--timeout-secs", str(TIMEOUT_SECS)
    with started(tmp_path, *options, program=FAULTY) as server:
        expected, found = ask(server, 1, []), list[str]()
        thread = threading.Thread(target=lambda: found.append(ask(server, 1, [])))
        thread.start()
        while not server.running():
            time.sleep(0.02)
        rank = ranks_of(server.process.pid)[1]
        (tmp_path / str(rank)).write_text(f"{kind} decode 1")
        thread.join()
        assert found == [expected]
        assert wait_until_gone([rank], 10) == []
        assert any("rank 0 was killed by SIGKILL: it is started again" in line for line in server.errors)


@pytest.mark.timeout(2 * SECS + 5 * FOUND_SECS)
def test_every_stream_has_its_text_whatever_happens_to_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    options = ["--nproc", str(NUM_RANKS), "--max-rows", "4", "--timeout-secs", str(TIMEOUT_SECS), "--restarts", "1000"]
    options += ["--rebalance", "every:8", "--rebalance-min-gain", "0", "--max-tokens-per-rank", "128"]
    shared = {*Path("/dev/shm").iterdir()}
    with started(tmp_path, *options, program=FAULTY) as server:
        expected, ended, rounds = texts_of(server), threading.Event(), itertools.count()
        pauses: list[float] = []
        wrong: list[tuple[str, str]] = []

        def keep_asking(number: int) -> None:
            while not ended.is_set():
                try:
                    text = ask(server, number, pauses)
                except OSError as error:
                    text = repr(error)
                next(rounds)
                if text != expected[number]:
                    wrong.append((text, expected[number]))
                    return

        before = descriptors(server.process.pid)
        threads, chaos = together(keep_asking), Chaos(server, tmp_path)
        chaos.run(time.monotonic() + SECS)
        ended.set()
        for thread in threads:
            thread.join()
        print(*(line for line in server.errors if "serving.access" not in line), sep="\n")
        hits = (tmp_path / "hits").read_text().splitlines()
        count, worst = next(rounds), max(pauses)
        print(f"{count} streams, {len(hits)} faults {hits}, scaled {chaos.scaled} times, longest pause {worst:.1f} s")
        assert not wrong
        assert chaos.left() == []
        chaos.resume(all_of_them=True)
        deadline = time.monotonic() + FOUND_SECS
        while lost(server) or not chaos.scale(NUM_RANKS):
            assert time.monotonic() < deadline, lost(server)
            time.sleep(0.2)
        server.wait_for_ranks(*["serving"] * NUM_RANKS)
        assert texts_of(server) == expected
        assert len(ranks_of(server.process.pid)) == 1 + NUM_RANKS
        deadline = time.monotonic() + 10  # the launcher forgets a process some seconds after its end
        # a rank has six or seven connections to the launcher's store
        while len(left := descriptors(server.process.pid)) > len(before) + NUM_RANKS:
            assert time.monotonic() < deadline, sorted(left.items() - before.items())
            time.sleep(0.2)
        server.process.terminate()
        assert server.ended()[::2] == (143, [])
    assert {*Path("/dev/shm").iterdir()} <= shared
    assert len(hits) >= SECS / 8
