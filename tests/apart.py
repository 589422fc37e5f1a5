"""Runs test files that need their own environment in separate processes, in parallel with the session.

The test of such a file has the mark `apart(path)`, runs after all others, and waits for `outcome(path)`. Many other
tests only wait, for ranks or for time to pass; these files use the idle core, at lower priority.
"""

import concurrent.futures
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

SECS = 600.0  # timeout of a file
LESS_PRIORITY = ("nice", "-n", "5")

_files: dict[Path, "concurrent.futures.Future[tuple[int, str]]"] = {}
_running: set["subprocess.Popen[str]"] = set()
_lock = threading.Lock()
_ended = threading.Event()
_cores = threading.Semaphore(0)  # free cores for files
_waited = threading.Event()  # set once the session only waits for files
_pools: list[concurrent.futures.ThreadPoolExecutor] = []


def start(paths: Iterable[Path]) -> None:
    """Run these files, one per core; the session keeps one core until it waits for an `outcome`."""
    cores = len(os.sched_getaffinity(0))
    _cores.release(max(cores - 1, 1))
    pool = concurrent.futures.ThreadPoolExecutor(cores)
    _pools.append(pool)
    _files.update((path, pool.submit(_run, path)) for path in dict.fromkeys(paths))


def outcome(path: Path) -> tuple[int, str]:
    """The exit code of a file's tests and the end of their output. Blocks until they have ended."""
    if not _waited.is_set():
        _waited.set()
        _cores.release()
    return _files[path].result()


def stop() -> None:
    """End files that still run, and start no more."""
    _ended.set()
    _cores.release(len(_files) + 1)  # wakes threads that wait for a core
    for pool in _pools:
        pool.shutdown(wait=False, cancel_futures=True)
    with _lock:
        for process in _running:
            process.terminate()


def _run(path: Path) -> tuple[int, str]:
    command = [*LESS_PRIORITY, sys.executable, "-m", "pytest", str(path), "--tb=short", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with _cores:
        return _run_on_a_core(command, environment)


def _run_on_a_core(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with _lock:
        if _ended.is_set():
            return 1, "the tests have ended"
        process = subprocess.Popen(command, env=environment, cwd=Path(__file__).parent.parent, **pipes)
        _running.add(process)
    try:
        said, _ = process.communicate(timeout=SECS)
        return process.returncode, said[-8000:]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return 1, f"this file takes more than {SECS:g} s"
    finally:
        with _lock, contextlib.suppress(KeyError):
            _running.remove(process)
