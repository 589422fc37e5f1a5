"""A round's rows in the forms that DeepEP carries.

DeepEP sends bfloat16 rows, or rows of one-byte values with 32-bit scales. Every scheme is sent in one of these, bit for
bit: `pair` gives values and scales in bytes of 8 and words of 32 bits, `words` puts both into one bfloat16 row.

Letters: T tokens, N rows, H hidden, V stored values of a row, G scale groups, W elements of a bfloat16 row.
"""

import torch

from ep_moe.quant import Quantized
from ep_moe.transport.payload import WORD_BYTES, RowFormat, round_up

ROW_BYTES_MULTIPLE = 32  # V1's intranode kernels copy a row in two halves of 16-byte vectors


def padded(rows: torch.Tensor, width: int) -> torch.Tensor:
    """`rows` [N, n] as contiguous [N, width], with zeros behind; the tensor itself if it fits. Local, no host sync."""
    if rows.shape[1] == width:
        return rows.contiguous()
    wide = rows.new_zeros(rows.shape[0], width)
    wide[:, : rows.shape[1]] = rows
    return wide


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[T, n] of any dtype as [T, n * itemsize] uint8; a copy, since one column may count as contiguous and not be."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def words(row_format: RowFormat, x: torch.Tensor | Quantized, width: int) -> torch.Tensor:
    """[T, W = width] bfloat16: values, scales, zeros. Local, no host sync.

    Example: hidden 7168 in fp8_block is 7168 bytes of values and 224 of scales in a row of 14336 bytes.
    """
    if isinstance(x, torch.Tensor):
        return padded(x, width)
    rows = torch.zeros(x.values.shape[0], 2 * width, dtype=torch.uint8, device=x.values.device)
    rows[:, : row_format.value_bytes] = _bytes(x.values)
    rows[:, row_format.scales_at :][:, : row_format.scale_bytes] = _bytes(x.scale)
    return rows.view(torch.bfloat16)


def read_words(row_format: RowFormat, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values [N, V] and scale [N, G] or None, views of [N, W] bfloat16."""
    raw = rows.view(torch.uint8)
    values = raw[:, : row_format.value_bytes].view(row_format.dtype)
    if not row_format.num_groups:
        return values, None
    return values, raw[:, row_format.scales_at :][:, : row_format.scale_bytes].view(row_format.scale_dtype)


def pair(
    row_format: RowFormat, x: torch.Tensor | Quantized, width: int
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The rows of V1's and V2's `dispatch`: [T, width] bfloat16, or values [T, n] e4m3 and scales [T, m] float32.

    n and m are padded to 32 bytes and to 4; a byte or word of them may hold any format's bits. Local, no host sync.
    """
    if isinstance(x, torch.Tensor):
        return padded(x, width)
    values = padded(_bytes(x.values), round_up(row_format.value_bytes, ROW_BYTES_MULTIPLE))
    scales = padded(_bytes(x.scale), round_up(row_format.scale_bytes, WORD_BYTES))
    return values.view(torch.float8_e4m3fn), scales.view(torch.float32)


def read_pair(
    row_format: RowFormat, rows: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values [N, V] and scale [N, G] or None, views of what `dispatch` returns, of any row strides."""
    if isinstance(rows, torch.Tensor):
        return rows[:, : row_format.hidden], None
    values, scales = rows
    scales = scales if scales.stride(-1) == 1 else scales.contiguous()
    return (
        values.view(torch.uint8)[:, : row_format.value_bytes].view(row_format.dtype),
        scales.view(torch.uint8)[:, : row_format.scale_bytes].view(row_format.scale_dtype),
    )
