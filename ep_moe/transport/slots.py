"""The open rounds of a transport: which call each slot waits for."""

import dataclasses
from typing import Any, Generic, TypeVar

State = TypeVar("State")
CLOSED: Any = ("dispatch_send", None)  # `next` and `state` of a slot without a round


@dataclasses.dataclass(slots=True, eq=False)
class Slot(Generic[State]):
    """What one slot waits for and holds; `CLOSED` between rounds."""

    next: str  # the call that it waits for
    state: State  # of its open round


class Slots(Generic[State]):
    """The open rounds of a transport: dispatch_send, dispatch_recv, combine_send, combine_recv in turn on each slot.

    A call out of order raises RuntimeError with the slot and the call that it expects; the slot keeps its state. A call
    that has succeeded sets `next` and `state`. Any call after `destroy` raises RuntimeError.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots = [Slot[State](*CLOSED) for _ in range(num_slots)]
        self._destroyed = False

    def expect(self, slot: int, call: str, round_: int | None = None) -> Slot[State]:
        """The slot, if `call` is its next one, of this round.

        Errors: ValueError for a bad slot, RuntimeError else.
        """
        if self._destroyed or not isinstance(slot, int) or not 0 <= slot < len(self._slots):
            self._refuse(slot)
        entry = self._slots[slot]
        if entry.next != call:
            raise RuntimeError(f"slot {slot} waits for {entry.next}, not for {call}")
        if round_ is not None and getattr(entry.state, "round", round_) != round_:
            raise RuntimeError(
                f"the handle is of round {round_}, slot {slot} holds round {getattr(entry.state, 'round', None)}"
            )
        return entry

    def find(self, slot: int) -> Slot[State]:
        """The slot, whatever it waits for. Errors: as `expect`."""
        self._refuse(slot)
        return self._slots[slot]

    @property
    def open(self) -> tuple[int, ...]:
        """The slots that hold a round."""
        return tuple(index for index, entry in enumerate(self._slots) if entry.next != "dispatch_send")

    def check_open(self) -> None:
        """Raise RuntimeError once the transport is destroyed."""
        if self._destroyed:
            raise RuntimeError("the transport is destroyed")

    def destroy(self) -> None:
        """Forget all rounds; from now on every call is an error."""
        self._slots = [Slot(*CLOSED) for _ in self._slots]
        self._destroyed = True

    def _refuse(self, slot: int) -> None:
        """Raise for a slot that does not exist, or if all are gone."""
        self.check_open()
        if not isinstance(slot, int) or not 0 <= slot < len(self._slots):
            raise ValueError(f"slot ({slot!r}) is not in [0, num_slots ({len(self._slots)}))")
