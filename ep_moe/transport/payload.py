"""The payload of a round: the format of a token's row, which ranks compare, and its layout in an all-to-all of bytes.

A row of bytes is [values | scales | ids K x 4 | weights K x 4]; values and scales are padded to 4 bytes each, and the
row to 64, so that the strides of all its views are multiples of 16 elements. Rows are sent as bytes because gloo has no
8-bit floats.

Letters: T tokens on this rank, N rows, R ranks, H hidden, V stored values of a row, G scale groups, K top-k, B blocks
of tokens.
"""

import dataclasses
import zlib

import torch

from ep_moe.quant import QuantScheme
from ep_moe.routing import Routing

ROW_ALIGNMENT_BYTES = 64
WORD_BYTES = 4


def round_up(size: int, multiple: int) -> int:
    """The least multiple that is not below `size`. Local."""
    return -(-size // multiple) * multiple


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SendPlan:
    """The rows of the send buffer, ordered by (rank, token).

    Token t is sent to rank r as row `block_start[t // block_tokens, r] + place[t, r]`, unless place[t, r] is -1.
    """

    place: torch.Tensor  # [T, R] int32, -1 none
    block_start: torch.Tensor  # [B, R] int32
    block_tokens: int

    def token_to_row(self) -> torch.Tensor:
        """[T, R] int32: each token's row of the send buffer for each rank, -1 none. Local, no host sync."""
        block = torch.arange(self.place.shape[0], device=self.place.device) // self.block_tokens
        return torch.where(self.place >= 0, self.place + self.block_start[block], -1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """The sizes, dtypes and byte offsets of a row's parts."""

    scheme: str
    dtype: torch.dtype  # of the values
    hidden: int
    value_bytes: int  # of the V values
    num_groups: int  # G
    scale_dtype: torch.dtype
    num_topk: int

    @classmethod
    def of(cls, scheme: QuantScheme, dtype: torch.dtype, hidden: int, num_topk: int) -> "RowFormat":
        """The format of rows in `scheme`, or in the model's `dtype` if the scheme has none."""
        payload = scheme.payload
        return cls(
            scheme=scheme.name,
            dtype=payload.dtype or dtype,
            hidden=hidden,
            value_bytes=payload.values_bytes(hidden, dtype),
            num_groups=payload.num_groups(hidden),
            scale_dtype=payload.scale_dtype,
            num_topk=num_topk,
        )

    def fingerprint(self, max_num_tokens: int, *, cast: bool = False) -> int:
        """A 32-bit checksum (CRC-32) for ranks to compare.

        Args: max_num_tokens: the most tokens of a rank. cast: the transport quantizes, not `ep_moe.quant`.
        """
        return zlib.crc32(repr((self, max_num_tokens, cast)).encode())

    @property
    def scales_at(self) -> int:
        """The byte offset of a row's scales."""
        return round_up(self.value_bytes, WORD_BYTES)

    @property
    def ids_at(self) -> int:
        """The byte offset of a row's ids."""
        return self.scales_at + round_up(self.scale_bytes, WORD_BYTES)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales."""
        return self.num_groups * self.scale_dtype.itemsize

    @property
    def payload_bytes(self) -> int:
        """Bytes of a row's values and scales."""
        return self.value_bytes + self.scale_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row."""
        return round_up(self.ids_at + 2 * WORD_BYTES * self.num_topk, ROW_ALIGNMENT_BYTES)

    def read(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, Routing]:
        """Split [N, row_bytes] uint8 into values [N, V], scale [N, G] or None, and the routing: views, no copies."""
        scales, ids = self.scales_at, self.ids_at
        weights, scales_end = ids + WORD_BYTES * self.num_topk, scales + self.scale_bytes
        values = buffer[:, : self.value_bytes].view(self.dtype)
        scale = buffer[:, scales:scales_end].view(self.scale_dtype) if self.num_groups else None
        routing = Routing(
            topk_ids=buffer[:, ids:weights].view(torch.int32),
            topk_weights=buffer[:, weights : weights + WORD_BYTES * self.num_topk].view(torch.float32),
        )
        return values, scale, routing
