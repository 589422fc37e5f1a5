"""The layers of decode passes: the model's own over another transport, with a token count on the device."""

import dataclasses

import torch

from ep_moe.config import TransportConfig
from ep_moe.layer import ExpertParallelMoE
from ep_moe.transport import Transport

COUNTED = False


def decode_config(config: TransportConfig, rows: int) -> TransportConfig:
    """The config of a decode transport: that of the model's transport with M rows. Local."""
    kinds = tuple(dataclasses.replace(kind, counted=COUNTED) for kind in config.kinds)
    return dataclasses.replace(config, max_tokens_per_rank=rows, num_slots=1, kinds=kinds)


def layer_over(layer: ExpertParallelMoE, transport: Transport, index: int, experts: str) -> ExpertParallelMoE:
    """A layer's twin over another transport; they share the weights. `index`: of both. Local."""
    return ExpertParallelMoE(
        layer.config, layer.weights, transport, placement=layer.placement, experts=experts, layer_index=index
    )


def run_counted(
    layer: ExpertParallelMoE, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_tokens: torch.Tensor
) -> torch.Tensor:
    """The experts' sums for the first `num_tokens` [1] int32 rows of x [B, H]; other rows are undefined. Collective."""
    del num_tokens
    return layer(x, ids, weights)
