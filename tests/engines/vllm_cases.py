"""Cases beside the logits of whole models: one layer of a loaded model, called as vLLM's runner calls it.

Letters: T rows on this rank, H hidden, K top-k, E experts.
"""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import engine_cases
import torch
import vllm
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from engine_cases import Rows, configured, method, noted, random_rows
from prompts import prompts
from vllm.distributed import get_ep_group
from vllm.distributed.eplb.eplb_communicator import create_eplb_communicator
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import layer as factories
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import NaiveBatchedExperts
from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.worker import ubatching, workspace
from vllm_twins import DEVICE

from ep_moe.config import Layout
from ep_moe.engines.common import local
from ep_moe.engines.vllm import method as methods
from ep_moe.engines.vllm import prepare_finalize, step
from ep_moe.engines.vllm.eligibility import kind_of_layer
from ep_moe.engines.vllm.experts import EpMoeBatchedExperts
from ep_moe.engines.vllm.hooks import NEEDS
from ep_moe.engines.vllm.parameters import format_of
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

    def without_first(ids: torch.Tensor, share: Any) -> torch.Tensor:
        return ids.index_fill(0, torch.tensor([0], device=DEVICE), -1)

    place = methods if made.state.local else prepare_finalize
    engine_cases.faults_are_seen(made, mock.patch.object(place, "without_padding", without_first))


def workspace_is_locked(made: Any, most: int) -> None:
    """vLLM runs its largest step first, then allocates no workspace any more: smaller steps have no more rows."""
    with mock.patch("ep_moe.engines.vllm.method.SMALL_STEP", most // 2), contextlib.ExitStack() as stack:
        stack.callback(workspace.unlock_workspace)
        for layout in (None, *Layout):  # of the first one some steps are packed, others not
            workspace.reset_workspace_manager()
            workspace.init_workspace_manager(torch.device(DEVICE))
            made.use(layout)
            call(made, rows_of(made, made.rank, most))
            workspace.lock_workspace()
            for counts in [[rows] * made.dp for rows in range(1, most, 3)] + [[most] + [1] * (made.dp - 1)]:
                call(made, rows_of(made, made.rank, counts[made.rank]), counts)


def nothing_is_sent(made: Any) -> None:
    """Equal rows, or those of a rank alone, need no transport."""
    with mock.patch.object(made.plugin.transports, "get", side_effect=AssertionError("a transport is made")):
        made.use(None)
        made.check()


def shared_experts_in_order(made: Any) -> None:
    """Shared experts of small steps run on vLLM's auxiliary stream if there is one, else between a combine's halves, or
    before experts whose rows do not move."""
    calls: list[str] = []
    layer = made.experts[0]
    kernel = layer.quant_method.moe_kernel
    runner = next(module for module in made.model.modules() if getattr(module, "routed_experts", None) is layer)
    own = next(module for module in runner._shared_experts.modules() if hasattr(module, "down_proj"))

    def forward() -> torch.Tensor:
        calls.clear()
        return torch.cat(made.forward(list(range(len(prompts())))))

    first, halves = ["dispatch_send", "dispatch_recv", "apply"], ["combine_send", "forward", "combine_recv"]
    whole, beside = [*first, "combine", "combine_send", "combine_recv"], ["on its stream", "forward"]
    large = first + halves
    if kernel is None:
        large, whole = ["forward", "local_moe"], ["local_moe"]
    with contextlib.ExitStack() as stack:
        if kernel is None:
            stack.enter_context(noted(local, "local_moe", calls))
        else:
            for name in ("dispatch_send", "dispatch_recv", "combine", "combine_send", "combine_recv"):
                stack.enter_context(noted(kernel.prepare_finalize.transport, name, calls))
            stack.enter_context(noted(kernel.fused_experts, "apply", calls))
        stack.enter_context(noted(own, "forward", calls))
        plain = forward()
        assert calls == large, calls
        rows = len(plain)  # without padding
        for most, orders in ((rows - 1, [large]), (rows, [whole + beside, beside + whole])):
            with auxiliary_stream(runner._shared_experts, most, calls):
                assert torch.equal(forward(), plain)
                assert calls in orders, (most, calls)  # 0.26 launches them after the routed ones, 0.33 before
    masked = {"is_padding": torch.zeros(rows, dtype=torch.bool)}
    with (
        auxiliary_stream(runner._shared_experts, rows, calls),
        mock.patch.object(step, "is_forward_context_available", return_value=True),
    ):
        for named, in_two, between in ((masked, False, False), (masked, True, True), ({}, False, True)):
            with (
                mock.patch.object(step, "get_forward_context", return_value=SimpleNamespace(**named)),
                mock.patch.object(step, "in_micro_batch", return_value=in_two),
            ):
                assert layer.quant_method.mk_can_overlap_shared_experts == (between and kernel is not None)


@contextlib.contextmanager
def auxiliary_stream(shared_experts: Any, most: int, calls: list[str]) -> Iterator[None]:
    """A platform with vLLM's auxiliary stream, which is noted when it is entered, for steps of at most so many rows."""
    module, stream, events = sys.modules[type(shared_experts).__module__], mock.MagicMock(), [mock.MagicMock()] * 2
    platform = SimpleNamespace(is_cuda=lambda: True, is_cuda_alike=lambda: True)
    variables = {"VLLM_DISABLE_SHARED_EXPERTS_STREAM": "0", "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD": str(most)}

    @contextlib.contextmanager
    def entered(given: Any) -> Iterator[None]:
        assert given is stream
        calls.append("on its stream")
        yield

    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(step, "current_platform", platform),
        mock.patch.multiple(module, current_platform=platform, current_stream=mock.MagicMock()),
        mock.patch.object(torch.cuda, "stream", entered),
        mock.patch.object(torch.Tensor, "record_stream"),
        mock.patch.object(shared_experts, "_stream", stream),
        mock.patch.object(shared_experts, "_input_ready_event", events, create=True),  # in 0.33
        mock.patch.object(shared_experts, "_output_ready_event", events, create=True),
    ):
        yield


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


def bad_input(made: Any, most: int) -> None:
    """`engine_cases.bad_input`."""
    rank, last, kernel = made.rank, made.dp - 1, made.experts[0].quant_method.moe_kernel

    def checked(rows: Rows) -> torch.Tensor:
        found = call(made, rows)
        if DEVICE == "cuda":  # where the host does not read ids
            kernel.prepare_finalize.transport.check()
        return found

    def too_many() -> None:
        call(made, rows_of(made, rank, most + 1 if rank == last else 2), [2] * last + [most + 1])

    broken = mock.patch.object(kernel.fused_experts, "_batch", side_effect=RuntimeError("no memory"))
    count = made.experts[0].moe_config.num_experts
    engine_cases.bad_input(checked, rows_of(made, rank, 4), count, too_many, [broken], (rank, last))


def two_slots(made: Any) -> None:
    """Two micro-batches whose halves alternate, each on its slot, give what they give one after another."""
    layer = made.experts[0]
    state = layer.quant_method.ep_moe
    kernel = layer.quant_method.moe_kernel
    sizes = dataclasses.replace(kernel.prepare_finalize.transport.config, num_slots=2)
    transport = made.plugin.transports.get(
        state.process_group, layer.moe_config.num_experts, sizes, torch.device(DEVICE)
    )
    options = dataclasses.replace(kernel.prepare_finalize.options, layout=Layout.COMPACT)
    exchange = EpMoePrepareAndFinalize(transport, options)
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
    options = RoundOptions(layout=Layout.BATCHED, scheme=get_scheme("none"))
    sizes = dataclasses.replace(made.state.kind.exchange, max_tokens_per_rank=most)
    own = made.plugin.transports.get(None, moe.num_experts, sizes, torch.device(DEVICE))

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
    """Layers that stay on vLLM's path."""
    make = getattr(factories, "FusedMoEFactory", None) or factories.FusedMoE
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 32, "intermediate_size": 16, "activation": "gelu_tanh"}

    def layer(prefix: str) -> Any:
        return make(**sizes, params_dtype=torch.float32, prefix=prefix).routed_experts

    engine_cases.other_layers(made.plugin, layer)
    ours = made.experts[0]
    moe = ours.moe_config
    engine_cases.refused(
        lambda: kind_of_layer(ours, ours.quant_method, moe),
        [
            (moe, {"hidden_dim": 24}, r"hidden \(24\)"),
            (moe, {"intermediate_size_per_partition": 8}, r"intermediate \(8\)"),
            (moe, {"is_lora_enabled": True}, "LoRA"),
            (moe, {"in_dtype": torch.float64}, "float64"),
            (moe, {"moe_parallel_config": dataclasses.replace(moe.moe_parallel_config, tp_size=2)}, "sliced"),
        ],
    )


def hooks_are_checked() -> None:
    """Hooks of vLLM that are missing or changed."""
    changed, gone = (mk.FusedMoEKernel, "apply"), (mk.FusedMoEPrepareAndFinalizeModular, "prepare_async")
    engine_cases.hooks_are_checked(NEEDS, vllm.__version__, changed, gone)


def dead_rank(made: Any) -> None:
    """The last rank is gone."""
    engine_cases.dead_rank(lambda: call(made, rows_of(made, made.rank, 4)), made.dp - 1)


def reloaded(made: Any) -> None:
    """Weights that vLLM loads once more give the same; so does a second look at them."""
    get_model_loader(made.config.load_config).load_weights(made.model, made.config.model_config)
    for _ in range(2):
        for layer in made.experts:
            layer.quant_method.process_weights_after_loading(layer)
    made.check()


def reloaded_in_place(made: Any) -> None:
    """vLLM's `reload_weights`: new tensors are loaded and processed, then copied to those that graphs read."""
    kept = [parameter.data_ptr() for layer in made.experts for parameter in layer.parameters()]
    weights = get_model_loader(made.config.load_config).get_all_weights(made.config.model_config, made.model)
    with torch.device(DEVICE):
        initialize_layerwise_reload(made.model)
        made.model.load_weights(weights)
        finalize_layerwise_reload(made.model, made.config.model_config)
    assert [parameter.data_ptr() for layer in made.experts for parameter in layer.parameters()] == kept
    made.check()
    swaps_are_seen(made)
    with engine_cases.swapped(made.experts[0].get_expert_weights()):
        assert engine_cases.fails(made), "what a balancer writes is not seen"
    made.check()


def swaps_are_seen(made: Any) -> None:
    """`engine_cases.swaps_are_seen`."""
    engine_cases.swaps_are_seen(made, made.state.weights.w13)


def formats_are_refused() -> None:
    """Packed weights that we do not read are named with the option that stands against it."""
    moe = {"in_dtype": torch.bfloat16, "hidden_dim": 64, "intermediate_size_per_partition": 96}

    def read(made: Any, *, ranks: int = 1, interleaved: bool = False) -> str:
        made.moe = SimpleNamespace(**moe, moe_parallel_config=SimpleNamespace(ep_size=ranks))
        return format_of(made, interleaved=interleaved).scheme.name

    def packed(**changes: Any) -> Any:
        settings = engine_cases.INTS | {"symmetric": True} | changes
        return method("CompressedTensorsWNA16MoEMethod", weight_quant=SimpleNamespace(**settings))

    gptq = functools.partial(configured, "AutoGPTQMoEMethod", engine_cases.GPTQ)
    awq = functools.partial(configured, "AutoAWQMoEMethod", engine_cases.AWQ)
    rows = functools.partial(configured, "MoeWNA16Method", {"weight_bits": 4, "has_zp": True, "group_size": 32})
    engine_cases.formats_are_read(
        read,
        [
            (packed(), "int4_w4a16_g128"),
            (packed(num_bits=8, symmetric=False), "int8_w8a16_g128_zp"),
            (gptq(group_size=-1, desc_act=True), "int4_w4a16"),
            (gptq(weight_bits=8), "int8_w8a16_g128_zp"),
            (awq(), "int4_w4a16_g128_zp"),
            (rows(), "int4_w4a16_g32_zp"),
        ],
        [
            (packed(num_bits=2), "num_bits 2"),
            (packed(actorder="group"), "actorder 'group'.*order of w13"),
            (packed(strategy="tensor"), "strategy 'tensor'"),
            (gptq(is_sym=False), "sym false"),
            (gptq(desc_act=True), "desc_act.*order of w13"),
            (awq(zero_point=False), "AWQ weights without zero points"),
            (rows(group_size=64), r"groups of 64 do not divide intermediate \(96\)"),
            (method("CompressedTensorsW4A4Nvfp4MoEMethod"), "does not tell NVFP4 tokens"),
            (method("ModelOptNvFp4FusedMoE", use_a16=False, per_token_activation=True), "for each token"),
            (method("StrangeMethod"), "weights of StrangeMethod are not read here"),
        ],
    )
    on_two = functools.partial(read, ranks=2)
    engine_cases.formats_are_read(
        on_two, [(rows(has_zp=False), "int4_w4a16_g32")], [(rows(), "several expert-parallel ranks")]
    )
    turned = functools.partial(read, interleaved=True)
    engine_cases.formats_are_read(turned, [], [(packed(), "interleaved gate and up rows")])
