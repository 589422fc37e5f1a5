"""The files of `nvlink/` and `nvlink_faults/` in Triton's interpreter, in other processes: it is chosen at import."""

import dataclasses
import gc
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import separate

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.placement import Placement
from ep_moe.transport import TRANSPORTS

TESTS = Path(__file__).parent.parent
NO_RANK_LOST = "test_refused.py", "test_sent_once.py"  # which compute, and do not wait
FIRST, SECOND = separate.groups(TESTS / "nvlink", 2, without=[path.name for path in separate.WITH_MODELS])
GROUPS = FIRST, (*SECOND, *(TESTS / "nvlink_faults" / name for name in NO_RANK_LOST))
[FAULTS] = separate.groups(TESTS / "nvlink_faults", 1, without=NO_RANK_LOST)


@pytest.mark.timeout(900)  # it may wait for others
@pytest.mark.parametrize("files", [pytest.param(files, marks=pytest.mark.separate(files)) for files in GROUPS])
def test_the_transport_in_the_interpreter(files: separate.Files) -> None:
    code, said = separate.outcome(files)
    assert code == 0, said


@pytest.mark.timeout(900)
@pytest.mark.separate(FAULTS, waits=True)
def test_faults_in_the_interpreter() -> None:
    code, said = separate.outcome(FAULTS)
    assert code == 0, said


def test_who_can_go_on_without_a_rank() -> None:
    config = TransportConfig(hidden=16, max_tokens_per_rank=1, on_peer_loss="mask")
    with EPGroup.single("cpu") as group:
        TRANSPORTS["local"](group, Placement.linear(2, 1), config).destroy()
        with pytest.raises(ValueError, match=r"on_peer_loss \('mask'\) needs transport 'peer'"):
            TRANSPORTS["collective"](group, Placement.linear(2, 1), config)
    with pytest.raises(ValueError, match=r"on_peer_loss \('wait'\) is not one of raise, mask"):
        TransportConfig(hidden=16, max_tokens_per_rank=1, on_peer_loss="wait")


@pytest.mark.parametrize("num_sms", [3, 16, 100])
def test_a_launch_takes_no_more_processors_than_it_may(num_sms: int) -> None:
    pytest.importorskip("triton")
    from ep_moe.transport.one_sided.tuning import Tuning

    tuning = Tuning(most_receivers=200, num_sms=num_sms)
    for tokens in (1, 16, 128, 4096):
        dispatch, combine = tuning.dispatch(tokens, 4), tuning.combine(tokens, 4)
        counts = [dispatch.announcers, dispatch.senders, dispatch.receivers], [combine.senders, combine.receivers]
        alone = [dispatch.announcers, dispatch.senders_alone], [dispatch.receivers_alone]
        alone = (*alone, [combine.senders_alone], [combine.receivers_alone])
        assert all(min(count) >= 1 and sum(count) <= num_sms for count in (*counts, *alone))
    assert sum(counts[0]) >= num_sms - 2
    assert all(sum(count) == num_sms for count in alone[:3])  # a half by itself takes all of them
    assert Tuning(most_receivers=200).dispatch(4096, 4).senders > 100


@pytest.fixture
def hopper() -> Any:
    """The limits of an H100 or H200."""
    pytest.importorskip("triton")
    from ep_moe.kernels.device import Device
    from ep_moe.transport.one_sided.occupancy import Occupancy

    return Occupancy(device=Device(capability=(9, 0), num_sms=132, shared_bytes=232448, registers=65536, threads=2048))


def test_receivers_of_all_slots_fit_at_once(hopper: Any) -> None:
    assert [hopper.most_receivers(slots) for slots in (1, 2, 3, 4)] == [400, 200, 133, 100]
    with pytest.raises(RuntimeError, match=r"num_slots \(401\) exceeds 400, the programs that may wait on this GPU"):
        hopper.most_receivers(401)
    # programs per SM: as many as its threads and its registers hold
    fewer = {"registers": (49152, 3), "threads": (256, 2)}
    for name, (value, each) in fewer.items():
        device = dataclasses.replace(hopper.device, **{name: value})
        assert dataclasses.replace(hopper, device=device).most_receivers(1) == 100 * each, name


def test_rounds_that_may_fill_a_gpu_are_told_of(hopper: Any, caplog: pytest.LogCaptureFixture) -> None:
    from ep_moe.transport.one_sided.occupancy import DeviceRounds, OpenRounds
    from ep_moe.transport.slots import CLOSED, Slot

    stream, of_all = [0], DeviceRounds()

    def rounds_of(receivers: int) -> Any:
        current = lambda index: stream[0] + 10 * index  # noqa: E731
        return OpenRounds(torch.device("cuda", 5), hopper, of_all, lambda _: receivers, current)

    decode, prefill = rounds_of(40), rounds_of(364)
    first, second, other = (Slot[Any](*CLOSED) for _ in range(3))
    for used, slot in ((decode, first), (prefill, other), (decode, first)):  # in turn
        stream[0] = 1 - stream[0]
        used.begin(slot, 16)
        slot.next, slot.state = "combine_send", "a round"
        slot.next, slot.state = CLOSED
    stream[0] = 0
    decode.begin(first, 16)
    first.state = "a round"
    prefill.begin(other, 16)  # on one stream
    decode.begin(second, 16)
    second.state = "a round"
    stream[0] = 1
    decode.begin(second, 16)  # 40 and 40, on two
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        prefill.begin(other, 4096)
        prefill.begin(other, 4096)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("cuda:5: rounds are open on other streams, whose 40 waiting programs, and 364")
    assert caplog.messages[0].endswith(
        "(400 fit, 99 leave one empty). Ranks that begin them in different orders may wait "
        "for each other: begin them in one order on all ranks, or set num_sms to at most 99"
    )
    del prefill
    gc.collect()
    third = rounds_of(340)
    third.begin(Slot(*CLOSED), 16)
    assert len(caplog.messages) == 1
    decode.destroy()
    third.destroy()


POLLED = r"""
import re
from unittest import mock
from triton.backends.nvidia.compiler import CUDABackend
from compile_check.exchange_cases import _round
from compile_check.stub import compile_only
from ep_moe.config import Layout
def stop(module, metadata, *options):
    metadata |= {"shared": 0, "name": ""}
    return ""
later = {"make_ttgir": stop, "make_llir": stop, "make_ptx": stop, "make_cubin": lambda *given: b""}
with compile_only(90) as recorder, mock.patch.multiple(CUDABackend, **{n: staticmethod(s) for n, s in later.items()}):
    _round("words", "fp8_block", Layout.COMPACT, tokens=8).launch()
for kernel, compiled in recorder.launches:
    for count in re.findall(r"tt\.load .*isVolatile = true.* : tensor<(\d+)x!tt", compiled.asm["ttir"]):
        print(kernel.fn.__name__, 32 * compiled.metadata.num_warps, count)
"""


def test_every_warp_judges_the_copies_that_it_uses(tmp_path: Path) -> None:
    """Polled words are held by every warp or by one, never by two of four: only one warp's copy is checked for arrival.

    With 7168 columns a token has 56 scales, more than a warp has threads and fewer than a program has.
    """
    pytest.importorskip("triton")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", POLLED]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    polled = [(kernel, int(threads), int(count)) for kernel, threads, count in map(str.split, done.stdout.splitlines())]
    assert len({kernel for kernel, *_ in polled}) == 2, done.stderr
    assert [found for found in polled if 32 < found[2] < found[1]] == []
