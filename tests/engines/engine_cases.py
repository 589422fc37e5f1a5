"""Cases that are the same for all engines: of a loaded model, `made`, and a call of its first layer of experts.

Letters: T rows on this rank, H hidden, K top-k.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from ep_moe.engines.common.plugin import Hook, check_hooks
from ep_moe.group import PeerLostError
from ep_moe.quant import StoredMatrix


@dataclasses.dataclass(frozen=True)
class Rows:
    """The input of a layer on one rank."""

    x: torch.Tensor  # [T, H]
    ids: torch.Tensor  # [T, K] int32
    weights: torch.Tensor  # [T, K]


Call = Callable[[Rows], torch.Tensor]


def random_rows(rank: int, num_rows: int, hidden: int, num_experts: int, num_topk: int, seed: int = 0) -> Rows:
    """Random rows of a rank, on the CPU."""
    random = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(num_rows, hidden, generator=random)
    weights, ids = torch.rand(num_rows, num_experts, generator=random).topk(num_topk, dim=-1)
    return Rows(x, ids.to(torch.int32), weights)


def any_rank(made: Any, found: bool) -> bool:
    """Whether it was found on any rank."""
    return any(made.group.all_gather_object(found))


def fails(made: Any) -> bool:
    """Whether the comparison with the reference fails on any rank."""
    try:
        made.check_ours()
        made.check()
    except AssertionError:
        return any_rank(made, True)
    return any_rank(made, False)


@contextlib.contextmanager
def swapped(views: Sequence[torch.Tensor]) -> Iterator[None]:
    """The first two experts of tensors [L, ...] in each other's place."""

    def swap() -> None:
        for view in views:
            data = view.data.view(torch.uint8) if view.element_size() == 1 else view.data
            data.copy_(data[[1, 0, *range(2, data.shape[0])]])

    swap()
    yield
    swap()


def faults_are_seen(made: Any, losing_a_token: contextlib.AbstractContextManager[Any]) -> None:
    """The comparison fails with two experts swapped, with a token lost, and with a layer that is not ours."""
    assert not fails(made)
    layer = made.experts[0]
    with swapped([layer.w13_weight]):
        assert fails(made), "two swapped experts were not seen"
    with losing_a_token:
        assert fails(made), "a lost token was not seen"
    ours = type(layer.quant_method)
    layer.quant_method.__class__ = ours.__mro__[1]
    assert fails(made), "a layer that is not ours was not seen"
    layer.quant_method.__class__ = ours
    assert not fails(made)


def swaps_are_seen(made: Any, matrix: StoredMatrix, per_tensor: bool = True) -> None:
    """The comparison fails with the values, the scales or the zero points of two experts of w13 swapped.

    Args: per_tensor: with scales per tensor too, which may differ too little to be seen.
    """
    for name, tensor in matrix.tensors.items():
        if bool((tensor == tensor[:1]).all()) or (name == "scale" and tensor.dim() == 1 and not per_tensor):
            continue  # all experts have the same
        with swapped([tensor]):
            assert fails(made), f"swapped {name} were not seen"
    made.check()


def parameters_stay(call: Call, rows: Rows, views: Sequence[torch.Tensor], starts: Iterable[int]) -> None:
    """Calls follow what an engine's expert load balancer writes to parameters while ranks serve.

    Args: views: of all parameters of the layer. starts: the first expert of each rank.
    """
    before = call(rows)
    moved = rows.ids.clone()
    for start in starts:
        moved[rows.ids == start], moved[rows.ids == start + 1] = start + 1, start
    with swapped(views):
        assert torch.equal(call(dataclasses.replace(rows, ids=moved)), before)
    assert torch.equal(call(rows), before)


def balanced(call: Call, rows: Rows, num_experts: int, move: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """An engine's load balancer moves experts between ranks, there and back; outputs differ by the order of sums."""
    before, plain = call(rows), torch.arange(num_experts)
    turned = plain.roll(3)  # logical expert of each physical one
    for old, new in ((plain, turned), (turned, plain)):
        move(old, new)
        places = new.argsort().to(rows.ids)
        found = call(dataclasses.replace(rows, ids=places[rows.ids.long()]))
        assert float((found - before).abs().max()) < 1e-6, (found - before).abs().max()
        assert float((call(rows) - before).abs().max() < 1e-6) == (new is plain)


def hooks_are_checked(
    engine: str,
    version: str,
    tested: Sequence[str],
    hooks: Sequence[Hook],
    changed: tuple[Any, str],
    gone: tuple[Any, str],
) -> None:
    """A hook that is missing or takes other arguments is named with engine and version."""

    def checked() -> None:
        check_hooks(engine, version, tested, hooks)

    owner, name = changed
    words = rf"{engine} {version}: .*{owner.__name__}.{name} takes \(self, x\)"
    with mock.patch.object(owner, name, lambda self, x: x), pytest.raises(RuntimeError, match=words):
        checked()
    owner, name = gone
    kept = getattr(owner, name)
    delattr(owner, name)
    try:
        with pytest.raises(RuntimeError, match=f"{engine} {version} has no .*{name}.*{' and '.join(tested)}"):
            checked()
    finally:
        setattr(owner, name, kept)
    checked()


def dead_rank(step: Callable[[], object], last: int) -> None:
    """The last rank has ended; the others name it, in bounded time. The first round may still have its rows."""

    def rounds() -> None:
        for _ in range(3):
            step()

    began = time.monotonic()
    with pytest.raises(PeerLostError, match=f"rank {last}"):
        rounds()
    assert time.monotonic() - began < 30
