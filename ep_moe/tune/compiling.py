"""Processes that compile candidates beforehand, each for one expert: Triton's cache on disk then has their kernels."""

import concurrent.futures
import multiprocessing
import os
import types
from collections.abc import Sequence

import torch

from ep_moe.experts.tuning import ExpertTiles
from ep_moe.tune.problem import Problem, Sizes

_MOST_JOBS = 16  # each holds a CUDA context of about 0.5 GB
_ROWS = 16
_problem: list[Problem] = []  # of this process, made by its first candidate


class Compilers:
    """A pool of processes on one GPU. Use as a context manager.

    Args:
        sizes: of the problem. device: a GPU. jobs: processes; 0 is one for each core, at most 16.
    """

    def __init__(self, sizes: Sizes, device: torch.device, jobs: int) -> None:
        self._sizes, self._device = sizes, device
        workers = min(jobs or len(os.sched_getaffinity(0)), _MOST_JOBS)
        self._pool = concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))

    def __enter__(self) -> "Compilers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def compile(self, candidates: Sequence[ExpertTiles], secs: float) -> dict[ExpertTiles, str]:
        """Compile candidates for at most `secs` seconds.

        Returns: those that were compiled, and why they cannot be launched, else "".
        Errors: BrokenExecutor if a process dies.
        """
        jobs = {self._pool.submit(_compile, self._sizes, self._device, tiles): tiles for tiles in candidates}
        done, late = concurrent.futures.wait(jobs, timeout=secs)
        for job in late:
            job.cancel()
        return {jobs[job]: job.result() for job in done if not job.cancelled()}


def _compile(sizes: Sizes, device: torch.device, tiles: ExpertTiles) -> str:
    if not _problem:
        torch.cuda.set_device(device)
        _problem.append(Problem(sizes, device))
        _problem[0].set_rows(_ROWS)
    try:
        _problem[0].run(tiles)
    except Exception as error:  # noqa: BLE001 - what a compiler or driver may raise has no common type
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
