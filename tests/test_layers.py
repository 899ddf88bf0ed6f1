"""Imports go one way, and no module keeps mutable state."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A module may import from its own line only inside a package of its own (state), else from lines above.
LAYERS = [
    ["errors", "formats", "json_lines", "waits"],
    ["scaling", "names"],
    ["kernels"],
    ["fallback", "recipe", "ops", "gathered", "graphs", "patterns"],
    ["settings"],
    ["state"],
    ["overrides", "precision", "groups"],
    ["attendance"],
    ["sync", "tensor_parallel", "weight_notes", "outgrown"],
    ["consistency"],
    ["offline"],
    ["doctor", "monitor", "simulation"],
    ["watch", "linear_slots"],
    ["nn"],
    ["step_watch"],
    ["ddp", "boundary", "calibration", "precision_control", "wrappers", "arguments"],
    ["coverage", "checker", "fsdp", "shards", "guarded_steps"],
    ["cycle", "loss_guard"],
    ["checkpoint", "transformer_engine", "attachment"],
    ["manager"],
    ["prepare", "model_check"],
    ["__init__"],
    ["cli"],
    ["__main__"],
]
LINE = {name: line for line, names in enumerate(LAYERS) for name in names}


def _sources() -> list[tuple[str, Path]]:
    found = [("kernels", path) for path in (ROOT / "kernels" / "ops").rglob("*.py")]
    for path in (ROOT / "fp8dist").rglob("*.py"):
        relative = path.relative_to(ROOT / "fp8dist")
        found.append((relative.parts[0] if len(relative.parts) > 1 else relative.stem, path))
    return found


def _imports(tree: ast.Module) -> list[tuple[str, bool]]:
    """(module below fp8dist, whether only for type checking)."""
    guarded = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and ast.unparse(test.test) == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fp8dist":
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
            found += [(name, id(node) in guarded) for name in names]
    return found


@pytest.mark.parametrize(("layer", "path"), _sources(), ids=lambda value: getattr(value, "stem", value))
def test_imports_go_one_way(layer: str, path: Path) -> None:
    assert layer in LINE, f"{path} belongs to no layer: add it to LAYERS and to ARCHITECTURE.md"
    for imported, type_checking in _imports(ast.parse(path.read_text())):
        same_package = imported == layer and layer in ("state", "kernels", "consistency", "offline", "simulation")
        assert type_checking or same_package or LINE[imported] < LINE[layer], f"{path.name} imports {imported}"


@pytest.mark.parametrize(("layer", "path"), _sources(), ids=lambda value: getattr(value, "stem", value))
def test_no_globals_and_no_layer_one_torch_distributed(layer: str, path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Global)], f"{path.name} has a global"
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, mutable):
            names = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            assert names == "__all__", f"{path.name}: module-level mutable {names}"
    if LINE[layer] <= LINE["ops"] and layer != "ops":
        assert "torch.distributed" not in path.read_text()


def test_every_layer_has_a_file() -> None:
    assert {layer for layer, _ in _sources()} == set(LINE)
