"""The files of `interpreted/` in Triton's interpreter, in other processes: Triton reads TRITON_INTERPRET at import."""

from pathlib import Path

import apart
import pytest

GROUPS = apart.groups(Path(__file__).parent / "interpreted", 3)


@pytest.mark.timeout(900)  # it may wait for others
@pytest.mark.parametrize("files", [pytest.param(files, marks=pytest.mark.apart(files)) for files in GROUPS])
def test_kernels_in_the_interpreter(files: apart.Files) -> None:
    code, said = apart.outcome(files)
    assert code == 0, said
