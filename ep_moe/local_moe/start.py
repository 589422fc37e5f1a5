"""The launcher of the kernel that does in one launch what comes before the copy of rows, lists and quantization; of a
few tokens also the copy."""

import functools
from collections.abc import Container
from typing import Any

import torch

from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernels.gemm.arguments import TileList
from ep_moe.kernels.local.start import Lists, _start_call_kernel
from ep_moe.kernels.rows.permute import Placed
from ep_moe.kernels.rows.quantize import Quantizing
from ep_moe.layout.triton import CopyShape, PlaceShape
from ep_moe.local_moe.routed import PLACED, QUANTIZED, RoutedPacking
from ep_moe.quant.triton import QuantizeKernel, QuantizeShape

_MOST_LAUNCHES = 512
_LEAST_WARPS = 4  # of the program that makes the lists


def start_of(
    packing: RoutedPacking, row_tiles: tuple[int, int], listed: Container[str]
) -> tuple[Kernel, tuple[Placed, TileList, Quantizing]]:
    """The launch, and the names of the tensors that it takes, of packing and of the experts' tile list, in their order.

    Args:
        packing: with a `placing`. row_tiles: as of `PreparedCall`. listed: the fields of `TileList` that are present.
    """
    assert packing.placing is not None
    tiles = TileList(*(f"tiles:{name}" if name in listed else None for name in TileList._fields))
    few, tokens = packing.copying is not None, Quantizing(None, None, None, None)
    if packing.quantizing is not None:
        tokens = Quantizing(*QUANTIZED)._replace(**({"data": "x", "scale": "scale:bytes"} if few else {}))
    elif few:
        tokens = tokens._replace(x="tokens:words", data="x:words")
    placed = PLACED._replace(before=None, token_to_row="token_to_row") if few else PLACED
    shapes = packing.placing, packing.quantizing, packing.copying
    return _start_launch(*shapes, row_tiles, tiles, packing.ids_dtype, packing.device), (placed, tiles, tokens)


@functools.lru_cache(maxsize=_MOST_LAUNCHES)
def _start_launch(
    placing: PlaceShape,
    quantizing: QuantizeShape | None,
    copying: CopyShape | None,
    row_tiles: tuple[int, int],
    tiles: TileList,
    ids_dtype: torch.dtype,
    device: torch.device,
) -> Kernel:
    """The launch for these shapes, and for a tile list of which these names are not absent."""
    del ids_dtype, tiles  # Triton reads them off the tensors of the first call
    (max_tiles, block_m), placed = row_tiles, placing.constants if copying is None else placing.constants_of_few
    constants: dict[str, Any] = {"GROUPS": None, "SCALING": None}
    programs, num_warps, stride = 0, _LEAST_WARPS, 0
    if quantizing is not None:
        programs, num_warps, constants = QuantizeKernel.of(quantizing, few=copying is not None)
        stride = quantizing.stride
    elif copying is not None:
        constants["GROUPS"], programs, num_warps = copying.words
        programs, stride = programs * copying.num_tokens, copying.strides[0]
    return Kernel(
        _start_call_kernel,
        1 + programs,
        settings=(*placing.settings, max_tiles, stride),
        constants={"IDS": placed.pop("IDS"), "LISTS": Lists(**placed, BLOCK_M=block_m), **constants},
        options={"num_warps": max(num_warps, _LEAST_WARPS)},
        device=device,
        early=True,
    )
