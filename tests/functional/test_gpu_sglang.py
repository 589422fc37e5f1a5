"""SGLang's calls on a GPU, against the same calls in torch on a CPU, and replayed from CUDA graphs."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.experts_oracle import EXPERTS, FORMATS, HIDDEN, INNER, TOKENS, TOPK, check, generator, made

from ep_moe.functional.sglang import (
    FusedMoE,
    StandardTopKOutput,
    invoke_fused_moe_kernel,
    moe_align_block_size,
    outplace_fused_experts,
    override_config,
    quantize,
    routing_from_topk,
    triton_kernel_fused_experts,
    triton_kernel_fused_experts_with_bias,
    try_get_optimal_moe_config,
)
from ep_moe.testing import worst_row_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LIMIT = 2e-2  # two roundings of a token to 8 bits may fall on either side
CONFIG = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
FEW = ("none", "fp8_channel", "fp8_block", "int8_channel", "int8_groups_zp", "int4_groups_zp")


def to_gpu(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return given.cuda()
    if isinstance(given, dict):
        return {name: to_gpu(value) for name, value in given.items()}
    return given


def replayed(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What a captured call computes, after its output was overwritten."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.fill_(torch.nan)
    graph.replay()
    return out


def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    check(found.cpu(), expected, LIMIT)


def routed(seed: int) -> dict[str, torch.Tensor]:
    random = generator(seed)
    ids = torch.rand(TOKENS, EXPERTS, generator=random).argsort(1)[:, :TOPK].int()
    ids[3, 1], ids[5] = -1, torch.tensor([EXPERTS, -1, EXPERTS + 90])
    return {
        "hidden_states": torch.randn(TOKENS, HIDDEN, generator=random).bfloat16(),
        "topk_weights": torch.rand(TOKENS, TOPK, generator=random) + 0.1,
        "topk_ids": ids,
    }


@pytest.mark.parametrize("name", FORMATS)
def test_fused_experts(name: str) -> None:
    """Formats, and for few of them, flags on and off."""
    w1, w2 = (made(FORMATS[name], *size, torch.bfloat16, 4) for size in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    given = routed(3) | {"w1": w1.values, "w2": w2.values, "w1_scale": w1.scale, "w2_scale": w2.scale}
    given |= {"w1_zp": w1.zero, "w2_zp": w2.zero, **FORMATS[name].flags}
    biases = {"b1": torch.randn(EXPERTS, 2 * INNER).bfloat16(), "b2": torch.randn(EXPERTS, HIDDEN).bfloat16()}
    flags: list[dict[str, Any]] = [{}, biases, {"no_combine": True}, {"apply_router_weight_on_input": True}]
    flags += [{"routed_scaling_factor": 2.5, "activation": "gelu"}]
    flags += [{"no_combine": True, "no_combine_keep_router_weight": True}, {"swiglu_limit": 0.5}, {"gemm1_limit": 0.3}]
    gpt_oss = {"gemm1_alpha": 1.702, "gemm1_limit": 0.9}
    flags += [{**gpt_oss, "gate_up_interleaved": False}]
    if (FORMATS[name].flags.get("block_shape") or [0])[0] == 0:  # no scale is of a gate and an up row
        flags += [{**gpt_oss, **biases}, {"fuse_swiglu_interleaved": True}]
    if name == "fp8_block":
        scale = torch.rand(TOKENS + 4, HIDDEN // 16) / 20 + 0.01
        flags += [{"a1_q": torch.randn(TOKENS + 4, HIDDEN).mul(20).to(torch.float8_e4m3fn), "a1_scale": scale}]
    for more in flags if name in FEW else flags[:2]:
        expected = outplace_fused_experts(**given, **more)
        on_gpu = to_gpu(given | more)
        compare(replayed(lambda on_gpu=on_gpu: outplace_fused_experts(**on_gpu)), expected)
    with override_config(CONFIG):
        compare(outplace_fused_experts(**to_gpu(given)), outplace_fused_experts(**given))


@pytest.mark.parametrize("name", ["none", "fp8_block"])
def test_without_a_gate(name: str) -> None:
    w1, w2 = (made(FORMATS[name], *size, torch.bfloat16, 4) for size in ((INNER, HIDDEN), (HIDDEN, INNER)))
    given = routed(3) | {"w1": w1.values, "w2": w2.values, "w1_scale": w1.scale, "w2_scale": w2.scale}
    given |= {"activation": "relu2", "is_gated": False, **FORMATS[name].flags}
    on_gpu = to_gpu(given)
    compare(replayed(lambda: outplace_fused_experts(**on_gpu)), outplace_fused_experts(**given))


@pytest.mark.parametrize("name", FEW)
def test_one_gemm(name: str) -> None:
    form, ids = FORMATS[name], routed(5)
    weight = made(form, 2 * INNER, HIDDEN, torch.bfloat16, 6)
    pairs, experts, count = moe_align_block_size(ids["topk_ids"], 16, EXPERTS)
    given = dict.fromkeys(
        ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"), False
    )
    given |= {"A": ids["hidden_states"], "B": weight.values, "A_scale": None, "B_scale": weight.scale}
    given |= {"B_zp": weight.zero, "topk_weights": ids["topk_weights"], "topk_ids": ids["topk_ids"]}
    given |= {"sorted_token_ids": pairs, "expert_ids": experts, "num_tokens_post_padded": count, "top_k": TOPK}
    given |= {"config": CONFIG, "compute_type": torch.bfloat16, **form.flags}
    bias = torch.randn(EXPERTS, 2 * INNER, generator=generator(7)).bfloat16()
    dropped = experts.clone()
    dropped[1] = -1
    for weighted, c_sorted, filtered in itertools.product([False, True], repeat=3):
        more = {"mul_routed_weight": weighted, "c_sorted": c_sorted, "bias": bias if weighted else None}
        more |= {"expert_ids": dropped if filtered else experts, "a_use_tma": False, "b_use_tma": c_sorted}
        rows = len(pairs) if c_sorted else TOKENS * TOPK
        outs = []
        for everything in (given | more, to_gpu(given | more)):
            c = torch.zeros(rows, 2 * INNER, dtype=torch.bfloat16, device=everything["A"].device)
            outs.append(c)
            invoke_fused_moe_kernel(C=c, **everything)
        compare(outs[1], outs[0])
    on_gpu, c = to_gpu(given | more), torch.zeros(rows, 2 * INNER, dtype=torch.bfloat16, device="cuda")

    def call() -> torch.Tensor:
        invoke_fused_moe_kernel(C=c, **on_gpu)
        return c

    first = call().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    c.zero_()
    graph.replay()
    assert torch.equal(c, first)


def test_default_config_of_this_gpu() -> None:
    config = try_get_optimal_moe_config((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER), TOPK, None, TOKENS)
    w1, w2 = (made(FORMATS["none"], *size, torch.bfloat16, 4) for size in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    given = routed(9) | {"w1": w1.values, "w2": w2.values}
    with override_config(config):
        compare(outplace_fused_experts(**to_gpu(given)), outplace_fused_experts(**given))


@pytest.mark.parametrize("form", ["turned", "contiguous", "mxfp4"])
def test_routing_data(form: str) -> None:
    random, given = generator(11), routed(10)
    w1 = (torch.randn(EXPERTS, HIDDEN, 2 * INNER, generator=random) / 8).bfloat16()
    w2 = (torch.randn(EXPERTS, INNER, HIDDEN, generator=random) / 8).bfloat16()
    b1, b2 = torch.randn(EXPERTS, 2 * INNER, generator=random), torch.randn(EXPERTS, HIDDEN, generator=random)
    if form == "turned":
        w1, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w1, w2))
    found = []
    for device in ("cpu", "cuda"):
        x, weights, ids = (given[name].to(device) for name in ("hidden_states", "topk_weights", "topk_ids"))
        routing = routing_from_topk(weights, ids, EXPERTS)
        first, second = w1.to(device), w2.to(device)
        if form == "mxfp4":
            first, _, pcg1 = quantize(w1, "mx4", device)
            second, _, pcg2 = quantize(w2, "mx4", device)
            rest = (pcg1, b1.to(device), second, pcg2, b2.to(device))
            numbers = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.9}
            call = lambda: triton_kernel_fused_experts_with_bias(x, first, *rest, *routing, **numbers)  # noqa: B023, E731
        else:
            call = lambda: triton_kernel_fused_experts(x, first, second, *routing)  # noqa: B023, E731
        found.append(replayed(call) if device == "cuda" else call())
    compare(found[1], found[0])


@pytest.mark.parametrize("kind", ["none", "fp8", "nvfp4"])
def test_layer(kind: str) -> None:
    """Moved to the GPU after it was loaded, and captured."""
    config = {"nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "none": None}
    config["fp8"] = {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic"}
    layer = FusedMoE(EXPERTS, HIDDEN, INNER, 0, params_dtype=torch.bfloat16, quant_config=config[kind], inplace=False)
    random = generator(12)
    for name, parameter in layer.named_parameters():
        if "scale" in name:
            size = 1.0 if name.endswith("_scale") and kind == "nvfp4" else 0.02
            parameter.data.copy_(
                (torch.rand(parameter.shape[:1], generator=random) + 0.5)
                .mul(size)
                .view(-1, *[1] * (parameter.dim() - 1))
                .expand(parameter.shape)
            )
        elif kind == "nvfp4":
            parameter.data.copy_(torch.randint(0, 256, parameter.shape, generator=random, dtype=torch.uint8))
        else:
            size = 1.0 if kind == "fp8" else 0.1
            parameter.data.copy_(torch.randn(parameter.shape, generator=random).mul(size).to(parameter.dtype))
    given = routed(13)
    x, output = given["hidden_states"], StandardTopKOutput(given["topk_weights"], given["topk_ids"], None)
    expected = layer(x, output)
    moved = copy.deepcopy(layer).cuda()
    on_gpu = StandardTopKOutput(*(tensor.cuda() for tensor in output[:2]), None)
    own = x.cuda()
    found = replayed(lambda: moved(own, on_gpu)).cpu()
    busy = ~(expected == 0).all(1)
    assert float(worst_row_error(found[busy], expected[busy].double())) < (0.1 if kind == "nvfp4" else LIMIT)
