"""The folders whose tests mostly wait, in other processes: a plain `pytest` computes meanwhile."""

import pytest
from helpers import separate


@pytest.mark.timeout(900)  # it may wait for others
@pytest.mark.parametrize(
    "folders",
    [
        pytest.param(folders, marks=pytest.mark.separate(folders, waits=True, interpreted=False))
        for folders in separate.WAITING
    ],
)
def test_folders_that_wait(folders: separate.Files) -> None:
    code, said = separate.outcome(folders)
    assert code == 0, said
