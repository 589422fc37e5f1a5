"""Values as bytes for other ranks: JSON, since reading a pickle runs whatever its sender likes.

Whoever reaches the store may put himself between two ranks, as may a host of their network. JSON has lists and objects
with text for keys: a tuple, set, dict, bytes or dataclass is an object with one key, the name of its type.
Example: {1: (2.5, b"a")} travels as {"dict": [[1, {"tuple": [2.5, {"bytes": "61"}]}]]}.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from ep_moe.fields import shown

_PLAIN = {type(None), bool, int, float, str}
_SEQUENCES = (tuple, set, frozenset)
_MAKERS = {kind.__name__: kind for kind in (*_SEQUENCES, dict)} | {"bytes": bytes.fromhex}


def encode(value: Any) -> bytes:
    """The bytes of a value: None, a bool, number, str or bytes; a list, tuple, set, dict or dataclass of these.

    Errors: ValueError names a value of another type. Local.
    """
    return json.dumps(_tagged(value)).encode()


def _tagged(value: Any) -> Any:
    """A value as what JSON has."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is dict:
        content = [list(item) for item in value.items()]
    elif kind is list or kind in _SEQUENCES:
        content = value
    elif dataclasses.is_dataclass(kind):
        content = [getattr(value, field.name) for field in dataclasses.fields(kind) if field.init]
    else:
        raise ValueError(f"{shown(value)} is a {kind.__name__}, which ranks do not send to each other")
    tagged = [element if type(element) in _PLAIN else _tagged(element) for element in content]
    return tagged if kind is list else {kind.__name__: tagged}


def decode(data: bytes, *known: type) -> Any:
    """The value that `encode` has made these bytes of.

    Args:
        known: the dataclasses that it may hold.
    Errors: ValueError for bytes of anything else. Local.
    """
    makers: Mapping[str, Callable[[Any], Any]] = _MAKERS | {kind.__name__: _maker(kind) for kind in known}

    def restore(found: dict[str, Any]) -> Any:
        [(name, content)] = found.items()
        return makers[name](content)

    try:
        return json.loads(data, object_hook=restore)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{shown(data)} is nothing that a rank has sent: {error}") from None


def _maker(kind: Any) -> Callable[[Any], Any]:
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    return lambda content: kind(**dict(zip(names, content, strict=True)))
