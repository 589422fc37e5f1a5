"""SGLang's formats and activations as ours."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from ep_moe.config import ActivationConfig, ActivationKind
from ep_moe.engines.common.formats import LoadedFormat, fp8_blocks, gptq_group, integer_scheme, packed_integers
from ep_moe.quant import get_scheme, with_block

BIAS = "weight_bias"  # of SGLang's parameters, behind "w13_" and "w2_"
_KINDS = {
    ("silu", True): ActivationKind.SILU,
    ("gelu", True): ActivationKind.GELU,
    ("relu2", False): ActivationKind.RELU2,
}


def activation_of(runner: Any) -> ActivationConfig:
    """Our activation for a MoeRunnerConfig. Errors: ValueError for one that we do not compute. Local."""
    name, gated = runner.activation, runner.is_gated
    alpha, clamp, limit = runner.gemm1_alpha, runner.gemm1_clamp_limit, runner.swiglu_limit
    given = (alpha, clamp, limit) != (None, None, None)
    if (name, gated) not in _KINDS or (given and name != "silu"):
        raise ValueError(f"activation '{name}' ({'' if gated else 'not '}gated) is not computed here")
    if getattr(runner, "gemm1_beta", None) not in (None, 1.0):
        raise ValueError(f"gemm1_beta ({runner.gemm1_beta}) is not 1")
    if getattr(runner, "silu_mul_keep_fp32", False):
        raise ValueError("silu_mul_keep_fp32 is not computed here")
    if clamp is not None and limit is not None:
        raise ValueError(f"both gemm1_clamp_limit ({clamp}) and swiglu_limit ({limit}) are given")
    if alpha is not None:
        if limit is not None:
            raise ValueError(f"swiglu_limit ({limit}) is given beside gemm1_alpha ({alpha})")
        return ActivationConfig(kind=ActivationKind.SWIGLU, alpha=alpha, beta=1.0, limit=clamp)
    if clamp is not None:
        return ActivationConfig(kind=ActivationKind.SWIGLU_STEP, limit=clamp)
    if limit is not None:
        return ActivationConfig(kind=ActivationKind.SWIGLU, limit=limit)
    return ActivationConfig(kind=_KINDS[name, gated])


def format_of(layer: Any, method: Any) -> LoadedFormat:
    """The format of a layer's method. Errors: ValueError for a format that we do not read. Local."""
    holder = layer.scheme if type(method).__name__ in _OF_SCHEME else method
    name = type(holder).__name__
    if name not in _READERS:
        raise ValueError(f"weights of {name} are not read here")
    loaded, runner = _READERS[name](layer, holder), layer.moe_runner_config
    interleaved = bool(runner.gemm1_alpha is not None and runner.gate_up_interleaved)
    if interleaved and loaded.values_name != "weight":
        raise ValueError(f"weights of {name} with gate and up rows in turns are not read here")
    return dataclasses.replace(loaded, bias_name=BIAS, interleaved=interleaved)


def _plain(_layer: Any, _method: Any) -> LoadedFormat:
    return LoadedFormat(scheme=get_scheme("none"))


def _fp8(_layer: Any, method: Any) -> LoadedFormat:
    """The format of SGLang's Fp8MoEMethod."""
    if getattr(method, "is_fp4_expert", False):
        raise ValueError("weights of Fp8MoEMethod in fp4 are not read here")
    if not method.quant_config.is_checkpoint_fp8_serialized:
        raise ValueError("its weights are quantized to fp8 while they are loaded")
    if method.use_mxfp8:
        return LoadedFormat(scheme=get_scheme("mxfp8"), scale_name="weight_scale_inv")
    if method.block_quant:
        return LoadedFormat(scheme=fp8_blocks(method.weight_block_size), scale_name="weight_scale_inv")
    static = method.quant_config.activation_scheme == "static"
    return LoadedFormat(scheme=get_scheme("fp8_tensor"), scale_name="weight_scale", static=static)


def _compressed_fp8(_layer: Any, scheme: Any) -> LoadedFormat:
    if scheme.block_quant:
        return LoadedFormat(scheme=fp8_blocks(scheme.weight_block_size), scale_name="weight_scale")
    ours = get_scheme("fp8_tensor" if scheme.weight_quant.strategy == "tensor" else "fp8_token")
    return LoadedFormat(scheme=ours, scale_name="weight_scale", static=scheme.static_input_scales)


def _modelopt_fp8(_layer: Any, method: Any) -> LoadedFormat:
    if not method.quant_config.is_checkpoint_fp8_serialized:
        raise ValueError("its weights are quantized to fp8 while they are loaded")
    return LoadedFormat(scheme=get_scheme("fp8_tensor"), scale_name="weight_scale", static=True)


def _fp8_channels(_layer: Any, _method: Any) -> LoadedFormat:
    return LoadedFormat(scheme=get_scheme("fp8_token"), scale_name="weight_scale")


def _int8(_layer: Any, _method: Any) -> LoadedFormat:
    return LoadedFormat(scheme=get_scheme("int8_token"), scale_name="weight_scale")


def _int8_blocks(_layer: Any, method: Any) -> LoadedFormat:
    scheme = with_block(get_scheme("int8_block"), *method.quant_config.weight_block_size)
    return LoadedFormat(scheme=scheme, scale_name="weight_scale_inv")


def _mxfp4(layer: Any, _method: Any) -> LoadedFormat:
    """The format of SGLang's Mxfp4MoEMethod, which some backends make larger than the checkpoint."""
    scheme, runner = get_scheme("mxfp4_w4a16"), layer.moe_runner_config
    rows = 2 * layer.intermediate_size_per_partition
    needed = (layer.num_local_experts, rows, scheme.weight.row_values(runner.hidden_size))
    found = tuple(layer.w13_weight.shape)
    if found != needed:
        raise ValueError(f"its MXFP4 weights are padded: w13_weight is {found}, the checkpoint has {needed}")
    return LoadedFormat(scheme=scheme, scale_name="weight_scale")


def _nvfp4(_layer: Any, method: Any) -> LoadedFormat:
    """NVFP4 of modelopt; tokens are in NVFP4 too unless SGLang would compute with its Marlin kernels."""
    config = method.quant_config
    if getattr(config, "is_nvfp4_online", False):
        raise ValueError("its weights are quantized to NVFP4 while they are loaded")
    if getattr(config, "use_per_token_activation", False):
        raise ValueError("NVFP4 tokens with a second scale for each token are not computed here")
    scheme = get_scheme("nvfp4_w4a16" if method._moe_runner_backend.is_marlin() else "nvfp4")
    return LoadedFormat(scheme=scheme, scale_name="weight_scale", global_name="weight_scale_2")


def _compressed_nvfp4(_layer: Any, scheme: Any) -> LoadedFormat:
    """NVFP4 of compressed-tensors, whose second scale divides."""
    weights_alone = "W4A16" in type(scheme).__name__
    return LoadedFormat(
        scheme=get_scheme("nvfp4_w4a16_divisor" if weights_alone else "nvfp4_divisor"),
        scale_name="weight_scale",
        values_name="weight_packed",
        global_name="weight_global_scale",
        up_first=bool(scheme.load_up_proj_weight_first),
    )


def _compressed_integers(layer: Any, scheme: Any) -> LoadedFormat:
    if not scheme.sym:
        raise ValueError("packed weights with zero points, which SGLang loads without turning them, are not read here")
    return LoadedFormat(
        scheme=packed_integers(scheme, symmetric=True, dtype=layer.w13_weight_scale.dtype),
        scale_name="weight_scale",
        values_name="weight_packed",
        order="columns",
    )


def _gptq(layer: Any, scheme: Any) -> LoadedFormat:
    """Symmetric GPTQ; SGLang refuses others, or reads them by `_wna16`."""
    config = scheme.quant_config
    if not config.is_sym:
        raise ValueError("GPTQ weights with zero points, which SGLang loads as numbers of tokens, are not read here")
    group = max(config.group_size, 0)
    return LoadedFormat(
        scheme=integer_scheme(config.weight_bits, group, layer.w13_scales.dtype, zero_point=False),
        scale_name="scales",
        values_name="qweight",
        order="columns",
        group_name=gptq_group(config.desc_act, config.group_size, config.full_config),
    )


def _awq(layer: Any, scheme: Any) -> LoadedFormat:
    config = scheme.quant_config
    if not config.zero_point:
        raise ValueError("AWQ weights without zero points are not read here")
    return LoadedFormat(
        scheme=integer_scheme(config.weight_bits, config.group_size, layer.w13_scales.dtype, zero_point=True),
        scale_name="scales",
        values_name="qweight",
        order="awq",
        zero_name="qzeros",
        zero_order="awq",
    )


def _wna16(layer: Any, method: Any) -> LoadedFormat:
    """GPTQ and AWQ of --quantization moe_wna16, which SGLang turns to rows while it loads them."""
    config = method.quant_config
    if config.has_zp and config.weight_bits == 8:
        raise ValueError("GPTQ weights of 8 bits with zero points are not loaded by this release")
    if config.has_zp and layer.moe_ep_size > 1 and not hasattr(_module_of(method), "_local_expert_ids"):
        raise ValueError("zero points of moe_wna16 are not loaded on several expert-parallel ranks by this release")
    return LoadedFormat(
        scheme=integer_scheme(config.weight_bits, layer.group_size, layer.w13_scales.dtype, zero_point=config.has_zp),
        scale_name="scales",
        values_name="qweight",
        zero_name="qzeros" if config.has_zp else "",
    )


def _module_of(method: Any) -> Any:
    return sys.modules[type(method).__module__]


_OF_SCHEME = ("CompressedTensorsFusedMoEMethod", "GPTQMarlinMoEMethod", "AWQMoEMethod")  # name their scheme's class
_READERS: dict[str, Callable[[Any, Any], LoadedFormat]] = {
    "UnquantizedFusedMoEMethod": _plain,
    "Mxfp4MoEMethod": _mxfp4,
    "Fp8MoEMethod": _fp8,
    "ModelOptFp8MoEMethod": _modelopt_fp8,
    "CompressedTensorsW8A8Fp8MoE": _compressed_fp8,
    "W8A8FP8MoEMethod": _fp8_channels,
    "W8A8Int8MoEMethod": _int8,
    "BlockInt8MoEMethod": _int8_blocks,
    "ModelOptNvFp4FusedMoEMethod": _nvfp4,
    "CompressedTensorsW4A4Nvfp4MoE": _compressed_nvfp4,
    "CompressedTensorsW4A16Nvfp4MoE": _compressed_nvfp4,
    "CompressedTensorsWNA16MoE": _compressed_integers,
    "CompressedTensorsWNA16TritonMoE": _compressed_integers,
    "GPTQMarlinMoEScheme": _gptq,
    "AWQMoEScheme": _awq,
    "MoeWNA16Method": _wna16,
}
