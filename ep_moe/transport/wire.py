"""One token as bytes: how a row with its scales, ids and weights is packed for a byte-wise all-to-all.

Letters: T tokens on this rank, N rows, R ranks, H hidden, G scale groups, K top-k. A row is [values | scales G x 4 |
ids K x 4 | weights K x 4], its length rounded up to 64 bytes, so that the strides of all its views are multiples of 16
elements; gloo cannot carry 8-bit floats, bytes go everywhere.
"""

import dataclasses
import zlib

import torch

from ep_moe.quant import Quantised, QuantScheme
from ep_moe.routing import Routing
from ep_moe.transport.plan import SendPlan

ROW_ALIGNMENT_BYTES = 64


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
        used = self.value_bytes + 4 * self.num_groups + 8 * self.num_topk
        return -(-used // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES

    def write(
        self, x: torch.Tensor | Quantised, routing: Routing, plan: SendPlan, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy every token to its rows of the send buffer.

        Args:
            x: [T, H]. routing: of these tokens. plan: where they go. num_rows: N, as the plan's header has it.
        Returns: the rows [N, row_bytes] uint8, with anything behind what a row holds; and [T, R] int32, the row by
        which a token goes to a rank, -1 none. Local, on the current stream; no host sync on a GPU.
        """
        if plan.place.is_cuda:  # only here is Triton imported, which is for Linux alone and takes time
            from ep_moe.transport import triton

            return triton.write_rows(x, routing, plan, num_rows=num_rows, row_bytes=self.row_bytes)
        token_to_row = plan.token_to_row()
        token, rank = torch.nonzero(token_to_row >= 0, as_tuple=True)
        parts = [x.values, x.scale] if isinstance(x, Quantised) else [x]
        parts += [routing.topk_ids.int(), routing.topk_weights]
        # cloned, for a single column may count as contiguous and yet not be viewed as bytes
        whole = torch.cat([p.clone(memory_format=torch.contiguous_format).view(torch.uint8) for p in parts], dim=1)
        buffer = torch.empty(num_rows, self.row_bytes, dtype=torch.uint8, device=whole.device)
        buffer[token_to_row[token, rank].long(), : whole.shape[1]] = whole[token]
        return buffer, token_to_row

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
