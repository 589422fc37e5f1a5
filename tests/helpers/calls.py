"""What tests of all calls do: compile one, expect an error that names arguments, move arguments to a GPU."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch


def assert_compiles(call: Callable[..., Any], *given: torch.Tensor) -> None:
    """A function is compiled into one graph, whose results have the bits of an eager call."""
    found = torch.compile(call, backend="aot_eager", fullgraph=True)(*given)
    torch.testing.assert_close(found, call(*given), rtol=0, atol=0)


def assert_named(words: Iterable[str], call: Callable[..., Any], **given: Any) -> None:
    """A call is a ValueError whose message has all words."""
    with pytest.raises(ValueError) as caught:
        call(**given)
    assert [word for word in words if word not in str(caught.value)] == []


def moved(given: Any, device: str | torch.device) -> Any:
    """Arguments with the tensors in them on a device; tuples, dictionaries and dataclasses are made anew."""
    if isinstance(given, torch.Tensor):
        return given.to(device)
    if isinstance(given, dict):
        return {name: moved(value, device) for name, value in given.items()}
    if isinstance(given, tuple):
        values = [moved(value, device) for value in given]
        return type(given)(*values) if hasattr(given, "_fields") else tuple(values)
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        changes = {field.name: moved(getattr(given, field.name), device) for field in dataclasses.fields(given)}
        return dataclasses.replace(given, **changes)
    return given
