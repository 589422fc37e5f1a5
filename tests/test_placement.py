"""Placements in worked examples, and their maps against plain loops."""

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_moe.config import MoEConfig, RoutingConfig, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import PLACEMENTS, Placement, create_placement
from ep_moe.quant import StoredMatrix, get_scheme, quantize, quantize_weight
from ep_moe.transport import create_transport
from ep_moe.weights import ExpertWeights

REDUNDANT = Placement((0, 1, 2, 0, 2), (0, 2, 5))  # 3 logical experts in 5 positions
REVERSED = Placement((3, 2, 1, 0), (0, 1, 1, 4))
SIZES = [(1, 1), (1, 3), (3, 4), (8, 4), (10, 4), (11, 2), (256, 8), (7, 7)]


def every_placement() -> list[Placement]:
    built = [create_placement(name, e, r) for name in PLACEMENTS for e, r in SIZES]
    return [*built, REDUNDANT, REVERSED]


@pytest.mark.parametrize(
    ("name", "num_experts", "num_ranks", "owned"),
    [
        ("linear", 10, 4, [(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)]),
        ("linear", 8, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("linear", 3, 4, [(0,), (1,), (2,), ()]),
        ("linear", 1, 3, [(0,), (), ()]),
        ("round_robin", 10, 4, [(0, 4, 8), (1, 5, 9), (2, 6), (3, 7)]),
        ("round_robin", 8, 2, [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("round_robin", 3, 4, [(0,), (1,), (2,), ()]),
        ("round_robin", 5, 1, [(0, 1, 2, 3, 4)]),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_worked_ownership(name: str, num_experts: int, num_ranks: int, owned: list[tuple[int, ...]]) -> None:
    placement = create_placement(name, num_experts, num_ranks)
    assert [placement.local_experts(rank) for rank in range(num_ranks)] == owned
    assert [placement.num_local_experts(rank) for rank in range(num_ranks)] == [len(experts) for experts in owned]
    assert (placement.num_experts, placement.num_physical, placement.num_ranks) == (num_experts, num_experts, num_ranks)
    offset = 0
    for rank, experts in enumerate(owned):
        assert placement.local_expert_offset(rank) == offset
        offset += len(experts)


def test_worked_maps() -> None:
    placement = Placement.round_robin(5, 2)
    assert placement == Placement((0, 2, 4, 1, 3), (0, 3, 5))
    assert placement.expert_map(0).tolist() == [0, -1, 1, -1, 2]
    assert placement.expert_map(1).tolist() == [-1, 0, -1, 1, -1]
    assert placement.logical_to_physical().tolist() == [0, 3, 1, 4, 2]
    assert placement.expert_map(0).dtype == torch.int32
    assert placement.logical_to_physical().dtype == torch.int64


def test_worked_redundant_copies() -> None:
    """A logical expert with several positions is found in the first, on each rank and over all."""
    assert (REDUNDANT.num_experts, REDUNDANT.num_physical) == (3, 5)
    assert REDUNDANT.logical_to_physical().tolist() == [0, 1, 2]
    assert REDUNDANT.expert_map(0).tolist() == [0, 1, -1]
    assert REDUNDANT.expert_map(1).tolist() == [1, -1, 0]


@pytest.mark.parametrize("placement", every_placement(), ids=lambda p: f"P{p.num_physical}R{p.num_ranks}")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_to_physical_names_a_position_of_the_expert(placement: Placement, dtype: torch.dtype) -> None:
    experts = placement.num_experts
    ids = torch.arange(-1, experts, dtype=dtype).flip(0).repeat(2).reshape(2, experts + 1)
    kept = ids.clone()
    physical = placement.to_physical(ids)
    assert torch.equal(ids, kept)
    assert (physical.shape, physical.dtype) == (ids.shape, torch.int32)
    for logical, position in zip(ids.reshape(-1).tolist(), physical.reshape(-1).tolist(), strict=True):
        expected = -1 if logical == -1 else placement.physical_to_logical.index(logical)
        assert position == expected
    owners = [
        sum(placement.expert_map(rank)[logical] >= 0 for rank in range(placement.num_ranks))
        for logical in range(experts)
    ]
    holders = [
        sum(logical in placement.local_experts(rank) for rank in range(placement.num_ranks))
        for logical in range(experts)
    ]
    assert owners == holders
    assert min(holders) >= 1


@pytest.mark.parametrize("placement", every_placement(), ids=lambda p: f"P{p.num_physical}R{p.num_ranks}")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_to_physical_keeps_invalid_ids_invalid(placement: Placement, dtype: torch.dtype) -> None:
    """No invalid id becomes a position or -1, and small invalid ids can be recovered from their image."""
    experts, positions = placement.num_experts, placement.num_physical
    moderate = [-2, -3, -experts - 1, experts, experts + 1, positions + 7, 2**20]
    extreme = [torch.iinfo(dtype).min, torch.iinfo(dtype).max, 2**31 - 1, -(2**31)]
    if dtype == torch.int64:
        extreme += [2**32, 2**32 + 1, -(2**32) - 1, 2**63 - positions]
    physical = placement.to_physical(torch.tensor([moderate + extreme], dtype=dtype))[0].tolist()
    assert all(position < -1 or position >= positions for position in physical)
    recovered = [got if got < 0 else got - (positions - experts) for got in physical[: len(moderate)]]
    assert recovered == moderate


def test_identity_returns_its_argument() -> None:
    ids = torch.tensor([[0, 3], [-1, 9]], dtype=torch.int32)
    assert Placement.linear(4, 2).to_physical(ids) is ids
    assert Placement.round_robin(4, 1).to_physical(ids) is ids


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_to_physical_in_a_cuda_graph(dtype: torch.dtype) -> None:
    placement = Placement((4, 2, 0, 1, 3, 2), (0, 3, 6))
    ids = torch.tensor([[[0, 1, 2]], [[4, -1, 7]]], dtype=dtype, device="cuda")
    static = ids[0].clone()
    placement.to_physical(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        physical = placement.to_physical(static)
    static.copy_(ids[1])
    graph.replay()
    assert physical.tolist() == [[0, -1, 8]]
    assert placement.expert_map(1, "cuda").tolist() == placement.expert_map(1).tolist()


def test_zero_tokens() -> None:
    assert Placement.round_robin(5, 2).to_physical(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3)


def test_maps_are_made_once() -> None:
    placement = Placement.round_robin(5, 2)
    assert placement.expert_map(1) is placement.expert_map(1, "cpu")
    assert placement.expert_map(1) is not placement.expert_map(0)
    assert placement.logical_to_physical() is placement.logical_to_physical(torch.device("cpu"))


def test_equality_hash_and_pickle_ignore_the_maps() -> None:
    used, fresh = Placement.round_robin(5, 2), Placement.round_robin(5, 2)
    used.to_physical(torch.tensor([[1]]))
    assert used == fresh
    assert hash(used) == hash(fresh)
    assert pickle.dumps(used) == pickle.dumps(fresh)
    copy = pickle.loads(pickle.dumps(used))
    assert copy == fresh
    assert copy.to_physical(torch.tensor([[1]])).tolist() == [[3]]


@pytest.mark.parametrize(
    ("physical_to_logical", "starts", "words"),
    [
        ((), (0, 0), ["()", "at least 1"]),
        ((0, -2), (0, 2), ["expert -2", "start at 0"]),
        ((0, 1, 3), (0, 3), ["expert 3", "not expert 2"]),
        ((0, 1), (0,), ["(0,)", "at least 2"]),
        ((0, 1), (1, 2), ["(1, 2)", "from 0 to the number of physical experts (2)"]),
        ((0, 1), (0, 1), ["(0, 1)", "number of physical experts (2)"]),
        ((0, 1), (0, 3, 2), ["(0, 3, 2)", "from 3 to 2"]),
    ],
    ids=["empty", "negative", "missing", "no_rank", "late_start", "early_end", "descending"],
)
def test_bad_placements(physical_to_logical: tuple[int, ...], starts: tuple[int, ...], words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        Placement(physical_to_logical, starts)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_bad_sizes(name: str) -> None:
    with pytest.raises(ValueError, match=r"num_experts \(0\) must be at least 1"):
        create_placement(name, 0, 2)
    with pytest.raises(ValueError, match=r"num_ranks \(-1\) must be at least 1"):
        create_placement(name, 4, -1)


def test_bad_names_ranks_and_dtypes() -> None:
    with pytest.raises(ValueError, match=r"placement \('best'\) is not one of linear, round_robin"):
        create_placement("best", 4, 2)
    placement = Placement.linear(4, 2)
    for call in (
        placement.local_expert_offset,
        placement.num_local_experts,
        placement.local_experts,
        placement.expert_map,
    ):
        for rank in (-1, 2):
            with pytest.raises(ValueError, match=rf"rank \({rank}\) is not in \[0, num_ranks \(2\)\)"):
                call(rank)
    with pytest.raises(ValueError, match=r"topk_ids are torch.int16; int32 or int64 needed"):
        placement.to_physical(torch.zeros(1, 1, dtype=torch.int16))


def expert_weights(w13: Any = (4, 32, 16), w2: Any = (4, 16, 16), **more: Any) -> ExpertWeights:
    return ExpertWeights(w13=StoredMatrix(torch.zeros(w13)), w2=StoredMatrix(torch.zeros(w2)), **more)


def transport_of(name: Any = "local", group: Any = None, placement: Any = None, config: Any = None) -> Any:
    group = EPGroup.single("cpu") if group is None else group
    placement = Placement.linear(4, 1) if placement is None else placement
    sizes = TransportConfig(hidden=16, max_tokens_per_rank=4, dtype=torch.float32)
    return create_transport(name, group, placement, sizes if config is None else config)


GROUPED = RoutingConfig(method=2, num_topk=5, num_group=4, topk_group=2)
LAYER: dict[str, int] = {"hidden": 16, "intermediate": 16, "num_experts": 4}
REFUSED: dict[str, Callable[[], Any]] = {
    "num_experts (4.5) is not an integer": lambda: Placement.linear(4.5, 2),  # type: ignore[arg-type]
    "num_ranks (True) is not an integer": lambda: Placement.round_robin(4, True),
    "starts[1] (nan) is not an integer": lambda: Placement((0, 1), (0, float("nan"), 2)),  # type: ignore[arg-type]
    "physical_to_logical (None) is not a list": lambda: Placement(None, (0, 1)),  # type: ignore[arg-type]
    "placement (['linear']) is not a text": lambda: create_placement(["linear"], 4, 2),  # type: ignore[arg-type]
    "rank (0.5) is not an integer": lambda: Placement.linear(4, 2).local_experts(0.5),  # type: ignore[arg-type]
    "num_topk (5) exceeds the 4 experts in topk_group (2) groups": lambda: MoEConfig(
        hidden=16, intermediate=16, num_experts=8, routing=GROUPED
    ),
    "x (torch.float64) must be float32, bfloat16 or float16": lambda: quantize(
        torch.ones(2, 128, dtype=torch.float64), get_scheme("fp8_block")
    ),
    "x is a list ([1.0]), not a tensor": lambda: quantize([1.0], get_scheme("fp8_block")),  # type: ignore[arg-type]
    "weight (torch.float64) must be float32": lambda: quantize_weight(
        torch.ones(2, 128, dtype=torch.float64), get_scheme("fp8_token")
    ),
    "values is a NoneType (None), not a tensor": lambda: StoredMatrix(None),  # type: ignore[arg-type]
    "scale is a float (1.0), not a tensor": lambda: StoredMatrix(torch.ones(1), scale=1.0),  # type: ignore[arg-type]
    "w13 is (32, 16), expected 3 dimensions": lambda: expert_weights(w13=(32, 16)),
    "w13 has 4 experts, w2 has 3": lambda: expert_weights(w2=(3, 16, 16)),
    "scheme ('none') is not a QuantScheme": lambda: expert_weights(scheme="none"),
    "w13_order has columns from 0 to 16, not in [0, hidden (16))": lambda: expert_weights(
        w13_order=torch.arange(17)[1:].expand(4, 16) * torch.arange(4)[:, None].clamp(max=1)
    ),
    "w13_order is (4, 15) torch.int64, expected (4, 16) torch.int64": lambda: expert_weights(
        w13_order=torch.zeros(4, 15, dtype=torch.int64)
    ),
    "group ('all') is no EPGroup": lambda: transport_of(group="all"),
    "placement (4) is no Placement": lambda: transport_of(placement=4),
    "config (16) is no TransportConfig": lambda: transport_of(config=16),
    "transport (['local']) is not one of auto": lambda: transport_of(["local"]),
    "transport (None) is no Transport": lambda: ExpertParallelMoE(MoEConfig(**LAYER), expert_weights(), None),
    "weights (None) is no ExpertWeights": lambda: ExpertParallelMoE(MoEConfig(**LAYER), None, transport_of()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_values_are_refused_where_they_are_made(message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        REFUSED[message]()
