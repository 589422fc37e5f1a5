"""Runs a serving engine whole, with and without the plug-in in turn, and times its answers.

    python tests/engines/serve_engine.py --engine vllm --model qwen3-30b --nproc 2 --ranks dp --logs DIR

The engine, its compiled parts and its dependencies are on PYTHONPATH. Models have published sizes and random weights
(`serve_models`), prompts are token ids drawn by number. Each turn is a process of its own, ended after --timeout-secs.
A JSON line is printed for each turn and setting: tokens a second, time to the first token, time per further token, that
of a step once every request has its first token, a hash of the greedy tokens, and how far they agree with the first
turn's, which the second turn of the same side puts in proportion. Exit status 1: a turn failed, or the plug-in did not
run where it should.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import faulthandler
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ep_moe.report.records import Record

HERE = Path(__file__).parent
if os.environ.get("EP_MOE_SERVE_STAND_INS"):  # engines may start processes that import this file again
    importlib.import_module(f"serve_{os.environ['EP_MOE_SERVE_STAND_INS']}").stand_ins()

ENGINES = {"vllm": "serve_vllm", "sglang": "serve_sglang"}  # modules beside this file
PLUGINS = {
    "vllm.general_plugins": {"ep_moe_serve": "serve_models:register_vllm"},
    "sglang.srt.plugins": {"ep_moe_serve": "serve_models:register_sglang"},
}
TURNS = ("off", "on", "off", "on")
REQUESTS = (1, 16, 64, 256)
PROMPT_TOKENS, NEW_TOKENS = 128, 64
PREFILL = (8, 4096)  # requests and tokens of each, for one new token
# of a setting: the first compiles kernels of its sizes, of the others the median is kept. Prompts are eager, and their
# passes, which the host bounds, differ by half
PASSES, PREFILL_PASSES = 6, 12
LOGPROBS = (64, 20)  # prompts, and tokens after each
MAX_TOKENS = 4096  # of a step
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LOWEST_ID, IDS = 1000, 50_000  # of prompts: every model's vocabulary has them
SHOWN_CHARS = 6000  # of the log of a turn that failed
ENDS_AFTER_SECS = 15  # between a turn's stacks, which it prints, and its end
STACKS_BEFORE_SECS = 5  # and those of the engine's processes
OURS = re.compile(r"ep_moe runs (\S+)")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Requests that are sent at once."""

    name: str
    requests: int
    prompt_tokens: int
    new_tokens: int

    def prompts(self) -> list[list[int]]:
        """Token ids, the same in every run; no two begin alike."""
        draw = random.Random(f"{self.name} {self.requests} {self.prompt_tokens}")
        return [[draw.randrange(LOWEST_ID, IDS) for _ in range(self.prompt_tokens)] for _ in range(self.requests)]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The greedy tokens of a request, and the seconds from the start of all to its first and last."""

    tokens: list[int]
    first_secs: float
    last_secs: float


class Engine(Protocol):
    """An engine that runs; instead of the first two it may have `answers`, of all requests in one call. `rank` is the
    data-parallel rank that computes a request, None if there is one place for all."""

    version: str

    def stream(self, prompt: list[int], new_tokens: int, rank: int | None) -> Any:
        """An asynchronous iterator of new tokens."""

    async def first_logprobs(self, prompt: list[int], count: int, rank: int | None) -> dict[int, float]:
        """The most probable tokens after a prompt, and the logarithms of their probabilities."""

    async def sleep(self) -> None:
        """Give the GPU's memory back, then take it again."""

    def close(self) -> None:
        """End its processes."""


def settings(options: argparse.Namespace) -> list[Setting]:
    """What is measured, in order."""
    found = [Setting("decode", requests, options.prompt_tokens, options.new_tokens) for requests in options.requests]
    if options.prefill:
        requests, tokens = PREFILL
        found.append(Setting("prefill", requests, min(tokens, options.max_tokens), 1))
    return found


def placed(options: argparse.Namespace, setting: Setting) -> list[tuple[list[int], int | None]]:
    """The prompts of a setting and their ranks, in turn: each pass then computes the same steps."""
    ranks = options.nproc if options.ranks == "dp" else 1
    return [(prompt, number % ranks if ranks > 1 else None) for number, prompt in enumerate(setting.prompts())]


async def answer(engine: Engine, prompt: list[int], new_tokens: int, rank: int | None, began: float) -> Answer:
    """Send one request. Errors: RuntimeError if it ends early."""
    tokens: list[int] = []
    first = last = 0.0
    async for new in engine.stream(prompt, new_tokens, rank):
        if new:
            last = time.perf_counter() - began
            first = first or last
            tokens += new
    if len(tokens) != new_tokens:
        raise RuntimeError(f"a request of {new_tokens} tokens ended after {len(tokens)}")
    return Answer(tokens, first, last)


async def answers(engine: Any, options: argparse.Namespace, setting: Setting) -> list[Answer]:
    """Send all requests of a setting at once."""
    if hasattr(engine, "answers"):
        return [Answer(*found) for found in engine.answers(setting.prompts(), setting.new_tokens)]
    began = time.perf_counter()
    sent = (answer(engine, prompt, setting.new_tokens, rank, began) for prompt, rank in placed(options, setting))
    return list(await asyncio.gather(*sent))


def figures(setting: Setting, found: Sequence[Answer]) -> dict[str, Any]:
    """Times and rates of one setting, and its tokens."""
    secs, further = max(one.last_secs for one in found), setting.new_tokens - 1
    tokens = [one.tokens for one in found]
    values = {
        "secs": secs,
        "output_tokens_per_s": setting.requests * setting.new_tokens / secs,
        "prompt_tokens_per_s": setting.requests * setting.prompt_tokens / max(one.first_secs for one in found),
        "ttft_ms": 1e3 * statistics.median(one.first_secs for one in found),
        "ttft_max_ms": 1e3 * max(one.first_secs for one in found),
    }
    if further:
        values["tpot_ms"] = 1e3 * statistics.median((one.last_secs - one.first_secs) / further for one in found)
        values["step_ms"] = (1e3 * secs - values["ttft_max_ms"]) / further
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    return {
        **dataclasses.asdict(setting),
        **{name: round(value, 3) for name, value in values.items()},
        "tokens_sha256": digest[:16],
        "distinct_tokens": len({token for row in tokens for token in row}),
        "tokens": tokens,
    }


def agreement(tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> dict[str, float]:
    """Of how many requests the first token is the reference's, and how many tokens agree before the first other one."""
    pairs = list(zip(tokens, reference, strict=True))
    same = [next((at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0])) for pair in pairs]
    return {
        "first_tokens_agree": round(sum(count > 0 for count in same) / len(same), 4),
        "tokens_agree": round(sum(same) / len(same), 2),
    }


def differences(logprobs: Sequence[Mapping[str, float]], reference: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """How far the log-probabilities of the reference's two most probable tokens are from its own: a wrong layer changes
    them by more than 1, another order of sums by hundredths, which may make another token the most probable one. A
    token that is missing counts as probable as the least one that is there."""
    pairs = [
        (ours, token, value)
        for ours, theirs in zip(logprobs, reference, strict=True)
        for token, value in sorted(theirs.items(), key=lambda pair: -pair[1])[:2]
    ]
    far = [abs(value - ours.get(token, min(ours.values()))) for ours, token, value in pairs]
    return {
        "logprobs_found": round(statistics.mean(token in ours for ours, token, _ in pairs), 4),
        "logprob_difference_median": round(statistics.median(far), 4),
        "logprob_difference_max": round(max(far), 4),
    }


async def measure(engine: Any, options: argparse.Namespace) -> None:
    """Measure every setting of one turn; lines go to the turn's file as soon as they are there. Log-probabilities are
    asked for before, behind, and after --sleep."""
    await _note_logprobs(engine, options, "before")
    for setting in settings(options):
        passes = []
        for _ in range(PREFILL_PASSES if setting.name == "prefill" else PASSES):
            passes.append(figures(setting, await answers(engine, options, setting)))
            print(f"{setting.name} {setting.requests}: {passes[-1]['secs']:.2f} s", flush=True)
        median = sorted(passes[1:], key=lambda found: found["secs"])[(len(passes) - 1) // 2]
        equal = len({found["tokens_sha256"] for found in passes}) == 1
        with options.lines.open("a") as file:
            file.write(json.dumps({"version": engine.version, **median, "passes_equal": equal}) + "\n")
    await _note_logprobs(engine, options, "behind")
    if options.sleep:
        await engine.sleep()
        await _note_logprobs(engine, options, "after sleep")


async def _note_logprobs(engine: Any, options: argparse.Namespace, when: str) -> None:
    if hasattr(engine, "first_logprobs"):
        requests, count = LOGPROBS
        setting = Setting("logprobs", requests, options.prompt_tokens, 1)
        asked = (engine.first_logprobs(prompt, count, rank) for prompt, rank in placed(options, setting))
        found = await asyncio.gather(*asked)
        row = {**dataclasses.asdict(setting), "version": engine.version, "when": when, "logprobs": found}
        with options.lines.open("a") as file:
            file.write(json.dumps(row) + "\n")


async def turn(options: argparse.Namespace) -> None:
    """One turn, in its own process."""
    import serve_models

    module = importlib.import_module(ENGINES[options.engine])
    folder = serve_models.write_model(options.model, options.lines.parent / "model", options.layers)
    began = time.monotonic()
    if options.http:
        engine: Engine = importlib.import_module("serve_http").HttpServer(module, folder, options)
    else:
        engine = module.make(folder, options)
    ready = time.monotonic() - began
    print(f"ready after {ready:.1f} s", flush=True)
    with options.lines.open("a") as file:
        file.write(json.dumps({"ready_secs": round(ready, 1)}) + "\n")
    gc.collect()
    gc.freeze()  # else a collection of all that the engine has imported stops some passes for half a second
    try:
        await measure(engine, options)
    finally:
        engine.close()


@contextlib.contextmanager
def _ended(process: ForkProcess) -> Iterator[None]:
    """Neither the turn nor what it has started lives on."""
    try:
        yield
    finally:
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # which may have no session of its own yet
            process.join()


def _in_child(options: argparse.Namespace, plugin: str, log: Path) -> None:
    """A turn, in a session of its own; its output goes to the log, and variables alone put the plug-in on or off."""
    import serve_models

    os.setsid()
    os.chdir(options.lines.parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    entries, switch = options.lines.parent / "entries", importlib.import_module(ENGINES[options.engine]).SWITCH
    for name in (switch, "EP_MOE_STRICT"):
        os.environ.pop(name, None)
        if plugin == "on":
            os.environ[name] = "1"
    options.set += options.set_on if plugin == "on" else []
    paths = [str(entries), str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = ":".join(filter(None, paths))
    sys.path.insert(0, str(entries))
    os.environ[serve_models.STACKS_AT] = str(time.time() + options.timeout_secs - STACKS_BEFORE_SECS)
    faulthandler.dump_traceback_later(options.timeout_secs, exit=True)
    asyncio.run(turn(options))
    sys.stdout.flush()


def run_turn(options: argparse.Namespace, number: int, work: Path) -> tuple[list[Any], str]:
    """One turn in a process: its lines, and what is wrong with it, or nothing."""
    plugin = options.turns[number]
    options.lines = work / f"{number}.jsonl"
    log = options.logs / f"{options.engine}-{options.label}-{number}-{plugin}.log"
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(options, plugin, log))
    with _ended(process):
        process.start()
        process.join(options.timeout_secs + ENDS_AFTER_SECS)
        code = process.exitcode
    wrong = f"still ran after {options.timeout_secs + ENDS_AFTER_SECS:.0f} s" if code is None else ""
    wrong = f"exit code {code}" if code else wrong
    text = log.read_text(errors="replace") if log.is_file() else ""
    ours = len(OURS.findall(text))
    if not wrong and (ours > 0) != (plugin == "on"):
        wrong = f"the log names {ours} kinds of layers of ep_moe"
    if wrong:
        print(f"turn {number}, plug-in {plugin}: {wrong}; the end of {log}:\n{text[-SHOWN_CHARS:]}", flush=True)
    lines = options.lines
    return ([json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []), wrong


def report(
    options: argparse.Namespace, number: int, rows: Sequence[Mapping[str, Any]], first: dict[str, Any]
) -> list[dict[str, Any]]:
    """Print a turn's lines, which are returned; `first` keeps the tokens of the first turn of each setting."""
    shown = []
    shared = {
        "engine": options.engine,
        "model": options.model,
        "layers": options.layers,
        "nproc": options.nproc,
        "ranks": options.ranks if options.nproc > 1 else "",
        "compile": options.compile,
        "set": dict(options.set + options.set_on if options.turns[number] == "on" else options.set),
        "turn": number,
        "plugin": options.turns[number],
    }
    for row in rows:
        kept = dict(row)
        if "tokens" in kept:
            tokens = kept.pop("tokens")
            reference = first.setdefault(f"{row['name']} {row['requests']}", tokens)
            kept |= agreement(tokens, reference)
        if "logprobs" in kept:
            logprobs = kept.pop("logprobs")
            kept |= differences(logprobs, first.setdefault(row["name"], logprobs))
        shown.append({**shared, **kept})
        line = json.dumps(shown[-1])
        print(line, flush=True)
        with (options.logs / f"{options.engine}-{options.label}.jsonl").open("a") as file:
            file.write(line + "\n")
    return shown


def machine() -> dict[str, Any]:
    """The GPU and the versions that rows name, from another process: engines may not fork one that has used CUDA."""
    words = """import json, torch
from ep_moe.report.records import device_name, versions
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print(json.dumps({"gpu": device_name(device), "versions": versions(device)}))"""
    paths = ":".join(filter(None, [str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", words]
    found = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True, capture_output=True, text=True)
    return dict(json.loads(found.stdout.splitlines()[-1]))


def records(
    options: argparse.Namespace,
    lines: Sequence[Mapping[str, Any]],
    command: Sequence[str],
    gpu: str,
    versions: dict[str, str | None],
) -> "list[Record]":
    """A row of the bench "engine_serve" for each setting: means of the turns with the plug-in, and of those without."""
    from serve_models import MODELS

    from ep_moe.report.records import Record, now

    probabilities = [line for line in lines if line.get("name") == "logprobs" and line["plugin"] == "on"]
    measured = [line for line in lines if "output_tokens_per_s" in line]
    sets = {"set": options.set, "set_on": options.set_on}
    found = []
    for name, requests in dict.fromkeys((line["name"], line["requests"]) for line in measured):
        rate = "prompt_tokens_per_s" if name == "prefill" else "output_tokens_per_s"
        sides: dict[str, dict[str, float]] = {}
        for plugin in ("on", "off"):
            turns = [
                one for one in measured if (one["name"], one["requests"], one["plugin"]) == (name, requests, plugin)
            ]
            figures = {"tokens_per_sec": [one[rate] for one in turns], "ttft_ms": [one["ttft_ms"] for one in turns]}
            if name != "prefill":
                figures |= {key: [one[key] for one in turns] for key in ("tpot_ms", "step_ms")}
            figures["first_tokens_share"] = [one["first_tokens_agree"] for one in turns]
            sides[plugin] = {key: statistics.mean(values) for key, values in figures.items()}
        ours, own = sides["on"], sides["off"]
        own["speedup_ratio"] = ours["tokens_per_sec"] / own["tokens_per_sec"]
        if probabilities:
            ours["logprob_error"] = max(one["logprob_difference_max"] for one in probabilities)
            ours["median_logprob_error"] = max(one["logprob_difference_median"] for one in probabilities)
        one = next(line for line in measured if (line["name"], line["requests"]) == (name, requests))
        found.append(
            Record(
                bench="engine_serve",
                date=now(),
                commit=options.commit,
                gpu=gpu,
                world_size=options.nproc,
                versions=versions,
                command=shlex.join(["python", "tests/engines/serve_engine.py", *command]),
                sweep=options.http,  # its client takes a part of the time
                shapes={"preset": options.model, "layers": options.layers or MODELS[options.model]["num_hidden_layers"]}
                | {part: one[part] for part in ("requests", "prompt_tokens", "new_tokens")},
                setup={
                    "engine": options.engine + " over HTTP" * options.http,
                    "engine_version": one["version"],
                    "ranks": options.ranks if options.nproc > 1 else "one",
                    "compile": options.compile,
                    "setting": f"{name}, {requests} requests",
                    "turns": len(options.turns),
                    **{key: json.dumps(dict(more)) for key, more in sets.items() if more},
                },
                figures=ours,
                baselines={"own": own},
            )
        )
    return found


def start(options: argparse.Namespace, command: Sequence[str]) -> int:
    """All turns up to the first that fails; the exit status. The engine is imported once, and each turn is forked."""
    import releases

    from ep_moe.report.records import append_records

    module = importlib.import_module(ENGINES[options.engine])
    for name, value in {**module.ENVIRON, "HF_HUB_OFFLINE": "1"}.items():
        os.environ.setdefault(name, value)
    module.preload()
    options.logs.mkdir(parents=True, exist_ok=True)
    ends, first, lines = time.monotonic() + options.budget_secs, dict[str, Any](), list[dict[str, Any]]()
    work = Path(tempfile.mkdtemp(prefix="ep_moe_serve_"))
    try:
        releases.entry_points(work / "entries", PLUGINS)
        for number in range(len(options.turns)):
            if time.monotonic() + options.timeout_secs > ends and number:
                print(f"turn {number} and those after it: left out, the time ran out", flush=True)
                return 1
            rows, wrong = run_turn(options, number, work)
            lines += report(options, number, rows, first)
            if wrong:
                return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if options.append:
        append_records(options.append, records(options, lines, command, **machine()))
    return 0


def assignment(text: str) -> tuple[str, Any]:
    """A name and its value, from NAME=JSON. Errors: ValueError."""
    name, found, value = text.partition("=")
    if not found:
        raise ValueError(text)
    return name, json.loads(value)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options. Errors: SystemExit with what is wrong."""
    from serve_models import MODELS

    from ep_moe.report.records import RowsFile, check_writable

    parser = argparse.ArgumentParser(description="Runs an engine whole, with and without ep_moe in turn.")
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--nproc", type=int, default=1, help="GPUs")
    parser.add_argument(
        "--ranks", choices=("dp", "tp"), default="dp", help="data or tensor parallel, x expert parallel"
    )
    parser.add_argument("--turns", nargs="+", choices=("off", "on"), default=list(TURNS), help="plug-in, turn by turn")
    parser.add_argument("--requests", nargs="+", type=int, default=list(REQUESTS), help="at once")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of a step, and of a prompt")
    parser.add_argument("--no-prefill", dest="prefill", action="store_false", help="leave out the long prompts")
    parser.add_argument("--graph-sizes", nargs="+", type=int, default=list(GRAPH_SIZES), help="of captured steps")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="CUDA graphs of decode steps alone")
    parser.add_argument("--in-process", action="store_true", help="vLLM: vllm.LLM in one process, one GPU")
    parser.add_argument("--http", action="store_true", help="the engine's HTTP server, by OpenAI's completions API")
    parser.add_argument("--attention", help="the engine's name of a backend")
    parser.add_argument("--moe-backend", help="of the engine's own experts")
    parser.add_argument("--set", nargs="+", type=assignment, default=[], help="more options of the engine: NAME=JSON")
    parser.add_argument("--set-on", nargs="+", type=assignment, default=[], help="as --set, where the plug-in is on")
    parser.add_argument("--memory", type=float, default=0.88, help="part of a GPU that the engine takes")
    parser.add_argument("--sleep", action="store_true", help="vLLM sleeps and wakes up at the end of each turn")
    parser.add_argument("--timeout-secs", type=float, default=240.0, help="of a turn")
    parser.add_argument("--budget-secs", type=float, default=560.0, help="no turn begins that might end after it")
    parser.add_argument("--logs", type=Path, default=Path("serve_logs"), help="folder for logs and lines")
    parser.add_argument("--append", type=Path, help="add the rows to this .jsonl file; needs --commit")
    parser.add_argument("--commit", default="", help="commit that is measured; needs --append")
    options = parser.parse_args(arguments)
    for name in ("nproc", "prompt_tokens", "new_tokens", "max_tokens", "timeout_secs", "budget_secs"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} ({getattr(options, name)}) must be positive")
    if min(options.requests) < 1 or options.prompt_tokens > options.max_tokens:
        parser.error(f"--requests ({options.requests}) or --prompt-tokens ({options.prompt_tokens}) do not fit")
    if options.sleep and (options.engine != "vllm" or options.in_process or options.http):
        parser.error("--sleep is for vLLM in processes of its own, without --http")
    if options.in_process and (options.engine != "vllm" or options.nproc > 1 or options.http):
        parser.error("--in-process is for vLLM on one GPU, without --http")
    if options.append and (options.turns[0], set(options.turns)) != ("off", {"off", "on"}):
        parser.error(f"--append needs --turns ({' '.join(options.turns)}) that begin with off and have on")
    try:
        RowsFile(append=options.append, commit=options.commit)
        if options.append:
            check_writable(options.append, "append")
    except ValueError as error:
        parser.error(str(error))
    options.logs = options.logs.resolve()
    options.label = "-".join([options.model, str(options.nproc), *([options.ranks] if options.nproc > 1 else [])])
    return options


def main(arguments: Sequence[str]) -> int:
    """The command line's exit status."""
    return start(parse(arguments), arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # then what it has started ends, too
    sys.exit(main(sys.argv[1:]))
