"""The transport `nvshmem` in the interpreter: the same kernels, by puts from an outbox and by addresses.

What a put sends is copied over memory that is mapped; NVSHMEM itself is not there.
"""

import dataclasses

import pytest

from ep_moe.group import EPGroup
from ep_moe.testing import TransportCase, check_round
from ep_moe.transport.one_sided.nvshmem import NvshmemTransport
from nvlink.common import on_ranks, patched
from nvlink.test_cases import cases, ways

CASES = 3
STORES = ("puts", "addresses")


def check_on_rank(group: EPGroup, num_words: int) -> dict[str, str]:
    """The outcome of each case on this rank: "" or the error."""
    outcomes = {}
    every = cases(group.num_ranks)
    for (name, case), way in zip(every.items(), ways([*every.values()]), strict=True):
        outcomes[name] = ""
        for slot, kind in enumerate(way):
            with patched(WORD_TOKENS=16 if kind == "words" else 0, SELF_COUNTED_TOKENS=4, BLOCK_TOKENS=4):
                config = dataclasses.replace(case.config, nvshmem_stores="puts")
                transport = NvshmemTransport(group, case.make_placement(), config)
                try:
                    check_round(transport, case, group.device, slot, halves=(kind == "rows", kind == "rows"))
                except AssertionError as error:
                    outcomes[name] += f"{kind}: {error}\n"
            group.barrier()
            transport.destroy()
    return outcomes


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_case_by_puts(num_ranks: int) -> None:
    for rank, outcomes in enumerate(on_ranks(check_on_rank, 16, num_ranks=num_ranks)):
        assert {name: text for name, text in outcomes.items() if text} == {}, f"rank {rank}"
