"""Whole calls as one sequence of launches, in Triton's interpreter: the same bits as by separate launches."""

import functools
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from helpers.sampling import thinned

from ep_moe.config import ActivationConfig, Layout
from ep_moe.experts import create_experts
from ep_moe.functional import plans
from ep_moe.functional.flashinfer import trtllm, trtllm_fp4_block_scale_moe
from ep_moe.layout import triton as layout_kernels
from ep_moe.local_moe import local_moe
from ep_moe.quant import StoredMatrix, get_scheme, quantize_weight
from ep_moe.routing import Routing
from ep_moe.routing import triton as routing_kernels
from ep_moe.routing.base import Options
from ep_moe.testing.transports import engine_defaults
from ep_moe.weights import ExpertWeights
from interpreted.common import DEVICE, generator, use_kernels

pytestmark = pytest.mark.skipif(torch.device(DEVICE).type != "cpu", reason="memory is read by its address on a CPU")
EXPERTS, TOPK, HIDDEN, INNER = 4, 2, 64, 96
BLOCK_IDS = {65: 128, 67: 16}  # tokens, and the ids of a block of them


def stored(scheme: str, *shape: int) -> StoredMatrix:
    values = torch.randn(*shape, generator=generator(f"{scheme} {shape}")) / 8
    return StoredMatrix(values.bfloat16()) if scheme == "none" else quantize_weight(values, get_scheme(scheme))


def weights_in(scheme: str) -> ExpertWeights:
    w13, w2 = stored(scheme, EXPERTS, 2 * INNER, HIDDEN), stored(scheme, EXPERTS, HIDDEN, INNER)
    return ExpertWeights(w13=w13, w2=w2, scheme=get_scheme(scheme))


def twice(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, rows])


def routed(seed: str, tokens: int) -> tuple[torch.Tensor, Routing]:
    random = generator(seed)
    ids = torch.randint(-1, EXPERTS, (tokens, TOPK), generator=random, dtype=torch.int32)
    weights = torch.rand(tokens, TOPK, generator=random)
    return torch.randn(tokens, HIDDEN, generator=random).bfloat16(), Routing(topk_ids=ids, topk_weights=weights)


@pytest.mark.parametrize(
    ("scheme", "tokens", "launches", "given"),
    [
        pytest.param("none", 5, 4, False, id="few"),
        pytest.param("none", 5, 4, True, id="few, out"),
        pytest.param("fp8_block", 6, 4, False, id="few, quantized"),
        pytest.param("fp8_block", 65, 5, True, id="quantized, two blocks of tokens"),
        pytest.param("none", 67, 8, False, id="more blocks than one program counts"),
        pytest.param("nvfp4", 20, 6, False, id="few, quantized in groups of 16"),
        pytest.param("fp8_tensor", 3, None, False, id="largest magnitude"),
        pytest.param("fp8_tensor", 3, None, True, id="largest magnitude, out"),
    ],
)
def test_local_moe(
    scheme: str, tokens: int, launches: int | None, given: bool, repeats: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if tokens in BLOCK_IDS:  # of no other test: launches are kept by the number of tokens
        monkeypatch.setattr(layout_kernels, "_BLOCK_IDS", BLOCK_IDS[tokens])
        monkeypatch.setattr(layout_kernels, "_FEW_PAIRS", 128)
    weights = weights_in(scheme)
    experts = create_experts("triton", ActivationConfig(kind="silu"), DEVICE)

    def call(seed: str, weights: ExpertWeights = weights) -> torch.Tensor:
        x, routing = routed(seed, tokens)
        out = torch.full((tokens, HIDDEN), math.nan, dtype=torch.bfloat16) if given else None
        y = local_moe(x, routing, weights, experts, out=out)
        assert out is None or y is out
        return y

    expected = call("b")
    del repeats[:]
    call("a")
    found = call("b")
    assert torch.equal(found, expected)
    assert bool(found.isfinite().all())
    assert len(repeats) == 2  # one sequence for each call
    assert launches is None or repeats == [launches] * 2
    kept = weakref.ref(weights.w13.values)
    del weights, call
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(("scheme", "tokens", "launches"), [("none", 67, 8), ("fp8_block", 6, 5)])
def test_rows_that_are_not_copied(
    scheme: str, tokens: int, launches: int, repeats: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layout FLAT, one sequence, too: the bits of COMPACT. Of 67 tokens the rows are placed by several launches."""
    if tokens in BLOCK_IDS:
        monkeypatch.setattr(layout_kernels, "_BLOCK_IDS", BLOCK_IDS[tokens])
    weights = weights_in(scheme)
    experts = create_experts("triton", ActivationConfig(kind="silu"), DEVICE)
    expected = local_moe(*routed("b", tokens), weights, experts)
    out = torch.full((tokens, HIDDEN), math.nan, dtype=torch.bfloat16)
    for seed in "ab":
        local_moe(*routed(seed, tokens), weights, experts, layout=Layout.FLAT, out=out)
    assert torch.equal(out, expected)
    assert torch.equal(local_moe(*routed("b", tokens), weights, experts, layout=Layout.FLAT), expected)
    del repeats[:]
    assert torch.equal(local_moe(*routed("b", tokens), weights, experts, layout=Layout.FLAT), expected)
    assert repeats == [launches]


@pytest.mark.parametrize(
    "scheme", thinned(["none", "fp8_block", "fp8_tensor", "mxfp8", "int4_w4a8", "int4_w4a16_g32", "nvfp4"])
)
def test_defaults_of_torch_do_not_matter(scheme: str) -> None:
    """Calls whose parts are made while an engine has set a default device and dtype: the bits of others."""
    weights = weights_in(scheme)
    x, routing = routed("defaults", 9)
    more = Routing(topk_ids=twice(routing.topk_ids), topk_weights=twice(routing.topk_weights))
    experts = create_experts("triton", ActivationConfig(kind="silu"), DEVICE)
    with engine_defaults():
        found = [local_moe(twice(x), more, weights, experts) for _ in range(3)]
    fewer = Routing(topk_ids=more.topk_ids[:-1], topk_weights=more.topk_weights[:-1])
    expected = local_moe(twice(x)[:-1], fewer, weights, experts)  # of another number of rows: nothing is found again
    assert all(torch.equal(one[:-1], expected) for one in found)


@pytest.mark.parametrize("deepseek", [False, True], ids=["plain", "groups and bias"])
def test_routing_is_part_of_the_sequence(deepseek: bool, repeats: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    for name, kernels in (("route", routing_kernels.route), ("loaded_sequence", routing_kernels.loaded_sequence)):

        def call(
            x: Any, config: Any, routing_bias: Any = None, routing_replay_out: Any = None, own: Any = kernels
        ) -> Any:
            return own(x, Options(config, routing_bias, routing_replay_out))

        monkeypatch.setattr(trtllm, name, call)
    routing_kernels._plans.cache_clear()
    routing_kernels._kernel_of.cache_clear()
    w1, w2 = stored("mxfp4_w4a16", EXPERTS, 2 * INNER, HIDDEN), stored("mxfp4_w4a16", EXPERTS, HIDDEN, INNER)
    bias = torch.randn(EXPERTS, generator=generator("bias")) if deepseek else None
    numbers = (None, None, None) if deepseek else tuple(torch.rand(EXPERTS) + n for n in range(3))
    scales = [torch.rand(EXPERTS) + 0.5 for _ in range(3)] if deepseek else [None] * 3
    groups = (2, 1) if deepseek else (None, None)

    def call(seed: str) -> torch.Tensor:
        x, _ = routed(seed, 7)
        logits = torch.randn(7, EXPERTS, generator=generator(f"{seed} logits"))
        return trtllm_fp4_block_scale_moe(
            *(logits, bias, x, None, w1.values, w1.scale, None, *numbers, w2.values, w2.scale, None, *scales),
            *(EXPERTS, TOPK, *groups, INNER, 0, EXPERTS, 2.5 if deepseek else None, 2 if deepseek else 1),
        )[0]

    first = call("b")
    del repeats[:]
    second = call("a")
    assert torch.equal(call("b"), first)
    assert not torch.equal(second, first)
    assert len(repeats) == 2
    if deepseek:
        scales[0].mul_(2)  # of which there are views
        assert not torch.equal(call("b"), first)
    plans.plan_cache.cache_clear()
    functools.reduce(lambda _, cache: cache.cache_clear(), (routing_kernels._plans, routing_kernels._kernel_of), None)
