"""The files of `interpreted/` in Triton's interpreter, in other processes: Triton reads TRITON_INTERPRET at import."""

from pathlib import Path

import pytest
from helpers import separate

FOLDER = Path(__file__).parent / "interpreted"
MORE = "test_model.py", "test_deepep.py"  # which import transformers and start ranks, as those with models do
FIRST, SECOND = separate.groups(FOLDER, 2, without=MORE)
GROUPS = (*separate.WITH_MODELS, *(FOLDER / name for name in MORE), *FIRST), SECOND


@pytest.mark.timeout(900)  # it may wait for others
@pytest.mark.parametrize("files", [pytest.param(files, marks=pytest.mark.separate(files)) for files in GROUPS])
def test_kernels_in_the_interpreter(files: separate.Files) -> None:
    code, said = separate.outcome(files)
    assert code == 0, said
