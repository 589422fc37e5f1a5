"""One measured row and its JSON line: figures, device, versions, commit, and the command to repeat it."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ep_moe.config import from_mapping
from ep_moe.environment import shares_gpus
from ep_moe.fields import Field, check_fields, check_keys, require

if TYPE_CHECKING:
    import torch

OURS, GATHERED = "ep_moe", "allgather_reducescatter"  # names of what is compared, and of a baseline
PHASES = ("route", "dispatch", "experts", "combine")  # of a layer
UNITS = ("_us", "_ms", "_gbs", "tflops", "_bytes", "tokens_per_sec", "_secs")  # how a figure's name ends, by its unit
PURE_NUMBERS = ("_error", "_ratio", "_share", "_count")  # endings of figures without a unit
ENDINGS = (*UNITS, *PURE_NUMBERS)
WORDS, WORD_TYPES = ("shapes", "setup"), (str, int, float, bool)  # parts of a row that say what was measured

# How each bench shows its rows: `summary` is a `Summary`; `columns` are those of the table of all its rows: a title and
# the name of a word or figure, "a baseline/figure" for a baseline's. Rows of a bench with `flat` are one flat JSON
# object: the names of their shapes and of their setup; any other name that ends in a unit is a figure.
BENCHES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("benches.json").read_text(encoding="utf-8"))
FLAT_ROWS: dict[str, dict[str, list[str]]] = {name: bench["flat"] for name, bench in BENCHES.items() if "flat" in bench}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One measured row.

    Args:
        bench: the benchmark, such as "layer"; rows of one bench have the same kinds of figures.
        date: ISO 8601 with a time zone. commit: of the source, 7 to 40 hex digits.
        gpu: the device's name, or the CPU's if there is no GPU. world_size: number of ranks.
        versions: by name, None if not installed. command: the command line that repeats the measurement.
        sweep: True for an exploratory row, which reports leave out.
        shapes: sizes of the work. setup: implementations by name and other choices.
        figures: by a name that ends in its unit or in one of PURE_NUMBERS. baselines: figures of baselines of this run.
    A row of a bench in FLAT_ROWS has exactly the names of shapes and setup that are listed there.
    Errors: ValueError names the wrong value.
    """

    bench: str
    date: str
    commit: str
    gpu: str
    world_size: Annotated[int, Field(at_least=1)]
    versions: dict
    command: str
    sweep: bool
    shapes: dict
    setup: dict
    figures: dict
    baselines: dict

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("bench", "date", "commit", "gpu", "command"):
            require(bool(getattr(self, name)), f"{name} ('') must be a text that is not empty")
        check_commit(self.commit)
        try:
            zone = datetime.datetime.fromisoformat(self.date).tzinfo
        except ValueError:
            raise ValueError(f"date ({self.date!r}) is not an ISO 8601 date and time") from None
        require(zone is not None, f"date ({self.date!r}) has no time zone")
        for part, types in {"versions": (str, type(None)), "shapes": WORD_TYPES, "setup": WORD_TYPES}.items():
            for name, value in getattr(self, part).items():
                kinds = ", ".join(kind.__name__ for kind in types)
                require(isinstance(value, types), f"{part}.{name} ({value!r}) is not one of {kinds}")
        _check_figures("figures", self.figures)
        for name, figures in self.baselines.items():
            _check_figures(f"baselines.{name}", figures)
        for part, names in FLAT_ROWS.get(self.bench, {}).items():
            check_keys(getattr(self, part), names, part)

    @property
    def configuration(self) -> str:
        """The same for rows that measure the same thing, of which a report shows only the last."""
        return json.dumps((self.bench, self.gpu, self.world_size, self.shapes, self.setup), sort_keys=True)

    @property
    def when(self) -> datetime.datetime:
        """When it was measured."""
        return datetime.datetime.fromisoformat(self.date)

    def value(self, path: str) -> Any:
        """The value at a path such as "baselines.grouped_mm.tflops", "" if the row has none. Local."""
        part, *names = path.split(".")
        value: Any = getattr(self, part)
        for name in names:
            value = value.get(name, "") if value else ""
        return value

    def to_line(self) -> str:
        """The row as one line of JSON, without its end. Local."""
        return json.dumps(flatten(self.bench, {name: getattr(self, name) for name in FIELDS}), allow_nan=False)

    @classmethod
    def from_line(cls, line: str, source: str) -> "Record":
        """Read a line of JSON. Errors: ValueError names `source` and the key that is unknown, missing or wrong."""
        from ep_moe.weights.json_files import parse_object

        content = _unflatten(parse_object(line.encode(), source), source)
        setup = content.get("setup")
        if isinstance(setup, dict) and setup.get("transport") == "nvlink":  # its name until 2026-11
            setup["transport"] = "peer"
        return from_mapping(cls, content, source)


FIELDS = tuple(field.name for field in dataclasses.fields(Record))


def flatten(bench: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as its bench writes it: with its parts at the top level for a bench of FLAT_ROWS, else unchanged. Local."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= value if bench in FLAT_ROWS and name in (*WORDS, "figures") else {name: value}
    return flat


def _unflatten(content: dict[str, Any], source: str) -> dict[str, Any]:
    """Restore the parts of a row that was written flat; other content unchanged. Errors: as `check_keys`."""
    parts = FLAT_ROWS.get(content["bench"]) if isinstance(content.get("bench"), str) else None
    if parts is None:
        return content
    common = [name for name in FIELDS if name not in (*WORDS, "figures")]
    known = [*common, *(name for names in parts.values() for name in names)]
    figures = {name: value for name, value in content.items() if name not in known and name.endswith(ENDINGS)}
    check_keys(set(content) - set(figures), known, source)
    nested = {part: {name: content[name] for name in names} for part, names in parts.items()}
    return {name: content[name] for name in common} | nested | {"figures": figures}


def check_commit(commit: str) -> None:
    """Raise ValueError unless `commit` is 7 to 40 hex digits. Local."""
    fits = re.fullmatch(r"[0-9a-f]{7,40}", commit) is not None
    require(fits, f"commit ({commit!r}) is not 7 to 40 hex digits, as `git rev-parse HEAD` prints them")


def _check_figures(what: str, figures: Any) -> None:
    require(
        isinstance(figures, dict) and bool(figures), f"{what} ({figures!r}) is not a mapping with at least one figure"
    )
    for name, value in figures.items():
        is_number = type(value) in (int, float) and math.isfinite(value)
        require(is_number, f"{what}.{name} ({value!r}) is not a finite number")
        known = name.endswith(ENDINGS)
        require(known, f"{what}.{name} does not say its unit: a figure's name ends in {', '.join(ENDINGS)}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowsFile:
    """The file that measured rows go to, and what they state. Errors: ValueError for a wrong path or commit."""

    append: Annotated[Path | None, Field(help="Add the measured rows to this .jsonl file; needs --commit")] = None
    commit: Annotated[str, Field(help="Commit that is measured, as `git rev-parse HEAD` prints it; needs --append")] = (
        ""
    )
    sweep: Annotated[bool, Field(help="Mark the rows as exploratory: the report leaves them out")] = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.append is None:
            require(not self.commit and not self.sweep, "--commit and --sweep require --append")
            return
        check_path(self.append)
        require(bool(self.commit), "append needs --commit: a row says of which source it is")
        check_commit(self.commit)


def append_records(path: str | Path, records: Sequence[Record]) -> None:
    """Append rows to a .jsonl file, which is created if missing. Local.

    Errors: ValueError for a path that does not end in .jsonl.
    """
    check_path(path)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(record.to_line() + "\n" for record in records))  # one write: no partial rows


def check_writable(path: Path, option: str) -> None:
    """Write nothing to a file, which is removed if this creates it, so that errors come before a run. Local.

    Errors: ValueError names the option and a file that cannot be written.
    """
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{option} ({str(path)!r}) cannot be written: {error}") from None


def check_path(path: str | Path) -> None:
    """Raise ValueError unless the path of a file of rows ends in .jsonl. Local."""
    require(Path(path).suffix == ".jsonl", f"append ({str(path)!r}) must end in .jsonl")


def read_records(directory: str | Path) -> list[Record]:
    """Read every row of a directory's .jsonl files, file by file in the order of their names, line by line. Local.

    Errors: ValueError names the file and line that is not a row, or a directory that is not there.
    """
    folder = Path(directory)
    require(folder.is_dir(), f"directory ({str(directory)!r}) is not a directory")
    return [
        Record.from_line(line, f"{path}:{number}")
        for path in sorted(folder.glob("*.jsonl"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if line.strip()
    ]


def newest(records: Sequence[Record]) -> list[Record]:
    """The newest row of each configuration, without sweeps, in the order of the configurations' first rows. Local."""
    chosen: dict[str, Record] = {}
    for record in records:
        before = chosen.get(record.configuration)
        if not record.sweep and (before is None or record.when >= before.when):
            chosen[record.configuration] = record
    return list(chosen.values())


def now() -> str:
    """The current date and time in UTC, to the second, for a row. Local."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def device_name(device: "torch.device") -> str:
    """The name of the GPU, and whether ranks may share it, or of the CPU. Local."""
    import torch

    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device)) + ", shared" * shares_gpus()
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(\S.*)$", info.read_text() if info.is_file() else "", re.MULTILINE)
    return names[0].strip() if names else platform.processor() or platform.machine() or "CPU"


def versions(device: "torch.device") -> dict[str, str | None]:
    """The versions that a figure depends on; None if not installed; cuda and nccl on the CPU. Local."""
    import torch

    found: dict[str, str | None] = {"torch": str(torch.__version__), "triton": None, "transformers": None}
    found |= {"cuda": None, "nccl": None, "python": platform.python_version(), "ep_moe": None}
    for name in ("triton", "transformers", "ep_moe"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # ep_moe: in a source tree
            found[name] = importlib.metadata.version(name.replace("_", "-"))
    if device.type == "cuda":
        found |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found
