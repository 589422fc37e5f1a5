"""What holds for all tests."""

import os
import signal

import apart
import pytest
import torch

from ep_moe.app.start import PRELOAD
from ep_moe.launch import start_server

# a shell starts what it runs in the background deaf to Ctrl-C, and so would be all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Last come those that wait for files that run apart."""
    items.sort(key=lambda item: item.get_closest_marker("apart") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what tests share: the server that forks their ranks, and the files that run apart."""
    if session.config.option.collectonly:
        return
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # files that run apart: their ranks need less
    if not interpreted and not torch.cuda.is_available():  # an import that touches CUDA would spoil it for ranks
        start_server((*PRELOAD, "pytest", "ep_moe.testing"))
    marks = [item.get_closest_marker("apart") for item in session.items]
    apart.start([mark.args[0] for mark in marks if mark])


def pytest_sessionfinish() -> None:
    """End what still runs, after Ctrl-C for example."""
    apart.stop()
