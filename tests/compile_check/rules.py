"""The rules for compiled kernels."""

from typing import Any

from compile_check import ir, sass
from compile_check.case import Finding, Target
from compile_check.source import look_up
from compile_check.stub import SHARED_BYTES

MINIMUM_WIDTH_BYTES = 4
MOST_SPILLED = 16  # stores of a kernel of Gluon to local memory
WARP_GROUP_ROWS = 64  # fewest rows of a product by a warp group (sm_90) or in tensor memory (sm_100)
WARP_GROUP_WARPS = 4
FP8_OPCODES: dict[Target, set[str]] = {
    89: {"QMMA"},
    90: {"QGMMA"},
    100: {"UTCQMMA"},
    120: {"QMMA"},
}  # others multiply e4m3 as float16
WARP_GROUP_OPCODES: dict[Target, set[str]] = {
    90: {"HGMMA", "QGMMA", "IGMMA"},
    100: {"UTCHMMA", "UTCQMMA", "UTCIMMA"},
}  # others have mma.sync


def check(kernel: str, compiled: Any, intermediate: ir.Ir, machine: sass.Sass) -> list[Finding]:
    """All findings on a CompiledKernel."""
    meta = compiled.metadata
    arch = meta.target.arch
    findings = []
    if meta.shared > SHARED_BYTES[arch]:
        text = f"{meta.shared} bytes of shared memory exceed {SHARED_BYTES[arch]}"
        findings.append(Finding(rule="shared", kernel=kernel, text=text))
    findings += [
        Finding(rule="tensor_core", kernel=kernel, text=text)
        for text in _products(intermediate, machine, arch, meta.num_warps)
    ]
    if "ttir" in compiled.asm:
        findings += [
            Finding(rule="loaded_again", kernel=kernel, text=f"loaded in several layouts: {_where(place)}")
            for place in ir.loaded_again(compiled.asm["ttir"], compiled.asm["ttgir"])
        ]
    weak = [
        f"{access.opcode} is no strong store: {_where(access.place)}"
        for access in machine.accesses
        if access.kind == "store" and access.place and look_up(*access.place).function == "publish"
        if "STRONG.SYS" not in access.opcode
    ]
    if meta.target.backend == "hip" and "ttir" in compiled.asm:
        places = ir.from_caches(compiled.asm["ttir"])
        weak += [f"a volatile load may be of a cache: {_where(place)}" for place in places]
    findings += [Finding(rule="weak", kernel=kernel, text=text) for text in dict.fromkeys(weak)]
    if machine.overwritten:
        text = f"{machine.overwritten} instructions write registers that products in flight read"
        findings.append(Finding(rule="in_flight", kernel=kernel, text=text))
    if meta.target.backend == "cuda":  # elsewhere accesses are read without their lines
        findings += [
            Finding(rule="narrow", kernel=kernel, text=text)
            for text in narrow_accesses(intermediate, machine, 32 * meta.num_warps)
        ]
    return findings


def spills(kernel: str, machine: sass.Sass, gluon: bool) -> list[Finding]:
    """The findings on registers that spill."""
    findings = []
    if machine.spills:
        text = f"{machine.spills} instructions on local memory, {machine.stack_bytes} bytes of stack a thread"
        findings.append(Finding(rule="spill", kernel=kernel, text=text))
    if gluon and machine.loop_spills:
        text = f"{machine.loop_spills} instructions on local memory in a loop over products"
        findings.append(Finding(rule="loop_spill", kernel=kernel, text=text))
    if gluon and machine.spilled > MOST_SPILLED:
        text = f"{machine.spilled} stores to local memory exceed {MOST_SPILLED}"
        findings.append(Finding(rule="many_spills", kernel=kernel, text=text))
    return findings


def _products(intermediate: ir.Ir, machine: sass.Sass, arch: Target, num_warps: int) -> list[str]:
    """Errors in the use of tensor-core instructions."""
    found, texts = set(machine.tensor_core), []
    has = f"(has {', '.join(sorted(found)) or 'no tensor core instruction'})"
    fp8_opcodes, warp_group = FP8_OPCODES.get(arch, set()), WARP_GROUP_OPCODES.get(arch)
    for dot in dict.fromkeys(intermediate.dots):
        what = f"{dot.m}x{dot.n}x{dot.k} product of {dot.left} and {dot.right}"
        if dot.fp8:
            if not found & fp8_opcodes:
                texts.append(f"{what} without {' or '.join(sorted(fp8_opcodes))} {has}")
        elif intermediate.widens_fp8:
            texts.append(f"{what} in a kernel that widens fp8 {has}")
        elif ir.ELEMENT_BYTES[dot.left] == 2 or dot.precision != "ieee":
            if not found:
                texts.append(f"{what} without a tensor core")
            elif warp_group and dot.m >= WARP_GROUP_ROWS and num_warps >= WARP_GROUP_WARPS and not found & warp_group:
                texts.append(f"{what} without {' or '.join(sorted(warp_group))} {has}")
    if intermediate.dots and all(dot.fp8 for dot in intermediate.dots) and found - fp8_opcodes and found & fp8_opcodes:
        texts.append(f"fp8 products, some of which are not in fp8 {has}")
    return texts


def _least_width(access: ir.Access, threads: int) -> int:
    """The least bytes that a thread must load or store at once in this access."""
    if access.elements == 1:
        return 1
    if access.kind == "load" and access.element_bytes == 2 and access.elements <= threads:
        return 2
    return MINIMUM_WIDTH_BYTES


def narrow_accesses(intermediate: ir.Ir, machine: sass.Sass, threads: int) -> list[str]:
    """Describe each line whose loads or stores are too narrow.

    An instruction belongs to the accesses of its own line with its kind and elements no wider than it is; if there are
    none, to those of this line in other files, since ptxas leaves out a change of the file alone; if there are none
    either, to those of the whole kernel. The strictest of them counts.
    """
    texts = []
    for access in machine.accesses:
        if access.width_bytes >= MINIMUM_WIDTH_BYTES:
            continue
        able = [a for a in intermediate.accesses if a.kind == access.kind and a.element_bytes <= access.width_bytes]
        line = (access.place or ())[1:]
        here = [a for a in able if a.place == access.place] or [a for a in able if (a.place or ())[1:] == line] or able
        strictest = max(here, key=lambda a: _least_width(a, threads), default=None)
        if strictest is None or access.width_bytes < _least_width(strictest, threads):
            block = f"{strictest.elements} {strictest.element}" if strictest else "unknown numbers"
            what = f"{access.opcode} for a {access.kind} of {block} by {threads} threads"
            texts.append(f"{what} at {_where(access.place)}")
    return list(dict.fromkeys(texts))


def _where(place: ir.Place | None) -> str:
    return f"{place[0]}:{place[1]}" if place else "an unknown line"
