"""A round's rows in the forms that DeepEP carries.

DeepEP sends bfloat16 rows, or rows of one-byte values with 32-bit scales. Every scheme is sent in one of these, bit for
bit: `pair` gives values and scales in bytes of 8 and words of 32 bits, `words` puts both into one bfloat16 row.

Letters: T tokens, N rows, H hidden, V stored values of a row, G scale groups, W elements of a bfloat16 row.
"""

import dataclasses

import torch

from ep_moe.quant import Quantized, QuantScheme

WORD_BYTES = 4
ROW_BYTES_MULTIPLE = 32  # V1's intranode kernels copy a row in two halves of 16-byte vectors


def round_up(size: int, multiple: int) -> int:
    """The least multiple that is not below `size`. Local."""
    return -(-size // multiple) * multiple


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PayloadFormat:
    """Sizes and dtypes of one token's values and scales."""

    scheme: str
    dtype: torch.dtype  # of the values
    hidden: int
    value_bytes: int
    num_groups: int
    scale_dtype: torch.dtype

    @classmethod
    def of(cls, scheme: QuantScheme, dtype: torch.dtype, hidden: int) -> "PayloadFormat":
        """The format of rows in `scheme`, or in the model's `dtype` if the scheme has none."""
        payload = scheme.payload
        return cls(
            scheme=scheme.name,
            dtype=payload.dtype or dtype,
            hidden=hidden,
            value_bytes=payload.values_bytes(hidden, dtype),
            num_groups=payload.num_groups(hidden),
            scale_dtype=payload.scale_dtype,
        )

    @property
    def scales_at(self) -> int:
        """The byte offset of the scales in `words`."""
        return round_up(self.value_bytes, WORD_BYTES)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales."""
        return self.num_groups * self.scale_dtype.itemsize

    def words(self, x: torch.Tensor | Quantized, width: int) -> torch.Tensor:
        """[T, W = width] bfloat16: values, scales, zeros. Local, no host sync.

        Example: hidden 7168 in fp8_block is 7168 bytes of values and 224 of scales in a row of 14336 bytes.
        """
        if isinstance(x, torch.Tensor):
            return padded(x, width)
        rows = torch.zeros(x.values.shape[0], 2 * width, dtype=torch.uint8, device=x.values.device)
        rows[:, : self.value_bytes] = _bytes(x.values)
        rows[:, self.scales_at : self.scales_at + self.scale_bytes] = _bytes(x.scale)
        return rows.view(torch.bfloat16)

    def read_words(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values [N, V] and scale [N, G] or None, views of [N, W] bfloat16."""
        raw = rows.view(torch.uint8)
        values = raw[:, : self.value_bytes].view(self.dtype)
        if not self.num_groups:
            return values, None
        return values, raw[:, self.scales_at : self.scales_at + self.scale_bytes].view(self.scale_dtype)

    def pair(self, x: torch.Tensor | Quantized, width: int) -> "torch.Tensor | tuple[torch.Tensor, torch.Tensor]":
        """What V1's `dispatch` and V2's take: [T, width] bfloat16, or values [T, n] e4m3 and scales [T, m] float32.

        n and m are padded to 32 bytes and to 4; a byte or word of them may hold any format's bits. Local, no host sync.
        """
        if isinstance(x, torch.Tensor):
            return padded(x, width)
        values = padded(_bytes(x.values), round_up(self.value_bytes, ROW_BYTES_MULTIPLE))
        scales = padded(_bytes(x.scale), round_up(self.scale_bytes, WORD_BYTES))
        return values.view(torch.float8_e4m3fn), scales.view(torch.float32)

    def read_pair(
        self, rows: "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values [N, V] and scale [N, G] or None, views of what `dispatch` returns, of any row strides."""
        if isinstance(rows, torch.Tensor):
            return rows[:, : self.hidden], None
        values, scales = rows
        scales = scales if scales.stride(-1) == 1 else scales.contiguous()
        return (
            values.view(torch.uint8)[:, : self.value_bytes].view(self.dtype),
            scales.view(torch.uint8)[:, : self.scale_bytes].view(self.scale_dtype),
        )
