"""The work of ranks that generate in step: plans, the shapes of decode passes, their capture as CUDA graphs.

A plan is equal on all ranks. It says what every rank does next, so that ranks need not agree on anything else: which of
them sit out a prefill, and which capture a pass that the others only take part in.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

LEAST_CAPACITY = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The key of a captured pass: rows of its bucket, capacity in positions, and whether it samples."""

    rows: int
    capacity: int
    sampled: bool


def pass_shape(num_rows: int, num_positions: int, sampled: bool) -> Shape:
    """The shape of decode passes for the first rows of a rank, 0 or more, up to a number of positions. Local."""
    return Shape(rows=bucket_of(num_rows), capacity=bucket_of(num_positions, LEAST_CAPACITY), sampled=sampled)


def bucket_of(number: int, least: int = 1) -> int:
    """The power of two that a number of rows or positions is rounded up to. Local."""
    return max(1 << max(number - 1, 0).bit_length(), least)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowStart:
    """A sequence that starts in a row of a rank.

    Args:
        row: its index, in which no sequence runs. prompt: token ids, one or more.
        max_new_tokens: 1 or more. temperature: 0 takes the likeliest token. top_p: in (0, 1]. seed: of the sampling.
    """

    row: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowsPlan:
    """A prefill of new rows, or a few decode passes; each field but `passes` has an entry for each rank.

    Args:
        ended: rows that end before anything else because their client has left.
        starts: sequences to prefill, in consecutive rows; their prompts, padded to the longest, have at most
            max_tokens_per_rank tokens.
        passes: decode passes, 0 in a plan with starts.
        shapes: of these passes.
    """

    ended: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[RowStart, ...], ...]
    passes: int = 0
    shapes: tuple[Shape, ...] = ()


def new_pool() -> Any:
    """A memory pool for graphs, which can share it because they are never replayed at the same time. Local."""
    return torch.cuda.graph_pool_handle()


def capture(call: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Capture a call, which is not run, as a CUDA graph; returns its replay. Local, host sync.

    Errors: RuntimeError for a call that cannot be captured, for example one with a host sync.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local: NCCL's thread queries events meanwhile, which would invalidate a global capture
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            call()
    except RuntimeError as error:
        raise RuntimeError(
            f"a decode pass cannot be captured as a CUDA graph, decode_graphs=False decodes without graphs: {error}"
        ) from error
    return graph.replay
