"""Any number of programs works, of announcers, senders and receivers; and rows wider than a warp."""

import dataclasses
import functools

import pytest

from ep_moe.config import Layout
from ep_moe.group import EPGroup
from ep_moe.testing import TransportCase, check_round
from ep_moe.transport.one_sided import NvlinkTransport
from nvlink.common import Programs, on_ranks, patched, with_programs

GRIDS = {
    "2-announce-3-send-5-receive": Programs(announcers=2, senders=3, receivers=5),
    "5-announce-4-send-2-receive": Programs(announcers=5, senders=4, receivers=2),
    "3-announce-5-send-1-receives": Programs(announcers=3, senders=5, receivers=1),
    "1-announces-1-sends-4-receive": Programs(receivers=4),
    "small-pieces": Programs(announcers=4, senders=2, receivers=3, small_pieces=True),
    "one-program": Programs(fused=True),
}
CASES = [
    TransportCase(name="grid-batched", tokens=(3, 2), layout=Layout.BATCHED, hidden=272, scheme="fp8_block"),
    TransportCase(name="grid-compact", tokens=(2, 3), hidden=528, shared=True, num_topk=3, routing="repeats"),
    TransportCase(name="grid-flat", tokens=(2, 2), rows=(4, 2), layout=Layout.FLAT, hidden=48, scheme="mxfp8"),
]
NARROW_GROUPS = {"hidden": 640, "scheme": "fp8_block_16x16", "num_topk": 2}
# rows as words with more scales, or entries, than a warp has threads: only words checked for arrival are used
WIDE = [
    TransportCase(name="scales", tokens=(2, 1), **NARROW_GROUPS),
    TransportCase(name="flat-scales", tokens=(1, 2), layout=Layout.FLAT, **NARROW_GROUPS),
    TransportCase(name="entries", tokens=(2, 2), num_topk=40, num_experts=44, routing="holes"),
    TransportCase(
        name="flat-entries", tokens=(2, 1), num_topk=33, num_experts=44, layout=Layout.FLAT, routing="repeats"
    ),
]


def check_on_rank(group: EPGroup) -> dict[str, str]:
    """The outcome of each grid on this rank: "" or the error."""
    outcomes = dict.fromkeys(GRIDS, "")
    for number, (name, programs) in enumerate(GRIDS.items()):
        for place, case in enumerate(CASES):
            word_tokens = (16, 0)[(number + place) % 2]
            halves = (False, False) if programs.fused else (number % 2 == 0, word_tokens == 0)
            with patched(WORD_TOKENS=word_tokens, SELF_COUNTED_TOKENS=2), with_programs(programs):
                transport = NvlinkTransport(group, case.make_placement(), case.config)
                try:
                    check_round(transport, case, group.device, slot=number % 2, halves=halves)
                except AssertionError as error:
                    outcomes[name] += f"{case.name}, {word_tokens} word tokens: {error}\n"
            group.barrier()
            transport.destroy()
    return outcomes


@functools.cache
def outcomes() -> list[dict[str, str]]:
    """Each rank's outcome of each grid."""
    return on_ranks(check_on_rank)


@pytest.mark.parametrize("name", GRIDS)
def test_any_grid(name: str) -> None:
    assert [rank[name] for rank in outcomes()] == ["", ""]


def check_wide(group: EPGroup) -> None:
    for case in WIDE:
        transport = NvlinkTransport(group, case.make_placement(), dataclasses.replace(case.config, max_topk=64))
        check_round(transport, case, group.device)
        group.barrier()
        transport.destroy()


def test_wide_rows() -> None:
    on_ranks(check_wide)
