"""vLLM's formats and activations as ours."""

from typing import Any

from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from ep_moe.config import ActivationConfig, ActivationKind
from ep_moe.engines.common.formats import LoadedFormat, fp8_blocks, int4_scheme, packed_int4
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
    if name == "Fp8MoEMethod":
        if getattr(method, "weight_scale_refine", None) is not None:
            raise ValueError("its fp8 blocks are refined for tensor parallelism")
        if method.block_quant:
            return LoadedFormat(scheme=fp8_blocks(method.weight_block_size), scale_name="weight_scale_inv")
        static = method.quant_config.activation_scheme == "static"
        return LoadedFormat(scheme=get_scheme("fp8_tensor"), scale_name="weight_scale", static=static)
    if name == "CompressedTensorsW8A8Fp8MoEMethod":
        if method.block_quant:
            return LoadedFormat(scheme=fp8_blocks(method.weight_block_size), scale_name="weight_scale")
        scheme = get_scheme("fp8_tensor" if method.weight_quant.strategy == "tensor" else "fp8_token")
        return LoadedFormat(scheme=scheme, scale_name="weight_scale", static=method.static_input_scales)
    if name in ("CompressedTensorsWNA16MoEMethod", "CompressedTensorsWNA16MarlinMoEMethod"):
        backend = getattr(getattr(method, "wna16_backend", None), "name", "")
        return LoadedFormat(
            scheme=packed_int4(method.weight_quant, symmetric=method.weight_quant.symmetric, dtype=method.moe.in_dtype),
            scale_name="weight_scale",
            values_name="weight_packed",
            # 0.33 has the attribute; 0.26 loads columns first for all backends but this
            columns_first=getattr(method, "is_transposed", backend != "FLASHINFER_TRTLLM"),
        )
    if name == "AutoGPTQMoEMethod":
        return LoadedFormat(scheme=_gptq(method), scale_name="scales", values_name="qweight", columns_first=True)
    if name in ("CompressedTensorsW4A4Nvfp4MoEMethod", "ModelOptNvFp4FusedMoE"):
        return _nvfp4(method, divides=name.startswith("CompressedTensors"))
    if name == "CompressedTensorsW8A8Int8MoEMethod":
        return LoadedFormat(scheme=get_scheme("int8_token"), scale_name="weight_scale")
    raise ValueError(f"weights of {name} are not read here")


def _nvfp4(method: Any, *, divides: bool) -> LoadedFormat:
    """NVFP4 of compressed-tensors, whose second scale divides, or of modelopt. Errors: ValueError for others. Local."""
    if not hasattr(method, "use_a16"):
        raise ValueError("this release does not tell NVFP4 tokens from those in 16 bits")
    if getattr(method, "per_token_activation", False):
        raise ValueError("NVFP4 tokens with a second scale for each token are not computed here")
    scheme = get_scheme(f"nvfp4{'_w4a16' if method.use_a16 else ''}{'_divisor' if divides else ''}")
    if divides:
        return LoadedFormat(
            scheme=scheme, scale_name="weight_scale", values_name="weight_packed", global_name="weight_global_scale"
        )
    return LoadedFormat(scheme=scheme, scale_name="weight_scale", global_name="weight_scale_2")


def _gptq(method: Any) -> QuantScheme:
    """The scheme of symmetric int4 weights of GPTQ. Errors: ValueError for others. Local."""
    config = method.quant_config
    if (config.weight_bits, config.is_sym, config.desc_act) != (4, True, False):
        raise ValueError(
            f"GPTQ weights with bits {config.weight_bits}, sym {config.is_sym}, desc_act {config.desc_act} "
            "are not read here"
        )
    return int4_scheme(0 if config.group_size == -1 else config.group_size, method.moe.in_dtype)
