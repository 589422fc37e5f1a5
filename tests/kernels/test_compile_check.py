"""The compile check finds the errors of a package of wrong kernels, and none in right ones that are close to them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from compile_check.__main__ import main
from compile_check.exchange_order import RULES
from compile_check.mutants import MUTANTS, Mutant
from compile_check.order import unseen

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
FAULTY = ("--package", "compile_check.faulty", "--cases", "compile_check.faulty.cases")

# by case, else by kernel: the rule that it breaks, on all targets of the case, and words of the finding
EXPECTED = {
    "widened": ("tensor_core", "64x128x128 product of f16 and f16 in a kernel that widens fp8"),
    "few rows": ("tensor_core", "16x128x128 product of f8E4M3FN and f8E4M3FN without"),
    "bytes": ("narrow", "STG.E.U8 for a store of 2048 f8E4M3FN"),
    "halves": ("narrow", "STG.E.U16 for a store of 2048 bf16"),
    "strided": ("narrow", "LDG.E.U16 for a load of 2048 bf16"),
    "words": ("narrow", "no store is 16 bytes wide"),
    "spill": ("spill", "instructions on local memory"),
    "too many stages": ("shared", "exceed 232448"),
    "running on": ("in_flight", "instructions write registers that products in flight read"),
    "polls": ("loaded_again", "loaded in several layouts: "),
    "weak words": ("weak", "STG.E.128.STRONG.GPU is no strong store: "),
    "error": ("case", "arange's range must be a power of 2"),
    "unsaid fusion": ("case", "the launch does not say enable_fp_fusion"),
    "failing": ("case", "the launcher fails: ValueError('no such size')"),
    "idle": ("case", "launches no kernel"),
    "missing": ("case", "does not import: ModuleNotFoundError"),
    "_forgotten_kernel": ("case", "no case launches this kernel"),
    "_used_by_forgotten": ("case", "no kernel of any case calls this jit function"),
    "in_a_dict": ("case", "no kernel of any case calls this jit function"),
}
IDLE_EXCUSE = "FOUND excuse: case 'idle excuse' excuses _product_kernel from 'tensor_core' for nothing"

_FOUND = re.compile(r"^FOUND ((?:sm_\d+ )+)(\w+): (.*)$", re.MULTILINE)


def check(*arguments: str, module: str = "compile_check") -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as .ci/run does."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, cwd=TESTS.parent, env=environ, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.fixture(scope="module")
def faulty() -> subprocess.CompletedProcess[str]:
    """The check of the faulty package for both targets."""
    return check(*FAULTY)


def findings(output: str) -> dict[str, list[tuple[str, str, str]]]:
    """(target, rule, text) of every finding, by case, else by the last part of the kernel's or module's name."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for targets, rule, text in _FOUND.findall(output):
        case = re.search(r"\[(.*?)\]", text)
        about = case[1] if case else text.partition(":")[0].rpartition(".")[2]
        found.setdefault(about, []).extend((target, rule, text) for target in targets.split())
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("about", EXPECTED)
def test_finds(faulty: subprocess.CompletedProcess[str], about: str) -> None:
    rule, words = EXPECTED[about]
    found = findings(faulty.stdout).get(about, [])
    from compile_check.faulty.cases import cases  # imports Triton, which not every machine has

    only_hopper = any(case.targets for case in cases() if case.name == about)
    targets = ("sm_90",) if only_hopper else ("sm_100", "sm_90")
    assert sorted(finding[:2] for finding in found) == [(target, rule) for target in targets], faulty.stdout
    assert all(words in text for *_, text in found)


@pytest.mark.matrix
def test_finds_nothing_else(faulty: subprocess.CompletedProcess[str]) -> None:
    assert faulty.returncode == 1, faulty.stderr
    assert set(findings(faulty.stdout)) == set(EXPECTED)


@pytest.mark.matrix
def test_excuses(faulty: subprocess.CompletedProcess[str]) -> None:
    assert IDLE_EXCUSE in faulty.stdout.splitlines()
    excused = [line for line in faulty.stdout.splitlines() if line.startswith("excused ")]
    assert [line.split()[1] for line in excused] == ["sm_90"]
    assert excused[0].endswith("(16 rows are too few for the fp8 instructions of a warp group)")


def test_right_kernels_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    assert main([*FAULTY, "--only", "right copy of", "--target", "90"]) == 0
    assert "1 compiled kernels, 0 findings" in capsys.readouterr().out


def test_amds_compiler_may_read_polls_from_caches() -> None:
    done = check(*FAULTY, "--only", "polls", "--target", "gfx942")
    assert "FOUND gfx942 weak: _polling_kernel [polls]: a volatile load may be of a cache: " in done.stdout, done.stdout


def test_refuses_to_compile_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main([*FAULTY]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


@pytest.fixture(scope="module")
def order_of_mutants() -> dict[str, list[str]]:
    """The findings of the rules on order in each changed kernel."""
    done = check("90", module="compile_check.mutate")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_order_finds(order_of_mutants: dict[str, list[str]], mutant: Mutant) -> None:
    """A change of the exchange that breaks the order of its accesses is found; unchanged it has no finding."""
    assert order_of_mutants[mutant.kernel] == []
    assert any(mutant.found in text for text in order_of_mutants[mutant.name]), order_of_mutants[mutant.name]


def test_a_load_keeps_its_line_where_the_table_lacks_its_file() -> None:
    from compile_check import ir, rules, sass

    def read(elements: int, line: int) -> ir.Access:
        return ir.Access(kind="load", element="bf16", elements=elements, place=("a.py", line))

    def text(line: int) -> str:
        load = sass.GlobalAccess(kind="load", opcode="LDG.E.U16", width_bytes=2, place=("b.py", line))
        return "".join(rules.narrow_accesses(intermediate, SimpleNamespace(accesses=[load]), 256))

    intermediate = ir.Ir(accesses=[read(128, 54), read(8192, 7)], dots=[], reductions=[], widens_fp8=False)
    found = "LDG.E.U16 for a load of 8192 bf16 by 256 threads at b.py"
    assert [text(line) for line in (54, 7, 55)] == ["", f"{found}:7", f"{found}:55"]


def test_rules_of_order_say_what_no_kernel_has() -> None:
    for rules in RULES.values():
        seen = {rule.name: set(rule.parts) for rule in rules}
        assert [*unseen(rules, seen)] == []
        for rule in rules:
            for part in rule.parts:
                without = {**seen, rule.name: seen[rule.name] - {part}}
                assert [*unseen(rules, without)] == [
                    f"{rule.name}: no kernel of any case has its {part}"
                ] * rule.parts.count(part)
