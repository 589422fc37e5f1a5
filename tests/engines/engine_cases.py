"""Cases that are the same for all engines: of a loaded model, `made`, and a call of its first layer of experts.

Letters: T rows on this rank, H hidden, K top-k.
"""

import contextlib
import dataclasses
import functools
import logging
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from ep_moe.engines.common.plugin import Needs
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


def noted(target: Any, name: str, calls: list[str]) -> contextlib.AbstractContextManager[Any]:
    """In the context, the name of a function is added to `calls` when it is called."""
    original = getattr(target, name)

    def wrapper(*args: Any, **options: Any) -> Any:
        calls.append(name)
        return original(*args, **options)

    return mock.patch.object(target, name, wrapper)


def bad_input(
    call: Call,
    rows: Rows,
    num_experts: int,
    too_many: Callable[[], object],
    faults: Sequence[Any],
    ranks: tuple[int, int],
) -> None:
    """Errors on every rank that name what is wrong; the next step works. Whatever fails ends its round.

    Args: too_many: a call with more rows than fit on the last rank. faults: patches that let a call of that rank fail.
        ranks: this one and the last.
    """
    before, bad, last = call(rows), rows.ids.clone(), ranks[0] == ranks[1]
    if last:
        bad[0, 0] = num_experts + 7
    with pytest.raises(ValueError, match=f"{num_experts + 7}" if last else f"rank {ranks[1]}"):
        call(dataclasses.replace(rows, ids=bad))
    assert torch.equal(call(rows), before)
    with pytest.raises(ValueError, match=f"max_tokens_per_rank|rank {ranks[1]}"):
        too_many()
    for fault in faults:
        assert torch.equal(call(rows), before)
        if last:
            with fault, pytest.raises(RuntimeError, match="no memory"):
                call(rows)
        else:
            assert call(rows).isnan().any()
    assert torch.equal(call(rows), before)


def other_layers(plugin: Any, make: Callable[[str], Any]) -> None:
    """A layer that is not eligible stays on the engine's path and is named once; strict, it is an error.

    Args: make: constructs a layer of this name with activation gelu_tanh.
    """
    lines, handler = list[str](), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    plugin.log.addHandler(handler)
    for name in ("odd.0", "odd.1"):
        assert not hasattr(make(name).quant_method, "ep_moe")
    assert len(lines) == 1, lines
    assert all(words in lines[0] for words in ("does not run odd.0", "gelu_tanh")), lines
    plugin.config, kept = dataclasses.replace(plugin.config, strict=True), plugin.config
    with pytest.raises(ValueError, match="gelu_tanh.*EP_MOE_STRICT"):
        make("odd.2")
    plugin.config = kept
    plugin.log.removeHandler(handler)


def refused(kind_of: Callable[[], object], cases: Iterable[tuple[Any, dict[str, Any], str]]) -> None:
    """A layer is refused while an attribute of an object has another value."""
    for target, changes, words in cases:
        with contextlib.ExitStack() as stack:
            for name, value in changes.items():
                stack.callback(setattr, target, name, getattr(target, name))
                setattr(target, name, value)
            with pytest.raises(ValueError, match=words):
                kind_of()
    kind_of()


INTS = {"num_bits": 4, "actorder": None, "strategy": "group", "group_size": 128}
GPTQ = {"is_sym": True, "weight_bits": 4, "group_size": 128, "desc_act": False, "full_config": {}}
AWQ = {"weight_bits": 4, "group_size": 128, "zero_point": True}


def method(name: str, **attributes: Any) -> Any:
    """An object of a class of this name."""
    made = type(name, (), {"__module__": __name__})()
    made.__dict__.update(attributes)
    return made


def configured(name: str, defaults: dict[str, Any], **changes: Any) -> Any:
    """A method with such a config."""
    return method(name, quant_config=types.SimpleNamespace(**defaults | changes))


def formats_are_read(
    read: Callable[[Any], str], good: Iterable[tuple[Any, str]], bad: Iterable[tuple[Any, str]]
) -> None:
    """The schemes of methods, and the words of errors that name what stands against others."""
    for made, name in good:
        assert read(made) == name
    for made, words in bad:
        with pytest.raises(ValueError, match=words):
            read(made)


def hooks_are_checked(needs: Needs, version: str, changed: tuple[Any, str], gone: tuple[Any, str]) -> None:
    """A hook that is missing or takes other arguments is named with engine and version."""
    checked, engine = functools.partial(needs.check, version, mock.Mock()), needs.engine
    owner, name = changed
    words = rf"{engine} {version}: .*{owner.__name__}.{name} takes \(self, x\)"
    with mock.patch.object(owner, name, lambda self, x: x), pytest.raises(RuntimeError, match=words):
        checked()
    owner, name = gone
    kept = getattr(owner, name)
    delattr(owner, name)
    try:
        with pytest.raises(RuntimeError, match=f"{engine} {version} has no .*{name}.*{' and '.join(needs.tested)}"):
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
