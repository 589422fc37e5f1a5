"""What kernels of the exchange pack, the host and other kernels unpack; regions lie apart from each other."""

import pytest
import torch
import triton
import triton.language as tl

from ep_moe.kernels.exchange import wire_layout
from ep_moe.kernels.exchange.peers import Exchange, Links
from ep_moe.kernels.exchange.round_state import SlotState, report_loss
from ep_moe.kernels.exchange.wire_layout import (
    STATUS_MASK,
    Ranks,
    Regions,
    Row,
    code_of,
    epoch_of,
    expert_of,
    host_abort,
    host_word,
    make_abort,
    make_word,
    pack_entry,
    pack_status,
    payload_of,
    place_of,
    read_abort,
    value_of,
)
from interpreted.common import DEVICE

PAIRS = ((0, 0), (1, 5), (7, 2**20 - 1), (2**11 - 1, 12))  # experts and places
STATUSES = ((0, 17, 17), (3, 2**28 - 1, 2**28 - 1), (2, 2**30, 2**28 - 1), (2, -1, 2**28 - 1))  # code, value, as sent


@triton.jit
def _pack_kernel(in_ptr, out_ptr):
    first, second = tl.load(in_ptr), tl.load(in_ptr + 1)
    entry = pack_entry(first, second)
    status = pack_status(first & 7, second)
    word = make_word(first, second)
    tl.store(out_ptr, expert_of(entry))
    tl.store(out_ptr + 1, place_of(entry))
    tl.store(out_ptr + 2, code_of(status))
    tl.store(out_ptr + 3, value_of(status))
    tl.store(out_ptr + 4, epoch_of(word))
    tl.store(out_ptr + 5, payload_of(word))
    tl.store(out_ptr + 6, word)
    tl.store(out_ptr + 7, make_abort(first, second, wire_layout.COMBINE))


def packed(first: int, second: int) -> list[int]:
    """All that the kernel makes of two numbers."""
    out = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    _pack_kernel[(1,)](torch.tensor([first, second], dtype=torch.int32, device=DEVICE), out)
    return out.tolist()


@pytest.mark.parametrize(("expert", "place"), PAIRS)
def test_entries(expert: int, place: int) -> None:
    assert packed(expert, place)[:2] == [expert, place]


@pytest.mark.parametrize(("code", "value", "sent"), STATUSES)
def test_statuses(code: int, value: int, sent: int) -> None:
    assert packed(code, value)[2:4] == [code, sent]
    assert sent <= STATUS_MASK.value


@pytest.mark.parametrize(("epoch", "payload"), [(1, 5), (-1, 5), (3, -7), (2**31 - 1, -(2**31))])
def test_words(epoch: int, payload: int) -> None:
    found = packed(epoch, payload)
    assert found[4:6] == [epoch, payload]
    assert found[6] & 2**64 - 1 == host_word(epoch, payload) & 2**64 - 1


@pytest.mark.parametrize("suspect", [0, 2, 31])
def test_aborts(suspect: int) -> None:
    assert read_abort(packed(4, suspect)[7]) == (4, "combine", (suspect,))
    assert read_abort(host_abort((suspect, 1))) == (0, "dispatch", (suspect,))


def test_aborts_that_name_nobody() -> None:
    assert read_abort(host_abort(())) == (0, "dispatch", ())
    assert read_abort(host_word(9, 0)) is None


@triton.jit
def _report_loss_kernel(links, own, active, ranks: tl.constexpr):
    report_loss(Exchange(links, own), ranks, active)


LATER, EARLIER, BEFORE_IT = host_word(7, 257), host_word(7, 3), host_word(6, 258)


@pytest.mark.parametrize(
    ("aborts", "active", "reported"),
    [
        ((0, 0, 0), 0b111, [0, 0]),
        ((LATER, 0, EARLIER), 0b111, [1, EARLIER]),  # the combine waits for a rank that waits in the dispatch
        ((LATER, EARLIER, BEFORE_IT), 0b111, [1, BEFORE_IT]),
        ((LATER, EARLIER, BEFORE_IT), 0b001, [1, LATER]),  # what ranks store that were masked out
        ((0, EARLIER, 0), 0b101, [0, 0]),
    ],
)
def test_the_earliest_loss_that_an_active_rank_names_is_reported(
    aborts: tuple[int, ...], active: int, reported: list[int]
) -> None:
    found = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    ranks = Ranks(R=3, RANKS=4, RANK=2, STARTS=(0, 1, 2, 3), L=1, EXPERTS=1)
    words = torch.tensor(aborts, dtype=torch.int64, device=DEVICE)
    links = Links(*(None,) * len(Links._fields))._replace(abort_ptr=words)
    own = SlotState(*(None,) * len(SlotState._fields))._replace(news_ptr=found)
    _report_loss_kernel[(1,)](links, own, active, ranks)
    assert found.tolist() == reported


@pytest.mark.parametrize("num_groups", [0, 1, 56])
def test_regions_hold_what_is_sent(num_groups: int) -> None:
    """The last element of each region of the last rank and token, with the most experts and columns, is inside."""
    ranks = Ranks(R=3, RANKS=4, RANK=2, STARTS=(0, 5, 10, 12), L=5, EXPERTS=8)
    hidden, tokens, word_tokens, k = 7168, 24, 16, 6
    regions = Regions(
        num_ranks=3, max_experts=5, max_tokens=tokens, hidden=hidden, max_topk=k, itemsize=2, word_tokens=word_tokens
    )
    strides = {"VALUE_STRIDE": regions.value_bytes // 4, "SCALE_STRIDE": regions.scale_bytes // 4}
    strides |= {"ENTRY": 2 * k, "LL_STRIDE": regions.ll_words}
    row = Row(K=k, COLUMNS=8, VALUE_WORDS=hidden // 2, G=num_groups, GROUPS=64, **strides)
    assert row.VALUE_WORDS <= row.VALUE_STRIDE
    assert row.G <= row.SCALE_STRIDE
    assert wire_layout.ll_scales(row.K, row.VALUE_WORDS) + row.G <= row.LL_STRIDE
    needed = {
        wire_layout.HEADERS: 8 * ranks.R * wire_layout.header_stride(ranks.L),
        wire_layout.FLAGS: 8 * ranks.R * tokens,
        wire_layout.ENTRIES: 4 * ranks.R * tokens * row.ENTRY,
        wire_layout.VALUES: 4 * ranks.R * tokens * row.VALUE_STRIDE,
        wire_layout.SCALES: 4 * ranks.R * tokens * row.SCALE_STRIDE,
        wire_layout.LL_ROWS: 8 * ranks.R * word_tokens * row.LL_STRIDE,
        wire_layout.COMBINE_HEADERS: 8 * ranks.R,
        wire_layout.RETURNED: 2 * ranks.R * tokens * hidden,
    }
    assert len(needed) == len(regions.sizes) == len(regions.offsets) - 1
    for name, size in needed.items():
        assert size <= regions.sizes[name.value], name
        assert regions.offsets[name.value] + size <= regions.offsets[name.value + 1], name
        assert regions.offsets[name.value] % 256 == 0
