"""`b12x_fused_moe`: NVFP4 or MXFP4 experts of tokens that are routed already.

Letters: T tokens, H hidden, I intermediate, K top-k, L local experts; W = 2I if the activation is gated, else I.
"""

import functools
from typing import Any, NamedTuple

import torch

from ep_moe.config import ActivationConfig, ActivationKind
from ep_moe.experts import Experts
from ep_moe.functional.call import Operation, Weight, Written, with_arguments
from ep_moe.functional.common import check_like, experts_for, mapped_ids, served_scheme
from ep_moe.functional.flashinfer.formats import MXFP4, NVFP4, stored_weight
from ep_moe.functional.plans import RoutedPlan, writes
from ep_moe.local_moe import local_moe
from ep_moe.quant import Quantized, QuantScheme, StoredMatrix, quantize
from ep_moe.routing import Routing
from ep_moe.weights import ExpertWeights, PerExpert

_SWIGLU = "swigluoai_uninterleave"
_SWIGLU_NUMBERS = {"alpha": 1.702, "beta": 1.0, "limit": None}  # FlashInfer's defaults
_ACTIVATIONS = {
    "silu": ActivationKind.SILU,
    "gelu_tanh": ActivationKind.GELU_TANH,
    _SWIGLU: ActivationKind.SWIGLU,
    "relu2": ActivationKind.RELU2,
}
_MODES = {"nvfp4": "nvfp4", "w4a4": "nvfp4", "mxfp4": "mxfp4", "w4a16": "w4a16"}
_PRECISIONS = {"fp4": "nvfp4", "bf16": "w4a16"}
_SCHEMES = {  # mode and source format -> schemes, the first of them if kernels do not decide
    ("nvfp4", "modelopt"): ("nvfp4", "nvfp4_w4a16"),
    ("mxfp4", "modelopt"): ("mxfp4_w4a16",),
    ("w4a16", "modelopt"): ("nvfp4_w4a16",),
    ("w4a16", "compressed_tensors"): ("nvfp4_w4a16_divisor",),
}
_IDS = (torch.int32, torch.int64)
_WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)


@functools.lru_cache(maxsize=64)
def _mode_of(quant_mode: str | None, activation_precision: str) -> str:
    """Which of `_SCHEMES`: "nvfp4", "mxfp4" or "w4a16"."""
    if activation_precision not in _PRECISIONS:
        raise ValueError(f"activation_precision ({activation_precision!r}) is not one of {', '.join(_PRECISIONS)}")
    if quant_mode is None:
        return _PRECISIONS[activation_precision]
    if quant_mode not in _MODES:
        raise ValueError(f"quant_mode ({quant_mode!r}) is not one of {', '.join(_MODES)}")
    return _MODES[quant_mode]


class B12xCall(NamedTuple):
    """The parameters of `b12x_fused_moe`, in their order."""

    x: torch.Tensor
    w1_weight: Weight
    w1_weight_sf: Weight
    w2_weight: Weight
    w2_weight_sf: Weight
    token_selected_experts: torch.Tensor
    token_final_scales: torch.Tensor
    num_experts: int
    top_k: int
    w1_alpha: Weight
    w2_alpha: Weight
    fc2_input_scale: Weight | None = None
    input_global_scale: Weight | None = None
    num_local_experts: int | None = None
    expert_map: torch.Tensor | None = None
    output: Written | None = None
    output_dtype: torch.dtype = torch.bfloat16
    activation: str = "silu"
    swiglu_alpha: float = 1.702
    swiglu_beta: float = 1.0
    swiglu_limit: float | None = None
    activation_precision: str = "fp4"
    quant_mode: str | None = None
    source_format: str = "modelopt"

    @property
    def mode(self) -> str:
        """How weights and tokens are stored; only "nvfp4" has input scales."""
        return _mode_of(self.quant_mode, self.activation_precision)

    @property
    def num_local(self) -> int:
        """L."""
        return self.num_experts if self.num_local_experts is None else self.num_local_experts

    @property
    def written(self) -> tuple[int, ...] | None:
        """`writes` of those that are multiplied by input scales, whose products may miss writes."""
        if _mode_of(self.quant_mode, self.activation_precision) != "nvfp4":
            return ()
        return writes((self.w1_alpha, self.w2_alpha, self.fc2_input_scale, self.input_global_scale))

    @property
    def ids(self) -> torch.Tensor:
        """The local ids [T, K] of the chosen experts."""
        ids = self.token_selected_experts
        return ids if self.expert_map is None else mapped_ids(ids, self.expert_map)


_BY_NAME = B12xCall._fields.index("w1_alpha")


@with_arguments(B12xCall, " ".join([*B12xCall._fields[:_BY_NAME], "*", *B12xCall._fields[_BY_NAME:]]))
def b12x_fused_moe(call: Any) -> torch.Tensor:
    """Compute FP4 experts [0, num_local_experts) of routed tokens, and sum their weighted outputs.

    Args:
        x: [T, H] bfloat16. token_selected_experts: [T, K] int32 or int64; other ids than those of local experts add
            nothing, so that a rank passes ids less its first expert. token_final_scales: [T, K], any float dtype.
        w1_weight, w1_weight_sf: [L, W, H / 2] uint8 and [L, W, H / 16] e4m3, rows [up; gate] but for "relu2".
        w2_weight, w2_weight_sf: [L, H, I / 2] and [L, H, I / 16]. In "mxfp4" scales are e8m0, of 32 columns.
        w1_alpha, w2_alpha: [L] float32, multiply the sums; divide them if `source_format` is "compressed_tensors".
        fc2_input_scale: one float32 or [L], needed in "nvfp4", whose `w2_alpha` contains its inverse; else ignored.
        input_global_scale: one float32 or [L], by which tokens are divided before they are rounded in "nvfp4", and the
            sums multiplied; 1 if None; else ignored.
        expert_map: [num_experts] integers, the local number of each expert, -1 none; ids are then those of all experts.
        quant_mode: "nvfp4" or "w4a4", tokens and intermediate are rounded to NVFP4 too (if no kernel computes that on
            this GPU, but one that keeps them in bfloat16 does, that one); "w4a16", they are not; "mxfp4", weights are
            MXFP4, tokens and intermediate stay in bfloat16. None: as `activation_precision` says, "fp4" for "nvfp4"
            and "bf16" for "w4a16".
        output: [T, H] bfloat16, is written and returned. activation: "silu", "gelu_tanh", "swigluoai_uninterleave",
            gated, or "relu2".
        swiglu_alpha, swiglu_beta, swiglu_limit: of "swigluoai_uninterleave"; a limit of None does not clamp.
    Returns: `output`, or [T, H] bfloat16.
    Errors: ValueError names the argument, its value and what is needed.
    Local, on the current stream. With experts that are kernels no host sync, and safe in CUDA graphs after a call of
    the same kind; an operator under torch.compile.
    """
    if call.output_dtype != torch.bfloat16:
        raise ValueError(f"output_dtype ({call.output_dtype}) is not torch.bfloat16")
    return _OPERATION(call)


def _matrix(call: B12xCall, name: str, shape: tuple[int, ...]) -> StoredMatrix:
    values, scale = getattr(call, name), getattr(call, f"{name}_sf")
    if tuple(values.shape) != shape:
        raise ValueError(f"{name} is {tuple(values.shape)}; {shape} needed")
    kind, matrix = stored_weight(values, scale, name, f"{name}_sf")
    needed, group = (MXFP4, 32) if call.mode == "mxfp4" else (NVFP4, 16)
    if kind != needed:
        raise ValueError(
            f"{name}_sf is {tuple(scale.shape)}, scales of {kind}; one for {group} columns needed in quant_mode "
            f"'{call.mode}'"
        )
    return matrix


@functools.lru_cache(maxsize=64)
def _activation_of(name: str, alpha: float, beta: float, limit: float | None) -> ActivationConfig:
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation ({name!r}) is not one of {', '.join(_ACTIVATIONS)}")
    numbers: dict[str, Any] = {"alpha": alpha, "beta": beta, "limit": limit}
    for number, value in numbers.items():
        if name != _SWIGLU and value != _SWIGLU_NUMBERS[number]:
            raise ValueError(f"swiglu_{number} ({value}) belongs to activation '{_SWIGLU}', not to {name!r}")
    if limit is not None and not limit > 0:
        raise ValueError(f"swiglu_limit ({limit}) must be positive")
    return ActivationConfig(kind=_ACTIVATIONS[name], **(numbers if name == _SWIGLU else {}))


def _global_scale(call: B12xCall, name: str) -> torch.Tensor:
    """An input scale, [1] or [L]."""
    scale, num_local = getattr(call, name), call.num_local
    if scale is None or scale.dtype != torch.float32 or scale.numel() not in (1, num_local):
        given = "missing" if scale is None else f"{tuple(scale.shape)} {scale.dtype}"
        raise ValueError(f"{name} is {given}; 1 or {num_local} float32 needed in quant_mode 'nvfp4'")
    return scale.reshape(-1)


def _launch(plan: RoutedPlan, call: B12xCall) -> torch.Tensor | None:
    return plan(call.x, call.ids, call.token_final_scales, call.output)


def _first(call: B12xCall) -> tuple[torch.Tensor, RoutedPlan | None]:
    """The weighted sum, in `output` if there is one. Errors: ValueError. Local."""
    x, routing, weights, experts = _prepare(call)
    options: dict[str, Any] = {"num_local_experts": call.num_local, "num_experts": call.num_experts}
    options |= {"dtype": torch.bfloat16, "out": call.output}
    result = local_moe(x, routing, weights, experts, **options)
    if isinstance(x, Quantized):  # values that were divided by an input scale
        return result, None
    return result, RoutedPlan.of(x, routing, weights, experts, **options)


def _prepare(call: B12xCall) -> tuple[torch.Tensor | Quantized, Routing, ExpertWeights, Experts]:
    """Check everything; the arguments of `local_moe`."""
    if call.x.dim() != 2:
        raise ValueError(f"x is {tuple(call.x.shape)}; [tokens, hidden] needed")
    num_local, (num_tokens, hidden) = call.num_local, call.x.shape
    if not 1 <= num_local <= call.num_experts:
        raise ValueError(f"num_local_experts ({num_local}) is not in [1, num_experts ({call.num_experts})]")
    activation = _activation_of(call.activation, call.swiglu_alpha, call.swiglu_beta, call.swiglu_limit)
    names = _SCHEMES.get((call.mode, call.source_format))
    if names is None:
        known = "; ".join(f"{mode} with {source}" for mode, source in _SCHEMES)
        raise ValueError(f"source_format ({call.source_format!r}) in quant_mode '{call.mode}' is none of {known}")
    check_like(call.x, "x", (num_tokens, hidden), (torch.bfloat16,))
    if call.output is not None:
        check_like(call.output, "output", (num_tokens, hidden), (torch.bfloat16,))
    check_like(call.token_selected_experts, "token_selected_experts", (num_tokens, call.top_k), _IDS)
    check_like(call.token_final_scales, "token_final_scales", (num_tokens, call.top_k), _WEIGHTS)
    if call.expert_map is not None:
        check_like(call.expert_map, "expert_map", (call.num_experts,), _IDS)
    scheme = served_scheme(names, call.x.device)
    experts = experts_for(activation, scheme, call.x.device)
    routing = Routing(topk_ids=call.ids, topk_weights=call.token_final_scales.float())
    make = functools.partial(_weights, call, activation.kind.gated, scheme)
    weights = _OPERATION.made(call, make, num_local, hidden, activation.kind, scheme.name)
    return _tokens(call, scheme, routing.topk_ids), routing, weights, experts


def _tokens(call: B12xCall, scheme: QuantScheme, ids: torch.Tensor) -> torch.Tensor | Quantized:
    """Tokens as `local_moe` takes them: a row for each expert of a token if experts have scales of their own."""
    if call.input_global_scale is None or not scheme.payload.quantized:  # which only "nvfp4" has
        return call.x
    x, scale = call.x.float(), _global_scale(call, "input_global_scale")
    if scale.numel() > 1:
        x = x.repeat_interleave(call.top_k, dim=0)
        scale = scale[ids.reshape(-1).long().clamp(0, len(scale) - 1)][:, None]
    return quantize(x / scale, scheme)


def _weights(call: B12xCall, gated: bool, scheme: QuantScheme) -> ExpertWeights:
    """The weights of a call, checked."""
    num_local, hidden = call.num_local, call.x.shape[1]
    intermediate = 2 * call.w2_weight.shape[-1]
    width = intermediate * (2 if gated else 1)
    w1 = _matrix(call, "w1_weight", (num_local, width, hidden // 2))
    w2 = _matrix(call, "w2_weight", (num_local, hidden, intermediate // 2))
    for name in ("w1_alpha", "w2_alpha"):
        check_like(getattr(call, name), name, (num_local,), (torch.float32,))
    first, second = call.w1_alpha.detach(), call.w2_alpha.detach()
    if call.mode == "mxfp4":  # which has no global scales
        own = PerExpert(w13_output_scale=first, w13_gate_output_scale=first if gated else None, w2_output_scale=second)
        return ExpertWeights(w13=w1, w2=w2, scheme=scheme, per_expert=own, up_first=gated)
    if call.mode == "nvfp4":
        second = second * _global_scale(call, "fc2_input_scale")
        if call.input_global_scale is not None and scheme.payload.quantized:
            first = first * _global_scale(call, "input_global_scale")
    return ExpertWeights(
        w13=StoredMatrix(w1.values, scale=w1.scale, global_scale=first),
        w2=StoredMatrix(w2.values, scale=w2.scale, global_scale=second),
        scheme=scheme,
        up_first=gated,
    )


def _new_output(call: B12xCall) -> torch.Tensor:
    return torch.empty_like(call.x, memory_format=torch.contiguous_format)


_OPERATION = Operation("b12x_fused_moe", B12xCall, _first, launch=_launch, result="output", new=_new_output)
