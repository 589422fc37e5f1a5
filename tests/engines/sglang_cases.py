"""Cases beside the outputs of whole blocks: one layer of a loaded model, called as SGLang's models call it.

Letters: T rows on this rank, H hidden, K top-k, E experts.
"""

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import engine_cases
import pytest
import sglang
import torch
from engine_cases import Rows, configured, method, noted, random_rows
from sglang.srt.batch_overlap import two_batch_overlap
from sglang.srt.batch_overlap.operations import YieldOperation
from sglang.srt.batch_overlap.operations_strategy import OperationsStrategy
from sglang.srt.eplb import expert_distribution, expert_location_updater
from sglang.srt.layers import dp_attention
from sglang.srt.layers.moe import utils
from sglang.srt.layers.moe.fused_moe_triton import layer as layers
from sglang.srt.layers.moe.token_dispatcher import deepep
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.plugins import load_plugins_by_group

from ep_moe.config import Layout
from ep_moe.engines.sglang import dispatcher as dispatchers
from ep_moe.engines.sglang import eligibility, register, registering, step
from ep_moe.engines.sglang.eligibility import kind_of_layer
from ep_moe.engines.sglang.hooks import NEEDS
from ep_moe.engines.sglang.parameters import format_of
from ep_moe.functional.sglang.layer_formats import LayerFormat, layer_format


def rows_of(made: Any, num_rows: int, seed: int = 0) -> Rows:
    """Random rows of this rank."""
    kind = made.state.kind
    return random_rows(made.group.rank, num_rows, kind.moe.hidden, kind.moe.num_experts, kind.num_topk, seed)


def call(made: Any, rows: Rows) -> torch.Tensor:
    """The routed experts of the first layer for these rows."""
    with torch.no_grad():
        return made.experts[0](rows.x, StandardTopKOutput(rows.weights, rows.ids, torch.empty(0)))


def faults_are_seen(made: Any) -> None:
    """`engine_cases.faults_are_seen`."""
    send = dispatchers.rows_to_send

    def without_first(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **options: Any) -> Any:
        return send(x, ids.index_fill(0, torch.tensor([0]), -1), weights, **options)

    engine_cases.faults_are_seen(made, mock.patch.object(dispatchers, "rows_to_send", without_first))


def parameters_stay(made: Any, num_views: int = 2) -> None:
    """What SGLang's expert load balancer needs: the parameters' data, to which it writes while ranks serve."""
    local, views = made.experts[0].num_local_experts, next(iter(made.blocks.values())).get_moe_weights()
    assert [view.shape[0] for view in views] == [local] * num_views
    starts = range(0, made.state.kind.moe.num_experts, local)
    engine_cases.parameters_stay(functools.partial(call, made), rows_of(made, 6), views, starts)


def layout_of_the_step(made: Any) -> None:
    """A step with prompts is FLAT, one without COMPACT."""
    seen: list[Layout] = []
    transport = made.state.of_step().transport
    send = transport.dispatch_send

    def noted(*args: Any, layout: Layout, **options: Any) -> None:
        seen.append(layout)
        send(*args, layout=layout, **options)

    with mock.patch.object(transport, "dispatch_send", noted):
        for extend in (True, False):
            dp_attention.set_is_extend_in_batch(extend)
            call(made, rows_of(made, 3))
    assert seen == [Layout.FLAT, Layout.COMPACT], seen


def hooks_of_the_dispatcher(made: Any) -> None:
    """SGLang's hooks are called around both halves, and between those of the dispatch."""
    calls: list[str] = []
    layer = made.experts[0]
    dispatcher, transport = layer.dispatcher, made.state.of_step().transport
    handles: list[Any] = []
    for name in ("pre_dispatch", "post_dispatch", "pre_combine", "post_combine"):
        register = getattr(dispatcher, f"register_{name}_hook")
        handles.append(register(lambda *_, name=name: calls.append(name)))
    handles += dispatcher.register_deepep_dispatch_hook(lambda _: calls.append("between"))

    rows = rows_of(made, 4)
    with contextlib.ExitStack() as stack:
        for name in ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv"):
            stack.enter_context(noted(transport, name, calls))
        call(made, rows)
    for handle in handles:
        handle.remove()
    halves = ["pre_dispatch", "dispatch_send", "between", "dispatch_recv", "post_dispatch"]
    assert calls == [*halves, "pre_combine", "combine_send", "combine_recv", "post_combine"], calls
    call(made, rows)
    assert len(calls) == 9, calls


def load_is_recorded(made: Any) -> None:
    """SGLang's recorder of expert load gets the rows of each local expert; as a list where its mode asks for one."""
    rows, local = rows_of(made, 7), made.experts[0].num_local_experts
    recorder = mock.Mock(spec=expert_distribution.ExpertDistributionRecorder)
    for mode in (None, "stat_approx"):
        moe = types.SimpleNamespace(moe=types.SimpleNamespace(expert_distribution_recorder_mode=mode))
        with (
            mock.patch.object(dispatchers, "get_global_expert_distribution_recorder", return_value=recorder),
            mock.patch.object(dispatchers, "get_exec", return_value=moe),
        ):
            call(made, rows)
    every = torch.tensor(made.group.all_gather_object(rows.ids.tolist())).flatten()
    counts = torch.bincount(every, minlength=made.state.kind.moe.num_experts)
    first = made.group.rank * local
    wanted = counts[first : first + local].tolist()
    assert [given.args[0].tolist() for given in recorder.on_deepep_dispatch_low_latency.call_args_list] == [wanted] * 2
    assert [given.args[0] for given in recorder.on_deepep_dispatch_normal.call_args_list] == [wanted]


def balanced(made: Any) -> None:
    """SGLang's load balancer moves experts between ranks."""
    count, ranks = made.state.kind.moe.num_experts, made.group.num_ranks
    weights = next(iter(made.blocks.values())).get_moe_weights()
    buffers = expert_location_updater.create_temp_buffers(weights)

    def move(old: torch.Tensor, new: torch.Tensor) -> None:
        expert_location_updater.update_expert_weights_single_layer(
            weights, buffers, old.tolist(), new.tolist(), count // ranks, ranks, made.group.rank, ranks
        )

    engine_cases.balanced(functools.partial(call, made), rows_of(made, 7), count, move)


def bad_input(made: Any, most: int) -> None:
    """`engine_cases.bad_input`."""
    rank, last, ours = made.group.rank, made.group.num_ranks - 1, made.state.of_step()
    places = ((dispatchers, "rows_to_send"), (ours, "experts"), (ours.transport, "combine_send"))
    faults = [mock.patch.object(*place, side_effect=RuntimeError("no memory")) for place in places]
    engine_cases.bad_input(
        functools.partial(call, made),
        rows_of(made, 4),
        made.state.kind.moe.num_experts,
        lambda: call(made, rows_of(made, most + 1 if rank == last else 2)),
        faults,
        (rank, last),
    )


@contextlib.contextmanager
def _noted_bounds(transport: Any) -> Iterator[list[int | None]]:
    """The bounds of the rounds that are sent meanwhile."""
    bounds: list[int | None] = []
    send = transport.dispatch_send

    def noted(*args: Any, max_num_tokens: int | None, **options: Any) -> None:
        bounds.append(max_num_tokens)
        send(*args, max_num_tokens=max_num_tokens, **options)

    with mock.patch.object(transport, "dispatch_send", noted):
        yield bounds


def bound_of_the_step(made: Any) -> None:
    """With attention over data-parallel ranks the exchange is sized by the rows that SGLang says ranks have."""
    rows = rows_of(made, 5)

    @contextlib.contextmanager
    def counted(*counts: int) -> Iterator[None]:
        with (
            mock.patch.object(step, "is_dp_attention_enabled", return_value=True),
            mock.patch.object(step, "get_dp_global_num_tokens", return_value=list(counts)),
        ):
            yield

    before = call(made, rows)
    with _noted_bounds(made.state.of_step().transport) as bounds:
        assert torch.equal(call(made, rows), before)
        with counted(3, 6):
            assert torch.equal(call(made, rows), before)
        if made.group.num_ranks > 1:
            with counted(3, 4), pytest.raises(ValueError, match="max_num_tokens|rank"):
                call(made, rows)
            assert bounds == [None, 6, 4], bounds
        else:
            assert bounds == [5, 5], bounds
    assert torch.equal(call(made, rows), before)


def few_equal_rows(made: Any) -> None:
    """Equal rows, none and few: ranks return parts of their sums, without a transport."""
    with mock.patch.object(made.plugin.transports, "get", side_effect=AssertionError("a transport is made")):
        made.use(None)
    for count in (0, 1, 7):
        rows = _shared_rows(made, count)
        found = call(made, rows)
        assert found.shape == rows.x.shape
        parts = torch.tensor(made.group.all_gather_object(found.tolist()))
        assert torch.allclose(parts.sum(0).view_as(rows.x), _computed(made, rows), atol=1e-5)
    rows = _shared_rows(made, 3)
    rows.ids[1] = -1
    assert not call(made, rows)[1].any()


def _shared_rows(made: Any, count: int) -> Rows:
    """The same rows on all ranks."""
    kind = made.state.kind
    return random_rows(17, count, kind.moe.hidden, kind.moe.num_experts, kind.num_topk)


def _computed(made: Any, rows: Rows) -> torch.Tensor:
    """All experts by loops, with the weights of all ranks."""
    layer = made.experts[0]
    own = [weight.data.tolist() for weight in (layer.w13_weight, layer.w2_weight)]
    w13, w2 = (
        torch.cat(list(map(torch.tensor, parts))) for parts in zip(*made.group.all_gather_object(own), strict=True)
    )
    result = torch.zeros_like(rows.x)
    for token, (ids, weights) in enumerate(zip(rows.ids.tolist(), rows.weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = (w13[expert] @ rows.x[token]).chunk(2)
            result[token] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return result


def factor_of_the_router(made: Any) -> None:
    """What SGLang's own experts multiply by on a GPU: only with equal rows, and only if the router does not."""
    state, layer = made.state, made.experts[0]
    assert state.factor is None
    with mock.patch.object(layer.moe_runner_config, "routed_scaling_factor", 2.5):
        assert state.factor is None  # on a CPU the model multiplies
        with mock.patch.object(state, "_device", torch.device("cuda")):
            assert state.factor == 2.5
            rows = _shared_rows(made, 5)
            doubled = call(made, rows)
            with mock.patch.object(layer, "should_fuse_routed_scaling_factor_in_topk", True):
                assert state.factor is None
                assert torch.allclose(doubled, 2.5 * call(made, rows), atol=1e-5)


def two_batches(made: Any) -> None:
    """SGLang's schedules of two batches in turns, each on its slot, give what the batches give alone."""
    assert made.state._halves == ((False, False), (True, True))  # what is compiled for them when weights are loaded
    block = next(iter(made.blocks.values()))
    given = [rows_of(made, 5 + made.group.rank, seed).x for seed in (1, 2)]
    plain = [made.call(block, rows) for rows in given]
    for mode in (ForwardMode.EXTEND, ForwardMode.DECODE):
        with (
            mock.patch.object(torch.cuda, "get_device_properties", return_value=mock.Mock(multi_processor_count=132)),
            _noted_bounds(made.state.of_step().transport) as bounds,
            mock.patch.object(step, "is_dp_attention_enabled", return_value=True),
            torch.no_grad(),
        ):
            schedule = OperationsStrategy.init_new_tbo(made.model.model.layers[:1], mode)
            assert schedule.deep_gemm_num_sms == (132 if mode.is_extend() else None)
            found = _in_turns(block, schedule, given, mode)
        assert bounds == [12] * 2, bounds  # of the whole step, in twos as SGLang pads it, not of the largest
        for output, wanted in zip(found, plain, strict=True):
            assert torch.allclose(output, wanted, atol=1e-6)
    with (
        mock.patch.object(utils.get_flags().moe, "deepep_config", '{"normal_dispatch": {}, "normal_combine": {}}'),
        pytest.raises(ValueError, match="--deepep-config is for DeepEP"),
    ):
        deepep.DeepEPConfig()


def _in_turns(block: Any, schedule: Any, given: list[torch.Tensor], mode: ForwardMode) -> list[torch.Tensor]:
    """Run those of a schedule's operations that are a block's, for two batches."""

    def begin(state: Any, **inputs: Any) -> None:
        state.update(inputs)

    def end(state: Any) -> dict[str, torch.Tensor]:
        return {"output": state.pop("hidden_states_mlp_output")}

    operations = [
        operation if isinstance(operation, YieldOperation) or operation.__self__ is block else lambda state: None
        for operation in schedule.operations
    ]
    operations[0] = begin
    operations[-2 if isinstance(operations[-1], YieldOperation) else -1] = end
    operations = operations[: operations.index(end) + 1]
    batch = types.SimpleNamespace(
        forward_mode=mode,
        num_token_non_padded=None,
        moe_num_token_non_padded=lambda: None,
        global_dp_buffer_len=None,
        global_num_tokens_cpu=None,
        tbo_padded_len=None,
        dp_padding_mode=dp_attention.DpPaddingMode.SUM_LEN,
    )
    inputs = [
        {"hidden_states_mlp_input": rows.clone(), "forward_batch": batch, "tbo_subbatch_index": index}
        for index, rows in enumerate(given)
    ]
    dp_attention.set_dp_buffer_len(None, None, False, [10, 11])  # of the step: rank 1 has a row more
    with forward_context(ForwardContext(attn_backend=None)):
        outputs = two_batch_overlap.execute_overlapped_operations(
            inputs_arr=inputs, operations_arr=[operations] * 2, delta_stages=[0, schedule.tbo_delta_stages]
        )
    return [output["output"] for output in outputs]


def other_layers(made: Any) -> None:
    """Layers that stay on SGLang's path."""
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 32, "intermediate_size": 16, "layer_id": 0}
    make = functools.partial(layers.FusedMoE, **sizes, params_dtype=torch.float32)

    def odd(prefix: str) -> Any:
        layer = make(prefix=prefix, activation="gelu_tanh")
        assert not isinstance(layer.dispatcher, dispatchers.EqualRowsDispatcher)
        return layer

    with mock.patch.object(utils.get_flags().moe, "a2a_backend", utils.MoeA2ABackend.NONE):
        engine_cases.other_layers(made.plugin, odd)
        assert isinstance(make(prefix="even.0").dispatcher, dispatchers.EqualRowsDispatcher)
    ours = made.experts[0]
    moe = utils.get_flags().moe
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (ours.moe_runner_config, {"hidden_size": 24}, r"hidden \(24\)"),
        (ours, {"intermediate_size_per_partition": 8}, r"intermediate \(8\)"),
        (ours.moe_runner_config, {"params_dtype": torch.float64}, "float64"),
        (ours.moe_runner_config, {"no_combine": True}, "sums the experts' outputs by itself"),
        (ours.moe_runner_config, {"gemm1_clamp_limit": 7.0, "swiglu_limit": 7.0}, "both gemm1_clamp_limit"),
        (ours, {"moe_tp_size": 2}, "sliced by tensor parallelism"),
        (ours, {"num_fused_shared_experts": 1}, "--disable-shared-experts-fusion"),
        (moe, {"a2a_backend": utils.MoeA2ABackend.MOONCAKE}, "--moe-a2a-backend mooncake"),
        (moe, {"runner_backend": utils.MoeRunnerBackend.FLASHINFER_TRTLLM}, "--moe-runner-backend flashinfer_trtllm"),
        (ours.quant_method, {"__class__": type("StrangeMethod", (type(ours.quant_method),), {})}, "StrangeMethod"),
    ]
    engine_cases.refused(lambda: kind_of_layer(ours, ours.quant_method), cases)


def hooks_are_checked() -> None:
    """Hooks of SGLang that are missing or changed; SGLang's own call of the plug-in ends with the error."""
    gone = (layers, "create_moe_dispatcher")
    engine_cases.hooks_are_checked(NEEDS, sglang.__version__, (BaseDispatcher, "combine"), gone)
    (entry,) = [found for found, _ in load_plugins_by_group("sglang.srt.plugins").values()]
    refused = mock.patch.object(registering.Plugin, "create", side_effect=RuntimeError("has no dispatcher"))
    with refused, mock.patch.object(registering, "_plugins", []), pytest.raises(SystemExit, match="has no dispatcher"):
        entry()


def backend_by_name(arguments: Callable[..., Any], publish: Callable[[Any], None]) -> None:
    """`--moe-runner-backend ep_moe` where SGLang takes names of others; it means "auto" to layers that are not ours."""
    for line, wanted in ((["--moe-runner-backend", "ep_moe"], "1"), (["--moe-runner-backend=triton", "ep_moe"], None)):
        with (
            mock.patch.dict(os.environ),
            mock.patch.object(sys, "argv", ["launch_server", *line]),
            mock.patch.object(registering, "register_hooks") as registered,
        ):
            del os.environ["EP_MOE_SGLANG"]
            register()
            assert os.environ.get("EP_MOE_SGLANG") == wanted
            assert registered.called == (wanted is not None)
    given = ("qwen3_moe_even", "none", "--moe-runner-backend", "ep_moe")
    if sglang.__version__ == "0.5.17":
        with pytest.raises(SystemExit):
            arguments(*given)
        return
    publish(arguments(*given))
    assert utils.get_moe_runner_backend() is utils.MoeRunnerBackend.AUTO


def dead_rank(made: Any) -> None:
    """The last rank is gone."""
    engine_cases.dead_rank(lambda: call(made, rows_of(made, 4)), made.group.num_ranks - 1)


def rows_in_turns(made: Any) -> None:
    """Rows of gate and up that a model says, after the layer is constructed, to stand in turns."""
    for layer in made.experts:
        layer.inference_moe_w13_interleaved = True
        for name in ("w13_weight", "w13_weight_scale"):
            data = getattr(layer, name).data.view(torch.uint8)
            data.copy_(torch.stack(data.chunk(2, dim=1), dim=2).flatten(1, 2))
    made.use(None)
    made.check()


def runner_is_needed(engine: Callable[[], Any]) -> None:
    """SGLang's refusal of a runner for an a2a backend stands if the layer is not ours."""
    refused = mock.patch.object(eligibility, "kind_of_layer", side_effect=ValueError("not here"))
    with refused, pytest.raises(NotImplementedError, match="requires a fused func"), engine():
        pass


def formats_are_refused() -> None:
    """Formats that we do not read are named with what stands against them."""
    parts = {"w13_scales": torch.empty(0, dtype=torch.half), "w13_weight_scale": torch.empty(0, dtype=torch.bfloat16)}

    def read(holder: Any, *, of: str = "", ranks: int = 1, alpha: float | None = None) -> str:
        runner = types.SimpleNamespace(gemm1_alpha=alpha, gate_up_interleaved=alpha is not None)
        settings = {"scheme": holder, "moe_runner_config": runner, "moe_ep_size": ranks, "group_size": 32}
        layer = types.SimpleNamespace(**parts, **settings)
        return format_of(layer, method(of) if of else holder).scheme.name

    def integers(**changes: Any) -> Any:
        return method("CompressedTensorsWNA16MoE", **engine_cases.INTS | {"sym": True} | changes)

    def reads(good: list[tuple[Any, str]], bad: list[tuple[Any, str]], **options: Any) -> None:
        engine_cases.formats_are_read(functools.partial(read, **options), good, bad)

    gptq = functools.partial(configured, "GPTQMarlinMoEScheme", engine_cases.GPTQ)
    awq = functools.partial(configured, "AWQMoEScheme", engine_cases.AWQ)
    rows = functools.partial(configured, "MoeWNA16Method", {"weight_bits": 4, "has_zp": True})
    reads(
        [(gptq(), "int4_w4a16_g128_f16"), (gptq(weight_bits=8, group_size=-1), "int8_w8a16_zp_f16")],
        [(gptq(desc_act=True), "desc_act.*order of w13"), (gptq(is_sym=False), "GPTQ weights with zero points")],
        of="GPTQMarlinMoEMethod",
    )
    reads(
        [(awq(), "int4_w4a16_g128_zp_f16")],
        [(awq(zero_point=False), "AWQ weights without zero points")],
        of="AWQMoEMethod",
    )
    reads([], [(awq(), "interleaved gate and up rows")], of="AWQMoEMethod", alpha=1.7)
    reads(
        [(integers(strategy="channel"), "int4_w4a16")],
        [(integers(sym=False), "packed weights with zero points"), (integers(actorder="group"), "actorder 'group'")],
        of="CompressedTensorsFusedMoEMethod",
    )
    reads([(rows(has_zp=False), "int4_w4a16_g32_f16")], [(rows(), "several expert-parallel ranks")], ranks=2)
    strange = method("StrangeMethod"), "weights of StrangeMethod are not read here"
    reads([], [(rows(weight_bits=8), "8 bits with zero points"), strange])


def config_objects() -> None:
    """Our own `FusedMoE` reads SGLang's config objects as the `quantization_config` that they are made of."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
        "symmetric": True,
        "dynamic": False,
    }
    packed = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head", "re:model.layers.2.mlp.*"],
    }
    blocks = {"quant_method": "blockwise_int8", "activation_scheme": "dynamic", "weight_block_size": [64, 128]}
    bytes_ = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
    skipping = awq | {"modules_to_not_convert": ["model.layers.2.mlp"]}
    for name, config, scheme in (
        ("gptq_marlin", gptq, "int4_w4a16_g32"),
        ("gptq", gptq, "int4_w4a16_g32_zp"),  # the object does not say that there are no zero points
        ("moe_wna16", gptq, "int4_w4a16_g32"),
        ("awq_marlin", skipping, "int4_w4a16_g64_zp"),
        ("awq", skipping, "int4_w4a16_g64_zp"),
        ("compressed-tensors", packed, "int4_w4a16_g128"),
        ("blockwise_int8", blocks, "int8_block_64x128"),
        ("mxfp8", bytes_, "mxfp8"),
    ):
        if name not in QUANTIZATION_METHODS:
            assert name == "gptq", name  # which 0.5.23 reads as gptq_marlin
            continue
        quantized = QUANTIZATION_METHODS[name].from_config(dict(config))
        found = layer_format(quantized, "model.layers.1.mlp.experts")
        assert found.scheme.name == scheme, f"{name}: {found.scheme.name}"
        plainly = config | {"sym": False} if name == "gptq" else config
        assert found == layer_format(plainly, ""), name
        plain = layer_format(quantized, "model.layers.2.mlp.experts") == LayerFormat()
        assert plain == ("model.layers.2" in str(config)), name
