"""Train a small byte-level GPT on real text, on one rank or many, in high precision or in FP8.

    python -m launch.train_gpt --precision fp8                       one process
    NPROC=2 launch/torchrun.sh --precision fp8 --update next_step    two ranks
    NPROC=4 launch/torchrun.sh --parallel hsdp --save-every 50       two shards, each on two ranks, and checkpoints

Uses CUDA and nccl if there are GPUs, else the CPU and gloo. On CUDA, all but the FP8 modules run in bfloat16, by
torch.autocast or FSDP's mixed precision. On a CPU, FP8 is emulated, and the rest of the model runs in float32.

Writes the folder of a run (``fp8dist.Recorder``) and ``summary.json`` to ``--out``. The data of a rank depends only on
seed, step, rank and microbatch, so two runs with one seed give the same bits, and so does a run that resumes.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm  # type: ignore[import-untyped]

import fp8dist
from fp8dist.errors import CheckpointError, ConfigurationError, DivergenceError, ManifestMismatchError
from fp8dist.state.settings import Settings
from launch.train_gpt import checkpoints
from launch.train_gpt.data import BadInput, Text, read_text
from launch.train_gpt.exits import DIVERGED, exit_with
from launch.train_gpt.model import GPT
from launch.train_gpt.options import Options, parse
from launch.train_gpt.parallel import DDP, FSDP2, Parallel
from launch.train_gpt.ranks import Ranks, joined_ranks

FINAL_STEPS = 10
"""The final training loss is the mean over this many steps."""


class Training:
    """A run of the job, built in the order that fp8dist asks for: prepare, wrap, load, attach. COLLECTIVE."""

    def __init__(self, options: Options, ranks: Ranks, text: Text) -> None:
        self.options, self.ranks = options, ranks
        self.texts = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (text.training, text.validation)]
        folder = self.find()
        torch.manual_seed(options.seed)
        self.parallel = self.make_parallel()
        self.model = self.make_model()
        self.manager = self.prepare() if options.precision == "fp8" else None  # 1. Linears become FP8Linears.
        self.module = self.parallel.wrap(self.model.to(ranks.device))  # 2. DDP or FSDP2.
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), options.learning_rate, (0.9, 0.95), weight_decay=0.1
        )
        self.done = 0 if folder is None else self.load(folder)  # 3. A checkpoint has FP8 state, too.
        self.recorder = self.make_recorder()
        if self.manager is not None:  # 4. The ranks agree on the state; from now on optimizer.step() syncs it.
            limit = timedelta(seconds=options.timeout)
            self.manager.attach(self.module, optimizer=self.optimizer, timeout=limit)

    def make_parallel(self) -> Parallel:
        """Return how the ranks share the work. COLLECTIVE."""
        modes = {"none": Parallel, "ddp": DDP, "fsdp2": FSDP2, "hsdp": FSDP2}
        return modes[self.options.parallel](self.options, self.ranks)

    def make_model(self) -> GPT:
        """Return the model."""
        return GPT(self.options.layers, self.options.width, self.options.heads, self.options.context)

    def prepare(self) -> fp8dist.StateManager:
        """Convert the model's Linears to FP8."""
        options, gathers = self.options, self.options.fp8_all_gather
        if gathers is None:
            possible = isinstance(self.parallel, FSDP2) and options.recipe in ("delayed", "current")
            gathers = possible and Settings.resolve(amax_sync=options.amax_sync).amax_sync
        kind = options.recipe.upper() if options.recipe in ("mxfp8", "nvfp4") else options.recipe.capitalize()
        recipe = getattr(fp8dist, f"{kind}Scaling")  # Such as DelayedScaling.
        return fp8dist.prepare(
            self.model,
            recipe(**({"update": options.update} if options.update else {})),
            group=self.parallel.group,
            amax_sync=options.amax_sync,
            check_every=options.check_every,
            check_policy=options.check_policy,
            audit_every=options.audit_every,
            fp8_all_gather=gathers,
        )

    def find(self) -> Path | None:
        """Return the checkpoint to resume from, or None. COLLECTIVE."""
        return checkpoints.find(self.options, self.ranks)

    def load(self, folder: Path) -> int:
        """Load a checkpoint, and return its step. COLLECTIVE."""
        step = checkpoints.load(folder, self.module, self.optimizer, self.manager)
        if self.ranks.first:
            print(f"resumed from {folder}, after step {step}", file=sys.stderr)
        return step

    def make_recorder(self) -> fp8dist.Recorder:
        """Return the recorder of the run, which also starts the watch."""
        options, done = self.options, self.done or None
        watch: dict[str, Any] = {"every": options.watch_every, "ranks": options.watch_ranks}
        return fp8dist.Recorder(options.out, self.manager, resume_after=done, precision=options.precision, **watch)

    def run(self) -> dict[str, Any]:
        """Train, and return the contents of ``summary.json``. COLLECTIVE.

        Raises:
            DivergenceError: on all ranks, if they differ.
        """
        options, first = self.options, self.ranks.first
        if self.done and options.parallel == "ddp":
            self.settle_buckets()
        steps, losses = range(self.done + 1, options.last_step + 1), deque[float](maxlen=FINAL_STEPS)
        tokens = options.batch_size * options.context * options.accumulate * self.ranks.size
        before, start = self.metrics(), time.perf_counter()
        with self.recorder:
            for step in tqdm(steps, desc=options.precision, unit="step", disable=None if first else True):
                loss, grad_norm = self.step(step)
                losses.append(self.ranks.mean(loss).item())
                self.recorder.log(step, loss=losses[-1], grad_norm=grad_norm, tokens=tokens)
                if options.saves_at(step):
                    self.save(step)
                self.check(step)
            seconds, after, count = time.perf_counter() - start, self.metrics(), max(1, len(steps))
            validation_loss = self.validation_loss()
            self.recorder.event("evaluated", options.last_step, validation_loss=validation_loss)
        spent = {name: (after[name] - before[name]) / count for name in after}
        return {
            "ranks": self.ranks.size,
            "steps": options.last_step,
            "resumed_after_step": self.done,
            "final_training_loss": sum(losses) / len(losses) if losses else None,
            "validation_loss": validation_loss,
            "tokens_per_s": round(len(steps) * tokens / seconds, 1),
            "fp8_collectives_per_step": spent.get("fp8/collectives", 0.0),
            "exposed_sync_ms_per_step": round(spent.get("fp8/sync_wait_ms", 0.0), 4),
        }

    def metrics(self) -> dict[str, float]:
        """Return the manager's metrics, if there is one."""
        return {} if self.manager is None else self.manager.metrics()

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Make one optimizer step. Return this rank's mean loss and the norm of all gradients, 0-d. COLLECTIVE."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(step, self.options)
        loss = self.gradients(step)
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.optimizer.step()  # Here the amaxes of all ranks are reduced, and the scales updated.
        return loss, norm

    def gradients(self, step: int) -> Tensor:
        """Run forward and backward of all microbatches. Return this rank's mean loss. COLLECTIVE."""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.ranks.device)
        for microbatch in range(self.options.accumulate):
            last = microbatch == self.options.accumulate - 1
            with nullcontext() if last else self.parallel.local(self.module):
                total += self.backward(*self.batch(step, microbatch))
        return total

    def backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Run forward and backward of a microbatch. Return its part of the mean loss. COLLECTIVE."""
        with self.parallel.precision():
            loss = self.module(tokens, targets) / self.options.accumulate
        loss.backward()
        return loss.detach()

    def check(self, step: int) -> None:
        """Compare the ranks, if it is due. In FP8 the manager does so in each step, but not after the last. COLLECTIVE.

        Raises:
            DivergenceError: on all ranks, if they differ and ``--check-policy`` says so.
        """
        last, every = step == self.options.last_step, self.options.check_every
        if self.manager is None and every and (last or step % every == 0):
            report = fp8dist.check(self.module, step=step, policy=self.options.check_policy or "raise")
            self.recorder.log_check(step, report)
        elif self.manager is not None and self.manager.settings.check_every and last:
            self.manager.check(policy=self.manager.settings.check_policy)

    def save(self, step: int) -> None:
        """Save a checkpoint. COLLECTIVE."""
        run = {"step": step, "ranks": self.ranks.size, "gathered_in": self.parallel.gathered_in}
        folder = checkpoints.save(self.options, run, self.module, self.optimizer, self.manager)
        self.recorder.event("saved", step, path=str(folder))

    def settle_buckets(self) -> None:
        """Run a backward so that DDP orders its buckets as in an uninterrupted run. COLLECTIVE.

        The order affects the rounding of sums over three or more ranks. In high precision it may be another one, and
        in ``eval()`` no amax is recorded.
        """
        self.module.eval()
        self.backward(*self.batch(self.done, 0))
        self.module.train()
        self.optimizer.zero_grad(set_to_none=True)

    def batch(self, step: int, microbatch: int, stream: int = 0) -> tuple[Tensor, Tensor]:
        """Return (tokens, targets), int64 [batch, context]: random windows of the training text.

        They depend only on seed, stream, step, rank and microbatch.
        """
        return self.windows(self.texts[0], self.starts(step, microbatch, stream, self.ranks.rank))

    def starts(self, step: int, microbatch: int, stream: int, rank: int) -> Tensor:
        """Return where the windows of a rank's microbatch begin, int64 [batch]."""
        options = self.options
        random = np.random.default_rng([options.seed, stream, step, rank, microbatch])
        return torch.from_numpy(random.integers(0, len(self.texts[0]) - options.context, options.batch_size))

    def windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return (tokens, targets), int64 [n, context]: the windows of a text that begin at these bytes."""
        places = starts[:, None] + torch.arange(self.options.context + 1)
        windows = text[places].to(self.ranks.device, torch.int64)
        return windows[:, :-1], windows[:, 1:]

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the mean loss over windows of the held-out text, other ones on each rank, if there are enough.
        COLLECTIVE."""
        ranks, options, text = self.ranks, self.options, self.texts[1]
        windows = torch.arange(0, len(text) - options.context, options.context)
        starts = windows[torch.arange(ranks.rank, max(len(windows), ranks.size), ranks.size) % len(windows)]
        self.model.eval()
        with self.parallel.precision():
            loss = self.model(*self.windows(text, starts[: 8 * options.batch_size]))
        self.model.train()
        return ranks.mean(loss).item()


def learning_rate_at(step: int, options: Options) -> float:
    """Return the learning rate: linear warm-up over a tenth of the run, then cosine decay to a tenth of the peak."""
    warm_up = max(1, options.steps // 10)
    if step <= warm_up:
        return options.learning_rate * step / warm_up
    progress = (step - warm_up) / max(1, options.steps - warm_up)
    return options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def main(arguments: Sequence[str]) -> int:
    """Run the job, and return its exit status. A mistake of the user prints one line and exits with status 2."""
    try:
        options = parse(arguments, Options)
        text = read_text(options.data, options.context)
        with joined_ranks(options.timeout) as ranks:
            logging.basicConfig(format=f"[rank {ranks.rank}] %(message)s")
            try:
                summary = Training(options, ranks, text).run()
            except DivergenceError as error:  # On all ranks. One of them has logged the report.
                if ranks.rank == error.report.reporting_rank:
                    write_report(error, options.out)
                dist.barrier()  # torchrun ends the others as soon as one rank ends.
                return DIVERGED
            if ranks.first:
                (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
                print("\n".join(f"{name + ':':28}{value}" for name, value in summary.items()))
    except (BadInput, CheckpointError, ConfigurationError, ManifestMismatchError) as error:
        exit_with(error)
    return 0


def write_report(error: DivergenceError, folder: Path) -> None:
    """Write ``divergence.txt`` and ``divergence.json``."""
    report = error.report
    (folder / "divergence.txt").write_text(f"{report}\n", encoding="utf-8")
    (folder / "divergence.json").write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    print(f"train_gpt: stopped, because ranks differ: {folder}/divergence.txt", file=sys.stderr, flush=True)
