"""The weights of `trtllm_fp4_block_scale_moe` as the runtime has them.

Letters: L local experts, with shared ones; H hidden, I intermediate; W = 2I if the activation is gated, else I.
"""

from typing import Any, NamedTuple

import torch

from ep_moe.config import ActivationKind
from ep_moe.functional.common import check_like
from ep_moe.functional.flashinfer.fp4_call import Fp4Call
from ep_moe.functional.fp4 import NVFP4, stored_weight
from ep_moe.quant import QuantScheme, StoredMatrix
from ep_moe.weights import ExpertWeights, PerExpert

_FLOAT = (torch.float32,)


def _own(call: Fp4Call, name: str, *shape: int) -> torch.Tensor | None:
    """An optional float32 argument [L, *shape] of the local experts, sliced if it is of all experts."""
    given = getattr(call, name)
    if given is None:
        return None
    given = given.detach()  # unlike other views, it does not keep the caller's tensor alive
    if given.shape[:1] == (call.num_total,):
        given = given[call.local]
    check_like(given, name, (call.num_held, *shape), _FLOAT)
    return given


def _matrix(call: Fp4Call, name: str, rows: int, columns: int) -> tuple[str, StoredMatrix]:
    """A weight of the local experts, sliced if it is of all experts, and its format."""
    values, scale = getattr(call, name), getattr(call, f"{name}_scale")
    if call.num_total != call.num_held and values.shape[:1] == (call.num_total,):
        values, scale = values[call.local], scale[call.local]
    needed = (call.num_held, rows, columns // 2)
    if tuple(values.shape) != needed or columns % 2:
        raise ValueError(
            f"{name} is {tuple(values.shape)}; {needed} needed for intermediate_size ({call.intermediate_size}), "
            f"activation_type ({call.activation_type}) and local_num_experts ({call.num_held})"
        )
    return stored_weight(values, scale, name, f"{name}_scale")


class _Numbers(NamedTuple):
    """The numbers of each expert, and the biases, in the units in which the experts add and multiply them."""

    per_expert: PerExpert
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None


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


def _numbers(call: Fp4Call, gated: bool) -> _Numbers:
    """Turn FlashInfer's numbers, which are in the units of unscaled sums, into ours, which are in those of results."""
    first, gate, second = (
        _own(call, name) for name in ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
    )
    alpha, beta, limit = (_own(call, name) for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"))
    halves, (hidden, inner) = 2 if gated else 1, call.computed
    bias1, bias2 = _own(call, "gemm1_bias", halves * call.intermediate_size), _own(call, "gemm2_bias", _rows(call))
    if bias1 is not None:
        bias1 = _cut(bias1.unsqueeze(2), halves, inner, 1).squeeze(2)
    if bias2 is not None:
        bias2 = bias2[:, :hidden]
    if bias2 is not None and second is not None:
        bias2 = bias2 * second[:, None]
    both = call.scales_both
    if not both and bias1 is None and beta is None and limit is None:
        own = PerExpert(alpha=alpha, w13_output_scale=first, w13_gate_output_scale=gate, w2_output_scale=second)
        return _Numbers(own, None, bias2)
    # a factor behind the activation may as well stand behind FC2, so that one factor is left for both halves of FC1
    behind = first
    if gate is not None:
        behind = behind if both else 1 / gate if behind is None else behind / gate
        bias1 = None if bias1 is None else bias1 * gate[:, None]
        beta = beta if beta is None or both else beta * gate
        if limit is not None and call.activation.kind is not ActivationKind.SWIGLU_STEP:  # that clamps silu of the gate
            limit = limit * gate
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


def _rows(call: Fp4Call) -> int:
    """Rows of FC2's weights: H, or without padding."""
    rows: int = call.gemm2_weights.shape[1]
    return rows if rows == call.computed[0] else call.hidden


def has_copies(call: Fp4Call) -> bool:
    """Whether new tensors are computed, which would miss later writes to the caller's."""
    if call.cut:
        return True
    scaled = call.output1_scale_scalar is not None or call.output1_scale_gate_scalar is not None
    in_units_of_sums = any(part is not None for part in (call.gemm1_bias, call.gemm1_beta, call.gemm1_clamp_limit))
    second = call.gemm2_bias is not None and call.output2_scale_scalar is not None
    return second or (scaled and (in_units_of_sums or call.scales_both))


class Fp4Weights:
    """The weights of a call, in each scheme that its tokens ask for."""

    def __init__(self, kind: str, w13: StoredMatrix, w2: StoredMatrix, numbers: _Numbers) -> None:
        self.kind, self._w13, self._w2, self._numbers = kind, w13, w2, numbers
        self._made: dict[str, ExpertWeights] = {}
        self.plans: dict[object, Any] = {}  # what later calls with these weights find, by their kind

    @classmethod
    def of(cls, call: Fp4Call, gated: bool) -> "Fp4Weights":
        """Those of a call, checked."""
        halves, (hidden, inner), padded = 2 if gated else 1, call.computed, call.intermediate_size
        kind, w13 = _matrix(call, "gemm1_weights", halves * padded, call.hidden)
        kind2, w2 = _matrix(call, "gemm2_weights", _rows(call), padded)
        if kind != kind2:
            raise ValueError(f"gemm1_weights are {kind}, gemm2_weights are {kind2}: their scales say so")
        w13 = _cut_matrix(w13, halves, inner, hidden, call.hidden)
        w2 = _cut_matrix(w2, 1, hidden, inner, padded)
        if kind == NVFP4:
            ones = torch.ones(call.num_held, dtype=torch.float32, device=w13.values.device)
            w13, w2 = (StoredMatrix(part.values, scale=part.scale, global_scale=ones) for part in (w13, w2))
        return cls(kind, w13, w2, _numbers(call, gated))

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
