"""What all layers that a plug-in runs in one process share."""

import dataclasses
import logging
from typing import Any

from ep_moe.config import TransportConfig
from ep_moe.engines.common.transports import SharedTransports
from ep_moe.environment import PluginConfig


@dataclasses.dataclass(eq=False)
class Plugin:
    """What all layers of a process share.

    Attributes:
        engine: its name. config: the options. transports: those of the layers. log: where lines are said.
        said: lines that were said once. warm: kinds of layers whose kernels are compiled.
        loaded: sizes of the transports that ranks have waited for.
    """

    engine: str
    config: PluginConfig
    transports: SharedTransports
    log: logging.Logger
    said: set[str] = dataclasses.field(default_factory=set)
    warm: set[Any] = dataclasses.field(default_factory=set)
    loaded: set[TransportConfig] = dataclasses.field(default_factory=set)

    def say_once(self, key: str, level: int, line: str) -> None:
        """Log a line unless one with the same key was logged before. Local."""
        if key not in self.said:
            self.said.add(key)
            self.log.log(level, "%s", line)

    def refuse(self, layer_name: str, why: ValueError) -> None:
        """Say once for each reason that a layer stays on the engine's path. Errors: ValueError if strict. Local."""
        line = f"ep_moe does not run {layer_name} and layers like it, {self.engine} does: {why}"
        if self.config.strict:
            raise ValueError(f"{line} (EP_MOE_STRICT=1)") from why
        self.say_once(str(why), logging.WARNING, line)
