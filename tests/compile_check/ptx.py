"""Reads PTX as text: instructions in basic blocks, their source lines, and whose memory they access."""

import dataclasses
import re
from pathlib import Path
from typing import Literal

Frame = tuple[str, int]  # file and line

Kind = Literal["load", "store", "atomic", "other"]
_KINDS: dict[str, Kind] = {"ld": "load", "st": "store", "atom": "atomic", "red": "atomic"}
_FILE = re.compile(r'^\s*\.file\s+(\d+) "(.*?)"(?: "(.*?)")?')
_LOC = re.compile(r"^\s*\.loc\s+(\d+) (\d+) (\d+)(.*)$")
_OUTER = re.compile(r"@\[ (\S+?):(\d+)")  # callers, in a comment
_INLINED = re.compile(r"inlined_at (\d+) (\d+) (\d+)")  # the caller, whose own line has its caller, from Triton 3.8 on
_MOST_CALLERS = 16  # a line may be its own caller's caller, by another call
_LABEL = re.compile(r"^(\$\w+):")
_PARAM = re.compile(r"\.param \.u64 (\w+),?$")
_INSTRUCTION = re.compile(r"^(?:@(!?)(%p\d+) )?([a-z]\w*)((?:[.:]+\w+)*)\s*(.*)$", re.DOTALL)
_REGISTER = re.compile(r"%(?:rd|rs|r|p|f|fd|h|hh)\d+")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One instruction; `frames` are its source lines, innermost first.

    Attributes:
        in_peers: its address is computed from an address of the group's memory, which peers may write too.
        guard: its predicate, "" if it has none.
    """

    opcode: str
    modifiers: frozenset[str]
    frames: tuple[Frame, ...]
    in_peers: bool
    guard: str
    text: str

    @property
    def kind(self) -> Kind:
        """Its kind of access to global memory, "other" if none."""
        return _KINDS.get(self.opcode, "other") if "global" in self.modifiers else "other"

    @property
    def is_strong(self) -> bool:
        """True for a strong operation at system scope; `volatile` is relaxed at system scope.

        So are stores that write through: the rule "weak" looks at their machine code.
        """
        return bool({"volatile", "wt"} & self.modifiers) or (
            "sys" in self.modifiers and bool(self.modifiers & {"relaxed", "acquire"})
        )


@dataclasses.dataclass(kw_only=True, slots=True)
class Block:
    """Instructions without a branch between them, and the numbers of the blocks that may follow."""

    instructions: list[Instruction]
    successors: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A kernel: its blocks, entry first, and register -> registers computed from it."""

    blocks: list[Block]
    flows: dict[str, set[str]]


def read(text: str) -> Program:
    """Read a kernel's PTX.

    An address belongs to the group's memory if it is computed from a 64-bit parameter that is no pointer: so launchers
    pass `Links.bases`.
    """
    paths = {match[1]: str(Path(match[2], match[3] or "")) for match in map(_FILE.match, text.splitlines()) if match}
    by_name = {Path(path).name: path for path in paths.values()}
    depth, frames, lines = 0, tuple[Frame, ...](), list[tuple[str, tuple[Frame, ...]]]()  # of braces
    parameters, callers = set(), dict[tuple[str, ...], tuple[str, ...] | None]()
    assembly = located = False  # from Triton 3.8 on each line of inline assembly adds one to its line of source
    for line in text.splitlines():
        if match := _PARAM.search(line):
            parameters.add(f"[{match[1]}]")
        inside = depth > 0
        if inside or line.startswith("{"):
            depth += line.count("{") - line.count("}")
        if not inside or depth == 0:
            continue
        if line.strip().startswith("//"):
            assembly, located = "begin inline asm" in line, False
        if match := _LOC.match(line):
            if assembly and located:
                continue
            located = True
            outer = tuple((by_name.get(name, name), int(at)) for name, at in _OUTER.findall(match[4]))
            inlined = _INLINED.search(match[4])
            here = match.group(1, 2, 3)
            callers[here] = inlined.groups() if inlined else None
            while (caller := callers.get(here)) is not None and len(outer) < _MOST_CALLERS:
                outer, here = (*outer, (paths[caller[0]], int(caller[1]))), caller
            frames = ((paths[match[1]], int(match[2])), *outer)
        elif match := _LABEL.match(line):
            lines.append((match[1], ()))
        else:
            code = line.partition("//")[0]
            lines += [(part.strip(), frames) for part in code.split(";") if part.strip(" \t{}")]
    codes = [code for code, _ in lines]
    given = [code for code in codes if code.startswith("ld.param") and code.partition(",")[2].strip() in parameters]
    flows = _flows(codes)
    addresses = {source: {r for r in to if not r.startswith("%p")} for source, to in flows.items()}
    return Program(blocks=_blocks(lines, closure(addresses, {targets(code)[0] for code in given})), flows=flows)


def targets(code: str) -> list[str]:
    """The registers that an instruction writes; none for a branch or a store."""
    match = _INSTRUCTION.match(code)
    if match is None or match[3] in ("st", "red", "bar", "bra", "ret"):
        return []
    until = "}" if match[5].startswith("{") else ","
    return _REGISTER.findall(match[5].partition(until)[0])


def closure(flows: dict[str, set[str]], registers: set[str]) -> set[str]:
    """These registers and all that are computed from them."""
    seen, todo = set(registers), list(registers)
    while todo:
        new = flows.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


def _flows(codes: list[str]) -> dict[str, set[str]]:
    """Register -> registers computed from it by one instruction; not through memory, nor from a load's predicate."""
    flows: dict[str, set[str]] = {}
    for code in codes:
        written = targets(code)
        match = _INSTRUCTION.match(code)
        if match is None or not written or match[3] in ("ld", "atom"):
            continue
        until = "}" if match[5].startswith("{") else ","
        for source in (*_REGISTER.findall(match[5].partition(until)[2]), *filter(None, [match[2]])):
            flows.setdefault(source, set()).update(written)
    return flows


def _blocks(lines: list[tuple[str, tuple[Frame, ...]]], peers: set[str]) -> list[Block]:
    """Split lines into basic blocks with their successors."""
    blocks, starts = [Block(instructions=[], successors=[])], dict[str, int]()
    jumps: list[tuple[int, str]] = []
    falls = [True]  # whether a block may fall through to the next
    for code, frames in lines:
        if code.startswith("$"):
            if blocks[-1].instructions:
                blocks.append(Block(instructions=[], successors=[]))
                falls.append(True)
            starts[code] = len(blocks) - 1
            continue
        match = _INSTRUCTION.match(code)
        if match is None or code.startswith("."):
            continue
        opcode, modifiers = match[3], frozenset(re.findall(r"\w+", match[4]))
        address = code[code.find("[") : code.find("]")] if "[" in code else ""
        in_peers = any(register in peers for register in _REGISTER.findall(address))
        blocks[-1].instructions.append(
            Instruction(
                opcode=opcode,
                modifiers=modifiers,
                frames=frames,
                in_peers=in_peers,
                guard=match[2] or "",
                text=code,
            )
        )
        if opcode in ("bra", "ret", "exit"):
            falls[-1] = match[2] is not None
            if opcode == "bra":
                jumps.append((len(blocks) - 1, match[5].strip()))
            blocks.append(Block(instructions=[], successors=[]))
            falls.append(True)
        elif opcode in ("brx", "call"):
            raise RuntimeError(f"cannot follow this line of PTX: {code}")
    for number, on in enumerate(falls[:-1]):
        if on:
            blocks[number].successors.append(number + 1)
    for number, label in jumps:
        blocks[number].successors.append(starts[label])
    return blocks
