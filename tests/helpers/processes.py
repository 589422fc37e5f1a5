"""Commands in processes of their own, and what they leave behind."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
EP_MOE = [sys.executable, "-m", "ep_moe"]


def environ(*folders: Path) -> dict[str, str]:
    """This environment with `folders`, the source tree and all test files on Python's path, and one torch thread."""
    of_tests = sorted({path.parent for path in TESTS.rglob("test_*.py")})
    paths = [*map(str, (*folders, ROOT, TESTS, *of_tests)), os.environ.get("PYTHONPATH", "")]
    # a rank with as many threads as cores is many times slower if another process uses a core
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def hear_sighup() -> None:
    """In a child before it begins: SIGHUP ends it, even if these tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


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


def _fields(process: int) -> list[str]:
    """Those of its line in /proc behind its name, which is field 2, in brackets."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def parent_of(process: int) -> int:
    """The parent's id."""
    return int(_fields(process)[1])


def ranks_of(process: int) -> list[int]:
    """The processes that a command has started, in their order: children of its child, the fork server. Of a server the
    first is the front end. Ids begin again from 1 once there have been some ten thousands."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or has no parent
            if entry.name.isdigit() and parent_of(parent_of(int(entry.name))) == process:
                found.append((int(_fields(int(entry.name))[19]), int(entry.name)))  # when it began, in 1/100 s
    return [each for _, each in sorted(found) if is_running(each)]


def actors_with(mark: str) -> list[int]:
    """Ranks that are actors of Ray among the processes with a mark, by the title that Ray gives them."""
    titles = {process: Path(f"/proc/{process}/cmdline") for process in processes_with(mark)}
    return [process for process, title in titles.items() if title.read_bytes().startswith(b"ray::_Rank")]


def is_running(pid: int) -> bool:
    """Whether a process lives; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def wait_until_gone(pids: list[int], within_secs: float) -> list[int]:
    """The processes that still live after a while."""
    deadline = time.monotonic() + within_secs
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if is_running(pid)]
