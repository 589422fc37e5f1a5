"""The tests that mostly wait, in another process: a plain `pytest` computes meanwhile."""

import pytest
from helpers import separate


@pytest.mark.timeout(900)  # it may wait for others
@pytest.mark.separate(separate.WAITING, waits=True, interpreted=False)
def test_what_waits() -> None:
    code, said = separate.outcome(separate.WAITING)
    assert code == 0, said
