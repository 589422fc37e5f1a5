"""The experts of one rank without a transport, against a dense loop over tokens that knows nothing of layouts."""

import dataclasses
import operator
import sys
from typing import Any

import pytest
import torch

from ep_moe.config import ActivationConfig, Layout
from ep_moe.experts import Experts, create_experts
from ep_moe.experts.hopper.shapes import is_hopper
from ep_moe.experts.tuning import HOPPER_TILES, ExpertTiles, GemmTiles
from ep_moe.layout.base import PackingSizes, packable
from ep_moe.local_moe import local_moe
from ep_moe.quant import StoredMatrix, dequantize_rows, dequantize_weight, get_scheme, quantize, quantize_weight
from ep_moe.routing import Routing
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from ep_moe.weights import ExpertWeights

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_TOPK = 48, 32, 7, 3
ACTIVATION = ActivationConfig(kind="silu")


def whole_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [E, 2I, H] and w2 [E, H, I], every expert different."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN), (NUM_EXPERTS, HIDDEN, INTERMEDIATE))
    w13, w2 = (torch.randn(shape, generator=generator) / 5 for shape in shapes)
    return w13, w2


def local_weights(first: int, count: int, scheme: str, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    """Experts [first, first + count)."""
    w13, w2 = (w[first : first + count].to(dtype) for w in whole_weights())
    if scheme == "none":
        return ExpertWeights(w13=StoredMatrix(w13), w2=StoredMatrix(w2))
    chosen = get_scheme(scheme)
    return ExpertWeights(w13=quantize_weight(w13, chosen), w2=quantize_weight(w2, chosen), scheme=chosen)


def expected(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Each token's sum over the local experts among its ids, in float64, repeats counted as often as they stand."""
    w13, w2 = (w.double() for w in whole_weights())
    out = torch.zeros(x.shape[0], HIDDEN, dtype=torch.float64)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            if first <= expert < first + count:
                gate, up = (w13[expert] @ x[token].double()).chunk(2)
                out[token] += weight * (w2[expert] @ (gate * torch.sigmoid(gate) * up))
    return out


def tokens(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids of all experts with repeats and -1 among them, and weights."""
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(-1, NUM_EXPERTS, (count, NUM_TOPK), generator=generator)
    if count > 3:
        ids[0], ids[1] = torch.tensor([4, 4, 4]), torch.tensor([-1, -1, -1])
        ids[2], ids[3] = torch.tensor([3, NUM_EXPERTS + 90, -7]), torch.tensor([5, 2, 5])
    x = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    return x, ids, torch.rand(count, NUM_TOPK, generator=generator)


def cpu_experts() -> Experts:
    return create_experts("torch", ACTIVATION, torch.device("cpu"))


SLICES = [pytest.param(0, NUM_EXPERTS, id="all"), pytest.param(2, 3, id="middle"), pytest.param(6, 1, id="last")]


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(("first", "count"), SLICES)
@pytest.mark.parametrize(("num_tokens", "ids_dtype"), [(0, torch.int32), (1, torch.int64), (21, torch.int32)])
def test_against_a_loop_over_tokens(
    first: int, count: int, layout: Layout, num_tokens: int, ids_dtype: torch.dtype
) -> None:
    x, ids, weights = tokens(num_tokens)
    out = local_moe(
        x,
        Routing(topk_ids=ids.to(ids_dtype), topk_weights=weights),
        local_weights(first, count, "none"),
        cpu_experts(),
        layout=layout,
        local_expert_offset=first,
        num_local_experts=count,
        num_experts=NUM_EXPERTS,
    )
    assert out.shape == (num_tokens, HIDDEN)
    found = expected(x, ids, weights, first, count)
    idle = (found == 0).all(1)
    assert torch.equal(out[idle], torch.zeros_like(out[idle]))
    if bool((~idle).any()):
        assert worst_row_error(out[~idle], found[~idle]) < ROW_ERROR_LIMITS["float32"]


@pytest.mark.parametrize("layout", list(Layout))
def test_parts_of_all_ranks_add_up(layout: Layout) -> None:
    x, ids, weights = tokens(30)
    routing = Routing(topk_ids=ids, topk_weights=weights)
    parts = [
        local_moe(x, routing, local_weights(f, n, "none"), cpu_experts(), layout=layout, local_expert_offset=f)
        for f, n in ((0, 3), (3, 3), (6, 1))
    ]
    assert worst_row_error(sum(parts)[2:], expected(x, ids, weights, 0, NUM_EXPERTS)[2:]) < ROW_ERROR_LIMITS["float32"]


def test_quantized_tokens_are_taken_as_they_are() -> None:
    """Quantized here or before, the bits are the same; and they are those of dequantized tokens and weights."""
    x, ids, weights = tokens(20, torch.bfloat16)
    stored, routing = local_weights(1, 5, "fp8_block", torch.bfloat16), Routing(topk_ids=ids, topk_weights=weights)
    here = local_moe(x, routing, stored, cpu_experts(), local_expert_offset=1)
    brought = quantize(x, stored.scheme)
    out = torch.full((20, HIDDEN), float("nan"), dtype=torch.bfloat16)
    there = local_moe(brought, routing, stored, cpu_experts(), local_expert_offset=1, dtype=torch.bfloat16, out=out)
    assert there is out
    assert torch.equal(here, there)
    scheme = dataclasses.replace(stored.scheme)  # an equal one, whose id says that its calls are checked
    before = sys.getrefcount(scheme)
    local_moe(dataclasses.replace(brought, scheme=scheme), routing, stored, cpu_experts(), dtype=torch.bfloat16)
    assert sys.getrefcount(scheme) > before  # so that no other scheme gets this id
    plain = ExpertWeights(
        w13=StoredMatrix(dequantize_weight(stored.w13, stored.scheme)),
        w2=StoredMatrix(dequantize_weight(stored.w2, stored.scheme)),
    )
    real = dequantize_rows(brought.values, brought.scale, stored.scheme)
    loose = local_moe(real, routing, plain, cpu_experts(), local_expert_offset=1).double()
    rows = loose.abs().sum(1) > 0
    assert worst_row_error(here[rows], loose[rows]) < 0.05  # the loose sum does not round between the GEMMs


@pytest.mark.parametrize("experts", [0, 3])
def test_static_input_scale(experts: int) -> None:
    """A scale that saturates shows that it is used; a rank without experts returns zeros."""
    x, ids, weights = tokens(9)
    stored, routing = local_weights(2, experts, "fp8_tensor"), Routing(topk_ids=ids, topk_weights=weights)
    static = {"w13_input_scale": torch.tensor([1e-4]), "w2_input_scale": torch.full((experts,), 0.01)}
    outs = [
        local_moe(x, routing, w, cpu_experts(), local_expert_offset=2)
        for w in (stored, dataclasses.replace(stored, **static))
    ]
    assert all(bool(out.isfinite().all()) for out in outs)
    assert torch.equal(*outs) is (experts == 0)


@pytest.mark.parametrize("layout", [Layout.COMPACT, Layout.BATCHED])
def test_a_row_for_each_expert_of_a_token(layout: Layout) -> None:
    ids, weights = tokens(21)[1:]
    x = tokens(21 * NUM_TOPK)[0]
    out = torch.full((21, HIDDEN), float("nan"))
    routing = Routing(topk_ids=ids, topk_weights=weights)
    given = x, routing, local_weights(0, NUM_EXPERTS, "none"), cpu_experts()
    assert local_moe(*given, layout=layout, out=out) is out
    apart = expected(x, ids.reshape(-1, 1), weights.reshape(-1, 1), 0, NUM_EXPERTS)
    found = apart.view(21, NUM_TOPK, HIDDEN).sum(1)
    idle = (found == 0).all(1)
    assert torch.equal(out[idle], torch.zeros_like(out[idle]))
    assert worst_row_error(out[~idle], found[~idle]) < ROW_ERROR_LIMITS["float32"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(15, HIDDEN), "layout": Layout.FLAT}, "x is (15, 48), 3 rows a token, which layout flat"),
        ({"x": torch.zeros(15, HIDDEN), "out": torch.zeros(15, HIDDEN)}, "out is (15, 48)"),
        ({"num_local_experts": 4}, "num_local_experts (4) is not that of the weights (3)"),
        ({"local_expert_offset": -1}, "local experts [-1, 2) are not in [0, num_experts (None))"),
        ({"local_expert_offset": 5, "num_experts": 7}, "local experts [5, 8) are not in [0, num_experts (7))"),
        ({"dtype": torch.float16}, "x is torch.float32, dtype says torch.float16"),
        ({"x": torch.zeros(4, HIDDEN)}, "topk_ids has 5 rows, x is (4, 48)"),
        ({"x": quantize(torch.zeros(5, HIDDEN), get_scheme("fp8_block"))}, "dtype is needed if x is Quantized"),
        ({"out": torch.zeros(4, HIDDEN)}, "out is (4, 48)"),
        *(
            ({"out": torch.zeros(5, HIDDEN).int(), "layout": each}, "out is (5, 48) torch.int32 on cpu; (5, 48) ")
            for each in Layout
        ),
    ],
    ids=[
        *("flat", "summed", "num_local_experts", "negative", "beyond", "dtype", "rows", "quantized", "out"),
        *(f"out_{each.value}" for each in Layout),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    x, ids, weights = tokens(5)
    routing = Routing(topk_ids=ids, topk_weights=weights)
    arguments = {"x": x, "routing": routing, "weights": local_weights(0, 3, "none"), "experts": cpu_experts()} | change
    with pytest.raises(ValueError) as caught:
        local_moe(**arguments)
    assert message in str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_nothing_is_read_back_on_a_gpu(scheme: str, layout: Layout) -> None:
    """Any host sync is an error here, and a captured call follows new ids."""
    device, (x, ids, weights) = torch.device("cuda"), tokens(40, torch.bfloat16)
    stored = local_weights(2, 4, scheme, torch.bfloat16)
    parts = {name: getattr(stored, name) for name in ("w13", "w2")}
    on_gpu = dataclasses.replace(stored, **{name: part.map(lambda t: t.to(device)) for name, part in parts.items()})
    experts = create_experts("triton", ACTIVATION, device)
    given, routing = x.to(device), Routing(topk_ids=ids.to(device), topk_weights=weights.to(device))

    def call() -> torch.Tensor:
        return local_moe(given, routing, on_gpu, experts, layout=layout, local_expert_offset=2, num_experts=NUM_EXPERTS)

    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    shuffled = ids.flip(0)
    routing.topk_ids.copy_(shuffled)
    graph.replay()
    there = Routing(topk_ids=shuffled, topk_weights=weights)
    reference = local_moe(x, there, stored, cpu_experts(), local_expert_offset=2).double()
    rows = reference.abs().sum(1) > 0
    assert (
        worst_row_error(out.cpu()[rows], reference[rows]) < ROW_ERROR_LIMITS["fp8" if scheme != "none" else "bfloat16"]
    )


def test_rows_that_quantization_leaves_no_whole_words_are_not_packed_by_words() -> None:
    """510 columns are 1020 bytes in bfloat16, and 510 in fp8."""
    ids, weights = torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
    sizes = {
        name: PackingSizes(
            layout=Layout.COMPACT,
            scheme=get_scheme(name),
            dtype=torch.bfloat16,
            first=0,
            num_local_experts=3,
            capacity=4,
            static=False,
            expected_rows=4,
        )
        for name in ("none", "fp8_token")
    }
    found = {
        (name, hidden): packable(torch.zeros(4, hidden, dtype=torch.bfloat16), ids, weights, size)
        for name, size in sizes.items()
        for hidden in (508, 510)
    }
    assert [key for key, fits in found.items() if not fits] == [("fp8_token", 510)]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("hidden", [511, 510, 504])
@pytest.mark.parametrize("scheme", ["none", "fp8_block", "fp8_token", "int8_w8a16", "int4_w4a16"])
def test_sizes_that_are_no_multiple_of_16(scheme: str, hidden: int, layout: Layout) -> None:
    """Against torch on a CPU, which takes any size."""
    random, chosen = torch.Generator().manual_seed(7), get_scheme(scheme)
    hidden, inner = hidden - hidden % chosen.weight.packed, 256 if scheme == "fp8_block" else 254
    plain = [torch.randn(shape, generator=random) / 16 for shape in ((7, 2 * inner, hidden), (7, hidden, inner))]
    w13, w2 = (quantize_weight(w, chosen) if scheme != "none" else StoredMatrix(w.bfloat16()) for w in plain)
    x, ids = torch.randn(40, hidden, generator=random).bfloat16(), torch.randint(-1, 7, (40, 3), generator=random)
    outs, factors = [], torch.rand(40, 3, generator=random)
    for device in map(torch.device, ("cpu", "cuda")):
        moved = operator.methodcaller("to", device)
        weights = ExpertWeights(w13=w13.map(moved), w2=w2.map(moved), scheme=chosen)
        routing = Routing(topk_ids=ids.to(device), topk_weights=factors.to(device))
        experts = create_experts("auto", ACTIVATION, device, scheme=chosen)
        outs.append(local_moe(x.to(device), routing, weights, experts, layout=layout).cpu())
    rows = outs[0].abs().sum(1) > 0
    limit = ROW_ERROR_LIMITS["fp8" if chosen.payload.quantized else "bfloat16"]
    assert worst_row_error(outs[1][rows], outs[0][rows].double()) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["none", "fp8_block", "fp8_token", "fp8_tensor", "mxfp8", "nvfp4"])
def test_later_calls_on_a_gpu(scheme: str) -> None:
    """A first call is launched kernel by kernel, later ones start with one kernel for several of them: the same bits.

    At one to four blocks of 128 tokens, and at more, by two kinds of experts: with 7 and with 300.
    """
    device = torch.device("cuda")
    for num_experts in (NUM_EXPERTS, 300):
        random = torch.Generator(device).manual_seed(5)
        shapes = (num_experts, 2 * INTERMEDIATE, 64), (num_experts, 64, INTERMEDIATE)
        plain = [torch.randn(shape, generator=random, device=device).bfloat16() / 8 for shape in shapes]
        chosen = get_scheme(scheme)
        w13, w2 = (quantize_weight(w, chosen) if scheme != "none" else StoredMatrix(w) for w in plain)
        weights, experts = ExpertWeights(w13=w13, w2=w2, scheme=chosen), create_experts("auto", ACTIVATION, device)
        for count in (1, 17, 127, 128, 129, 384, 512, 513):
            outs = []
            for seed in (1, 2, 1):
                random.manual_seed(seed)
                x = torch.randn(count, 64, generator=random, device=device).bfloat16()
                ids = torch.randint(-1, num_experts + 1, (count, NUM_TOPK), generator=random, device=device).int()
                factors = torch.rand(count, NUM_TOPK, generator=random, device=device)
                outs.append(local_moe(x, Routing(topk_ids=ids, topk_weights=factors), weights, experts))
            assert torch.equal(outs[0], outs[2]), f"{count} tokens, {num_experts} experts"
            assert bool((outs[0] != outs[1]).any())


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["none", "fp8_block"])
def test_two_backends_in_turn_on_a_gpu(scheme: str) -> None:
    """With row tiles of one size: the tile list of one of them has counters, which its calls set to zero."""
    device = torch.device("cuda")
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    gemm = GemmTiles(block_n=64, block_k=64, num_stages=3)
    triton = ExpertTiles(block_m=32, first=gemm, second=gemm, backend="triton")
    random, chosen = torch.Generator(device).manual_seed(5), get_scheme(scheme)
    shapes = (7, 256, 64), (7, 64, 128)
    plain = [torch.randn(shape, generator=random, device=device).bfloat16() / 8 for shape in shapes]
    w13, w2 = (quantize_weight(w, chosen) if scheme != "none" else StoredMatrix(w) for w in plain)
    weights = ExpertWeights(w13=w13, w2=w2, scheme=chosen)
    backends = [create_experts("hopper", ACTIVATION, device, tiles=tiles) for tiles in (triton, HOPPER_TILES)]
    for count in (6, 34):
        x = torch.randn(count, 64, generator=random, device=device).bfloat16()
        ids = torch.randint(0, 7, (count, NUM_TOPK), generator=random, device=device).int()
        routing = Routing(topk_ids=ids, topk_weights=torch.rand(count, NUM_TOPK, generator=random, device=device))
        outs = [local_moe(x, routing, weights, experts) for _ in range(4) for experts in backends]
        for out in outs[2:]:
            assert worst_row_error(out, outs[0].double()) < ROW_ERROR_LIMITS["fp8" if scheme != "none" else "bfloat16"]
        assert all(torch.equal(outs[i], outs[i % 2]) for i in range(8)), f"{count} tokens"
