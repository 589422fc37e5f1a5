"""A rank is lost in the one-sided exchange, as a model: every interleaving, with its rules and without each one.

The last rank dies after any of its stores. The others' waits end, and where hosts agree (`on_peer_loss="mask"`) they go
on: from one round on, the same on all ranks, rounds are right again. `BROKEN` says what is found without a rule.
"""

from dataclasses import replace

import pytest
from protocol.losses import explore
from protocol.ranks import Call, Case


def a_round(s: int) -> tuple[Call, ...]:
    """A round of one slot: the host looks, for a dispatch settles a loss."""
    return ("look", s), ("send", s), ("receive", s), ("combine", s)


ROUNDS = (*a_round(0), *a_round(0), ("check", 0), *a_round(0))
# slot 0 is open while a round of slot 1 fails and its loss is settled
TWO_SLOTS = (
    *(("look", 0), ("send", 0), *a_round(1), ("check", 0), ("receive", 0), ("combine", 0)),
    *(*a_round(0), ("check", 0), *a_round(0), *a_round(1)),
)
ONE_SLOT, OPEN_SLOT = Case(calls=ROUNDS), Case(calls=TWO_SLOTS, num_slots=2)
RAISES = Case(calls=(*a_round(0), *a_round(0)), agrees=False)  # a loss ends the transport
ONE_NEVER_TIMES_OUT = replace(RAISES, may_time_out=(0,))
TWO_WARPS = Case(calls=ROUNDS, num_ranks=2, num_warps=2, may_time_out=(0,))
DESIGNED = {
    "one-slot": ONE_SLOT,
    "a-slot-open": OPEN_SLOT,
    "raises": RAISES,
    "raises-and-one-is-patient": ONE_NEVER_TIMES_OUT,
    "two-warps": TWO_WARPS,
    "two-warps-of-two-ranks": replace(RAISES, num_warps=2),
}


@pytest.mark.parametrize("name", DESIGNED)
def test_every_wait_ends_and_rounds_go_on(name: str) -> None:
    found, states = explore(DESIGNED[name])
    assert found == set()
    assert states > 300


BROKEN = {
    "waits-without-a-bound": ("D never comes", ONE_SLOT),
    "tells-nobody": ("D never comes", ONE_NEVER_TIMES_OUT),
    "warps-decide-alone": ("warps never meet", TWO_WARPS),
    "masks-nobody": ("agreements without end", ONE_SLOT),
    "the-abort-stays": ("agreements without end", ONE_SLOT),
    "resumes-where-it-stands": ("D never comes", ONE_SLOT),
    "rounds-behind-are-exchanged": ("D never comes", ONE_SLOT),
    "results-stay": ("stale Y", ONE_SLOT),
    "votes-before-its-stores-have-landed": ("stale Y", ONE_SLOT),
    "votes-for-what-it-has-received": ("Y never comes", OPEN_SLOT),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_without_a_rule(rule: str) -> None:
    wanted, case = BROKEN[rule]
    assert wanted in explore(replace(case, broken=rule), until=wanted)[0]


def test_who_is_clean_first_may_go_on() -> None:
    """Ranks meet after an agreement to learn whether another is lost meanwhile; after one loss they need not."""
    assert explore(replace(ONE_SLOT, broken="goes-on-alone"))[0] == set()
