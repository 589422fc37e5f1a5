"""What calls of a kind share, found by a key."""

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

Plan = TypeVar("Plan")


class PlanCache(Generic[Plan]):
    """Plans by their keys. If there are `most`, the less recently used half is dropped for the next one.

    Threads may share it.
    """

    def __init__(self, most: int) -> None:
        self._most, self._clock = most, itertools.count()
        self._entries: dict[object, list[Any]] = {}  # last use, plan, references

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: object) -> Plan | None:
        """The plan of a key. Local."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[0] = next(self._clock)
        plan: Plan = entry[1]
        return plan

    def keep(self, key: object, plan: Plan, *, owners: Iterable[Any] = (), alive: Iterable[Any] = ()) -> Plan:
        """Find this plan, which is returned, by the key from now on. Local.

        Args:
            owners: objects whose ids are in the key; the plan is dropped with the first of them, so it must not hold
                one. alive: others, which are kept alive as long as the plan.
        """
        entries = self._entries
        if len(entries) >= self._most:
            used = sorted(entries.copy().items(), key=lambda item: item[1][0])
            for old, _ in used[: (self._most + 1) // 2]:
                entries.pop(old, None)

        def forget(reference: object) -> None:
            del reference
            entries.pop(key, None)

        entries[key] = [next(self._clock), plan, [weakref.ref(owner, forget) for owner in owners], tuple(alive)]
        return plan

    def clear(self) -> None:
        """Drop all plans. Local."""
        self._entries.clear()
