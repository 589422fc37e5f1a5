"""Integers of 4 and 8 bits packed in int32, as GPTQ, AWQ and compressed-tensors store them, and back.

The first element is in the lowest bits. compressed-tensors packs the columns of a row; GPTQ the rows of the transposed
weight, AWQ its columns, in another order within each int32. All hold unsigned integers.
Letters: N and K rows and columns of a weight, P elements of one int32 (8 of 4 bits, 4 of 8 bits).
"""

import torch

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # column j of 8 is nibble AWQ_ORDER[j]
AWQ_BITS = 4


def elements_per_int32(bits: int) -> int:
    """P. Example: 8 for 4 bits."""
    return 32 // bits


def unpack_columns(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [A, B] to uint8 [A, B * P]: P neighbors of a row in each int32. Local."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(-2)


def unpack_rows(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [A, B] to uint8 [A * P, B]: P neighbors of a column in each int32. Local."""
    return unpack_columns(packed.t().contiguous(), bits).t()


def unpack_awq(packed: torch.Tensor) -> torch.Tensor:
    """int32 [A, B] to uint8 [A, B * 8], in AWQ's order. Local."""
    codes = unpack_columns(packed, AWQ_BITS).unflatten(-1, (-1, 8))
    return codes[..., list(AWQ_ORDER)].flatten(-2)


def pack_columns(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `unpack_columns`; a row whose last int32 is not full is filled with zeros. Local."""
    missing = -codes.shape[-1] % elements_per_int32(bits)
    padded = torch.nn.functional.pad(codes, (0, missing)) if missing else codes
    if bits == AWQ_BITS:
        padded = padded[..., 0::2] | (padded[..., 1::2] << 4)
    words = padded.reshape(-1).view(torch.int32)  # bytes in the order of memory, which is the lowest first
    return words.view(*padded.shape[:-1], -1)


def pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `unpack_rows`. Local."""
    return pack_columns(codes.t().contiguous(), bits).t().contiguous()
