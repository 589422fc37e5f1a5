"""Quantised activations: kernel and torch, bit for bit."""

import math

import pytest
import torch

from ep_moe.quant import dequantise, fp8, get_scheme, triton
from ep_moe.testing import assert_same_bits, poisoned_memory
from interpreted.common import DEVICE, generator

SCHEMES = ["fp8_tensor", "fp8_tensor_static", "fp8_token", "fp8_block", "fp8_block_64x48", "fp8_block_16x16"]


def quantise_both(x: torch.Tensor, name: str) -> tuple:
    """What the kernel and torch make of x, a row of which may be followed by a gap."""
    scheme = get_scheme(name.removesuffix("_static"))
    static = torch.tensor([0.003]) if name.endswith("_static") else None
    expected = fp8.quantise(x, scheme, static)
    placed = x.as_strided((x.shape[0], x.stride(0)), (x.stride(0), 1)).to(DEVICE)[:, : x.shape[1]]
    with poisoned_memory():
        actual = triton.quantise(placed, scheme, None if static is None else static.to(DEVICE))
    return actual, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [16, 48, 144, 2880])
@pytest.mark.parametrize("tokens", [0, 1, 37])
@pytest.mark.parametrize("name", SCHEMES)
def test_quantise(name: str, tokens: int, width: int, dtype: torch.dtype) -> None:
    """Magnitudes from 1e-3 to 10, and numbers next to those where e4m3 rounds the other way; rows of zeros too."""
    x = torch.randn(tokens, width + 16, generator=generator(f"{tokens} {width}")) * torch.logspace(-3, 1, width + 16)
    if tokens > 2:
        x[1] = 0
        x[2] = 448 * (1 + torch.arange(width + 16) % 32 / 16) / 2 ** (torch.arange(width + 16) % 19)
    actual, expected = quantise_both(x.to(dtype)[:, :width], name)
    assert_same_bits(actual.values, expected.values, "values")
    assert_same_bits(actual.scale, expected.scale, "scale")
    assert actual.scale.stride() == expected.scale.stride()
    assert actual.values.is_contiguous()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_not_finite(name: str, bad: float) -> None:
    x = torch.randn(4, 272, generator=generator(name))
    x[2, 130] = bad
    actual, expected = quantise_both(x, name)
    torch.testing.assert_close(dequantise(actual).cpu(), dequantise(expected), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(actual.scale.cpu(), expected.scale, rtol=0, atol=0, equal_nan=True)
    assert bool(dequantise(actual)[2].isnan().any()) == (not (name.endswith("_static") and math.isinf(bad)))


def test_columns_that_are_apart() -> None:
    x = torch.randn(144, 5, generator=generator("apart")).t()
    expected = fp8.quantise(x, get_scheme("fp8_block"), None)
    actual = triton.quantise(x.contiguous().t().to(DEVICE).t(), get_scheme("fp8_block"), None)
    assert_same_bits(actual.values, expected.values, "values")
