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
        self._rows, self._one = self._counts.unbind(), self._counts.new_ones(1)

    @property
    def counts(self) -> torch.Tensor:
        """[MoE layers, E] int64 on the device, since the last `reset`; a copy. Local."""
        return self._counts[:, :-1].clone()

    def add(self, layer: int, topk_ids: torch.Tensor) -> None:
        """Count a layer's ids [T, K] int32 or int64; -1 and E are no experts, and other ids the layer refuses.

        Two launches. Local, no host sync.
        """
        ids = torch.remainder(topk_ids.reshape(-1), self._counts.shape[1])  # -1 becomes E
        self._rows[layer].index_add_(0, ids, self._one.expand(ids.shape))

    def add_times(self, layer: int, topk_ids: torch.Tensor, times: torch.Tensor) -> None:
        """`add` in one launch, for ids [T, K] that are all in [0, E]; id i counts `times[i]`, [T * K] int64. Local."""
        self._rows[layer].scatter_add_(0, topk_ids.reshape(-1).long(), times)

    def reset(self) -> None:
        """Set the counts to zero. Local, no host sync."""
        self._counts.zero_()
