"""Pairs of a token and an expert, from lists that name pairs by expert to the expert of each pair.

A pair that no list names keeps what the first of two launches fills in.
Letters: P pairs, M places of a list, E experts.
"""

import triton
import triton.language as tl


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
    listed_ptr,  # [P] uint8, out: 1 for each listed pair; or None
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
    if listed_ptr is not None:
        tl.store(listed_ptr + pair, tl.full([BLOCK], 1, tl.uint8), mask=there)


@triton.jit(do_not_specialize=["num_pairs"])
def _ragged_pairs_kernel(
    count_ptr,  # [E] int32, places of each expert, in order
    pair_ptr,  # [P] int32 or int64, the pair of each place, others than [0, P) are none
    factor_ptr,  # [P], any float, of each place
    map_ptr,  # [E] int32 or int64, which expert each is, -1 none; or None
    ids_ptr,  # [P] int32, out: the expert of each listed pair
    weights_ptr,  # [P] float32, out: its factor
    num_pairs,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,  # E rounded up to a power of two
    BLOCK: tl.constexpr,
):
    """Store expert and factor of the pair of each place; places behind the last expert's are none."""
    column = tl.arange(0, EXPERTS)
    ends = tl.cumsum(tl.load(count_ptr + column, mask=column < E, other=0).to(tl.int32), 0)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = (ends[None, :] <= place[:, None]) & (column[None, :] < E)
    expert = tl.sum(before.to(tl.int32), axis=1)
    there = (place < num_pairs) & (expert < E)
    pair = tl.load(pair_ptr + place, mask=there, other=-1).to(tl.int64)
    there &= (pair >= 0) & (pair < num_pairs)
    if map_ptr is not None:
        expert = tl.load(map_ptr + expert, mask=there, other=-1).to(tl.int32)
    tl.store(ids_ptr + pair, expert, mask=there)
    tl.store(weights_ptr + pair, tl.load(factor_ptr + place, mask=there, other=0.0).to(tl.float32), mask=there)
