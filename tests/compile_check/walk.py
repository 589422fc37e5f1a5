"""Finds every jit function of a package, and those that no case has reached."""

import gc
import importlib
import pkgutil
from collections.abc import Container, Iterable

from triton.runtime.jit import JITFunction

from compile_check.case import Finding

ENGINES = ("vllm", "sglang")  # serving engines, which need not be installed: their plug-ins have no kernels


def import_all(package: str) -> list[Finding]:
    """Import every module of a package but `__main__`; a finding for each that fails but for an absent engine."""
    findings = []
    path = importlib.import_module(package).__path__
    for module in pkgutil.walk_packages(path, f"{package}.", onerror=lambda name: None):
        if module.name.rpartition(".")[2] != "__main__":
            try:
                importlib.import_module(module.name)
            except Exception as error:  # noqa: BLE001 - a module may fail in any way
                if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in ENGINES:
                    continue
                findings.append(Finding(rule="case", kernel=module.name, text=f"does not import: {error!r}"))
    return findings


def name_of(function: JITFunction) -> str:
    """The module and name of a jit function."""
    return f"{function.fn.__module__}.{function.fn.__qualname__}"


def jit_functions(package: str) -> list[JITFunction]:
    """Every live jit function that a package's modules define: at top level, in a class, a dict or a closure.

    Tests `type(thing)`: isinstance would read `__class__`, which some objects compute, with warnings.
    """
    found = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), JITFunction) and f"{thing.fn.__module__}.".startswith(f"{package}.")
    ]
    return sorted(found, key=name_of)


def without_case(functions: Iterable[JITFunction], launched: Container[int], reached: Container[int]) -> list[Finding]:
    """A finding for each jit function that no case has launched or, if it is not named a kernel, reached; by id."""
    findings = []
    for function in functions:
        name = name_of(function)
        if name.endswith("_kernel") and id(function) not in launched:
            findings.append(Finding(rule="case", kernel=name, text="no case launches this kernel"))
        elif id(function) not in reached:
            findings.append(Finding(rule="case", kernel=name, text="no kernel of any case calls this jit function"))
    return findings
