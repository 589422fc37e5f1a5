"""Setup shared by all tests."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

gc.set_threshold(50_000, 20, 100)  # at 700 objects a fifth of the time of these imports goes into collections

import torch
from helpers import separate

from ep_moe.app.start import PRELOAD
from ep_moe.launch import start_server

# a shell starts background jobs with SIGINT ignored, which processes started by tests would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)
# some images set it, and each process would compile the package and its tests again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest` without arguments runs what mostly waits by `test_waiting`, else itself."""
    plain = not config.invocation_params.args
    elsewhere = collection_path in separate.WAITING if plain else collection_path.name == "test_waiting.py"
    return True if elsewhere else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move tests that wait for separate processes to the end."""
    items.sort(key=lambda item: item.get_closest_marker("separate") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server that forks ranks, and the groups of files that run in separate processes.

    What is loaded by then stays: a collection of garbage, of which tests ask for some, need not look at it.
    """
    gc.collect()
    gc.freeze()
    if session.config.option.collectonly:
        return
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # in a separate process, whose ranks import less
    if not interpreted and not torch.cuda.is_available():  # imports may initialize CUDA, which must not be forked
        # groups of files use the other cores: operators that wait for a second thread take several times the CPU time
        torch.set_num_threads(1)
        start_server((*PRELOAD, "pytest", "ep_moe.testing"))
    marks = [item.get_closest_marker("separate") for item in session.items]
    separate.start([mark for mark in reversed(marks) if mark])  # the longest first, those of transports


def pytest_sessionfinish() -> None:
    """End files that still run, after Ctrl-C for example."""
    separate.stop()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in a test, whatever ran before it in this process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def logs_of_one_test() -> Iterator[None]:
    """Remove the log lines that a command has configured in this process."""
    yield
    package = logging.getLogger("ep_moe")
    package.handlers = []
    package.setLevel(logging.NOTSET)
