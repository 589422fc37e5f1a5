"""Cases beside the logits of whole models: one layer of a loaded model, called as vLLM's runner calls it.

Letters: T rows on this rank, H hidden, K top-k, E experts.
"""

import contextlib
import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import vllm
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.distributed import get_ep_group
from vllm.distributed.eplb.eplb_communicator import create_eplb_communicator
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import layer as factories
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import NaiveBatchedExperts
from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize
from vllm.v1.worker import ubatching
from vllm_twins import DEVICE

from ep_moe.config import Layout
from ep_moe.engines.common.hooks import check_hooks, check_version
from ep_moe.engines.vllm.eligibility import kind_of_layer
from ep_moe.engines.vllm.experts import EpMoeBatchedExperts
from ep_moe.engines.vllm.hooks import HOOKS, TESTED
from ep_moe.engines.vllm.prepare_finalize import EpMoePrepareAndFinalize, RoundOptions
from ep_moe.group import PeerLostError
from ep_moe.quant import get_scheme


@dataclasses.dataclass(frozen=True)
class Rows:
    """The input of a layer on one rank."""

    x: torch.Tensor  # [T, H]
    ids: torch.Tensor  # [T, K] int32
    weights: torch.Tensor  # [T, K]


def rows_of(made: Any, rank: int, num_rows: int, seed: int = 0) -> Rows:
    """Random rows of a rank."""
    random = torch.Generator().manual_seed(100 * seed + rank)
    moe = made.experts[0].moe_config
    x = torch.randn(num_rows, moe.hidden_dim, generator=random)
    scores = torch.rand(num_rows, moe.num_experts, generator=random)
    weights, ids = scores.topk(moe.experts_per_token, dim=-1)
    return Rows(x.to(DEVICE), ids.to(DEVICE, torch.int32), weights.to(DEVICE))


def call(made: Any, rows: Rows, counts: list[int] | None = None) -> torch.Tensor:
    """The routed experts of the first layer for these rows; `counts`: rows of each rank."""
    context: dict[str, Any] = {"num_tokens": rows.x.shape[0]}
    if made.dp > 1:
        given = [rows.x.shape[0]] * made.dp if counts is None else counts
        context["num_tokens_across_dp"] = torch.tensor(given, dtype=torch.int32)
    with torch.no_grad(), set_forward_context(None, made.config, **context):
        return made.experts[0].forward_modular(x=rows.x, topk_weights=rows.weights, topk_ids=rows.ids)


def any_rank(made: Any, found: bool) -> bool:
    """Whether it was found on any rank."""
    return any(made.group.all_gather_object(found))


def faults_are_seen(made: Any) -> None:
    """The comparison of logits fails with two experts swapped, with a token lost, and with a layer that is not ours."""

    def fails() -> bool:
        try:
            made.check_ours()
            made.check()
        except AssertionError:
            return any_rank(made, True)
        return any_rank(made, False)

    assert not fails()
    layer = made.experts[0]
    order = [1, 0, *range(2, layer.w13_weight.shape[0])]
    layer.w13_weight.data.copy_(layer.w13_weight.data[order])
    assert fails(), "two swapped experts were not seen"
    layer.w13_weight.data.copy_(layer.w13_weight.data[order])
    rows = EpMoePrepareAndFinalize._rows

    def without_first(self: Any, a1: Any, weights: Any, ids: torch.Tensor, on_input: bool) -> Any:
        return rows(self, a1, weights, ids.index_fill(0, torch.tensor([0], device=DEVICE), -1), on_input)

    with mock.patch.object(EpMoePrepareAndFinalize, "_rows", without_first):
        assert fails(), "a lost token was not seen"
    ours = type(layer.quant_method)
    layer.quant_method.__class__ = ours.__mro__[1]
    assert fails(), "a layer that is not ours was not seen"
    layer.quant_method.__class__ = ours
    assert not fails()


def halves_in_order(made: Any) -> None:
    """Shared experts run between the halves of the combine."""
    calls: list[str] = []
    kernel = made.experts[0].quant_method.moe_kernel
    runner = next(
        module for module in made.model.modules() if getattr(module, "routed_experts", None) is made.experts[0]
    )

    def noted(target: Any, name: str, as_name: str) -> Any:
        original = getattr(target, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(as_name)
            return original(*args, **kwargs)

        return mock.patch.object(target, name, wrapper)

    with contextlib.ExitStack() as stack:
        for name in ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv"):
            stack.enter_context(noted(kernel.prepare_finalize.transport, name, name))
        stack.enter_context(noted(kernel.fused_experts, "apply", "experts"))
        shared = next(module for module in runner._shared_experts.modules() if hasattr(module, "down_proj"))
        stack.enter_context(noted(shared, "forward", "shared"))
        made.check()
    assert calls == ["dispatch_send", "dispatch_recv", "experts", "combine_send", "shared", "combine_recv"], calls


def parameters_stay(made: Any) -> None:
    """What vLLM's expert load balancer needs: views of all parameters, to which it writes while ranks serve."""
    layer, rows = made.experts[0], rows_of(made, made.rank, 6)
    before = call(made, rows)
    views = layer.get_expert_weights()
    assert all(view.shape[0] == layer.local_num_experts for view in views)
    first = made.rank * (layer.moe_config.num_experts // made.dp + bool(layer.moe_config.num_experts % made.dp))
    for view in views:
        view.data.copy_(view.data[[1, 0, *range(2, view.shape[0])]])
    starts = made.group.all_gather_object(first)
    moved = rows.ids.clone()
    for start in starts:
        moved[rows.ids == start], moved[rows.ids == start + 1] = start + 1, start
    assert torch.equal(call(made, dataclasses.replace(rows, ids=moved)), before)
    for view in views:
        view.data.copy_(view.data[[1, 0, *range(2, view.shape[0])]])
    assert torch.equal(call(made, rows), before)


def balanced(made: Any) -> None:
    """vLLM's expert load balancer moves experts between ranks, there and back; outputs differ by the order of sums."""
    layer, group, rows = made.experts[0], get_ep_group(), rows_of(made, made.rank, 6)
    before, weights = call(made, rows), [list(layer.get_expert_weights())]
    buffers = [torch.empty_like(view) for view in weights[0]]
    communicator = create_eplb_communicator(group, "torch_nccl", weights, buffers)
    plain = torch.arange(layer.moe_config.num_experts)[None]
    turned = plain.roll(3, dims=1)  # logical expert of each physical one
    for old, new in ((plain, turned), (turned, plain)):
        rearrange_expert_weights_inplace(old, new, weights, buffers, group.device_group, communicator)
        places = new[0].argsort().to(rows.ids)
        found = call(made, dataclasses.replace(rows, ids=places[rows.ids.long()]))
        assert float((found - before).abs().max()) < 1e-6, (found - before).abs().max()
        assert float((call(made, rows) - before).abs().max() < 1e-6) == (new is plain)


def ranks_without_rows(made: Any) -> None:
    """No rows on the last rank, then on all."""
    counts = [5] * (made.dp - 1) + [0]
    rows = rows_of(made, made.rank, counts[made.rank])
    whole = call(made, rows_of(made, made.rank, 5))
    found = call(made, rows, counts)
    nothing = call(made, rows_of(made, made.rank, 0))
    assert nothing.shape[0] == 0
    assert torch.allclose(found, whole[: counts[made.rank]], atol=1e-5)  # sums of GEMMs depend on their heights


def checked_call(made: Any, rows: Rows) -> None:
    """A call, and what the device found in it: on a GPU the host does not read ids."""
    call(made, rows)
    if DEVICE == "cuda":
        made.experts[0].quant_method.moe_kernel.prepare_finalize.transport.check()


def bad_input(made: Any, most: int) -> None:
    """Errors on every rank that name what is wrong; the next step works. Failing experts end their round."""
    rank, last = made.rank, made.dp - 1
    rows = rows_of(made, rank, 4)
    before = call(made, rows)
    experts = made.experts[0].moe_config.num_experts
    bad = rows.ids.clone()
    if rank == last:
        bad[0, 0] = experts + 7
    with pytest.raises(ValueError, match=f"{experts + 7}" if rank == last else f"rank {last}"):
        checked_call(made, dataclasses.replace(rows, ids=bad))
    assert torch.equal(call(made, rows), before)
    too_many = rows_of(made, rank, most + 1 if rank == last else 2)
    with pytest.raises(ValueError, match=f"max_tokens_per_rank|rank {last}"):
        call(made, too_many, [2] * last + [most + 1])
    assert torch.equal(call(made, rows), before)
    broken = made.experts[0].quant_method.moe_kernel.fused_experts
    with mock.patch.object(broken, "_batch", side_effect=RuntimeError("no memory")) if rank == last else _nothing():
        if rank == last:
            with pytest.raises(RuntimeError, match="no memory"):
                call(made, rows)
        else:
            assert call(made, rows).isnan().any()
    assert torch.equal(call(made, rows), before)


_nothing = contextlib.nullcontext


def two_slots(made: Any) -> None:
    """Two micro-batches whose halves alternate, each on its slot, give what they give one after another."""
    layer = made.experts[0]
    state = layer.quant_method.ep_moe
    kernel = layer.quant_method.moe_kernel
    sizes = dataclasses.replace(kernel.prepare_finalize.transport.config, num_slots=2)
    shared = made.plugin.transports.get(state.process_group, layer.moe_config.num_experts, sizes, torch.device(DEVICE))
    options = dataclasses.replace(kernel.prepare_finalize.options, layout=Layout.COMPACT)
    exchange = EpMoePrepareAndFinalize(shared.transport, options)
    batches = [rows_of(made, made.rank, 5, seed) for seed in (1, 2)]
    outputs = [torch.full_like(rows.x, torch.nan) for rows in batches]
    plain = [call(made, rows) for rows in batches]

    @contextlib.contextmanager
    def micro_batch(slot: int) -> Iterator[None]:
        with mock.patch.object(ubatching, "dbo_current_ubatch_id", return_value=slot):
            yield

    fixed = (layer.global_num_experts, layer.expert_map, False, FUSED_MOE_UNQUANTIZED_CONFIG, False)
    receivers: list[Callable[[], Any]] = []
    for slot, rows in enumerate(batches):
        with micro_batch(slot):
            receivers.append(exchange.prepare_async(rows.x, rows.weights, rows.ids, *fixed)[1])
    received = []
    for slot in (0, 1):
        with micro_batch(slot):
            received.append(receivers[slot]()[2].batch)
    finals = []
    for slot, rows in enumerate(batches):
        with micro_batch(slot):
            y = state_experts(layer)(received[slot])
            finals.append(exchange.finalize_async(outputs[slot], y, rows.weights, rows.ids, False, None)[1])
    for slot in (1, 0):
        with micro_batch(slot):
            finals[slot]()
    for found, wanted in zip(outputs, plain, strict=True):
        assert torch.allclose(found, wanted, atol=1e-6)


def state_experts(layer: Any) -> Callable[[Any], torch.Tensor]:
    """Our experts with the layer's weights."""
    bound = layer.quant_method.moe_kernel.fused_experts
    return lambda batch: bound._experts(batch, bound._weights)


def crossed(made: Any) -> None:
    """Our prepare/finalize with vLLM's batched experts, its prepare/finalize with ours: bit for bit theirs alone.

    With two experts per token: of more, vLLM sums in the order of experts, and we in the order of ids.
    """
    layer, moe = made.experts[0], made.experts[0].moe_config
    rows, most = rows_of(made, 0, 9), 16
    rows = Rows(rows.x, rows.ids[:, :2].contiguous(), rows.weights[:, :2].contiguous())
    transport = layer.quant_method.moe_kernel.prepare_finalize.transport
    options = RoundOptions(layout=Layout.BATCHED, scheme=get_scheme("none"))
    sizes = dataclasses.replace(transport.config, max_tokens_per_rank=most)
    own = made.plugin.transports.get(None, moe.num_experts, sizes, torch.device(DEVICE)).transport

    def run(ours: bool, our_experts: bool) -> torch.Tensor:
        exchange = (
            EpMoePrepareAndFinalize(own, options) if ours else BatchedPrepareAndFinalize(most, moe.num_experts, 1, 0)
        )
        kind = EpMoeBatchedExperts if our_experts else NaiveBatchedExperts
        kernel = mk.FusedMoEKernel(exchange, kind(moe, FUSED_MOE_UNQUANTIZED_CONFIG, most, 1))
        with torch.no_grad(), set_forward_context(None, made.config, num_tokens=9):
            return kernel.apply(
                hidden_states=rows.x,
                w1=layer.w13_weight,
                w2=layer.w2_weight,
                topk_weights=rows.weights,
                topk_ids=rows.ids,
                activation=MoEActivation.SILU,
                global_num_experts=moe.num_experts,
                expert_map=None,
                apply_router_weight_on_input=False,
            )

    theirs = run(False, False)
    for ours, our_experts in ((True, False), (False, True), (True, True)):
        difference = (run(ours, our_experts) - theirs).abs().max()
        assert difference == 0, f"prepare/finalize ours: {ours}, experts ours: {our_experts}: {difference:.1e}"


def other_layers(made: Any) -> None:
    """A layer that is not eligible stays on vLLM's path and is named once; strict, it is an error."""
    caught: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: caught.append(record.getMessage())  # type: ignore[method-assign]
    made.plugin.log.addHandler(handler)
    make = getattr(factories, "FusedMoEFactory", None) or factories.FusedMoE

    def layer(prefix: str) -> Any:
        sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 32, "intermediate_size": 16}
        return make(**sizes, activation="gelu_tanh", params_dtype=torch.float32, prefix=prefix)

    assert not hasattr(layer("odd.0").routed_experts.quant_method, "ep_moe")
    assert len(caught) == 1, caught
    assert "does not run odd.0" in caught[0]
    assert "gelu_tanh" in caught[0]
    layer("odd.1")
    assert len(caught) == 1, caught
    plugin = made.plugin
    plugin.config, kept = dataclasses.replace(plugin.config, strict=True), plugin.config
    with pytest.raises(ValueError, match="gelu_tanh.*EP_MOE_STRICT"):
        layer("odd.2")
    plugin.config = kept
    ours = made.experts[0]
    for changes, words in (
        ({"hidden_dim": 24}, r"hidden \(24\) is no multiple of 16"),
        ({"intermediate_size_per_partition": 8}, r"intermediate \(8\)"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"in_dtype": torch.float64}, "float64"),
        ({"moe_parallel_config": dataclasses.replace(ours.moe_config.moe_parallel_config, tp_size=2)}, "sliced"),
    ):
        moe = copy.copy(ours.moe_config)
        for name, value in changes.items():
            setattr(moe, name, value)
        with pytest.raises(ValueError, match=words):
            kind_of_layer(ours, ours.quant_method, moe)
    kind_of_layer(ours, ours.quant_method, ours.moe_config)


def hooks_are_checked() -> None:
    """A hook that is missing or takes other arguments is named with engine and version; so is another version."""
    words = rf"vLLM {vllm.__version__}: .*FusedMoEKernel.apply takes \(self, x\)"
    changed = mock.patch.object(mk.FusedMoEKernel, "apply", lambda self, x: x)
    with changed, pytest.raises(RuntimeError, match=words):
        check_hooks("vLLM", vllm.__version__, TESTED, HOOKS)
    prepare = mk.FusedMoEPrepareAndFinalizeModular.prepare_async
    del mk.FusedMoEPrepareAndFinalizeModular.prepare_async
    try:
        with pytest.raises(RuntimeError, match=f"vLLM {vllm.__version__} has no .*prepare_async.*0.26.0 and 0.33.0"):
            check_hooks("vLLM", vllm.__version__, TESTED, HOOKS)
    finally:
        mk.FusedMoEPrepareAndFinalizeModular.prepare_async = prepare
    check_hooks("vLLM", vllm.__version__, TESTED, HOOKS)
    log = mock.Mock(spec=logging.Logger)
    check_version("vLLM", vllm.__version__, TESTED, log)
    log.warning.assert_not_called()
    check_version("vLLM", "9.9", TESTED, log)
    log.warning.assert_called_once()


def rounds(made: Any, count: int) -> None:
    """Several rounds: the first may still have the rows of a rank that then died."""
    for _ in range(count):
        call(made, rows_of(made, made.rank, 4))


def dead_rank(made: Any) -> None:
    """The last rank is gone; the others name it, in bounded time."""
    began = time.monotonic()
    with pytest.raises(PeerLostError, match=f"rank {made.dp - 1}"):
        rounds(made, 3)
    assert time.monotonic() - began < 30
