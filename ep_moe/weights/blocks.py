"""Weights in fp8 on disk with a scale for each block, as in the DeepSeek-V3 checkpoints.

A tensor NAME of e4m3 values [N, K] has a scale tensor NAME_scale_inv [ceil(N/n), ceil(K/k)], which in spite of its name
multiplies the values (github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md). Dimensions before N are those of stacked
experts. `weight_block_size` of config.json's `quantization_config` is [n, k].
Letters: N and K rows and columns of a weight, n and k those of a block.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ep_moe.config import DTYPES
from ep_moe.fields import shown
from ep_moe.quant import QuantScheme, StoredMatrix, dequantize_weight, get_scheme
from ep_moe.weights import storage
from ep_moe.weights.storage import StoredTensor, TensorReader

SUFFIX = "_scale_inv"
SCALE_DTYPES = (*DTYPES.values(), torch.float8_e8m0fnu)  # all convert to float32 without rounding
OPTIONS: dict[str, tuple[Any, ...]] = {  # keys of quantization_config and their supported values
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn", None),
    "activation_scheme": ("dynamic", None),
}


def stored_scheme(config: Mapping[str, Any], name: str) -> QuantScheme | None:
    """The scheme of the fp8 tensors of a checkpoint; None if config.json has no quantization.

    Some tensors may be unquantized (`modules_to_not_convert`): each tensor's dtype decides.
    `scale_fmt`, the rounding of activation scales during training, is ignored: ours are not rounded.

    Args:
        config: the content of config.json. name: its name in errors.
    Errors: ValueError for another quantization method or option: names it and those that are supported. Local.
    """
    quantized = config.get("quantization_config")
    if quantized is None:
        return None
    read = f"{', '.join(DTYPES)}, and fp8 e4m3 with weight_block_size [n, k] and dynamic activation scales are read"
    method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
    stored = f"{name}: weights are quantized on disk ({shown(method)})"
    if not isinstance(quantized, Mapping):
        raise ValueError(f"{stored}; {read}")
    for key, values in OPTIONS.items():
        if quantized.get(key) not in values:
            raise ValueError(f"{stored} with {key} {shown(quantized.get(key))}; {read}")
    block = quantized.get("weight_block_size")
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(type(size) is int for size in block)):
        raise ValueError(f"{stored} with weight_block_size {shown(block)}; {read}")
    try:
        return get_scheme(f"fp8_block_{block[0]}x{block[1]}")
    except ValueError as error:
        raise ValueError(f"{name}: weight_block_size {list(block)}: {error}") from None


def pair_scales(tensors: Mapping[str, StoredTensor], scheme: QuantScheme | None) -> dict[str, StoredTensor]:
    """Attach its scale to every fp8 tensor of a checkpoint, and drop the scales from the mapping.

    Args:
        tensors: by name. scheme: of fp8 tensors; None returns the tensors unchanged.
    Errors: ValueError names a scale that is missing or has a wrong shape or an unsupported dtype. Local.
    """
    if scheme is None:
        return dict(tensors)
    scales = {f"{name}{SUFFIX}" for name, stored in tensors.items() if stored.dtype == scheme.weight.dtype}
    paired = {}
    for name, stored in tensors.items():
        if name in scales:
            continue
        if stored.dtype == scheme.weight.dtype:
            scale = tensors.get(f"{name}{SUFFIX}")
            if scale is None:
                raise ValueError(f"{name} in {stored.file} is {stored.dtype}, but {name}{SUFFIX} is missing")
            expected = scheme.weight.scale_shape(stored.shape) if len(stored.shape) > 1 else None
            if scale.shape != expected or scale.dtype not in SCALE_DTYPES:
                raise ValueError(
                    f"{scale.name} in {scale.file} is {list(scale.shape)} {scale.dtype}; {list(stored.shape)} values "
                    f"in blocks of {list(scheme.weight.block)} need {None if expected is None else list(expected)} "
                    f"of {', '.join(str(dtype) for dtype in SCALE_DTYPES)}"
                )
            stored = dataclasses.replace(stored, scale=scale)
        paired[name] = stored
    return paired


def read_numbers(reader: TensorReader, stored: StoredTensor, out: torch.Tensor, scheme: QuantScheme | None) -> None:
    """Read a tensor into `out`, dequantized if it has a scale, converted to the dtype of `out`.

    Args:
        stored: [N, K] if it has a scale, else any shape. out: that shape. scheme: of tensors with a scale.
    Extra memory: a portion, or one row of blocks, of stored values and of dequantized values.
    Errors: as of `TensorReader.read_into`. Local; synchronizes with the device of `out`.
    """
    if stored.scale is None:
        reader.read_into(stored, out)
        return
    assert scheme is not None
    scale = torch.empty(stored.scale.shape, dtype=torch.float32, device=out.device)
    reader.read_into(stored.scale, scale)
    (num_rows, columns), block_rows = stored.shape, scheme.weight.block[0]
    blocks = max(storage.PORTION_BYTES // (columns * block_rows * torch.float32.itemsize), 1)
    for block in range(0, scale.shape[0], blocks):
        start, stop = block * block_rows, min((block + blocks) * block_rows, num_rows)
        values = torch.empty(stop - start, columns, dtype=stored.dtype, device=out.device)
        reader.read_into(stored.rows(start, stop), values)
        out[start:stop] = dequantize_weight(StoredMatrix(values, scale=scale[block : block + blocks]), scheme)


def read_scale(reader: TensorReader, stored: StoredTensor, out: torch.Tensor, repeat: int) -> None:
    """Read a scale for blocks with `repeat` times fewer rows: each stored row is repeated that often in `out`.

    Args:
        stored: [ceil(N/n), ceil(K/k)]. out: float32 [ceil(N/(n/repeat)), ceil(K/k)].
    Local; synchronizes with the device of `out`.
    """
    if repeat == 1:
        reader.read_into(stored, out)
        return
    scale = torch.empty(stored.shape, dtype=torch.float32, device=out.device)
    reader.read_into(stored, scale)
    out.copy_(scale.repeat_interleave(repeat, dim=0)[: out.shape[0]])
