"""The experts of a rank for rows that do not move. Letters: T rows, H hidden, K top-k, E experts of all ranks."""

import dataclasses

import torch

from ep_moe.config import Layout
from ep_moe.engines.common.rows import RowShare, rows_to_send
from ep_moe.experts import Experts
from ep_moe.layer.warmup import row_counts, run_compiled
from ep_moe.local_moe import local_moe
from ep_moe.weights import ExpertWeights


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalExperts:
    """This rank's part of a layer whose rows are on all ranks, or on one rank alone: the engine adds the parts up, as
    it does those of tensor parallelism, so that nothing is dispatched or combined.

    Args: weights: of this rank's experts. experts: compute them. first: of them. num_experts: E.
    """

    weights: ExpertWeights
    experts: Experts
    first: int
    num_experts: int

    def __call__(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        layout: Layout,
        *,
        weights_on_input: bool = False,
    ) -> torch.Tensor:
        """The part of this rank.

        Args:
            x: [T, H] in the model's dtype. topk_ids: [T, K] physical, those of no expert are ignored.
            topk_weights: [T, K], any float dtype. weights_on_input: multiply rows by their weight; K must be 1.
        Returns: [T, H]; rows without an expert of this rank are zero.
        Errors: ValueError for tensors that do not fit each other. Local, no host sync on a GPU.
        """
        scheme = self.weights.scheme
        rows, routing = rows_to_send(
            x, topk_ids, topk_weights, share=RowShare(), scheme=scheme, weights_on_input=weights_on_input
        )
        return local_moe(
            rows,
            routing,
            self.weights,
            self.experts,
            layout=layout,
            local_expert_offset=self.first,
            num_experts=self.num_experts,
        )

    def warm_up(self, layout: Layout, max_rows: int, num_topk: int, *, hidden: int, dtype: torch.dtype) -> None:
        """Compile the kernels of steps of up to `max_rows` rows, on a GPU. Local."""
        device = self.weights.w13.values.device
        if device.type != "cuda":
            return

        def call(rows: int) -> None:
            x = torch.zeros(rows, hidden, dtype=dtype, device=device)
            ids = torch.full((rows, num_topk), -1, dtype=torch.int32, device=device)
            self(x, ids, torch.zeros(rows, num_topk, dtype=torch.float32, device=device), layout)

        run_compiled(call, row_counts(max_rows), self.experts)
