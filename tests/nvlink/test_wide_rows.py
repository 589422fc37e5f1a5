"""Rows as words with more scales, or entries, than a warp has threads: only words checked for arrival are used."""

import dataclasses

from ep_moe.config import Layout
from ep_moe.group import EPGroup
from ep_moe.testing import TransportCase, check_round
from ep_moe.transport.one_sided import NvlinkTransport
from nvlink.common import on_ranks

NARROW_GROUPS = "fp8_block_16x16"
CASES = [
    TransportCase(name="scales", tokens=(2, 1), hidden=640, scheme=NARROW_GROUPS, num_topk=2),
    TransportCase(name="flat-scales", tokens=(1, 2), hidden=640, scheme=NARROW_GROUPS, num_topk=2, layout=Layout.FLAT),
    TransportCase(name="entries", tokens=(2, 2), num_topk=40, num_experts=44, routing="holes"),
    TransportCase(
        name="flat-entries", tokens=(2, 1), num_topk=33, num_experts=44, layout=Layout.FLAT, routing="repeats"
    ),
]


def check_on_rank(group: EPGroup) -> None:
    for case in CASES:
        transport = NvlinkTransport(group, case.make_placement(), dataclasses.replace(case.config, max_topk=64))
        check_round(transport, case, group.device)
        group.barrier()
        transport.destroy()


def test_wide_rows() -> None:
    on_ranks(check_on_rank)
