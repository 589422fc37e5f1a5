"""How the ranks of a launch end: their results, their failures, and which failure was the first."""

import dataclasses
import json
import time
import traceback
from typing import Any

from ep_moe.fields import require, typed
from ep_moe.group import STILL_THERE, PeerLostError

DIED = "Died"  # the error type of a process that ended without one


class RankFailedError(RuntimeError):
    """A rank failed, died or was lost; the message begins with the rank and its own error.

    Args:
        rank: the first to fail by itself, not because another rank did.
        error_type: the name of its exception's class; "Died" for a process that ended without one.
        error_message: of the exception, or how the process ended.
        traceback_text: of the rank, empty if the process died. Also shown as the cause of this error.
        failures: rank -> one line, for every rank that did not return a result.
    """

    def __init__(
        self, rank: int, error_type: str, error_message: str, traceback_text: str, failures: dict[int, str]
    ) -> None:
        self.rank = rank
        self.error_type = error_type
        self.error_message = error_message
        self.traceback_text = traceback_text
        self.failures = failures
        super().__init__(failures[rank])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.error_type, self.error_message, self.traceback_text, self.failures)


class RankTraceback(Exception):  # noqa: N818
    """The traceback of a rank as text: the cause of a RankFailedError, so that the launcher's traceback shows it."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How a rank ended that returned no result."""

    error_type: str
    message: str
    traceback_text: str = ""
    lost: PeerLostError | None = None  # if the rank only reports that another is lost
    when: float = dataclasses.field(default_factory=time.monotonic)  # one clock for all processes of a machine

    def line(self, rank: int) -> str:
        return f"rank {rank} {self.message}" if self.error_type == DIED else f"rank {rank}: {self.what()}"

    def what(self) -> str:
        return f"{self.error_type}: {self.message}" if self.message else self.error_type


def describe(error: BaseException) -> Failure:
    """A failure of this rank's own, or its report that another rank is lost."""
    return Failure(
        error_type=type(error).__name__,
        message=str(error),
        traceback_text="".join(traceback.format_exception(error)),
        lost=error.copy() if isinstance(error, PeerLostError) else None,
    )


class Outcomes:
    """The results and failures of a launch's ranks, as they arrive.

    Args:
        num_ranks: of the launch.
        grace_secs: how long the other ranks may take to end after the first failure.
    Errors: ValueError for grace_secs that is negative or no finite number.
    """

    def __init__(self, num_ranks: int, grace_secs: float) -> None:
        self._num_ranks = num_ranks
        self._grace_secs = typed(grace_secs, float, "grace_secs")
        require(grace_secs >= 0, f"grace_secs ({grace_secs}) must not be negative")
        self._results: dict[int, Any] = {}
        self._failures: dict[int, Failure] = {}
        self._deaths: list[tuple[int, str]] = []
        self._deadline: float | None = None
        self._keeps = False
        self._left: set[int] = set()

    @property
    def keeps(self) -> bool:
        """Whether `keep` was called."""
        return self._keeps

    def keep(self) -> None:
        """From now on a failure ends the other ranks only if none is left."""
        self._keeps = True

    def forget(self, rank: int) -> None:
        """Forget how a rank has ended: it has been started again."""
        self._left.discard(rank)
        self._failures.pop(rank, None)
        self._results.pop(rank, None)

    def leave(self, rank: int) -> None:
        """Count a rank, which has ended, for none of the launch, until `forget`."""
        self.forget(rank)
        self._left.add(rank)

    def end(self) -> None:
        """Give the pending ranks no longer than after a failure."""
        self._deadline = time.monotonic() + self._grace_secs

    def add(self, rank: int, outcome: Failure | tuple[Any]) -> None:
        """Take a rank's failure, or its result in a tuple of one."""
        if not isinstance(outcome, Failure):
            self._results[rank] = outcome[0]
            return
        self._failures[rank] = outcome
        if self._deadline is None and not self._keeps:
            self.end()

    def note(self, rank: int, message: str) -> str:
        """Add how a rank ended to all deaths, which are returned as the store has them under DEATHS_KEY."""
        self._deaths.append((rank, message))
        return json.dumps(self._deaths)

    @property
    def pending(self) -> set[int]:
        """Ranks that have not ended."""
        return set(range(self._num_ranks)) - set(self._results) - set(self._failures) - self._left

    @property
    def secs_left(self) -> float | None:
        """How long the pending ranks may still take; None if no rank has failed."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def complete(self) -> bool:
        """Whether nothing else is worth waiting for: the other ranks have ended, never will, or are late."""
        if self._keeps and self._deadline is None:
            return not self.pending
        return self.secs_left == 0.0 or self.pending <= self._still_there()

    def results(self) -> list[Any]:
        """The results in rank order. Errors: RankFailedError for the first failure; after `keep` only if there is no
        result, and None is the result of other ranks."""
        if self._keeps and self._results:
            return [self._results.get(rank) for rank in range(self._num_ranks)]
        if self._failures:
            raise self._error()
        return [self._results[rank] for rank in range(self._num_ranks)]

    def _still_there(self) -> set[int]:
        """Ranks that the others reported as lost but whose processes may still run: they will not end by themselves."""
        reports = [failure.lost for failure in self._failures.values() if failure.lost is not None]
        return {rank for lost in reports if lost.reason.startswith(STILL_THERE) for rank in lost.seats}

    def _error(self) -> RankFailedError:
        lines = {rank: failure.line(rank) for rank, failure in sorted(self._failures.items())}
        ended = f"did not end within {self._grace_secs:g} s of the first failure and was killed"
        lines |= {rank: f"rank {rank} {ended}" for rank in self.pending}
        rank, first = min(self._failures.items(), key=lambda item: (item[1].lost is not None, item[1].when))
        if first.lost is not None and first.lost.seats:
            rank = first.lost.seats[0]
            lines[rank] = str(first.lost)
        last_rank, last = max(self._failures.items(), key=lambda item: item[1].when)
        if self._keeps and last is not first:
            lines[rank] = f"{lines[rank]}; then {lines[last_rank]}"
        error = RankFailedError(rank, first.error_type, first.message, first.traceback_text, lines)
        if first.traceback_text:
            error.__cause__ = RankTraceback(first.traceback_text)
        return error
