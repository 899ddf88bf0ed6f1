"""Pages name only what exists, and everything that a user may meet is on some page."""

from __future__ import annotations

import re

import pytest

import fp8dist
from fp8dist.manager import StateManager
from fp8dist.settings import VARIABLES
from launch.train_gpt import exits
from tests.support.named import code_of, metrics, own_flags, strangers
from tests.support.pages import pages

PAGES = pages()


@pytest.mark.parametrize("page", PAGES)
def test_what_is_named_exists(page: str) -> None:
    assert strangers(PAGES[page]) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("manager.metrics", "manager.metric"),
        ("fp8dist.prepare", "fp8dist.prepares"),
        ("fp8dist.StateManager.watch", "fp8dist.StateManager.wach"),
        ("fp8dist.Finding.step", "fp8dist.Finding.stepp"),
        ("--history-len", "--history-length"),
        ("--no-amax-sync", "--no-amax"),
        ("FP8DIST_BACKEND", "FP8DIST_BACKENDS"),
        ("fp8/cold_slots", "fp8/cold_slot"),
        ("fp8dist/step/order.py", "fp8dist/step/orders.py"),
        ("tests/kernels/test_fused_*.py", "tests/kernels/test_fusing_*.py"),
        ("order.py", "orders.py"),
        ("setup.cfg", "setup.toml"),
    ],
)
def test_a_planted_name_is_found(right: str, wrong: str) -> None:
    in_span, in_block = "Say `{}`, then go on.\n", "Text.\n\n```sh\nuse {} now\n```\n"
    assert strangers(in_span.format(right)) == []
    assert strangers(in_span.format(wrong)) == [wrong]
    assert strangers(in_block.format(right)) == []
    if wrong not in ("orders.py", "setup.toml"):  # In a block these may be a reader's own files.
        assert strangers(in_block.format(wrong)) == [wrong]
    assert strangers(f"Prose about {wrong} is no code.\n") == []


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
    page = PAGES["docs/reference/exit-codes.md"]
    statuses = [getattr(exits, name) for name in exits.__all__ if name.isupper()]
    assert [status for status in (0, *statuses) if f"| {status} | " not in page] == []
