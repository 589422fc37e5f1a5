"""One measured row and its JSON line: figures, device, versions, commit, and the command to repeat it."""

import dataclasses
import datetime
import importlib.metadata
import json
import math
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch

from ep_moe.config import from_mapping
from ep_moe.fields import Field, check_fields, check_keys
from ep_moe.weights.json_files import parse_object

UNITS = ("_us", "_ms", "_gbs", "tflops", "_bytes", "tokens_per_sec", "_secs")  # how a figure's name ends, by its unit
PURE_NUMBERS = ("_error", "_ratio", "_share", "_count")  # endings of figures without a unit

# Benches whose rows are one flat JSON object: the names of their shapes and of their setup. Any other name that ends in
# a unit and is not a field of all rows is a figure.
FLAT_ROWS: dict[str, dict[str, tuple[str, ...]]] = {
    "transport": {
        "shapes": ("tokens", "hidden", "num_topk", "num_experts"),
        "setup": (
            *("transport", "layout", "payload", "dtype", "graph", "routing", "num_sms", "nodes"),
            *("seed", "warmup", "repeats"),
        ),
    },
}


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
            if not getattr(self, name):
                raise ValueError(f"{name} ('') must be a text that is not empty")
        check_commit(self.commit)
        try:
            zone = datetime.datetime.fromisoformat(self.date).tzinfo
        except ValueError:
            raise ValueError(f"date ({self.date!r}) is not an ISO 8601 date and time") from None
        if zone is None:
            raise ValueError(f"date ({self.date!r}) has no time zone")
        _check_types("versions", self.versions, (str, type(None)))
        for part in ("shapes", "setup"):
            _check_types(part, getattr(self, part), (str, int, float, bool))
        for part, figures in {"figures": self.figures, **_prefixed("baselines.", self.baselines)}.items():
            _check_figures(part, figures)
        for part, names in FLAT_ROWS.get(self.bench, {}).items():
            check_keys(getattr(self, part), names, part)

    @property
    def configuration(self) -> str:
        """The same for rows that measure the same thing, of which a report shows only the last."""
        return json.dumps((self.bench, self.gpu, self.world_size, self.shapes, self.setup), sort_keys=True)

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
        return from_mapping(cls, _unflatten(parse_object(line.encode(), source), source), source)


FIELDS = tuple(field.name for field in dataclasses.fields(Record))
PARTS = ("shapes", "setup", "figures")  # that a flat row has at its top level


def flatten(bench: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as its bench writes it: with its parts at the top level for a bench of FLAT_ROWS, else unchanged. Local."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= value if bench in FLAT_ROWS and name in PARTS else {name: value}
    return flat


def _unflatten(content: dict[str, Any], source: str) -> dict[str, Any]:
    """Restore the parts of a row that was written flat; other content unchanged. Errors: as `check_keys`."""
    parts = FLAT_ROWS.get(content["bench"]) if isinstance(content.get("bench"), str) else None
    if parts is None:
        return content
    common = [name for name in FIELDS if name not in PARTS]
    known = [*common, *(name for names in parts.values() for name in names)]
    figures = {name: value for name, value in content.items() if name not in known and _has_unit(name)}
    check_keys(set(content) - set(figures), known, source)
    nested = {part: {name: content[name] for name in names} for part, names in parts.items()}
    return {name: content[name] for name in common} | nested | {"figures": figures}


def _has_unit(figure: str) -> bool:
    return figure.endswith((*UNITS, *PURE_NUMBERS))


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in values.items()}


def check_commit(commit: str) -> None:
    """Raise ValueError unless `commit` is 7 to 40 hex digits. Local."""
    if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
        raise ValueError(f"commit ({commit!r}) is not 7 to 40 hex digits, as `git rev-parse HEAD` prints them")


def _check_types(what: str, values: Mapping[str, Any], types: tuple[type, ...]) -> None:
    for name, value in values.items():
        if not isinstance(value, types):
            raise ValueError(f"{what}.{name} ({value!r}) is not one of {', '.join(kind.__name__ for kind in types)}")


def _check_figures(what: str, figures: Any) -> None:
    if not isinstance(figures, dict) or not figures:
        raise ValueError(f"{what} ({figures!r}) is not a mapping with at least one figure")
    for name, value in figures.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"{what}.{name} ({value!r}) is not a finite number")
        if not _has_unit(name):
            endings = ", ".join((*UNITS, *PURE_NUMBERS))
            raise ValueError(f"{what}.{name} does not say its unit: a figure's name ends in {endings}")


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
        if self.append is None and (self.commit or self.sweep):
            raise ValueError("--commit and --sweep require --append")
        if self.append is not None:
            check_path(self.append)
            if not self.commit:
                raise ValueError("append needs --commit: a row says of which source it is")
            check_commit(self.commit)


def append_records(path: str | Path, records: Sequence[Record]) -> None:
    """Append rows to a .jsonl file, which is created if missing. Local.

    Errors: ValueError for a path that does not end in .jsonl.
    """
    check_path(path)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(record.to_line() + "\n" for record in records))  # one write: no partial rows


def check_writable(path: str | Path) -> None:
    """Append nothing to a file of rows, which is removed if this creates it, so that errors come before a run. Local.

    Errors: as `check_path`, and ValueError for a file that cannot be written.
    """
    is_new = not Path(path).exists()
    try:
        append_records(path, [])
        if is_new:
            Path(path).unlink()
    except OSError as error:
        raise ValueError(f"append ({str(path)!r}) cannot be written: {error}") from None


def check_path(path: str | Path) -> None:
    """Raise ValueError unless the path of a file of rows ends in .jsonl. Local."""
    if Path(path).suffix != ".jsonl":
        raise ValueError(f"append ({str(path)!r}) must end in .jsonl")


def read_records(directory: str | Path) -> list[Record]:
    """Read every row of a directory's .jsonl files, file by file in the order of their names, line by line. Local.

    Errors: ValueError names the file and line that is not a row, or a directory that is not there.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise ValueError(f"directory ({str(directory)!r}) is not a directory")
    return [
        Record.from_line(line, f"{path}:{number}")
        for path in sorted(folder.glob("*.jsonl"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if line.strip()
    ]


def now() -> str:
    """The current date and time in UTC, to the second, for a row. Local."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the CPU. Local."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(\S.*)$", info.read_text() if info.is_file() else "", re.MULTILINE)
    return names[0].strip() if names else platform.processor() or platform.machine() or "CPU"


def versions(device: torch.device) -> dict[str, str | None]:
    """The versions that a figure depends on; cuda and nccl are None on the CPU. Local."""
    on_cuda = device.type == "cuda"
    return {
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "cuda": str(torch.version.cuda) if on_cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_cuda else None,
        "python": platform.python_version(),
        "ep_moe": _version("ep-moe"),
    }


def _version(package: str) -> str | None:
    """The version of an installed package, else None, such as for ep_moe in a source tree."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
