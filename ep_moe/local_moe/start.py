"""The launcher of the kernel that does in one launch what comes before the copy of rows: lists and quantization."""

import functools
from typing import Any

import torch

from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernels.gemm.arguments import TileList
from ep_moe.kernels.local.start import Lists, _start_call_kernel
from ep_moe.kernels.rows.permute import Placed
from ep_moe.kernels.rows.quantize import Quantizing, Scaling
from ep_moe.layout.triton import PlaceShape
from ep_moe.local_moe.routed import QUANTIZED
from ep_moe.quant.triton import QuantizeKernel, QuantizeShape

_MOST_LAUNCHES = 512
_LEAST_WARPS = 4  # of the program that makes the lists
_NOTHING: dict[str, Any] = {"GROUPS": None, "SCALING": Scaling()}
_TILES = TileList(*(f"tiles:{name}" for name in TileList._fields))


def start_names(placed: Placed, *, quantized: bool) -> tuple[Placed, TileList, Quantizing]:
    """Names of the tensors that the launch takes, of packing and of the experts' tile list, in their order."""
    return placed, _TILES, Quantizing(*(QUANTIZED if quantized else [None] * len(QUANTIZED)))


@functools.lru_cache(maxsize=_MOST_LAUNCHES)
def start_launch(
    placing: PlaceShape,
    quantizing: QuantizeShape | None,
    row_tiles: tuple[int, int],
    ids_dtype: torch.dtype,
    device: torch.device,
) -> Kernel:
    """The launch for these shapes, and row tiles as of `PreparedCall`; it takes tensors as `start_names` says."""
    del ids_dtype  # Triton reads it off the tensors of the first call
    (max_tiles, block_m), placed = row_tiles, placing.constants
    programs, num_warps, stride, constants = 1, _LEAST_WARPS, 0, _NOTHING
    if quantizing is not None:
        kernel = QuantizeKernel.of(quantizing)
        programs, num_warps, stride = 1 + kernel.programs, max(kernel.num_warps, num_warps), quantizing.stride
        constants = kernel.constants
    return Kernel(
        _start_call_kernel,
        programs,
        settings=(*placing.settings, max_tiles, stride),
        constants={"IDS": placed.pop("IDS"), "LISTS": Lists(**placed, BLOCK_M=block_m), **constants},
        options={"num_warps": num_warps},
        device=device,
        early=True,
    )
