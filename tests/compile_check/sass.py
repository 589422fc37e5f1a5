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
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)")
_TENSOR_CORE = re.compile(r"^\w*MMA$")  # QGMMA, HGMMA, HMMA, IMMA, QMMA, UTCHMMA, UTCQMMA, ...
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
    tensor_core: dict[str, int]  # opcode -> count
    accesses: list[GlobalAccess]
    bulk: set[str]  # "load", "store": whole tiles at once, through a descriptor


def _run(tool: str, *arguments: str) -> str:
    environ = {**os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def read(cubin: bytes) -> Sass:
    """Disassemble a cubin. Errors: RuntimeError if a disassembler fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        listing = _run("nvdisasm", "--print-code", "--print-line-info", str(path))
        resources = _RESOURCES.search(_run("cuobjdump", "--dump-resource-usage", str(path)))
    if resources is None:
        raise RuntimeError("cuobjdump tells no registers")
    opcodes, accesses, place = collections.Counter[str](), [], None
    for line in listing.splitlines():
        if match := _LINE.search(line):
            place = (match[1], int(match[2]))
        elif line.startswith(".text."):
            place = None
        elif match := _INSTRUCTION.search(line):
            opcode, modifiers = match[1], match[2].split(".")[1:]
            opcodes[opcode] += 1
            if opcode in _GLOBAL:
                width = next((_WIDTHS[modifier] for modifier in modifiers if modifier in _WIDTHS), 4)
                name = opcode + match[2]
                accesses.append(GlobalAccess(kind=_GLOBAL[opcode], opcode=name, width_bytes=width, place=place))
    return Sass(
        registers=int(resources[1]),
        stack_bytes=int(resources[2]),
        spills=opcodes["LDL"] + opcodes["STL"],
        tensor_core={opcode: count for opcode, count in sorted(opcodes.items()) if _TENSOR_CORE.match(opcode)},
        accesses=accesses,
        bulk={_BULK[opcode] for opcode in opcodes if opcode in _BULK},
    )
