"""Exhaustive search through the states of a model."""

from collections.abc import Hashable, Iterable
from typing import Any, Protocol


class Explored(Protocol):
    """A model whose states can be searched; a state is hashable and no str."""

    def first(self) -> Hashable:
        """The initial state."""

    def moves(self, state: Any) -> Iterable[Any]:
        """Every state that one step leads to, or, as a str, the error of the step."""

    def stuck(self, state: Any) -> set[str]:
        """The deadlocks of a state without moves; empty if everything has ended."""


def explore(model: Explored, until: str = "") -> tuple[set[str], int]:
    """All errors and deadlocks that can happen, and the number of states; stops once `until` is found."""
    first = model.first()
    seen, todo = {first}, [first]
    found: set[str] = set()
    while todo and until not in found:
        state, moved = todo.pop(), False
        for after in model.moves(state):
            moved = True
            if isinstance(after, str):
                found.add(after)
            elif after not in seen:
                seen.add(after)
                todo.append(after)
        if not moved:
            found |= model.stuck(state)
    return found, len(seen)
