"""One rank of one version of an engine: all cases, one after another, since importing an engine takes 15 to 20 seconds.

Run as `python ENGINE_process.py WORLD RANK PORT CHECKPOINTS [CASE ...]`, with the engine, its dependencies and a folder
of entry points on PYTHONPATH and its plug-in switched on. It prints a line per case, at the end "all cases passed".
"""

import abc
import dataclasses
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_moe.config import Layout

WORLD, RANK, PORT = (int(text) for text in sys.argv[1:4])
CHECKPOINTS = Path(sys.argv[4])
MAX_TOKENS = 64
FLOAT32_LIMIT, ROUNDED_LIMIT = 1e-5, 1e-2
ADOPTED = "ep_moe_adopted"  # of a method's class that computes here
ONE_LAYER = ("deepseek_v3",)  # the others have two with experts
START = time.monotonic()
FAILED: list[str] = []


@dataclasses.dataclass
class Engine(abc.ABC):
    """A model of an engine's own class, loaded by its own loader."""

    name: str
    model: Any = None

    @property
    @abc.abstractmethod
    def experts(self) -> list[Any]:
        """The layers of routed experts."""

    @property
    def state(self) -> Any:
        """Of our first layer."""
        return self.experts[0].quant_method.ep_moe

    @property
    def group(self) -> Any:
        """The ranks, as our transports know them."""
        return self.state.group

    @property
    def plugin(self) -> Any:
        """What our layers of this process share."""
        return self.state.plugin

    def use(self, layout: Layout | None) -> None:
        """Load the parameters again with another layout, as engines do after a reload of weights."""
        self.plugin.config = dataclasses.replace(self.plugin.config, layout=layout)
        for layer in self.experts:
            layer.quant_method.process_weights_after_loading(layer)

    def check_ours(self) -> None:
        """Every layer of experts is ours."""
        ours = [hasattr(type(layer.quant_method), ADOPTED) for layer in self.experts]
        assert ours == [True] * (1 if self.name in ONE_LAYER else 2), ours

    def compare(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], *, rounded: bool) -> float:
        """The largest error of found and expected rows, relative to the row if tokens are quantized; it is checked."""
        worst = 0.0
        for found, wanted in pairs:
            if found.numel() == 0:
                continue
            error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1) if rounded else (found - wanted).abs()
            worst = max(worst, float(error.nan_to_num(9).max()))
        limit = ROUNDED_LIMIT if rounded else FLOAT32_LIMIT
        assert worst < limit, f"{self.name}: {worst:.2e} is not below {limit:g}"
        return worst


def next_port(count: int = 1) -> int:
    """The first of `count` ports that no earlier engine of this process has used."""
    global PORT
    PORT += count
    return PORT


def report(text: str) -> None:
    """Print a line."""
    print(f"rank {RANK} of {WORLD}: {text} ({time.monotonic() - START:.1f} s)", flush=True)


def attempt(case: Callable[..., None], *arguments: Any, name: str = "") -> None:
    """Run a case; one that fails is noted, so that a run shows all that do."""
    name = name or case.__name__
    try:
        case(*arguments)
        report(f"{name}: ok")
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 all of them are shown, and the process fails
        FAILED.append(name)
        traceback.print_exc()
        report(f"{name}: FAILED")


def dead_rank(engine: AbstractContextManager[Engine], case: Callable[[Any], None]) -> None:
    """The last case of a process: the last rank ends, the others run a case."""
    with engine as made:
        if RANK < WORLD - 1:
            attempt(case, made)
        if not FAILED:
            report("all cases passed")
        os._exit(len(FAILED))


def main(cases: dict[str, Callable[[], None]]) -> None:
    """Run the cases that the command line names, by default all."""
    faulthandler.dump_traceback_later(float(os.environ["EP_MOE_ENGINE_SECS"]), exit=True)
    for case in [name for name in cases if name in (sys.argv[5:] or cases)]:
        attempt(cases[case], name=case)
    if FAILED:
        sys.exit(f"failed: {', '.join(FAILED)}")
    report("all cases passed")
