"""The transport `nvshmem` in the interpreter: the same kernels and cases, by puts from an outbox.

What a put sends is copied over memory that is mapped; NVSHMEM itself is not there.
"""

import dataclasses

import pytest

from ep_moe.group import EPGroup
from ep_moe.testing import check_round
from ep_moe.transport.one_sided.nvshmem import NvshmemTransport
from nvlink.common import on_ranks, patched
from nvlink.test_cases import cases, ways


def check_on_rank(group: EPGroup) -> dict[str, str]:
    """The outcome of each case on this rank: "" or the error."""
    outcomes = {}
    every = cases(group.num_ranks)
    for (name, case), way in zip(every.items(), ways([*every.values()]), strict=True):
        outcomes[name] = ""
        for slot, kind in enumerate(way):
            with patched(WORD_TOKENS=16 if kind == "words" else 0, SELF_COUNTED_TOKENS=4, BLOCK_TOKENS=4):
                config = dataclasses.replace(case.config, nvshmem_stores="puts")
                transport = NvshmemTransport(group, case.make_placement(), config)
                assert bin(transport._context.ranks.PUTS).count("1") == group.num_ranks - 1
                try:
                    check_round(transport, case, group.device, slot, halves=(kind == "rows", kind == "rows"))
                except AssertionError as error:
                    outcomes[name] += f"{kind}: {error}\n"
            group.barrier()
            transport.destroy()
    return outcomes


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_case_by_puts(num_ranks: int) -> None:
    for rank, outcomes in enumerate(on_ranks(check_on_rank, num_ranks=num_ranks)):
        assert {name: text for name, text in outcomes.items() if text} == {}, f"rank {rank}"


def by_nodes(group: EPGroup) -> list[int]:
    """What ranks 0 and 1 on one node, and 2 on another, reach by puts, and a round that they are right in."""
    group.node = group.rank // 2
    found = []
    for stores in ("auto", "puts"):
        case = cases(group.num_ranks)["compact-one-token"]
        config = dataclasses.replace(case.config, nvshmem_stores=stores)
        transport = NvshmemTransport(group, case.make_placement(), config)
        check_round(transport, case, group.device)
        found.append(transport._context.ranks.PUTS)
        group.barrier()
        transport.destroy()
    for options, said in (
        (
            {"nvshmem_stores": "addresses"},
            r"memory that all ranks reach, but rank \d and rank \d are on different mach",
        ),
        ({"on_peer_loss": "mask"}, r"on_peer_loss \('mask'\) needs ranks on one node, got 2"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=said):
            NvshmemTransport(group, case.make_placement(), dataclasses.replace(case.config, **options))
    return found


def test_nodes_are_reached_by_puts() -> None:
    assert on_ranks(by_nodes, num_ranks=3) == [[0b100, 0b110], [0b100, 0b101], [0b011, 0b011]]
