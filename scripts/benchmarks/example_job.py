"""A model of the example job's default size that trains in turns with another one, to compare what their steps cost.

Times are CPU times of one process and thread, because other work on the machine disturbs them less.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from launch.train_gpt.model import GPT, VOCABULARY
from launch.train_gpt.options import Options, parse
from scripts.benchmarks.timing import in_turn


class Job:
    """A model, in DDP if it has a group, its optimizer, and its recorder if it has a folder. COLLECTIVE with a group.

    ``options``: of ``prepare``.
    """

    def __init__(self, folder: Path | None = None, every: int = 1, **options: Any) -> None:
        job = parse(["--precision", "fp8"], Options)
        torch.manual_seed(0)
        model = GPT(job.layers, job.width, job.heads, job.context)
        self.manager = fp8dist.prepare(model, skip=("lm_head",), **options)
        self.recorder = None if folder is None else fp8dist.Recorder(folder, self.manager, every=every)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.model: nn.Module = DistributedDataParallel(model) if "group" in options else model
        self.manager.attach(self.model, optimizer=self.optimizer)
        self.tokens = torch.randint(VOCABULARY, (job.batch_size, job.context + 1))
        self.done = 0

    def train(self, steps: int) -> None:
        """Run some steps. COLLECTIVE with a group."""
        for _ in range(steps):
            loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done += 1
            loss, norm = loss.item(), norm.item()
            if self.recorder is not None:
                self.recorder.log(self.done, loss=loss, grad_norm=norm, tokens=self.tokens.numel())


class Turns(NamedTuple):
    """The times of two jobs. ``step_ms``: of the first. ``ratio``: the second's time over the first's, median of the
    pairs; ``quartiles`` likewise."""

    step_ms: float
    ratio: float
    quartiles: list[float]


def in_turns(plain: Job, other: Job, pairs: int, steps: int) -> Turns:
    """Train two jobs in turns of some steps. COLLECTIVE with a group."""
    sides = {"plain": lambda: plain.train(steps), "other": lambda: other.train(steps)}
    times = in_turn(sides, pairs, clock=time.process_time)
    ratios = [b / a for a, b in zip(times["plain"], times["other"])]
    step_ms = statistics.median(times["plain"]) / steps
    return Turns(step_ms, statistics.median(ratios), statistics.quantiles(ratios, n=4))
