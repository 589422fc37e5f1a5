"""These files are collected if kernels can run: in the interpreter, or on a GPU, where they are marked as GPU tests."""

from pathlib import Path

import pytest

from interpreted.common import CAN_RUN, INTERPRETING

if INTERPRETING:
    from helpers.launch_kinds import watch  # imports Triton, which not every machine has
    from quick_interpreter import hurry

    from interpreted.repeating import repeats  # noqa: F401 - a fixture

    hurry()
    watch()
collect_ignore_glob = [] if CAN_RUN else ["test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add marks before pytest selects by marks."""
    for item in items:
        if not INTERPRETING and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
