"""`ep-moe chat` with a server of its own kind, and `ep-moe formats`."""

import http.server
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.processes import EP_MOE, environ, hear_sighup, processes_with, wait_until_gone
from typer.testing import CliRunner

from ep_moe.app.chat import ChatConfig, chat
from ep_moe.cli import app
from ep_moe.config import EngineConfig
from ep_moe.names import SCHEME_NAMES


class Server(http.server.BaseHTTPRequestHandler):
    """Answers a chat with its messages, in pieces; refuses the message "no", and thinks only of "why"."""

    models = b'{"data": [{"id": "fake"}]}'

    def log_message(self, *args: Any) -> None: ...

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:  # noqa: N802 - the name is the library's
        self._answer(200, self.models)

    def do_POST(self) -> None:  # noqa: N802
        if self.headers["authorization"] not in (None, "Bearer mine"):
            self._answer(401, b'{"error": {"message": "another key"}}')
            return
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = [message["content"] for message in request["messages"]]
        if said[-1] == "no":
            self._answer(400, b'{"error": {"message": "not this"}}')
            return
        pieces = [{"choices": [{"delta": {"content": piece}}]} for piece in ("<", "|".join(said), ">")]
        if said[-1] == "why":
            deltas = {"reasoning_content": "I "}, {"reasoning_content": "think"}
            pieces = [{"choices": [{"delta": delta}]} for delta in deltas]
            pieces.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
        lines = [f"data: {json.dumps(piece)}\n\n" for piece in pieces]
        self._answer(200, "".join([*lines, "data: [DONE]\n\n"]).encode())


@pytest.fixture
def url() -> Iterator[str]:
    """The address of a fake server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_chat_remembers_what_was_said_until_it_is_cleared(url: str) -> None:
    done = CliRunner().invoke(app, ["chat", "--url", url, "--system", "S"], input="a\n\nb\n/clear\nc\n")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "<S|a>\n<S|a|<S|a>|b>\n<S|c>\n"
    assert done.stderr.startswith(f"fake at {url}/v1.")


def test_a_chat_brings_the_key_of_the_environment(url: str) -> None:
    for key, code in (("mine", 0), ("other", 1)):
        done = CliRunner().invoke(app, ["chat", "--url", url], input="a\n", env={"EP_MOE_API_KEY": key})
        assert (done.exit_code, done.stdout, "another key" in done.stderr) == (code, "<a>\n" * (not code), bool(code))


def test_what_a_server_refuses_is_one_line(url: str) -> None:
    done = CliRunner().invoke(app, ["chat", "--url", f"{url}/v1/"], input="no\n")
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (1, "error: not this")
    done = CliRunner().invoke(app, ["chat", "--url", "http://127.0.0.1:1"], input="a\n")
    assert (done.exit_code, "refused" in done.stderr.splitlines()[-1]) == (1, True)
    done = CliRunner().invoke(app, ["chat", "--url", "127.0.0.1:1"])
    assert (done.exit_code, "does not begin with http://" in done.stderr) == (2, True)
    done = CliRunner().invoke(app, ["chat", "--url", url, "--nproc", "2"])
    assert (done.exit_code, "is a running server, which has its own --nproc" in done.stderr) == (2, True)


@pytest.mark.parametrize("models", [b"{}", b'{"data": []}', b"[1]", b"<html>"])
def test_an_answer_of_another_protocol_is_one_line(models: bytes, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "models", models)
    done = CliRunner().invoke(app, ["chat", "--url", url], input="a\n")
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith(f"error: {url}/v1/models: the answer is not of OpenAI's protocol: ")


def test_a_refusal_on_a_terminal_drops_the_message(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO("a\nno\nb\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    chat(EngineConfig(), ChatConfig(url=url))
    out, err = capsys.readouterr()
    assert out == "<a>\n<a|<a>|b>\n"
    assert "error: not this (/clear forgets what was said)\n" in err


def test_reasoning_and_a_cut_are_shown_on_standard_error(url: str) -> None:
    done = CliRunner().invoke(app, ["chat", "--url", url, "--max-tokens", "2"], input="why\n")
    assert (done.exit_code, done.stdout) == (0, "\n")
    assert done.stderr.splitlines()[1:] == ["I think", "(cut off, as --max-tokens is 2 or the model takes no more)"]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGHUP, 129),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.matrix),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.matrix),
    ],
)
def test_the_model_of_a_chat_ends_with_it(number: signal.Signals, code: int) -> None:
    mark = f"{os.getpid()}.{time.time_ns()}"
    command = [*EP_MOE, "chat", "--nproc", "1", "--device", "cpu"]
    pipes: Any = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environ() | {"EP_MOE_TEST_MARK": mark}}
    with subprocess.Popen(command, preexec_fn=hear_sighup, **pipes) as process:
        assert process.stderr is not None
        while b"Ctrl-D" not in (line := process.stderr.readline()):
            assert line
        started = processes_with(mark)
        assert len(started) > 3
        process.send_signal(number)
        assert process.wait(20) == code
    assert wait_until_gone(started, 10.0) == []


def test_a_model_is_served_for_a_chat_and_its_log_names_requests() -> None:
    command = [*EP_MOE, "chat", "--nproc", "1", "--device", "cpu", "--max-tokens", "8", "--temperature", "0"]
    done = subprocess.run(
        [*command], input="Blessed are\n", capture_output=True, text=True, env=environ(), timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 0 < len(done.stdout.encode()) <= 9
    wrong = subprocess.run(
        [*EP_MOE, "chat", "--nproc", "1", "--device", "cuda"],
        capture_output=True,
        text=True,
        env=environ(),
        check=False,
    )
    assert wrong.returncode == 1
    assert wrong.stderr.splitlines()[-1].startswith("error: the model is not served: device cuda needs a GPU")


def test_formats_lists_every_name() -> None:
    report = json.loads(CliRunner().invoke(app, ["formats", "--json"]).stdout)
    assert [row["name"] for row in report["formats"]] == list(SCHEME_NAMES)
    known = {row["name"]: (row["experts"], row["tokens"], round(row["weight_bits"], 2)) for row in report["formats"]}
    assert known["nvfp4"] == ("e2m1 per group of 1x16", "e2m1 per group of 1x16", 4.5)
    assert known["int4_w4a8"] == ("int4 per channel", "e4m3 per token", 4.0)
    shown = CliRunner().invoke(app, ["formats"]).stdout
    assert all(f" {name} " in shown for name in SCHEME_NAMES)
