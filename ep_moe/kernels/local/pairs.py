"""Pairs of a token and an expert: as rows of their own, and from lists that name pairs by expert.

A pair that no list names keeps what the first of two launches fills in.
Letters: T tokens, K top-k, H hidden, P pairs, M places of a list, E experts.
"""

import triton
import triton.language as tl

from ep_moe.kernels.numerics import round_to


@triton.jit(do_not_specialize=["ids_stride", "weights_stride"])
def _pair_rows_kernel(
    x_ptr,  # [T, H], rows `x_stride` apart
    source_ptr,  # [P] int32, the row of x of each pair that has an expert, K is 1 then; or None: that of its token
    ids_ptr,  # [T, K], rows `ids_stride` apart
    weights_ptr,  # [T, K] float32, rows `weights_stride` apart
    tokens_ptr,  # [P, H], out, P = T * K
    pair_ids_ptr,  # [P], out
    pair_weights_ptr,  # [P] float32, out
    x_stride,
    ids_stride,
    weights_stride,
    factor,
    H: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # K rounded up to a power of two
    BLOCK: tl.constexpr,  # columns of H that one program copies
    ON_INPUT: tl.constexpr,
):
    """A token's row for each of its K pairs: as it is, or ON_INPUT times the pair's weight.

    Pairs get their weight times `factor`, or ON_INPUT `factor` alone.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    if source_ptr is not None:
        listed = tl.load(ids_ptr + token * ids_stride) >= 0
        source = tl.load(source_ptr + token, mask=listed, other=0).to(tl.int64)
    else:
        listed = token >= 0
        source = token
    x = tl.load(x_ptr + source * x_stride + column, mask=inside)
    for k in tl.static_range(K):
        row = x
        if ON_INPUT:
            weight = round_to(tl.load(weights_ptr + token * weights_stride + k, mask=listed, other=0.0), x.dtype)
            row = round_to(x.to(tl.float32) * weight.to(tl.float32), x.dtype)
        tl.store(tokens_ptr + (token * K + k) * H + column, row, mask=inside)
    if tl.program_id(1) == 0:
        pair = tl.arange(0, COLUMNS)
        there = pair < K
        tl.store(pair_ids_ptr + token * K + pair, tl.load(ids_ptr + token * ids_stride + pair, mask=there), mask=there)
        if ON_INPUT:
            weights = tl.full([COLUMNS], 1.0, tl.float32)
        else:
            weights = tl.load(weights_ptr + token * weights_stride + pair, mask=there)
        tl.store(pair_weights_ptr + token * K + pair, weights * factor, mask=there)


@triton.jit(do_not_specialize=["num_pairs"])
def _fill_pairs_kernel(
    ids_ptr,  # [P] int32, out: -1
    listed_ptr,  # [P] uint8, out: 0; or None
    num_pairs,
    BLOCK: tl.constexpr,
):
    """No pair has an expert, none is listed."""
    pair = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    tl.store(ids_ptr + pair, tl.full([BLOCK], -1, tl.int32), mask=pair < num_pairs)
    if listed_ptr is not None:
        tl.store(listed_ptr + pair, tl.zeros([BLOCK], tl.uint8), mask=pair < num_pairs)


@triton.jit(do_not_specialize=["num_places", "num_pairs"])
def _sorted_pairs_kernel(
    pairs_ptr,  # [M] int32 or int64, others than [0, P) are none
    expert_ptr,  # [blocks of M], int32 or int64
    end_ptr,  # [1], places from here on are none
    ids_ptr,  # [P] int32, out: the expert of each listed pair
    listed_ptr,  # [P] uint8, out: 1 for each listed pair
    num_places,
    num_pairs,
    HEIGHT: tl.constexpr,  # places of an entry of `expert_ptr`
    BLOCK: tl.constexpr,
):
    """Store the expert of the block of places in which a pair stands."""
    place = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    there = (place < num_places) & (place < tl.load(end_ptr))
    pair = tl.load(pairs_ptr + place, mask=there, other=-1).to(tl.int64)
    there &= (pair >= 0) & (pair < num_pairs)
    expert = tl.load(expert_ptr + place // HEIGHT, mask=there, other=-1)
    tl.store(ids_ptr + pair, expert.to(tl.int32), mask=there)
    tl.store(listed_ptr + pair, tl.full([BLOCK], 1, tl.uint8), mask=there)


@triton.jit(do_not_specialize=["num_pairs", "num_tokens"])
def _ragged_pairs_kernel(
    count_ptr,  # [E] int32, places of each expert, in order
    row_ptr,  # [P] int32 or int64, the token of each place, others than [0, T) are none
    pair_ptr,  # [P] int32 or int64, the pair of each place, others than [0, P) are none; or None: the place
    factor_ptr,  # [P], any float, of each place
    map_ptr,  # [E] int32 or int64, which expert each is, -1 none; or None
    ids_ptr,  # [P] int32, out: the expert of each listed pair
    weights_ptr,  # [P] float32, out: its factor
    source_ptr,  # [P] int32, out: its token
    num_pairs,
    num_tokens,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,  # E rounded up to a power of two
    BLOCK: tl.constexpr,
):
    """Store expert, factor and token of the pair of each place; places behind the last expert's are none."""
    column = tl.arange(0, EXPERTS)
    ends = tl.cumsum(tl.load(count_ptr + column, mask=column < E, other=0).to(tl.int32), 0)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = (ends[None, :] <= place[:, None]) & (column[None, :] < E)
    expert = tl.sum(before.to(tl.int32), axis=1)
    there = (place < num_pairs) & (expert < E)
    pair = place.to(tl.int64)
    if pair_ptr is not None:
        pair = tl.load(pair_ptr + place, mask=there, other=-1).to(tl.int64)
    row = tl.load(row_ptr + place, mask=there, other=-1)
    there &= (pair >= 0) & (pair < num_pairs) & (row >= 0) & (row < num_tokens)
    if map_ptr is not None:
        expert = tl.load(map_ptr + expert, mask=there, other=-1).to(tl.int32)
    tl.store(ids_ptr + pair, expert, mask=there)
    tl.store(source_ptr + pair, row.to(tl.int32), mask=there)
    tl.store(weights_ptr + pair, tl.load(factor_ptr + place, mask=there, other=0.0).to(tl.float32), mask=there)
