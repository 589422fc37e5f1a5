"""What holds for all tests."""

import signal

import apart
import pytest

# a shell starts what it runs in the background deaf to Ctrl-C, and so would be all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the files that run apart, of the tests that were selected."""
    marks = [item.get_closest_marker("apart") for item in session.items]
    if any(marks) and not session.config.option.collectonly:
        apart.start([mark.args[0] for mark in marks if mark], alone=all(marks))


def pytest_sessionfinish() -> None:
    """End what still runs, after Ctrl-C for example."""
    apart.stop()
