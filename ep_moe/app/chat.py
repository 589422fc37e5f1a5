"""`ep-moe chat`: a conversation in the terminal, with a running server or with a model that it serves meanwhile."""

import contextlib
import dataclasses
import http.client
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Annotated, Any, TextIO

from ep_moe.app.report import CONTROLS
from ep_moe.config import EngineConfig
from ep_moe.environment import client_key
from ep_moe.fields import Field, check_fields, described
from ep_moe.launch.signals import end_with_parent, held_back, terminable

END_SECS = 20.0  # in which the server of a chat ends
HELP = "Ctrl-C ends an answer, Ctrl-D the chat; /clear forgets what was said"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChatConfig:
    """A chat of `ep-moe chat`."""

    url: Annotated[str, Field(help="A running server, such as http://127.0.0.1:8000; by default --model is served")] = (
        ""
    )
    system: Annotated[str, Field(help="First message, of the role system")] = ""
    max_tokens: Annotated[int, Field(help="Most tokens of an answer", at_least=1)] = 200
    temperature: Annotated[float, Field(help="Sampling temperature; 0 takes the likeliest token", at_least=0)] = 0.7
    silence_secs: Annotated[float, Field(help="Longest silence of the server within an answer", positive=True)] = 120.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.url and not re.match(r"https?://", self.url):
            raise ValueError(f"url ({self.url!r}) does not begin with http:// or https://")


class _RefusedError(RuntimeError):
    """The server has refused a message; in its words."""


def chat(engine: EngineConfig, config: ChatConfig) -> dict[str, Any]:
    """Read messages from standard input and write the answers, until it ends.

    Errors: ValueError for an engine's option beside a url; RuntimeError for a server that refuses or is not there.
    """
    changed = changed_options(engine)
    if config.url and changed:
        raise ValueError(f"url ({config.url!r}) is a running server, which has its own {changed[0]}")
    with (
        terminable(interrupts_once=False),
        contextlib.nullcontext(config.url) if config.url else _server(changed) as url,
    ):
        base = url.rstrip("/").removesuffix("/v1") + "/v1"
        _talk(base, config)
    return {}


def changed_options(engine: EngineConfig) -> list[str]:
    """The options of `ep-moe serve` that make this config."""
    found, usual = [], EngineConfig(log_level=engine.log_level)
    for name, (_, field) in described(EngineConfig).items():
        value = getattr(engine, name)
        if value != getattr(usual, name):
            found += [field.option or f"--{name.replace('_', '-')}", str(getattr(value, "value", value))]
    return found


@contextlib.contextmanager
def _server(options: list[str]) -> Iterator[str]:
    """Serve a model while the block runs; yields the address. Errors: RuntimeError with the server's last line."""
    command = [sys.executable, "-m", "ep_moe", "serve", "--port", "0", "--drain-secs", "0", "--log-level", "warning"]
    # in a group of its own: Ctrl-C ends an answer, not the server
    with subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=end_with_parent
    ) as process:
        try:
            assert process.stderr is not None
            line = ""
            for line in process.stderr:
                found = re.match(r"serving .* at (http://\S+?):? ", line)
                if found:
                    yield found[1].rstrip(":")
                    return
                sys.stderr.write(line)
            raise RuntimeError(f"the model is not served: {line.strip().removeprefix('error: ')}")
        finally:
            with held_back(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECS)
                process.kill()


def _talk(base: str, config: ChatConfig) -> None:
    name, asks = _name_of(base, config), sys.stdin.isatty()
    sys.stderr.write(f"{name} at {base}. {HELP}\n")
    begin = [{"role": "system", "content": config.system}] if config.system else []
    messages = list(begin)
    while True:
        if asks:
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return
        text = line.rstrip("\n")
        if text == "/clear":
            messages = list(begin)
            continue
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        answer, before = "", ""
        try:
            for kind, piece in _pieces(base, name, messages, config):
                if before == "reasoning" != kind:
                    sys.stderr.write("\n")
                before = kind
                if kind == "content":
                    answer += piece
                    _show(sys.stdout, piece)
                elif kind == "reasoning":
                    _show(sys.stderr, piece, dim=True)
        except KeyboardInterrupt:
            if not asks:
                raise
        except _RefusedError as error:
            if not asks:
                raise
            messages.pop()
            _show(sys.stderr, f"error: {error} (/clear forgets what was said)\n")
            continue
        _show(sys.stdout, "\n")
        if before == "length":
            sys.stderr.write(f"(cut off, as --max-tokens is {config.max_tokens} or the model takes no more)\n")
        messages.append({"role": "assistant", "content": answer})


def _show(stream: TextIO, piece: str, *, dim: bool = False) -> None:
    if stream.isatty():
        piece = CONTROLS.sub(" ", piece)
        piece = f"\x1b[2m{piece}\x1b[0m" if dim else piece
    stream.write(piece)
    stream.flush()


def _name_of(base: str, config: ChatConfig) -> str:
    with _request(f"{base}/models", None, config) as answer:
        return str(json.load(answer)["data"][0]["id"])


def _pieces(base: str, name: str, messages: list[dict[str, str]], config: ChatConfig) -> Iterator[tuple[str, str]]:
    """The text of an answer as it comes, each piece after its kind: "reasoning", "content"; "length" if cut off."""
    body = {"model": name, "messages": messages, "max_tokens": config.max_tokens, "temperature": config.temperature}
    with _request(f"{base}/chat/completions", body | {"stream": True}, config) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise _RefusedError(event["error"]["message"])
            for choice in event["choices"]:
                delta = choice["delta"]
                if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
                    yield "reasoning", reasoning
                if delta.get("content"):
                    yield "content", delta["content"]
                if choice.get("finish_reason") == "length":
                    yield "length", ""


@contextlib.contextmanager
def _request(url: str, body: dict[str, Any] | None, config: ChatConfig) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request. Errors: RuntimeError in the server's words."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    if client_key():
        headers["authorization"] = f"Bearer {client_key()}"
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=config.silence_secs) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"{url}: {error}"
        raise _RefusedError(message) from None
    except (OSError, http.client.HTTPException) as error:
        raise RuntimeError(f"{url}: {getattr(error, 'reason', error)}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RuntimeError(f"{url}: the answer is not of OpenAI's protocol: {error!r}") from None
