"""Merging, placing, packing and the weighted sum: kernel against torch, bit for bit, including unwritten memory."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from helpers.sampling import thinned

from ep_moe.config import Layout
from ep_moe.kernel_launch.sequence import LaunchSequence
from ep_moe.kernels.gemm.arguments import TileList
from ep_moe.layout import Packed, TokenRows, reference, triton
from ep_moe.layout.base import ADDRESSED, PackingSizes
from ep_moe.local_moe.routed import RoutedPacking
from ep_moe.local_moe.start import start_of
from ep_moe.quant import Quantized, QuantScheme, TensorFormat, as_bytes, get_scheme, quantize
from ep_moe.testing import assert_same_bits, poisoned_memory
from interpreted.common import DEVICE, generator, random_payload, strided
from interpreted.repeating import recorded


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Received rows of tokens. `ids` is "random" (a third -1), "none", "one" (all to the last expert)."""

    tokens: int
    topk: int
    experts: int
    hidden: int = 48
    dtype: torch.dtype = torch.bfloat16
    groups: int = 0
    ids: str = "random"
    alignment: int = 16
    gap: int = 0  # elements between rows
    scale_dtype: torch.dtype = torch.float32


CASES = {
    "no_tokens": Case(tokens=0, topk=3, experts=5, groups=2),
    "one_token_one_expert": Case(tokens=1, topk=1, experts=1),
    "one_token": Case(tokens=1, topk=8, experts=17, groups=1, dtype=torch.float32),
    "several_blocks": Case(tokens=40, topk=9, experts=5, hidden=16, alignment=4),
    "blocks_of_one_token": Case(tokens=20, topk=33, experts=300, hidden=16, alignment=1),
    "all_to_one": Case(tokens=70, topk=2, experts=17, ids="one", dtype=torch.float16),
    "nobody": Case(tokens=9, topk=4, experts=5, ids="none", groups=2),
    "no_experts": Case(tokens=9, topk=4, experts=0, ids="none", groups=2, gap=16),
    "fp8_wire": Case(tokens=23, topk=5, experts=5, hidden=144, dtype=torch.float8_e4m3fn, groups=2, gap=112),
    "fp8_odd_stride": Case(tokens=5, topk=2, experts=3, hidden=144, dtype=torch.float8_e4m3fn, groups=9, gap=5),
    "int8_token_scale": Case(tokens=11, topk=2, experts=3, hidden=48, dtype=torch.int8, groups=1, alignment=7),
    "mxfp8": Case(
        tokens=7, topk=3, experts=3, dtype=torch.float8_e4m3fn, groups=5, gap=16, scale_dtype=torch.float8_e8m0fnu
    ),
    "nvfp4_wire": Case(
        tokens=9, topk=3, experts=4, hidden=24, dtype=torch.uint8, groups=3, gap=40, scale_dtype=torch.float8_e4m3fn
    ),
    "nvfp4_units_of_8": Case(
        tokens=9, topk=2, experts=4, hidden=24, dtype=torch.uint8, groups=3, scale_dtype=torch.float8_e4m3fn
    ),
    "nvfp4_odd_stride": Case(
        tokens=5, topk=2, experts=3, hidden=24, dtype=torch.uint8, groups=3, gap=4, scale_dtype=torch.float8_e4m3fn
    ),
    "odd_width": Case(tokens=9, topk=3, experts=4, hidden=51, alignment=4),
    "odd_bytes": Case(tokens=9, topk=2, experts=4, hidden=49, dtype=torch.float8_e4m3fn, groups=4, gap=3),
    "several_chunks": Case(tokens=3, topk=2, experts=2, hidden=2880, dtype=torch.float32, gap=4),
    "gpt_oss": Case(tokens=4, topk=4, experts=5, hidden=2880, dtype=torch.float8_e4m3fn, groups=23, alignment=128),
}


def make_ids(case: Case, random: torch.Generator) -> torch.Tensor:
    """Ids [N, K] int32 with repeats."""
    ids = torch.full((case.tokens, case.topk), -1, dtype=torch.int32)
    if case.ids == "random":
        ids = torch.randint(-case.experts // 2, case.experts, ids.shape, generator=random).clamp(min=-1).int()
    if case.ids == "one":
        ids[:, -1] = case.experts - 1
    return ids


def make_rows(name: str) -> TokenRows:
    """The rows of a case, on the CPU."""
    case, random = CASES[name], generator(name)
    ids, weights = reference.merge_repeats(make_ids(case, random), torch.rand(case.tokens, case.topk, generator=random))
    x = random_payload((case.tokens, case.hidden), case.dtype, random)
    scales = random_payload((case.tokens, case.groups + 1), case.scale_dtype, random)
    scale = scales[:, 1:] if case.groups else None
    return TokenRows(
        x=strided(x, gap=case.gap) if case.gap else x, scale=scale, local_topk_ids=ids, topk_weights=weights
    )


def to_device(rows: TokenRows) -> TokenRows:
    """The same rows and row strides on the kernels' device."""
    x = rows.x
    if x.stride(0) != x.shape[1] and x.shape[0] > 1:
        x = x.as_strided((x.shape[0], x.stride(0)), (x.stride(0), 1)).to(DEVICE)[:, : x.shape[1]]
    return TokenRows(
        x=x.to(DEVICE),
        scale=None if rows.scale is None else rows.scale.to(DEVICE),
        local_topk_ids=rows.local_topk_ids.to(DEVICE),
        topk_weights=rows.topk_weights.to(DEVICE),
    )


def assert_same_batch(actual: Packed, expected: Packed) -> None:
    """Compare every tensor, including unwritten elements, and the strides."""
    tensors = ("x", "scale", "expert_row_start", "expert_num_tokens", "row_index")
    assert_same_bits(actual.token_to_row, expected.token_to_row, "token_to_row")
    assert type(actual.batch) is type(expected.batch)
    assert actual.batch.expected_rows == expected.batch.expected_rows
    for name in tensors:
        found, wanted = getattr(actual.batch, name), getattr(expected.batch, name)
        assert (found is None) == (wanted is None), name
        if wanted is not None:
            assert_same_bits(found, wanted, name)
            assert found.stride() == wanted.stride(), name


@pytest.mark.parametrize(
    ("name", "summed_at_a_time", "layout"),
    thinned([*((name, None) for name in CASES), ("several_blocks", 16), ("blocks_of_one_token", 1024)], Layout),
    ids=str,
)
def test_pack(name: str, summed_at_a_time: int | None, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    case, rows = CASES[name], make_rows(name)
    if summed_at_a_time:
        monkeypatch.setattr(triton, "_SUMMED_COUNTS", summed_at_a_time)
    sizes = {
        "scheme": QuantScheme(
            name="any",
            payload=TensorFormat(
                family="scaled", dtype=case.dtype, granularity="group", block=(1, 128), scale_dtype=case.scale_dtype
            ),
        ),
        "dtype": torch.bfloat16,
        "num_local_experts": case.experts,
        "capacity": case.tokens + 2,
        "alignment": case.alignment,
    }
    with poisoned_memory():
        expected = reference.pack(rows, layout, **sizes)
        actual = triton.pack(to_device(rows), layout, **sizes)
        assert_same_batch(actual, expected)
        count = int((rows.local_topk_ids >= 0).sum())
        tight = triton.pack(to_device(rows), layout, **sizes, max_rows=count)
        assert_same_batch(tight, reference.pack(rows, layout, **sizes, max_rows=count))


def test_pack_of_the_same_sizes_in_each_layout() -> None:
    """COMPACT and FLAT batches of 6 rows, copied in both; launches are kept by their sizes."""
    random = generator("alike")
    x, ids = torch.randn(6, 48, generator=random).bfloat16(), torch.arange(6)[:, None].int()
    rows = TokenRows(x=strided(x, gap=8), scale=None, local_topk_ids=ids, topk_weights=torch.ones(6, 1))
    sizes: dict[str, Any] = {"scheme": QuantScheme(name="plain"), "dtype": torch.bfloat16}
    sizes |= {"num_local_experts": 6, "capacity": 6}
    for layout in (*Layout, *Layout):
        with poisoned_memory():
            assert_same_batch(triton.pack(to_device(rows), layout, **sizes), reference.pack(rows, layout, **sizes))


def test_pack_refuses_what_may_not_fit() -> None:
    rows = to_device(make_rows("all_to_one"))
    plain = QuantScheme(name="plain")
    with pytest.raises(ValueError, match=r"may have 70 rows, which exceeds capacity \(69\)"):
        triton.pack(rows, Layout.BATCHED, scheme=plain, dtype=torch.float16, num_local_experts=17, capacity=69)


def test_pack_takes_more_rows_than_an_expert_may_have() -> None:
    """60 rows, each of one expert, of which none has more than 7, go into a batch of 7 rows for each."""
    random = generator("bound")
    ids = torch.arange(9).repeat(7)[:60, None][torch.randperm(60, generator=random)].int()
    x = torch.randn(60, 48, generator=random).bfloat16()
    rows = TokenRows(x=x, scale=None, local_topk_ids=ids, topk_weights=torch.ones(60, 1), max_expert_rows=7)
    sizes = {"scheme": QuantScheme(name="plain"), "dtype": torch.bfloat16, "num_local_experts": 9, "capacity": 7}
    with poisoned_memory():
        actual = triton.pack(dataclasses.replace(to_device(rows), max_expert_rows=7), Layout.BATCHED, **sizes)
        assert_same_batch(actual, reference.pack(rows, Layout.BATCHED, **sizes))
    with pytest.raises(ValueError, match=r"may have 8 rows, which exceeds capacity \(7\)"):
        triton.pack(dataclasses.replace(to_device(rows), max_expert_rows=8), Layout.BATCHED, **sizes)


@pytest.mark.parametrize(("first", "last"), [(0, None), (2, 9), (4, 4)])
@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "dtype"),
    [
        *((*sizes, torch.int32) for sizes in ((0, 3, 5), (300, 7, 5))),
        *((*sizes, torch.int64) for sizes in ((1, 1, 1), (37, 64, 20), (600, 2, 30))),
    ],
)
def test_merge_repeats(tokens: int, topk: int, experts: int, first: int, last: int | None, dtype: torch.dtype) -> None:
    random = generator(f"{tokens} {topk}")
    ids = torch.randint(-1, experts, (tokens, topk + 3), generator=random, dtype=dtype)[:, 1 : topk + 1]
    weights = torch.randn(tokens, topk + 1, generator=random)[:, :topk]
    weights = torch.where(ids < 0, torch.nan, weights)  # of no expert: never read
    expected = reference.merge_repeats(ids, weights, first=first, last=last)
    with poisoned_memory():
        actual = triton.merge_repeats(ids.to(DEVICE), weights.to(DEVICE), first=first, last=last)
    assert_same_bits(actual[0], expected[0], "ids")
    assert_same_bits(actual[1], expected[1], "weights")


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUMS = [  # every way at one size, three ways at others
    *((12, 8, 144, *how) for how in itertools.product(DTYPES, (True, False), (None, torch.float32, torch.bfloat16))),
    *(
        (*sizes, *how)
        for sizes in ((0, 2, 16), (1, 1, 16), (37, 5, 48), (3, 4, 2880), (2, 40, 16))
        for how in zip(DTYPES, (True, True, False), (None, torch.float32, torch.bfloat16), strict=True)
    ),
]


@pytest.mark.parametrize(("tokens", "topk", "hidden", "dtype", "weighted", "shared"), SUMS, ids=str)
def test_weighted_sum(
    tokens: int, topk: int, hidden: int, dtype: torch.dtype, weighted: bool, shared: torch.dtype | None
) -> None:
    """Values that differ by orders of magnitude, so that another order or a fused multiply-add is detected."""
    random = generator(f"{tokens} {topk} {hidden}")
    y = (torch.randn(tokens * topk + 4, hidden, generator=random).exp() * 3).to(dtype)
    rows = torch.randperm(tokens * topk + 4, generator=random)[: tokens * topk].reshape(tokens, topk)
    rows = torch.where(torch.rand(rows.shape, generator=random) < 0.3, -1, rows).int()
    unused = torch.ones(len(y), dtype=torch.bool)
    unused[rows[rows >= 0].long()] = False
    y[unused] = float("nan")
    weights = torch.randn(tokens, topk, generator=random).exp() if weighted else None
    if weights is not None:
        weights = torch.where(rows < 0, torch.nan, weights)
    added = None if shared is None else torch.randn(tokens, hidden + 16, generator=random).to(shared)[:, :hidden]
    expected = reference.weighted_sum(y, rows, weights, shared=added)
    arguments = [None if t is None else t.to(DEVICE) for t in (y, rows, weights, added)]
    with poisoned_memory():
        actual = triton.weighted_sum(*arguments[:3], shared=arguments[3])
        out = torch.empty(tokens, hidden + 16, dtype=torch.float32, device=DEVICE)[:, :hidden]
        assert triton.weighted_sum(*arguments[:3], shared=arguments[3], out=out) is out
    assert_same_bits(actual, expected, "sum")
    wide = torch.empty(tokens, hidden)
    assert_same_bits(out, reference.weighted_sum(y, rows, weights, shared=added, out=wide), "sum in float32")


def test_weighted_sum_writes_to_any_memory() -> None:
    y, rows = torch.randn(6, 32), torch.arange(6, dtype=torch.int32).reshape(3, 2)
    weights, shared = torch.rand(3, 2), torch.randn(32, 3).t()
    out = torch.full((32, 3), float("nan")).to(DEVICE).t()
    actual = triton.weighted_sum(*(t.to(DEVICE) for t in (y, rows, weights)), shared=shared.to(DEVICE), out=out)
    assert actual is out
    assert_same_bits(out, reference.weighted_sum(y.reshape(2, 3, 32), rows, weights, shared=shared), "sum")


def _rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Some rows of a batch's x, scale or row_index."""
    return (rows if rows.dim() == 1 else as_bytes(rows).flatten(0, -2))[index]


def _started(packing: RoutedPacking, given: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the first kernel of a call stores in place of packing's launches, by the names of all tensors."""
    launch, names = start_of(packing, (512, 16), TileList._fields)
    lists = dict.fromkeys(filter(None, names[1]), ((512,), torch.int32))
    like, pieces = packing.sequence, {**packing.sequence.pieces, **lists}
    sequence = LaunchSequence([(launch, names)], like.given, pieces, packing.device, aliases=like.aliases)
    memory = sequence.run(dict(zip(like.given, given, strict=True)))
    assert memory is not None
    return {name: sequence.workspace.view(memory, name) for name in pieces}


ROUTED = [  # tokens, top-k, experts, scheme, layout, what quantizes
    pytest.param(9, 3, 5, "none", Layout.COMPACT, "", id="few"),
    pytest.param(129, 5, 7, "none", Layout.COMPACT, "", id="not_few"),
    pytest.param(6, 33, 40, "none", Layout.BATCHED, "", id="several_launches"),
    pytest.param(16, 16, 6, "none", Layout.COMPACT, "", id="a_whole_block"),
    pytest.param(70, 5, 6, "fp8_block", Layout.COMPACT, "packing", id="as_many_as_are_few"),
    pytest.param(5, 33, 6, "none", Layout.COMPACT, "", id="too_many_comparisons"),
    pytest.param(1, 33, 300, "none", Layout.COMPACT, "", id="a_block_of_one_token"),
    pytest.param(11, 3, 5, "fp8_block", Layout.COMPACT, "packing", id="fp8_block"),
    pytest.param(3, 1, 1, "fp8_token", Layout.BATCHED, "packing", id="fp8_token"),
    pytest.param(5, 2, 3, "fp8_tensor", Layout.COMPACT, "packing", id="fp8_tensor"),
    pytest.param(5, 2, 3, "fp8_tensor", Layout.COMPACT, "static", id="static"),
    pytest.param(7, 4, 9, "mxfp8", Layout.COMPACT, "packing", id="mxfp8"),
    pytest.param(20, 4, 9, "nvfp4", Layout.BATCHED, "packing", id="nvfp4"),
    pytest.param(20, 4, 9, "mxfp4_w4a8", Layout.COMPACT, "caller", id="by_the_caller"),
    pytest.param(12, 3, 5, "none", Layout.FLAT, "", id="flat"),
    pytest.param(6, 33, 40, "fp8_block", Layout.FLAT, "packing", id="flat_fp8_block"),
    pytest.param(13, 4, 9, "mxfp8", Layout.FLAT, "packing", id="flat_mxfp8"),
]


@pytest.mark.parametrize(("tokens", "topk", "experts", "name", "layout", "quantizer"), ROUTED)
def test_routed_tokens(tokens: int, topk: int, experts: int, name: str, layout: Layout, quantizer: str) -> None:
    """All bits of merging, quantizing, packing and the sum; then the addresses of later launches."""
    random, scheme, hidden, first = generator(f"{tokens} {name}"), get_scheme(name), 96, 2
    x = strided(torch.randn(tokens, hidden, generator=random).bfloat16(), gap=16)
    ids_dtype = (torch.int32, torch.int64)[tokens % 2]
    ids = torch.randint(-2, experts + 4, (tokens, topk + 1), generator=random, dtype=ids_dtype)[:, :topk]
    weights = torch.rand(tokens, topk, generator=random)
    static = torch.tensor([0.02]) if quantizer == "static" else None
    stored: torch.Tensor | Quantized = x if quantizer == "" else quantize(x, scheme, static_scale=static)
    merged = reference.merge_repeats(ids, weights, first=first, last=first + experts)
    expected = reference.pack(
        TokenRows(
            x=stored if isinstance(stored, torch.Tensor) else stored.values,
            scale=None if isinstance(stored, torch.Tensor) else stored.scale,
            local_topk_ids=merged[0],
            topk_weights=merged[1],
        ),
        layout,
        scheme=scheme,
        dtype=x.dtype,
        num_local_experts=experts,
        capacity=tokens,
    )
    given = stored if quantizer == "caller" else x
    sizes = PackingSizes(
        layout=layout,
        scheme=scheme,
        dtype=x.dtype,
        first=first,
        num_local_experts=experts,
        capacity=tokens,
        static=static is not None,
        expected_rows=expected.batch.expected_rows,
    )
    if isinstance(given, Quantized):
        given = Quantized(values=given.values.to(DEVICE), scale=given.scale.to(DEVICE), scheme=scheme)
    else:
        given = strided(given.contiguous(), gap=16).to(DEVICE) if DEVICE == "cpu" else given.to(DEVICE)
    inputs = given, ids.contiguous().to(DEVICE), weights.to(DEVICE), None if static is None else static.to(DEVICE)
    packing = RoutedPacking(*inputs[:3], sizes)
    assert (packing.placing is None) == (tokens > triton._MOST_BLOCKS * triton.block_tokens(topk))
    packing.pack(*inputs)  # on a GPU the next launches skip Triton
    with poisoned_memory():
        batch = packing.pack(*inputs)
    assert batch is not None
    assert_same_bits(packing.view(batch, "token_to_row"), expected.token_to_row, "token_to_row")
    assert_same_bits(packing.view(batch, "topk_weights"), merged[1], "weights")
    written = expected.token_to_row[expected.token_to_row >= 0].long()
    by_row = ("row_index",) if layout is Layout.FLAT else ("x", "scale")  # of which other rows are undefined
    for field in ("x", "scale", "expert_row_start", "expert_num_tokens", "row_index"):
        wanted, actual = getattr(expected.batch, field), getattr(batch, field)
        assert (wanted is None) == (actual is None)
        if wanted is not None:
            assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
            assert actual.stride() == wanted.stride() or (field, layout, quantizer) == ("x", Layout.FLAT, "")
            rows = field in by_row
            assert_same_bits(*(_rows(each.cpu(), written) if rows else each for each in (actual, wanted)), field)
    assert batch.addresses == [getattr(batch, field).data_ptr() for field in batch.addressed]
    assert {*batch.addressed} == {field for field in ADDRESSED if getattr(batch, field, None) is not None}
    num_rows = batch.x.shape[:-1].numel() if batch.row_index is None else batch.row_index.numel()
    y = torch.randn(num_rows, hidden, generator=random).bfloat16()
    summed = reference.weighted_sum(y, expected.token_to_row, merged[1])
    out = torch.full((hidden, tokens), float("nan")).to(DEVICE).t()
    for _ in range(2):
        assert_same_bits(packing.weighted_sum(y.to(DEVICE), batch), summed, "sum")
    assert packing.weighted_sum(y.to(DEVICE), batch, out) is out
    assert_same_bits(out.bfloat16(), summed, "sum in float32")

    if packing.placing is not None:
        with poisoned_memory():
            started = _started(packing, packing.inputs(*inputs))
        for counter in ("amax", "next_tile", "stored"):
            assert not started[f"tiles:{counter}"][: 2 if counter == "next_tile" else experts].any(), counter
        launches = {start_of(packing, (512, 16), listed)[0] for listed in (TileList._fields, TileList._fields[:3])}
        assert len(launches) == 2, "the launch of a list without counters has not stored any"
        few = packing.copying is not None
        not_few = tokens == 129 or (tokens == 5 and topk == 33)  # 2048 pairs, 8 * 64 * 64 comparisons
        assert few == (layout is Layout.COMPACT and quantizer != "caller" and not not_few)
        for field in ("topk_weights", "expert_num_tokens", "expert_row_start", *["token_to_row", "x", "scale"] * few):
            if field in started:
                actual, wanted = started[field], packing.view(batch, field)
                if field in ("x", "scale"):  # [rows, V] and [G, rows]
                    of_rows = (each.t() if field == "scale" else each for each in (actual, wanted))
                    actual, wanted = (_rows(each.cpu(), written) for each in of_rows)
                assert_same_bits(actual, wanted, f"{field} of the first kernel")

    recorders = recorded(packing.sequence)
    if quantizer != "packing" or name != "fp8_tensor":  # whose largest magnitude is a new tensor in each call
        for _ in range(2):
            assert packing.pack(*inputs) is not None
        assert [recorder.repeated for recorder in recorders] == [recorder.first for recorder in recorders]
        assert all(recorder.first for recorder in recorders)
