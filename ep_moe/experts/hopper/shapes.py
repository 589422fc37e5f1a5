"""Which calls the Hopper kernels take. Imports no kernels."""

import functools
import importlib.util
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # it imports Triton
    from ep_moe.experts.grouped_gemm import CallShape

CAPABILITY = (9, 0)
# expected of an expert, below which Triton's kernels are as fast: by whether Hopper's gather rows first, and by an
# element's bytes
LEAST_ROWS = {False: {1: 1, 2: 2}, True: {1: 64, 2: 96}}
BLOCK = 128  # rows and columns of a weight that share a scale, and columns of a row
_ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
_MOST_ROWS = 2**31 - 2**16  # TMA's coordinates are int32
STEP_BYTES = 128  # of a row in a step over K: the width of TMA's swizzle
TMA_BYTES = 16  # strides are multiples of it


@functools.cache
def has_gluon() -> bool:
    """True if this Triton has Gluon. Local."""
    try:
        return importlib.util.find_spec("triton.experimental.gluon.language.nvidia.hopper") is not None
    except ImportError:
        return False


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """True if this device is a GPU that the kernels run on. Local."""
    found = device.type == "cuda" and torch.cuda.is_available() and torch.version.hip is None
    return found and torch.cuda.get_device_capability(device) == CAPABILITY


def obstacle(shape: "CallShape") -> str | None:
    """The reason why the kernels do not compute calls of this shape; None if they do. Local."""
    rows, weight = shape.scheme.payload, shape.scheme.weight
    if shape.decodes or rows.family not in ("none", "scaled") or shape.row_dtype not in _ROW_DTYPES:
        return f"they do not compute scheme '{shape.scheme.name}' in {shape.dtype}"
    if shape.alternating and shape.hidden * shape.row_dtype.itemsize % STEP_BYTES:
        width = STEP_BYTES // shape.row_dtype.itemsize
        return f"gate and up rows of w13 alternate, and hidden ({shape.hidden}) is no multiple of {width}"
    if torch.float32 not in (rows.scale_dtype, weight.scale_dtype) or weight.scale_dtype != rows.scale_dtype:
        return f"scales are {weight.scale_dtype}, not {torch.float32}"
    if weight.granularity in ("block", "group"):
        if weight.block != (BLOCK, BLOCK) or rows.group_width != BLOCK:
            return f"blocks of scales are {weight.block}, not {BLOCK} x {BLOCK}"
        if not shape.halves_aligned:
            return f"intermediate ({shape.intermediate}) is no multiple of {BLOCK}: a block of scales spans both halves"
    for name, width in (("hidden", shape.hidden), ("intermediate", shape.intermediate)):
        if width * shape.row_dtype.itemsize % TMA_BYTES:
            return f"rows of {name} ({width}) columns are no multiple of {TMA_BYTES} bytes"
    if shape.gathered:
        return None
    if shape.x_stride * shape.row_dtype.itemsize % TMA_BYTES:
        return f"rows of x are {shape.x_stride * shape.row_dtype.itemsize} bytes apart, no multiple of {TMA_BYTES}"
    if shape.max_rows * (shape.num_experts if shape.rows_apart else 1) > _MOST_ROWS:
        return f"the batch has more than {_MOST_ROWS} rows"
    if rows.quantized:
        (block, row, group), groups = shape.scale_strides, rows.num_groups(shape.hidden)
        dense = block == shape.scale_height * groups and (groups == 1 or group == shape.scale_height)
        if row != 1 or (shape.rows_apart and not dense):
            return f"scales of x lie {shape.scale_strides} apart"
    return None
