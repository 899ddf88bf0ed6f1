"""scripts/mutants: its choice of mutations, its edits, and its verdicts (caught or survived)."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import program
from tests.test_layers import FLOOR

ROOT = Path(__file__).resolve().parents[2]


tool = program("mutants")

SOURCE = '''"""Docstring: 1 < 2."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    there = 1 < 2

@dataclass(frozen=True)
class Thing:
    size: Literal[7] = 8

    def __repr__(self) -> str:
        return "a" * 9 if self.size > 9 else "b"

    def grow(self, by: int) -> bool:
        """Docstring: 2 < 3."""
        text = "short" if by == 10 else f"long {by + 11}"
        if by != 12:
            text = f"{text}!"
        if (by  # Why: 3 and 4.
                and "ü" < text):
            raise ValueError(text if by > 13 else "no" * 14)
        self.note("ünder", text); return True
'''

EXPECTED = {
    ("constant", "size: Literal[7] = 9"),
    ("and/or", 'or "ü" < text):'),
    ("negated", 'if (not (by # Why: 3 and 4. and "ü" < text)):'),
    ("swapped", 'and "ü" > text):'),
    ("strict", 'and "ü" <= text):'),
    ("swallowed", "pass"),
    ("dropped", "pass; return True"),
    ("constant", 'self.note("ünder", text); return False'),
}  # fmt: skip


def test_each_kind_changes_what_it_says_and_nothing_is_drawn_from_what_does_not_act() -> None:
    source = SOURCE.encode()
    found = tool.mutants("room", "thing.py", source)
    assert {(mutant.kind, mutant.after) for mutant in found} == EXPECTED
    assert {mutant.kind for mutant in found} == set(tool.KINDS)
    for mutant in found:
        planted = mutant.planted(source)
        assert (planted[: mutant.start], planted[mutant.start + len(mutant.text) :]) == (
            source[: mutant.start],
            source[mutant.end :],
        )
        assert mutant.function == ("Thing" if mutant.line == 8 else "Thing.grow")
        assert SOURCE.splitlines()[mutant.line - 1].split()[0] == mutant.before.split()[0]


def test_what_python_does_not_see_is_not_drawn(tmp_path: Path) -> None:
    source = b"def f(x):\n    return x < 1e300\n"
    (tmp_path / "f.py").write_bytes(source)
    found = {"room": tool.mutants("room", "f.py", source)}
    assert {mutant.after for mutant in found["room"]} == {"return x > 1e300", "return x <= 1e300", "return x < 1e+300"}
    drawn = {mutant.after for mutant in tool.draw(found, 0, tmp_path)}
    assert drawn == {"return x > 1e300", "return x <= 1e300"}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """Return all candidate mutations by folder."""
    return dict(tool.candidates())


@pytest.mark.long
def test_a_draw_is_even_over_rooms_and_kinds_and_follows_its_seed(found: dict[str, list[Any]]) -> None:
    """A change elsewhere in a file leaves names as they are."""
    drawn, again, other = (
        list(itertools.islice(tool.draw(rooms, seed), 120))
        for rooms, seed in ((found, 17), (dict(reversed(found.items())), 17), (found, 18))
    )
    assert drawn == again != other
    assert len({mutant.name for mutant in drawn}) == 120
    assert not [mutant.path for mutant in drawn if "/triton/" in mutant.path]
    large = Counter(mutant.room for mutant in drawn if len(found[mutant.room]) > 10)
    assert max(large.values()) - min(large.values()) <= 1
    some = list(itertools.islice(tool.draw({"job": found["job"]}, 17), 21))
    assert Counter(mutant.kind for mutant in some) == dict.fromkeys(tool.KINDS, 3)
    before = tool.mutants("room", "thing.py", SOURCE.encode())
    after = tool.mutants("room", "thing.py", SOURCE.replace("@dataclass", "later = 1\n\n@dataclass").encode())
    assert {mutant.name for mutant in before} < {mutant.name for mutant in after}


def test_every_claim_names_a_room_and_tests_that_are_there() -> None:
    assert set(tool.CLAIMS) <= set(FLOOR)
    for room in FLOOR:
        for path in tool.CLAIMS.get(room, (f"tests/{room}",)):
            assert (ROOT / path).exists(), f"{room}: {path}"


TOY = {
    "setup.cfg": "[tool:pytest]\naddopts = -ra\npythonpath = . kernels\nmarkers =\n    slow\n    long\n",
    "fp8dist/__init__.py": "",
    "fp8dist/common/text.py": "def shown(number):\n    return number if number < 4 else 4\n",
    "kernels/fp8dist_kernels/__init__.py": "",
    "tests/text/test_text.py": (
        "import pytest\nfrom fp8dist.common.text import shown\n\n"
        "@pytest.mark.slow\ndef test_large():\n    assert shown(9) == 4\n"
    ),
}


@pytest.mark.long
@pytest.mark.nightly
def test_caught_and_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in TOY.items():
        (tmp_path / "toy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "toy" / name).write_text(text)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path / "toy", check=True)
    monkeypatch.setitem(tool.CLAIMS, "text", ("tests/text",))
    path = "fp8dist/common/text.py"
    found = tool.mutants("text", path, TOY[path].encode())
    drawn = [next(each for each in found if each.kind == kind) for kind in ("strict", "swapped")]
    out = tmp_path / "out.json"
    rows = tool.judge_all(drawn, 1, out, tmp_path / "toy")
    assert [(row["kind"], row["outcome"], row["test"]) for row in rows] == [
        ("strict", "survived", ""),
        ("swapped", "caught", "tests/text/test_text.py::test_large"),
    ]
    assert json.loads(out.read_text()) == rows
    assert (tmp_path / "toy" / path).read_text() == TOY[path]
    monkeypatch.setattr(tool, "judge", None)
    assert tool.judge_all(drawn, 1, out, tmp_path / "toy") == rows, "what was written is not run again"
