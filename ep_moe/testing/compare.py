"""Comparisons: moved data bit for bit, arithmetic by the worst row's relative error."""

import torch

ROW_ERROR_LIMITS = {
    "float32": 1e-5,
    "float16": 2e-3,
    "bfloat16": 1e-2,
    "fp8": 3e-2,
}  # worst row's relative L2 error of an expert kernel against the oracle of the same scheme


def worst_row_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative L2 error of a row, over the last dimension, in float64.

    A global error hides a lost token; its row's error is 1.0. For rows expected to be zero the absolute norm is taken.
    NaN anywhere gives NaN, for which every `<` is false. No rows give 0.
    """
    a, e = actual.detach().cpu().double(), expected.detach().cpu().double()
    if a.shape != e.shape:
        raise ValueError(f"shapes differ: {tuple(a.shape)} and {tuple(e.shape)}")
    if a.numel() == 0:
        return 0.0
    norm = e.norm(dim=-1)
    error = (a - e).norm(dim=-1) / torch.where(norm > 0, norm, 1.0)
    return float(error.max()) if not error.isnan().any() else float("nan")


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise AssertionError unless shape, dtype and every bit agree; the message has the first place that differs."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    width = actual.dtype.itemsize
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    a, e = (t.detach().cpu().contiguous().view(bits) for t in (actual, expected))
    if not torch.equal(a, e):
        places = torch.nonzero(a != e)
        first = tuple(places[0].tolist())
        raise AssertionError(
            f"{what}: {len(places)} of {a.numel()} elements differ, first at {first}: "
            f"{actual.detach().cpu()[first].item()}, expected {expected.detach().cpu()[first].item()}"
        )
