"""scripts/sizes counts what a person would count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import program

SOURCE = '''"""Docstring
of two lines."""

# A comment.
import os  # Another one.

TEXT = """A text
is code: # all of it

to the end."""
"""The docstring of a variable."""


class Thing:
    """Docstring."""

    def first(self) -> int:
        """Docstring."""
        if os.name and TEXT or self:  # One branch, and two operands more.
            return 1

        return 2

    @staticmethod
    def second(
        x: int,
    ) -> list[int]:
        def inner() -> int:
            return x if x else 0

        return [y for y in range(x) if y]
'''
CODE = {5, *range(7, 11), 14, 17, 19, 20, 22, 24, 25, 26, 27, 28, 29, 31}
"""Numbers of the lines of code, found by reading."""


tool = program("sizes")


def test_lines_functions_and_classes(tmp_path: Path) -> None:
    path = tmp_path / "room" / "thing.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    (path.parent / "empty.py").write_text("# Nothing.\n")
    (path.parent / "program").write_text("import os\n")
    assert tool.code_lines(SOURCE) == CODE
    paths = tool.modules_in(["room", "room", "nowhere"], tmp_path)
    assert [path.name for path in paths] == ["empty.py", "thing.py"]
    size = tool.size_of(paths)
    assert (size.files, size.lines, size.classes) == (2, len(CODE), [(2, "Thing")])
    found = {function.place.partition(" ")[2]: (function.lines, function.branches) for function in size.functions}
    # second: itself, the list, its condition, and the conditional expression inside.
    assert found == {"first": (4, 4), "second": (7, 4), "inner": (2, 2)}
    assert tool.row_of("room", size) == ("room", "2", str(len(CODE)), "3", "0", "4", "1", "2", "Thing")


def test_chosen_folders(capsys: pytest.CaptureFixture[str]) -> None:
    """CI runs it for all."""
    assert all(tool.modules_in([folder]) for folders in tool.SUMS.values() for folder in folders)
    assert tool.main(["scripts/simulation", "--long"]) == 0
    _, room, whole = (line.split() for line in capsys.readouterr().out.splitlines()[:3])
    assert (room[0], room[1:]) == ("scripts/simulation", whole[1:])
    assert tool.main(["nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
