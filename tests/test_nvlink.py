"""Every file of `nvlink/` in Triton's interpreter, in a process of its own: Triton reads the environment once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ep_moe.transport.nvlink.tuning import Tuning

FOLDER = Path(__file__).parent / "nvlink"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.parametrize("name", FILES)
def test_the_transport_in_the_interpreter(name: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", str(FOLDER / name), "--tb=short", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=FOLDER.parent.parent, timeout=290
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_there_are_files() -> None:
    assert FILES


@pytest.mark.parametrize("num_sms", [3, 16, 100])
def test_a_launch_takes_no_more_processors_than_it_may(num_sms: int) -> None:
    tuning = Tuning(most_receivers=150, num_sms=num_sms)
    for tokens in (1, 16, 128, 4096):
        dispatch, combine = tuning.dispatch(tokens, 4), tuning.combine(tokens, 4)
        counts = [dispatch.announcers, dispatch.senders, dispatch.receivers], [combine.senders, combine.receivers]
        assert all(min(count) >= 1 and sum(count) <= num_sms for count in counts)
    assert sum(counts[0]) >= num_sms - 2
    assert Tuning(most_receivers=150).dispatch(4096, 4).senders > 100
