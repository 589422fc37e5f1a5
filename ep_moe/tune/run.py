"""`ep-moe tune`: tunes one shape on the present GPU and writes its table after each number of rows."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.config import EngineConfig
from ep_moe.environment import default_tiles_dir
from ep_moe.experts import row_of
from ep_moe.experts.tile_tables import device_name, table_name, tiles_to_json
from ep_moe.files import write_whole
from ep_moe.quant import get_scheme
from ep_moe.report.records import versions
from ep_moe.report.tables import open_console
from ep_moe.tune.compiling import Compilers
from ep_moe.tune.config import TuneConfig
from ep_moe.tune.journal import Chosen, Journal, Trial
from ep_moe.tune.problem import Problem, Sizes
from ep_moe.tune.search import Compile, Search, in_turn


def tune(engine: EngineConfig, config: TuneConfig) -> dict[str, Any]:
    """Search tiles for each of `config.rows`, and write a table of those that were found.

    Args:
        engine: `dtype`, `scheme` and `device`; a CPU needs Triton's interpreter, and its tiles serve tests alone.
    Returns: the report: paths of table and journal, and for each number of rows times, gain and whether it was searched
        to the end; of a check without paths. An interrupted or unfinished run goes on where it was.
    Errors: ValueError for a scheme or sizes that the kernels do not compute, RuntimeError without a GPU, OSError for a
        folder that cannot be written. Host sync.
    """
    scheme, moe = get_scheme(engine.scheme), config.moe(engine)
    device = _device(engine)
    row_of(scheme)  # refuses what kernels do not compute
    bias = LAYER_PRESETS[config.preset].bias
    num_local = config.num_local_experts(moe)
    sizes = Sizes(moe=moe, engine=engine, num_experts=num_local, bias=bias, seed=config.seed)
    folder = (default_tiles_dir() if config.out is None else config.out) / device_name(device).replace(" ", "_")
    dtype = scheme.name if scheme.weight.quantized else engine.dtype
    path = folder / table_name(moe.intermediate, moe.hidden, device_name(device), dtype)
    folder.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {
        "gpu": device_name(device),
        "versions": versions(device),
        "preset": config.preset,
        "num_local_experts": num_local,
        "seed": config.seed,
    }
    problem = Problem(sizes, device)
    if config.stage == "check":
        checked = [_checked(problem, rows, folder.parent) for rows in config.rows]
        return {"gpu": device_name(device), "dtype": dtype, "rows": checked}
    about["backends"] = problem.backends
    journal = Journal(path.with_suffix(".measured.jsonl"), about)
    end = time.monotonic() + 60 * config.minutes
    with _compiling(sizes, device, config) as compiling, _Progress() as progress:
        search = Search(problem=problem, journal=journal, compile=compiling, report=progress.trial)
        for index, rows in enumerate(reversed(config.rows)):  # many rows have few candidates and leave time
            left = (end - time.monotonic()) / (len(config.rows) - index)
            if config.stage == "compile":
                progress.compiled(rows, search.compile_near(rows, left))
                continue
            found = journal.chosen.get(rows)
            if found is None or not found.complete:
                progress.begin(rows, left)
                found = search.run(rows, [done.tiles for done in journal.chosen.values()], left)
                _write(path, journal.chosen)
            progress.end(found)
    _write(path, journal.chosen)
    return {
        "table": str(path),
        "journal": str(journal.path),
        "gpu": device_name(device),
        "dtype": dtype,
        "compiled": len(journal.compiled),
        "rows": [
            _reported(
                journal.chosen[rows], tried=len(journal.of(rows)), refused=sum(bool(t.why) for t in journal.of(rows))
            )
            for rows in config.rows
            if rows in journal.chosen
        ],
    }


def _device(engine: EngineConfig) -> torch.device:
    """Errors: RuntimeError without a GPU, unless Triton's interpreter computes on the CPU."""
    import triton

    if engine.device != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if triton.knobs.runtime.interpret and engine.device != "cuda":
        return torch.device("cpu")
    raise RuntimeError("tune measures kernels on a GPU, and none is visible")


@contextlib.contextmanager
def _compiling(sizes: Sizes, device: torch.device, config: TuneConfig) -> Iterator[Compile]:
    """A pool on a GPU; the interpreter compiles nothing, and neither does a run that only measures."""
    if config.stage == "measure":
        yield lambda candidates, secs: {}
        return
    if device.type == "cpu":
        yield lambda candidates, secs: dict.fromkeys(candidates, "")
        return
    with Compilers(sizes, device, config.jobs) as compilers:
        yield compilers.compile


def _checked(problem: Problem, rows: int, folder: Path) -> dict[str, Any]:
    """The tiles in use for `rows` rows per expert beside the default ones, as a row of the report."""
    problem.set_rows(rows)
    used, default = problem.used(folder), problem.default()
    us = in_turn(problem, default, used)
    chosen = Chosen(rows=rows, tiles=used, us=us[used], default_us=us[default], complete=True)
    return _reported(chosen, tried=len(us), refused=0)


def _write(path: Path, chosen: Mapping[int, Chosen]) -> None:
    if not chosen:
        return
    rows = {str(key): tiles_to_json(found.tiles) for key, found in sorted(chosen.items())}
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(entry)}" for key, entry in rows.items())
    write_whole(path, f"{{\n{lines}\n}}\n")


def _reported(found: Chosen, *, tried: int, refused: int) -> dict[str, Any]:
    return {
        "rows_per_expert": found.rows,
        "backend": found.tiles.backend,
        "us": found.us,
        "default_us": found.default_us,
        "speedup_ratio": found.default_us / found.us,
        "tried": tried,
        "refused": refused,
        "complete": found.complete,
    }


class _Progress:
    """Progress on standard error: a bar on a terminal, else a line for each number of rows. A context manager."""

    def __init__(self) -> None:
        self._console = open_console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._start = self._secs = 0.0

    def __enter__(self) -> "_Progress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, rows: int, secs: float) -> None:
        """A search for `rows` begins, which takes `secs` at most."""
        self._start, self._secs = time.monotonic(), max(secs, 1.0)
        self._task = self._progress.add_task(f"{rows} rows", total=self._secs)

    def trial(self, tried: int, best: Trial) -> None:
        """Candidates were tried."""
        passed = min(time.monotonic() - self._start, self._secs)
        text = f"{best.rows} rows: {tried} tried, best {best.us:.1f} us"
        self._progress.update(self._task, completed=passed, description=text)

    def compiled(self, rows: int, count: int) -> None:
        """Candidates for `rows` are compiled."""
        self._console.print(f"{rows} rows: {count} candidates compiled")

    def end(self, found: Chosen) -> None:
        """A search has ended, in this run or before."""
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        gain = f"{found.us:.1f} us, {found.default_us / found.us:.2f} x the default's rate"
        unfinished = "" if found.complete else " (not searched to the end)"
        self._console.print(f"{found.rows} rows: '{found.tiles.backend}', {gain}{unfinished}")
