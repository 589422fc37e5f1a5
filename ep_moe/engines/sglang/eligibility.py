"""Which layers run here; the others stay on SGLang's own path."""

from typing import Any

from sglang.srt.batch_overlap.single_batch_overlap import SboFlags
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend, is_tbo_enabled
from sglang.srt.runtime_context import get_exec, get_lora, get_parallel

from ep_moe.engines.common.engine_layer import LayerKind, eligible_kind
from ep_moe.engines.sglang.parameters import activation_of, format_of
from ep_moe.engines.sglang.step import most_tokens

_A2A = ("none", "deepep")
_RUNNERS = ("auto", "triton", "deep_gemm")  # with which parameters are created as checkpoints have them


def kind_of_layer(layer: Any, method: Any) -> LayerKind:
    """What a FusedMoE layer computes, if we can.

    Args: layer: with its parameters, not loaded yet. method: its quantization method.
    Errors: ValueError says why the layer is not eligible. Local.
    """
    _check_engine(layer)
    runner = layer.moe_runner_config
    if runner.no_combine:
        raise ValueError("its model sums the experts' outputs by itself")
    if runner.top_k is None:
        raise ValueError("its model does not say how many experts a token has")
    loaded = format_of(layer, method)
    if getattr(method, "load_up_proj_weight_first", False) and not loaded.up_first:
        raise ValueError(f"weights of {type(method).__name__} with up rows before gate rows are not read here")
    return eligible_kind(
        loaded,
        activation_of(runner),
        hidden=runner.hidden_size,
        intermediate=layer.intermediate_size_per_partition,
        num_experts=runner.num_experts,
        num_topk=runner.top_k,
        dtype=runner.params_dtype,
        max_num_tokens=most_tokens(),
        num_slots=2 if is_tbo_enabled() else 1,
    )


def _check_engine(layer: Any) -> None:
    """Raise ValueError for what SGLang does differently around this layer."""
    a2a, runner, parallel, moe = (
        get_moe_a2a_backend().value,
        get_moe_runner_backend().value,
        get_parallel(),
        get_exec().moe,
    )
    if a2a not in _A2A:
        raise ValueError(f"--moe-a2a-backend {a2a} is not one of {', '.join(_A2A)}")
    if runner not in _RUNNERS:
        raise ValueError(
            f"--moe-runner-backend {runner} has weights in an order of its own; triton keeps the checkpoint's"
        )
    if layer.moe_tp_size > 1:
        raise ValueError(f"its experts are sliced by tensor parallelism; --ep-size {parallel.tp_size} keeps them whole")
    if parallel.moe_dp_size > 1:
        raise ValueError(f"--moe-dp-size {parallel.moe_dp_size} is not supported here")
    if getattr(parallel, "dwdp_size", 1) > 1:
        raise ValueError("dwdp replaces the weights while serving")
    if get_lora().enable_lora or get_lora().lora_paths:
        raise ValueError("LoRA is not supported here")
    if moe.elastic_ep_backend is not None:
        raise ValueError("elastic expert parallelism is not supported here")
    if layer.num_fused_shared_experts and (layer.moe_ep_size > 1 or a2a != "none"):
        raise ValueError("a shared expert is fused with the routed ones; --disable-shared-experts-fusion separates it")
    combined = SboFlags.enable_combine_down_gemm_two_stream_overlap()
    if combined or SboFlags.enable_combine_shared_two_stream_overlap():
        raise ValueError("--enable-single-batch-overlap needs DeepEP's combine here")
