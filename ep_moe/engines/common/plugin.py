"""A plug-in in one process of an engine: what it needs of the engine, what its layers share, and how methods of the
engine's layers become ours."""

import dataclasses
import importlib
import inspect
import logging
import re
from typing import Any

from ep_moe.config import GroupConfig, TransportConfig
from ep_moe.engines.common.transports import SharedTransports
from ep_moe.environment import PluginConfig

ADOPTED = "ep_moe_adopted"  # of the class of a method that computes here


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """What a plug-in needs of its engine.

    Args:
        engine: its name. tested: its versions that are tested.
        hooks: the name of each module with ":", then its functions and classes that are called or replaced, in
            parentheses the parameters that they must have, in this order.
    Example of hooks: "json: dumps(obj, skipkeys) JSONEncoder.encode".
    """

    engine: str
    tested: tuple[str, ...]
    hooks: str

    def check(self, version: str, log: logging.Logger) -> None:
        """Log a warning for a version that is not tested.

        Errors: RuntimeError names engine, version and a hook that is missing or takes other parameters. Local.
        """
        tested, module = " and ".join(self.tested), ""
        if version not in self.tested:
            log.warning("ep_moe is tested with %s %s; it tries to run in %s", self.engine, tested, version)
        for name, rest, parameters in re.findall(r"([\w.]+)(:|\(([^)]*)\))?", self.hooks):
            if rest == ":":
                module = name
                continue
            where, needed = f"{module}.{name}", re.findall(r"\w+", parameters)
            try:
                found: Any = importlib.import_module(module)
                for part in name.split("."):
                    found = getattr(found, part)
            except (ImportError, AttributeError) as error:
                words = f"{self.engine} {version} has no {where} ({error}); ep_moe is tested with {tested}"
                raise RuntimeError(words) from error
            taken = list(inspect.signature(found).parameters) if needed else []
            if [parameter for parameter in taken if parameter in needed] != needed:
                raise RuntimeError(
                    f"{self.engine} {version}: {where} takes ({', '.join(taken)}), needed are ({', '.join(needed)}); "
                    f"ep_moe is tested with {tested}"
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
    def create(cls, needs: Needs, version: str, config: PluginConfig, log: logging.Logger) -> "Plugin":
        """Check the engine, and make the plug-in of this process. Errors: as of `Needs.check`. Local."""
        needs.check(version, log)
        transports = SharedTransports(config.transport, GroupConfig(timeout_secs=config.timeout_secs))
        return cls(engine=needs.engine, config=config, transports=transports, log=log)

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

    Args: state: its `EngineLayer`, which becomes its attribute `ep_moe`. overrides: attributes of the subclass.
    """
    theirs = type(method)
    names = {name: getattr(theirs, name) for name in ("__module__", "__qualname__", "__doc__")}
    method.__class__ = type(theirs.__name__, (theirs,), names | {ADOPTED: True} | overrides)
    object.__setattr__(method, "ep_moe", state)
