"""SGLang's formats and activations as ours."""

from typing import Any

from ep_moe.config import ActivationConfig, ActivationKind
from ep_moe.engines.common.formats import LoadedFormat, fp8_blocks, packed_int4
from ep_moe.quant import get_scheme

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
    if given:
        return ActivationConfig(kind=ActivationKind.SWIGLU, limit=clamp if limit is None else limit)
    return ActivationConfig(kind=_KINDS[name, gated])


def format_of(layer: Any, method: Any) -> LoadedFormat:
    """The format of a layer's method. Errors: ValueError for a format that we do not read. Local."""
    runner, name = layer.moe_runner_config, type(method).__name__
    interleaved = bool(runner.gemm1_alpha is not None and runner.gate_up_interleaved)
    common: dict[str, Any] = {"bias_name": BIAS, "interleaved": interleaved}
    if name == "UnquantizedFusedMoEMethod":
        return LoadedFormat(scheme=get_scheme("none"), **common)
    if name == "Mxfp4MoEMethod":
        return _mxfp4(layer, common)
    if name == "Fp8MoEMethod":
        return _fp8(method, common)
    if name == "CompressedTensorsFusedMoEMethod":
        scheme: Any = layer.scheme
        name = type(scheme).__name__
        if name == "CompressedTensorsW8A8Fp8MoE":
            if scheme.block_quant:
                return LoadedFormat(scheme=fp8_blocks(scheme.weight_block_size), scale_name="weight_scale", **common)
            ours = get_scheme("fp8_tensor" if scheme.weight_quant.strategy == "tensor" else "fp8_token")
            return LoadedFormat(scheme=ours, scale_name="weight_scale", static=scheme.static_input_scales, **common)
        if name in ("CompressedTensorsWNA16MoE", "CompressedTensorsWNA16TritonMoE") and not interleaved:
            return LoadedFormat(
                scheme=packed_int4(scheme, symmetric=scheme.sym, dtype=layer.w13_weight_scale.dtype),
                scale_name="weight_scale",
                values_name="weight_packed",
                columns_first=True,
                **common,
            )
    raise ValueError(f"weights of {name} are not read here")


def _fp8(method: Any, common: dict[str, Any]) -> LoadedFormat:
    """The format of SGLang's Fp8MoEMethod."""
    if method.use_mxfp8 or getattr(method, "is_fp4_expert", False):
        raise ValueError(f"weights of Fp8MoEMethod in {'MXFP8' if method.use_mxfp8 else 'fp4'} are not read here")
    if not method.quant_config.is_checkpoint_fp8_serialized:
        raise ValueError("its weights are quantized to fp8 while they are loaded")
    if method.block_quant:
        return LoadedFormat(scheme=fp8_blocks(method.weight_block_size), scale_name="weight_scale_inv", **common)
    static = method.quant_config.activation_scheme == "static"
    return LoadedFormat(scheme=get_scheme("fp8_tensor"), scale_name="weight_scale", static=static, **common)


def _mxfp4(layer: Any, common: dict[str, Any]) -> LoadedFormat:
    """The format of SGLang's Mxfp4MoEMethod, which some backends make larger than the checkpoint."""
    scheme, runner = get_scheme("mxfp4_w4a16"), layer.moe_runner_config
    rows = 2 * layer.intermediate_size_per_partition
    needed = (layer.num_local_experts, rows, scheme.weight.row_values(runner.hidden_size))
    found = tuple(layer.w13_weight.shape)
    if found != needed:
        raise ValueError(f"its MXFP4 weights are padded: w13_weight is {found}, the checkpoint has {needed}")
    return LoadedFormat(scheme=scheme, scale_name="weight_scale", **common)
