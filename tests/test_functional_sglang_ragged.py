"""SGLang's `triton_kernel_*` calls against float64 loops over experts, written from triton_kernels' documentation."""

import dataclasses
import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_oracle import EXPERTS, HIDDEN, INNER, LIMITS, ROUNDED_LIMIT, TOKENS, TOPK, generator

from ep_moe.functional import sglang
from ep_moe.functional.sglang import (
    GatherIndx,
    MoeRunnerConfig,
    RoutingData,
    ScatterIndx,
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


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@dataclasses.dataclass
class Layer:
    """Tokens, weights [E, K, N], and a routing, of which some pairs are of no expert."""

    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @property
    def routing(self) -> tuple[RoutingData, GatherIndx, ScatterIndx]:
        """Pairs sorted by expert, those of no expert last and -1, as triton_kernels sorts them."""
        flat = self.ids.flatten()
        order = sorted(range(len(flat)), key=lambda pair: (flat[pair] < 0, flat[pair].item(), pair))
        pairs = torch.tensor([pair if flat[pair] >= 0 else -1 for pair in order], dtype=torch.int32)
        places = torch.full_like(pairs, -1)
        for place, pair in enumerate(pairs.tolist()):
            if pair >= 0:
                places[pair] = place
        gates = self.weights.flatten()[torch.tensor(order)]
        hist = torch.tensor([(flat == expert).sum() for expert in range(EXPERTS)], dtype=torch.int32)
        return RoutingData(gates, hist, EXPERTS, TOPK), GatherIndx(pairs, places), ScatterIndx(places, pairs)


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


def summed(made: Layer, w1: torch.Tensor, w2: torch.Tensor, **how: Any) -> torch.Tensor:
    """Loop over experts: gather, both GEMMs, scatter, sum."""
    data, gather, scatter = made.routing
    gather = how.get("gather", gather)
    ends = data.expt_hist.cumsum(0).tolist()
    out = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for expert, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        mapped = expert if how.get("expert_map") is None else int(how["expert_map"][expert])
        if mapped < 0:
            continue
        rows = made.x[gather.src_indx[first:end].long() // TOPK].double()
        sums = rows @ w1[mapped]
        gates = data.gate_scal[first:end, None].double()
        if how.get("on_input"):
            sums = sums * gates
        if how.get("bias"):
            sums = sums + how["bias"][0][mapped].double()
            gate, up = sums[:, 0::2].clamp(max=LIMIT), sums[:, 1::2].clamp(-LIMIT, LIMIT)
            inner = gate / (1 + torch.exp(-ALPHA * gate)) * (up + 1)
        else:
            gate, up = sums.chunk(2, 1)
            if how.get("activation") == "gelu":
                inner = up * gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
            else:
                inner = up * gate / (1 + torch.exp(-gate))
        result = inner.bfloat16().double() @ w2[mapped]
        if how.get("bias"):
            result = result + how["bias"][1][mapped].double()
        result = result * (1 if how.get("on_input") else gates)
        out.index_add_(0, scatter.dst_indx[first:end].long() // TOPK, result)
    return out


def check(found: torch.Tensor, expected: torch.Tensor, limit: float = LIMITS[torch.bfloat16]) -> None:
    assert (found.dtype, found.shape) == (torch.bfloat16, expected.shape)
    idle = (expected == 0).all(1)
    assert bool((found[idle] == 0).all())
    assert float(worst_row_error(found[~idle], expected[~idle])) < limit


@pytest.mark.parametrize("on_input", [False, True], ids=["", "on_input"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_fused_experts(activation: str, on_input: bool) -> None:
    made = layer()
    expected = summed(made, made.w1.double(), made.w2.double(), activation=activation, on_input=on_input)
    flags = {"activation": activation, "apply_router_weight_on_input": on_input}
    limit = LIMITS[torch.bfloat16] * (2 if on_input else 1)  # tokens are rounded once more
    found = triton_kernel_fused_experts(made.x, made.w1, made.w2, *made.routing, **flags)
    check(found, expected, limit)
    turned = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in (made.w1, made.w2)]
    assert torch.equal(triton_kernel_fused_experts(made.x, *turned, *made.routing, **flags), found)
    kept = made.x.clone()
    assert triton_kernel_fused_experts(kept, *turned, *made.routing, inplace=True, **flags) is kept
    assert torch.equal(kept, found)
    config = MoeRunnerConfig(activation=activation)
    output = TritonKernelTopKOutput(*made.routing)
    again = triton_kernel_moe_forward(made.x, *turned, output, config, apply_router_weight_on_input=on_input)
    assert torch.equal(again, found)


def test_other_rows_than_the_pairs_own() -> None:
    """A gather and a scatter that are not each other's inverse: rows go to other tokens than they came from."""
    made = layer()
    made.ids = made.ids.clamp(min=0)
    data, gather, scatter = made.routing
    other = GatherIndx(gather.src_indx.flip(0), gather.dst_indx)
    found = triton_kernel_fused_experts(made.x, made.w1, made.w2, data, other, scatter)
    check(found, summed(made, made.w1.double(), made.w2.double(), gather=other))
    same = GatherIndx(gather.src_indx.clone(), gather.dst_indx)
    expected = triton_kernel_fused_experts(made.x, made.w1, made.w2, *made.routing)
    check(triton_kernel_fused_experts(made.x, made.w1, made.w2, data, same, scatter), expected.double())


def test_expert_map() -> None:
    made = layer()
    mapped = torch.tensor([1, -1, 0, -1, 2, -1], dtype=torch.int32)
    w1, w2 = made.w1[:3], made.w2[:3]
    found = triton_kernel_fused_experts(made.x, w1, w2, *made.routing, global_num_experts=EXPERTS, expert_map=mapped)
    check(found, summed(made, w1.double(), w2.double(), expert_map=mapped))


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
        check(found, summed(made, *real), 4 * ROUNDED_LIMIT)  # both roundings to fp8, against none


def biased(made: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    random = generator(9)
    return torch.randn(EXPERTS, 2 * INNER, generator=random), torch.randn(EXPERTS, HIDDEN, generator=random)


def test_with_bias() -> None:
    made = layer()
    b1, b2 = biased(made)
    rest = (None, b1, made.w2, None, b2)
    numbers = {"gemm1_alpha": ALPHA, "gemm1_clamp_limit": LIMIT}
    found = triton_kernel_fused_experts_with_bias(made.x, made.w1, *rest, *made.routing, **numbers)
    check(found, summed(made, made.w1.double(), made.w2.double(), bias=(b1, b2)))
    config = MoeRunnerConfig(**numbers)
    output = TritonKernelTopKOutput(*made.routing)
    assert torch.equal(triton_kernel_moe_with_bias_forward(made.x, made.w1, *rest, output, config), found)
    kept = made.x.clone()
    triton_kernel_fused_experts_with_bias(kept, made.w1, *rest, *made.routing, inplace=True, **numbers)
    assert torch.equal(kept, found)


class StridedLayout:
    """As triton_kernels' layout of this name."""


@pytest.mark.parametrize("wrapped", [False, True], ids=["tensors", "wrapped"])
def test_mxfp4(wrapped: bool) -> None:
    made = layer()
    b1, b2 = biased(made)
    packed = [quantize(w, "mx4", "cpu", swizzle_mx_scale=False) for w in (made.w1, made.w2)]
    real = []
    for values, _, context in packed:
        codes = torch.stack([values & 15, values >> 4], dim=2).flatten(1, 2).long()
        scale = torch.exp2(context.weight_scale.double() - 127).repeat_interleave(32, 1)
        real.append(E2M1[codes] * scale)
    for w, numbers in zip((made.w1, made.w2), real, strict=True):
        assert float(worst_row_error(numbers.flatten(1), w.double().flatten(1))) < 0.2
    w1, w2 = (values for values, _, _ in packed)
    pcgs = [context for _, _, context in packed]
    if wrapped:
        wrap = lambda data: SimpleNamespace(storage=SimpleNamespace(data=data, layout=StridedLayout()))  # noqa: E731
        w1, w2 = wrap(w1), wrap(w2)
        pcgs = [SimpleNamespace(weight_scale=wrap(context.weight_scale)) for context in pcgs]
    found = triton_kernel_fused_experts_with_bias(
        made.x, w1, pcgs[0], b1, w2, pcgs[1], b2, *made.routing, gemm1_alpha=ALPHA, gemm1_clamp_limit=LIMIT
    )
    check(found, summed(made, *real, bias=(b1, b2)))


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
    found = routing_from_topk(made.weights, made.ids, EXPERTS)
    data, gather, scatter = made.routing
    assert torch.equal(found.routing_data.expt_hist, data.expt_hist)
    count = int(data.expt_hist.sum())
    assert torch.equal(found.routing_data.gate_scal[:count], data.gate_scal[:count])
    for mine, theirs in ((found.gather_indx, gather), (found.scatter_indx, scatter)):
        assert torch.equal(mine.src_indx, theirs.src_indx)
        assert torch.equal(mine.dst_indx, theirs.dst_indx)


def test_compiled_into_one_graph() -> None:
    made = layer()
    data, gather, scatter = made.routing

    def call(x: torch.Tensor) -> torch.Tensor:
        return triton_kernel_fused_experts(x * 2, made.w1, made.w2, data, gather, scatter) + 1

    found = torch.compile(call, backend="aot_eager", fullgraph=True)(made.x)
    assert torch.equal(found, call(made.x))


def swizzled(data: torch.Tensor) -> Any:
    return SimpleNamespace(storage=SimpleNamespace(data=data, layout=SimpleNamespace()))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "w1": ({"w1": torch.zeros(6, 192, 64, dtype=torch.bfloat16)}, r"w1 is \(6, 192, 64\).*\(6, 64, 64\)"),
    "w2": ({"w2": torch.zeros(6, 64, 96, dtype=torch.bfloat16)}, r"w2 is \(6, 64, 96\).*\(6, 96, 64\)"),
    "layout": ({"w1": swizzled(torch.zeros(6, 64, 192))}, "w1 has layout SimpleNamespace"),
    "global": ({"global_num_experts": 12}, "global_num_experts is 12"),
    "map": ({"expert_map": torch.zeros(4, dtype=torch.int32)}, "expert_map 4"),
    "pairs": ({"gather_indx": GatherIndx(torch.zeros(9), torch.zeros(9))}, r"gather_indx.src_indx is \(9,\).*\(60,\)"),
    "scale": ({"w1_scale": torch.ones(6)}, "w1_scale is given, no use_"),
    "activation": ({"activation": "tanh"}, r"activation \('tanh'\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    made, (changes, words) = layer(), BAD[name]
    data, gather, scatter = made.routing
    given = {"hidden_states": made.x, "w1": made.w1, "w2": made.w2, "routing_data": data}
    given |= {"gather_indx": gather, "scatter_indx": scatter}
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
    with pytest.raises(ValueError, match="w1_pcg has no weight_scale"):
        triton_kernel_fused_experts_with_bias(
            made.x, bytes_, None, None, halves, None, None, *made.routing, gemm1_alpha=1.0
        )
    with pytest.raises(ValueError, match="is not \\(routing_data"):
        triton_kernel_moe_forward(made.x, made.w1, made.w2, (1, 2, 3), MoeRunnerConfig())


LAST = (
    "use_fp8_w8a8=False per_channel_quant=False global_num_experts=-1 expert_map=None w1_scale=None w2_scale=None "
    "a1_scale=None a2_scale=None block_shape=None"
)
SEEDS_ARGUMENTS = {
    "quantize": "w dtype dev opt",
    "triton_kernel_moe_forward": (
        f"hidden_states w1 w2 topk_output moe_runner_config apply_router_weight_on_input=False {LAST}"
    ),
    "triton_kernel_fused_experts": (
        "hidden_states w1 w2 routing_data gather_indx scatter_indx inplace=False activation='silu' "
        f"apply_router_weight_on_input=False {LAST}"
    ),
    "triton_kernel_moe_with_bias_forward": (
        f"hidden_states w1 w1_pcg b1 w2 w2_pcg b2 topk_output moe_runner_config {LAST}"
    ),
    "triton_kernel_fused_experts_with_bias": (
        "hidden_states w1 w1_pcg b1 w2 w2_pcg b2 routing_data gather_indx scatter_indx inplace=False "
        f"activation='silu' {LAST} gemm1_alpha=None gemm1_clamp_limit=None"
    ),
}


@pytest.mark.parametrize("name", SEEDS_ARGUMENTS)
def test_names_order_and_defaults(name: str) -> None:
    parameters = inspect.signature(getattr(sglang, name)).parameters.values()
    empty = inspect.Parameter.empty
    found = [one.name + ("" if one.default is empty else f"={one.default!r}") for one in parameters]
    assert " ".join(found) == SEEDS_ARGUMENTS[name]
