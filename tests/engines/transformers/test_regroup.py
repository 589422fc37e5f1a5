"""A model and its sequences go on after ranks are lost, and with new ones, as if nothing had happened."""

import dataclasses
import functools
import gc
import itertools
import math
import os
import re
import shutil
import signal
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.decoding import MODELS, captured_on_a_cpu, sharded_model
from helpers.lost import record, recorded
from helpers.small_models import make_model

from ep_moe.app.session import load_expert_parallel, load_tokenizer
from ep_moe.app.start import SHIPPED_MODEL
from ep_moe.balance import Rebalancer
from ep_moe.config import EngineConfig, GroupConfig, MoEConfig, TransportConfig
from ep_moe.engines.transformers import from_pretrained, regrouping
from ep_moe.engines.transformers.decoding import RowDecoder
from ep_moe.engines.transformers.decoding.grammars import RowGrammars
from ep_moe.engines.transformers.decoding.passes import RowsPlan, RowStart, Sampling, pass_shape
from ep_moe.engines.transformers.decoding.sequences import NONE
from ep_moe.engines.transformers.moving import HeldExperts, with_rows
from ep_moe.engines.transformers.regrouping import Recipe, Rehearsal, hand_over_experts, regroup_experts
from ep_moe.environment import LaunchEnv
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.launch import RankFailedError, launch
from ep_moe.placement import Placement
from ep_moe.quant import get_scheme
from ep_moe.serving.formats import StructuredOutputs
from ep_moe.testing.random_experts import RandomExperts
from ep_moe.weights import Checkpoint, ExpertWeights

CONFIG = GroupConfig(timeout_secs=120.0, heartbeat_secs=0.2)
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.9, seed=7),
    Sampling(temperature=0.7, seed=8, repetition_penalty=1.2, frequency_penalty=0.3),
)
SIZES = Checkpoint.open(SHIPPED_MODEL).config
AT_ONCE_SECS = CONFIG.timeout_secs / 2  # whoever waits for a lost rank takes all of it; 0.5 s of an idle machine
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
        self.group, self.told, self.secs = group, list[Any](), list[tuple[float, float]]()
        self.model, self.session = load_expert_parallel(group, engine)
        self.joined = 0.0  # when the last group was made
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
        plan, session = next(self.steps), self.session
        gc.disable()  # memory of the old layers is free at once
        old = [weakref.ref(each) for each in (session.layers[0], session.transport, session.rebalancer) if each]
        with pytest.raises(PeerLostError):
            tokens_of(self.rows, passes(self.group, plan))
        start = time.monotonic()
        self.join(epoch, seats)
        self.secs.append((self.joined - start, time.monotonic() - self.joined))
        assert [each() for each in old] == [None] * len(old)
        gc.enable()
        self.made += tokens_of(self.rows, passes(self.group, plan))

    def join(self, epoch: int, seats: tuple[int, ...]) -> None:
        self.group, self.joined = self.group.regroup(epoch, seats), time.monotonic()
        done = self.session.regroup(self.group)
        self.told.append((done.from_ranks, done.from_checkpoint, done.checkpoint_bytes, self.session.placements))
        assert self.rows is None or self.rows.regroup() == ()


def be_replaced(group: EPGroup, engine: EngineConfig, folder: Path) -> tuple[Any, ...]:
    """Seats 0 to 3 have the model. Seat 1 dies in a pass, and its place is taken by the process of seat 4; then seat 0
    dies between passes, then seat 3 when the checkpoint has gone."""
    if (folder / "mapped").exists():  # experts are stored into the memory of others, as on GPUs
        regrouping.maps_peers = lambda group: True
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
    rank.group.barrier()  # a slower rank would see the loss in the passes before
    if rank.group.seat == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.survive(4, (1, 2, 3))
    load = rank.session.expert_load.sum(1).tolist()
    rank.group.barrier()
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


@pytest.mark.parametrize("mapped", [False, True])
def test_ranks_die_and_one_is_replaced(mapped: bool, tmp_path: Path, undisturbed: dict[int, Any]) -> None:
    if mapped:
        (tmp_path / "mapped").touch()
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
    assert two[2] == 16 * 3 * SIZES.hidden * SIZES.intermediate * 4
    assert three[1] == 0
    assert three[0] >= 4 * 4
    assert [each.num_ranks for each in (two[3][0], three[3][0], four[3][0])] == [3, 4, 3]
    assert max(map(sum, secs)) < AT_ONCE_SECS, secs  # of the group, and of the model
    prompts = sum(len(start.prompt) for start in starts_of(2))  # the plans that deaths interrupted count once
    assert old[3] == [4 * (prompts + len(SAMPLINGS) * sum(STEPS[:5]))] * 4  # K and layers of the shipped model
    for text in (new[4], old[4]):
        assert "rank 3 was killed by SIGKILL" in text
        assert str(tmp_path / "model") in text


class MadeExperts:
    """In place of a checkpoint."""

    def __init__(self, made: RandomExperts, scheme: str) -> None:
        self._made, self._scheme = made, get_scheme(scheme)

    def read(self, experts: dict[int, Sequence[int]]) -> dict[int, ExpertWeights]:
        return {layer: self._made.local(each, self._scheme) for layer, each in experts.items()}


def keep_formats(group: EPGroup) -> list[str]:
    """Bring six experts of several schemes to three ranks; the second has none, and leaves then. Returns errors."""
    wrong = []
    had = ((0, 1, 3), (), (3, 4))[group.rank]
    for scheme in ("none", "fp8_block", "fp8_tensor", "mxfp4_w4a16", "nvfp4", "int4_w4a16_g32_zp"):
        config = MoEConfig(hidden=128, intermediate=64, num_experts=6, scheme=scheme)
        made = RandomExperts(config, torch.bfloat16, torch.device("cpu"), bias=scheme == "mxfp4_w4a16", seed=3)
        first = made.local([0], get_scheme(scheme))
        rows = {name: each[:0] for name, each in first.named_tensors.items() if name != "w13_input_scale"}
        nothing = with_rows(first, rows)
        recipe = Recipe(
            transport="collective",
            experts="auto",
            sizes=TransportConfig(hidden=128, max_tokens_per_rank=8),
            num_topk=2,
            configs=(config,),
            source=MadeExperts(made, scheme),  # type: ignore[arg-type]
            spread=(7, 3),
        )
        held = [HeldExperts(experts=had, weights=made.local(had, get_scheme(scheme)) if had else nothing)]
        transport, (layer,), done = regroup_experts(recipe, held, group, "lost")
        [placement] = done.placements
        local = placement.local_experts(group.rank)
        expected = made.local(local, get_scheme(scheme)).named_tensors
        found = layer.weights.named_tensors
        assert set(found) == set(expected)
        wrong += [f"{scheme} {name}" for name, each in expected.items() if not torch.equal(raw(each), raw(found[name]))]
        if (done.from_checkpoint, placement.num_physical) != (2, 7):
            wrong.append(f"{scheme} {done}")
        transport.destroy()
        held, alone = [HeldExperts.of(layer)], dataclasses.replace(recipe, source=None)
        [placement] = hand_over_experts(alone, held, group, [1])
        local = held[0].experts
        assert placement.local_experts(group.rank) == local
        assert set(placement.physical_to_logical) == {*range(6)}
        found = held[0].weights.named_tensors
        if group.rank == 1:
            wrong += [f"{scheme} {name} is still there" for name in rows if len(found[name])]
            continue
        expected = made.local(local, get_scheme(scheme)).named_tensors
        wrong += [f"{scheme} {name}" for name, each in expected.items() if not torch.equal(raw(each), raw(found[name]))]
    return wrong


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def lose_copies(group: EPGroup, engine: EngineConfig, folder: Path) -> tuple[Any, ...]:
    """Each expert is on two ranks: the loss of seat 2 takes no checkpoint. Then seat 0 is lost while experts move."""
    del folder
    rank, away = Ranks(group, engine), f"{engine.model}.away"
    rank.begin()
    group.barrier()
    if group.seat == 0:
        os.rename(engine.model, away)
    group.barrier()
    if group.seat == 2:
        kill_in_pass(rank.rows, 2)
    load = rank.session.expert_load.sum(1).tolist()
    rank.survive(1, (0, 1, 3))
    if group.seat == 0:
        os.rename(away, engine.model)
    wrong = keep_formats(rank.group)
    session, now = rank.session, rank.session.placements
    session.rebalancer = moving = Rebalancer(
        session.layers, rank.group, max_bytes=4 * 3 * 4 * SIZES.hidden * SIZES.intermediate
    )
    turned = [placement.physical_to_logical[8:] + placement.physical_to_logical[:8] for placement in now]
    moving.request([Placement(experts, now[0].starts) for experts in turned])
    while not moving.status.moved_experts:
        session.end_pass()
    assert moving.is_active
    del moving
    if rank.group.seat == 0:
        kill_in_pass(rank.rows, 1)
    rank.survive(2, (1, 3))
    assert session.rebalancer is None
    rank.go_on()
    return rank.made, rank.told, rank.secs, wrong, load, session.expert_load.sum(1).tolist()


def test_copies_take_the_place_of_a_checkpoint(tmp_path: Path, undisturbed: dict[int, Any]) -> None:
    model = shutil.copytree(SHIPPED_MODEL, tmp_path / "model")
    engine = EngineConfig(model=str(model), dtype="float32", redundant_experts=16, transport="hierarchical")
    found = outcomes_of(tmp_path, 4, {0, 2}, lose_copies, engine)
    for seat, (made, told, _, wrong, before, after) in found.items():
        assert made == undisturbed[seat][: 1 + sum(STEPS[:3])]
        assert wrong == []
        assert [(each[1], each[3][0].num_physical) for each in told][0] == (0, 24)
        assert told[1][3][0].num_physical == 16
        assert all(new > old for new, old in zip(after, before, strict=True))


def interrupt(layers: Sequence[Any], rows: RowDecoder, plan: RowsPlan, call: int) -> tuple[int, ...]:
    """Run a plan that fails in this call of a layer, of which the one before gives NaN, as from a rank that fails, and
    go on; returns the rows that have ended by it."""
    calls, layer = itertools.count(1), layers[1]
    forward = layer.forward_routed

    def failing(*args: Any, **options: Any) -> Any:
        number = next(calls)
        if number == call:
            raise PeerLostError((0,), "dispatch", 1, "was killed by SIGKILL")
        return forward(*args, **options) * (math.nan if number == call - 1 else 1.0)

    layer.forward_routed = failing
    with pytest.raises(PeerLostError):
        rows.run(plan)
    layer.forward_routed = forward
    return rows.regroup()


def test_an_interrupted_plan_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts, and passes of rows with penalties and with a grammar, that are longer than a small pass."""
    monkeypatch.setattr("ep_moe.engines.transformers.decoding.passes.LEAST_CAPACITY", 4)
    group = EPGroup.single("cpu")
    model = from_pretrained(SHIPPED_MODEL, group, dtype=torch.float32)
    [text] = StructuredOutputs(regex="(And|Or) [a-z]{2,5} [a-z]+").grammars()
    starts = (*starts_of(0), RowStart(row=3, prompt=(65, 66), max_new_tokens=40, sampling=Sampling(grammar=text)))
    shapes = (pass_shape(4, CAPACITY, sampled=True, adjusted=True),)
    nothing = ((),)
    plans = [
        RowsPlan(ended=nothing, starts=(starts,), chunks=(((0, 2), (1, 5), (2, 4), (3, 2)),)),
        RowsPlan(ended=nothing, starts=nothing, chunks=(((0, 3), (1, 4), (2, 9)),)),
        RowsPlan(ended=nothing, starts=nothing, passes=5, shapes=shapes),
        RowsPlan(ended=((1,),), starts=nothing, passes=6, shapes=shapes),
        RowsPlan(ended=nothing, starts=nothing, passes=6, shapes=shapes),
    ]
    made = []
    for interrupted in (False, True):
        tokenizer = load_tokenizer(EngineConfig())
        grammars = RowGrammars(tokenizer, model.config.vocab_size, ())
        grammars._compile(text)  # else the first plans depend on how long a thread takes
        rows = RowDecoder(model, num_rows=4, num_positions=CAPACITY, end_ids=(), graphs=False, grammars=grammars)
        made.append([])
        for number, plan in enumerate(plans):
            if interrupted:
                layers = rows._decoder._layers if plan.passes else model.ep_moe.layers
                assert interrupt(layers, rows, plan, 4 if plan.passes else 1) == ()
                if number:
                    assert interrupt(layers, rows, plan, 1) == ()
            made[-1].append(rows.run(plan).tokens)
    assert made[0] == made[1]
    ended = [[step[row] for plan in made[0][2:] for step in plan] for row in (1, 3)]
    assert ended[0][4] >= 0 > max(ended[0][5:])
    text = bytes([made[0][0][0][3], *(token for token in ended[1] if token >= 0)]).decode()
    assert re.match("(And|Or) [a-z]{2,5} [a-z]+", text)


def test_long_rows_keep_what_they_have() -> None:
    """A row with more positions than the smallest passes have."""
    model = from_pretrained(SHIPPED_MODEL, EPGroup.single("cpu"), dtype=torch.float32)
    text = b"And it came to pass in those days that there went out a decree. " * 5
    start = RowStart(row=0, prompt=tuple(text), max_new_tokens=40, sampling=Sampling(logprobs=0))
    first = RowsPlan(ended=((),), starts=((start,),), chunks=(((0, len(text)),),))
    passes_ = RowsPlan(ended=((),), starts=((),), passes=8, shapes=(pass_shape(1, 512, True, True),))
    made = []
    for regroups in (False, True):
        rows = RowDecoder(model, num_rows=2, num_positions=512, end_ids=(), graphs=False)
        rows.run(first)
        for _ in range(4 if regroups else 0):
            assert rows.regroup() == ()
        made.append([each.value for each in rows.run(passes_).logprobs[0]])
    assert made[0] == made[1]


def test_a_window_that_was_overwritten_ends_its_row() -> None:
    """Windows of 6 positions: a row that has not filled them goes on, the other one starts again."""
    model = sharded_model("gpt_oss_windows")
    prompts = ((5, 6), (9, 8, 7, 6, 5, 4, 3, 9))
    starts = tuple(RowStart(row=row, prompt=prompt, max_new_tokens=20) for row, prompt in enumerate(prompts))
    first = RowsPlan(
        ended=((),), starts=(starts,), chunks=(tuple((row, len(each)) for row, each in enumerate(prompts)),)
    )
    passes_ = RowsPlan(ended=((),), starts=((),), passes=4, shapes=(pass_shape(2, CAPACITY, False),))
    made = []
    for _ in range(2):
        rows = RowDecoder(model, num_rows=2, num_positions=CAPACITY, end_ids=(), graphs=False)
        made.append(rows.run(first).tokens)
        if len(made) == 2:
            assert interrupt(rows._decoder._layers, rows, passes_, 3) == (1,)
            again = RowStart(row=1, prompt=(*prompts[1], made[1][0][1]), max_new_tokens=19)
            made[1] += [[step[0], NONE] for step in rows.run(passes_).tokens]
            new = rows.run(RowsPlan(ended=((),), starts=((again,),), chunks=(((1, 9),),))).tokens
            assert new == [[made[0][1][1]]]
        else:
            made[0] += rows.run(passes_).tokens
    assert [step[0] for step in made[0]] == [step[0] for step in made[1]]


def _graphs(model: Any) -> bool:
    """For a model that has a transport: without one it raises."""
    return model.ep_moe.transport is not None


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_were_made_before_the_experts(name: str, tmp_path: Path) -> None:
    """On a rank that joins later, beside those of a rank that has all experts from the start."""
    make_model(**MODELS[name]).save_pretrained(tmp_path)
    prompts = ((5, 6, 7), (9, 8, 7, 6, 5))
    starts = tuple(RowStart(row=row, prompt=prompt, max_new_tokens=8) for row, prompt in enumerate(prompts))
    first = RowsPlan(ended=((),), starts=(starts,), chunks=(((0, 3), (1, 5)),))
    passes_ = RowsPlan(ended=((),), starts=((),), passes=6, shapes=(pass_shape(2, CAPACITY, False),))
    made, captures = [], []
    for later in (False, True):
        group = EPGroup.single("cpu")
        group.standby = later
        model = from_pretrained(tmp_path, group, dtype=torch.float32)
        rehearsals, before = [Rehearsal(1, 2), Rehearsal(0, 1)] if later else [], 0
        with captured_on_a_cpu() as counts:
            rows = RowDecoder(
                model,
                num_rows=2,
                num_positions=CAPACITY,
                end_ids=(),
                graphs=functools.partial(_graphs, model),
                rehearsals=rehearsals,
            )
            if later:
                before = len(counts)
                model.ep_moe.regroup(EPGroup.single("cpu"))
                assert rows.regroup() == ()
            made.append([rows.run(first).tokens, *(rows.run(passes_).tokens for _ in range(2))])
        captures.append(len(counts) - before)
        assert int(model.ep_moe.expert_load.sum()) > 0
    assert made[0] == made[1]
    assert captures[0] == captures[1] > 0  # none of a rehearsal counts: ranks would run different numbers of passes
