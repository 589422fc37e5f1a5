"""The payload of a round, as the dispatch kernel sends it.

Letters: H hidden, K top-k, G scale groups.
"""

import dataclasses

import torch
import triton

from ep_moe.config import ALIGNMENT
from ep_moe.quant import QuantScheme
from ep_moe.transport.collective.row_format import RowFormat
from ep_moe.transport.layer_tag import signed_word

_FUSED_DTYPES = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """The rows of a round: in a scheme or the model's dtype, with K ids each."""

    scheme: QuantScheme
    dtype: torch.dtype
    hidden: int
    num_topk: int

    def fingerprint(self, max_num_tokens: int) -> int:
        """`RowFormat.fingerprint` as int32, for ranks to compare."""
        row_format = RowFormat.of(self.scheme, self.dtype, self.hidden, self.num_topk)
        return signed_word(row_format.fingerprint(max_num_tokens))

    @property
    def may_be_ll(self) -> bool:
        """Whether few tokens may be sent as LL words: scales, if any, must have 32 bits."""
        return self.scheme.payload.scale_dtype.itemsize == 4

    @property
    def value_words(self) -> int:
        """32-bit words of a row's values."""
        return self.scheme.payload.values_bytes(self.hidden, self.dtype) // 4

    @property
    def num_groups(self) -> int:
        """G, scale groups of a row."""
        return self.scheme.payload.num_groups(self.hidden)

    @property
    def fused_quant(self) -> str:
        """How the send kernel quantizes, "" if it cannot: then `quantize` runs before it."""
        payload = self.scheme.payload
        how = _FUSED_DTYPES.get(payload.dtype, "") if payload.dtype is not None else ""
        if payload.family != "scaled" or payload.granularity not in ("token", "group"):
            return ""
        if payload.granularity == "group" and payload.block[1] & (payload.block[1] - 1):
            return ""
        return f"{how}_power_of_two" if how == "e4m3" and payload.power_of_two else how

    @property
    def group(self) -> int:
        """Elements that share a scale, a power of two: the last group of a row may be short."""
        payload = self.scheme.payload
        return payload.block[1] if payload.granularity == "group" else triton.next_power_of_2(self.hidden)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy if it is not aligned to 16 bytes, as kernels need every pointer."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def is_aligned(rows: torch.Tensor) -> bool:
    """Whether rows can be moved in 16-byte pieces in place: each contiguous, ALIGNMENT elements or a multiple apart."""
    aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) % ALIGNMENT == 0
    return aligned and (rows.stride(1) == 1 or rows.shape[1] == 1)


def aligned_rows(rows: torch.Tensor) -> torch.Tensor:
    """The rows themselves, or a copy that `is_aligned`."""
    return rows if is_aligned(rows) else rows.clone(memory_format=torch.contiguous_format)
