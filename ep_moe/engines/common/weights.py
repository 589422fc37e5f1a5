"""Weights of engines: reordered to ep_moe's row order, and quantized.

Letters: L local experts, H hidden, I intermediate.
"""

import dataclasses

import torch

from ep_moe.quant import QuantScheme, quantize_weight
from ep_moe.weights import ExpertWeights


def gate_above_up(rows: torch.Tensor) -> torch.Tensor:
    """Reorder rows [gate 0, up 0, gate 1, up 1, ...] to [gate; up]: [L, 2I] or [L, 2I, H], a copy. Local."""
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)


def gate_beside_up(rows: torch.Tensor) -> torch.Tensor:
    """The inverse of `gate_above_up`. Local."""
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)


def quantize_experts(weights: ExpertWeights, scheme: QuantScheme) -> ExpertWeights:
    """Quantize unquantized weights; with scheme "none" they are returned unchanged. Local."""
    if not scheme.weight.quantized:
        return weights
    w13, w2 = (quantize_weight(matrix.values, scheme) for matrix in (weights.w13, weights.w2))
    return dataclasses.replace(weights, w13=w13, w2=w2, scheme=scheme)
