"""The hierarchical transport with one-sided stores inside nodes of two ranks."""

import dataclasses

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.placement import Placement
from ep_moe.testing import check_round
from ep_moe.testing.transports import check_sit_out
from ep_moe.transport.hierarchical import HierarchicalTransport
from nvlink.common import on_ranks
from nvlink.test_cases import cases

NAMES = ("mixed-layouts", "compact-fewer-experts-than-ranks", "flat-mxfp8-of-more-rows")


def make(group: EPGroup, placement: Placement, config: TransportConfig) -> HierarchicalTransport:
    """The transport, with messages of one row between nodes."""
    config = dataclasses.replace(config, ranks_per_node=2, chunk_rows=1)
    return HierarchicalTransport(group, placement, config, inside="nvlink")


def check_on_rank(group: EPGroup) -> list[str]:
    """The errors of a few small cases on this rank, in halves and whole, and of a rank that sits a round out."""
    wrong = []
    for name in NAMES:
        case = cases(group.num_ranks)[name]
        transport = make(group, case.make_placement(), case.config)
        try:
            for halves in (False, True):
                check_round(transport, case, group.device, halves=(halves, halves))
        except AssertionError as error:
            wrong.append(str(error))
        group.barrier()
        transport.destroy()
    try:
        check_sit_out(make, group)
    except AssertionError as error:
        wrong.append(str(error))
    return wrong


def test_nodes_of_two_ranks() -> None:
    assert on_ranks(check_on_rank, num_ranks=4) == [[]] * 4
