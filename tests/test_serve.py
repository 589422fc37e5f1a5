"""`ep-moe serve` as users start it: two ranks on the CPU, and OpenAI's own client."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from processes import EP_MOE, environ, processes_with, ranks_of
from typer.testing import CliRunner

from ep_moe.app.serve import ServeConfig, bind, serve
from ep_moe.app.start import SHIPPED_MODEL
from ep_moe.cli import app
from ep_moe.config import EngineConfig

PROMPTS = ("In the beginning God ", "Blessed are the poor in spirit: for ")
NEW_TOKENS = 24
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'none' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ message.content }}{% endfor %}"
)


@dataclasses.dataclass(kw_only=True)
class Server:
    """A server's process, its client, and what it wrote."""

    process: "subprocess.Popen[bytes]"
    client: openai.OpenAI
    mark: str
    errors: list[str]

    def running(self) -> int:
        """Sequences that have a row now."""
        return self.client.get("/../health", cast_to=dict[str, Any])["running"]

    def ended(self) -> tuple[int, str, list[int]]:
        """Wait for the end; exit code, last line, and processes left after some seconds."""
        code = self.process.wait(timeout=60)
        deadline = time.monotonic() + 10
        while processes_with(self.mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        return code, self.errors[-1], processes_with(self.mark)


class _Starting:
    """A server on two ranks at a free port, from its start on; killed at the end if it has not ended."""

    def __init__(self, *options: str, cwd: Path) -> None:
        self.mark = f"{os.getpid()}.{time.time_ns()}"
        command = [*EP_MOE, "serve", "--nproc", "2", "--device", "cpu", "--port", "0", *options]
        environment = environ() | {"EP_MOE_TEST_MARK": self.mark}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=cwd, env=environment)
        self._errors: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self._errors.append(line.decode().rstrip())
            if self._errors[-1].startswith("serving"):
                self._ready.set()
        self._ready.set()

    def server(self) -> Server:
        """Wait until it serves."""
        assert self._ready.wait(120), self._errors
        place = re.search(r"http://\S+/v1", self._errors[-1])
        assert place is not None, self._errors
        client = openai.OpenAI(base_url=place[0], api_key="none", max_retries=0, timeout=60)
        mark = f"EP_MOE_TEST_MARK={self.mark}"
        return Server(process=self.process, client=client, mark=mark, errors=self._errors)

    def close(self) -> None:
        """Kill the launcher, and with it its ranks."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with a chat template, which it does not have."""
    directory = tmp_path_factory.mktemp("models") / "chat"
    shutil.copytree(SHIPPED_MODEL, directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return directory


@pytest.fixture(scope="module")
def servers(chat_model: Path) -> Iterator[tuple[_Starting, _Starting]]:
    """Two servers that start at the same time: of the model with a chat template, and of the shipped one."""
    with contextlib.ExitStack() as ends:
        chat = ends.enter_context(
            contextlib.closing(_Starting("--model", str(chat_model), "--max-rows", "2", cwd=chat_model))
        )
        shipped = ends.enter_context(contextlib.closing(_Starting("--timeout-secs", "5", cwd=chat_model)))
        yield chat, shipped


@pytest.fixture(scope="module")
def server(servers: tuple[_Starting, _Starting]) -> Server:
    """The server of the model with a chat template."""
    return servers[0].server()


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """What `ep-moe generate` says to the prompts."""
    options = ["--max-new-tokens", str(NEW_TOKENS), "--json", "--device", "cpu", "--nproc", "2"]
    done = CliRunner().invoke(app, ["generate", *PROMPTS, *options], env={"OMP_NUM_THREADS": "1"})
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)["text"]


def test_answers_are_what_generate_says(server: Server, expected: list[str]) -> None:
    """A completion beside a streamed chat, at the same time."""
    client, found = server.client, {}

    def complete() -> None:
        answer = client.completions.create(model="chat", prompt=PROMPTS[0], max_tokens=NEW_TOKENS, temperature=0)
        found["completion"] = answer

    thread = threading.Thread(target=complete)
    thread.start()
    chunks = list(
        client.chat.completions.create(
            model="chat",
            messages=[{"role": "user", "content": PROMPTS[1]}],
            max_tokens=NEW_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    thread.join()
    answer = found["completion"]
    assert answer.choices[0].text == expected[0]
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", NEW_TOKENS)
    assert answer.usage.prompt_tokens == len(PROMPTS[0])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected[1]
    assert sum(bool(chunk.choices) for chunk in chunks) > NEW_TOKENS / 4
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.total_tokens == len(PROMPTS[1]) + NEW_TOKENS
    assert [model.id for model in client.models.list()] == ["chat"]


def test_stop_strings_and_seeds(server: Server, expected: list[str]) -> None:
    client = server.client
    stop = expected[0][9:14]
    answer = client.completions.create(model="chat", prompt=PROMPTS[0], max_tokens=500, temperature=0, stop=stop)
    assert answer.choices[0].text == expected[0][: expected[0].index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    ask = {"model": "chat", "messages": [{"role": "user", "content": PROMPTS[1]}], "max_completion_tokens": 12}
    first, same, other = (
        client.chat.completions.create(**ask, temperature=0.9, top_p=0.9, seed=seed).choices[0].message.content
        for seed in (7, 7, 8)
    )
    assert first == same != other
    with pytest.raises(openai.BadRequestError, match="chat template refuses these messages: no such role"):
        client.chat.completions.create(model="chat", messages=[{"role": "none", "content": "x"}])


def test_a_client_that_leaves_frees_its_rows(server: Server, expected: list[str]) -> None:
    """Four long sequences take all rows; when their clients have left, others are answered."""
    client = server.client
    ask = {"model": "chat", "prompt": list(PROMPTS), "max_tokens": 900, "temperature": 0}
    stream = client.completions.create(**ask, stream=True)
    next(iter(stream))
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(**ask)
    stream.close()
    answer = client.completions.create(model="chat", prompt=PROMPTS[0], max_tokens=NEW_TOKENS, temperature=0)
    assert answer.choices[0].text == expected[0]
    assert server.running() == 0


def test_ctrl_c_ends_all(server: Server) -> None:
    stream = server.client.completions.create(model="chat", prompt="The", max_tokens=900, stream=True)
    next(iter(stream))
    server.process.send_signal(signal.SIGINT)
    assert server.ended() == (130, "interrupted", [])


def test_a_killed_rank_is_named_to_all_clients(servers: tuple[_Starting, _Starting]) -> None:
    server = servers[1].server()
    client, found = server.client, []

    def complete() -> None:
        try:
            client.completions.create(model="ep-moe", prompt="The", max_tokens=900)
        except openai.APIStatusError as error:
            found.append(error)

    stream = client.completions.create(model="ep-moe", prompt="And", max_tokens=900, stream=True)
    next(iter(stream))
    thread = threading.Thread(target=complete)
    thread.start()
    while server.running() < 2:
        time.sleep(0.05)
    os.kill(ranks_of(server.process.pid, server.mark)[1], signal.SIGKILL)
    with pytest.raises(openai.APIError, match="rank 1 was killed by SIGKILL"):
        list(stream)
    with pytest.raises(openai.InternalServerError, match="rank 1 was killed by SIGKILL") as late:
        client.completions.create(model="ep-moe", prompt="The")
    thread.join()
    assert [error.status_code for error in (*found, late.value)] == [503, 503]
    assert str(found[0].body["message"]).startswith("rank 1 was killed by SIGKILL")
    assert server.ended() == (1, "error: rank 1 was killed by SIGKILL", [])


def test_a_port_in_use_and_missing_packages_are_told_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules["ep_moe.launch"], "launch", lambda *args, **options: pytest.fail("ranks were started")
    )
    with contextlib.closing(bind("127.0.0.1", 0)) as taken:
        taken.listen()
        done = CliRunner().invoke(app, ["serve", "--port", str(taken.getsockname()[1])])
    assert done.exit_code == 1
    assert re.search(r"error: host \('127.0.0.1'\) and port \(\d+\) cannot be listened at: .*in use", done.stderr)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else name)
    with pytest.raises(
        RuntimeError, match=re.escape("ep-moe serve needs uvicorn; install: pip install 'ep-moe[serve]'")
    ):
        serve(EngineConfig(), ServeConfig())
