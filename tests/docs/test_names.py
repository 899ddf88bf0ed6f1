"""Pages mention only existing names, and some page mentions each public name."""

from __future__ import annotations

import contextlib
import io
import re
import shlex

import pytest

import fp8dist
from fp8dist.job.manager import StateManager
from fp8dist.state.settings import VARIABLES
from launch.train_gpt import exits
from launch.train_gpt.data import BadInput
from scripts.pages.flags import command_line, job_parser
from tests.support.lab import exits as lab_exits
from tests.support.named import code_of, lab_parser, metrics, own_flags, strangers
from tests.support.pages import blocks, pages

PAGES = pages()


@pytest.mark.parametrize("page", PAGES)
def test_what_is_named_exists(page: str) -> None:
    assert strangers(PAGES[page]) == []


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


def test_code_is_what_stands_in_backticks() -> None:
    text = "a `b` ``c ` d`` e\n\n```python\nf\n```\n\ng `h\ni` j\n"
    assert code_of(text) == ["f\n", "b", "c ` d", "h\ni"]


def test_every_name_is_on_some_page() -> None:
    words = "\n".join(text for page, text in PAGES.items() if page.startswith("docs/"))
    methods = [name for name in vars(StateManager) if not name.startswith(("_", "join_"))]
    everything = [
        *(name for name in fp8dist.__all__),
        *(f"manager.{name}" for name in methods),
        *own_flags(),
        *VARIABLES,
        *metrics(),
    ]
    assert [name for name in everything if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", words)] == []


def test_every_exit_status_is_on_the_page() -> None:
    assert "| 0 | " in PAGES["docs/example-job.md"]
    for module, page in ((exits, "docs/example-job.md"), (lab_exits, "docs/fault-lab.md")):
        statuses = [value for name, value in vars(module).items() if name.isupper() and isinstance(value, int)]
        assert [status for status in statuses if f"| {status} | " not in PAGES[page]] == []


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
