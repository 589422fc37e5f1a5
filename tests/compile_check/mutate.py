"""Compiles the exchange kernels as `compile_check.mutants` changes them, and prints what the rules on order find.

    PYTHONPATH=tests python -m compile_check.mutate 90

prints JSON: for each mutant what is found, and under "dispatch" and "combine" what is in the kernels as they are. It
stops at the PTX: no machine code is made.
"""

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from triton.backends.nvidia.compiler import CUDABackend

from compile_check import ir
from compile_check.checking import Orders
from compile_check.exchange_cases import small_round
from compile_check.exchange_order import RULES
from compile_check.mutants import MUTANTS, Mutant
from compile_check.stub import compile_only
from ep_moe.transport.one_sided import combine_launcher, dispatch_launcher

# in order of their imports
MODULES = (
    "device",
    "wire_layout",
    "puts",
    "peers",
    "waits",
    "round_state",
    "headers",
    "count_ids",
    "batch_rows",
    "dispatch_send",
    "dispatch_receive",
    "dispatch",
    "combine_send",
    "combine_receive",
    "combine",
)
UNCHANGED = tuple(
    Mutant(name=kernel, module="", old="", new="", found="", kernel=kernel) for kernel in ("dispatch", "combine")
)


class _Idle:
    """A kernel whose launch does nothing."""

    fn = staticmethod(lambda: None)  # without parameters

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: None


@contextlib.contextmanager
def changed_kernels(folder: Path, mutants: list[Mutant]) -> Iterator[None]:
    """Reload the exchange's kernels with changes; in the block, launchers launch these."""
    loaded: dict[str, Any] = {}
    with mock.patch.dict(sys.modules):  # restores the modules at the end
        for name in MODULES:
            full = "ep_moe.kernels.device" if name == "device" else f"ep_moe.kernels.exchange.{name}"
            spec = importlib.util.find_spec(full)
            assert spec is not None
            assert spec.origin is not None
            text = Path(spec.origin).read_text()
            for mutant in mutants:
                if name == mutant.module:
                    assert mutant.old in text, f"{name}.py has no {mutant.old!r}: change the mutant {mutant.name!r}"
                    text = text.replace(mutant.old, mutant.new)
            path = folder / f"{name}.py"
            path.write_text(text)
            spec = importlib.util.spec_from_file_location(full, path)
            assert spec is not None
            assert spec.loader is not None
            loaded[name] = sys.modules[full] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded[name])
        (kernel,) = {mutant.kernel for mutant in mutants}
        changed = {name: _Idle() for name in ("dispatch", "combine")}
        changed[kernel] = getattr(loaded[kernel], f"_{kernel}_kernel")
        with (
            mock.patch.object(dispatch_launcher, "_dispatch_kernel", changed["dispatch"]),
            mock.patch.object(combine_launcher, "_combine_kernel", changed["combine"]),
        ):
            yield


def findings(arch: int) -> list[str]:
    """The findings of the rules on the kernel that a small round compiles now."""
    with compile_only(arch) as recorder, mock.patch.object(CUDABackend, "make_cubin", return_value=b""):
        small_round().launch()
    for _, error in recorder.failures:
        raise error
    orders, found = Orders(rules=RULES), list[str]()
    for function, compiled in recorder.launches:
        intermediate, threads = ir.read(compiled.asm["ttir"]), 32 * compiled.metadata.num_warps
        here = orders.check(function.fn.__name__, compiled.asm["ptx"], intermediate, threads)
        found += [finding.text for finding in here]
    assert orders.seen, "nothing was compiled"
    return found


def main(arch: int) -> None:
    """Print the findings by mutant as JSON."""
    found, groups = {}, list[list[Mutant]]()
    for mutant in (*UNCHANGED, *MUTANTS):
        if mutant.beside:
            groups[-1].append(mutant)
        else:
            groups.append([mutant])
    with tempfile.TemporaryDirectory(prefix="compile_check_") as name:
        os.environ["TRITON_CACHE_DIR"] = name
        for number, group in enumerate(groups):
            folder = Path(name) / f"group{number}"
            folder.mkdir()
            with changed_kernels(folder, group):
                found |= dict.fromkeys([mutant.name for mutant in group], findings(arch))
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
