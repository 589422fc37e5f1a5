"""The functions between the two expert GEMMs, as `ep_moe.config.ActivationKind` names them."""

import triton
import triton.language as tl


@triton.jit
def activate(first, second, KIND: tl.constexpr, alpha, beta, limit, LIMITED: tl.constexpr):
    """Apply the activation to float32 tiles of the first and the second half of w13's rows.

    Example: "silu" of gate 1 and up 2 is 1 * sigmoid(1) * 2 = 1.4621. KIND is the value of an `ActivationKind`, whose
    first half is the gate, or that and "_up_first". Without a gate the second half is unused.
    """
    if KIND == "silu_up_first":
        return _activate(second, first, "silu", alpha, beta, limit, LIMITED)
    elif KIND == "gelu_up_first":
        return _activate(second, first, "gelu", alpha, beta, limit, LIMITED)
    elif KIND == "swiglu_up_first":
        return _activate(second, first, "swiglu", alpha, beta, limit, LIMITED)
    else:
        return _activate(first, second, KIND, alpha, beta, limit, LIMITED)


@triton.jit
def _activate(gate, up, KIND: tl.constexpr, alpha, beta, limit, LIMITED: tl.constexpr):
    """With LIMITED, "swiglu" clamps gate from above and up from both sides; NaN propagates."""
    if KIND == "silu":
        return gate * tl.sigmoid(gate) * up
    elif KIND == "gelu":
        return gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == "swiglu":
        if LIMITED:
            gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        return gate * tl.sigmoid(alpha * gate) * (up + beta)
    elif KIND == "relu2":
        positive = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive
    else:
        tl.static_assert(KIND == "identity", "no such activation")
        return gate
