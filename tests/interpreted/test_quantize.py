"""Quantized activations: kernel against torch, bit for bit."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import triton.language as tl
from helpers.sampling import thinned
from triton import jit as triton_jit

from ep_moe.kernel_launch.kernel import as_constants
from ep_moe.kernels.gemm.arguments import RowGroups, Rows, Stored, TileList
from ep_moe.kernels.gemm.requantize import _requantize_kernel, _requantize_nvfp4_kernel
from ep_moe.kernels.numerics import e4m3_half, e4m3_value, to_e4m3
from ep_moe.quant import Quantized, dequantize, get_scheme, micro, scaled, triton, unpack_nibbles
from ep_moe.testing import assert_same_bits, poisoned_memory
from interpreted.common import DEVICE, generator


@triton_jit
def _cast_kernel(x_ptr, narrow_ptr, code_ptr, wide_ptr, half_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(narrow_ptr + place, to_e4m3(tl.load(x_ptr + place)))
    code = tl.load(code_ptr + place)
    tl.store(wide_ptr + place, e4m3_value(code))
    tl.store(half_ptr + place, e4m3_half(code))


def test_casts_of_e4m3_are_those_of_torch() -> None:
    """All numbers of bfloat16, those next to ties of e4m3 in float32, and all of e4m3: NaN, infinities, subnormals."""
    numbers = torch.arange(1 << 16, dtype=torch.int32) << 16
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes.view(torch.float8_e4m3fn).float()[(codes & 0x7F) < 0x7F].sort().values
    ties = ((finite[1:] + finite[:-1]) / 2).view(torch.int32)
    x = torch.cat([numbers, ties, ties + 1, ties - 1]).view(torch.float32)
    x = torch.cat([x, x.new_zeros(-len(x) % 4096)]).to(DEVICE)
    code = codes.repeat(len(x) // 256).view(torch.float8_e4m3fn).to(DEVICE)
    narrow, wide, half = torch.empty_like(code), torch.empty_like(x), torch.empty_like(x, dtype=torch.float16)
    _cast_kernel[(len(x) // 4096,)](x, narrow, code, wide, half, BLOCK=4096, enable_fp_fusion=True)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert_same_bits(narrow[~x.isnan()], expected[~x.isnan()], "to e4m3")
    assert bool(narrow[x.isnan()].float().isnan().all())
    for found, dtype in ((wide, torch.float32), (half, torch.float16)):
        expected = code.to(dtype)
        assert_same_bits(found[~expected.isnan()], expected[~expected.isnan()], "from e4m3")
        assert bool(found[expected.isnan()].isnan().all())


SCHEMES = ["fp8_tensor", "fp8_tensor_static", "fp8_token", "fp8_block", "fp8_block_64x48", "fp8_block_16x16"]
SCHEMES += ["fp8_block_ue8m0", "int8_token", "int8_block", "mxfp8", "nvfp4"]


def quantize_both(x: torch.Tensor, name: str) -> tuple:
    """The results of the kernel and of torch for x, whose rows may be followed by a gap."""
    scheme = get_scheme(name.removesuffix("_static"))
    static = torch.tensor([0.003]) if name.endswith("_static") else None
    family = micro if scheme.payload.family == "micro" else scaled
    expected = family.quantize(x, scheme.payload, static)
    placed = x.as_strided((x.shape[0], x.stride(0)), (x.stride(0), 1)).to(DEVICE)[:, : x.shape[1]]
    with poisoned_memory():
        actual = triton.quantize(placed, scheme.payload, None if static is None else static.to(DEVICE))
    return tuple(Quantized(values=values, scale=scale, scheme=scheme) for values, scale in (actual, expected))


QUANTIZED = [
    *((tokens, width, torch.bfloat16) for tokens in (1, 37) for width in (16, 48, 144, 2880)),
    *((0, 48, torch.bfloat16), (37, 144, torch.float32), (37, 144, torch.float16)),
]


@pytest.mark.parametrize(("name", "tokens", "width", "dtype"), thinned(SCHEMES, QUANTIZED), ids=str)
def test_quantize(name: str, tokens: int, width: int, dtype: torch.dtype) -> None:
    """Magnitudes from 1e-3 to 10, values next to ties of e4m3, and rows of zeros."""
    x = torch.randn(tokens, width + 16, generator=generator(f"{tokens} {width}")) * torch.logspace(-3, 1, width + 16)
    if tokens > 2:
        x[1] = 0
        x[2] = 448 * (1 + torch.arange(width + 16) % 32 / 16) / 2 ** (torch.arange(width + 16) % 19)
    actual, expected = quantize_both(x.to(dtype)[:, :width], name)
    assert_same_bits(actual.values, expected.values, "values")
    assert_same_bits(actual.scale, expected.scale, "scale")
    assert actual.scale.stride() == expected.scale.stride()
    assert actual.values.is_contiguous()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_not_finite(name: str, bad: float) -> None:
    x = torch.randn(4, 272, generator=generator(name))
    x[2, 130] = bad
    actual, expected = quantize_both(x, name)
    torch.testing.assert_close(dequantize(actual).cpu(), dequantize(expected), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(actual.scale.cpu(), expected.scale, rtol=0, atol=0, equal_nan=True)
    assert bool(dequantize(actual)[2].isnan().any()) == (not (name.endswith("_static") and math.isinf(bad)))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_groups_of_any_bits(name: str) -> None:
    """Rows of any float32, with subnormals, infinities and NaN, and rows of ties, in groups of any magnitude."""
    random, width = generator(name), 464
    bits = torch.randint(-(2**31), 2**31, (40, width), generator=random).to(torch.int32).view(torch.float32)
    eighths = torch.randint(-64, 65, (40, width), generator=random) / 8
    exponents = torch.randint(-150, 120, (40, width // 16), generator=random).repeat_interleave(16, dim=1)
    actual, expected = quantize_both(torch.cat([bits, torch.ldexp(eighths, exponents)]), name)
    torch.testing.assert_close(actual.scale.cpu().float(), expected.scale.float(), rtol=0, atol=0, equal_nan=True)
    finite = expected.scale.float().isfinite().repeat_interleave(expected.scheme.payload.block[1], dim=1)[:, :width]
    values = [tokens.values.cpu().view(torch.uint8) for tokens in (actual, expected)]
    if name == "nvfp4":
        values, finite = [unpack_nibbles(packed) for packed in values], torch.ones_like(finite)
    assert_same_bits(*(torch.where(finite, codes, 0) for codes in values), "values")
    assert 0.1 < finite.float().mean() < 1 or name == "nvfp4"


def test_columns_that_are_apart() -> None:
    x = torch.randn(144, 5, generator=generator("apart")).t()
    stored = get_scheme("fp8_block").payload
    expected, _ = scaled.quantize(x, stored, None)
    actual, _ = triton.quantize(x.contiguous().t().to(DEVICE).t(), stored, None)
    assert_same_bits(actual, expected, "values")


TWO_TILES = ([16, 15], [0, 1], [0, 1], [2])  # tokens of two experts, and the tile list


def launch(
    kernel: Any,
    x: torch.Tensor,
    out: Stored,
    tiles: tuple[list[int], ...],
    numbers: Any,
    pieces: RowGroups,
    **more: Any,
) -> None:
    """Launch a requantizing kernel in two programs."""
    num_tokens, *listed = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in tiles)
    rows, tile_list = Rows(None, num_tokens, None), TileList(*listed, amax=None, next_tile=None)
    constants = as_constants(pieces, kernel, "PIECES")
    kernel[(2,)](Stored(x.to(DEVICE), None), out, rows, tile_list, *numbers, PIECES=constants, **more)


@pytest.mark.parametrize("name", ["fp8_block_ue8m0", "int8_block"])
@pytest.mark.parametrize(("intermediate", "group"), [(256, 128), (80, 128), (144, 48)])
def test_requantize(intermediate: int, group: int, name: str) -> None:
    """Experts of 5, 0 and 17 tokens in tiles of 16 rows; rows without a token are neither read nor written."""
    random = generator(f"{intermediate} {group}")
    block_m, counts = 16, [5, 0, 17]
    x = torch.full((64, intermediate), math.nan)
    used = torch.zeros(64, dtype=torch.bool)
    for first_tile, count in zip([0, 1, 1], counts, strict=True):
        used[first_tile * block_m : first_tile * block_m + count] = True
    x[used] = torch.randn(22, intermediate, generator=random) * torch.logspace(-3, 3, 22)[:, None]
    x[used.nonzero()[3], 5] = math.inf
    stored = dataclasses.replace(get_scheme(name).activation, block=(1, group))
    expected_values, expected_scale = scaled.quantize(x[used], stored, None)
    groups = stored.num_groups(intermediate)
    values = torch.zeros(64, intermediate, dtype=torch.uint8, device=DEVICE).view(stored.dtype)
    scale = torch.zeros(groups, 64, device=DEVICE)
    pieces = RowGroups(BLOCK_M=block_m, ROWS=8, BLOCK=128 if group > 48 else 64)
    numbers, options = (intermediate, intermediate, group, 64), {"POWER_OF_TWO": stored.power_of_two, "ORDER": 0}
    launch(
        _requantize_kernel, x, Stored(values, scale), (counts, [0, 2, 2], [0, 1, 1], [3]), numbers, pieces, **options
    )
    finite = expected_scale.isfinite().all(1)
    assert_same_bits(values.cpu().view(torch.uint8)[used][finite], expected_values.view(torch.uint8)[finite], "values")
    torch.testing.assert_close(scale.t().cpu()[used], expected_scale, rtol=0, atol=0, equal_nan=True)
    assert not bool(values.cpu().view(torch.uint8)[~used].any())
    assert not bool(scale.t().cpu()[~used].any())


def places_of_columns(width: int, packed: int) -> torch.Tensor:
    """Where columns are stored for weights of `packed` in a byte; written out: thread, word or pair, number in it."""
    columns = []
    for column in range(width):
        stored, half = divmod(column, packed or 1)  # a byte of 64, and which weight of it
        thread, byte = stored % 64 // 16, stored % 16
        if packed == 2:
            number = byte % 4 * 2 + half  # of eight in a word
            place = byte // 4 * 32 + number % 4 // 2 * 8 + number % 2 * 16 + thread * 2 + number // 4
        else:
            place = byte // 2 * 8 + thread * 2 + byte % 2
        columns.append(stored // 64 * 64 * packed + place if packed else column)
    return torch.tensor(columns)


@pytest.mark.parametrize("packed", [0, 1, 2], ids=lambda packed: f"order-{packed}")
@pytest.mark.parametrize("intermediate", [80, 256])
def test_requantize_to_nvfp4(intermediate: int, packed: int) -> None:
    """Rows of any magnitude, of zeros and of ties, with NaN and infinity: bit for bit what the torch experts see."""
    random, stored = generator(str(intermediate)), get_scheme("nvfp4").activation
    x = torch.randn(32, intermediate, generator=random) * torch.logspace(-12, 9, 32)[:, None]
    x[3], x[5, 7], x[6, 20] = 0, math.nan, -math.inf
    x[8] = torch.randint(-64, 65, (intermediate,), generator=random) / 8 * 448 / 0.75
    values, scale, global_scale = micro._quantize(x, stored, shared=(-1,))
    expected = micro.dequantize_rows(values, scale, stored)
    width = math.ceil(intermediate / (64 * packed)) * 64 * packed if packed else intermediate
    out = torch.full((32, width), 7.0, dtype=torch.bfloat16, device=DEVICE)
    found = torch.zeros(1, 32, device=DEVICE)
    pieces = RowGroups(BLOCK_M=16, ROWS=4, BLOCK=256 if intermediate > 80 else 128)
    sizes, written = (intermediate, width), Stored(out, found)
    launch(_requantize_nvfp4_kernel, x, written, TWO_TILES, sizes, pieces, GROUP=16, ORDER=packed)
    places = places_of_columns(width, packed)
    torch.testing.assert_close(
        out[:31, places[:intermediate]].cpu().float(), expected[:31], rtol=0, atol=0, equal_nan=True
    )
    assert bool((out[:31, places[intermediate:]] == 0).all())
    assert bool((out[31] == 7).all())
    assert global_scale is not None
    assert_same_bits(found[0, :31], global_scale[:31, 0], "global scales")


def test_requantize_to_e4m3_in_an_order() -> None:
    """A scale for each row, in float16, as "int4_w4a8" stores it; columns beyond the intermediate are zeros."""
    random, stored, (intermediate, width) = generator("order"), get_scheme("int4_w4a8").activation, (80, 128)
    x = torch.randn(32, intermediate, generator=random)
    values, expected_scale = scaled.quantize(x, stored, None)
    out, scale = torch.full((32, width), 7.0, dtype=torch.float16, device=DEVICE), torch.zeros(1, 32, device=DEVICE)
    pieces, numbers = RowGroups(BLOCK_M=16, ROWS=8, BLOCK=128), (intermediate, width, intermediate, 32)
    launch(_requantize_kernel, x, Stored(out, scale), TWO_TILES, numbers, pieces, POWER_OF_TWO=False, ORDER=2)
    places = places_of_columns(width, 2)
    torch.testing.assert_close(out[:31, places[:intermediate]].cpu().float(), values[:31].float(), rtol=0, atol=0)
    torch.testing.assert_close(scale[0, :31].cpu(), expected_scale[:31, 0], rtol=0, atol=0)
    assert bool((out[:31, places[intermediate:]] == 0).all())
    assert bool((out[31] == 7).all())
