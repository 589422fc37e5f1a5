"""What a run has measured, a line of JSON each: an interrupted run goes on from it."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ep_moe.experts.tile_tables import tiles_of_json, tiles_to_json
from ep_moe.experts.tuning import ExpertTiles
from ep_moe.files import write_whole


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One candidate.

    Args:
        rows: per expert. us: the median of its times, infinite if it has none. why: it was refused, else "".
    """

    rows: int
    tiles: ExpertTiles
    us: float = math.inf
    why: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """Tiles whose kernels were compiled, which serve every number of rows; `why` they cannot be launched, else ""."""

    tiles: ExpertTiles
    why: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The end of the search for one number of rows: the tiles, and their time beside that of the default, in turn."""

    rows: int
    tiles: ExpertTiles
    us: float
    default_us: float
    complete: bool  # False if the time ended the search


class Journal:
    """The trials of one table, in a file.

    Args:
        path: of the file; one of another machine, other versions or another problem is begun anew, and one is cut off
            at a line that is no entry.
        about: what trials depend on, JSON values.
    Errors: OSError of the file.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.trials: dict[tuple[int, ExpertTiles], Trial] = {}
        self.chosen: dict[int, Chosen] = {}
        self.compiled: dict[ExpertTiles, str] = {}
        found = path.read_text(encoding="utf-8") if path.is_file() else ""
        head, kept = json.dumps({"about": dict(about)}), list[str]()
        for line in found.splitlines() if found.partition("\n")[0] == head else []:
            try:
                self._remember(json.loads(line))
            except (AttributeError, KeyError, TypeError, ValueError):  # such as the last line of a run that was killed
                break
            kept.append(line)
        text = "\n".join(kept or [head]) + "\n"
        if text != found:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)

    def of(self, rows: int) -> list[Trial]:
        """The trials for this number of rows."""
        return [trial for trial in self.trials.values() if trial.rows == rows]

    def add(self, entry: Trial | Compiled | Chosen) -> None:
        """Write an entry behind the others. Errors: OSError."""
        values = {name: getattr(entry, name) for name in type(entry).__slots__} | {"tiles": tiles_to_json(entry.tiles)}
        if isinstance(entry, Trial) and math.isinf(entry.us):
            del values["us"]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({type(entry).__name__.lower(): values}) + "\n")
        self._store(entry)

    def _remember(self, entry: Mapping[str, Any]) -> None:
        for name, kind in (("trial", Trial), ("compiled", Compiled), ("chosen", Chosen)):
            if name in entry:
                values = dict(entry[name])
                self._store(kind(**values | {"tiles": tiles_of_json(values["tiles"], str(self.path))}))

    def _store(self, entry: Trial | Compiled | Chosen) -> None:
        if isinstance(entry, Trial):
            self.trials[entry.rows, entry.tiles] = entry
        elif isinstance(entry, Compiled):
            self.compiled[entry.tiles] = entry.why
        else:
            self.chosen[entry.rows] = entry
