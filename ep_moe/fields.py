"""Checks of values against type annotations: fields of configs, and values read from files."""

import dataclasses
import enum
import math
import numbers
import types
import typing
from typing import Any

import torch

_PLAIN: dict[type, tuple[type, str]] = {  # accepted type and its name in errors; a bool is not accepted as a number
    bool: (bool, "true or false"),
    int: (numbers.Integral, "an integer"),
    float: (numbers.Real, "a number"),
    str: (str, "a text"),
}
_SHOWN_CHARS = 200


def shown(value: Any) -> str:
    """A value as errors show it: its repr, truncated if long."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a nested {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def check_tensor(value: Any, name: str) -> None:
    """Raise ValueError for a value that is not a dense tensor of this rank: other types, sparse and distributed ones.

    Local, no host sync.
    """
    if type(value) is torch.Tensor and value.layout is torch.strided:  # distributed tensors are a subclass
        return
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is a {type(value).__name__} ({shown(value)}), not a tensor")
    if value.layout is not torch.strided or hasattr(value, "to_local"):
        raise ValueError(f"{name} is a {type(value).__name__} of layout {value.layout}, not dense")


def typed(value: Any, wanted: Any, name: str) -> Any:
    """Convert a value to the type `wanted`: an integer to a float, a list to a tuple, a name to an enum member.

    Args:
        value: of a config's field, or read from a file. name: its name in errors.
        wanted: bool, int, float, str, an enum or another class; a tuple of any number of one of these; one or None.
    Errors: ValueError names the value and the wanted type; a float must be finite. Local.
    """
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        [wanted] = set(arguments) - {type(None)}
        return None if value is None else typed(value, wanted, name)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        _require(isinstance(value, list | tuple), f"{name} ({shown(value)}) is not a list")
        return tuple(typed(element, arguments[0], f"{name}[{index}]") for index, element in enumerate(value))
    _require(isinstance(wanted, type), f"{name} ({shown(value)}) cannot be set from a file")
    if wanted in _PLAIN:
        fitting, what = _PLAIN[wanted]
        fits = isinstance(value, fitting) and (wanted is bool or not isinstance(value, bool))
        _require(fits, f"{name} ({shown(value)}) is not {what}")
        return _finite(value, name) if wanted is float else int(value) if wanted is int else value
    if issubclass(wanted, enum.Enum):
        named = isinstance(value, str | int) and not isinstance(value, bool)
        _require(named, f"{name} ({shown(value)}) is not a name or number")
        allowed = [member.value for member in wanted]
        _require(value in allowed, f"{name} ({shown(value)}) is not one of {', '.join(map(str, allowed))}")
        return wanted(value)
    _require(isinstance(value, wanted), f"{name} ({shown(value)}) is no {wanted.__module__}.{wanted.__qualname__}")
    return value


def _finite(value: Any, name: str) -> float:
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the largest float
        number = math.inf
    _require(math.isfinite(number), f"{name} ({shown(value)}) must be finite")
    return number


def field_types(config_type: type[Any]) -> dict[str, Any]:
    """The annotated type of each field of a dataclass. Local."""
    wanted = typing.get_type_hints(config_type)
    return {field.name: wanted[field.name] for field in dataclasses.fields(config_type)}


def check_fields(config: Any) -> None:
    """Check every field of a frozen dataclass against its annotation, and replace it by the result of `typed`.

    The first line of a config's `__post_init__`, so that errors come when a config is made, not at its first use.
    Errors: ValueError names the field, its value and the wanted type. Local.
    """
    for name, wanted in field_types(type(config)).items():
        object.__setattr__(config, name, typed(getattr(config, name), wanted, name))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
