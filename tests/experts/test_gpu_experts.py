"""The experts' kernels on a GPU at the sizes of served models, against the torch experts of the same scheme.

Letters: L local experts, H hidden, I intermediate, N received rows, K top-k.
"""

import dataclasses
import math
import operator
from typing import Any

import pytest
import torch
from helpers.expert_cases import interleaved, used_rows

from ep_moe.config import ActivationConfig, ActivationKind, Layout
from ep_moe.experts import Experts, ReferenceExperts, create_experts, reference
from ep_moe.experts.grouped_gemm import CallShape
from ep_moe.experts.hopper.shapes import CAPABILITY
from ep_moe.experts.kernels import KernelExperts
from ep_moe.experts.tuning import HOPPER_TILES, ExpertTiles
from ep_moe.kernels.device import Device
from ep_moe.layout import Compact, ExpertBatch, Flat, Packed, TokenRows, pack, weighted_sum
from ep_moe.quant import StoredMatrix, as_bytes, dequantize_weight, get_scheme, quantize, quantize_weight, round_trip
from ep_moe.testing import ROW_ERROR_LIMITS, assert_same_bits, worst_row_error
from ep_moe.weights import ExpertWeights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SILU = ActivationConfig()
TIE = 5e-4  # relative: an element of the intermediate may round either way if a change by this much decides it
DRAWS = 32  # of signs of these changes: an element that changes as its scale does, every second time, keeps its number
GPT_OSS = ActivationConfig(kind=ActivationKind.SWIGLU, alpha=1.702, beta=1.0, limit=7.0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The experts of one rank."""

    hidden: int
    intermediate: int
    experts: int
    num_topk: int
    activation: ActivationConfig = SILU
    biased: bool = False


MODELS = {
    "deepseek-v3": Model(hidden=7168, intermediate=2048, experts=32, num_topk=8),
    "qwen3-235b": Model(hidden=4096, intermediate=1536, experts=16, num_topk=8),
    "qwen3-30b": Model(hidden=2048, intermediate=768, experts=16, num_topk=8),
    "mixtral": Model(hidden=4096, intermediate=14336, experts=2, num_topk=2),
    "gpt-oss-120b": Model(hidden=2880, intermediate=2880, experts=16, num_topk=4, activation=GPT_OSS, biased=True),
}
SCHEMES = ["none", "fp8_tensor", "fp8_token", "fp8_block", "int8_token", "int8_block"]
DECODED = ["fp8_w8a16", "fp8_w8a16_block", "int8_w8a16", "int8_w8a16_zp", "int8_w8a16_g64_zp", "mxfp8_w8a16"]
DECODED += ["int4_w4a16_zp", "int4_w4a16_g16", "int4_w4a16_g32_f32", "int4_w4a16_g64_zp"]
DECODED += ["mxfp4_w4a16", "nvfp4_w4a16", "nvfp4_w4a16_divisor"]
PAIRED = ["int8_w8a16", "mxfp8_w8a16", "int4_w4a16_zp", "int4_w4a16_g16", "int4_w4a16_g64_zp"]  # by Hopper's kernels
PAIRED += ["mxfp4_w4a16", "nvfp4_w4a16", "nvfp4_w4a16_divisor"]
NARROW = ["int4_w4a8", "int4_w4a8_g32_zp", "mxfp8", "mxfp4_w4a8", "nvfp4"]  # tokens as well


def make_weights(model: Model, scheme_name: str) -> ExpertWeights:
    """Random weights, every expert's different, quantized expert by expert."""
    scheme, random = get_scheme(scheme_name), torch.Generator("cuda").manual_seed(3)
    width = model.intermediate * (2 if model.activation.kind.gated else 1)

    def matrices(rows: int, columns: int) -> StoredMatrix:
        made = StoredMatrix.empty((model.experts, rows, columns), scheme.weight, torch.bfloat16, "cuda")
        for expert in range(model.experts):
            w = torch.randn(rows, columns, generator=random, device="cuda") * (0.5 + expert / model.experts)
            w *= columns**-0.5
            made[expert].copy_(quantize_weight(w, scheme) if scheme.weight.quantized else StoredMatrix(w))
        return made

    w13, w2 = matrices(width, model.hidden), matrices(model.hidden, model.intermediate)
    biases = {}
    if model.biased:
        for name, columns in (("w13_bias", width), ("w2_bias", model.hidden)):
            biases[name] = torch.randn(model.experts, columns, generator=random, device="cuda").bfloat16()
    return ExpertWeights(w13=w13, w2=w2, scheme=scheme, **biases)


def make_rows(model: Model, scheme_name: str, num_rows: int, seed: int = 5) -> TokenRows:
    """Received rows: each token has some of its K experts here; the first expert has no rows, the last many."""
    scheme, random = get_scheme(scheme_name), torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(num_rows, model.experts * 4, generator=random, device="cuda")
    scores[:, 0] = -1
    scores[:, model.experts - 1] += 0.3
    ids = scores.topk(min(model.num_topk, model.experts), dim=1).indices
    ids = torch.where(ids < model.experts, ids, -1).int()
    x = torch.randn(num_rows, model.hidden, generator=random, device="cuda").bfloat16()
    payload = quantize(x, scheme) if scheme.payload.quantized else None
    return TokenRows(
        x=x if payload is None else payload.values,
        scale=None if payload is None else payload.scale,
        local_topk_ids=ids,
        topk_weights=torch.where(ids >= 0, torch.rand(ids.shape, generator=random, device="cuda"), 0.0),
    )


def lay_out(
    rows: TokenRows, layout: Layout, model: Model, scheme_name: str, *, capacity: int | None = None, alignment: int = 16
) -> Packed:
    """The batch, as a transport makes it, by default for any routing."""
    return pack(
        rows,
        layout,
        scheme=get_scheme(scheme_name),
        dtype=torch.bfloat16,
        num_local_experts=model.experts,
        capacity=max(rows.x.shape[0], 1) if capacity is None else capacity,
        alignment=alignment,
    )


def gathered(rows: TokenRows, model: Model, scheme_name: str) -> ExpertBatch:
    """Rows gathered from a pool, as COMPACT with a row_index."""
    flat = lay_out(rows, Layout.FLAT, model, scheme_name).batch
    return Compact(**{field.name: getattr(flat, field.name) for field in dataclasses.fields(ExpertBatch)})


class Watched(ReferenceExperts):
    """The torch experts, which keep the intermediate of each expert that has rows, before it is rounded."""

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights, *, out: torch.Tensor | None = None) -> torch.Tensor:
        self.inner: list[torch.Tensor] = []

        def watch(inner: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            self.inner.append(inner)
            return round_trip(inner, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "round_trip", watch)
            return super().__call__(batch, weights, out=out)


def without_ties(
    out: torch.Tensor,
    expected: torch.Tensor,
    batch: ExpertBatch,
    weights: ExpertWeights,
    watched: Watched,
    limit: float,
) -> torch.Tensor:
    """The used rows `out`; from those that exceed `limit`, what roundings next to a tie explain is subtracted.

    One element may hold a third of the intermediate's norm: if it lies between two fp8 numbers to within the error of
    the first GEMM's sums, either of them is right, and they differ by an eighth of it.
    """
    scheme, fixed = weights.scheme, out.double()
    counts = [count for count in batch.expert_num_tokens.tolist() if count]
    experts = [expert for expert, count in enumerate(batch.expert_num_tokens.tolist()) if count]
    error = (fixed - expected.double()).norm(dim=1) / expected.double().norm(dim=1)
    first = 0
    for expert, count, inner in zip(experts, counts, watched.inner, strict=True):
        for row in torch.nonzero(error[first : first + count] >= limit).flatten().tolist():
            step = torch.zeros_like(inner[row], dtype=torch.float64)
            for _ in range(DRAWS):
                change = TIE * (torch.randint(2, inner.shape, device=inner.device) * 2.0 - 1)
                low, high = (round_trip(inner * (1 + sign * change), scheme)[row].double() for sign in (-1, 1))
                step = torch.maximum(step, (high - low).abs())
            tied = step > inner[row].abs() / 32  # not the change of the scale alone
            columns = dequantize_weight(weights.w2[expert], scheme)[:, tied].double()
            left = (fixed[first + row] - expected[first + row].double()).unsqueeze(1)
            taken = torch.linalg.lstsq(columns, left).solution[:, 0]
            fixed[first + row] -= columns @ torch.clamp(taken, -1.1 * step[tied], 1.1 * step[tied])
        first += count
    return fixed


def make_experts(kind: str, activation: ActivationConfig, tiles: ExpertTiles | None = None) -> Experts:
    """Experts by name; those of Hopper compute calls of any number of rows."""
    if kind == "triton":
        return create_experts(kind, activation, torch.device("cuda"))
    if torch.cuda.get_device_capability() != CAPABILITY:
        pytest.skip("needs a Hopper GPU")
    from ep_moe.experts.hopper.gemms import HopperGemms
    from ep_moe.experts.triton import TritonGemms

    return KernelExperts(activation, [HopperGemms(least_rows=0), TritonGemms()], tiles=tiles)


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [*(("triton", scheme) for scheme in (*SCHEMES, *DECODED)), *(("hopper", s) for s in (*SCHEMES, *PAIRED))],
)
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_torch_experts(name: str, kind: str, scheme: str) -> None:
    model, weights = MODELS[name], make_weights(MODELS[name], scheme)
    ours, theirs = make_experts(kind, model.activation), Watched(model.activation)
    quantized = get_scheme(scheme).payload.quantized
    limit = ROW_ERROR_LIMITS["fp8" if quantized else "bfloat16"]
    worst = 0.0
    for num_rows in (1, 40, 3000):
        rows = make_rows(model, scheme, num_rows)
        batches: dict[str, ExpertBatch] = {
            layout.value: lay_out(rows, layout, model, scheme).batch for layout in Layout
        }
        batches["row_index"] = gathered(rows, model, scheme)
        for layout, batch in batches.items():
            expected = theirs(batch, weights)
            out = ours(batch, weights, out=torch.full_like(expected, math.nan))
            assert_same_bits(ours(batch, weights, out=torch.full_like(expected, math.nan)), out, "second run")
            if isinstance(batch, Flat):
                of_rows = ours(batches["row_index"], weights)
                assert_same_bits(weighted_sum(of_rows, batch.token_to_row, batch.topk_weights), out, "sums of rows")
                if quantized:  # the rows themselves are judged, ties considered
                    continue
            else:
                used = used_rows(batch)
                assert bool(out[~used].isnan().all())
                out, expected = out[used], expected[used]
                if quantized:
                    out = without_ties(out, expected, batch, weights, theirs, limit)
            error = worst_row_error(out, expected)
            assert error < limit, f"{layout}, {num_rows} rows"
            worst = max(worst, error)
    print(f"{name} {kind} {scheme}: worst row {worst:.2e}")


@pytest.mark.parametrize("shared_kib", [160, 99])
@pytest.mark.parametrize("scheme", ["none", "fp8_block", "fp8_token", "fp8_w8a16", "int8_w8a16", "int4_w4a16_zp"])
def test_tiles_of_gpus_with_less_shared_memory(scheme: str, shared_kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This GPU computes with the default tiles of smaller ones, with as many stages as it fits in their memory."""
    smaller = dataclasses.replace(Device.of(torch.device("cuda")), shared_bytes=shared_kib * 1024)
    monkeypatch.setattr(Device, "of", lambda device: smaller)
    test_equals_the_torch_experts("qwen3-30b", "triton", scheme)
    test_equals_the_torch_experts("gpt-oss-120b", "triton", scheme)


ACTIVATIONS = {kind.value: ActivationConfig(kind=kind) for kind in ActivationKind} | {"gpt-oss": GPT_OSS}
ODD_ROWS = [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300, 0, 256, 7, 384]
ODD_ROWS_OF_32 = [0, 1, 15, 16, 17, 31, 32, 33, 47, 7, 0, 49, 3, 1, 2, 1]  # 16 on average, in tiles of 32
ODD_ROWS_OF_64 = [0, 1, 31, 32, 33, 63, 64, 65, 95, 7, 0, 97, 9, 2, 8, 3]  # 32 on average, in tiles of 64


@pytest.mark.parametrize(
    ("biased", "odd_rows"),
    [(False, ODD_ROWS), (True, ODD_ROWS), (False, ODD_ROWS_OF_32), (True, ODD_ROWS_OF_64)],
    ids=["", "bias", "32", "bias-64"],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scheme", [*SCHEMES, "fp8_block_ue8m0", "int8_w8a16", "int4_w4a16_g16", "nvfp4_w4a16"])
def test_hopper_gemms_of_odd_sizes(scheme: str, activation: str, biased: bool, odd_rows: list[int]) -> None:
    """Tiles that rows or columns do not fill, experts that begin at any row, NaN in a row, unaligned tensors.

    Of 400 columns, the second GEMM has tiles of 128, as they are few; of 1040 tiles of 256.
    """
    gated, decoded = ACTIVATIONS[activation].kind.gated, scheme in DECODED
    words = 16 if decoded else 0  # rows of weights that are decoded have whole groups of 16 bytes
    model = Model(
        hidden=(1040 if biased else 400) + words,
        intermediate=640 if gated and "block" in scheme else 336 + words,
        experts=len(odd_rows),
        num_topk=1,
        activation=ACTIVATIONS[activation],
        biased=biased,
    )
    weights, experts = make_weights(model, scheme), make_experts("hopper", model.activation)
    ids = torch.arange(len(odd_rows), device="cuda").repeat_interleave(torch.tensor(odd_rows, device="cuda"))
    rows = make_rows(dataclasses.replace(model, num_topk=1), scheme, len(ids))
    rows = dataclasses.replace(rows, local_topk_ids=ids.int().unsqueeze(1), topk_weights=torch.ones_like(ids)[:, None])
    batch = lay_out(rows, Layout.COMPACT, model, scheme, alignment=1).batch
    if batch.x.dtype == torch.int8:
        assert batch.scale is not None
        batch.scale[200] = math.nan
    else:
        values = as_bytes(batch.x)
        values[200, 7] = math.nan if values.is_floating_point() else 0x7F
    backend, _ = experts.choose_backend(CallShape.of(batch, weights, model.activation))
    assert backend.name == "hopper"
    y = experts(batch, weights, out=torch.full(batch.output_shape, math.nan, dtype=torch.bfloat16, device="cuda"))
    watched = Watched(model.activation)
    expected = watched(batch, weights)
    assert torch.equal(y.isnan(), expected.isnan())
    sound = ~expected.isnan().any(1)
    assert bool(sound.any())
    assert bool((~sound).any())
    quantized = get_scheme(scheme).payload.quantized
    limit = ROW_ERROR_LIMITS["fp8" if quantized else "bfloat16"]
    fixed = without_ties(y, expected, batch, weights, watched, limit) if quantized else y
    assert worst_row_error(fixed[sound], expected[sound]) < limit
    shifted = torch.empty(y.numel() + 1, dtype=y.dtype, device="cuda")[1:].view_as(y)
    assert_same_bits(experts(batch, weights, out=shifted)[sound], y[sound], "out that is aligned to 2 bytes")
    for group_m in (1, 64):
        tiles = dataclasses.replace(HOPPER_TILES, group_m=group_m)
        other = make_experts("hopper", model.activation, tiles)
        assert_same_bits(other(batch, weights)[sound], y[sound], f"tiles in groups of {group_m}")
    for expected_rows in (8, 32, 64, 128) if decoded else ():
        other_tiles = dataclasses.replace(batch, expected_rows=expected_rows)
        again = experts(other_tiles, weights, out=torch.full_like(y, math.nan))
        assert_same_bits(again[sound], y[sound], f"tiles of {expected_rows} rows")


@pytest.mark.parametrize("pool", [False, True], ids=["", "gathered"])
@pytest.mark.parametrize("scheme", ["none", "fp8_tensor", "fp8_token", "mxfp4_w4a16", "int4_w4a16_g32_zp"])
def test_hopper_gemms_of_interleaved_rows(scheme: str, pool: bool) -> None:
    """Rows of gate and up that take turns have the bits of rows apart, at counts and columns that fill no tile."""
    model = Model(
        hidden=1152,
        intermediate=352,
        experts=len(ODD_ROWS),
        num_topk=1,
        activation=GPT_OSS,
        biased=scheme != "fp8_token",
    )
    apart, experts = make_weights(model, scheme), make_experts("hopper", model.activation)
    bias = None if apart.w13_bias is None else interleaved(apart.w13_bias)
    weights = dataclasses.replace(apart, w13=apart.w13.map(interleaved), w13_bias=bias, alternating=True)
    ids = torch.arange(len(ODD_ROWS), device="cuda").repeat_interleave(torch.tensor(ODD_ROWS, device="cuda"))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator("cuda").manual_seed(4), device="cuda")]
    rows = make_rows(model, scheme, len(ids))
    rows = dataclasses.replace(rows, local_topk_ids=ids.int().unsqueeze(1), topk_weights=torch.ones_like(ids)[:, None])
    batch = gathered(rows, model, scheme) if pool else lay_out(rows, Layout.COMPACT, model, scheme).batch
    backend, _ = experts.choose_backend(CallShape.of(batch, weights, model.activation))
    assert backend.name == "hopper"
    used = used_rows(batch)
    expected, found = experts(batch, apart)[used], experts(batch, weights)[used]
    assert found.shape[0] == len(ids)
    assert_same_bits(found, expected, "rows in turns")
    assert_same_bits(experts(batch, weights)[used], expected, "a repeated call")


@pytest.mark.parametrize("scheme", NARROW)
@pytest.mark.parametrize("name", ["qwen3-30b", "gpt-oss-120b"])
def test_hopper_decodes_as_triton_does(name: str, scheme: str) -> None:
    """Tokens are narrow, too: both round them and the intermediate alike, so that no tie has to be explained."""
    model, weights = MODELS[name], make_weights(MODELS[name], scheme)
    batch = lay_out(make_rows(model, scheme, 3000), Layout.COMPACT, model, scheme).batch
    used = used_rows(batch)
    outs = [make_experts(kind, model.activation)(batch, weights)[used] for kind in ("hopper", "triton")]
    assert_same_bits(*outs, "Hopper's and Triton's")


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
@pytest.mark.parametrize("scheme", ["none", "fp8_block", "fp8_tensor", "mxfp4_w4a16"])
@pytest.mark.parametrize("kind", ["triton", "hopper"])
def test_a_graph_is_replayed_with_other_counts(kind: str, scheme: str, layout: Layout) -> None:
    model, weights = MODELS["qwen3-30b"], make_weights(MODELS["qwen3-30b"], scheme)
    experts = make_experts(kind, model.activation)
    batches = [lay_out(make_rows(model, scheme, 200, seed), layout, model, scheme).batch for seed in range(3)]
    tensors = [f.name for f in dataclasses.fields(batches[0]) if isinstance(getattr(batches[0], f.name), torch.Tensor)]
    fixed = dataclasses.replace(batches[0], **{name: getattr(batches[0], name).clone() for name in tensors})
    out = torch.full(fixed.output_shape, math.nan, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        experts(fixed, weights, out=out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts(fixed, weights, out=out)
    for batch in reversed(batches):
        for name in tensors:
            getattr(fixed, name).copy_(getattr(batch, name))
        out.fill_(math.nan)
        graph.replay()
        expected = experts(batch, weights, out=torch.full_like(out, math.nan))
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        assert bool((~out.isnan()).any())


def test_more_than_two_to_the_31_elements() -> None:
    """Rows, and weights, at offsets beyond 2^31 elements: addresses have 64 bits."""
    model = Model(hidden=4096, intermediate=2048, experts=96, num_topk=2)
    random = torch.Generator("cuda").manual_seed(1)
    w13, w2 = (
        torch.empty(model.experts, *shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((4096, 4096), (4096, 2048))
    )
    for expert in range(model.experts):
        for w in (w13, w2):
            w[expert] = torch.randn(w.shape[1:], generator=random, device="cuda") * w.shape[2] ** -0.5
    capacity = 6144  # 96 * 6144 * 4096 = 2.4e9
    x = torch.empty(model.experts, capacity, model.hidden, dtype=torch.bfloat16, device="cuda")
    counts = torch.zeros(model.experts, dtype=torch.int32, device="cuda")
    counts[1], counts[-1] = 3, 200
    for expert in (1, model.experts - 1):
        x[expert, :200] = torch.randn(200, model.hidden, generator=random, device="cuda")
    rows = TokenRows(
        x=torch.empty(0, model.hidden, dtype=torch.bfloat16, device="cuda"),
        scale=None,
        local_topk_ids=torch.empty(0, 2, dtype=torch.int32, device="cuda"),
        topk_weights=torch.empty(0, 2, device="cuda"),
    )
    batch = dataclasses.replace(
        lay_out(rows, Layout.BATCHED, model, "none").batch,
        x=x,
        expert_num_tokens=counts,
        expert_row_start=torch.arange(model.experts, dtype=torch.int32, device="cuda") * capacity,
        expected_rows=3,
    )
    weights, used = ExpertWeights(w13=StoredMatrix(w13), w2=StoredMatrix(w2)), used_rows(batch)
    assert x.numel() > 2**31
    y = create_experts("triton", SILU, torch.device("cuda"))(batch, weights)
    expected = ReferenceExperts(SILU)(batch, weights)
    assert worst_row_error(y[used], expected[used]) < ROW_ERROR_LIMITS["bfloat16"]


def test_rows_beyond_two_to_the_31_words_are_packed_and_come_home() -> None:
    """BATCHED of 96 experts with room for 12288 rows is 2.4e9 words; two tokens go to its last expert and its first."""
    random = torch.Generator("cuda").manual_seed(2)
    x = torch.randn(2, 4096, generator=random, device="cuda").bfloat16()
    ids = torch.tensor([[95, 0], [95, -1]], dtype=torch.int32, device="cuda")
    rows = TokenRows(x=x, scale=None, local_topk_ids=ids, topk_weights=torch.ones(2, 2, device="cuda"))
    model = Model(hidden=4096, intermediate=64, experts=96, num_topk=2)
    packed = lay_out(rows, Layout.BATCHED, model, "none", capacity=12288)
    assert packed.batch.x.numel() // 2 > 2**31
    assert_same_bits(packed.batch.x[95, :2], x, "last expert")
    assert_same_bits(packed.batch.x[0, 0], x[0], "first expert")
    home = weighted_sum(packed.batch.x, packed.token_to_row, rows.topk_weights)
    assert_same_bits(home, torch.stack([x[0] * 2, x[1]]), "home")


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_tensors_on_a_gpu_that_is_not_the_current_one() -> None:
    model = MODELS["qwen3-30b"]
    weights, rows = make_weights(model, "fp8_block"), make_rows(model, "fp8_block", 40)
    assert torch.cuda.current_device() == 0
    other = torch.device("cuda:1")
    move = operator.methodcaller("to", other)
    moved_weights = dataclasses.replace(weights, w13=weights.w13.map(move), w2=weights.w2.map(move))
    tensors = {field.name: getattr(rows, field.name) for field in dataclasses.fields(rows)}
    moved = {name: move(value) for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    moved_rows = dataclasses.replace(rows, **moved)
    outputs = []
    for these_weights, these_rows in ((weights, rows), (moved_weights, moved_rows)):
        batch = lay_out(these_rows, Layout.FLAT, model, "fp8_block").batch
        outputs.append(create_experts("triton", SILU, batch.x.device)(batch, these_weights))
    assert outputs[1].device == other
    assert_same_bits(outputs[1], outputs[0], "experts on the other GPU")
    x = torch.randn(7, 256, device=other)
    here, there = (quantize(t, get_scheme("fp8_block")) for t in (x.to("cuda:0"), x))
    assert_same_bits(there.values, here.values, "values")
    assert_same_bits(there.scale, here.scale, "scale")
