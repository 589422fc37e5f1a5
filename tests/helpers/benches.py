"""Commands of `ep-moe bench` in this process, and faults of experts and graphs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from ep_moe.cli import app
from ep_moe.profiling.timing import Captured
from ep_moe.testing.random_experts import RandomExperts


def bench(*words: str, cwd: Path, ranks: tuple[str, ...] = ("--nproc", "2")) -> Result:
    """`ep-moe bench ...` on CPU ranks, in a folder that is not the repository; in this process."""
    command = ["bench", *words, *ranks, "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["ep-moe", *command])
        return CliRunner().invoke(app, command, env={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})


def louder_expert(sound: Callable[..., Any]) -> Callable[..., Any]:
    """One of this rank's experts is 1 % too large."""

    def local(self: RandomExperts, *args: Any) -> Any:
        weights = sound(self, *args)
        weights.w2.values[3] *= 1.01 if weights.w2.values.dtype != torch.bfloat16 else 1  # not of the baseline
        return weights

    return local


def not_a_number(sound: Callable[..., Any]) -> Callable[..., Any]:
    """The expected output on this rank is NaN."""
    return lambda *args, **options: sound(*args, **options) * float("nan")


def fake_capture(missing_rows: int) -> Callable[..., Captured]:
    """A capture for a CPU, whose replay omits the first rows."""

    def capture(call: Callable[[], torch.Tensor], device: torch.device, count: int = 1) -> Captured:
        output = call().clone()

        def replay() -> None:
            output[missing_rows:] = call()[missing_rows:]

        return Captured(replay, output, count)

    return capture
