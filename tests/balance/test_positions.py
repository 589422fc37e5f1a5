"""Which copy a token takes: the nearest, and evenly among several; tables that are updated in place."""

import collections

import pytest
import torch

from ep_moe.placement import Placement
from ep_moe.routing import PositionTable

# expert 0 is on ranks 0 to 3, expert 1 on ranks 0 and 6, the others once
RANKS = ((0, 1), (0, 2), (0, 3), (0, 4), (5,), (6,), (1, 7), (8,))
PLACEMENT = Placement(sum(RANKS, ()), (0, 2, 4, 6, 8, 9, 10, 12, 13))


def rank_of(position: int) -> int:
    return next(rank for rank in range(8) if PLACEMENT.starts[rank + 1] > position)


def taken(rank: int, expert: int, rows: int, node: tuple[int, int] | None = None) -> list[int]:
    """The ranks whose copies the rows of a rank take."""
    ids = torch.full((rows, 1), expert, dtype=torch.int32)
    positions = PositionTable(PLACEMENT, rank, node=node).to_physical(ids).flatten().tolist()
    assert all(PLACEMENT.physical_to_logical[position] == expert for position in positions)
    return [rank_of(position) for position in positions]


def test_the_nearest_copy() -> None:
    for rank in range(4):
        assert set(taken(rank, 0, 20)) == {rank}
    assert set(taken(6, 1, 20)) == {6}
    assert set(taken(1, 1, 20, node=(0, 4))) == {0}
    assert set(taken(5, 1, 20, node=(4, 8))) == {6}
    assert set(taken(5, 0, 40, node=(4, 8))) == {0, 1, 2, 3}
    assert set(taken(7, 2, 20)) == {1}


def test_idle_copies_are_not_taken() -> None:
    """The own rank's copy neither, nor one of several on the node."""
    placement = Placement(PLACEMENT.physical_to_logical, PLACEMENT.starts, (1, 4))  # expert 1 on rank 0, 0 on rank 2
    ids = torch.zeros(60, 2, dtype=torch.int64)
    ids[:, 1] = 1
    first, second = PositionTable(placement, 0).to_physical(ids).T.tolist()
    assert set(first) == {0}
    assert set(second) == {10}
    assert set(PositionTable(placement, 2).to_physical(ids)[:, 0].tolist()) == {0, 2, 6}
    assert placement.logical_to_physical().tolist()[:3] == [0, 10, 3]
    for idle, message in {
        (1, 10): "idle leaves expert 1 without a position",
        (4, 1): r"idle \(4, 1\) must be ascending positions in \[0, 13\)",
        (13,): r"idle \(13,\) must be ascending",
    }.items():
        with pytest.raises(ValueError, match=message):
            Placement(PLACEMENT.physical_to_logical, PLACEMENT.starts, idle)


def test_copies_get_equal_counts() -> None:
    """Row by row, ranks 4 to 7 take each of four copies once; the rows of one rank take them evenly too."""
    rows = [taken(rank, 0, 4096) for rank in range(4, 8)]
    assert all(sorted(each) == [0, 1, 2, 3] for each in zip(*rows, strict=True))
    for each in rows:
        counts = collections.Counter(each)
        assert all(abs(counts[copy] - 1024) < 100 for copy in range(4))
    second = collections.Counter(taken(4, 1, 4096))
    assert abs(second[0] - 2048) < 140
    assert taken(4, 1, 64) != [[0, 6][copy % 2] for copy in taken(4, 0, 64)]  # experts do not choose alike


def test_updates_in_place() -> None:
    table = PositionTable(PLACEMENT, 4, counted=True)
    address, ids = table.words.data_ptr(), torch.arange(9).repeat(3, 1)
    table.to_physical(ids)
    other = Placement(tuple(8 - expert for expert in PLACEMENT.physical_to_logical), PLACEMENT.starts)
    table.update(other)
    assert table.words.data_ptr() == address
    assert table.placement == other
    assert torch.equal(table.to_physical(ids), PositionTable(other, 4).to_physical(ids))
    assert table.counts.tolist() == [6] * 9
    with pytest.raises(ValueError, match="the new placement has 13 experts"):
        table.update(Placement.linear(13, 8))
    fixed = PositionTable(Placement.linear(4, 2), 0)
    with pytest.raises(ValueError, match="changing=False"):
        fixed.update(Placement((1, 0, 2, 3), (0, 2, 4)))
    changing = PositionTable(Placement.linear(4, 2), 0, changing=True)
    changing.update(Placement((1, 0, 2, 3), (0, 2, 4)))
    assert changing.to_physical(torch.tensor([[0, 1, -1, 3, 4]])).tolist() == [[1, 0, -1, 3, 4]]
    with pytest.raises(ValueError, match=r"node \(\(1, 2\)\) is no range of 2 ranks with rank 0"):
        PositionTable(Placement.linear(4, 2), 0, node=(1, 2))
