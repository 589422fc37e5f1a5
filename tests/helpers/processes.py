"""Commands in processes of their own, and what they leave behind."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EP_MOE = [sys.executable, "-m", "ep_moe"]


def environ() -> dict[str, str]:
    """This environment with the source tree and the tests on the path, without variables of an outer launcher."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    # a rank with as many threads as cores is many times slower if another process uses a core
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def processes_with(mark: str) -> list[int]:
    """Processes whose environment holds `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has ended meanwhile
                continue
    return sorted(found)


def parent_of(process: int) -> int:
    """The parent's id; field 4 of the line, where field 2 is a name in brackets."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def ranks_of(process: int, mark: str) -> list[int]:
    """The ranks that a command has started, in the order of their start: children of its child, the fork server."""
    return [rank for rank in processes_with(mark) if parent_of(parent_of(rank)) == process]
