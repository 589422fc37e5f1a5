"""Random values for the parameters of a transformers model, the same however its parameters are spread over ranks.

Letters: E experts, L of them on this rank.
"""

import math
import zlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def _values(key: str, shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """Normally distributed float32 values of a key and a seed; another device type gives other values."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{key}".encode()))
    return torch.randn(shape, generator=generator, device=device)


def expert_values(name: str, index: int, shape: tuple[int, int], seed: int, device: torch.device) -> torch.Tensor:
    """Expert `index` of the parameter `name` [E, *shape], in float32, scaled by the number of its columns. Local."""
    return _values(f"{name}/{index}", shape, seed, device).mul_(shape[1] ** -0.5)


@torch.no_grad()
def fill_with_random_numbers(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter with values that depend on its name, scaled so that activations stay near 1.

    3D parameters are experts, made one by one; norms are near 1; an embedding is not scaled. DTensors get their shard
    of the same whole, experts sharded by their first dimension.

    Errors: ValueError for experts that are sharded otherwise. Local; collective for DTensors.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    parameter: Any
    for name, parameter in model.named_parameters():
        spread = isinstance(parameter, DTensor)
        local = parameter.to_local() if spread else parameter
        if parameter.dim() == 3:
            _fill_experts(name, parameter, local, seed)
            continue
        whole = _values(name, tuple(parameter.shape), seed, local.device)
        if parameter.dim() == 1:
            whole = 1 + 0.1 * whole
        elif id(parameter) not in embeddings:
            whole.mul_(math.prod(parameter.shape[1:]) ** -0.5)
        if spread:
            part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            whole = part.to_local()
        local.copy_(whole)


def _fill_experts(name: str, parameter: torch.Tensor, local: torch.Tensor, seed: int) -> None:
    first = 0
    if isinstance(parameter, DTensor):
        if parameter.placements != (Shard(0),):
            raise ValueError(f"{name} is spread by {parameter.placements}, not by whole experts")
        first = parameter.device_mesh.get_local_rank() * local.shape[0]
    for index in range(local.shape[0]):
        shape = (local.shape[1], local.shape[2])
        local[index].copy_(expert_values(name, first + index, shape, seed, local.device))
