"""Runs groups of test files and folders in separate processes, in parallel with the session.

The test of a group has the mark `separate(files)`, runs after all others, and waits for `outcome(files)`. Its files run
in Triton's interpreter, or with `interpreted=False` as in the session. Many tests of the session only wait, for ranks
or for time to pass; the groups use the idle core, at lower priority. A group that mostly waits itself has the mark
`separate(files, waits=True)`: it takes no core, and has its times at normal priority.
"""

import concurrent.futures
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

SECS = 850.0  # timeout of a group, of which several share the cores
LESS_PRIORITY = ("nice", "-n", "5")

Files = tuple[Path, ...]
TESTS = Path(__file__).parents[1]
# in the interpreter, with models of transformers, whose import takes seconds
WITH_MODELS = TESTS / "nvlink" / "test_decode.py", TESTS / "nvlink" / "test_regroup.py"
# for commands, servers, lost ranks; the other tests of a server compute
WAITING = TESTS / "app", TESTS / "group", TESTS / "launch", TESTS / "serving" / "test_serve.py"
_groups: dict[Files, "concurrent.futures.Future[tuple[int, str]]"] = {}
_running: set["subprocess.Popen[str]"] = set()
_lock = threading.Lock()
_ended = threading.Event()
_cores = threading.Semaphore(0)  # free cores for groups
_waited = threading.Event()  # set once the session only waits for groups
_pools: list[concurrent.futures.ThreadPoolExecutor] = []


def groups(folder: Path, count: int, *, without: Iterable[str] = ()) -> list[Files]:
    """All test files of a folder in so many groups."""
    files = sorted(path for path in folder.glob("test_*.py") if path.name not in without)
    assert len(files) >= count, f"{folder} has {len(files)} files"
    return [tuple(files[first::count]) for first in range(count)]


def start(marks: Iterable[pytest.Mark]) -> None:
    """Run the groups of these marks, one per core; the session keeps one core until it waits for an `outcome`.

    Those that wait run one after another, beside the others.
    """
    cores = len(os.sched_getaffinity(0))
    _cores.release(max(cores - 1, 1))
    computing, waiting = (concurrent.futures.ThreadPoolExecutor(threads) for threads in (cores, 1))
    _pools.extend((computing, waiting))
    for mark in marks:
        options = {"waits": False, "interpreted": True, **mark.kwargs}
        pool = waiting if options["waits"] else computing
        _groups[mark.args[0]] = pool.submit(_run, mark.args[0], **options)


def outcome(files: Files) -> tuple[int, str]:
    """The exit code of a group's tests and the end of their output. Blocks until they have ended."""
    if not _waited.is_set():
        _waited.set()
        _cores.release()
    return _groups[files].result()


def stop() -> None:
    """End groups that still run, and start no more."""
    _ended.set()
    _cores.release(len(_groups) + 1)  # wakes threads that wait for a core
    for pool in _pools:
        pool.shutdown(wait=False, cancel_futures=True)
    with _lock:
        for process in _running:
            process.terminate()


def _run(files: Files, waits: bool, interpreted: bool) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", *map(str, files), "--tb=short", "-p", "no:cacheprovider"]
    environment = dict(os.environ)
    if interpreted:
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    if waits:
        return _run_command(command, environment)
    with _cores:
        return _run_command([*LESS_PRIORITY, *command], environment)


def _run_command(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with _lock:
        if _ended.is_set():
            return 1, "the tests have ended"
        process = subprocess.Popen(command, env=environment, cwd=TESTS.parent, **pipes)
        _running.add(process)
    try:
        output, _ = process.communicate(timeout=SECS)
        return process.returncode, output[-8000:]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return 1, f"these files take more than {SECS:g} s"
    finally:
        with _lock, contextlib.suppress(KeyError):
            _running.remove(process)
