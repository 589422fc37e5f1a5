"""The arguments of `trtllm_fp4_block_scale_moe`: what they say of the activation and the routing.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts of all ranks, L local experts, S shared experts, which
every token has.
"""

import functools
from typing import Any, NamedTuple

import torch

from ep_moe.config import ActivationConfig, ActivationKind, RoutingConfig, RoutingMethod
from ep_moe.functional.common import check_like

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
_SCALED_METHODS = (2, 7)
_NUMBERS = {"alpha": "gemm1_alpha", "beta": "gemm1_beta", "limit": "gemm1_clamp_limit"}
_VALID = 128  # valid sizes are rounded up to a multiple of this, as FlashInfer does


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
    num_fused_shared_experts: int | None
    valid_hidden_size: int | None
    valid_intermediate_size: int | None

    @property
    def hidden(self) -> int:
        """H, of which FC1's weights have two elements in a byte."""
        return 2 * self.gemm1_weights.shape[-1]

    @property
    def computed(self) -> tuple[int, int]:
        """H and I without padding."""
        return _unpadded(self.hidden, self.valid_hidden_size), _unpadded(
            self.intermediate_size, self.valid_intermediate_size
        )

    @property
    def cut(self) -> bool:
        """Whether that leaves out columns or rows."""
        if self.valid_hidden_size is None and self.valid_intermediate_size is None:
            return False
        return self.computed != (self.hidden, self.intermediate_size)

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
    def num_held(self) -> int:
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
        return slice(self.local_expert_offset, self.local_expert_offset + self.num_held)

    @property
    def weights(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors of the weights, their scales, biases and numbers."""
        return self[_WEIGHTS]  # type: ignore[return-value]

    @property
    def numbers(self) -> tuple[Any, ...]:
        """Arguments that are numbers."""
        return *self[_WEIGHTS.stop : _NUMBERS_STOP], self.norm_topk_prob, *self[_SIZES_START:]

    def check_sizes(self) -> None:
        """Raise ValueError unless the local experts are some of all, and valid sizes are within the padded ones."""
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

    def check_activation(self) -> None:
        """Raise ValueError for numbers that do not belong to the activation."""
        for number, name in _NUMBERS.items():
            if getattr(self, name) is not None and number not in self.activation.kind.numbers:
                raise ValueError(f"{name} is given, it does not belong to activation_type {self.activation_type}")


def _unpadded(size: int, valid: int | None) -> int:
    return size if valid is None else min(-(-valid // _VALID) * _VALID, size)


_WEIGHTS = slice(Fp4Call._fields.index("gemm1_weights"), Fp4Call._fields.index("num_experts"))
_NUMBERS_STOP = Fp4Call._fields.index("per_token_scale")  # numbers follow the weights
_SIZES_START = Fp4Call._fields.index("num_fused_shared_experts")


@functools.lru_cache(maxsize=64)
def _activation_of(number: int, plain: bool) -> ActivationConfig:
    """The activation of this number; `plain` if it has no alpha, beta and limit."""
    if number not in _ACTIVATIONS:
        known = ", ".join(f"{number} ({kind.value})" for number, kind in _ACTIVATIONS.items())
        raise ValueError(f"activation_type ({number}) is not one of {known}")
    kind = _ACTIVATIONS[number]
    kind = ActivationKind.SILU if plain and kind is ActivationKind.SWIGLU else kind
    return ActivationConfig(kind=kind, **_DEFAULTS.get(kind, {}))


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


def routing_config(call: Fp4Call) -> RoutingConfig:
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
