"""Architecture rules, checked on the source: allowed imports between packages, and names that only one may use."""

import ast
import functools
import sys
from collections.abc import Container, Iterable, Mapping, Set
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(__file__).parent.parent / "ep_moe"

LEVELS = [
    {"config", "environment", "fields", "files", "grammar", "logs", "names", "quant", "tensors"}
    | {"kernels", "kernel_launch"},
    {"group", "launch", "routing", "placement", "layout", "weights"},
    {"transport", "experts"},
    {"local_moe", "layer", "functional", "balance", "testing", "profiling"},
    {"engines", "serving", "bench", "report", "tune", "planning"},
    {"app", "cli", "__main__", "__init__"},
]
INDEPENDENT = [{"transport", "experts"}]  # packages of one level that never import each other
ALONE = {
    "init_process_group": {"group"},
    "environ": {"environment", "launch"},
    "getenv": set(),
    "tomllib": {"config"},
    "tomli": {"config"},
    # what runs code of its bytes' sender; those of a launch come through a pipe of its own, or Ray's
    "pickle": {"launch"},
    **dict.fromkeys(("cloudpickle", "dill", "marshal", "shelve", "allow_pickle"), set()),
    **dict.fromkeys(("broadcast_object_list", "scatter_object_list", "gather_object"), set()),
    **dict.fromkeys(("send_object_list", "recv_object_list"), set()),
}

MOST_PARAMETERS, MOST_KERNEL_PARAMETERS = 10, 16
OF_OTHERS = {  # signatures that other libraries own
    "functional": {"FusedMoE.__init__"}
}


def level_of(package: str) -> int:
    """The level that a package is on, from 0."""
    return next(index for index, packages in enumerate(LEVELS) if package in packages)


def package_of(path: Path) -> str:
    """The package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_packages(nodes: Iterable[ast.AST]) -> set[str]:
    """The packages that a file imports, at its top or inside a function; ep_moe itself counts as the top level."""
    packages = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            names = [f"ep_moe.{alias.name}" for alias in node.names] if node.module == "ep_moe" else [node.module or ""]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "ep_moe":
                known = len(parts) > 1 and any(parts[1] in names_ for names_ in LEVELS)
                packages.add(parts[1] if known else "__init__")
    return packages


def violations(package: str, nodes: Iterable[ast.AST]) -> list[str]:
    """The forbidden imports of a file of `package` with these nodes."""
    found = []
    for other in sorted(imported_packages(nodes) - {package}):
        if level_of(other) > level_of(package):
            found.append(f"{package} imports {other}, which is on a later level")
        found += [f"{package} imports {other}" for pair in INDEPENDENT if {package, other} == pair]
    return found


def parsed(source: str) -> list[ast.AST]:
    """All nodes of a source, the module first."""
    return list(ast.walk(ast.parse(source)))


@functools.cache
def sources() -> dict[Path, list[ast.AST]]:
    """The nodes of all modules of the package."""
    return {path: parsed(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def listed(path: Path, found: Iterable[str]) -> list[str]:
    """What was found in a file of the package, with its name."""
    return [f"{path.relative_to(PACKAGE)}: {text}" for text in found]


def test_imports_go_one_way() -> None:
    found = [listed(path, violations(package_of(path), nodes)) for path, nodes in sources().items()]
    assert sum(found, []) == []


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("config", "from ep_moe.layer import ExpertParallelMoE"),
        ("config", "import ep_moe.group"),
        ("routing", "def f():\n    from ep_moe.transport import base"),
        ("layer", "from ep_moe import ExpertParallelMoE"),
        ("layer", "from ep_moe import cli"),
        ("experts", "from ep_moe.transport.base import Handle"),
        ("transport", "def f():\n    import ep_moe.experts.base"),
    ],
)
def test_the_import_rule_sees(package: str, source: str) -> None:
    assert len(violations(package, parsed(source))) == 1


def first_circle(graph: Mapping[str, Set[str]]) -> str:
    """The first circle of a graph as "a -> b -> a", "" if it has none."""
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> str:
        if name in trail:
            return " -> ".join((*trail[trail.index(name) :], name))
        found = "" if name in done else next(filter(None, (walk(other, (*trail, name)) for other in graph[name])), "")
        done.add(name)
        return found

    return next(filter(None, (walk(name, ()) for name in graph)), "")


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(nodes: Iterable[ast.AST], known: Container[str]) -> set[str]:
    """The modules of `known` that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in known else node.module for name in names)
    return {name for name in found if name in known}


def test_packages_do_not_import_in_circles() -> None:
    graph: dict[str, set[str]] = {}
    for path, nodes in sources().items():
        graph.setdefault(package_of(path), set()).update(imported_packages(nodes) - {package_of(path)})
    assert first_circle({"__init__": set(), **graph}) == ""


def test_files_do_not_import_in_circles() -> None:
    files = {module_of(path): nodes for path, nodes in sources().items()}
    assert first_circle({name: imported_modules(nodes, files) for name, nodes in files.items()}) == ""


def test_the_circle_rule_sees() -> None:
    sources = {"a": "import b", "b": "def f():\n    from c import d", "c.d": "from a import x", "c": ""}
    graph = {name: imported_modules(parsed(source), sources) for name, source in sources.items()}
    assert first_circle(graph) == "a -> b -> c.d -> a"
    assert first_circle(graph | {"c.d": set()}) == ""


@functools.cache
def named() -> dict[str, set[str]]:
    """The packages that use each name: as an attribute, a variable, an argument, or in an import."""
    users: dict[str, set[str]] = {}
    for path, nodes in sources().items():
        names = {getattr(node, field, "") for node in nodes for field in ("attr", "id", "arg")}
        for name in names | {node.name for node in nodes if isinstance(node, ast.alias)}:
            users.setdefault(name, set()).add(package_of(path))
    return users


@pytest.mark.parametrize("name", sorted(ALONE))
def test_only_its_package_uses(name: str) -> None:
    assert named().get(name, set()) <= ALONE[name]


def test_inline_assembly_has_its_files() -> None:
    """Device code that only some GPUs have is in few files: instructions, pairs of decoded weights, Hopper."""
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path, nodes in sources().items()
        if any(getattr(node, "attr", "") == "inline_asm_elementwise" for node in nodes)
    }
    assert {user for user in users if not user.startswith("kernels/hopper/")} == {
        "kernels/device.py",
        "kernels/gemm/pairs.py",
    }


OBJECTS_OF_TORCH = {f"{torch}.all_gather_object" for torch in ("dist", "torch.distributed", "dist.distributed_c10d")}


def unsafe_reads(nodes: Iterable[ast.AST]) -> list[str]:
    """Where torch unpickles: `torch.load` but for weights, and its own gathering of objects, unlike that of a group."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("load", "all_gather_object"):
            name, call = ast.unparse(node.func), ast.unparse(node)
            if name in OBJECTS_OF_TORCH or (name == "torch.load" and "weights_only=True" not in call):
                found.append(call)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found += [alias.name for alias in node.names if alias.name in ("load", "all_gather_object")]
    return found


def test_nothing_is_unpickled() -> None:
    assert [text for path, nodes in sources().items() for text in listed(path, unsafe_reads(nodes))] == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "dist.all_gather_object(found, mine)",
        "torch.distributed.all_gather_object(found, mine)",
        "from torch.distributed import all_gather_object",
    ],
)
def test_the_rule_of_pickles_sees(source: str) -> None:
    assert len(unsafe_reads(parsed(source))) == 1
    assert unsafe_reads(parsed("group.all_gather_object(1), torch.load(path, weights_only=True), json.load(x)")) == []


# torch's functions that make tensors on the default device, and those that make them of the default dtype: engines set
# both while they make a model
FACTORIES = {"tensor", "full", "arange", "randint", "randperm"}
OF_DEFAULT_DTYPE = {"zeros", "ones", "empty", "rand", "randn", "logspace", "linspace", "eye"}
OF_ENGINES = {
    "group",
    "layout",
    "weights",
    "transport",
    "experts",
    "local_moe",
    "layer",
    "routing",
    "quant",
    "placement",
}


def left_to_defaults(nodes: list[ast.AST]) -> list[str]:
    """Calls of torch's factories that leave device or dtype to the defaults; `**like` gives what all its dicts have."""
    found, mappings = [], mappings_of(nodes)
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in FACTORIES | OF_DEFAULT_DTYPE:
            name = ast.unparse(node.func).removeprefix("torch.")
            needed = {"device", "dtype"} if name in OF_DEFAULT_DTYPE else {"device"} if name in FACTORIES else set()
            given = {keyword.arg for keyword in node.keywords}
            for keyword in node.keywords:
                if keyword.arg is None:
                    given |= mappings.get(ast.unparse(keyword.value), set())
            if needed - given:
                found.append(ast.unparse(node))
    return found


def mappings_of(nodes: list[ast.AST]) -> dict[str, set[str | None]]:
    """The keys of dicts, by the names that they are assigned to: those that all of a name have."""
    found: dict[str, set[str | None]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            keys = {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                name = ast.unparse(target)
                found[name] = found.get(name, keys) & keys
    return found


def test_tensors_have_a_named_device_and_dtype() -> None:
    of_engines = {path: nodes for path, nodes in sources().items() if package_of(path) in OF_ENGINES}
    assert [text for path, nodes in of_engines.items() for text in listed(path, left_to_defaults(nodes))] == []


def test_the_rule_of_defaults_sees() -> None:
    for wrong in ("torch.zeros(3, dtype=x)", "torch.rand(3, device=x)", "torch.tensor([1])"):
        assert left_to_defaults(parsed(wrong)) == [wrong]
    assert left_to_defaults(parsed("torch.zeros(3, dtype=x, device='cpu'), torch.full_like(x, 1)")) == []
    both = "like = {'device': x, 'dtype': y}\ntorch.ones(2, **like)"
    assert left_to_defaults(parsed(both)) == []
    assert left_to_defaults(parsed(both.replace(", 'dtype': y", ""))) == ["torch.ones(2, **like)"]


def test_every_folder_is_packaged() -> None:
    packages = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(path.parent.relative_to(PACKAGE.parent).parts) for path in sources()}
    assert folders | {"ep_moe.configs"} == set(packages)


def wide_signatures(nodes: list[ast.AST], of_others: Set[str] = frozenset()) -> list[str]:
    """Functions with more parameters than a reader can hold, `self` aside; commands take what their options are."""
    found = []
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    of_class = {id(method): f"{owner.name}." for owner in classes for method in owner.body}
    for node in nodes:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        names = {node.name, f"{of_class.get(id(node), '')}{node.name}"}
        if any(".command(" in decorator for decorator in decorators) or names & of_others:
            continue
        given = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len(given) - (given[:1] in (["self"], ["cls"]))
        limit = (
            MOST_KERNEL_PARAMETERS
            if any(text.startswith(("triton.jit", "gluon.jit")) for text in decorators)
            else MOST_PARAMETERS
        )
        if count > limit:
            found.append(f"{node.name} takes {count} parameters, the limit is {limit}")
    return found


def test_signatures_are_short() -> None:
    found = []
    for path, nodes in sources().items():
        found += listed(path, wide_signatures(nodes, OF_OTHERS.get(package_of(path), frozenset())))
    assert found == []


@pytest.mark.parametrize(
    ("head", "count", "limit"),
    [
        ("", 11, 10),
        ("@triton.jit\n", 17, 16),
        ("@triton.jit(do_not_specialize=['a0'])\n", 17, 16),
        ("@gluon.jit\n", 17, 16),
    ],
)
def test_the_signature_rule_sees(head: str, count: int, limit: int) -> None:
    for number in (limit, count):
        names = ", ".join(f"a{index}" for index in range(number))
        found = wide_signatures(parsed(f"{head}def f({names}): ..."))
        assert len(found) == (number > limit), found
