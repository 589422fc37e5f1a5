"""A plug-in in one process of an engine: what it needs of the engine, what its layers share, and how methods of the
engine's layers become ours."""

import dataclasses
import importlib
import inspect
import logging
import re
from collections.abc import Sequence
from typing import Any

from ep_moe.config import GroupConfig, TransportConfig
from ep_moe.engines.common.transports import SharedTransports
from ep_moe.environment import PluginConfig

ADOPTED = "ep_moe_adopted"  # of the class of a method that computes here
ATTRIBUTE = "ep_moe"  # of such a method: its layer's `EngineLayer`


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


@dataclasses.dataclass(eq=False)
class Plugin:
    """What all layers of a process share.

    Attributes:
        engine: its name. config: the options. transports: those of the layers. log: of the engine.
        logged: keys of lines that are logged once. warm: kinds of layers whose kernels are compiled.
        loaded: sizes of the transports that ranks have waited for.
    """

    engine: str
    config: PluginConfig
    transports: SharedTransports
    log: logging.Logger
    logged: set[str] = dataclasses.field(default_factory=set)
    warm: set[Any] = dataclasses.field(default_factory=set)
    loaded: set[TransportConfig] = dataclasses.field(default_factory=set)

    @classmethod
    def create(
        cls,
        engine: str,
        version: str,
        tested: Sequence[str],
        hooks: Sequence[Hook],
        config: PluginConfig,
        log: logging.Logger,
    ) -> "Plugin":
        """Check the engine, and make the plug-in of this process. Errors: RuntimeError as of `check_hooks`. Local."""
        check_version(engine, version, tested, log)
        check_hooks(engine, version, tested, hooks)
        transports = SharedTransports(config.transport, GroupConfig(timeout_secs=config.timeout_secs))
        return cls(engine=engine, config=config, transports=transports, log=log)

    def log_once(self, key: str, level: int, line: str) -> None:
        """Log a line unless one with the same key was logged before. Local."""
        if key not in self.logged:
            self.logged.add(key)
            self.log.log(level, "%s", line)

    def refuse(self, layer_name: str, why: ValueError) -> None:
        """Log once for each reason that a layer stays on the engine's path. Errors: ValueError if strict. Local."""
        line = f"ep_moe does not run {layer_name} and layers like it, {self.engine} does: {why}"
        if self.config.strict:
            raise ValueError(f"{line} (EP_MOE_STRICT=1)") from why
        self.log_once(str(why), logging.WARNING, line)


def adopt(method: Any, state: Any, **overrides: Any) -> None:
    """Make a method of an engine compute here: its class becomes a subclass with the same name. Local.

    A subclass and not a wrapper: engines ask for a method's class, its name and its attributes while they load weights.

    Args: state: its `EngineLayer`. overrides: functions and attributes of the subclass.
    """
    theirs = type(method)
    names = {name: getattr(theirs, name) for name in ("__module__", "__qualname__", "__doc__")}
    method.__class__ = type(theirs.__name__, (theirs,), names | {ADOPTED: True} | overrides)
    object.__setattr__(method, ATTRIBUTE, state)
