"""The torch experts against loops over rows in float64 numpy, which do their own activation and requantization."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.expert_cases import ACTIVATIONS, EXPERTS, GPT_OSS, OWN, SILU, TOPK_IDS, Case, make_case, used_rows
from helpers.sampling import thinned

from ep_moe.config import ActivationConfig, ActivationKind, Layout
from ep_moe.experts import ReferenceExperts, apply_activation, create_experts
from ep_moe.experts.grouped_gemm import CallShape
from ep_moe.experts.hopper.shapes import obstacle
from ep_moe.layout import Compact, ExpertBatch, weighted_sum
from ep_moe.quant import (
    QuantScheme,
    StoredMatrix,
    TensorFormat,
    as_bytes,
    dequantize_weight,
    get_scheme,
    quantize,
    quantize_weight,
)
from ep_moe.testing import ROW_ERROR_LIMITS
from ep_moe.weights import ExpertWeights, PerExpert

HIDDEN, INTERMEDIATE = 144, 80
COUNTS = [4, 0, 2, 10]
FORMATS = [
    *((name, torch.float32) for name in ("none", "fp8_tensor", "fp8_block", "fp8_block_ue8m0", "nvfp4")),
    *((name, torch.bfloat16) for name in ("none", "fp8_token", "fp8_block", "int8_token", "mxfp8", "int8_block_16x48")),
    *((name, torch.float16) for name in ("none", "fp8_block_32x48", "int8_w8a16_g16_zp")),
    *((name, torch.bfloat16) for name in ("fp8_w8a16", "int4_w4a16_g16_zp_f16", "int4_w4a8_g16", "mxfp4_w4a16")),
    ("int4_w4a16", torch.float32),
    ("mxfp4_w4a8", torch.float32),
    ("nvfp4_w4a16_divisor", torch.bfloat16),
]
LAYOUTS = list(Layout)


def own_activation(x: np.ndarray, kind: str, alpha: float, beta: float, limit: float | None) -> np.ndarray:
    """The activation of one row in float64, element by element."""

    def sigmoid(value: float) -> float:
        return 1 / (1 + math.exp(-value))

    ones: dict[str, Callable[[float], float]] = {
        "identity": lambda value: value,
        "relu2": lambda value: value * value if value > 0 else 0.0,
        "silu": lambda value: value * sigmoid(value),
        "gelu": lambda value: value * 0.5 * (1 + math.erf(value / math.sqrt(2))),
        "gelu_tanh": lambda value: (
            value * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)))
        ),
    }
    if not ActivationKind(kind).gated:
        return np.array([ones[kind.removesuffix("_no_mul")](value) for value in x.tolist()])
    half, most, result = len(x) // 2, math.inf if limit is None else limit, []
    for gate, up in zip(x[:half].tolist(), x[half:].tolist(), strict=True):
        g, u = min(gate, most), max(min(up, most), -most)
        if kind in ones:
            result.append(ones[kind](gate) * up)
        elif kind == "swiglu_step":
            result.append(min(ones["silu"](gate), most) * u)
        elif kind == "situ":
            u = beta * math.tanh(u / beta) if beta > 0 else u
            result.append(alpha * math.tanh(g / alpha) * sigmoid(g) * u)
        else:
            result.append(g * sigmoid(alpha * g) * (u + beta))
    return np.array(result)


def reference_e4m3(x: np.ndarray) -> np.ndarray:
    """Round to the nearest e4m3 number, ties to even: steps of 2^(exponent - 3), never below 2^-9; saturate at 448."""
    x = np.clip(x, -448, 448)
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 2.0**-6)))
    step = 2.0 ** (exponent - 3)
    return np.round(x / step) * step


def reference_group(x: np.ndarray, amax: float, scheme: QuantScheme, second: float) -> np.ndarray:
    """Quantize and dequantize values whose scale group has the largest magnitude `amax`; `second` is nvfp4's scale."""
    stored = scheme.activation
    if stored.dtype == torch.int8:
        scale = max(amax, 1e-10) / 127
        return np.clip(np.round(x / scale), -127, 127) * scale
    if stored.scale_dtype == torch.float8_e8m0fnu:
        scale = 2.0 ** (np.floor(np.log2(amax)) - 8)
        return reference_e4m3(x / scale) * scale
    if stored.dtype == torch.uint8:
        scale = second * float(reference_e4m3(np.array(amax / second / 6)))
        ratio = np.clip(x / scale, -6, 6)
        step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(ratio), 1))) - 1)
        return np.round(ratio / step) * step * scale
    scale = max(amax, 1e-10) / 448
    if stored.power_of_two:
        scale = 2.0 ** np.ceil(np.log2(scale))
    return reference_e4m3(x / scale) * scale


def reference_requantize(inner: np.ndarray, scheme: QuantScheme, static: float | None) -> np.ndarray:
    """Requantize and dequantize the rows [n, I] of one expert."""
    result = np.empty_like(inner)
    per = scheme.activation.granularity
    group = scheme.activation.block[1] if per == "group" else inner.shape[1]
    for row in range(inner.shape[0]):
        for first in range(0, inner.shape[1], group):
            shared = inner if per == "tensor" else inner[row, first : first + group]
            mine, place = inner[row, first : first + group], np.s_[row, first : first + group]
            if static is None:
                second = np.abs(inner[row]).max() / 2688
                result[place] = reference_group(mine, np.abs(shared).max(), scheme, second)
            else:
                result[place] = reference_e4m3(mine / static) * static
    return result


def stored_numbers(values: torch.Tensor, stored: TensorFormat) -> np.ndarray:
    """Stored values [.., V] decoded without their scales and zero points, [.., H] float64."""
    if stored.packed == 1:
        return values.double().numpy().copy()
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.zeros((*values.shape[:-1], 2 * values.shape[-1]))
    for parity in range(2):
        code = values.numpy() // 16**parity % 16
        four_bits = code if stored.family == "integer" else np.where(code < 8, 1, -1) * magnitude[code % 8]
        numbers[..., parity::2] = four_bits
    return numbers


def reference_weight(matrix: StoredMatrix, scheme: QuantScheme) -> np.ndarray:
    """One expert's matrix in float64."""
    stored = scheme.weight
    real = stored_numbers(matrix.values, stored)
    if stored.global_scale != "none":
        real *= matrix.global_scale.item() ** (1 if stored.global_scale == "multiplier" else -1)
    middle = (8 if stored.packed == 2 else 128) if stored.family == "integer" else 0
    if matrix.scale is not None:
        (bn, bk), s = stored.block, matrix.scale.float().double().numpy()
        zero = np.full(s.shape, middle) if matrix.zero is None else matrix.zero.double().numpy()
        for n in range(real.shape[0]):
            for k in range(real.shape[1]):
                place = {"tensor": (), "channel": (n,), "group": (n, k // bk), "block": (n // bn, k // bk)}
                at = place[stored.granularity]
                real[n, k] = (real[n, k] - zero[at]) * s[at]
    return real


def reference_rows(case: Case, activation: ActivationConfig) -> list[np.ndarray]:
    """By expert: its output rows [n, H] in float64, in the order of the received rows."""
    w, scheme, outputs = case.weights, case.weights.scheme, []
    x = stored_numbers(case.rows.x, scheme.payload)
    for expert in range(EXPERTS):
        w13, w2 = (reference_weight(matrix[expert], scheme) for matrix in (w.w13, w.w2))
        b13, b2 = (0.0 if b is None else b[expert].double().numpy() for b in (w.w13_bias, w.w2_bias))
        own = {name: tensor[expert].item() for name, tensor in w.per_expert.tensors.items()}
        up_scale, gate_scale = own.get("w13_output_scale", 1.0), own.get("w13_gate_output_scale", 1.0)
        halves = np.full(len(w13), up_scale)
        if activation.kind.gated:
            halves[: len(w13) // 2] = gate_scale
        numbers = [own.get(name, getattr(activation, name)) for name in ("alpha", "beta", "limit")]
        inner = []
        for token in range(len(TOPK_IDS)):
            if expert in TOPK_IDS[token]:
                row = x[token].copy()
                if case.rows.scale is not None:
                    group = scheme.payload.block[1] if scheme.payload.granularity == "group" else HIDDEN
                    row *= np.array([case.rows.scale[token, column // group].item() for column in range(HIDDEN)])
                inner.append(own_activation(w13 @ row * halves + b13, activation.kind.value, *numbers))
        stacked = np.array(inner).reshape(-1, INTERMEDIATE)
        if scheme.activation.quantized and len(stacked):
            static = None if w.w2_input_scale is None else w.w2_input_scale[expert].item()
            stacked = reference_requantize(stacked, scheme, static)
        elif not scheme.activation.quantized:
            stacked = torch.from_numpy(stacked).to(case.dtype).double().numpy()
        w2 = w2 * own.get("w2_output_scale", 1.0)
        outputs.append(np.array([w2 @ row + b2 for row in stacked]).reshape(-1, HIDDEN))
    return outputs


def assert_close_rows(actual: torch.Tensor, expected: np.ndarray, case: Case) -> None:
    """Compare row by row: the worst by the format's limit, and half of them by that of the model's dtype.

    float64 and float32 may requantize a value at a tie differently, a full step of fp8; that is rare, so that a median
    as large as the worst means that the intermediate is requantized wrongly.
    """
    found = actual.double().numpy()
    assert found.shape == expected.shape
    norm = np.linalg.norm(expected, axis=-1)
    errors = np.linalg.norm(found - expected, axis=-1) / np.where(norm > 0, norm, 1)
    dtype_limit = ROW_ERROR_LIMITS[str(case.dtype).removeprefix("torch.")]
    worst_limit = max(dtype_limit, ROW_ERROR_LIMITS["fp8"]) if case.weights.scheme.weight.quantized else dtype_limit
    assert errors.max() < worst_limit
    assert np.median(errors) < dtype_limit


def assert_equals_reference(case: Case, activation: ActivationConfig, *layouts: Layout) -> None:
    """Compute with and without `out`; rows with tokens are the reference's, rows without are not touched.

    The sums of all layouts have the same bits.
    """
    experts, by_expert, summed = ReferenceExperts(activation), reference_rows(case, activation), []
    for layout in layouts:
        packed = case.packed(layout)
        y = experts(packed.batch, case.weights)
        out = torch.full_like(y, math.nan)
        assert experts(packed.batch, case.weights, out=out) is out
        assert y.dtype == case.dtype
        if layout is Layout.FLAT:
            expected = np.zeros((len(TOPK_IDS), HIDDEN))
            for token, ids in enumerate(TOPK_IDS):
                for k, expert in enumerate(ids):
                    if expert >= 0:
                        index = sum(expert in earlier for earlier in TOPK_IDS[:token])
                        expected[token] += case.rows.topk_weights[token, k].item() * by_expert[expert][index]
            assert_close_rows(y, expected, case)
            assert torch.equal(y, out)
            summed.append(y)
            continue
        used = used_rows(packed.batch)
        assert packed.batch.expert_num_tokens.tolist() == COUNTS
        assert_close_rows(y[used], np.concatenate(by_expert), case)
        assert torch.equal(y[used], out[used])
        assert bool(out[~used].isnan().all())
        summed.append(weighted_sum(y, packed.token_to_row, case.rows.topk_weights))
    assert all(torch.equal(each, summed[0]) for each in summed)


@pytest.mark.parametrize(("activation", "scheme", "dtype"), thinned(["gpt-oss", "relu2"], FORMATS), ids=str)
def test_equals_the_reference_in_all_layouts(activation: str, scheme: str, dtype: torch.dtype) -> None:
    assert_equals_reference(make_case(scheme, dtype, ACTIVATIONS[activation]), ACTIVATIONS[activation], *Layout)


@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu-unlimited", "identity"])
def test_other_activations(activation: str, scheme: str) -> None:
    case = make_case(scheme, activation=ACTIVATIONS[activation])
    assert_equals_reference(case, ACTIVATIONS[activation], Layout.COMPACT)


def test_without_biases_and_static_scales() -> None:
    assert_equals_reference(make_case("none", biased=False), SILU, *Layout)
    assert_equals_reference(make_case("fp8_tensor", static=True), SILU, *Layout)


@pytest.mark.parametrize("names", [tuple(OWN), *((name,) for name in OWN)], ids="-".join)
@pytest.mark.parametrize("scheme", ["none", "fp8_token"])
def test_numbers_of_each_expert(scheme: str, names: tuple[str, ...]) -> None:
    case, activation = make_case(scheme, activation=GPT_OSS), dataclasses.replace(GPT_OSS, limit=None)
    changed = case.with_own(*names)
    assert_equals_reference(changed, activation, *(Layout if len(names) > 1 else [Layout.COMPACT]))
    assert len(list(changed.weights.tensors())) == len(list(case.weights.tensors())) + len(names)


@pytest.mark.parametrize("scheme", ["none", "fp8_token"])
def test_up_before_gate(scheme: str) -> None:
    """The same bits as [gate; up], with biases and numbers of each expert."""
    case = make_case(scheme, activation=GPT_OSS).with_own(*OWN)
    weights = case.weights
    assert weights.w13_bias is not None
    # bytes, since a CPU does not roll fp8
    swapped = dataclasses.replace(
        weights,
        w13=weights.w13.map(lambda part: as_bytes(part).roll(part.shape[1] // 2, dims=1).view(part.dtype)),
        w13_bias=weights.w13_bias.roll(weights.w13_bias.shape[1] // 2, dims=1),
        up_first=True,
    )
    batch = case.batch(Layout.COMPACT)
    expected, found = (ReferenceExperts(GPT_OSS)(batch, given) for given in (weights, swapped))
    rows = used_rows(batch)
    assert torch.equal(found[rows], expected[rows])
    assert not torch.equal(
        ReferenceExperts(GPT_OSS)(batch, dataclasses.replace(swapped, up_first=False))[rows], expected[rows]
    )
    with pytest.raises(ValueError, match="weights are up_first, activation 'relu2' has no up half"):
        ReferenceExperts(ACTIVATIONS["relu2"])(batch, dataclasses.replace(swapped, per_expert=PerExpert()))


def test_output_scales_without_a_gate() -> None:
    case = make_case("fp8_block", activation=ACTIVATIONS["relu2"]).with_own("w13_output_scale", "w2_output_scale")
    assert_equals_reference(case, ACTIVATIONS["relu2"], Layout.COMPACT)


@pytest.mark.parametrize(
    ("activation", "own", "words"),
    [
        ("silu", PerExpert(beta=torch.ones(4)), ("beta", "'silu'")),
        ("relu2", PerExpert(w13_gate_output_scale=torch.ones(4)), ("w13_gate_output_scale", "'relu2' has no gate")),
        ("gpt-oss", PerExpert(limit=torch.ones(5)), ("limit", "(5,)", "(4,)")),
        ("gpt-oss", PerExpert(w2_output_scale=torch.ones(4).half()), ("w2_output_scale", "float16", "float32")),
    ],
)
def test_numbers_of_each_expert_that_do_not_fit(activation: str, own: PerExpert, words: tuple[str, ...]) -> None:
    case = make_case(activation=ACTIVATIONS[activation])
    with pytest.raises(ValueError) as caught:
        ReferenceExperts(ACTIVATIONS[activation])(
            case.batch(Layout.COMPACT), dataclasses.replace(case.weights, per_expert=own)
        )
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("pool", ["flat", "batched"])
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("none", torch.bfloat16), *((name, torch.float32) for name in ("fp8_tensor", "fp8_block", "mxfp8", "nvfp4"))],
)
def test_rows_gathered_from_a_pool(scheme: str, dtype: torch.dtype, pool: str) -> None:
    case, experts = make_case(scheme, dtype), ReferenceExperts(SILU)
    compact, gathered = case.gathered(pool)
    used = used_rows(compact)
    y = experts(gathered, case.weights, out=torch.full((len(used), HIDDEN), math.nan, dtype=case.dtype))
    assert torch.equal(y[used], experts(compact, case.weights)[used])
    assert bool(y[~used].isnan().all())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("scheme", ["none", "fp8_tensor", "fp8_block"])
@pytest.mark.parametrize("num_rows", [0, 3])
def test_no_tokens(num_rows: int, scheme: str, layout: Layout) -> None:
    case = make_case(scheme, ids=[[-1, -1]] * num_rows)
    batch = case.batch(layout)
    out = torch.full(batch.output_shape, math.nan)
    y = ReferenceExperts(SILU)(batch, case.weights, out=out)
    untouched = torch.zeros_like(y) if layout is Layout.FLAT else torch.full_like(y, math.nan)
    torch.testing.assert_close(y, untouched, rtol=0, atol=0, equal_nan=True)


def compact(x: torch.Tensor, scale: torch.Tensor | None, scheme: QuantScheme, counts: list[int], dtype: Any) -> Compact:
    """Rows of experts, one expert behind the other."""
    num_tokens = torch.tensor(counts, dtype=torch.int32)
    return Compact(
        x=x,
        scale=scale,
        scheme=scheme,
        dtype=dtype,
        expert_row_start=(num_tokens.cumsum(0) - num_tokens).int(),
        expert_num_tokens=num_tokens,
        row_index=None,
        expected_rows=max(counts),
    )


@pytest.mark.parametrize("std", [1.0, 0.003, 1e-5, 100.0])
def test_nvfp4_experts_of_any_size_against_float(std: float) -> None:
    """Weights of that standard deviation, quantized, against the same in float: the error of 4 bits."""
    random, scheme = torch.Generator().manual_seed(4), get_scheme("nvfp4")
    w13, w2 = (torch.randn(2, *shape, generator=random) * std for shape in ((160, HIDDEN), (HIDDEN, 80)))
    weights = ExpertWeights(w13=quantize_weight(w13, scheme), w2=quantize_weight(w2, scheme), scheme=scheme)
    x = torch.randn(24, HIDDEN, generator=random)
    payload = quantize(x, scheme)
    batch = compact(payload.values, payload.scale, scheme, [12, 12], torch.float32)
    y = ReferenceExperts(SILU)(batch, weights).double()
    rows = x.unflatten(0, (2, 12)).double()
    gate, up = (rows @ w13.double().mT).chunk(2, dim=-1)
    expected = ((gate * torch.sigmoid(gate) * up) @ w2.double().mT).flatten(0, 1)
    error = (y - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 0.35
    assert 0.1 < error.median() < 0.25


@pytest.mark.parametrize("name", ["fp8_token", "fp8_block", "int8_token", "mxfp8", "nvfp4"])
def test_weights_alone_are_quantized(name: str) -> None:
    """Plain tokens on weights in a scheme: the bits of plain experts that hold the dequantized weights."""
    case, scheme = make_case(), QuantScheme(name="alone", weight=get_scheme(name).weight)
    stored = {part: quantize_weight(getattr(case.weights, part).values, scheme) for part in ("w13", "w2")}
    real = {part: StoredMatrix(dequantize_weight(matrix, scheme)) for part, matrix in stored.items()}
    batch = case.batch(Layout.COMPACT)
    y = ReferenceExperts(SILU)(
        dataclasses.replace(batch, scheme=scheme), dataclasses.replace(case.weights, **stored, scheme=scheme)
    )
    expected = ReferenceExperts(SILU)(batch, dataclasses.replace(case.weights, **real))
    used = used_rows(batch)
    assert torch.equal(y[used], expected[used])
    assert not torch.equal(y[used], ReferenceExperts(SILU)(batch, case.weights)[used])


def test_saturation_and_ties_of_the_requantized_intermediate() -> None:
    """Identity matrices pass x through; what remains is rounding to e4m3 under each expert's own static scale."""
    scheme = get_scheme("fp8_tensor")
    eye = quantize_weight(torch.eye(16).expand(2, 16, 16), scheme)
    weights = ExpertWeights(w13=eye, w2=eye, scheme=scheme, w2_input_scale=torch.tensor([1.0, 0.25]))
    values = torch.tensor([448.0, 18, 17, 1, -448, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).expand(2, 16)
    batch = compact((values / 2).to(torch.float8_e4m3fn), torch.full((2, 1), 2.0), scheme, [1, 1], torch.float32)
    y = ReferenceExperts(ACTIVATIONS["identity"])(batch, weights)
    # 17 / 2 = 8.5 ties to 8 when x is made, so 16 arrives; times 448 * (1 / 448) twice, the values are integers again
    expected = torch.tensor([[448.0, 18, 16, 1, -448], [112.0, 18, 16, 1, -112]])
    torch.testing.assert_close(y[:, :5], expected, rtol=1e-6, atol=0)
    assert torch.equal(y[:, 5:], torch.zeros(2, 11))


@pytest.mark.parametrize(("dtype", "one"), [(torch.float32, 1.0), (torch.float16, 0.0), (torch.bfloat16, 0.0)])
def test_the_intermediate_is_rounded_to_the_model_dtype(dtype: torch.dtype, one: float) -> None:
    """2049 rounds to 2048 in both 16-bit formats, so that their difference shows the rounding."""
    w13, w2 = torch.zeros(1, 16, 16), torch.zeros(1, 16, 16)
    w13[0, 0, 0], w13[0, 0, 1], w13[0, 1, 0] = 2048, 1, 2048
    w2[0, 0, 0], w2[0, 0, 1] = 1, -1
    batch = compact(torch.ones(1, 16, dtype=dtype), None, get_scheme("none"), [1], dtype)
    weights = ExpertWeights(w13=StoredMatrix(w13.to(dtype)), w2=StoredMatrix(w2.to(dtype)))
    assert ReferenceExperts(ACTIVATIONS["identity"])(batch, weights)[0, 0].item() == one


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_activation_equals_its_formula(name: str, dtype: torch.dtype) -> None:
    activation = ACTIVATIONS[name]
    x = (torch.randn(6, 64, generator=torch.Generator().manual_seed(5)) * 6).to(dtype)
    numbers = activation.kind.value, activation.alpha, activation.beta, activation.limit
    expected = np.stack([own_activation(row, *numbers) for row in x.double().numpy()])
    actual = apply_activation(x, activation)
    assert actual.dtype == torch.float32
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (1.0, 2.0, 2.5373873),  # sigmoid(1.702) * 3
        (9.0, 2.0, 20.9998594),  # the gate is clamped to 7
        (-9.0, 2.0, -6.00953396e-6),  # and from above alone
        (1.0, 9.0, 6.76636613),  # up is clamped to 7
        (1.0, -9.0, -5.0747746),  # and to -7
    ],
)
def test_gpt_oss_numbers(gate: float, up: float, expected: float) -> None:
    found = apply_activation(torch.tensor([gate, up]), dataclasses.replace(GPT_OSS, limit=7.0))
    np.testing.assert_allclose(found.numpy(), [expected], rtol=1e-6)


def test_an_odd_width_cannot_be_halved() -> None:
    with pytest.raises(ValueError, match=r"width \(5\) must be even .*'silu'"):
        apply_activation(torch.ones(2, 5), SILU)


def _batch(**changes: object) -> Callable[[Case], tuple[ExpertBatch, ExpertWeights]]:
    return lambda case: (dataclasses.replace(case.batch(Layout.COMPACT), **changes), case.weights)  # type: ignore[arg-type]


def _flat(**changes: object) -> Callable[[Case], tuple[ExpertBatch, ExpertWeights]]:
    return lambda case: (dataclasses.replace(case.batch(Layout.FLAT), **changes), case.weights)  # type: ignore[arg-type]


def _weights(**changes: object) -> Callable[[Case], tuple[ExpertBatch, ExpertWeights]]:
    return lambda case: (case.batch(Layout.COMPACT), dataclasses.replace(case.weights, **changes))  # type: ignore[arg-type]


def _matrix(name: str, **changes: object) -> Callable[[Case], tuple[ExpertBatch, ExpertWeights]]:
    return lambda case: _weights(**{name: dataclasses.replace(getattr(case.weights, name), **changes)})(case)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scheme", "change", "words"),
    [
        ("none", _batch(x=torch.ones(24, 128)), ("x is (24, 128)", "(24, 144)")),
        ("none", _batch(x=torch.ones(24, 144).half()), ("x is", "float16", "float32")),
        ("none", _batch(x=torch.ones(144)), ("(144,)", "2 or 3 dimensions")),
        ("none", _batch(dtype=torch.float64), ("torch.float64", "float32, bfloat16, float16")),
        ("none", _batch(scheme=get_scheme("fp8_token")), ("'fp8_token'", "'none'")),
        ("none", _batch(scale=torch.ones(24, 1)), ("batch has a scale (24, 1)", "'none'")),
        ("none", _batch(expert_num_tokens=torch.ones(5, dtype=torch.int32)), ("expert_num_tokens", "(5,)", "(4,)")),
        ("none", _batch(expert_row_start=torch.ones(4, dtype=torch.int64)), ("expert_row_start", "int64", "int32")),
        ("none", _batch(expert_row_start=torch.full((4,), 32, dtype=torch.int32)), ("[32, 36)", "(32, 144)")),
        ("none", _flat(row_index=None), ("row_index", "FLAT")),
        ("none", _flat(topk_weights=torch.ones(11, 3)), ("topk_weights", "(11, 3)", "(11, 2)")),
        ("none", _matrix("w13", values=torch.ones(4, 161, 144)), ("161", "'silu'", "even")),
        ("none", _matrix("w2", values=torch.ones(4, 144, 160)), ("w2", "(4, 144, 160)", "(4, 144, 80)")),
        ("none", _matrix("w2", values=torch.ones(4, 144, 80).half()), ("w2", "float16", "float32")),
        ("none", _weights(w13_bias=torch.ones(4, 80)), ("w13_bias", "(4, 80)", "(4, 160)")),
        ("none", _weights(w2_bias=torch.ones(4, 144).int()), ("w2_bias", "int32", "float")),
        ("none", _matrix("w2", scale=torch.ones(4)), ("w2 has a scale (4,)", "'none'")),
        ("none", _weights(w2_input_scale=torch.ones(4)), ("w2_input_scale", "'none'")),
        ("fp8_token", _weights(w2_input_scale=torch.ones(4)), ("w2_input_scale", "'fp8_token'", "token")),
        ("fp8_tensor", _weights(w2_input_scale=torch.ones(1)), ("w2_input_scale", "(1,)", "(4,)")),
        ("fp8_tensor", _matrix("w2", scale=None), ("w2_scale", "missing", "(4,)")),
        ("fp8_block", _matrix("w13", scale=torch.ones(4, 2, 1)), ("w13_scale", "(4, 2, 1)", "(4, 2, 2)")),
        ("fp8_block", _batch(scale=None), ("scale", "missing", "'fp8_block'")),
        ("fp8_block", _matrix("w2", values=torch.ones(4, 144, 80)), ("w2", "float32", "float8_e4m3fn")),
        ("mxfp8", _matrix("w2", scale=torch.ones(4, 144, 3)), ("w2_scale", "float32", "float8_e8m0fnu")),
        ("nvfp4", _matrix("w2", global_scale=None), ("w2_global_scale is missing", "'nvfp4'", "(4,)")),
        ("nvfp4", _matrix("w13", global_scale=torch.ones(1)), ("w13_global_scale", "(1,)", "(4,)")),
        ("mxfp8", _matrix("w13", global_scale=torch.ones(4)), ("w13 has a global scale (4,)", "'mxfp8'")),
        ("fp8_block", _matrix("w13", zero=torch.ones(4, 2, 2)), ("w13 has a zero (4, 2, 2)", "'fp8_block'")),
        ("nvfp4", _matrix("w2", values=torch.ones(4, 144, 80).byte()), ("w2", "(4, 144, 80)", "(4, 144, 40)")),
    ],
)
def test_batch_and_weights_that_do_not_fit(
    scheme: str, change: Callable[[Case], tuple[ExpertBatch, ExpertWeights]], words: tuple[str, ...]
) -> None:
    batch, weights = change(make_case(scheme))
    with pytest.raises(ValueError) as caught:
        ReferenceExperts(SILU)(batch, weights)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (torch.ones(4, HIDDEN), ("out", "(4, 144)", "(11, 144)")),
        (torch.ones(11, HIDDEN).bfloat16(), ("out", "bfloat16", "float32")),
    ],
)
def test_out_that_does_not_fit(out: torch.Tensor, words: tuple[str, ...]) -> None:
    case = make_case()
    with pytest.raises(ValueError) as caught:
        ReferenceExperts(SILU)(case.batch(Layout.FLAT), case.weights, out=out)
    assert [word for word in words if word not in str(caught.value)] == []


def test_experts_by_name() -> None:
    for name in ("auto", "torch"):
        experts = create_experts(name, GPT_OSS, torch.device("cpu"))
        assert (type(experts), experts.activation) == (ReferenceExperts, GPT_OSS)
    with pytest.raises(RuntimeError, match="'triton' on a CPU need TRITON_INTERPRET=1"):
        create_experts("triton", SILU, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"experts \('cutlass'\) is not one of auto, torch, triton, hopper"):
        create_experts("cutlass", SILU, torch.device("cpu"))
    rows = get_scheme("nvfp4").payload
    mixed = QuantScheme(name="mixed", payload=rows, activation=rows, weight=get_scheme("mxfp8").weight)
    assert type(create_experts("auto", SILU, torch.device("cuda"), scheme=mixed)) is ReferenceExperts
    with pytest.raises(ValueError, match=r"'triton' experts do not compute scheme 'mixed'.*experts=\"torch\" does"):
        create_experts("triton", SILU, torch.device("cuda"), scheme=mixed)
    with pytest.raises(ValueError, match=r"device \(meta\) is not one of cpu, cuda"):
        create_experts("auto", SILU, torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("scheme", "dtype"), FORMATS, ids=str)
def test_cuda_equals_the_cpu(scheme: str, dtype: torch.dtype, layout: Layout) -> None:
    case = make_case(scheme, dtype, GPT_OSS)
    packed, experts = case.packed(layout), ReferenceExperts(GPT_OSS)
    used = used_rows(packed.batch) if layout is not Layout.FLAT else torch.ones(len(TOPK_IDS), dtype=torch.bool)
    expected = experts(packed.batch, case.weights)[used]
    y = experts(to_cuda(packed.batch), to_cuda(case.weights)).cpu()[used]
    assert_close_rows(y, expected.double().numpy(), case)


def to_cuda(value: Any) -> Any:
    """Copy a tensor, or a dataclass and all tensors in it, to the GPU."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    if not dataclasses.is_dataclass(value):
        return value
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return dataclasses.replace(value, **{name: to_cuda(part) for name, part in fields.items()})


def test_which_calls_kernels_take() -> None:
    def shape(scheme: str, **changes: object) -> CallShape:
        case = make_case(scheme, torch.bfloat16)
        batch = case.batch(Layout.BATCHED)
        return dataclasses.replace(CallShape.of(batch, case.weights, SILU), **changes)

    assert obstacle(shape("none")) is None
    assert obstacle(shape("none", dtype=torch.float16)) is None
    for scheme in ("fp8_block", "fp8_token", "fp8_tensor"):
        assert obstacle(shape(scheme, intermediate=256)) is None
    for scheme in ("int8_w8a16", "int4_w4a16", "mxfp4_w4a16"):  # weights are decoded in words if rows are whole words
        folded = scheme == "mxfp4_w4a16"
        assert shape(scheme).decodes_pairs(folded=folded)
        assert not shape(scheme, hidden=510).decodes_pairs(folded=folded)
        assert not shape(scheme, intermediate=338).decodes_pairs(folded=folded)
    assert obstacle(shape("none", alternating=True, hidden=192)) is None
    assert obstacle(shape("fp8_token", alternating=True, hidden=384)) is None
    for wrong, words in (
        (shape("none", dtype=torch.float32), "scheme 'none' in torch.float32"),
        (shape("mxfp8"), "scheme 'mxfp8'"),
        (shape("fp8_block_64x32"), r"blocks of scales are (64, 32), not 128 x 128"),
        (shape("fp8_block", intermediate=336), "intermediate (336) is no multiple of 128"),
        (shape("none", alternating=True, hidden=208), "rows of w13 alternate, and hidden (208) is no multiple of 64"),
        (shape("fp8_token", alternating=True, hidden=192), "hidden (192) is no multiple of 128"),
        (shape("none", hidden=511, gathered=True), "rows of hidden (511) columns are no multiple of 16 bytes"),
        (shape("fp8_token", intermediate=72), "rows of intermediate (72) columns are no multiple of 16 bytes"),
        (shape("none", x_stride=100), "rows of x are 200 bytes apart, no multiple of 16"),
        (shape("fp8_token", scale_strides=(64, 2, 1)), "scales of x lie (64, 2, 1) apart"),
    ):
        assert words in str(obstacle(wrong))
