"""vLLM's formats and activations as ours."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from ep_moe.config import ActivationConfig, ActivationKind
from ep_moe.engines.common import formats
from ep_moe.engines.common.formats import LoadedFormat, stored_as
from ep_moe.engines.common.packed import Order

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
    if interleaved and name not in _MAY_INTERLEAVE:
        raise ValueError(f"weights of {name} with interleaved gate and up rows are not read here")
    return dataclasses.replace(formats.format_by(_FORMATS, method, method), interleaved=interleaved)


def _fp8(method: Any) -> LoadedFormat:
    if getattr(method, "weight_scale_refine", None) is not None:
        raise ValueError("its fp8 blocks are refined for tensor parallelism")
    return formats.serialized_fp8(method)


def _compressed_mxfp4(method: Any) -> LoadedFormat:
    """MXFP4 of compressed-tensors, which vLLM computes by its Marlin kernels, or with tokens in MXFP4."""
    if method.use_cutlass_mxfp4:
        raise ValueError("MXFP4 tokens, which vLLM's CUTLASS kernels take, are not computed here")
    return stored_as("mxfp4_w4a16", values=".weight_packed")


def _compressed_integers(method: Any) -> LoadedFormat:
    weights, backend = method.weight_quant, getattr(getattr(method, "wna16_backend", None), "name", "")
    # 0.33 has the attribute; 0.26 loads columns first for all backends but this
    columns = getattr(method, "is_transposed", backend != "FLASHINFER_TRTLLM")
    order: Order = "columns" if columns else "rows"
    return formats.compressed_integers(weights, symmetric=weights.symmetric, dtype=method.moe.in_dtype, order=order)


def _gptq(method: Any) -> LoadedFormat:
    """Symmetric GPTQ; vLLM refuses others, or reads them by `_wna16`."""
    if not method.quant_config.is_sym:
        raise ValueError("GPTQ weights with sym false are read with --quantization moe_wna16")
    return formats.gptq(method.quant_config, method.moe.in_dtype)


def _wna16(method: Any) -> LoadedFormat:
    config, moe = method.quant_config, method.moe
    if config.has_zp and moe.moe_parallel_config.ep_size > 1:
        raise ValueError("zero points of moe_wna16 are not loaded on several expert-parallel ranks by this release")
    for what, size in (("hidden", moe.hidden_dim), ("intermediate", moe.intermediate_size_per_partition)):
        if size % config.group_size:
            raise ValueError(f"groups of {config.group_size} do not divide {what} ({size}): vLLM makes them smaller")
    return formats.wna16(config, config.group_size, moe.in_dtype)


def note_tokens(method: Any, quant_config: Any, layer: Any, prefix: str) -> None:
    """Give a method of compressed-tensors' NVFP4 `use_a16`, which 0.26 forgets; does nothing for others. Local.

    Args: quant_config: of the model. layer: RoutedExperts. prefix: its name.
    """
    if type(method).__name__ == "CompressedTensorsW4A4Nvfp4MoEMethod" and not hasattr(method, "use_a16"):
        settings = quant_config.get_scheme_dict(layer, f"{prefix}.0.gate_proj")
        method.use_a16 = settings["input_activations"] is None


def _nvfp4(method: Any) -> LoadedFormat:
    if not hasattr(method, "use_a16"):
        raise ValueError("this release does not tell NVFP4 tokens from those in 16 bits")
    if getattr(method, "per_token_activation", False):
        raise ValueError("NVFP4 tokens with a second scale for each token are not computed here")
    return formats.nvfp4(tokens=not method.use_a16, compressed=type(method).__name__.startswith("Compressed"))


_MAY_INTERLEAVE = ("UnquantizedFusedMoEMethod", "GptOssMxfp4MoEMethod")
_FORMATS: Mapping[str, LoadedFormat | formats.Reader] = {  # by class of a method
    "UnquantizedFusedMoEMethod": stored_as("none"),
    "GptOssMxfp4MoEMethod": stored_as("mxfp4_w4a16"),
    "Fp8MoEMethod": _fp8,
    "ModelOptFp8MoEMethod": stored_as("fp8_tensor", static=True),
    "CompressedTensorsW8A8Fp8MoEMethod": formats.compressed_fp8,
    "CompressedTensorsW8A8Int8MoEMethod": stored_as("int8_token"),
    "CompressedTensorsWNA16MoEMethod": _compressed_integers,
    "CompressedTensorsWNA16MarlinMoEMethod": _compressed_integers,
    "AutoGPTQMoEMethod": _gptq,
    "AutoAWQMoEMethod": lambda method: formats.awq(method.quant_config, method.moe.in_dtype),
    "MoeWNA16Method": _wna16,
    "ModelOptNvFp4FusedMoE": _nvfp4,
    "CompressedTensorsW4A4Nvfp4MoEMethod": _nvfp4,
    "CompressedTensorsW4A4Mxfp4MoEMethod": _compressed_mxfp4,
    "CompressedTensorsW8A8Mxfp8MoEMethod": stored_as("mxfp8"),
    "ModelOptMxFp8FusedMoE": stored_as("mxfp8"),
}
