"""Architecture rules, checked on the source: allowed imports between rooms, and names that only one room may use."""

import ast
import sys
from collections.abc import Set
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(__file__).parent.parent / "ep_moe"

FLOORS = [
    {"config", "environment", "fields", "quant", "kernels", "kernel_launch"},
    {"group", "launch", "routing", "placement", "layout", "weights"},
    {"transport", "experts"},
    {"local_moe", "layer", "functional", "testing", "profiling"},
    {"engines", "serving", "bench", "report", "tune", "planning"},
    {"app", "cli", "__main__", "__init__"},
]
STRANGERS = [{"transport", "experts"}]  # rooms of one floor that never import each other
ALONE = {
    "init_process_group": {"group"},
    "environ": {"environment", "launch"},
    "getenv": set(),
    "tomllib": {"config"},
    "tomli": {"config"},
}

# words in names that meant nothing to a reader: `test_retired_names_stay_retired` says what took their place
MOST_PARAMETERS, MOST_KERNEL_PARAMETERS = 10, 30
OF_OTHERS = {  # signatures that other libraries own
    "functional": {
        "trtllm_fp4_block_scale_moe",
        "b12x_fused_moe",
        "inplace_fused_experts",
        "outplace_fused_experts",
        "fused_experts_impl",
        "fused_experts",
        "fused_moe",
        "invoke_fused_moe_kernel",
        "triton_kernel_fused_experts",
        "triton_kernel_fused_experts_with_bias",
        "triton_kernel_moe_forward",
        "triton_kernel_moe_with_bias_forward",
        "invoke_moe_batched_triton_kernel",
        "_BatchedExperts.apply",
        "FusedMoE.__init__",
    }
}

RETIRED = ("news", "patience", "impatient", "spoilt", "guilty", "quantis", "homes", "unplanned", "wordy")
# whole names whose words have one meaning elsewhere, and what took their place
RETIRED_NAMES = {
    "kind_of": "plan_key",
    "Sent": "RoundInputs",
    "Planner": "RoundPlans",
    "Launch": "RepeatedLaunch",
    "ExchangeMemory": "PeerMemory",
    "SlotMemory": "SlotState",
    "Own": "SlotState",
    "launch_of": "kernel_of",
}


def floor_of(room: str) -> int:
    """The floor that a room is on, from 0."""
    return next(index for index, rooms in enumerate(FLOORS) if room in rooms)


def room_of(path: Path) -> str:
    """The room that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(tree: ast.AST) -> set[str]:
    """Every room that a file imports, at its top or inside a function. The package itself counts as its top floor."""
    rooms = set()
    for node in ast.walk(tree):
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
                known = len(parts) > 1 and any(parts[1] in rooms_ for rooms_ in FLOORS)
                rooms.add(parts[1] if known else "__init__")
    return rooms


def violations(room: str, source: str) -> list[str]:
    """The forbidden imports of a file of `room` with this source."""
    found = []
    for other in sorted(imported_rooms(ast.parse(source)) - {room}):
        if floor_of(other) > floor_of(room):
            found.append(f"{room} imports {other}, which is on a later floor")
        found += [f"{room} imports {other}" for pair in STRANGERS if {room, other} == pair]
    return found


def files() -> list[Path]:
    """All modules of the package."""
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    assert violations(room_of(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("room", "source"),
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
def test_the_import_rule_sees(room: str, source: str) -> None:
    assert len(violations(room, source)) == 1


def test_rooms_do_not_import_in_circles() -> None:
    graph: dict[str, set[str]] = {}
    for path in files():
        graph.setdefault(room_of(path), set()).update(imported_rooms(ast.parse(path.read_text())) - {room_of(path)})
    done: set[str] = set()

    def walk(room: str, trail: tuple[str, ...]) -> None:
        assert room not in trail, " -> ".join((*trail, room))
        if room not in done:
            for other in graph.get(room, ()):
                walk(other, (*trail, room))
            done.add(room)

    for room in graph:
        walk(room, ())


@pytest.mark.parametrize("name", sorted(ALONE))
def test_only_its_room_uses(name: str) -> None:
    users = {
        room_of(path)
        for path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if name in (getattr(node, "attr", None), getattr(node, "id", None))
        or (isinstance(node, ast.alias) and node.name == name)
    }
    assert users <= ALONE[name]


@pytest.mark.parametrize("folder", [PACKAGE, PACKAGE.parent / "tests"], ids=["package", "tests"])
def test_retired_names_stay_retired(folder: Path) -> None:
    """Each had a term of the field's own in its place: header, timeout, poisoned, suspect, quantize, dest_rank_mask."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [getattr(node, field, None) for field in ("id", "attr", "name", "arg")]
            found += [f"{path.name}: {name} is {RETIRED_NAMES[name]} now" for name in names if name in RETIRED_NAMES]
            words = {part for name in names if isinstance(name, str) for part in name.lower().split("_")}
            found += [f"{path.name}: {name}" for name in words if any(name.startswith(retired) for retired in RETIRED)]
    assert sorted(set(found)) == []


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


def left_to_defaults(source: str) -> list[str]:
    """Calls of torch's factories that leave device or dtype to the defaults; `**like` gives what all its dicts have."""
    found, tree = [], ast.parse(source)
    mappings = mappings_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func).removeprefix("torch.")
            needed = {"device", "dtype"} if name in OF_DEFAULT_DTYPE else {"device"} if name in FACTORIES else set()
            given = {keyword.arg for keyword in node.keywords}
            for keyword in node.keywords:
                if keyword.arg is None:
                    given |= mappings.get(ast.unparse(keyword.value), set())
            if needed - given:
                found.append(ast.unparse(node))
    return found


def mappings_of(tree: ast.Module) -> dict[str, set[str | None]]:
    """The keys of dicts, by the names that they are assigned to: those that all of a name have."""
    found: dict[str, set[str | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            keys = {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                name = ast.unparse(target)
                found[name] = found.get(name, keys) & keys
    return found


@pytest.mark.parametrize("path", [path for path in files() if room_of(path) in OF_ENGINES], ids=lambda path: path.stem)
def test_tensors_have_a_named_device_and_dtype(path: Path) -> None:
    assert left_to_defaults(path.read_text()) == []


def test_the_rule_of_defaults_sees() -> None:
    for wrong in ("torch.zeros(3, dtype=x)", "torch.rand(3, device=x)", "torch.tensor([1])"):
        assert left_to_defaults(wrong) == [wrong]
    assert left_to_defaults("torch.zeros(3, dtype=x, device='cpu'), torch.full_like(x, 1)") == []
    both = "like = {'device': x, 'dtype': y}\ntorch.ones(2, **like)"
    assert left_to_defaults(both) == []
    assert left_to_defaults(both.replace(", 'dtype': y", "")) == ["torch.ones(2, **like)"]


def test_every_folder_is_packaged() -> None:
    packages = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(path.parent.relative_to(PACKAGE.parent).parts) for path in files()}
    assert folders | {"ep_moe.configs"} == set(packages)


def wide_signatures(source: str, of_others: Set[str] = frozenset()) -> list[str]:
    """Functions with more parameters than a reader can hold, `self` aside; commands take what their options are."""
    found, tree = [], ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    of_class = {id(method): f"{owner.name}." for owner in classes for method in owner.body}
    for node in ast.walk(tree):
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


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_signatures_are_short(path: Path) -> None:
    assert wide_signatures(path.read_text(), OF_OTHERS.get(room_of(path), frozenset())) == []


@pytest.mark.parametrize(
    ("head", "count", "limit"),
    [
        ("", 11, 10),
        ("@triton.jit\n", 31, 30),
        ("@triton.jit(do_not_specialize=['a0'])\n", 31, 30),
        ("@gluon.jit\n", 31, 30),
    ],
)
def test_the_signature_rule_sees(head: str, count: int, limit: int) -> None:
    for number in (limit, count):
        names = ", ".join(f"a{index}" for index in range(number))
        found = wide_signatures(f"{head}def f({names}): ...")
        assert len(found) == (number > limit), found
