"""The calls that `functional_calls.py` times: each kind at the sizes of a model, and what torch computes for it.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.functional import grouped_mm, silu

from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.experts import create_experts
from ep_moe.functional.flashinfer import b12x_fused_moe, trtllm_fp4_block_scale_moe
from ep_moe.functional.sglang import (
    invoke_fused_moe_kernel,
    moe_align_block_size,
    outplace_fused_experts,
    routing_from_topk,
    triton_kernel_fused_experts,
    triton_kernel_fused_experts_with_bias,
    try_get_optimal_moe_config,
)
from ep_moe.functional.vllm import BatchedTritonExperts, invoke_moe_batched_triton_kernel
from ep_moe.local_moe import local_moe
from ep_moe.quant import StoredMatrix, dequantize_weight, get_scheme
from ep_moe.routing import Routing, route
from ep_moe.weights import ExpertWeights

DEVICE = torch.device("cuda", 0)
LIMITS = {"bfloat16": 2e-2, "fp8": 1e-1, "fp4": 3e-1}  # by the format of tokens
GROUP = 128  # columns that share a scale and a zero point of 4-bit integers
Call = Callable[[], torch.Tensor]


class Weights(NamedTuple):
    """Both weights as they are stored and in bfloat16."""

    w1: torch.Tensor
    w1_scale: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None
    plain1: torch.Tensor
    plain2: torch.Tensor


def stored(
    scheme: str, experts: int, rows: int, columns: int, *, compared: bool
) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """A random weight, its scales, and, if it is compared with torch's, the same in bfloat16."""
    if scheme == "none":
        plain = torch.empty(experts, rows, columns, dtype=torch.bfloat16, device=DEVICE)
        return plain.normal_(std=0.03), None, plain
    chosen = get_scheme(scheme)
    plain = torch.empty(experts if compared else 0, rows, columns, dtype=torch.bfloat16, device=DEVICE)
    if scheme.startswith("fp8"):
        values = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device=DEVICE)
        scale = torch.rand(experts, rows // 128, columns // 128, device=DEVICE) * 1e-3 + 1e-3
        for expert in range(experts):
            values[expert] = (30 * torch.randn(rows, columns, device=DEVICE)).to(torch.float8_e4m3fn)
    else:
        values = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=DEVICE)
        if scheme.startswith("mxfp4"):
            shape = (experts, rows, columns // 32)
            scale = torch.randint(119, 123, shape, dtype=torch.uint8, device=DEVICE).view(torch.float8_e8m0fnu)
        else:
            scale = (torch.rand(experts, rows, columns // 16, device=DEVICE) * 0.02 + 0.01).to(torch.float8_e4m3fn)
    one = torch.ones(experts, device=DEVICE) if scheme.startswith("nvfp4") else None
    matrix = StoredMatrix(values, scale=scale, global_scale=one)
    for expert in range(plain.shape[0]):
        plain[expert] = dequantize_weight(matrix[expert], chosen)
    return values, scale, plain


def weights_of(scheme: str, experts: int, hidden: int, intermediate: int, *, compared: bool) -> Weights:
    """Those of a layer with a gate."""
    w1, scale1, plain1 = stored(scheme, experts, 2 * intermediate, hidden, compared=compared)
    w2, scale2, plain2 = stored(scheme, experts, hidden, intermediate, compared=compared)
    return Weights(w1, scale1, w2, scale2, plain1, plain2)


def by_torch(
    x: torch.Tensor,
    ids: torch.Tensor,
    factors: torch.Tensor,
    weights: Weights,
    between: Callable[[torch.Tensor], torch.Tensor],
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    on_input: bool = False,
    combined: bool = True,
) -> torch.Tensor:
    """Two grouped GEMMs of routed tokens, and the weighted sum, or every expert's own weighted row [T, K, H]."""
    flat, count = ids.reshape(-1), weights.w1.shape[0]
    order = torch.argsort(flat)
    token, expert = order // ids.shape[1], flat[order]
    counts = torch.zeros(count, dtype=torch.int32, device=flat.device)
    ends = counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int32)).cumsum(0).int()
    factor = factors.reshape(-1)[order].to(x.dtype)[:, None]
    rows = x[token] * factor if on_input else x[token]
    first = grouped_mm(rows, weights.plain1.transpose(1, 2), offs=ends)
    if biases is not None:
        first += biases[0][expert]
    y = grouped_mm(between(first), weights.plain2.transpose(1, 2), offs=ends)
    if biases is not None:
        y += biases[1][expert]
    if not on_input:
        y = y * factor
    if combined:
        return torch.zeros_like(x).index_add_(0, token, y)
    return torch.empty_like(y).index_copy_(0, order, y).view(*ids.shape, -1)


def swiglu(rows: torch.Tensor, alpha: float, limit: float, up_first: bool) -> torch.Tensor:
    """gpt-oss's activation."""
    gate, up = rows.chunk(2, dim=-1)[:: -1 if up_first else 1]
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up + 1)


def swiglu_in_turns(rows: torch.Tensor) -> torch.Tensor:
    """gpt-oss's activation of columns that take turns, gate first."""
    return swiglu(torch.cat([rows[:, ::2], rows[:, 1::2]], 1), 1.702, 7.0, False)


def gated(rows: torch.Tensor, up_first: bool) -> torch.Tensor:
    """The activation of most models."""
    gate, up = rows.chunk(2, dim=-1)[:: -1 if up_first else 1]
    return silu(gate).mul_(up)


class Case(NamedTuple):
    """Calls of one kind that compute the same."""

    call: str
    limit: float
    ours: Call
    torchs: Call | None
    timed: bool = False  # on the GPU too


def trtllm(preset: str, scheme: str, weights: Weights, tokens: int) -> Case:
    """FlashInfer's FP4 call, with biases and a limit for gpt-oss, scales for DeepSeek-V3."""
    sizes = LAYER_PRESETS[preset].sizes
    experts, config = sizes.num_experts, sizes.routing
    assert config is not None
    x = torch.randn(tokens, sizes.hidden, device=DEVICE).bfloat16()
    logits = torch.randn(tokens, experts, device=DEVICE)
    number, vector = torch.ones(experts, device=DEVICE), None
    biases, numbers, scales = None, (None, None, None), (None, None, None)
    deepseek = int(config.method) == 2
    if deepseek:
        scales, vector = (0.9 * number, 1.1 * number, 0.8 * number), torch.rand(experts, device=DEVICE)
    else:
        biases = tuple(torch.randn(experts, n, device=DEVICE) for n in (2 * sizes.intermediate, sizes.hidden))
        numbers = 1.702 * number, number, 7 * number
    groups = (config.num_group, config.topk_group) if deepseek else (None, None)
    factor = config.routed_scaling_factor if deepseek else None

    def ours() -> torch.Tensor:
        return trtllm_fp4_block_scale_moe(
            *(logits, vector, x, None, weights.w1, weights.w1_scale, biases and biases[0], *numbers),
            *(weights.w2, weights.w2_scale, biases and biases[1], *scales, experts, config.num_topk, *groups),
            *(sizes.intermediate, 0, experts, factor, int(config.method)),
        )[0]

    routing = route(logits, config, routing_bias=vector)
    narrow = None if biases is None else (biases[0].bfloat16(), biases[1].bfloat16())

    def between(rows: torch.Tensor) -> torch.Tensor:
        if not deepseek:
            return swiglu(rows, 1.702, 7.0, True)
        up, gate = rows.chunk(2, dim=-1)
        return silu(gate * 1.1).mul_(up).mul_(0.9)

    def torchs() -> torch.Tensor:
        return by_torch(x, routing.topk_ids, routing.topk_weights * (0.8 if deepseek else 1), weights, between, narrow)

    return Case("trtllm_fp4_block_scale_moe", LIMITS["bfloat16"], ours, torchs, timed=True)


def routed(preset: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, weights and ids."""
    sizes = LAYER_PRESETS[preset].sizes
    assert sizes.routing is not None
    logits = torch.rand(tokens, sizes.num_experts, device=DEVICE)
    factors, ids = logits.topk(sizes.routing.num_topk)
    return torch.randn(tokens, sizes.hidden, device=DEVICE).bfloat16(), factors, ids.int()


def fused(preset: str, scheme: str, weights: Weights, tokens: int) -> Case:
    """SGLang's fused experts."""
    x, factors, ids = routed(preset, tokens)
    flags: dict[str, Any] = {}
    if scheme.startswith("fp8"):
        flags = {"use_fp8_w8a8": True, "block_shape": [128, 128]}
        flags |= {"w1_scale": weights.w1_scale, "w2_scale": weights.w2_scale}

    def ours() -> torch.Tensor:
        return outplace_fused_experts(x, weights.w1, weights.w2, factors, ids, **flags)

    def torchs() -> torch.Tensor:
        return by_torch(x, ids, factors, weights, lambda rows: gated(rows, False))

    return Case("fused_experts", LIMITS["fp8" if flags else "bfloat16"], ours, torchs, timed=True)


def others(preset: str, scheme: str, weights: Weights, tokens: int) -> Iterator[Case]:
    """The other calls at these sizes."""
    x, factors, ids = routed(preset, tokens)
    experts, limit = weights.w1.shape[0], LIMITS["bfloat16"]
    if scheme.startswith("nvfp4"):
        one, inner = torch.ones(experts, device=DEVICE), torch.ones(1, device=DEVICE)
        for mode in ("w4a16", "nvfp4"):
            given = {"w1_alpha": one, "w2_alpha": one, "fc2_input_scale": inner, "quant_mode": mode}
            yield Case(
                f"b12x_fused_moe, {mode}",
                LIMITS["fp4"] if mode == "nvfp4" else limit,
                lambda given=given: b12x_fused_moe(
                    *(x, weights.w1, weights.w1_scale, weights.w2, weights.w2_scale, ids, factors, experts),
                    ids.shape[1],
                    **given,
                ),
                lambda: by_torch(x, ids, factors, weights, lambda rows: gated(rows, True)),
            )
    if scheme.startswith("mxfp4"):
        yield with_bias(weights, x, factors, ids)
    if scheme != "none":
        return
    yield from paths(weights, x, factors, ids)
    own = ExpertWeights(w13=StoredMatrix(weights.w1), w2=StoredMatrix(weights.w2))
    kernels = create_experts("auto", LAYER_PRESETS[preset].sizes.activation, DEVICE)
    routing = Routing(topk_ids=ids, topk_weights=factors)

    def expected() -> torch.Tensor:
        return by_torch(x, ids, factors, weights, lambda rows: gated(rows, False))

    yield Case("local_moe", limit, lambda: local_moe(x, routing, own, kernels), expected)
    data = routing_from_topk(factors, ids, experts)
    turned = weights.w1.transpose(1, 2), weights.w2.transpose(1, 2)
    yield Case(
        "triton_kernel_fused_experts",
        limit,
        lambda: triton_kernel_fused_experts(x, *turned, *data),
        lambda: by_torch(x, ids, factors, weights, lambda rows: gated(rows, False), combined=False).flatten(0, 1),
    )
    config = try_get_optimal_moe_config(weights.w1.shape, weights.w2.shape, ids.shape[1], None, tokens)
    lists = moe_align_block_size(ids, config["BLOCK_SIZE_M"], experts)
    c = torch.empty(*ids.shape, weights.w1.shape[1], dtype=x.dtype, device=DEVICE)

    def one_gemm() -> torch.Tensor:
        invoke_fused_moe_kernel(
            *(x, weights.w1, None, c, None, None, None, factors, ids, *lists, False, ids.shape[1], config),
            *(torch.bfloat16, False, False, False, False, False),
        )
        return c[0]

    def gathered() -> torch.Tensor:
        return torch.einsum("h,knh->kn", x[0].float(), weights.plain1[ids[0].long()].float())

    yield Case("invoke_fused_moe_kernel", limit, one_gemm, gathered)
    yield from batched(weights, x, experts, config)


def paths(weights: Weights, x: torch.Tensor, factors: torch.Tensor, ids: torch.Tensor) -> Iterator[Case]:
    """SGLang's fused experts by their less usual arguments."""
    given, limit = (x, weights.w1, weights.w2, factors, ids), LIMITS["bfloat16"]

    def silu_of(rows: torch.Tensor) -> torch.Tensor:
        return gated(rows, False)

    yield Case(
        "fused_experts, gemm1_alpha",
        limit,
        lambda: outplace_fused_experts(*given, gemm1_alpha=1.702, gemm1_limit=7.0),
        lambda: by_torch(x, ids, factors, weights, swiglu_in_turns),
        timed=True,
    )
    yield Case(
        "fused_experts, no_combine",
        limit,
        lambda: outplace_fused_experts(*given, no_combine=True, no_combine_keep_router_weight=True).flatten(0, 1),
        lambda: by_torch(x, ids, factors, weights, silu_of, combined=False).flatten(0, 1),
        timed=True,
    )
    yield Case(
        "fused_experts, weights on the input",
        limit,
        lambda: outplace_fused_experts(*given, apply_router_weight_on_input=True),
        lambda: by_torch(x, ids, factors, weights, silu_of, on_input=True),
        timed=True,
    )
    (first, plain1), (second, plain2) = (zero_points(w.shape) for w in (weights.w1, weights.w2))
    flags: dict[str, Any] = {"use_int4_w4a16": True, "block_shape": [0, GROUP]}
    flags |= {f"w{n}_{name}": part[name] for n, part in ((1, first), (2, second)) for name in ("scale", "zp")}
    integers = weights._replace(plain1=plain1, plain2=plain2)
    yield Case(
        "fused_experts, zero points",
        limit,
        lambda: outplace_fused_experts(x, first["values"], second["values"], factors, ids, **flags),
        lambda: by_torch(x, ids, factors, integers, silu_of),
        timed=True,
    )
    yield with_bias(weights, x, factors, ids)


def zero_points(shape: torch.Size) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A weight [E, N, K] of 4 bits around zero points of groups, as SGLang has it, and the same in bfloat16."""
    experts, rows, columns = shape
    values = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=DEVICE)
    zero = torch.randint(0, 256, (experts, rows // 2, columns // GROUP), dtype=torch.uint8, device=DEVICE)
    scale = (torch.rand(experts, rows, columns // GROUP, device=DEVICE) * 0.01 + 0.002).bfloat16()
    codes = torch.stack([values & 15, values >> 4], 3).view(shape)
    points = torch.stack([zero & 15, zero >> 4], 2).view(experts, rows, -1)
    centered = codes.bfloat16() - points.bfloat16().repeat_interleave(GROUP, 2)
    return {"values": values, "scale": scale, "zp": zero}, centered * scale.repeat_interleave(GROUP, 2)


class Precision(NamedTuple):
    """The part of triton_kernels' PrecisionConfig that is read."""

    b_mx_scale: torch.Tensor


def with_bias(weights: Weights, x: torch.Tensor, factors: torch.Tensor, ids: torch.Tensor) -> Case:
    """triton_kernels' form with biases, of weights in bfloat16 or MXFP4."""
    experts, width = weights.w1.shape[:2]
    b1, b2 = (torch.randn(experts, n, device=DEVICE).bfloat16() for n in (width, weights.w2.shape[1]))
    data = routing_from_topk(factors, ids, experts)
    pcg1, pcg2 = (
        None if scale is None else Precision(scale.view(torch.uint8).transpose(1, 2))
        for scale in (weights.w1_scale, weights.w2_scale)
    )
    turned = weights.w1.transpose(1, 2), pcg1, b1, weights.w2.transpose(1, 2), pcg2, b2
    return Case(
        "triton_kernel_fused_experts_with_bias",
        LIMITS["bfloat16"],
        lambda: triton_kernel_fused_experts_with_bias(x, *turned, *data, gemm1_alpha=1.702, gemm1_clamp_limit=7.0),
        lambda: by_torch(x, ids, factors, weights, swiglu_in_turns, (b1, b2), combined=False).flatten(0, 1),
        timed=True,
    )


def batched(weights: Weights, x: torch.Tensor, experts: int, config: Any) -> Iterator[Case]:
    """vLLM's calls: each expert has four rows for a token, of which half hold one."""
    height = max(4 * x.shape[0] // experts, 2)
    rows = torch.randn(experts, height, x.shape[1], device=DEVICE).bfloat16()
    counts = torch.full((experts,), height // 2, dtype=torch.int32, device=DEVICE)
    calls, output = BatchedTritonExperts(height, 1), torch.zeros_like(rows)
    c = torch.zeros(experts, height, weights.w1.shape[1], dtype=x.dtype, device=DEVICE)
    none = dict.fromkeys(("expert_map", "w1_scale", "w2_scale", "w1_zp", "w2_zp", "a1q_scale", "a2_scale"))
    ids = torch.zeros(experts * height // 2, 1, device=DEVICE)

    def both() -> torch.Tensor:
        calls.apply(
            output=output,
            hidden_states=rows,
            w1=weights.w1,
            w2=weights.w2,
            topk_ids=ids,
            activation="silu",
            global_num_experts=experts,
            workspace13=output,
            workspace2=output,
            expert_num_tokens=counts,
            **none,
        )
        return output[0, : height // 2]

    def first() -> torch.Tensor:
        flags = (None, None, None, False, False, False, config, False)
        invoke_moe_batched_triton_kernel(rows, weights.w1, c, counts, torch.bfloat16, *flags)
        return c[0, : height // 2]

    def of_one_expert() -> torch.Tensor:
        return rows[0, : height // 2] @ weights.plain1[0].t()

    yield Case(
        "BatchedTritonExperts", LIMITS["bfloat16"], both, lambda: gated(of_one_expert(), False) @ weights.plain2[0].t()
    )
    yield Case("invoke_moe_batched_triton_kernel", LIMITS["bfloat16"], first, of_one_expert)


SCHEMES = {  # case -> preset, scheme, and the call that is timed
    "gpt-oss-120b": ("gpt-oss-120b", "mxfp4_w4a16", trtllm),
    "deepseek-v3-fp4": ("deepseek-v3", "nvfp4_w4a16", trtllm),
    "qwen3-30b": ("qwen3-30b", "none", fused),
    "deepseek-v3": ("deepseek-v3", "fp8_block", fused),
}
