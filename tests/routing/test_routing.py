"""Routing methods against float64 loops and worked examples."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama4.modeling_llama4 import Llama4Router

from ep_moe.config import RoutingConfig, RoutingMethod
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, QuantScheme, TensorFormat, get_scheme, quantize
from ep_moe.routing import BIASED_METHODS, Routing, apply_weights_to_input, route

WORST_ROW = 2e-6  # relative L2 error of a token's weights, float32 against float64
NEAR = 1e-5  # scores closer than this, but not equal, may change places between float32 and float64


def configured(method: int, **numbers: Any) -> RoutingConfig:
    return RoutingConfig(method=RoutingMethod(method), **numbers)


# id: (config, number of experts, bias)
METHODS: dict[str, tuple[RoutingConfig, int, bool]] = {
    "0_default": (configured(0, num_topk=6), 60, False),
    "1_renormalize": (configured(1, num_topk=4), 32, False),
    "1_every_expert": (configured(1, num_topk=7), 7, False),
    "2_groups_bias": (configured(2, num_topk=8, num_group=8, topk_group=4, routed_scaling_factor=2.5), 64, True),
    "2_groups": (configured(2, num_topk=5, num_group=5, topk_group=2, routed_scaling_factor=1.8), 35, False),
    "2_groups_of_one": (configured(2, num_topk=3, num_group=12, topk_group=6), 12, True),
    "2_all_of_the_groups": (configured(2, num_topk=6, num_group=4, topk_group=2), 12, True),
    "2_no_norm": (
        configured(2, num_topk=5, num_group=5, topk_group=2, routed_scaling_factor=1.8, norm_topk_prob=False),
        35,
        True,
    ),
    "2_one_group": (configured(2, num_topk=8, routed_scaling_factor=2.446), 48, True),
    "2_beyond_flashinfer": (configured(2, num_topk=24, num_group=8, topk_group=6), 64, True),
    "2_softmax_groups": (  # DeepSeek-V2
        configured(
            2,
            num_topk=6,
            num_group=8,
            topk_group=3,
            group_best=1,
            scoring="softmax",
            norm_topk_prob=False,
            routed_scaling_factor=16.0,
        ),
        40,
        False,
    ),
    "2_softmax_groups_bias": (configured(2, num_topk=5, num_group=5, topk_group=2, scoring="softmax"), 35, True),
    "2_sigmoid_groups_by_best": (configured(2, num_topk=5, num_group=5, topk_group=2, group_best=1), 35, False),
    "3_llama4": (configured(3, num_topk=1), 16, False),
    "3_llama4_topk": (configured(3, num_topk=3), 16, False),
    "4_renormalize_naive": (configured(4, num_topk=8), 128, False),
    "5_topk": (configured(5, num_topk=3), 11, False),
    "6_sigmoid_renorm": (configured(6, num_topk=4), 20, False),
    "6_no_norm": (configured(6, num_topk=4, norm_topk_prob=False), 20, False),
    "7_minimax2": (configured(7, num_topk=8, routed_scaling_factor=1.5), 40, True),
    "7_no_bias": (configured(7, num_topk=8), 40, False),
    "7_softmax_bias": (configured(7, num_topk=6, scoring="softmax", routed_scaling_factor=2.5), 40, True),
    "8_sigmoid": (configured(8, num_topk=2), 9, False),
    "9_topk_sigmoid": (configured(9, num_topk=4), 21, False),
}


def sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value - max(values)) for value in values]
    return [power / math.fsum(powers) for power in powers]


def closest(scores: list[float]) -> float:
    """The smallest difference between two unequal scores."""
    ranked = sorted(set(scores))
    return min((after - before for before, after in zip(ranked, ranked[1:], strict=False)), default=math.inf)


def reference(
    logits: list[float], config: RoutingConfig, bias: list[float] | None
) -> tuple[list[int], list[float], float]:
    """One token in float64: (ids, weights, smallest difference between unequal scores)."""
    experts, top = len(logits), config.num_topk
    method = int(config.method)
    if method in (0, 4) or config.scoring == "softmax":
        scores = softmax(logits)
    elif method in (1, 5):
        scores = logits
    else:
        scores = [sigmoid(value) for value in logits]
    choice = [score + shift for score, shift in zip(scores, bias or [0.0] * experts, strict=True)]
    allowed, distance = list(range(experts)), closest(choice)
    if config.num_group > 1:
        size = experts // config.num_group
        grouped = [sorted(choice[first : first + size], reverse=True) for first in range(0, experts, size)]
        group_scores = [sum(scores[: config.group_best]) for scores in grouped]
        groups = sorted(range(config.num_group), key=lambda group: (-group_scores[group], group))[: config.topk_group]
        allowed = [expert for expert in allowed if expert // size in groups]
        distance = min(distance, closest(group_scores))
    ids = sorted(allowed, key=lambda expert: (-choice[expert], expert))[:top]
    weights = [scores[expert] for expert in ids]
    if method == 1:
        weights = softmax(weights)
    if method in (4, 7) or (method in (2, 6) and config.norm_topk_prob):
        weights = [weight / (math.fsum(weights) + 1e-20) for weight in weights]
    if method in (2, 7):
        weights = [weight * config.routed_scaling_factor for weight in weights]
    return ids, weights, distance


def check(logits: torch.Tensor, config: RoutingConfig, bias: torch.Tensor | None, least_rows: int) -> None:
    """Compare every row without nearly equal scores; there must be at least `least_rows` of them."""
    kept = logits.clone()
    routing = route(logits, config, routing_bias=bias)
    assert torch.equal(logits, kept)
    assert (routing.topk_ids.dtype, routing.topk_weights.dtype) == (torch.int32, torch.float32)
    assert routing.topk_ids.shape == routing.topk_weights.shape == (logits.shape[0], config.num_topk)
    compared = 0
    for row, values in enumerate(logits.double().tolist()):
        ids, weights, distance = reference(values, config, None if bias is None else bias.double().tolist())
        if distance < NEAR:
            continue
        compared += 1
        assert routing.topk_ids[row].tolist() == ids
        error = np.linalg.norm(routing.topk_weights[row].double().numpy() - weights)
        assert error <= WORST_ROW * np.linalg.norm(weights)
    assert compared >= least_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_random_logits(name: str, dtype: torch.dtype) -> None:
    config, num_experts, biased = METHODS[name]
    random = torch.Generator().manual_seed(7)
    # Multiples of 1/16 keep softmax and sigmoid scores of different logits apart, in every dtype alike.
    logits = (torch.randn(60, num_experts, generator=random) * 16).round().div(16).to(dtype)
    bias = torch.randn(num_experts, generator=random) * 0.3 if biased else None
    check(logits, config, bias, least_rows=20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_ties_go_to_the_lower_expert(name: str, dtype: torch.dtype) -> None:
    """Four different logits among all experts, and rows of equal logits; sums of two scores differ."""
    config, num_experts, biased = METHODS[name]
    random = torch.Generator().manual_seed(3)
    logits = torch.randint(0, 4, (40, num_experts), generator=random).to(dtype)
    logits[:4] = torch.tensor([0.0, -0.0, 3.0, -1.0], dtype=dtype)[:, None]
    logits[4, ::2] = 0.0
    logits[4, 1::2] = -0.0
    check(logits, config, torch.full((num_experts,), -0.75) if biased else None, least_rows=40)


@pytest.mark.parametrize("num_experts", [1, 13, 256, 1000])
def test_all_equal_logits_choose_the_first_experts(num_experts: int) -> None:
    top = min(num_experts, 8)
    logits = torch.full((5, num_experts), 0.3)
    for method in RoutingMethod:
        ids = route(logits, configured(method, num_topk=top)).topk_ids
        assert ids.tolist() == [list(range(top))] * 5


def logit(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).logit()


def test_bias_changes_the_choice_but_not_the_weights() -> None:
    logits = logit(0.2, 0.8, 0.5, 0.4)
    bias = torch.tensor([0.75, 0.0, -1.0, 0.0])  # choice 0.95, 0.8, -0.5, 0.4
    for method in (2, 7):
        config = configured(method, num_topk=2, routed_scaling_factor=3.0)
        routing = route(logits, config, routing_bias=bias)
        assert routing.topk_ids.tolist() == [[0, 1]]
        assert torch.allclose(routing.topk_weights, torch.tensor([[0.6, 2.4]]), rtol=1e-6)
        assert route(logits, config).topk_ids.tolist() == [[1, 2]]


def test_negative_scores_let_no_other_group_in() -> None:
    """All choice scores are negative: an expert outside the two best groups, set to 0, would win."""
    logits = logit(0.1, 0.2, 0.6, 0.5, 0.9, 0.05, 0.3, 0.4)
    config = configured(2, num_topk=4, num_group=4, topk_group=2, routed_scaling_factor=2.05)
    routing = route(logits, config, routing_bias=torch.full((8,), -1.0))
    assert routing.topk_ids.tolist() == [[4, 2, 3, 5]]
    assert torch.allclose(routing.topk_weights, torch.tensor([[0.9, 0.6, 0.5, 0.05]]), rtol=1e-6)


def test_minus_infinity_lets_no_other_group_in() -> None:
    """Groups 1 and 2 win by their two best; their third experts, with bias -inf, are chosen last, but are chosen."""
    logits = logit(0.1, 0.2, 0.3, 0.6, 0.7, 0.99, 0.9, 0.98, 0.8)
    bias = torch.zeros(9)
    bias[[5, 7]] = -math.inf
    config = configured(2, num_topk=6, num_group=3, topk_group=2)
    assert route(logits, config, routing_bias=bias).topk_ids.tolist() == [[6, 8, 4, 3, 5, 7]]


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["nan", "negative_nan"])
@pytest.mark.parametrize("name", METHODS)
def test_nan_logits_are_chosen_and_seen(name: str, sign: float) -> None:
    config, num_experts, _ = METHODS[name]
    logits = torch.linspace(-1, 1, num_experts).repeat(3, 1)
    logits[1, 2] = math.copysign(math.nan, sign)
    routing, clean = route(logits, config), route(logits[[0, 0, 2]], config)
    assert routing.topk_ids[1, 0].item() == (0 if config.scoring == "softmax" else 2)  # all of its softmax are NaN
    assert len(set(routing.topk_ids[1].tolist())) == config.num_topk
    assert routing.topk_weights[1, 0].isnan().item()
    assert torch.equal(routing.topk_ids[::2], clean.topk_ids[::2])
    assert torch.equal(routing.topk_weights[::2], clean.topk_weights[::2])


BIASED = [name for name, (config, _, _) in METHODS.items() if config.method in BIASED_METHODS]


@pytest.mark.parametrize("others", [0.0, math.inf, -math.inf], ids=["finite", "infinite", "minus_infinite"])
@pytest.mark.parametrize("expert", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("name", BIASED)
def test_a_nan_bias_is_seen(name: str, expert: int, others: float) -> None:
    """Whichever expert has it, even if others are +inf, so that it is not chosen."""
    config, num_experts, _ = METHODS[name]
    logits = torch.randn(5, num_experts, generator=torch.Generator().manual_seed(1))
    bias = torch.full((num_experts,), others)
    clean = route(logits, config, routing_bias=bias)
    assert bool(clean.topk_weights.isfinite().all())
    bias[expert] = math.nan
    routing = route(logits, config, routing_bias=bias)
    assert bool(routing.topk_weights.isnan().all())
    assert all(len(set(row)) == config.num_topk for row in routing.topk_ids.tolist())
    assert bool(((routing.topk_ids >= 0) & (routing.topk_ids < num_experts)).all())


@pytest.mark.parametrize("name", METHODS)
def test_extreme_logits_give_valid_ids(name: str) -> None:
    config, num_experts, _ = METHODS[name]
    rows = [[value] * num_experts for value in (math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-45)]
    ids = route(torch.tensor(rows), config).topk_ids
    assert ids.tolist() == [list(range(config.num_topk))] * len(rows)


@pytest.mark.parametrize("name", METHODS)
def test_zero_tokens(name: str) -> None:
    config, num_experts, biased = METHODS[name]
    replay = torch.full((2, config.num_topk), -5, dtype=torch.int16)
    bias = torch.zeros(num_experts) if biased else None
    routing = route(torch.empty(0, num_experts), config, routing_bias=bias, routing_replay_out=replay)
    assert routing.topk_ids.shape == routing.topk_weights.shape == (0, config.num_topk)
    assert replay.tolist() == [[-5] * config.num_topk] * 2


@pytest.mark.parametrize("name", METHODS)
def test_replay_writes_the_rows_of_the_tokens_alone(name: str) -> None:
    config, num_experts, _ = METHODS[name]
    logits = torch.randn(5, num_experts, generator=torch.Generator().manual_seed(0))
    for spare in (0, 3):
        replay = torch.full((5 + spare, config.num_topk), -5, dtype=torch.int16)
        routing = route(logits, config, routing_replay_out=replay)
        assert replay[:5].tolist() == routing.topk_ids.tolist()
        assert replay[5:].tolist() == [[-5] * config.num_topk] * spare


def test_physical_ids_and_logical_replay() -> None:
    """4 experts at positions 3, 2, 0 and 1; expert 1 has a second position, which routing does not choose."""
    config, placement = configured(5, num_topk=3), Placement((2, 3, 1, 0, 1), (0, 2, 5))
    replay = torch.zeros(2, 3, dtype=torch.int16)
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0], [4.0, 3.0, 0.0, 5.0]])
    routing = route(logits, config, routing_replay_out=replay, placement=placement)
    assert replay.tolist() == [[1, 2, 3], [3, 0, 1]]
    assert routing.topk_ids.tolist() == [[2, 0, 1], [1, 3, 2]]
    assert routing.topk_weights.tolist() == [[3.0, 2.0, 1.0], [5.0, 4.0, 3.0]]
    assert routing.topk_ids.dtype == torch.int32


def test_replay_at_the_limit_of_int16() -> None:
    config = configured(5, num_topk=1)
    replay = torch.zeros(1, 1, dtype=torch.int16)
    route(torch.arange(32767.0)[None], config, routing_replay_out=replay)
    assert replay.item() == 32766
    with pytest.raises(ValueError, match=r"num_experts \(32768\) exceeds 32767"):
        route(torch.zeros(1, 32768), config, routing_replay_out=replay)


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [8, 60, 256, 3000])
def test_cuda_chooses_as_the_cpu_does(num_experts: int) -> None:
    """Ties, zeros, NaN and infinities of both signs, at sizes that CUDA sorts in different ways."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, -math.nan])
    random = torch.Generator().manual_seed(5)
    logits = values[torch.randint(0, len(values), (64, num_experts), generator=random)]
    logits[:16] = logits[:16].nan_to_num(0.0)
    logits[:8] = logits[:8].clamp(-1, 1)
    config = configured(5, num_topk=8)
    assert torch.equal(route(logits.cuda(), config).topk_ids.cpu(), route(logits, config).topk_ids)


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_route_in_a_cuda_graph(name: str) -> None:
    config, num_experts, biased = METHODS[name]
    random = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 9, num_experts, generator=random).cuda()
    bias = torch.randn(num_experts, generator=random).cuda() if biased else None
    static, replay = logits[0].clone(), torch.zeros(9, config.num_topk, dtype=torch.int16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        route(static, config, routing_bias=bias, routing_replay_out=replay)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        routing = route(static, config, routing_bias=bias, routing_replay_out=replay)
    static.copy_(logits[1])
    graph.replay()
    expected = route(logits[1], config, routing_bias=bias)
    assert torch.equal(routing.topk_ids, expected.topk_ids)
    assert torch.equal(routing.topk_weights, expected.topk_weights)
    assert torch.equal(replay.int(), expected.topk_ids)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_carry_gradients_to_the_chosen_logits(device: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]], device=device, requires_grad=True)
    routing = route(logits, configured(1, num_topk=2))
    routing.topk_weights[0, 0].backward()
    slope = sigmoid(1.0) * sigmoid(-1.0)  # of softmax over the logits 2 and 1
    assert logits.grad is not None
    assert torch.allclose(logits.grad.cpu(), torch.tensor([[0.0, slope, -slope]]), atol=1e-6)


def test_method_3_is_that_of_llama4() -> None:
    router = Llama4Router(SimpleNamespace(hidden_size=32, num_local_experts=32, num_experts_per_tok=1))
    router.weight.data = torch.eye(32)
    logits = torch.randn(100, 32, generator=torch.Generator().manual_seed(11)) * 2
    with torch.no_grad():
        weights, ids = router(logits)[0].max(1, keepdim=True)
    routing = route(logits, configured(3, num_topk=1))
    assert torch.equal(routing.topk_ids.long(), ids)
    torch.testing.assert_close(routing.topk_weights, weights, rtol=WORST_ROW, atol=0)


TOP2 = configured(1, num_topk=2)
LOGITS = torch.zeros(3, 8)


BAD: dict[str, tuple[torch.Tensor, RoutingConfig, dict[str, Any], str]] = {
    "logits_1d": (torch.zeros(8), TOP2, {}, r"router_logits are \(8,\) torch.float32"),
    "logits_integer": (torch.zeros(3, 8, dtype=torch.int32), TOP2, {}, r"router_logits are \(3, 8\) torch.int32"),
    "more_topk_than_experts": (torch.zeros(3, 1), TOP2, {}, r"num_topk \(2\) exceeds num_experts \(1\)"),
    "uneven_groups": (
        torch.zeros(3, 10),
        configured(2, num_topk=1, num_group=4, topk_group=2),
        {},
        r"num_experts \(10\) is not a multiple of num_group \(4\)",
    ),
    "more_topk_than_candidates": (
        LOGITS,
        configured(2, num_topk=5, num_group=4, topk_group=2),
        {},
        r"num_topk \(5\) exceeds the 4 experts in topk_group \(2\) groups",
    ),
    "bias_shape": (
        LOGITS,
        configured(7, num_topk=2),
        {"routing_bias": torch.zeros(7)},
        r"routing_bias is \(7,\) torch.float32; \(8,\) of a float dtype needed",
    ),
    "bias_dtype": (
        LOGITS,
        configured(2, num_topk=2),
        {"routing_bias": torch.zeros(8, dtype=torch.int64)},
        r"routing_bias is \(8,\) torch.int64",
    ),
    "replay_dtype": (
        LOGITS,
        TOP2,
        {"routing_replay_out": torch.zeros(3, 2, dtype=torch.int32)},
        r"routing_replay_out is torch.int32; torch.int16",
    ),
    "replay_rows": (
        LOGITS,
        TOP2,
        {"routing_replay_out": torch.zeros(2, 2, dtype=torch.int16)},
        r"routing_replay_out is \(2, 2\); at least 3 rows of num_topk \(2\)",
    ),
    "replay_columns": (
        LOGITS,
        TOP2,
        {"routing_replay_out": torch.zeros(3, 3, dtype=torch.int16)},
        r"routing_replay_out is \(3, 3\); at least 3 rows of num_topk \(2\)",
    ),
    "replay_device": (
        LOGITS,
        TOP2,
        {"routing_replay_out": torch.zeros(3, 2, dtype=torch.int16, device="meta")},
        r"routing_replay_out is on meta, router_logits on cpu",
    ),
    "placement": (
        LOGITS,
        TOP2,
        {"placement": Placement.linear(9, 2)},
        r"the placement has 9 experts, router_logits have 8",
    ),
    "placement_in_order_of_its_own": (
        LOGITS,
        TOP2,
        {"placement": Placement((1, 0, 2), (0, 3))},
        r"the placement has 3 experts.*have 8",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_route_arguments(name: str) -> None:
    logits, config, extra, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        route(logits, config, **extra)


@pytest.mark.parametrize("method", [0, 1, 3, 4, 5, 6, 8])
def test_bias_needs_method_2_or_7(method: int) -> None:
    with pytest.raises(ValueError, match=rf"routing_bias needs routing method 2 or 7, got {method}"):
        route(LOGITS, configured(method, num_topk=1), routing_bias=torch.zeros(8))


@pytest.mark.parametrize(
    ("ids", "weights", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3), r"topk_ids are \(3,\) torch.int32"),
        (torch.zeros(3, 0, dtype=torch.int32), torch.zeros(3, 0), r"topk_ids are \(3, 0\)"),
        (torch.zeros(3, 2, dtype=torch.int16), torch.zeros(3, 2), r"topk_ids are \(3, 2\) torch.int16"),
        (torch.zeros(3, 2, dtype=torch.int32), torch.zeros(2, 3), r"topk_weights are \(2, 3\).*\(3, 2\)"),
        (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2).bfloat16(), r"topk_weights are \(3, 2\) torch.bf"),
        (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2, device="meta"), r"on meta, topk_ids on cpu"),
    ],
    ids=["ids_1d", "no_column", "ids_dtype", "weights_shape", "weights_dtype", "device"],
)
def test_bad_routings(ids: torch.Tensor, weights: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Routing(topk_ids=ids, topk_weights=weights)


def top1(*weights: float) -> Routing:
    ids = torch.arange(len(weights), dtype=torch.int64)[:, None]
    return Routing(topk_ids=ids, topk_weights=torch.tensor(weights)[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weigh_input(dtype: torch.dtype) -> None:
    routing = top1(0.3, -2.0, 0.0)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept, kept_weights = x.clone(), routing.topk_weights.clone()
    weighed, left = apply_weights_to_input(x, routing)
    factors = [torch.tensor(value).to(dtype) for value in (0.3, -2.0, 0.0)]
    assert isinstance(weighed, torch.Tensor)
    assert weighed.dtype == dtype
    for row, factor in enumerate(factors):
        assert torch.equal(weighed[row], (x[row].double() * factor.double()).to(dtype))
    assert left.topk_weights.tolist() == [[1.0], [1.0], [1.0]]
    assert left.topk_weights.dtype == torch.float32
    assert torch.equal(left.topk_ids, routing.topk_ids)
    assert torch.equal(x, kept)
    assert torch.equal(routing.topk_weights, kept_weights)


def test_weigh_input_quantized() -> None:
    scheme = QuantScheme(
        name="grouped", payload=TensorFormat(family="scaled", dtype=torch.int8, granularity="group", block=(1, 16))
    )
    values = torch.randint(-127, 128, (2, 40), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    scale = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    weighed, left = apply_weights_to_input(Quantized(values=values, scale=scale, scheme=scheme), top1(0.5, 3.0))
    assert isinstance(weighed, Quantized)
    assert torch.equal(weighed.values, values)
    assert weighed.scale.tolist() == [[0.5, 1.0, 1.5], [12.0, 15.0, 18.0]]
    assert scale.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert left.topk_weights.tolist() == [[1.0], [1.0]]


def test_weigh_input_errors() -> None:
    two = Routing(topk_ids=torch.zeros(3, 2, dtype=torch.int32), topk_weights=torch.ones(3, 2))
    with pytest.raises(ValueError, match="apply_router_weight_on_input needs num_topk 1, got 2"):
        apply_weights_to_input(torch.zeros(3, 16), two)
    with pytest.raises(ValueError, match="x has 4 tokens, topk_ids 3"):
        apply_weights_to_input(torch.zeros(4, 16), top1(1.0, 1.0, 1.0))
    for name in ("mxfp8", "nvfp4"):
        with pytest.raises(ValueError, match=f"x is in scheme '{name}', whose scales of one byte"):
            apply_weights_to_input(quantize(torch.ones(1, 32), get_scheme(name)), top1(1.0))
