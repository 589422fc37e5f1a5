"""The functions between the two expert GEMMs, as `ep_moe.config.ActivationKind` names them."""

import triton
import triton.language as tl

# From Triton 3.8 on `-x` is no more `0.0 - x`, and then `_hopper_gemm_kernel` with scales of blocks spills sums in its
# loop over K. With the subtraction written out it does not; versions before compile what they did.
_NEGATED_ERF = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8))


@triton.jit
def activate(first, second, alpha, beta, limit, EPILOGUE):
    """Apply the activation to float32 tiles of the first and the second half of w13's rows.

    Example: "silu" of gate 1 and up 2 is 1 * sigmoid(1) * 2 = 1.4621. Without a gate the second half is unused.
    """
    if EPILOGUE.UP_FIRST:
        return _activate(second, first, alpha, beta, limit, EPILOGUE.ACTIVATION, EPILOGUE.LIMITED)
    else:
        return _activate(first, second, alpha, beta, limit, EPILOGUE.ACTIVATION, EPILOGUE.LIMITED)


@triton.jit
def _sigmoid(x):
    """The logistic function, as Triton 3.6 and 3.7 compile `tl.sigmoid`."""
    return 1.0 / (1.0 + tl.exp(0.0 - x))


@triton.jit
def _tanh(x):
    """The hyperbolic tangent, within 1e-7."""
    return 2.0 * _sigmoid(2.0 * x) - 1.0


@triton.jit
def _activate(gate, up, alpha, beta, limit, KIND: tl.constexpr, LIMITED: tl.constexpr):
    """With LIMITED, gate is clamped from above and up from both sides; NaN propagates."""
    if KIND == "silu" or KIND == "swiglu_step" or KIND == "silu_no_mul":
        gate = gate * _sigmoid(gate)
    elif KIND == "gelu" or KIND == "gelu_no_mul":
        if _NEGATED_ERF:
            gate = gate * 0.5 * (1.0 - tl.erf((0.0 - gate) * 0.7071067811865476))
        else:
            gate = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh" or KIND == "gelu_tanh_no_mul":  # (1 + tanh(x)) / 2 is sigmoid(2 * x)
        gate = gate * _sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate))
    elif KIND == "relu2":
        gate = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        gate = gate * gate
    if LIMITED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    if KIND == "swiglu":
        return gate * _sigmoid(alpha * gate) * (up + beta)
    elif KIND == "situ":
        up = tl.where(beta > 0.0, beta * _tanh(up / beta), up)
        return alpha * _tanh(gate / alpha) * _sigmoid(gate) * up
    elif KIND == "silu" or KIND == "gelu" or KIND == "gelu_tanh" or KIND == "swiglu_step":
        return gate * up
    else:
        return gate
