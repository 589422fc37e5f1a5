"""Setup shared by all tests."""

import os
import signal

import apart
import pytest
import torch

from ep_moe.app.start import PRELOAD
from ep_moe.launch import start_server

# a shell starts background jobs with SIGINT ignored, which processes started by tests would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move tests that wait for files running apart to the end."""
    items.sort(key=lambda item: item.get_closest_marker("apart") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server that forks ranks, and the files that run apart."""
    if session.config.option.collectonly:
        return
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # in files that run apart, whose ranks import less
    if not interpreted and not torch.cuda.is_available():  # imports may initialize CUDA, which must not be forked
        start_server((*PRELOAD, "pytest", "ep_moe.testing"))
    marks = [item.get_closest_marker("apart") for item in session.items]
    apart.start([mark.args[0] for mark in marks if mark])


def pytest_sessionfinish() -> None:
    """End files that still run, after Ctrl-C for example."""
    apart.stop()
