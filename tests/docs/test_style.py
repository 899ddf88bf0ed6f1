"""The style of the pages: README's order, lengths, and quotes of messages."""

from __future__ import annotations

import ast
import fnmatch
import re
from typing import TypeGuard

import pytest

from launch.train_gpt.options import Options
from scripts.pages.filling import names
from tests.support.pages import MADE, ROOT, TOP, blocks, pages

PAGES = pages()
OTHERS = ("train.py", "check.py", "loop.py", "launch.py", "your_script.py", "X.py")
"""Names of a reader's own files."""


def _written(text: str) -> str:
    """Return the page without its generated parts, of which a directive of mkdocstrings is one."""
    return re.sub(r"^::: \S+\n(?: +.*\n)*\n?", "", MADE.sub("", text), flags=re.M)


def test_readme_is_short_and_in_order() -> None:
    readme = PAGES["README.md"]
    assert len(readme.splitlines()) <= 130
    assert max(len(line) for line in readme.splitlines() if not line.startswith("|")) <= 100
    order = [
        "# fp8dist",
        "docs/images/report.svg",
        "<!-- made: hardware -->",
        "## Install",
        "git+https://",
        "## Find the rank that differs",
        "parameters differ between ranks",
        "## Train in FP8",
        "## Numbers",
        "<!-- made: front -->",
        "## Who should use something else",
        "| | fp8dist | TransformerEngine | torchao |",
        "| you have | read |",
    ]
    places = [readme.index(part) for part in order]
    assert places == sorted(places)
    code = {block.language: block.text for block in blocks("README.md", readme)}
    assert len([line for line in code["python"].splitlines() if line.strip()]) == 10
    assert len([line for line in code["diff"].splitlines() if line.startswith(("+", "-"))]) <= 5


def test_the_manual_is_short() -> None:
    """Pages of the tab "Manual" beside README, and their words. Bars of tables and dashes are no words."""
    listed = (ROOT / "mkdocs.yml").read_text().split("- Manual:")[1].split("- Design and project:")[0]
    manual = [f"docs/{page}" for page in re.findall(r"- (\S+\.md)$", listed, re.M) if page != "index.md"]
    assert len(manual) <= 32
    assert sum(len(re.findall(r"\S*\w\S*", PAGES[page])) for page in manual) <= 38_000


@pytest.mark.parametrize("page", PAGES)
def test_no_page_begins_with_what_it_will_do_for_a_reader(page: str) -> None:
    assert not re.search(r"^(After (reading )?this page|This page)", PAGES[page], re.M)


def test_recommendations_agree() -> None:
    """README, the quickstart, recipes and the convergence of a first run advise one call; the example job makes it."""
    call = "prepare(model, group="
    assert "this call of `prepare` for a first run" in PAGES["README.md"]
    assert "`prepare(model, group=…)` is the call for a first run" in PAGES["docs/quickstart.md"]
    assert "**Call `fp8dist.prepare(model, group=…)`.**" in PAGES["docs/recipes.md"]
    assert all(call in PAGES[page] for page in ("README.md", "docs/quickstart.md", "docs/ddp.md"))
    assert "that is advised for [a first run](recipes.md#the-first-run)" in " ".join(
        PAGES["docs/convergence.md"].split()
    )
    assert Options().recipe == "delayed"


def test_the_first_screen_says_what_has_run_on_which_hardware() -> None:
    """Generated from results, see ``hardware`` in scripts/pages/runs.py."""
    head = PAGES["README.md"].splitlines()[:30]
    assert "hardware" in names("\n".join(head))
    assert any(line.startswith("- **GPU") for line in head)
    assert any(line.startswith("- **CPU") for line in head)


def test_a_page_is_short() -> None:
    limits = {"ARCHITECTURE.md": 120}
    lengths = {page: len(_written(text).splitlines()) for page, text in PAGES.items()}
    assert {page: n for page, n in lengths.items() if n > limits.get(page, 165)} == {}


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_at_most_100_characters(page: str) -> None:
    """Table rows, output blocks and lines with only a link may be longer."""
    limit = 100 if page.startswith(("README", "docs")) else 120
    text = re.sub(r"```text\n.*?```", "", _written(PAGES[page]), flags=re.S)
    long = [line for line in text.splitlines() if len(line) > limit]
    assert [line for line in long if not re.match(r" *\||!?\[[^]]*\]\([^)]*\)$| *<!--|::: ", line)] == []


def test_quoted_messages_stand_in_the_code() -> None:
    """Tables of "message has" quote literal parts of messages, between placeholders. Adjacent literals count as one."""
    tables = re.findall(r"^\| message has \|.*?\n\n", PAGES["docs/mistakes.md"], re.M | re.S)
    rows = [line for text in tables for line in text.splitlines()[2:] if "(gloo, NCCL)" not in line]
    quoted = [found for line in rows for found in re.findall(r"^\| (`+) ?(.+?) ?\1", line)]
    assert len(quoted) >= 30
    trees = [ast.parse(path.read_text()) for room in ("fp8dist", "launch") for path in (ROOT / room).rglob("*.py")]
    literals = [" ".join(n.value.split()) for t in trees for n in ast.walk(t) if _is_text(n)]
    assert [text for _, text in quoted if not any(" ".join(text.split()) in literal for literal in literals)] == []


def _is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_files_that_are_cited_exist() -> None:
    """Comments, docstrings and pages cite a file by its path from the top, or by the end of its path."""
    patterns = ("*.*", *(f"{top}/**/*" for top in ("docs", "fp8dist", "kernels", "launch", "scripts", "tests")))
    paths = [path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()]
    known = ["/" + path.relative_to(ROOT).as_posix() for path in paths]
    missing = []
    for path in paths:
        if path.suffix in (".py", ".md", ".sh", ".sbatch", ".yaml", ".cfg", "") and "data" not in path.parts:
            text = path.read_text()
            prose = text if path.suffix == ".md" else " ".join(re.findall(r'""".*?"""|#[^\n]*', text, re.S))
            cited = re.findall(r"(?<![\w./*-])(?!pytorch/)[\w./*-]+\.(?:py|md|sh)\b", prose)
            ends = {name: name.removeprefix("../").removeprefix("../") for name in cited}
            missing += [(path.name, name) for name, end in ends.items() if not fnmatch.filter(known, f"*/{end}")]
    assert [one for one in missing if one[1].rpartition("/")[2] not in OTHERS] == []


def test_pages_at_the_top_are_the_known_ones() -> None:
    assert {path.name for path in ROOT.glob("*.md")} == {*TOP, "CHANGELOG.md"}
