"""The cost of the checks of steps and weights.

Times the same training step with and without the checks, interleaved. "Without" disables the process-wide optimizer
hooks and the check that a weight still fits its scale. It uses one process and prints Markdown. Run it on an idle
machine: ``.venv/bin/python -m scripts.benchmarks.watch``.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from unittest import mock

import torch
from torch import nn

import fp8dist
from fp8dist.job.step_watch import StepWatch
from fp8dist.modules.outgrown import Outgrown
from fp8dist.modules.weight_notes import WeightNote
from fp8dist.modules.write_policy import WritePolicy
from scripts.benchmarks.markdown import table
from scripts.benchmarks.timing import in_turn, medians

ROUNDS = 15
"""Pairs of steps that are timed."""


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Disable the checks inside the context."""
    patched = mock.patch.object
    with (  # Functions: a Mock would add calls of its own.
        patched(StepWatch, "_before", lambda *_: None),
        patched(StepWatch, "_after", lambda *_: None),
        patched(WritePolicy, "limits", lambda *_: Outgrown(None)),
        patched(WeightNote, "changed_between_backwards", lambda *_: False),
    ):
        yield


def compare(layers: int, width: int, tokens: int) -> list[str]:
    """Return a row of the table: a step of a model with ``layers`` Linears of this width, with and without checks."""
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    manager = fp8dist.prepare(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    manager.attach(net, optimizer=optimizer)
    x = torch.randn(tokens, width)

    def step() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def step_unchecked() -> None:
        with unchecked():
            step()

    for _ in range(3):
        step()
    # Without the notes of the step before, an unchecked one would look like a write to the weights.
    take_notes = manager._cycle.steps.take_notes
    times = in_turn({"checked": step, "unchecked": step_unchecked}, ROUNDS, take_notes)
    ratio = statistics.median(a / b for a, b in zip(times["checked"], times["unchecked"]))
    ms = "{checked:.1f} ({unchecked:.1f})".format(**medians(times))
    return [str(layers), str(width), str(tokens), ms, f"{ratio:.3f}"]


def main() -> None:
    torch.set_num_threads(1)
    rows = [compare(*size) for size in ((32, 64, 64), (224, 64, 64), (32, 512, 512))]
    head = ["Linears", "width", "tokens", "ms a step (without)", "ratio"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
