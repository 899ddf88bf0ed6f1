"""Pages mention only existing names; they are short, in order, and quote what the code says."""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import io
import re
import shlex
from typing import TypeGuard

import pytest

from launch.train_gpt.data import BadInput
from launch.train_gpt.options import Options
from scripts.pages.filling import names
from scripts.pages.flags import command_line, job_parser
from tests.support.named import code_of, lab_parser, strangers
from tests.support.pages import MADE, ROOT, TOP, blocks, pages

PAGES = pages()


def test_what_is_named_exists() -> None:
    assert {page: found for page, text in PAGES.items() if (found := strangers(text))} == {}


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("manager.metrics", "manager.metric"),
        ("fp8dist.prepare", "fp8dist.prepares"),
        ("fp8dist.StateManager.check", "fp8dist.StateManager.chekc"),
        ("fp8dist.Finding.step", "fp8dist.Finding.stepp"),
        ("--save-every", "--saves-every"),
        ("--no-amax-sync", "--no-amax"),
        ("FP8DIST_BACKEND", "FP8DIST_BACKENDS"),
        ("fp8/cold_slots", "fp8/cold_slot"),
        ("fp8dist/job/order.py", "fp8dist/step/orders.py"),
        ("tests/kernels/test_fused_*.py", "tests/kernels/test_fusing_*.py"),
        ("order.py", "orders.py"),
        ("setup.cfg", "setup.toml"),
        ("prepare(model, skip=None)", "prepare(skips=)"),
        ("fp8dist.watch(manager, every=100)", "fp8dist.watch(evry=)"),
        ("DelayedScaling(margin=1)", "DelayedScaling(margins=)"),
        ("summary.json", "summry.json"),
    ],
)
def test_a_planted_name_is_found(right: str, wrong: str) -> None:
    in_span, in_block = "Say `{}`, then go on.\n", "Text.\n\n```sh\nuse {} now\n```\n"
    assert strangers(in_span.format(right)) == []
    assert strangers(in_span.format(wrong)) == [wrong]
    assert strangers(in_block.format(right)) == []
    if wrong not in ("orders.py", "setup.toml", "summry.json"):  # In a code block, these may be the reader's own files.
        assert strangers(in_block.format(wrong)) == [wrong]
    assert strangers(f"Prose about {wrong} is no code.\n") == []


def test_a_planted_call_is_found() -> None:
    assert strangers("Call `refresh_weights()`, `optimizer.step()` or `dist.barrier()`.\n") == []
    assert strangers("Call `refresh_weightz()`.\n") == ["refresh_weightz()"]
    text = "a `b` ``c ` d`` e\n\n```python\nf\n```\n\ng `h\ni` j\n"
    assert code_of(text) == ["f\n", "b", "c ` d", "h\ni"]


def refused(command: str) -> str:
    """Return why the example job, the lab or ``fp8dist`` refuses a command line; "" if it does not, or for others."""
    words = [word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", word)]
    lab = next((i for i, word in enumerate(words) if word == "tests.support.lab"), None)
    job = next((i for i, word in enumerate(words) if word in ("launch/torchrun.sh", "launch.train_gpt")), None)
    own = next((i for i, word in enumerate(words) if word == "fp8dist"), None)
    if lab is not None:
        parser, given = lab_parser(), words[lab + 1 :]
    elif job is not None and (words[job + 1 :] or ["-"])[0].startswith("-"):
        parser, given = job_parser(), words[job + 1 :]
    elif own is not None and words[own + 1 : own + 2] != ["launch"]:
        parser, given = command_line(), words[own + 1 :]
    else:
        return ""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parser.parse_args(given)
    except BadInput as error:
        return str(error)
    except SystemExit as ended:
        return said.getvalue() if ended.code else ""
    return ""


def test_commands_in_shell_blocks_are_taken() -> None:
    lines = [
        (page, line.strip())
        for page, text in PAGES.items()
        for block in blocks(page, text)
        if block.language == "sh"
        for line in block.text.splitlines()
    ]
    assert [(page, line, why) for page, line in lines if (why := refused(line))] == []
    assert "invalid choice: 'blok'" in refused("NPROC=2 launch/torchrun.sh --recipe blok  # no such recipe")
    assert "invalid choice: 'docter'" in refused("torchrun -m fp8dist docter")


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
    # The first screen says what has run on which hardware: see ``hardware`` in scripts/pages/runs.py.
    head = readme.splitlines()[:30]
    assert "hardware" in names("\n".join(head))
    assert all(any(line.startswith(f"- **{device}") for line in head) for device in ("GPU", "CPU"))
    code = {block.language: block.text for block in blocks("README.md", readme)}
    assert len([line for line in code["python"].splitlines() if line.strip()]) == 10
    assert len([line for line in code["diff"].splitlines() if line.startswith(("+", "-"))]) <= 5


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


def test_pages_are_short() -> None:
    """Table rows, output blocks and lines with only a link may be longer than the others."""
    listed = (ROOT / "mkdocs.yml").read_text().split("- Manual:")[1].split("- Design and project:")[0]
    manual = [f"docs/{page}" for page in re.findall(r"- (\S+\.md)$", listed, re.M) if page != "index.md"]
    assert len(manual) <= 32  # Beside README.
    assert sum(len(re.findall(r"\S*\w\S*", PAGES[page])) for page in manual) <= 38_000
    for page, whole in PAGES.items():
        text, limit = _written(whole), 100 if page.startswith(("README", "docs")) else 120
        assert len(text.splitlines()) <= (120 if page == "ARCHITECTURE.md" else 165), page
        lines = re.sub(r"```text\n.*?```", "", text, flags=re.S).splitlines()
        long = [line for line in lines if len(line) > limit]
        assert [line for line in long if not re.match(r" *\||!?\[[^]]*\]\([^)]*\)$| *<!--|::: ", line)] == [], page
        assert not re.search(r"^(After (reading )?this page|This page)", whole, re.M), page
    assert {path.name for path in ROOT.glob("*.md")} == {*TOP, "CHANGELOG.md"}


def test_quoted_messages_stand_in_the_code() -> None:
    """Tables of "message has" quote literal parts of messages, between placeholders. Adjacent literals count as one."""
    tables = re.findall(r"^\| message has \|.*?\n\n", PAGES["docs/mistakes.md"], re.M | re.S)
    rows = [line for text in tables for line in text.splitlines()[2:] if "(gloo, NCCL)" not in line]
    quoted = [found for line in rows for found in re.findall(r"^\| (`+) ?(.+?) ?\1", line)]
    assert len(quoted) >= 30
    wanted = [" ".join(text.split()) for _, text in quoted]
    sources = [path.read_text() for room in ("fp8dist", "launch") for path in (ROOT / room).rglob("*.py")]
    # All are read, and those parsed that have one of the texts: to parse all takes two seconds.
    written = [re.sub(r'" f?"', "", " ".join(source.split())) for source in sources]
    trees = [ast.parse(s) for s, text in zip(sources, written) if any(each in text for each in wanted)]
    literals = [" ".join(n.value.split()) for t in trees for n in ast.walk(t) if _is_text(n)]
    assert [text for text in wanted if not any(text in literal for literal in literals)] == []


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
