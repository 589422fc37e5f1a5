"""The JSON files of a checkpoint: reading objects, typed keys, and building configs from them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ep_moe.fields import field_types, shown, typed

Built = TypeVar("Built")

_NEEDED = object()  # marks a required key


def parse_object(content: bytes, name: str) -> dict[str, Any]:
    """Parse the JSON object of the file `name`.

    Errors: ValueError names the file if it is not UTF-8, not JSON, nested too deep or not an object. Local.
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
        config: its content. name: its name in errors. wanted: a type that `ep_moe.fields.typed` supports.
        default: for an optional key.
    Errors: ValueError names the file and the key if it is missing, also value and wanted type if they differ. Local.
    """
    found = config.get(key)
    if found is None and default is _NEEDED:
        raise ValueError(f"{name}: no key {key}, which model_type {config['model_type']!r} needs")
    return default if found is None else typed(found, wanted, f"{name}: {key}")


def build_config(
    config_type: type[Built], config: Mapping[str, Any], name: str, keys: Mapping[str, str], **more: Any
) -> Built:
    """Build a config dataclass from keys of config.json.

    Args:
        config, name: as of `read_key`. keys: field -> key of config.json; names that are not fields of `config_type`
            are not read, only explained in errors. more: other fields, by value.
    Errors: ValueError names the file, and the keys of the fields in the message. Local.
    """
    wanted: dict[str, Any] = field_types(config_type)
    read = {field: read_key(config, name, wanted[field], key) for field, key in keys.items() if field in wanted}
    try:
        return config_type(**read, **more)
    except ValueError as error:
        aliases = [f"{field} is its {key}" for field, key in keys.items() if field != key and field in str(error)]
        raise ValueError("; ".join([f"{name}: {error}", *aliases])) from None
