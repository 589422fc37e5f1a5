"""A rank is lost in the one-sided exchange, as a model: every interleaving, with all rules and with each one broken.

The last rank dies after any of its stores. The others' waits end, and if hosts agree (`on_peer_loss="mask"`) they go
on: from some round on, the same on all ranks, results are right again. `BROKEN` lists the error without each rule.
"""

from dataclasses import replace

import pytest
from helpers.sampling import without

from protocol.exploring import explore
from protocol.losses import Model
from protocol.ranks import Call, Case


def a_round(s: int) -> tuple[Call, ...]:
    """A round of one slot, with the host's check for a loss before its dispatch."""
    return ("look", s), ("send", s), ("receive", s), ("combine", s)


ROUNDS = (*a_round(0), *a_round(0), ("check", 0), *a_round(0))
# slot 0 is open while a round of slot 1 fails and the ranks agree on the loss
TWO_SLOTS = (
    *(("look", 0), ("send", 0), *a_round(1), ("check", 0), ("receive", 0), ("combine", 0)),
    *(*a_round(0), ("check", 0), *a_round(0), *a_round(1)),
)
ONE_SLOT, OPEN_SLOT = Case(calls=ROUNDS), Case(calls=TWO_SLOTS, num_slots=2)
WAKES = replace(ONE_SLOT, wakes=True)
RAISES = Case(calls=(*a_round(0), *a_round(0)), agrees=False)  # a loss ends the transport
ONE_NEVER_TIMES_OUT = replace(RAISES, may_time_out=(0,))
TWO_WARPS = Case(calls=ROUNDS, num_ranks=2, num_warps=2, may_time_out=(0,))
DESIGNED = {
    "one-slot": ONE_SLOT,
    "one-slot-and-it-wakes": WAKES,
    "a-slot-open": OPEN_SLOT,
    "raises": RAISES,
    "raises-and-one-is-patient": ONE_NEVER_TIMES_OUT,
    "two-warps": TWO_WARPS,
    "two-warps-of-two-ranks": replace(RAISES, num_warps=2),
}


@pytest.mark.parametrize("name", without(DESIGNED, "one-slot-and-it-wakes", "a-slot-open", "two-warps-of-two-ranks"))
def test_every_wait_ends_and_rounds_go_on(name: str) -> None:
    found, states = explore(Model(DESIGNED[name]))
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
    "a-bound-as-stride": ("D never comes", WAKES),
    "hears-who-is-masked-out": ("a round after the loss fails", WAKES),
    "votes-for-what-it-has-received": ("Y never comes", OPEN_SLOT),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_without_a_rule(rule: str) -> None:
    wanted, case = BROKEN[rule]
    assert wanted in explore(Model(replace(case, broken=rule)), until=wanted)[0]


def test_who_is_clean_first_may_go_on() -> None:
    """Ranks wait for each other after an agreement to detect another loss; after a single loss they need not."""
    assert explore(Model(replace(ONE_SLOT, broken="goes-on-alone")))[0] == set()
