"""Times of the calls of `ep_moe.functional` on one GPU, beside torch's grouped GEMMs, one JSON line each.

    python docs/benchmarks/functional_calls.py --cases gpt-oss-120b qwen3-30b --tokens 1 16 512 --out rows.jsonl

A result is compared with torch's first. `call_us` and `torch_us`: the median of replays of a captured call with a cold
L2; torch's way is argsort, two `grouped_mm` in bfloat16, the activation between them and `index_add_`, without routing.
`host_us`: the median of the calls' time on the host with an idle GPU before each; `row_us`: of calls in a row. All
kernels compile at first, in a process for each case. A table of all rows is last.

Letters: T tokens.
"""

import argparse
import cProfile
import io
import json
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from functional_cases import DEVICE, SCHEMES, Call, others, weights_of

from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.testing import worst_row_error

TOKENS = (1, 16, 64, 128, 512, 4096)
HOST_TOKENS = (16, 128)


def host_us(call: Call, count: int = 200) -> tuple[float, float]:
    """The host's time of a call after the GPU was idle, and of one of several in a row."""
    single, row = [], []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        single.append(1e6 * (time.perf_counter() - start))
    for _ in range(count // 8):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(8):
            call()
        row.append(1e6 * (time.perf_counter() - start) / 8)
    return statistics.median(single), statistics.median(row)


def gpu_us(call: Call, count: int = 30) -> float:
    """The median of replays with a cold L2."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flushed = torch.empty(2 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.uint8, device=DEVICE)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for first, last in marks:
        flushed.zero_()
        first.record()
        graph.replay()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(1e3 * first.elapsed_time(last) for first, last in marks)


def profile(call: Call, top: int) -> str:
    """The functions that a call's host time goes to, by their own time."""
    profiler = cProfile.Profile()
    for _ in range(30):
        torch.cuda.synchronize()
        profiler.enable()
        for _ in range(8):
            call()
        profiler.disable()
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(top)
    return "\n".join(line for line in out.getvalue().splitlines() if line.strip())


def rows(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of one case."""
    preset, scheme, make = SCHEMES[name]
    sizes = LAYER_PRESETS[preset].sizes
    made = sizes.num_experts, sizes.hidden, sizes.intermediate
    weights = weights_of(scheme, *made, compared=not options.compile_only)
    for tokens in options.tokens:
        cases = [make(preset, scheme, weights, tokens)]
        if tokens in options.others:
            cases += others(preset, scheme, weights, tokens)
        for case in cases:
            row: dict[str, Any] = {"case": name, "call": case.call, "tokens": tokens}
            found = case.ours().clone()
            if options.compile_only:
                continue
            if case.torchs is not None:
                row["error"] = float(worst_row_error(found, case.torchs()))
                row["right"] = row["error"] < case.limit
            if not options.host_only and case.timed:
                row["call_us"] = gpu_us(case.ours)
                if case.torchs is not None:
                    row["torch_us"] = gpu_us(case.torchs)
                    row["faster"] = row["torch_us"] / row["call_us"]
            if tokens in options.host:
                row["host_us"], row["row_us"] = host_us(case.ours)
            if tokens in options.profile:
                print(json.dumps(row), profile(case.ours, 28), sep="\n", flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument(
        "--others", nargs="*", type=int, default=[16, 128, 512], help="tokens at which other calls are timed"
    )
    parser.add_argument("--host", nargs="*", type=int, default=list(HOST_TOKENS), help="tokens with the host's time")
    parser.add_argument("--profile", nargs="*", type=int, default=[], help="tokens at which calls are profiled")
    parser.add_argument("--host-only", action="store_true", help="only the host's time")
    parser.add_argument("--compile-only", action="store_true", help="compile kernels, time nothing")
    parser.add_argument("--out", type=Path, help="file that rows are appended to")
    options, found = parser.parse_args(), list[dict[str, Any]]()
    if not options.compile_only:
        compile_all(options)
    for name in options.cases:
        for row in rows(name, options):
            rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
            found.append(rounded)
            line = json.dumps(rounded)
            print(line, flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(f"{line}\n")
        torch.cuda.empty_cache()
    print(torch.cuda.get_device_name(), torch.__version__, *table(found), sep="\n")
    if not all(row.get("right", True) for row in found):
        raise SystemExit("results that are not torch's: WRONG")


def compile_all(options: argparse.Namespace) -> None:
    """Compile the kernels of all cases, each in a process; those of a call are found in Triton's cache then."""
    numbers: list[str] = []
    for name in ("tokens", "others"):
        numbers += [f"--{name}", *map(str, getattr(options, name))]
    command = [sys.executable, __file__, "--compile-only", *numbers, "--cases"]
    processes = [subprocess.Popen([*command, name], stdout=subprocess.DEVNULL) for name in options.cases]
    for name, process in zip(options.cases, processes, strict=True):
        if process.wait():
            raise SystemExit(f"{name}: its kernels were not compiled")


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each row; a star stands behind one that misses an aim."""
    yield f"{'case':16} {'call':40} {'T':>5} {'call_us':>8} {'torch_us':>8} {'faster':>7} {'host_us':>8} {'row_us':>7}"
    for row in found:
        numbers = [(name, row.get(name)) for name in ("call_us", "torch_us", "faster", "host_us", "row_us")]
        cells = [
            "" if value is None else f"{value:.2f}" if name == "faster" else f"{value:.0f}" for name, value in numbers
        ]
        misses = row.get("host_us", 0) > 60 or (row["tokens"] <= 512 and row.get("faster", 1) < 1)
        widths = zip(cells, (8, 8, 7, 8, 7), strict=True)
        shown = " ".join(cell.rjust(width) for cell, width in widths)
        wrong = "" if row.get("right", True) else " WRONG"
        yield f"{row['case']:16} {row['call']:40} {row['tokens']:5} {shown}{' *' * misses}{wrong}"


if __name__ == "__main__":
    main()
