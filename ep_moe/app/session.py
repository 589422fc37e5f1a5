"""Functions for the ranks of the commands: loading the model, progress bars, times of phases."""

import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ep_moe import logs
from ep_moe.app.placements import placements_for
from ep_moe.app.start import model_dir, open_model
from ep_moe.balance import balancedness, rank_loads
from ep_moe.balance.reports import status_entries, status_of_ranks
from ep_moe.config import EngineConfig
from ep_moe.engines.transformers import Session, from_pretrained, loading
from ep_moe.group import EPGroup
from ep_moe.placement import Placement
from ep_moe.report.tables import open_console
from ep_moe.weights import families
from ep_moe.weights.json_files import read_object

_log = logging.getLogger(__name__)
Model = Any  # a transformers model; its mixins are more than a type checker can follow


def with_dtype(engine: EngineConfig, device: torch.device) -> EngineConfig:
    """The config with dtype "auto" replaced: the checkpoint's on a GPU, float32 on a CPU. Local."""
    if engine.dtype != "auto":
        return engine
    path = model_dir(engine) / "config.json"
    dtype = torch.float32 if device.type == "cpu" else families.dtype_of(read_object(path), str(path))
    return dataclasses.replace(engine, dtype=str(dtype).removeprefix("torch."))


def load_expert_parallel(group: EPGroup, engine: EngineConfig) -> tuple[Model, Session]:
    """Load the model with this rank's experts only; returns the model and its expert-parallel session.

    On a standby rank the session has no experts until `Session.regroup`. Collective, but for a standby.
    """
    model: Model = from_pretrained(
        model_dir(engine),
        group,
        dtype=with_dtype(engine, group.device).torch_dtype,
        transport=engine.transport,
        experts=engine.experts,
        placement="linear" if group.standby else placements_for(engine, group.num_ranks),
        scheme=None if engine.scheme == "auto" else engine.scheme,
        layout=engine.layout,
        max_tokens_per_rank=engine.max_tokens_per_rank,
    )
    session = model.ep_moe
    assert isinstance(session, Session)
    return model, session


def load_whole(group: EPGroup, engine: EngineConfig) -> Model:
    """Load the whole model with transformers' own eager experts, as the reference for expert parallelism. Local.

    Weights that are quantized on disk are dequantized to the model's dtype by our own reader; transformers reads other
    checkpoints.
    """
    checkpoint = open_model(engine)
    if checkpoint.method is not None:
        return loading.load_whole(checkpoint, with_dtype(engine, group.device).torch_dtype, group.device)
    transformers_logging.disable_progress_bar()  # the bars of several ranks would overwrite each other
    model: Model = AutoModelForCausalLM.from_pretrained(
        model_dir(engine), experts_implementation="eager", dtype=with_dtype(engine, group.device).torch_dtype
    )
    return model.to(group.device).eval()


def load_tokenizer(engine: EngineConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer. Errors: ValueError names a directory that has none."""
    try:
        return AutoTokenizer.from_pretrained(model_dir(engine))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{model_dir(engine)} has no tokenizer that transformers can load: {reason}") from error


class PhaseClock:
    """Adds up the seconds of named phases. On CUDA each phase ends with a device sync, which slows the code inside."""

    def __init__(self, device: torch.device) -> None:
        self.secs: dict[str, float] = collections.defaultdict(float)
        self._device = device

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.secs[name] += time.perf_counter() - start


class LoadOfRank(NamedTuple):
    """How often a rank's tokens chose each expert, [MoE layer][expert], which rank has which now, and what its
    rebalancer has done, None without one."""

    experts: list[list[int]]
    placements: tuple[Placement, ...]
    rebalancing: dict[str, Any] | None


def load_of(session: Session) -> LoadOfRank:
    """The load of a session so far. Local, host sync."""
    moved = None if session.rebalancer is None else status_entries(session.rebalancer.status)
    return LoadOfRank(session.expert_load.tolist(), session.placements, moved)


def gather_report(
    group: EPGroup, clock: PhaseClock, load: LoadOfRank, **part: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All ranks' parts of a report, in rank order, and the entries that every report has. Collective."""
    own = {"expert_load": load.experts, "secs": dict(clock.secs), "rebalancing": load.rebalancing}
    parts = group.all_gather_object(part | own)
    total = torch.tensor([other["expert_load"] for other in parts]).sum(0).tolist()
    by_rank = rank_loads(total, load.placements)
    return parts, {
        "world_size": group.num_ranks,
        "expert_load": total,
        "rank_load": by_rank,
        "balancedness": balancedness(by_rank),
        "rebalancing": None if load.rebalancing is None else status_of_ranks([other["rebalancing"] for other in parts]),
        "times": {f"{name}_secs": max(other["secs"][name] for other in parts) for name in clock.secs},
    }


@contextlib.contextmanager
def progress_bar(group: EPGroup) -> Iterator[Progress]:
    """A progress display on standard error, on rank 0 only, with the steps that the package logs meanwhile.

    Without a terminal there are no bars: a log line tells what was read and compiled, when it is done.
    """
    console = open_console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, disable=group.rank != 0)
    tasks: dict[str, TaskID] = {}
    num_bytes: dict[str, int] = collections.defaultdict(int)

    def show(work: str, done: int, total: int, more: int) -> None:
        num_bytes[work] += more
        size = f", {num_bytes[work] / 1e6:.1f} MB" if num_bytes[work] else ""
        if console.is_terminal:
            if work not in tasks or done == 1:
                tasks[work] = progress.add_task(work, total=total)
            progress.update(tasks[work], completed=done, description=f"{work}{size}")
        elif done == total:
            _log.info("%s: %d%s, %.1f s since the start", work, total, size, time.perf_counter() - began)

    began, handler = time.perf_counter(), logs.StepsHandler(show)
    with progress:
        if group.rank == 0:
            logs.STEPS.addHandler(handler)
            logs.STEPS.setLevel(logging.DEBUG)
        try:
            yield progress
        finally:
            logs.STEPS.removeHandler(handler)


def start_task(progress: Progress, label: str, total: int) -> TaskID:
    """Add a task of `total` steps; without a terminal for a bar, print its label as a line."""
    if not progress.disable and not progress.console.is_terminal:
        progress.console.print(label)
    return progress.add_task(label, total=total)
