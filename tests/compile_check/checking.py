"""Runs cases for one target and checks every kernel that they compile."""

import dataclasses
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from compile_check import amdgcn, ir, order, ptx, reporting, rules, sass, walk
from compile_check.case import Case, Finding, Rule, Target
from compile_check.stub import Recorder, compile_only

MEASURED = (90, 100)  # targets whose kernels spill nothing without a case's excuse; of others spills are listed
MEASURED_TRITON = (3, 7)  # the newest that GPUs ran: another ptxas may divide registers otherwise
BETWEEN_TILES = ("spill", "many_spills")
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))


@dataclasses.dataclass(kw_only=True, slots=True)
class Compiled:
    """One compiled kernel, and the cases that launched it."""

    kernel: str
    cases: list[str]
    num_warps: int
    registers: int
    shared_bytes: int
    spills: int
    tensor_core: dict[str, int]
    widths: dict[str, list[int]]  # "load", "store" -> bytes of accesses to global memory, widest first, 0 whole tiles
    findings: list[Finding]


@dataclasses.dataclass(kw_only=True, slots=True)
class Orders:
    """Rules on the order of accesses by kernel name, and the parts of each rule that were found in kernels; others that
    may start early follow `AfterLaunch`."""

    rules: Mapping[str, tuple[order.AnyRule, ...]]
    seen: dict[str, set[str]] = dataclasses.field(default_factory=dict)

    def check(self, kernel: str, text: str, intermediate: ir.Ir, threads: int, early: bool = False) -> list[Finding]:
        """The findings on a kernel's PTX; `early`: the driver may launch it before the kernel before it has ended."""
        texts = []
        if rules_here := self.rules.get(kernel, (order.AfterLaunch(),) if early else ()):
            program = ptx.read(text)
            for rule in rules_here:
                seen = order.check(rule, program, intermediate, threads)
                self.seen.setdefault(rule.name, set()).update(seen.parts)
                texts += seen.wrong
        return [Finding(rule="order", kernel=kernel, text=text) for text in texts]

    def without_case(self) -> list[Finding]:
        """A finding for each part of a rule that was found in no kernel."""
        return [
            Finding(rule="order", kernel=kernel, text=text)
            for kernel, rules_here in self.rules.items()
            for text in order.unseen(rules_here, self.seen)
        ]


@dataclasses.dataclass(kw_only=True, slots=True)
class Result:
    """The compiled kernels of one target, and the findings."""

    compiled: list[Compiled]
    findings: list[Finding]
    excused: list[Finding]
    used_excuses: list[tuple[str, str, Rule]]  # case, kernel, rule
    all_excuses: list[tuple[str, str, Rule]]


def _widths(machine: sass.Sass, kind: str) -> list[int]:
    widths = sorted({access.width_bytes for access in machine.accesses if access.kind == kind}, reverse=True)
    return [0, *widths] if kind in machine.bulk else widths


def _check(function: JITFunction, compiled: Any, orders: Orders) -> Compiled:
    """Read one compiled kernel and check it."""
    kernel = function.fn.__name__
    gluon = "ttir" not in compiled.asm
    machine = sass.read(compiled.asm["cubin"]) if "cubin" in compiled.asm else amdgcn.read(compiled.asm["amdgcn"])
    intermediate = ir.read(compiled.asm["ttgir" if gluon else "ttir"])
    early = not gluon and "ptx" in compiled.asm and compiled.metadata.launch_pdl  # Gluon's have partitions
    threads = 32 * compiled.metadata.num_warps
    ordered = orders.check(kernel, compiled.asm.get("ptx", ""), intermediate, threads, early)
    return Compiled(
        kernel=kernel,
        cases=[],
        num_warps=compiled.metadata.num_warps,
        registers=machine.registers,
        shared_bytes=compiled.metadata.shared,
        spills=machine.spills,
        tensor_core=machine.tensor_core,
        widths={kind: _widths(machine, kind) for kind in ("load", "store")},
        findings=rules.check(kernel, compiled, intermediate, machine) + rules.spills(kernel, machine, gluon) + ordered,
    )


def _thin_payload(kernel: Compiled, width_bytes: int) -> list[Finding]:
    """A finding if the widest load, or the widest store, is narrower than a case says."""
    return [
        Finding(rule="narrow", kernel=kernel.kernel, text=f"no {kind} is {width_bytes} bytes wide")
        for kind, widths in kernel.widths.items()
        if 0 not in widths and max(widths, default=0) < width_bytes
    ]


def _run_case(case: Case, recorder: Recorder, by_hash: dict[str, Compiled], orders: Orders) -> list[Finding]:
    """Run one case; returns its failures, and adds its compiled kernels to `by_hash`."""
    findings = []
    launches, failures = len(recorder.launches), len(recorder.failures)
    try:
        case.launch()
    except Exception as error:  # noqa: BLE001 - a launcher may fail in any way, and the other cases still run
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"the launcher fails: {error!r} at {where.filename}:{where.lineno}"
        findings.append(Finding(rule="case", kernel=case.name, text=text))
    for function, failure in recorder.failures[failures:]:
        while failure.__cause__ is not None:  # Triton names the callers around it
            failure = failure.__cause__
        text = f"does not compile: {' '.join(str(failure).split()) or repr(failure)}"
        findings.append(Finding(rule="case", kernel=f"{function.fn.__name__} [{case.name}]", text=text))
    for function, compiled in recorder.launches[launches:]:
        key = compiled.metadata.hash
        if key not in by_hash:
            by_hash[key] = _check(function, compiled, orders)
        kernel = by_hash[key]
        if case.name not in kernel.cases:
            kernel.cases.append(case.name)
            kernel.findings += _thin_payload(kernel, case.payload_width_bytes.get(kernel.kernel, 0))
    if len(recorder.launches) == launches and not findings and not recorder.idle:
        findings.append(Finding(rule="case", kernel=case.name, text="launches no kernel"))
    return findings


def _excuse(result: Result, compiled: Compiled, cases: dict[str, Case], arch: Target) -> None:
    """Split the findings on one kernel into those that a case, its target or the Triton excuses, and the others."""
    measured = arch in MEASURED and TRITON <= MEASURED_TRITON
    for finding in compiled.findings:
        key = (finding.kernel, finding.rule)
        named = dataclasses.replace(finding, kernel=f"{finding.kernel} [{compiled.cases[0]}]")
        excusing = [name for name in compiled.cases if key in cases[name].excuses]
        if excusing:
            result.excused.append(dataclasses.replace(named, reason=cases[excusing[0]].excuses[key]))
            result.used_excuses += [(name, *key) for name in excusing]
        elif finding.rule in BETWEEN_TILES and not measured or finding.rule == "loop_spill" and arch not in MEASURED:
            reason = f"no tile was measured on {reporting.name_of(arch)} with Triton {triton.__version__}"
            result.excused.append(dataclasses.replace(named, reason=reason))
        else:
            result.findings.append(named)


def check_cases(
    cases: list[Case],
    package: str,
    arch: Target,
    *,
    complete: bool,
    elsewhere: Sequence[str],
    rules_of_order: Mapping[str, tuple[order.AnyRule, ...]],
    share: tuple[int, int] = (0, 1),
) -> Result:
    """Run all cases for sm_`arch` and check what they compile.

    Args:
        cases: with unique names. package: if `complete`, all its jit functions need cases.
        share: (i, n) compiles every n-th case from the i-th on; of the others only the launchers run, and no function
            that a kernel calls, and no part of a rule, is missed.
        elsewhere: packages, modules or functions whose device code is for other targets, and needs none.
        rules_of_order: by kernel name; if `complete`, every part of each must be found in some kernel.
    """
    by_name = {case.name: case for case in cases}
    if len(by_name) != len(cases):
        raise ValueError("two cases have the same name")
    findings, by_hash = walk.import_all(package) if complete else [], dict[str, Compiled]()
    orders = Orders(rules=rules_of_order)
    with compile_only(arch) as recorder:
        for number, case in enumerate(cases):
            recorder.idle = number % share[1] != share[0]
            findings += _run_case(case, recorder, by_hash, orders)
    if complete:
        functions = [
            function
            for function in walk.jit_functions(package)
            if not any(f"{walk.name_of(function)}.".startswith(f"{name}.") for name in elsewhere)
        ]
        reached = recorder.reached if share[1] == 1 else {id(function) for function in functions}
        findings += walk.without_case(functions, recorder.launched, reached)
        findings += orders.without_case() if share[1] == 1 else []
    compiling = cases[share[0] :: share[1]] if arch in MEASURED else []  # others may need fewer excuses
    excuses = [(case.name, *key) for case in compiling for key in case.excuses]
    compiled = list(by_hash.values())
    result = Result(compiled=compiled, findings=findings, excused=[], used_excuses=[], all_excuses=excuses)
    for kernel in compiled:
        _excuse(result, kernel, by_name, arch)
    return result
