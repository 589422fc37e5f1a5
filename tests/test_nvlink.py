"""Every file of `nvlink/` in Triton's interpreter, in a process of its own: Triton reads the environment once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
