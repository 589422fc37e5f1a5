"""Which layers run here; the others stay on vLLM's own path."""

import dataclasses
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ep_moe.config import ALIGNMENT, DTYPES, ActivationConfig
from ep_moe.engines.vllm.parameters import LoadedFormat, activation_of, format_of
from ep_moe.experts import SERVES
from ep_moe.quant import QuantScheme

_OWN_PATH = ("forward_modular", "get_expert_weights")  # methods whose override means another computation


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """What a layer computes."""

    loaded: LoadedFormat
    activation: ActivationConfig
    interleaved: bool  # vLLM loads rows of w13 as [gate 0, up 0, gate 1, ...]

    @property
    def scheme(self) -> QuantScheme:
        """Of weights and payload."""
        return self.loaded.scheme


def kind_of_layer(layer: Any, method: Any, moe: Any) -> LayerKind:
    """What a RoutedExperts layer computes, if we can.

    Args:
        layer: as its constructor has made it so far, before its parameters. method: its quantization method.
        moe: its FusedMoEConfig.
    Errors: ValueError says why the layer is not eligible. Local.
    """
    parallel, engine = moe.moe_parallel_config, get_current_vllm_config().parallel_config
    if parallel.tp_size > 1:
        raise ValueError("its experts are sliced by tensor parallelism; --enable-expert-parallel keeps them whole")
    if parallel.pcp_size > 1:
        raise ValueError("prefill context parallelism is not supported here")
    if moe.is_lora_enabled:
        raise ValueError("LoRA is not supported here")
    if getattr(engine, "enable_elastic_ep", False):
        raise ValueError("elastic expert parallelism has groups without a common store")
    strategy = layer.expert_map_manager.placement_strategy
    if parallel.use_ep and strategy != "linear":
        raise ValueError(f"expert placement '{strategy}' is not linear")
    if getattr(moe, "skip_final_all_reduce", False):
        raise ValueError("its model sums partial outputs by itself")
    for name in _OWN_PATH:
        theirs = next(base for base in type(layer).__mro__ if name in vars(base))
        if theirs is not RoutedExperts:
            raise ValueError(f"{theirs.__name__} has a {name} of its own")
    if moe.in_dtype not in DTYPES.values():
        raise ValueError(f"its tokens are {moe.in_dtype}, not one of {', '.join(DTYPES)}")
    for name, size in (("hidden", moe.hidden_dim), ("intermediate", moe.intermediate_size_per_partition)):
        if size % ALIGNMENT:
            raise ValueError(f"{name} ({size}) is no multiple of {ALIGNMENT}")
    loaded = format_of(method)
    interleaved = moe.activation is MoEActivation.SWIGLUOAI
    if interleaved and loaded.scheme.weight.quantized:
        raise ValueError(f"scales of interleaved rows in scheme '{loaded.scheme.name}' are not read here")
    activation = activation_of(
        moe.activation,
        alpha=getattr(layer, "swiglu_alpha", None),
        beta=getattr(layer, "swiglu_beta", None),
        limit=getattr(layer, "swiglu_limit", None),
    )
    _check_device(loaded.scheme, activation, moe.in_dtype)
    if activation.kind.gated != moe.is_act_and_mul:
        raise ValueError(f"activation '{moe.activation.value}' does not fit is_act_and_mul ({moe.is_act_and_mul})")
    return LayerKind(loaded=loaded, activation=activation, interleaved=interleaved)


def _check_device(scheme: QuantScheme, activation: ActivationConfig, dtype: torch.dtype) -> None:
    """Raise ValueError unless a backend of kernels computes this on the GPU that the model is made on; CPUs do all."""
    device = torch.empty(0).device
    if device.type != "cuda":
        return
    backend = next((serves for serves in SERVES.values() if serves.computes(scheme)), None)
    if backend is None:
        raise ValueError(f"no kernels here compute scheme '{scheme.name}'")
    try:
        backend.check(scheme, activation=activation.kind, dtype=dtype, device=device)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
