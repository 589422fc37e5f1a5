"""The experts of transformers' fine-grained fp8 (`FP8Experts`): each weight has a parameter with its scales.

Letters: E experts of the module, N and K rows and columns of a weight, n and k those of a block, I intermediate.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from ep_moe.config import DTYPES
from ep_moe.quant import QuantScheme, StoredMatrix, get_scheme, with_block
from ep_moe.weights.method import scales_of_halves, scheme_of_halves

SCALE = "scale_inv"  # behind the name of a parameter
ACTIVATION_SCALE = "activation_scale"


def first_of(module: Any) -> str:
    """The name of the parameter of the first GEMM."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def scheme_of(module: Any) -> QuantScheme:
    """The scheme of an experts module: "none" unless its weights are in fp8.

    Errors: ValueError names weights that are not computed here. Local.
    """
    name, first = type(module).__name__, first_of(module)
    weight, scale = getattr(module, first), getattr(module, f"{first}_{SCALE}", None)
    if scale is None or weight.dtype in DTYPES.values():
        return get_scheme("none")
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{first} of {name} is {weight.dtype} with scales; torch.float8_e4m3fn is computed here")
    static = module.activation_scheme == "static"
    if module.block_size is None:
        if scale.dtype != torch.float32:
            raise ValueError(f"{first}_{SCALE} of {name} is {scale.dtype}; per tensor it must be torch.float32")
        return scheme_of_halves(get_scheme("fp8_tensor"), 1) if static else get_scheme("fp8_token")
    if static:
        raise ValueError(f"{name} has weights in blocks and static scales of activations, which are not computed here")
    return scheme_of_halves(_in_blocks(module, scale), module.down_proj.shape[2])


def _in_blocks(module: Any, scale: torch.Tensor) -> QuantScheme:
    """The scheme with the module's own blocks."""
    scheme = get_scheme("fp8_block_ue8m0" if scale.dtype == torch.float8_e8m0fnu else "fp8_block")
    block = tuple(module.block_size)
    return scheme if block == scheme.weight.block else with_block(scheme, *block)


def matrix(module: Any, key: str, parameter: Callable[[str], torch.Tensor], scheme: QuantScheme) -> StoredMatrix:
    """A weight of a module in fp8 [E, N, K], a view if its blocks and the dtype of its scales are ours. Local.

    Args: parameter: reads one by name, for some of the experts.
    Errors: ValueError for scales of a shape that the blocks do not make.
    """
    values, scale = parameter(key), parameter(f"{key}_{SCALE}")
    halves = 2 if module.has_gate and key == first_of(module) else 1
    num_experts, rows, columns = values.shape
    if module.block_size is None:
        each = scale.float().reshape(num_experts, -1)
        return StoredMatrix(values, scale=each.repeat_interleave(rows // each.shape[1], dim=1))
    expected = (
        num_experts,
        halves * math.ceil(rows / halves / module.block_size[0]),
        math.ceil(columns / module.block_size[1]),
    )
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"{key}_{SCALE} of {type(module).__name__} is {tuple(scale.shape)}; {key} {tuple(values.shape)} in blocks "
            f"of {module.block_size} needs {expected}"
        )
    stored = _in_blocks(module, scale).weight
    return StoredMatrix(values, scale=scales_of_halves(scale.float(), stored, scheme.weight, rows, halves).contiguous())


def static_scales(module: Any, num_experts: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Static scales of activations, [1] and [num_experts] float32: the largest of all experts of the module. Local."""
    if getattr(module, "activation_scheme", None) != "static" or not scheme_of(module).payload.quantized:
        return None, None
    one, two = (getattr(module, f"{key}_{ACTIVATION_SCALE}").detach() for key in (first_of(module), "down_proj"))
    return one.float().max().reshape(1), two.float().max().expand(num_experts).contiguous()
