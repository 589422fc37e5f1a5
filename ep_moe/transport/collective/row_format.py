"""The byte layout of a token's row, with its scales, ids and weights, for an all-to-all of bytes.

Letters: T tokens on this rank, N rows, R ranks, H hidden, V stored values of a row, G scale groups, K top-k. A row is
[values | scales | ids K x 4 | weights K x 4]; values and scales are padded to 4 bytes each, and the row to 64, so that
the strides of all its views are multiples of 16 elements. Rows are sent as bytes because gloo has no 8-bit floats.
"""

import dataclasses
import zlib

import torch

from ep_moe.quant import Quantized, QuantScheme, as_bytes
from ep_moe.routing import Routing
from ep_moe.transport.collective.send_plan import SendPlan

ROW_ALIGNMENT_BYTES = 64
WORD_BYTES = 4


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """The sizes, dtypes and byte offsets of a row's parts."""

    scheme: str
    dtype: torch.dtype  # of the values
    hidden: int
    value_bytes: int  # of the V values
    num_groups: int
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

    def fingerprint(self, max_num_tokens: int) -> int:
        """A 32-bit checksum (CRC-32) of the format and of the most tokens of a rank, for ranks to compare."""
        return zlib.crc32(repr((self, max_num_tokens)).encode())

    @property
    def scales_at(self) -> int:
        """The byte offset of a row's scales."""
        return _round_up(self.value_bytes, WORD_BYTES)

    @property
    def ids_at(self) -> int:
        """The byte offset of a row's ids."""
        return self.scales_at + _round_up(self.num_groups * self.scale_dtype.itemsize, WORD_BYTES)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a row's values and scales."""
        return self.value_bytes + self.num_groups * self.scale_dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row."""
        return _round_up(self.ids_at + 2 * WORD_BYTES * self.num_topk, ROW_ALIGNMENT_BYTES)

    def write(
        self, x: torch.Tensor | Quantized, routing: Routing, plan: SendPlan, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy every token to its rows of the send buffer.

        Args:
            x: [T, H], or quantized. routing: of these tokens. plan: their destinations.
            num_rows: N, the sum of the header's row counts.
        Returns: the rows [N, row_bytes] uint8, whose padding is undefined; and [T, R] int32, each token's row for each
        rank, -1 none. Local, on the current stream; no host sync on a GPU.
        """
        if plan.place.is_cuda:  # Triton is imported only here: it exists only on Linux and is slow to import
            from ep_moe.transport.collective import launchers

            return launchers.write_rows(x, routing, plan, num_rows=num_rows, row_bytes=self.row_bytes)
        token_to_row = plan.token_to_row()
        token, rank = torch.nonzero(token_to_row >= 0, as_tuple=True)
        parts = {0: x.values, self.scales_at: as_bytes(x.scale)} if isinstance(x, Quantized) else {0: x}
        parts |= {self.ids_at: routing.topk_ids.int(), self.ids_at + WORD_BYTES * self.num_topk: routing.topk_weights}
        buffer = torch.empty(num_rows, self.row_bytes, dtype=torch.uint8, device=token.device)
        row = token_to_row[token, rank].long()
        for place, part in parts.items():
            # cloned: a single column may count as contiguous although torch cannot view it as bytes
            whole = part.clone(memory_format=torch.contiguous_format).view(torch.uint8)
            buffer[row, place : place + whole.shape[1]] = whole[token]
        return buffer, token_to_row

    def read(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, Routing]:
        """Split [N, row_bytes] uint8 into values [N, V], scale [N, G] or None, and the routing: views, no copies."""
        scales, ids = self.scales_at, self.ids_at
        weights, scales_end = ids + WORD_BYTES * self.num_topk, scales + self.num_groups * self.scale_dtype.itemsize
        values = buffer[:, : self.value_bytes].view(self.dtype)
        scale = buffer[:, scales:scales_end].view(self.scale_dtype) if self.num_groups else None
        routing = Routing(
            topk_ids=buffer[:, ids:weights].view(torch.int32),
            topk_weights=buffer[:, weights : weights + WORD_BYTES * self.num_topk].view(torch.float32),
        )
        return values, scale, routing
