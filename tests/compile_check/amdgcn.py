"""Reads AMD's machine code as text, for what the table and the rules on shared memory, spills and products need."""

import collections
import re
from typing import Literal

from compile_check.sass import GlobalAccess, Sass

_NUMBER = r"\.{}:\s+(\d+)"
_PRODUCT = re.compile(r"^\s*(v_mfma_\w+|v_smfmac_\w+)", re.MULTILINE)
_ACCESS = re.compile(r"^\s*((?:global|buffer|flat)_(load|store)_([a-z]+\d*(?:x\d)?)\w*)", re.MULTILINE)
_WIDTHS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "b128": 16, "b64": 8, "b32": 4}
_BYTE = ("ubyte", "sbyte", "byte", "u8", "i8", "b8")


def _number(text: str, name: str) -> int:
    """A number of the kernel's metadata."""
    match = re.search(_NUMBER.format(name), text)
    if match is None:
        raise RuntimeError(f"the code object has no {name}")
    return int(match[1])


def _width(kind: str) -> int:
    return _WIDTHS.get(kind, 1 if kind in _BYTE else 2)


def read(text: str) -> Sass:
    """Read the assembly of one kernel. Errors: RuntimeError if its metadata lacks a number."""
    spills, products = _number(text, "vgpr_spill_count"), collections.Counter(_PRODUCT.findall(text))
    accesses = []
    for opcode, found, what in _ACCESS.findall(text):
        kind: Literal["load", "store"] = "load" if found == "load" else "store"
        accesses.append(GlobalAccess(kind=kind, opcode=opcode, width_bytes=_width(what), place=None))
    return Sass(
        registers=_number(text, "vgpr_count"),
        stack_bytes=_number(text, "private_segment_fixed_size"),
        spills=spills,
        spilled=spills,
        loop_spills=0,
        overwritten=0,
        tensor_core=dict(sorted(products.items())),
        accesses=accesses,
        bulk=set(),
    )
