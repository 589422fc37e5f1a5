"""SGLang's `triton_kernel_*` calls against float64 loops over experts, written from triton_kernels' documentation."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.calls import assert_compiles
from helpers.experts_oracle import (
    EXPERTS,
    HIDDEN,
    INNER,
    LIMITS,
    ROUNDED_LIMIT,
    TOKENS,
    TOPK,
    check,
    expert_rows,
    generator,
    rounded,
    routed_rows,
)

from ep_moe.functional.sglang import (
    MoeRunnerConfig,
    RaggedTensorMetadata,
    TritonKernelTopKOutput,
    quantize,
    routing_from_topk,
    triton_kernel_fused_experts,
    triton_kernel_fused_experts_with_bias,
    triton_kernel_moe_forward,
    triton_kernel_moe_with_bias_forward,
)
from ep_moe.testing import worst_row_error

ALPHA, LIMIT = 1.702, 0.9
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@dataclasses.dataclass
class Layer:
    """Tokens, weights [E, K, N], and a routing, of which some pairs are of no expert."""

    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @property
    def routing(self) -> TritonKernelTopKOutput:
        """Pairs sorted by expert, those of no expert last and -1, as triton_kernels sorts them."""
        flat = self.ids.flatten()
        order = sorted(range(len(flat)), key=lambda pair: (flat[pair] < 0, flat[pair].item(), pair))
        pairs = torch.tensor([pair if flat[pair] >= 0 else -1 for pair in order], dtype=torch.int32)
        gates = self.weights.flatten()[torch.tensor(order)]
        hist = torch.tensor([(flat == expert).sum() for expert in range(EXPERTS)], dtype=torch.int32)
        tokens = torch.div(pairs, TOPK, rounding_mode="trunc")  # 0 of those of no expert
        return TritonKernelTopKOutput(RaggedTensorMetadata(hist), tokens, pairs, gates, TOPK)


def layer(seed: int = 3) -> Layer:
    random = generator(seed)
    ids = torch.rand(TOKENS, EXPERTS, generator=random).argsort(1)[:, :TOPK].int()
    ids[4, 1], ids[7] = -1, -1
    return Layer(
        x=torch.randn(TOKENS, HIDDEN, generator=random).bfloat16(),
        w1=(torch.randn(EXPERTS, HIDDEN, 2 * INNER, generator=random) / 8).bfloat16(),
        w2=(torch.randn(EXPERTS, INNER, HIDDEN, generator=random) / 8).bfloat16(),
        ids=ids,
        weights=torch.rand(TOKENS, TOPK, generator=random) + 0.1,
    )


def rows(made: Layer, w1: torch.Tensor, w2: torch.Tensor, **how: Any) -> torch.Tensor:
    """The rows [G, H] of all places, each at the row that it has."""
    data, gather, scatter, gates, _ = how.get("routing", made.routing)
    count, kind, biases = len(gather), how.get("kind", "bfloat16"), how.get("bias")
    expert = torch.full((count,), -1).long()
    listed = torch.arange(EXPERTS).repeat_interleave(data.slice_sizes.long())
    expert[: len(listed)] = listed if how.get("expert_map") is None else how["expert_map"][listed].long()
    target, token = torch.arange(count) if scatter is None else scatter.long(), gather.long()
    there = (token >= 0) & (token < TOKENS) & (target >= 0) & (target < count)
    options = {"activation": how.get("activation", "silu")}
    if biases is not None:
        options = {"gemm1_alpha": ALPHA, "gemm1_limit": LIMIT}

    def one(number: int, x: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        own = tuple(None if bias is None else bias[number] for bias in biases or (None, None))
        return expert_rows(x, w1[number].T, w2[number].T, kind, biases=own, factors=factors, **options)

    x, ids = rounded(made.x.double(), kind)[token.clamp(0, TOKENS - 1)], torch.where(there, expert, -1)[:, None]
    found = routed_rows(x, ids, gates[:, None], one, EXPERTS, on_input=how.get("on_input", False))
    out = torch.zeros(count + 1, HIDDEN, dtype=torch.float64)
    out[torch.where(there, target, count)] = found[:, 0]
    return out[:-1]


@pytest.mark.parametrize("on_input", [False, True], ids=["", "on_input"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_fused_experts(activation: str, on_input: bool, run: Any) -> None:
    made = layer()
    given = {"hidden_states": made.x, **made.routing._asdict()}
    expected = rows(made, made.w1.double(), made.w2.double(), activation=activation, on_input=on_input)
    flags = {"activation": activation, "apply_router_weight_on_input": on_input}
    limit = LIMITS[torch.bfloat16] * (2 if on_input else 1)  # tokens are rounded once more
    found = run(triton_kernel_fused_experts, w1=made.w1, w2=made.w2, **given, **flags)
    assert found.dtype == torch.bfloat16
    check(found, expected, limit)
    turned = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in (made.w1, made.w2)]
    assert torch.equal(run(triton_kernel_fused_experts, w1=turned[0], w2=turned[1], **given, **flags), found)
    found = triton_kernel_fused_experts(made.x, *turned, *made.routing, **flags)
    config = MoeRunnerConfig(activation=activation)
    again = triton_kernel_moe_forward(made.x, *turned, made.routing, config, apply_router_weight_on_input=on_input)
    assert torch.equal(again, found)
    with pytest.raises(ValueError, match="inplace is set"):
        triton_kernel_fused_experts(made.x, *turned, *made.routing, inplace=True, **flags)


@pytest.mark.parametrize("placed", [False, True])
def test_other_rows_than_the_pairs_own(placed: bool) -> None:
    """A gather and a scatter of other tokens and rows, with indices of neither; or rows in the order of experts."""
    made = layer()
    data, gather, scatter, gates, _ = made.routing
    gather, scatter = gather.flip(0).long(), scatter.flip(0) if placed else None
    gather[3], gather[8] = -1, TOKENS
    if scatter is not None:
        scatter[9] = TOKENS * TOPK
    routing = (data, gather, scatter, gates, TOPK)
    found = triton_kernel_fused_experts(made.x, made.w1, made.w2, *routing)
    check(found, rows(made, made.w1.double(), made.w2.double(), routing=routing))


def test_expert_map() -> None:
    made = layer()
    mapped = torch.tensor([1, -1, 0, -1, 2, -1], dtype=torch.int32)
    w1, w2 = made.w1[:3], made.w2[:3]
    found = triton_kernel_fused_experts(made.x, w1, w2, *made.routing, global_num_experts=EXPERTS, expert_map=mapped)
    check(found, rows(made, w1.double(), w2.double(), expert_map=mapped))


def test_fp8() -> None:
    """Weights as bytes with a scale for each column, or for a block of rows and columns."""
    made, random = layer(), generator(8)
    w1, w2 = (w.float().mul(8).to(torch.float8_e4m3fn) for w in (made.w1, made.w2))
    for block, s1, s2 in (
        (None, (EXPERTS, 2 * INNER), (EXPERTS, HIDDEN)),
        ([32, 16], (EXPERTS, HIDDEN // 16, 2 * INNER // 32), (EXPERTS, INNER // 16, HIDDEN // 32)),
    ):
        scales = [(torch.rand(size, generator=random) + 0.5) / 8 for size in (s1, s2)]
        spread = [scale[:, None].double() for scale in scales]
        if block:
            spread = [scale.double().repeat_interleave(16, 1).repeat_interleave(32, 2) for scale in scales]
        real = [w.double() * scale for w, scale in zip((w1, w2), spread, strict=True)]
        flags = {"use_fp8_w8a8": True, "per_channel_quant": block is None, "block_shape": block}
        found = triton_kernel_fused_experts(
            made.x, w1, w2, *made.routing, w1_scale=scales[0], w2_scale=scales[1], **flags
        )
        check(found, rows(made, *real, kind=f"fp8 {'group' if block else 'token'}"), ROUNDED_LIMIT)


def biased(made: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    random = generator(9)
    return torch.randn(EXPERTS, 2 * INNER, generator=random), torch.randn(EXPERTS, HIDDEN, generator=random)


def test_with_bias() -> None:
    made = layer()
    b1, b2 = biased(made)
    rest = (None, b1, made.w2, None, b2)
    numbers = {"gemm1_alpha": ALPHA, "gemm1_clamp_limit": LIMIT}
    found = triton_kernel_fused_experts_with_bias(made.x, made.w1, *rest, *made.routing, **numbers)
    check(found, rows(made, made.w1.double(), made.w2.double(), bias=(b1, b2)))
    config = MoeRunnerConfig(**numbers)
    assert torch.equal(triton_kernel_moe_with_bias_forward(made.x, made.w1, *rest, made.routing, config), found)
    rest, numbers["apply_router_weight_on_input"] = (None, None, made.w2, None, b2), True
    found = triton_kernel_fused_experts_with_bias(made.x, made.w1, *rest, *made.routing, **numbers)
    check(found, rows(made, made.w1.double(), made.w2.double(), bias=(None, b2), on_input=True), 2e-2)
    again = triton_kernel_moe_with_bias_forward(made.x, made.w1, *rest, made.routing, config, True)
    assert torch.equal(again, found)


class StridedLayout:
    """As triton_kernels' layout of this name."""


@pytest.mark.parametrize("wrapped", [False, True], ids=["tensors", "wrapped"])
def test_mxfp4(wrapped: bool, run: Any) -> None:
    made = layer()
    b1, b2 = biased(made)
    packed = [quantize(w, "mx4", "cpu", swizzle_mx_scale=False) for w in (made.w1, made.w2)]
    real = []
    for values, _, context in packed:
        codes = torch.stack([values & 15, values >> 4], dim=2).flatten(1, 2).long()
        scale = torch.exp2(context.b_mx_scale.double() - 127).repeat_interleave(32, 1)
        real.append(E2M1[codes] * scale)
    for w, numbers in zip((made.w1, made.w2), real, strict=True):
        assert float(worst_row_error(numbers.flatten(1), w.double().flatten(1))) < 0.2
    w1, w2 = (values for values, _, _ in packed)
    pcgs = [context for _, _, context in packed]
    if wrapped:
        wrap = lambda data: SimpleNamespace(storage=SimpleNamespace(data=data, layout=StridedLayout()))  # noqa: E731
        w1, w2 = wrap(w1), wrap(w2)
        pcgs = [SimpleNamespace(b_mx_scale=wrap(context.b_mx_scale)) for context in pcgs]
    given = {"w1": w1, "w1_pcg": pcgs[0], "b1": b1, "w2": w2, "w2_pcg": pcgs[1], "b2": b2, **made.routing._asdict()}
    given |= {"hidden_states": made.x, "gemm1_alpha": ALPHA, "gemm1_clamp_limit": LIMIT}
    call = triton_kernel_fused_experts_with_bias
    check(call(**given) if wrapped else run(call, **given), rows(made, *real, bias=(b1, b2)))


def test_quantize() -> None:
    w = torch.randn(2, 64, 32, generator=generator(1))
    values, flex = quantize(w, "bf16", "cpu")
    assert torch.equal(values, w.bfloat16())
    assert flex.scale is None
    values, flex, _ = quantize(w, "fp8", "cpu")
    assert (values.dtype, values.stride(1), flex.dtype) == (torch.float8_e4m3fn, 1, torch.float8_e4m3fn)
    assert float((values.float() * flex.scale - w).abs().max()) < float(w.abs().max()) / 16
    for bad, words in ((("int8", "cpu"), "int8"), (("mx4", "cpu", True), "swizzle_mx_scale")):
        with pytest.raises(ValueError, match=words):
            quantize(w, *bad[:2], **({"swizzle_mx_scale": True} if len(bad) > 2 else {}))


def test_routing_from_ids() -> None:
    made = layer()
    found, wanted = routing_from_topk(made.weights, made.ids, EXPERTS), made.routing
    assert torch.equal(found.a_ragged_metadata.slice_sizes, wanted.a_ragged_metadata.slice_sizes)
    count = int(wanted.a_ragged_metadata.slice_sizes.sum())
    for name in ("gather_indx", "scatter_indx", "gate_scal"):
        assert torch.equal(getattr(found, name)[:count], getattr(wanted, name)[:count])
    assert bool((found.scatter_indx[count:] == -1).all())
    assert found.n_expts_act == TOPK


def test_compiled_into_one_graph() -> None:
    made = layer()
    routing = made.routing

    def call(x: torch.Tensor) -> torch.Tensor:
        return triton_kernel_fused_experts(x * 2, made.w1, made.w2, *routing) + 1

    assert_compiles(call, made.x)


def swizzled(data: torch.Tensor) -> Any:
    return SimpleNamespace(storage=SimpleNamespace(data=data, layout=SimpleNamespace()))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "w1": ({"w1": torch.zeros(6, 192, 64, dtype=torch.bfloat16)}, r"w1 is \(6, 192, 64\).*\(6, 64, 64\)"),
    "w2": ({"w2": torch.zeros(6, 64, 96, dtype=torch.bfloat16)}, r"w2 is \(6, 64, 96\).*\(6, 96, 64\)"),
    "layout": ({"w1": swizzled(torch.zeros(6, 64, 192))}, "w1 has layout SimpleNamespace"),
    "global": ({"global_num_experts": 12}, "global_num_experts is 12"),
    "map": ({"expert_map": torch.zeros(4, dtype=torch.int32)}, "expert_map 4"),
    "tokens": ({"gather_indx": torch.zeros(9)}, r"gather_indx is \(9,\).*\(60,\)"),
    "rows": ({"scatter_indx": torch.zeros(9)}, r"scatter_indx is \(9,\).*\(60,\)"),
    "weights": ({"n_expts_act": 2}, r"gather_indx is \(60,\); \(40,\).*n_expts_act 2"),
    "scale": ({"w1_scale": torch.ones(6)}, "w1_scale is given, no use_"),
    "activation": ({"activation": "tanh"}, r"activation \('tanh'\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    made, (changes, words) = layer(), BAD[name]
    given = {"hidden_states": made.x, "w1": made.w1, "w2": made.w2, **made.routing._asdict()}
    with pytest.raises(ValueError, match=words):
        triton_kernel_fused_experts(**given | changes)


def test_bad_forms_with_bias() -> None:
    made = layer()
    rest = (None, None, made.w2, None, None, *made.routing)
    with pytest.raises(ValueError, match="gemm1_alpha"):
        triton_kernel_fused_experts_with_bias(made.x, made.w1, *rest)
    with pytest.raises(ValueError, match=r"activation \('gelu'\)"):
        triton_kernel_fused_experts_with_bias(made.x, made.w1, *rest, activation="gelu", gemm1_alpha=1.0)
    bytes_ = torch.zeros(6, 32, 192, dtype=torch.uint8)
    halves = torch.zeros(6, 48, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="w1_pcg has no b_mx_scale"):
        triton_kernel_fused_experts_with_bias(
            made.x, bytes_, None, None, halves, None, None, *made.routing, gemm1_alpha=1.0
        )
    with pytest.raises(ValueError, match="is not \\(a_ragged_metadata"):
        triton_kernel_moe_forward(made.x, made.w1, made.w2, (1, 2, 3, 4, 5), MoeRunnerConfig())
    for options, forward, weights in (
        ({"gemm1_alpha": 1.7}, triton_kernel_moe_forward, (made.w1, made.w2)),
        ({"swiglu_limit": 10.0}, triton_kernel_moe_forward, (made.w1, made.w2)),
        ({"is_gated": False}, triton_kernel_moe_forward, (made.w1, made.w2)),
        (
            {"gate_up_interleaved": False, "gemm1_alpha": 1.7},
            triton_kernel_moe_with_bias_forward,
            (made.w1, None, None, made.w2, None, None),
        ),
    ):
        with pytest.raises(
            ValueError, match=rf"moe_runner_config.{next(iter(options))} \({next(iter(options.values()))}"
        ):
            forward(made.x, *weights, made.routing, MoeRunnerConfig(**options))
