"""The JSON files of a checkpoint: objects, their keys by type, and configs that are made of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ep_moe.fields import field_types, shown, typed

Built = TypeVar("Built")

_NEEDED = object()  # the default of a key that a file must have


def parse_object(content: bytes, name: str) -> dict[str, Any]:
    """Read a JSON object, which `name` is the file of.

    Errors: ValueError names the file for what is not UTF-8, not JSON, nested too deep or no object. Local.
    """
    try:
        found = json.loads(content.decode())
    except RecursionError:
        raise ValueError(f"{name}: nested too deep to be read") from None
    except ValueError as error:
        raise ValueError(f"{name}: not JSON in UTF-8: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name}: {shown(found)} is not a JSON object")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object. Errors: ValueError as `parse_object`. Local."""
    return parse_object(path.read_bytes(), str(path))


def read_key(config: Mapping[str, Any], name: str, wanted: Any, key: str, *, default: Any = _NEEDED) -> Any:
    """Read a key of config.json; null counts as absent.

    Args:
        config: its content. name: what errors call it. wanted: a type that `ep_moe.fields.typed` knows.
        default: for a key that may be absent.
    Errors: ValueError names the file, the key, and the value and what is wanted where it is of another type. Local.
    """
    found = config.get(key)
    if found is None and default is _NEEDED:
        raise ValueError(f"{name}: no key {key}, which model_type {config['model_type']!r} needs")
    return default if found is None else typed(found, wanted, f"{name}: {key}")


def build_config(
    config_type: type[Built], config: Mapping[str, Any], name: str, keys: Mapping[str, str], **more: Any
) -> Built:
    """Make a config dataclass of keys of config.json.

    Args:
        config, name: as of `read_key`. keys: a field of `config_type`, which is read, or another name in its errors ->
            the key that config.json has for it. more: other fields.
    Errors: ValueError names the file, and the keys of the names that it speaks of. Local.
    """
    wanted: dict[str, Any] = field_types(config_type)
    read = {field: read_key(config, name, wanted[field], key) for field, key in keys.items() if field in wanted}
    try:
        return config_type(**read, **more)
    except ValueError as error:
        aliases = [f"{field} is its {key}" for field, key in keys.items() if field != key and field in str(error)]
        raise ValueError("; ".join([f"{name}: {error}", *aliases])) from None
