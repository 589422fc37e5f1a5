"""`trtllm_fp4_block_scale_moe`: routing and FP4 experts in one call.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts of all ranks, L local experts; W = 2I if the activation
is gated, else I.
"""

import functools
import threading
from typing import Any, NamedTuple

import torch
from torch.library import custom_op

from ep_moe.config import ActivationConfig, ActivationKind, RoutingConfig, RoutingMethod
from ep_moe.experts import Experts
from ep_moe.functional.common import check_like, experts_for, kept_weights
from ep_moe.functional.fp4 import NVFP4, stored_weight, tokens_of
from ep_moe.local_moe import local_moe, local_rows
from ep_moe.quant import Quantized, QuantScheme, StoredMatrix
from ep_moe.routing import Routing, route
from ep_moe.weights import ExpertWeights, PerExpert

_ACTIVATIONS = {
    3: ActivationKind.SWIGLU,
    4: ActivationKind.GELU,
    6: ActivationKind.RELU2,
    7: ActivationKind.IDENTITY,
}
_LOGITS = (torch.float32, torch.bfloat16)
_SCALED_METHODS = (2, 7)
_MOST_PLANS = 256  # of the same weights
_FLOAT = (torch.float32,)
_OUTPUT = (torch.bfloat16,)


class Fp4Call(NamedTuple):
    """The arguments of `trtllm_fp4_block_scale_moe` that have a meaning here, in its order."""

    routing_logits: torch.Tensor
    routing_bias: torch.Tensor | None
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    gemm1_weights: torch.Tensor
    gemm1_weights_scale: torch.Tensor
    gemm1_bias: torch.Tensor | None
    gemm1_alpha: torch.Tensor | None
    gemm1_beta: torch.Tensor | None
    gemm1_clamp_limit: torch.Tensor | None
    gemm2_weights: torch.Tensor
    gemm2_weights_scale: torch.Tensor
    gemm2_bias: torch.Tensor | None
    output1_scale_scalar: torch.Tensor | None
    output1_scale_gate_scalar: torch.Tensor | None
    output2_scale_scalar: torch.Tensor | None
    num_experts: int
    top_k: int
    n_group: int | None
    topk_group: int | None
    intermediate_size: int
    local_expert_offset: int
    local_num_experts: int
    routed_scaling_factor: float | None
    routing_method_type: int
    activation_type: int
    per_token_scale: torch.Tensor | None
    output: torch.Tensor | None
    norm_topk_prob: bool
    routing_replay_out: torch.Tensor | None

    @property
    def hidden(self) -> int:
        """H, of which FC1's weights have two elements in a byte."""
        return 2 * self.gemm1_weights.shape[-1]

    @property
    def activation(self) -> ActivationConfig:
        """What lies between the GEMMs. Errors: ValueError for another number."""
        plain = self.gemm1_alpha is None and self.gemm1_beta is None and self.gemm1_clamp_limit is None
        return _activation_of(self.activation_type, plain)

    @property
    def local(self) -> slice:
        """The local experts among all."""
        return slice(self.local_expert_offset, self.local_expert_offset + self.local_num_experts)


_WEIGHTS = slice(Fp4Call._fields.index("gemm1_weights"), Fp4Call._fields.index("num_experts"))
_NUMBERS_STOP = Fp4Call._fields.index("per_token_scale")  # numbers follow the weights


def trtllm_fp4_block_scale_moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm1_bias: torch.Tensor | None,
    gemm1_alpha: torch.Tensor | None,
    gemm1_beta: torch.Tensor | None,
    gemm1_clamp_limit: torch.Tensor | None,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    gemm2_bias: torch.Tensor | None,
    output1_scale_scalar: torch.Tensor | None,
    output1_scale_gate_scalar: torch.Tensor | None,
    output2_scale_scalar: torch.Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: int = 3,
    per_token_scale: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    norm_topk_prob: bool = True,
    routing_replay_out: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Route tokens and compute the local experts among those that they choose, with FP4 weights.

    With x1 = output1_scale_gate_scalar * clamp(gate rows @ x + bias) and x0 = clamp(up rows @ x + bias), FC1 gives
    output1_scale_scalar * (x0 + beta) * x1 * sigmoid(alpha * x1), and FC2 output2_scale_scalar * (w2 @ . + bias): as in
    FlashInfer, biases, beta and the limit are in the units of the unscaled sums. Without a gate, FC1 gives
    output1_scale_scalar * activation(output1_scale_gate_scalar * (w1 @ x + bias)). A scalar that is None is 1.

    Args:
        routing_logits: [T, E] float32 or bfloat16. routing_bias: [E], for the choice only, methods 2 and 7.
        hidden_states, hidden_states_scale: [T, H] bfloat16; NVFP4, [T, H / 2] uint8 and [T, H / 16] e4m3; MXFP8, [T, H]
            e4m3 and [T, H / 32] e8m0.
        gemm1_weights, gemm1_weights_scale: [L, W, H / 2] and [L, W, H / 16] (NVFP4) or [L, W, H / 32] (MXFP4).
        gemm2_weights, gemm2_weights_scale: [L, H, I / 2] and [L, H, I / 16] or [L, H, I / 32].
        gemm1_bias, gemm2_bias: [L, W] and [L, H] float32. gemm1_alpha, gemm1_beta, gemm1_clamp_limit: [L] float32.
        output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar: [L] float32.
        num_experts, top_k, intermediate_size: E, K, I. Each tensor of L experts may instead have all E.
        local_expert_offset, local_num_experts: the local experts; other choices add nothing.
        per_token_scale: [T] float32, multiplies the hidden states. output: [T, H] bfloat16, is written and returned.
        routing_replay_out: [at least T, K] int16, receives the chosen experts.
    Returns: [output], or, if not do_finalize, [gemm2_output [rows, H] bfloat16, expert_weights [T, K] bfloat16,
        expanded_idx_to_permuted_idx [T * K] int32]: the row of token t's k-th expert, -1 if it is not local.
    Errors: ValueError names the argument, its value and what is needed.
    Local, on the current stream. With experts that are kernels no host sync, and safe in CUDA graphs after a call of
    the same kind; an operator under torch.compile.
    """
    del enable_pdl, tune_max_num_tokens
    if do_finalize and output is None:
        shape = (hidden_states.shape[0], 2 * gemm1_weights.shape[-1])
        output = torch.empty(shape, dtype=torch.bfloat16, device=hidden_states.device)
    call = Fp4Call(
        routing_logits=routing_logits,
        routing_bias=routing_bias,
        hidden_states=hidden_states,
        hidden_states_scale=hidden_states_scale,
        gemm1_weights=gemm1_weights,
        gemm1_weights_scale=gemm1_weights_scale,
        gemm1_bias=gemm1_bias,
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
        gemm2_weights=gemm2_weights,
        gemm2_weights_scale=gemm2_weights_scale,
        gemm2_bias=gemm2_bias,
        output1_scale_scalar=output1_scale_scalar,
        output1_scale_gate_scalar=output1_scale_gate_scalar,
        output2_scale_scalar=output2_scale_scalar,
        num_experts=num_experts,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        intermediate_size=intermediate_size,
        local_expert_offset=local_expert_offset,
        local_num_experts=local_num_experts,
        routed_scaling_factor=routed_scaling_factor,
        routing_method_type=routing_method_type,
        activation_type=activation_type,
        per_token_scale=per_token_scale,
        output=output,
        norm_topk_prob=norm_topk_prob,
        routing_replay_out=routing_replay_out,
    )
    if not do_finalize:
        if output is not None:
            raise ValueError("output is given, but do_finalize=False returns rows of its own")
        return list(_fp4_rows_op(*call) if torch.compiler.is_compiling() else _rows(call))
    assert output is not None
    if torch.compiler.is_compiling():
        _fp4_moe_op(*call)
    else:
        _write_output(call)
    return [output]


@functools.lru_cache(maxsize=64)
def _activation_of(number: int, plain: bool) -> ActivationConfig:
    """The activation of this number; `plain` if it has no alpha, beta and limit."""
    if number not in _ACTIVATIONS:
        known = ", ".join(f"{number} ({kind.value})" for number, kind in _ACTIVATIONS.items())
        raise ValueError(f"activation_type ({number}) is not one of {known}")
    kind = _ACTIVATIONS[number]
    return ActivationConfig(kind=ActivationKind.SILU if plain and kind is ActivationKind.SWIGLU else kind)


@functools.lru_cache(maxsize=64)
def _routing_of(
    method: int, top_k: int, n_group: int | None, topk_group: int | None, factor: float | None, norm: bool
) -> RoutingConfig:
    """The routing of these arguments. Errors: ValueError for what the method does not take."""
    if method not in RoutingMethod._value2member_map_:
        raise ValueError(f"routing_method_type ({method}) is not one of 0 to {max(RoutingMethod)}")
    if factor not in (None, 1.0) and method not in _SCALED_METHODS:
        raise ValueError(
            f"routed_scaling_factor ({factor}) belongs to routing_method_type 2 and 7, not to {method}: use None"
        )
    chosen = RoutingMethod(method)
    if not norm and chosen is RoutingMethod.RENORMALIZE_NAIVE:
        chosen = RoutingMethod.DEFAULT  # what is left of it
    normalizes = chosen.value in (1, 2, 4, 6, 7)
    return RoutingConfig(
        method=chosen,
        num_topk=top_k,
        num_group=n_group or 1,
        topk_group=topk_group or 1,
        routed_scaling_factor=1.0 if factor is None else float(factor),
        norm_topk_prob=norm or not normalizes,
    )


def _routing_config(call: Fp4Call) -> RoutingConfig:
    """The routing of a call, checked."""
    check_like(call.routing_logits, "routing_logits", (call.hidden_states.shape[0], call.num_experts), _LOGITS)
    if call.routing_bias is not None:
        check_like(call.routing_bias, "routing_bias", (call.num_experts,), _LOGITS)
    return _routing_of(
        call.routing_method_type,
        call.top_k,
        call.n_group,
        call.topk_group,
        call.routed_scaling_factor,
        call.norm_topk_prob,
    )


def _own(call: Fp4Call, name: str, *shape: int) -> torch.Tensor | None:
    """An optional float32 argument [L, *shape] of the local experts, sliced if it is of all experts."""
    given = getattr(call, name)
    if given is None:
        return None
    given = given.view_as(given)  # an object of its own: what is kept may not keep the caller's alive
    if given.shape[:1] == (call.num_experts,):
        given = given[call.local]
    check_like(given, name, (call.local_num_experts, *shape), _FLOAT)
    return given


def _matrix(call: Fp4Call, name: str, rows: int, columns: int) -> tuple[str, StoredMatrix]:
    """A weight of the local experts, sliced if it is of all experts, and its format."""
    values, scale = getattr(call, name), getattr(call, f"{name}_scale")
    if call.num_experts != call.local_num_experts and values.shape[:1] == (call.num_experts,):
        values, scale = values[call.local], scale[call.local]
    needed = (call.local_num_experts, rows, columns // 2)
    if tuple(values.shape) != needed or columns % 2:
        raise ValueError(
            f"{name} is {tuple(values.shape)}; {needed} needed for intermediate_size ({call.intermediate_size}), "
            f"activation_type ({call.activation_type}) and local_num_experts ({call.local_num_experts})"
        )
    return stored_weight(values, scale, name, f"{name}_scale")


class _Numbers(NamedTuple):
    """The numbers of each expert, and the biases, in the units in which the experts add and multiply them."""

    per_expert: PerExpert
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None


def _numbers(call: Fp4Call, gated: bool, width: int) -> _Numbers:
    """Turn FlashInfer's numbers, which are in the units of unscaled sums, into ours, which are in those of results."""
    first, gate, second = (
        _own(call, name) for name in ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
    )
    alpha, beta, limit = (_own(call, name) for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"))
    bias1, bias2 = _own(call, "gemm1_bias", width), _own(call, "gemm2_bias", call.hidden)
    if bias2 is not None and second is not None:
        bias2 = bias2 * second[:, None]
    if gated and bias1 is None and beta is None and limit is None:
        own = PerExpert(alpha=alpha, w13_output_scale=first, w13_gate_output_scale=gate, w2_output_scale=second)
        return _Numbers(own, None, bias2)
    # a factor behind the activation may as well stand behind FC2, so that one factor is left for both halves of FC1
    behind = first
    if gate is not None:
        behind = behind if not gated else 1 / gate if behind is None else behind / gate
        bias1, beta, limit = (
            None if bias1 is None else bias1 * gate[:, None],
            None if beta is None else beta * gate,
            None if limit is None else limit * gate,
        )
    if behind is not None:
        second = behind if second is None else second * behind
    own = PerExpert(
        alpha=alpha,
        beta=beta,
        limit=limit,
        w13_output_scale=gate,
        w13_gate_output_scale=gate if gated else None,
        w2_output_scale=second,
    )
    return _Numbers(own, bias1, bias2)


def _has_copies(call: Fp4Call, gated: bool) -> bool:
    """Whether `_numbers` computes new tensors, which would miss later writes to the caller's."""
    scaled = call.output1_scale_scalar is not None or call.output1_scale_gate_scalar is not None
    in_units_of_sums = any(part is not None for part in (call.gemm1_bias, call.gemm1_beta, call.gemm1_clamp_limit))
    second = call.gemm2_bias is not None and call.output2_scale_scalar is not None
    return second or (scaled and (in_units_of_sums or not gated))


class _Weights:
    """The weights of a call, in each scheme that its tokens ask for."""

    def __init__(self, kind: str, w13: StoredMatrix, w2: StoredMatrix, numbers: _Numbers) -> None:
        self.kind, self._w13, self._w2, self._numbers = kind, w13, w2, numbers
        self._made: dict[str, ExpertWeights] = {}
        self.plans: dict[object, _Plan] = {}  # of calls with these weights, by `_kind_of`

    @classmethod
    def of(cls, call: Fp4Call, gated: bool) -> "_Weights":
        """Those of a call, checked."""
        width = call.intermediate_size * (2 if gated else 1)
        kind, w13 = _matrix(call, "gemm1_weights", width, call.hidden)
        kind2, w2 = _matrix(call, "gemm2_weights", call.hidden, call.intermediate_size)
        if kind != kind2:
            raise ValueError(f"gemm1_weights are {kind}, gemm2_weights are {kind2}: their scales say so")
        if kind == NVFP4:
            ones = torch.ones(call.local_num_experts, dtype=torch.float32, device=w13.values.device)
            w13, w2 = (StoredMatrix(part.values, scale=part.scale, global_scale=ones) for part in (w13, w2))
        return cls(kind, w13, w2, _numbers(call, gated, width))

    def in_scheme(self, scheme: QuantScheme, *, up_first: bool) -> ExpertWeights:
        """The same object for the same scheme."""
        if scheme.name not in self._made:
            self._made[scheme.name] = ExpertWeights(
                w13=self._w13,
                w2=self._w2,
                scheme=scheme,
                w13_bias=self._numbers.w13_bias,
                w2_bias=self._numbers.w2_bias,
                per_expert=self._numbers.per_expert,
                up_first=up_first,
            )
        return self._made[scheme.name]


class _Plan(NamedTuple):
    """What calls share whose tensors differ in their values alone, once their arguments are checked."""

    routing: RoutingConfig
    weights: ExpertWeights
    experts: Experts
    in_place: bool  # hidden_states are the tokens
    options: dict[str, Any]  # of `local_moe` and `local_rows`


def _kind_of(call: Fp4Call) -> tuple[object, ...]:
    """All that a plan and its checks depend on besides the weights."""
    tensors: list[torch.Tensor | None] = [call.routing_logits, call.routing_bias, call.hidden_states]
    tensors += [call.hidden_states_scale, call.per_token_scale, call.output]
    kinds = [None if tensor is None else (tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
    return *kinds, *call[_WEIGHTS.stop : _NUMBERS_STOP], call.norm_topk_prob


def _weights_of(call: Fp4Call) -> _Weights:
    """The weights of a call, kept for later ones unless they are copies."""
    gated = call.activation.kind.gated
    if _has_copies(call, gated):
        return _Weights.of(call, gated)
    key = call.num_experts, call.local_expert_offset, call.local_num_experts, call.intermediate_size, gated
    kept = kept_weights(trtllm_fp4_block_scale_moe.__name__, threading.get_ident())
    tensors: Any = call[_WEIGHTS]
    return kept.get(tensors, key, functools.partial(_Weights.of, call, gated))


def _make_plan(call: Fp4Call, made: _Weights) -> _Plan:
    """Check everything, and find what computes the call."""
    activation, hidden = call.activation, call.hidden
    if activation.kind not in (ActivationKind.SILU, ActivationKind.SWIGLU):
        for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"):
            if getattr(call, name) is not None:
                raise ValueError(f"{name} is given, it belongs to activation_type 3, not to {call.activation_type}")
    x, scheme = _tokens_of(call, made)
    if call.output is not None:
        check_like(call.output, "output", (call.hidden_states.shape[0], hidden), _OUTPUT)
    return _Plan(
        routing=_routing_config(call),
        weights=made.in_scheme(scheme, up_first=activation.kind.gated),
        experts=experts_for(activation, scheme, call.hidden_states.device),
        in_place=x is call.hidden_states,
        options={
            "local_expert_offset": call.local_expert_offset,
            "num_local_experts": call.local_num_experts,
            "num_experts": call.num_experts,
            "dtype": torch.bfloat16,
        },
    )


def _tokens_of(call: Fp4Call, made: _Weights) -> tuple[torch.Tensor | Quantized, QuantScheme]:
    return tokens_of(
        call.hidden_states,
        call.hidden_states_scale,
        hidden=call.hidden,
        weights=made.kind,
        per_token_scale=call.per_token_scale,
    )


def _prepare(call: Fp4Call) -> tuple[tuple[torch.Tensor | Quantized, Routing, ExpertWeights, Experts], dict[str, Any]]:
    """What `local_moe` and `local_rows` take, once everything is checked and the tokens are routed."""
    if not 0 <= call.local_expert_offset <= call.num_experts - call.local_num_experts or call.local_num_experts < 1:
        raise ValueError(
            f"local experts [{call.local.start}, {call.local.stop}), by local_expert_offset and local_num_experts, are "
            f"not in [0, num_experts ({call.num_experts}))"
        )
    made, kind = _weights_of(call), _kind_of(call)
    plan = made.plans.get(kind)
    if plan is None:
        if len(made.plans) >= _MOST_PLANS:
            made.plans.clear()
        plan = made.plans[kind] = _make_plan(call, made)
    x = call.hidden_states if plan.in_place else _tokens_of(call, made)[0]
    bias, replay = call.routing_bias, call.routing_replay_out
    routing = route(call.routing_logits, plan.routing, routing_bias=bias, routing_replay_out=replay)
    return (x, routing, plan.weights, plan.experts), plan.options


def _write_output(call: Fp4Call) -> None:
    tokens, options = _prepare(call)
    local_moe(*tokens, **options, out=call.output)


def _rows(call: Fp4Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `do_finalize=False` returns."""
    tokens, options = _prepare(call)
    rows = local_rows(*tokens, **options)
    return rows.y, tokens[1].topk_weights.bfloat16(), rows.token_to_row.reshape(-1)


def _fp4_moe(*arguments: Any) -> None:
    _write_output(Fp4Call(*arguments))


def _fp4_rows(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _rows(Fp4Call(*arguments))


def _schema(output: str, returns: str) -> str:
    """The schema of an operator with the arguments of `Fp4Call`."""
    kinds: dict[Any, str] = {torch.Tensor: "Tensor", int: "int", bool: "bool"}
    kinds |= {torch.Tensor | None: "Tensor?", int | None: "int?", float | None: "float?"}
    written = {"output": output, "routing_replay_out": "Tensor(b!)?"}
    fields = Fp4Call.__annotations__.items()
    return f"({', '.join(f'{written.get(name, kinds[kind])} {name}' for name, kind in fields)}) -> {returns}"


_fp4_moe_op = custom_op(
    "ep_moe::trtllm_fp4_block_scale_moe",
    _fp4_moe,
    mutates_args=("output", "routing_replay_out"),
    schema=_schema("Tensor(a!)", "()"),
)
_fp4_rows_op = custom_op(
    "ep_moe::trtllm_fp4_block_scale_moe_rows",
    _fp4_rows,
    mutates_args=("routing_replay_out",),
    schema=_schema("Tensor?", "(Tensor, Tensor, Tensor)"),
)


@_fp4_moe_op.register_fake
def _fp4_moe_fake(*arguments: Any) -> None:
    """It returns nothing; the real call checks its arguments."""
    del arguments


@_fp4_rows_op.register_fake
def _fp4_rows_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = Fp4Call(*arguments)
    num_tokens = call.hidden_states.shape[0]
    like: dict[str, Any] = {"device": call.hidden_states.device}
    return (
        torch.empty(num_tokens * min(call.top_k, call.local_num_experts), call.hidden, dtype=torch.bfloat16, **like),
        torch.empty(num_tokens, call.top_k, dtype=torch.bfloat16, **like),
        torch.empty(num_tokens * call.top_k, dtype=torch.int32, **like),
    )
