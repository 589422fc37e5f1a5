"""The experts of transformers' fine-grained fp8 (`FP8Experts`): each weight has a parameter with its scales.

Letters: E experts of the module, N and K rows and columns of a weight, n and k those of a block, I intermediate.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from ep_moe.config import DTYPES
from ep_moe.quant import QuantScheme, StoredMatrix, get_scheme

SCALE = "scale_inv"  # behind the name of a parameter
ACTIVATION_SCALE = "activation_scale"
_WHOLE_BLOCK = (128, 128)


def first_of(module: Any) -> str:
    """The name of the parameter of the first GEMM."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def scheme_of(module: Any) -> QuantScheme:
    """The scheme of an experts module: "none" unless its weights are in fp8.

    With a scale per tensor the halves of the first weight have one each, so that they become one for each row.
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
        return get_scheme("fp8_tensor_channel" if static else "fp8_token")
    if static:
        raise ValueError(f"{name} has weights in blocks and static scales of activations, which are not computed here")
    rows, columns = block_of(module)
    if scale.dtype == torch.float8_e8m0fnu:
        if (rows, columns) != _WHOLE_BLOCK:
            raise ValueError(f"{name} has blocks of {rows}x{columns} with {scale.dtype} scales, which need 128x128")
        return get_scheme("fp8_block_ue8m0")
    return get_scheme("fp8_block" if (rows, columns) == _WHOLE_BLOCK else f"fp8_block_{rows}x{columns}")


def block_of(module: Any) -> tuple[int, int]:
    """Rows and columns that share a scale here: blocks whose rows do not divide I are cut. Local."""
    rows, columns = module.block_size
    return math.gcd(rows, module.down_proj.shape[2]), columns


def matrix(module: Any, key: str, parameter: Callable[[str], torch.Tensor], scheme: QuantScheme) -> StoredMatrix:
    """A weight of a module in fp8 [E, N, K], a view if its blocks and the dtype of its scales are ours. Local.

    Args: parameter: reads one by name, for some of the experts.
    Errors: ValueError for scales of a shape that the blocks do not make.
    """
    values, scale = parameter(key), parameter(f"{key}_{SCALE}")
    halves = 2 if module.has_gate and key == first_of(module) else 1
    rows = values.shape[1] // halves
    scale = scale if scale.dtype == torch.float32 else scale.float()
    if scheme.weight.granularity == "channel":
        each = scale.reshape(scale.shape[0], -1)
        return StoredMatrix(values, scale=each.repeat_interleave(values.shape[1] // each.shape[1], dim=1))
    theirs, ours = module.block_size[0], scheme.weight.block[0]
    expected = (values.shape[0], halves * math.ceil(rows / theirs), math.ceil(values.shape[2] / module.block_size[1]))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"{key}_{SCALE} of {type(module).__name__} is {tuple(scale.shape)}; {key} {tuple(values.shape)} in blocks "
            f"of {module.block_size} needs {expected}"
        )
    if ours != theirs:
        parts = scale.unflatten(1, (halves, -1)).repeat_interleave(theirs // ours, dim=2)
        scale = parts[:, :, : math.ceil(rows / ours)].flatten(1, 2)
    return StoredMatrix(values, scale=scale.contiguous())


def static_scales(module: Any, num_experts: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Static scales of activations, [1] and [num_experts] float32: the largest of all experts of the module. Local."""
    if getattr(module, "activation_scheme", None) != "static" or not scheme_of(module).payload.quantized:
        return None, None
    one, two = (getattr(module, f"{key}_{ACTIVATION_SCALE}").detach() for key in (first_of(module), "down_proj"))
    return one.float().max().reshape(1), two.float().max().expand(num_experts).contiguous()
