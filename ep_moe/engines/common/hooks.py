"""Checks of what we need of an engine: its version, and the functions and classes that we call or replace."""

import dataclasses
import importlib
import inspect
import logging
import re
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """An attribute of an engine.

    Args:
        module: dotted name. path: of the attribute in it, such as "Class.method".
        parameters: names that a function must have among its parameters, in this order.
    """

    module: str
    path: str
    parameters: tuple[str, ...] = ()


def hooks_of(text: str) -> tuple[Hook, ...]:
    """The hooks of a text: the name of each module with ":", then its attributes, with parameters in parentheses.

    Example: "json: dumps(obj, skipkeys) JSONEncoder.encode". Local.
    """
    found, module = [], ""
    for name, rest, parameters in re.findall(r"([\w.]+)(:|\(([^)]*)\))?", text):
        if rest == ":":
            module = name
        else:
            found.append(Hook(module=module, path=name, parameters=tuple(re.findall(r"\w+", parameters))))
    return tuple(found)


def check_version(engine: str, version: str, tested: Sequence[str], log: logging.Logger) -> None:
    """Warn if a version of an engine is not one of those tested. Local."""
    if version not in tested:
        log.warning("ep_moe is tested with %s %s; it tries to run in %s", engine, " and ".join(tested), version)


def check_hooks(engine: str, version: str, tested: Sequence[str], hooks: Sequence[Hook]) -> None:
    """Raise RuntimeError that names engine, version and attribute if a hook is missing or takes other parameters.

    Local; imports the modules of the hooks.
    """
    for hook in hooks:
        where = f"{hook.module}.{hook.path}"
        advice = f"ep_moe is tested with {' and '.join(tested)}"
        try:
            found: Any = importlib.import_module(hook.module)
            for name in hook.path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            raise RuntimeError(f"{engine} {version} has no {where} ({error}); {advice}") from error
        if not hook.parameters:
            continue
        parameters = list(inspect.signature(found).parameters)
        if [name for name in parameters if name in hook.parameters] != list(hook.parameters):
            needed = ", ".join(hook.parameters)
            raise RuntimeError(
                f"{engine} {version}: {where} takes ({', '.join(parameters)}), needed are ({needed}); {advice}"
            )
