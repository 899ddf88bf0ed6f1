"""Generated parts of pages are up to date, and their names are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.pages import commands
from scripts.pages.__main__ import main
from scripts.pages.commands import block, masked, output_of
from scripts.pages.filling import ROOT, filled, names, pages, problems
from scripts.pages.parts import REFERENCE
from tests.support.suite import few

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in pages()}
SHOWN = sorted({name.removeprefix("command ") for text in PAGES.values() for name in names(text) if "command " in name})


def test_parts_are_up_to_date() -> None:
    """If this fails, run ``python -m scripts.pages``."""
    assert main(["--check"]) == 0
    shown = {name for text in PAGES.values() for name in names(text)}
    assert [name for name in REFERENCE if name not in shown] == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", few(SHOWN, *(name for name in SHOWN if name != "demo")))  # The demo takes minutes.
def test_commands_still_print_what_is_shown(name: str) -> None:
    """If this fails, run ``python -m scripts.pages commands NAME`` to update the output."""
    shown = next(text for text in PAGES.values() if f"command {name}" in names(text))
    part = shown.split(f"<!-- made: command {name} -->")[1].split(f"<!-- end of command {name} -->")[0]
    assert part.strip(), "it was never run"
    assert masked(name, part.strip()) == masked(name, block(name, brief=True))
    if name == "demo":
        for run in ("damaged", "fp8"):
            page = (ROOT / "runs" / "demo" / f"{run}.html").read_text(encoding="utf-8")
            assert 'class="empty"' not in page  # Every panel has numbers.
            assert "The newest checkpoint that is known to be good is of" in page
        assert part.strip("`\n").splitlines()[-1].split()[0] == "runs/demo/fp8.html"


def test_a_part_goes_between_its_markers() -> None:
    page = "before\n\n<!-- made: a -->\nold\n<!-- end of a -->\n\nafter\n<!-- made: b -->\n<!-- end of b -->\n"
    once = filled(page, {"a": lambda: "| new |\n"})
    assert once == page.replace("\nold\n", "\n\n| new |\n\n")
    assert filled(once, {"a": lambda: "| new |\n"}) == once
    assert filled(once, {"a": lambda: ""}) == page.replace("old\n", "")
    assert names(page) == ["a", "b"]
    assert problems(page, ["a", "b"]) == []
    assert problems("<!-- made: x -->\n<!-- end of x -->\n", ["a"]) == ["there is no made part 'x'"]
    assert problems("<!-- made: a -->\n", ["a"]) == ["made: a has no end"]
    assert problems("<!-- end of a -->\n", ["a"]) == ["end of a has no beginning"]
    assert problems("Write `<!-- made: x -->` on a line.\n", ["a"]) == []


def test_pages_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "docs" / "reference" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text("<!-- made: exits-job -->\n<!-- end of exits-job -->\n")
    assert main(["--check"], tmp_path) == 1
    assert "out of date: docs/reference/page.md" in capsys.readouterr().out
    assert main([], tmp_path) == 0
    assert "| 4 | The ranks differ" in page.read_text()
    assert main(["--check"], tmp_path) == 0
    page.write_text(page.read_text() + "<!-- made: exits-jobs -->\n<!-- end of exits-jobs -->\n")
    assert main(["--check"], tmp_path) == 1
    assert "page.md: there is no made part 'exits-jobs'" in capsys.readouterr().err
    assert main(["commands", "nothing"], tmp_path) == 2
    page.write_text("<!-- made: command doctor -->\nold\n<!-- end of command doctor -->\n")
    assert main(["--check"], tmp_path) == 0  # Outputs of commands are left alone.


def test_what_is_shown_names_no_machine_and_a_mask_hides_times_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "vm")
    shown = commands._anonymous("rank 0 on vm        1.5\nrank 0 on vm, late\non Linux-6.1-x\nvmx")
    assert shown == "rank 0 on host0     1.5\nrank 0 on host0, late\non Linux\nvmx"
    first, second = "rank 0 on host0      2.7, 6.6    78.3", "rank 0 on host0     12.7, 16.6     8.3"
    assert masked("straggler", first) == masked("straggler", second)
    assert masked("straggler", first) != masked("straggler", second.replace("rank", "host"))
    assert masked("simulate", "16384 ranks") == "16384 ranks"


@pytest.mark.slow
def test_a_command_that_ends_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "bad": commands.Command(("launch/torchrun.sh", "--nonsense")),
        "none": commands.Command(("true",), first="x"),
    }
    monkeypatch.setattr(commands, "COMMANDS", table)
    with pytest.raises(commands.CommandFailed, match="ended with status 2: train_gpt: error"):
        output_of("bad")
    with pytest.raises(commands.CommandFailed, match="no line has 'x'"):
        output_of("none")
