"""Experts move while a layer runs: all that a position owns, in every format, and nothing if something is wrong."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lost import be_lost, record, recorded

from ep_moe.app.start import SHIPPED_MODEL
from ep_moe.balance import Rebalancer, RebalanceState, RebalanceStatus
from ep_moe.balance.pieces import pieces_of
from ep_moe.config import ActivationConfig, ActivationKind, GroupConfig, MoEConfig, TransportConfig
from ep_moe.engines.transformers import GenerationOptions, Session, from_pretrained, generate
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.launch import RankFailedError, launch
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement
from ep_moe.quant import SCHEMES, get_scheme
from ep_moe.routing import PositionTable
from ep_moe.testing import assert_same_bits
from ep_moe.testing.random_experts import RandomExperts
from ep_moe.transport import create_transport
from ep_moe.weights import ExpertWeights, PerExpert

HIDDEN, INTERMEDIATE, EXPERTS = 64, 128, 6
STARTS = (0, 4, 8)
NOW = Placement((0, 1, 2, 3, 4, 5, 0, 1), STARTS)
TARGET = Placement((5, 4, 3, 0, 2, 1, 4, 0), STARTS, (6,))  # every position changes, others have copies, one is idle
FORMATS = [*SCHEMES, "int4_w4a16_g32_zp_f16", "fp8_block_64x32"]


def weights_at(placement: Placement, rank: int, scheme: str) -> ExpertWeights:
    """Experts with everything that one can own, different for each."""
    config = MoEConfig(hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=EXPERTS, scheme=scheme)
    experts = placement.local_experts(rank)
    made = RandomExperts(config, torch.float32, torch.device("cpu"), bias=True, seed=3).local(
        experts, get_scheme(scheme)
    )
    numbers = torch.tensor(experts, dtype=torch.float32)
    names = ("alpha", "beta", "limit", "w13_output_scale", "w13_gate_output_scale", "w2_output_scale")
    own = PerExpert(**{name: 1 + (numbers + place) / 8 for place, name in enumerate(names)})
    order = torch.stack([torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(each)) for each in experts])
    plain = not get_scheme(scheme).payload.quantized  # tokens that are quantized in groups keep their order
    found = dataclasses.replace(made, per_expert=own, w13_order=order if plain else None)
    if made.w2_input_scale is not None:
        found = dataclasses.replace(found, w2_input_scale=made.w2_input_scale * (1 + numbers / 16))
    return found


def layer_at(group: EPGroup, placement: Placement, scheme: str, transport: Any = None) -> ExpertParallelMoE:
    config = MoEConfig(
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=EXPERTS,
        activation=ActivationConfig(kind=ActivationKind.SWIGLU, alpha=1.702, beta=1.0, limit=2.0),
        scheme=scheme,
    )
    sizes = TransportConfig(hidden=HIDDEN, max_tokens_per_rank=16, dtype=torch.float32)
    table = PositionTable(placement, group.rank, counted=True, changing=True)
    transport = transport or create_transport("auto", group, placement, sizes)
    return ExpertParallelMoE(
        config, weights_at(placement, group.rank, scheme), transport, placement=table, experts="torch"
    )


def outputs(layer: ExpertParallelMoE, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(12, HIDDEN, generator=generator)
    ids = torch.arange(24).reshape(12, 2) % EXPERTS
    return layer.forward_routed(x, ids, torch.rand(12, 2, generator=generator))


def move_formats(group: EPGroup) -> None:
    for index, scheme in enumerate(FORMATS):
        layer = layer_at(group, NOW, scheme)
        before = outputs(layer, group.rank)
        few = None if index % 2 else 10 * sum(t[0].numel() * t.element_size() for t in layer.weights.tensors()) // 4
        rebalancer = Rebalancer([layer], group, max_bytes=few, mapped=index % 3 == 0)
        tag, addresses = layer.tag.words, [each.data_ptr() for each in layer.weights.tensors()]
        rebalancer.request([TARGET])
        passes = 0
        while rebalancer.is_active:
            rebalancer.step()
            passes += 1
            if passes % 4 == 0 and index % 3 == 0:  # a change may be in each fourth step
                torch.testing.assert_close(outputs(layer, group.rank), before, rtol=1e-5, atol=1e-5)
        expected = layer_at(group, TARGET, scheme, layer.transport)
        assert layer.placement == TARGET
        assert layer.tag.words == tag == dataclasses.replace(expected.tag, number=0).words
        assert [each.data_ptr() for each in layer.weights.tensors()] == addresses
        for name, tensor in expected.weights.named_tensors.items():
            assert_same_bits(layer.weights.named_tensors[name], tensor, f"{scheme} {name}")
        assert_same_bits(outputs(layer, group.rank), outputs(expected, group.rank), scheme)
        status = rebalancer.status
        assert (status.state, status.rebalances, status.failures) == (RebalanceState.IDLE, 1, 0)
        assert status.moved_experts >= 8
        assert status.moved_bytes > 0
        assert passes == status.steps
        rebalancer.destroy()
        layer.transport.destroy()


def test_all_that_a_position_owns_moves_in_every_format() -> None:
    launch(move_formats, num_ranks=2, device="cpu")


def test_pieces_leave_every_expert_somewhere() -> None:
    chance = random.Random(1)
    for _ in range(300):
        ranks, experts = chance.randint(1, 4), chance.randint(1, 9)
        size = experts + chance.randint(0, 6)
        starts = tuple(sorted([0, size, *(chance.randint(0, size) for _ in range(ranks - 1))]))
        copies = [[*range(experts), *chance.choices(range(experts), k=size - experts)] for _ in range(2)]
        now, target = (Placement(tuple(chance.sample(each, size)), starts) for each in copies)
        repeated = [p for p, each in enumerate(target.physical_to_logical) if each in target.physical_to_logical[:p]]
        idle = chance.sample(repeated, chance.randint(0, len(repeated)))
        target = Placement(target.physical_to_logical, starts, tuple(sorted(idle)))
        most, sends_too = chance.randint(2, 4), chance.random() < 0.5
        rank_of = [rank for rank in range(ranks) for _ in now.local_experts(rank)]
        for piece in pieces_of(5, now, target, most, sends_too=sends_too):
            received, sent = [rank_of[p] for p in piece.positions], [rank_of[p] for p in piece.sources]
            assert max(map(received.count, received), default=0) <= most
            assert not sends_too or max(map(sent.count, sent), default=0) <= most
            now = piece.after(now)  # refuses a placement that drops an expert
        assert now == target
    now, starts = Placement((2, 6, 5, 3, 0, 6, 1, 1, 4), (0, 3, 6, 9)), (0, 3, 6, 9)
    for piece in pieces_of(0, now, Placement((2, 6, 2, 0, 1, 0, 5, 3, 4), starts), 1, sends_too=True):
        assert max(map([position // 3 for position in piece.sources].count, range(3))) <= 1  # after a change undone
        now = piece.after(now)
    with pytest.raises(ValueError, match="layer 0 has to change two positions of a rank at once"):
        pieces_of(0, Placement((0, 1), (0, 2)), Placement((1, 0), (0, 2)), 1, sends_too=False)


def refuse(group: EPGroup) -> list[str]:
    layer, errors = layer_at(group, NOW, "none"), []

    def refused(call: Any, *arguments: Any, **options: Any) -> None:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - compared by the caller
            call(*arguments, **options)
        errors.append(str(caught.value))

    refused(Rebalancer, [layer], group, max_bytes=1000, mapped=False)
    refused(Rebalancer, [layer], group, every=5 + group.rank)
    refused(Rebalancer, [layer], group, min_gain=1.5 if group.rank else 0.1)
    rebalancer = Rebalancer([layer], group)
    refused(rebalancer.request, [Placement(NOW.physical_to_logical[:6] * 1, (0, 3, 6))])
    refused(rebalancer.request, [TARGET, TARGET])
    refused(rebalancer.request, [TARGET if group.rank else NOW])
    other = PositionTable(NOW, group.rank)
    fixed = ExpertParallelMoE(layer.config, layer.weights, layer.transport, placement=other, experts="torch")
    refused(Rebalancer, [fixed], group)
    for _ in range(3):
        rebalancer.step()
    assert layer.placement == NOW
    rebalancer.request([TARGET])
    rebalancer.step()
    refused(rebalancer.request, [NOW])
    rebalancer.finish()
    assert layer.placement == TARGET
    rebalancer.destroy()
    with pytest.raises(RuntimeError, match="is destroyed"):
        rebalancer.step()
    return errors


def test_bad_input_is_an_error_on_every_rank() -> None:
    first, second = launch(refuse, num_ranks=2, device="cpu")
    assert "max_bytes (1000) is below" in first[0]
    assert "rank 0 and rank 1 have other layers, placements or arguments" in first[1]
    assert first[2] == "rank 1 raised ValueError: min_gain (1.5) is not in [0, 1)"
    assert "placements[0] has num_experts and starts (6, (0, 3, 6))" in first[3]
    assert "there are 2 placements for 1 layers" in first[4]
    assert "rank 0 and rank 1 have other layers" in first[5]
    assert "its placement is fixed" in first[6]
    assert "a rebalance is under way" in first[7]
    assert second[1:2] + second[3:] == first[1:2] + first[3:]


def lose(group: EPGroup, folder: str) -> None:
    layer = layer_at(group, NOW, "none")
    rebalancer = Rebalancer([layer], group)
    rebalancer.request([TARGET])
    rebalancer.step()
    if group.rank:
        be_lost("SIGKILL")
    try:
        rebalancer.finish()
    except PeerLostError as error:
        record(Path(folder), group.rank, (error.ranks, layer.placement == NOW, rebalancer.status.state.value))
        raise


def test_a_lost_rank_leaves_the_old_placement(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="rank 1"):
        launch(lose, str(tmp_path), num_ranks=2, device="cpu", config=GroupConfig(timeout_secs=5.0))
    assert recorded(tmp_path) == {0: ((1,), True, "failed")}


def decode(group: EPGroup, every: int | None, mapped: bool) -> tuple[torch.Tensor, RebalanceStatus, bool]:
    model: Any = from_pretrained(SHIPPED_MODEL, group, dtype=torch.float32)
    session: Session = model.ep_moe
    linear = session.placements
    if every is not None:
        session.rebalancer = Rebalancer(session.layers, group, every=every, min_gain=0.0, mapped=mapped)
    ids = torch.randint(1, 255, (2, 9), generator=torch.Generator().manual_seed(group.rank))
    made = generate(model, ids, GenerationOptions(max_new_tokens=24))
    status = RebalanceStatus() if session.rebalancer is None else session.rebalancer.status
    moved = session.placements != linear
    session.destroy()
    return made, status, moved


def decode_twice(group: EPGroup) -> list[Any]:
    return [decode(group, every, mapped) for every, mapped in ((None, False), (3, False))]


def test_tokens_are_equal_while_experts_move() -> None:
    for plain, *others in launch(decode_twice, num_ranks=2, device="cpu"):
        assert not plain[2]
        for tokens, status, moved in others:
            assert torch.equal(tokens, plain[0])
            assert moved
            assert status.moved_experts > 0
            assert status.failures == 0
            assert status.balancedness_after > status.balancedness_before
