"""vLLM's formats and activations as ours."""

from collections.abc import Callable
from typing import Any

from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from ep_moe.config import ActivationConfig, ActivationKind
from ep_moe.engines.common.formats import LoadedFormat, fp8_blocks, gptq_group, integer_scheme, packed_integers
from ep_moe.quant import QuantScheme, get_scheme

_PLAIN = {
    MoEActivation.SILU: ActivationKind.SILU,
    MoEActivation.GELU: ActivationKind.GELU,
    MoEActivation.RELU2_NO_MUL: ActivationKind.RELU2,
}
_OAI_ALPHA, _OAI_BETA, _OAI_LIMIT = 1.702, 1.0, 7.0  # of gpt-oss' model card


def activation_of(activation: Any, *, alpha: float | None, beta: float | None, limit: float | None) -> ActivationConfig:
    """Our activation for a `MoEActivation` and a layer's swiglu numbers, None where the layer has none.

    Errors: ValueError for an activation that we do not compute. Local.
    """
    if activation is MoEActivation.SWIGLUOAI:
        return ActivationConfig(kind=ActivationKind.SWIGLU, alpha=_OAI_ALPHA, beta=_OAI_BETA, limit=_OAI_LIMIT)
    if activation is MoEActivation.SWIGLUOAI_UNINTERLEAVE:
        numbers = {"alpha": 1.0 if alpha is None else alpha, "beta": 0.0 if beta is None else beta}
        return ActivationConfig(kind=ActivationKind.SWIGLU, limit=limit, **numbers)
    if activation is MoEActivation.SILU and limit is not None:
        return ActivationConfig(kind=ActivationKind.SWIGLU, limit=limit)
    if activation not in _PLAIN:
        raise ValueError(f"activation '{activation.value}' is not computed here")
    return ActivationConfig(kind=_PLAIN[activation])


def format_of(method: Any, *, interleaved: bool) -> LoadedFormat:
    """The format of a method. Errors: ValueError for a format that we do not read. Local."""
    name = type(method).__name__
    if name == "UnquantizedFusedMoEMethod":
        return LoadedFormat(scheme=get_scheme("none"), interleaved=interleaved)
    if name == "GptOssMxfp4MoEMethod":
        return LoadedFormat(scheme=get_scheme("mxfp4_w4a16"), scale_name="weight_scale", interleaved=interleaved)
    if interleaved:
        raise ValueError(f"weights of {name} with gate and up rows in turns are not read here")
    if name not in _READERS:
        raise ValueError(f"weights of {name} are not read here")
    return _READERS[name](method)


def _fp8(method: Any) -> LoadedFormat:
    if getattr(method, "weight_scale_refine", None) is not None:
        raise ValueError("its fp8 blocks are refined for tensor parallelism")
    if method.block_quant:
        return LoadedFormat(scheme=fp8_blocks(method.weight_block_size), scale_name="weight_scale_inv")
    static = method.quant_config.activation_scheme == "static"
    return LoadedFormat(scheme=get_scheme("fp8_tensor"), scale_name="weight_scale", static=static)


def _compressed_fp8(method: Any) -> LoadedFormat:
    if method.block_quant:
        return LoadedFormat(scheme=fp8_blocks(method.weight_block_size), scale_name="weight_scale")
    scheme = get_scheme("fp8_tensor" if method.weight_quant.strategy == "tensor" else "fp8_token")
    return LoadedFormat(scheme=scheme, scale_name="weight_scale", static=method.static_input_scales)


def _modelopt_fp8(_method: Any) -> LoadedFormat:
    return LoadedFormat(scheme=get_scheme("fp8_tensor"), scale_name="weight_scale", static=True)


def _compressed_int8(_method: Any) -> LoadedFormat:
    return LoadedFormat(scheme=get_scheme("int8_token"), scale_name="weight_scale")


def _mxfp8(_method: Any) -> LoadedFormat:
    return LoadedFormat(scheme=get_scheme("mxfp8"), scale_name="weight_scale")


def _compressed_mxfp4(method: Any) -> LoadedFormat:
    """MXFP4 of compressed-tensors, which vLLM computes by its Marlin kernels, or with tokens in MXFP4."""
    if method.use_cutlass_mxfp4:
        raise ValueError("MXFP4 tokens, which vLLM's CUTLASS kernels take, are not computed here")
    return LoadedFormat(scheme=get_scheme("mxfp4_w4a16"), scale_name="weight_scale", values_name="weight_packed")


def _compressed_integers(method: Any) -> LoadedFormat:
    weights, backend = method.weight_quant, getattr(getattr(method, "wna16_backend", None), "name", "")
    # 0.33 has the attribute; 0.26 loads columns first for all backends but this
    columns = getattr(method, "is_transposed", backend != "FLASHINFER_TRTLLM")
    return LoadedFormat(
        scheme=packed_integers(weights, symmetric=weights.symmetric, dtype=method.moe.in_dtype),
        scale_name="weight_scale",
        values_name="weight_packed",
        order="columns" if columns else "rows",
        zero_name="" if weights.symmetric else "weight_zero_point",
        zero_order="columns" if columns else "rows",
    )


def _gptq(method: Any) -> LoadedFormat:
    """Symmetric GPTQ; vLLM refuses others, or reads them by `_wna16`."""
    config = method.quant_config
    if not config.is_sym:
        raise ValueError("GPTQ weights with sym false are read with --quantization moe_wna16")
    return LoadedFormat(
        scheme=integer_scheme(config.weight_bits, max(config.group_size, 0), method.moe.in_dtype, zero_point=False),
        scale_name="scales",
        values_name="qweight",
        order="columns",
        group_name=gptq_group(config.desc_act, config.group_size, config.full_config),
    )


def _awq(method: Any) -> LoadedFormat:
    config = method.quant_config
    if not config.zero_point:
        raise ValueError("AWQ weights without zero points are not read here")
    return LoadedFormat(
        scheme=integer_scheme(config.weight_bits, config.group_size, method.moe.in_dtype, zero_point=True),
        scale_name="scales",
        values_name="qweight",
        order="awq",
        zero_name="qzeros",
        zero_order="awq",
    )


def _wna16(method: Any) -> LoadedFormat:
    """GPTQ and AWQ of --quantization moe_wna16, which vLLM turns to rows while it loads them."""
    config, moe = method.quant_config, method.moe
    if config.has_zp and moe.moe_parallel_config.ep_size > 1:
        raise ValueError("zero points of moe_wna16 are not loaded on several expert-parallel ranks by this release")
    for what, size in (("hidden", moe.hidden_dim), ("intermediate", moe.intermediate_size_per_partition)):
        if size % config.group_size:
            raise ValueError(f"groups of {config.group_size} do not divide {what} ({size}): vLLM makes them smaller")
    return LoadedFormat(
        scheme=integer_scheme(config.weight_bits, config.group_size, moe.in_dtype, zero_point=config.has_zp),
        scale_name="scales",
        values_name="qweight",
        zero_name="qzeros" if config.has_zp else "",
    )


def _modelopt_nvfp4(method: Any) -> LoadedFormat:
    return LoadedFormat(scheme=_nvfp4_scheme(method, ""), scale_name="weight_scale", global_name="weight_scale_2")


def _compressed_nvfp4(method: Any) -> LoadedFormat:
    """NVFP4 of compressed-tensors, whose second scale divides."""
    return LoadedFormat(
        scheme=_nvfp4_scheme(method, "_divisor"),
        scale_name="weight_scale",
        values_name="weight_packed",
        global_name="weight_global_scale",
    )


def note_tokens(method: Any, quant_config: Any, layer: Any, prefix: str) -> None:
    """Give a method of compressed-tensors' NVFP4 `use_a16`, which 0.26 forgets; does nothing for others. Local.

    Args: quant_config: of the model. layer: RoutedExperts. prefix: its name.
    """
    if type(method).__name__ == "CompressedTensorsW4A4Nvfp4MoEMethod" and not hasattr(method, "use_a16"):
        settings = quant_config.get_scheme_dict(layer, f"{prefix}.0.gate_proj")
        method.use_a16 = settings["input_activations"] is None


def _nvfp4_scheme(method: Any, ending: str) -> QuantScheme:
    if not hasattr(method, "use_a16"):
        raise ValueError("this release does not tell NVFP4 tokens from those in 16 bits")
    if getattr(method, "per_token_activation", False):
        raise ValueError("NVFP4 tokens with a second scale for each token are not computed here")
    return get_scheme(f"nvfp4{'_w4a16' if method.use_a16 else ''}{ending}")


_READERS: dict[str, Callable[[Any], LoadedFormat]] = {
    "Fp8MoEMethod": _fp8,
    "ModelOptFp8MoEMethod": _modelopt_fp8,
    "CompressedTensorsW8A8Fp8MoEMethod": _compressed_fp8,
    "CompressedTensorsW8A8Int8MoEMethod": _compressed_int8,
    "CompressedTensorsWNA16MoEMethod": _compressed_integers,
    "CompressedTensorsWNA16MarlinMoEMethod": _compressed_integers,
    "AutoGPTQMoEMethod": _gptq,
    "AutoAWQMoEMethod": _awq,
    "MoeWNA16Method": _wna16,
    "ModelOptNvFp4FusedMoE": _modelopt_nvfp4,
    "CompressedTensorsW4A4Nvfp4MoEMethod": _compressed_nvfp4,
    "CompressedTensorsW4A4Mxfp4MoEMethod": _compressed_mxfp4,
    "CompressedTensorsW8A8Mxfp8MoEMethod": _mxfp8,
    "ModelOptMxFp8FusedMoE": _mxfp8,
}
