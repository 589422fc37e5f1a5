"""The protocol of expert computation: an `Experts` takes a batch in any layout and one layer's weights."""

from typing import Protocol

import torch

from ep_moe.config import ActivationConfig
from ep_moe.layout import ExpertBatch
from ep_moe.weights import ExpertWeights


def experts_name(experts: "Experts") -> str:
    """The name of an implementation in configs, or of its class. Local."""
    return getattr(experts, "name", type(experts).__name__)


class Experts(Protocol):
    """Two grouped GEMMs with an activation between them; every call passes a layer's weights."""

    activation: ActivationConfig

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute y = w2 @ act(w13 @ x + b13) + b2 for every row of every local expert.

        Args:
            batch: `Batched`, `Compact` or `Flat`; rows that hold no token are never read.
            weights: of the batch's L local experts, in the batch's scheme.
            out: optional result, of the shape and dtype below; rows that hold no token are not written.
        Returns: `batch.dtype`; BATCHED [L, C, H], COMPACT [rows, H]; FLAT [N, H], weights applied and summed.
        Errors: ValueError if batch and weights do not fit each other.
        Local, on the current stream.
        """
        ...
