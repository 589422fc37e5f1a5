"""A model and its sequences go on after ranks are lost, and with new ones, as if nothing had happened."""

import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lost import record, recorded

from ep_moe.app.session import load_expert_parallel
from ep_moe.app.start import SHIPPED_MODEL
from ep_moe.config import EngineConfig, GroupConfig
from ep_moe.engines.transformers import from_pretrained
from ep_moe.engines.transformers.decoding import RowDecoder
from ep_moe.engines.transformers.decoding.passes import RowsPlan, RowStart, Sampling, pass_shape
from ep_moe.environment import LaunchEnv
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.launch import RankFailedError, launch

CONFIG = GroupConfig(timeout_secs=30.0, heartbeat_secs=0.2)
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.9, seed=7),
    Sampling(temperature=0.7, seed=8, repetition_penalty=1.2, frequency_penalty=0.3),
)
STEPS = (3, 5, 5, 4, 4, 4)  # passes of the plans of a sequence
CAPACITY = 64


def starts_of(seat: int) -> tuple[RowStart, ...]:
    """A sequence for each sampling, of other prompts on each seat."""
    texts = [f"{'And it came to pass '[: 5 + seat + 4 * row]}" for row in range(len(SAMPLINGS))]
    return tuple(
        RowStart(row=row, prompt=tuple(text.encode()), max_new_tokens=40, sampling=sampling)
        for row, (text, sampling) in enumerate(zip(texts, SAMPLINGS, strict=True))
    )


def decoder_of(model: Any) -> RowDecoder:
    return RowDecoder(model, num_rows=4, num_positions=CAPACITY, end_ids=(), graphs=False)


def prefill(group: EPGroup, starts: Sequence[RowStart]) -> RowsPlan:
    """The same on all ranks but for this one's own entry, which alone it reads."""
    everywhere, chunks = group.num_ranks, tuple((start.row, len(start.prompt)) for start in starts)
    return RowsPlan(ended=((),) * everywhere, starts=(tuple(starts),) * everywhere, chunks=(chunks,) * everywhere)


def passes(group: EPGroup, number: int) -> RowsPlan:
    shapes = (pass_shape(len(SAMPLINGS), CAPACITY, sampled=True, adjusted=True),) * group.num_ranks
    nothing: tuple[tuple[()], ...] = ((),) * group.num_ranks
    return RowsPlan(ended=nothing, starts=nothing, passes=number, shapes=shapes)


def tokens_of(rows: RowDecoder, plan: RowsPlan) -> list[list[int]]:
    """[passes][row] of the rows in use."""
    return [row[: len(SAMPLINGS)] for row in rows.run(plan).tokens]


def kill_in_pass(rows: RowDecoder, number: int) -> None:
    """End this process in an MoE layer of this pass."""
    layer: Any = rows._decoder._layers[1]
    calls, forward = [0], layer.forward_routed

    def dying(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*args, **options)

    layer.forward_routed = dying


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, list[list[int]]]:
    """By seat, the tokens of each pass on one rank."""
    group = EPGroup.single("cpu")
    model = from_pretrained(SHIPPED_MODEL, group, dtype=torch.float32)
    found = {}
    for seat in range(4):
        rows = decoder_of(model)
        made = tokens_of(rows, prefill(group, starts_of(seat)))
        found[seat] = made + [row for number in STEPS for row in tokens_of(rows, passes(group, number))]
    return found


class Ranks:
    """One rank of the test: its group, model and rows, and what its sequences have said so far."""

    def __init__(self, group: EPGroup, engine: EngineConfig) -> None:
        self.group, self.told, self.secs = group, list[Any](), list[float]()
        self.model, self.session = load_expert_parallel(group, engine)
        self.rows: Any = None
        self.made: list[list[int]] = []
        self.steps = iter(STEPS)

    def begin(self) -> None:
        self.rows = decoder_of(self.model)
        self.made += tokens_of(self.rows, prefill(self.group, starts_of(self.group.seat)))

    def go_on(self) -> None:
        self.made += tokens_of(self.rows, passes(self.group, next(self.steps)))

    def survive(self, epoch: int, seats: tuple[int, ...], again: Callable[[], None] | None = None) -> None:
        """Lose a rank in the next plan, regroup, and run that plan again."""
        plan = next(self.steps)
        with pytest.raises(PeerLostError):
            tokens_of(self.rows, passes(self.group, plan))
        start = time.monotonic()
        self.join(epoch, seats)
        self.secs.append(time.monotonic() - start)
        self.made += tokens_of(self.rows, passes(self.group, plan))

    def join(self, epoch: int, seats: tuple[int, ...]) -> None:
        self.group = self.group.regroup(epoch, seats)
        done = self.session.regroup(self.group)
        self.told.append((done.from_ranks, done.from_checkpoint, done.checkpoint_bytes, self.session.placements))
        assert self.rows is None or self.rows.regroup() == ()


def be_replaced(group: EPGroup, engine: EngineConfig, folder: Path) -> tuple[Any, ...]:
    """Seats 0 to 3 have the model. Seat 1 dies in a pass, and its place is taken by the process of seat 4; then seat 0
    dies between passes, then seat 3 when the checkpoint has gone."""
    if group.seat == 4:
        group.destroy()
        env = LaunchEnv.from_environ()
        assert env is not None
        rank = Ranks(EPGroup.on_standby(dataclasses.replace(env, rank=1), CONFIG, "cpu"), engine)
        wait_for(folder / "three")
        with pytest.raises(RuntimeError, match="rank 1 has no experts yet"):
            rank.session.transport.check()
        rank.join(3, (0, 1, 2, 3))
        rank.begin()
        rank.steps = iter(STEPS[3:])
    else:
        rank = Ranks(group.regroup(1, (0, 1, 2, 3)), engine)
        rank.begin()
        rank.go_on()
        if rank.group.seat == 1:
            kill_in_pass(rank.rows, 3)
        rank.survive(2, (0, 2, 3))
        rank.go_on()
        if rank.group.seat == 0:
            (folder / "three").touch()
        rank.join(3, (0, 1, 2, 3))
        rank.rows._prefill(())  # with the prompts of the new rank
    rank.go_on()
    if rank.group.seat == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.survive(4, (1, 2, 3))
    load = rank.session.total_expert_load().sum(1).tolist()
    if rank.group.seat == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    shutil.rmtree(engine.model, ignore_errors=True)
    with pytest.raises(PeerLostError):
        rank.go_on()
    rank.group = rank.group.regroup(5, (1, 2))
    with pytest.raises(RuntimeError) as caught:
        rank.session.regroup(rank.group)
    return rank.made, rank.told, rank.secs, load, str(caught.value)


def recorded_rank(group: EPGroup, target: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    folder = args[-1]
    found = target(group, *args)
    (folder / "found").mkdir(exist_ok=True)
    record(folder / "found", group.latest.seat if group.seat != 4 else 1, found)


def outcomes_of(folder: Path, num_ranks: int, lost: set[int], *args: Any) -> dict[int, Any]:
    with pytest.raises(RankFailedError) as caught:
        launch(recorded_rank, *args, folder, num_ranks=num_ranks, config=CONFIG, device="cpu", grace_secs=120.0)
    assert set(caught.value.failures) == lost, caught.value.failures
    return recorded(folder / "found")


def test_ranks_die_and_one_is_replaced(tmp_path: Path, undisturbed: dict[int, Any]) -> None:
    engine = EngineConfig(model=str(shutil.copytree(SHIPPED_MODEL, tmp_path / "model")), dtype="float32")
    found = outcomes_of(tmp_path, 5, {0, 1, 3}, be_replaced, engine)
    new, old = found[1], found[2]
    assert old[0] == undisturbed[2][: len(old[0])]
    assert len(old[0]) == 1 + sum(STEPS[:5])
    assert new[0] == undisturbed[1][: len(new[0])]
    assert len(new[0]) == 1 + sum(STEPS[3:5])
    (two, three, four), secs = old[1], old[2]
    assert new[1] == [three, four]
    assert (two[1], four[1]) == (4 * 4, 4 * 4)  # four experts of each layer were on the lost rank alone
    assert two[2] == 4 * 4 * 3 * 128 * 64 * 4 or two[2] > 0
    assert three[1] == 0
    assert three[0] >= 4 * 4
    assert [each.num_ranks for each in (two[3][0], three[3][0], four[3][0])] == [3, 4, 3]
    print(secs)
    for text in (new[4], old[4]):
        assert "rank 3 was killed by SIGKILL" in text
        assert str(tmp_path / "model") in text
