"""These files are collected if kernels can run: in the interpreter, or on GPUs, as multi-GPU tests."""

from pathlib import Path

import pytest

from nvlink_faults.common import CAN_RUN, INTERPRETING

collect_ignore_glob = [] if CAN_RUN else ["test_*.py"]
if INTERPRETING and CAN_RUN:
    from quick_interpreter import hurry  # imports Triton, which not every machine has

    hurry()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add marks before pytest selects by marks."""
    for item in items:
        if not INTERPRETING and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.multigpu)
