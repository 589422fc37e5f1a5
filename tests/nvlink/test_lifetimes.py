"""Transports side by side and in a subset of ranks; equal rounds, unequal configs."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from compile_check.exchange_cases import make_launchers
from helpers import layers

from ep_moe.config import GroupConfig, Layout, MoEConfig, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.kernel_launch.allocation import Workspace
from ep_moe.kernel_launch.kernel import Kernel, present
from ep_moe.launch import RankFailedError
from ep_moe.layer import ExpertParallelMoE
from ep_moe.layout import Flat
from ep_moe.placement import Placement
from ep_moe.quant import StoredMatrix, as_bytes, get_scheme
from ep_moe.routing import Routing
from ep_moe.testing import TransportCase, check_round, poisoned_memory
from ep_moe.testing.rounds import compute_experts
from ep_moe.transport import CollectiveTransport, create_transport
from ep_moe.transport.layer_tag import LayerTag
from ep_moe.transport.one_sided import NvlinkTransport, dispatch_launcher
from ep_moe.transport.one_sided.dispatch_launcher import DispatchLauncher
from ep_moe.transport.one_sided.round_plan import RoundPlan, RoundSpec
from ep_moe.weights import ExpertWeights
from nvlink.common import on_ranks
from nvlink.reference import raw

CASE = TransportCase(name="lifetimes", tokens=(3, 2), scheme="fp8_token", hidden=48, num_topk=3)


def side_by_side(group: EPGroup) -> None:
    """Two transports, of other sizes, in turn; both with an open round."""
    other = dataclasses.replace(CASE, name="beside", tokens=(1, 4), hidden=64, scheme="none", layout=Layout.FLAT)
    cases = (CASE, other)
    both = [NvlinkTransport(group, case.make_placement(), case.config) for case in cases]
    for case, transport in zip(cases, both, strict=True):
        check_round(transport, case, group.device)
    inputs = [case.inputs(group.rank) for case in cases]
    for transport, case, brought in zip(both, cases, inputs, strict=True):
        scheme = get_scheme(case.scheme)
        transport.dispatch_send(brought.x, brought.routing, layout=case.layout, scheme=scheme, slot=1)
    for transport, case in zip(both[::-1], cases[::-1], strict=True):
        check_round(transport, case, group.device)  # on slot 0, while slot 1 is open
    for transport in both:
        transport.abandon(slot=1)
        transport.destroy()


def in_a_subset(world: EPGroup) -> None:
    """A transport of ranks 0 and 2 of three; rank 1 has none."""
    subset = dist.new_group([0, 2])
    if world.rank == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    with EPGroup.from_process_group(subset, store, GroupConfig(timeout_secs=60)) as group:
        transport = create_transport("nvlink", group, CASE.make_placement(), CASE.config)
        check_round(transport, CASE, group.device)
        transport.destroy()


LIVES = {"side_by_side": (side_by_side, 2), "subset": (in_a_subset, 3)}


@pytest.mark.parametrize("name", LIVES)
def test_lifetimes(name: str) -> None:
    check, num_ranks = LIVES[name]
    on_ranks(check, num_ranks=num_ranks)


def bits_of_a_round(transport: NvlinkTransport, case: TransportCase, slot: int, halves: bool) -> list[torch.Tensor]:
    """All outputs of a round, except for undefined memory."""
    inputs, scheme = case.inputs(transport.rank), get_scheme(case.scheme)
    with poisoned_memory():
        options: dict[str, Any] = {"layout": case.layout_of(transport.rank), "scheme": scheme, "slot": slot}
        if halves:
            transport.dispatch_send(inputs.x, inputs.routing, **options)
            dispatched = transport.dispatch_recv(slot=slot)
        else:
            dispatched = transport.dispatch(inputs.x, inputs.routing, **options)
        batch = dispatched.batch
        found = [batch.expert_row_start, batch.expert_num_tokens]
        if isinstance(batch, Flat):
            rows = int(batch.expert_num_tokens.sum())
            found += [batch.row_index[:rows], batch.token_to_row, batch.local_topk_ids, batch.topk_weights]
        else:
            found += [as_bytes(batch.x), as_bytes(batch.scale)]  # rows without a token keep their fill
        found = [tensor.clone() for tensor in found]
        y = compute_experts(batch, case.make_placement().starts[transport.rank])
        return [*found, transport.combine(y, dispatched)]


def same_bits(group: EPGroup) -> list[int]:
    """For each layout the number of tensors that differ in any bit from those of the first round."""
    differing = []
    for layout in Layout:
        case = dataclasses.replace(CASE, layout=layout)
        transport = NvlinkTransport(group, case.make_placement(), case.config)
        first, *others = (
            bits_of_a_round(transport, case, slot, halves) for slot, halves in ((0, False), (1, True), (0, True))
        )
        pairs = [pair for other in others for pair in zip(first, other, strict=True)]
        differing.append(sum(not torch.equal(raw(a.flatten()), raw(b.flatten())) for a, b in pairs))
        group.barrier()
        transport.destroy()
    return differing


def test_the_same_round_has_the_same_bits() -> None:
    assert on_ranks(same_bits) == [[0, 0, 0], [0, 0, 0]]


def test_experts_prepare_once_for_all_batches_of_a_size() -> None:
    plans = make_launchers(
        TransportConfig(hidden=64, max_tokens_per_rank=4096, max_topk=8), Placement.linear(64, 4)
    ).plans

    def plan_of(
        num_tokens: int, layout: Layout = Layout.FLAT, scheme: str = "none", counted: bool = False
    ) -> RoundPlan:
        size = plans.size_for(num_tokens)
        return plans.make(RoundSpec(num_tokens, 8, layout, get_scheme(scheme), False, counted, size))

    first = plan_of(1030)
    assert first.expected_rows == 1280 * 4 * 8 // 64
    for alike in (plan_of(1025), plan_of(1280), plan_of(1100, counted=True)):
        assert alike.signature is first.signature
        assert alike.expected_rows == first.expected_rows
    others = [plan_of(1281), plan_of(1030, Layout.COMPACT), plan_of(1030, scheme="fp8_block"), plan_of(17), plan_of(19)]
    assert len({id(plan.signature) for plan in (first, *others)}) == 6
    assert [plan.expected_rows for plan in others[-2:]] == [9, 10]  # 17 and 19 tokens bring 8.5 and 9.5
    assert plan_of(1024).expected_rows == 1024 * 4 * 8 // 64


class SameMemory(Workspace):
    """Allocates once."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        memory = self.allocate()
        self.allocate = lambda: memory


@pytest.mark.parametrize("layout", list(Layout))
def test_a_repeated_round_passes_the_addresses_of_a_first(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[list[int]] = []
    launch = Kernel.__call__

    def recorded(kernel: Kernel, tensors: tuple[Any, ...], numbers: tuple[int, ...] = ()) -> None:
        first.append([*(tensor.data_ptr() for tensor in present(tensors)), *present(numbers)])
        launch(kernel, tensors, numbers)

    monkeypatch.setattr(Kernel, "__call__", recorded)
    with EPGroup.single("cpu") as group:
        config = TransportConfig(hidden=256, max_tokens_per_rank=4, max_topk=2, dtype=torch.bfloat16)
        transport = NvlinkTransport(group, Placement.linear(4, 1), config)
        x, shared = (torch.randn(3, 256).bfloat16() for _ in range(2))
        routing = Routing(
            topk_ids=torch.tensor([[0, 1], [3, -1], [2, 0]], dtype=torch.int32), topk_weights=torch.rand(3, 2)
        )
        scheme = get_scheme("fp8_block")
        monkeypatch.setattr(dispatch_launcher, "Workspace", SameMemory)

        def plan() -> Any:
            (found,) = transport._plans._plans.values()
            return found

        def run() -> None:
            dispatched = transport.dispatch(x, routing, layout=layout, scheme=scheme, layer=LayerTag(number=5))
            y = torch.zeros(dispatched.batch.output_shape, dtype=config.dtype)
            ys.append(y)
            results.append(transport.combine(ys[0], dispatched, shared=shared))
            assert dispatched.batch.template.signature is plan().signature

        ys: list[torch.Tensor] = []
        results: list[torch.Tensor] = []
        run()
        again: list[list[int]] = []
        for kernel in (plan().dispatches[0, 0, True, True], plan().combines[0, False, shared.dtype, True, True]):
            kernel.run = lambda values: again.append([*values])
        object.__setattr__(plan(), "new_result", lambda: results[0])
        run()
        assert results[1] is results[0]
        numbers = [launches[0].pop(-2) for launches in (first, again)]  # of the rounds, before the timeout
        assert numbers == [numbers[0], numbers[0] + 1]
        assert again == first
        transport.destroy()


def count_rounds(group: EPGroup) -> tuple[list[int], list[int]]:
    """Rounds on both slots: tokens per expert, summed here and by the kernels."""
    transport = NvlinkTransport(group, CASE.make_placement(), CASE.config)
    inputs, scheme, total = CASE.inputs(group.rank), get_scheme(CASE.scheme), 0
    for slot, tokens in ((0, 9), (1, 1), (0, 0)):
        routing = Routing(topk_ids=inputs.routing.topk_ids[:tokens], topk_weights=inputs.routing.topk_weights[:tokens])
        dispatched = transport.dispatch(inputs.x[:tokens], routing, layout=Layout.COMPACT, scheme=scheme, slot=slot)
        total = total + dispatched.batch.expert_num_tokens.long()
        transport.combine(torch.zeros(dispatched.batch.output_shape, dtype=CASE.dtype), dispatched)
    found = transport.statistics()
    assert found.waited_ns.shape == (group.num_ranks,)
    assert found.last_waited_ns.shape == (CASE.config.num_slots, group.num_ranks)
    transport.destroy()
    return total.tolist(), found.expert_tokens.tolist()


def test_tokens_of_experts_are_counted() -> None:
    for added, counted in on_ranks(count_rounds):
        assert counted == added
        assert sum(counted) > 0


def dispatch_again(group: EPGroup) -> int:
    """Rank 1 runs out of memory for its batch and calls again while the others wait. Returns the number of rounds."""
    transport = NvlinkTransport(group, CASE.make_placement(), CASE.config)
    if group.rank == 1:
        inputs = CASE.inputs(1)
        with no_memory_for_batches(), pytest.raises(torch.OutOfMemoryError):
            transport.dispatch(inputs.x, inputs.routing, layout=CASE.layout, scheme=get_scheme(CASE.scheme))
    check_round(transport, CASE, group.device)
    transport.destroy()
    return transport.num_rounds


@contextlib.contextmanager
def no_memory_for_batches() -> Iterator[None]:
    """There is no memory for batches of a layout with memory of its own, as on a full GPU."""
    receive = DispatchLauncher.receive

    def fail(launcher: DispatchLauncher, round_: Any, **options: Any) -> Any:
        if round_.plan.spec.layout is not Layout.FLAT:
            raise torch.OutOfMemoryError("as of a full GPU")
        return receive(launcher, round_, **options)

    with mock.patch.object(DispatchLauncher, "receive", fail):
        yield


def test_a_dispatch_without_memory_may_be_made_again() -> None:
    assert on_ranks(dispatch_again) == [1, 1]


def give_up(group: EPGroup) -> list[bool]:
    """Rank 1 runs out of memory for a batch already sent, and abandons it. Returns which of rank 0's rows are NaN."""
    transport, inputs, nan = NvlinkTransport(group, CASE.make_placement(), CASE.config), CASE.inputs(group.rank), []
    transport.dispatch_send(inputs.x, inputs.routing, layout=CASE.layout, scheme=get_scheme(CASE.scheme))
    if group.rank == 1:
        with no_memory_for_batches(), pytest.raises(torch.OutOfMemoryError):
            transport.dispatch_recv()
        transport.abandon()
    else:
        dispatched = transport.dispatch_recv()
        y = torch.zeros(dispatched.batch.output_shape, dtype=CASE.dtype)
        out = transport.combine(y, dispatched, out=torch.ones_like(inputs.x))
        nan = out.isnan().all(1).tolist()
    check_round(transport, CASE, group.device)
    transport.destroy()
    return nan


def test_a_batch_without_memory_is_abandoned() -> None:
    ids, starts = CASE.inputs(0).routing.topk_ids, CASE.make_placement().starts
    there = (ids >= starts[1]) & (ids < starts[2])
    assert on_ranks(give_up) == [there.any(1).tolist(), []]


def end_the_group(group: EPGroup) -> list[str]:
    """A transport's error in an open round once its group is destroyed."""
    transport, inputs = NvlinkTransport(group, CASE.make_placement(), CASE.config), CASE.inputs(group.rank)
    scheme = get_scheme(CASE.scheme)
    dispatched = transport.dispatch(inputs.x, inputs.routing, layout=CASE.layout, scheme=scheme)
    y = torch.zeros(dispatched.batch.output_shape, dtype=CASE.dtype)
    group.barrier()
    group.destroy()
    calls = [
        lambda: transport.combine(y, dispatched),
        lambda: transport.dispatch(inputs.x, inputs.routing, layout=CASE.layout, scheme=scheme, slot=1),
        transport.abandon,
        transport.check,
    ]
    told = []
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        told.append(str(caught.value))
    transport.destroy()
    return told


def test_a_destroyed_group_exchanges_nothing() -> None:
    for rank, told in enumerate(on_ranks(end_the_group)):
        assert [f"rank {rank} has left this group" in words for words in told] == [True] * 4, told


def layer_without_memory(group: EPGroup) -> bool:
    """Rank 1's layer runs out of memory for its batch: are rank 0's results NaN for its experts, and the next right?"""
    hidden, intermediate, case = CASE.hidden, 32, CASE
    transport, inputs = NvlinkTransport(group, case.make_placement(), case.config), case.inputs(group.rank)
    experts, routing = transport.placement.num_local_experts(group.rank), inputs.routing
    generator = torch.Generator().manual_seed(group.rank)
    weights = ExpertWeights(
        w13=StoredMatrix(torch.randn(experts, 2 * intermediate, hidden, generator=generator).to(case.dtype)),
        w2=StoredMatrix(torch.randn(experts, hidden, intermediate, generator=generator).to(case.dtype)),
    )
    config = MoEConfig(hidden=hidden, intermediate=intermediate, num_experts=case.num_experts)
    layer = ExpertParallelMoE(config, weights, transport, experts="torch")
    sound = layer.forward_routed(inputs.x, routing.topk_ids, routing.topk_weights)
    if group.rank == 1:
        with no_memory_for_batches(), pytest.raises(torch.OutOfMemoryError):
            layer.forward_routed(inputs.x, routing.topk_ids, routing.topk_weights)
        right = True
    else:
        first, last = transport.placement.starts[1:3]
        lost = ((routing.topk_ids >= first) & (routing.topk_ids < last)).any(1)
        found = layer.forward_routed(inputs.x, routing.topk_ids, routing.topk_weights)
        right = bool(lost.any()) and torch.equal(found.isnan().all(1), lost)
        right = right and torch.equal(found[~lost], sound[~lost])
    again = layer.forward_routed(inputs.x, routing.topk_ids, routing.topk_weights)
    transport.check()
    transport.destroy()
    return right and torch.equal(again, sound)


def test_a_layer_without_memory_costs_the_others_what_they_sent_there() -> None:
    assert on_ranks(layer_without_memory) == [True, True]


def in_micro_batches(group: EPGroup) -> list[torch.Tensor]:
    """The results in three micro-batches by nvlink and by collective; on rank 1 the last call fails in between."""
    found = []
    for name in ("nvlink", "collective"):
        like = layers.layer_on(group, "linear", "fp8_token", Layout.COMPACT, torch.float32)
        transport = create_transport(
            name, group, like.placement, TransportConfig(hidden=48, max_tokens_per_rank=5, dtype=torch.float32)
        )
        shared, bias = like.shared_experts, like.routing_bias
        layer = ExpertParallelMoE(like.config, like.weights, transport, routing_bias=bias, shared_experts=shared)
        x, logits = layers.tokens_of(group)
        found.append(layer.forward_micro_batches(x, logits, num_micro_batches=3))
        if name == "nvlink" and group.rank == 1:
            layer.shared_experts = lambda x: (_ for _ in ()).throw(MemoryError("no memory"))
            with pytest.raises(MemoryError):
                layer.forward_micro_batches(x, logits, num_micro_batches=3)
            layer.shared_experts = shared
        elif name == "nvlink":
            lost = layer.forward_micro_batches(x, logits, num_micro_batches=3).isnan().all(1)
            assert torch.equal(lost, layers.sent_to_rank_1(layer, logits))
        if name == "nvlink":
            found.append(layer.forward_micro_batches(x, logits, num_micro_batches=3))
            transport.check()
        transport.destroy()
    return found


def test_micro_batches_in_two_slots() -> None:
    for first, again, by_collective in on_ranks(in_micro_batches):
        assert torch.equal(first, by_collective)
        assert torch.equal(again, by_collective)


def test_no_tokens_of_any_strides() -> None:
    case = dataclasses.replace(CASE, tokens=(0,), scheme="none")
    with EPGroup.single("cpu") as group:
        transport = NvlinkTransport(group, case.make_placement(), case.config)
        inputs = case.inputs(0)
        for x in (inputs.x.repeat(1, 2)[:, 1::2], inputs.x.repeat(1, 2)[:, 1 : 1 + case.hidden]):
            dispatched = transport.dispatch(x, inputs.routing, layout=case.layout, scheme=get_scheme("none"))
            assert int(dispatched.batch.expert_num_tokens.sum()) == 0
            result = transport.combine(compute_experts(dispatched.batch, 0), dispatched)
            assert result.shape == (0, case.hidden)
        transport.check()
        transport.destroy()


def other_config(group: EPGroup) -> str:
    config = dataclasses.replace(CASE.config, hidden=64 if group.rank == 1 else 48)
    case, kind = (
        dataclasses.replace(CASE, tokens=(2, 2, 2)),
        CollectiveTransport if group.rank == 1 else NvlinkTransport,
    )
    with pytest.raises(ValueError) as caught:
        kind(group, case.make_placement(), config)
    return str(caught.value)


def test_an_unequal_config_is_named() -> None:
    said = on_ranks(other_config, num_ranks=3)
    pairs, kinds = ["0 and rank 1", "1 and rank 0", "2 and rank 1"], ["NvlinkTransport", "CollectiveTransport"]
    values = [((48, 64)[:: 1 - 2 * odd], kinds[:: 1 - 2 * odd]) for odd in (False, True, False)]
    assert said == [
        f"rank {pair} make the transport differently: hidden ({a} and {b}); transport ({x} and {y})"
        for pair, ((a, b), (x, y)) in zip(pairs, values, strict=True)
    ]


def a_placement_for_others(group: EPGroup) -> None:
    NvlinkTransport(group, dataclasses.replace(CASE, tokens=(1, 1, 1)).make_placement(), CASE.config)


def test_a_placement_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(RankFailedError, match="spreads experts over 3 ranks, the group has 2"):
        on_ranks(a_placement_for_others)
