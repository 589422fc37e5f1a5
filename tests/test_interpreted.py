"""Every file of `interpreted/` in Triton's interpreter, in a process each: Triton reads TRITON_INTERPRET at import."""

from pathlib import Path

import apart
import pytest

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.timeout(900)  # it may wait for others
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.apart(FOLDER / name)) for name in FILES])
def test_kernels_in_the_interpreter(name: str) -> None:
    code, said = apart.outcome(FOLDER / name)
    assert code == 0, said


def test_there_are_files() -> None:
    assert FILES
