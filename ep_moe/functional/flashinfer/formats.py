"""Tensors of FlashInfer's FP4 calls as the runtime's own formats, and weights of its Blackwell kernels in row order.

FP4 values are e2m1, two in a byte, the first in the low four bits. Which format a tensor has follows from the number of
its scales: one e4m3 scale for 16 elements is NVFP4, one e8m0 scale for 32 is MXFP4, or MXFP8 if values are e4m3.

Before a call to its TensorRT-LLM kernels, FlashInfer's users reorder FP4 weights in three steps:
1. rows of a gated w1, [up; gate], alternate: up 0, gate 0, up 1, gate 1, ...;
2. in each block of 32 rows, row 4 * a + b moves to 8 * b + a (epilogue tiles of 128 rows; of 64, in blocks of 16 rows,
   2 * a + b moves to 8 * b + a);
3. scales, reordered as their rows, are stored in tiles of 128 rows and 4 columns, in which row 32 * a + b and column c
   is element 16 * b + 4 * a + c.

Letters: T tokens, H hidden, E experts, L local experts, N and K rows and columns of a weight, G scales of a row.
"""

import torch

from ep_moe.functional.common import check_like, served_scheme
from ep_moe.quant import Quantized, QuantScheme, StoredMatrix, dequantize, get_scheme

NVFP4, MXFP4, MXFP8 = "nvfp4", "mxfp4", "mxfp8"
_GROUPS = {16: NVFP4, 32: MXFP4}  # columns that share a scale -> format
_SCALE_DTYPES = {NVFP4: torch.float8_e4m3fn, MXFP4: torch.float8_e8m0fnu, MXFP8: torch.float8_e8m0fnu}
# formats of weights and tokens -> schemes that compute them, the first one as the tokens say. All others expand the
# tokens to bfloat16, which holds every product of an FP4 or e4m3 value and its scale
_SCHEMES = {
    (NVFP4, NVFP4): ("nvfp4", "nvfp4_w4a16"),
    (MXFP4, MXFP8): ("mxfp4_w4a8", "mxfp4_w4a16"),
}
_TILE_ROWS, _TILE_COLUMNS = 128, 4
_BLOCK_ROWS = {128: 32, 64: 16}  # rows of the epilogue's tile -> rows of a block of step 2


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of one-byte elements as another such dtype: callers hold FP4 and scales under several. Local."""
    return tensor if tensor.dtype == dtype or tensor.element_size() != 1 else tensor.view(dtype)


def stored_weight(values: torch.Tensor, scale: torch.Tensor, name: str, scale_name: str) -> tuple[str, StoredMatrix]:
    """A packed weight and its scales, in the order of their rows.

    Args:
        values: [L, N, K / 2], any dtype of one byte. scale: [L, N, K / 16] or [L, N, K / 32], any dtype of one byte.
        name, scale_name: in errors.
    Returns: NVFP4 or MXFP4, and the matrix, without a global scale.
    Errors: ValueError for other shapes and dtypes. Local; its tensors are views.
    """
    if values.dim() != 3 or values.element_size() != 1:
        raise ValueError(f"{name} is {tuple(values.shape)} {values.dtype}; [experts, rows, columns / 2] uint8 needed")
    experts, rows, columns = values.shape[0], values.shape[1], 2 * values.shape[2]
    shapes = {(experts, rows, columns // group): kind for group, kind in _GROUPS.items() if columns % group == 0}
    kind = next((kind for shape, kind in shapes.items() if shape == tuple(scale.shape)), None)
    if kind is None or scale.element_size() != 1:
        raise ValueError(
            f"{scale_name} is {tuple(scale.shape)} {scale.dtype}; one byte each, "
            f"{' or '.join(map(str, shapes))} needed beside {name} {tuple(values.shape)}"
        )
    return kind, StoredMatrix(values.detach().view(torch.uint8), scale=scale.detach().view(_SCALE_DTYPES[kind]))


def tokens_of(
    hidden_states: torch.Tensor,
    scale: torch.Tensor | None,
    *,
    hidden: int,
    weights: str,
    per_token_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor | Quantized, QuantScheme]:
    """Tokens as an input of `local_moe`, and the scheme that computes them.

    Args:
        hidden_states: [T, H] bfloat16, [T, H / 2] of one byte (NVFP4) or [T, H] of one byte (MXFP8).
        scale: their block scales, None for bfloat16; a flat tensor of as many elements is taken as [T, groups].
        hidden: H. weights: NVFP4 or MXFP4.
        per_token_scale: [T] float32 or None, multiplies each token; the product is rounded to bfloat16.
    Errors: ValueError for other shapes and dtypes. Local, no host sync.
    """
    num_tokens = hidden_states.shape[0]
    quantized, kind = _quantized(hidden_states, scale, hidden), "none"
    if quantized is not None:
        kind = MXFP8 if quantized.scheme.name == MXFP8 else NVFP4
    weights_alone = f"{weights}_w4a16"
    names = _SCHEMES.get((weights, kind), (weights_alone,)) if per_token_scale is None else (weights_alone,)
    scheme = served_scheme(names, hidden_states.device)
    if quantized is None:
        x = hidden_states
    elif scheme.payload == quantized.scheme.payload:
        return Quantized(values=quantized.values, scale=quantized.scale, scheme=scheme), scheme
    else:
        x = dequantize(quantized)
    if per_token_scale is not None:
        check_like(per_token_scale, "per_token_scale", (num_tokens,), (torch.float32,))
        x = x.float() * per_token_scale[:, None]
    return x.to(torch.bfloat16), scheme


def _quantized(hidden_states: torch.Tensor, scale: torch.Tensor | None, hidden: int) -> Quantized | None:
    """Tokens in MXFP8 or NVFP4, None for bfloat16."""
    found = f"hidden_states are {tuple(hidden_states.shape)} {hidden_states.dtype}"
    if hidden_states.dim() != 2:
        raise ValueError(f"{found}; 2 dimensions needed")
    num_tokens, width = hidden_states.shape
    if hidden_states.dtype == torch.bfloat16 and width == hidden:
        if scale is not None:
            raise ValueError(f"hidden_states_scale is given, bfloat16 hidden_states have none: {tuple(scale.shape)}")
        return None
    if hidden_states.element_size() == 1 and width == hidden:
        kind, group, hidden_states = MXFP8, 32, as_dtype(hidden_states, torch.float8_e4m3fn)
    elif hidden_states.element_size() == 1 and 2 * width == hidden:
        kind, group, hidden_states = NVFP4, 16, as_dtype(hidden_states, torch.uint8)
    else:
        raise ValueError(
            f"{found}; [tokens, {hidden}] bfloat16, [tokens, {hidden}] of one byte (MXFP8) or "
            f"[tokens, {hidden // 2}] of one byte (NVFP4) needed beside the weights"
        )
    groups = hidden // group
    if scale is None or scale.element_size() != 1 or scale.numel() != num_tokens * groups:
        given = "missing" if scale is None else f"{tuple(scale.shape)} {scale.dtype}"
        raise ValueError(f"hidden_states_scale is {given}; {(num_tokens, groups)} of one byte needed for {kind}")
    scale = as_dtype(scale.reshape(num_tokens, groups), _SCALE_DTYPES[kind])
    return Quantized(values=hidden_states, scale=scale, scheme=get_scheme(kind))


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
