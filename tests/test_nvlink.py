"""Every file of `nvlink/` in Triton's interpreter, in a process of its own: Triton reads the environment once."""

from pathlib import Path

import apart
import pytest

FOLDER = Path(__file__).parent / "nvlink"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.timeout(900)  # it may wait for others
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.apart(FOLDER / name)) for name in FILES])
def test_the_transport_in_the_interpreter(name: str) -> None:
    code, said = apart.outcome(FOLDER / name)
    assert code == 0, said


def test_there_are_files() -> None:
    assert FILES


@pytest.mark.parametrize("num_sms", [3, 16, 100])
def test_a_launch_takes_no_more_processors_than_it_may(num_sms: int) -> None:
    pytest.importorskip("triton")
    from ep_moe.transport.nvlink.tuning import Tuning

    tuning = Tuning(most_receivers=150, num_sms=num_sms)
    for tokens in (1, 16, 128, 4096):
        dispatch, combine = tuning.dispatch(tokens, 4), tuning.combine(tokens, 4)
        counts = [dispatch.announcers, dispatch.senders, dispatch.receivers], [combine.senders, combine.receivers]
        assert all(min(count) >= 1 and sum(count) <= num_sms for count in counts)
    assert sum(counts[0]) >= num_sms - 2
    assert Tuning(most_receivers=150).dispatch(4096, 4).senders > 100
