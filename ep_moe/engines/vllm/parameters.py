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


def scheme_of(method: Any) -> QuantScheme:
    """Our scheme for a method of vLLM. Errors: ValueError for a format that we do not read. Local."""
    name = type(method).__name__
    if name == "UnquantizedFusedMoEMethod":
        return get_scheme("none")
    if name == "Fp8MoEMethod" and method.block_quant:
        if getattr(method, "weight_scale_refine", None) is not None:
            raise ValueError("its fp8 blocks are refined for tensor parallelism")
        return fp8_blocks(method.weight_block_size)
    if name == "Fp8MoEMethod":
        raise ValueError("fp8 with a scale per tensor is not read here")
    raise ValueError(f"weights of {name} are not read here")


def fp8_blocks(block: list[int]) -> QuantScheme:
    """The scheme of fp8 weights with a scale per block of [rows, columns], and tokens in groups. Local."""
    rows, columns = block
    return get_scheme("fp8_block" if (rows, columns) == (128, 128) else f"fp8_block_{rows}x{columns}")


def weights_of(layer: Any, scheme: QuantScheme) -> ExpertWeights:
    """The parameters of a RoutedExperts layer, as views; w13 is [gate; up] in both. Local.

    Errors: ValueError for parameters that are not as vLLM's loader leaves them.
    """
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
    scales: dict[str, Any] = dict.fromkeys(("w13", "w2"))
    if scheme.weight.quantized:
        scales = {name: getattr(layer, f"{name}_weight_scale_inv").data for name in scales}
    bias = {name: getattr(layer, f"{name}_bias", None) for name in ("w13", "w2")}
    return ExpertWeights(
        w13=StoredMatrix(w13, scale=scales["w13"]),
        w2=StoredMatrix(w2, scale=scales["w2"]),
        scheme=scheme,
        w13_bias=None if bias["w13"] is None else bias["w13"].data,
        w2_bias=None if bias["w2"] is None else bias["w2"].data,
    )


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
