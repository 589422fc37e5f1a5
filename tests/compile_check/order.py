"""Rules on the order of memory accesses between ranks, read off the compiled PTX.

A rule is a state machine that follows every path through a kernel, access by access, so that a fence on another path,
or for another store, does not satisfy it. Accesses are named by the jit function and the statement that they come from
(`Site`). A rule records which of its parts it has seen: a part that no kernel has is a finding, too.
"""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Protocol

from compile_check import ir, ptx
from compile_check.ptx import Instruction, Kind
from compile_check.source import look_up


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Accesses of one kind that come from a function, or its callees, by statements that contain `words`."""

    function: str
    kind: Kind
    words: str = ""

    def holds(self, instruction: Instruction) -> bool:
        """True for an access of this site."""
        if instruction.kind != self.kind:
            return False
        lines = (look_up(*frame) for frame in instruction.frames)
        return any(line.function == self.function and self.words in line.statement for line in lines)


class Rule(Protocol):
    """A requirement on the order of a kernel's accesses.

    Attributes:
        name: in findings. start: the state at the kernel's entry. parts: accesses that the kernels of all cases
            together must have, by the names that `step` returns.
    """

    name: str
    start: str
    parts: tuple[str, ...]

    def step(self, instruction: Instruction, state: str) -> tuple[str, str, str]:
        """The state after an instruction, its error or "", and its part or ""."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Publish:
    """Between rows and the flag that publishes them: first a barrier, then a fence at system scope."""

    name: str
    rows: Site
    flag: Site
    start: str = "fenced"
    parts: tuple[str, ...] = ("rows", "flag")

    def step(self, instruction: Instruction, state: str) -> tuple[str, str, str]:
        """See `Rule.step`."""
        if self.flag.holds(instruction):
            wrong = {
                "stored": "the flag follows its rows without a barrier and then a fence at system scope",
                "met": "the flag follows its rows without a fence at system scope after the barrier",
            }
            return state, wrong.get(state, ""), "flag"
        if self.rows.holds(instruction):
            return "stored", "", "rows"
        if instruction.opcode == "bar":
            return "met" if state == "stored" else state, "", ""
        fences = instruction.opcode == "fence" and "sys" in instruction.modifiers
        return "fenced" if fences and state == "met" else state, "", ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Acquire:
    """Memory of the group is read at system scope, or after an acquire load of a flag and a barrier."""

    name: str
    flags: str  # the function that polls flags
    start: str = "nothing acquired"
    parts: tuple[str, ...] = ("flag", "plain load", "strong load")

    def step(self, instruction: Instruction, state: str) -> tuple[str, str, str]:
        """See `Rule.step`."""
        if instruction.opcode == "bar":
            return "met" if state == "acquired by one thread" else state, "", ""
        if instruction.kind not in ("load", "atomic") or not instruction.in_peers:
            return state, "", ""
        if "nc" in instruction.modifiers:
            return state, "a load of what peers write through the read-only cache", ""
        if look_up(*instruction.frames[0]).function == self.flags:
            if {"acquire", "sys"} <= instruction.modifiers:
                return "acquired by one thread", "", "flag"
            return self.start, "a flag is looked at by what is no acquire at system scope", "flag"
        if instruction.is_strong:
            return state, "", "strong load"
        wrong = "" if state == "met" else f"a plain load of what peers write, with {state}"
        return state, wrong, "plain load"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Strong:
    """Words that these functions access change meanwhile: accesses are strong (system scope, not reordered)."""

    name: str
    functions: tuple[str, ...]
    atomics: dict[str, frozenset[str]]  # function -> modifiers that its atomics need
    start: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """See `Rule`."""
        return (*self.functions, *self.atomics)

    def step(self, instruction: Instruction, state: str) -> tuple[str, str, str]:
        """See `Rule.step`."""
        function = look_up(*instruction.frames[0]).function if instruction.frames else ""
        if instruction.kind == "atomic":
            wanted = self.atomics.get(function, {"acquire", "sys"})  # by default as for polling a flag
            missing = wanted - instruction.modifiers
            wrong = f"an atomic operation in {function} is not {' and '.join(sorted(missing))}" if missing else ""
            return state, wrong, function if function in self.atomics else ""
        if instruction.kind == "load" and function in self.functions:
            return state, "" if instruction.is_strong else f"a plain load in {function}", function
        return state, "", ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stores:
    """Every store to memory of the group belongs to the protocol: a row, a flag, a result, or a word.

    Attributes:
        words: stores of words that other ranks or the host poll, wherever these lie: strong, single, of 64 bits.
        results: stores over a sentinel, which are polled too: strong.
        others: stores that other rules cover.
    """

    name: str
    words: tuple[Site, ...]
    results: tuple[Site, ...]
    others: tuple[Site, ...]
    start: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """See `Rule`."""
        return tuple(site.function for site in (*self.words, *self.results, *self.others))

    def step(self, instruction: Instruction, state: str) -> tuple[str, str, str]:
        """See `Rule.step`."""
        if instruction.kind != "store":
            return state, "", ""
        for site in (*self.results, *self.words):
            if site.holds(instruction):
                whole = site in self.results or bool({"b64", "u64", "s64"} & instruction.modifiers)
                wrong = "" if whole else f"a word does not travel in one piece from {site.function}"
                weak = f"{site.function} stores weakly what others poll"
                return state, wrong if instruction.is_strong else weak, site.function
        for site in self.others:
            if site.holds(instruction) or not instruction.in_peers:
                return state, "", site.function if instruction.in_peers else ""
        return state, "a store to memory of the group that no rule knows", ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Meet:
    """A barrier separates the reads by all warps from the write by one of them."""

    name: str
    read: Site
    written: Site
    start: str = "met"
    parts: tuple[str, ...] = ("read", "written")

    def step(self, instruction: Instruction, state: str) -> tuple[str, str, str]:
        """See `Rule.step`."""
        if self.read.holds(instruction):
            return "read", "", "read"
        if self.written.holds(instruction):
            return state, "" if state == "met" else "overwritten before all warps have met that read it", "written"
        return "met" if instruction.opcode == "bar" else state, "", ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AfterLaunch:
    """A kernel that may start early (PDL) accesses no memory before it has waited for the previous kernel."""

    name: str = "early launch"
    start: str = "early"
    parts: tuple[str, ...] = ("wait",)

    def step(self, instruction: Instruction, state: str) -> tuple[str, str, str]:
        """See `Rule.step`."""
        if instruction.opcode == "griddepcontrol" and "wait" in instruction.modifiers:
            return "waited", "", "wait"
        early = state == "early" and instruction.kind != "other"
        return state, "an access before the kernel before this one has ended" if early else "", ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Results of a rule on one kernel: errors with their lines, and the parts that were found."""

    wrong: tuple[str, ...]
    parts: frozenset[str]


def follow(rule: Rule, program: ptx.Program) -> Seen:
    """Follow every path through a kernel with a rule."""
    blocks = program.blocks
    states = collections.defaultdict[int, set[str]](set)
    states[0].add(rule.start)
    todo, wrong, parts = [(0, rule.start)], dict[str, None](), set()
    while todo:
        number, state = todo.pop()
        for instruction in blocks[number].instructions:
            state, what, part = rule.step(instruction, state)
            parts.add(part)
            if what:
                wrong[f"{rule.name}: {what} at {_where(instruction)}"] = None
        for following in blocks[number].successors:
            if state not in states[following]:
                states[following].add(state)
                todo.append((following, state))
    return Seen(wrong=tuple(wrong), parts=frozenset(parts - {""}))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Agree:
    """All warps of a program take the same branches, although polled words change: they agree by a reduction over all.

    Attributes:
        looks: functions whose loads, and reads of the clock, may differ between warps: branches may depend on them only
            through shared memory. reductions: functions whose reductions have an element for each thread.
    """

    name: str
    looks: tuple[str, ...]
    reductions: tuple[str, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """See `Rule`."""
        return (*self.looks, *self.reductions)

    def check(self, program: ptx.Program, intermediate: ir.Ir, threads: int) -> Seen:
        """Check a whole kernel."""
        wrong, parts, found = dict[str, None](), set(), set()
        every = [instruction for block in program.blocks for instruction in block.instructions]
        for instruction in every:
            function = look_up(*instruction.frames[0]).function if instruction.frames else ""
            if function in self.looks and (instruction.kind == "load" or "%globaltimer" in instruction.text):
                parts.add(function)
                found.update(ptx.targets(instruction.text))
        apart = ptx.closure(program.flows, found)
        for instruction in every:
            if instruction.opcode == "bra" and instruction.guard in apart:
                wrong[f"{self.name}: warps may part ways at {_where(instruction)}"] = None
        for reduction in intermediate.reductions:
            functions = [look_up(*frame).function for frame in reduction.frames[:2]]  # Triton's own, then its caller
            for function in set(self.reductions).intersection(functions):
                parts.add(function)
                if reduction.elements < threads:
                    text = f"{self.name}: {threads} threads agree on {reduction.elements} elements in {function}"
                    wrong[text] = None
        return Seen(wrong=tuple(wrong), parts=frozenset(parts))


AnyRule = Rule | Agree


def check(rule: AnyRule, program: ptx.Program, intermediate: ir.Ir, threads: int) -> Seen:
    """Check one rule on a kernel with this many threads."""
    return rule.check(program, intermediate, threads) if isinstance(rule, Agree) else follow(rule, program)


def _where(instruction: Instruction) -> str:
    """The source lines of an instruction, outermost last."""
    return (
        " in ".join(f"{path.rpartition('/')[2]}:{number}" for path, number in instruction.frames) or "an unknown line"
    )


def unseen(rules: tuple[AnyRule, ...], seen: dict[str, set[str]]) -> Iterator[str]:
    """A text for each part of a rule that no kernel has; `seen` are the found parts by rule name."""
    for rule in rules:
        for part in rule.parts:
            if part not in seen.get(rule.name, ()):
                yield f"{rule.name}: no kernel of any case has its {part}"
