"""The Triton experts against the torch ones, at small sizes: every format, layout, activation and tile size.

Letters: L local experts, H hidden, I intermediate, N received rows.
"""

import dataclasses
import functools
import gc
import itertools
import json
import logging
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.expert_cases import (
    ACTIVATIONS,
    EXPERTS,
    GPT_OSS,
    OWN,
    SILU,
    TOPK_IDS,
    Case,
    fill_with_nan,
    interleaved,
    used_rows,
)
from helpers.expert_cases import make_case as make
from helpers.sampling import thinned
from triton import next_power_of_2

from ep_moe.config import ActivationConfig, Layout
from ep_moe.experts import ReferenceExperts, column_order, create_experts, experts_name
from ep_moe.experts.formats import Between
from ep_moe.experts.grouped_gemm import CallShape
from ep_moe.experts.kernels import KernelExperts
from ep_moe.experts.prepared import PreparedCall
from ep_moe.experts.prepared_rows import group_loads, inner_order, inner_width
from ep_moe.experts.requantize import prepare_tile_list
from ep_moe.experts.tile_tables import default_table, log_once, table_name
from ep_moe.experts.triton import TritonGemms
from ep_moe.experts.tuning import ExpertTiles, GemmTiles, fit_stages
from ep_moe.kernel_launch.kernel import as_constants
from ep_moe.kernels.device import Device
from ep_moe.kernels.gemm.arguments import RowGroups, Rows, Stored, TileList
from ep_moe.kernels.gemm.requantize import _expert_amax_kernel
from ep_moe.layout import ExpertBatch, Flat
from ep_moe.quant import QuantScheme, StoredMatrix, dequantize_weight, get_scheme, quantize_weight
from ep_moe.testing import ROW_ERROR_LIMITS, assert_same_bits, worst_row_error
from ep_moe.weights import ExpertWeights
from interpreted.common import DEVICE
from interpreted.repeating import recorded

# In a row of 80 elements a single one that requantizes to its other neighbor matters: a GPU's fp8 sums of 14 bits cause
# that, the interpreter's do not.
HIDDEN, INTERMEDIATE = (144, 80) if DEVICE.type == "cpu" else (720, 1200)
IDS = TOPK_IDS * 2  # expert 1 has no token, expert 3 has 20
make_case = functools.partial(make, hidden=HIDDEN, intermediate=INTERMEDIATE, ids=IDS, device=DEVICE)
LAYOUTS = list(Layout)


def list_tiles(counts: torch.Tensor, max_tiles: int, block_m: int) -> tuple[Rows, TileList]:
    """The tile list of experts with so many tokens, with zeros for their largest magnitudes and for drawn tiles."""
    rows = Rows(row_start=None, num_tokens=counts, row_index=None)
    sizes = (max_tiles, len(counts), 1, len(counts), 2)
    tiles = TileList(*(torch.full((size,), 7, dtype=torch.int32, device=DEVICE) for size in sizes))
    prepare_tile_list(len(counts), max_tiles, block_m, torch.device(DEVICE))((rows, tiles))
    return rows, tiles


def assert_equals_torch(case: Case, activation: ActivationConfig, batch: ExpertBatch, *, tiles: Any = None) -> None:
    """Rows with tokens are those of the torch experts, rows without are not touched, on a GPU two runs have the same
    bits.

    Values at a tie may requantize the other way if float32 sums differ in their last bit. That is rare: half of the
    rows must be as close as the model's dtype.
    """
    expected = ReferenceExperts(activation)(batch, case.weights)
    experts = KernelExperts(activation, [TritonGemms()], tiles=tiles)
    out, used = torch.full_like(expected, math.nan), slice(None) if isinstance(batch, Flat) else used_rows(batch)
    assert experts(batch, case.weights, out=out) is out
    if DEVICE.type == "cuda":
        assert_same_bits(experts(batch, case.weights)[used], out[used], "second run")
    if not isinstance(batch, Flat):
        assert bool(out[~used].isnan().all())
    out, expected = out[used], expected[used]
    dtype_limit = ROW_ERROR_LIMITS[str(case.dtype).removeprefix("torch.")]
    quantized = case.weights.scheme.payload.quantized
    assert worst_row_error(out, expected) < max(dtype_limit, ROW_ERROR_LIMITS["fp8"] if quantized else 0)
    if quantized and DEVICE.type == "cuda":
        dtype_limit = max(dtype_limit, ROW_ERROR_LIMITS["bfloat16"])
    errors = sorted(worst_row_error(a[None], e[None]) for a, e in zip(out, expected, strict=True))
    assert errors[len(errors) // 2] < dtype_limit


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FORMATS = [
    *(("none", dtype) for dtype in (F32, BF16, F16)),
    *((name, BF16) for name in ("fp8_tensor", "fp8_token", "fp8_block")),
    ("fp8_block", F32),
    ("fp8_block_32x48", F16),  # 48 columns: no power of two
    ("fp8_block_64x32", BF16),  # four scales in a tile of the intermediate
    ("fp8_block_256x256", BF16),  # more columns than a tile
    ("fp8_block_ue8m0", BF16),
]
# weights that are decoded; HIDDEN and INTERMEDIATE have groups of 16, 48 and 80, and short ones of the others. Formats
# of a kind take turns with few and with many expected rows, which choose other tiles; a format alone has both.
DECODED = [
    *(("fp8_w8a16", BF16), ("fp8_w8a16_block", BF16), ("fp8_w8a16_tensor", F16), ("fp8_w8a16_block_16x48", F32)),
    *(("int8_w8a16", BF16), ("int8_w8a16_g16_zp_f32", BF16), ("int8_w8a16_zp", F16), ("int8_w8a16_g48", F16)),
    *(("int4_w4a16", F32), ("int4_w4a16_g16", BF16), ("int4_w4a16_zp", BF16), ("int4_w4a16_g16_zp_f16", F16)),
    *(("mxfp4_w4a16", BF16), ("mxfp4_w4a16", F16), ("nvfp4_w4a16", F32), ("nvfp4_w4a16", BF16)),
    *(("nvfp4_w4a16_divisor", F16), ("mxfp8_w8a16", BF16), ("mxfp8_w8a16", BF16)),
]
# tokens of 8 bits and below, other than fp8 with float32 scales for weights in fp8; as above
NARROW_TOKENS = [
    *(("int8_token", BF16), ("int8_token", BF16), ("int8_block", F16), ("int8_block_32x48", BF16)),
    *(("int4_w4a8", F32), ("int4_w4a8_g48", BF16), ("int4_w4a8_g16_zp_f16", F16), ("nvfp4_divisor", F32)),
    *(("nvfp4", BF16), ("mxfp8", BF16), ("mxfp8", BF16), ("mxfp4_w4a8", F16), ("mxfp4_w4a8", F16)),
]
GPT = {"activation": GPT_OSS}
UNLIMITED = ACTIVATIONS["swiglu-unlimited"]
SCALES = ("w13_output_scale", "w13_gate_output_scale", "w2_output_scale")
WIDE = {"hidden": 144, "intermediate": 144 if DEVICE.type == "cpu" else 1328}
Options = dict[str, Any]


def narrow(scheme: str) -> Options:
    """Options of a case: the sizes that groups of this scheme divide."""
    return GPT | ({"hidden": 144, "intermediate": 48} if "48" in scheme else {})


CASES: list[tuple[str, torch.dtype, Layout, Options]] = [
    *((*form, LAYOUTS[number % 3], {}) for number, form in enumerate(FORMATS)),
    *((scheme, BF16, layout, {}) for scheme in ("fp8_token", "fp8_block_64x32") for layout in LAYOUTS[1:]),
    *((*form, Layout.BATCHED, narrow(form[0])) for form in DECODED[::2]),
    *((*form, Layout.COMPACT, narrow(form[0]) | {"expected_rows": 500}) for form in DECODED[1::2]),
    *((*form, Layout.FLAT, narrow(form[0])) for form in NARROW_TOKENS[::2]),
    *((*form, Layout.BATCHED, narrow(form[0]) | {"expected_rows": 500}) for form in NARROW_TOKENS[1::2]),
    *(
        ("none", F32, Layout.COMPACT, {"activation": activation, "up_first": activation.kind.gated})
        for name, activation in ACTIVATIONS.items()
        if name != "silu"
    ),
    *(
        ("fp8_block", BF16, Layout.COMPACT, {"activation": activation})
        for name, activation in ACTIVATIONS.items()
        if name in ("relu2", "gpt-oss")
    ),
    *(  # sizes that are no multiple of 16
        (scheme, BF16, Layout.COMPACT, {"hidden": 51, "intermediate": 37})
        for scheme in ("none", "fp8_token", "fp8_block_16x16", "int8_w8a16", "mxfp8")
    ),
    *(  # numbers of each expert
        (scheme, BF16, layout, {"activation": dataclasses.replace(UNLIMITED, limit=limit), "own": tuple(OWN)})
        for scheme in ("none", "fp8_token", "fp8_block")
        for layout, limit in ((Layout.COMPACT, None), (Layout.FLAT, 0.3))
    ),
    *(("none", BF16, Layout.COMPACT, {"activation": UNLIMITED, "own": (name,)}) for name in OWN),
    *(
        (scheme, BF16, Layout.COMPACT, {"activation": ACTIVATIONS[name], "own": own, "up_first": True})
        for scheme, name, own in (
            ("none", "gpt-oss", (*SCALES, "limit")),
            ("fp8_token", "gelu", SCALES),
            ("nvfp4_w4a16", "silu", SCALES),
            ("mxfp4_w4a16", "gpt-oss", (*SCALES, "limit")),
        )
    ),
    ("fp8_tensor", BF16, Layout.BATCHED, {"activation": ACTIVATIONS["relu2"], "own": SCALES[::2]}),
    *(  # every size of tile
        (scheme, BF16, Layout.BATCHED, GPT | WIDE | {"expected_rows": rows})
        for scheme, every in (("none", (1, 24, 500)), ("fp8_block", (12, 100)))
        for rows in every
    ),
    *(
        (scheme, BF16, layout, {"static": True, "biased": False})
        for scheme, layout in (*(("fp8_tensor", layout) for layout in LAYOUTS), ("fp8_tensor_channel", Layout.COMPACT))
    ),
    *(  # sizes that no tile divides
        (scheme, BF16, Layout.COMPACT, GPT | {"hidden": hidden, "intermediate": 192 if hidden == 16 else 16})
        for scheme, hidden in (("none", 16), ("none", 272), ("fp8_block", 16), ("fp8_block", 400))
    ),
    *(  # one scale for all columns of a tile
        ("fp8_block", BF16, Layout.COMPACT, {"hidden": 160, "intermediate": 256, "biased": False, "expected_rows": n})
        for n in (5, 100)
    ),
]


@pytest.mark.parametrize(
    ("scheme", "dtype", "layout", "options"), CASES, ids=lambda value: None if isinstance(value, dict) else str(value)
)
def test_equals_the_torch_experts(scheme: str, dtype: torch.dtype, layout: Layout, options: Options) -> None:
    named = dict(options)
    activation, rows = named.pop("activation", SILU), named.pop("expected_rows", 5)
    own, up_first = named.pop("own", ()), named.pop("up_first", False)
    case = make_case(scheme, dtype, activation, **named).with_own(*own).with_weights(up_first=up_first)
    assert_equals_torch(case, activation, case.batch(layout, rows))


@pytest.mark.parametrize(
    ("scheme", "layout"),
    [*(("int4_w4a16_g16", layout) for layout in Layout), ("int4_w4a8_g16", Layout.FLAT)],
    ids=lambda value: value.value if isinstance(value, Layout) else value,
)
def test_columns_of_w13_in_an_order_of_each_expert(
    scheme: str, layout: Layout, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Act-order: the same as weights whose columns have been put back, and told once. Rows are copied in portions."""
    case, random = make_case(scheme, torch.float32), torch.Generator().manual_seed(3)
    order = torch.stack([torch.randperm(HIDDEN, generator=random) for _ in range(EXPERTS)]).to(DEVICE)
    stored = case.weights
    case = dataclasses.replace(case, weights=dataclasses.replace(stored, w13_order=order))
    batch = case.batch(layout)
    monkeypatch.setattr(column_order, "_PORTION_BYTES", 8 * HIDDEN * 3)
    column_order.warn_slow.cache_clear()
    assert_equals_torch(case, SILU, batch)
    assert [record.levelname for record in caplog.records if "act-order" in record.getMessage()] == ["WARNING"]
    real = dequantize_weight(stored.w13, stored.scheme)
    put_back = torch.empty_like(real).scatter_(2, order.unsqueeze(1).expand_as(real), real)
    plain_w13, plain_w2 = StoredMatrix(put_back), StoredMatrix(dequantize_weight(stored.w2, stored.scheme))
    if scheme == "int4_w4a16_g16":
        plain = dataclasses.replace(stored, scheme=get_scheme("none"), w13=plain_w13, w2=plain_w2)
        there = dataclasses.replace(batch, scheme=get_scheme("none"))
        used = slice(None) if layout is Layout.FLAT else used_rows(batch)
        expected, found = ReferenceExperts(SILU)(there, plain)[used], ReferenceExperts(SILU)(batch, case.weights)[used]
        assert worst_row_error(found, expected) < ROW_ERROR_LIMITS["float32"]
    with pytest.raises(ValueError, match=r"w13_order is \(.*\) torch.int64"):
        dataclasses.replace(case.weights, w13_order=order[:, 1:])


@pytest.mark.parametrize(
    ("scheme", "dtype", "hidden", "loads"),
    thinned(
        [
            *(("nvfp4_w4a16", BF16, 320, "words"), ("nvfp4_w4a16", BF16, 336, "shifted")),
            *(("mxfp4_w4a16", F16, 352, "shifted"), ("mxfp4_w4a16", BF16, 288, "shifted")),
            *(("int4_w4a16_g32_zp_f16", F16, 384, "words"), ("int4_w4a16_g32", BF16, 320, "words")),
            *(("mxfp8_w8a16", BF16, 192, "shifted"), ("mxfp8", BF16, 256, "words")),
            *(("int4_w4a16_g128", BF16, 512, "words"), ("int4_w4a16_g128_zp", BF16, 640, "shifted")),
        ]
    ),
)
def test_scales_are_loaded_in_words(scheme: str, dtype: torch.dtype, hidden: int, loads: str) -> None:
    case = make_case(scheme, dtype, hidden=hidden, intermediate=128 if "g128" in scheme else 32, ids=TOPK_IDS)
    batch, stored = case.batch(Layout.COMPACT), case.weights.scheme.weight
    shape = CallShape.of(batch, case.weights, SILU)
    tiles = TritonGemms().default_tiles(shape)
    tiles = dataclasses.replace(tiles, first=dataclasses.replace(tiles.first, block_k=128 * stored.packed))
    assert group_loads(shape, tiles.first, hidden, stored.scale_dtype) == loads
    assert_equals_torch(case, SILU, batch, tiles=tiles)


@pytest.mark.parametrize(
    ("scheme", "block_m", "block_n"),
    [
        *((scheme, *tile) for scheme in ("mxfp4_w4a8", "nvfp4", "int8_w8a16") for tile in ((16, 16), (64, 128))),
        *((scheme, *tile) for scheme in ("int4_w4a8_g128", "mxfp8") for tile in ((64, 32), (16, 64))),
    ],
)
def test_intermediate_in_the_order_of_decoded_weights(scheme: str, block_n: int, block_m: int) -> None:
    """Stored in tiles of few and of many rows and columns, by either GEMM's kernel or by one between them."""
    sizes = {"hidden": 128, "intermediate": 128} if scheme.endswith("g128") else {"hidden": 96, "intermediate": 80}
    case, block_k = make_case(scheme, torch.bfloat16, GPT_OSS, **sizes), 64 * get_scheme(scheme).weight.packed
    gemm = GemmTiles(block_n=max(block_n, get_scheme(scheme).weight.group_width % 128), block_k=block_k, swap=True)
    tiles = ExpertTiles(block_m=block_m, first=gemm, second=dataclasses.replace(gemm, block_n=64))
    batch = case.batch(Layout.COMPACT)
    shape = CallShape.of(batch, case.weights, GPT_OSS)
    assert inner_order(shape, tiles) == get_scheme(scheme).weight.packed
    assert inner_width(shape, tiles) % block_k == 0
    assert_equals_torch(case, GPT_OSS, batch, tiles=tiles)


@pytest.mark.parametrize(
    ("scheme", "layout"),
    thinned(
        [
            *(("none", Layout.COMPACT), ("mxfp8", Layout.BATCHED), ("int4_w4a8_g48", Layout.FLAT)),
            *(("int4_w4a16_g16_zp_f16", Layout.COMPACT), ("fp8_token", Layout.BATCHED), ("mxfp4_w4a16", Layout.FLAT)),
        ]
    ),
)
def test_interleaved_rows_of_gate_and_up(scheme: str, layout: Layout) -> None:
    """The bits of the same rows apart, and the torch experts' result."""
    sizes = {"hidden": 144, "intermediate": 48} if "48" in scheme else {}
    own = ("w13_output_scale", "w13_gate_output_scale", "limit")
    dtype = torch.float32 if scheme == "none" else torch.bfloat16
    case = make_case(scheme, dtype, GPT_OSS, **sizes).with_own(*own)
    apart, batch = case.weights, case.batch(layout)
    turned = dataclasses.replace(
        apart, w13=apart.w13.map(lambda part: interleaved(part)), w13_bias=interleaved(apart.w13_bias), alternating=True
    )
    assert_equals_torch(dataclasses.replace(case, weights=turned), GPT_OSS, batch)
    used = slice(None) if layout is Layout.FLAT else used_rows(batch)
    for experts in (create_experts("triton", GPT_OSS, DEVICE), ReferenceExperts(GPT_OSS)):
        assert_same_bits(experts(batch, turned)[used], experts(batch, apart)[used], type(experts).__name__)


def test_rows_that_cannot_be_interleaved() -> None:
    case = make_case("fp8_block", torch.bfloat16)
    batch = case.batch(Layout.COMPACT)
    for weights, activation, words in (
        (dataclasses.replace(case.weights, alternating=True), SILU, "alternating, .* has scales of 128 rows"),
        (dataclasses.replace(case.weights, alternating=True, up_first=True), SILU, "alternating and up_first"),
        (dataclasses.replace(case.weights, alternating=True), ACTIVATIONS["relu2"], "without an up half"),
    ):
        for experts in (create_experts("triton", activation, DEVICE), ReferenceExperts(activation)):
            with pytest.raises(ValueError, match=words):
                experts(batch, weights)


@pytest.mark.parametrize("pool", ["flat", "batched"])
@pytest.mark.parametrize("scheme", ["none", "fp8_token", "fp8_block"])
def test_rows_gathered_from_a_pool(scheme: str, pool: str) -> None:
    case = make_case(scheme, torch.bfloat16)
    compact, gathered = case.gathered(pool)
    experts, used = create_experts("triton", SILU, DEVICE), used_rows(compact)
    out = experts(gathered, case.weights, out=torch.full((*used.shape, HIDDEN), math.nan, dtype=case.dtype).to(DEVICE))
    assert_same_bits(out[used], experts(compact, case.weights)[used], pool)
    assert bool(out[~used].isnan().all())


def test_rows_that_lie_apart() -> None:
    """As a transport returns them: a view of rows that hold more than their values."""
    case = make_case("fp8_block", torch.bfloat16)
    batch = case.batch(Layout.FLAT)
    wide = torch.zeros(batch.x.shape[0], batch.hidden + 64, dtype=torch.uint8, device=DEVICE)
    wide[:, : batch.hidden] = batch.x.view(torch.uint8)
    apart = dataclasses.replace(batch, x=wide[:, : batch.hidden].view(batch.x.dtype))
    assert not apart.x.is_contiguous()
    assert_same_bits(
        create_experts("triton", SILU, DEVICE)(apart, case.weights),
        create_experts("triton", SILU, DEVICE)(batch, case.weights),
        "rows apart",
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("ids", [[], [[-1, -1]] * 3], ids=["no-rows", "no-experts"])
def test_no_tokens(ids: list[list[int]], layout: Layout) -> None:
    case = make_case("fp8_block", torch.bfloat16, ids=ids)
    batch = case.batch(layout)
    out = torch.full(batch.output_shape, math.nan, dtype=case.dtype, device=DEVICE)
    create_experts("triton", SILU, DEVICE)(batch, case.weights, out=out)
    expected = torch.zeros_like(out) if layout is Layout.FLAT else torch.full_like(out, math.nan)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "scheme", thinned(["none", "fp8_token", "fp8_block", "int8_token", "int4_w4a8", "mxfp8", "nvfp4"])
)
def test_a_nan_stays_in_its_row(scheme: str) -> None:
    case = make_case(scheme, torch.bfloat16)
    clean, batch = case.batch(Layout.COMPACT), case.batch(Layout.COMPACT)
    bad = int(batch.expert_row_start[3]) + 5
    mask = torch.zeros(batch.x.shape[0], dtype=torch.bool, device=DEVICE)
    mask[bad] = True
    if batch.scale is None:
        fill_with_nan(batch.x, mask)
    else:  # where `quantize` leaves it; the interpreter reads a NaN of e4m3 as 480
        fill_with_nan(batch.scale, mask)
    y, expected = (create_experts("triton", SILU, DEVICE)(b, case.weights) for b in (batch, clean))
    used = used_rows(batch) & ~mask
    assert bool(y[bad].isnan().all())
    assert_same_bits(y[used], expected[used], "other rows")


@pytest.mark.parametrize("counts", [[3, 0, 40, 16, 17, 0], [17] * 6], ids=["some", "most"])
def test_tile_list(counts: list[int]) -> None:
    block = 16
    owners = [expert for expert, count in enumerate(counts) for _ in range(math.ceil(count / block))]
    _, tiles = list_tiles(torch.tensor(counts, dtype=torch.int32, device=DEVICE), 12, block)
    assert tiles.num_tiles.tolist() == [len(owners)]
    assert tiles.tile_expert.tolist()[: len(owners)] == owners
    assert tiles.first_tile.tolist() == [
        owners.index(e) if e in owners else sum(o < e for o in owners) for e in range(6)
    ]
    assert (tiles.amax.tolist(), tiles.next_tile.tolist()) == ([0] * 6, [0, 0])


@pytest.mark.parametrize(("counts", "rows"), [([3, 0, 40, 16, 17, 0], 96), ([17] * 6, 102), ([1] * 6, 6)])
def test_most_tiles(counts: list[int], rows: int) -> None:
    """As many as the counts need, from shapes alone, in rows together and in rows apart."""
    case = make_case(biased=False)
    shape = CallShape.of(case.batch(Layout.COMPACT), case.weights, SILU)
    needed = sum(math.ceil(count / 16) for count in counts)
    together = dataclasses.replace(shape, num_experts=6, max_rows=rows)
    apart = dataclasses.replace(together, max_rows=max(counts), rows_apart=True)
    assert needed <= together.max_tiles(16) <= rows
    assert apart.max_tiles(16) == 6 * math.ceil(max(counts) / 16)


def test_between_the_gemms() -> None:
    named = {
        "none": Between.ROUND,
        "fp8_token": Between.TOKEN,
        "fp8_tensor": Between.TENSOR,
        "fp8_block": Between.GROUP,
        "fp8_block_32x48": Between.WIDE_GROUP,
        "fp8_block_256x256": Between.WIDE_GROUP,
        "fp8_block_ue8m0": Between.GROUP,
        "int8_token": Between.TOKEN,
        "int8_block": Between.GROUP,
        "mxfp4_w4a8": Between.MXFP8,
        "nvfp4_divisor": Between.NVFP4,
        "int4_w4a8_g128": Between.TOKEN,
        "nvfp4_w4a16": Between.ROUND,
    }
    assert {name: Between.of(get_scheme(name), 128, static=False) for name in named} == named
    assert Between.of(get_scheme("fp8_tensor"), 128, static=True) is Between.STATIC
    assert Between.of(get_scheme("fp8_block"), 64, static=False) is Between.WIDE_GROUP
    fused = [Between.ROUND, Between.GROUP, Between.STATIC, Between.MXFP8]
    assert [between for between in Between if between.fused] == fused


def test_calls_of_one_shape_are_prepared_once() -> None:
    case = make_case("fp8_block", torch.bfloat16)
    experts, batch = create_experts("triton", SILU, DEVICE), case.batch(Layout.COMPACT)
    first = experts.prepare(batch, case.weights)
    other = dataclasses.replace(batch, x=batch.x.clone(), expert_num_tokens=batch.expert_num_tokens.clone())
    assert experts.prepare(other, case.weights) is first
    assert experts.prepare(dataclasses.replace(batch, expected_rows=500), case.weights) is not first
    assert experts.prepare(case.batch(Layout.BATCHED), case.weights) is not first


@pytest.mark.parametrize(
    ("name", "layout", "static"),
    [
        pytest.param("fp8_block", Layout.COMPACT, False, id="compact"),
        pytest.param("fp8_tensor", Layout.FLAT, False, id="flat-amax"),
        pytest.param("fp8_tensor", Layout.BATCHED, True, id="batched-static"),
        pytest.param("int4_w4a16_zp", Layout.FLAT, False, id="flat-zero-points"),
    ],
)
def test_a_repeated_call_passes_the_addresses_of_a_first(name: str, layout: Layout, static: bool) -> None:
    case = make_case(name, torch.bfloat16, static=static)
    experts, batch = create_experts("triton", SILU, DEVICE), case.batch(layout)
    copies = {field: getattr(batch, field).clone() for field in ("expert_row_start", "expert_num_tokens")}
    batch = dataclasses.replace(batch, **copies)  # aligned to 16 bytes
    out = torch.empty(batch.output_shape, dtype=case.dtype, device=DEVICE)
    recorders = recorded(experts.prepare(batch, case.weights).sequence)
    for _ in range(2):
        experts(batch, case.weights, out=out)
    assert [recorder.repeated for recorder in recorders] == [recorder.first for recorder in recorders]
    assert all(recorder.first for recorder in recorders)


def test_experts_keep_no_weights_alive() -> None:
    case = make_case("fp8_block", torch.bfloat16)
    experts, batch = create_experts("triton", SILU, DEVICE), case.batch(Layout.COMPACT)
    weights = dataclasses.replace(case.weights, w13=case.weights.w13.map(torch.clone))
    experts(batch, weights)
    kept = weakref.ref(weights.w13.values)
    del weights
    gc.collect()
    assert kept() is None
    assert_equals_torch(case, SILU, batch)


def test_columns_of_another_group_do_not_count() -> None:
    """Groups of 48 in blocks of 64, some with values a hundred times as large as their neighbors'."""
    case = make_case("fp8_block_32x48", torch.bfloat16, biased=False)
    scheme = case.weights.scheme
    w13, w2 = (dequantize_weight(matrix, scheme) for matrix in (case.weights.w13, case.weights.w2))
    loud = torch.arange(INTERMEDIATE, device=DEVICE) % 96 >= 48
    w13[:, INTERMEDIATE:][:, loud] *= 100
    w2[:, :, loud] /= 100
    weights = ExpertWeights(w13=quantize_weight(w13, scheme), w2=quantize_weight(w2, scheme), scheme=scheme)
    loud_case = dataclasses.replace(case, weights=weights)
    assert_equals_torch(loud_case, SILU, loud_case.batch(Layout.COMPACT))


def test_rows_without_a_token_have_no_part_in_a_scale() -> None:
    case = make_case("fp8_tensor", torch.bfloat16)
    counts = case.batch(Layout.COMPACT).expert_num_tokens
    rows, tiles = list_tiles(counts, 8, 16)
    inner = torch.full((8 * 16, INTERMEDIATE), 1e6, device=DEVICE)
    wanted = torch.zeros(EXPERTS, device=DEVICE)
    for expert, (first, count) in enumerate(zip(tiles.first_tile.tolist(), counts.tolist(), strict=True)):
        inner[first * 16 : first * 16 + count] = torch.randn(count, INTERMEDIATE, device=DEVICE) * (expert + 1)
        wanted[expert] = inner[first * 16 : first * 16 + count].abs().max() if count else 0
    groups = RowGroups(BLOCK_M=16, ROWS=8, BLOCK=next_power_of_2(INTERMEDIATE))
    pieces = as_constants(groups, _expert_amax_kernel, "PIECES")
    _expert_amax_kernel[(3,)](Stored(inner, None), rows, tiles, INTERMEDIATE, PIECES=pieces)
    assert_same_bits(tiles.amax.view(torch.float32), wanted, "amax")


def test_tensors_that_are_not_packed() -> None:
    """Every other element of a wider tensor, or one element for all: as the torch experts accept them."""
    case = make_case("fp8_tensor", torch.bfloat16, static=True)
    batch = case.batch(Layout.COMPACT)

    def apart(tensor: torch.Tensor | None) -> torch.Tensor:
        assert tensor is not None
        wide = torch.full((*tensor.shape, 2), 77, dtype=tensor.dtype, device=DEVICE)
        wide[..., 0] = tensor
        return wide[..., 0]

    spread = dataclasses.replace(
        batch, expert_row_start=apart(batch.expert_row_start), expert_num_tokens=apart(batch.expert_num_tokens)
    )
    held, names = case.weights, ("w13_bias", "w2_bias", "w2_input_scale")
    w13, w2 = (dataclasses.replace(matrix, scale=apart(matrix.scale)) for matrix in (held.w13, held.w2))
    weights = dataclasses.replace(held, w13=w13, w2=w2, **{name: apart(getattr(held, name)) for name in names})
    assert_equals_torch(dataclasses.replace(case, weights=weights), SILU, spread)
    one_scale = dataclasses.replace(case.weights, w2_input_scale=torch.tensor([0.01], device=DEVICE).expand(EXPERTS))
    assert_equals_torch(dataclasses.replace(case, weights=one_scale), SILU, batch)
    out = torch.full((HIDDEN, batch.x.shape[0]), 7.0, dtype=case.dtype, device=DEVICE).t()
    assert create_experts("triton", SILU, DEVICE)(batch, case.weights, out=out) is out
    used = used_rows(batch)
    assert_same_bits(
        out[used], create_experts("triton", SILU, DEVICE)(batch, case.weights)[used], "out that is not contiguous"
    )
    assert bool((out[~used] == 7).all())


@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "int8_w8a16_g16_zp_f16"])
def test_weights_at_any_address(scheme: str) -> None:
    case = make_case(scheme, torch.float16)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        one_further = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=DEVICE)[1:]
        return one_further.view(tensor.shape).copy_(tensor)

    w13, w2 = case.weights.w13.map(moved), case.weights.w2.map(moved)
    weights = dataclasses.replace(case.weights, w13=w13, w2=w2)
    assert weights.w13.values.data_ptr() % 16 == 1
    assert_equals_torch(dataclasses.replace(case, weights=weights), SILU, case.batch(Layout.COMPACT))


def test_scales_that_do_not_go_together() -> None:
    per_token, per_block = get_scheme("fp8_token").payload, get_scheme("fp8_block").weight
    scheme = QuantScheme(name="mixed", payload=per_token, activation=per_token, weight=per_block)
    case = make_case("fp8_block", torch.bfloat16)
    mixed = dataclasses.replace(case.weights, scheme=scheme)
    batch = dataclasses.replace(
        case.batch(Layout.COMPACT),
        scheme=scheme,
        scale=torch.ones(case.batch(Layout.COMPACT).x.shape[0], 1, device=DEVICE),
    )
    with pytest.raises(ValueError, match="weights per block and activations per token"):
        create_experts("triton", SILU, DEVICE)(batch, mixed)


def test_tiles_of_our_own_choice() -> None:
    tiles = ExpertTiles(
        block_m=16,
        first=GemmTiles(block_n=64, block_k=32, swap=True),
        second=GemmTiles(block_n=32, block_k=16),
        group_m=1,
    )
    case = make_case("fp8_block_64x32", torch.bfloat16)
    assert_equals_torch(case, SILU, case.batch(Layout.COMPACT), tiles=tiles)
    crossing = dataclasses.replace(tiles, second=GemmTiles(block_n=32, block_k=64))
    with pytest.raises(ValueError, match=r"block_k \(64\) of the second GEMM does not divide the 32 columns"):
        KernelExperts(SILU, [TritonGemms()], tiles=crossing)(case.batch(Layout.COMPACT), case.weights)


@pytest.mark.parametrize(("scheme", "gemm"), [("mxfp8", {"block_n": 16}), ("mxfp4_w4a8", {"block_k": 16})])
def test_tiles_that_cut_a_group_of_a_row(scheme: str, gemm: dict[str, int]) -> None:
    case = make_case(scheme, torch.bfloat16)
    tiles = ExpertTiles(block_m=16, first=GemmTiles(**gemm), second=GemmTiles())
    with pytest.raises(ValueError, match=r"\(16\).* of the first GEMM are not multiples of the 32 columns"):
        KernelExperts(SILU, [TritonGemms()], tiles=tiles)(case.batch(Layout.COMPACT), case.weights)


def test_tiles_of_a_user_s_table(tmp_path: Path) -> None:
    """The table of this shape in the folder is used, by rows; steps that cross a scale are an error that names it."""
    case = make_case("fp8_block", torch.bfloat16)
    device = "cpu" if DEVICE.type == "cpu" else torch.cuda.get_device_name(DEVICE)
    path = tmp_path / device.replace(" ", "_") / table_name(INTERMEDIATE, HIDDEN, device, "fp8_block")
    path.parent.mkdir()
    gemm = {"BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "SWAP_AB": True, "num_warps": 2, "num_stages": 2}
    few = {"BLOCK_SIZE_M": 32, "GROUP_SIZE_M": 1, "first": {**gemm, "PROGRAMS_PER_SM": 1}}
    few["second"] = {**gemm, "PROGRAMS_PER_SM": 2}
    path.write_text(json.dumps({"4": few, "8": {**few, "BLOCK_SIZE_M": 16}}))
    experts = KernelExperts(SILU, [TritonGemms()], tiles=tmp_path)
    chosen = [
        experts.choose_backend(CallShape.of(case.batch(Layout.COMPACT, rows), case.weights, SILU))[1] for rows in (4, 5)
    ]
    assert [tiles.block_m for tiles in chosen] == [32, 16]
    assert (chosen[0].group_m, chosen[0].first.num_warps, chosen[0].second.programs_per_sm) == (1, 2, 2)
    assert_equals_torch(case, SILU, case.batch(Layout.COMPACT), tiles=tmp_path)
    default = create_experts("triton", SILU, DEVICE).choose_backend(
        CallShape.of(case.batch(Layout.COMPACT), case.weights, SILU)
    )[1]
    assert default == default_table(torch.float8_e4m3fn, gated=True, group_k=128, whole_blocks=False).choose(5)
    few["second"]["BLOCK_SIZE_K"] = 256
    other = tmp_path / "other"
    (other / path.parent.name).mkdir(parents=True)
    (other / path.parent.name / path.name).write_text(json.dumps({"4": few}))
    with pytest.raises(
        ValueError, match=r"fp8_block\.json: block_k \(256\) of the second GEMM does not divide the 128"
    ):
        KernelExperts(SILU, [TritonGemms()], tiles=other)(case.batch(Layout.COMPACT), case.weights)


def test_stages_fit_the_shared_memory() -> None:
    tiles = default_table(torch.bfloat16, gated=True).choose(500)
    assert fit_stages(tiles, 232448, 16, 16, gated=True) == tiles
    a100, l40 = (fit_stages(tiles, size, 16, 16, gated=True, warp_groups=False) for size in (166912, 101376))
    assert [t.first.num_stages for t in (a100, l40)] == [4, 3]  # one of them in registers
    assert [t.second.num_stages for t in (a100, l40)] == [3, 3]
    with pytest.raises(RuntimeError, match="stage of 49152 bytes, beside 2048, .* do not fit the 49152 bytes"):
        fit_stages(tiles, 49152, 16, 16, gated=True)
    packed = default_table(torch.float16, gated=True, weight_bits=4).choose(500)
    assert fit_stages(packed, 232448, 16, 4, gated=True) == packed
    one_by_one = fit_stages(packed, 232448, 16, 4, gated=True, rearranged=True)  # three would need 233472 bytes
    assert [one_by_one.first.num_stages, one_by_one.second.num_stages] == [2, 2]


def default_tiles(shared: int) -> Iterator[tuple[Any, int, dict[str, Any], Any]]:
    """The default tiles of a GPU with so many bytes of shared memory, of all formats and sizes.

    Yields tiles, bits of a row's value, facts of the format, and a label.
    """
    widths = {torch.bfloat16: 16, torch.float8_e4m3fn: 8, torch.int8: 8, torch.float32: 32}
    for dtype, bits in widths.items():
        kinds = [(0, False)] + ([(4, False), (8, True), (8, False)] if dtype == torch.bfloat16 else [])
        for (weight_bits, fp8), gated, rows in itertools.product(kinds, (True, False), (4, 16, 32, 64, 128, 256)):
            facts = {"gated": gated, "weight_bits": weight_bits, "fp8_weights": fp8}
            tiles = default_table(dtype, shared_kib=shared // 1024, **facts).choose(rows)
            yield tiles, bits, facts, (dtype, facts, rows)


@pytest.mark.parametrize(("capability", "shared"), [((8, 0), 166912), ((8, 9), 101376), ((12, 0), 101376)])
def test_default_tiles_fit_smaller_gpus_as_they_are(capability: tuple[int, int], shared: int) -> None:
    """No default tile of another GPU than Hopper's and Blackwell's loses a stage."""
    device = dataclasses.replace(Device.of(torch.device("cpu")), capability=capability, shared_bytes=shared)
    for tiles, bits, facts, label in default_tiles(shared):
        gated, weight_bits, fp8 = facts.values()
        fitted = fit_stages(
            tiles,
            device.shared_bytes,
            bits,
            weight_bits or bits,
            gated=gated,
            paired=weight_bits > 0 and not fp8,
            warp_groups=device.warp_groups,
        )
        assert fitted == tiles, label


@pytest.mark.parametrize("shared", [65536, 163840])
def test_default_tiles_fit_amd_gpus(shared: int) -> None:
    """At least with fewer stages; weights are decoded one by one there, and packed ones pass through shared memory."""
    for tiles, bits, facts, label in default_tiles(shared):
        gated, weight_bits, _ = facts.values()
        decoding = {"rearranged": weight_bits == 4, "warp_groups": False}
        fitted = fit_stages(tiles, shared, bits, weight_bits or bits, gated=gated, **decoding)
        assert fitted.first.num_stages >= 2, label
        assert fitted.second.num_stages >= 2, label


def test_a_table_that_does_not_fit_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """Its tiles are replaced by the defaults, which is said once; tiles without a table are an error."""
    case = make_case("none", torch.bfloat16)
    shape = CallShape.of(case.batch(Layout.COMPACT), case.weights, SILU)
    wide = GemmTiles(block_n=256, block_k=256, num_stages=2)
    tiles = ExpertTiles(block_m=128, first=wide, second=wide)
    small = dataclasses.replace(Device.of(torch.device("cpu")), capability=(8, 9), shared_bytes=101376)
    log_once.cache_clear()
    with mock.patch.object(Device, "of", return_value=small), caplog.at_level(logging.INFO, logger="ep_moe.experts"):
        for _ in range(2):
            assert TritonGemms().tiles(shape, tiles, "other.json") == TritonGemms().default_tiles(shape)
        with pytest.raises(RuntimeError, match="do not fit the 101376 bytes"):
            TritonGemms().tiles(shape, tiles)
    assert [r.message for r in caplog.records if "other.json: tiles for another GPU are not used" in r.message] == [
        caplog.records[0].message
    ]


def test_layers_that_compute_alike_share_what_is_prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, case = create_experts("triton", SILU, DEVICE), make_case()
    assert create_experts("triton", SILU, DEVICE) is first
    assert create_experts("triton", GPT_OSS, DEVICE) is not first
    monkeypatch.setenv("EP_MOE_TILES_DIR", str(tmp_path))
    assert create_experts("triton", SILU, DEVICE) is not first
    monkeypatch.delenv("EP_MOE_TILES_DIR")
    tiles = ExpertTiles(block_m=16, first=GemmTiles(), second=GemmTiles())
    chosen = create_experts("triton", SILU, DEVICE, tiles=tiles)
    assert create_experts("triton", SILU, DEVICE, tiles=dataclasses.replace(tiles)) is chosen
    assert (chosen.tiles, create_experts("triton", SILU, DEVICE).tiles) == (tiles, None)
    batch = case.batch(Layout.COMPACT)
    doubled = dataclasses.replace(case.weights, w2=case.weights.w2.map(lambda values: 2 * values), w2_bias=None)
    plain = dataclasses.replace(case.weights, w2_bias=None)
    prepare = mock.Mock(wraps=PreparedCall)
    monkeypatch.setattr("ep_moe.experts.kernels.PreparedCall", prepare)
    used = used_rows(batch)
    y, twice = (create_experts("triton", SILU, DEVICE)(batch, weights)[used] for weights in (plain, doubled))
    assert torch.equal(twice, 2 * y)
    assert prepare.call_count == 1


def test_auto_and_names() -> None:
    assert experts_name(create_experts("triton", SILU, DEVICE)) == "triton"
    hopper = DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE) == (9, 0)
    wanted = "torch" if DEVICE.type == "cpu" else "hopper" if hopper else "triton"
    assert experts_name(create_experts("auto", SILU, DEVICE)) == wanted
