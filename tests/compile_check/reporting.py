"""The table of compiled kernels, and a line for each finding."""

from typing import Any

from compile_check.case import Target

COLUMNS = ("kernel", "target", "warps", "regs", "shared", "spills", "tensor core", "loads", "stores", "case")


def name_of(target: Target) -> str:
    """A target in words."""
    return target if isinstance(target, str) else f"sm_{target}"


def _row(target: Target, kernel: dict[str, Any]) -> tuple[str, ...]:
    cases = kernel["cases"]
    return (
        kernel["kernel"],
        name_of(target),
        str(kernel["num_warps"]),
        str(kernel["registers"]),
        str(kernel["shared_bytes"]),
        str(kernel["spills"]),
        " ".join(f"{opcode}*{count}" for opcode, count in kernel["tensor_core"].items()) or "-",
        *(",".join(str(width or "tile") for width in kernel["widths"][kind]) or "-" for kind in ("load", "store")),
        cases[0] + (f" (+{len(cases) - 1})" if len(cases) > 1 else ""),
    )


def report(results: dict[Target, dict[str, Any]]) -> int:
    """Print the table, the excused findings with their reasons, and the findings; 1 if there are findings, else 0.

    Args:
        results: by target, `checking.Result` as a dict. Bytes in the table: shared memory, and widths of accesses to
            global memory by one thread ("tile" is a whole tile at once).
    """
    rows = [
        COLUMNS,
        *sorted(_row(target, kernel) for target, result in results.items() for kernel in result["compiled"]),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    excused, found = _by_text(results, "excused"), _by_text(results, "findings")
    used = {tuple(key) for result in results.values() for key in result["used_excuses"]}
    excuses = dict.fromkeys(tuple(key) for result in results.values() for key in result["all_excuses"])
    idle = [
        f"excuse: case {key[0]!r} excuses {key[1]} from {key[2]!r} for nothing"
        for key in excuses
        if key not in used and key[2] not in ("spill", "many_spills")  # which kernels spill depends on Triton's release
    ]
    for line in excused:
        print(f"excused {line}")
    for line in (*found, *idle):
        print(f"FOUND {line}")
    print(f"{len(rows) - 1} compiled kernels, {len(found) + len(idle)} findings")
    return 1 if found or idle else 0


def _by_text(results: dict[Target, dict[str, Any]], which: str) -> list[str]:
    """A line for each finding, with all its targets."""
    targets: dict[str, list[Target]] = {}
    for target, result in results.items():
        for finding in result[which]:
            reason = f" ({finding['reason']})" if finding["reason"] else ""
            text = f"{finding['rule']}: {finding['kernel']}: {finding['text']}{reason}"
            targets.setdefault(text, []).append(target)
    return [f"{' '.join(map(name_of, found))} {text}" for text, found in targets.items()]
