"""Every shared case with few tokens, as words or as rows in halves; refusals, slots, abandoned rounds."""

import dataclasses
import functools

import pytest
from no_memory import abandoning_without_memory

from ep_moe.config import Layout
from ep_moe.group import EPGroup
from ep_moe.quant import get_scheme
from ep_moe.testing import TransportCase, check_round, transport_cases
from ep_moe.testing.transports import CHECKS
from ep_moe.transport.one_sided import NvlinkTransport, NvshmemTransport
from nvlink.common import Programs, on_ranks, patched, with_programs
from nvlink.nans import check_all_ones

FEW = 2  # tokens of a rank at most
MANY = 6  # of a rank in "many-tokens", of which 4 are counted together
BESIDE = CHECKS | {"all-ones": check_all_ones}


def small(case: TransportCase) -> TransportCase:
    """The same case with at most FEW tokens of each rank, in at most two more rows."""
    if case.name == "many-tokens":
        return dataclasses.replace(case, tokens=(MANY, *(MANY - 1,) * (case.num_ranks - 1)), hidden=32)
    tokens = tuple(min(count, FEW) for count in case.tokens)
    rows = tuple(t + 2 * (before > t0) for t, t0, before in zip(tokens, case.tokens, case.rows, strict=False))
    return dataclasses.replace(case, tokens=tokens, rows=rows)


def cases(num_ranks: int) -> dict[str, TransportCase]:
    """Small cases by name: all for 2 ranks, else those whose layouts or placements depend on the number of ranks."""
    every = {case.name: small(case) for case in transport_cases(num_ranks)}
    if num_ranks == 2:
        return every
    if num_ranks == 8:
        return {"mixed-layouts": every["mixed-layouts"]}
    names = (
        *("compact-fewer-experts-than-ranks", "mixed-layouts", "round-robin", "batched-one_rank"),
        *("compact-one-token", "flat-mxfp8-of-more-rows"),
    )
    return {name: every[name] for name in names}


def ways(cases: list[TransportCase]) -> list[tuple[str, ...]]:
    """How each case is sent: as words and as rows if it is the first of its payload or layout, else alternating."""
    found, seen = [], set()
    for number, case in enumerate(cases):
        kinds = {(case.scheme, case.dtype, case.quantized_input), (case.layout, case.mixed_layouts)}
        found.append(("rows", "words")[number % 2 :][:1] if kinds <= seen else ("words", "rows"))
        seen |= kinds
    return found


def check_on_rank(group: EPGroup, stores: str = "") -> dict[str, str]:
    """The outcome of each case on this rank, "" or the error, by nvlink, or by `nvshmem` with these stores."""
    outcomes, every = {}, cases(group.num_ranks)
    options, make = ({"nvshmem_stores": stores}, NvshmemTransport) if stores else ({}, NvlinkTransport)
    for (name, case), way in zip(every.items(), ways([*every.values()]), strict=True):
        if stores and group.num_ranks == 2 and len(way) == 1:
            continue  # puts carry rows, and words, of each layout and payload: other numbers of them are alike
        outcomes[name] = ""
        for slot, kind in enumerate(way):
            with patched(WORD_TOKENS=16 if kind == "words" else 0, SELF_COUNTED_TOKENS=4, BLOCK_TOKENS=4):
                config = dataclasses.replace(case.config, **options)
                transport = make(group, case.make_placement(), config)
                assert transport._context.ranks.PUTS.bit_count() == (group.num_ranks - 1) * (stores == "puts")
                try:
                    check_round(transport, case, group.device, slot, halves=(kind == "rows", kind == "rows"))
                except AssertionError as error:
                    outcomes[name] += f"{kind}: {error}\n"
            group.barrier()
            transport.destroy()
    return outcomes


@functools.cache
def outcomes(num_ranks: int) -> list[dict[str, str]]:
    """Each rank's outcome of each case; ranks are started once for all cases."""
    return on_ranks(check_on_rank, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [
        pytest.param(number, name, id=f"{number}-{name}", marks=() if number in (2, 3) else pytest.mark.matrix)
        for number in (1, 2, 3, 4, 8)
        for name in cases(number)
    ],
)
def test_carries(num_ranks: int, name: str) -> None:
    assert [rank[name] for rank in outcomes(num_ranks)] == [""] * num_ranks


def check_beside(group: EPGroup, name: str) -> None:
    """A check other than a case, with as many rows in flight as on a GPU if it is about what a token's rows are."""
    with with_programs(Programs(rows_in_flight=8 if name == "nan_weights" else 0)):
        BESIDE[name](abandoning_without_memory(NvlinkTransport), group)


@pytest.mark.parametrize("name", BESIDE)
def test_keeps(name: str) -> None:
    on_ranks(check_beside, name, num_ranks=3 if name in ("layers", "sit_out") else 2)


def sizes_on_rank(group: EPGroup) -> dict[str, list[tuple[int, ...]]]:
    """By layout, the shapes of x and of the experts' output of rounds with the bounds None, 3, 17 and 100."""
    case = TransportCase(name="sizes", tokens=(1,) * group.num_ranks, room=100, num_topk=3)
    transport = NvlinkTransport(group, case.make_placement(), case.config)
    inputs, found = case.inputs(group.rank), {}
    for layout in Layout:
        found[layout.value] = []
        for bound in (None, 3, 17, 100):
            dispatched = transport.dispatch(
                inputs.x, inputs.routing, layout=layout, scheme=get_scheme("none"), max_num_tokens=bound
            )
            found[layout.value].append((*dispatched.batch.x.shape[:-1], *dispatched.batch.output_shape[:-1]))
            transport.abandon()
    return found


def test_a_bound_sizes_the_batch() -> None:
    """2 ranks, of which each has 4 experts, and 3 of them for a token; sizes are multiples of 16 and at most M."""
    for found in on_ranks(sizes_on_rank, num_ranks=2):
        rows = [200, 2 * 16, 2 * 32, 200]
        assert found["batched"] == [(4, height) * 2 for height in rows]
        assert found["flat"] == [(height, height) for height in rows]
        assert [shape[0] < 3 * height + 4 * 16 for shape, height in zip(found["compact"], rows, strict=True)] == [
            True
        ] * 4
