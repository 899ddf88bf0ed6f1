"""Rooms import in one direction, ARCHITECTURE.md has the same list, and no module has mutable global state."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A room may import from the lines above its own, and from itself. Each file of fp8dist's top folder is a room.
ROOMS = [
    ["kernels", "text"],
    ["divergence"],
    ["errors"],
    ["names", "optimizer_hooks"],
    ["patterns"],
    ["recipe"],
    ["state"],
    ["settings"],
    ["sync"],
    ["modules", "monitoring"],
    ["parallel"],
    ["consistency"],
    ["offline"],
    ["step"],
    ["checkpoint"],
    ["arguments", "coverage"],
    ["manager"],
    ["preparation", "model_check", "model_replay", "model_trace", "ddp", "fsdp"],
    ["launcher", "replays", "report"],
    ["exporters", "public"],
    ["__init__"],
    ["integrations"],
    ["cli"],
    ["__main__"],
]
LINE = {room: line for line, rooms in enumerate(ROOMS) for room in rooms}
PURE = ("kernels", "text", "divergence", "errors", "names", "patterns", "recipe")
"""Rooms that do not depend on ranks."""


def room_of(module: str) -> str | None:
    """Return the room of a dotted module name; None for foreign modules."""
    top, _, rest = module.partition(".")
    if top == "fp8dist_kernels":
        return "kernels"
    return (rest.split(".")[0] or "__init__") if top == "fp8dist" else None


def sources() -> list[tuple[str, Path]]:
    """Return (room, file) of all shipped files."""
    found = []
    for root in (ROOT, ROOT / "kernels"):
        for package in ("fp8dist", "fp8dist_kernels"):
            for path in sorted((root / package).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                found.append((room_of(".".join(parts)) or "", path))
    return found


def imports(tree: ast.Module) -> set[str]:
    """Return our modules that a file imports, including imports in functions and for type checkers."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the room"
            whole = node.module == "fp8dist"
            found |= {f"fp8dist.{alias.name}" for alias in node.names} if whole else {node.module or ""}
    return {name for name in found if room_of(name) is not None}


@pytest.fixture(scope="module")
def trees() -> list[tuple[str, Path, ast.Module]]:
    """Return (room, file, syntax tree) of all shipped files."""
    return [(room, path, ast.parse(path.read_text())) for room, path in sources()]


def test_every_file_is_in_a_room_and_every_room_has_a_file() -> None:
    """A new room must be added to ROOMS and to ARCHITECTURE.md."""
    assert {room for room, _ in sources()} == set(LINE)


def test_imports_go_one_way(trees: list[tuple[str, Path, ast.Module]]) -> None:
    wrong = [
        f"{path} imports {module}"
        for room, path, tree in trees
        for module in imports(tree)
        if room_of(module) != room and LINE[str(room_of(module))] >= LINE[room]
    ]
    assert not wrong


def test_no_globals_and_no_ranks_below_state(trees: list[tuple[str, Path, ast.Module]]) -> None:
    wrong = []
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    for room, path, tree in trees:
        wrong += [f"{path}: a global" for node in ast.walk(tree) if isinstance(node, ast.Global)]
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, mutable):
                names = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                wrong += [f"{path}: module-level mutable {names}"] * (names != "__all__")
        if room in PURE and "torch.distributed" in path.read_text():
            wrong.append(f"{path}: torch.distributed")
    assert not wrong


def test_files_of_a_room_import_each_other_without_circles(trees: list[tuple[str, Path, ast.Module]]) -> None:
    graph = {}
    for room, path, tree in trees:
        root = ROOT / "kernels" if room == "kernels" else ROOT
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = imports(tree)
    done: set[str] = set()

    def visit(name: str, on_the_way: tuple[str, ...]) -> None:
        assert name not in on_the_way, " -> ".join((*on_the_way, name))
        if name not in done:
            for imported in graph.get(name, ()):
                visit(imported, (*on_the_way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_architecture_shows_the_same_rooms() -> None:
    rows = [
        [cell.strip(" `") for cell in line.split("|")[2].split(",")]
        for line in (ROOT / "ARCHITECTURE.md").read_text().split("## Rooms")[1].split("\n## ")[0].splitlines()
        if line.startswith("| ") and line.split("|")[1].strip().isdigit()
    ]
    assert [[name.rstrip("/") for name in row] for row in rows] == ROOMS
