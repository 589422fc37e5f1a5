"""Rows as words with more scales, or entries, than a warp has threads: only words checked for arrival are used."""

import dataclasses

import pytest

from ep_moe.config import Layout
from ep_moe.group import EPGroup
from ep_moe.testing import TransportCase, check_round
from ep_moe.transport.one_sided import NvlinkTransport
from nvlink.common import on_ranks

NARROW_GROUPS = "fp8_block_16x16"
CASES = {
    "scales": TransportCase(name="many-scales", tokens=(2, 1), hidden=640, scheme=NARROW_GROUPS, num_topk=2),
    "flat-scales": TransportCase(
        name="many-scales", tokens=(1, 2), hidden=640, scheme=NARROW_GROUPS, num_topk=2, layout=Layout.FLAT
    ),
    "entries": TransportCase(name="many-entries", tokens=(2, 2), num_topk=40, num_experts=44, routing="holes"),
    "flat-entries": TransportCase(
        name="many-entries", tokens=(2, 1), num_topk=33, num_experts=44, layout=Layout.FLAT, routing="repeats"
    ),
}


def check_on_rank(group: EPGroup, case: TransportCase) -> None:
    transport = NvlinkTransport(group, case.make_placement(), dataclasses.replace(case.config, max_topk=64))
    check_round(transport, case, group.device)
    transport.destroy()


@pytest.mark.parametrize("name", CASES)
def test_wide_rows(name: str) -> None:
    on_ranks(check_on_rank, CASES[name])
