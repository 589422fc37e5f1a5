"""Random values for the parameters of a transformers model, the same however its parameters are spread over ranks.

Letters: E experts, L of them on this rank.
"""

import math
import zlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ep_moe.config import MoEConfig
from ep_moe.engines.transformers.architectures import NUM_EXPERTS_KEYS
from ep_moe.engines.transformers.experts import ExpertsModule, activation_of, find_experts, parameters_of
from ep_moe.quant import SCHEMES
from ep_moe.testing.random_experts import RandomExperts


def intermediate_of(config: Any) -> int:
    """I of the experts of a model with a transformers config. Local."""
    return int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)


def num_experts_of(config: Any) -> int:
    """E of a model with a transformers config. Local."""
    return int(next(value for key in NUM_EXPERTS_KEYS if (value := getattr(config, key, None))))


def experts_of(
    config: Any, module: ExpertsModule, name: str, seed: int, dtype: torch.dtype, device: torch.device
) -> RandomExperts:
    """The experts of a model with a transformers config; a device type has its own.

    Args:
        module: one of the model's, for the activation and whether there are biases. name: its name. Local.
    """
    sizes = MoEConfig(
        hidden=config.hidden_size,
        intermediate=intermediate_of(config),
        num_experts=num_experts_of(config),
        activation=activation_of(module),
    )
    return RandomExperts(sizes, dtype, device, bias=module.has_bias, seed=_seed(name, seed))


def _seed(name: str, seed: int) -> int:
    return zlib.crc32(f"{seed}/{name}".encode())


@torch.no_grad()
def fill_with_random_numbers(model: Any, seed: int) -> None:
    """Fill every parameter with values that depend on its name, scaled so that activations stay near 1.

    Experts are made one by one; norms and biases are near 1; an embedding is not scaled. DTensors get their shard of
    the same whole, experts sharded by their first dimension.

    Errors: ValueError for experts that are sharded otherwise. Local; collective for DTensors.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    of_experts: set[torch.Tensor] = set()
    for name, module in find_experts(model).items():
        of_experts.update(module.parameters(recurse=False))
        _fill_experts(model.config, name, module, seed)
    for name, parameter in model.named_parameters():
        if parameter in of_experts:
            continue
        spread = isinstance(parameter, DTensor)
        local = parameter.to_local() if spread else parameter
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


def _fill_experts(config: Any, name: str, module: ExpertsModule, seed: int) -> None:
    """Fill the parameters of an experts module, or this rank's shards of them."""
    first, targets = 0, {}
    for key, parameter in module.named_parameters(recurse=False):
        targets[key] = parameter
        if isinstance(parameter, DTensor):
            if parameter.placements != (Shard(0),):
                raise ValueError(f"{name}.{key} is spread by {parameter.placements}, not by whole experts")
            targets[key] = local = parameter.to_local()
            first = parameter.device_mesh.get_local_rank() * local.shape[0]
    sample = targets["down_proj"]
    experts = experts_of(config, module, name, seed, sample.dtype, sample.device)
    for index in range(sample.shape[0]):
        for key, values in parameters_of(module, experts.local([first + index], SCHEMES["none"])).items():
            targets[key][index].copy_(values[0])
