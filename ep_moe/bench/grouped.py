"""Baseline of the expert kernels: torch's grouped GEMM in bfloat16, with plain torch between the two GEMMs.

Letters: N rows, L local experts, H hidden, I intermediate; W = 2I if the activation is gated, else I.
"""

import functools
from collections.abc import Callable

import torch
from torch.nn.functional import grouped_mm, silu

from ep_moe.bench.oracle import Expert
from ep_moe.config import ActivationConfig, ActivationKind
from ep_moe.experts import apply_activation
from ep_moe.layout import ExpertBatch
from ep_moe.quant import QuantScheme, StoredMatrix, dequantize_weight, get_scheme
from ep_moe.weights import ExpertWeights

DTYPE = torch.bfloat16  # the only dtype of torch's grouped kernels
CAPABILITIES = (
    9,
    10,
)  # major compute capabilities with these kernels; elsewhere torch loops over experts on the host


def has_grouped_gemm(device: torch.device) -> bool:
    """True if torch has a grouped GEMM kernel for the device, which a CUDA graph can capture. Local."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in CAPABILITIES


class GroupedExperts:
    """The experts of a rank on rows sorted by expert: two grouped GEMMs in bfloat16.

    On a CPU, where torch runs the same function as a loop, for tests only.

    Args:
        weights: of L experts; converted to bfloat16 here, once, if quantized or of another dtype.
        activation: between the two GEMMs; those of the presets are computed in bfloat16, as models do.
    """

    def __init__(self, weights: ExpertWeights, activation: ActivationConfig) -> None:
        self._activation = activation
        biases = (weights.w13_bias, weights.w2_bias)
        w13_bias, w2_bias = (None if bias is None else bias.to(DTYPE) for bias in biases)
        self.weights = ExpertWeights(
            scheme=get_scheme("none"),
            w13=StoredMatrix(_as_bfloat16(weights.w13, weights.scheme)),
            w2=StoredMatrix(_as_bfloat16(weights.w2, weights.scheme)),
            w13_bias=w13_bias,
            w2_bias=w2_bias,
        )

    def expert(self, index: int) -> Expert:
        """The weights of local expert `index` as used here. Local."""
        own = self.weights
        w13_bias, w2_bias = (None if bias is None else bias[index] for bias in (own.w13_bias, own.w2_bias))
        return Expert(w13=own.w13.values[index], w2=own.w2.values[index], w13_bias=w13_bias, w2_bias=w2_bias)

    def prepare(self, batch: ExpertBatch, row_expert: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A call on a COMPACT batch without padding, whose rows are `row_expert`'s [N] int64, for the biases. Local."""
        row_end = batch.expert_num_tokens.cumsum(0).int()
        return functools.partial(self, batch.x, row_end, row_expert)

    def __call__(self, x: torch.Tensor, row_end: torch.Tensor, row_expert: torch.Tensor) -> torch.Tensor:
        """Compute every row's expert.

        Args:
            x: [N, H] bfloat16, sorted by expert. row_end: [L] int32, end of each expert's rows.
            row_expert: [N] int64, the expert of each row, for the biases.
        Returns: [N, H] bfloat16. Local, no host sync if `has_grouped_gemm`.
        """
        own = self.weights
        first = self._product(x, own.w13.values, own.w13_bias, row_end, row_expert)
        second = _activate(first, self._activation)
        return self._product(second, own.w2.values, own.w2_bias, row_end, row_expert)

    def _product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        row_end: torch.Tensor,
        row_expert: torch.Tensor,
    ) -> torch.Tensor:
        y = grouped_mm(x, weight.transpose(1, 2), offs=row_end)
        return y if bias is None else y.add_(bias[row_expert])


def _as_bfloat16(matrix: StoredMatrix, scheme: QuantScheme) -> torch.Tensor:
    """Weights [L, ., .] in bfloat16, one expert at a time, as float32 takes four times the memory of fp8."""
    values = matrix.values
    if not scheme.weight.quantized:
        return values.to(DTYPE)
    shape = (*values.shape[:-1], scheme.weight.row_width(values.shape[-1]))
    whole = torch.empty(shape, dtype=DTYPE, device=values.device)
    for expert, out in enumerate(whole):
        out.copy_(dequantize_weight(matrix[expert], scheme))
    return whole


def _activate(x: torch.Tensor, activation: ActivationConfig) -> torch.Tensor:
    """The activation on [N, W] in x's dtype, with as few passes over memory as plain torch allows."""
    if activation.kind is ActivationKind.SILU:
        gate, up = x.chunk(2, dim=-1)
        return silu(gate).mul_(up)
    if activation.kind is ActivationKind.SWIGLU:
        gate, up = x.chunk(2, dim=-1)
        if activation.limit is not None:
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return torch.sigmoid(gate * activation.alpha).mul_(gate).mul_(up + activation.beta)
    return apply_activation(x, activation).to(x.dtype)
