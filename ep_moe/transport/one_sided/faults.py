"""Errors that kernels detect, read by the host: refused rounds and ranks that do not answer.

Letters: R ranks, S slots, M max_tokens_per_rank.
"""

import collections
import contextlib
import logging
import threading
import time

import torch

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.group.membership import Members, earlier_epoch
from ep_moe.kernels.exchange.round_state import MISMATCH, OTHER_LAYER, OUT_OF_ORDER, read_report
from ep_moe.kernels.exchange.wire_layout import BAD_IDS, STATUS_MASK, TOO_MANY, read_abort
from ep_moe.kernels.numerics import INTERPRET
from ep_moe.placement import Placement
from ep_moe.transport.checks import bad_ids_message, too_many_tokens_message
from ep_moe.transport.layer_tag import LayerTag, other_layer_message
from ep_moe.transport.one_sided.memory import PeerMemory
from ep_moe.transport.one_sided.slot_state import SlotStates
from ep_moe.transport.one_sided.watchdog import Watchdog

# the interpreter has no timer: a kernel makes fewer polls than this, so that the watchdog times out first
_POLLS_PER_SEC = 1000
REST_SECS = 10.0  # for all launched kernels to end, in addition to two timeouts
_POLL_SECS = 1e-3
_UNTIMED = contextlib.nullcontext()
_log = logging.getLogger(__name__)


class Faults:
    """Reads the report that kernels write to host memory, and agrees with the other ranks on how to continue.

    Attributes:
        timeout_ns: how long a kernel waits, in nanoseconds, or in polls under the interpreter.
        waiting: enforces the timeout of a launch, by phase and round (`Watchdog.waiting`); on a GPU kernels do so.
    """

    def __init__(
        self,
        group: EPGroup,
        placement: Placement,
        config: TransportConfig,
        memory: PeerMemory,
        states: SlotStates,
    ) -> None:
        self._group, self._config, self._memory, self._states = group, config, memory, states
        self._num_physical, self._watch = placement.num_physical, group.watch
        *self._reports, self._bell = (memoryview(words.numpy()) for words in states.reports)
        self.timeout_ns = int(group.config.timeout_secs * (_POLLS_PER_SEC if INTERPRET else 1e9))
        self._members = Members(group) if config.on_peer_loss == "mask" else None
        self._watchdog = Watchdog(group, memory, self._members)
        self.waiting = self._watchdog.waiting if INTERPRET else _untimed
        self._refusal: Exception | None = None
        self._refused_counts: collections.deque[int] = collections.deque(maxlen=16)  # of tokens, by this host
        self._lost: PeerLostError | None = None  # ends this transport
        self._suspects: set[int] = set()
        self._destroyed, self._rested = False, False

    @property
    def active(self) -> tuple[bool, ...]:
        """[R], by rank, whether it takes part in rounds."""
        return (True,) * self._group.num_ranks if self._members is None else self._members.active

    def note_too_many(self, num_tokens: int) -> None:
        """Record a token count that this host has refused: the device reports it too, and `check` skips that report."""
        self._refused_counts.append(num_tokens)

    def poll(self, *, settle: bool = False) -> None:
        """Read the kernels' report and raise if a rank is lost; refused rounds are kept for `check`.

        Args:
            settle: if a rank is lost and `on_peer_loss` is "mask", agree to continue without it, before the next round.
        Errors: PeerLostError; RuntimeError once the transport or its group is destroyed. Local, no host sync; with
        `settle` collective if a rank was lost.
        """
        if self._destroyed or self._group.destroyed:
            self._group.check_open()
            raise RuntimeError("the transport is destroyed")
        if self._bell[0]:
            self._read_reports()
        if self._lost is None and self._members is None:
            failure = None if self._watch is None else self._watch.failure
            if failure is None:
                return
            self._lost = failure.copy()
        if self._lost is not None:
            raise self._lost.copy()
        if not self.active[self._group.rank]:
            raise RuntimeError(f"rank {self._group.rank} is not among the active ranks {self.active}")
        if settle and self._watchdog.ended and self._members is not None and not self._is_capturing():
            self._settle()

    def check(self) -> None:
        """Wait for all launches, then raise their errors: PeerLostError first, then that of a refused round."""
        if not self._rest():
            limit = 2 * self._group.config.timeout_secs + REST_SECS
            raise RuntimeError(f"kernels that rank {self._group.rank} has launched did not end within {limit:g} s")
        self._read_reports()
        aborts = zip(self._memory.abort.tolist(), self.active, strict=True)  # while this rank had nothing to wait for
        self._note_loss(min((word for word, active in aborts if word and active), default=0))
        self.poll(settle=True)
        error, self._refusal = self._refusal, None
        if error is not None:
            raise error

    def set_active(self, wanted: tuple[bool, ...]) -> None:
        """Continue with only these ranks. Errors: ValueError if ranks ask for different ones. Collective, host sync."""
        if self._members is None:
            raise ValueError("set_active_ranks needs on_peer_loss 'mask', this transport has 'raise'")
        if not self._rest():
            raise RuntimeError(f"kernels that rank {self._group.rank} has launched have not ended")
        self._settle(wanted)

    def destroy(self) -> bool:
        """Stop the watchdog; returns whether all launched kernels have ended. Local; calling it twice is fine."""
        self._watchdog.stop()
        if self._destroyed:
            return self._rested
        self._destroyed = True
        if self._members is not None:
            with contextlib.suppress(RuntimeError):  # if the store is gone, no rank reads this
                self._members.leave()
        try:
            self._rested = self._rest()
        except RuntimeError as error:
            _log.warning("kernels that rank %d has launched ended with an error: %s", self._group.rank, error)
        return self._rested

    def _read_reports(self) -> None:
        self._bell[0] = 0  # first: what comes later sets it again
        lost, self._bell[1] = self._bell[1], 0
        self._note_loss(lost)
        found = []
        for words in self._reports:
            if words[0]:
                found.append((*read_report(words[0]), words[1], words[2]))
                words[0] = 0  # lets kernels write the slot's next report; only they write the other two words
        for number, verdict, source, value, own_value in sorted(found):
            error = self._explain(number, verdict, source, value, own_value)
            if error is not None:
                _log.warning("a round failed: %s", error)
                self._refusal = self._refusal or error

    def _explain(self, round_: int, verdict: int, source: int, value: int, own_value: int) -> Exception | None:
        """The error of a reported round; None if this rank has raised it already."""
        own = source == self._group.rank
        if verdict == OUT_OF_ORDER.value:
            return RuntimeError(
                f"rank {self._group.rank} has run round {round_} out of order: a slot's dispatch and combine take "
                "turns, in graphs too"
            )
        if verdict == TOO_MANY.value:
            if own and value in self._refused_counts:
                self._refused_counts.remove(value)
                return None
            if value == STATUS_MASK.value:
                most = STATUS_MASK.value - 1
                return ValueError(f"num_tokens on the device is negative or above {most} on rank {source}")
            if value > self._config.max_tokens_per_rank:
                return ValueError(too_many_tokens_message(value, self._config.max_tokens_per_rank, source))
            return ValueError(f"num_tokens ({value}) is not in [0, rows of x] on rank {source} in round {round_}")
        if verdict == BAD_IDS.value:
            return ValueError(bad_ids_message(value & 0xFFFFFFFF, value >> 32, self._num_physical, source))
        if verdict == OTHER_LAYER.value:
            tags = (LayerTag.from_words(words, words >> 32) for words in (own_value, value))
            return ValueError(other_layer_message(next(tags), self._group.rank, next(tags), source, round_))
        if verdict == MISMATCH.value:
            odd = " and ".join(f"rank {rank}" for rank in range(self._group.num_ranks) if value >> rank & 1)
            return ValueError(
                f"ranks disagree on the payload in round {round_}: {odd} not as rank {self._group.rank}; scheme, "
                "num_topk and max_num_tokens must be the same on all ranks"
            )
        return None if own else ValueError(f"rank {source} refused its input in round {round_}; its own error says why")

    def _note_loss(self, word: int) -> None:
        """Record the loss that an abort word names."""
        abort = read_abort(word)
        if abort is None or self._lost is not None:
            return
        ranks = abort.suspects
        if self._members is not None:
            self._suspects.update(rank for rank in ranks if self.active[rank])
            self._watchdog.end(tuple(self._suspects))
            return
        reason = f"did not arrive: nothing came within {self._group.config.timeout_secs:g} s"
        self._lost = self._group.failure or self._group.blame(ranks, abort.phase, abort.round, reason)

    def _settle(self, wanted: tuple[bool, ...] | None = None) -> None:
        """Agree with the others on the active ranks, until all of these have reset their memory and met."""
        members = self._members
        assert members is not None
        missing: tuple[int, ...] = ()
        rank, settled = self._group.rank, wanted is None
        while True:
            self._read_reports()
            before = members.active
            asked = wanted  # unless a rank is lost, which is settled first
            if before[rank] and (settled or missing or self._watchdog.ended):
                asked = None
                self._watchdog.end(missing)
                if not self._rest():
                    raise PeerLostError((), "agreement", None, "this rank's device has not come to rest")
                self._read_reports()
            suspects = {*missing, *self._suspects, *self._watchdog.suspects}
            decision = members.decide(sorted(suspects), self._states.begun(), asked)
            settled = settled or decision.as_wanted
            if decision.active[rank]:
                self._take_up(decision.active, decision.resume, catch_up=not before[rank])
                missing = members.meet()
                if decision.error:
                    raise ValueError(decision.error)
            elif before[rank] and not decision.as_wanted:
                self._lost = PeerLostError((rank,), "agreement", None, "was given up by the other ranks")
                raise self._lost.copy()
            if settled and not missing:
                return

    def _take_up(self, active: tuple[bool, ...], resume: tuple[int, ...], *, catch_up: bool) -> None:
        """Reset this rank's memory and continue with these ranks."""
        with self._watchdog.lock:
            self._memory.reset()
            self._states.resume(active, resume)
            if catch_up:
                self._states.catch_up([earlier_epoch(epoch) for epoch in resume])
            if self._group.device.type == "cuda":
                torch.cuda.synchronize(self._group.device)  # it is idle: only the resets are waited for
            self._suspects.clear()
            self._watchdog.restart()
        _log.warning("rank %d continues with the active ranks %s", self._group.rank, active)

    def _is_capturing(self) -> bool:
        return self._group.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _rest(self) -> bool:
        """Wait until all launches of this rank have ended; False if they do not within the limit. Host sync.

        Another thread makes the sync, because a kernel of another library may wait for a lost rank forever.
        """
        if self._group.device.type != "cuda":
            return True
        ended, errors = threading.Event(), []

        def synchronize() -> None:
            try:
                torch.cuda.synchronize(self._group.device)
            except RuntimeError as error:
                errors.append(error)
            ended.set()

        threading.Thread(target=synchronize, name="ep_moe-rest", daemon=True).start()
        deadline = time.monotonic() + 2 * self._group.config.timeout_secs + REST_SECS
        while not ended.wait(_POLL_SECS) and time.monotonic() < deadline:
            if self._members is None and self._group.failure is not None:
                deadline = min(deadline, time.monotonic() + REST_SECS)
        if errors:
            raise errors[0]
        return ended.is_set()


def _untimed(phase: str, round: int) -> contextlib.AbstractContextManager[None]:  # noqa: A002
    return _UNTIMED
