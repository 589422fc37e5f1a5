"""A layer's call in micro-batches: the bits of calls of each part, in the order that overlaps, also after failures."""

import dataclasses
import functools

import pytest
import torch
from helpers.layers import NUM_EXPERTS, ROUTING, fail_on_rank_1, layer_on, tokens, tokens_of

from ep_moe.config import GroupConfig, Layout, TransportConfig
from ep_moe.experts import Experts
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.layer import ExpertParallelMoE
from ep_moe.layer.micro_batches import row_slices, steps
from ep_moe.layout import ExpertBatch
from ep_moe.routing import route
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from ep_moe.transport import create_transport
from ep_moe.weights import ExpertWeights


class Watched:
    """Experts that note which slots are open when they compute."""

    def __init__(self, layer: ExpertParallelMoE) -> None:
        self._experts: Experts = layer.experts
        self._layer, self.open_slots = layer, list[tuple[int, ...]]()

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights, *, out: torch.Tensor | None = None) -> torch.Tensor:
        self.open_slots.append(self._layer.transport.open_slots)
        return self._experts(batch, weights, out=out)


def compute(group: EPGroup, scheme: str, layout: Layout) -> tuple[bool, float, list[tuple[int, ...]]]:
    """Whether 1 to 4 micro-batches have the bits of calls of their parts; the error beside one call; the open slots."""
    layer = layer_on(group, "linear", scheme, layout, torch.float32)
    watched = layer.experts = Watched(layer)
    x, logits = tokens_of(group)
    routing = route(logits, ROUTING, routing_bias=layer.routing_bias)
    whole, same, error = layer(x, logits), True, 0.0
    for count in (1, 2, 3, 4):
        parts = [layer(x[rows], logits[rows]) for rows in row_slices(len(x), count)]
        watched.open_slots.clear()
        found = layer.forward_micro_batches(x, logits, num_micro_batches=count)
        slots = list(watched.open_slots)
        routed = layer.forward_micro_batches(
            x, (routing.topk_ids, routing.topk_weights), num_micro_batches=count, max_num_tokens=30
        )
        same = same and torch.equal(found, torch.cat(parts))
        parts = [
            layer.forward_routed(x[rows], routing.topk_ids[rows], routing.topk_weights[rows])
            for rows in row_slices(len(x), count)
        ]
        same = same and torch.equal(routed, torch.cat(parts))
        error = max(error, worst_row_error(found, whole)) if len(x) else error
        assert layer.transport.open_slots == ()
    return same, error, slots


@pytest.mark.parametrize(
    ("num_ranks", "scheme", "layout"),
    [(1, "none", Layout.FLAT), (2, "none", Layout.COMPACT), (4, "fp8_token", Layout.BATCHED)],
)
def test_micro_batches_have_the_bits_of_their_parts(num_ranks: int, scheme: str, layout: Layout) -> None:
    """Ranks have different numbers of tokens, one of four has none."""
    for same, error, slots in launch(compute, scheme, layout, num_ranks=num_ranks, device="cpu"):
        assert same
        assert error < ROW_ERROR_LIMITS["float32"]
        assert slots == [(0, 1)] * 4  # of four micro-batches; the last one's beside the results of the third


def test_the_order_of_steps() -> None:
    words = "send 0, receive 0, send 1, compute 0, receive 1, send_back 0, compute 1, receive_back 0, send_back 1, "
    assert [f"{step} {index}" for step, index in steps(2)] == [*words.split(", ")[:-1], "receive_back 1"]
    assert [step for step, _ in steps(1)] == ["send", "receive", "compute", "send_back", "receive_back"]
    for count in (1, 2, 3, 6):
        order = list(steps(count))
        for name in ("send", "receive", "compute", "send_back", "receive_back"):
            assert [index for step, index in order if step == name] == list(range(count))
        for index in range(count):
            calls = ("send", "receive", "compute", "send_back", "receive_back")
            places = [order.index((call, index)) for call in calls]
            assert places == sorted(places)
        for index in range(2, count):  # a slot has one round at a time
            assert order.index(("receive_back", index - 2)) < order.index(("send", index))


FAILING = {  # a function, how many of its calls succeed before one fails, and the first micro-batch that is lost
    "route": ("ep_moe.layer.base.route", 0, 0),
    "first-send": ("ep_moe.transport.collective.transport.plan_send", 0, 0),
    "second-send": ("ep_moe.transport.collective.transport.plan_send", 1, 0),
    "first-receive": ("ep_moe.transport.host_sync.pack", 0, 0),
    "first-experts": ("ep_moe.experts.ReferenceExperts.__call__", 0, 0),
    "second-experts": ("ep_moe.experts.ReferenceExperts.__call__", 1, 1),
    "third-send": ("ep_moe.transport.collective.transport.plan_send", 2, 1),
}


def fail_on_one_rank(group: EPGroup, where: str, before: int, first_lost: int) -> tuple[bool, bool]:
    layer = layer_on(group)
    first = row_slices(len(tokens_of(group)[0]), 3)[first_lost].start
    call = functools.partial(layer.forward_micro_batches, num_micro_batches=3)
    return fail_on_rank_1(group, layer, call, where, before, first)


@pytest.mark.parametrize("name", FAILING)
def test_a_failing_step_costs_the_others_what_they_sent_there(name: str) -> None:
    config = GroupConfig(timeout_secs=20)
    told = launch(fail_on_one_rank, *FAILING[name], num_ranks=3, config=config, device="cpu")
    assert told == [(True, True)] * 3


def mistakes(group: EPGroup) -> list[str]:
    """What each rank reads of mistakes that rank 1 makes, each followed by a good call."""
    layer = layer_on(group)
    x, logits = tokens_of(group)
    sound = layer.forward_micro_batches(x, logits)
    mine, found = group.rank == 1, list[str]()
    for given, router in ((x, logits[:, 1:] if mine else logits), (x.double() if mine else x, logits)):
        with pytest.raises(ValueError) as caught:
            layer.forward_micro_batches(given, router)
        found.append(str(caught.value))
        assert torch.equal(layer.forward_micro_batches(x, logits), sound)
    return found


def test_a_mistake_on_one_rank_is_told_to_all_and_the_next_call_works() -> None:
    theirs, own = launch(mistakes, num_ranks=2, config=GroupConfig(timeout_secs=20), device="cpu")
    assert own[0].startswith(f"router_logits is (8, {NUM_EXPERTS - 1}), expected [num_tokens, num_experts] (8, ")
    assert "torch.float64" in own[1]
    assert all("rank 1" in text for text in theirs)


def test_what_micro_batches_need() -> None:
    group = EPGroup.single("cpu")
    layer = layer_on(group)
    x, logits = tokens()
    for count in (0, 1.5, True):
        with pytest.raises(ValueError, match=rf"num_micro_batches \({count}\) must be an int of at least 1"):
            layer.forward_micro_batches(x, logits, num_micro_batches=count)  # type: ignore[arg-type]
    sizes = TransportConfig(hidden=48, max_tokens_per_rank=30, dtype=torch.float32, num_slots=1)
    transport = create_transport("auto", group, layer.placement, sizes)
    single = ExpertParallelMoE(layer.config, layer.weights, transport, routing_bias=layer.routing_bias)
    with pytest.raises(ValueError, match=r"at least 2 slots; num_slots is 1"):
        single.forward_micro_batches(x, logits)
    small = create_transport(
        "auto", group, layer.placement, dataclasses.replace(sizes, num_slots=2, max_tokens_per_rank=15)
    )
    halved = ExpertParallelMoE(layer.config, layer.weights, small, routing_bias=layer.routing_bias)
    assert halved.forward_micro_batches(x, logits).shape == x.shape  # M bounds a micro-batch, not the call
    with pytest.raises(RuntimeError, match="no backward pass"):
        layer.forward_micro_batches(x.requires_grad_(), logits).sum().backward()
