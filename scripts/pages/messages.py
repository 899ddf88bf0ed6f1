"""The reference of errors: each public exception with its messages, from the code."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from fp8dist import errors as exceptions
from fp8dist.job import order
from scripts.pages.filling import ROOT

PLACE = "\u2039…\u203a"
"""Placeholder for a value in a message."""

_AS: Mapping[str, str] = MappingProxyType({"FileError": "CheckpointError", "Unsupported": "CheckpointError"})
"""Public base classes of private exceptions."""

_ELSEWHERE: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        **{("common/divergence.py", name): "DivergenceError" for name in ("_headline", "_sentence")},
        ("errors.py", "__str__"): "LossDiverged",
        **{
            ("state/publications.py", name): "ManifestMismatchError"
            for name in ("_differences", "_absent", "_read_outcome")
        },
    }
)
"""By file and function that builds the text of an exception, away from its ``raise``: the exception."""

_UNCHANGED = ("one_line", "str")
"""Functions that return their text argument with small changes."""

Texts = Mapping[str, list[ast.expr]]


def public_errors() -> dict[str, type[Exception]]:
    """Return the exceptions of ``fp8dist.errors``, the base class first."""
    found = {name: getattr(exceptions, name) for name in exceptions.__all__}
    kinds = [(name, kind) for name, kind in found.items() if inspect.isclass(kind) and issubclass(kind, Exception)]
    return dict(sorted(kinds, key=lambda one: (one[1] is not exceptions.Fp8DistError, one[0])))


def errors() -> str:
    """Return a heading for each exception, and its messages by subpackage."""
    by_kind: dict[str, dict[str, dict[str, None]]] = {}
    for path in sorted((ROOT / "fp8dist").rglob("*.py")):
        room = path.relative_to(ROOT / "fp8dist").parts[0].removesuffix(".py")
        for kind, text in [*messages_in(path), *_from_elsewhere(path), *_of_order(room)]:
            by_kind.setdefault(kind, {}).setdefault(room, {})[text] = None
    texts = []
    for name, error in public_errors().items():
        bases = [base.__name__ for base in error.__bases__]
        first = (inspect.getdoc(error) or "").splitlines()[0].replace("``", "`")
        texts.append(f"## {name}\n\n{first} (A subclass of {', '.join(f'`{base}`' for base in bases)}.)\n")
        for room, said in sorted(by_kind.get(name, {}).items()):
            lines = "".join(f"- {_code(text)}\n" for text in said)
            texts.append(f"**{room}**\n\n{lines}")
    return "\n".join(texts)


def messages_in(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (public exception, message template) for each ``raise`` with a known text in a file, in order."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public = public_errors()
    constants = _texts_in(tree.body)
    defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    functions = {node.name: node for node in defined}
    seen: set[int] = set()
    for function in [*defined, tree]:
        known = {**constants, **_texts_in(list(ast.walk(function)))}
        for call in ast.walk(function):
            if not isinstance(call, ast.Call) or not call.args or id(call) in seen:
                continue
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            kind = _AS.get(called, called)
            if kind not in public:
                continue
            seen.add(id(call))
            for text in _templates(call.args[0], known, functions):
                if re.search(r"[a-zA-Z]{3}", text):
                    yield kind, " ".join(text.split())


def _from_elsewhere(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (public exception, message template) for texts that this file builds and other code raises."""
    place = path.relative_to(ROOT / "fp8dist").as_posix()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef) or (place, node.name) not in _ELSEWHERE:
            continue
        known = _texts_in(list(ast.walk(node)))
        values = [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value]
        if node.name == "_read_outcome":
            values += [each for texts in known.values() for each in texts]
        for text in (text for value in values for text in _templates(value, known, {})):
            if re.search(r"[a-z]{3} ", text):
                yield _ELSEWHERE[place, node.name], " ".join(text.split())


def _of_order(room: str) -> Iterator[tuple[str, str]]:
    """Yield the messages for calls in the wrong order, from the table in ``fp8dist/job/order.py``."""
    if room == "job":
        for call, refused in order._REFUSED.items():
            for phase, instead in refused.items():
                yield "ConfigurationError", f"{call} {phase.value}: {instead}"


def _texts_in(nodes: list[ast.stmt] | list[ast.AST]) -> dict[str, list[ast.expr]]:
    """Return the expressions that are assigned to each name."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return found


def _templates(node: ast.expr, known: Texts, functions: Mapping[str, ast.FunctionDef], depth: int = 0) -> list[str]:
    """Return all texts that an expression can have."""
    if depth > 4:
        return [PLACE]
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else [PLACE]
    if isinstance(node, ast.IfExp):
        return [text for side in (node.body, node.orelse) for text in _templates(side, known, functions, depth + 1)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(_piece(value, known) for value in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_templates(side, known, functions, depth + 1) for side in (node.left, node.right)]
        return [left + right for left in sides[0] for right in sides[1]]
    if isinstance(node, ast.Name) and node.id in known:
        return [text for value in known[node.id] for text in _templates(value, known, functions, depth + 1)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _of_call(node.func.id, node, known, functions, depth)
    return [PLACE]


def _of_call(
    name: str, call: ast.Call, known: Texts, functions: Mapping[str, ast.FunctionDef], depth: int
) -> list[str]:
    if name in _UNCHANGED and call.args:
        return _templates(call.args[0], known, functions, depth + 1)
    if name not in functions:
        return [PLACE]
    inside = _texts_in(list(ast.walk(functions[name])))
    returned = [node.value for node in ast.walk(functions[name]) if isinstance(node, ast.Return) and node.value]
    return [text for value in returned for text in _templates(value, {**known, **inside}, functions, depth + 1)]


def _piece(value: ast.expr, known: Texts) -> str:
    """Return a part of an f-string as text. If a name has only one possible text, insert the text."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    inner = value.value if isinstance(value, ast.FormattedValue) else value
    texts = known.get(inner.id, []) if isinstance(inner, ast.Name) else []
    if len(texts) == 1 and isinstance(texts[0], ast.Constant) and isinstance(texts[0].value, str):
        return texts[0].value
    return PLACE


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"
