"""The open rounds of a transport: which call each slot waits for."""

import dataclasses
from typing import Generic, TypeVar

State = TypeVar("State")


@dataclasses.dataclass(slots=True)
class _Slot(Generic[State]):
    next: str = "dispatch_send"
    state: State | None = None


class Slots(Generic[State]):
    """The open rounds of a transport: dispatch_send, dispatch_recv, combine_send, combine_recv in turn on each slot.

    A call out of order raises RuntimeError with the slot and the call that it expects; the slot keeps its state. Any
    call after `destroy` raises RuntimeError.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot[State]() for _ in range(num_slots)]
        self._destroyed = False

    def expect(self, slot: int, call: str, round_: int | None = None) -> State:
        """Return the slot's state, None before a dispatch, if `call` is its next one.

        Errors: ValueError for a bad slot, RuntimeError else.
        """
        if self._destroyed or not isinstance(slot, int) or not 0 <= slot < len(self._slots):
            self._refuse(slot)
        entry = self._slots[slot]
        if entry.next != call:
            raise RuntimeError(f"slot {slot} waits for {entry.next}, not for {call}")
        state = entry.state
        if round_ is not None and getattr(state, "round", round_) != round_:
            raise RuntimeError(
                f"the handle is of round {round_}, slot {slot} holds round {getattr(state, 'round', None)}"
            )
        return state  # type: ignore[return-value] # None is read by no caller

    def stage(self, slot: int) -> tuple[str, State | None]:
        """The slot's next call, and its state. Errors: as `expect`."""
        self._refuse(slot)
        entry = self._slots[slot]
        return entry.next, entry.state

    @property
    def open(self) -> tuple[int, ...]:
        """The slots that hold a round."""
        return tuple(index for index, entry in enumerate(self._slots) if entry.next != "dispatch_send")

    def put(self, slot: int, call: str, state: State) -> None:
        """Record the slot's open round, and the call that it waits for."""
        entry = self._slots[slot]
        entry.next, entry.state = call, state

    def close(self, slot: int) -> None:
        """Forget the slot's round."""
        entry = self._slots[slot]
        entry.next, entry.state = "dispatch_send", None

    def check_open(self) -> None:
        """Raise RuntimeError once the transport is destroyed."""
        if self._destroyed:
            raise RuntimeError("the transport is destroyed")

    def destroy(self) -> None:
        """Forget all rounds; from now on every call is an error."""
        self._slots = [_Slot() for _ in self._slots]
        self._destroyed = True

    def _refuse(self, slot: int) -> None:
        """Raise for a slot that does not exist, or if all are gone."""
        self.check_open()
        if not isinstance(slot, int) or not 0 <= slot < len(self._slots):
            raise ValueError(f"slot ({slot!r}) is not in [0, num_slots ({len(self._slots)}))")
