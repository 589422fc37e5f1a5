"""The stand-in and the adapter against DeepEP's real files, from the wheel sgl-deep-ep, whose CUDA part is not run."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import fake_deepep

from ep_moe.testing.cases import TransportCase
from ep_moe.testing.rounds import SUM_ORDERS, _Part
from ep_moe.transport.deepep import library, low_latency

WHEEL = (
    "sgl-deep-ep==0.1.2",
    "--python-version=3.11",
    "--platform=manylinux_2_28_x86_64",
    "--platform=manylinux_2_27_x86_64",
)
FILES = {"Buffer": "legacy.py", "ElasticBuffer": "elastic.py"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel. It is read, never imported as a whole: it needs CUDA."""
    folder = tmp_path_factory.mktemp("deep_ep")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=1"]
    command = [*pip, "--timeout=10", "--disable-pip-version-check", f"--dest={folder}", *WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        pytest.skip(f"pip cannot get {WHEEL[0]}: {last}")
    with zipfile.ZipFile(found[0]) as archive:
        archive.extractall(folder)
    return folder / "deep_ep"


def methods_of(wheel: Path, name: str) -> dict[str, ast.FunctionDef]:
    """The methods of a class in the real files."""
    tree = ast.parse((wheel / "buffers" / FILES[name]).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def parameters_of(function: ast.FunctionDef) -> list[tuple[str, Any]]:
    """Names and defaults, `self` aside; `inspect.Parameter.empty` for no default."""
    arguments, empty = function.args, inspect.Parameter.empty
    defaults = [empty] * (len(arguments.args) - len(arguments.defaults))
    defaults += [ast.literal_eval(default) for default in arguments.defaults]
    found = [(argument.arg, default) for argument, default in zip(arguments.args, defaults, strict=True)]
    return [entry for entry in found if entry[0] != "self"]


def returned(function: ast.FunctionDef) -> set[int]:
    """The numbers of values that it returns."""
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    return {len(value.elts) for value in values if isinstance(value, ast.Tuple)}


def own_methods(kind: type) -> dict[str, ast.FunctionDef]:
    """The stand-in's public methods."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: node for node in functions if node.name == "__init__" or not node.name.startswith("_")}


@pytest.mark.parametrize("name", FILES)
def test_the_stand_in_has_the_real_signatures(wheel: Path, name: str) -> None:
    real, own = methods_of(wheel, name), own_methods(getattr(fake_deepep, name))
    assert set(own) <= set(real)
    for method, function in own.items():
        assert parameters_of(function) == parameters_of(real[method]), method
        static = [
            any(ast.unparse(d) == "staticmethod" for d in node.decorator_list) for node in (function, real[method])
        ]
        assert static[0] == static[1], method
        if method in ("dispatch", "combine", "get_dispatch_layout", "low_latency_dispatch", "low_latency_combine"):
            assert returned(function) == returned(real[method]), method


@pytest.mark.parametrize("mode", library.MODES)
def test_the_adapter_needs_what_is_there(wheel: Path, mode: str) -> None:
    name, needed = library.NEEDED[mode]
    real = methods_of(wheel, name)
    for method, arguments in needed.items():
        assert set(arguments.split()) <= {argument for argument, _ in parameters_of(real[method])}, method


def test_handles_are_as_the_adapter_reads_them(wheel: Path) -> None:
    real = methods_of(wheel, "Buffer")
    tuples = [
        [ast.unparse(part) for part in node.value.elts]
        for method in ("low_latency_dispatch", "dispatch")
        for node in ast.walk(real[method])
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "handle"
        and isinstance(node.value, ast.Tuple)
    ]
    assert [len(names) for names in tuples] == [5, 6]
    assert tuples[0][:3] == ["packed_recv_src_info", "packed_recv_layout_range", "num_max_dispatch_tokens_per_rank"]
    handle = ast.parse((wheel / "buffers" / "elastic.py").read_text())
    (init,) = (
        node
        for owner in handle.body
        if isinstance(owner, ast.ClassDef) and owner.name == "EPHandle"
        for node in owner.body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    assert "num_recv_tokens_per_expert_list" in [argument.arg for argument in init.args.args]
    filling = (wheel / "utils" / "envs.py").read_text()
    assert "fill_uninitialized_memory" in filling  # why `without_fill` surrounds every call


def test_low_latency_limits_are_those_of_the_compiled_kernels(wheel: Path) -> None:
    (compiled,) = wheel.glob("_C*.so")
    kernels = set(re.findall(rb"internode_ll7combineILb\dELi(\d+)ELi(\d+)E", compiled.read_bytes()))
    widths, most_topk = ({int(kernel[place]) for kernel in kernels} for place in (0, 1))
    assert {*low_latency.WIDTHS, low_latency.WIDTH_OF_2} <= widths
    assert set(fake_deepep.WIDTHS) == widths
    assert min(most_topk) >= low_latency.MOST_TOPK


def reference_of(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """DeepEP's own reference in torch, `utils/refs.py`, without the rest of the package."""
    names = {"envs": {"get_global_seed": lambda: 0}, "math": {"ceil_div": lambda a, b: -(-a // b)}}
    monkeypatch.setitem(sys.modules, "deep_ep_reference", types.ModuleType("deep_ep_reference"))
    for name, parts in names.items():
        module = types.ModuleType(f"deep_ep_reference.{name}")
        module.__dict__.update(parts)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location("deep_ep_reference.refs", wheel / "utils" / "refs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_order_of_sums_of_v2_is_that_of_its_own_reference(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 ranks of 4 experts, weights of 1: the ranks' sums are added in the order of their last columns."""
    reference, generator = reference_of(wheel, monkeypatch), torch.Generator().manual_seed(7)
    num_tokens, num_topk, hidden = 40, 6, 64
    ids = torch.rand(num_tokens, 16, generator=generator).argsort(1)[:, :num_topk]
    y = (torch.randn(num_tokens, num_topk, hidden, generator=generator) * 10).bfloat16()
    expected = reference.combine(y.clone(), ids, 1, 4, 16, None, reduce_in_local=True, reduce_in_scaleup=False)
    case = TransportCase(name="reference", tokens=(num_tokens, 0, 0, 0), hidden=hidden, num_experts=16)
    found = {
        order: torch.stack(
            [
                add(
                    case,
                    [
                        _Part(owner=expert // 4, weight=torch.ones(()), row=y[token, column].float())
                        for column, expert in enumerate(ids[token].tolist())
                    ],
                )
                for token in range(num_tokens)
            ]
        ).bfloat16()
        for order, (add, _) in SUM_ORDERS.items()
    }
    assert torch.equal(found["last-columns-rounded"], expected)
    assert not torch.equal(found["columns"], expected)
