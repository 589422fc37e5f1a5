"""The command: one process for each GPU, then the table and the findings. See the package's docstring."""

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from compile_check.case import CUDA_TARGETS, HIP_TARGETS, Target

TARGETS = (90, 100)  # of a call that names none
EARLY_LAUNCH = 90  # the first target with programmatic dependent launch


def share(text: str) -> tuple[int, int]:
    """Read I/N. Errors: ValueError."""
    first, step = map(int, text.split("/"))
    if not 0 <= first < step:
        raise ValueError
    return first, step


def target(text: str) -> Target:
    """Read a target. Errors: ValueError."""
    return {str(each): each for each in CUDA_TARGETS + HIP_TARGETS}.get(text, text)


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="compile_check", description="Compile all Triton kernels without a GPU.")
    parser.add_argument("--package", default="ep_moe", help="whose jit functions need cases")
    parser.add_argument("--cases", default="compile_check.cases", help="module with cases() and RULES_OF_ORDER")
    parser.add_argument("--only", default="", help="run the cases with this in their name, and look for no missing one")
    text = "compute capability, or AMD's name of an architecture; repeatable; {} and {}".format(*TARGETS)
    parser.add_argument("--target", type=target, choices=CUDA_TARGETS + HIP_TARGETS, action="append", help=text)
    text = "I/N compiles every N-th case from the I-th on, and runs the others' launchers"
    parser.add_argument("--share", type=share, default=(0, 1), help=text)
    parser.add_argument("--report", type=Path, help="write what one target compiled to this file, and print nothing")
    return parser.parse_args(argv)


def start(arguments: argparse.Namespace, target: Target, folder: Path) -> subprocess.Popen[bytes]:
    """Start the process of one target, with an empty cache of its own."""
    command = [sys.executable, "-m", "compile_check", "--package", arguments.package, "--cases", arguments.cases]
    command += ["--only", arguments.only, "--share", "{}/{}".format(*arguments.share)]
    command += ["--target", str(target), "--report", str(folder / f"{target}.json")]
    return subprocess.Popen(command, env={**os.environ, "TRITON_CACHE_DIR": str(folder / f"cache{target}")})


def check_target(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Compile and check all cases for one target, in this process."""
    from compile_check import checking  # imports Triton, which reads TRITON_CACHE_DIR
    from compile_check.order import AfterLaunch

    module = importlib.import_module(arguments.cases)
    cases = [case for case in module.cases() if arguments.only in case.name]
    cases = [case for case in cases if case.targets is None or target in case.targets]
    elsewhere = [name for name, targets in getattr(module, "TARGETS_OF", {}).items() if target not in targets]
    ordered = getattr(module, "RULES_OF_ORDER", {})
    if isinstance(target, str):
        ordered = {}  # the rules are for PTX
        cases = [dataclasses.replace(case, payload_width_bytes={}) for case in cases]  # of warps of 32 threads
    elif target < EARLY_LAUNCH:
        ordered = {
            kernel: tuple(rule for rule in rules if not isinstance(rule, AfterLaunch))
            for kernel, rules in ordered.items()
        }
    options = {"complete": not arguments.only, "elsewhere": elsewhere, "rules_of_order": ordered}
    result = checking.check_cases(cases, arguments.package, target, share=arguments.share, **options)
    return dataclasses.asdict(result)


def main(argv: list[str]) -> int:
    """Run the check; 0 without findings, 1 with findings, 2 if it could not run."""
    arguments = parse(argv)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("compile_check: TRITON_INTERPRET is set, and then nothing compiles", file=sys.stderr)
        return 2
    if arguments.report is not None:
        [target] = arguments.target
        arguments.report.write_text(json.dumps(check_target(arguments, target)))
        return 0
    from compile_check import reporting

    with tempfile.TemporaryDirectory(prefix="compile_check_") as name:
        folder = Path(name)
        targets = arguments.target or TARGETS
        processes = {target: start(arguments, target, folder) for target in targets}
        codes = {target: process.wait() for target, process in processes.items()}
        for target, code in codes.items():
            if code:
                print(f"compile_check: the process of {reporting.name_of(target)} ended with {code}", file=sys.stderr)
                return 2
        results = {target: json.loads((folder / f"{target}.json").read_text()) for target in targets}
    return reporting.report(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
