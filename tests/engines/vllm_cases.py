"""Cases beside the logits of whole models: one layer of a loaded model, called as vLLM's runner calls it.

Letters: T rows on this rank, H hidden, K top-k, E experts.
"""

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import engine_cases
import pytest
import torch
import vllm
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from engine_cases import Rows, random_rows
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
from ep_moe.engines.vllm.eligibility import kind_of_layer
from ep_moe.engines.vllm.experts import EpMoeBatchedExperts
from ep_moe.engines.vllm.hooks import HOOKS, TESTED
from ep_moe.engines.vllm.prepare_finalize import EpMoePrepareAndFinalize, RoundOptions
from ep_moe.quant import get_scheme


def rows_of(made: Any, rank: int, num_rows: int, seed: int = 0) -> Rows:
    """Random rows of a rank."""
    moe = made.experts[0].moe_config
    rows = random_rows(rank, num_rows, moe.hidden_dim, moe.num_experts, moe.experts_per_token, seed)
    return Rows(rows.x.to(DEVICE), rows.ids.to(DEVICE), rows.weights.to(DEVICE))


def call(made: Any, rows: Rows, counts: list[int] | None = None) -> torch.Tensor:
    """The routed experts of the first layer for these rows; `counts`: rows of each rank."""
    context: dict[str, Any] = {"num_tokens": rows.x.shape[0]}
    if made.dp > 1:
        given = [rows.x.shape[0]] * made.dp if counts is None else counts
        context["num_tokens_across_dp"] = torch.tensor(given, dtype=torch.int32)
    with torch.no_grad(), set_forward_context(None, made.config, **context):
        return made.experts[0].forward_modular(x=rows.x, topk_weights=rows.weights, topk_ids=rows.ids)


def faults_are_seen(made: Any) -> None:
    """`engine_cases.faults_are_seen`."""
    rows = EpMoePrepareAndFinalize._rows

    def without_first(self: Any, a1: Any, weights: Any, ids: torch.Tensor, on_input: bool) -> Any:
        return rows(self, a1, weights, ids.index_fill(0, torch.tensor([0], device=DEVICE), -1), on_input)

    losing = mock.patch.object(EpMoePrepareAndFinalize, "_rows", without_first)
    engine_cases.faults_are_seen(made, losing)


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
    layer = made.experts[0]
    views = layer.get_expert_weights()
    assert all(view.shape[0] == layer.local_num_experts for view in views)
    first = made.rank * (layer.moe_config.num_experts // made.dp + bool(layer.moe_config.num_experts % made.dp))
    starts = made.group.all_gather_object(first)
    engine_cases.parameters_stay(functools.partial(call, made), rows_of(made, made.rank, 6), views, starts)


def balanced(made: Any) -> None:
    """vLLM's expert load balancer moves experts between ranks."""
    layer, group = made.experts[0], get_ep_group()
    weights = [list(layer.get_expert_weights())]
    buffers = [torch.empty_like(view) for view in weights[0]]
    communicator = create_eplb_communicator(group, "torch_nccl", weights, buffers)

    def move(old: torch.Tensor, new: torch.Tensor) -> None:
        rearrange_expert_weights_inplace(old[None], new[None], weights, buffers, group.device_group, communicator)

    count = layer.moe_config.num_experts
    engine_cases.balanced(functools.partial(call, made), rows_of(made, made.rank, 6), count, move)


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
        ({"hidden_dim": 24}, r"hidden \(24\)"),
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
    """Hooks of vLLM that are missing or changed."""
    changed, gone = (mk.FusedMoEKernel, "apply"), (mk.FusedMoEPrepareAndFinalizeModular, "prepare_async")
    engine_cases.hooks_are_checked("vLLM", vllm.__version__, TESTED, HOOKS, changed, gone)


def dead_rank(made: Any) -> None:
    """The last rank is gone."""
    engine_cases.dead_rank(lambda: call(made, rows_of(made, made.rank, 4)), made.dp - 1)
