"""`ep-moe serve` as users start it: two ranks on the CPU, and OpenAI's own client."""

import contextlib
import dataclasses
import functools
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.processes import EP_MOE, actors_with, environ, processes_with, ranks_of
from typer.testing import CliRunner

from ep_moe.app.serve import ServeConfig, bind, serve
from ep_moe.app.start import SHIPPED_MODEL, SHIPPED_TEXT
from ep_moe.cli import app
from ep_moe.config import EngineConfig
from ep_moe.launch import RankFailedError
from ep_moe.launch.signals import terminable

PROMPTS = ("In the beginning God ", "Blessed are the poor in spirit: for \n")  # a line, as the chat template makes it
NEW_TOKENS = 24


@dataclasses.dataclass(kw_only=True)
class Server:
    """A server's process, its client, and what it wrote."""

    process: "subprocess.Popen[bytes]"
    client: openai.OpenAI
    mark: str
    errors: list[str]

    def running(self) -> int:
        """Sequences that have a row now."""
        return self.load()["running"]

    def load(self) -> dict[str, Any]:
        """How many sequences have a row now, and how many wait for one."""
        return self.client.get("/../health", cast_to=dict[str, Any])

    def ranks(self, **asked: Any) -> dict[str, Any]:
        """The state of the ranks; how many or which are to serve, if `asked` has it."""
        client, place = self.client.with_options(api_key="boss"), "/../admin/ranks"
        wanted: Any = dict[str, Any]
        return client.post(place, body=asked, cast_to=wanted) if asked else client.get(place, cast_to=wanted)

    def wait_for_ranks(self, *states: str) -> None:
        """Wait until the ranks have these states."""
        deadline = time.monotonic() + 120
        while [rank["state"] for rank in self.ranks()["ranks"]] != [*states]:
            assert time.monotonic() < deadline, self.ranks()
            time.sleep(0.05)

    def ended(self) -> tuple[int, str, list[int]]:
        """Wait for the end; exit code, last line, and processes left after some seconds."""
        code = self.process.wait(timeout=60)
        deadline = time.monotonic() + 10
        while processes_with(self.mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        return code, self.errors[-1], processes_with(self.mark)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on two ranks of two rows, of the shipped model, which move experts all the time."""
    moving = "--rebalance", "every:8", "--rebalance-min-gain", "0"
    with started(tmp_path_factory.mktemp("server"), *moving) as found:
        yield found


@contextlib.contextmanager
def started(folder: Path, *options: str, program: Path | None = None) -> Iterator[Server]:
    """A server on two ranks of two rows that has started in a folder; killed if it has not ended.

    Args:
        program: in place of `ep-moe`.
    """
    mark = f"{os.getpid()}.{time.time_ns()}"
    command = [
        *(EP_MOE if program is None else [sys.executable, str(program)]),
        "serve",
        "--nproc",
        "2",
        "--device",
        "cpu",
        "--port",
        "0",
        "--max-rows",
        "2",
    ]
    process = subprocess.Popen(
        [*command, "--timeout-secs", "20", *options],
        stderr=subprocess.PIPE,
        cwd=folder,
        start_new_session=True,  # as a terminal's job, which Ctrl-C signals whole
        env=environ() | {"EP_MOE_TEST_MARK": mark, "EP_MOE_ADMIN_KEY": "boss"},
    )
    errors: list[str] = []
    ready = threading.Event()

    def read() -> None:
        for line in process.stderr or ():
            errors.append(line.decode().rstrip())
            if errors[-1].startswith("serving"):
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(200), errors
        place = re.search(r"http://\S+/v1", errors[-1])
        assert place is not None, errors
        client = openai.OpenAI(base_url=place[0], api_key="none", max_retries=0, timeout=60)
        yield Server(process=process, client=client, mark=f"EP_MOE_TEST_MARK={mark}", errors=errors)
    finally:
        process.kill()
        process.wait()
        reader.join(10)


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
        answer = client.completions.create(model="ep-moe", prompt=PROMPTS[0], max_tokens=NEW_TOKENS, temperature=0)
        found["completion"] = answer

    thread = threading.Thread(target=complete)
    thread.start()
    chunks = list(
        client.chat.completions.create(
            model="ep-moe",
            messages=[{"role": "user", "content": PROMPTS[1].removesuffix("\n")}],
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
    assert [model.id for model in client.models.list()] == ["ep-moe"]


def test_experts_move_and_answers_stay(server: Server, expected: list[str]) -> None:
    for _ in range(20):
        answer = server.client.completions.create(
            model="ep-moe", prompt=PROMPTS[0], max_tokens=NEW_TOKENS, temperature=0
        )
        assert answer.choices[0].text == expected[0]
        if any("rebalance of experts complete" in line for line in server.errors):
            return
    pytest.fail("no experts have moved")


def test_answers_have_the_formats_that_were_asked_for(server: Server) -> None:
    """Two choices of a regular expression beside a stream that keeps to a schema; a keyword that is not known."""
    pytest.importorskip("llguidance")
    client = server.client.with_options(timeout=120)
    chat = functools.partial(
        client.chat.completions.create, model="ep-moe", messages=[{"role": "user", "content": "x"}]
    )
    leaf = {"type": "object", "properties": {"a": {"enum": ["\N{GREEK SMALL LETTER ALPHA}", 1]}}, "required": ["a"]}
    schema = leaf | {"properties": {"a": {"type": "array", "items": leaf, "minItems": 1, "maxItems": 2}}}
    for each in (schema, leaf):
        each["additionalProperties"] = False
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    stream = chat(response_format=wanted, max_tokens=300, stream=True)
    more = {"regex": "[a-f]{3}-[0-9]{2}", "guided_json": None}
    prompt = "In the beginning God "
    answer = client.completions.create(model="", prompt=prompt, n=2, logprobs=1, seed=5, extra_body=more)
    for choice in answer.choices:
        assert re.fullmatch("[a-f]{3}-[0-9]{2}", choice.text)
        assert (choice.finish_reason, len(choice.logprobs.tokens)) == ("stop", 6)
    assert answer.choices[0].text != answer.choices[1].text
    parts = [chunk.choices[0] for chunk in stream]
    assert parts[-1].finish_reason == "stop"
    found = json.loads("".join(part.delta.content or "" for part in parts))
    assert [len(found), {each["a"] for each in found["a"]} <= {"\N{GREEK SMALL LETTER ALPHA}", 1}] == [1, True]
    left = chat(response_format={"type": "json_object"}, max_tokens=400, stream=True)
    next(iter(left))
    left.close()
    schema["properties"]["a"]["uniqueItems"] = True
    with pytest.raises(openai.BadRequestError, match=r"response_format cannot be served: Unimplemented keys: ..uniq"):
        chat(response_format=wanted)
    while server.running():
        time.sleep(0.05)


def test_stop_strings_and_seeds(server: Server, expected: list[str]) -> None:
    client = server.client
    stop = expected[0][9:14]
    answer = client.completions.create(model="ep-moe", prompt=PROMPTS[0], max_tokens=500, temperature=0, stop=stop)
    assert answer.choices[0].text == expected[0][: expected[0].index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    messages = [{"role": "user", "content": PROMPTS[1].removesuffix("\n")}]
    ask = {"model": "ep-moe", "messages": messages, "max_completion_tokens": 12}
    first, same, other = (
        client.chat.completions.create(**ask, temperature=0.9, top_p=0.9, seed=seed).choices[0].message.content
        for seed in (7, 7, 8)
    )
    assert first == same != other
    with pytest.raises(openai.BadRequestError, match="refuses these messages: role 'none' is not one of system, "):
        client.chat.completions.create(model="ep-moe", messages=[{"role": "none", "content": "x"}])


def test_what_vllms_benchmark_sends(server: Server, expected: list[str]) -> None:
    """The body of `vllm bench serve` for completions, as its documentation lists it: no end token ends the text."""
    more = {"repetition_penalty": 1.0, "ignore_eos": True, "top_k": -1, "min_p": 0.0}
    chunks = list(
        server.client.completions.create(
            model="ep-moe",
            prompt=PROMPTS[0],
            max_tokens=NEW_TOKENS,
            temperature=0.0,
            logprobs=None,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=more,
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected[0]
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], NEW_TOKENS)


def test_penalties_and_biases_change_the_answer(server: Server, expected: list[str]) -> None:
    client, ask = server.client, {"model": "ep-moe", "prompt": PROMPTS[0], "max_tokens": NEW_TOKENS, "temperature": 0}
    penalized = client.completions.create(**ask, presence_penalty=2, frequency_penalty=2)
    assert len(set(penalized.choices[0].text)) > len(set(expected[0]))
    token = ord("z")
    biased = client.completions.create(**ask, logit_bias={str(token): 100}, logprobs=1, n=2)
    assert [choice.text for choice in biased.choices] == ["z" * NEW_TOKENS] * 2
    assert max(biased.choices[0].logprobs.token_logprobs) < -1  # before the bias
    choice = client.completions.create(**ask, extra_body={"stop_token_ids": [ord(expected[0][5])], "min_tokens": 3})
    assert choice.choices[0].finish_reason == "stop"
    assert choice.usage.completion_tokens >= 3


@pytest.mark.launchers
def test_lm_eval_measures_the_loss_of_ep_moe_eval(server: Server, tmp_path: Path) -> None:
    """A log-likelihood task of lm-eval's `local-completions` on windows of the held-out text."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    window, count = 256, 8
    text = SHIPPED_TEXT.read_text()
    # lm-eval moves a space at the end of the context to the target; a token of these windows is a character
    found = [text[first : first + window] for first in range(0, len(text), 1000) if not text[first].isspace()]
    windows = [each for each in found if each.isascii()][:count]
    (tmp_path / "text").write_text("".join(windows))
    rows = [json.dumps({"context": each[0], "target": each[1:]}) for each in windows]
    (tmp_path / "windows.jsonl").write_text("\n".join(rows))
    task = {
        "task": "windows",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "windows.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{target}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity"}],
    }
    (tmp_path / "windows.yaml").write_text(json.dumps(task))
    scored = lm_eval.simple_evaluate(
        "local-completions",
        model_args={
            "model": "ep-moe",
            "base_url": f"{server.client.base_url}completions",
            "tokenizer": str(SHIPPED_MODEL),
            "tokenizer_backend": "huggingface",
            "batch_size": 3,
        },
        tasks=["windows"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    nats = [sample["filtered_resps"][0][0] for sample in scored["samples"]["windows"]]
    assert len(nats) == count
    options = ["--window", str(window), "--text", str(tmp_path / "text"), "--no-whole", "--json", "--device", "cpu"]
    done = CliRunner().invoke(app, ["eval", *options, "--nproc", "2"], env={"OMP_NUM_THREADS": "1"})
    assert done.exit_code == 0, done.stderr
    loss = json.loads(done.stdout)["nats_per_byte"]
    assert -sum(nats) / (count * (window - 1)) == pytest.approx(loss, abs=1e-4)


def test_a_client_that_leaves_frees_its_rows(server: Server, expected: list[str]) -> None:
    """Four long sequences take all rows; when their clients have left, others are answered."""
    client = server.client
    ask = {"model": "ep-moe", "prompt": list(PROMPTS), "max_tokens": 900, "temperature": 0}
    stream = client.completions.create(**ask, stream=True)
    next(iter(stream))
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(**ask)
    stream.close()
    answer = client.completions.create(model="ep-moe", prompt=PROMPTS[0], max_tokens=NEW_TOKENS, temperature=0)
    assert answer.choices[0].text == expected[0]
    assert server.running() == 0


STREAMS, STREAM_TOKENS = 8, 40
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def memory_of(process: int) -> int:
    """MB that a process has in memory."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) // 1024  # type: ignore[index]


def cpu_secs_of(process: int) -> float:
    """Seconds that all threads of a process have computed; fields 14 and 15 of the line, see `parent_of`."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_attacks_break_no_stream(server: Server) -> None:
    """Large bodies, wrong ones, endless ones and half-open connections, while all rows run and more streams wait.

    /health is answered before the front end has computed for a second. Its time on the clock depends on who else uses
    the cores, attackers and ranks for example.
    """
    address = (server.client.base_url.host, server.client.base_url.port)
    front = ranks_of(server.process.pid)[0]
    before, most, waits, texts = memory_of(front), [0], [], []
    computed: list[float] = []

    def stream() -> None:
        patient = server.client.with_options(timeout=200)  # a stream that waits for a row, on a busy machine
        chunks = patient.completions.create(
            model="ep-moe", prompt=PROMPTS[0], max_tokens=STREAM_TOKENS, temperature=0, stream=True
        )
        texts.append("".join(chunk.choices[0].text for chunk in chunks))

    def post(body: bytes) -> int:
        client = http.client.HTTPConnection(*address, timeout=60)
        with contextlib.closing(client), contextlib.suppress(ConnectionError):  # refused while it still sends
            client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            return client.getresponse().status
        return 413

    def endless(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(b"10000\r\n" + b"a" * 65536 + b"\r\n")

    threads = [threading.Thread(target=stream) for _ in range(STREAMS)]
    with contextlib.ExitStack() as opened:
        for thread in threads:
            thread.start()
        # a stream whose request has not arrived is as half-open as those that follow, and may be closed for them
        while (load := server.load())["running"] + load["waiting"] + len(texts) < STREAMS:
            time.sleep(0.05)
        half_open = [opened.enter_context(socket.create_connection(address)) for _ in range(600)]
        for connection in half_open:
            with contextlib.suppress(ConnectionError):
                connection.sendall(HEAD)
        sender = opened.enter_context(socket.create_connection(address))
        sender.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        attack = threading.Thread(target=endless, args=(sender,))
        attack.start()
        threads.append(attack)
        bodies = [
            (b'{"prompt":[' + b",".join([b"{}"] * 200_000) + b"]}", 400),
            (b'{"prompt":"' + b"a" * 10**6 + b'"}', 400),
            (b'{"prompt":"' + b"a" * 5 * 10**6 + b'"}', 413),
            (json.dumps({"prompt": ["a"] * 50_000}).encode(), 400),
        ]
        statuses: list[int] = []
        many = threading.Thread(target=lambda: statuses.extend(post(body) for body, _ in bodies * 2))
        many.start()
        threads.append(many)
        while any(thread.is_alive() for thread in threads[:STREAMS]) or many.is_alive():
            start, cpu_start = time.monotonic(), cpu_secs_of(front)
            with contextlib.closing(http.client.HTTPConnection(*address, timeout=60)) as client:
                client.request("GET", "/health")
                assert client.getresponse().status == 200
            waits.append(time.monotonic() - start)
            computed.append(cpu_secs_of(front) - cpu_start)
            most.append(memory_of(front))
            time.sleep(0.05)
    for thread in threads:
        thread.join(20)
    assert statuses == [status for _, status in bodies * 2]
    assert len(texts) == STREAMS
    assert set(map(len, texts)) == {STREAM_TOKENS}
    assert len(set(texts)) == 1
    assert max(most) - before < 200
    assert max(computed) < 1, sorted(computed)[-5:]
    assert max(waits) < 20, sorted(waits)[-5:]


def test_sigterm_drains_the_server(tmp_path: Path) -> None:
    """A stream that runs ends whole, new requests are refused, the exit code is SIGTERM's; --api-keys are asked for."""
    (tmp_path / "keys").write_text("secret\n")
    more = ["--api-keys", str(tmp_path / "keys"), "--drain-secs", "60"]
    with started(tmp_path, *more) as server:
        with pytest.raises(openai.AuthenticationError):
            server.client.models.list()
        client = server.client.with_options(api_key="secret")
        stream = client.completions.create(model="", prompt=PROMPTS[0], max_tokens=150, temperature=0, stream=True)
        first = next(stream)
        server.process.terminate()

        def ask_until_refused() -> None:
            while True:
                client.completions.create(model="", prompt="a", max_tokens=1)

        with pytest.raises(openai.InternalServerError, match="takes no new requests"):
            ask_until_refused()
        chunks = [first, *stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        code, _, left = server.ended()
        assert (code, left) == (143, [])


def test_rank_0_dies_and_streams_go_on(server: Server) -> None:
    """The text is that without the death, and the rank comes back."""
    client = server.client
    ask: dict[str, Any] = {"model": "ep-moe", "prompt": list(PROMPTS), "n": 2, "max_tokens": 200, "temperature": 0}
    whole = [choice.text for choice in client.completions.create(**ask).choices]
    texts = ["", "", "", ""]
    for number, chunk in enumerate(client.completions.create(**ask, stream=True)):
        if number == 20:
            os.kill(ranks_of(server.process.pid)[1], signal.SIGKILL)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == whole
    assert any("rank 0 was killed by SIGKILL: it is started again in 0.5 s" in line for line in server.errors)
    deadline = time.monotonic() + 120
    while client.get("/../health", cast_to=dict[str, Any])["status"] == "degraded":
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_ranks_leave_and_come_while_streams_run(server: Server) -> None:
    """Rank 0 leaves, then it takes the place of rank 1: the text stays, nothing is lost or read from the checkpoint."""
    client, before = server.client.with_options(timeout=200), len(server.errors)
    ask: dict[str, Any] = {"model": "ep-moe", "prompt": list(PROMPTS), "max_tokens": 160, "temperature": 0}
    whole = [choice.text for choice in client.completions.create(**ask).choices]
    assert server.ranks()["done"]
    texts, asked = ["", ""], list[Any]()
    for number, chunk in enumerate(client.completions.create(**ask, stream=True)):
        if number == 10:
            asked.append(server.ranks(ranks=[1]))
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == whole
    assert not asked[0]["done"]
    server.wait_for_ranks("left", "serving")
    found = client.get("/../health", cast_to=dict[str, Any])
    assert (found["status"], len(ranks_of(server.process.pid))) == ("ok", 2)
    with pytest.raises(openai.BadRequestError, match=r"num_ranks \(3\) must be in \[1, 2\]"):
        server.ranks(num_ranks=3)
    assert [choice.text for choice in client.completions.create(**ask).choices] == whole
    server.ranks(num_ranks=2)
    server.wait_for_ranks("serving", "serving")
    server.ranks(ranks=[0])
    server.wait_for_ranks("serving", "left")
    assert [choice.text for choice in client.completions.create(**ask).choices] == whole
    lines = server.errors[before:]
    assert not any("killed" in line or "Error" in line for line in lines), lines
    assert not [line for line in lines if re.search(r" [1-9]\d* from the checkpoint", line)], lines
    server.ranks(ranks=[0, 1])
    server.wait_for_ranks("serving", "serving")


@pytest.mark.launchers
def test_actors_of_ray_are_replaced_while_streams_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2 nodes of 2 ranks, one killed and one stopped: the text is that without their deaths; ranks leave and come;
    nothing is left after SIGTERM."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with started(tmp_path, "--ray", "local", "--nodes", "2", "--timeout-secs", "5") as server:
        client = server.client.with_options(timeout=200)
        ask: dict[str, Any] = {"model": "ep-moe", "prompt": list(PROMPTS), "n": 2, "max_tokens": 60, "temperature": 0}
        whole = [choice.text for choice in client.completions.create(**ask).choices]
        for number in (signal.SIGKILL, signal.SIGSTOP):
            before, texts = actors_with(server.mark), ["", "", "", ""]
            for count, chunk in enumerate(client.completions.create(**ask, stream=True)):
                if count == 20:
                    os.kill(before[1], number)
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
            assert texts == whole
            server.wait_for_ranks(*["serving"] * 4)
            now = actors_with(server.mark)
            assert (len(before), len(now), set(before) - set(now)) == (4, 4, {before[1]})
        server.ranks(ranks=[1, 2])
        server.wait_for_ranks("left", "serving", "serving", "left")
        assert len(actors_with(server.mark)) == 2
        server.ranks(num_ranks=4)
        server.wait_for_ranks(*["serving"] * 4)
        assert [choice.text for choice in client.completions.create(**ask).choices] == whole
        server.process.terminate()
        found, _, left = server.ended()
        assert (found, left) == (143, [])


def test_a_port_in_use_and_missing_packages_are_told_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules["ep_moe.launch"], "launch", lambda *args, **options: pytest.fail("ranks were started")
    )
    with contextlib.closing(bind("127.0.0.1", 0)) as taken:  # by a server that may still load its model
        done = CliRunner().invoke(app, ["serve", "--port", str(taken.getsockname()[1])])
    assert done.exit_code == 1
    assert re.search(r"error: host \('127.0.0.1'\) and port \(\d+\) cannot be listened at: .*in use", done.stderr)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else name)
    with pytest.raises(
        RuntimeError, match=re.escape("ep-moe serve needs uvicorn; install: pip install 'ep-moe[serve]'")
    ):
        serve(EngineConfig(), ServeConfig())


@pytest.mark.parametrize("asked", [True, False])
def test_ranks_that_end_with_the_server_are_no_error_after_sigterm(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service manager may signal all processes; a rank that dies by itself is an error."""

    def on_ranks(*args: Any, front: Any) -> None:
        with terminable():
            os.kill(os.getpid(), signal.SIGTERM if asked else 0)
        raise RankFailedError(0, "Died", "was killed by SIGTERM", "", {0: "was killed by SIGTERM"})

    monkeypatch.setattr("ep_moe.app.serve.on_ranks", on_ranks)
    with pytest.raises(SystemExit if asked else RankFailedError) as end:
        serve(EngineConfig(device="cpu"), ServeConfig(port=0))
    assert not asked or end.value.code == 143
