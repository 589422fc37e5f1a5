"""The interface between the transport and one mode of DeepEP.

Letters: T tokens on this rank, N received rows, K top-k, H hidden, R ranks, M max_tokens_per_rank, L physical experts
of the rank that has most. DeepEP needs equally many experts on every rank: it gets R * L, of which expert e is on
rank e // L, and no token chooses those that do not exist.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from ep_moe.group import EPGroup
from ep_moe.layout import TokenRows
from ep_moe.quant import Quantized
from ep_moe.transport.headers import Header
from ep_moe.transport.payload import RowFormat


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """A rank's tokens, as a mode sends them."""

    x: torch.Tensor | Quantized  # [T, H]
    format: RowFormat
    topk_ids: torch.Tensor  # [T, K] DeepEP's ids, each at most once in a row, -1 none
    topk_weights: torch.Tensor  # [T, K] float32, repeats merged, 0 where the id is -1
    headers: list[Header]  # of all ranks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """The rows of a round at their experts' rank, sorted by source rank and token (low latency: of each expert)."""

    rows: TokenRows  # N rows, of which a mode wants [N, H] back, weighted and summed by `rows.topk_weights`
    num_pairs: int  # upper bound of the (row, expert) pairs


class Exchange(Protocol):
    """One mode of DeepEP, made of a `Library`, group, config and L. `round_` is the mode's own state of a round.

    Attributes:
        most_topk: of its kernels.
        sum_order: the name of its order of sums, as `ep_moe.testing` knows it.
        casts: whether DeepEP quantizes, so that `Outgoing.x` is [T, H] in the model's dtype.
    """

    most_topk: int
    sum_order: str
    casts: bool

    def send(self, outgoing: Outgoing) -> Any:
        """Begin a round; returns its state. Collective."""
        ...

    def receive(self, round_: Any) -> Arrived:
        """Wait, on the device or on the host, for the rows of all ranks. Collective."""
        ...

    def count(self, round_: Any) -> int:
        """N of a round, for which it is received if it has not been. Collective if so."""
        ...

    def send_back(self, round_: Any, rows: torch.Tensor) -> None:
        """Return [N, H] bfloat16, a row for each of `Arrived.rows`. Collective."""
        ...

    def receive_back(self, round_: Any) -> torch.Tensor:
        """[T, H] bfloat16, the sums at the source ranks, rounded. Collective."""
        ...

    def destroy(self) -> None:
        """Free DeepEP's buffers. Local."""
        ...


def check_common(dtype: torch.dtype, group: EPGroup) -> None:
    """Raise for what no mode of DeepEP carries."""
    if dtype is not torch.bfloat16:
        raise ValueError(f"dtype ({dtype}): DeepEP's combine sums torch.bfloat16 alone")
    if group.process_group is None:
        raise RuntimeError("transport 'deepep' needs a process group, which EPGroup.single does not make")


@contextlib.contextmanager
def without_fill() -> Iterator[None]:
    """Turn off torch's filling of new memory, which `torch.use_deterministic_algorithms` brings.

    DeepEP allocates on this stream and writes on its own, which does not wait for a fill, so that the fill may be last:
    V2 asserts that it is off, and V1's layout of a dispatch held 2^31 - 1 tokens.
    """
    settings: Any = torch.utils.deterministic
    filling = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filling
