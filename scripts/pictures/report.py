"""A divergence report in a terminal: three ranks train, and one bit of a weight flips on one rank.

The text comes from a real run and is stored in docs/images/report.txt, so that every machine draws the same picture.
``rerun`` repeats the run.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from scripts.pictures.svg import document, rect, text

__all__ = ["TEXT", "draw", "rerun"]

TEXT = Path(__file__).resolve().parents[2] / "docs" / "images" / "report.txt"

RANKS, ODD, STEPS = 3, 2, 3
PLACE, BIT = (3, 5), 4
"""The element of the weight that changes, and the bit that flips."""

SIZE = 12.0
ADVANCE = 7.2
"""Width of a character, in pixels."""


def rerun() -> None:
    """Run the ranks, and write their log to TEXT."""
    TEXT.parent.mkdir(parents=True, exist_ok=True)
    TEXT.write_text(logged(), encoding="utf-8")


def logged() -> str:
    """Run the ranks and return the report, with the host's name replaced."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(folder,), nprocs=RANKS)
        texts = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("log-*"))]
    (report,) = [text for text in texts if text]  # Exactly one rank reports.
    return report.replace(socket.gethostname(), "host0")


def _rank(rank: int, folder: str) -> None:
    """Train for some steps on one rank, with a check after each step."""
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    handler = logging.FileHandler(Path(folder) / f"log-{rank}", encoding="utf-8")
    logging.getLogger("fp8dist").addHandler(handler)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16()
    manager = fp8dist.prepare(model, fp8dist.DelayedScaling(history_len=16), group=dist.group.WORLD)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-2)
    manager.attach(parallel, optimizer=optimizer)
    for step in range(1, STEPS + 1):
        parallel(torch.randn(32, 64, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS and rank == ODD:
            weight: torch.Tensor = model.get_parameter("0.weight").detach()
            weight[PLACE].view(torch.int16).bitwise_xor_(1 << BIT)
        manager.check(policy="warn")
    dist.barrier()
    handler.close()
    os._exit(0)  # With some versions of torch, gloo aborts the process at a normal exit.


def draw() -> str:
    """Return the picture as SVG.

    Raises:
        FileNotFoundError: ``rerun`` has never run.
    """
    rows, y = [], 72.0
    for row in TEXT.read_text(encoding="utf-8").rstrip("\n").split("\n"):
        rows.append(text(30, y, row, mono=True, size=SIZE, length=ADVANCE * len(row)))
        y += 19
    notes = (
        ("step, last good", f"found in step {STEPS}; a checkpoint of the last good step, or an earlier one, is good"),
        ("kind, name", "which tensor: the weight of the first Linear"),
        ("ranks, reference", f"rank {ODD} has it otherwise; rank 0 is the lowest of the majority"),
        ("value, expected", "the first element that differs: on the odd rank, and on the reference"),
        ("ULP", "how far apart the two values are, in units in the last place"),
        ("below the row", "one element, and its bits differ in one place: a flipped bit"),
        ("last line", "host and device of the odd rank"),
    )
    shown = [text(30, y + 36, "How to read it", bold=True, size=14)]
    for place, (field, meaning) in enumerate(notes):
        shown += [
            text(30, y + 62 + 22 * place, field, "blue", bold=True, mono=True, size=12),
            text(170, y + 62 + 22 * place, meaning),
        ]
    return document(
        "A divergence report",
        "A terminal with what one of three ranks prints when a bit of a weight has flipped on another: "
        + " ".join(TEXT.read_text(encoding="utf-8").split()),
        y + 216,
        [
            rect(14, 14, 732, y - 16, "plain", radius=8),
            *(rect(30 + 20 * place, 28, 11, 11, colour) for place, colour in enumerate(("red", "orange", "green"))),
            text(380, 38, 'standard error of a job of 3 ranks, policy="warn"', "muted", anchor="middle", size=12),
            *rows,
            *shown,
        ],
    )
