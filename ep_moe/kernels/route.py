"""Routing: from a token's logits to its experts and their weights, as `ep_moe.routing.reference` computes them.

One program of one warp has one token, with the scores of all experts in registers, in rows of one group each. Scores
are compared as integers in the same order, so that NaN, zeros of both signs and infinities need no special cases; the
lowest of equal experts is found by a second reduction. Both are one instruction across the warp on Hopper.

Letters: T tokens on this rank, E experts, K top-k.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ep_moe.kernels.numerics import INT32_MAX, INTERPRET, clamp_to_int32, to_bf16

NOTHING = tl.constexpr(-(2**31))  # below every score's key: no expert, or one that is chosen already
KEY_OF_INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
LOW = tl.constexpr(0xFFFFFFFF)
# of the hash that chooses copies
LANES = tl.constexpr(8)  # of counts
OF_ROW, OF_EXPERT, FIRST, SECOND = (tl.constexpr(n) for n in (0x9E3779B1, 0x85EBCA77, 0x7FEB352D, 0x846CA68B))


class Scores(NamedTuple):
    """The tensors that routing reads."""

    logits_ptr: Any  # [T, E] float32, bfloat16 or float16, rows `logits_stride` apart
    bias_ptr: Any  # [E] of the same dtypes, if BIAS
    words_ptr: Any  # int64: [E] logical to physical expert, or `PositionTable.words`, if MAPPED or COUNTS
    num_tokens_ptr: Any = None  # [1] int32: rows from there on are not counted


class Chosen(NamedTuple):
    """The tensors that routing writes."""

    ids_ptr: Any  # [T, K] int32
    weights_ptr: Any  # [T, K] float32
    replay_ptr: Any  # [T, K] int16, logical experts, if REPLAY


class IdMaps(NamedTuple):
    """The tensors of a mapping of ids."""

    ids_ptr: Any  # [T, K] int32 or int64, logical
    words_ptr: Any  # as in `Scores`
    out_ptr: Any  # [T, K] int32, dense
    num_tokens_ptr: Any = None  # as in `Scores`


class Method(NamedTuple):
    """The settings of a routing."""

    K: tl.constexpr
    COLUMNS: tl.constexpr  # K rounded up
    G: tl.constexpr  # groups, 1 if the choice is among all experts
    GROUPS: tl.constexpr  # G rounded up
    GROUP_SIZE: tl.constexpr  # E / G
    MEMBERS: tl.constexpr  # GROUP_SIZE rounded up
    TOPK_GROUP: tl.constexpr
    GROUP_BEST: tl.constexpr  # scores that add up to a group's
    CHOICE: tl.constexpr  # "logit", or "sigmoid" or "softmax" with the bias
    WEIGHT: tl.constexpr  # "logit", "sigmoid", "softmax" over all, "softmax_chosen"
    NORMALIZE: tl.constexpr  # divide by the sum + EPSILON
    EPSILON: tl.constexpr
    FACTOR: tl.constexpr
    BIAS: tl.constexpr
    MAPPED: tl.constexpr
    COPIES: tl.constexpr  # experts may have several positions
    COUNTS: tl.constexpr  # where the counts of experts begin in the words; 0 if nothing is counted
    REPLAY: tl.constexpr
    ALIGNMENT: tl.constexpr  # of rows of logits, and of the bias, in bytes
    ROUNDED: tl.constexpr  # the dtype that weights are rounded to: "float32", "bfloat16" or "float16"


@triton.jit
def _exp(x):
    """The exponential function of CUDA's mathematics library, which torch's softmax and sigmoid use."""
    return tl.exp(x) if INTERPRET else libdevice.exp(x)


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)), rounded once after a fast division that one step of Newton's has corrected."""
    divisor = 1.0 + _exp(-x)
    if INTERPRET:
        return tl.div_rn(1.0, divisor)
    quotient = 1.0 / divisor
    corrected = tl.fma(quotient, tl.fma(-divisor, quotient, 1.0), quotient)
    return tl.where(divisor < float("inf"), corrected, quotient)


@triton.jit
def _key(score):
    """Map float32 to int32 in the same order: -0.0 is 0.0, and NaN is inf.

    Example: -inf, -1.0, -0.0, 1.0 and NaN give -0x7F800001, -0x3F800001, 0, 0x3F800000 and 0x7F800000.
    """
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ MAGNITUDE, bits)
    key = tl.where(key == -1, 0, key)
    return tl.where(score == score, key, KEY_OF_INFINITY)


@triton.jit
def _score(key):
    """The score of a key."""
    return tl.where(key < 0, key ^ MAGNITUDE, key).to(tl.float32, bitcast=True)


@triton.jit
def _take_largest(key, index):
    """Return the lowest index with the largest key, and the keys without it."""
    taken = tl.min(tl.where(key == tl.max(key), index, INT32_MAX))
    return taken, tl.where(index == taken, NOTHING, key)


@triton.jit
def _keep_best_groups(key, METHOD):
    """Keep the keys [GROUPS, MEMBERS] of the TOPK_GROUP groups whose GROUP_BEST best scores have the largest sums."""
    group, member = tl.arange(0, METHOD.GROUPS), tl.arange(0, METHOD.MEMBERS)[None, :]
    best = tl.max(key, 1)
    total = _score(best)
    if METHOD.MEMBERS > 1 and METHOD.GROUP_BEST > 1:
        place = tl.min(tl.where(key == best[:, None], member, INT32_MAX), 1)
        total += _score(tl.max(tl.where(member == place[:, None], NOTHING, key), 1))
    group_key = tl.where(group < METHOD.G, _key(total), NOTHING)
    for _ in range(METHOD.TOPK_GROUP):
        taken, group_key = _take_largest(group_key, group)
    return tl.where((group_key == NOTHING)[:, None], key, NOTHING)


@triton.jit
def _largest_and_sum(x, inside):
    """The largest of the elements inside, and their sum of exp(element - largest), by which a softmax divides."""
    largest = tl.max(tl.where(inside, x, -float("inf")))
    return largest, tl.sum(tl.where(inside, _exp(x - largest), 0.0))


@triton.jit
def _hash(row, expert):
    """As `ep_moe.routing.positions`: an evenly distributed uint32 for each row and expert."""
    value = row.to(tl.uint32) * OF_ROW + expert.to(tl.uint32) * OF_EXPERT
    value = (value ^ (value >> 16)) * FIRST
    value = (value ^ (value >> 15)) * SECOND
    return value ^ (value >> 16)


@triton.jit
def _position(words_ptr, row, expert, mask, COPIES: tl.constexpr):
    """The position of an expert for a token of this row, int64; `mask`: where there is one."""
    word = tl.load(words_ptr + expert, mask=mask, other=0)
    if COPIES:
        choices = (word >> 32).to(tl.uint32)
        place = (word & LOW) + ((_hash(row, expert).to(tl.uint64) * choices) >> 32).to(tl.int64)
        word = tl.load(words_ptr + place, mask=mask & (choices > 0), other=word)
    return word


@triton.jit
def _count(counts_ptr, num_tokens_ptr, row, expert, mask, E: tl.constexpr):
    """Add one to each expert of the rows before the padding, in the lane [E] of the row."""
    if num_tokens_ptr is not None:
        mask = mask & (row < tl.load(num_tokens_ptr))
    counts_ptr += row % LANES * E
    tl.atomic_add(counts_ptr + expert, tl.full(expert.shape, 1, tl.int64), mask=mask, sem="relaxed")


@triton.jit(
    do_not_specialize=["num_tokens", "logits_stride", "replay_stride", "replay_column_stride"],
    do_not_specialize_on_alignment=["scores", "chosen"],
)
def _route_kernel(
    scores,  # `Scores`
    chosen,  # `Chosen`
    num_tokens,  # T
    logits_stride,
    replay_stride,
    replay_column_stride,
    METHOD,
):
    """Choose K experts for one token, and weight them.

    Example: for logits 0, 2, 1 and 2, K = 2, "logit" and "softmax_chosen", experts 1 and 3 get 0.5 each.
    """
    token = tl.program_id(0).to(tl.int64)
    if token >= num_tokens:
        return
    row_ptr = tl.multiple_of(scores.logits_ptr + token * logits_stride, METHOD.ALIGNMENT)
    bias_ptr = tl.multiple_of(scores.bias_ptr, METHOD.ALIGNMENT)
    group, member = tl.arange(0, METHOD.GROUPS)[:, None], tl.arange(0, METHOD.MEMBERS)[None, :]
    expert = group * METHOD.GROUP_SIZE + member
    exists = (group < METHOD.G) & (member < METHOD.GROUP_SIZE)
    choice = tl.load(row_ptr + expert, mask=exists, other=-float("inf")).to(tl.float32)
    if METHOD.BIAS:
        bias = tl.load(bias_ptr + expert, mask=exists, other=0.0).to(tl.float32)
    if METHOD.WEIGHT == "softmax":
        largest, total = _largest_and_sum(choice, exists)
    if METHOD.CHOICE != "logit":
        choice = _sigmoid(choice) if METHOD.CHOICE == "sigmoid" else tl.div_rn(_exp(choice - largest), total)
        if METHOD.BIAS:
            choice += bias
        is_nan = tl.max((exists & (choice != choice)).to(tl.int32))
    key = tl.where(exists, _key(choice), NOTHING)
    if METHOD.G > 1:
        key = _keep_best_groups(key, METHOD)
    column = tl.arange(0, METHOD.COLUMNS)
    used = column < METHOD.K
    ids = tl.zeros([METHOD.COLUMNS], tl.int32)
    for k in range(METHOD.K):
        taken, key = _take_largest(key, expert)
        ids = tl.where(column == k, taken, ids)
    logit = tl.load(row_ptr + ids, mask=used, other=0.0).to(tl.float32)
    physical = ids
    if METHOD.MAPPED:
        physical = _position(scores.words_ptr, token, ids, used, METHOD.COPIES).to(tl.int32)
    if METHOD.COUNTS:
        _count(scores.words_ptr + METHOD.COUNTS, scores.num_tokens_ptr, token, ids, used, METHOD.G * METHOD.GROUP_SIZE)
    if METHOD.WEIGHT == "softmax_chosen":
        largest, total = _largest_and_sum(logit, used)
    if METHOD.WEIGHT == "sigmoid":
        weight = _sigmoid(logit)
    elif METHOD.WEIGHT == "logit":
        weight = logit
    else:
        weight = tl.div_rn(_exp(logit - largest), total)
    if METHOD.CHOICE != "logit":  # the weights do not contain the bias: without this, a NaN in it would go unnoticed
        weight = tl.where(is_nan > 0, float("nan"), weight)
    if METHOD.NORMALIZE:
        weight = tl.div_rn(weight, tl.sum(tl.where(used, weight, 0.0)) + METHOD.EPSILON)
    place = token * METHOD.K + column
    weight *= METHOD.FACTOR
    if METHOD.ROUNDED == "bfloat16":
        weight = to_bf16(weight).to(tl.float32)
    elif METHOD.ROUNDED == "float16":
        weight = weight.to(tl.float16).to(tl.float32)
    tl.store(chosen.weights_ptr + place, weight, mask=used)
    if METHOD.REPLAY:
        replay_ptr = chosen.replay_ptr + token * replay_stride + column * replay_column_stride
        tl.store(replay_ptr, ids.to(tl.int16), mask=used)
    tl.store(chosen.ids_ptr + place, physical, mask=used)


@triton.jit(
    do_not_specialize=["num_ids", "row_stride", "column_stride"],
    do_not_specialize_on_alignment=["maps"],
)
def _map_ids_kernel(
    maps,  # `IdMaps`
    num_ids,  # T * K
    row_stride,
    column_stride,
    K: tl.constexpr,
    E: tl.constexpr,  # 0 if all ids stay and nothing is counted
    ADDED: tl.constexpr,  # P - E
    MAPPED: tl.constexpr,  # else all ids stay
    COPIES: tl.constexpr,
    COUNTS: tl.constexpr,  # as in `Method`
    BLOCK: tl.constexpr,
):
    """Turn logical ids into physical ones: negative ids stay; an id from E on grows by P - E, and so stays invalid.

    Example: 3 experts at positions 0, 1 and 3 of 4, and ids -1, 2 and 3 give -1, 3 and 4.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_ids
    row, column = (place // K).to(tl.int64), (place % K).to(tl.int64)
    ids = tl.load(maps.ids_ptr + row * row_stride + column * column_stride, mask=inside, other=-1).to(tl.int64)
    known = (ids >= 0) & (ids < E)
    physical = tl.where(known, ids, 0)
    if COUNTS:
        _count(maps.words_ptr + COUNTS, maps.num_tokens_ptr, row, physical, inside & known, E)
    if MAPPED:
        physical = _position(maps.words_ptr, row, physical, inside & known, COPIES)
    physical = tl.where(known, physical, tl.where(ids < 0, ids, ids + ADDED))
    tl.store(maps.out_ptr + place, clamp_to_int32(physical), mask=inside)
