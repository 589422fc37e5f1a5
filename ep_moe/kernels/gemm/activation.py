"""The functions between the two expert GEMMs, as `ep_moe.config.ActivationKind` names them."""

import triton
import triton.language as tl


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
def _tanh(x):
    """The hyperbolic tangent, within 1e-7."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _activate(gate, up, alpha, beta, limit, KIND: tl.constexpr, LIMITED: tl.constexpr):
    """With LIMITED, gate is clamped from above and up from both sides; NaN propagates."""
    if KIND == "silu" or KIND == "swiglu_step" or KIND == "silu_no_mul":
        gate = gate * tl.sigmoid(gate)
    elif KIND == "gelu" or KIND == "gelu_no_mul":
        gate = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh" or KIND == "gelu_tanh_no_mul":  # (1 + tanh(x)) / 2 is sigmoid(2 * x)
        gate = gate * tl.sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate))
    elif KIND == "relu2":
        gate = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        gate = gate * gate
    if LIMITED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    if KIND == "swiglu":
        return gate * tl.sigmoid(alpha * gate) * (up + beta)
    elif KIND == "situ":
        up = tl.where(beta > 0.0, beta * _tanh(up / beta), up)
        return alpha * _tanh(gate / alpha) * tl.sigmoid(gate) * up
    elif KIND == "silu" or KIND == "gelu" or KIND == "gelu_tanh" or KIND == "swiglu_step":
        return gate * up
    else:
        return gate
