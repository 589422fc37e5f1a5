"""`trtllm_fp4_block_scale_moe`: routing and FP4 experts in one call.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts of all ranks, L local experts, S shared experts, which
every token has; W = 2I if the activation is gated, else I.
"""

import functools
from typing import TYPE_CHECKING, Any

import torch

from ep_moe.config import RoutingConfig
from ep_moe.experts import Experts
from ep_moe.functional.call import Operation, with_arguments
from ep_moe.functional.common import check_like, experts_for
from ep_moe.functional.flashinfer.formats import tokens_of
from ep_moe.functional.flashinfer.fp4_call import Fp4Call, kind_of, routing_config, weights_of
from ep_moe.local_moe import local_moe, local_rows, repeated_call
from ep_moe.quant import Quantized, QuantScheme
from ep_moe.routing import Routing, loaded_sequence, route

if TYPE_CHECKING:
    from ep_moe.local_moe.joined import JoinedCall

_OUTPUT = (torch.bfloat16,)
_LINEAR = 2  # FlashInfer's `SfLayout.layout_linear`


@with_arguments(Fp4Call)
def trtllm_fp4_block_scale_moe(call: Fp4Call) -> list[torch.Tensor]:
    """Route tokens and compute the local experts among those that they choose, with FP4 weights.

    With x1 = output1_scale_gate_scalar * clamp(gate rows @ x + bias) and x0 = clamp(up rows @ x + bias), FC1 gives
    output1_scale_scalar * (x0 + beta) * x1 * sigmoid(alpha * x1), and FC2 output2_scale_scalar * (w2 @ . + bias): as in
    FlashInfer, biases, beta and the limit are in the units of the unscaled sums. Without a gate, and with activations 7
    and 10, FC1 gives output1_scale_scalar * activation(output1_scale_gate_scalar * (w1 @ x + bias)), where alpha and
    beta, and the limit of 7, are in the units of what the activation takes. A scalar that is None is 1.

    Args:
        routing_logits: [T, E] float32 or bfloat16. routing_bias: [E], for the choice only, methods 2 and 7.
        hidden_states, hidden_states_scale: [T, H] bfloat16; NVFP4, [T, H / 2] e2m1 pairs and [T, H / 16] e4m3; MXFP8,
            [T, H] e4m3 and [T, H / 32] e8m0; under any dtype of one byte.
        gemm1_weights, gemm1_weights_scale: [L, W, H / 2] and [L, W, H / 16] (NVFP4) or [L, W, H / 32] (MXFP4).
        gemm2_weights, gemm2_weights_scale: [L, H, I / 2] and [L, H, I / 16] or [L, H, I / 32].
        gemm1_bias, gemm2_bias: [L, W] and [L, H] float32. gemm1_alpha, gemm1_beta, gemm1_clamp_limit: [L] float32.
        output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar: [L] float32.
        num_experts, top_k, intermediate_size: E, K, I. Each tensor of L experts may instead have all E.
        local_expert_offset, local_num_experts: the local experts; other choices add nothing.
        per_token_scale: [T] float32, multiplies the hidden states. output: [T, H] bfloat16, is written and returned.
        routing_replay_out: [at least T, K] int16, receives the chosen experts.
        num_fused_shared_experts: S; tensors of experts have E + S rows, the shared ones last, whose weight is 1.
        valid_hidden_size, valid_intermediate_size: H and I without padding; rounded up to multiples of 128 they are
            computed, from copies of the weights where that leaves some out, and the output has the valid columns.
            gemm2_weights may have H rows or those that are computed.
        hidden_states_scale_layout: 2, FlashInfer's layout_linear, or None. nvfp4_4over6: None.
    Returns: [output], or, if not do_finalize, [gemm2_output [rows, H] bfloat16, expert_weights [T, K] bfloat16,
        expanded_idx_to_permuted_idx [T * K] int32]: the row of token t's k-th expert, -1 if it is not local; with K + S
        in place of K.
    Errors: ValueError names the argument, its value and what is needed.
    Local, on the current stream. With experts that are kernels no host sync, and safe in CUDA graphs after a call of
    the same kind; an operator under torch.compile.
    """
    if call.hidden_states_scale_layout not in (None, _LINEAR):
        raise ValueError(
            f"hidden_states_scale_layout ({call.hidden_states_scale_layout}) is not {_LINEAR} (layout_linear) or None"
        )
    if call.nvfp4_4over6 is not None:
        raise ValueError(f"nvfp4_4over6 ({call.nvfp4_4over6}) is not None: results of FC1 are rounded to plain NVFP4")
    if call.do_finalize:
        return [_FINALIZED(call)]
    if call.output is not None:
        raise ValueError("output is given, but do_finalize=False returns rows of its own")
    if call.computed[0] != call.hidden:
        raise ValueError(
            f"valid_hidden_size ({call.valid_hidden_size}) is given, but do_finalize=False returns rows of all "
            f"{call.hidden} columns"
        )
    return list(_ROWS(call))


class _Plan:
    """What calls share whose tensors differ in addresses and values alone; made of the first one, which is checked."""

    def __init__(self, call: Fp4Call) -> None:
        self.kind = kind_of(call)  # of the weights
        x, scheme = self.tokens(call)
        self.routing: RoutingConfig = routing_config(call)
        make, sizes = functools.partial(weights_of, call, scheme), (call.num_total, call.num_local, *call.computed)
        key = scheme.name, call.activation_type, call.local_expert_offset, *sizes
        self.weights = _FINALIZED.made(call, make, *key)
        self.experts: Experts = experts_for(call.activation, scheme, call.hidden_states.device)
        self.options: dict[str, Any] = {
            "local_expert_offset": call.local_expert_offset,
            "num_local_experts": call.num_local,
            "num_experts": call.num_total,
            "dtype": torch.bfloat16,
        }
        scale = call.hidden_states_scale
        self._in_place = x is call.hidden_states
        same = isinstance(x, Quantized) and scale is not None and x.scale.data_ptr() == scale.data_ptr()
        self._views = self._in_place or same  # tokens and scales are read where they are
        self.launches: JoinedCall | None = None

    def tokens(self, call: Fp4Call) -> tuple[torch.Tensor | Quantized, QuantScheme]:
        """The tokens of a call as the experts take them, without padding, and their scheme."""
        x, scheme = tokens_of(
            call.hidden_states,
            call.hidden_states_scale,
            hidden=call.hidden,
            weights=self.kind,
            per_token_scale=call.per_token_scale,
        )
        if not call.cut:
            return x, scheme
        columns, padded = call.computed[0], call.hidden
        if isinstance(x, torch.Tensor):
            return x[:, :columns], scheme
        values, scale = (part[:, : columns * part.shape[1] // padded].contiguous() for part in (x.values, x.scale))
        return Quantized(values=values, scale=scale, scheme=scheme), scheme

    def routed(self, call: Fp4Call) -> tuple[torch.Tensor | Quantized, Routing]:
        """The tokens and the routing of a call."""
        x = call.hidden_states if self._in_place else self.tokens(call)[0]
        bias, replay = call.routing_bias, call.routing_replay_out
        routing = route(call.routing_logits, self.routing, routing_bias=bias, routing_replay_out=replay)
        if call.num_shared:
            ids, weights = routing.topk_ids, routing.topk_weights
            shared = torch.arange(call.num_experts, call.num_total, dtype=ids.dtype, device=ids.device)
            ids = torch.cat([ids, shared.expand(len(ids), -1)], dim=1)
            weights = torch.cat([weights, weights.new_ones(len(ids), call.num_shared)], dim=1)
            routing = Routing(topk_ids=ids, topk_weights=weights)
        return x, routing

    def compute(self, call: Fp4Call) -> Any:
        """The result of a call, in `output` if there is one; what `do_finalize=False` returns without it."""
        x, routing = self.routed(call)
        given = x, routing, self.weights, self.experts
        if not call.do_finalize:
            rows = local_rows(*given, **self.options)
            return rows.y, routing.topk_weights.bfloat16(), rows.token_to_row.reshape(-1)
        result = local_moe(*given, **self.options, out=call.output)
        if self.launches is None:
            self.keep_launches(call, x, routing)
        return result

    def launch(self, call: Fp4Call) -> Any:
        """The result of a later call, by the launches of an earlier one if there are any."""
        if self.launches is None:
            return self.compute(call)
        tensors = [call.hidden_states]
        if not self._views:
            x, _ = self.tokens(call)
            tensors = [x] if isinstance(x, torch.Tensor) else [x.values, x.scale]
        elif not self._in_place:
            assert call.hidden_states_scale is not None
            tensors.append(call.hidden_states_scale)
        tensors.append(call.routing_logits)
        if call.routing_bias is not None:
            tensors.append(call.routing_bias)
        found = self.launches(tensors, call.output)
        return self.compute(call) if found is None else found

    def keep_launches(self, call: Fp4Call, x: torch.Tensor | Quantized, routing: Routing) -> None:
        """Find the launches of a call that has returned."""
        if call.routing_replay_out is not None or call.num_shared:
            return
        before = loaded_sequence(call.routing_logits, self.routing, call.routing_bias)
        if before is not None:
            arguments = x, routing, self.weights, self.experts
            joined = repeated_call(*arguments, **self.options, out=call.output, before=before)
            if joined is not None and joined.fix_weights():  # the plan's key holds the weights' addresses
                self.launches = joined


def _first(call: Fp4Call) -> tuple[Any, _Plan | None]:
    """The result of a call, checked. Errors: ValueError. Local."""
    call.check()
    if call.output is not None:
        check_like(call.output, "output", (call.hidden_states.shape[0], call.width), _OUTPUT)
    if call.valid_hidden_size is not None and call.valid_hidden_size != call.computed[0]:
        whole = _FINALIZED(call._replace(output=None, valid_hidden_size=call.computed[0]))[:, : call.width]
        return whole.contiguous() if call.output is None else call.output.copy_(whole), None
    plan = _Plan(call)
    return plan.compute(call), plan


def _new_output(call: Fp4Call) -> torch.Tensor:
    return torch.empty(call.hidden_states.shape[0], call.width, dtype=torch.bfloat16, device=call.hidden_states.device)


def _new_rows(call: Fp4Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_tokens, num_topk = call.hidden_states.shape[0], call.top_k + call.num_shared
    like: dict[str, Any] = {"device": call.hidden_states.device}
    return (
        torch.empty(num_tokens * min(num_topk, call.num_local), call.hidden, dtype=torch.bfloat16, **like),
        torch.empty(num_tokens, num_topk, dtype=torch.bfloat16, **like),
        torch.empty(num_tokens * num_topk, dtype=torch.int32, **like),
    )


_FINALIZED = Operation(
    "trtllm_fp4_block_scale_moe", Fp4Call, _first, launch=_Plan.launch, result="output", new=_new_output
)
_ROWS = Operation("trtllm_fp4_block_scale_moe_rows", Fp4Call, _first, launch=_Plan.launch, new=_new_rows, num_results=3)
