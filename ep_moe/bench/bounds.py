"""Errors and limits that a result must meet before it is timed."""

from collections.abc import Iterable, Mapping

import torch


def largest(values: Iterable[float]) -> float:
    """The largest value, NaN if any is NaN, which Python's `max` may skip. Local."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def broken_bounds(bounds: Mapping[str, tuple[float, float]]) -> list[str]:
    """A line for each error that exceeds its limit or is NaN: "gathered worst_row_error (1) exceeds 0.01".

    Args:
        bounds: name -> error and its limit.
    Local.
    """
    return [f"{name} ({error:.3g}) exceeds {limit:g}" for name, (error, limit) in bounds.items() if not error <= limit]
