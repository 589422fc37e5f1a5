"""The protocol of the one-sided exchange as a model: all its interleavings, with its rules and with each one broken.

Every round a rank runs a dispatch kernel, its experts and a combine kernel, in stream order; each slot has its own
stream. A comment states each rule where the model implements it; `BROKEN` lists the error that occurs without it. Lost
ranks have a separate model (`test_lost_rank`).

Letters: R ranks, N rounds, n a round (from 1), a the rank that runs, b another rank. Words that b writes for a: D and
cnt are a dispatch's LL words ("cells": kind and T; counts), h the header of a row, P its payload, C the cell of a
combine, Y a result row, which holds Lamport-style sentinels until it arrives.
"""

from dataclasses import dataclass, replace

import pytest
from helpers.sampling import without

from protocol.exploring import explore
from protocol.model import Machine, Model, Program, Step

Traffic = frozenset[tuple[int, int]]  # (source, destination): one row goes there, and its result comes back
BOTH, HALF, NONE = frozenset({(0, 1), (1, 0)}), frozenset({(0, 1)}), frozenset[tuple[int, int]]()
CHAIN = frozenset({(0, 1), (1, 2)})
INTO_ONE = frozenset({(1, 0), (2, 0)})
SELF = frozenset({(0, 0), (0, 1)})
PLACES = 4  # indices of a word in one slot
# Broken rules about launch order only: their programs get the right epoch, so that only the order is wrong.
OUT_OF_TURN = (
    "dispatch-launched-before-combine-recv-ended",
    "combine-cell-before-gdc-wait",
    "refused-round-without-combine",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model to explore: traffic of each round, and at most one broken rule."""

    traffic: tuple[Traffic, ...]
    broken: str = ""
    num_ranks: int = 2
    flat: bool = False  # the experts read P, not the dispatch kernel
    num_words: int = 1  # words of a row, each delivered separately; 0: the row travels in its header
    cells: tuple[str, ...] = ("D", "cnt")
    refused: int = 0  # a round that a rank refuses: no rank waits for rows, and no results are returned
    lean: bool = False  # a source without rows has no receiver of its own if another waits for the same cells
    to_self: bool = False  # each rank also sends cells to itself
    num_slots: int = 1  # rounds use them in turn
    machine: Machine = Machine()

    def peers(self, a: int) -> list[int]:
        """The ranks that rank `a` publishes to and waits for."""
        return [b for b in range(self.num_ranks) if b != a or self.to_self]

    def order(self, a: int) -> list[int]:
        """The order in which a rank launches its rounds: slots in opposite order on even and odd ranks."""
        turns = range(1, len(self.traffic) + 1, self.num_slots)
        return [first + s for first in turns for s in range(self.num_slots)[:: -1 if a % 2 else 1]]

    def place(self, n: int) -> int:
        """Index of the first word of round n's slot."""
        return 0 if self.broken == "slots-share-their-words" else PLACES * ((n - 1) % self.num_slots)

    def region(self, n: int, source: int) -> int:
        """Where the rows of a source lie: only there, in each round."""
        return source * 2 if self.broken == "a-bound-as-stride" and n == 1 else source  # of 2, then 1 token of each

    def readers(self, waited: list[int], sources: list[int]) -> list[int]:
        """The ranks among those waited for that get their own receiver; `sources` have rows."""
        return [b for b in waited if b in sources] or waited[:1] if self.lean else waited

    def rows(self, n: int, source: int, destination: int) -> int:
        """The number of rows from one rank to another in round n."""
        return int((source, destination) in self.traffic[n - 1])

    def results(self, n: int, home: int, holder: int) -> int:
        """The number of result rows that rank `holder` returns to rank `home` in round n."""
        return 0 if n == self.refused else self.rows(n, home, holder)


def dispatch_kernel(case: Case, a: int, n: int) -> dict[str, list[list[Step]]]:
    """The programs of rank a's dispatch kernel of round n, by their part."""
    peers, broken, last, place = case.peers(a), case.broken, case.cells[-1], case.place(n)
    # The epoch comes from a device word that the previous combine kernel incremented, so that graph replays count too.
    epoch = [Step("epoch", ("done", a, a, place), 1)]
    if broken == "epoch-from-a-host-copy-one-behind":
        epoch = [Step("given", count=max(n - 1, 1))]
    elif broken == "one-word-counts-for-both-kernels":
        epoch = [Step("epoch", ("begun", a, a, place), 1)]
    elif broken in OUT_OF_TURN:
        epoch = [Step("given", count=n)]
    # Cells are single words with the epoch (LL protocol): they need no fence. All ranks get them, even with no tokens.
    early = epoch + [Step("store", (name, b, a, place), case.rows(n, a, b)) for name in case.cells for b in peers]
    senders = []
    for b in (b for b in peers if case.rows(n, a, b)):
        payload = [Step("store", ("P", b, case.region(n, a), place + i)) for i in range(case.num_words)]
        # A row's payload is delivered before its header (release).
        fence = [] if broken == "no-fence-before-the-header" else [Step("fence")]
        senders.append([*epoch, *payload, *fence, Step("store", ("h", b, case.region(n, a), place))])
    # A rank waits for the cells of all ranks: no rank gets two kernels ahead, whatever the traffic.
    sources = [b for b in peers if case.rows(n, b, a) or broken != "dispatch-waits-only-for-ranks-with-tokens"]
    waits = [Step("wait", (name, a, b, place)) for name in case.cells for b in sources]
    receivers = []
    for b in case.readers(sources, [b for b in peers if case.rows(n, b, a)]):
        # The number of rows is read after the cell was seen with this epoch.
        bound = [Step("bound", (last, a, b, place))]
        opening = bound + waits if broken == "loop-bound-from-the-last-cell" else waits + bound
        # A header carries the epoch, so that nothing needs to be cleared for the next round.
        region = case.region(n, b)
        header = [Step("flag" if broken == "header-without-epoch" else "wait", ("h", a, region, place), looped=True)]
        words = [] if case.flat else range(case.num_words)
        payload = [Step("read", ("P", a, region, place + i), looped=True) for i in words]
        # The payload is loaded after the header was seen (acquire).
        rows = payload + header if broken == "payload-loaded-before-the-header" else header + payload
        rows = [] if n == case.refused else [*rows, Step("took", count=case.rows(n, b, a))]
        # The slot's own copy keeps what the combine needs later.
        receivers.append([*epoch, *opening, *rows, Step("keep", ("copy", a, b, place))])
    # One program increments a word that no other program of this kernel reads, so it need not be the last.
    counter = [*epoch, Step("count", ("begun", a, a, place))]
    kernel = {"early": [early], "receivers": receivers, "senders": senders, "counter": [counter]}
    if broken == "re-poison-after-the-next-cells" and n > 1:
        kernel["poison"] = [poison(case, a, b, place) for b in peers if case.results(n - 1, a, b)]
    return kernel


def poison(case: Case, a: int, b: int, place: int) -> list[Step]:
    """The steps that write the sentinel back over a result row of rank b."""
    return [Step("poison", ("Y", a, b, place + i)) for i in range(max(case.num_words, 1))]


def combine_kernel(case: Case, a: int, n: int) -> dict[str, list[list[Step]]]:
    """The programs of rank a's combine kernel of round n, by their part."""
    peers, broken, place = case.peers(a), case.broken, case.place(n)
    epoch = [Step("given", count=n)] if broken in OUT_OF_TURN else [Step("epoch", ("begun", a, a, place), 0)]
    # The cell says that this rank's dispatch kernel has ended: all its waits were satisfied.
    early = [[*epoch, *(Step("store", ("C", b, a, place)) for b in peers)]]
    if n == case.refused and broken != "no-fence-behind-a-refused-round":
        # Nobody waits for the rows of a refused round: they arrive before the cell, at each rank for itself.
        early = [[*epoch, Step("behind", count=b), Step("store", ("C", b, a, place))] for b in peers]
    # A result row needs no flag and no fence: each word has arrived when it is not the sentinel.
    words = range(max(case.num_words, 1))
    senders = []
    for b in case.readers(peers, [b for b in peers if case.rows(n, b, a)]):
        # The number of rows is read from the slot's own copy: the cells may already be of the next round.
        known = [Step("recall", ("copy", a, b, place))]
        if broken == "combine-reads-what-peers-wrote":
            known = [Step("bound", (case.cells[-1], a, b, place))]
        results = [Step("store", ("Y", b, a, place + i), looped=True) for i in words]
        results = [] if n == case.refused else [*known, *results, Step("took", count=case.results(n, b, a))]
        senders.append([*epoch, *results])
    if broken == "rows-sent-twice":  # as by a combine that is launched again
        senders *= 2
    # A rank waits for the cells of all ranks: nothing else makes it wait for ranks to which it sent no rows.
    holders = [b for b in peers if case.results(n, a, b) or broken != "combine-waits-only-for-ranks-with-its-tokens"]
    waits = [Step("wait", ("C", a, b, place)) for b in holders]
    receivers = []
    for b in case.readers(holders, [b for b in peers if case.results(n, a, b)]):
        rows = [Step("take", ("Y", a, b, place + i)) for i in words] if case.results(n, a, b) else []
        # Sentinels are restored in a row that was read before this kernel ends, so before any rank can send the next.
        if rows and broken not in ("no-re-poison", "re-poison-after-the-next-cells"):
            rows += poison(case, a, b, place)
        receivers.append([*epoch, *waits, *rows])
    counter = [] if broken == "one-word-counts-for-both-kernels" else [*epoch, Step("count", ("done", a, a, place))]
    return {"early": early, "receivers": receivers, "senders": senders, "counter": [counter]}


def build(case: Case) -> list[Program]:
    """All programs of all ranks, each rank's kernels in stream order."""
    programs: list[Program] = []

    def launch(a: int, n: int, parts: dict[str, list[list[Step]]], after: dict[str, tuple[int, ...]]) -> dict:
        ids: dict[str, tuple[int, ...]] = {}
        for part, threads in parts.items():
            start = after.get(part, after["all"])
            if (part, case.broken) == ("senders", "receivers-fill-the-GPU"):
                start = ids["receivers"]
            ids[part] = tuple(range(len(programs), len(programs) + len(threads)))
            programs.extend(Program(a, n, start, tuple(steps)) for steps in threads)
        return ids

    def every(*kernels: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(i for kernel in kernels for ids in kernel.values() for i in ids)

    for a in range(case.num_ranks):
        befores = [()] * case.num_slots  # the programs that precede the next dispatch kernel
        behind: tuple[int, ...] = ()  # those that should precede it, but under a broken rule do not
        full: tuple[int, ...] = ()
        for n in case.order(a):
            before = befores[(n - 1) % case.num_slots] + full
            dispatch = launch(a, n, dispatch_kernel(case, a, n), {"all": before})
            if case.broken == "receivers-of-a-slot-fill-the-GPU":
                full = dispatch["receivers"]
            place, sources = case.place(n), [b for b in case.peers(a) if case.results(n, b, a)]
            pool = [("P", a, b, place + i) for b in sources for i in range(case.num_words)]
            experts = [[Step("read", word) for word in pool]] if case.flat else []
            ran = launch(a, n, {"experts": experts}, {"all": every(dispatch)})
            if case.broken == "refused-round-without-combine" and n == 1:
                befores = [every(dispatch, ran)]
                continue
            # The combine kernel runs after the experts: nothing on this rank reads P any more.
            after = {"all": every(dispatch, ran) + behind}
            if case.broken == "combine-cell-before-gdc-wait":
                after["early"] = dispatch["early"]
            elif case.broken == "combine-cell-before-the-experts-ended":
                after["early"] = every(dispatch)
            elif case.broken == "combine-before-the-experts-ended":
                after["all"] = every(dispatch)
            combine = launch(a, n, combine_kernel(case, a, n), after)
            # The next dispatch runs after all of this combine kernel, including its receivers and their sentinels.
            before, behind = every(combine, ran), ()
            if case.broken == "dispatch-launched-before-combine-recv-ended":
                behind = combine["receivers"]
                before = tuple(i for i in before if i not in behind)
            befores[(n - 1) % case.num_slots] = before
    return programs


def check(case: Case, until: str = "") -> set[str]:
    """All races and deadlocks of a case, or, once `until` is found, some of them."""
    return explore(Model(build(case), case.machine), until)[0]


ONE_CELL = {"cells": ("D",), "lean": True}  # without cnt, which works like D: with R = 3 there are too many states
DESIGNED = {
    "tokens-both-ways": Case(traffic=(BOTH,) * 3),
    "tokens-one-way": Case(traffic=(HALF,) * 3),
    "zero-tokens": Case(traffic=(NONE,) * 3),
    "zero-tokens-in-one-round": Case(traffic=(BOTH, NONE, BOTH)),
    "tokens-that-come-and-go": Case(traffic=(HALF, BOTH, NONE)),
    "rows-of-two-words": Case(traffic=(BOTH,) * 2, num_words=2),
    "rows-in-their-header": Case(traffic=(BOTH,) * 3, num_words=0),
    "one-rank": Case(traffic=(frozenset({(0, 0)}),) * 3, num_ranks=1, num_words=2, to_self=True),
    "tokens-to-itself": Case(traffic=(SELF,) * 2, to_self=True, **ONE_CELL),
    "three-ranks-zero-tokens": Case(traffic=(NONE,) * 2, num_ranks=3, **ONE_CELL),
    "three-ranks-tokens-one-way": Case(traffic=(HALF,) * 2, num_ranks=3, **ONE_CELL),
    "three-ranks-in-a-chain": Case(traffic=(CHAIN,) * 2, num_ranks=3, **ONE_CELL),
    "epochs-wrap-to-0": Case(traffic=(BOTH,) * 3, machine=Machine(period=4, start=2)),
    "epochs-of-one-bit": Case(traffic=(HALF,) * 3, machine=Machine(period=2)),
    "two-slots": Case(traffic=(HALF, HALF), num_slots=2, **ONE_CELL),
    "two-slots-twice": Case(traffic=(NONE,) * 4, num_slots=2, **ONE_CELL),
    "refused-round": Case(traffic=(BOTH,) * 2, refused=1),
    "three-ranks-and-a-refused-round": Case(traffic=(INTO_ONE,) * 2, num_ranks=3, refused=1, num_words=0, **ONE_CELL),
}


@pytest.mark.parametrize("layout", ["packed", "FLAT"])
@pytest.mark.parametrize("name", without(DESIGNED, "three-ranks-in-a-chain", "three-ranks-and-a-refused-round"))
def test_no_race_and_no_deadlock(name: str, layout: str) -> None:
    """Nor does a rank stage a word in its outbox whose last put is still under way (`kernels.exchange.peers`)."""
    case = replace(DESIGNED[name], flat=layout == "FLAT")
    model = Model(build(case), case.machine)
    assert explore(model)[0] == set()
    assert model.overtaken == set()


# Rule: the error without it, and the case. "Overwritten": before it was read, so that its reader waits for ever.
BROKEN = {
    "no-fence-before-the-header": ("stale P", Case(traffic=(HALF,) * 2)),
    "payload-loaded-before-the-header": ("stale P", Case(traffic=(HALF,) * 2)),
    "header-without-epoch": ("stale h", Case(traffic=(HALF,) * 2)),
    "loop-bound-from-the-last-cell": ("rows lost", Case(traffic=(HALF,) * 2)),
    "epoch-from-a-host-copy-one-behind": ("stale D", Case(traffic=(NONE,) * 2)),
    "one-word-counts-for-both-kernels": ("D never comes", Case(traffic=(NONE,) * 2)),
    "receivers-fill-the-GPU": ("h never comes", Case(traffic=(BOTH,))),
    "dispatch-waits-only-for-ranks-with-tokens": ("C overwritten", Case(traffic=(HALF,) * 2)),
    "combine-waits-only-for-ranks-with-its-tokens": ("D overwritten", Case(traffic=(HALF,) * 2)),
    "dispatch-launched-before-combine-recv-ended": ("P of the next round", Case(traffic=(HALF,) * 2)),
    "combine-cell-before-gdc-wait": ("D overwritten", Case(traffic=(HALF,) * 2)),
    "combine-before-the-experts-ended": ("P of the next round", Case(traffic=(HALF,) * 2, flat=True)),
    "no-re-poison": ("stale Y", Case(traffic=(HALF,) * 2)),
    "re-poison-after-the-next-cells": ("Y never comes", Case(traffic=(HALF,) * 2)),
    "refused-round-without-combine": ("D overwritten", Case(traffic=(NONE,) * 2)),
    "combine-reads-what-peers-wrote": ("rows lost", Case(traffic=(NONE, BOTH))),
    "rows-sent-twice": ("stale Y", Case(traffic=(HALF,) * 2)),
    "a-bound-as-stride": ("h never comes", DESIGNED["three-ranks-and-a-refused-round"]),
    "slots-share-their-words": ("D of the next round", Case(traffic=(NONE,) * 2, num_slots=2, **ONE_CELL)),
    "receivers-of-a-slot-fill-the-GPU": ("D never comes", Case(traffic=(NONE,) * 2, num_slots=2, **ONE_CELL)),
}


@pytest.mark.parametrize("rule", without(BROKEN, "a-bound-as-stride"))
def test_without_a_rule(rule: str) -> None:
    """Even if stores to one word stay in order."""
    found, case = BROKEN[rule]
    assert found in check(replace(case, broken=rule, machine=Machine(in_order=True)), until=found)


@pytest.mark.parametrize("layout", ["packed", "FLAT"])
@pytest.mark.parametrize("traffic", [BOTH, HALF, NONE], ids=["tokens-both-ways", "tokens-one-way", "zero-tokens"])
def test_the_cell_may_be_ahead_of_the_experts(traffic: Traffic, layout: str) -> None:
    """A rank whose rows the experts still read waits for their results anyway."""
    designed = Case(traffic=(traffic,) * 3, flat=layout == "FLAT")
    case = replace(designed, broken="combine-cell-before-the-experts-ended")
    assert ([p.after for p in build(case)] != [p.after for p in build(designed)]) == case.flat
    assert check(case) == set()


# Requirements of the protocol on the machine and on epochs: the error if one is not met.
DEMANDS = {
    "local-stores-land-after-their-kernel": ("stale Y", Case(traffic=(HALF,) * 2, machine=Machine(lands="none"))),
    "no-fence-behind-a-refused-round": (
        "h never comes",
        Case(traffic=(HALF,) * 2, refused=1, broken="no-fence-behind-a-refused-round"),
    ),
    "header-not-written-for-a-whole-period": ("stale h", Case(traffic=(HALF, NONE, HALF), machine=Machine(period=2))),
    "first-header-at-epoch-0": ("stale h", Case(traffic=(NONE, HALF), machine=Machine(period=4, start=2))),
}


@pytest.mark.parametrize("demand", DEMANDS)
def test_without_a_demand(demand: str) -> None:
    found, case = DEMANDS[demand]
    assert found in check(case)
