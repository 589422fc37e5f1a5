"""Model checker for protocols between ranks: explores every interleaving of programs and every order of delivery.

A kernel is a set of concurrent programs of one rank. Their stores travel as messages, delivered in any order, also
after their kernel has ended. Loads happen in program order: weak loads are not modelled.

Letters: a is a rank, n a round (from 1), i a program by number. A word is (name, owner, writer, index): it lies in
the memory of rank `owner`, rank `writer` writes it. Memory starts as zeros, but for Y, which starts as sentinels.
`done` and `begun` are a rank's own counters of rounds, seen by its programs as soon as they are written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Word = tuple[str, int, int, int]
SENTINEL = None


class Value(NamedTuple):
    """The value of a word: its epoch and, invisible to the programs, the round that it belongs to."""

    epoch: int = 0
    round: int = 0
    count: int = 0


class Step(NamedTuple):
    """One step of a program: an operation on a word.

    epoch: reads the program's epoch from a counter and adds `count`; given: the epoch is `count`; count: writes the
    epoch to a counter; store, poison: sends the epoch (P and Y: data) or the sentinel; fence: until all that this
    program sent is delivered; behind: until all that this rank's kernels before have sent to rank `count` is delivered;
    wait: until a word carries the epoch; flag: until a word is not zero; take: until a word is not the sentinel;
    read: now; bound: the loop bound is what a word counts; took: the loop bound must be `count`;
    keep: writes the loop bound to a word of the rank's own; recall: the loop bound is what such a word counts.
    """

    op: str
    word: Word = ("", 0, 0, 0)
    count: int = 0
    looped: bool = False  # skipped if the loop bound is 0


class Program(NamedTuple):
    """A program of a kernel, which starts when the programs `after` have ended."""

    rank: int
    round: int
    after: tuple[int, ...]
    steps: tuple[Step, ...]


class State(NamedTuple):
    """A point of a run: (next step, epoch, loop bound) of each program, memory, (program, word, value) in flight."""

    threads: tuple[tuple[int, int, int], ...]
    memory: tuple[Value | None, ...]
    flight: frozenset[tuple[int, int, Value | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Guarantees of the machine, and the range of its epochs."""

    lands: str = "local"  # stores that are delivered before the kernels after start: none, local ones, all
    in_order: bool = False  # stores of one rank to one word are delivered in program order
    period: int = 2**32  # epochs count modulo this
    start: int = 0  # rounds before the first modelled one


class Model:
    """Programs prepared for exploring: words by number, and which programs may run at the same time.

    Attributes:
        overtaken: names of words that a rank stored again while it still had a store of them under way. If stores are
            puts, which read their rank's outbox until they arrive, no word may be among them.
    """

    def __init__(self, programs: list[Program], machine: Machine) -> None:
        self.programs, self.machine = programs, machine
        words = {step.word for program in self.programs for step in program.steps if step.word[0]}
        self.words = {word: index for index, word in enumerate(sorted(words))}
        self.names = [word[0] for word in self.words]
        self.owners = [word[1] for word in self.words]
        self.steps = [[(step, self.words.get(step.word, -1)) for step in program.steps] for program in self.programs]
        self.ends = [len(steps) for steps in self.steps]
        self.ranks = range(1 + max(program.rank for program in programs))
        self.of_rank = [[i for i, program in enumerate(programs) if program.rank == a] for a in self.ranks]
        self.abreast = self.unordered()
        self.contested = self.contested_steps()
        self.overtaken: set[str] = set()

    def unordered(self) -> list[list[int]]:
        """For each program, itself and the programs of its rank that may run at the same time."""
        ancestors: list[set[int]] = []
        for program in self.programs:
            ancestors.append(set(program.after).union(*(ancestors[i] for i in program.after if i < len(ancestors))))
        return [
            [j for j in self.of_rank[program.rank] if i not in ancestors[j] and j not in ancestors[i]]
            for i, program in enumerate(self.programs)
        ]

    def contested_steps(self) -> set[tuple[int, int]]:
        """Steps on a rank's own counters that conflict with a program which may run at the same time."""
        return {
            (i, at)
            for i, program in enumerate(self.programs)
            for at, step in enumerate(program.steps)
            for j in self.abreast[i]
            for other in self.programs[j].steps
            if i != j and step.word == other.word and {step.op, other.op} in ({"epoch", "count"}, {"count"})
        }

    def live(self, a: int, threads: Sequence[tuple[int, int, int]]) -> Sequence[int]:
        """The programs of rank a that may run now: those concurrent with the first that has not ended."""
        for i in self.of_rank[a]:
            if threads[i][0] < self.ends[i]:
                return self.abreast[i]
        return ()

    def first(self) -> State:
        """The state before any step: zeroed memory, sentinels in result rows, counters at `start`."""
        memory: list[Value | None] = [Value()] * len(self.words)
        for index, name in enumerate(self.names):
            if name == "Y":
                memory[index] = SENTINEL
            elif name in ("done", "begun"):
                memory[index] = Value(self.machine.start)
        threads = ((0, 0, 1),) * len(self.programs)
        state = State(threads, tuple(memory), frozenset())
        for a in self.ranks:
            state = self.settle(a, list(state.threads), list(state.memory), set(state.flight))
        return state

    def started(self, program: int, threads: list, flight: set) -> bool:
        """Whether the kernels before have ended and their stores have been delivered as `Machine.lands` says."""
        rank, _, after, _ = self.programs[program]
        for i in after:
            if threads[i][0] < self.ends[i]:
                return False
        if self.machine.lands == "none":
            return True
        return not any(
            i in after and (self.machine.lands == "all" or self.owners[word] == rank) for i, word, _ in flight
        )

    def settle(self, a: int, threads: list, memory: list, flight: set) -> State:
        """Runs all steps of rank a that are independent of other programs, so in any order; freezes the state."""
        moved = True
        while moved:
            moved = False
            for i in self.live(a, threads):
                if threads[i][0] == self.ends[i] or (threads[i][0] == 0 and not self.started(i, threads, flight)):
                    continue
                while threads[i][0] < self.ends[i] and self.quiet_step(i, threads, memory, flight):
                    moved = True
        return State(tuple(threads), tuple(memory), frozenset(flight))

    def quiet_step(self, i: int, threads: list, memory: list, flight: set) -> bool:
        """Runs the next step of program i if it can run and commutes with all others' steps; returns whether it did."""
        at, epoch, bound = threads[i]
        step, word = self.steps[i][at]
        if step.looped and not bound:
            pass
        elif step.op == "store":
            name, rank = self.names[word], self.programs[i].rank
            if any(other == word and self.programs[j].rank == rank for j, other, _ in flight):
                self.overtaken.add(name)
            flight.add((i, word, Value(0 if name in "PY" else epoch, self.programs[i].round, step.count)))
        elif step.op == "poison":
            flight.add((i, word, SENTINEL))
        elif step.op == "given":
            epoch = step.count
        elif step.op in ("epoch", "count") and (i, at) not in self.contested:
            epoch = self.count(step, word, epoch, memory)
        elif step.op == "keep":  # no kernel that runs at the same time uses the word
            memory[word] = Value(epoch, self.programs[i].round, bound)
        elif step.op == "recall":
            bound = memory[word].count
        elif step.op == "took" and bound == step.count:
            pass
        elif step.op not in ("fence", "behind") or any(self.is_before(other, i, step) for other in flight):
            return False
        threads[i] = (at + 1, epoch, bound)
        return True

    def is_before(self, message: tuple[int, int, Value | None], i: int, step: Step) -> bool:
        """Whether a fence of program i, or a step "behind", waits for a message."""
        j, word, _ = message
        if step.op == "fence":
            return i == j
        earlier = self.programs[i].rank == self.programs[j].rank and j < i and j not in self.abreast[i]
        return earlier and self.owners[word] == step.count

    def count(self, step: Step, word: int, epoch: int, memory: list) -> int:
        """Reads the epoch from a counter, or writes it there; returns it."""
        if step.op == "count":
            memory[word] = Value(epoch)
            return epoch
        return (memory[word].epoch + step.count) % self.machine.period

    def visible_step(self, i: int, state: State) -> tuple[State | None, str]:
        """Runs the next step of program i, which may conflict with others: the state after it, or an error."""
        at, epoch, bound = state.threads[i]
        step, word = self.steps[i][at]
        memory, value, n = list(state.memory), state.memory[word], self.programs[i].round
        if step.op == "took":
            if bound != step.count:
                return None, "rows lost"
        elif step.op in ("epoch", "count"):
            epoch = self.count(step, word, epoch, memory)
        elif step.op == "bound":
            bound = value.count
        elif (
            (step.op == "take" and value is SENTINEL)
            or (step.op == "flag" and value.round == 0)
            or (step.op == "wait" and value.epoch != epoch)
        ):
            return None, ""
        elif value is SENTINEL or value.round != n:
            return None, f"stale {self.names[word]}" if value.round < n else f"{self.names[word]} of the next round"
        threads = list(state.threads)
        threads[i] = (at + 1, epoch, bound)
        return self.settle(self.programs[i].rank, threads, memory, set(state.flight)), ""

    def moves(self, state: State) -> Iterator[State | str]:
        """Every state that one delivery or one step leads to, and every race that a step meets."""
        for message in state.flight:
            program, word, value = message
            if self.machine.in_order and self.behind(message, state):
                continue
            memory = list(state.memory)
            memory[word] = value
            flight = set(state.flight) - {message}
            yield self.settle(self.programs[program].rank, list(state.threads), memory, flight)
        for i in self.running(state):
            after, wrong = self.visible_step(i, state)
            if after is not None or wrong:
                yield wrong if after is None else after

    def behind(self, message: tuple[int, int, Value | None], state: State) -> bool:
        """Whether an older store of the same rank to the same word is still in flight."""
        program, word, _ = message
        rank = self.programs[program].rank
        return any(i < program and other == word and self.programs[i].rank == rank for i, other, _ in state.flight)

    def running(self, state: State) -> list[int]:
        """The programs that have started but not ended, and do not wait for a delivery."""
        threads = state.threads
        return [
            i
            for a in self.ranks
            for i in self.live(a, threads)
            if threads[i][0] < self.ends[i] and self.steps[i][threads[i][0]][0].op not in ("fence", "behind")
            if threads[i][0] > 0 or self.started(i, threads, state.flight)
        ]

    def stuck(self, state: State) -> set[str]:
        """The waits that never end in a state without moves; none if all programs have ended."""
        found = set()
        for i in self.running(state):
            step, word = self.steps[i][state.threads[i][0]]
            value, n = state.memory[word], self.programs[i].round
            late = value is not SENTINEL and value.round > n
            found.add(f"{step.word[0]} overwritten" if late else f"{step.word[0]} never comes")
        if not found and any(at < end for (at, _, _), end in zip(state.threads, self.ends, strict=True)):
            found.add("a program never starts")
        return found
