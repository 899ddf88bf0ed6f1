"""Rooms import in one direction, ARCHITECTURE.md has the same list, and no module has mutable global state."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from fp8dist.integrations.stacks import TESTED

pytestmark = pytest.mark.xdist_group("layers")  # One process parses all files.

ROOT = Path(__file__).resolve().parents[1]

# A room imports from the floors above its own line, and from itself: the core, then the tools.
CORE = [["kernels", "common"], ["state"], ["modules"], ["parallel"], ["checks"], ["job"]]
TOOLS = [["files", "runs", "replays", "exact", "integrations"], ["cli"]]
FLOOR = {room: floor for floor, rooms in enumerate(CORE + TOOLS) for room in rooms}
# The thin files beside the rooms, and the rooms whose floors they are on. ``__init__`` imports nothing by itself.
BESIDE = {"errors": "common", "ddp": "job", "fsdp": "job", "exporters": "runs", "__main__": "cli", "__init__": "job"}


def room_of(module: str) -> str | None:
    """Return the room of a dotted module name; None for foreign modules. ``import fp8dist`` is for tools."""
    top, _, rest = module.partition(".")
    if top == "fp8dist_kernels":
        return "kernels"
    first = rest.split(".")[0] or "__init__"
    return BESIDE.get(first, first) if top == "fp8dist" else None


def sources() -> list[tuple[str, Path]]:
    """Return (room, file) of all shipped files."""
    found = []
    for root, package in ((ROOT, "fp8dist"), (ROOT / "kernels", "fp8dist_kernels")):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found.append((room_of(".".join(parts)) or "", path))
    return found


class Source(NamedTuple):
    """A shipped file. ``nodes``: of its whole syntax tree, which begins with the module."""

    room: str
    path: Path
    nodes: list[ast.AST]


def imports(source: Source) -> set[str]:
    """Return our modules that a file imports, including imports in functions and for type checkers."""
    found: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the room"
            whole = node.module == "fp8dist"
            found |= {f"fp8dist.{alias.name}" for alias in node.names} if whole else {node.module or ""}
    return {name for name in found if room_of(name) is not None}


@pytest.fixture(scope="module")
def trees() -> list[Source]:
    """Return all shipped files, parsed."""
    return [Source(room, path, [*ast.walk(ast.parse(path.read_text()))]) for room, path in sources()]


def test_every_file_is_in_a_room_and_every_room_has_a_file() -> None:
    """A new room must be added to FLOOR and to ARCHITECTURE.md."""
    assert {room for room, _ in sources()} == set(FLOOR)
    beside = {path.name for path in (ROOT / "fp8dist").iterdir() if path.is_file()}
    assert beside == {"py.typed", *(f"{name}.py" for name in BESIDE)}


def test_imports_go_one_way(trees: list[Source]) -> None:
    """``fp8dist/__init__.py`` imports the rooms of public names when they are used, and for type checkers."""
    wrong = [
        f"{source.path} imports {module}"
        for source in trees
        for module in imports(source)
        if room_of(module) != source.room and FLOOR[str(room_of(module))] >= FLOOR[source.room]
        if source.path != ROOT / "fp8dist" / "__init__.py"
    ]
    assert not wrong


@pytest.mark.slow
def test_the_core_loads_no_tool() -> None:
    """All names of the core are used in a process of its own, and a model trains. Then all other public names are
    used: they load no trainer, and no program that metrics are sent to."""
    program = (
        "import fp8dist, sys, torch\n"
        "from fp8dist.job import public\n"
        "used = [getattr(fp8dist, name) for name in public.__all__]\n"
        "print('torch._dynamo' in sys.modules)\n"  # It takes 100 MB, and seconds.
        "model = torch.nn.Linear(16, 16)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "manager = fp8dist.prepare(model)\n"
        "manager.attach(model, optimizer=optimizer)\n"
        "model(torch.ones(16, 16)).sum().backward()\n"
        "optimizer.step()\n"
        "manager.check(policy='warn')\n"
        "manager.load_state_dict(manager.state_dict())\n"
        "print(*(name for name in sys.modules if name.startswith('fp8dist.')))\n"
        "import fp8dist.cli.commands, fp8dist.exporters\n"
        "used = [getattr(fp8dist, name) for name in fp8dist.__all__]\n"
        "print(*sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    dynamo, loaded, later = map(str.split, done.stdout.splitlines())
    assert dynamo == ["False"]
    assert len(loaded) > 50
    assert not [name for name in loaded if FLOOR[str(room_of(name))] >= len(CORE)]
    senders = ("tensorboard", "torch.utils.tensorboard", "wandb", "mlflow", "prometheus_client", "opentelemetry")
    assert "fp8dist.exporters" in later
    assert not {*TESTED, *senders} & set(later)


def test_no_globals_and_no_ranks_in_kernels(trees: list[Source]) -> None:
    wrong = []
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    for room, path, nodes in trees:
        wrong += [f"{path}: a global" for node in nodes if isinstance(node, ast.Global)]
        for node in nodes[0].body:  # type: ignore[attr-defined]
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, mutable):
                names = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                wrong += [f"{path}: module-level mutable {names}"] * (names != "__all__")
        if room == "kernels" and "torch.distributed" in path.read_text():
            wrong.append(f"{path}: torch.distributed")
    assert not wrong


def test_files_of_a_room_import_each_other_without_circles(trees: list[Source]) -> None:
    graph = {}
    for source in trees:
        root = ROOT / "kernels" if source.room == "kernels" else ROOT
        name = ".".join(source.path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = imports(source)
    tuple(graphlib.TopologicalSorter(graph).static_order())  # It raises CycleError.


def test_architecture_shows_the_same_rooms() -> None:
    rows = [
        [cell.strip(" `") for cell in line.split("|")[2].split(",")]
        for line in (ROOT / "ARCHITECTURE.md").read_text().split("## Rooms")[1].split("\n## ")[0].splitlines()
        if line.startswith("| ") and line.split("|")[1].strip().isdigit()
    ]
    assert [[name.rstrip("/") for name in row] for row in rows] == CORE + TOOLS


def test_other_files_reach_into_a_manager_by_internals_alone(trees: list[Source]) -> None:
    """``Internals`` of fp8dist/job/manager.py is the one way to what is not public."""
    reached = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for _, path, nodes in trees
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if path.name != "manager.py" and ast.unparse(node.value).rpartition(".")[2] in ("manager", "_manager", "_owner")
    ]
    assert not reached


def test_classes(trees: list[Source]) -> None:
    """A class name stands once, and no class has over 30 methods."""
    classes = [node for source in trees for node in source.nodes if isinstance(node, ast.ClassDef)]
    assert {name for name, count in Counter(node.name for node in classes).items() if count > 1} == set()
    methods = {node.name: sum(isinstance(part, ast.FunctionDef) for part in node.body) for node in classes}
    assert {name: count for name, count in methods.items() if count > 30} == {}


def test_names_have_verbs_of_programmers(trees: list[Source]) -> None:
    """Names do not tell, hear or say: see CONTRIBUTING, "Style". The ``tell`` of a file is Python's own."""
    spoken = re.compile(r"(^|_)(tell|told|hear|heard|say|said)(s|ing)?(_|$)|Tell|Told|Hear|Say|Said")
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for _, path, nodes in trees
        for node in nodes
        for name in (getattr(node, key, None) for key in ("id", "name", "arg", "attr"))
        if isinstance(name, str) and name != "tell" and spoken.search(name)
    }
    assert found == set()
