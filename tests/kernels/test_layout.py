"""Packing, merging and weighted sums against plain loops, bit for bit if data only moves."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from ep_moe.config import Layout
from ep_moe.kernel_launch.allocation import Workspace
from ep_moe.layout import Batched, Compact, ExpertBatch, Flat, Packed, TokenRows, merge_repeats, pack, weighted_sum
from ep_moe.layout.base import BatchTemplate
from ep_moe.quant import QuantScheme, TensorFormat, get_scheme

PLAIN = QuantScheme(name="plain")
GROUPED = QuantScheme(
    name="grouped",
    payload=TensorFormat(family="scaled", dtype=torch.float8_e4m3fn, granularity="group", block=(1, 128)),
)
PER_TOKEN = QuantScheme(name="per_token", payload=TensorFormat(family="scaled", dtype=torch.int8, granularity="token"))
SCHEMES = {
    "bf16": PLAIN,
    "fp8_group": GROUPED,
    "int8_token": PER_TOKEN,
    "mxfp8": get_scheme("mxfp8"),  # scales of one byte, five of them
    "nvfp4": get_scheme("nvfp4"),  # two elements per byte, rows of 72 bytes
}
CLASSES = {Layout.BATCHED: Batched, Layout.COMPACT: Compact, Layout.FLAT: Flat}
HIDDEN = 144  # two groups of 128, the second one short

# name: (tokens, top-k, local experts, alignment, how ids are made)
CASES = {
    "mixed": (37, 4, 5, 16, "random"),
    "aligned_to_one": (20, 3, 7, 1, "random"),
    "odd_alignment": (23, 2, 3, 7, "random"),
    "many_empty_experts": (6, 2, 40, 4, "random"),
    "all_to_last_expert": (19, 3, 6, 8, "last"),
    "nobody": (9, 4, 3, 16, "none"),
    "zero_rows": (0, 4, 3, 16, "random"),
    "no_local_experts": (8, 2, 0, 16, "none"),
    "zero_rows_no_experts": (0, 2, 0, 16, "none"),
    "one_of_each": (1, 1, 1, 16, "last"),
}


def make_rows(case: str, scheme: QuantScheme) -> tuple[TokenRows, int, int]:
    num_tokens, num_topk, num_local, alignment, how = CASES[case]
    random = torch.Generator().manual_seed(num_tokens)
    if how == "random":
        ids = torch.randint(-2, num_local, (num_tokens, num_topk), generator=random).clamp(min=-1)
    else:
        ids = torch.full((num_tokens, num_topk), -1)
        ids[:, -1] = num_local - 1 if how == "last" else -1
    ids, weights = merge_repeats(ids.int(), torch.rand(num_tokens, num_topk, generator=random))
    stored = scheme.payload
    if stored.dtype is None:
        x = torch.randn(num_tokens, HIDDEN, generator=random).bfloat16()
    else:
        num_values = stored.row_values(HIDDEN)
        x = torch.randint(0, 120, (num_tokens, num_values), generator=random, dtype=torch.uint8).view(stored.dtype)
    groups = stored.num_groups(HIDDEN)
    scale = torch.rand(num_tokens, groups, generator=random) if groups else None
    if stored.scale_dtype.itemsize == 1:
        codes = torch.randint(0, 120, (num_tokens, groups), generator=random, dtype=torch.uint8)
        scale = codes.view(stored.scale_dtype)
    return TokenRows(x=x, scale=scale, local_topk_ids=ids, topk_weights=weights), num_local, alignment


def packed_case(rows: TokenRows, layout: Layout, scheme: QuantScheme, case: str, capacity: int, **more: Any) -> Packed:
    """The rows of a case, packed."""
    _, _, num_local, alignment, _ = CASES[case]
    sizes = {"num_local_experts": num_local, "capacity": capacity, "alignment": alignment}
    return pack(rows, layout, scheme=scheme, **{"dtype": torch.bfloat16, **sizes, **more})


def tokens_of_experts(ids: torch.Tensor, num_local: int) -> list[list[tuple[int, int]]]:
    """For each expert, the (token, column) pairs that chose it, by ascending token."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(num_local)]
    for token, row in enumerate(ids.tolist()):
        for column, expert in enumerate(row):
            if expert >= 0:
                found[expert].append((token, column))
    return found


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, last dimension split into bytes."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()


def pool_of(batch: ExpertBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The batch's rows and scales with one row dimension."""
    scale = None if batch.scale is None else batch.scale.reshape(-1, batch.scale.shape[-1])
    return batch.x.reshape(-1, batch.x.shape[-1]), scale


def check_rows(packed: Packed, rows: TokenRows, num_local: int) -> None:
    """Every row of every expert holds its token's bytes, and `token_to_row` says where."""
    batch, (pool, pool_scale) = packed.batch, pool_of(packed.batch)
    expected_back = np.full(tuple(rows.local_topk_ids.shape), -1)
    for expert, chosen in enumerate(tokens_of_experts(rows.local_topk_ids, num_local)):
        start = int(batch.expert_row_start[expert])
        assert batch.expert_num_tokens[expert].item() == len(chosen)
        for index, (token, column) in enumerate(chosen):
            expected_back[token, column] = source = start + index
            if batch.row_index is not None:
                source = int(batch.row_index[source])
            assert np.array_equal(raw(pool[source]), raw(rows.x[token]))
            if rows.scale is not None:
                assert pool_scale is not None
                assert np.array_equal(raw(pool_scale[source]), raw(rows.scale[token]))
    assert packed.token_to_row.dtype == torch.int32
    assert np.array_equal(packed.token_to_row.numpy(), expected_back)


def most_rows(max_rows: int, num_local: int, alignment: int) -> int:
    """The most rows that any routing can take: as many experts as possible need a whole block for one row."""
    lone = min(num_local, max_rows)  # experts that get a row each, and pay a whole aligned block for it
    return (lone + (max_rows - lone) // alignment) * alignment


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.value)
def test_pack(layout: Layout, case: str, scheme: QuantScheme) -> None:
    rows, num_local, alignment = make_rows(case, scheme)
    capacity, groups = rows.x.shape[0] + 3, scheme.payload.num_groups(HIDDEN)
    packed = packed_case(rows, layout, scheme, case, capacity)
    batch = packed.batch
    assert type(batch) is CLASSES[layout]
    assert (batch.scheme, batch.dtype, batch.hidden) == (scheme, torch.bfloat16, HIDDEN)
    assert (batch.num_local_experts, batch.x.dtype) == (num_local, rows.x.dtype)
    assert (batch.expert_row_start.dtype, batch.expert_num_tokens.dtype) == (torch.int32, torch.int32)
    check_rows(packed, rows, num_local)

    counts = [len(chosen) for chosen in tokens_of_experts(rows.local_topk_ids, num_local)]
    num_tokens, num_topk = rows.local_topk_ids.shape
    max_rows = num_tokens * min(num_topk, num_local)
    assert batch.expected_rows == math.ceil(max_rows / max(num_local, 1))
    starts, next_start = [], 0
    for expert, count in enumerate(counts):
        step = {Layout.BATCHED: capacity, Layout.COMPACT: math.ceil(count / alignment) * alignment, Layout.FLAT: count}
        starts.append(expert * capacity if layout is Layout.BATCHED else next_start)
        next_start += step[layout]
    assert batch.expert_row_start.tolist() == starts
    compact_rows = most_rows(max_rows, num_local, alignment)
    assert layout is not Layout.COMPACT or next_start <= compact_rows
    shape = {
        Layout.BATCHED: (num_local, capacity, rows.x.shape[1]),
        Layout.COMPACT: (compact_rows, rows.x.shape[1]),
        Layout.FLAT: tuple(rows.x.shape),
    }[layout]
    assert tuple(batch.x.shape) == shape
    output_rows = (num_tokens,) if layout is Layout.FLAT else shape[:-1]
    assert batch.output_shape == (*output_rows, HIDDEN)
    assert (batch.scale is None) == (groups == 0)
    if batch.scale is not None and batch.scale.numel() > 0:
        assert tuple(batch.scale.shape) == (*shape[:-1], groups)
        assert batch.scale.dtype == scheme.payload.scale_dtype
        strides = (capacity * groups, 1, capacity) if layout is Layout.BATCHED else (1, shape[0])
        wanted = [stride for stride, size in zip(strides, batch.scale.shape, strict=True) if size > 1]
        assert [s for s, size in zip(batch.scale.stride(), batch.scale.shape, strict=True) if size > 1] == wanted
    if isinstance(batch, Flat):
        assert batch.row_index is not None
        assert batch.row_index.shape == (max_rows,)
        assert torch.equal(batch.token_to_row, packed.token_to_row)
        assert torch.equal(batch.local_topk_ids, rows.local_topk_ids)
        assert torch.equal(batch.topk_weights, rows.topk_weights)
    else:
        assert batch.row_index is None


def test_pack_docstring_example() -> None:
    ids = torch.tensor([[0, 1], [1, -1], [1, 0]], dtype=torch.int32)
    rows = TokenRows(x=torch.arange(3.0)[:, None], scale=None, local_topk_ids=ids, topk_weights=torch.ones(3, 2))
    packed = pack(rows, Layout.COMPACT, scheme=PLAIN, dtype=torch.float32, num_local_experts=2, capacity=3, alignment=2)
    assert packed.batch.expert_num_tokens.tolist() == [2, 3]
    assert packed.batch.expert_row_start.tolist() == [0, 2]
    assert packed.token_to_row.tolist() == [[0, 2], [3, -1], [4, 1]]
    assert packed.batch.x.shape == (8, 1)
    assert packed.batch.x[:5, 0].tolist() == [0, 2, 0, 1, 2]


def test_scales_stay_float32_under_another_default_dtype() -> None:
    rows, num_local, _ = make_rows("mixed", GROUPED)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for layout in Layout:
            packed = pack(rows, layout, scheme=GROUPED, dtype=torch.bfloat16, num_local_experts=num_local, capacity=37)
            check_rows(packed, rows, num_local)
    finally:
        torch.set_default_dtype(default)


def test_pack_refuses_an_expert_beyond_capacity() -> None:
    rows, num_local, _ = make_rows("all_to_last_expert", PLAIN)
    with pytest.raises(ValueError, match=r"19 rows, which exceeds capacity \(18\)"):
        pack(rows, Layout.BATCHED, scheme=PLAIN, dtype=torch.bfloat16, num_local_experts=num_local, capacity=18)
    bounded = dataclasses.replace(rows, max_expert_rows=18)
    with pytest.raises(ValueError, match=r"19 rows, which exceeds max_expert_rows \(18\)"):
        pack(bounded, Layout.COMPACT, scheme=PLAIN, dtype=torch.bfloat16, num_local_experts=num_local, capacity=19)


@pytest.mark.parametrize("layout", [Layout.COMPACT, Layout.FLAT], ids=lambda layout: layout.value)
def test_max_rows_sizes_what_is_allocated(layout: Layout) -> None:
    rows, num_local, alignment = make_rows("mixed", GROUPED)
    count = int((rows.local_topk_ids >= 0).sum())
    packed = packed_case(rows, layout, GROUPED, "mixed", 37, max_rows=count)
    batch = packed.batch
    check_rows(packed, rows, num_local)
    assert batch.expected_rows == math.ceil(count / num_local)
    sized = batch.x if batch.row_index is None else batch.row_index
    assert sized.shape[0] == (most_rows(count, num_local, alignment) if layout is Layout.COMPACT else count)
    with pytest.raises(ValueError, match=rf"{count} rows, which exceeds max_rows \({count - 1}\)"):
        packed_case(rows, layout, GROUPED, "mixed", 37, max_rows=count - 1)


@pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.value)
def test_pack_reads_rows_of_a_wire(layout: Layout) -> None:
    """Rows with gaps between them, as a receive buffer has them; FLAT makes them contiguous."""
    rows, num_local, _ = make_rows("mixed", GROUPED)
    assert rows.scale is not None
    wide, scale_of_rows = torch.full((37, HIDDEN + 64), 7, dtype=torch.uint8), torch.zeros(37, 5)
    wide[:, :HIDDEN], scale_of_rows[:, 1:3] = rows.x.view(torch.uint8), rows.scale
    strided = dataclasses.replace(rows, x=wide.view(torch.float8_e4m3fn)[:, :HIDDEN], scale=scale_of_rows[:, 1:3])
    packed = packed_case(strided, layout, GROUPED, "mixed", 37)
    assert packed.batch.x.is_contiguous()
    check_rows(packed, rows, num_local)


def test_merge_repeats_by_hand() -> None:
    ids = torch.tensor([[3, 5, 3, -1], [-1, -1, 2, 2], [7, 7, 7, 7], [1, 2, 1, 2], [4, 3, 2, 1]], dtype=torch.int32)
    weights = torch.tensor([[1.0, 2, 3, 4], [1, 2, 3, 4], [1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 4, 8]])
    weights[0, 3] = float("nan")  # belongs to no expert
    kept_ids, kept_weights = ids.clone(), weights.clone()
    merged_ids, merged_weights = merge_repeats(ids, weights)
    assert merged_ids.tolist() == [[3, 5, -1, -1], [-1, -1, 2, -1], [7, -1, -1, -1], [1, 2, -1, -1], [4, 3, 2, 1]]
    assert merged_weights.tolist() == [[4, 2, 0, 0], [0, 0, 7, 0], [15, 0, 0, 0], [5, 10, 0, 0], [1, 2, 4, 8]]
    local_ids, local_weights = merge_repeats(ids, weights, first=2, last=5)
    assert local_ids.tolist() == [[1, -1, -1, -1], [-1, -1, 0, -1], [-1, -1, -1, -1], [-1, 0, -1, -1], [2, 1, 0, -1]]
    assert local_weights.tolist() == [[4, 0, 0, 0], [0, 0, 7, 0], [0, 0, 0, 0], [0, 10, 0, 0], [1, 2, 4, 0]]
    assert torch.equal(ids, kept_ids)
    assert torch.equal(weights.nan_to_num(-1.0), kept_weights.nan_to_num(-1.0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("first", "last"), [(0, None), (1, 3), (3, 3)])
@pytest.mark.parametrize(("num_tokens", "num_topk", "num_experts"), [(200, 6, 4), (50, 9, 30), (0, 3, 4), (5, 1, 2)])
def test_merge_repeats_against_loops(
    dtype: torch.dtype, first: int, last: int | None, num_tokens: int, num_topk: int, num_experts: int
) -> None:
    random = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(-1, num_experts, (num_tokens, num_topk), generator=random, dtype=dtype)
    weights = torch.randn(num_tokens, num_topk, generator=random)
    expected_ids = np.full((num_tokens, num_topk), -1)
    expected_weights = np.zeros((num_tokens, num_topk), dtype=np.float32)
    end = num_experts if last is None else last
    for token in range(num_tokens):
        places: dict[int, int] = {}
        for column in range(num_topk):
            expert = int(ids[token, column])
            if not first <= expert < end:
                continue
            home = places.setdefault(expert, column)
            expected_ids[token, home] = expert - first
            expected_weights[token, home] += weights[token, column].numpy()
    merged_ids, merged_weights = merge_repeats(ids, weights, first=first, last=last)
    assert (merged_ids.dtype, merged_weights.dtype) == (torch.int32, torch.float32)
    assert np.array_equal(merged_ids.numpy(), expected_ids)
    assert np.array_equal(merged_weights.numpy(), expected_weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["mixed", "many_empty_experts", "nobody", "zero_rows", "no_local_experts"])
@pytest.mark.parametrize("layout", [Layout.BATCHED, Layout.COMPACT], ids=lambda layout: layout.value)
def test_weighted_sum(layout: Layout, case: str, dtype: torch.dtype) -> None:
    """Bit for bit: float32 products, summed in column order, rounded once; rows of no token are NaN."""
    rows, _, _ = make_rows(case, PLAIN)
    packed = packed_case(rows, layout, PLAIN, case, 40, dtype=dtype)
    random = torch.Generator().manual_seed(1)
    y = torch.full((*packed.batch.x.shape[:-1], 24), float("nan"), dtype=dtype)
    flat = y.view(-1, 24)
    used = packed.token_to_row[packed.token_to_row >= 0].long()
    flat[used] = torch.randn(len(used), 24, generator=random).to(dtype)
    expected = np.zeros((rows.x.shape[0], 24), dtype=np.float32)
    for token, columns in enumerate(packed.token_to_row.tolist()):
        for column, row in enumerate(columns):
            if row >= 0:
                product = np.float32(rows.topk_weights[token, column].item()) * flat[row].float().numpy()
                expected[token] = expected[token] + product
    summed = weighted_sum(y, packed.token_to_row, rows.topk_weights)
    assert summed.dtype == dtype
    assert torch.equal(summed, torch.from_numpy(expected).to(dtype))


def test_weighted_sum_ignores_the_weight_of_no_expert() -> None:
    y = torch.tensor([[1.0, 2.0], [float("nan"), float("nan")]])
    token_to_row = torch.tensor([[-1, 0], [-1, -1]], dtype=torch.int32)
    weights = torch.tensor([[float("nan"), 3.0], [float("inf"), 1.0]])
    assert weighted_sum(y, token_to_row, weights).tolist() == [[3.0, 6.0], [0.0, 0.0]]


def test_weighted_sum_adds_what_is_shared_before_it_rounds() -> None:
    """Without weights a token's rows are summed with weight 1: the source rank's sum over ranks."""
    y = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()  # bfloat16 has no 257
    token_to_row = torch.tensor([[0, 1], [-1, -1], [2, -1]], dtype=torch.int32)
    shared = torch.tensor([[1.0], [0.5], [-1.0]])
    out = torch.full((3, 1), float("nan"), dtype=torch.bfloat16)
    assert weighted_sum(y, token_to_row, None, shared=shared, out=out) is out
    assert out.tolist() == [[258.0], [0.5], [0.0]]
    assert weighted_sum(y, token_to_row, None).tolist() == [[256.0], [0.0], [1.0]]


def test_a_batch_of_a_template() -> None:
    scheme, counts = get_scheme("fp8_block"), torch.arange(3, dtype=torch.int32)
    shared = {"scheme": scheme, "dtype": torch.bfloat16, "row_index": None, "expected_rows": 5}
    pieces = {"x": ((4, 256), scheme.payload.dtype), "own": ((7,), torch.int64), "scale": ((2, 4), torch.float32)}
    pieces["expert_row_start"] = (3,), torch.int32
    template = BatchTemplate(
        Compact, "signature", shared | {"expert_num_tokens": counts}, Workspace(pieces, torch.device("cpu"))
    )
    first, second = (template.batch(template.allocate().fill_(value)) for value in (1, 2))
    assert first.addressed == ("x", "scale", "expert_row_start", "expert_num_tokens")
    assert first.addresses == [getattr(first, name).data_ptr() for name in first.addressed]
    assert (first.scale.shape, first.scale.stride()) == ((4, 2), (1, 4))
    assert (first.x.dtype, first.x.shape, second.output_shape) == (scheme.payload.dtype, (4, 256), (4, 256))
    assert first.expert_num_tokens is counts
    for batch, value in ((first, 1), (second, 2)):
        assert {int(each.view(torch.uint8).unique()) for each in (batch.x, batch.scale.t())} == {value}
    with pytest.raises(AttributeError, match="Compact has no attribute 'own'"):
        _ = first.own
    other = dataclasses.replace(first, expected_rows=7)  # differs in more than addresses
    assert (other.template, other.x is first.x, other.addresses) == (None, True, first.addresses)
