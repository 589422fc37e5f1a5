"""What SGLang's fused experts compute: weights as the runtime has them, and the call.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts, W = 2I.
"""

import functools
from typing import Any, NamedTuple

import torch

from ep_moe.config import DTYPES, ActivationConfig, ActivationKind
from ep_moe.functional.call import Operation, Weight
from ep_moe.functional.common import check_like, experts_for
from ep_moe.functional.formats import Flags, GivenWeight, matrix_of, scale_is_view, scheme_of
from ep_moe.functional.plans import RoutedPlan, capturing, writes
from ep_moe.functional.sglang.configs import ConfigsKey, configs_key, found_tiles, get_moe_configs, override_key
from ep_moe.functional.sglang.pairs import pair_launches, rows_of
from ep_moe.local_moe import local_moe
from ep_moe.quant import Quantized, QuantScheme, as_bytes, quantize
from ep_moe.routing import Routing, apply_weights_to_input
from ep_moe.weights import ExpertWeights


class ExpertsCall(NamedTuple):
    """The parameters of `fused_experts_impl`, in their order."""

    hidden_states: torch.Tensor
    w1: Weight
    w2: Weight
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    b1: Weight | None = None
    b2: Weight | None = None
    inplace: bool = False
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    use_fp8_w8a8: bool = False
    use_int8_w8a8: bool = False
    use_int8_w8a16: bool = False
    use_int4_w4a16: bool = False
    per_channel_quant: bool = False
    w1_scale: Weight | None = None
    w2_scale: Weight | None = None
    w1_zp: Weight | None = None
    w2_zp: Weight | None = None
    a1_scale: Weight | None = None
    a2_scale: Weight | None = None
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
    def unsummed(self) -> bool:
        """Whether the result is [T, K, H], without the sum."""
        return self.no_combine or self.defer_sum

    @property
    def weighted(self) -> bool:
        """Whether results, or tokens, are multiplied by the routing weights."""
        return self.apply_router_weight_on_input or self.no_combine_keep_router_weight or not self.no_combine

    @property
    def one_row_per_pair(self) -> bool:
        """Whether each pair of a token and an expert is a row of its own, for which tokens may be weighted."""
        return self.apply_router_weight_on_input or (self.unsummed and self.topk_ids.shape[1] > 1)

    @property
    def factor(self) -> float:
        """What multiplies the sum."""
        return 1.0 if self.routed_scaling_factor is None or self.unsummed else self.routed_scaling_factor

    @property
    def written(self) -> tuple[int, ...] | None:
        """How often torch has written the zero points of which the runtime reads others; () if it reads none.

        None if that is unknown, or while a CUDA graph is captured, whose memory the others would be, or which would
        read those of a plan.
        """
        if self.use_int4_w4a16:  # they are unpacked
            makes_zeros = self.w1_zp is not None
        else:  # 128 if there are none
            makes_zeros = self.use_int8_w8a16 and self.block_shape is not None and self.w1_zp is None
        if not makes_zeros:
            return ()
        return None if capturing(self.w1.device) else writes((self.w1_zp, self.w2_zp))

    @property
    def flags(self) -> Flags:
        """How weights and tokens are stored."""
        return Flags(**{name: getattr(self, name) for name in Flags._fields})

    @property
    def weights(self) -> tuple[GivenWeight, GivenWeight]:
        """Both weights with their scales."""
        first, second = self.static_scales
        return GivenWeight.of(self, "w1", "a1_scale", first), GivenWeight.of(self, "w2", "a2_scale", second)


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
    """The activation of SGLang's arguments. Errors: ValueError names the argument, and what it goes with. Local."""
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
    biases = [checked_bias(getattr(call, name), name, shape) for name, shape in zip(("b1", "b2"), shapes, strict=True)]
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


def checked_bias(bias: torch.Tensor | None, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """A view of a bias of the weight [E, N, C] of this shape, if there is one. Errors: ValueError. Local."""
    if bias is None:
        return None
    check_like(bias, name, tuple(shape[:2]), tuple(DTYPES.values()))
    return bias.detach()


def _static(given: torch.Tensor | None, name: str, count: int) -> torch.Tensor | None:
    """A static activation scale, for `count` experts."""
    if given is None:
        return None
    if given.dtype != torch.float32 or given.numel() not in (1, count):
        raise ValueError(f"{name} is {tuple(given.shape)} {given.dtype}; one float32 number needed")
    return given.detach().reshape(-1).expand(count).contiguous()


class ConfiguredPlan(NamedTuple):
    """What later calls launch, as long as `get_moe_configs` returns the same."""

    routed: RoutedPlan
    configs_key: ConfigsKey
    configs: dict[int, Any] | None

    @classmethod
    def of(cls, routed: RoutedPlan | None, call: ExpertsCall) -> "ConfiguredPlan | None":
        """The plan of a call that has returned; None without launches."""
        if routed is None:
            return None
        key = configs_key(call.flags, call.w2, call.hidden_states.dtype)
        return cls(routed, key, get_moe_configs(*key))


def run(call: ExpertsCall) -> torch.Tensor:
    """The call, as an operator under torch.compile. Errors: ValueError. Local."""
    if not call.weighted:
        call = call._replace(topk_weights=torch.ones_like(call.topk_weights, dtype=torch.float32))
    if not call.inplace:
        return _OUTPLACE(call)
    if call.unsummed:
        name = "no_combine" if call.no_combine else "defer_sum"
        raise ValueError(f"{name} and inplace are both set: [T, K, H] does not fit into hidden_states")
    return _INPLACE(call)


def _launch(plan: ConfiguredPlan, call: ExpertsCall) -> torch.Tensor | None:
    if get_moe_configs(*plan.configs_key) is not plan.configs:
        return None
    x, ids, topk_weights, out = call.hidden_states, call.topk_ids, call.topk_weights, None
    if call.inplace:
        out = x
    scales = {"static_scale": call.a1_scale, "inner_scale": call.a2_scale}
    if call.one_row_per_pair:
        y = plan.routed.listed(x, [x, ids, topk_weights.float()], out, **scales)
    else:
        y = plan.routed(x, ids, topk_weights, out, **scales)
    return y.view(-1, ids.shape[1], y.shape[1]) if y is not None and call.unsummed else y


def _compute(call: ExpertsCall) -> tuple[torch.Tensor, ConfiguredPlan | None]:
    """The weighted sum [T, H], or the rows [T, K, H] without it, checked. Errors: ValueError. Local."""
    hidden_states, ids, out = call.hidden_states, call.topk_ids, None
    if call.inplace:
        out = hidden_states
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
    weights = kept_or_new(_OUTPLACE, call, call, scheme)
    tiles = found_tiles(flags, call.w2, hidden_states, scheme, gated=call.is_gated)
    experts = experts_for(activation, scheme, hidden_states.device, tiles)
    on_input, factor = call.apply_router_weight_on_input, call.factor
    if on_input and call.b1 is not None:
        raise ValueError("b1 is given, apply_router_weight_on_input takes none: SGLang would multiply it too")
    chosen = Routing(topk_ids=ids, topk_weights=call.topk_weights.float())
    x, routing = routed_rows(tokens, chosen, weights, on_input=on_input, no_combine=call.unsummed, factor=factor)
    options: dict[str, Any] = {"dtype": hidden_states.dtype, "out": out}
    y = local_moe(x, routing, weights, experts, **options)
    result = y.view(-1, ids.shape[1], y.shape[1]) if call.unsummed else y
    if isinstance(x, Quantized) or has_copies(call, scheme):
        return result, None
    before = None
    if call.one_row_per_pair:
        before = pair_launches(hidden_states, ids, chosen.topk_weights, on_input=on_input, factor=factor)
        factor = 1.0
        if before is None:
            return result, None
    options |= {"factor": factor, "inner_scale": call.a2_scale, "before": before}
    return result, ConfiguredPlan.of(RoutedPlan.of(x, routing, weights, experts, **options), call)


def has_copies(call: ExpertsCall, scheme: QuantScheme) -> bool:
    """Whether `weights_of` copies scales, which would miss later writes to the caller's."""
    return not all(scale_is_view(each, scheme) for each in call.weights)


def kept_or_new(operation: Operation[Any, Any], given: Any, call: ExpertsCall, scheme: QuantScheme) -> ExpertWeights:
    """The weights of an earlier call, if they are views; else new ones. `call` has views of the tensors of `given`."""
    make = functools.partial(weights_of, call, scheme)
    if any(scale is not None for scale in call.static_scales) or has_copies(call, scheme):
        return make()  # with copies, which would miss later writes to the caller's tensors
    tokens = call.hidden_states
    key = scheme.name, call.alternating, call.is_gated, tokens.shape[1], tokens.dtype
    found: ExpertWeights = operation.made(given, make, *key)
    return found


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
    of_values, of_scale = (values, stored.dtype, hidden), (scale, stored.scale_dtype, stored.num_groups(hidden))
    for name, (tensor, dtype, width) in {"a1_q": of_values, "a1_scale": of_scale}.items():
        if tensor.dim() != 2 or tensor.dtype != dtype or tensor.shape[0] < num_tokens or tensor.shape[1] != width:
            needed = f"{(num_tokens, width)} {dtype}, or more rows, needed"
            raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}; {needed}")
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
    """The tokens and the routing of `local_moe`: a row for each pair if weights multiply tokens, or without a sum."""
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


def new_result(call: ExpertsCall) -> torch.Tensor:
    """An undefined result."""
    (num_tokens, hidden), num_topk = call.hidden_states.shape, call.topk_ids.shape[1]
    return call.hidden_states.new_empty((num_tokens, num_topk, hidden) if call.unsummed else (num_tokens, hidden))


_PLANS: dict[str, Any] = {"launch": _launch, "state": override_key}
_OUTPLACE = Operation("outplace_fused_experts", ExpertsCall, _compute, **_PLANS, new=new_result)
_INPLACE = Operation("inplace_fused_experts", ExpertsCall, _compute, **_PLANS, result="hidden_states")
