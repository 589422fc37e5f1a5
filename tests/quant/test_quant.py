"""Number formats against a reference that knows the bit patterns of e4m3 and e2m1 and loops over tiles in numpy."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from ep_moe.experts import kernels_compute
from ep_moe.quant import (
    SCHEMES,
    Quantized,
    QuantScheme,
    StoredMatrix,
    TensorFormat,
    as_bytes,
    dequantize,
    dequantize_rows,
    dequantize_weight,
    get_scheme,
    payload_bytes,
    quantize,
    quantize_weight,
    round_trip,
    with_block,
)

QUANTIZED = ["fp8_tensor", "fp8_token", "fp8_block", "fp8_block_64x32", "fp8_block_ue8m0", "int8_token"]
QUANTIZED += ["fp8_tensor_channel", "int8_block"]
MICRO = ["mxfp8", "nvfp4"]
WIDTHS = [2880, 144, 16]
BF16 = torch.bfloat16
WORST_ROW_LIMIT = 0.04  # relative L2, e4m3; a uniformly distributed mantissa gives 2^-4 / sqrt(3) * ~0.72 = 0.026
WORST_ROW_LIMITS = {"fp8_block_ue8m0": 0.045}  # of another format: its scale may be twice the needed one


def _value_of(code: int) -> float:
    """The value of an e4m3 bit pattern: 1 sign, 4 exponent bits with bias 7, 3 mantissa bits, no infinity."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return math.nan if code & 127 == 127 else -magnitude if code & 128 else magnitude


VALUES = np.array([_value_of(code) for code in range(256)])
MAGNITUDES = VALUES[:127]  # ascending: 0 to 448
MIDPOINTS = (MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2  # exact in float64


def _nearest_code(x: np.ndarray) -> np.ndarray:
    """The nearest bit pattern to each value in [-448, 448], ties to the even pattern; a NaN keeps its sign."""
    magnitude = np.abs(x.astype(np.float64))
    below = np.searchsorted(MIDPOINTS, magnitude, side="left")  # midpoints strictly below
    tie = (below < 126) & (magnitude == MIDPOINTS[np.minimum(below, 125)])
    code = np.where(tie & (below % 2 == 1), below + 1, below)
    code = np.where(np.isnan(x), 127, code)
    return (code + 128 * np.signbit(x)).astype(np.uint8)


def _numbers(codes: np.ndarray, name: str) -> np.ndarray:
    """The values of bytes, float32."""
    return codes.view(np.int8).astype(np.float32) if name.startswith("int8") else VALUES[codes].astype(np.float32)


def _largest(name: str) -> np.float32:
    return np.float32(127 if name.startswith("int8") else 448)


def _scale_of(amax: np.float32, name: str) -> np.float32:
    scale = max(amax, np.float32(1e-10)) / _largest(name)
    if name == "fp8_block_ue8m0":
        mantissa, exponent = math.frexp(scale)  # mantissa in [0.5, 1)
        scale = np.float32(2.0 ** (exponent - (mantissa == 0.5)))
    return scale


def _reference(x: np.ndarray, tile: tuple[int, int], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of x [N, K] float32 and one scale for each tile, tile after tile."""
    rows, columns = math.ceil(x.shape[0] / tile[0]), math.ceil(x.shape[1] / tile[1])
    codes, scale = np.zeros(x.shape, np.uint8), np.zeros((rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            place = np.s_[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
            scale[i, j] = _scale_of(np.max(np.abs(x[place])), name)
            clipped = np.clip(x[place] / scale[i, j], -_largest(name), _largest(name))
            integers = name.startswith("int8")
            codes[place] = np.rint(clipped).astype(np.int8).view(np.uint8) if integers else _nearest_code(clipped)
    return codes, scale


TILES = {  # rows and columns that share a scale, of activations and of weights; 0 is all of them
    "fp8_tensor": ((0, 0), (0, 0)),
    "fp8_tensor_channel": ((0, 0), (1, 0)),
    "fp8_token": ((1, 0), (1, 0)),
    "int8_token": ((1, 0), (1, 0)),
    "fp8_block": ((1, 128), (128, 128)),
    "fp8_block_ue8m0": ((1, 128), (128, 128)),
    "int8_block": ((1, 128), (128, 128)),
    "fp8_block_64x32": ((1, 32), (64, 32)),
    "mxfp8": ((1, 32), (1, 32)),
    "nvfp4": ((1, 16), (1, 16)),
}


def _tile(name: str, rows: int, columns: int, *, weights: bool = False) -> tuple[int, int]:
    tile = TILES[name][weights]
    return tile[0] or rows, tile[1] or columns


def _codes(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.uint8).numpy()


def _tokens(num_tokens: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different magnitude, including zeros, nearly zeros and values near the dtype's largest."""
    random = torch.Generator().manual_seed(num_tokens * 10007 + width)
    x = torch.randn(num_tokens, width, generator=random) * 10 ** torch.randn(num_tokens, 1, generator=random)
    x[1] = 0
    x[2] *= 1e-13
    x[3] = x[3] / x[3].abs().max() * (torch.finfo(dtype).max / 1.01)
    return x.to(dtype)


def test_rounding_is_to_nearest_even_and_saturates() -> None:
    exact = MAGNITUDES.astype(np.float32)
    ties = MIDPOINTS.astype(np.float32)
    around = [np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))]
    extreme = np.array([1e-45, 2**-11, 463.9, 464.0, 464.1, 1e5, 3e38, np.inf], np.float32)
    magnitude = np.concatenate([exact, ties, *around, extreme])
    x = np.concatenate([magnitude, -magnitude])[None]
    result = quantize(torch.from_numpy(x), SCHEMES["fp8_tensor"], static_scale=torch.ones(1))
    np.testing.assert_array_equal(_codes(result.values), _nearest_code(np.clip(x, -448, 448)))
    np.testing.assert_array_equal(dequantize(result).numpy(), VALUES[_codes(result.values)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantize_has_the_bits_of_the_reference(name: str, width: int, dtype: torch.dtype) -> None:
    x = _tokens(9, width, dtype)
    before = x.clone()
    codes, tiles = _reference(x.float().numpy(), _tile(name, 9, width), name)
    result = quantize(x, get_scheme(name))
    np.testing.assert_array_equal(_codes(result.values), codes)
    np.testing.assert_array_equal(result.scale.numpy(), np.broadcast_to(tiles, (9, tiles.shape[1])))
    assert result.scale.stride() == (1, 9)
    assert result.values.is_contiguous()
    assert torch.equal(x, before)
    spread = np.repeat(tiles, _tile(name, 9, width)[1], axis=1)[:, :width]
    with np.errstate(over="ignore"):  # what is rounded up beyond the largest float32
        real = _numbers(codes, name) * spread
    np.testing.assert_array_equal(dequantize(result).numpy(), real)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_error_is_half_a_step(name: str, width: int) -> None:
    random = torch.Generator().manual_seed(width)
    x = torch.randn(40, width, generator=random)
    result = quantize(x, get_scheme(name))
    error = (dequantize(result).double() - x.double()).abs()
    largest_scale = result.scale.max(dim=1, keepdim=True).values.double()
    step = torch.maximum(x.double().abs() / 8, largest_scale / 512) if not name.startswith("int8") else largest_scale
    assert bool((error <= 1.00001 * step / 2).all())
    assert float((error.norm(dim=1) / x.double().norm(dim=1)).max()) < WORST_ROW_LIMITS.get(name, WORST_ROW_LIMIT)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_row_of_zeros_is_zeros(name: str) -> None:
    result = quantize(torch.zeros(3, 144), get_scheme(name))
    assert torch.equal(dequantize(result), torch.zeros(3, 144))
    assert torch.equal(result.scale, torch.full_like(result.scale, float(_scale_of(np.float32(0), name))))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", QUANTIZED + MICRO)
def test_no_rows(name: str, width: int) -> None:
    scheme = get_scheme(name)
    for static in [None, torch.ones(1)] if scheme.payload.granularity == "tensor" else [None]:
        result = quantize(torch.empty(0, width, dtype=torch.bfloat16), scheme, static_scale=static)
        assert (result.values.shape, result.scale.shape) == (
            (0, scheme.payload.row_values(width)),
            (0, scheme.payload.num_groups(width)),
        )
        assert dequantize(result).shape == (0, width)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", QUANTIZED + MICRO)
def test_what_is_not_finite_makes_nan_of_its_scale_alone(name: str, bad: float) -> None:
    x = torch.randn(4, 272, generator=torch.Generator().manual_seed(0))
    clean = dequantize(quantize(x, get_scheme(name)))
    x[2, 130] = bad
    with_nan = dequantize(quantize(x, get_scheme(name)))
    row, column = torch.meshgrid(torch.arange(4), torch.arange(272), indexing="ij")
    tile_rows, tile_columns = _tile(name, 4, 272)
    shared = (row // tile_rows == 2 // tile_rows) & (column // tile_columns == 130 // tile_columns)
    assert bool(with_nan[shared].isnan().all())
    assert torch.equal(with_nan[~shared], clean[~shared])


def test_static_scale() -> None:
    x = torch.tensor([[1.0, -3.0, 1000.0], [math.nan, math.inf, -math.inf], [0.3, 17.0, -18.0]])
    result = quantize(x, SCHEMES["fp8_tensor"], static_scale=torch.tensor(0.5))
    expected = torch.tensor([[1.0, -3.0, 224.0], [math.nan, 224.0, -224.0], [0.3125, 16.0, -18.0]])
    assert torch.equal(result.scale, torch.full((3, 1), 0.5))
    torch.testing.assert_close(dequantize(result), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", QUANTIZED + MICRO)
def test_rows_of_any_leading_shape_and_strides(name: str) -> None:
    experts, capacity, width = 3, 5, 336
    scheme = get_scheme(name)
    x = torch.randn(experts * capacity, width, generator=torch.Generator().manual_seed(3))
    result = quantize(x, scheme)
    groups = scheme.payload.num_groups(width)
    scale = torch.empty(experts, groups, capacity, dtype=scheme.payload.scale_dtype).transpose(1, 2)
    scale.copy_(result.scale.reshape(experts, capacity, groups))
    rows = dequantize_rows(result.values.view(experts, capacity, scheme.payload.row_values(width)), scale, scheme)
    assert torch.equal(rows.view(-1, width), dequantize(result))
    assert torch.equal(dequantize_rows(result.values[7], result.scale[7], scheme), dequantize(result)[7])


@pytest.mark.parametrize(("rows", "columns"), [(144, 336), (128, 256), (16, 2880)])
@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_have_the_bits_of_the_reference(name: str, rows: int, columns: int) -> None:
    scheme = get_scheme(name)
    weight = (
        torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(rows))
        * torch.tensor([1, 9, 0.01])[:, None, None]
    )
    stored = quantize_weight(weight.bfloat16(), scheme)
    values, scale = stored.values, stored.scale
    assert scale is not None
    assert stored.tensors.keys() == {"values", "scale"}
    real = dequantize_weight(stored, scheme)
    tile = _tile(name, rows, columns, weights=True)
    shapes = {
        "tensor": (3,),
        "channel": (3, rows),
        "block": (3, math.ceil(rows / tile[0]), math.ceil(columns / tile[1])),
    }
    assert scale.shape == shapes[scheme.weight.granularity]
    for expert in range(3):
        codes, tiles = _reference(weight[expert].bfloat16().float().numpy(), tile, name)
        np.testing.assert_array_equal(_codes(values[expert]), codes)
        np.testing.assert_array_equal(scale[expert].reshape(tiles.shape).numpy(), tiles)
        for n, k in [(0, 0), (rows - 1, columns - 1), (rows // 2, columns // 3)]:
            expected = _numbers(codes[n : n + 1, k], name)[0] * tiles[n // tile[0], k // tile[1]]
            assert real[expert, n, k].item() == expected
    alone = quantize_weight(weight[1].bfloat16(), scheme)
    assert torch.equal(alone.values.view(torch.uint8), values[1].view(torch.uint8))
    assert torch.equal(dequantize_weight(alone, scheme), real[1])


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # by code; ties go to the even one


def _micro_reference(
    x: np.ndarray, name: str, second: np.float32 | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes of x [N, K] float32, one per element, the byte of each group's scale, and the decoded values.

    `second` is the second scale of "nvfp4", None for rows that carry none.
    """
    second = np.float32(1) if second is None else second
    group = _tile(name, 1, 1)[1]
    codes, real = np.zeros(x.shape, np.uint8), np.zeros(x.shape, np.float32)
    bytes_ = np.zeros((x.shape[0], math.ceil(x.shape[1] / group)), np.uint8)
    for i, j in np.ndindex(*bytes_.shape):
        place = np.s_[i, j * group : (j + 1) * group]
        amax = np.max(np.abs(x[place]))
        if name == "mxfp8":
            exponent = math.frexp(amax)[1] - 1 - 8 if amax else -127  # frexp has its mantissa in [0.5, 1)
            bytes_[i, j] = max(exponent, -127) + 127
            scale = 2.0 ** (int(bytes_[i, j]) - 127)
            codes[place] = _nearest_code(np.clip(x[place] / scale, -448, 448))
            real[place] = VALUES[codes[place]] * scale
            continue
        bytes_[i, j] = _nearest_code(np.clip(amax / second / np.float32(6), 0, 448))
        scale = np.float32(VALUES[bytes_[i, j]])
        if np.isnan(scale):  # e2m1 has no NaN, so the codes are 0
            real[place] = math.nan
            continue
        for k in range(*place[1].indices(x.shape[1])):
            ratio = abs(x[i, k] / (scale * second)) if scale else 0.0
            distance = np.abs(E2M1 - min(ratio, 6))
            nearest = [code for code in range(8) if distance[code] == distance.min()]
            magnitude = nearest[0] if len(nearest) == 1 or nearest[0] % 2 == 0 else nearest[1]
            negative = bool(np.signbit(x[i, k])) and bool(scale)
            codes[i, k] = magnitude + 8 * negative
            real[i, k] = np.float32(-1 if negative else 1) * np.float32(E2M1[magnitude]) * scale * second
    return codes, bytes_, real


def _micro_codes(values: torch.Tensor, name: str) -> np.ndarray:
    """One code per element; of two in a byte the first is in the low half."""
    codes = _codes(values)
    return codes if name == "mxfp8" else np.stack([codes % 16, codes // 16], axis=-1).reshape(*codes.shape[:-1], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [464, 144, 48, 16])
@pytest.mark.parametrize("name", MICRO)
def test_micro_scales_have_the_bits_of_the_reference(name: str, width: int, dtype: torch.dtype) -> None:
    x = _tokens(9, width, dtype)
    if dtype == torch.float32:
        x[4] *= 2.0**-127 / x[4].abs().max()  # values below 448 times the smallest scale
    codes, scales, real = _micro_reference(x.float().numpy(), name)
    scheme = get_scheme(name)
    result = quantize(x, scheme)
    np.testing.assert_array_equal(_micro_codes(result.values, name), codes)
    np.testing.assert_array_equal(_codes(result.scale), scales)
    np.testing.assert_array_equal(dequantize(result).numpy(), real)
    assert result.scale.stride() == (1, 9)
    assert result.values.is_contiguous()
    if name == "mxfp8":
        weight = quantize_weight(torch.stack([x, x.flip(0)]), scheme)
        assert weight.scale is not None
        assert weight.scale.shape == (2, 9, scheme.payload.num_groups(width))
        np.testing.assert_array_equal(_micro_codes(weight.values[1], name), codes[::-1])
        np.testing.assert_array_equal(_codes(weight.scale[1]), scales[::-1])
        np.testing.assert_array_equal(dequantize_weight(weight, scheme)[0].numpy(), real)


def _second_scale(x: np.ndarray) -> np.float32:
    """The second scale that rows share: the largest group gets the scale 448 for 6; groups with NaN are ignored."""
    rows = x.reshape(-1, x.shape[-1])
    groups = [np.abs(rows[:, first : first + 16]).max(axis=1) for first in range(0, x.shape[-1], 16)]
    largest = max(amax for group in groups for amax in group if np.isfinite(amax))
    return max(largest, np.float32(1e-10)) / np.float32(2688)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [144, 48, 24])
def test_second_scales_have_the_bits_of_the_reference(width: int, dtype: torch.dtype) -> None:
    """Weights have one per matrix; rows that are not sent have one per row."""
    scheme, random = SCHEMES["nvfp4"], torch.Generator().manual_seed(width)
    stds = torch.tensor([1.0, 3e-3, 1e-5, 100.0, 1e-13, 0.0, 1e35])
    weight = (torch.randn(7, 9, width, generator=random) * stds[:, None, None]).to(dtype)
    weight[:, 4] *= 2**-16  # groups that lose bits, or all
    weight[1, 2, 3] = math.nan
    stored = quantize_weight(weight, scheme)
    values, scale, second = stored.values, stored.scale, stored.global_scale
    assert scale is not None
    assert second is not None
    assert (second.shape, second.dtype) == ((7,), torch.float32)
    real = dequantize_weight(stored, scheme)
    rows = weight.flatten(0, 1)
    trips = round_trip(rows, scheme).numpy()
    for expert, matrix in enumerate(weight.float().numpy()):
        expected_second = _second_scale(matrix)
        codes, scales, expected = _micro_reference(matrix, "nvfp4", expected_second)
        assert second[expert].item() == expected_second
        np.testing.assert_array_equal(_codes(scale[expert]), scales)
        signless = np.where(np.isnan(expected), 7, 15)
        np.testing.assert_array_equal(_micro_codes(values[expert], "nvfp4") & signless, codes)
        np.testing.assert_array_equal(real[expert].numpy(), expected)
    for row, trip in zip(rows.float().numpy(), trips, strict=True):
        np.testing.assert_array_equal(trip, _micro_reference(row[None], "nvfp4", _second_scale(row))[2][0])
    with pytest.raises(ValueError, match=r"global scale is None, scheme 'nvfp4' needs \(\(7,\), torch.float32\)"):
        dequantize_weight(StoredMatrix(values, scale=scale), scheme)


def _worst_row(found: torch.Tensor, x: torch.Tensor) -> float:
    error = (found.double() - x.double()).norm(dim=-1) / x.double().norm(dim=-1)
    return error.max().item()


def test_small_and_large_weights_keep_the_error_of_the_format() -> None:
    """The worst row error of "nvfp4" weights, and of rows that are not sent, is the same for every magnitude."""
    scheme, x = SCHEMES["nvfp4"], torch.randn(2, 48, 256, generator=torch.Generator().manual_seed(5))
    for std in (1.0, 0.003, 0.001, 1e-5, 100.0):
        assert 0.09 < _worst_row(dequantize_weight(quantize_weight(x * std, scheme), scheme), x * std) < 0.115
        assert 0.09 < _worst_row(round_trip(x[0] * std, scheme), x[0] * std) < 0.115


def test_the_range_of_a_row_that_carries_no_second_scale() -> None:
    """Groups with a largest value in [6 * 2^-6, 2688] keep the error of "nvfp4"; smaller ones lose bits, then all."""
    scheme, x = SCHEMES["nvfp4"], torch.randn(48, 256, generator=torch.Generator().manual_seed(6))
    largest = x.unflatten(1, (16, 16)).abs().amax(2)

    def error(factor: float) -> float:
        return _worst_row(dequantize(quantize(x * factor, scheme)), x * factor)

    lowest, highest = 6 * 2**-6 / largest.min().item(), 2688 / largest.max().item()
    for factor in (lowest, 1.0, 0.99999 * highest):
        assert 0.09 < error(factor) < 0.115
    assert error(lowest / 10) > 0.13
    assert error(highest * 2) > 0.2
    gone = 0.99 * 6 * 2**-10 / largest.max().item()
    assert not dequantize(quantize(x * gone, scheme)).any()


def test_e2m1_rounds_to_nearest_even_and_saturates() -> None:
    midpoints = ((E2M1[:-1] + E2M1[1:]) / 2).astype(np.float32)
    around = [np.nextafter(midpoints, np.float32(0)), np.nextafter(midpoints, np.float32(9))]
    magnitude = np.concatenate([E2M1.astype(np.float32), midpoints, *around])
    x = np.stack([np.full_like(magnitude, 6), magnitude, -magnitude], axis=1)  # a row each; 6 makes the scale 1
    x = np.concatenate([x, np.zeros_like(x[:, :1])], axis=1)
    result = quantize(torch.from_numpy(x), SCHEMES["nvfp4"])
    nearest = np.concatenate([np.arange(8), [0, 2, 2, 4, 4, 6, 6], np.arange(7), np.arange(1, 8)])
    np.testing.assert_array_equal(_codes(result.scale), np.full((len(magnitude), 1), 0x38))
    np.testing.assert_array_equal(_micro_codes(result.values, "nvfp4")[:, 1], nearest)
    np.testing.assert_array_equal(_micro_codes(result.values, "nvfp4")[:, 2], nearest + 8)


@pytest.mark.parametrize(
    ("name", "numbers", "scale_byte", "codes", "real"),
    [
        ("mxfp8", [0.0, 0.0], 0, [0, 0], [0.0, 0.0]),
        ("mxfp8", [7.0, 1.0], 121, [0x7E, 0x68], [7.0, 1.0]),  # 448 and 64 times 2^-6
        ("mxfp8", [-7.9, 1.0], 121, [0xFE, 0x68], [-7.0, 1.0]),  # 505.6 saturates
        ("mxfp8", [2.0**-130, 2.0**-140], 0, [0x20, 0], [2.0**-130, 0.0]),  # float32 subnormals; 2^-13 is too small
        ("mxfp8", [math.nan, 1.0], 255, [0x7F, 0x7F], [math.nan, math.nan]),
        ("mxfp8", [1.0, -math.inf], 255, [0x7F, 0x7F], [math.nan, math.nan]),
        ("nvfp4", [0.0, 0.0], 0, [0, 0], [0.0, 0.0]),
        ("nvfp4", [0.5, -6.0], 0x38, [1, 15], [0.5, -6.0]),
        ("nvfp4", [-(2.0**-10) * 6, 0.0], 0, [0, 0], [0.0, 0.0]),  # its scale is a tie, and rounds to 0
        ("nvfp4", [1e5, -1e3], 0x7E, [7, 12], [2688.0, -896.0]),  # scale 448
        ("nvfp4", [math.nan, 1.0], 0x7F, [0, 0], [math.nan, math.nan]),
        ("nvfp4", [1.0, math.inf], 0x7F, [0, 0], [math.nan, math.nan]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_micro_scales_by_hand(
    name: str, numbers: list[float], scale_byte: int, codes: list[int], real: list[float]
) -> None:
    result = quantize(torch.tensor([numbers]), SCHEMES[name])
    assert _codes(result.scale).tolist() == [[scale_byte]]
    assert (_micro_codes(result.values, name)[0] & (0xFF if scale_byte != 255 else 0x7F)).tolist() == codes
    torch.testing.assert_close(dequantize(result)[0], torch.tensor(real), rtol=0, atol=0, equal_nan=True)


def test_powers_of_two_are_rounded_up_by_their_bits() -> None:
    amax = torch.tensor([448.0, 448.00003, 447.99997, 896.0, 3e38, 1e-30])
    x = torch.zeros(6, 16)
    x[:, 3] = amax
    scale = quantize(x, SCHEMES["fp8_block_ue8m0"]).scale
    assert scale.squeeze(1).tolist() == [1, 2, 1, 2, 2.0**120, 2.0**-42]


def test_none_leaves_numbers_alone() -> None:
    x = torch.randn(3, 32)
    assert dequantize_rows(x, None, SCHEMES["none"]) is x
    assert torch.equal(dequantize_weight(StoredMatrix(x.bfloat16()), SCHEMES["none"]), x.bfloat16().float())


@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("name", QUANTIZED + MICRO)
def test_payload_bytes_are_those_of_a_row(name: str, hidden: int) -> None:
    row = quantize(torch.ones(1, hidden), get_scheme(name))
    stored = row.values.untyped_storage().nbytes(), row.scale.untyped_storage().nbytes()
    scheme = get_scheme(name)
    assert (scheme.payload.values_bytes(hidden, torch.bfloat16), scheme.payload.scale_bytes(hidden)) == stored
    assert payload_bytes(scheme, hidden, torch.bfloat16) == sum(stored)
    assert payload_bytes(SCHEMES["none"], hidden, torch.bfloat16) == 2 * hidden


def test_schemes_by_name() -> None:
    assert all(get_scheme(name) is scheme and scheme.name == name for name, scheme in SCHEMES.items())
    assert get_scheme("fp8_block_64x32").weight.block == (64, 32)
    assert get_scheme("fp8_block_64x32") == get_scheme("fp8_block_64x32")
    assert get_scheme("fp8_block_128x128") is SCHEMES["fp8_block"]
    assert get_scheme("fp8_w8a16_block_128x128") is SCHEMES["fp8_w8a16_block"]
    for name in ("int8_block_16x32", "fp8_w8a16_block_16x32", "int8_w8a16_g64", "int8_w8a16_zp_f32", "int4_w4a8_g32"):
        assert get_scheme(name).name == name
        assert get_scheme(name) == get_scheme(name)
    found = get_scheme("int4_w4a16_g128_zp_f16").weight
    assert (found.family, found.packed, found.block, found.zero_point) == ("integer", 2, (1, 128), True)
    assert (found.scale_dtype, SCHEMES["int4_w4a16"].weight.scale_dtype) == (torch.float16, BF16)
    assert with_block(SCHEMES["int8_block"], 64, 128) == get_scheme("int8_block_64x128")
    assert with_block(get_scheme("fp8_w8a16_block_16x32"), 128, 128) is SCHEMES["fp8_w8a16_block"]


INT4_ROWS = {"family": "integer", "dtype": torch.uint8, "packed": 2, "scale_dtype": torch.bfloat16}
FP8_ROWS = SCHEMES["fp8_token"].payload


@pytest.mark.parametrize(
    ("scheme", "token_bytes", "parts", "num_bytes"),
    [
        (  # weight-only int4 with groups of 48 and zero points
            QuantScheme(
                name="w4a16", weight=TensorFormat(**INT4_ROWS, granularity="group", block=(1, 48), zero_point=True)
            ),
            2 * 336,
            {"values": ((3, 48, 168), torch.uint8), "scale": ((3, 48, 7), BF16), "zero": ((3, 48, 7), torch.uint8)},
            3 * 48 * (168 + 7 * 2 + 7),
        ),
        (  # weight-only int8 per channel
            QuantScheme(name="w8a16", weight=TensorFormat(family="scaled", dtype=torch.int8, granularity="channel")),
            2 * 336,
            {"values": ((3, 48, 336), torch.int8), "scale": ((3, 48), torch.float32)},
            3 * 48 * (336 + 4),
        ),
        (  # int4 weights per channel, fp8 tokens
            QuantScheme(
                name="w4a8",
                payload=FP8_ROWS,
                activation=FP8_ROWS,
                weight=TensorFormat(**INT4_ROWS, granularity="channel"),
            ),
            336 + 4,
            {"values": ((3, 48, 168), torch.uint8), "scale": ((3, 48), BF16)},
            3 * 48 * (168 + 2),
        ),
        (  # NVFP4 as compressed-tensors stores it, bfloat16 tokens
            QuantScheme(name="fp4a16", weight=dataclasses.replace(SCHEMES["nvfp4"].weight, global_scale="divisor")),
            2 * 336,
            {
                "values": ((3, 48, 168), torch.uint8),
                "scale": ((3, 48, 21), torch.float8_e4m3fn),
                "global_scale": ((3,), torch.float32),
            },
            3 * (48 * (168 + 21) + 4),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, QuantScheme) else "",
)
def test_what_schemes_say_of_shapes_and_bytes(
    scheme: QuantScheme, token_bytes: int, parts: dict[str, tuple[tuple[int, ...], torch.dtype]], num_bytes: int
) -> None:
    """Formats of weights that differ from those of tokens, with zero points, groups and divisors."""
    assert payload_bytes(scheme, 336, BF16) == token_bytes
    assert scheme.weight.parts((3, 48, 336), BF16) == parts
    stored = StoredMatrix.empty((3, 48, 336), scheme.weight, BF16, "cpu")
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.tensors.items()} == parts
    assert stored.num_bytes == num_bytes
    assert stored[1].num_bytes == num_bytes // 3
    assert kernels_compute(scheme)
    made = quantize_weight(torch.ones(3, 48, 336), scheme).tensors
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()} == parts


def test_weights_alone_are_quantized() -> None:
    """Weights have the bits of the scheme that quantizes tokens too; a divisor is the reciprocal of a multiplier."""
    weight = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(2))
    for base in ("int8_token", "mxfp8", "nvfp4"):
        alone = QuantScheme(name="alone", weight=SCHEMES[base].weight)
        stored = quantize_weight(weight, alone)
        assert torch.equal(dequantize_weight(stored, alone), dequantize_weight(stored, SCHEMES[base]))
        with pytest.raises(ValueError, match="'alone' has no quantized form"):
            quantize(weight[0], alone)
    divided = QuantScheme(name="divided", weight=dataclasses.replace(SCHEMES["nvfp4"].weight, global_scale="divisor"))
    multiplied = quantize_weight(weight, SCHEMES["nvfp4"])
    stored = quantize_weight(weight, divided)
    assert stored.global_scale is not None
    torch.testing.assert_close(stored.global_scale, 2688 / weight.abs().amax(dim=(1, 2)))
    infinite = weight.clone()
    infinite[:, 5, 16:32] = -math.inf
    rest = torch.cat([weight[:, :5], weight[:, 6:], weight[:, 5:6, 32:].repeat(1, 1, 2)], dim=1)
    torch.testing.assert_close(quantize_weight(infinite, divided).global_scale, 2688 / rest.abs().amax(dim=(1, 2)))
    tiny = quantize_weight(weight * torch.tensor([0.0, 1e-20])[:, None, None], divided)  # at most 2688 / 1e-10
    assert tiny.global_scale is not None
    torch.testing.assert_close(tiny.global_scale, torch.full((2,), 2.688e13), rtol=1e-6, atol=0)
    real = dequantize_weight(stored, divided)
    torch.testing.assert_close(real, dequantize_weight(multiplied, SCHEMES["nvfp4"]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"family": "scaled", "granularity": "token"}, ("'scaled'", "None", "'token'")),
        ({"dtype": torch.int8, "granularity": "token"}, ("'none'", "torch.int8")),
        ({"family": "scaled", "dtype": torch.int8}, ("'scaled'", "torch.int8", "'none'")),
        ({**INT4_ROWS, "family": "scaled", "granularity": "channel", "zero_point": True}, ("'scaled'", "'integer'")),
        ({**INT4_ROWS, "granularity": "channel", "global_scale": "divisor"}, ("'integer'", "'micro'")),
    ],
)
def test_formats_that_contradict_themselves(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        TensorFormat(**fields)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fp8", ("'fp8'", "none", "fp8_tensor", "fp8_token", "fp8_block", "fp8_block_<n>x<k>")),
        ("fp8_block_64", ("'fp8_block_64'", "fp8_block_<n>x<k>")),
        ("fp8_block_0x64", ("'fp8_block_0x64'", "(0)", "multiple of 16")),
        ("fp8_block_64x40", ("'fp8_block_64x40'", "(40)", "multiple of 16")),
        ("int4_w4a16_g24", ("'int4_w4a16_g24'", "(24)", "multiple of 16")),
        ("int8_w8a16_f16", ("'int8_w8a16_f16'", "int8_w8a16_g<k>", "_zp")),
        ("int8_w8a16_g0", ("(0)", "multiple of 16")),
    ],
)
def test_unknown_schemes(name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        get_scheme(name)
    assert [word for word in words if word not in str(caught.value)] == []


X = torch.ones(4, 144)
FP8 = quantize(X, SCHEMES["fp8_block"])
ONE = torch.tensor(1.0)
FP4 = quantize(X, SCHEMES["nvfp4"])


def _fp4(scale: torch.Tensor, global_scale: torch.Tensor) -> StoredMatrix:
    return StoredMatrix(FP4.values, scale=scale, global_scale=global_scale)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize(X, SCHEMES["none"]), ("'none'",)),
        (lambda: quantize(X.int(), SCHEMES["fp8_token"]), ("torch.int32", "float32")),
        (lambda: quantize(FP8.values, SCHEMES["fp8_token"]), ("float8_e4m3fn", "float32")),
        (lambda: quantize(X[0], SCHEMES["fp8_token"]), ("(144,)", "2 dimensions")),
        (lambda: quantize(X, SCHEMES["fp8_block"], static_scale=torch.ones(1)), ("'fp8_block'", "static_scale")),
        (lambda: quantize(X, SCHEMES["fp8_tensor"], static_scale=torch.ones(2)), ("(2,)", "1 element")),
        (lambda: quantize_weight(X, SCHEMES["none"]), ("'none'",)),
        (lambda: quantize_weight(X[0], SCHEMES["fp8_token"]), ("(144,)", "2 dimensions")),
        (lambda: quantize_weight(X.int(), SCHEMES["fp8_token"]), ("torch.int32", "float32")),
        (lambda: dequantize_rows(X, FP8.scale, FP8.scheme), ("torch.float32", "float8_e4m3fn")),
        (lambda: dequantize_rows(FP8.values, FP8.scale[:, :1], FP8.scheme), ("(4, 1)", "(4, 2)")),
        (lambda: dequantize_rows(FP8.values, None, FP8.scheme), ("None", "(4, 2)")),
        (lambda: dequantize_rows(FP8.values, FP8.scale.double(), FP8.scheme), ("torch.float64", "torch.float32")),
        (lambda: dequantize_weight(StoredMatrix(FP8.values, scale=FP8.scale), FP8.scheme), ("(4, 2)", "(1, 2)")),
        (lambda: Quantized(values=FP8.values[0], scale=FP8.scale, scheme=FP8.scheme), ("(144,)", "2 dimensions")),
        (lambda: Quantized(values=FP8.values, scale=FP8.scale[:3], scheme=FP8.scheme), ("(3, 2)", "(4, 2)")),
        (lambda: Quantized(values=X, scale=FP8.scale, scheme=FP8.scheme), ("torch.float32", "float8_e4m3fn")),
        (lambda: Quantized(values=X, scale=FP8.scale, scheme=SCHEMES["none"]), ("'none'",)),
        (lambda: quantize(X[:, :7], SCHEMES["nvfp4"]), ("'nvfp4'", "7")),
        (lambda: quantize_weight(X[:, :7], SCHEMES["nvfp4"]), ("'nvfp4'", "7")),
        (lambda: quantize(X, SCHEMES["mxfp8"], static_scale=torch.ones(1)), ("'mxfp8'", "static_scale")),
        (lambda: dequantize_rows(FP8.values, FP8.scale, SCHEMES["mxfp8"]), ("torch.float32", "(4, 5)", "e8m0fnu")),
        (lambda: dequantize_weight(_fp4(FP4.scale[:, 1:], ONE), FP4.scheme), ("(4, 8)", "(4, 9)")),
        (
            lambda: dequantize_weight(StoredMatrix(X, global_scale=ONE), SCHEMES["none"]),
            ("global scale", "'none'", "None"),
        ),
        (lambda: dequantize_weight(_fp4(FP4.scale, torch.ones(1)), FP4.scheme), ("(1,)", "((), torch.float32)")),
        (lambda: round_trip(X[0], SCHEMES["nvfp4"]), ("(144,)", "2 dimensions")),
        (lambda: round_trip(X, SCHEMES["nvfp4"], static_scale=torch.ones(1)), ("'nvfp4'", "static_scale")),
        (lambda: Quantized(values=FP4.values, scale=FP4.scale.float(), scheme=FP4.scheme), ("(4, 9)", "e4m3fn")),
    ],
)
def test_bad_input(call: object, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        call()  # type: ignore[operator]
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUANTIZED + MICRO)
def test_cuda_has_the_bits_of_the_cpu(name: str) -> None:
    x, scheme = _tokens(300, 2880), get_scheme(name)
    here, there = quantize(x, scheme), quantize(x.cuda(), scheme)
    assert torch.equal(here.values.view(torch.uint8), there.values.cpu().view(torch.uint8))
    assert torch.equal(as_bytes(here.scale), as_bytes(there.scale).cpu())
    assert torch.equal(dequantize(here), dequantize(there).cpu())
