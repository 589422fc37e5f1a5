"""Calls of other libraries in formats that `test_plans` has not, by kernels against torch; on a GPU too."""

import functools
from typing import Any

import pytest
import torch
from helpers import fp4_oracle
from helpers.calls import moved

from ep_moe.experts.prepared import PreparedCall
from ep_moe.functional import plans
from ep_moe.functional.flashinfer import trtllm_fp4_block_scale_moe
from ep_moe.functional.sglang import outplace_fused_experts, override_config
from ep_moe.functional.vllm import BatchedTritonExperts, batched_moe_kernel_quantize_input
from ep_moe.quant import StoredMatrix, get_scheme, quantize_weight
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from interpreted.common import DEVICE, generator, use_kernels

EXPERTS, TOPK, TOKENS, HIDDEN, INNER = 4, 2, 9, 64, 96


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes later calls use kernels on a CPU too."""

    plans.plan_cache.cache_clear()
    yield functools.partial(use_kernels, monkeypatch)
    plans.plan_cache.cache_clear()


def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float(worst_row_error(found.cpu(), expected.cpu())) < ROW_ERROR_LIMITS["bfloat16"]


def tokens(seed: str) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=generator(seed)).bfloat16()


@pytest.mark.parametrize("activation", [3, 6])
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_trtllm(kind: str, activation: int, by_kernels: Any) -> None:
    random = generator(kind)
    layer = fp4_oracle.random_layer(kind, activation == 3, EXPERTS, HIDDEN, INNER, random)
    none = ("hidden_states_scale", "routing_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
    given: dict[str, Any] = dict.fromkeys((*none, "n_group", "topk_group", "routed_scaling_factor"))
    scalars = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
    given |= {name: torch.rand(EXPERTS, generator=random) + 0.5 for name in scalars}
    given |= {"gemm1_bias": torch.randn(EXPERTS, layer.w1.shape[1], generator=random), "gemm2_bias": None}
    given |= {"gemm1_weights": layer.w1, "gemm1_weights_scale": layer.w1_scale, "gemm2_weights": layer.w2}
    given |= {"gemm2_weights_scale": layer.w2_scale, "hidden_states": tokens(kind), "num_experts": EXPERTS}
    given |= {"routing_logits": torch.randn(TOKENS, EXPERTS, generator=random), "top_k": TOPK}
    given |= {"intermediate_size": INNER, "local_expert_offset": 0, "local_num_experts": EXPERTS}
    given |= {"routing_method_type": 1, "activation_type": activation}
    [expected] = trtllm_fp4_block_scale_moe(**given)
    by_kernels()
    given = moved(given, DEVICE)
    compare(trtllm_fp4_block_scale_moe(**given)[0], expected)
    compare(trtllm_fp4_block_scale_moe(**given)[0], expected)  # by the launches of the call before


def test_sglang_with_scales_of_channels(by_kernels: Any) -> None:
    random, given = generator("channels"), dict[str, Any]()
    for name, rows, columns in (("w1", 2 * INNER, HIDDEN), ("w2", HIDDEN, INNER)):
        given[name] = (torch.randn(EXPERTS, rows, columns, generator=random) / 8).to(torch.float8_e4m3fn)
        given[f"{name}_scale"] = torch.rand(EXPERTS, rows, 1, generator=random) + 0.5
    given |= {"hidden_states": tokens("channels"), "topk_weights": torch.rand(TOKENS, TOPK, generator=random)}
    given |= {"b1": torch.randn(EXPERTS, 2 * INNER, generator=random).bfloat16(), "use_fp8_w8a8": True}
    given |= {"topk_ids": torch.randint(-1, EXPERTS, (TOKENS, TOPK), generator=random).int(), "per_channel_quant": True}
    given["topk_ids"][:, 0] = 1
    expected = outplace_fused_experts(**given, routed_scaling_factor=1.5)
    by_kernels()
    compare(outplace_fused_experts(**moved(given, DEVICE), routed_scaling_factor=1.5), expected)


CONFIG = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1, "num_stages": 2}


def test_an_override_is_used(by_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    random = generator("override")
    w1 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=random).bfloat16() / 8
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, generator=random).bfloat16() / 8
    ids = torch.randint(0, EXPERTS, (TOKENS, TOPK), generator=random).int()
    given = (tokens("override"), w1, w2, torch.rand(TOKENS, TOPK, generator=random), ids)
    expected, used, prepare = outplace_fused_experts(*given), [], PreparedCall.__init__

    def note(self: PreparedCall, shape: Any, backend: Any, tiles: Any, *rest: Any, **named: Any) -> None:
        used.append(tiles)
        prepare(self, shape, backend, tiles, *rest, **named)

    monkeypatch.setattr(PreparedCall, "__init__", note)
    by_kernels()
    with override_config(CONFIG):
        compare(outplace_fused_experts(*(tensor.to(DEVICE) for tensor in given)), expected)
    [tiles] = used
    assert (tiles.block_m, tiles.group_m, tiles.first.block_n, tiles.first.block_k) == (16, 1, 32, 32)
    assert (tiles.second.block_n, tiles.second.num_warps, tiles.first.num_stages) == (64, 4, 2)


@pytest.mark.parametrize("form", ["none", "fp8 tensor", "fp8 block", "int8 token", "fp8 token tensor"])
def test_vllm(form: str, by_kernels: Any) -> None:
    """Rows as vLLM has them: scales of a whole expert, or of rows, in its strides."""
    random, height = generator(form), 12
    flags: dict[str, Any] = {
        "none": {},
        "fp8 tensor": {"use_fp8_w8a8": True},
        "fp8 block": {"use_fp8_w8a8": True, "block_shape": [32, 16]},
        "int8 token": {"use_int8_w8a8": True, "per_act_token_quant": True},
        "fp8 token tensor": {"use_fp8_w8a8": True, "per_act_token_quant": True},  # weights with a scale each
    }[form]
    experts, counts = BatchedTritonExperts(height, 1, **flags), torch.tensor([3, 0, 12, 1], dtype=torch.int32)
    schemes = {"fp8 tensor": "fp8_tensor", "fp8 block": "fp8_block_32x16", "int8 token": "int8_token"}
    scheme = (schemes | {"fp8 token tensor": "fp8_tensor"}).get(form)
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    weights = [torch.randn(shape, generator=random) for shape in shapes]
    stored = [StoredMatrix(weight.bfloat16() / 8) for weight in weights]
    if scheme is not None:
        stored = [quantize_weight(weight / 8, get_scheme(scheme)) for weight in weights]
    x, scale = batched_moe_kernel_quantize_input(
        torch.randn(EXPERTS, height, HIDDEN, generator=random).bfloat16(),
        *(None, height, EXPERTS, HIDDEN, counts, experts.quant_dtype, experts.per_act_token_quant),
        experts.block_shape,
    )
    given: dict[str, Any] = {
        "output": torch.zeros(EXPERTS, height, HIDDEN, dtype=torch.bfloat16),
        "hidden_states": x,
        **{f"w{name}": matrix.values for name, matrix in enumerate(stored, 1)},
        **{f"w{name}_scale": matrix.scale for name, matrix in enumerate(stored, 1)},
        "topk_ids": torch.zeros(9, TOPK),
        "a1q_scale": scale,
        "expert_num_tokens": counts,
        "activation": "silu",
        "global_num_experts": EXPERTS,
        **dict.fromkeys(("expert_map", "w1_zp", "w2_zp", "a2_scale", "workspace13", "workspace2")),
    }
    experts.apply(**given)
    expected = given["output"].clone()
    by_kernels()
    given = moved(given, DEVICE) | {"output": torch.zeros_like(expected, device=DEVICE)}
    for _ in range(2):  # the second by the launches of the first
        experts.apply(**given)
        compare(given["output"].view(-1, HIDDEN), expected.view(-1, HIDDEN))
