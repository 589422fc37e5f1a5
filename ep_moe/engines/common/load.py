"""Expert load: how often this rank's tokens choose each expert, counted on the device.

Letters: T tokens on this rank, K top-k, E logical experts.
"""

import torch


class ExpertLoad:
    """Counts of the ids that layers route to, for balancing experts over ranks.

    Args:
        num_layers: MoE layers of the model. num_experts: E. device: of the ids.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        # the extra column counts ids that are no experts, so that they need no filtering, which would be a host sync
        self._counts = torch.zeros(num_layers, num_experts + 1, dtype=torch.int64, device=device)

    @property
    def counts(self) -> torch.Tensor:
        """[MoE layers, E] int64 on the device, since the last `reset`; a copy. Local."""
        return self._counts[:, :-1].clone()

    def add(self, layer: int, topk_ids: torch.Tensor) -> None:
        """Count a layer's ids [T, K], any integer dtype, -1 none. Local, no host sync."""
        num_experts = self._counts.shape[1] - 1
        ids = topk_ids.reshape(-1).long()
        ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
        self._counts[layer].scatter_add_(0, ids, torch.ones_like(ids))

    def add_times(self, layer: int, topk_ids: torch.Tensor, times: torch.Tensor) -> None:
        """`add` in one launch, for ids [T, K] that are all in [0, E]; id i counts `times[i]`, [T * K] int64. Local."""
        self._counts[layer].scatter_add_(0, topk_ids.reshape(-1).long(), times)

    def reset(self) -> None:
        """Set the counts to zero. Local, no host sync."""
        self._counts.zero_()
