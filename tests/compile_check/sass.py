"""Reads a compiled kernel with the disassemblers that Triton ships: instructions, source lines, registers."""

import collections
import dataclasses
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

import triton

from compile_check.ir import Place

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

_LINE = re.compile(r'//## File "(.*)", line (\d+)')
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+((?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)[^;]*)")
_TENSOR_CORE = re.compile(r"^\w*MMA$")  # QGMMA, HGMMA, HMMA, IMMA, QMMA, UTCHMMA, UTCQMMA, ...
_LABEL = re.compile(r"^(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
_WRITES = re.compile(r"(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)((?:\.\w+)*) R(\d+)\b")
_READS = re.compile(r"\w+GMMA\S* R\d+, R(\d+), gdesc")
_ENDS_GROUP = re.compile(r"\w+GMMA\b.*\bgsb0")
_WAITS = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)")
_LEFT_REGISTERS = 4  # of a thread: 64 rows of 32 bytes on 128 threads
_VECTOR_LOADS = {"LDG", "LD", "LDS", "LDSM", "LDL", "LDC"}
_REGISTERS = {"64": 2, "2": 2, "128": 4, "4": 4}
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_GLOBAL: dict[str, Literal["load", "store"]] = {
    "LDG": "load",
    "LD": "load",
    "LDGSTS": "load",
    "STG": "store",
    "ST": "store",
}
_BULK = {"UTMALDG": "load", "UBLKCP": "load", "UTMASTG": "store"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GlobalAccess:
    """An instruction that moves `width_bytes` per thread from or to global memory."""

    kind: Literal["load", "store"]
    opcode: str
    width_bytes: int
    place: Place | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sass:
    """The machine code of a kernel."""

    registers: int
    stack_bytes: int
    spills: int  # instructions that load from or store to local memory
    spilled: int  # of them, stores
    loop_spills: int  # of them, those in the innermost loops over products
    overwritten: int  # instructions in these loops that write a register which a product that still runs may read
    tensor_core: dict[str, int]  # opcode -> count
    accesses: list[GlobalAccess]
    bulk: set[str]  # "load", "store": whole tiles at once, through a descriptor


def _run(tool: str, *arguments: str) -> str:
    environ = {**os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _product_loops(opcodes: list[str], labels: dict[str, int], branches: list[tuple[int, str]]) -> list[slice]:
    """The loops with products that meet no shorter such loop.

    Blocks that wait, which are behind the other code, branch back into the midst of a loop: a longer one, it seems.

    Args:
        opcodes: in order. labels: name -> the next opcode's index. branches: index and label of each.
    """
    loops = {(labels[label], at) for at, label in branches if labels.get(label, at + 1) <= at}
    products = [index for index, opcode in enumerate(opcodes) if _TENSOR_CORE.match(opcode)]
    with_products = {(first, last) for first, last in loops if any(first <= index <= last for index in products)}
    return [
        slice(loop[0], loop[1] + 1)
        for loop in sorted(with_products)
        if not any(
            other[1] - other[0] < loop[1] - loop[0] and other[0] <= loop[1] and loop[0] <= other[1]
            for other in with_products
        )
    ]


def _written(instruction: str) -> range:
    """The vector registers that an instruction writes."""
    match = _WRITES.match(instruction)
    if match is None or _TENSOR_CORE.match(match[1]):
        return range(0)
    modifiers = match[2].split(".")
    count = 2 if "WIDE" in modifiers or (match[1] == "CS2R" and "32" not in modifiers) else 1
    if match[1] in _VECTOR_LOADS:
        count = next((_REGISTERS[modifier] for modifier in modifiers if modifier in _REGISTERS), 1)
    return range(int(match[3]), int(match[3]) + count)


def _overwritten(loop: list[str]) -> int:
    """Instructions of a loop that write registers of a product's left operand before that product is waited for.

    A product of a warp group reads them at any time until then, also in the next turn. Only in order; blocks that
    branches enter from outside do not count.
    """
    groups: list[set[int]] = []  # of products that are waited for together
    opened, found = set[int](), set[int]()
    for index, instruction in [*enumerate(loop), *enumerate(loop)]:
        if match := _READS.search(instruction):
            opened |= set(range(int(match[1]), int(match[1]) + _LEFT_REGISTERS))
        elif match := _WAITS.search(instruction):
            left = int(match[1], 16)
            groups = groups[-left:] if left else []
        elif any(register in group for group in (opened, *groups) for register in _written(instruction)):
            found.add(index)
        if _ENDS_GROUP.search(instruction):
            groups, opened = [*groups, opened], set()
    return len(found)


def read(cubin: bytes) -> Sass:
    """Disassemble a cubin. Errors: RuntimeError if a disassembler fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        listing = _run("nvdisasm", "--print-code", "--print-line-info", str(path))
        resources = _RESOURCES.search(_run("cuobjdump", "--dump-resource-usage", str(path)))
    if resources is None:
        raise RuntimeError("cuobjdump tells no registers")
    in_order, texts, labels, branches = list[str](), list[str](), dict[str, int](), list[tuple[int, str]]()
    accesses, place = [], None
    for line in listing.splitlines():
        if match := _LINE.search(line):
            place = (match[1], int(match[2]))
        elif line.startswith(".text."):
            place = None
        elif match := _LABEL.match(line):
            labels[match[1]] = len(in_order)
        elif match := _INSTRUCTION.search(line):
            texts.append(" ".join(match[1].split()))
            opcode, modifiers = match[2], match[3].split(".")[1:]
            if branch := _BRANCH.search(line):
                branches.append((len(in_order), branch[1]))
            in_order.append(opcode)
            if opcode in _GLOBAL:
                width = next((_WIDTHS[modifier] for modifier in modifiers if modifier in _WIDTHS), 4)
                name = opcode + match[3]
                accesses.append(GlobalAccess(kind=_GLOBAL[opcode], opcode=name, width_bytes=width, place=place))
    opcodes, loops = collections.Counter(in_order), _product_loops(in_order, labels, branches)
    return Sass(
        registers=int(resources[1]),
        stack_bytes=int(resources[2]),
        spills=opcodes["LDL"] + opcodes["STL"],
        spilled=opcodes["STL"],
        loop_spills=sum(opcode in ("LDL", "STL") for loop in loops for opcode in in_order[loop]),
        overwritten=sum(_overwritten(texts[loop]) for loop in loops),
        tensor_core={opcode: count for opcode, count in sorted(opcodes.items()) if _TENSOR_CORE.match(opcode)},
        accesses=accesses,
        bulk={_BULK[opcode] for opcode in opcodes if opcode in _BULK},
    )
