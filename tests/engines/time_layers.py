"""Times one MoE layer of a serving engine: the engine's own, beside the same layer on ep_moe.

    python tests/engines/time_layers.py --engine vllm --nproc 2 [--case fp8] [--append FILE.jsonl --commit SHA]

The engine, its compiled parts and its dependencies are on PYTHONPATH. Both layers are built by the engine's own classes
and have the same weights, tokens and routing. Outputs are checked before anything is timed, against the float32 oracle
of the scheme. A row is printed, and appended, as soon as it is measured. Exit status 1: a case failed, or the time ran
out.

Letters: T tokens of a rank, H hidden, K top-k, E experts.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import importlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from ep_moe.bench.harness import largest_of_ranks
from ep_moe.config import ActivationConfig, ActivationKind, MoEConfig
from ep_moe.group import EPGroup
from ep_moe.profiling.kernels import profile_kernels
from ep_moe.profiling.timing import GRAPH_WARMUP, Captured, slowest, spread, time_calls
from ep_moe.quant import get_scheme
from ep_moe.report.records import OURS, Record, RowsFile, append_records, device_name, now, versions
from ep_moe.report.tables import markdown_table
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from ep_moe.testing.random_experts import RandomExperts
from ep_moe.weights import ExpertWeights

TOKENS = (1, 16, 128, 512, 4096)
GRAPH_TOKENS = 512  # steps up to here are timed in a CUDA graph, as engines replay them
GRAPH_DEVICES = ("cuda",)
MAX_TOKENS = 4096  # that both sides make room for
SAMPLE_ROWS = 16  # that the oracle computes
SEED, WARMUP, REPEATS, TURNS = 0, 5, 20, 2  # both sides are timed in turns
# a baseline may round scales up to powers of two, for which the scheme's limit is not meant: it must be the same layer
BASELINE_LIMITS = {"fp8": 1e-1, "bfloat16": 2e-2}
PROFILED, KERNEL_NAME = 5, 70  # calls whose kernels are shown, characters of a kernel's name
ENDS_AFTER_SECS = 20  # beyond the budget, for what is under way
ENGINES = {"vllm": "time_vllm", "sglang": "time_sglang"}  # modules beside this file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The sizes of one layer; `num_experts` by the number of ranks."""

    preset: str
    hidden: int
    intermediate: int
    num_experts: Mapping[int, int]
    num_topk: int
    scheme: str
    gpt_oss: bool = False  # biases, clamps, and rows of gate and up in turn

    @property
    def limit(self) -> str:
        """The name of its limits."""
        return "fp8" if self.scheme == "fp8_block" else "bfloat16"

    def moe(self, world: int) -> MoEConfig:
        """The layer as the oracle knows it."""
        return MoEConfig(
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts[world],
            scheme=self.scheme,
            activation=GPT_OSS if self.gpt_oss else ActivationConfig(),
        )


GPT_OSS = ActivationConfig(kind=ActivationKind.SWIGLU, alpha=1.702, beta=1.0, limit=7.0)  # of its model card
CASES = {
    "fp8": Case(
        preset="deepseek-v3",
        hidden=7168,
        intermediate=2048,
        num_experts={1: 64, 2: 256},
        num_topk=8,
        scheme="fp8_block",
    ),
    "bf16": Case(
        preset="qwen3-30b", hidden=2048, intermediate=768, num_experts={1: 128, 2: 128}, num_topk=8, scheme="none"
    ),
    "mxfp4": Case(
        preset="gpt-oss-20b",
        hidden=2880,
        intermediate=2880,
        num_experts={1: 32, 2: 32},
        num_topk=4,
        scheme="mxfp4_w4a16",
        gpt_oss=True,
    ),
}


class Engine(Protocol):
    """One rank of an engine, in this process."""

    name: str
    version: str
    device: torch.device
    backends: Sequence[str]  # of the engine's own experts
    words: Mapping[str, str]  # of a row's setup: what else was chosen
    equal_rows: bool  # True if all ranks have the same rows

    def build(self, case: Case, backend: str, label: str, fill: Callable[[Any], None]) -> Any:
        """A layer, whose parameters `fill` sets. Collective."""

    def switch_on(self) -> None:
        """Register the plug-in: layers that are built from now on are ours."""

    def kernel_of(self, layer: Any) -> str:
        """What computes the engine's own layer."""

    def group_of(self, layer: Any) -> EPGroup:
        """The ranks of a layer of ours."""

    def route(self, layer: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [T, K] and weights [T, K] float32 of the layer's router."""

    def call_of(self, layer: Any, x: torch.Tensor, logits: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The whole layer as the engine's models call it, for T tokens of every rank. Collective."""

    def capturing(self) -> contextlib.AbstractContextManager[torch.cuda.Stream]:
        """The engine's own context of a capture, and its stream."""


def fill(weights: ExpertWeights, case: Case, layer: Any) -> None:
    """Copy weights into the parameters of an engine's layer, as its loader leaves them. Local."""
    scale = "weight_scale" if case.gpt_oss else "weight_scale_inv"
    for name, matrix, bias in (("w13", weights.w13, weights.w13_bias), ("w2", weights.w2, weights.w2_bias)):
        for part, values in (("weight", matrix.values), (scale, matrix.scale), ("bias", bias)):
            if values is not None:
                parameter = getattr(layer, f"{name}_{part}").data
                values = values.view(parameter.dtype) if part == scale else values  # e8m0, as bytes
                in_turn = case.gpt_oss and name == "w13"
                parameter.copy_(torch.stack(values.chunk(2, 1), 2).flatten(1, 2) if in_turn else values)


def capture(engine: Engine, call: Callable[[], torch.Tensor]) -> Captured:
    """Capture a call as the engine captures its model. Collective, host sync."""
    with engine.capturing() as stream:
        for _ in range(GRAPH_WARMUP):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            output = call()
    torch.cuda.synchronize()
    return Captured(graph.replay, output)


@dataclasses.dataclass(kw_only=True)
class Layers:
    """The layers of one case on this rank: the engine's own by backend, and ours."""

    case: Case
    experts: RandomExperts
    by_label: dict[str, Any]


class Timer:
    """All cases of one rank. Args: as the command line's."""

    def __init__(self, engine: Engine, options: argparse.Namespace, file: RowsFile) -> None:
        self._engine, self._options, self._file = engine, options, file
        self._rank, self._world = options.rank, options.nproc
        self._device = engine.device
        self._ends = time.monotonic() + options.budget_secs
        self.records: list[Record] = []
        self.failed: list[str] = []

    def run(self) -> None:
        """Build every layer of the engine's own before the plug-in is registered, then ours; then time."""
        made = {name: self._attempt(f"build {name}", self._own_layers, CASES[name]) for name in self._options.case}
        self._engine.switch_on()
        for name, layers in made.items():
            if layers is not None:
                self._attempt(name, self._time_case, layers)

    def _attempt(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result, or None after an error, which is shown and counted."""
        try:
            return function(*arguments)
        except Exception:  # noqa: BLE001 the other cases go on
            self.failed.append(what)
            say(self._rank, f"FAILED {what}\n{traceback.format_exc()}")
            return None

    def _weights(self, experts: RandomExperts, case: Case) -> ExpertWeights:
        mine = case.num_experts[self._world] // self._world
        return experts.local(range(self._rank * mine, (self._rank + 1) * mine), get_scheme(case.scheme))

    def _build(self, case: Case, backend: str, label: str, filled: Callable[[Any], None]) -> Any:
        """A layer, built under the model's dtype as engines do. Collective."""
        torch.set_default_dtype(torch.bfloat16)
        try:
            return self._engine.build(case, backend, label, filled)
        finally:
            torch.set_default_dtype(torch.float32)

    def _own_layers(self, case: Case) -> Layers:
        experts = RandomExperts(case.moe(self._world), torch.bfloat16, self._device, bias=case.gpt_oss, seed=SEED)
        filled = functools.partial(fill, self._weights(experts, case), case)
        layers: dict[str, Any] = {}
        kernels: set[str] = set()
        for backend in self._engine.backends:
            try:
                layer = self._build(case, backend, f"{backend}.{case.preset}", filled)
            except Exception:
                if backend == self._engine.backends[0]:
                    raise
                say(self._rank, f"{case.preset}, {backend} cannot be built\n{traceback.format_exc()}")
                continue
            kernel = self._engine.kernel_of(layer)
            say(self._rank, f"{case.preset}, {backend}: {kernel}")
            if kernel not in kernels:  # "auto" often chooses what has been named already
                layers[backend] = layer
            kernels.add(kernel)
        return Layers(case=case, experts=experts, by_label=layers)

    def _time_case(self, layers: Layers) -> None:
        case = layers.case
        filled = functools.partial(fill, self._weights(layers.experts, case), case)
        layers.by_label[OURS] = self._build(case, self._engine.backends[0], f"{OURS}.{case.preset}", filled)
        del filled
        torch.cuda.empty_cache()
        group = self._engine.group_of(layers.by_label[OURS])
        # the largest first: engines share work buffers that grow, and graphs keep their addresses
        for tokens in sorted(self._options.tokens, reverse=True):
            what = f"{case.preset}, {tokens} tokens"
            if not all(group.all_gather_object(time.monotonic() < self._ends)):
                self.failed.append(f"{what}: left out, the time ran out")
                continue
            self._attempt(what, self._measure, layers, tokens, group)
        layers.by_label.clear()
        torch.cuda.empty_cache()

    def _inputs(self, case: Case, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [T, H] bfloat16 and logits [T, E] float32."""
        seed = 1000 * tokens + (0 if self._engine.equal_rows else self._rank)
        generator = torch.Generator(self._device).manual_seed(seed)
        normal = functools.partial(torch.randn, generator=generator, device=self._device, dtype=torch.float32)
        return normal(tokens, case.hidden).bfloat16(), normal(tokens, case.num_experts[self._world])

    def _measure(self, layers: Layers, tokens: int, group: EPGroup) -> None:
        """Check all sides, then time them. Collective."""
        case, graph = layers.case, tokens <= GRAPH_TOKENS and self._device.type in GRAPH_DEVICES
        x, logits = self._inputs(case, tokens)
        ids, weights = self._engine.route(layers.by_label[OURS], logits)
        sample = torch.linspace(0, tokens - 1, min(SAMPLE_ROWS, tokens), device=self._device).long()
        expected = layers.experts.expected_output(
            x[sample], ids[sample].long(), weights[sample].float(), get_scheme(case.scheme)
        )
        group.wait_for_all("expected output")
        for layer in layers.by_label.values():  # so that no buffer grows once a graph has its address
            with contextlib.suppress(Exception):  # which comes again below
                self._engine.call_of(layer, x, logits)()
        calls: dict[str, Callable[[], object]] = {}
        captured_calls = []
        figures: dict[str, dict[str, float]] = {}
        for label, layer in layers.by_label.items():
            call = self._engine.call_of(layer, x, logits)
            try:
                output = call().clone()
                errors = {"worst_row_error": worst_row_error(output[sample], expected)}
                if graph:
                    captured = capture(self._engine, call)
                    captured_calls.append(call)  # its tensors are read by the graph
                    errors["worst_graph_row_error"] = worst_row_error(captured.replayed(), output)
                    call = captured.replay
            except Exception:
                if label in (OURS, self._engine.backends[0]):
                    raise
                say(self._rank, f"{case.preset}, {tokens} tokens, {label} fails\n{traceback.format_exc()}")
                errors = dict.fromkeys(("worst_row_error", "worst_graph_row_error")[: 1 + graph], float("nan"))
            errors = largest_of_ranks(group, {label: errors})[label]
            limit = (ROW_ERROR_LIMITS if label == OURS else BASELINE_LIMITS)[case.limit]
            wrong = {name: error for name, error in errors.items() if not error < limit}
            if wrong:
                text = f"{case.preset}, {tokens} tokens, {label}: {wrong} is not below {limit}"
                if label in (OURS, self._engine.backends[0]):
                    raise ValueError(text)
                say(self._rank, f"{text}; not timed")
                self.failed.append(text)
                continue
            figures[label] = errors
            calls[label] = call
        samples: dict[str, list[float]] = {label: [] for label in calls}
        for _ in range(TURNS):
            for label, call in calls.items():
                samples[label] += time_calls(call, group, warmup=WARMUP, repeats=REPEATS)
        for label, us in samples.items():
            figures[label] |= spread("call", slowest(group, {"call": us}, whole="call")["call"])
        self._record(layers, tokens, figures, graph=graph)
        if self._options.kernels:
            for label, call in calls.items():
                kernels = profile_kernels(call, group, repeats=PROFILED)
                if self._rank == 0:
                    print(f"{case.preset}, {tokens} tokens, kernels of {label}\n{kernels_table(kernels)}", flush=True)

    def _record(self, layers: Layers, tokens: int, figures: dict[str, dict[str, float]], *, graph: bool) -> None:
        case = layers.case
        record = row_of(
            case,
            figures,
            world=self._world,
            tokens=tokens,
            device=self._device,
            commit=self._file.commit,
            setup={
                "engine": self._engine.name,
                "engine_version": self._engine.version,
                **self._engine.words,
                "dtype": "bfloat16",
                "scheme": case.scheme,
                "graph": graph,
                "seed": SEED,
                "warmup": WARMUP,
                "repeats": REPEATS * TURNS,
                **{
                    f"{label}_kernel": self._engine.kernel_of(layer)
                    for label, layer in layers.by_label.items()
                    if label in figures and label != OURS
                },
            },
        )
        self.records.append(record)
        if self._rank:
            return
        if self._file.append is not None:
            append_records(self._file.append, [record])
        print(f"ROW {record.to_line()}\n{line_of(record)}", flush=True)


def row_of(
    case: Case,
    figures: Mapping[str, dict[str, float]],
    *,
    world: int,
    tokens: int,
    device: torch.device,
    commit: str,
    setup: Mapping[str, Any],
) -> Record:
    """A row of bench "engine"; `figures` by side. Each baseline has its time over ours, and ours over its. Local."""
    ours, theirs = figures[OURS], {label: dict(found) for label, found in figures.items() if label != OURS}
    for found in theirs.values():
        found["speedup_ratio"] = found["call_us"] / ours["call_us"]
        found["time_ratio"] = ours["call_us"] / found["call_us"]
    return Record(
        bench="engine",
        date=now(),
        commit=commit or "0000000",
        gpu=device_name(device),
        world_size=world,
        versions=versions(device),
        command=shlex.join(["python", "tests/engines/time_layers.py", *given(sys.argv[1:])]),
        sweep=False,
        shapes={
            "preset": case.preset,
            "tokens_per_rank": tokens,
            "hidden": case.hidden,
            "intermediate": case.intermediate,
            "num_experts": case.num_experts[world],
            "num_topk": case.num_topk,
        },
        setup=dict(setup),
        figures=dict(ours),
        baselines=theirs,
    )


def given(arguments: Sequence[str]) -> list[str]:
    """The arguments without those that `start` adds for a rank. Local."""
    return list(arguments[: arguments.index("--rank")] if "--rank" in arguments else arguments)


def line_of(record: Record) -> str:
    """A row for people: times in microseconds, our time over each baseline's in brackets. Local."""
    theirs = [
        f"{label} {found['call_us']:.1f} us ({found['time_ratio']:.2f}, error {found['worst_row_error']:.1e})"
        for label, found in record.baselines.items()
    ]
    ours, shapes = record.figures, record.shapes
    text = (
        f"{record.setup['engine']}, {record.world_size} ranks, {shapes['preset']}, {shapes['tokens_per_rank']} tokens"
    )
    return f"{text}: ours {ours['call_us']:.1f} us (error {ours['worst_row_error']:.1e}), {', '.join(theirs)}"


def kernels_table(kernels: Sequence[tuple[str, float]]) -> str:
    """Microseconds of each kernel and how often it runs, per call of `PROFILED`, the slowest first. Local."""
    times: dict[str, list[float]] = {}
    for name, us in kernels:
        times.setdefault(name, []).append(us)
    slowest_first = sorted(times.items(), key=lambda item: -sum(item[1]))
    columns = [
        ("us a call", [f"{sum(us) / PROFILED:.1f}" for _, us in slowest_first]),
        ("times", [f"{len(us) / PROFILED:g}" for _, us in slowest_first]),
        ("kernel", [name[:KERNEL_NAME] for name, _ in slowest_first]),
    ]
    return markdown_table(columns)


def say(rank: int, text: str) -> None:
    """A line of progress."""
    print(f"rank {rank}: {text}", flush=True)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, RowsFile]:
    """The options, and where rows go. Errors: SystemExit with what is wrong."""
    parser = argparse.ArgumentParser(description="Times MoE layers of an engine beside ep_moe's.")
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--nproc", type=int, choices=(1, 2), default=1, help="ranks, each on a GPU of its own")
    parser.add_argument("--gpus", help="GPUs by number, such as 0,1; by default the first ones")
    parser.add_argument("--case", nargs="+", choices=CASES, help="all that the engine's own kernels compute by default")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="of each rank")
    parser.add_argument("--kernels", action="store_true", help="print the time of each kernel, too")
    parser.add_argument("--budget-secs", type=float, default=240.0, help="no measurement begins after that")
    parser.add_argument("--append", type=Path, help="add the rows to this .jsonl file; needs --commit")
    parser.add_argument("--commit", default="", help="commit that is measured; needs --append")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    cases = [name for name, case in CASES.items() if options.engine == "vllm" or not case.gpt_oss]
    options.case = options.case or cases
    if set(options.case) - set(cases):
        parser.error(f"--case ({' '.join(options.case)}) of {options.engine} must be of {' '.join(cases)}")
    if not all(0 < tokens <= MAX_TOKENS for tokens in options.tokens):
        parser.error(f"--tokens ({options.tokens}) are not from 1 to {MAX_TOKENS}")
    if options.budget_secs <= 0:
        parser.error(f"--budget-secs ({options.budget_secs}) must be positive")
    gpus = (options.gpus or "0,1").split(",")
    if not all(gpu.isdecimal() for gpu in gpus) or len(gpus) < options.nproc:
        parser.error(f"--gpus ({options.gpus}) are not {options.nproc} numbers with commas between")
    try:
        return options, RowsFile(append=options.append, commit=options.commit)
    except ValueError as error:
        parser.error(str(error))


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start the ranks; returns the worst exit status. A rank that fails ends the others."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    gpus = ",".join((options.gpus or "0,1").split(",")[: options.nproc])
    # all ranks see all GPUs: they map memory of each other
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments, "--rank", str(rank), "--port", str(port)],
            env=environment,
            start_new_session=True,
        )
        for rank in range(options.nproc)
    ]
    ends = time.monotonic() + options.budget_secs + 2 * ENDS_AFTER_SECS
    with _ended(ranks):
        while time.monotonic() < ends:
            codes = [rank.poll() for rank in ranks]
            if all(code is not None for code in codes):
                break
            if any(codes):  # the others may wait for it
                ends = min(ends, time.monotonic() + ENDS_AFTER_SECS)
            time.sleep(0.2)
    return max(1 if rank.returncode else 0 for rank in ranks)


@contextlib.contextmanager
def _ended(ranks: Sequence["subprocess.Popen[bytes]"]) -> Iterator[None]:
    """No rank, nor what it has started, lives on."""
    try:
        yield
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def rank_main(options: argparse.Namespace, file: RowsFile) -> int:
    """One rank's part; returns its exit status."""
    faulthandler.dump_traceback_later(options.budget_secs + ENDS_AFTER_SECS, exit=True)
    torch.cuda.set_device(options.rank)
    module = importlib.import_module(ENGINES[options.engine])
    engine = module.make(rank=options.rank, world=options.nproc, port=options.port, max_tokens=MAX_TOKENS)
    say(options.rank, f"{engine.name} {engine.version} on {torch.cuda.get_device_name()}")
    timer = Timer(engine, options, file)
    with torch.no_grad():
        timer.run()
    for what in timer.failed:
        say(options.rank, f"not as wanted: {what}")
    return 1 if timer.failed else 0


def main(arguments: Sequence[str]) -> int:
    """The command line's exit status."""
    options, file = parse(arguments)
    if options.rank is None:
        return start(options, arguments)
    code = 1
    try:
        code = rank_main(options, file)
    except Exception:  # noqa: BLE001 shown before the process ends
        say(options.rank, traceback.format_exc())
    sys.stdout.flush()
    os._exit(code)  # engines leave threads and communicators that wait for other ranks


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
