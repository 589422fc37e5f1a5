"""What SGLang's fused experts compute: weights as the runtime has them, and the call.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts, W = 2I.
"""

import functools
import threading
from typing import Any, NamedTuple

import torch

from ep_moe.config import DTYPES, ActivationConfig, ActivationKind
from ep_moe.functional.common import check_like, experts_for, kept_weights, writes
from ep_moe.functional.formats import Flags, GivenWeight, matrix_of, scale_is_view, scheme_of
from ep_moe.functional.plans import capturing, identities, kinds, plans_of
from ep_moe.functional.routed_plan import RoutedPlan
from ep_moe.functional.sglang.configs import ConfigsKey, configs_key, found_tiles, get_moe_configs, override_key
from ep_moe.functional.sglang.pairs import pair_launches, rows_of
from ep_moe.local_moe import local_moe
from ep_moe.quant import Quantized, QuantScheme, as_bytes, quantize
from ep_moe.routing import Routing, apply_weights_to_input
from ep_moe.weights import ExpertWeights


class ExpertsCall(NamedTuple):
    """The parameters of `fused_experts_impl`, in their order."""

    hidden_states: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    b1: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    inplace: bool = False
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    use_fp8_w8a8: bool = False
    use_int8_w8a8: bool = False
    use_int8_w8a16: bool = False
    use_int4_w4a16: bool = False
    per_channel_quant: bool = False
    w1_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w1_zp: torch.Tensor | None = None
    w2_zp: torch.Tensor | None = None
    a1_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None
    block_shape: list[int] | None = None
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_limit: float | None = None
    filter_expert: bool = True  # ids of no expert add nothing in either case
    swiglu_limit: float | None = None
    gate_up_interleaved: bool = True
    a1_q: torch.Tensor | None = None
    fuse_swiglu_interleaved: bool = False
    defer_sum: bool = False
    no_combine_keep_router_weight: bool = False

    @property
    def between(self) -> ActivationConfig:
        """What lies between the GEMMs. Errors: as of `activation_config`."""
        numbers = self.gemm1_alpha, self.gemm1_limit, self.swiglu_limit
        found = activation_config(self.activation, self.is_gated, *numbers)
        if self.fuse_swiglu_interleaved and found.kind is not ActivationKind.SILU:
            raise ValueError(
                f"fuse_swiglu_interleaved is set, activation ({self.activation!r}) with gemm1_alpha, gemm1_limit and "
                f"swiglu_limit {numbers} is not 'silu' alone"
            )
        return found

    @property
    def alternating(self) -> bool:
        """Whether rows of w1 are gate and up in turns."""
        in_turns = self.gemm1_alpha is not None and self.gate_up_interleaved and self.activation == "silu"
        return self.fuse_swiglu_interleaved or in_turns

    @property
    def static_scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The static scales of tokens and of the intermediate; `a1_scale` is that of each group beside `a1_q`."""
        return None if self.a1_q is not None else self.a1_scale, self.a2_scale

    @property
    def apart(self) -> bool:
        """Whether the result is [T, K, H], without the sum."""
        return self.no_combine or self.defer_sum

    @property
    def weighted(self) -> bool:
        """Whether results, or tokens, are multiplied by the routing weights."""
        return self.apply_router_weight_on_input or self.no_combine_keep_router_weight or not self.no_combine

    @property
    def rows_apart(self) -> bool:
        """Whether each pair of a token and an expert is a row of its own, for which tokens may be weighted."""
        return self.apply_router_weight_on_input or (self.apart and self.topk_ids.shape[1] > 1)

    @property
    def factor(self) -> float:
        """What multiplies the sum."""
        return 1.0 if self.routed_scaling_factor is None or self.apart else self.routed_scaling_factor

    @property
    def makes_zeros(self) -> bool:
        """Whether the runtime reads zero points that are made: unpacked ones of 4 bits, or 128 where none are given."""
        if self.use_int4_w4a16:
            return self.w1_zp is not None
        return self.use_int8_w8a16 and self.block_shape is not None and self.w1_zp is None

    @property
    def flags(self) -> Flags:
        """How weights and tokens are stored."""
        return Flags(
            self.use_fp8_w8a8,
            self.use_int8_w8a8,
            self.use_int8_w8a16,
            self.use_int4_w4a16,
            self.per_channel_quant,
            self.block_shape,
        )

    @property
    def weights(self) -> tuple[GivenWeight, GivenWeight]:
        """Both weights with their scales."""
        static = self.static_scales
        first = GivenWeight("w1", self.w1, "w1_scale", self.w1_scale, "w1_zp", self.w1_zp, "a1_scale", static[0])
        second = GivenWeight("w2", self.w2, "w2_scale", self.w2_scale, "w2_zp", self.w2_zp, "a2_scale", static[1])
        return first, second


_KINDS = {
    ("silu", True): ActivationKind.SILU,
    ("gelu", True): ActivationKind.GELU,
    ("gelu_tanh", True): ActivationKind.GELU_TANH,
    ("situ", True): ActivationKind.SITU,
    ("silu", False): ActivationKind.SILU_NO_MUL,
    ("gelu", False): ActivationKind.GELU_NO_MUL,
    ("relu2", False): ActivationKind.RELU2,
}
_SITU_ALPHA = 4.0  # without gemm1_alpha


@functools.lru_cache(maxsize=64)
def activation_config(
    name: str,
    is_gated: bool,
    gemm1_alpha: float | None,
    gemm1_limit: float | None,
    swiglu_limit: float | None,
    limit_name: str = "gemm1_limit",
) -> ActivationConfig:
    """The activation that SGLang's arguments describe. Local.

    Errors: ValueError names the argument, its value and what it goes with.
    """
    if (name, is_gated) not in _KINDS:
        gated = ", ".join(key for key, gate in _KINDS if gate == is_gated)
        raise ValueError(f"activation ({name!r}) is not one of {gated}, which there are with is_gated {is_gated}")
    numbers = {"gemm1_alpha": gemm1_alpha, limit_name: gemm1_limit, "swiglu_limit": swiglu_limit}
    given = {argument: number for argument, number in numbers.items() if number is not None}
    text = " and ".join(f"{argument} ({number})" for argument, number in given.items())
    if name == "situ" and swiglu_limit is None:
        alpha, beta = _SITU_ALPHA if gemm1_alpha is None else gemm1_alpha, gemm1_limit or 0.0
        return ActivationConfig(kind=ActivationKind.SITU, alpha=float(alpha), beta=float(beta))
    if given and (name, is_gated) != ("silu", True):
        raise ValueError(f"{text} given, which activation {name!r} with is_gated {is_gated} does not have")
    if swiglu_limit is not None and len(given) > 1:
        raise ValueError(f"{text} are given, swiglu_limit goes with no other")
    if gemm1_alpha is not None and gemm1_limit is None:
        raise ValueError(f"{text} given, {limit_name} is missing beside it")
    if gemm1_alpha is not None:
        return swiglu(gemm1_alpha, gemm1_limit)
    if swiglu_limit is not None:
        return ActivationConfig(kind=ActivationKind.SWIGLU, limit=float(swiglu_limit))
    if gemm1_limit is not None:
        return ActivationConfig(kind=ActivationKind.SWIGLU_STEP, limit=float(gemm1_limit))
    return ActivationConfig(kind=_KINDS[name, is_gated])


def swiglu(alpha: float, limit: float | None) -> ActivationConfig:
    """gpt-oss's activation."""
    return ActivationConfig(kind=ActivationKind.SWIGLU, alpha=float(alpha), beta=1.0, limit=limit)


def swiglu_gpt_oss_sigmoid_alpha(x: torch.Tensor, gemm1_alpha: float, gemm1_limit: float) -> torch.Tensor:
    """[..., 2I] of alternating gate and up to [..., I], in the dtype of x: gpt-oss's activation. Local.

    gate <= limit, -limit <= up <= limit, then gate * sigmoid(alpha * gate) * (up + 1).
    """
    gate, up = x[..., ::2].clamp(max=gemm1_limit), x[..., 1::2].clamp(-gemm1_limit, gemm1_limit)
    return gate * torch.sigmoid(gate * gemm1_alpha) * (up + 1)


def swiglu_no_interleaved_with_alpha_and_limit(x: torch.Tensor, gemm1_alpha: float, gemm1_limit: float) -> torch.Tensor:
    """`swiglu_gpt_oss_sigmoid_alpha` of the halves [gate; up]."""
    return swiglu_gpt_oss_sigmoid_alpha(torch.stack(x.chunk(2, -1), -1).flatten(-2), gemm1_alpha, gemm1_limit)


def weights_of(call: ExpertsCall, scheme: QuantScheme) -> ExpertWeights:
    """The weights of a call, checked."""
    if call.w1.dim() != 3 or call.w2.dim() != 3:
        raise ValueError(f"w1 is {tuple(call.w1.shape)}, w2 {tuple(call.w2.shape)}; 3 dimensions each needed")
    (num_experts, width, _), hidden = call.w1.shape, call.hidden_states.shape[1]
    intermediate, odd = divmod(width, 2) if call.is_gated else (width, 0)
    if odd:
        raise ValueError(f"w1 is {tuple(call.w1.shape)}; an even number of rows needed, a gate and an up half")
    shapes = (num_experts, width, hidden), (num_experts, hidden, intermediate)
    w13, w2 = (
        matrix_of(given, scheme, call.flags, shape, call.hidden_states.dtype)
        for given, shape in zip(call.weights, shapes, strict=True)
    )
    biases = []
    for name, matrix in (("b1", w13), ("b2", w2)):
        bias, needed = getattr(call, name), tuple(matrix.values.shape[:2])
        if bias is not None:
            check_like(bias, name, needed, tuple(DTYPES.values()))
        biases.append(None if bias is None else bias.detach())
    if call.alternating and scheme.weight.block[0] > 1:
        raise ValueError(
            f"rows of gate and up alternate (gemm1_alpha {call.gemm1_alpha}, gate_up_interleaved "
            f"{call.gate_up_interleaved}): a scale of {call.block_shape} has both"
        )
    first, second = call.static_scales
    return ExpertWeights(
        w13=w13,
        w2=w2,
        scheme=scheme,
        w13_bias=biases[0],
        w2_bias=biases[1],
        w13_input_scale=_static(first, "a1_scale", 1),
        w2_input_scale=_static(second, "a2_scale", num_experts),
        alternating=call.alternating,
    )


def _static(given: torch.Tensor | None, name: str, count: int) -> torch.Tensor | None:
    """A static activation scale, for `count` experts."""
    if given is None:
        return None
    if given.dtype != torch.float32 or given.numel() not in (1, count):
        raise ValueError(f"{name} is {tuple(given.shape)} {given.dtype}; one float32 number needed")
    return given.detach().reshape(-1).expand(count).contiguous()


class _Plan(NamedTuple):
    """What later calls of a kind repeat.

    Unless `get_moe_configs` says something else by then, or zero points have been written of which others are made.
    """

    routed: RoutedPlan
    configs_key: ConfigsKey
    configs: dict[int, Any] | None
    zeros_written: tuple[int, ...]


def _key_of(call: ExpertsCall, out: torch.Tensor | None) -> tuple[object, ...]:
    """All that a plan depends on."""
    block = call.block_shape
    given = [call.hidden_states, call.topk_ids, call.topk_weights]
    if out is not None:
        given.append(out)
    numbers, fields = None if block is None else (*block,), _fields_of(call)
    flags = *fields[_FLAGS], numbers, *fields[_NUMBERS], override_key()
    return *flags, *kinds(given), *identities(_weights_given(call))


def _fields_of(call: ExpertsCall) -> tuple[Any, ...]:
    return call


def _weights_given(call: ExpertsCall) -> tuple[torch.Tensor | None, ...]:
    """The tensors that belong to the weights."""
    return call.w1, call.w2, call.b1, call.b2, *_fields_of(call)[_SCALES]


_FLAGS = slice(ExpertsCall._fields.index("activation"), ExpertsCall._fields.index("w1_scale"))
_SCALES = slice(_FLAGS.stop, ExpertsCall._fields.index("block_shape"))
_NUMBERS = slice(_SCALES.stop + 1, None)


def compute(call: ExpertsCall, out: torch.Tensor | None = None) -> torch.Tensor:
    """The weighted sum [T, H], or the rows [T, K, H] without it. Errors: ValueError. Local."""
    if not call.weighted:
        call = call._replace(topk_weights=torch.ones_like(call.topk_weights, dtype=torch.float32))
    zeros_written = _zeros_written(call)
    if zeros_written is None or call.a1_q is not None:
        return _computed(call, out)[0]
    plans, key = plans_of("fused_experts", threading.get_ident()), _key_of(call, out)
    plan: _Plan | None = plans.get(key)
    if plan is not None and plan.zeros_written == zeros_written and get_moe_configs(*plan.configs_key) is plan.configs:
        result = _repeated(plan.routed, call, out)
        if result is not None:
            return result
    result, routed = _computed(call, out)
    if routed is not None:
        found = configs_key(call.flags, call.w2, call.hidden_states.dtype)
        new = _Plan(routed, found, get_moe_configs(*found), zeros_written)
        plans.keep(key, new, call.hidden_states.device, _weights_given(call))
    return result


def _zeros_written(call: ExpertsCall) -> tuple[int, ...] | None:
    """How often torch has written the zero points that others are made of; None if that is unknown, or a CUDA graph is
    captured, whose memory these would be, or which would read those of a plan."""
    if not call.makes_zeros:
        return ()
    if capturing(call.w1.device):
        return None
    return writes((call.w1_zp, call.w2_zp))


def _repeated(routed: RoutedPlan, call: ExpertsCall, out: torch.Tensor | None) -> torch.Tensor | None:
    """The result of a later call; None if a tensor is not aligned."""
    x, ids, topk_weights = call.hidden_states, call.topk_ids, call.topk_weights
    scales = {"static_scale": call.a1_scale, "inner_scale": call.a2_scale}
    if call.rows_apart:
        y = routed.listed(x, [x, ids, topk_weights.float()], out, **scales)
    else:
        y = routed(x, ids, topk_weights, out, **scales)
    return y.view(-1, ids.shape[1], y.shape[1]) if y is not None and call.apart else y


def _computed(call: ExpertsCall, out: torch.Tensor | None) -> tuple[torch.Tensor, RoutedPlan | None]:
    """The result of a call, checked, and what repeats it, if anything does."""
    hidden_states, ids = call.hidden_states, call.topk_ids
    check_tokens(hidden_states)
    if ids.dim() != 2 or ids.shape[0] != hidden_states.shape[0] or call.topk_weights.shape != ids.shape:
        raise ValueError(
            f"topk_ids are {tuple(ids.shape)}, topk_weights {tuple(call.topk_weights.shape)}; both "
            f"({hidden_states.shape[0]}, K) needed beside hidden_states {tuple(hidden_states.shape)}"
        )
    if call.no_combine and call.defer_sum:
        raise ValueError("no_combine and defer_sum are both set: with weights of their own, or without")
    activation, flags, given = call.between, call.flags, call.weights
    scheme = scheme_of(flags, given)
    tokens = hidden_states if call.a1_q is None else _quantized(call, scheme)
    tensors = call.w1, call.w1_scale, call.b1, call.w2, call.w2_scale, call.b2, call.w1_zp, call.w2_zp
    weights = kept_or_new("sglang", tensors, call, scheme)
    tiles = found_tiles(flags, call.w2, hidden_states, scheme, gated=call.is_gated)
    experts = experts_for(activation, scheme, hidden_states.device, tiles)
    on_input, factor = call.apply_router_weight_on_input, call.factor
    if on_input and call.b1 is not None:
        raise ValueError("b1 is given, apply_router_weight_on_input takes none: SGLang would multiply it too")
    chosen = Routing(topk_ids=ids, topk_weights=call.topk_weights.float())
    x, routing = routed_rows(tokens, chosen, weights, on_input=on_input, no_combine=call.apart, factor=factor)
    y = local_moe(x, routing, weights, experts, dtype=hidden_states.dtype, out=out)
    result = y.view(-1, ids.shape[1], y.shape[1]) if call.apart else y
    if isinstance(x, Quantized) or has_copies(call, scheme):
        return result, None
    before = None
    if call.rows_apart:
        before = pair_launches(hidden_states, ids, chosen.topk_weights, on_input=on_input, factor=factor)
        factor = 1.0
        if before is None:
            return result, None
    more: dict[str, Any] = {"factor": factor, "inner_scale": call.a2_scale, "before": before, "out": out}
    return result, RoutedPlan.of(x, routing, weights, experts, **more)


def has_copies(call: ExpertsCall, scheme: QuantScheme) -> bool:
    """Whether `weights_of` copies scales, which would miss later writes to the caller's."""
    return not all(scale_is_view(each, scheme) for each in call.weights)


def kept_or_new(
    name: str, tensors: tuple[torch.Tensor | None, ...], call: ExpertsCall, scheme: QuantScheme
) -> ExpertWeights:
    """The weights of an earlier call with the same tensors, if they are views; else new ones.

    Args: name: of the calls. tensors: the caller's, of which `call` has views.
    """
    if any(scale is not None for scale in call.static_scales) or has_copies(call, scheme):
        return weights_of(call, scheme)  # with copies, which would miss later writes to the caller's tensors
    kept = kept_weights(name, threading.get_ident())
    tokens = call.hidden_states
    key = scheme.name, call.alternating, call.is_gated, tokens.shape[1], tokens.dtype, *identities(tensors)
    make = functools.partial(weights_of, call, scheme)
    return kept.get(tensors, key, make, copied=call.makes_zeros)


def check_tokens(hidden_states: torch.Tensor) -> None:
    """Raise ValueError unless tokens are a matrix in a dtype of models. Local."""
    if hidden_states.dim() != 2 or hidden_states.dtype not in DTYPES.values():
        found = f"{tuple(hidden_states.shape)} {hidden_states.dtype}"
        raise ValueError(f"hidden_states are {found}; [tokens, hidden] of {', '.join(DTYPES)} needed")


def _quantized(call: ExpertsCall, scheme: QuantScheme) -> Quantized:
    """The tokens that a call has quantized; rows behind the last token are padding."""
    values, scale, (num_tokens, hidden) = call.a1_q, call.a1_scale, call.hidden_states.shape
    assert values is not None
    if not call.use_fp8_w8a8 or call.block_shape is None or scale is None:
        raise ValueError("a1_q is given, which needs use_fp8_w8a8, a block_shape and a1_scale")
    stored = scheme.payload
    needed = (num_tokens, hidden), (num_tokens, stored.num_groups(hidden))
    for name, tensor, dtype, shape in (
        ("a1_q", values, stored.dtype, needed[0]),
        ("a1_scale", scale, stored.scale_dtype, needed[1]),
    ):
        if tensor.dim() != 2 or tensor.dtype != dtype or tensor.shape[0] < shape[0] or tensor.shape[1] != shape[1]:
            raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}; {shape} {dtype}, or more rows, needed")
    return Quantized(values=values[:num_tokens].contiguous(), scale=scale[:num_tokens], scheme=scheme)


def routed_rows(
    x: torch.Tensor | Quantized,
    routing: Routing,
    weights: ExpertWeights,
    *,
    on_input: bool = False,
    no_combine: bool = False,
    factor: float = 1.0,
) -> tuple[torch.Tensor | Quantized, Routing]:
    """The tokens and the routing that `local_moe` computes: a row for each pair if weights or results need it.

    Args: on_input: weights multiply tokens, and not outputs. no_combine: results are not summed. factor: of the sum.
    """
    ids, topk_weights, num_topk = routing.topk_ids, routing.topk_weights, routing.topk_ids.shape[1]
    if on_input or (no_combine and num_topk > 1):
        if isinstance(x, Quantized):
            values = as_bytes(x.values).repeat_interleave(num_topk, dim=0).view(x.values.dtype)
            x = Quantized(values=values, scale=x.scale.repeat_interleave(num_topk, dim=0), scheme=x.scheme)
            ids, topk_weights = ids.reshape(-1, 1), topk_weights.reshape(-1, 1)
        elif on_input and weights.scheme.payload.quantized:  # its scales are multiplied, not tokens
            rows, ids, topk_weights = rows_of(x, ids, topk_weights)
            x = quantize(rows, weights.scheme, static_scale=weights.w13_input_scale)
        else:
            x, ids, topk_weights = rows_of(x, ids, topk_weights, on_input=on_input, factor=factor)
            factor = 1.0
        if on_input and isinstance(x, Quantized):
            x, _ = apply_weights_to_input(x, Routing(topk_ids=ids, topk_weights=topk_weights))
            topk_weights = torch.ones_like(topk_weights)
    if factor != 1.0:
        topk_weights = topk_weights * factor
    if on_input and not no_combine:
        ids, topk_weights = ids.view(-1, num_topk), topk_weights.view(-1, num_topk)
    return x, Routing(topk_ids=ids, topk_weights=topk_weights)
