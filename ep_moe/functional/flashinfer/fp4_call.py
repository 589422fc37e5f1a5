"""The arguments of `trtllm_fp4_block_scale_moe`: the activation, the routing and the weights that they describe.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts of all ranks, L local experts, S shared experts, which
every token has.
"""

import functools
from typing import Any, NamedTuple

import torch

from ep_moe.config import ActivationConfig, ActivationKind, RoutingConfig, RoutingMethod
from ep_moe.functional.call import Weight, Written
from ep_moe.functional.common import check_like
from ep_moe.functional.flashinfer.formats import NVFP4, stored_weight
from ep_moe.functional.plans import writes
from ep_moe.quant import QuantScheme, StoredMatrix
from ep_moe.weights import ExpertWeights, PerExpert

_ACTIVATIONS = {
    3: ActivationKind.SWIGLU,
    4: ActivationKind.GELU,
    6: ActivationKind.RELU2,
    7: ActivationKind.SWIGLU_STEP,
    8: ActivationKind.GELU_TANH,
    9: ActivationKind.IDENTITY,
    10: ActivationKind.SITU,
}
_DEFAULTS: dict[ActivationKind, dict[str, float]] = {  # FlashInfer's, where they are others than ours
    ActivationKind.SWIGLU_STEP: {"limit": 7.0},
    ActivationKind.SITU: {"beta": 1.0},
}
_LOGITS = (torch.float32, torch.bfloat16)
_FLOAT = (torch.float32,)
_SCALED_METHODS = (2, 7)
_NUMBERS = {"alpha": "gemm1_alpha", "beta": "gemm1_beta", "limit": "gemm1_clamp_limit"}
_LEAST_GATE = 1e-19  # whose square float32 can hold
_VALID = 128  # valid sizes are rounded up to a multiple of this, as FlashInfer does


class Fp4Call(NamedTuple):
    """The parameters of `trtllm_fp4_block_scale_moe`, in their order."""

    routing_logits: torch.Tensor
    routing_bias: torch.Tensor | None
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    gemm1_weights: Weight
    gemm1_weights_scale: Weight
    gemm1_bias: Weight | None
    gemm1_alpha: Weight | None
    gemm1_beta: Weight | None
    gemm1_clamp_limit: Weight | None
    gemm2_weights: Weight
    gemm2_weights_scale: Weight
    gemm2_bias: Weight | None
    output1_scale_scalar: Weight | None
    output1_scale_gate_scalar: Weight | None
    output2_scale_scalar: Weight | None
    num_experts: int
    top_k: int
    n_group: int | None
    topk_group: int | None
    intermediate_size: int
    local_expert_offset: int
    local_num_experts: int
    routed_scaling_factor: float | None
    routing_method_type: int = 0
    do_finalize: bool = True
    enable_pdl: bool | None = None
    activation_type: int = 3
    per_token_scale: torch.Tensor | None = None
    output: Written | None = None
    tune_max_num_tokens: int = 8192
    norm_topk_prob: bool = True
    routing_replay_out: Written | None = None
    num_fused_shared_experts: int | None = None
    valid_hidden_size: int | None = None
    valid_intermediate_size: int | None = None
    hidden_states_scale_layout: int | None = None
    workspace_buffer: torch.Tensor | None = None
    nvfp4_4over6: int | None = None  # of FlashInfer's own class if it is not None

    @property
    def hidden(self) -> int:
        """H, of which FC1's weights have two elements in a byte."""
        return 2 * self.gemm1_weights.shape[-1]

    @property
    def computed(self) -> tuple[int, int]:
        """H and I without padding."""
        inner = _unpadded(self.intermediate_size, self.valid_intermediate_size)
        return _unpadded(self.hidden, self.valid_hidden_size), inner

    @property
    def cut(self) -> bool:
        """Whether that leaves out columns or rows."""
        valid = self.valid_hidden_size is not None or self.valid_intermediate_size is not None
        return valid and self.computed != (self.hidden, self.intermediate_size)

    @property
    def width(self) -> int:
        """Columns of the output."""
        return self.hidden if self.valid_hidden_size is None else self.valid_hidden_size

    @property
    def num_shared(self) -> int:
        """S."""
        return self.num_fused_shared_experts or 0

    @property
    def num_total(self) -> int:
        """E + S."""
        return self.num_experts + self.num_shared

    @property
    def num_local(self) -> int:
        """L + S."""
        return self.local_num_experts + self.num_shared

    @property
    def activation(self) -> ActivationConfig:
        """What lies between the GEMMs. Errors: ValueError for another number."""
        plain = self.gemm1_alpha is None and self.gemm1_beta is None and self.gemm1_clamp_limit is None
        return _activation_of(self.activation_type, plain)

    @property
    def scales_both(self) -> bool:
        """Whether output1_scale_gate_scalar multiplies all sums of FC1, and output1_scale_scalar the activation's."""
        kind = self.activation.kind
        return not kind.gated or kind in _DEFAULTS

    @property
    def local(self) -> slice:
        """The local experts among all, and shared ones."""
        return slice(self.local_expert_offset, self.local_expert_offset + self.num_local)

    @property
    def written(self) -> tuple[int, ...] | None:
        """`writes` of the tensors of which the weights have products or parts, () if these are all views."""
        copied = self.cut or (self.gemm2_bias is not None and self.output2_scale_scalar is not None)
        if not copied and (self.output1_scale_scalar is not None or self.output1_scale_gate_scalar is not None):
            plain = self.gemm1_bias is None and self.gemm1_beta is None and self.gemm1_clamp_limit is None
            copied = not plain or self.scales_both
        return writes(self[_WEIGHTS]) if copied else ()  # type: ignore[arg-type]

    def check(self) -> None:
        """Raise ValueError for sizes, local experts and numbers of the activation that do not belong together."""
        for name, padded in (("valid_hidden_size", self.hidden), ("valid_intermediate_size", self.intermediate_size)):
            valid = getattr(self, name)
            if valid is not None and not 1 <= valid <= padded:
                raise ValueError(f"{name} ({valid}) is not in [1, {padded}], of which it is a part")
        whole = self.local_expert_offset == 0 and self.local_num_experts == self.num_experts
        if self.num_shared and (self.num_shared < 0 or self.routing_method_type != 2 or not whole):
            raise ValueError(
                f"num_fused_shared_experts ({self.num_shared}) needs a positive number, routing_method_type 2 and all "
                f"experts here, got method {self.routing_method_type}, {self.local_num_experts} of {self.num_experts}"
            )
        if not 0 <= self.local_expert_offset <= self.num_experts - self.local_num_experts or self.local_num_experts < 1:
            raise ValueError(
                f"local experts [{self.local.start}, {self.local.stop}), by local_expert_offset and local_num_experts, "
                f"are not in [0, num_experts ({self.num_experts}))"
            )

        for number, name in _NUMBERS.items():
            if getattr(self, name) is not None and number not in self.activation.kind.numbers:
                raise ValueError(f"{name} is given, it does not belong to activation_type {self.activation_type}")


def _unpadded(size: int, valid: int | None) -> int:
    return size if valid is None else min(-(-valid // _VALID) * _VALID, size)


_WEIGHTS = slice(Fp4Call._fields.index("gemm1_weights"), Fp4Call._fields.index("num_experts"))


@functools.lru_cache(maxsize=64)
def _activation_of(number: int, plain: bool) -> ActivationConfig:
    """The activation of this number; `plain` if it has no alpha, beta and limit."""
    if number not in _ACTIVATIONS:
        known = ", ".join(f"{number} ({kind.value})" for number, kind in _ACTIVATIONS.items())
        raise ValueError(f"activation_type ({number}) is not one of {known}")
    kind = _ACTIVATIONS[number]
    kind = ActivationKind.SILU if plain and kind is ActivationKind.SWIGLU else kind
    return ActivationConfig(kind=kind, **_DEFAULTS.get(kind, {}))


def routing_config(call: Fp4Call) -> RoutingConfig:
    """The routing of a call. Errors: ValueError for shapes, and for what the method does not take. Local."""
    check_like(call.routing_logits, "routing_logits", (call.hidden_states.shape[0], call.num_experts), _LOGITS)
    if call.routing_bias is not None:
        check_like(call.routing_bias, "routing_bias", (call.num_experts,), _LOGITS)
    method, factor, norm = call.routing_method_type, call.routed_scaling_factor, call.norm_topk_prob
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
        num_topk=call.top_k,
        num_group=call.n_group or 1,
        topk_group=call.topk_group or 1,
        routed_scaling_factor=1.0 if factor is None else float(factor),
        norm_topk_prob=norm or not normalizes,
    )


def _own(call: Fp4Call, name: str, *shape: int) -> torch.Tensor | None:
    """An optional float32 argument [L, *shape] of the local experts, sliced if it is of all experts."""
    given = getattr(call, name)
    if given is None:
        return None
    given = given.detach()  # unlike other views, it does not keep the caller's tensor alive
    if given.shape[:1] == (call.num_total,):
        given = given[call.local]
    check_like(given, name, (call.num_local, *shape), _FLOAT)
    return given


def _matrix(call: Fp4Call, name: str, rows: int, columns: int) -> tuple[str, StoredMatrix]:
    """A weight of the local experts, sliced if it is of all experts, and its format."""
    values, scale = getattr(call, name), getattr(call, f"{name}_scale")
    if call.num_total != call.num_local and values.shape[:1] == (call.num_total,):
        values, scale = values[call.local], scale[call.local]
    needed = (call.num_local, rows, columns // 2)
    if tuple(values.shape) != needed or columns % 2:
        raise ValueError(
            f"{name} is {tuple(values.shape)}; {needed} needed for intermediate_size ({call.intermediate_size}), "
            f"activation_type ({call.activation_type}) and local_num_experts ({call.num_local})"
        )
    return stored_weight(values, scale, name, f"{name}_scale")


def _cut(tensor: torch.Tensor, halves: int, rows: int, columns: int) -> torch.Tensor:
    """The first rows of each half, and of them the first columns: a view if that is all, else a copy."""
    parts = tensor.unflatten(1, (halves, -1))[:, :, :rows, :columns]
    return tensor if parts.shape[2:].numel() * halves == tensor.shape[1:].numel() else parts.flatten(1, 2).contiguous()


def _cut_matrix(matrix: StoredMatrix, halves: int, rows: int, columns: int, whole: int) -> StoredMatrix:
    """The same of a weight whose rows have `whole` elements."""
    assert matrix.scale is not None
    values, scale = (
        _cut(part, halves, rows, columns * part.shape[2] // whole) for part in (matrix.values, matrix.scale)
    )
    return StoredMatrix(values, scale=scale)


def _numbers(call: Fp4Call) -> dict[str, Any]:
    """The biases and `PerExpert`: FlashInfer's numbers are in the units of unscaled sums, ours in those of results."""
    first, gate, second = (
        _own(call, f"output{name}") for name in ("1_scale_scalar", "1_scale_gate_scalar", "2_scale_scalar")
    )
    alpha, beta, limit = (_own(call, name) for name in _NUMBERS.values())
    gated, both, (hidden, inner) = call.activation.kind.gated, call.scales_both, call.computed
    bias1 = _own(call, "gemm1_bias", (1 + gated) * call.intermediate_size)
    bias2 = _own(call, "gemm2_bias", _rows(call))
    if bias1 is not None:
        bias1 = _cut(bias1.unsqueeze(2), 1 + gated, inner, 1).squeeze(2)
    if bias2 is not None:
        bias2 = bias2[:, :hidden] if second is None else bias2[:, :hidden] * second[:, None]
    scales = {"w13_output_scale": first, "w13_gate_output_scale": gate, "w2_output_scale": second}
    if both or bias1 is not None or beta is not None or limit is not None:
        # a factor behind the activation may as well stand behind FC2, so that one is left for both halves of FC1
        behind = first
        if gate is not None:
            if not both:  # FC1's results have the factor gate**2, and are 0 where 1 / gate could overflow
                behind = torch.where(gate.abs() < _LEAST_GATE, 0.0, (1.0 if behind is None else behind) / gate)
            bias1 = None if bias1 is None else bias1 * gate[:, None]
            beta = beta if beta is None or both else beta * gate
            if limit is not None and call.activation.kind is not ActivationKind.SWIGLU_STEP:  # clamps silu of the gate
                limit = limit * gate
        if behind is not None:
            second = behind if second is None else second * behind
        scales = {"w13_output_scale": gate, "w13_gate_output_scale": gate if gated else None, "w2_output_scale": second}
    return {
        "w13_bias": bias1,
        "w2_bias": bias2,
        "per_expert": PerExpert(alpha=alpha, beta=beta, limit=limit, **scales),
    }


def _rows(call: Fp4Call) -> int:
    """Rows of FC2's weights: H, or without padding."""
    rows: int = call.gemm2_weights.shape[1]
    return rows if rows == call.computed[0] else call.hidden


def kind_of(call: Fp4Call) -> str:
    """The format of the weights, NVFP4 or MXFP4; both are checked. Errors: ValueError. Local."""
    (kind, _), (kind2, _) = _matrices(call)
    if kind != kind2:
        raise ValueError(f"gemm1_weights are {kind}, gemm2_weights are {kind2}: their scales say so")
    return kind


def _matrices(call: Fp4Call) -> tuple[tuple[str, StoredMatrix], tuple[str, StoredMatrix]]:
    """Both weights as the caller has them."""
    padded, halves = call.intermediate_size, 1 + call.activation.kind.gated
    first = _matrix(call, "gemm1_weights", halves * padded, call.hidden)
    return first, _matrix(call, "gemm2_weights", _rows(call), padded)


def weights_of(call: Fp4Call, scheme: QuantScheme) -> ExpertWeights:
    """The weights of a call, checked, in the scheme that its tokens ask for. Errors: ValueError. Local."""
    gated, (hidden, inner) = call.activation.kind.gated, call.computed
    (kind, w13), (_, w2) = _matrices(call)
    w13 = _cut_matrix(w13, 1 + gated, inner, hidden, call.hidden)
    w2 = _cut_matrix(w2, 1, hidden, inner, call.intermediate_size)
    if kind == NVFP4:
        ones = torch.ones(call.num_local, dtype=torch.float32, device=w13.values.device)
        w13, w2 = (StoredMatrix(part.values, scale=part.scale, global_scale=ones) for part in (w13, w2))
    return ExpertWeights(w13=w13, w2=w2, scheme=scheme, up_first=gated, **_numbers(call))
