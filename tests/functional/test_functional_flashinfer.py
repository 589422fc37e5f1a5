"""FlashInfer's FP4 calls against float64, written from the formats and FlashInfer's documentation (`fp4_oracle`).

Cases that take `run` are computed by torch and, marked `gpu`, by kernels: on a GPU, or in Triton's interpreter.
"""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.calls import assert_compiles, assert_named, moved
from helpers.fp4_oracle import Layer, choose, random_layer, random_stored, real, round_nvfp4

from ep_moe.functional.flashinfer import (
    b12x_fused_moe,
    trtllm_fp4_block_scale_moe,
    unshuffle_rows,
    unshuffle_weight,
    untile_scales,
)
from ep_moe.testing import worst_row_error

EXPERTS, TOPK, TOKENS, HIDDEN, INNER = 8, 3, 24, 64, 96
LIMITS = {"bf16": 1e-2, "mxfp8": 2e-2, "nvfp4": 2e-2}  # a value near a rounding boundary may go either way
NUMBERS = ("routing_bias", "gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias")
SCALARS = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def hidden_states(
    kind: str, seed: int = 1, hidden: int = HIDDEN
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Tokens in a format, their scales, and the real numbers that these stand for."""
    if kind == "bf16":
        x = torch.randn(TOKENS, hidden, generator=generator(seed)).bfloat16()
        return x, None, x.double()
    values, scale = random_stored((TOKENS, hidden), kind, 1.0, generator(seed))
    exact = real(values, scale, kind)
    if kind == "mxfp8":
        return values.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), exact
    return values, scale.view(torch.float8_e4m3fn), exact


def logits(seed: int = 2) -> torch.Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=generator(seed)) * 2


def arguments(layer: Layer, x: torch.Tensor, scale: torch.Tensor | None, **changes: Any) -> dict[str, Any]:
    """Arguments of a call with all experts, Renormalize, and no optional argument."""
    dtype = torch.float8_e4m3fn if layer.kind == "nvfp4" else torch.float8_e8m0fnu
    given: dict[str, Any] = dict.fromkeys((*NUMBERS, *SCALARS, "n_group", "topk_group"))
    given |= {
        "routing_logits": logits(),
        "hidden_states": x,
        "hidden_states_scale": scale,
        "gemm1_weights": layer.w1,
        "gemm1_weights_scale": layer.w1_scale.view(dtype),
        "gemm2_weights": layer.w2,
        "gemm2_weights_scale": layer.w2_scale.view(dtype),
        "num_experts": EXPERTS,
        "top_k": TOPK,
        "intermediate_size": INNER,
        "local_expert_offset": 0,
        "local_num_experts": EXPERTS,
        "routed_scaling_factor": None,
        "routing_method_type": 1,
    }
    return given | changes


def check(found: torch.Tensor, expected: torch.Tensor, how: str) -> None:
    assert found.dtype == torch.bfloat16
    assert float(worst_row_error(found, expected)) < LIMITS[how]


@pytest.mark.parametrize("per_token", [False, True], ids=["", "per_token_scale"])
@pytest.mark.parametrize("tokens", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("weights", ["mxfp4", "nvfp4"])
def test_formats(weights: str, tokens: str, per_token: bool, run: Any) -> None:
    layer = random_layer(weights, True, EXPERTS, HIDDEN, INNER, generator(3))
    x, scale, exact = hidden_states(tokens)
    factor = torch.rand(TOKENS, generator=generator(4)) * 3 + 0.1 if per_token else None
    given = arguments(layer, x, scale, per_token_scale=factor)
    how = {("mxfp4", "mxfp8"): "mxfp8", ("nvfp4", "nvfp4"): "nvfp4"}.get((weights, tokens), "bf16")
    if factor is not None:
        exact, how = (exact * factor[:, None].double()).bfloat16().double(), "bf16"
    [found] = run(trtllm_fp4_block_scale_moe, **given)
    ids, chosen = choose(logits(), 1, TOPK)
    check(found, layer(exact, ids, chosen, "swiglu", how, range(EXPERTS)), how)
    if scale is not None:  # dtypes and shapes under which callers hold bytes
        given["hidden_states_scale"] = scale.view(torch.uint8).reshape(-1)
        given["gemm1_weights"] = layer.w1.view(torch.float8_e4m3fn)
        given["gemm2_weights_scale"] = layer.w2_scale
        given["hidden_states"] = x.view(torch.int8)
        assert torch.equal(run(trtllm_fp4_block_scale_moe, **given)[0], found)


def numbers(low: float, high: float, seed: int, count: int = EXPERTS) -> torch.Tensor:
    return torch.rand(count, generator=generator(seed)) * (high - low) + low


ACTIVATIONS = {3: "swiglu", 4: "geglu", 6: "relu2", 7: "swiglu_step", 8: "geglu_tanh", 9: "identity", 10: "situ"}


@pytest.mark.parametrize(
    ("scalars", "biased"), [("", False), ("111", True), ("100", False), ("010", True), ("001", True), ("110", False)]
)
@pytest.mark.parametrize(
    ("number", "own"),
    [
        *((3, ""), (3, "alpha"), (3, "alpha beta limit"), (3, "limit"), (4, ""), (6, "")),
        *((7, "limit"), (8, ""), (9, ""), (10, "alpha beta limit")),
    ],
)
def test_activations_and_scalars(number: int, own: str, scalars: str, biased: bool, run: Any) -> None:
    """Biases, beta and limit are in the units of the unscaled sums; they matter most where scalars are far from 1."""
    layer = random_layer("nvfp4", number not in (6, 9), EXPERTS, HIDDEN, INNER, generator(number))
    given: dict[str, torch.Tensor] = {
        name: tensor
        for name, tensor in (
            ("alpha", numbers(0.5, 2.0, 11)),
            ("beta", numbers(0.5 if number == 10 else -1.0, 1.5, 12)),
            ("limit", numbers(0.3, 1.5, 13)),
        )
        if name in own.split()
    }
    names = ("up", "gate", "second")
    sizes = ((0.2, 3.0), (0.4, 2.5), (0.5, 4.0))
    for name, size, flag in zip(names, sizes, scalars or "000", strict=True):
        if flag == "1":
            given[name] = numbers(*size, seed=14 + len(name))
    if "gate" in given:
        given["gate"][:3] = torch.tensor([0.0, 1e-38, -1e-45])  # whose inverses are not finite, or nearly so
    if biased:
        given["b1"] = torch.randn(EXPERTS, layer.w1.shape[1], generator=generator(15))
        given["b2"] = torch.randn(EXPERTS, HIDDEN, generator=generator(16))
    layer = dataclasses.replace(layer, **given)
    x, _, exact = hidden_states("bf16")
    ids, chosen = choose(logits(), 1, TOPK)
    expected = layer(exact, ids, chosen, ACTIVATIONS[number], "bf16", range(EXPERTS))
    fields = ("gemm1_bias", "gemm2_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", *SCALARS)
    ours = ("b1", "b2", "alpha", "beta", "limit", *names)
    changes = {field: getattr(layer, name) for field, name in zip(fields, ours, strict=True)}
    [found] = run(trtllm_fp4_block_scale_moe, **arguments(layer, x, None, activation_type=number, **changes))
    check(found, expected, "bf16")


ROUTINGS: dict[str, dict[str, Any]] = {
    "0": {"routing_method_type": 0},
    "1": {"routing_method_type": 1},
    "2": {"routing_method_type": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "2_without_groups": {"routing_method_type": 2, "n_group": None, "topk_group": None},
    "2_unnormalized": {"routing_method_type": 2, "n_group": 0, "topk_group": 0, "norm_topk_prob": False},
    "3": {"routing_method_type": 3, "top_k": 1},
    "3_topk": {"routing_method_type": 3},
    "4": {"routing_method_type": 4, "routed_scaling_factor": 1.0},
    "4_unnormalized": {"routing_method_type": 4, "norm_topk_prob": False},
    "5": {"routing_method_type": 5, "norm_topk_prob": False},
    "6": {"routing_method_type": 6},
    "6_unnormalized": {"routing_method_type": 6, "norm_topk_prob": False},
    "7": {"routing_method_type": 7, "routed_scaling_factor": 1.5},
    "8": {"routing_method_type": 8},
    "9": {"routing_method_type": 9, "norm_topk_prob": False},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_methods(name: str, dtype: torch.dtype, run: Any) -> None:
    more, layer = ROUTINGS[name], random_layer("mxfp4", True, EXPERTS, HIDDEN, INNER, generator(5))
    method, topk = more["routing_method_type"], more.get("top_k", TOPK)
    # distinct also in bfloat16: of equal scores, the oracle takes any
    scores = (torch.rand(TOKENS, EXPERTS, generator=generator(6)).argsort(1) * 0.37 - 1.3).to(dtype)
    bias = (torch.randn(EXPERTS, generator=generator(7)) * 0.3).to(dtype) if method in (2, 7) else None
    replay = torch.full((TOKENS + 3, topk), -7, dtype=torch.int16)
    x, _, exact = hidden_states("bf16")
    changes = {"routing_logits": scores, "routing_bias": bias, "routing_replay_out": replay, **more}
    [found] = run(trtllm_fp4_block_scale_moe, **arguments(layer, x, None, **changes))
    ids, chosen = choose(
        scores,
        method,
        topk,
        bias,
        n_group=more.get("n_group") or 1,
        topk_group=more.get("topk_group") or 1,
        factor=more.get("routed_scaling_factor") or 1.0,
        norm=more.get("norm_topk_prob", True),
    )
    check(found, layer(exact, ids, chosen, "swiglu", "bf16", range(EXPERTS)), "bf16")
    assert torch.equal(replay[:TOKENS].sort(1).values.long(), ids.sort(1).values)
    assert bool((replay[TOKENS:] == -7).all())


@pytest.mark.parametrize("whole", [False, True], ids=["own_weights", "all_weights"])
@pytest.mark.parametrize("bounds", [(0, 8), (0, 3, 8), (0, 1, 4, 6, 8)], ids=["1_rank", "2_ranks", "4_ranks"])
def test_parts_of_all_ranks_add_up(bounds: tuple[int, ...], whole: bool, run: Any) -> None:
    """Each rank passes its own experts' tensors, or all experts' as the documentation's shapes say."""
    made = random_layer("nvfp4", True, EXPERTS, HIDDEN, INNER, generator(8))
    layer = dataclasses.replace(
        made,
        b1=torch.randn(EXPERTS, 2 * INNER, generator=generator(9)),
        b2=torch.randn(EXPERTS, HIDDEN, generator=generator(10)),
        alpha=numbers(0.5, 2.0, 11),
        second=numbers(0.5, 2.0, 12),
    )
    x, scale, exact = hidden_states("bf16")
    ids, chosen = choose(logits(), 1, TOPK)
    total = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for first, last in zip(bounds, bounds[1:], strict=False):
        rank = slice(0, EXPERTS) if whole else slice(first, last)
        given = arguments(layer, x, scale, local_expert_offset=first, local_num_experts=last - first)
        given |= {"gemm1_bias": layer.b1, "gemm2_bias": layer.b2, "gemm1_alpha": layer.alpha}
        given["output2_scale_scalar"] = layer.second
        for name in (
            name for name, tensor in given.items() if name.startswith(("gemm", "output")) and tensor is not None
        ):
            given[name] = given[name].view(torch.uint8)[rank] if given[name].element_size() == 1 else given[name][rank]
        [part] = run(trtllm_fp4_block_scale_moe, **given)
        expected = layer(exact, ids, chosen, "swiglu", "bf16", range(first, last))
        idle = (expected == 0).all(1)
        assert torch.equal(part[idle], torch.zeros_like(part[idle]))
        check(part[~idle], expected[~idle], "bf16")
        total += part.double()
    assert float(worst_row_error(total, layer(exact, ids, chosen, "swiglu", "bf16", range(EXPERTS)))) < LIMITS["bf16"]


def test_rows_before_the_sum(run: Any) -> None:
    layer = random_layer("mxfp4", True, EXPERTS, HIDDEN, INNER, generator(3))
    given = arguments(layer, *hidden_states("bf16")[:2], local_expert_offset=2, local_num_experts=5)
    given["gemm1_weights"], given["gemm1_weights_scale"] = layer.w1[2:7], layer.w1_scale[2:7]
    [found] = run(trtllm_fp4_block_scale_moe, **given)
    rows, weights, permuted = run(trtllm_fp4_block_scale_moe, **given, do_finalize=False)
    assert (rows.dtype, weights.dtype, permuted.dtype) == (torch.bfloat16, torch.bfloat16, torch.int32)
    assert (rows.shape[1], weights.shape, permuted.shape) == (HIDDEN, (TOKENS, TOPK), (TOKENS * TOPK,))
    ids, chosen = choose(logits(), 1, TOPK)
    assert torch.equal(weights, chosen.float().bfloat16())
    here = ((ids >= 2) & (ids < 7)).reshape(-1)
    assert torch.equal(permuted >= 0, here)
    assert len(set(permuted[here].tolist())) == int(here.sum())
    parts = torch.where(here[:, None], rows[permuted.clamp(min=0)].float(), 0.0).view(TOKENS, TOPK, HIDDEN)
    expected = (parts * weights.float()[:, :, None]).sum(1)
    some = here.view(TOKENS, TOPK).any(1)
    assert float(worst_row_error(found[some], expected[some])) < LIMITS["bf16"]
    with pytest.raises(ValueError, match="output is given, but do_finalize=False"):
        run(trtllm_fp4_block_scale_moe, **given, do_finalize=False, output=found)


def test_shared_experts(run: Any) -> None:
    """Every token has the two last ones, with weight 1, beside those that it chooses."""
    made = random_layer("mxfp4", True, EXPERTS + 2, HIDDEN, INNER, generator(3))
    layer = dataclasses.replace(made, second=numbers(0.5, 2.0, 12, EXPERTS + 2))
    x, _, exact = hidden_states("bf16")
    more: dict[str, Any] = {"routing_method_type": 2, "routed_scaling_factor": 2.5, "num_fused_shared_experts": 2}
    replay = torch.full((TOKENS, TOPK), -7, dtype=torch.int16)
    given = arguments(layer, x, None, **more, output2_scale_scalar=layer.second, routing_replay_out=replay)
    [found] = run(trtllm_fp4_block_scale_moe, **given)
    ids, chosen = choose(logits(), 2, TOPK, factor=2.5)
    assert torch.equal(replay.sort(1).values.long(), ids.sort(1).values)
    every = torch.ones(TOKENS, 2, dtype=torch.float64)
    ids, chosen = torch.cat([ids, every.long() * torch.tensor([8, 9])], 1), torch.cat([chosen, every], 1)
    check(found, layer(exact, ids, chosen, "swiglu", "bf16", range(EXPERTS + 2)), "bf16")
    rows, weights, permuted = run(trtllm_fp4_block_scale_moe, **given, do_finalize=False)
    assert weights.shape == (TOKENS, TOPK + 2)
    assert bool((weights[:, TOPK:] == 1).all())
    parts = rows[permuted.long()].float().view(TOKENS, TOPK + 2, HIDDEN) * weights.float()[:, :, None]
    assert float(worst_row_error(found, parts.sum(1).double())) < LIMITS["bf16"]


def padded(tensor: torch.Tensor, halves: int, rows: int, columns: int, fill: int) -> torch.Tensor:
    """[E, rows of the halves, columns] bytes, at the start of each half of a larger tensor full of `fill`."""
    parts = tensor.unflatten(1, (halves, -1))
    out = torch.full((len(tensor), halves, rows, columns), fill, dtype=torch.uint8)
    out[:, :, : parts.shape[2], : parts.shape[3]] = parts
    return out.flatten(1, 2)


@pytest.mark.parametrize(
    ("kind", "tokens", "rows"), [("nvfp4", "bf16", 128), ("nvfp4", "nvfp4", 256), ("mxfp4", "mxfp8", 128)]
)
def test_valid_sizes(kind: str, tokens: str, rows: int, run: Any) -> None:
    """100 of 256 columns and 200 of 384, computed as 128 and 256: beyond them NaN changes nothing."""
    group = 32 if kind == "mxfp4" else 16
    layer = random_layer(kind, True, EXPERTS, 128, 256, generator(3))
    nan = 255 if kind == "mxfp4" else 127
    x, scale, exact = hidden_states(tokens, hidden=128)
    given = arguments(layer, x, scale)
    if scale is None:
        given["hidden_states"] = torch.cat([x, torch.full_like(x, torch.nan)], 1)
    else:
        wide = torch.cat([x.view(torch.uint8), torch.full_like(x.view(torch.uint8), 127)], 1)
        given["hidden_states"] = wide.view(x.dtype)
        given["hidden_states_scale"] = torch.cat([scale.view(torch.uint8)] * 2, 1)
    given |= {
        "gemm1_weights": padded(layer.w1, 2, 384, 128, 17),
        "gemm1_weights_scale": padded(layer.w1_scale, 2, 384, 256 // group, nan),
        "gemm2_weights": padded(layer.w2, 1, rows, 192, 17),
        "gemm2_weights_scale": padded(layer.w2_scale, 1, rows, 384 // group, nan),
        "intermediate_size": 384,
        "valid_hidden_size": 100,
        "valid_intermediate_size": 200,
    }
    b1, b2 = torch.randn(EXPERTS, 512, generator=generator(15)), torch.randn(EXPERTS, 128, generator=generator(16))
    lost = torch.full((EXPERTS, 128), torch.nan)
    given["gemm1_bias"] = torch.cat([b1[:, :256], lost, b1[:, 256:], lost], 1)
    given["gemm2_bias"] = torch.cat([b2, lost], 1)[:, :rows]
    layer = dataclasses.replace(layer, b1=b1, b2=b2)
    expected = layer(exact, *choose(logits(), 1, TOPK), "swiglu", tokens, range(EXPERTS))
    output = torch.empty(TOKENS, 100, dtype=torch.bfloat16)
    [found] = run(trtllm_fp4_block_scale_moe, **given)
    assert found.shape == output.shape
    check(found, expected[:, :100], tokens)
    assert run(trtllm_fp4_block_scale_moe, **given, output=output)[0] is output
    assert torch.equal(output, found)
    with pytest.raises(ValueError, match=r"valid_hidden_size \(100\) is given, but do_finalize=False"):
        run(trtllm_fp4_block_scale_moe, **given, do_finalize=False)


def test_output_is_written_and_other_arguments_change_nothing(run: Any) -> None:
    layer = random_layer("nvfp4", True, EXPERTS, HIDDEN, INNER, generator(3))
    given = arguments(layer, *hidden_states("nvfp4")[:2])
    [expected] = run(trtllm_fp4_block_scale_moe, **given)
    output = torch.full((TOKENS, HIDDEN), torch.nan, dtype=torch.bfloat16)
    rest: dict[str, Any] = {"enable_pdl": True, "tune_max_num_tokens": 1, "hidden_states_scale_layout": 2}
    rest |= {"workspace_buffer": torch.empty(64, dtype=torch.uint8), "nvfp4_4over6": None}
    [found] = run(trtllm_fp4_block_scale_moe, **given, output=output, **rest)
    assert found is output
    assert torch.equal(output, expected)


def test_writes_to_weights_are_seen_and_freed_weights_are_not_kept() -> None:
    layer = random_layer("nvfp4", True, EXPERTS, HIDDEN, INNER, generator(3))
    other = random_layer("nvfp4", True, EXPERTS, HIDDEN, INNER, generator(4))
    scalars = {name: numbers(0.5, 2.0, 30 + index) for index, name in enumerate(SCALARS)}
    given = arguments(layer, *hidden_states("bf16")[:2], **scalars)
    [before] = trtllm_fp4_block_scale_moe(**given)
    assert torch.equal(trtllm_fp4_block_scale_moe(**given)[0], before)
    changed = given | {"gemm2_weights": other.w2}
    [expected] = trtllm_fp4_block_scale_moe(**changed)
    assert not torch.equal(expected, before)
    assert torch.equal(trtllm_fp4_block_scale_moe(**given)[0], before)
    given["gemm2_weights"].copy_(other.w2)
    assert torch.equal(trtllm_fp4_block_scale_moe(**given)[0], expected)
    given["output2_scale_scalar"].mul_(4)
    torch.testing.assert_close(trtllm_fp4_block_scale_moe(**given)[0], expected * 4, rtol=0, atol=0)
    memory = weakref.ref(layer.w1)
    del layer, given, changed
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("inference", [False, True], ids=["counted", "inference mode"])
def test_products_of_numbers_follow_writes(inference: bool) -> None:
    """The clamp limit is multiplied by the gate's scale, `w2_alpha` by the input scale: neither product gets stale."""
    layer = random_layer("nvfp4", True, EXPERTS, HIDDEN, INNER, generator(3))
    with torch.inference_mode(inference):
        given = arguments(
            layer,
            *hidden_states("bf16")[:2],
            gemm1_clamp_limit=numbers(0.5, 1.0, 33),
            output1_scale_gate_scalar=numbers(0.5, 2.0, 34),
        )
        brought = b12x_arguments(layer, fc2_input_scale=torch.tensor([0.5]))
        for call, changed, name in (
            (lambda: trtllm_fp4_block_scale_moe(**given)[0], given, "gemm1_clamp_limit"),
            (lambda: b12x_fused_moe(**brought), brought, "fc2_input_scale"),
        ):
            before = call()
            assert torch.equal(call(), before)
            changed[name].mul_(0.25)
            written = call()
            assert not torch.equal(written, before)
            changed[name] = changed[name].clone()
            assert torch.equal(call(), written)


def test_no_tokens() -> None:
    layer = random_layer("nvfp4", True, EXPERTS, HIDDEN, INNER, generator(3))
    x, scale, _ = hidden_states("nvfp4")
    assert scale is not None
    given = arguments(layer, x[:0], scale.view(torch.uint8)[:0], routing_logits=logits()[:0])
    assert trtllm_fp4_block_scale_moe(**given)[0].shape == (0, HIDDEN)
    assert [tuple(part.shape) for part in trtllm_fp4_block_scale_moe(**given, do_finalize=False)] == [
        (0, HIDDEN),
        (0, TOPK),
        (0,),
    ]


def scales(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


HALF_LOGITS = torch.zeros(TOKENS, EXPERTS, dtype=torch.float16)
PACKED = torch.zeros(TOKENS, HIDDEN // 2, dtype=torch.uint8)
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "method 10": ({"routing_method_type": 10}, ("routing_method_type (10)", "0 to 9")),
    "layout": ({"hidden_states_scale_layout": 0}, ("hidden_states_scale_layout (0)", "2 (layout_linear)")),
    "4 over 6": ({"nvfp4_4over6": "MAE"}, ("nvfp4_4over6 (MAE)", "plain NVFP4")),
    "valid hidden": ({"valid_hidden_size": 65}, ("valid_hidden_size (65)", "[1, 64]")),
    "valid intermediate": ({"valid_intermediate_size": 0}, ("valid_intermediate_size (0)", "[1, 96]")),
    "valid output": (
        {"valid_hidden_size": 48, "output": torch.empty(TOKENS, HIDDEN).bfloat16()},
        ("output is (24, 64)", "(24, 48)"),
    ),
    "shared": ({"num_fused_shared_experts": 1}, ("num_fused_shared_experts (1)", "routing_method_type 2", "method 1")),
    "shared, some experts": (
        {"num_fused_shared_experts": 1, "routing_method_type": 2, "local_num_experts": 7},
        ("num_fused_shared_experts (1)", "7 of 8"),
    ),
    "factor": ({"routed_scaling_factor": 2.5}, ("routed_scaling_factor (2.5)", "2 and 7")),
    "groups": ({"n_group": 4, "topk_group": 2}, ("num_group (4)", "method 2")),
    "norm": ({"norm_topk_prob": False}, ("norm_topk_prob (False)", "got 1")),
    "bias": ({"routing_bias": torch.zeros(EXPERTS)}, ("routing_bias", "method 2 or 7, got 1")),
    "bias's shape": ({"routing_bias": torch.zeros(3), "routing_method_type": 2}, ("routing_bias", "(3,)", "(8,)")),
    "logits": ({"routing_logits": torch.zeros(TOKENS, 9)}, ("routing_logits", "(24, 9)", "(24, 8)")),
    "logits' dtype": ({"routing_logits": HALF_LOGITS}, ("routing_logits", "float16", "bfloat16")),
    "activation": ({"activation_type": 5}, ("activation_type (5)", "3 (swiglu)", "9 (identity)")),
    "alpha": ({"activation_type": 4, "gemm1_alpha": torch.ones(8)}, ("gemm1_alpha", "not belong to activation_type 4")),
    "width": ({"activation_type": 6}, ("gemm1_weights", "(8, 192, 32)", "(8, 96, 32)", "activation_type (6)")),
    "intermediate": ({"intermediate_size": 48}, ("gemm1_weights", "(8, 96, 32)", "intermediate_size (48)")),
    "offset": ({"local_expert_offset": 1}, ("[1, 9)", "num_experts (8)")),
    "scale": ({"hidden_states_scale": scales(TOKENS, 4)}, ("hidden_states_scale", "bfloat16 hidden_states have none")),
    "float16": ({"hidden_states": torch.zeros(TOKENS, HIDDEN).half()}, ("hidden_states", "float16", "bfloat16")),
    "nvfp4 alone": ({"hidden_states": PACKED}, ("hidden_states_scale is missing", "(24, 4)")),
    "weight scale": ({"gemm1_weights_scale": scales(8, 192, 3)}, ("gemm1_weights_scale", "(8, 192, 4)", "(8, 192, 2)")),
    "mixed": ({"gemm2_weights_scale": scales(8, 64, 3)}, ("gemm1_weights are nvfp4, gemm2_weights are mxfp4",)),
    "scalar": ({"output1_scale_scalar": torch.ones(3)}, ("output1_scale_scalar", "(3,)", "(8,)")),
    "scalar's dtype": ({"gemm1_alpha": torch.ones(8).half()}, ("gemm1_alpha", "float16", "float32")),
    "gemm1_bias": ({"gemm1_bias": torch.ones(8, 96)}, ("gemm1_bias", "(8, 96)", "(8, 192)")),
    "per_token_scale": ({"per_token_scale": torch.ones(TOKENS, 1)}, ("per_token_scale", "(24, 1)", "(24,)")),
    "output": ({"output": torch.empty(TOKENS, HIDDEN)}, ("output", "float32", "bfloat16")),
    "replay": ({"routing_replay_out": torch.zeros(TOKENS, TOPK)}, ("routing_replay_out", "float32", "int16")),
    "top_k": ({"top_k": 9}, ("num_topk (9)", "num_experts (8)")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    changes, words = BAD[name]
    layer = random_layer("nvfp4", True, EXPERTS, HIDDEN, INNER, generator(3))
    assert_named(words, trtllm_fp4_block_scale_moe, **arguments(layer, *hidden_states("bf16")[:2], **changes))


def test_compiled_into_one_graph() -> None:
    layer = random_layer("nvfp4", True, EXPERTS, HIDDEN, INNER, generator(3))
    given = arguments(layer, *hidden_states("bf16")[:2], output2_scale_scalar=numbers(0.5, 2.0, 1))

    def finalized(x: torch.Tensor, replay: torch.Tensor) -> torch.Tensor:
        [out] = trtllm_fp4_block_scale_moe(**given | {"hidden_states": x * 2}, routing_replay_out=replay)
        return out + 1

    def rows(x: torch.Tensor, replay: torch.Tensor) -> tuple[torch.Tensor, ...]:
        changed = given | {"hidden_states": x * 2}
        return tuple(trtllm_fp4_block_scale_moe(**changed, do_finalize=False, routing_replay_out=replay))

    for function in (finalized, rows):
        replays = [torch.zeros(TOKENS, TOPK, dtype=torch.int16) for _ in range(2)]
        expected = function(given["hidden_states"], replays[0])
        found = torch.compile(function, backend="aot_eager", fullgraph=True)(given["hidden_states"], replays[1])
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert torch.equal(*replays)
        assert bool(replays[0].any())


def assert_replays(call: Callable[..., Any], given: dict[str, Any], changes: dict[str, torch.Tensor]) -> None:
    """A captured call, replayed with other inputs, has the bits of an eager one; `changes` are those inputs."""
    given, changes = moved(given, "cuda"), moved(changes, "cuda")

    def run(**more: torch.Tensor) -> list[torch.Tensor]:
        found = call(**given | more)
        return [found] if isinstance(found, torch.Tensor) else found

    first, graph = [tensor.clone() for tensor in run()], torch.cuda.CUDAGraph()
    run()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    assert all(map(torch.equal, captured, first))
    expected = run(**changes)
    for name, tensor in changes.items():
        given[name].copy_(tensor)
    for tensor in captured:
        tensor.fill_(-7)
    graph.replay()
    for found, wanted, before in zip(captured, expected, first, strict=True):
        assert torch.equal(found, wanted)
        assert not torch.equal(found, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", ["bf16", "nvfp4"])
@pytest.mark.parametrize("finalized", [True, False], ids=["", "rows"])
def test_captured_in_a_cuda_graph(tokens: str, finalized: bool) -> None:
    """With products of numbers, which a captured call makes again."""
    layer = random_layer("nvfp4", True, EXPERTS, HIDDEN, INNER, generator(3))
    x, scale, _ = hidden_states(tokens)
    own = {name: numbers(0.5, 2.0, 30 + index) for index, name in enumerate((*SCALARS, *NUMBERS))}
    given = arguments(layer, x, scale, do_finalize=finalized, **{name: own[name] for name in SCALARS})
    given |= {name: own[name] for name in ("gemm1_beta", "gemm1_clamp_limit")}
    changes = {
        "hidden_states": x.flip(0),
        "routing_logits": logits().flip(0, 1),  # other experts, and other weights of them
        "output2_scale_scalar": own["gemm1_alpha"],
    }
    assert_replays(trtllm_fp4_block_scale_moe, given, changes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["nvfp4", "w4a16"])
def test_b12x_captured_in_a_cuda_graph(mode: str) -> None:
    layer = random_layer("nvfp4", True, EXPERTS, HIDDEN, INNER, generator(3))
    given = b12x_arguments(layer, **MODES[mode])
    changes = {"x": given["x"].flip(0), "token_selected_experts": given["token_selected_experts"].flip(0)}
    assert_replays(b12x_fused_moe, given, changes | {"w2_alpha": given["w1_alpha"]})


# b12x_fused_moe


def b12x_arguments(layer: Layer, seed: int = 20, **changes: Any) -> dict[str, Any]:
    random = generator(seed)
    ids = torch.rand(TOKENS, EXPERTS, generator=random).argsort(1)[:, :TOPK]
    given = {
        "x": torch.randn(TOKENS, HIDDEN, generator=random).bfloat16(),
        "w1_weight": layer.w1,
        "w1_weight_sf": layer.w1_scale.view(torch.float8_e4m3fn),
        "w2_weight": layer.w2,
        "w2_weight_sf": layer.w2_scale.view(torch.float8_e4m3fn),
        "token_selected_experts": ids.int(),
        "token_final_scales": torch.rand(TOKENS, TOPK, generator=random),
        "num_experts": EXPERTS,
        "top_k": TOPK,
        "w1_alpha": numbers(0.5, 2.0, 21),
        "w2_alpha": numbers(0.5, 2.0, 22),
    }
    return given | changes


MODES: dict[str, dict[str, Any]] = {
    "default": {"fc2_input_scale": torch.tensor([4.0])},
    "nvfp4": {"quant_mode": "nvfp4", "fc2_input_scale": torch.tensor(0.25)},
    "w4a4": {"quant_mode": "w4a4", "fc2_input_scale": numbers(0.5, 2.0, 23)},
    "fp4": {"activation_precision": "fp4", "fc2_input_scale": torch.tensor([1.0])},
    "bf16": {"activation_precision": "bf16"},
    "w4a16": {"quant_mode": "w4a16", "fc2_input_scale": torch.tensor([1e30])},
    "compressed_tensors": {"quant_mode": "w4a16", "source_format": "compressed_tensors"},
    "mxfp4": {"quant_mode": "mxfp4", "fc2_input_scale": torch.tensor([1e30])},
    "input_scale": {"fc2_input_scale": torch.tensor([0.5]), "input_global_scale": torch.tensor(0.013)},
    "input_scales": {"fc2_input_scale": torch.tensor([0.5]), "input_global_scale": numbers(0.001, 5.0, 24)},
}
FUNCTIONS = {"silu": "swiglu", "gelu_tanh": "geglu_tanh", "swigluoai_uninterleave": "swiglu", "relu2": "relu2"}


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_b12x(mode: str, activation: str, run: Any) -> None:
    more = MODES[mode]
    kind, gated = "mxfp4" if mode == "mxfp4" else "nvfp4", activation != "relu2"
    layer = random_layer(kind, gated, EXPERTS, HIDDEN, INNER, generator(3))
    given = b12x_arguments(layer, activation=activation, **more)
    rounded = mode in ("default", "nvfp4", "w4a4", "fp4", "input_scale", "input_scales")
    first, second = given["w1_alpha"], given["w2_alpha"]
    if rounded:
        second = second * more["fc2_input_scale"].reshape(-1)
    if mode == "compressed_tensors":
        first, second = 1 / first.double(), 1 / second.double()
    layer = dataclasses.replace(layer, gate=first, up=first if gated else None, second=second)
    if activation == "swigluoai_uninterleave":
        limit = None if rounded else 1.5  # numbers that are clamped are equal, and go another way all at once
        given |= {"swiglu_alpha": 1.3, "swiglu_beta": 0.5, "swiglu_limit": limit}
        own = {"alpha": torch.full((EXPERTS,), 1.3), "beta": 0.5 / first}  # of unscaled sums, as the limit
        layer = dataclasses.replace(layer, **own, limit=None if limit is None else limit / first)
    how = "nvfp4" if rounded else "bf16"
    ids, weights = given["token_selected_experts"], given["token_final_scales"]
    expected = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for expert, scale in enumerate(given.get("input_global_scale", torch.tensor(1.0)).expand(EXPERTS).double()):
        x = given["x"].double()
        x = round_nvfp4(x, scale.expand(TOKENS, 1)) if rounded else x
        expected += layer(x, ids, weights, FUNCTIONS[activation], how, range(expert, expert + 1))
    found = run(b12x_fused_moe, **given)
    check(found, expected, how)
    output = torch.full((TOKENS, HIDDEN), torch.nan, dtype=torch.bfloat16)
    assert run(b12x_fused_moe, **given, output=output) is output
    assert torch.equal(output, found)


def test_b12x_on_two_ranks(run: Any) -> None:
    """A rank passes ids less its first expert, or a map; those of the other rank's experts add nothing."""
    layer = random_layer("nvfp4", True, EXPERTS, HIDDEN, INNER, generator(3))
    given = b12x_arguments(layer, quant_mode="w4a16")
    expected, total = run(b12x_fused_moe, **given).double(), torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for first, last in ((0, 5), (5, 8)):
        part = {name: given[name].view(torch.uint8)[first:last] for name in given if name.startswith(("w1_w", "w2_w"))}
        part |= {name: given[name][first:last] for name in ("w1_alpha", "w2_alpha")}
        part["num_local_experts"] = last - first
        of_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        of_map[first:last] = torch.arange(last - first, dtype=torch.int32)
        mapped = run(b12x_fused_moe, **given | part, expert_map=of_map)
        part["token_selected_experts"] = given["token_selected_experts"] - first
        found = run(b12x_fused_moe, **given | part)
        assert torch.equal(mapped, found)
        total += found.double()
    assert float(worst_row_error(total, expected)) < LIMITS["bf16"]


BAD_B12X: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "scale": ({}, ("fc2_input_scale is missing", "'nvfp4'")),
    "mode": ({"quant_mode": "w8a8"}, ("quant_mode ('w8a8')", "nvfp4, w4a4, mxfp4, w4a16")),
    "precision": ({"activation_precision": "fp8"}, ("activation_precision ('fp8')", "fp4, bf16")),
    "source": ({"source_format": "gguf", "quant_mode": "w4a16"}, ("source_format ('gguf')", "compressed_tensors")),
    "pair": ({"source_format": "compressed_tensors"}, ("source_format ('compressed_tensors')", "'nvfp4'")),
    "dtype": ({"output_dtype": torch.float16}, ("output_dtype (torch.float16)",)),
    "activation": ({"activation": "gelu"}, ("activation ('gelu')", "silu, gelu_tanh, swigluoai_uninterleave, relu2")),
    "local": ({"num_local_experts": 9, "quant_mode": "w4a16"}, ("num_local_experts (9)", "[1, num_experts (8)]")),
    "weights": ({"num_local_experts": 4, "quant_mode": "w4a16"}, ("w1_weight is (8, 192, 32)", "(4, 192, 32)")),
    "x": ({"x": torch.zeros(TOKENS, HIDDEN), "quant_mode": "w4a16"}, ("x is", "float32", "bfloat16")),
    "x's dimensions": ({"x": torch.zeros(1, 2, 64).bfloat16()}, ("x is (1, 2, 64)", "[tokens, hidden]")),
    "alpha": ({"w1_alpha": torch.ones(1), "quant_mode": "w4a16"}, ("w1_alpha is (1,)", "(8,)")),
    "top_k": ({"top_k": 2, "quant_mode": "w4a16"}, ("token_selected_experts is (24, 3)", "(24, 2)")),
    "alpha of silu": ({"swiglu_alpha": 1.0}, ("swiglu_alpha (1.0)", "'swigluoai_uninterleave'", "'silu'")),
    "limit of silu": ({"swiglu_limit": 7.0}, ("swiglu_limit (7.0)", "'silu'")),
    "limit": ({"activation": "swigluoai_uninterleave", "swiglu_limit": 0.0}, ("swiglu_limit (0.0) must be positive",)),
    "input scale": (
        {"input_global_scale": torch.ones(3), "fc2_input_scale": torch.ones(1)},
        ("input_global_scale is (3,)", "1 or 8 float32"),
    ),
    "map": ({"expert_map": torch.zeros(7).int(), "quant_mode": "w4a16"}, ("expert_map is (7,)", "(8,)")),
    "scales of 16": ({"quant_mode": "mxfp4"}, ("w1_weight_sf is (8, 192, 4)", "nvfp4", "32 columns", "'mxfp4'")),
    "mxfp4": (
        {"w1_weight_sf": torch.zeros(8, 192, 2, dtype=torch.uint8), "quant_mode": "w4a16"},
        ("w1_weight_sf is (8, 192, 2)", "16 columns"),
    ),
}


@pytest.mark.parametrize("name", BAD_B12X)
def test_bad_arguments_of_b12x_are_named(name: str) -> None:
    changes, words = BAD_B12X[name]
    layer = random_layer("nvfp4", True, EXPERTS, HIDDEN, INNER, generator(3))
    assert_named(words, b12x_fused_moe, **b12x_arguments(layer, **changes))


def test_b12x_compiled_into_one_graph() -> None:
    layer = random_layer("nvfp4", True, EXPERTS, HIDDEN, INNER, generator(3))
    given = b12x_arguments(layer, quant_mode="w4a16")

    def function(x: torch.Tensor) -> torch.Tensor:
        return b12x_fused_moe(**given | {"x": x * 2}) + 1

    assert_compiles(function, given["x"])


# Shuffled weights


def shuffled(rows: torch.Tensor, gated: bool, block: int) -> torch.Tensor:
    """Rows [N, ...] as FlashInfer stores them for Blackwell: gate and up alternate, then rows move within blocks."""
    count, order = len(rows), list(range(len(rows)))
    if gated:
        order = [index for pair in zip(range(count // 2), range(count // 2, count), strict=True) for index in pair]
    stored, part = [0] * count, block // 8
    for place, row in enumerate(order):
        start, within = divmod(place, block)
        stored[start * block + within % part * 8 + within // part] = row
    return rows[stored]


def tiled(scale: torch.Tensor) -> torch.Tensor:
    """Scales [N, G], multiples of 128 and 4, in tiles of 128 x 4: row r begins at 16 * (r % 32) + 4 * (r // 32)."""
    rows, columns = scale.shape
    out = torch.empty(rows * columns, dtype=scale.dtype)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * (columns // 4) + column // 4
            out[512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4] = scale[row, column]
    return out


@pytest.mark.parametrize(("gated", "tile_m"), [(True, 128), (False, 128), (True, 64)])
def test_shuffled_weights(gated: bool, tile_m: int) -> None:
    block = {128: 32, 64: 16}[tile_m]
    weight = torch.randint(0, 256, (2, 256, 64), generator=generator(1), dtype=torch.uint8)
    scale = torch.randint(0, 256, (2, 256, 8), generator=generator(2), dtype=torch.uint8).view(torch.float8_e4m3fn)
    bias = torch.randn(2, 256, generator=generator(3))
    stored = torch.stack([shuffled(rows, gated, block) for rows in weight])
    stored_scale = torch.stack([tiled(shuffled(rows, gated, block)) for rows in scale.view(torch.uint8)])
    found, found_scale = unshuffle_weight(
        stored, stored_scale.view(2, 256, 8).view(torch.float8_e4m3fn), gated=gated, epilogue_tile_m=tile_m
    )
    assert torch.equal(found, weight)
    assert found_scale.dtype == torch.float8_e4m3fn
    assert torch.equal(found_scale.view(torch.uint8), scale.view(torch.uint8))
    stored_bias = torch.stack([shuffled(row, gated, block) for row in bias])
    assert torch.equal(unshuffle_rows(stored_bias, gated=gated, epilogue_tile_m=tile_m), bias)


def test_scales_in_tiles_that_are_not_full() -> None:
    scale = torch.randint(0, 256, (3, 256, 8), generator=generator(2), dtype=torch.uint8)
    stored = torch.stack([tiled(rows) for rows in scale])
    assert torch.equal(untile_scales(stored, 200, 6), scale[:, :200, :6])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: unshuffle_rows(torch.zeros(2, 40, 4), gated=True), ("(40)", "multiple of 32")),
        (
            lambda: unshuffle_rows(torch.zeros(2, 64), gated=True, epilogue_tile_m=96),
            ("epilogue_tile_m (96)", "128, 64"),
        ),
        (lambda: untile_scales(torch.zeros(2, 100, dtype=torch.uint8), 128, 4), ("(2, 100)", "512 for each expert")),
        (lambda: unshuffle_weight(torch.zeros(2, 64, 8), torch.zeros(2, 32, 1), gated=True), ("(2, 32, 1)",)),
    ],
)
def test_bad_layouts_are_named(call: Callable[[], Any], words: tuple[str, ...]) -> None:
    assert_named(words, call)
