"""The headers of a dispatch: a rank sends its own to all ranks, and a receiver judges the round by all headers.

Letters: T tokens on this rank, K top-k, R ranks, L the most experts that a rank owns.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.device import newest
from ep_moe.kernels.exchange.peers import Peer, Piece, put_word, stage
from ep_moe.kernels.exchange.round_state import MISMATCH, OTHER_LAYER, OWN_TOKENS, SENT, is_active, pick
from ep_moe.kernels.exchange.wire_layout import (
    BAD_IDS,
    FINE,
    FORMAT,
    HEADER_WORDS,
    HEADERS,
    LAYER,
    REFUSED,
    SETTINGS,
    STATUS,
    TOO_MANY,
    code_of,
    header_stride,
    make_word,
    pack_status,
    payload_of,
    value_of,
)
from ep_moe.kernels.numerics import INT32_MIN, clamp_to_int32


@triton.jit
def load_ids(tokens, first, end, ids_stride, K: tl.constexpr, TOKENS: tl.constexpr):
    """The ids of TOKENS tokens from `first` on, -1 from token `end` on: int32 [TOKENS] for each of K columns.

    All loads are on their way before any id is compared, for which the compiler would wait.
    """
    token, ids, found = first + tl.arange(0, TOKENS).to(tl.int64), tl.tuple([]), tl.tuple([])
    for k in tl.static_range(K):
        ids = ids + tl.tuple([tl.load(tokens.ids_ptr + token * ids_stride + k, mask=token < end, other=-1)])
    for k in tl.static_range(K):
        found = found + tl.tuple([clamp_to_int32(ids[k])])
    return found


@triton.jit
def _find_bad_id(tokens, present, num_physical, ids_stride, K: tl.constexpr, TOKENS: tl.constexpr):
    """The largest of the ids that no rank owns, cut to int32."""
    found = tl.zeros([TOKENS], tl.int32) + INT32_MIN
    for first in range(0, present, TOKENS):
        token = first + tl.arange(0, TOKENS).to(tl.int64)
        for k in tl.static_range(K):
            ids = tl.load(tokens.ids_ptr + token * ids_stride + k, mask=token < present, other=-1)
            bad = (ids < -1) | (ids >= num_physical)
            found = tl.maximum(found, tl.where(bad, clamp_to_int32(ids), INT32_MIN))
    return tl.max(found, 0)


class Announcer(NamedTuple):
    """A program that sends headers."""

    index: Any
    count: Any  # of such programs
    present: Any  # tokens that are sent
    num_tokens: Any  # as the caller counts them
    max_tokens: Any
    num_blocks: Any  # B
    num_physical: Any  # P
    refusal: Any  # 1 if the host has refused this rank's input


@triton.jit
def announce(
    exchange, ranks: tl.constexpr, round_, tokens, ids_stride, announcer, row: tl.constexpr, sending: tl.constexpr
):
    """Send every rank this rank's header: status, format, layer and counts.

    Rule: all of it is sent in every round, also with a status that refuses the round, since receivers wait for all.
    """
    links, own = exchange.links, exchange.own
    present, num_tokens, num_physical = announcer.present, announcer.num_tokens, announcer.num_physical
    EXPERTS: tl.constexpr = sending.EXPERT_BLOCK
    totals_ptr = tokens.block_counts_ptr + announcer.num_blocks.to(tl.int64) * (num_physical + 1)
    header = ranks.RANK * header_stride(ranks.L)
    if not sending.IDS_COUNTED:
        ids = load_ids(tokens, 0, present, ids_stride, row.K, sending.TOKENS)
    for first in range(announcer.index * EXPERTS, num_physical, announcer.count * EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        if sending.IDS_COUNTED:
            count = tl.load(totals_ptr + expert, mask=expert < num_physical, other=0)
        else:
            hit = tl.zeros([sending.TOKENS, EXPERTS], tl.int32)
            for k in tl.static_range(row.K):
                hit = hit | (ids[k][:, None] == expert[None, :]).to(tl.int32)
            count = tl.sum(hit, 0)
        word = make_word(tl.zeros([EXPERTS], tl.int32) + round_.epoch, count)
        # staged once for all ranks, each of which takes the words of its experts
        stage(exchange, ranks, HEADERS, HEADER_WORDS, expert, word, expert < num_physical)
        for r in tl.static_range(ranks.R):
            place = expert + (HEADER_WORDS - ranks.STARTS[r])
            theirs = (expert >= ranks.STARTS[r]) & (expert < ranks.STARTS[r + 1])
            mask = theirs & round_.enabled & is_active(round_.active, r)
            low, high = tl.maximum(first, ranks.STARTS[r]), tl.minimum(first + EXPERTS, ranks.STARTS[r + 1])
            count = tl.where(round_.enabled & is_active(round_.active, r), high - low, 0)
            piece = Piece(header, ranks.STARTS[r], low + (HEADER_WORDS - ranks.STARTS[r]), count)
            put_word(exchange, ranks, Peer(links.bases[r], r), HEADERS, piece, place, word, mask)
    if announcer.index == 0:
        if sending.IDS_COUNTED:
            bad = tl.load(totals_ptr + num_physical)
        else:
            found = tl.zeros([sending.TOKENS], tl.int32)
            for k in tl.static_range(row.K):
                found += ((ids[k] < -1) | (ids[k] >= num_physical)).to(tl.int32)
            bad = tl.sum(found, 0)
        wrong_count = (num_tokens > announcer.max_tokens) | (num_tokens < 0)
        code = tl.where(wrong_count, TOO_MANY, tl.where(bad > 0, BAD_IDS, FINE))
        code = tl.where(announcer.refusal > 0, REFUSED, code)
        status = make_word(round_.epoch, pack_status(code, tl.where(code == BAD_IDS, bad, num_tokens)))
        fingerprint = round_.fingerprint
        if code == BAD_IDS:  # there is no payload: the format's word carries one of the ids
            fingerprint = _find_bad_id(tokens, present, num_physical, ids_stride, row.K, sending.TOKENS)
        others = (fingerprint, round_.layer, round_.settings)  # FORMAT, LAYER, SETTINGS
        stage(exchange, ranks, HEADERS, 0, STATUS, status, None)
        for w in tl.static_range(FORMAT, HEADER_WORDS):
            stage(exchange, ranks, HEADERS, 0, w, make_word(round_.epoch, others[w - FORMAT]), None)
        for r in tl.static_range(ranks.R):
            if round_.enabled & is_active(round_.active, r):
                put_word(exchange, ranks, Peer(links.bases[r], r), HEADERS, Piece(header, 0), STATUS, status, None)
                for w in tl.static_range(FORMAT, HEADER_WORDS):
                    piece = Piece(header, 0, 0, HEADER_WORDS * (w == HEADER_WORDS - 1))  # all with the last word
                    word = make_word(round_.epoch, others[w - FORMAT])
                    put_word(exchange, ranks, Peer(links.bases[r], r), HEADERS, piece, w, word, None)
        tl.store(own.state_ptr + OWN_TOKENS, tl.where(wrong_count, announcer.max_tokens, num_tokens))
        tl.store(own.state_ptr + SENT, round_.epoch)  # also if it is skipped: ranks must not resume with this round


@triton.jit
def judge(headers_ptr, round_, is_source, ranks: tl.constexpr):
    """Return a round's verdict (FINE, or why it fails), the rank that caused it, and the int64 that describes it.

    This rank's own mistake comes first: its host has raised it already. The int64 is, for MISMATCH, a bit for each rank
    with another format; for BAD_IDS, one of the ids above their count; for OTHER_LAYER, the other rank's `settings`
    above its `layer`; else the value of the status.
    """
    RANK: tl.constexpr = ranks.RANK
    RANKS: tl.constexpr = ranks.RANKS
    source = tl.arange(0, RANKS)
    header_ptr, known = headers_ptr + source * header_stride(ranks.L), source < ranks.R
    statuses = payload_of(tl.load(header_ptr + STATUS, mask=known, other=0, volatile=True, cache_modifier=newest()))
    formats = payload_of(tl.load(header_ptr + FORMAT, mask=known, other=0, volatile=True, cache_modifier=newest()))
    layers = payload_of(tl.load(header_ptr + LAYER, mask=known, other=0, volatile=True, cache_modifier=newest()))
    others = payload_of(tl.load(header_ptr + SETTINGS, mask=known, other=0, volatile=True, cache_modifier=newest()))
    code = tl.where(is_source, code_of(statuses), FINE)
    compared = is_source & (code == FINE)
    odd = compared & (formats != round_.fingerprint)
    code = tl.where(odd, MISMATCH, code)
    code = tl.where(compared & ((layers != round_.layer) | (others != round_.settings)), OTHER_LAYER, code)
    suspect = tl.where(pick(code, RANK, RANKS) != FINE, RANK, tl.min(tl.where(code != FINE, source, RANKS), 0))
    verdict, number = pick(code, suspect, RANKS), pick(value_of(statuses), suspect, RANKS)
    bad_id = pick(formats, suspect, RANKS).to(tl.int64) << 32
    number = tl.where(verdict == MISMATCH, tl.sum(odd.to(tl.int32) << source, 0), number).to(tl.int64)
    tag = make_word(pick(others, suspect, RANKS), pick(layers, suspect, RANKS))
    number = tl.where(verdict == BAD_IDS, number | bad_id, number)
    return verdict, suspect, tl.where(verdict == OTHER_LAYER, tag, number)


@triton.jit
def place_experts(exchange, ranks: tl.constexpr, headers_ptr, receiver, writes, active, BATCHED: tl.constexpr):
    """Return the first row of each expert for each source, [RANKS * EXPERTS]; with `writes` also write the counts.

    Example: two sources send expert 7, whose rows start at 64, 3 and 2 rows: they begin at 64 and at 67.
    """
    own, alignment = exchange.own, receiver.alignment
    EXPERTS: tl.constexpr = ranks.EXPERTS
    num_experts = ranks.STARTS[ranks.RANK + 1] - ranks.STARTS[ranks.RANK]
    source, expert = tl.arange(0, ranks.RANKS), tl.arange(0, EXPERTS)
    inside = ((source < ranks.R) & is_active(active, source))[:, None] & (expert < num_experts)[None, :]
    count_ptrs = headers_ptr + source[:, None] * header_stride(ranks.L) + HEADER_WORDS + expert[None, :]
    count = tl.where(
        inside, payload_of(tl.load(count_ptrs, mask=inside, other=0, volatile=True, cache_modifier=newest())), 0
    )
    total = tl.sum(count, 0)
    if BATCHED:
        row_start = expert * receiver.height
    else:
        aligned = (total + alignment - 1) // alignment * alignment
        row_start = tl.cumsum(aligned, 0) - aligned
    if writes:
        mine = expert < num_experts
        tl.store(own.num_rows_ptr + expert, total, mask=mine)
        tl.store(own.row_start_ptr + expert, row_start.to(tl.int32), mask=mine)
        tl.store(own.rows_seen_ptr + expert, tl.load(own.rows_seen_ptr + expert, mask=mine) + total, mask=mine)
    first = row_start[None, :] + tl.cumsum(count, 0) - count
    return tl.reshape(first.to(tl.int32), [ranks.RANKS * EXPERTS])
