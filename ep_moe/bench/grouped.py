"""Baseline of the expert kernels: torch's grouped GEMM in bfloat16, with plain torch between the two GEMMs.

Letters: N rows, L local experts, H hidden, I intermediate; W = 2I if the activation is gated, else I.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import grouped_mm, silu

from ep_moe.config import ActivationConfig, ActivationKind
from ep_moe.experts import apply_activation
from ep_moe.layout import ExpertBatch
from ep_moe.weights import ExpertWeights

DTYPE = torch.bfloat16  # the only dtype of torch's grouped kernels
CAPABILITIES = (9, 10)  # major compute capabilities with these kernels; elsewhere torch loops over experts on the host


def has_grouped_gemm(device: torch.device) -> bool:
    """True if torch has a grouped GEMM kernel for the device, which a CUDA graph can capture. Local."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in CAPABILITIES


class GroupedExperts:
    """Experts on the rows of one batch: two grouped GEMMs in bfloat16.

    On a CPU, where torch runs the same function as a loop, for tests only.

    Args:
        batch: COMPACT without padding, bfloat16. weights: of L experts, bfloat16, unquantized.
        activation: between the two GEMMs; those of the presets are computed in bfloat16, as models do.
    """

    def __init__(self, batch: ExpertBatch, weights: ExpertWeights, activation: ActivationConfig) -> None:
        self._x, self._weights, self._activation = batch.x, weights, activation
        counts = batch.expert_num_tokens
        self._row_end = counts.cumsum(0).int()
        # [N], for the biases
        self._row_expert = torch.arange(len(counts), device=counts.device).repeat_interleave(counts.long())

    def __call__(self) -> torch.Tensor:
        """Compute every row's expert; returns [N, H] bfloat16. Local, no host sync if `has_grouped_gemm`."""
        own = self._weights
        first = self._product(self._x, own.w13.values, own.w13_bias)
        return self._product(_activate(first, self._activation), own.w2.values, own.w2_bias)

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = grouped_mm(x, weight.transpose(1, 2), offs=self._row_end)
        return y if bias is None else y.add_(bias[self._row_expert])


def _activate(x: torch.Tensor, activation: ActivationConfig) -> torch.Tensor:
    """The activation on [N, W] in x's dtype, with as few passes over memory as plain torch allows."""
    if activation.kind in (ActivationKind.SILU, ActivationKind.SWIGLU):
        return gated(x.chunk(2, dim=-1), activation)
    return apply_activation(x, activation).to(x.dtype)


def gated(halves: Sequence[torch.Tensor], activation: ActivationConfig) -> torch.Tensor:
    """SILU or SWIGLU of gate and up [N, I], in their dtype. Local."""
    gate, up = halves
    if activation.kind is ActivationKind.SILU:
        return silu(gate).mul_(up)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return torch.sigmoid(gate * activation.alpha).mul_(gate).mul_(up + activation.beta)
