"""Random values for the parameters of a transformers model, the same however its parameters are spread over ranks.

Letters: E experts, L of them on this rank.
"""

import math
import zlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ep_moe.config import MoEConfig
from ep_moe.testing.random_experts import RandomExperts

EXPERT_MATRICES = {"gate_up_proj": "w13", "down_proj": "w2"}  # parameters [E, ., .], as an `Expert` names them


def experts_of(config: Any, name: str, seed: int, dtype: torch.dtype, device: torch.device) -> RandomExperts:
    """The experts of the module `name` of a model with a transformers config; a device type has its own. Local."""
    sizes = MoEConfig(
        hidden=config.hidden_size, intermediate=config.moe_intermediate_size, num_experts=config.num_experts
    )
    return RandomExperts(sizes, dtype, device, bias=False, seed=_seed(name, seed))


def _seed(name: str, seed: int) -> int:
    return zlib.crc32(f"{seed}/{name}".encode())


@torch.no_grad()
def fill_with_random_numbers(model: Any, seed: int) -> None:
    """Fill every parameter with values that depend on its name, scaled so that activations stay near 1.

    3D parameters are experts, made one by one; norms are near 1; an embedding is not scaled. DTensors get their shard
    of the same whole, experts sharded by their first dimension.

    Errors: ValueError for experts that are sharded otherwise. Local; collective for DTensors.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for name, parameter in model.named_parameters():
        spread = isinstance(parameter, DTensor)
        local = parameter.to_local() if spread else parameter
        if parameter.dim() == 3:
            if spread and parameter.placements != (Shard(0),):
                raise ValueError(f"{name} is spread by {parameter.placements}, not by whole experts")
            first = parameter.device_mesh.get_local_rank() * local.shape[0] if spread else 0
            module, _, matrix = name.rpartition(".")
            experts = experts_of(model.config, module, seed, local.dtype, local.device)
            for index in range(local.shape[0]):
                local[index].copy_(getattr(experts.expert(first + index), EXPERT_MATRICES[matrix]))
            continue
        generator = torch.Generator(local.device).manual_seed(_seed(name, seed))
        whole = torch.randn(tuple(parameter.shape), generator=generator, device=local.device)
        if parameter.dim() == 1:
            whole = 1 + 0.1 * whole
        elif id(parameter) not in embeddings:
            whole.mul_(math.prod(parameter.shape[1:]) ** -0.5)
        if spread:
            part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            whole = part.to_local()
        local.copy_(whole)
