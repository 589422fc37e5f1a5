"""When the ranks of a command move experts to where their load is, and what they report of it."""

import dataclasses
import logging
import re
from typing import TYPE_CHECKING, Annotated

from ep_moe.fields import Field, check_fields

if TYPE_CHECKING:
    from ep_moe.balance.rebalancer import Rebalancer, RebalanceStatus
    from ep_moe.engines.transformers import Session

_log = logging.getLogger(__name__)
OFF = "off"
ONCE_AFTER = 100  # forward passes, by default
_When = Annotated[str, Field(help="Move experts to even out ranks: off, once[:PASSES], every:PASSES")]
_Gain = Annotated[float, Field(help="Move none for a smaller gain", at_least=0)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RebalanceConfig:
    """When experts move: never, once after some forward passes, or each time after so many."""

    rebalance: _When = OFF
    rebalance_min_gain: _Gain = 0.05

    def __post_init__(self) -> None:
        check_fields(self)
        kind, _, passes = self.rebalance.partition(":")
        number = re.fullmatch(r"0*[1-9]\d{0,8}", passes)
        if not (self.rebalance in (OFF, "once") or (kind in ("once", "every") and number)):
            raise ValueError(
                f"rebalance ({self.rebalance!r}) is not off, once, once:PASSES or every:PASSES, with PASSES below 10^9"
            )
        if self.rebalance_min_gain >= 1:
            raise ValueError(f"rebalance_min_gain ({self.rebalance_min_gain}) is not in [0, 1)")

    @property
    def every(self) -> int | None:
        """Forward passes between two rebalances, None for none or one."""
        return int(self.rebalance.partition(":")[2]) if self.rebalance.startswith("every") else None

    @property
    def once_after(self) -> int | None:
        """Forward passes before the only rebalance, None for none or several."""
        if not self.rebalance.startswith("once"):
            return None
        return int(self.rebalance.partition(":")[2] or ONCE_AFTER)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobRebalanceConfig(RebalanceConfig):
    """That of `ep-moe run`, whose ranks move experts while they generate, so that the comparison covers it."""

    rebalance: _When = "once:16"
    rebalance_min_gain: _Gain = 0.01


class OneRebalance:
    """A `Rebalancer` that begins once, in the step of this number."""

    def __init__(self, rebalancer: "Rebalancer", after: int) -> None:
        self._rebalancer, self._left = rebalancer, after

    @property
    def status(self) -> "RebalanceStatus":
        """See `Rebalancer`."""
        return self._rebalancer.status

    def step(self) -> None:
        """See `Rebalancer`. Collective."""
        self._left -= 1
        if self._left == 0:
            self._rebalancer.request()
        self._rebalancer.step()

    def finish(self) -> None:
        """Begin now if it has not yet, and end. Collective, host sync."""
        if self._left > 0:
            self._left = 0
            self._rebalancer.request()
        self._rebalancer.finish()

    def destroy(self) -> None:
        """See `Rebalancer`."""
        self._rebalancer.destroy()


def start_rebalancing(session: "Session", config: RebalanceConfig) -> None:
    """Have the ranks of a loaded model move experts as the config says. Errors: as of `Rebalancer`. Collective."""
    if config.rebalance == OFF:
        return
    if session.group.num_ranks == 1:
        _log.info("rebalance (%r) has no effect: there is one rank", config.rebalance)
        return
    from ep_moe.balance.rebalancer import Rebalancer

    made = Rebalancer(session.layers, session.group, every=config.every, min_gain=config.rebalance_min_gain)
    session.rebalancer = made if config.once_after is None else OneRebalance(made, config.once_after)
