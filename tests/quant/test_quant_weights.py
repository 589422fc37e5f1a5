"""Formats of weights alone: integers against loops in numpy, MXFP4 by the words of its specification."""

import dataclasses
import math
from inspect import getsource
from pathlib import Path

import numpy as np
import pytest
import torch

from ep_moe.config import ActivationConfig
from ep_moe.experts import ReferenceExperts, create_experts, row_of
from ep_moe.experts.formats import FORMATS
from ep_moe.experts.tile_tables import default_table
from ep_moe.kernels.gemm.weights import decode
from ep_moe.names import SCHEME_NAMES
from ep_moe.quant import (
    SCHEMES,
    QuantScheme,
    StoredMatrix,
    dequantize_weight,
    get_scheme,
    pack_nibbles,
    quantize_weight,
    unpack_nibbles,
)
from ep_moe.quant.formats import FAMILIES
from ep_moe.weights import ExpertWeights

ROWS, COLUMNS = 6, 96
NAMES = [
    "int4_w4a16",
    "int4_w4a16_g32",
    "int4_w4a16_g48_zp",
    "int4_w4a16_g16_zp_f16",
    "int4_w4a8_g96_f32",
    "int4_w4a8_zp",
    "int8_w8a16_zp",
    "int8_w8a16_g16_zp_f32",
]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def weights(seed: int = 1) -> torch.Tensor:
    """Two matrices with rows of zeros, of tiny, of large, of positive and of negative numbers."""
    weight = torch.randn(2, ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))
    weight[0, 0] = 0
    weight[0, 1] *= 1e-14
    weight[0, 2] *= 2000
    weight[0, 3] = weight[0, 3].abs() + 0.3
    weight[0, 4] = -weight[0, 4].abs()
    return weight


def integer_reference(group: np.ndarray, scheme: QuantScheme) -> tuple[list[int], float, int]:
    """Codes, scale and zero point of the numbers that share them."""
    stored = scheme.weight
    largest = 2 ** (8 // stored.packed) - 1
    low, high = (
        (min(group.min(), 0), max(group.max(), 0)) if stored.zero_point else (-abs(group).max(), abs(group).max())
    )
    smallest = 2.0**-24 if stored.scale_dtype == torch.float16 else 1e-11
    ratio = (np.float32(high) - np.float32(low)) / np.float32(largest)
    scale = np.float32(torch.tensor(max(ratio, np.float32(smallest))).to(stored.scale_dtype).item())
    zero = int(np.clip(np.rint(np.float32(-low) / scale), 0, largest)) if stored.zero_point else (largest + 1) // 2
    codes = [int(min(max(np.rint(x / scale) + zero, 0), largest)) for x in group]
    return codes, float(scale), zero


@pytest.mark.parametrize("name", NAMES)
def test_integers_have_the_bits_of_the_reference(name: str) -> None:
    scheme, weight = get_scheme(name), weights()
    stored = scheme.weight
    found = quantize_weight(weight, scheme)
    assert {part: (tuple(t.shape), t.dtype) for part, t in found.tensors.items()} == stored.parts(
        tuple(weight.shape), torch.bfloat16
    )
    real = dequantize_weight(found, scheme)
    group = stored.block[1] if stored.granularity == "group" else COLUMNS
    codes = found.values if stored.packed == 1 else unpack_nibbles(found.values)
    assert found.scale is not None
    for expert, row, first in np.ndindex(2, ROWS, COLUMNS // group):
        here = np.s_[expert, row, first * group : (first + 1) * group]
        shared = (expert, row, first) if stored.granularity == "group" else (expert, row)
        expected, scale, zero = integer_reference(weight.numpy()[here], scheme)
        assert codes.numpy()[here].tolist() == expected
        assert found.scale[shared].item() == scale
        assert found.zero is None or found.zero[shared].item() == zero
        products = (np.array(expected, np.float32) - np.float32(zero)) * np.float32(scale)
        np.testing.assert_array_equal(real.numpy()[here], products)


@pytest.mark.parametrize("name", NAMES)
def test_error_is_half_a_step(name: str) -> None:
    """And a rounding of the scale, which moves the largest number by its part."""
    scheme, weight = get_scheme(name), weights(2)[1]
    found = quantize_weight(weight, scheme)
    assert found.scale is not None
    step = found.scale.float().reshape(ROWS, -1).repeat_interleave(COLUMNS // (found.scale.numel() // ROWS), 1)
    error = (dequantize_weight(found, scheme) - weight).abs()
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}.get(scheme.weight.scale_dtype, 1e-6)
    assert bool((error <= step * 0.5001 + weight.abs() * rounding * 2).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["int4_w4a16_g32", "int4_w4a16_g32_zp_f16", "int8_w8a16_g32_zp", "mxfp4_w4a16"])
def test_what_is_not_finite_makes_nan_of_its_group_alone(name: str, bad: float) -> None:
    scheme, weight = get_scheme(name), weights(3)[1]
    clean = dequantize_weight(quantize_weight(weight, scheme), scheme)
    weight[2, 40] = bad
    found = dequantize_weight(quantize_weight(weight, scheme), scheme)
    assert bool(found[2, 32:64].isnan().all())
    clean[2, 32:64] = found[2, 32:64] = 0
    assert torch.equal(found, clean)


def test_nibbles_are_packed_with_the_first_low() -> None:
    assert pack_nibbles(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]
    assert unpack_nibbles(torch.tensor([0x21, 0x0F], dtype=torch.uint8)).tolist() == [1, 2, 15, 0]


def test_integers_by_hand() -> None:
    """-8 to 7 times 0.5; with zero points 0 to 15 times 0.25 from -1, and GPTQ's zero point 16."""
    half = torch.tensor([[0.5 * (code - 8) for code in range(16)]])
    half[0, 0] = -3.75  # 7.5 steps, which a tie rounds to the even 8
    found = quantize_weight(half, get_scheme("int4_w4a16"))
    assert found.values.tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    assert found.scale is not None
    assert found.scale.tolist() == [0.5]
    shifted = torch.tensor([[0.25 * code - 1 for code in range(16)]])
    found = quantize_weight(shifted, get_scheme("int4_w4a16_zp"))
    assert found.zero is not None
    assert found.zero.tolist() == [4]
    assert torch.equal(dequantize_weight(found, get_scheme("int4_w4a16_zp")), shifted)
    sixteen = StoredMatrix(found.values, scale=found.scale, zero=torch.tensor([16], dtype=torch.uint8))
    assert torch.equal(dequantize_weight(sixteen, get_scheme("int4_w4a16_zp")), shifted - 3)


@pytest.mark.parametrize("width", [96, 2880, 40])
def test_mxfp4_by_its_specification(width: int) -> None:
    """Scales 2^(floor(log2 amax) - 2), the nearest of 0 to 6 with ties to even codes; a last group may be short."""
    scheme = get_scheme("mxfp4_w4a16")
    weight = torch.randn(3, width, generator=torch.Generator().manual_seed(width)) * 10.0 ** torch.tensor(
        [[-3.0], [0], [4]]
    )
    weight[1, 3] = 0.0
    found, tokens = quantize_weight(weight, scheme), get_scheme("mxfp4_w4a8")
    assert found.scale is not None
    assert found.scale.shape == (3, -(-width // 32))
    assert (tokens.weight, tokens.payload) == (scheme.weight, get_scheme("mxfp8").payload)
    real = dequantize_weight(found, scheme)
    codes, bytes_ = unpack_nibbles(found.values), found.scale.view(torch.uint8)
    for row in range(3):
        for group in range(found.scale.shape[1]):
            numbers = weight[row, group * 32 : group * 32 + 32].tolist()
            exponent = math.floor(math.log2(max(map(abs, numbers)))) - 2
            assert bytes_[row, group].item() == exponent + 127
            for offset, number in enumerate(numbers):
                ratio = min(abs(number) / 2.0**exponent, 6)
                nearest = min(range(8), key=lambda code: (abs(E2M1[code] - ratio), code % 2))
                at = row, group * 32 + offset
                assert codes[at].item() == nearest + 8 * (number < 0)
                assert real[at].item() == math.copysign(E2M1[nearest] * 2.0**exponent, number)


def test_mxfp4_scales_at_the_ends() -> None:
    """0 is 2^-127, also that of a group of zeros, and 255 is NaN."""
    scheme = get_scheme("mxfp4_w4a16")
    values = torch.full((3, 16), 0x72, dtype=torch.uint8)  # 1 and 6
    scale = torch.tensor([[0], [254], [255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    real = dequantize_weight(StoredMatrix(values, scale=scale), scheme)
    assert real[0, :2].tolist() == [2.0**-127, 6 * 2.0**-127]
    assert real[1, 0].item() == 2.0**127
    assert bool(real[2].isnan().all())
    zeros = quantize_weight(torch.zeros(1, 32), scheme)
    assert zeros.scale is not None
    assert zeros.scale.view(torch.uint8).tolist() == [[0]]


@pytest.mark.parametrize("name", [*SCHEMES, *NAMES, "fp8_block_64x48", "int8_block_16x80", "int4_w4a8_g32_zp_f16"])
def test_a_scheme_lacks_nothing(name: str) -> None:
    """All that a new number format needs, by file."""
    scheme, text = get_scheme(name), (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    families = {scheme.payload.family, scheme.activation.family, scheme.weight.family} - {"none"}
    row = next((row for row in FORMATS if row.takes(scheme)), None)
    weight_bits = 8 * (scheme.weight.dtype or torch.bfloat16).itemsize // scheme.weight.packed
    decoded = {"weight_bits": weight_bits} if row is not None and row.kind != "none" else {}
    rows = (row.rows if row is not None else None) or scheme.payload.dtype or torch.bfloat16
    needed = {
        "quant: the module of its families": families <= FAMILIES.keys(),
        "experts/formats.py: a row of kernels": row is not None,
        "kernels/gemm/weights.py: its kind of codes": row is not None and row.kind in getsource(decode.fn) + "none",
        "experts/default_tiles.json: a table": bool(default_table(rows, gated=True, **decoded).rows),
        "names.py: its name": name in SCHEME_NAMES or name not in SCHEMES,
        "docs/formats.md: its name": f"`{name}`" in text or name not in SCHEMES,
    }
    assert [what for what, present in needed.items() if not present] == []


def test_kernels_refuse_tokens_and_weights_that_do_not_go_together() -> None:
    for tokens, weight in (("fp8_token", "int8_w8a16_zp"), ("int8_token", "int4_w4a16"), ("nvfp4", "mxfp4_w4a16")):
        rows = get_scheme(tokens).payload
        scheme = QuantScheme(name="mixed", payload=rows, activation=rows, weight=get_scheme(weight).weight)
        with pytest.raises(ValueError, match=r"'triton' experts do not compute scheme 'mixed'.*experts=\"torch\" does"):
            row_of(scheme)


MATRIX = quantize_weight(weights()[0], get_scheme("int4_w4a16_g32_zp"))
ZP, PLAIN = get_scheme("int4_w4a16_g32_zp"), get_scheme("int4_w4a16_g32")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize_weight(torch.ones(4, 80), PLAIN), ("groups of 32", "80")),
        (lambda: quantize_weight(torch.ones(4, 7), get_scheme("int4_w4a16")), ("2 elements", "7")),
        (
            lambda: dequantize_weight(StoredMatrix(MATRIX.values[:, :40], scale=MATRIX.scale), PLAIN),
            ("groups of 32", "80"),
        ),
        (lambda: dequantize_weight(StoredMatrix(MATRIX.values, scale=MATRIX.scale), ZP), ("zero is None", "(6, 3)")),
        (lambda: dequantize_weight(MATRIX, PLAIN), ("zero is ((6, 3)", "needs None")),
        (
            lambda: dequantize_weight(StoredMatrix(MATRIX.values, scale=MATRIX.scale[:, :2]), PLAIN),
            ("(6, 2)", "(6, 3)"),
        ),
        (
            lambda: dequantize_weight(StoredMatrix(MATRIX.values, scale=MATRIX.scale.half()), PLAIN),
            ("torch.float16", "torch.bfloat16"),
        ),
        (lambda: dequantize_weight(StoredMatrix(MATRIX.values.int(), scale=MATRIX.scale), PLAIN), ("int32", "uint8")),
        (lambda: QuantScheme(name="bad", payload=PLAIN.weight), ("'bad'", "payload", "weights alone")),
    ],
)
def test_bad_input(call: object, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        call()  # type: ignore[operator]
    assert [word for word in words if word not in str(caught.value)] == []


def _layer_weights(seed: float, name: str = "int4_w4a16_g32_zp", **fields: torch.Tensor) -> ExpertWeights:
    scheme = get_scheme(name)
    w13, w2 = (quantize_weight(weights()[0][None] * seed, scheme) for _ in range(2))
    return ExpertWeights(w13=w13, w2=w2, scheme=scheme, **fields)


def test_weights_are_refitted_in_place() -> None:
    ours, other = _layer_weights(1.0, w2_bias=torch.ones(1, 4)), _layer_weights(-3.0, w2_bias=torch.zeros(1, 4))
    places = [tensor.data_ptr() for tensor in ours.tensors()]
    assert not torch.equal(ours.w13.values, other.w13.values)
    ours.refit(other)
    assert [tensor.data_ptr() for tensor in ours.tensors()] == places
    assert ours.named_tensors.keys() == {
        *(f"{name}{part}" for name in ("w13", "w2") for part in ("", "_scale", "_zero")),
        "w2_bias",
    }
    assert all(torch.equal(tensor, other.named_tensors[name]) for name, tensor in ours.named_tensors.items())


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (_layer_weights(2.0, "int4_w4a16_g32"), ("'int4_w4a16_g32_zp'", "'int4_w4a16_g32'")),
        (dataclasses.replace(_layer_weights(2.0), alternating=True), ("alternating True", "of these False and False")),
        (_layer_weights(2.0, w2_bias=torch.ones(1, 4)), ("w2_bias", "((1, 4), torch.float32)", "None")),
        (
            dataclasses.replace(_layer_weights(2.0), w2=_layer_weights(2.0).w2.map(lambda tensor: tensor[:, :3])),
            ("w2 of", "(1, 3, 48)", "(1, 6, 48)"),
        ),
    ],
    ids=["scheme", "rows", "bias", "shape"],
)
def test_other_weights_are_not_refitted(source: ExpertWeights, words: tuple[str, ...]) -> None:
    ours = _layer_weights(1.0)
    kept = {name: tensor.clone() for name, tensor in ours.named_tensors.items()}
    with pytest.raises(ValueError) as caught:
        ours.refit(source)
    assert [word for word in words if word not in str(caught.value)] == []
    assert all(torch.equal(tensor, kept[name]) for name, tensor in ours.named_tensors.items())


def test_schemes_without_a_kernel_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    odd = QuantScheme(name="odd", weight=dataclasses.replace(get_scheme("int8_w8a16").weight, granularity="tensor"))
    for _ in range(2):
        assert isinstance(
            create_experts("auto", ActivationConfig(), torch.device("cuda"), scheme=odd), ReferenceExperts
        )
    assert [record.getMessage() for record in caplog.records] == [
        "no kernel computes scheme 'odd' on this GPU: 'torch' experts serve it slowly, in float32"
    ]
