"""The layer: EP over n ranks equals EP over one, and both equal a plain loop over tokens; faults during a run."""

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.layers import (
    HIDDEN,
    INTERMEDIATE,
    NUM_EXPERTS,
    NUM_TOPK,
    ROUTING,
    expected,
    fail_on_rank_1,
    layer_on,
    local_weights,
    run_layer,
    sent_to_rank_1,
    tokens,
    tokens_of,
    whole_weights,
)
from helpers.lost import be_lost, record, recorded
from no_memory import NoMemory
from torch.utils._python_dispatch import TorchDispatchMode

from ep_moe.config import ActivationConfig, GroupConfig, Layout, MoEConfig, RoutingConfig, TransportConfig
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.launch import RankFailedError, launch
from ep_moe.layer import ExpertParallelMoE, warmup
from ep_moe.local_moe import local_moe
from ep_moe.placement import Placement
from ep_moe.quant import StoredMatrix, get_scheme
from ep_moe.routing import Routing, route
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from ep_moe.testing.transports import engine_defaults
from ep_moe.transport import create_transport
from ep_moe.transport.base import RoundKind
from ep_moe.weights import ExpertWeights

CASES = [
    pytest.param(1, "linear", "none", Layout.COMPACT, torch.float32, id="1-float32"),
    pytest.param(2, "round_robin", "none", Layout.FLAT, torch.float32, id="2-round-robin-flat"),
    pytest.param(3, "linear", "none", Layout.BATCHED, torch.float32, id="3-batched"),
    pytest.param(4, "linear", "none", Layout.COMPACT, torch.float32, id="4-compact"),
    pytest.param(4, "round_robin", "none", Layout.FLAT, torch.bfloat16, id="4-bfloat16"),
]


@pytest.mark.parametrize(("num_ranks", "placement", "scheme", "layout", "dtype"), CASES)
def test_layer_equals_a_plain_loop(
    num_ranks: int, placement: str, scheme: str, layout: Layout, dtype: torch.dtype
) -> None:
    parts = launch(run_layer, placement, scheme, layout, dtype, num_ranks=num_ranks, device="cpu")
    outputs = torch.cat(parts, dim=1)
    limit = ROW_ERROR_LIMITS[str(dtype).removeprefix("torch.")]
    assert worst_row_error(outputs[0], expected(dtype)) < limit
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_token"])
def test_four_ranks_equal_one_in_fp8(scheme: str) -> None:
    one, four = (
        torch.cat(launch(run_layer, "linear", scheme, layout, torch.bfloat16, num_ranks=n, device="cpu"), dim=1)
        for n, layout in ((1, Layout.COMPACT), (4, Layout.BATCHED))
    )
    assert worst_row_error(four, one) < ROW_ERROR_LIMITS["bfloat16"]
    assert worst_row_error(one[0], expected(torch.bfloat16)) < 0.1


def weigh_on_input(group: EPGroup) -> torch.Tensor:
    """Top-1 with the router's weight on the input: this rank's output [T, H]."""
    layer = layer_on(group)
    config = dataclasses.replace(
        layer.config, apply_router_weight_on_input=True, routing=RoutingConfig(method=3, num_topk=1)
    )
    weighed = ExpertParallelMoE(config, layer.weights, layer.transport)
    return weighed(*tokens_of(group))


def test_router_weight_on_input() -> None:
    out = torch.cat(launch(weigh_on_input, num_ranks=3, device="cpu"))
    x, logits = (tensor.double() for tensor in tokens())
    w13, w2, b13, b2 = (tensor.double() for tensor in whole_weights())
    for token in range(x.shape[0]):
        expert = int(logits[token].argmax())
        weighed = x[token] / (1 + torch.exp(-logits[token, expert]))
        gate, up = (w13[expert] @ weighed + b13[expert]).chunk(2)
        gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
        x[token] = w2[expert] @ (gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)) + b2[expert]
    assert worst_row_error(out, x) < ROW_ERROR_LIMITS["float32"]


def static_scales(group: EPGroup, input_scale: float) -> torch.Tensor:
    """fp8 per tensor with the input scale of a checkpoint."""
    layer = layer_on(group, "linear", "fp8_tensor", Layout.BATCHED, torch.float32)
    scales = {
        "w13_input_scale": torch.tensor([input_scale]),
        "w2_input_scale": torch.full((layer.weights.num_local_experts,), 0.01),
    }
    fixed = ExpertParallelMoE(
        layer.config,
        dataclasses.replace(layer.weights, **scales),
        layer.transport,
        routing_bias=layer.routing_bias,
        shared_experts=layer.shared_experts,
    )
    return fixed(*tokens_of(group))


def test_static_input_scales() -> None:
    fine, coarse = (torch.cat(launch(static_scales, s, num_ranks=2, device="cpu")) for s in (0.008, 0.0005))
    assert worst_row_error(fine, expected()) < 0.15
    assert worst_row_error(coarse, expected()) > 0.5  # 448 * 0.0005 saturates: the scale is in use


def mistakes_on_one_rank(group: EPGroup) -> list[str]:
    """The last but one rank, or the only one, makes one mistake after another; returns every rank's errors."""
    layer = layer_on(group)
    x, logits = tokens_of(group)
    routing = route(logits, ROUTING, routing_bias=layer.routing_bias)
    sound = layer(x, logits)
    mistakes = [
        {"router_logits": logits[:, :4]},
        {"topk_ids": routing.topk_ids.float(), "topk_weights": routing.topk_weights},
        {"topk_ids": routing.topk_ids, "topk_weights": routing.topk_weights[:, :1]},
        {"topk_ids": routing.topk_ids + 5, "topk_weights": routing.topk_weights},
        {"router_logits": None},
        {"router_logits": logits.tolist()},
        {"router_logits": logits.numpy()},
        {"router_logits": logits.to_sparse()},
        {"topk_ids": routing.topk_ids, "topk_weights": None},
        {"topk_ids": None, "topk_weights": routing.topk_weights},
        {"topk_ids": routing.topk_ids.tolist(), "topk_weights": routing.topk_weights},
        {"hidden_states": None, "router_logits": logits},
        {"hidden_states": x.tolist(), "router_logits": logits},
        {"hidden_states": x.numpy(), "router_logits": logits},
        {"hidden_states": x.to_sparse(), "router_logits": logits},
        {"hidden_states": x[0, 0], "router_logits": logits},
    ]
    told = []
    for mistake in mistakes:
        named = {
            "hidden_states": x,
            **(mistake if group.rank == min(1, group.num_ranks - 1) else {"router_logits": logits}),
        }
        try:
            (layer.forward_routed if "topk_ids" in named else layer)(**named)
        except ValueError as error:
            told.append(str(error))
        assert torch.equal(layer(hidden_states=x, router_logits=logits), sound)
    return told


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_mistake_on_one_rank_is_an_error_on_all_and_the_next_call_works(num_ranks: int) -> None:
    errors, wrong, rows = (
        launch(mistakes_on_one_rank, num_ranks=num_ranks, device="cpu"),
        min(1, num_ranks - 1),
        30 // num_ranks,
    )
    words = [
        *(f"({rows}, 4)", "float32", f"({rows}, 1)", f"outside [-1, num_experts (10)) on rank {wrong}, such as"),
        *("router_logits is a NoneType (None)", "router_logits is a list (", "router_logits is a ndarray ("),
        *("sparse_coo", "topk_weights is a NoneType (None)", "topk_ids is a NoneType (None)", "topk_ids is a list ("),
        *(
            "hidden_states is a NoneType (None)",
            "hidden_states is a list (",
            "hidden_states is a ndarray (",
            "sparse_coo",
            "hidden_states is ()",
        ),
    ]
    assert [len(texts) for texts in errors] == [len(words)] * num_ranks
    for number, expected_words in enumerate(words):
        for rank, texts in enumerate(errors):
            assert (expected_words if rank == wrong else f"rank {wrong}") in texts[number]


class CountsMeta(TorchDispatchMode):
    """Counts operators that run on a meta device, whose conversions import hundreds of modules."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.count += any(isinstance(given, torch.Tensor) and given.is_meta for given in args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1)], ids=["identity", "permuted"])
def test_another_device_is_refused_before_anything_runs_there(order: tuple[int, ...], dtype: torch.dtype) -> None:
    weights = ExpertWeights(w13=StoredMatrix(torch.ones(4, 32, 16)), w2=StoredMatrix(torch.ones(4, 16, 16)))
    sizes = TransportConfig(hidden=16, max_tokens_per_rank=4, dtype=torch.float32)
    transport = create_transport("local", EPGroup.single("cpu"), Placement(order, (0, 4)), sizes)
    routing = RoutingConfig(method=1, num_topk=2)
    layer = ExpertParallelMoE(MoEConfig(hidden=16, intermediate=16, num_experts=4, routing=routing), weights, transport)
    x, logits = torch.ones(2, 16), torch.ones(2, 4)
    far = Routing(topk_ids=torch.ones(2, 2, dtype=dtype, device="meta"), topk_weights=torch.ones(2, 2, device="meta"))
    calls = {
        "topk_ids is on meta on rank 0, the transport on cpu": lambda: layer.forward_routed(
            x, far.topk_ids, far.topk_weights
        ),
        "router_logits is on meta on rank 0, the transport on cpu": lambda: layer(x, logits.to("meta")),
        "hidden_states is on meta on rank 0, the transport on cpu": lambda: layer(x.to("meta"), logits),
        "topk_ids is on meta, x on cpu": lambda: local_moe(x, far, weights, layer.experts),
    }
    for message, call in calls.items():
        with CountsMeta() as mode, pytest.raises(ValueError, match=message):
            call()
        assert mode.count == 0
    assert layer(x, logits).isfinite().all()


def count_on_rank(group: EPGroup, scheme: str, static: bool) -> list[str]:
    """Rounds with the same rows and other numbers of tokens, the rest NaN: wrong rows, by the call that gave them."""
    layer = layer_on(group, "linear", scheme, Layout.COMPACT, torch.float32)
    if static:
        weights = dataclasses.replace(layer.weights, w13_input_scale=torch.tensor([0.01]))
        options = {"routing_bias": layer.routing_bias, "shared_experts": layer.shared_experts}
        layer = ExpertParallelMoE(layer.config, weights, layer.transport, **options)
    x, logits = map(torch.clone, tokens_of(group))
    rows, wrong = x.shape[0], []
    for count in {min(rows, n) for n in (4, 0, 30)}:
        padded, padded_logits = x.clone(), logits.clone()
        padded[count:] = padded_logits[count:] = float("nan")
        routing = route(padded_logits, ROUTING, routing_bias=layer.routing_bias)
        num_tokens = torch.tensor([count], dtype=torch.int32)
        expected = torch.zeros(rows, HIDDEN)
        expected[:count] = layer(x[:count], logits[:count])
        options = {"num_tokens": num_tokens, "max_num_tokens": 30}
        found = {
            "forward": layer(padded, padded_logits, **options),
            "forward_routed": layer.forward_routed(padded, routing.topk_ids, routing.topk_weights, **options),
            "unbounded": layer(padded, padded_logits, num_tokens=num_tokens),
        }
        wrong += [f"{name}, {count} tokens" for name, out in found.items() if not torch.equal(out, expected)]
    return wrong


@pytest.mark.parametrize(("scheme", "static"), [("none", False), ("fp8_tensor", False), ("fp8_tensor", True)])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_padding_goes_nowhere_and_its_results_are_zero(num_ranks: int, scheme: str, static: bool) -> None:
    assert launch(count_on_rank, scheme, static, num_ranks=num_ranks, device="cpu") == [[]] * num_ranks


def wrong_bounds(group: EPGroup) -> list[str]:
    """Rank 1's bound is too low, too high, and not a number: every rank's errors."""
    layer = layer_on(group)
    x, logits = tokens_of(group)
    sound, told = layer(x, logits, max_num_tokens=15), []
    for bound in (14, 31, 15.0):
        with pytest.raises(ValueError) as caught:
            layer(x, logits, max_num_tokens=bound if group.rank == 1 else 15)
        told.append(str(caught.value))
        assert torch.equal(layer(x, logits, max_num_tokens=30), sound)
    return told


def test_a_bound_below_the_rows_or_above_the_transports_is_refused() -> None:
    told = launch(wrong_bounds, num_ranks=2, device="cpu")
    for said, bound in zip(told[1], (14, 31, 15.0), strict=True):
        assert said == f"max_num_tokens ({bound}) is not in [rows of x (15), max_tokens_per_rank (30)] on rank 1"
    assert all("rank 1 refused its input" in said for said in told[0])


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_a_warm_up_runs_what_the_layer_will_run(scheme: str, layout: Layout) -> None:
    """On a CPU each part of it by itself: nothing is compiled, and no token goes anywhere."""
    layer = layer_on(EPGroup.single("cpu"), "linear", scheme, layout, torch.float32)
    x, logits = tokens()
    sound, before = layer(x, logits), layer.transport.num_rounds
    layer.warmup()
    assert layer.transport.num_rounds == before
    sizes = warmup.row_counts(30)
    assert sizes == [1, 2, 4, 8, 16, 30]
    with engine_defaults():
        warmup.compute_alone(layer, NUM_TOPK, sizes)
    assert layer.transport.num_rounds == before
    watched = mock.patch.object(layer.transport, "dispatch_send", wraps=layer.transport.dispatch_send)
    with watched as sent, engine_defaults():
        warmup.run_rounds(layer, NUM_TOPK, sizes, padded=True)
    rows = [call.args[0].shape[0] for call in sent.call_args_list]
    assert rows == [size for size in sizes for _ in range(2)]
    assert all(bool((call.args[1].topk_ids == -1).all()) for call in sent.call_args_list)
    assert [call.kwargs["num_tokens"] is None for call in sent.call_args_list] == [True, False] * len(sizes)
    with mock.patch.object(layer.transport, "dispatch_send", wraps=layer.transport.dispatch_send) as sent:
        warmup.run_rounds(layer, NUM_TOPK, [1, 4], padded=False, overlapped=layer.forward_micro_batches)
    assert [call.args[0].shape[0] for call in sent.call_args_list] == [1, 4, 1, 1, 4, 4]
    assert all(bool((call.args[1].topk_ids == -1).all()) for call in sent.call_args_list)
    expected = {"num_topk": 3, "scheme": scheme, "layout": layout}
    split = {"split_dispatch": True, "shared_dtype": torch.float32}
    assert warmup.round_kinds(layer, 3, padded=True) == [
        RoundKind(**expected, **split, counted=False),
        RoundKind(**expected, **split, counted=True),
    ]
    layer.shared_experts = None
    halves = RoundKind(**expected, split_dispatch=True, split_combine=True)
    assert warmup.round_kinds(layer, 3, padded=False, micro_batches=True) == [RoundKind(**expected), halves]
    layer.shared_experts = lambda x: x * 0.5
    assert torch.equal(layer(x, logits), sound)


def test_a_warm_up_needs_a_number_of_experts_per_token() -> None:
    layer = layer_on(EPGroup.single("cpu"))
    with pytest.raises(ValueError, match=r"num_topk \(33\) is not in \[1, max_topk \(32\)\]"):
        layer.warmup(num_topk=33)
    bare = ExpertParallelMoE(dataclasses.replace(layer.config, routing=None), layer.weights, layer.transport)
    with pytest.raises(ValueError, match="num_topk is needed: the layer has no routing config"):
        bare.warmup()
    bare.warmup(num_topk=2)


class FullMemory:
    """Experts that run out of memory, which stays full until the call has ended."""

    def __init__(self) -> None:
        self.full, self.held = NoMemory(), list[weakref.ref[torch.Tensor]]()

    def __call__(self, *_: object) -> torch.Tensor:
        part = torch.zeros(8)
        self.held.append(weakref.ref(part))
        self.full.__enter__()
        raise torch.OutOfMemoryError("no memory for experts")

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        try:
            with pytest.raises(torch.OutOfMemoryError, match="no memory for experts"):
                yield
        finally:
            self.full.__exit__(None, None, None)


def test_memory_that_stays_full_costs_one_call() -> None:
    layer = layer_on(EPGroup.single("cpu"))
    (x, logits), experts, fails = tokens(), layer.experts, FullMemory()
    sound, layer.experts = layer(x, logits), fails
    with fails.raising():
        try:
            layer(x, logits)
        finally:
            assert fails.held[0]() is None  # although the error is still there
    layer.experts = experts
    assert torch.equal(layer(x, logits), sound)


def fail_on_one_rank(group: EPGroup, part: str) -> tuple[bool, bool]:
    """Rank 1 fails once: is the result NaN where its experts are missing, and is the next one right?"""
    layer = layer_on(group)
    x, logits = tokens_of(group)
    sound = layer(x, logits)
    shared, experts, layer.shared_experts, fails = layer.shared_experts, layer.experts, None, FullMemory()
    if group.rank == 1:
        setattr(layer, part, fails)
        with fails.raising():
            layer(x, logits)
        is_nan = True
    else:
        needs_rank_1 = sent_to_rank_1(layer, logits)
        is_nan = torch.equal(layer(x, logits).isnan().all(1), needs_rank_1)
    layer.shared_experts, layer.experts = shared, experts
    return is_nan, torch.equal(layer(x, logits), sound)


@pytest.mark.parametrize("part", ["experts", "shared_experts"])
def test_failing_experts_give_the_others_nan_and_the_next_call_works(part: str) -> None:
    assert launch(fail_on_one_rank, part, num_ranks=3, device="cpu") == [(True, True)] * 3


FAILING = {
    "route": ("ep_moe.layer.base.route", False),
    "before-the-header": ("ep_moe.transport.collective.transport.plan_send", False),
    "shared-experts-before-the-header": ("ep_moe.transport.collective.transport.plan_send", True),
    "received": ("ep_moe.transport.host_sync.pack", False),
}


def fail_before_tokens_are_sent(group: EPGroup, where: str, shared: bool) -> tuple[bool, bool]:
    layer = layer_on(group)
    layer.shared_experts = layer.shared_experts if shared else None
    return fail_on_rank_1(group, layer, layer, where, before=0, first=0)


@pytest.mark.parametrize("name", FAILING)
def test_a_dispatch_that_fails_costs_the_others_what_they_sent_there(name: str) -> None:
    config = GroupConfig(timeout_secs=20)
    told = launch(fail_before_tokens_are_sent, *FAILING[name], num_ranks=3, config=config, device="cpu")
    assert told == [(True, True)] * 3


def fail_after_the_header(group: EPGroup) -> tuple[str, float]:
    """Rank 1 runs out of memory for the announced rows: each rank's error, and its time."""
    layer = layer_on(group)
    x, logits = tokens_of(group)
    layer(x, logits)
    no_memory = mock.patch(
        "ep_moe.transport.collective.transport.write_rows", side_effect=torch.OutOfMemoryError("no memory")
    )
    start = time.monotonic()
    with no_memory if group.rank == 1 else contextlib.nullcontext(), pytest.raises(RuntimeError) as caught:
        layer(x, logits)
    took_secs = time.monotonic() - start
    with pytest.raises(PeerLostError, match="rank 1 failed: OutOfMemoryError: no memory"):
        layer(x, logits)
    return f"{type(caught.value).__name__}: {caught.value}", took_secs


def test_a_rank_without_memory_for_announced_rows_tells_the_others() -> None:
    config = GroupConfig(timeout_secs=30, heartbeat_secs=0.2)
    told = launch(fail_after_the_header, num_ranks=3, config=config, device="cpu")
    assert told[1][0] == "OutOfMemoryError: no memory"
    for words, secs in (told[0], told[2]):
        assert words.startswith("PeerLostError: rank 1 failed: OutOfMemoryError: no memory")
        assert secs < 10


def call_out_of_step(group: EPGroup) -> list[str]:
    """Two layers, which rank 0 calls in the other order; then one that has other settings on rank 0."""
    first = layer_on(group)
    second = ExpertParallelMoE(first.config, first.weights, first.transport, routing_bias=first.routing_bias)
    x, logits = tokens_of(group)
    sound, told = first(x, logits), []
    for layer in (second, first) if group.rank == 0 else (first, second):
        with pytest.raises(ValueError) as caught:
            layer(x, logits)
        told.append(str(caught.value))
    activation = ActivationConfig(kind="gelu") if group.rank == 0 else first.config.activation
    config = dataclasses.replace(first.config, activation=activation)
    odd = ExpertParallelMoE(config, first.weights, first.transport, layer_index=7)
    with pytest.raises(ValueError) as caught:
        odd(x, logits)
    assert torch.equal(first(x, logits), sound)
    return [*told, str(caught.value)]


def test_ranks_in_different_layers_read_who_is_where() -> None:
    told = launch(call_out_of_step, num_ranks=3, device="cpu")
    for number, (own, others) in enumerate([(1, 0), (0, 1)]):
        assert f"rank 0 is in layer {own}, rank 1 in layer {others}" in told[0][number]
        for rank in (1, 2):
            assert f"rank {rank} is in layer {others}, rank 0 in layer {own}" in told[rank][number]
    assert "rank 2 and rank 0 have made layer 7 with different settings: activation (found in round" in told[2][2]


def test_a_layer_number_is_one() -> None:
    layer = layer_on(EPGroup.single("cpu"))
    for number in (-1, 1.0, True):
        with pytest.raises(ValueError, match=rf"layer_index \({number}\) must be an int of at least 0"):
            ExpertParallelMoE(layer.config, layer.weights, layer.transport, layer_index=number)


def call_after_the_end(group: EPGroup, name: str) -> list[str]:
    """Errors of a layer, its transport and its group once the group is destroyed."""
    layer = layer_on(group)
    assert type(layer.transport).__name__ == name
    x, logits = tokens_of(group)
    layer(x, logits)
    options = {"layout": Layout.COMPACT, "scheme": get_scheme("none")}
    routing = Routing(topk_ids=route(logits, ROUTING).topk_ids, topk_weights=torch.ones(x.shape[0], NUM_TOPK))
    dispatched = layer.transport.dispatch(x, routing, **options)
    y = torch.zeros(dispatched.batch.output_shape)
    idle = create_transport("auto", group, layer.placement, layer.transport.config)
    group.barrier()
    group.destroy()
    calls = [
        lambda: layer(x, logits),
        lambda: layer.transport.combine(y, dispatched),
        layer.transport.abandon,
        idle.abandon,
        idle.check,
        layer.transport.check,
        lambda: create_transport("auto", group, layer.placement, layer.transport.config),
        group.barrier,
        lambda: group.all_gather_object(1),
        lambda: group.all_reduce_sum(torch.ones(1)),
        lambda: group.wait_for_all("load"),
        group.connect_store,
        group.check,
    ]
    told = []
    for number, call in enumerate(calls):
        try:
            call()
        except RuntimeError as error:
            told.append(str(error))
        else:
            told.append(f"call {number} raised nothing")
    layer.transport.destroy()
    idle.destroy()
    group.destroy()
    return told


@pytest.mark.parametrize(("num_ranks", "name"), [(1, "LocalTransport"), (2, "CollectiveTransport")])
def test_a_destroyed_group_computes_nothing(num_ranks: int, name: str) -> None:
    for rank, told in enumerate(launch(call_after_the_end, name, num_ranks=num_ranks, device="cpu")):
        for words in told:
            assert f"rank {rank} has left this group" in words


@pytest.mark.parametrize("trained", ["hidden_states", "logits", "w2", "w13_bias", "routing_bias", "shared", "function"])
def test_backward_is_refused(trained: str) -> None:
    """Whichever parameter is trained, backward raises rather than lose its gradient; the forward is unchanged."""
    layer = layer_on(EPGroup.single("cpu"))
    inputs = dict(zip(("hidden_states", "logits"), tokens(), strict=True))
    shared = torch.nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
    layer.shared_experts = shared if trained == "shared" else lambda x: shared(x)
    layer.routing_bias = torch.zeros(NUM_EXPERTS)
    expected = layer(*inputs.values())
    assert not expected.requires_grad
    held = {"w2": layer.weights.w2.values, "w13_bias": layer.weights.w13_bias}
    target = inputs.get(trained, held.get(trained))
    target = layer.routing_bias if trained == "routing_bias" else shared.weight if target is None else target
    target.requires_grad_()
    out = layer(*inputs.values())
    assert torch.equal(out, expected)
    with pytest.raises(RuntimeError, match="no backward pass"):
        out.sum().backward()
    assert target.grad is None
    with torch.no_grad():
        assert not layer(*inputs.values()).requires_grad


def lose_a_rank(group: EPGroup, victim: int, how: str, folder: Path) -> None:
    """Run rounds until the victim dies or stops in the middle of one; survivors record their errors."""
    layer = layer_on(group)
    x, logits = tokens_of(group)
    routing = Routing(topk_ids=route(logits, ROUTING).topk_ids, topk_weights=torch.ones(x.shape[0], NUM_TOPK))
    start = time.monotonic()
    try:
        for step in range(1000):
            if step == 5 and group.rank == victim:
                options = {"layout": Layout.COMPACT, "scheme": get_scheme("none"), "layer": layer.tag}
                layer.transport.dispatch_send(x, routing, **options)
                be_lost(how)
            start = time.monotonic()
            layer(x, logits)
    except PeerLostError as error:
        record(folder, group.rank, (error.ranks, time.monotonic() - start < 8.0))
        with pytest.raises(PeerLostError):
            layer(x, logits)
        raise


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_name_a_rank_lost_in_mid_run(victim: int, how: str, tmp_path: Path) -> None:
    config = GroupConfig(timeout_secs=4, heartbeat_secs=0.2)
    with pytest.raises(RankFailedError) as caught:
        launch(lose_a_rank, victim, how, tmp_path, num_ranks=4, config=config, device="cpu", grace_secs=12)
    assert recorded(tmp_path) == {rank: ((victim,), True) for rank in range(4) if rank != victim}
    assert f"rank {victim}" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 64}, "hidden (48) does not fit the layer on rank 0, which needs 64"),
        ({"num_experts": 12}, "num_experts (10) does not fit the layer on rank 0, which needs 12"),
        ({"scheme": "fp8_block"}, "scheme (none) does not fit the layer on rank 0, which needs fp8_block"),
        ({"intermediate": 64}, "rows of w13 (64) does not fit the layer on rank 0, which needs 128"),
        ({}, "dtype of w13 (torch.float32) does not fit the layer on rank 0, which needs torch.bfloat16"),
    ],
    ids=["hidden", "num_experts", "scheme", "intermediate", "dtype"],
)
def test_layer_refuses_what_does_not_fit(change: dict, message: str) -> None:
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": NUM_EXPERTS} | change
    placement = Placement.linear(NUM_EXPERTS, 1)
    transport = create_transport(
        "local", EPGroup.single("cpu"), placement, TransportConfig(hidden=HIDDEN, max_tokens_per_rank=4)
    )
    with pytest.raises(ValueError) as caught:
        ExpertParallelMoE(MoEConfig(**sizes), local_weights(placement, 0), transport)
    assert message in str(caught.value)
