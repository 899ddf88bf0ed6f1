"""The cost of recording a run every ten steps, as a share of the example job's step.

Trains two equal models of the example job's default size, one of which is recorded, in turns of ten steps, and prints
the median ratio of these pairs, and the time inside the recorder and the watch. Times are CPU times of the one process
and thread, because other work on the machine disturbs them less. Prints Markdown. Run it on an idle machine:
``.venv/bin/python -m scripts.benchmarks.recording``.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import fp8dist
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.monitoring.recorder import Recorder
from fp8dist.monitoring.watch import Watch
from fp8dist.step.cycle import StepCycle
from fp8dist.sync.arena_sync import ArenaSync
from fp8dist.sync.microbatches import Microbatches
from launch.train_gpt.model import GPT, VOCABULARY
from launch.train_gpt.options import Options, parse

EVERY = 10
"""Interval of the recording, and steps of a turn."""

INSIDE = (
    (Recorder, "log"),
    (Watch, "collect"),
    (LinearSlots, "_measure"),
    (Microbatches, "forward"),
    (Microbatches, "backward"),
    (ArenaSync, "_keep_seen"),
    (StepCycle, "_microbatches_known"),
)
"""What only a recorded run calls. ``collect`` includes what the recorder does with an observation."""


class Job:
    """A model of the example job's default size, its optimizer, and its recorder, if any."""

    def __init__(self, folder: Path | None) -> None:
        options = parse(["--precision", "fp8"], Options)
        torch.manual_seed(0)
        model = GPT(options.layers, options.width, options.heads, options.context)
        self.manager = fp8dist.prepare(model, skip=("lm_head",))
        self.recorder = None if folder is None else Recorder(folder, self.manager, every=EVERY)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.manager.attach(model, optimizer=self.optimizer)
        self.model, self.done = model, 0
        self.tokens = torch.randint(VOCABULARY, (options.batch_size, options.context + 1))

    def turn(self) -> float:
        """Run ten steps, and return the CPU seconds that they took."""
        start = time.process_time()
        for _ in range(EVERY):
            loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done += 1
            loss, norm = loss.item(), norm.item()
            if self.recorder is not None:
                self.recorder.log(self.done, loss=loss, grad_norm=norm, tokens=self.tokens.numel())
        return time.process_time() - start


@contextlib.contextmanager
def timed_inside(spent: dict[str, float]) -> Iterator[None]:
    """Add up the CPU seconds inside the functions of ``INSIDE``."""

    def timing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                spent[name] = spent.get(name, 0.0) + time.process_time() - start

        name = function.__qualname__
        return call

    with contextlib.ExitStack() as stack:
        for owner, function_name in INSIDE:
            patched = mock.patch.object(owner, function_name, timing(getattr(owner, function_name)))
            stack.enter_context(patched)
        yield


def main(pairs: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        plain, recorded = Job(None), Job(Path(folder))
        ratios, seconds = [], []
        for pair in range(-1, pairs):  # The first pair warms up.
            first, second = (plain, recorded) if pair % 2 else (recorded, plain)
            times = {id(first): first.turn(), id(second): second.turn()}
            if pair >= 0:
                ratios.append(times[id(recorded)] / times[id(plain)])
                seconds.append(times[id(plain)])
        spent: dict[str, float] = {}
        with timed_inside(spent):
            turns = max(1, pairs // 4)
            for _ in range(turns):
                recorded.turn()
    step = 1e3 * statistics.median(seconds) / EVERY
    low, _, high = statistics.quantiles(ratios, n=4)
    print(f"step: {step:.1f} ms; {pairs} pairs of {EVERY} steps")
    print(f"ratio with recording, median (quartiles): {statistics.median(ratios):.4f} ({low:.4f}, {high:.4f})\n")
    print("| inside | ms per step | share of the step |\n|---|---|---|")
    each = {name: 1e3 * value / turns / EVERY for name, value in spent.items()}
    for name, ms in [*sorted(each.items(), key=lambda one: -one[1]), ("all", sum(each.values()))]:
        print(f"| {name} | {ms:.4f} | {100 * ms / step:.3f} % |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
