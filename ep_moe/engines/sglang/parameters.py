"""SGLang's formats and activations as ours."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from ep_moe.config import ActivationConfig, ActivationKind
from ep_moe.engines.common import formats
from ep_moe.engines.common.formats import LoadedFormat, configured, stored_as

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
    bounded = (alpha, clamp, limit) != (None, None, None)
    if (name, gated) not in _KINDS or (bounded and name != "silu"):
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
    loaded, runner = formats.format_by(_FORMATS, holder, layer, holder), layer.moe_runner_config
    interleaved = bool(runner.gemm1_alpha is not None and runner.gate_up_interleaved)
    if interleaved and loaded.method.names["values"] != "weight":
        raise ValueError(f"weights of {type(holder).__name__} with interleaved gate and up rows are not read here")
    return dataclasses.replace(loaded, bias_name=BIAS, interleaved=interleaved)


def _fp8(_layer: Any, method: Any) -> LoadedFormat:
    if getattr(method, "is_fp4_expert", False):
        raise ValueError("weights of Fp8MoEMethod in fp4 are not read here")
    _check_serialized(method)
    return configured(quant_method="mxfp8") if method.use_mxfp8 else formats.serialized_fp8(method)


def _modelopt_fp8(_layer: Any, method: Any) -> LoadedFormat:
    _check_serialized(method)
    return stored_as("fp8_tensor", static=True)


def _check_serialized(method: Any) -> None:
    if not method.quant_config.is_checkpoint_fp8_serialized:
        raise ValueError("its weights are quantized to fp8 while they are loaded")


def _int8_blocks(_layer: Any, method: Any) -> LoadedFormat:
    return configured(quant_method="blockwise_int8", weight_block_size=method.quant_config.weight_block_size)


def _mxfp4(layer: Any, _method: Any) -> LoadedFormat:
    """The format of SGLang's Mxfp4MoEMethod, which some backends make larger than the checkpoint."""
    loaded, runner = stored_as("mxfp4_w4a16"), layer.moe_runner_config
    rows = 2 * layer.intermediate_size_per_partition
    needed = (layer.num_local_experts, rows, loaded.scheme.weight.row_values(runner.hidden_size))
    found = tuple(layer.w13_weight.shape)
    if found != needed:
        raise ValueError(f"its MXFP4 weights are padded: w13_weight is {found}, the checkpoint has {needed}")
    return loaded


def _nvfp4(_layer: Any, method: Any) -> LoadedFormat:
    """NVFP4 of modelopt; tokens are in NVFP4 too unless SGLang would compute with its Marlin kernels."""
    config = method.quant_config
    if getattr(config, "is_nvfp4_online", False):
        raise ValueError("its weights are quantized to NVFP4 while they are loaded")
    if getattr(config, "use_per_token_activation", False):
        raise ValueError("NVFP4 tokens with a second scale for each token are not computed here")
    return formats.nvfp4(tokens=not method._moe_runner_backend.is_marlin())


def _compressed_nvfp4(_layer: Any, scheme: Any) -> LoadedFormat:
    loaded = formats.nvfp4(tokens="W4A16" not in type(scheme).__name__, compressed=True)
    return dataclasses.replace(loaded, up_first=bool(scheme.load_up_proj_weight_first))


def _compressed_integers(layer: Any, scheme: Any) -> LoadedFormat:
    if not scheme.sym:
        raise ValueError("packed weights with zero points, which SGLang loads without turning them, are not read here")
    return formats.compressed_integers(scheme, symmetric=True, dtype=layer.w13_weight_scale.dtype, order="columns")


def _gptq(layer: Any, scheme: Any) -> LoadedFormat:
    """Symmetric GPTQ; SGLang refuses others, or reads them by `_wna16`."""
    if not scheme.quant_config.is_sym:
        raise ValueError("GPTQ weights with zero points, which SGLang loads as numbers of tokens, are not read here")
    return formats.gptq(scheme.quant_config, layer.w13_scales.dtype)


def _wna16(layer: Any, method: Any) -> LoadedFormat:
    config = method.quant_config
    if config.has_zp and config.weight_bits == 8:
        raise ValueError("GPTQ weights of 8 bits with zero points are not loaded by this release")
    if config.has_zp and layer.moe_ep_size > 1 and not hasattr(sys.modules[type(method).__module__], _LOCAL_IDS):
        raise ValueError("zero points of moe_wna16 are not loaded on several expert-parallel ranks by this release")
    return formats.wna16(config, layer.group_size, layer.w13_scales.dtype)


_LOCAL_IDS = "_local_expert_ids"  # of the module of a release that loads them
_OF_SCHEME = ("CompressedTensorsFusedMoEMethod", "GPTQMarlinMoEMethod", "AWQMoEMethod")  # name their scheme's class
_FORMATS: Mapping[str, LoadedFormat | formats.Reader] = {  # by class of a method, or of its scheme
    "UnquantizedFusedMoEMethod": stored_as("none"),
    "Mxfp4MoEMethod": _mxfp4,
    "Fp8MoEMethod": _fp8,
    "ModelOptFp8MoEMethod": _modelopt_fp8,
    "CompressedTensorsW8A8Fp8MoE": lambda _layer, scheme: formats.compressed_fp8(scheme),
    "W8A8FP8MoEMethod": stored_as("fp8_token"),
    "W8A8Int8MoEMethod": stored_as("int8_token"),
    "BlockInt8MoEMethod": _int8_blocks,
    "ModelOptNvFp4FusedMoEMethod": _nvfp4,
    "CompressedTensorsW4A4Nvfp4MoE": _compressed_nvfp4,
    "CompressedTensorsW4A16Nvfp4MoE": _compressed_nvfp4,
    "CompressedTensorsWNA16MoE": _compressed_integers,
    "CompressedTensorsWNA16TritonMoE": _compressed_integers,
    "GPTQMarlinMoEScheme": _gptq,
    "AWQMoEScheme": lambda layer, scheme: formats.awq(scheme.quant_config, layer.w13_scales.dtype),
    "MoeWNA16Method": _wna16,
}
