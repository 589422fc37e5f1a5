"""Weights as FlashInfer's Blackwell kernels want them, turned back into rows in order, as its documentation has them.

Before a call to its TensorRT-LLM kernels, FlashInfer's users reorder FP4 weights in three steps:
1. rows of a gated w1, [up; gate], alternate: up 0, gate 0, up 1, gate 1, ...;
2. in each block of 32 rows, row 4 * a + b moves to 8 * b + a (epilogue tiles of 128 rows; of 64, in blocks of 16 rows,
   2 * a + b moves to 8 * b + a);
3. scales, reordered as their rows, are stored in tiles of 128 rows and 4 columns, in which row 32 * a + b and column c
   is element 16 * b + 4 * a + c.

Letters: E experts, N rows, G scales of a row.
"""

import torch

_TILE_ROWS, _TILE_COLUMNS = 128, 4
_BLOCK_ROWS = {128: 32, 64: 16}  # rows of the epilogue's tile -> rows of a block of step 2


def _stored_order(num_rows: int, gated: bool, epilogue_tile_m: int, device: torch.device) -> torch.Tensor:
    """[N] int64: the row, in order, that each stored row holds."""
    block = _BLOCK_ROWS.get(epilogue_tile_m)
    if block is None:
        raise ValueError(f"epilogue_tile_m ({epilogue_tile_m}) is not one of {', '.join(map(str, _BLOCK_ROWS))}")
    if num_rows % block:
        raise ValueError(f"the number of rows ({num_rows}) is not a multiple of {block}, the rows of a shuffled block")
    rows = torch.arange(num_rows, device=device)
    if gated:
        rows = rows.view(2, -1).t().reshape(-1)
    return rows.view(-1, 8, block // 8).transpose(1, 2).reshape(-1)


def unshuffle_rows(shuffled: torch.Tensor, *, gated: bool, epilogue_tile_m: int = 128) -> torch.Tensor:
    """Undo the shuffling of a weight's rows, or of a bias.

    Args:
        shuffled: [E, N, ...], any dtype. gated: it is w1 or its bias, with an up and a gate half.
        epilogue_tile_m: rows of the kernel's tile, 128 or 64, as it was given for shuffling.
    Returns: a copy with rows in order, [up; gate] if gated.
    Errors: ValueError for rows that do not fill blocks, or another `epilogue_tile_m`. Local, no host sync.
    """
    if shuffled.dim() < 2:
        raise ValueError(f"the weight is {tuple(shuffled.shape)}; [experts, rows, ...] needed")
    order = _stored_order(shuffled.shape[1], gated, epilogue_tile_m, shuffled.device)
    stored = shuffled.view(torch.uint8) if shuffled.element_size() == 1 else shuffled
    return torch.empty_like(stored).index_copy_(1, order, stored).view(shuffled.dtype)


def untile_scales(tiled: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """Undo the tiling of block scales.

    Args:
        tiled: E * N' * G' bytes in any shape that begins with E, in tiles of 128 rows and 4 columns, where N' and G'
            are N and G rounded up to whole tiles. num_rows: N. num_columns: G.
    Returns: [E, N, G], a copy in the same dtype.
    Errors: ValueError for another number of bytes. Local, no host sync.
    """
    tiles, columns = -(-num_rows // _TILE_ROWS), -(-num_columns // _TILE_COLUMNS)
    needed = tiles * _TILE_ROWS * columns * _TILE_COLUMNS
    if tiled.element_size() != 1 or tiled.dim() < 2 or tiled[0].numel() != needed:
        raise ValueError(
            f"the scales are {tuple(tiled.shape)} {tiled.dtype}; one byte each and {needed} for each expert needed for "
            f"{num_rows} rows of {num_columns}"
        )
    parts = tiled.view(torch.uint8).reshape(-1, tiles, columns, 32, _TILE_ROWS // 32, _TILE_COLUMNS)
    rows = parts.permute(0, 1, 4, 3, 2, 5).reshape(-1, tiles * _TILE_ROWS, columns * _TILE_COLUMNS)
    return rows[:, :num_rows, :num_columns].contiguous().view(tiled.dtype)


def unshuffle_weight(
    shuffled: torch.Tensor, shuffled_scale: torch.Tensor, *, gated: bool, epilogue_tile_m: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo all steps for a packed FP4 weight and its scales; what it returns is what the calls here take.

    Args:
        shuffled: [E, N, K / 2], one byte each. shuffled_scale: [E, N, K / 16] or [E, N, K / 32], one byte each, tiled.
        gated, epilogue_tile_m: as in `unshuffle_rows`.
    Returns: the weight and its scales, copies in the same shapes and dtypes.
    Errors: as of `unshuffle_rows` and `untile_scales`. Local, no host sync.
    """
    if shuffled_scale.dim() != 3 or shuffled_scale.shape[:2] != shuffled.shape[:2]:
        raise ValueError(
            f"the scales are {tuple(shuffled_scale.shape)}; [experts, rows, groups] needed beside a weight of "
            f"{tuple(shuffled.shape)}"
        )
    scale = untile_scales(shuffled_scale, shuffled_scale.shape[1], shuffled_scale.shape[2])
    weight = unshuffle_rows(shuffled, gated=gated, epilogue_tile_m=epilogue_tile_m)
    return weight, unshuffle_rows(scale, gated=gated, epilogue_tile_m=epilogue_tile_m)
