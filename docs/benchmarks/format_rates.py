"""Times every scheme of docs/formats.md on one GPU at 16 and 1024 rows per expert, and prints tables.

    python docs/benchmarks/format_rates.py --compile 14 --secs 330 --out rates.jsonl

32 experts with the same number of rows, default tiles; the backend that `experts="auto"` takes, and Triton's beside
it where that is another. Every call is first compared with the oracle, rows of four experts. `us`: the median of
replays of a captured call with a cold L2, from the tile list to the second GEMM; `share`: bytes of all weights per
second, of the bandwidth of a copy in the same process, read and written; `of bf16`: the time of Triton's bfloat16
experts of these sizes, divided by the scheme's. Beside them torch's own grouped products, with silu between two of
them: of bfloat16 weights, as every scheme's would be after dequantization, and of fp8 per token, quantized between
them by our kernel.
The steps of calls (`--steps`) are timed one by one. `--candidates` times tiles beside the default ones. `--compile`:
processes that compile everything first.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from format_tiles import COMPILED_EXPERTS, DEVICE, DTYPE, EXPERTS, FEW, MANY, copy_gbs

from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.config import EngineConfig, Layout
from ep_moe.experts.grouped_gemm import CallShape
from ep_moe.experts.hopper.experts import HopperExperts
from ep_moe.experts.kernels import KernelExperts
from ep_moe.experts.prepared import batch_tensors, weight_tensors, with_dense_rows
from ep_moe.experts.tile_tables import tiles_to_json
from ep_moe.experts.triton import TritonExperts
from ep_moe.experts.tuning import ExpertTiles, GemmTiles
from ep_moe.group import EPGroup
from ep_moe.layout import pack_routed
from ep_moe.profiling.timing import capture, time_calls
from ep_moe.quant import get_scheme, quantize
from ep_moe.quant.triton import quantize as quantize_rows
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from ep_moe.testing.random_experts import RandomExperts

DEEPSEEK, GPT_OSS = "deepseek-v3", "gpt-oss-120b"
SCHEMES = (
    *("none", "fp8_block", "fp8_block_ue8m0", "fp8_token", "fp8_tensor", "fp8_tensor_channel", "int8_token"),
    *("int8_block", "mxfp8", "nvfp4", "nvfp4_divisor", "mxfp4_w4a8", "int4_w4a8", "int4_w4a8_g128"),
    *("int4_w4a16", "int4_w4a16_zp", "int4_w4a16_g32", "int4_w4a16_g64", "int4_w4a16_g128", "int4_w4a16_g128_zp"),
    *("mxfp4_w4a16", "nvfp4_w4a16", "nvfp4_w4a16_divisor"),
    *("fp8_w8a16", "fp8_w8a16_tensor", "fp8_w8a16_block", "int8_w8a16", "int8_w8a16_g128_zp", "mxfp8_w8a16"),
)
PROBLEMS = (*((DEEPSEEK, scheme) for scheme in SCHEMES), (GPT_OSS, "none"), (GPT_OSS, "mxfp4_w4a16"))
NAMES = tuple(name if preset == DEEPSEEK else f"{preset}:{name}" for preset, name in PROBLEMS)
ROWS = (FEW, MANY)
BACKENDS: dict[str, type[TritonExperts | HopperExperts]] = {"triton": TritonExperts, "hopper": HopperExperts}
REPEATS = {FEW: 15, MANY: 7}
CHECKED_ROWS = 4  # of an expert


def gemm(n: int, k: int, warps: int, stages: int, programs: int, *, swap: bool = True) -> GemmTiles:
    """Tiles of a GEMM."""
    return GemmTiles(block_n=n, block_k=k, swap=swap, num_warps=warps, num_stages=stages, programs_per_sm=programs)


def both(rows: int, k: int, warps: int, stages: int, programs: int, group: int = 16) -> ExpertTiles:
    """Tiles that hold as many rows of w13 as of w2: 128."""
    first = gemm(64, k, warps, stages, programs)
    return ExpertTiles(block_m=rows, first=first, second=dataclasses.replace(first, block_n=128), group_m=group)


def plain(rows: int, first: tuple[int, ...], second: tuple[int, ...], group: int = 16) -> ExpertTiles:
    """Tiles of weights that are multiplied as they are stored: columns, warps, stages and programs of each GEMM."""
    gemms = [gemm(n, 128, *options, swap=False) for n, *options in (first, second)]
    return ExpertTiles(block_m=rows, first=gemms[0], second=gemms[1], group_m=group)


def few(first: tuple[int, ...], second: tuple[int, ...]) -> ExpertTiles:
    """Tiles of 16 rows: rows of weights, columns of a step, warps, stages and programs of each GEMM."""
    return ExpertTiles(block_m=16, first=gemm(first[0] // 2, *first[1:]), second=gemm(*second))


BLOCKS_MANY = (
    plain(64, (128, 8, 3, 1), (128, 4, 3, 2), 8),
    plain(64, (128, 8, 3, 1), (128, 4, 3, 2), 32),
    plain(64, (128, 8, 3, 1), (128, 8, 3, 2)),
)
BYTES_MANY = (
    both(128, 128, 4, 2, 2, 4),
    both(128, 64, 4, 3, 2, 4),
    both(256, 64, 8, 4, 1, 4),
    both(256, 128, 8, 2, 1, 4),
)
CANDIDATES: dict[str, tuple[ExpertTiles, ...]] = {
    f"{DEEPSEEK}:fp8_w8a16:{FEW}": (few((64, 256, 4, 2, 4), (64, 256, 4, 2, 4)),),
    f"{DEEPSEEK}:int8_w8a16_g128_zp:{FEW}": (few((64, 128, 4, 3, 5), (64, 128, 4, 3, 5)),),
    **{
        f"{DEEPSEEK}:{scheme}:{rows}": (both(rows, 128, 4, 2, 2), both(rows, 64, 8, 3, 1))
        for scheme in ("fp8_w8a16", "mxfp8_w8a16")
        for rows in (64, 128)
    },
    **{f"{DEEPSEEK}:{scheme}:{MANY}": BYTES_MANY for scheme in ("fp8_w8a16", "int8_w8a16")},
    **{f"{DEEPSEEK}:{scheme}:{MANY}": BLOCKS_MANY for scheme in ("int8_block", "fp8_block")},
}


class Problem:
    """The experts of a preset in a scheme, and batches of them.

    Args:
        preset, name: of the layer and the scheme. experts: their number.
    """

    def __init__(self, preset: str, name: str, experts: int) -> None:
        self.scheme, self.num_experts = get_scheme(name), experts
        self.moe = LAYER_PRESETS[preset].moe(EngineConfig(scheme=name, device="cuda"))
        self.random = RandomExperts(self.moe, DTYPE, DEVICE, bias=LAYER_PRESETS[preset].bias, seed=0)
        self.weights = self.random.local(range(experts), self.scheme)
        self.expected: torch.Tensor | None = None

    def set_rows(self, rows: int) -> None:
        """Make a batch of so many rows of each expert."""
        ids = torch.arange(self.num_experts, dtype=torch.int32, device=DEVICE).repeat_interleave(rows).unsqueeze(1)
        self.x = torch.randn(len(ids), self.moe.hidden, dtype=DTYPE, device=DEVICE)
        self.ids, self.ones, self.expected = ids, torch.ones(len(ids), 1, device=DEVICE), None
        tokens: Any = self.x
        if self.scheme.payload.quantized:
            tokens = quantize(self.x, self.scheme, static_scale=self.weights.w13_input_scale)
        packed = pack_routed(
            tokens,
            ids,
            self.ones,
            Layout.COMPACT,
            scheme=self.scheme,
            dtype=DTYPE,
            first=0,
            num_local_experts=self.num_experts,
            capacity=len(ids),
        )
        self.batch = dataclasses.replace(packed.batch, expected_rows=rows)
        chosen = sorted({0, self.num_experts // 3, 2 * self.num_experts // 3, self.num_experts - 1})
        sample = [expert * rows + row * rows // CHECKED_ROWS for expert in chosen for row in range(CHECKED_ROWS)]
        self.sample = torch.tensor(sample, device=DEVICE)
        self.checked = packed.token_to_row[self.sample, 0].long()

    def experts(self, backend: str, tiles: ExpertTiles | None) -> KernelExperts:
        """The experts of this backend with these tiles; None are the package's."""
        return BACKENDS[backend](self.moe.activation, tiles=tiles)

    def backend(self) -> str:
        """The backend that takes the batch by default."""
        return self.experts("hopper", None).backend_of(self.batch, self.weights)

    def tiles(self) -> ExpertTiles:
        """Triton's tiles of the batch by default."""
        shape = CallShape.of(self.batch, self.weights, self.moe.activation)
        return self.experts("triton", None).choose_backend(shape)[1]

    def error(self, call: Callable[[], torch.Tensor]) -> float:
        """The worst relative error of the checked rows."""
        if self.expected is None:
            x, ids, ones = (each[self.sample] for each in (self.x, self.ids, self.ones))
            self.expected = self.random.expected_output(x, ids, ones, self.scheme)
        return worst_row_error(call()[self.checked], self.expected)

    @property
    def limit(self) -> float:
        """Of the error, by docs/formats.md."""
        return ROW_ERROR_LIMITS["fp8" if self.scheme.payload.quantized else "bfloat16"]

    def steps(self, experts: KernelExperts, repeats: int) -> dict[str, float]:
        """Microseconds of each kernel of a call by itself."""
        batch = with_dense_rows(self.batch)
        y = torch.empty(batch.output_shape, dtype=DTYPE, device=DEVICE)
        tensors = batch_tensors(batch) | {"y": y} | weight_tensors(self.weights)
        apart = experts.prepare(batch, self.weights).apart(tensors)
        for launch in apart.values():
            launch()
        group = EPGroup.single(DEVICE)
        return {
            name: statistics.median(time_calls(launch, group, warmup=1, repeats=repeats))
            for name, launch in apart.items()
        }


def median_us(call: Callable[[], torch.Tensor], repeats: int) -> float:
    """The median of replays of a captured call."""
    replay = capture(call, DEVICE).replay
    return statistics.median(time_calls(replay, EPGroup.single(DEVICE), warmup=2, repeats=repeats))


def calls_of(preset: str, name: str, *, candidates: bool) -> dict[int, list[ExpertTiles | None]]:
    """By rows, the tiles to time; None are the default ones."""
    calls: dict[int, list[ExpertTiles | None]] = {rows: [None] for rows in ROWS}
    for case, tiles in CANDIDATES.items() if candidates else ():
        case_preset, case_name, rows = case.split(":")
        if (case_preset, case_name) == (preset, name):
            calls[int(rows)] = [None, *tiles]
    return calls


def compile_calls(preset: str, name: str, rows: int, tried: list[ExpertTiles | None]) -> str:
    """Compile what calls launch. Returns: those that cannot be launched."""
    problem, failed = Problem(preset, name, COMPILED_EXPERTS), []
    problem.set_rows(rows)
    wanted = [("triton", tiles) for tiles in tried]
    if problem.backend() != "triton":
        wanted.append((problem.backend(), None))
    for backend, tiles in wanted:
        try:
            problem.experts(backend, tiles)(problem.batch, problem.weights)
        except Exception as error:  # noqa: BLE001 - what a compiler or driver may raise has no common type
            failed.append(f"{preset} {name} {rows} {backend} {tiles}: {error!r:.200}")
    torch.cuda.synchronize()
    return "\n".join(failed)


def compile_all(problems: Sequence[tuple[str, str]], processes: int, *, candidates: bool) -> None:
    """Compile everything in so many processes, those with the most tiles first."""
    begin, spawn = time.monotonic(), multiprocessing.get_context("spawn")
    given = [
        (preset, name, rows, tried)
        for preset, name in problems
        for rows, tried in calls_of(preset, name, candidates=candidates).items()
    ]
    with concurrent.futures.ProcessPoolExecutor(processes, spawn) as pool:
        futures = [pool.submit(compile_calls, *each) for each in sorted(given, key=lambda each: -len(each[3]))]
        for future in futures:
            if future.result():
                print(future.result(), flush=True)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)


def time_case(problem: Problem, backend: str, tiles: ExpertTiles | None, *, steps: bool) -> dict[str, Any]:
    """Check a call and time it. Returns: us, the error, "broken" if that is too large, and steps."""
    experts = problem.experts(backend, tiles)
    call = functools.partial(experts, problem.batch, problem.weights)
    found: dict[str, Any] = {"error": problem.error(call)}
    found["broken"] = not found["error"] < problem.limit
    repeats = REPEATS.get(problem.batch.expected_rows, REPEATS[MANY])
    found["us"] = median_us(call, repeats)
    if steps:
        found["steps"] = problem.steps(experts, repeats)
    return found


def torch_us(preset: str, rows: int, repeats: int) -> dict[str, float | str]:
    """Torch's grouped products, of bfloat16 and of fp8 per token: microseconds, or why there are none."""
    moe, found = LAYER_PRESETS[preset].moe(EngineConfig(scheme="none", device="cuda")), dict[str, float | str]()
    hidden, inner = moe.hidden, moe.intermediate
    x = torch.randn(EXPERTS * rows, hidden, dtype=DTYPE, device=DEVICE)
    offsets = torch.arange(1, EXPERTS + 1, dtype=torch.int32, device=DEVICE) * rows
    w13 = torch.randn(EXPERTS, 2 * inner, hidden, dtype=DTYPE, device=DEVICE)
    w2 = torch.randn(EXPERTS, hidden, inner, dtype=DTYPE, device=DEVICE)
    payload = get_scheme("fp8_token").payload

    def between(sums: torch.Tensor) -> torch.Tensor:
        gate, up = sums.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    def bf16() -> torch.Tensor:
        sums = torch._grouped_mm(x, w13.transpose(1, 2), offs=offsets)
        return torch._grouped_mm(between(sums), w2.transpose(1, 2), offs=offsets)

    def scaled(rows8: torch.Tensor, scale: torch.Tensor, w8: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"offs": offsets, "out_dtype": DTYPE, "use_fast_accum": True}
        return torch._scaled_grouped_mm(rows8, w8.transpose(1, 2), scale.reshape(-1), w_scale, **options)

    def timed(name: str, call: Callable[[], torch.Tensor]) -> None:
        try:
            call()
            found[name] = median_us(call, repeats)
        except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
            found[name] = f"{error!r:.120}"

    timed("grouped_mm", bf16)
    x8, x_scale = quantize_rows(x, payload, None)
    w13_8, w2_8 = w13.to(torch.float8_e4m3fn), w2.to(torch.float8_e4m3fn)
    ones13, ones2 = (torch.ones(EXPERTS, n, device=DEVICE) for n in (2 * inner, hidden))

    def fp8() -> torch.Tensor:
        values, scale = quantize_rows(between(scaled(x8, x_scale, w13_8, ones13)), payload, None)
        return scaled(values, scale, w2_8, ones2)

    timed("scaled_grouped_mm", fp8)
    return found


def line(row: dict[str, Any], baseline: dict[tuple[str, int], float], copy: float, tiles: str) -> str:
    """A row as one of a table."""
    key = row["preset"], row["rows"]
    shown = f"{row['num_bytes'] / row['us'] / 1e3 / copy:.0%}" if row["rows"] <= FEW else f"{row['tflops']:.0f}"
    ratio = f"{baseline[key] / row['us']:.2f}" if key in baseline else ""
    what = f"{row['us']:.0f} | {shown} | {ratio} | {row['error']:.1e}{' WRONG' if row['broken'] else ''}"
    steps = ", ".join(f"{name} {us:.0f}" for name, us in row.get("steps", {}).items())
    return f"| {row['preset']} | {row['scheme']} | {row['backend']} | {row['rows']} | {what} | {steps} | {tiles} |"


def time_problem(
    preset: str, name: str, baseline: dict[tuple[str, int], float], copy: float, arguments: argparse.Namespace
) -> None:
    """Time the calls of a problem, and print a line for each."""
    problem = Problem(preset, name, EXPERTS)
    matrices = (2 + problem.moe.activation.kind.gated) * problem.moe.hidden * problem.moe.intermediate
    for rows, tried in calls_of(preset, name, candidates=arguments.candidates).items():
        problem.set_rows(rows)
        calls: list[tuple[str, ExpertTiles | None]] = [("triton", tiles) for tiles in tried]
        if problem.backend() != "triton":
            calls.insert(0, (problem.backend(), None))
        for backend, tiles in calls:
            row: dict[str, Any] = {"preset": preset, "scheme": name, "backend": backend, "rows": rows}
            row |= {"copy_gbs": copy, "num_bytes": problem.weights.num_bytes, "tiles": tiles and tiles_to_json(tiles)}
            try:
                row |= time_case(problem, backend, tiles, steps=arguments.steps)
            except Exception as error:  # noqa: BLE001 - what a compiler or driver may raise has no common type
                print(f"{preset} {name} {rows} {backend} {tiles}: {error!r:.200}", flush=True)
                torch.cuda.synchronize()
                continue
            row["tflops"] = 2 * EXPERTS * rows * matrices / row["us"] / 1e6
            if name == "none" and backend == "triton" and tiles is None:
                baseline[preset, rows] = row["us"]
            record(row, arguments.out)
            shown = "" if len(tried) == 1 or backend != "triton" else short(tiles or problem.tiles())
            print(line(row, baseline, copy, shown), flush=True)


def record(row: dict[str, Any], out: Path) -> None:
    """Append a row to the file."""
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")


def run(arguments: argparse.Namespace) -> None:
    """Time everything and print the tables."""
    end, copy, baseline, late = time.monotonic() + arguments.secs, copy_gbs(), dict[tuple[str, int], float](), []
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}, copy {copy:.0f} GB/s")
    for preset in dict.fromkeys(preset for preset, _ in arguments.problems):
        for rows in ROWS:
            row = {"preset": preset, "rows": rows, "torch": torch_us(preset, rows, REPEATS[rows])}
            record(row, arguments.out)
            print(f"torch, {preset}, {rows} rows: {row['torch']}", flush=True)
            torch.cuda.empty_cache()
    print("Tiles: rows; columns, step, warps, stages, programs of each GEMM; order")
    print("| sizes | scheme | backend | rows | us | share, TFLOP/s | of bf16 | worst row | steps | tiles |")
    print("|" + "---|" * 10)
    for preset, name in arguments.problems:
        if time.monotonic() > end:
            late.append(f"{preset} {name}")
            continue
        time_problem(preset, name, baseline, copy, arguments)
        torch.cuda.empty_cache()
    if late:
        print(f"No time was left for: {', '.join(late)}")


def short(tiles: ExpertTiles) -> str:
    """Tiles in few characters."""
    gemms = (
        f"{each.block_n},{each.block_k},{each.num_warps},{each.num_stages},{each.programs_per_sm}"
        for each in (tiles.first, tiles.second)
    )
    return f"{tiles.block_m}; {'; '.join(gemms)}; {tiles.group_m}"


def main() -> None:
    """Compile, then time."""
    parser = argparse.ArgumentParser(description="Times every scheme of docs/formats.md")
    parser.add_argument("--problems", nargs="+", choices=NAMES, metavar="NAME", help="instead of all, after none")
    parser.add_argument("--compile", type=int, default=0, help="processes that compile first")
    parser.add_argument("--secs", type=float, default=300, help="after which no other scheme is begun")
    parser.add_argument("--candidates", action="store_true", help="time other tiles, too")
    parser.add_argument("--steps", action="store_true", help="time the kernels of each call one by one, too")
    parser.add_argument("--out", type=Path, default=Path("format_rates.jsonl"))
    arguments = parser.parse_args()
    chosen = [PROBLEMS[NAMES.index(name)] for name in arguments.problems or NAMES]
    arguments.problems = list(dict.fromkeys([(preset, "none") for preset, _ in chosen] + chosen))
    if arguments.compile:
        compile_all(arguments.problems, arguments.compile, candidates=arguments.candidates)
    run(arguments)


if __name__ == "__main__":
    main()
