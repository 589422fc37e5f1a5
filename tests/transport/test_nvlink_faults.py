"""The one-sided transport with lost ranks or refused rounds, in Triton's interpreter; options of each transport."""

import subprocess
from pathlib import Path

import pytest
from helpers import separate

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.placement import Placement
from ep_moe.transport import TRANSPORTS

FOLDER = Path(__file__).parent.parent / "nvlink_faults"
NO_RANK_LOST = "test_refused.py", "test_sent_once.py"  # other groups may use the cores meanwhile
REFUSALS = tuple(FOLDER / name for name in NO_RANK_LOST)
[FAULTS] = separate.groups(FOLDER, 1, without=NO_RANK_LOST)


@pytest.mark.timeout(900)  # it may wait for others
@pytest.mark.separate(REFUSALS)
def test_refusals_in_the_interpreter() -> None:
    code, said = separate.outcome(REFUSALS)
    assert code == 0, said


@pytest.mark.timeout(600)
def test_faults_in_the_interpreter() -> None:
    command, environment = separate.interpreted(FAULTS)
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=FOLDER.parent.parent, timeout=580
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_who_can_go_on_without_a_rank() -> None:
    config = TransportConfig(hidden=16, max_tokens_per_rank=1, on_peer_loss="mask")
    with EPGroup.single("cpu") as group:
        TRANSPORTS["local"](group, Placement.linear(2, 1), config).destroy()
        with pytest.raises(ValueError, match=r"on_peer_loss \('mask'\) needs transport 'nvlink'"):
            TRANSPORTS["collective"](group, Placement.linear(2, 1), config)
    with pytest.raises(ValueError, match=r"on_peer_loss \('wait'\) is not one of raise, mask"):
        TransportConfig(hidden=16, max_tokens_per_rank=1, on_peer_loss="wait")
