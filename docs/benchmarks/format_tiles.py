"""Times tiles of decoded weights on one GPU, 16 and 1024 rows per expert, one JSON line each, and prints the best.

    python docs/benchmarks/format_tiles.py --cases deepseek-v3:nvfp4_w4a16:16 --secs 60 --out tiles.jsonl
    python docs/benchmarks/format_tiles.py --compile 8   # compiles all candidates beforehand, in 8 processes

32 experts with the same number of rows. `us`: the median of replays of a captured call with a cold L2, from the tile
list to the second GEMM. `share`: bytes of all weights per second, of the bandwidth of a copy in the same process, read
and written. At 16 rows the first GEMM's tiles are tried first, then the second's with the best of them. The best ones
are compared with the oracle and timed again, beside the package's.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.config import EngineConfig, Layout
from ep_moe.experts.grouped_gemm import CallShape
from ep_moe.experts.tile_tables import tiles_to_json
from ep_moe.experts.triton import TritonExperts
from ep_moe.experts.tuning import ExpertTiles, GemmTiles
from ep_moe.group import EPGroup
from ep_moe.layout import pack_routed
from ep_moe.profiling.timing import capture, time_calls
from ep_moe.quant import get_scheme, quantize
from ep_moe.testing import worst_row_error
from ep_moe.testing.random_experts import RandomExperts

DEVICE, DTYPE = torch.device("cuda", 0), torch.bfloat16
EXPERTS, COMPILED_EXPERTS = 32, 2
FEW, MANY = 16, 1024
REPEATS, FINAL_REPEATS = {FEW: 9, MANY: 4}, 15
FOUR_BITS = ("int4_w4a16_g128", "int4_w4a16_g32", "nvfp4_w4a16", "mxfp4_w4a8", "nvfp4", "int4_w4a8_g128")
EIGHT_BITS = ("int8_w8a16", "mxfp8", "fp8_w8a16")
CASES = (
    *(f"deepseek-v3:{scheme}:{FEW}" for scheme in (*FOUR_BITS, *EIGHT_BITS)),
    f"gpt-oss-120b:mxfp4_w4a16:{FEW}",
    *(f"deepseek-v3:{scheme}:{MANY}" for scheme in ("none", "fp8_block", "nvfp4", "mxfp8", "int4_w4a8_g128")),
)
# columns of a step, warps, stages, programs per SM, by the rows of weights that a program holds
FEW_STEPS = {
    64: (
        (256, 4, 3, 4),
        (256, 4, 3, 5),
        (256, 4, 2, 4),
        (256, 4, 2, 5),
        (128, 4, 4, 4),
        (128, 4, 4, 5),
    ),
    128: (
        (128, 4, 5, 3),
        (128, 4, 4, 4),
        (256, 4, 2, 4),
        (256, 4, 2, 3),
        (256, 8, 3, 2),
    ),
    256: ((128, 8, 4, 2),),
}
MANY_STEPS = ((64, 8, 3, 1), (64, 4, 3, 2), (32, 8, 3, 1), (64, 8, 4, 1), (128, 8, 2, 1), (32, 8, 4, 1))


def gemms(halves: int) -> list[GemmTiles]:
    """Tiles of a GEMM for few rows. halves: 2 for a gated w13."""
    return [
        GemmTiles(
            block_n=rows // halves, block_k=k, swap=True, num_warps=warps, num_stages=stages, programs_per_sm=programs
        )
        for rows, steps in FEW_STEPS.items()
        for k, warps, stages, programs in steps
    ]


def candidates(start: ExpertTiles, rows: int, scheme: str) -> tuple[list[ExpertTiles], list[GemmTiles]]:
    """Tiles of both GEMMs, and of the second one to try with the best of them."""
    if rows == FEW:
        return [dataclasses.replace(start, first=gemm) for gemm in gemms(2)], gemms(1)
    if scheme in ("none", "fp8_block"):
        return [], []
    both = []
    for block_m in (64, 128, 256):
        for k, warps, stages, programs in MANY_STEPS:
            first = GemmTiles(
                block_n=64, block_k=k, swap=True, num_warps=warps, num_stages=stages, programs_per_sm=programs
            )
            second = dataclasses.replace(first, block_n=128)
            both.append(dataclasses.replace(start, block_m=block_m, first=first, second=second))
    return both, []


class Problem:
    """The experts of a case and their tokens, as many for each expert.

    Args:
        case: preset, scheme and rows per expert. experts: their number.
    """

    def __init__(self, case: str, experts: int) -> None:
        preset, name, rows = case.split(":")
        self.moe, scheme = LAYER_PRESETS[preset].moe(EngineConfig(scheme=name, device="cuda")), get_scheme(name)
        random = RandomExperts(self.moe, DTYPE, DEVICE, bias=LAYER_PRESETS[preset].bias, seed=0)
        self.weights = random.local(range(experts), scheme)
        ids = torch.arange(experts, dtype=torch.int32, device=DEVICE).repeat_interleave(int(rows)).unsqueeze(1)
        x = torch.randn(len(ids), self.moe.hidden, dtype=DTYPE, device=DEVICE)
        ones = torch.ones(len(ids), 1, device=DEVICE)
        tokens = quantize(x, scheme) if scheme.payload.quantized else x
        packed = pack_routed(
            tokens,
            ids,
            ones,
            Layout.COMPACT,
            scheme=scheme,
            dtype=DTYPE,
            first=0,
            num_local_experts=experts,
            capacity=len(ids),
        )
        self.batch = dataclasses.replace(packed.batch, expected_rows=int(rows))
        sample = torch.tensor((*range(8), *range(len(ids) - 8, len(ids))), device=DEVICE)
        self.checked = packed.token_to_row[sample, 0].long()
        self.expected = random.expected_output(x[sample], ids[sample], ones[sample], scheme)

    def call(self, tiles: ExpertTiles | None) -> Callable[[], torch.Tensor]:
        """The call with these tiles."""
        return functools.partial(TritonExperts(self.moe.activation, tiles=tiles), self.batch, self.weights)

    def package_tiles(self) -> ExpertTiles:
        """The tiles that the package has for the case."""
        shape = CallShape.of(self.batch, self.weights, self.moe.activation)
        return TritonExperts(self.moe.activation).choices(shape)[0]

    def error(self, tiles: ExpertTiles) -> float:
        """The worst relative error of the checked rows."""
        return worst_row_error(self.call(tiles)()[self.checked], self.expected)

    def us(self, tiles: ExpertTiles, repeats: int) -> float:
        """The median of replays; infinite if the tiles cannot be launched."""
        try:
            replay = capture(self.call(tiles), DEVICE).replay
        except Exception:  # noqa: BLE001 - what a compiler or driver may raise has no common type
            return float("inf")
        return statistics.median(time_calls(replay, EPGroup.single(DEVICE), warmup=2, repeats=repeats))


def compile_case(case: str) -> str:
    """Compile all candidates of a case: the first GEMM's beside the second's. Returns: how many cannot be launched."""
    problem, (_, scheme, rows) = Problem(case, COMPILED_EXPERTS), case.split(":")
    start = problem.package_tiles()
    tried, seconds = candidates(start, int(rows), scheme)
    if seconds:
        tried = [dataclasses.replace(tiles, second=second) for tiles, second in zip(tried, seconds, strict=True)]
    failed = 0
    for tiles in (start, *tried):
        try:
            problem.call(tiles)()
        except Exception:  # noqa: BLE001 - what a compiler or driver may raise has no common type
            failed += 1
    return f"{case}: {1 + len(tried) - failed} compiled, {failed} cannot be launched"


def copy_gbs() -> float:
    """GB/s of a copy of 1 GiB, read and written."""
    source = torch.ones(1 << 28, device="cuda")
    target, times = torch.empty_like(source), []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.add(source, 1, out=target)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.nbytes / statistics.median(times) / 1e6


def time_case(case: str, copy: float, secs: float, out: Path) -> str:
    """Try the candidates of a case for at most `secs` seconds. Returns: the package's tiles and the best."""
    end = time.monotonic() + secs
    problem, (_, scheme, rows) = Problem(case, EXPERTS), case.split(":")
    start = problem.package_tiles()

    def timed(tiles: ExpertTiles, kind: str, repeats: int) -> float:
        us = problem.us(tiles, repeats)
        row = {"case": case, "kind": kind, "us": us, "share": problem.weights.num_bytes / us / 1e3 / copy}
        with out.open("a") as file:
            file.write(json.dumps(row | {"tiles": tiles_to_json(tiles)}) + "\n")
        return us

    best, best_us = start, timed(start, "package", FINAL_REPEATS)
    tried, seconds = candidates(start, int(rows), scheme)
    for tiles in tried:
        us = timed(tiles, "first", REPEATS[int(rows)]) if time.monotonic() < end else float("inf")
        best, best_us = (tiles, us) if us < best_us else (best, best_us)
    for gemm in seconds:
        tiles = dataclasses.replace(best, second=gemm)
        us = timed(tiles, "second", REPEATS[int(rows)]) if time.monotonic() < end else float("inf")
        best, best_us = (tiles, us) if us < best_us else (best, best_us)
    figures = [(timed(tiles, "again", FINAL_REPEATS), problem.error(tiles)) for tiles in (start, best)]
    shown = (
        f"{us:.0f} us ({problem.weights.num_bytes / us / 1e3 / copy:.0%}, error {error:.1e})" for us, error in figures
    )
    return f"{case}: package {next(shown)}, best {next(shown)} {json.dumps(tiles_to_json(best))}"


def main() -> None:
    """Compile or time the cases."""
    parser = argparse.ArgumentParser(description="Times tiles of decoded weights")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--compile", type=int, default=0, help="processes that compile, and time nothing")
    parser.add_argument("--secs", type=float, default=300, help="for all cases")
    parser.add_argument("--out", type=Path, default=Path("format_tiles.jsonl"))
    arguments = parser.parse_args()
    if arguments.compile:
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(arguments.compile, spawn) as pool:
            for text in pool.map(compile_case, arguments.cases):
                print(text, flush=True)
        return
    copy = copy_gbs()
    print(f"copy: {copy:.0f} GB/s")
    for case in arguments.cases:
        print(time_case(case, copy, arguments.secs / len(arguments.cases), arguments.out), flush=True)


if __name__ == "__main__":
    main()
