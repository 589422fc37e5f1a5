"""What a result must keep to be timed: errors and their limits."""

from collections.abc import Iterable, Mapping

import torch


def largest(values: Iterable[float]) -> float:
    """The largest number, NaN where one of them is, which `max` may pass over. Local."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def broken_bounds(bounds: Mapping[str, tuple[float, float]]) -> list[str]:
    """Name what exceeds its limit, or is NaN: "gathered worst_row_error (1) exceeds 0.01".

    Args:
        bounds: by name the error and its limit.
    Local.
    """
    return [f"{name} ({error:.3g}) exceeds {limit:g}" for name, (error, limit) in bounds.items() if not error <= limit]
