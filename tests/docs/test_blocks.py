"""Python code on the pages runs unchanged, and prints the output that the pages show."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.pages import MADE, Block, blocks, pages

MODEL = """
import torch
import torch.distributed as dist

import fp8dist

if rendezvous:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(32, 64)

def train_step():
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PREPARED = MODEL + "manager = fp8dist.prepare(model, fp8dist.DelayedScaling(history_len=16), group=group)\n"
ATTACHED = PREPARED + "manager.attach(model, optimizer=optimizer)\ntrain_step()\n"
DDP = PREPARED + "model = torch.nn.parallel.DistributedDataParallel(model)\n" + ATTACHED.removeprefix(PREPARED)
PRELUDES = {"model": MODEL, "prepared": PREPARED, "attached": ATTACHED, "ddp": DDP}
"""Code that runs before a fragment. The pages do not show it."""

PYTHON = [
    block
    for page, text in pages().items()
    if not page.endswith("-complete.md")  # test_complete_jobs.py runs them.
    for block in blocks(page, text)
    if block.language in ("python", "diff")
]


def _words(how: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in how.split())


def _run_script(words: list[str]) -> int:
    script = Path(words[0])
    os.chdir(script.parent)
    # A namespace that outlives the program: gloo may hang if DDP is freed after destroy_process_group().
    exec(compile(script.read_text(), words[0], "exec"), sys.modules["__main__"].__dict__)
    return 0


def _whole(block: Block, ranks: int | None) -> str:
    """Return the whole program: the block with its prelude and the end of the process group."""
    prelude, text = _words(block.how).get("prelude"), block.text
    if block.language == "diff":
        text = re.sub(r"^[ +]", "", re.sub(r"^-.*\n", "", text, flags=re.M), flags=re.M)  # The file after the change.
    if prelude is None:
        return text
    group = "dist.group.WORLD" if ranks else "None"
    end = "\nif dist.is_initialized():\n    dist.barrier()\n    dist.destroy_process_group()\n"
    begin = PRELUDES[prelude].replace("group=group", f"group={group}").replace("if rendezvous", f"if {bool(ranks)}")
    return begin + text + end


def _matches(printed: str, expected: str) -> bool:
    """Return True if the output matches. "…" on a page matches any text."""
    pattern = ".*?".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern, printed.strip(), re.S) is not None


@pytest.mark.slow
@pytest.mark.xdist_group("blocks")
@pytest.mark.parametrize(
    "block",
    [block for block in PYTHON if not block.how.startswith("no,")],
    ids=lambda block: f"{block.page}:{block.line}",
)
def test_a_block_runs_and_prints_what_the_page_says(block: Block, tmp_path: Path) -> None:
    how = _words(block.how)
    assert set(how) <= {"ranks", "prelude"}, block.how
    ranks = int(how["ranks"]) if "ranks" in how else None
    script = tmp_path / "script.py"
    script.write_text(_whole(block, ranks))
    done = forked.run([str(script)], ranks, {}, main=_run_script)
    assert done.returncode == 0, done.stdout + done.stderr
    if block.output is not None:
        printed = done.stdout or done.stderr
        assert _matches(printed, block.output), f"printed\n{printed}\nand not\n{block.output}"
    elif 'policy="warn"' not in block.text:
        assert "fp8dist: " not in done.stderr, f"a page's program warns\n{done.stderr}"


def test_blocks_are_of_languages_that_something_checks() -> None:
    """A text block is checked output, a generated part, or is marked "no" with a reason, as are a few programs."""
    left = []
    for page, text in pages().items():
        for block in blocks(page, MADE.sub("", text)):
            reason = block.language == "text" and block.how.startswith("no,")
            if block.language not in ("python", "diff", "sh", "json") and not reason:
                left.append((page, block.text[:60]))
        fences = re.findall(r"^ *```(.*)$", text, re.M)
        assert [fence for fence in fences if not re.fullmatch(r"\w*", fence)] == [], page
    assert left == []
    left_out = [block for block in PYTHON if block.how.startswith("no,")]
    assert all(len(block.how.split()) > 2 for block in left_out)
    assert len(left_out) <= 12, [f"{block.page}:{block.line}: {block.how}" for block in left_out]


def test_outputs_are_compared() -> None:
    (block,) = blocks("page", "<!-- run: ranks=2 -->\n```python\nprint(1)\n```\n\n<!-- output -->\n```text\n1 …\n```\n")
    assert (block.how, block.text, block.output) == ("ranks=2", "print(1)\n", "1 …\n")
    assert _matches("1 and 2\n", "1 …\n")
    assert not _matches("2\n", "1 …\n")
