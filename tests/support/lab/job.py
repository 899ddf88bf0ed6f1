"""The fault lab: the example job with every switch of the library, measured waits, and faults to plant.

    python -m tests.support.lab --precision fp8                                 one process
    NPROC=3 launch/torchrun.sh -m tests.support.lab --inject scale:1:5          three ranks, of which one is damaged

With equal flags it trains as the example job does, bit for bit. docs/fault-lab.md describes flags, outputs and exit
statuses. A run that fails writes no ``summary.json``; its ``metrics.jsonl`` ends with the last completed step, or the
step that the loss guard refused.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fp8dist
from fp8dist.errors import CheckpointError, ConfigurationError, DivergenceError, LossDiverged, ManifestMismatchError
from fp8dist.exporters import Prometheus, TensorBoard
from fp8dist.state.settings import AUDIT_BYTES, Settings
from launch.train_gpt import checkpoints
from launch.train_gpt.data import BadInput, Text
from launch.train_gpt.exits import DIVERGED, exit_with
from launch.train_gpt.model import GPT
from launch.train_gpt.train import Training, learning_rate_at, write_report
from tests.support.lab.checkpoints import Loaded, load
from tests.support.lab.exits import FAILED_COLLECTIVE, LOSS_DIVERGED
from tests.support.lab.failures import CollectiveFailed, Whereabouts, outlive_torchrun
from tests.support.lab.flags import NAN_SAMPLE
from tests.support.lab.injection import MARK, Injection
from tests.support.lab.mixture import MixtureGPT
from tests.support.lab.options import Options, parse, prepare_input
from tests.support.lab.parallel import Measured, parallel_of
from tests.support.lab.progress import Progress
from tests.support.lab.ranks import Ranks, digest_of, digest_of_state, joined_ranks, meet_at_the_end
from tests.support.lab.recipes import fallback_of, overrides_of, recipe_of
from tests.support.lab.skew import lines_of

TERMINATED = 128 + 15
"""Exit status of a rank that torchrun ended with SIGTERM (the shell convention)."""

LOSS_FACTOR = 1.5
"""Default of ``--loss-factor``."""

GUARD_STEPS = 100
"""Steps in high precision with ``--loss-guard fallback``, without ``--fallback-steps``."""

CALIBRATION = 1
"""Random stream of ``--calibrate-steps``. Training uses stream 0, so the windows differ."""


class Job(Training):
    """A run of the lab. COLLECTIVE."""

    options: Options
    ranks: Ranks
    parallel: Measured
    progress: Progress
    guard: fp8dist.LossGuard | None

    def __init__(self, options: Options, ranks: Ranks, text: Text, watch: Whereabouts) -> None:
        if MARK in text.training and any(fault.kind == NAN_SAMPLE for fault in options.inject):
            raise BadInput(
                f"--inject {NAN_SAMPLE}: the text has the byte {MARK}, which marks the sample: use other --data"
            )
        self.watch, self.loaded = watch, Loaded()
        with watch.during("starting"):
            super().__init__(options, ranks, text)
        left = options.fp8_start_step - 1 - self.done
        if self.manager is not None and left > 0 and not self.loaded.fp8:  # FP8 state includes the override.
            self.manager.set_precision("*", "high", steps=left)
        self.injection = Injection(options, ranks, self.model, self.manager)
        replayed = self.model if self.manager is None else self.manager
        self.buffer = fp8dist.ReplayBuffer(replayed) if options.replay_on else None

    @property
    def in_fp8(self) -> bool:
        """True if there is FP8 state, which counts the steps and sends events."""
        return self.manager is not None and self.manager.settings.enabled

    def make_parallel(self) -> Measured:
        return parallel_of(self.options, self.ranks)

    def make_model(self) -> GPT:
        options = self.options
        if not options.experts:
            return super().make_model()
        shape = options.layers, options.width, options.heads, options.context
        return MixtureGPT(*shape, options.experts, options.top_k)

    def prepare(self) -> fp8dist.StateManager:
        options = self.options
        gathers = options.fp8_all_gather
        if gathers is None:
            settings = Settings.resolve(amax_sync=options.amax_sync)
            gathers = options.gathers and settings.enabled and settings.amax_sync
        manager = fp8dist.prepare(
            self.model,
            recipe_of(options),
            group=self.parallel.group,
            amax_sync=options.amax_sync,
            check_every=options.check_every,
            check_policy=options.check_policy,
            audit_every=options.audit_every,
            audit_bytes=options.audit_bytes or AUDIT_BYTES,
            backend=options.backend,
            # lm_head is skipped by default; naming it here avoids the warning.
            skip=("lm_head", *(("*.router",) if options.experts else ())),
            fp8_all_gather=gathers,
            overrides=overrides_of(options, self.model),
            fallback=fallback_of(options),
        )
        self.watch.name(manager)
        return manager

    def load(self, folder: Path) -> int:
        with self.watch.during("loading the checkpoint"):
            self.loaded = load(folder, self.options, self.ranks, self.module, self.optimizer, self.manager)
        return self.loaded.step

    def save(self, step: int) -> None:
        guard = None if self.guard is None else json.dumps(self.guard.state_dict())
        run = {"step": step, "ranks": self.ranks.size, "gathered_in": self.parallel.gathered_in, "guard": guard}
        with self.watch.during("saving a checkpoint"):
            folder = checkpoints.save(self.options, run, self.module, self.optimizer, self.manager)
        digest = {} if self.manager is None else {"digest": digest_of_state(self.manager)}
        self.recorder.event("saved", step, path=str(folder), **digest)

    def make_guard(self) -> fp8dist.LossGuard | None:
        """Return what watches each step's loss, or None if it is off."""
        options, ranks = self.options, self.ranks
        if options.loss_guard == "off":
            return None
        guard = fp8dist.LossGuard(
            options.loss_guard,
            factor=LOSS_FACTOR if options.loss_factor is None else options.loss_factor,
            mean_over=None if ranks.size == 1 else torch.distributed.group.WORLD,
            manager=self.manager,
            steps=options.fallback_steps or GUARD_STEPS,
            optimizer=self.optimizer if options.loss_guard == "skip" else None,
        )
        if self.loaded.guard is not None:
            guard.load_state_dict(json.loads(self.loaded.guard))
        return guard

    def make_recorder(self) -> fp8dist.Recorder:
        options = self.options
        self.guard = self.make_guard()
        if options.scale_jump is not None and self.manager is not None:
            fp8dist.watch(self.manager, options.watch_every, jump=options.scale_jump)
        exporters: list[fp8dist.Exporter] = []
        if options.tensorboard:
            folder, done = options.out / "tensorboard", self.done or None
            exporters.append(TensorBoard(folder, resume_after=done, images=0, slots=True))
        if options.prometheus is not None:
            exporters.append(Prometheus(options.prometheus))
        return fp8dist.Recorder(
            options.out,
            self.manager,
            every=options.watch_every,
            resume_after=self.done or None,
            ranks=options.watch_ranks,
            precision=options.precision,
            exporters=exporters,
        )

    def run(self) -> dict[str, Any]:
        """Calibrate, train, validate, and return the contents of ``summary.json``. COLLECTIVE."""
        options = self.options
        (options.out / "summary.json").unlink(missing_ok=True)
        if not self.done and not self.ranks.restarts:  # The report stays if this job resumes or restarts.
            for name in ("divergence.txt", "divergence.json"):
                (options.out / name).unlink(missing_ok=True)
        if self.manager is not None and options.calibrate_steps and not self.loaded.fp8:
            with self.watch.during("calibrating"):
                self.calibrate(self.manager)
        if self.done and options.parallel == "ddp":
            with self.watch.during("a backward to warm up"):
                self.settle_buckets()
        self.replay_on_events()
        before = self.metrics()
        self.progress = Progress(options, self.ranks, self.recorder, self.manager, self.parallel.waiting, self.done)
        with self.recorder:
            self.train()
        spent = {name: value - before[name] for name, value in self.metrics().items()}
        with self.watch.during("summing up"):
            return self.summarise(spent)

    def train(self) -> None:
        """Run all training steps, and write the last numbers also of a run that fails. COLLECTIVE."""
        try:
            for step in range(self.done + 1, self.options.last_step + 1):
                self.train_step(step)
        except DivergenceError:
            self.progress.save_own()
            raise
        except LossDiverged:  # All ranks raise it, so collectives still work.
            with self.watch.during("sharing losses"):
                self.progress.flush()
            raise

    def train_step(self, step: int) -> None:
        """Run a step, and what is due after it. COLLECTIVE."""
        options, during, progress = self.options, self.watch.during, self.progress
        with self.parallel.waiting.step():
            loss, grad_norm = self.step(step)
        progress.add(step, self.optimizer.param_groups[0]["lr"], loss, grad_norm)
        if self.alarm is not None:
            progress.tell(self.alarm)
        if progress.due(step):
            validates = options.eval_every and step % options.eval_every == 0
            with during("sharing losses"):
                progress.flush(self.validation_loss if validates else None)
        if options.saves_at(step):
            self.save(step)
        with during("checking"):
            self.check(step)

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        self.watch.step = step
        self.injection.before_step(step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(step, self.options)
        loss = self.gradients(step)
        try:
            with self.watch.during("the loss guard"):
                self.alarm = None if self.guard is None else self.guard.observe(loss, step)
        except LossDiverged as error:  # Record the loss that stopped the run.
            self.progress.add(step, self.optimizer.param_groups[0]["lr"], loss)
            self.progress.tell(error.alarm)
            raise
        with self.watch.during("clipping gradients"):
            grad_norm = self.parallel.clip(self.module, 1.0)
        self.injection.before_update(step)
        with self.watch.during("the optimizer's step"):
            self.optimizer.step()
        self.injection.after_update(step)
        return loss, grad_norm

    def gradients(self, step: int) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.ranks.device)
        for microbatch in range(self.options.accumulate):
            last = microbatch == self.options.accumulate - 1
            with nullcontext() if last else self.parallel.local(self.module), self.parallel.calls():
                batch = self.injection.batch(step, microbatch, self.batch(step, microbatch))
                if self.buffer is not None:
                    self.buffer.keep(batch, None if self.in_fp8 else step)
                total += self.backward(*batch)
        return total

    def batch(self, step: int, microbatch: int, stream: int = 0) -> tuple[Tensor, Tensor]:
        if not self.options.share_batch:
            return super().batch(step, microbatch, stream)
        starts = self.starts(step, microbatch, stream, 0)[self.ranks.rank :: self.ranks.size]
        return self.windows(self.texts[0], starts)

    def backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.watch.during("forward"), self.parallel.precision():
            loss = self.module(tokens, targets) / self.options.accumulate
        with self.watch.during("backward"):
            self.parallel.backward(loss)
        return loss.detach()

    def replay_on_events(self) -> None:
        """Begin what ``--replay-on`` asks for. Local."""

        def record_replay(event: fp8dist.Event) -> None:
            if event.replay is not None and not self.in_fp8:  # With FP8 state the recorder hears of it.
                self.recorder.event(event.kind, event.step, **event.replay.fields())

        if self.buffer is not None:
            fp8dist.replay_on(
                self.module if self.manager is None else self.manager,
                self.buffer,
                lambda batch: self.backward(*batch),
                self.options.replay_on,
                guard=self.guard,
                callback=record_replay,
            )

    def calibrate(self, manager: fp8dist.StateManager) -> None:
        """Give every slot an amax from high-precision passes, so that training starts with warm scales. COLLECTIVE."""
        with manager.calibrate():
            for step in range(self.options.calibrate_steps):
                with self.parallel.thrown_away(self.module):
                    self.backward(*self.batch(step, 0, CALIBRATION))
        self.optimizer.zero_grad(set_to_none=True)

    def validation_loss(self) -> float:
        model: Any = self.model
        self.model = self.parallel.validates_with(self.module, model)
        loss = super().validation_loss()
        self.model = model
        return loss

    def summarise(self, spent: dict[str, float]) -> dict[str, Any]:
        """Return the contents of ``summary.json``. ``spent``: increase of this rank's FP8 metrics in training.
        COLLECTIVE."""
        options, ranks, manager = self.options, self.ranks, self.manager
        collectives = spent.get("fp8/collectives", 0.0)
        steps = options.last_step - self.done  # Steps of this process: 0 if the checkpoint is of the last step.
        final = (
            sum(self.progress.final_losses) / len(self.progress.final_losses) if self.progress.final_losses else None
        )
        rate = steps * self.progress.tokens_per_step / self.progress.training_seconds if steps else 0.0
        parameters = digest_of(self.parallel.whole_parameters(self.module, self.model))
        lines = (options.out / "events.jsonl").read_text().splitlines() if ranks.first else ()
        events = Counter(json.loads(line)["kind"] for line in lines)
        checks = int(spent.get("fp8/checks", events["checked"] + events["diverged"]))
        return {
            "precision": options.precision,
            "parallel": options.parallel,
            "ranks": ranks.size,
            "device": ranks.device.type,
            "steps": options.last_step,
            "resumed_after_step": self.done,
            "restarts": ranks.restarts,
            "final_training_loss": final,
            "validation_loss": self.validation_loss(),
            "tokens_per_s": round(rate, 1),
            "fp8_slots": len(manager.slots) if manager is not None and manager.settings.enabled else 0,
            "high_precision_modules": int(manager.metrics()["fp8/high_precision_modules"])
            if manager is not None
            else 0,
            "fallbacks": int(spent.get("fp8/fallbacks", 0.0)),
            "loss_alarms": 0 if self.guard is None else self.guard.alarms,
            "bytes_gathered_per_step": self.parallel.gathered.total / max(1, steps),
            "fp8_collectives_per_step": collectives / max(1, steps),
            "fp8_bytes_per_sync": spent.get("fp8/sync_bytes", 0.0) / collectives if collectives else 0.0,
            "exposed_sync_ms_per_step": round(spent.get("fp8/sync_wait_ms", 0.0) / max(1, steps), 4),
            "waiting": self.progress.skew.summary(ranks.gather_texts(socket.gethostname())),
            "checks": checks,
            "check_ms_per_check": round(spent.get("fp8/check_ms", 0.0) / checks, 3) if checks else 0.0,
            "divergences": events["diverged"],
            "fp8_state_identical": ranks.agree(digest_of_state(manager)) if manager is not None else None,
            "parameters_identical": ranks.agree(parameters),
            "parameters_sha256": parameters,
        }


def start(arguments: list[str]) -> int:
    """Run the lab, and return its exit status."""
    try:
        main(arguments)
    except DivergenceError:  # Already logged, and written to files.
        meet_at_the_end()
        return DIVERGED
    except LossDiverged:  # Already printed.
        meet_at_the_end()
        return LOSS_DIVERGED
    except CollectiveFailed as error:
        print(error, file=sys.stderr, flush=True)
        return FAILED_COLLECTIVE
    return 0


def main(arguments: list[str]) -> None:
    """Run the lab. A mistake of the user prints one line and exits with status 2.

    Raises:
        DivergenceError: on all ranks, after the report was written.
        LossDiverged: on all ranks, after rank 0 has printed it.
        CollectiveFailed: a collective failed or timed out.
    """
    try:
        options = parse(arguments)
        text = prepare_input(options)
        watch = Whereabouts(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), GPT.__name__)
        with ExitStack() as stack:
            with watch.during("starting"):
                ranks = stack.enter_context(joined_ranks(options.timeout))
            outlive_torchrun(TERMINATED)
            logging.basicConfig(format=f"[rank {ranks.rank}] %(message)s")
            try:
                # Freed before the process group is destroyed: gloo may hang if DDP goes later.
                summary = Job(options, ranks, text, watch).run()
                if ranks.first:
                    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
                    waiting = summary.pop("waiting")
                    lines = [f"{name + ':':28}{value}" for name, value in summary.items()]
                    print("\n".join([*lines, *(lines_of(waiting) if waiting else [])]), flush=True)
            except DivergenceError as error:
                if ranks.rank == error.report.reporting_rank:
                    write_report(error, options.out)
                raise
            except LossDiverged as error:
                if ranks.first:
                    print(f"train_gpt: stopped by --loss-guard: {error}", file=sys.stderr, flush=True)
                raise
    except (BadInput, CheckpointError, ConfigurationError, ManifestMismatchError) as error:
        exit_with(error)
