"""What the `triton_kernel_*` calls compute.

Weights have the columns of the tokens as rows, [E, H, 2I] and [E, I, H]. A transposed view of ours is used as it is;
a contiguous one is copied in each call.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts, G = T * K pairs of a token and an expert.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import torch

from ep_moe.config import ActivationConfig
from ep_moe.functional.call import Operation, Weight
from ep_moe.functional.common import experts_for
from ep_moe.functional.formats import scheme_of
from ep_moe.functional.plans import RoutedPlan
from ep_moe.functional.sglang.configs import found_tiles, get_moe_configs, override_key
from ep_moe.functional.sglang.experts import (
    ConfiguredPlan,
    ExpertsCall,
    check_tokens,
    checked_bias,
    has_copies,
    kept_or_new,
    routed_rows,
    swiglu,
)
from ep_moe.functional.sglang.pairs import ByExpert, sort_pairs
from ep_moe.local_moe import local_moe
from ep_moe.quant import QuantScheme, StoredMatrix, get_scheme, quantize_weight
from ep_moe.routing import Routing
from ep_moe.weights import ExpertWeights

_MXFP4_GROUP = 32


class RaggedCall(NamedTuple):
    """The arguments of the operator."""

    hidden_states: torch.Tensor
    w1: Weight
    b1: Weight | None
    w2: Weight
    b2: Weight | None
    slice_sizes: torch.Tensor
    gather_indx: torch.Tensor
    scatter_indx: torch.Tensor | None
    gate_scal: torch.Tensor
    n_expts_act: int
    activation: str = "silu"
    apply_router_weight_on_input: bool = False
    use_fp8_w8a8: bool = False
    per_channel_quant: bool = False
    global_num_experts: int = -1
    expert_map: torch.Tensor | None = None
    w1_scale: Weight | None = None
    w2_scale: Weight | None = None
    a1_scale: Weight | None = None
    a2_scale: Weight | None = None
    block_shape: list[int] | None = None
    gemm1_alpha: float | None = None
    gemm1_clamp_limit: float | None = None

    @property
    def is_mxfp4(self) -> bool:
        """Weights are MXFP4: bytes of two elements with scales beside them, without a flag."""
        return self.w1.dtype == torch.uint8 and not self.use_fp8_w8a8

    @property
    def by_expert(self) -> ByExpert:
        """The routing data."""
        return ByExpert(self.slice_sizes, self.gather_indx, self.scatter_indx, self.gate_scal, self.n_expts_act)

    @property
    def between(self) -> ActivationConfig:
        """What lies between the GEMMs. Errors: ValueError for another name."""
        alpha, limit = self.gemm1_alpha, self.gemm1_clamp_limit
        return self.as_experts().between if alpha is None else swiglu(alpha, limit)

    def as_experts(self) -> ExpertsCall:
        """The same call with weights in the order of `fused_experts_impl`, views; its routing is not read."""
        turned = {name: getattr(self, name).transpose(1, 2) for name in ("w1", "w2")}
        if self.block_shape is not None:
            scales = {name: getattr(self, name) for name in ("w1_scale", "w2_scale")}
            turned |= {name: scale.transpose(1, 2) for name, scale in scales.items() if scale is not None}
        same = {name: getattr(self, name) for name in ExpertsCall._fields if name in self._fields}
        routing = {"topk_weights": self.gate_scal, "topk_ids": self.gather_indx, "gemm1_limit": self.gemm1_clamp_limit}
        return ExpertsCall(**same | turned | routing)


def _launch(plan: ConfiguredPlan, call: RaggedCall) -> torch.Tensor | None:
    if get_moe_configs(*plan.configs_key) is not plan.configs:
        return None
    x, lists = call.hidden_states, call.by_expert.lists(call.hidden_states, call.expert_map)
    return plan.routed.listed(x, lists, None, static_scale=call.a1_scale, inner_scale=call.a2_scale)


def _compute(call: RaggedCall) -> tuple[torch.Tensor, ConfiguredPlan | None]:
    """The weighted rows [G, H] of pairs, checked; those without an expert are zeros. Errors: ValueError. Local."""
    _check(call)
    x, data, on_input = call.hidden_states, call.by_expert, call.apply_router_weight_on_input
    scheme, weights = _weights(call)
    given = call.as_experts()
    tiles = None if call.is_mxfp4 else found_tiles(given.flags, given.w2, x, scheme)
    experts = experts_for(call.between, scheme, x.device, tiles)
    scaled_later = on_input and scheme.payload.quantized  # its scales are multiplied, not tokens
    pairs = None if scaled_later else data.launches(x, call.expert_map, on_input=on_input)
    if pairs is None:
        routing, tokens = sort_pairs(data, call.expert_map, x.shape[0])
        rows, routing = routed_rows(x[tokens], routing, weights, on_input=on_input)
        return local_moe(rows, routing, weights, experts, dtype=x.dtype), None
    found = pairs.workspace.views(pairs.run(dict(zip(pairs.given, data.lists(x, call.expert_map), strict=True))))
    routing = Routing(topk_ids=found["ids"], topk_weights=found["weights"])
    result = local_moe(found["tokens"], routing, weights, experts)
    if _copies_mxfp4(call) if call.is_mxfp4 else has_copies(given, scheme):
        return result, None
    more: dict[str, Any] = {"inner_scale": call.a2_scale, "out": None, "before": pairs}
    return result, ConfiguredPlan.of(RoutedPlan.of(found["tokens"], routing, weights, experts, **more), given)


def _check(call: RaggedCall) -> None:
    """Raise ValueError for shapes that do not fit each other; routing data of other shapes too."""
    check_tokens(call.hidden_states)
    packed, hidden = 2 if call.is_mxfp4 else 1, call.hidden_states.shape[1]
    if call.w1.dim() != 3 or call.w2.dim() != 3:
        raise ValueError(f"w1 is {tuple(call.w1.shape)}, w2 {tuple(call.w2.shape)}; 3 dimensions each needed")
    num_experts, _, width = call.w1.shape
    needed = (num_experts, hidden // packed, width), (num_experts, width // 2 // packed, hidden)
    for name, found, shape in zip(("w1", "w2"), (call.w1.shape, call.w2.shape), needed, strict=True):
        if found != shape:
            given = f"{name} is {tuple(found)}; {shape} needed"
            raise ValueError(f"{given} beside hidden_states {tuple(call.hidden_states.shape)}")
    call.by_expert.check(call.hidden_states.shape[0])
    total = call.slice_sizes.shape[0]
    mapped = None if call.expert_map is None else call.expert_map.shape[0]
    if (mapped or num_experts) != total or call.global_num_experts not in (-1, total):
        raise ValueError(
            f"a_ragged_metadata has {total} experts, global_num_experts is {call.global_num_experts}, "
            f"w1 has {num_experts}, expert_map {mapped}: all of them, and expert_map names those of w1"
        )
    if call.b1 is not None and call.apply_router_weight_on_input:
        raise ValueError("b1 is given, apply_router_weight_on_input takes none")


def _weights(call: RaggedCall) -> tuple[QuantScheme, ExpertWeights]:
    """The scheme and the weights of a call, checked."""
    if not call.is_mxfp4:
        given = call.as_experts()
        scheme = scheme_of(given.flags, given.weights)
        return scheme, kept_or_new(OPERATION, call, given, scheme)
    for argument in ("per_channel_quant", "block_shape", "a1_scale", "a2_scale"):
        if getattr(call, argument) not in (False, None):
            raise ValueError(f"{argument} is given, MXFP4 weights take none")
    scheme = get_scheme("mxfp4_w4a16")
    make = functools.partial(_mxfp4_weights, call, scheme)
    if _copies_mxfp4(call):
        return scheme, make()
    key = scheme.name, call.gemm1_alpha is None, call.hidden_states.shape[1]
    return scheme, OPERATION.made(call, make, *key)


def _copies_mxfp4(call: RaggedCall) -> bool:
    """Whether MXFP4 weights or their scales are not views of ours, transposed; a scale may be missing."""
    there = [tensor for tensor in (call.w1, call.w2, call.w1_scale, call.w2_scale) if tensor is not None]
    return not all(tensor.transpose(1, 2).is_contiguous() for tensor in there if tensor.dim() == 3)


def _mxfp4_weights(call: RaggedCall, scheme: QuantScheme) -> ExpertWeights:
    """MXFP4 weights of a call, checked."""
    given, matrices = call.as_experts(), []
    for name, values in (("w1", given.w1), ("w2", given.w2)):
        scale = getattr(call, f"{name}_scale")
        if scale is None:
            raise ValueError(f"{name}_pcg has no b_mx_scale, {name} is {values.dtype} and needs one")
        groups = 2 * values.shape[2] // _MXFP4_GROUP
        if tuple(scale.shape) != (values.shape[0], groups, values.shape[1]) or scale.element_size() != 1:
            raise ValueError(
                f"{name}_pcg.b_mx_scale is {tuple(scale.shape)} {scale.dtype}; "
                f"{(values.shape[0], groups, values.shape[1])} of one byte needed"
            )
        turned = scale.detach().transpose(1, 2).contiguous().view(torch.float8_e8m0fnu)
        matrices.append(StoredMatrix(values.detach().contiguous(), scale=turned))
    return ExpertWeights(
        w13=matrices[0],
        w2=matrices[1],
        scheme=scheme,
        w13_bias=checked_bias(call.b1, "b1", given.w1.shape),
        w2_bias=checked_bias(call.b2, "b2", given.w2.shape),
        alternating=call.gemm1_alpha is not None,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class InFlexData:
    """The dtype of a quantized weight and its scale [1] float32, as triton_kernels' class of this name."""

    dtype: torch.dtype | None = None
    scale: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """The scales of an MXFP4 weight, as triton_kernels' class of this name, whose other attributes are not read."""

    b_mx_scale: torch.Tensor | None = None  # [E, K / 32, N] e8m0 bytes


def quantize(w: torch.Tensor, dtype: str, dev: Any, **opt: Any) -> tuple[Any, ...]:
    """A weight [E, K, N] in another dtype, on `dev`.

    Args:
        dtype: "bf16"; "fp8", e4m3 with one scale for the whole tensor, its largest magnitude / 448; "mx4", MXFP4 with a
            scale for 32 rows. opt: `swizzle_mx_scale` False, for "mx4".
    Returns: values and `InFlexData`, which has the scale of "fp8"; but for "bf16" also `PrecisionConfig`, with the
        scales of "mx4". Values of "fp8" and "mx4" are transposed views of a tensor whose rows are columns of w.
    Errors: ValueError for another dtype or option. Local.
    """
    if w.dim() != 3 or not w.is_floating_point():
        raise ValueError(f"w is {tuple(w.shape)} {w.dtype}; [E, K, N] of floats needed")
    for name, value in opt.items():
        if name != "swizzle_mx_scale" or value:
            raise ValueError(f"{name} ({value!r}) is given; swizzle_mx_scale False is supported, scales lie in order")
    if dtype == "bf16":
        return w.to(device=dev, dtype=torch.bfloat16), InFlexData()
    turned = w.to(dev).transpose(1, 2).contiguous()
    if dtype == "fp8":
        scale = turned.abs().amax().float().clamp(min=1e-10).reshape(1) / torch.finfo(torch.float8_e4m3fn).max
        values = (turned.float() / scale).to(torch.float8_e4m3fn)
        return values.transpose(1, 2), InFlexData(values.dtype, scale), PrecisionConfig()
    if dtype != "mx4":
        raise ValueError(f"dtype ({dtype!r}) is not one of bf16, fp8, mx4")
    matrix = quantize_weight(turned.float(), get_scheme("mxfp4_w4a16"))
    assert matrix.scale is not None
    scales = matrix.scale.view(torch.uint8).transpose(1, 2)
    return matrix.values.transpose(1, 2), InFlexData(), PrecisionConfig(scales)


def _new_rows(call: RaggedCall) -> torch.Tensor:
    return call.hidden_states.new_empty(call.gather_indx.shape[0], call.hidden_states.shape[1])


OPERATION = Operation(
    "triton_kernel_fused_experts", RaggedCall, _compute, launch=_launch, state=override_key, new=_new_rows
)
