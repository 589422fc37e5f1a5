"""SGLang's calls replayed from CUDA graphs, against the same calls in torch on a CPU."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.calls import moved
from helpers.experts_oracle import EXPERTS, FORMATS, HIDDEN, INNER, TOKENS, TOPK, check, generator, made

from ep_moe.functional.sglang import (
    FusedMoE,
    StandardTopKOutput,
    invoke_fused_moe_kernel,
    moe_align_block_size,
    outplace_fused_experts,
    override_config,
    routing_from_topk,
    triton_kernel_fused_experts,
    try_get_optimal_moe_config,
)
from ep_moe.testing import worst_row_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LIMIT = 2e-2  # two roundings of a token to 8 bits may fall on either side
CONFIG = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
FEW = ("none", "fp8_channel", "fp8_block", "int8_channel", "int8_groups_zp", "int4_groups_zp")


def replayed(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What a captured call computes, after its output was overwritten."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.fill_(torch.nan)
    graph.replay()
    return out


def routed(seed: int) -> dict[str, torch.Tensor]:
    random = generator(seed)
    ids = torch.rand(TOKENS, EXPERTS, generator=random).argsort(1)[:, :TOPK].int()
    ids[3, 1], ids[5] = -1, torch.tensor([EXPERTS, -1, EXPERTS + 90])
    x = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16()
    return {"hidden_states": x, "topk_weights": torch.rand(TOKENS, TOPK, generator=random) + 0.1, "topk_ids": ids}


def arguments(name: str, seed: int, halves: int = 2) -> dict[str, Any]:
    """Of `outplace_fused_experts` with weights in a format."""
    form, given = FORMATS[name], routed(seed)
    for number, size in enumerate(((halves * INNER, HIDDEN), (HIDDEN, INNER)), 1):
        w = made(form, *size, torch.bfloat16, 4)
        given |= {f"w{number}": w.values, f"w{number}_scale": w.scale, f"w{number}_zp": w.zero}
    return given | form.flags


BIASES = {"b1": torch.randn(EXPERTS, 2 * INNER).bfloat16(), "b2": torch.randn(EXPERTS, HIDDEN).bfloat16()}
OPTIONS: dict[str, dict[str, Any]] = {
    "rows": {"no_combine": True},
    "on input": {"apply_router_weight_on_input": True},
    "factor": {"routed_scaling_factor": 2.5, "activation": "gelu"},
    "weighted rows": {"no_combine": True, "no_combine_keep_router_weight": True},
    "swiglu_limit": {"swiglu_limit": 0.5},
    "limit": {"gemm1_limit": 0.3},
    "halves": {"gemm1_alpha": 1.702, "gemm1_limit": 0.9, "gate_up_interleaved": False},
    "in turns": {"gemm1_alpha": 1.702, "gemm1_limit": 0.9, **BIASES},
    "fused in turns": {"fuse_swiglu_interleaved": True},
}


@pytest.mark.parametrize("name", FORMATS)
def test_fused_experts(name: str) -> None:
    """Formats with and without biases, few of them with options."""
    given, flags = arguments(name, 3), [{}, BIASES]
    blocks = (FORMATS[name].flags.get("block_shape") or [0])[0] > 0  # whose scales are of gate and up rows
    flags += [more for key, more in OPTIONS.items() if name in FEW and not (blocks and "in turns" in key)]
    if name == "fp8_block":
        scale = torch.rand(TOKENS + 4, HIDDEN // 16) / 20 + 0.01
        flags += [{"a1_q": torch.randn(TOKENS + 4, HIDDEN).mul(20).to(torch.float8_e4m3fn), "a1_scale": scale}]
    for more in flags:
        on_gpu = moved(given | more, "cuda")
        found = replayed(lambda on_gpu=on_gpu: outplace_fused_experts(**on_gpu))
        check(found.cpu(), outplace_fused_experts(**given, **more), LIMIT)
    default = try_get_optimal_moe_config((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER), TOPK, None, TOKENS)
    for config in (CONFIG, default):
        with override_config(config):
            check(outplace_fused_experts(**moved(given, "cuda")).cpu(), outplace_fused_experts(**given), LIMIT)


@pytest.mark.parametrize("name", ["none", "fp8_block"])
def test_without_a_gate(name: str) -> None:
    given = arguments(name, 3, halves=1) | {"activation": "relu2", "is_gated": False}
    on_gpu = moved(given, "cuda")
    check(replayed(lambda: outplace_fused_experts(**on_gpu)).cpu(), outplace_fused_experts(**given), LIMIT)


@pytest.mark.parametrize("name", FEW)
def test_one_gemm(name: str) -> None:
    form, given = FORMATS[name], routed(5)
    weight = made(form, 2 * INNER, HIDDEN, torch.bfloat16, 6)
    pairs, experts, count = moe_align_block_size(given["topk_ids"], 16, EXPERTS)
    flags = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant")
    more: dict[str, Any] = dict.fromkeys(flags, False) | {"A_scale": None, "bias": BIASES["b1"], "top_k": TOPK}
    more |= {"A": given.pop("hidden_states"), "B": weight.values, "B_scale": weight.scale, "B_zp": weight.zero, **given}
    more |= {"sorted_token_ids": pairs, "expert_ids": experts, "num_tokens_post_padded": count}
    more |= {"mul_routed_weight": True, "config": CONFIG, "compute_type": torch.bfloat16, **form.flags}
    on_gpu, outs = moved(more, "cuda"), []
    for everything in (more, on_gpu):
        c = torch.zeros(TOKENS * TOPK, 2 * INNER, dtype=torch.bfloat16, device=everything["A"].device)

        def call() -> torch.Tensor:
            invoke_fused_moe_kernel(C=c, **everything)  # noqa: B023
            return c  # noqa: B023

        outs.append(replayed(call).cpu() if everything is on_gpu else call())
    check(outs[1], outs[0], LIMIT)


@pytest.mark.parametrize("turned", [False, True])
def test_routing_data(turned: bool) -> None:
    random, given, found = generator(11), routed(10), []
    w1 = (torch.randn(EXPERTS, HIDDEN, 2 * INNER, generator=random) / 8).bfloat16()
    w2 = (torch.randn(EXPERTS, INNER, HIDDEN, generator=random) / 8).bfloat16()
    if turned:
        w1, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w1, w2))
    for device in ("cpu", "cuda"):
        x, weights, ids = (given[name].to(device) for name in ("hidden_states", "topk_weights", "topk_ids"))
        arguments = x, w1.to(device), w2.to(device), *routing_from_topk(weights, ids, EXPERTS)
        call = lambda: triton_kernel_fused_experts(*arguments)  # noqa: B023, E731
        found.append(replayed(call).cpu() if device == "cuda" else call())
    check(found[1], found[0], LIMIT)


@pytest.mark.parametrize("kind", ["none", "fp8", "nvfp4"])
def test_layer(kind: str) -> None:
    """Moved to the GPU after it was loaded, and captured."""
    config = {"nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "none": None}
    config["fp8"] = {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic"}
    layer = FusedMoE(EXPERTS, HIDDEN, INNER, 0, params_dtype=torch.bfloat16, quant_config=config[kind], inplace=False)
    random = generator(12)
    for name, parameter in layer.named_parameters():
        shape = parameter.shape
        if "scale" in name:
            size = 1.0 if name.endswith("_scale") and kind == "nvfp4" else 0.02
            scale = (torch.rand(shape[:1], generator=random) + 0.5).mul(size)
            parameter.data.copy_(scale.view(-1, *[1] * (len(shape) - 1)).expand(shape))
        elif kind == "nvfp4":
            parameter.data.copy_(torch.randint(0, 256, shape, generator=random, dtype=torch.uint8))
        else:
            size = 1.0 if kind == "fp8" else 0.1
            parameter.data.copy_(torch.randn(shape, generator=random).mul(size).to(parameter.dtype))
    given = routed(13)
    x, output = given["hidden_states"], StandardTopKOutput(given["topk_weights"], given["topk_ids"], None)
    expected, on_gpu, own = layer(x, output), copy.deepcopy(layer).cuda(), x.cuda()
    there = moved(output, "cuda")
    found = replayed(lambda: on_gpu(own, there)).cpu()
    busy = ~(expected == 0).all(1)
    assert float(worst_row_error(found[busy], expected[busy].double())) < (0.1 if kind == "nvfp4" else LIMIT)
