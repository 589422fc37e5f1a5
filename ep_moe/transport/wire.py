"""One token as bytes: how a row with its scales, ids and weights is packed for a byte-wise all-to-all.

Letters: N rows, H hidden, G scale groups, K top-k. A row is [values | scales G x 4 | ids K x 4 | weights K x 4], its
length rounded up to 16 bytes; gloo cannot carry 8-bit floats, bytes go everywhere.
"""

import dataclasses
import zlib

import torch

from ep_moe.quant import Quantised, QuantScheme
from ep_moe.routing import Routing


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """The places of a row's parts."""

    scheme: str
    dtype: torch.dtype  # of the values
    hidden: int
    num_groups: int
    num_topk: int

    @classmethod
    def of(cls, scheme: QuantScheme, dtype: torch.dtype, hidden: int, num_topk: int) -> "RowFormat":
        """The format of rows in `scheme`, or in `dtype` where the scheme leaves the model's."""
        return cls(
            scheme=scheme.name,
            dtype=scheme.dtype or dtype,
            hidden=hidden,
            num_groups=scheme.num_groups(hidden),
            num_topk=num_topk,
        )

    @property
    def fingerprint(self) -> int:
        """A number that differs where formats differ, for ranks to compare; of 32 bits."""
        return zlib.crc32(repr(self).encode())

    @property
    def value_bytes(self) -> int:
        """Bytes of the H values."""
        return self.hidden * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row."""
        return -(-(self.value_bytes + 4 * self.num_groups + 8 * self.num_topk) // 16) * 16

    def write(self, x: torch.Tensor | Quantised, routing: Routing, token: torch.Tensor) -> torch.Tensor:
        """Return the rows of tokens `token` [N] as [N, row_bytes] uint8."""
        buffer = torch.zeros(token.shape[0], self.row_bytes, dtype=torch.uint8, device=token.device)
        values = x.values if isinstance(x, Quantised) else x
        parts = [values.contiguous().view(torch.uint8)[token]]
        if isinstance(x, Quantised):
            parts.append(x.scale[token].contiguous().view(torch.uint8))
        parts.append(routing.topk_ids[token].int().contiguous().view(torch.uint8))
        parts.append(routing.topk_weights[token].contiguous().view(torch.uint8))
        start = 0
        for part in parts:
            buffer[:, start : start + part.shape[1]] = part
            start += part.shape[1]
        return buffer

    def read(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, Routing]:
        """Split [N, row_bytes] uint8 into values [N, H], scale [N, G] or None, and the routing: views, no copies."""
        scales, ids = self.value_bytes, self.value_bytes + 4 * self.num_groups
        weights = ids + 4 * self.num_topk
        values = buffer[:, :scales].view(self.dtype)
        scale = buffer[:, scales:ids].view(torch.float32) if self.num_groups else None
        routing = Routing(
            topk_ids=buffer[:, ids:weights].view(torch.int32),
            topk_weights=buffer[:, weights : weights + 4 * self.num_topk].view(torch.float32),
        )
        return values, scale, routing
