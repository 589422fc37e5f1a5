"""Routing and the mapping of ids: kernels against torch, and against float64."""

import math
from typing import Any

import pytest
import torch
from helpers.sampling import thinned

from ep_moe.config import RoutingConfig, RoutingMethod
from ep_moe.placement import Placement
from ep_moe.routing import BIASED_METHODS, reference, triton
from ep_moe.routing.base import Options
from ep_moe.routing.positions import PositionTable
from ep_moe.testing import poisoned_memory
from interpreted.common import DEVICE, generator, strided

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities, in the interpreter
NEAR = 2.0**-21  # 4 ulp: scores closer than this, relative to the larger, may change places
ROUNDED = 1e-6  # relative error of a weight
PRECISE = 2e-6  # the same against float64
SIZES = {  # experts: (K, groups, chosen groups)
    8: (4, 4, 2),
    60: (6, 5, 2),
    128: (8, 8, 4),
    256: (8, 8, 4),
    384: (6, 12, 5),
    512: (1, 16, 3),
    1024: (22, 8, 4),
}
METHODS = {
    "0_default": 0,
    "1_renormalize": 1,
    "2_groups": 2,
    "2_no_norm": 2,
    "2_softmax_by_best": 2,
    "3_llama4": 3,
    "4_renormalize_naive": 4,
    "5_topk": 5,
    "6_sigmoid_renorm": 6,
    "6_no_norm": 6,
    "7_softmax_minimax2": 7,
    "7_minimax2": 7,
    "8_sigmoid": 8,
    "9_topk_sigmoid": 9,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def configured(name: str, num_experts: int) -> RoutingConfig:
    """The method of this name, for this number of experts."""
    topk, groups, topk_group = SIZES[num_experts]
    numbers: dict[str, Any] = {"num_topk": topk}
    if METHODS[name] == 2:
        numbers |= {"num_group": groups, "topk_group": topk_group, "routed_scaling_factor": 2.5}
    if METHODS[name] == 7:
        numbers["routed_scaling_factor"] = 1.5
    if "softmax" in name:
        numbers["scoring"] = "softmax"
    if name.endswith("by_best"):
        numbers["group_best"] = 1
    if name.endswith("no_norm"):
        numbers["norm_topk_prob"] = False
    return RoutingConfig(method=RoutingMethod(METHODS[name]), **numbers)


def nearest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """For each row [T], the smallest relative difference of unequal scores among the `count` + 1 largest."""
    ranked = scores.sort(dim=1, descending=True).values[:, : count + 1]
    gaps = ranked[:, :-1] - ranked[:, 1:]
    relative = (gaps / ranked[:, :-1].abs()).masked_fill(gaps == 0, 1.0)
    return torch.cat([relative, torch.ones(len(scores), 1)], 1).amin(1)


def largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Columns of the largest scores, the lower ones of equal scores first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def exact(
    logits: torch.Tensor, config: RoutingConfig, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In float64: ids, weights, and for which rows [T] no two scores are as close as NEAR."""
    logits, method = logits.double(), config.method
    sigmoids, softmaxes = 1 / (1 + (-logits).exp()), (logits - logits.logsumexp(1, keepdim=True)).exp()
    choice = logits
    if method in BIASED_METHODS:
        choice = softmaxes if config.scoring == "softmax" else sigmoids
        choice = choice if bias is None else choice + bias.double()
    allowed, clear = choice, torch.ones(len(logits), dtype=torch.bool)
    if config.num_group > 1:
        grouped = choice.unflatten(1, (config.num_group, -1))
        sums = grouped.topk(min(config.group_best, grouped.shape[2]), dim=2).values.sum(2)
        clear = nearest(sums, config.topk_group) > NEAR
        out = torch.ones_like(sums, dtype=torch.bool).scatter_(1, largest(sums, config.topk_group), value=False)
        allowed = grouped.masked_fill(out.unsqueeze(2), -math.inf).flatten(1)
    ids = largest(allowed, config.num_topk)
    softmax = method.value in (0, 1, 4) or config.scoring == "softmax"
    scores = {RoutingMethod.TOPK: logits}.get(method, softmaxes if softmax else sigmoids)
    weights = scores.gather(1, ids)
    if method.value in (1, 2, 4, 6, 7) and config.norm_topk_prob:
        weights = weights / weights.sum(1, keepdim=True)
    return ids, weights * config.routed_scaling_factor, clear & (nearest(allowed, config.num_topk) > NEAR)


def redundant(num_experts: int) -> Placement:
    """Three ranks, every expert once and every fifth twice, in an order of their own."""
    order = [*range(num_experts - 1, -1, -1), *range(0, num_experts, 5)]
    return Placement(tuple(order), (0, 1, len(order) // 2, len(order)))


def compare(
    logits: torch.Tensor,
    config: RoutingConfig,
    bias: torch.Tensor | None,
    placement: Placement | None,
    rows: torch.Tensor,
) -> None:
    """Compare the kernel with torch, the ids in these rows [T] and the weights there."""
    kept = logits.clone()
    with poisoned_memory():
        found = triton.route(logits, Options(config, bias, placement=placement))
    wanted = reference.route(logits, Options(config, bias, placement=placement))
    assert torch.equal(logits.nan_to_num(), kept.nan_to_num())
    assert (found.topk_ids.dtype, found.topk_ids.shape) == (torch.int32, (len(logits), config.num_topk))
    rows = rows.to(logits.device)
    assert torch.equal(found.topk_ids[rows], wanted.topk_ids[rows])
    near = {"rtol": ROUNDED, "atol": 1e-30, "equal_nan": True}
    torch.testing.assert_close(found.topk_weights[rows], wanted.topk_weights[rows], **near)


@pytest.mark.parametrize(("name", "num_experts"), thinned(METHODS, SIZES))
def test_random_logits(name: str, num_experts: int) -> None:
    """All dtypes, strides and placements: which ones, depends on the case."""
    case = [*METHODS].index(name) + [*SIZES].index(num_experts)
    config, random = configured(name, num_experts), generator(f"{name} {num_experts}")
    logits = (torch.randn(7, num_experts, generator=random) * 2).to(DTYPES[case % 4])
    bias = None
    if config.method in BIASED_METHODS and case % 3:
        bias = (torch.randn(num_experts, generator=random) * 0.3).to(DTYPES[case % 5 % 4])
    ids, weights, clear = exact(logits, config, bias)
    assert int(clear.sum()) >= 4
    layouts = (logits, strided(logits, gap=3), logits.t().contiguous().t(), strided(logits, gap=16))
    given = layouts[case % 4].to(DEVICE)
    placement = (None, Placement.round_robin(num_experts, 3), redundant(num_experts))[case % 3]
    bias = None if bias is None else bias.to(DEVICE)
    compare(given, config, bias, placement, clear)
    found = triton.route(given, Options(config, bias))
    assert torch.equal(found.topk_ids.cpu()[clear].long(), ids[clear])
    torch.testing.assert_close(found.topk_weights.cpu()[clear].double(), weights[clear], rtol=PRECISE, atol=1e-30)


@pytest.mark.parametrize("num_experts", [8, 60])
@pytest.mark.parametrize("name", METHODS)
def test_ties_go_to_the_lower_expert(name: str, num_experts: int) -> None:
    config, random = configured(name, num_experts), generator(f"ties {name} {num_experts}")
    logits = torch.randint(0, 4, (6, num_experts), generator=random).bfloat16()
    logits[0], logits[1, ::2], logits[1, 1::2] = 3.0, 0.0, -0.0
    bias = torch.full((num_experts,), -0.75) if config.method in BIASED_METHODS else None
    ids, _, clear = exact(logits, config, bias)
    assert bool(clear.all())
    bias = None if bias is None else bias.to(DEVICE)
    compare(logits.to(DEVICE), config, bias, None, clear)
    assert torch.equal(triton.route(logits.to(DEVICE), Options(config, bias)).topk_ids.cpu().long(), ids)


@pytest.mark.parametrize("num_experts", [8, 60])
@pytest.mark.parametrize("name", METHODS)
def test_nan_and_infinity(name: str, num_experts: int) -> None:
    """Among them groups whose sum is inf - inf, and rows of more infinities than are chosen."""
    config, random = configured(name, num_experts), generator(f"special {name} {num_experts}")
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, -math.nan, 100.0, -100.0, 1e-45])
    logits = values[torch.randint(0, len(values), (8, num_experts), generator=random)]
    logits[0], logits[1], logits[2, 1:], logits[3] = -math.inf, math.nan, 0.5, -3e38
    logits[4:6] = logits[4:6].nan_to_num(0.0, math.inf, -math.inf)
    everything = torch.ones(8, dtype=torch.bool)
    compare(logits.to(DEVICE), config, None, None, everything)
    if config.method in BIASED_METHODS:
        finite = torch.randn(8, num_experts, generator=random).to(DEVICE)
        bias = values[:6][torch.randint(0, 6, (num_experts,), generator=random)].to(DEVICE)
        compare(finite.round(), config, bias, None, everything)
        bias[num_experts // 2] = math.nan
        compare(finite.round(), config, bias, None, everything)
        assert bool(triton.route(finite, Options(config, bias)).topk_weights.isnan().all())


@pytest.mark.parametrize(
    ("num_experts", "numbers"),
    [
        (1, {"num_topk": 1}),
        (12, {"num_topk": 3, "num_group": 12, "topk_group": 6}),
        (12, {"num_topk": 6, "num_group": 4, "topk_group": 2}),
        (12, {"num_topk": 12, "num_group": 4, "topk_group": 4}),
        (13, {"num_topk": 13}),
        (999, {"num_topk": 22, "num_group": 3, "topk_group": 2}),
        (1024, {"num_topk": 2, "num_group": 512, "topk_group": 1}),
    ],
    ids=["one_expert", "groups_of_one", "all_of_the_groups", "all_groups", "all_experts", "three_groups", "pairs"],
)
def test_sizes_of_groups(num_experts: int, numbers: dict[str, Any]) -> None:
    config = RoutingConfig(method=RoutingMethod.DEEPSEEK_V3, **numbers)
    random = generator(f"{numbers}")
    logits, bias = torch.randn(5, num_experts, generator=random), torch.randn(num_experts, generator=random)
    ids, _, clear = exact(logits, config, bias)
    assert int(clear.sum()) >= 2
    compare(logits.to(DEVICE), config, bias.to(DEVICE), redundant(num_experts), clear)
    found = triton.route(logits.to(DEVICE), Options(config, bias.to(DEVICE))).topk_ids.cpu()
    assert torch.equal(found[clear].long(), ids[clear])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["0_default", "2_groups", "4_renormalize_naive", "5_topk"])
def test_rounded_weights(name: str, dtype: torch.dtype) -> None:
    config = configured(name, 60)
    logits = torch.randn(9, 60, generator=generator(f"rounded {name}")).to(DEVICE) * 3
    for route in (triton.route, reference.route):
        exact_weights = route(logits, Options(config)).topk_weights
        found = route(logits, Options(config, weights_dtype=dtype)).topk_weights
        assert found.dtype == torch.float32
        assert torch.equal(found, exact_weights.to(dtype).float())
        assert not torch.equal(found, exact_weights)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5])
def test_replay_and_rows_of_the_tokens_alone(num_tokens: int) -> None:
    """The program of the third row of three is there for a power of two, and must write nothing."""
    config, placement = configured("4_renormalize_naive", 60), redundant(60)
    logits = torch.randn(num_tokens, 60, generator=generator("replay")).to(DEVICE)
    empty = torch.full((num_tokens + 3, config.num_topk), -5, dtype=torch.int16, device=DEVICE)
    for replay in (empty, empty.t().contiguous().t()):
        found = triton.route(logits, Options(config, replay_out=replay, placement=placement))
        wanted = reference.route(logits, Options(config))
        assert torch.equal(replay[:num_tokens].int(), wanted.topk_ids)
        assert torch.equal(found.topk_ids, placement.to_physical(wanted.topk_ids))
        assert bool((replay[num_tokens:] == -5).all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "placement",
    [Placement.linear(60, 4), Placement.round_robin(60, 7), redundant(60)],
    ids=["linear", "round_robin", "redundant"],
)
def test_to_physical(placement: Placement, dtype: torch.dtype) -> None:
    """Good ids, -1, and bad ids that the transport will refuse."""
    ids = torch.randint(-1, 60, (50, 6), generator=generator("ids")).to(dtype)
    ids[::7, 2] = torch.tensor([-2, 60, 71, -(2**31), 2**31 - 100, -1, 0, 59]).to(dtype)
    if dtype == torch.int64:
        ids[0, 0], ids[0, 1] = 2**40, -(2**40)
    for given in (ids, strided(ids, gap=3), ids.t().contiguous().t(), ids[:1], ids[:0]):
        with poisoned_memory():
            found = triton.to_physical(given.to(DEVICE), placement)
        wanted = placement.to_physical(given)
        assert found.dtype == torch.int32
        assert torch.equal(found.cpu(), wanted)


def spread(num_experts: int, num_ranks: int) -> Placement:
    """Every expert once, expert 0 on all ranks, and every third on two ranks more."""
    owned: list[list[int]] = [[0] for _ in range(num_ranks)]
    for expert in range(1, num_experts):
        for step in range(3 if expert % 3 == 0 else 1):
            owned[(expert + step * 2) % num_ranks].append(expert)
    ends = [sum(map(len, owned[:rank])) for rank in range(num_ranks + 1)]
    return Placement(tuple(expert for experts in owned for expert in experts), tuple(ends))


def tables(placement: Placement, rank: int, node: tuple[int, int] | None, **options: bool) -> list[PositionTable]:
    """Equal tables for the kernel and for torch."""
    return [PositionTable(placement, rank, node=node, device=device, **options) for device in (DEVICE, "cpu")]


@pytest.mark.parametrize("counted", [False, True], ids=["uncounted", "counted"])
@pytest.mark.parametrize("node", [None, (1, 3)], ids=["one_node", "nodes"])
def test_copies_and_counts(node: tuple[int, int] | None, counted: bool) -> None:
    """Kernel and torch choose the same copies, and count the same tokens: no padding, no -1, no bad ids."""
    random = generator("copies")
    ids = torch.randint(-1, 60, (50, 6), generator=random)
    ids[::7, 2] = torch.tensor([-2, 60, 71, -(2**31), 2**40, -1, 0, 59])
    config = configured("4_renormalize_naive", 60)
    for placement in (spread(60, 5), Placement.linear(60, 5), Placement.round_robin(60, 5)):
        found, wanted = tables(placement, 2, node, counted=counted)
        limit = torch.tensor([31], dtype=torch.int32)
        for num_tokens in (None, limit):
            on_device = None if num_tokens is None else num_tokens.to(DEVICE)
            for dtype in (torch.int32, torch.int64):
                given = ids.clamp(-(2**31), 2**31 - 1).to(dtype) if dtype == torch.int32 else ids
                with poisoned_memory():
                    physical = triton.to_physical(given.to(DEVICE), found, on_device)
                assert torch.equal(physical.cpu(), wanted.to_physical(given, num_tokens))
            logits = torch.randn(40, 60, generator=random)
            routed = triton.route(logits.to(DEVICE), Options(config, placement=found, num_tokens=on_device))
            options = Options(config, placement=wanted, num_tokens=num_tokens)
            assert torch.equal(routed.topk_ids.cpu(), reference.route(logits, options).topk_ids)
        assert torch.equal(found.words.cpu(), wanted.words)
        assert bool(wanted.counts.any()) == counted


def test_counts_of_logical_experts() -> None:
    [table, _] = tables(spread(12, 4), 1, None, counted=True)
    ids = torch.tensor([[0, 3], [3, -1], [11, 12], [5, 5]], dtype=torch.int32, device=DEVICE)
    triton.to_physical(ids, table)
    triton.to_physical(ids, table, torch.tensor([2], dtype=torch.int32, device=DEVICE))
    assert table.counts.tolist() == [2, 0, 0, 4, 0, 2, 0, 0, 0, 0, 0, 1]
