"""The list of errors: each public exception and message, from the code, grouped by what to do."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from fp8dist import errors as exceptions
from fp8dist.job import order
from scripts.benchmarks.markdown import table
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


class Group(NamedTuple):
    """Messages with one answer: of exceptions ``kinds``, or raised in files that begin with ``places``."""

    title: str
    advice: str
    places: tuple[str, ...]
    kinds: tuple[str, ...] = ()


GROUPS = (
    Group(
        "Take another file, or load it differently",
        "`CheckpointError`. Other messages begin with a path or `FP8 state`: the file is damaged, take another copy.",
        (),
        ("CheckpointError",),
    ),
    Group(
        "Look at the named rank",
        "Raised on all ranks of the group: see [Between ranks](#between-ranks).",
        (),
        ("DivergenceError", "ManifestMismatchError", "SyncError", "LossDiverged"),
    ),
    Group("Correct a command", "Exit status 2.", ("cli/", "runs/report/")),
    Group("Change an export", "See [what is refused](export.md#what-is-refused).", ("files/",)),
    Group(
        "Set up a trainer differently",
        "See [Train with a trainer](trainers.md).",
        ("integrations/",),
    ),
    Group(
        "Wrap, shard or group differently",
        "See [DDP](ddp.md), [FSDP2](fsdp2.md) and [tensor parallelism](tensor-parallel.md).",
        ("parallel/", "job/joining", "modules/tensor_parallel.py", "modules/fp8_weight.py", "state/groups.py"),
    ),
    Group("Change what runs in exact arithmetic", "See [its page](design/exact.md).", ("exact/",)),
    Group("Change a replay or a check", "See [replays](replays.md) and [checks](healthy.md).", ("replays/", "checks/")),
    Group(
        "Change a recorder, watch or guard", "See [Record a run](watching.md).", ("runs/", "state/watch", "state/stat")
    ),
    Group(
        "Change the order or the inputs of a step",
        "See [Optimizers and steps](#optimizers-and-steps).",
        (
            "modules/",
            "job/boundary",
            "job/calib",
            "job/cycle",
            "job/early",
            "job/joined",
            "job/step_watch",
            "common/opt",
        ),
    ),
    Group(
        "Correct the arguments of prepare, attach or a recipe",
        "See [arguments of prepare](reference/cli.md#arguments-of-prepare).",
        ("",),
    ),
)
"""The first that fits counts."""

_OF_DAMAGED_FILES = tuple(
    f"files/{name}.py"
    for name in (
        *("archives", "dcp", "entries", "extra_states", "json_files"),
        *("pickles", "safetensor_files", "slices", "traces", "values"),
    )
)
"""Their messages say what is wrong with the bytes of a file. The answer is always to take another copy."""

_IN_MANY = frozenset({"a", "be", "got", "has", "is", "must"})
"""Words that many messages have."""

_OF_DAMAGED_STATE = "FP8 state "
"""Messages of a damaged state begin so. They have the same answer."""

_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "Fp8DistError": "",
        "CheckpointError": "Load another file, or pass `strict=False` or `convert=True`.",
        "ConfigurationError": "Change the call as the message says.",
        "DivergenceError": "Follow the [runbook](good-checkpoints.md#runbook-the-check-has-fired).",
        "LossDiverged": "Resume from an earlier checkpoint.",
        "ManifestMismatchError": "Make code, settings and versions of the ranks equal.",
        "NotAModelError": "Keep calling the model.",
        "SyncError": "Look at the rank that is [missing](launching.md#when-a-rank-or-a-host-dies).",
        "UnknownArgumentError": "Use the name in the message.",
    }
)
"""What to do about each exception."""


def public_errors() -> dict[str, type[Exception]]:
    """Return the exceptions of ``fp8dist.errors``, the base class first."""
    found = {name: getattr(exceptions, name) for name in exceptions.__all__}
    kinds = [(name, kind) for name, kind in found.items() if inspect.isclass(kind) and issubclass(kind, Exception)]
    return dict(sorted(kinds, key=lambda one: (one[1] is not exceptions.Fp8DistError, one[0])))


def errors() -> str:
    """Return a table of the exceptions, and the messages grouped by what to do, each cut to its first words.

    Messages that the written tables of the page have are left out.
    """
    written = quoted((ROOT / "docs" / "mistakes.md").read_text(encoding="utf-8"))
    kinds = []
    for name, error in public_errors().items():
        meaning = (inspect.getdoc(error) or "").splitlines()[0].replace("``", "`")
        kinds.append([f"`{name}`", meaning, _INSTEAD[name]])
    found: dict[str, dict[str, None]] = {group.title: {} for group in GROUPS}
    for path in sorted((ROOT / "fp8dist").rglob("*.py")):
        place = path.relative_to(ROOT / "fp8dist").as_posix()
        if place not in _OF_DAMAGED_FILES:
            for kind, text in messages_in(path, place):
                if text.startswith(_OF_DAMAGED_STATE) or any(quote in text for quote in written):
                    continue
                if len(set(re.findall(r"[A-Za-z]+", shortened(text))) - _IN_MANY) >= 2:  # Else nothing to search for.
                    title = next(one.title for one in GROUPS if kind in one.kinds or place.startswith(one.places))
                    found[title][shortened(text)] = None
    texts = [table(["exception", "meaning", "what to do"], kinds)]
    for group in GROUPS:
        lines = "".join(f"{text}\n" for text in found[group.title])
        texts.append(f"### {group.title}\n\n{group.advice}\n\n```text\n{lines}```\n")
    by_phase: dict[str, list[str]] = {}
    for call, phases in order._REFUSED.items():
        for phase in phases:
            by_phase.setdefault(phase.value, []).append(f"`{call}`")
    refused = "".join(f"- {phase}: {', '.join(calls)}\n" for phase, calls in by_phase.items())
    texts.append(f"### Calls that a phase refuses\n\nThe message says where to call it instead.\n\n{refused}")
    return "\n".join(texts)


def quoted(page: str) -> list[str]:
    """Return what the tables of "message has" quote, without white space at the ends."""
    tables = re.findall(r"^\| message has \|.*?\n\n", page, re.M | re.S)
    rows = [line for text in tables for line in text.splitlines()[2:]]
    return [text for line in rows for _, text in re.findall(r"^\| (`+) ?(.+?) ?\1", line)]


def shortened(text: str) -> str:
    """Return the first clause of a message with at least four words, at most five of its words.

    Placeholders at the beginning, such as the name of the module, and at the end are left out.
    """
    text = re.sub(rf"^{PLACE}:? ", "", text)
    first, *rest = re.split(r"(?<=[:;.,]) |(?= \()", text)
    for clause in rest:
        if len(re.findall(r"[A-Za-z]{2,}", first)) >= 4:
            break
        first += f" {clause.strip()}"
    words = first.rstrip(":;., ").split()
    return re.sub(rf"( {PLACE})+$", "", " ".join(words if len(words) <= 6 else words[:5]))


def messages_in(path: Path, place: str) -> Iterator[tuple[str, str]]:
    """Yield (public exception, message template) for each ``raise`` with a known text in a file, in order, then for
    texts that the file builds and other code raises. ``place``: the path of the file in fp8dist."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public = public_errors()
    constants = _texts_in(tree.body)
    every = [*ast.walk(tree)]
    defined = [node for node in every if isinstance(node, ast.FunctionDef)]
    functions = {node.name: node for node in defined}
    seen: set[int] = set()
    for nodes in [*([*ast.walk(function)] for function in defined), every]:
        known = {**constants, **_texts_in(nodes)}
        for call in nodes:
            if not isinstance(call, ast.Call) or not call.args or id(call) in seen:
                continue
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            kind = _AS.get(called, called)
            if kind in public:
                seen.add(id(call))
                texts = _templates(call.args[0], known, functions)
                yield from ((kind, " ".join(text.split())) for text in texts if re.search(r"[a-zA-Z]{3}", text))
    for name, function in functions.items():
        if kind := _ELSEWHERE.get((place, name), ""):
            known = _texts_in(ast.walk(function))
            values = _returned(function)
            if name == "_read_outcome":
                values += [each for texts in known.values() for each in texts]
            texts = [text for value in values for text in _templates(value, known, {})]
            yield from ((kind, " ".join(text.split())) for text in texts if re.search(r"[a-z]{3} ", text))


def _returned(function: ast.AST) -> list[ast.expr]:
    return [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]


def _texts_in(nodes: Iterable[ast.AST]) -> dict[str, list[ast.expr]]:
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
        if node.func.id in _UNCHANGED and node.args:
            return _templates(node.args[0], known, functions, depth + 1)
        if called := functions.get(node.func.id):
            known = {**known, **_texts_in(ast.walk(called))}
            return [text for value in _returned(called) for text in _templates(value, known, functions, depth + 1)]
    return [PLACE]


def _piece(value: ast.expr, known: Texts) -> str:
    """Return a part of an f-string as text. If a name has only one possible text, insert the text."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    inner = value.value if isinstance(value, ast.FormattedValue) else value
    texts = known.get(inner.id, []) if isinstance(inner, ast.Name) else []
    if len(texts) == 1 and isinstance(texts[0], ast.Constant) and isinstance(texts[0].value, str):
        return texts[0].value
    return PLACE
