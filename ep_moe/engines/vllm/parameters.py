"""vLLM's expert parameters as `ExpertWeights`, without a copy, and its activations as ours.

The parameters are read as vLLM's loader leaves them, before vLLM would repack them for a kernel of its own. They stay
the storage of our weights: vLLM's expert load balancer moves experts by writing to them.
Letters: L local experts, H hidden, I intermediate.
"""

import dataclasses
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from ep_moe.config import DTYPES, ActivationConfig, ActivationKind
from ep_moe.engines.common.weights import gate_above_up
from ep_moe.quant import QuantScheme, StoredMatrix, get_scheme
from ep_moe.weights import ExpertWeights

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedFormat:
    """How a method of vLLM loads weights.

    Args:
        scheme: ours for the same numbers.
        scale_name: of the parameters with scales, behind "w13_" and "w2_".
        static: there are scales of activations, w13_input_scale and w2_input_scale.
    """

    scheme: QuantScheme
    scale_name: str = ""
    static: bool = False


def format_of(method: Any) -> LoadedFormat:
    """The format of a method. Errors: ValueError for a format that we do not read. Local."""
    name = type(method).__name__
    if name == "UnquantizedFusedMoEMethod":
        return LoadedFormat(scheme=get_scheme("none"))
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
    raise ValueError(f"weights of {name} are not read here")


def fp8_blocks(block: list[int]) -> QuantScheme:
    """The scheme of fp8 weights with a scale per block of [rows, columns], and tokens in groups. Local."""
    rows, columns = block
    return get_scheme("fp8_block" if (rows, columns) == (128, 128) else f"fp8_block_{rows}x{columns}")


def weights_of(layer: Any, loaded: LoadedFormat) -> ExpertWeights:
    """The parameters of a RoutedExperts layer, as views; w13 is [gate; up] in both. Local.

    Args: layer: after `share_scale` if its scales are per tensor. Static scales of activations are left out.
    Errors: ValueError for parameters that are not as vLLM's loader leaves them.
    """
    scheme = loaded.scheme
    w13, w2 = layer.w13_weight.data, layer.w2_weight.data
    for name, tensor in (("w13_weight", w13), ("w2_weight", w2)):
        expected = scheme.weight.dtype or tensor.dtype
        if tensor.dim() != 3 or tensor.dtype != expected or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}, expected are 3 "
                f"dimensions of {expected}, contiguous"
            )
    if not scheme.weight.quantized and w13.dtype not in DTYPES.values():
        raise ValueError(f"w13_weight is {w13.dtype}, not one of {', '.join(DTYPES)}")
    bias = {name: getattr(layer, f"{name}_bias", None) for name in ("w13", "w2")}
    return ExpertWeights(
        w13=StoredMatrix(w13, scale=_scale(layer, "w13", loaded)),
        w2=StoredMatrix(w2, scale=_scale(layer, "w2", loaded)),
        scheme=scheme,
        w13_bias=None if bias["w13"] is None else bias["w13"].data,
        w2_bias=None if bias["w2"] is None else bias["w2"].data,
    )


def _scale(layer: Any, name: str, loaded: LoadedFormat) -> torch.Tensor | None:
    """The scales of a matrix as `StoredMatrix` has them: [L] per tensor, [L, N] per channel, or in blocks; a view."""
    if not loaded.scale_name:
        return None
    scale: torch.Tensor = getattr(layer, f"{name}_{loaded.scale_name}").data
    per = loaded.scheme.weight.granularity
    if per == "tensor":
        return scale[:, 0] if scale.dim() == 2 else scale
    return scale.squeeze(-1) if per == "channel" else scale


def share_scale(layer: Any) -> None:
    """Give both halves of w13 the larger of their scales [L, 2], as vLLM does; in place, nothing if they are equal.

    Local, host sync.
    """
    scale, w13 = layer.w13_weight_scale.data, layer.w13_weight.data
    if scale.dim() < 2 or scale.shape[1] < 2:
        return
    largest = scale.amax(dim=1)
    for half, rows in enumerate(w13.chunk(2, dim=1)):
        for expert in (scale[:, half] != largest).nonzero().flatten().tolist():
            factor = scale[expert, half] / largest[expert]
            rows[expert].copy_((rows[expert].float() * factor).to(rows.dtype))
    scale.copy_(largest.unsqueeze(1).expand_as(scale))


@dataclasses.dataclass(slots=True)
class RowOrder:
    """The order of the rows of w13, in parameters that vLLM loads as [gate 0, up 0, gate 1, ...].

    Args:
        separated: the first column of w13 as `separate` has left it, [L, 2I]; None before the first call.
    """

    separated: torch.Tensor | None = None

    def separate(self, layer: Any) -> None:
        """Reorder w13 and its bias to [gate; up] in place, unless they are as this has left them.

        vLLM calls `process_weights_after_loading` again after a reload, which writes the checkpoint's order, and after
        a sleep, which may write nothing. Local, host sync.
        """
        w13 = layer.w13_weight.data
        if self.separated is not None and torch.equal(self.separated, w13[:, :, 0]):
            return
        tensors = [w13] + [layer.w13_bias.data] * (getattr(layer, "w13_bias", None) is not None)
        for tensor in tensors:
            for expert in range(tensor.shape[0]):  # one at a time: a copy of all would double the memory
                tensor[expert : expert + 1].copy_(gate_above_up(tensor[expert : expert + 1]))
        self.separated = w13[:, :, 0].clone()
