"""`nvshmem_heap` and its stand-in against what the extras nvshmem-cu12 and nvshmem-cu13 install, without a GPU.

Their wheels are 280 MB together, so `.ci/run` runs it in a step of its own: pytest -m matrix.
"""

import ast
import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ep_moe.environment import NvshmemEnv
from ep_moe.group import nvshmem_heap

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
MODULES = ("nvshmem.core", "nvshmem.bindings", "cuda.core", "cuda.pathfinder")
GPU_ONLY = {"nvshmem.bindings.ptr", "nvshmem.bindings.cumodule_init"}  # the stand-in lacks them
# in the extra's environment; its library is loaded first, since torch may bring and load another
LOOK = """
import json, sys
from cuda.pathfinder import load_nvidia_dynamic_lib
load_nvidia_dynamic_lib("nvshmem_host")
sys.path += json.loads(sys.argv[1])
import test_nvshmem_sources
print(json.dumps(test_nvshmem_sources.look()))
"""


def uses() -> tuple[set[str], list[tuple[str, int, list[str]]]]:
    """What `nvshmem_heap` reads of the libraries, () for what a call returns; its calls, with numbers and keywords."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(nvshmem_heap))))
    names = {"nvshmem": "nvshmem", "_bindings()": "nvshmem.bindings"}

    def path_of(node: ast.AST) -> str:
        known = names.get(ast.unparse(node), "")
        if isinstance(node, ast.Attribute) and (owner := path_of(node.value)):
            return f"{owner}.{node.attr}"
        return f"{called}()" if isinstance(node, ast.Call) and (called := path_of(node.func)) else known

    for node in (node for node in nodes if isinstance(node, ast.ImportFrom) and node.module in MODULES):
        names |= {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and path_of(node.value)]
    names |= {ast.unparse(node.targets[0]): path_of(node.value) for node in assigned}
    calls = [
        (path_of(node.func), len(node.args), [str(keyword.arg) for keyword in node.keywords])
        for node in nodes
        if isinstance(node, ast.Call) and path_of(node.func)
    ]
    read = {path_of(node) for node in nodes if isinstance(node, ast.Attribute)} | {path for path, *_ in calls}
    return read - {""}, calls


def faults_of(modules: dict[str, Any], device: Any) -> dict[str, str]:
    """The names of `uses` that these modules lack, or that do not take their arguments, and why."""
    core, (read, calls) = modules["nvshmem.core"], uses()
    found: dict[str, Any] = {
        **modules,
        "nvshmem.core.get_version()": core.get_version(),
        "nvshmem.core.get_unique_id()": core.get_unique_id(empty=True),
        "cuda.core.Device()": device,
        "cuda.pathfinder.load_nvidia_dynamic_lib()": modules["cuda.pathfinder"].load_nvidia_dynamic_lib("nvshmem_host"),
    }
    for path in sorted(read - set(found)):  # an owner is before its attributes
        owner, _, name = path.rpartition(".")
        found[path] = getattr(found.get(owner), name, None)
    faults = {path: "is missing" for path in read if found[path] is None}
    for path, count, keywords in calls:
        try:
            if path not in faults:
                inspect.signature(found[path]).bind(*range(count), **dict.fromkeys(keywords))
        except TypeError as error:
            faults[path] = str(error)
    return faults


def look() -> dict[str, Any]:
    """What this process finds of the real libraries."""
    modules = {name: importlib.import_module(name) for name in MODULES}
    device = object.__new__(modules["cuda.core"].Device)  # its own constructor needs a GPU
    return {
        "faults": faults_of(modules, device),
        "names": {name: dir(module) for name, module in modules.items()},
        "unique id": modules["nvshmem.core"].get_unique_id(empty=True)._data.nbytes,
        "why not": nvshmem_heap.why_no_nvshmem(),
        "device code": str(nvshmem_heap._device_library()),
        "cuda": "cu" + importlib.metadata.version("cuda-bindings").split(".")[0],
    }


@pytest.fixture(scope="module", params=["cu12", "cu13"])
def found(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What `look` finds where the extra is installed; an environment of its own, 350 MB while it is used."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pip = [sys.executable, "-m", "pip", "--quiet", "--retries=1", "--timeout=10", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, symlinks=True)
        python = f"{folder}/bin/python"
        command = [*pip, f"--python={python}", "install", "--no-compile", "--only-binary=:all:"]
        command += extras[f"nvshmem-{request.param}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert "ResolutionImpossible" not in done.stderr, done.stderr[-3000:]
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            pytest.skip(f"pip cannot get nvshmem-{request.param}: {last}")
        paths = json.dumps([str(Path(__file__).parent), str(ROOT), *filter(None, sys.path)])
        looked = subprocess.run([python, "-c", LOOK, paths], capture_output=True, text=True, timeout=120, check=False)
        assert looked.returncode == 0, looked.stderr[-3000:]
        yield {**json.loads(looked.stdout.splitlines()[-1]), "flavour": request.param, "folder": folder}


def test_the_heap_calls_what_is_there(found: dict[str, Any]) -> None:
    assert found["faults"] == {}
    assert found["unique id"] == nvshmem_heap._UNIQUE_ID_BYTES
    assert found["cuda"] == found["flavour"]


def test_the_library_is_found_without_a_gpu(found: dict[str, Any]) -> None:
    assert found["why not"] == ""
    library = Path(found["device code"])
    assert library.is_relative_to(found["folder"])
    code, host = library.read_bytes(), (library.parent / "libnvshmem_host.so.3").read_bytes()
    functions = re.findall(r'"(nvshmemx?_\w+)"', (ROOT / "ep_moe/kernels/exchange/puts.py").read_text())
    assert len(functions) == 4
    assert [name for name in functions if name.encode() not in code] == []
    fixed = {"NVSHMEM_DISABLE_CUDA_VMM": "1"}
    for name in (*fixed, *(NvshmemEnv.from_environ(environ).variable for environ in ({}, fixed))):
        assert b"\0" + name.removeprefix("NVSHMEM_").encode() + b"\0" in host, name


def test_the_stand_in_has_nothing_that_the_real_one_lacks(found: dict[str, Any], tmp_path: Path) -> None:
    library = importlib.import_module("test_nvshmem").FakeLibrary(tmp_path)
    modules = {name: library.modules[name] for name in MODULES}
    for name, module in modules.items():
        assert set(vars(module)) <= set(found["names"][name]), name
        assert {f"{name}.{part}" for part in vars(module)} <= uses()[0], name
    assert set(faults_of(modules, modules["cuda.core"].Device(0))) == GPU_ONLY
