"""vLLM's batched calls against oracles: its documented prepare, finalize, quantization and experts, in float64.

Letters: E experts, T tokens, K top-k, H hidden, I intermediate, C rows of an expert.
"""

import dataclasses
import enum
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from helpers.calls import assert_compiles, assert_named, moved
from helpers.experts_oracle import (
    EXPERTS,
    HIDDEN,
    INNER,
    LIMITS,
    ROUNDED_LIMIT,
    TOKENS,
    TOPK,
    Format,
    Matrix,
    expert_rows,
    flags,
    generator,
    made,
    rounded,
    routed_rows,
)

from ep_moe.functional.vllm import (
    BatchedPrepareAndFinalize,
    BatchedTritonExperts,
    FusedMoEActivationFormat,
    FusedMoEQuantConfig,
    NaiveBatchedExperts,
    batched_moe_kernel_quantize_input,
    invoke_moe_batched_triton_kernel,
)
from ep_moe.testing import worst_row_error

HEIGHT = 24
COUNTS = [5, 0, HEIGHT, 1, 7, 2]
CONFIG = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}
FP8, INT8 = torch.float8_e4m3fn, torch.int8
DTYPES = {"fp8": FP8, "int8": INT8}


def stored(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    """x / scale, in float32, as a stored number in float64."""
    largest = 448.0 if dtype == FP8 else 127.0
    numbers = (x.float() / scale.float()).clamp(-largest, largest)
    return (numbers.to(FP8) if dtype == FP8 else numbers.round()).double()


def scales_of(x: torch.Tensor, dtype: torch.dtype, per: str, group: int = 16) -> torch.Tensor:
    """Scales of rows [n, W] by "tensor", "token" or "group", float64 but rounded to float32."""
    tiles = {"tensor": x.reshape(1, 1, -1), "token": x.unsqueeze(1), "group": x.unflatten(1, (-1, group))}[per]
    return (tiles.double().abs().amax(2).clamp(min=1e-10) / (448.0 if dtype == FP8 else 127.0)).float().double()


def spread(scale: torch.Tensor, width: int) -> torch.Tensor:
    return scale if scale.shape[-1] == 1 else scale.repeat_interleave(width // scale.shape[-1], -1)


BLOCK = [32, 16]
FP8_FLAG, INT8_FLAG = flags(use_fp8_w8a8=True), flags(use_int8_w8a8=True)
EACH, ALONE, INT4 = flags(per_act_token_quant=True), flags(use_int8_w8a16=True), flags(use_int4_w4a16=True)
FORMS = {
    "none": Format(flags={}),
    "fp8 tensor": Format(flags=FP8_FLAG, codes="fp8", scales="tensor", rows="fp8 tensor"),
    "fp8 tensor channel": Format(flags=FP8_FLAG, codes="fp8", scales="channel", rows="fp8 tensor"),
    "fp8 token": Format(flags=FP8_FLAG | EACH, codes="fp8", scales="channel", rows="fp8 token"),
    "fp8 token tensor": Format(flags=FP8_FLAG | EACH, codes="fp8", scales="tensor", rows="fp8 token"),
    "fp8 block": Format(flags=FP8_FLAG | flags(block_shape=BLOCK), codes="fp8", scales="block", rows="fp8 group"),
    "int8 token": Format(flags=INT8_FLAG | EACH, codes="int8", scales="channel", rows="int8 token"),
    "int8 tensor": Format(flags=INT8_FLAG, codes="int8", scales="tensor", rows="int8 tensor"),
    "int8 block": Format(flags=INT8_FLAG | flags(block_shape=BLOCK), codes="int8", scales="block", rows="int8 group"),
    "int8 alone": Format(flags=ALONE, codes="int8", scales="channel"),
    "int8 alone groups": Format(flags=ALONE | flags(block_shape=[0, 32]), codes="int8", scales=32),
    "uint8 groups": Format(flags=ALONE | flags(block_shape=[0, 32]), codes="uint8", scales=32, zero=True),
    "int4": Format(flags=INT4, codes="int4", scales="channel", scale_dtype=torch.bfloat16),
    "int4 groups": Format(flags=INT4 | flags(block_shape=[0, 16]), codes="int4", scales=16, zero=True),
}


def pair(form: Format, dtype: torch.dtype, seeds: tuple[int, int], halves: int = 2) -> tuple[Matrix, Matrix]:
    """w1 and w2."""
    return made(form, halves * INNER, HIDDEN, dtype, seeds[0]), made(form, HIDDEN, INNER, dtype, seeds[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of all experts as a call takes them, NaN where there is no token, and the real numbers of the tokens."""

    x: torch.Tensor
    scale: torch.Tensor | None
    real: torch.Tensor


def make_batch(form: Format, dtype: torch.dtype, seed: int) -> Batch:
    x = torch.randn(EXPERTS, HEIGHT, HIDDEN, generator=generator(seed)).to(dtype)
    real = x.double()
    for expert, count in enumerate(COUNTS):
        x[expert, count:] = torch.nan
    if form.rows == "none":
        return Batch(x=x, scale=None, real=real)
    kind, per = form.rows.split()
    values = torch.full(x.shape, 127, dtype=torch.uint8)
    shape = {"tensor": (1, 1), "token": (HEIGHT, 1), "group": (HEIGHT, HIDDEN // 16)}[per]
    scales = torch.full((EXPERTS, *shape), torch.nan)
    for expert, count in enumerate(COUNTS):
        if count:
            scale = scales_of(x[expert, :count], DTYPES[kind], per)
            numbers = stored(real[expert, :count], DTYPES[kind], spread(scale, HIDDEN))
            scales[expert, : scale.shape[0]] = scale.float()
            values[expert, :count] = numbers.float().to(DTYPES[kind]).view(torch.uint8)
            real[expert, :count] = numbers * spread(scale, HIDDEN)
    return Batch(x=values.view(DTYPES[kind]), scale=scales, real=real)


ACTIVATIONS: dict[str, dict[str, Any]] = {  # by vLLM's names, as SGLang's arguments
    "silu": {},
    "gelu": {"activation": "gelu"},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "swigluoai": {"gemm1_alpha": 1.702, "gemm1_limit": 7.0},
    "swiglustep": {"gemm1_limit": 7.0},
    "silu_no_mul": {"activation": "silu", "is_gated": False},
    "gelu_no_mul": {"activation": "gelu", "is_gated": False},
    "gelu_tanh_no_mul": {"activation": "gelu_tanh", "is_gated": False},
    "relu2_no_mul": {"activation": "relu2", "is_gated": False},
}


def expected(batch: Batch, w1: Matrix, w2: Matrix, form: Format, dtype: torch.dtype, **more: Any) -> list[torch.Tensor]:
    """The outputs of each expert's tokens, one [n, H] for each expert."""
    how, static = str(dtype).removeprefix("torch.") if form.rows == "none" or more.get("naive") else form.rows, None
    outputs, options = [], ACTIVATIONS[more.get("activation", "silu")]
    for expert, count in enumerate(COUNTS):
        if more.get("static") is not None:
            static = float(more["static"].reshape(-1)[expert % more["static"].numel()])
        x, matrices = batch.real[expert, : max(count, 1)], (w1.real[expert], w2.real[expert])
        outputs.append(expert_rows(x, *matrices, how, static=static, **options)[:count])
    return outputs


def compare(found: torch.Tensor, outputs: list[torch.Tensor], limit: float) -> None:
    """Rows of tokens are as expected, those that are no token are still NaN."""
    for expert, count in enumerate(COUNTS):
        assert bool(found[expert, count:].isnan().all())
        if count:
            assert float(worst_row_error(found[expert, :count], outputs[expert])) < limit


def limit_of(form: Format, dtype: torch.dtype) -> float:
    return LIMITS[dtype] if form.rows == "none" else ROUNDED_LIMIT


def counts() -> torch.Tensor:
    """As `prepare` returns them: of all ranks' experts, those of others zero."""
    return torch.tensor([*COUNTS, 0, 0], dtype=torch.int32)


def apply_arguments(
    form: Format, dtype: torch.dtype, seed: int = 1, halves: int = 2
) -> tuple[dict[str, Any], Batch, Matrix, Matrix]:
    batch = make_batch(form, dtype, seed)
    w1, w2 = pair(form, dtype, (seed + 1, seed + 2), halves)
    given: dict[str, Any] = {
        "output": torch.full((EXPERTS, HEIGHT, HIDDEN), torch.nan, dtype=dtype),
        "hidden_states": batch.x,
        "w1": w1.values,
        "w2": w2.values,
        "topk_ids": torch.zeros(TOKENS, TOPK, dtype=torch.int32),
        "activation": "silu",
        "global_num_experts": EXPERTS + 2,
        "expert_map": None,
        "w1_scale": w1.scale,
        "w2_scale": w2.scale,
        "w1_zp": w1.zero,
        "w2_zp": w2.zero,
        "a1q_scale": batch.scale,
        "a2_scale": None,
        "workspace13": torch.empty(0),
        "workspace2": torch.empty(0),
        "expert_num_tokens": counts(),
    }
    return given, batch, w1, w2


@pytest.mark.parametrize("make", [BatchedTritonExperts, NaiveBatchedExperts])
@pytest.mark.parametrize("name", FORMS)
def test_experts(name: str, make: Any) -> None:
    form = FORMS[name]
    given, batch, w1, w2 = apply_arguments(form, torch.bfloat16)
    naive = make is NaiveBatchedExperts
    experts = make(HEIGHT, 1, **form.flags)
    assert experts.apply(**given) is None
    compare(given["output"], expected(batch, w1, w2, form, torch.bfloat16, naive=naive), limit_of(form, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["none", "fp8 token", "int4 groups"])
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "silu"])
def test_dtypes_and_activations(activation: str, name: str, dtype: torch.dtype) -> None:
    """By their names, and as members of vLLM's enumeration, which have these as values."""
    form = FORMS[name]
    given, batch, w1, w2 = apply_arguments(form, dtype, halves=1 if activation.endswith("_no_mul") else 2)
    member = enum.Enum("Member", {"IT": activation}).IT
    BatchedTritonExperts(HEIGHT, 1, **form.flags).apply(**given | {"activation": member})
    compare(given["output"], expected(batch, w1, w2, form, dtype, activation=activation), limit_of(form, dtype))


@pytest.mark.parametrize("count", [1, EXPERTS])
@pytest.mark.parametrize("name", ["fp8 tensor", "fp8 tensor channel", "int8 tensor"])
def test_static_scales(name: str, count: int) -> None:
    form = FORMS[name]
    given, batch, w1, w2 = apply_arguments(form, torch.bfloat16)
    static = torch.linspace(0.015, 0.02, count)
    BatchedTritonExperts(HEIGHT, 1, **form.flags).apply(**given | {"a2_scale": static})
    compare(given["output"], expected(batch, w1, w2, form, torch.bfloat16, static=static), ROUNDED_LIMIT)


def test_weights_are_read_again() -> None:
    """Calls keep what they have checked; later writes to the same tensors are seen."""
    form = FORMS["fp8 token"]
    given, batch, w1, w2 = apply_arguments(form, torch.bfloat16)
    experts = BatchedTritonExperts(HEIGHT, 1, **form.flags)
    experts.apply(**given)
    given["w2_scale"] *= 2
    w2 = dataclasses.replace(w2, real=w2.real * 2)
    experts.apply(**given)
    compare(given["output"], expected(batch, w1, w2, form, torch.bfloat16), ROUNDED_LIMIT)


def test_sizes_and_attributes() -> None:
    a, rest = torch.empty(5, HIDDEN, dtype=torch.float16), (None, 5, 2 * INNER, HIDDEN, TOPK, 16, 4)
    found = BatchedTritonExperts(HEIGHT, 2).workspace_shapes(a, *rest)
    assert found == ((4, 48, 2 * INNER), (4, 48, INNER), (4, 48, HIDDEN), torch.float16)
    assert BatchedTritonExperts(HEIGHT, 2).workspace_shapes(a, None, 5, 32, 64, 1, 16, 4)[0] == (4, 48, 64)
    found = NaiveBatchedExperts(HEIGHT, 2).workspace_shapes(a, *rest)
    assert found == ((4, 48, HIDDEN), (48, 2 * INNER), (4, 48, HIDDEN), torch.float16)
    with pytest.raises(ValueError, match=r"a is \(1, 5, 64\); \[tokens, hidden\] needed"):
        NaiveBatchedExperts(HEIGHT, 2).workspace_shapes(a[None], *rest)
    experts = BatchedTritonExperts(HEIGHT, 2, use_fp8_w8a8=True, block_shape=BLOCK)
    assert (experts.use_fp8_w8a8, experts.use_int4_w4a16, experts.quant_dtype) == (True, False, FP8)
    assert (experts.max_num_tokens, experts.num_dispatchers, experts.block_shape) == (HEIGHT, 2, BLOCK)
    assert experts.activation_formats == (FusedMoEActivationFormat.BatchedExperts,) * 2
    assert (experts.supports_chunking(), experts.supports_expert_map()) == (False, True)
    exchange = BatchedPrepareAndFinalize(HEIGHT, 4, 2, 1)
    assert exchange.activation_format is FusedMoEActivationFormat.BatchedExperts
    assert (exchange.max_num_tokens_per_rank(), exchange.num_dispatchers()) == (HEIGHT, 2)
    assert exchange.topk_indices_dtype() is None


def test_dequant() -> None:
    t = torch.randn(40, 36).to(FP8)
    whole = NaiveBatchedExperts(HEIGHT, 1, use_fp8_w8a8=True)
    assert torch.equal(whole.dequant(t, torch.tensor([[2.0]])), t.float() * 2)
    block = NaiveBatchedExperts(HEIGHT, 1, use_fp8_w8a8=True, block_shape=BLOCK)
    scale = torch.rand(2, 3)
    found = block.dequant(t, scale)
    assert [float(found[i, j] / t[i, j].float()) for i, j in ((0, 15), (32, 16), (39, 35))] == pytest.approx(
        [float(scale[0, 0]), float(scale[1, 1]), float(scale[1, 2])]
    )
    with pytest.raises(ValueError, match=r"quant_dtype \(None\)"):
        NaiveBatchedExperts(HEIGHT, 1).dequant(t, scale)


# One GEMM


GEMM_FORMS = {name: form for name, form in FORMS.items() if name != "int8 tensor"}


@pytest.mark.parametrize("strided", [False, True], ids=["", "strided"])
@pytest.mark.parametrize("name", GEMM_FORMS)
def test_gemm(name: str, strided: bool) -> None:
    """int8 by int8 has no flag here."""
    form, dtype = GEMM_FORMS[name], torch.bfloat16
    batch, weight = make_batch(form, dtype, 5), made(form, INNER, HIDDEN, dtype, 6)
    C = torch.full((EXPERTS, HEIGHT, INNER), torch.nan, dtype=torch.float32 if strided else dtype)  # noqa: N806
    if strided:
        C = C.transpose(0, 1).contiguous().transpose(0, 1)  # noqa: N806
    names = ("use_fp8_w8a8", "use_int8_w8a16", "use_int4_w4a16")
    invoke_moe_batched_triton_kernel(
        A=batch.x,
        B=weight.values,
        C=C,
        expert_num_tokens=counts(),
        compute_type=dtype if strided else tl.bfloat16,
        A_scale=batch.scale,
        B_scale=weight.scale,
        B_zp=weight.zero,
        **{flag: form.flags.get(flag, False) for flag in names},
        config=CONFIG,
        per_act_token_quant=form.flags.get("per_act_token_quant", False),
        block_shape=form.flags.get("block_shape"),
    )
    outputs = [batch.real[expert, :count] @ weight.real[expert].T for expert, count in enumerate(COUNTS)]
    compare(C, outputs, LIMITS[dtype])
    assert torch.equal(C.nan_to_num(), C.nan_to_num().bfloat16().to(C.dtype))  # rounded to compute_type


# Quantization


@pytest.mark.parametrize("per", ["tensor", "token", "group"])
@pytest.mark.parametrize("dtype", [FP8, INT8], ids=["fp8", "int8"])
def test_quantization(dtype: torch.dtype, per: str) -> None:
    x = make_batch(FORMS["none"], torch.bfloat16, 7).x
    block = BLOCK if per == "group" else None
    call = batched_moe_kernel_quantize_input
    values, scales = call(x, None, HEIGHT, EXPERTS, 2 * INNER, counts(), dtype, per == "token", block)
    assert values.dtype == dtype
    for expert, count in enumerate(COUNTS):
        scale = scales_of(x[expert, :count], dtype, per) if count else torch.zeros(0, scales.shape[2])
        assert torch.equal(scales[expert, : scale.shape[0]], scale.float())
        assert bool((scales[expert, scale.shape[0] :] == 0).all())
        if count:
            assert torch.equal(values[expert, :count].double(), stored(x[expert, :count], dtype, spread(scale, HIDDEN)))


@pytest.mark.parametrize("per", ["tensor", "token"])
def test_static_quantization(per: str) -> None:
    x, call = make_batch(FORMS["none"], torch.float32, 7).x, batched_moe_kernel_quantize_input
    given = torch.linspace(0.01, 0.03, EXPERTS).reshape(EXPERTS, 1, 1)
    for scale in (given, given[0, 0], given.expand(-1, HEIGHT, 1) if per == "token" else given[:, 0]):
        values, scales = call(x, scale, HEIGHT, EXPERTS, INNER, counts(), INT8, per == "token")
        for expert, count in enumerate(COUNTS):
            own = scale.reshape(-1)[0] if scale.numel() == 1 else given[expert, 0, 0]
            assert torch.equal(values[expert, :count], (x[expert, :count] / own).clamp(-127, 127).round().to(INT8))
            assert bool((scales[expert, :count] == own).all())


def test_nothing_to_quantize() -> None:
    x, scale = torch.randn(EXPERTS, HEIGHT, HIDDEN), torch.rand(EXPERTS * HEIGHT, 4)
    values, found = batched_moe_kernel_quantize_input(x, scale, HEIGHT, EXPERTS, INNER, counts(), None, False)
    assert values is x
    assert found is not None
    assert torch.equal(found, scale.view(EXPERTS, HEIGHT, 4))
    assert batched_moe_kernel_quantize_input(x, None, HEIGHT, EXPERTS, INNER, counts(), None, False)[1] is None


# Prepare and finalize


def routing(seed: int = 3, num_experts: int = 2 * EXPERTS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, weights and ids, with ids of no expert."""
    random = generator(seed)
    ids = torch.rand(TOKENS, num_experts, generator=random).argsort(1)[:, :TOPK].int()
    ids[3, 1], ids[5] = -1, -1
    a1 = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16()
    return a1, torch.rand(TOKENS, TOPK, generator=random) + 0.1, ids


CONFIGS = {
    "none": FusedMoEQuantConfig(),
    "fp8 tensor": FusedMoEQuantConfig.make(use_fp8_w8a8=True),
    "fp8 token": FusedMoEQuantConfig.make(use_fp8_w8a8=True, per_act_token_quant=True),
    "fp8 block": FusedMoEQuantConfig.make(use_fp8_w8a8=True, block_shape=BLOCK),
    "int8 token": SimpleNamespace(quant_dtype=INT8, per_act_token_quant=True, block_shape=None),  # of another library
}


def own_rows(ids: torch.Tensor, own: int, mapped: torch.Tensor | None, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of local expert `own`, in order, and the column of each one's choice."""
    wanted = rank * EXPERTS + own if mapped is None else int((mapped == own).nonzero()[0])
    return (ids == wanted).nonzero(as_tuple=True)


@pytest.mark.parametrize("on_input", [False, True], ids=["", "weights-on-input"])
@pytest.mark.parametrize("mapped", [False, True], ids=["", "map"])
@pytest.mark.parametrize("name", CONFIGS)
def test_prepare_and_finalize(name: str, mapped: bool, on_input: bool) -> None:
    config, rank = CONFIGS[name], 1
    a1, weights, ids = routing()
    expert_map = None
    if mapped:
        expert_map = torch.full((2 * EXPERTS,), -1, dtype=torch.int32)
        expert_map[[7, 0, 3, 11, 4, 8]] = torch.arange(EXPERTS, dtype=torch.int32)
    exchange = BatchedPrepareAndFinalize(HEIGHT, EXPERTS, 1, rank)
    kept = a1.clone()
    x, scale, found, none, nothing = exchange.prepare(
        a1, None, None, weights, ids, 2 * EXPERTS, expert_map, on_input, config
    )
    assert torch.equal(a1, kept)
    assert (none, nothing) == (None, None)
    per = "none" if config.quant_dtype is None else "group" if config.block_shape else "token"
    per = "tensor" if per == "token" and not config.per_act_token_quant else per
    shape = (
        None
        if per == "none"
        else FusedMoEQuantConfig(
            config.quant_dtype, config.per_act_token_quant, False, config.block_shape
        ).batched_scale_shape(EXPERTS, HEIGHT, HIDDEN)
    )
    assert (None if scale is None else tuple(scale.shape)) == shape
    assert x.shape == (EXPERTS, HEIGHT, HIDDEN)
    y = torch.full((EXPERTS, HEIGHT, HIDDEN), torch.nan, dtype=torch.bfloat16)
    total = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for own in range(EXPERTS):
        token, column = own_rows(ids, own, expert_map, rank)
        count = len(token)
        assert int(found[own]) == count
        assert bool((x[own, count:].double() == 0).all())
        result = torch.randn(count, HIDDEN, generator=generator(own)).bfloat16()
        y[own, :count] = result
        factor = weights[token, column, None]
        total[token] += result.double() * (1 if on_input else factor.double())
        if not count:
            continue
        rows = a1[token]
        if on_input:
            rows = rows * factor.bfloat16()
        if scale is None:
            assert torch.equal(x[own, :count], rows)
            continue
        needed = scales_of(rows, config.quant_dtype, per)
        assert torch.equal(scale[own, : needed.shape[0]], needed.float())
        assert torch.equal(x[own, :count].double(), stored(rows, config.quant_dtype, spread(needed, HIDDEN)))
    assert found.shape == (2 * EXPERTS,)
    assert bool((found[EXPERTS:] == 0).all())
    output = torch.full((TOKENS, HIDDEN), torch.nan, dtype=torch.bfloat16)
    exchange.finalize(output, y, weights, ids, on_input)
    idle = (total == 0).all(1)
    assert int(idle.sum()) >= 1
    assert bool((output[idle] == 0).all())
    assert float(worst_row_error(output[~idle], total[~idle])) < LIMITS[torch.bfloat16]


@pytest.mark.parametrize("topk", [1, TOPK])
@pytest.mark.parametrize("on_input", [False, True], ids=["", "weights-on-input"])
@pytest.mark.parametrize("name", ["fp8 tensor", "fp8 token"])
def test_static_scales_of_tokens(name: str, on_input: bool, topk: int) -> None:
    config = CONFIGS[name]
    a1, weights, ids = routing()
    weights, ids = weights[:, :topk], ids[:, :topk]
    scale = torch.linspace(0.01, 0.02, TOKENS)[:, None] if config.per_act_token_quant else torch.tensor([0.015])
    exchange = BatchedPrepareAndFinalize(HEIGHT, EXPERTS, 1, 0)
    x, found, *_ = exchange.prepare(a1, scale, None, weights, ids, 2 * EXPERTS, None, on_input, config)
    assert found is not None
    names = ("quant_dtype", "per_act_token_quant", "block_shape")
    newer = SimpleNamespace(**{part: getattr(config, part) for part in names}, a1_scale=scale)
    again, *_ = exchange.prepare(a1, None, None, weights, ids, 2 * EXPERTS, None, on_input, newer)
    assert torch.equal(again.view(torch.uint8), x.view(torch.uint8))
    for own in range(EXPERTS):
        token, column = own_rows(ids, own, None, 0)
        rows = a1[token] * weights[token, column, None].bfloat16() if on_input else a1[token]
        needed = scale[token] if config.per_act_token_quant else scale.expand(1, 1)
        if len(token):
            assert torch.equal(found[own, : len(token) if config.per_act_token_quant else 1], needed)
            assert torch.equal(x[own, : len(token)].double(), stored(rows, FP8, needed))


def test_an_expert_twice_is_one_row() -> None:
    a1, weights, ids = routing()
    ids[0] = 2
    exchange = BatchedPrepareAndFinalize(HEIGHT, 2 * EXPERTS, 1, 0)
    x, _, found, *_ = exchange.prepare(a1, None, None, weights, ids, 2 * EXPERTS, None, False, CONFIGS["none"])
    assert int(found.sum()) == int((ids >= 0).sum()) - 2
    output = torch.empty(TOKENS, HIDDEN)
    exchange.finalize(output, x, weights, ids, False)
    valid = torch.where(ids >= 0, weights, 0).double().sum(1, keepdim=True)
    torch.testing.assert_close(output.double(), a1.double() * valid, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["none", "fp8 token", "fp8 block"])
def test_ranks_add_up_to_a_layer(name: str) -> None:
    """All parts together, over two ranks, against every token by itself."""
    form, dtype = FORMS[name], torch.bfloat16
    how = "bfloat16" if form.rows == "none" else form.rows
    a1, weights, ids = routing()
    total, wanted = torch.zeros(TOKENS, HIDDEN), torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for rank in range(2):
        w1, w2 = pair(form, dtype, (30 + rank, rank))
        exchange, experts = (
            BatchedPrepareAndFinalize(HEIGHT, EXPERTS, 1, rank),
            BatchedTritonExperts(HEIGHT, 1, **form.flags),
        )
        x, scale, found, *_ = exchange.prepare(
            a1, None, None, weights, ids, 2 * EXPERTS, None, False, experts.quant_config
        )
        first, second, shape, kind = experts.workspace_shapes(a1, x, TOKENS, 2 * INNER, HIDDEN, TOPK, 12, EXPERTS)
        space = torch.full((math.prod(first),), torch.nan, dtype=kind)
        y = space[: math.prod(shape)].view(shape)  # as vLLM's modular kernel has it
        scales = w1.scale, w2.scale, None, None, scale, None
        experts.apply(
            y, x, w1.values, w2.values, ids, "silu", 12, None, *scales, space, torch.empty(second, dtype=kind), found
        )
        output = torch.empty(TOKENS, HIDDEN, dtype=dtype)
        exchange.finalize(output, y, weights, ids, False)
        total += output.float()

        def expert(own: int, rows: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
            return expert_rows(rounded(rows.double(), how), w1.real[own], w2.real[own], how, factors=factors)  # noqa: B023

        wanted += routed_rows(a1, ids - rank * EXPERTS, weights, expert, EXPERTS).sum(1)
    busy = (wanted != 0).any(1)
    assert float(worst_row_error(total[busy], wanted[busy])) < ROUNDED_LIMIT


# Arguments


BAD: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "no scale": ("fp8 tensor", {"w2_scale": None}, ("w2_scale is missing", "use_fp8_w8a8")),
    "a scale": ("none", {"w1_scale": torch.ones(6)}, ("w1_scale is given", "no use_* flag")),
    "a zero": ("fp8 token", {"w1_zp": torch.ones(6)}, ("w1_zp is given", "use_fp8_w8a8")),
    "scale": ("fp8 token", {"w1_scale": torch.ones(6, 5)}, ("w1_scale is (6, 5)", "(6, 192)")),
    "bits": ("fp8 token", {"w1_scale": torch.ones(6, 192).int()}, ("w1_scale is torch.int32", "torch.float32")),
    "rows": ("fp8 token", {"a1q_scale": torch.ones(6, 5)}, ("a1q_scale is (6, 5)", "(6, 24, 1)", "token")),
    "no rows": ("fp8 token", {"a1q_scale": None}, ("a1q_scale is missing", "(6, 24, 1)")),
    "rows alone": ("int4", {"a1q_scale": torch.ones(1)}, ("a1q_scale is given", "use_int4_w4a16")),
    "static": ("fp8 block", {"a2_scale": torch.ones(1)}, ("a2_scale is given", "group")),
    "tokens": ("fp8 token", {"hidden_states": torch.zeros(6, 24, 64)}, ("hidden_states are", "float32", "float8")),
    "w2": ("none", {"w2": torch.zeros(5, 64, 96).bfloat16()}, ("w2 is (5, 64, 96)", "(6, 64, 96)")),
    "activation": ("none", {"activation": "tanh"}, ("activation ('tanh')", "silu, gelu")),
    "numbers": ("none", {"activation": "situ"}, ("activation ('situ')", "swiglustep")),
    "turns": ("fp8 block", {"activation": "swigluoai"}, ("weights are alternating", "gate and up")),
    "counts": ("none", {"expert_num_tokens": None}, ("expert_num_tokens is None", "[6]")),
    "few counts": ("none", {"expert_num_tokens": torch.zeros(5)}, ("expert_num_tokens is (5,)", "[6]")),
    "experts": ("none", {"global_num_experts": 5}, ("global_num_experts (5)", "6 experts")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    form, changes, words = BAD[name]
    given, *_ = apply_arguments(FORMS[form], torch.bfloat16)
    assert_named(words, BatchedTritonExperts(HEIGHT, 1, **FORMS[form].flags).apply, **given | changes)


def test_bad_arguments_of_the_others_are_named() -> None:
    for make in (BatchedTritonExperts, NaiveBatchedExperts):
        with pytest.raises(ValueError, match="use_fp8_w8a8 and use_int4_w4a16 are both set"):
            make(HEIGHT, 1, use_fp8_w8a8=True, use_int4_w4a16=True)
        with pytest.raises(ValueError, match=r"num_dispatchers \(0\) must be at least 1"):
            make(HEIGHT, 0)
        with pytest.raises(ValueError, match=r"per_act_token_quant and block_shape \(\[32, 16\]\) are both set"):
            make(HEIGHT, 1, use_fp8_w8a8=True, per_act_token_quant=True, block_shape=BLOCK)
    with pytest.raises(ValueError, match=r"rank \(-1\) must be at least 0"):
        BatchedPrepareAndFinalize(HEIGHT, 1, 1, -1)
    a1, weights, ids = routing()
    exchange, config = BatchedPrepareAndFinalize(HEIGHT - 5, EXPERTS, 1, 1), CONFIGS["none"]
    rest = (None, False, config)
    for message, given in {
        r"a1 has 20 tokens, which exceeds max_num_tokens \(19\)": (a1, None, None, weights, ids, 12, *rest),
        r"num_experts \(11\) is less than the end of the local experts \(12\)": (
            *(a1[:9], None, None, weights[:9], ids[:9], 11),
            *rest,
        ),
        r"topk_ids are \(20, 3\) torch.int32; \(9, K\)": (a1[:9], None, None, weights, ids, 12, *rest),
        r"topk_weights are \(9, 2\)": (a1[:9], None, None, weights[:9, :2], ids[:9], 12, *rest),
        r"a1_scale is given, quant_config has no quant_dtype": (
            *(a1[:9], torch.ones(1), None, weights[:9], ids[:9], 12),
            *rest,
        ),
        r"expert_map is \(5,\) torch.int64; \(12,\)": (
            *(a1[:9], None, None, weights[:9], ids[:9], 12, torch.arange(5)),
            *rest[1:],
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            exchange.prepare(*given)
    with pytest.raises(ValueError, match=r"output is \(20, 63\) torch.bfloat16; \(20, 64\)"):
        exchange.finalize(a1[:, 1:], torch.empty(EXPERTS, HEIGHT, HIDDEN), weights, ids, False)
    x = torch.empty(EXPERTS, HEIGHT, HIDDEN)
    with pytest.raises(ValueError, match=r"A is \(6, 24, 64\); \[E \(5\), num_tokens \(24\), columns\] needed"):
        batched_moe_kernel_quantize_input(x, None, HEIGHT, 5, INNER, counts(), FP8, False)
    with pytest.raises(ValueError, match=r"\(torch.float64\) is not one of float8_e4m3fn, int8"):
        batched_moe_kernel_quantize_input(x, None, HEIGHT, EXPERTS, INNER, counts(), torch.float64, False)
    with pytest.raises(ValueError, match="A_scale is torch.float64; float32 needed"):
        batched_moe_kernel_quantize_input(x, torch.ones(1).double(), HEIGHT, EXPERTS, INNER, counts(), FP8, False)
    with pytest.raises(ValueError, match=r"compute_type \(fp64\) is not one of"):
        invoke_moe_batched_triton_kernel(
            x, x, x, counts(), tl.float64, None, None, None, False, False, False, {}, False
        )
    with pytest.raises(ValueError, match=r"config: BLOCK_SIZE_M \(None\) is not a power of two from 16 to 256"):
        invoke_moe_batched_triton_kernel(
            *(x, x, torch.empty(6, 24, 24), counts(), tl.float32), *(None, None, None, False, False, False, {}, False)
        )
    with pytest.raises(ValueError, match=r"A is torch.float32; torch.bfloat16 needed with compute_type"):
        invoke_moe_batched_triton_kernel(
            *(x, x.bfloat16(), torch.empty(6, 24, 24), counts(), tl.bfloat16),
            *(None, None, None, False, False, False, {}, False),
        )


def layer(form: Format, device: str = "cpu", naive: bool = False) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A function of a1, weights and ids that runs all calls, and its arguments."""
    w1, w2 = pair(form, torch.bfloat16, (41, 42))
    given = [None if tensor is None else tensor.to(device) for tensor in (w1.values, w2.values, w1.scale, w2.scale)]
    make = NaiveBatchedExperts if naive else BatchedTritonExperts
    experts, exchange = make(HEIGHT, 1, **form.flags), BatchedPrepareAndFinalize(HEIGHT, EXPERTS, 1, 0)

    def run(a1: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x, scale, found, *_ = exchange.prepare(
            a1 * 2, None, None, weights, ids, EXPERTS, None, False, experts.quant_config
        )
        y = torch.zeros(EXPERTS, HEIGHT, HIDDEN, dtype=a1.dtype, device=a1.device)
        scales = given[2], given[3], None, None, scale, None
        experts.apply(y, x, given[0], given[1], ids, "silu", EXPERTS, None, *scales, y, y, found)
        output = torch.empty_like(a1)
        exchange.finalize(output, y, weights, ids, False)
        if form.rows != "none":
            config = experts.quant_config
            again, scale = batched_moe_kernel_quantize_input(
                y,
                None,
                HEIGHT,
                EXPERTS,
                INNER,
                found,
                DTYPES[form.rows.split()[0]],
                config.per_act_token_quant,
                config.block_shape,
            )
            C = torch.zeros(EXPERTS, HEIGHT, 2 * INNER, dtype=a1.dtype, device=a1.device)  # noqa: N806
            invoke_moe_batched_triton_kernel(
                *(again, given[0], C, found, a1.dtype, scale, given[2], None, True, False, False, CONFIG),
                *(config.per_act_token_quant, config.block_shape),
            )
            output = output + C.sum((0, 1))[:HIDDEN]
        return output + 1

    return run, tuple(tensor.to(device) for tensor in routing(num_experts=EXPERTS))


@pytest.mark.parametrize("name", ["none", "fp8 tensor", "fp8 block"])
def test_compiled_into_one_graph(name: str) -> None:
    run, given = layer(FORMS[name])
    assert_compiles(run, *given)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in which one element that a GPU's fp8 sums of 14 bits round to its other neighbor does not matter."""
    for name, size in (("HIDDEN", 704), ("INNER", 1184)):
        monkeypatch.setitem(globals(), name, size)


def gpu() -> list[pytest.MarkDecorator]:
    return [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("naive", [False, True], ids=["kernels", "naive"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=gpu()) for name in ("none", "fp8 tensor", "fp8 token", "fp8 block")]
)
def test_captured_in_a_cuda_graph(name: str, naive: bool, wide: None) -> None:
    """A graph is replayed with other tokens and counts."""
    run, given = layer(FORMS[name], "cuda", naive)
    expected_now = run(*given)
    graph, inputs = torch.cuda.CUDAGraph(), tuple(tensor.clone() for tensor in given)
    run(*inputs)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = run(*inputs)
    graph.replay()
    assert float(worst_row_error(output, expected_now)) < ROUNDED_LIMIT
    other = tuple(tensor.cuda() for tensor in routing(9, EXPERTS))
    for target, source in zip(inputs, other, strict=True):
        target.copy_(source)
    graph.replay()
    assert float(worst_row_error(output, run(*other))) < ROUNDED_LIMIT


@pytest.mark.parametrize("name", [pytest.param(name, marks=gpu()) for name in FORMS])
def test_kernels_agree_with_torch(name: str, wide: None) -> None:
    form = FORMS[name]
    given, batch, w1, w2 = apply_arguments(form, torch.bfloat16)
    on_gpu = moved(given, "cuda")
    BatchedTritonExperts(HEIGHT, 1, **form.flags).apply(**on_gpu)
    compare(on_gpu["output"].cpu(), expected(batch, w1, w2, form, torch.bfloat16), limit_of(form, torch.bfloat16))
