"""Train a small byte-level GPT on real text, on one rank or many, in high precision or in FP8.

    python -m launch.train_gpt --precision fp8                       one process
    NPROC=2 launch/torchrun.sh --precision fp8 --update next_step    two ranks
    NPROC=4 launch/torchrun.sh --parallel hsdp --save-every 50       two shards, each on two ranks, and checkpoints

Uses CUDA and nccl if there are GPUs, else the CPU and gloo. On CUDA, all but the FP8 modules run in bfloat16, by
torch.autocast or FSDP's mixed precision. On a CPU, FP8 is emulated, 1.7 times slower than float32, and the rest of the
model runs in float32. That is within a tenth of the fastest choice and comparable with --precision fp32.

Writes the folder of a run (``fp8dist.Recorder``) and ``summary.json`` to ``--out``. The data of a rank depends only on
seed, step, rank and microbatch, so two runs with one seed give the same bits.

``--save-every N`` saves checkpoints to ``checkpoints/step-…`` under ``--out``, each of them complete or absent.
``--resume auto`` resumes from the newest one. With the same flags and ranks, the resumed run gives the same bits as an
uninterrupted run; another ``--parallel`` or number of ranks is allowed. ``metrics.jsonl`` is continued. A job that
torchrun restarted (``MAX_RESTARTS`` of torchrun.sh) resumes automatically if it saves checkpoints.

``exits.py`` lists the exit statuses. If ranks differ (``--check-policy``), the report is in ``divergence.txt`` and
``divergence.json`` under ``--out``, and in torchelastic's error file. A run that fails writes no ``summary.json``; its
``metrics.jsonl`` ends with the last completed step, or the step that the loss guard refused.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

import fp8dist
from fp8dist.errors import CheckpointError, ConfigurationError, DivergenceError, LossDiverged, ManifestMismatchError
from fp8dist.state.settings import AUDIT_BYTES, Settings
from launch.train_gpt.checkpoints.checkpoints import Checkpoints, Loaded
from launch.train_gpt.compare_runs import cell
from launch.train_gpt.data import BadInput, Text
from launch.train_gpt.exits import DIVERGED, FAILED_COLLECTIVE, LOSS_DIVERGED, UNWRITTEN, exit_with
from launch.train_gpt.faults.divergence import ErrorFile, forget_report, write_report
from launch.train_gpt.faults.failures import CheckpointFailed, CollectiveFailed, Whereabouts, outlive_torchrun
from launch.train_gpt.faults.guard import Guard
from launch.train_gpt.faults.injection import MARK, Injection
from launch.train_gpt.measure.checks import Checks
from launch.train_gpt.measure.exporting import exporters_of
from launch.train_gpt.measure.progress import Progress
from launch.train_gpt.measure.skew import lines_of
from launch.train_gpt.model import GPT
from launch.train_gpt.options.flags import NAN_SAMPLE
from launch.train_gpt.options.options import Options, parse, prepare_input
from launch.train_gpt.parallel import Parallel, parallel_of
from launch.train_gpt.ranks import Ranks, digest_of, digest_of_state, joined_ranks, meet_at_the_end
from launch.train_gpt.recipes import fallback_of, overrides_of, recipe_of

VALIDATION_BATCHES = 8
"""Number of validation batches, over all ranks together."""

TERMINATED = 128 + 15
"""Exit status of a rank that torchrun ended with SIGTERM (the shell convention)."""

CALIBRATION = 1
"""Random stream of ``--calibrate-steps``. Training uses stream 0, so the windows differ."""


@dataclass(frozen=True)
class Job:
    """All objects that a training step needs."""

    options: Options
    ranks: Ranks
    parallel: Parallel
    model: GPT
    module: nn.Module  # The training loop calls it: the model or its wrapper.
    optimizer: torch.optim.Optimizer
    manager: fp8dist.StateManager | None
    checkpoints: Checkpoints
    loaded: Loaded
    guard: Guard
    watch: Whereabouts
    checks: Checks
    injection: Injection
    recorder: fp8dist.Recorder
    buffer: fp8dist.ReplayBuffer | None  # Of --replay-on.
    training: Tensor  # uint8 [bytes], on the CPU
    validation: Tensor  # uint8 [bytes], on the CPU

    @property
    def done(self) -> int:
        """The step of the loaded checkpoint, or 0."""
        return self.loaded.step

    @property
    def in_fp8(self) -> bool:
        """True if there is FP8 state, which counts the steps and sends events."""
        return self.manager is not None and self.manager.settings.enabled


def start(arguments: list[str]) -> int:
    """Run the job, write torchelastic's error file on failure, and return the exit status."""
    try:
        record(main, ErrorFile())(arguments)
    except DivergenceError:  # Already logged, and written to files.
        meet_at_the_end()
        return DIVERGED
    except LossDiverged:  # Already printed.
        meet_at_the_end()
        return LOSS_DIVERGED
    except CollectiveFailed as error:
        print(error, file=sys.stderr, flush=True)
        return FAILED_COLLECTIVE
    except CheckpointFailed as error:
        print(error, file=sys.stderr, flush=True)
        return UNWRITTEN
    return 0


def main(arguments: list[str]) -> None:
    """Run the job. A mistake of the user prints one line and exits with status 2.

    Raises:
        DivergenceError: on all ranks, after the report was written.
        LossDiverged: on all ranks, after rank 0 has printed it.
        CollectiveFailed: a collective failed or timed out.
        CheckpointFailed: a checkpoint could not be written.
    """
    try:
        options = parse(arguments)
        text = prepare_input(options)
        timeout = timedelta(seconds=options.timeout)
        watch = Whereabouts(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), GPT.__name__)
        with ExitStack() as stack:
            kept = (DivergenceError, LossDiverged, CollectiveFailed, CheckpointFailed)
            joins = joined_ranks(options.parallel, timeout, kept)
            with watch.during("starting"):
                ranks = stack.enter_context(joins)
            outlive_torchrun(TERMINATED)
            logging.basicConfig(format=f"[rank {ranks.rank}] %(message)s")
            try:
                run(build(options, ranks, text, watch))
            except DivergenceError as error:
                write_report(error.report, options.out, ranks)
                raise
            except LossDiverged as error:
                if ranks.first:
                    print(f"train_gpt: stopped by --loss-guard: {error}", file=sys.stderr, flush=True)
                raise
    except (BadInput, CheckpointError, ConfigurationError, ManifestMismatchError) as error:
        exit_with(error)


def build(options: Options, ranks: Ranks, text: Text, watch: Whereabouts) -> Job:
    """Build model, optimizer and, for FP8, the state manager, and load the checkpoint if there is one. COLLECTIVE."""
    _require_unmarked(options, text)
    checkpoints = Checkpoints(options, ranks)
    with watch.during("starting"):
        folder = checkpoints.find()
        torch.manual_seed(options.seed)
        parallel = parallel_of(options, ranks)
        checkpoints.gathered_in = "bfloat16" if parallel.bf16 and not parallel.bf16_by_autocast else None
        shape = options.layers, options.width, options.heads, options.context
        model = GPT(*shape, options.experts, options.top_k)
        manager = _prepare_fp8(model, options, parallel) if options.precision == "fp8" else None
        if manager is not None:
            watch.name(manager)
        model.to(ranks.device)
        module = parallel.wrap(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    with watch.during("loading the checkpoint"):
        loaded = checkpoints.load(folder, module, optimizer, manager) if folder is not None else Loaded()
    guard = Guard(options, ranks, optimizer, manager)
    if loaded.guard is not None:
        guard.restore(loaded.guard)
    recorder = _recorder(options, manager, loaded.step)
    if manager is not None:
        with watch.during("starting"):
            _attach(manager, options, module, optimizer, loaded)
    checks = Checks(options, ranks, module, manager)
    injection = Injection(options, ranks, model, manager)
    checkpoints.written = injection.files_written
    checkpoints.finished = lambda step, path, digest: recorder.event("saved", step, path=str(path), **digest)
    buffer = fp8dist.ReplayBuffer(model if manager is None else manager) if options.replay_on else None
    made = (parallel, model, module, optimizer, manager, checkpoints, loaded, guard, watch, checks, injection, recorder)
    return Job(options, ranks, *made, buffer, _bytes(text.training), _bytes(text.validation))


def _require_unmarked(options: Options, text: Text) -> None:
    if MARK in text.training and any(fault.kind == NAN_SAMPLE for fault in options.inject):
        raise BadInput(f"--inject {NAN_SAMPLE}: the text has the byte {MARK}, which marks the sample: use other --data")


def _prepare_fp8(model: GPT, options: Options, parallel: Parallel) -> fp8dist.StateManager:
    return fp8dist.prepare(
        model,
        recipe_of(options),
        group=parallel.group,
        amax_sync=options.amax_sync,
        check_every=options.check_every,
        check_policy=options.check_policy,
        audit_every=options.audit_every,
        audit_bytes=options.audit_bytes or AUDIT_BYTES,
        backend=options.backend,
        # lm_head is skipped by default; naming it here avoids the warning.
        skip=("lm_head", *(("*.router",) if options.experts else ())),
        fp8_all_gather=_gathers_fp8(options),
        overrides=overrides_of(options, model),
        fallback=fallback_of(options),
    )


def _recorder(options: Options, manager: fp8dist.StateManager | None, done: int) -> fp8dist.Recorder:
    """Return the recorder of the run, which also starts the watch. Local."""
    return fp8dist.Recorder(
        options.out,
        manager,
        every=options.watch_every,
        resume_after=done or None,
        ranks=options.watch_ranks,
        jump=options.scale_jump,
        tensorboard=options.out / "tensorboard" if options.tensorboard else None,
        precision=options.precision,
        exporters=exporters_of(options, done or None),
    )


def _attach(
    manager: fp8dist.StateManager, options: Options, module: nn.Module, optimizer: torch.optim.Optimizer, loaded: Loaded
) -> None:
    """Attach the manager, and apply the rest of ``--fp8-start-step``. COLLECTIVE."""
    manager.attach(module, optimizer=optimizer, timeout=timedelta(seconds=options.timeout))
    left = options.fp8_start_step - 1 - loaded.step
    if left > 0 and not loaded.fp8:  # FP8 state in a checkpoint includes the override.
        manager.set_precision("*", "high", steps=left)


def _gathers_fp8(options: Options) -> bool:
    """Return the value of ``--fp8-all-gather``; without the flag, True if it is possible and ranks share amaxes."""
    if options.fp8_all_gather is not None:
        return options.fp8_all_gather
    settings = Settings.resolve(amax_sync=options.amax_sync)
    return options.why_not_gathered is None and settings.enabled and settings.amax_sync


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def run(job: Job) -> None:
    """Calibrate, train, validate and write the summary. COLLECTIVE."""
    _forget_earlier_run(job)
    _announce(job)
    if job.manager is not None and job.options.calibrate_steps and not job.loaded.fp8:
        with job.watch.during("calibrating"):
            calibrate(job, job.manager)
    if job.done and job.options.parallel == "ddp":
        with job.watch.during("a backward to warm up"):
            settle_buckets(job)
    _replay_on_events(job)
    before = job.manager.metrics() if job.manager is not None else {}
    progress = Progress(job.options, job.ranks, job.recorder, job.manager, job.parallel.waiting, job.done)
    with job.recorder:
        train_and_check(job, progress)
    after = job.manager.metrics() if job.manager is not None else {}
    spent = {name: after[name] - before[name] for name in after}
    with job.watch.during("summing up"):
        summary = summarise(job, progress, spent)
    if job.ranks.first:
        options = job.options
        if job.done >= options.last_step:
            print(f"nothing to train: step {job.done} of {options.steps} was already done", file=sys.stderr)
        elif options.last_step < options.steps:
            print(
                f"stopped after step {options.last_step} of {options.steps}: continue with --resume auto",
                file=sys.stderr,
            )
        (job.options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        print(_as_table(summary), flush=True)


def train_and_check(job: Job, progress: Progress) -> None:
    """Train, check at the end, and write the last numbers also of a run that fails. COLLECTIVE."""
    try:
        train(job, progress)
        with job.watch.during("checking at the end"):
            job.checks.at_the_end(job.options.last_step)
    except DivergenceError:
        progress.save_own()
        raise
    except LossDiverged:  # All ranks raise it, so collectives still work.
        with job.watch.during("sharing losses"):
            progress.flush()
        with job.watch.during("saving a checkpoint"):
            job.checkpoints.wait()
        raise
    finally:
        progress.close()


def _forget_earlier_run(job: Job) -> None:
    """Remove results of an earlier run from ``--out``. The divergence report stays if this job resumes or restarts."""
    (job.options.out / "summary.json").unlink(missing_ok=True)
    if not job.done and not job.ranks.restarts:
        forget_report(job.options.out)


def _announce(job: Job) -> None:
    if not job.ranks.first:
        return
    parameters = sum(p.numel() for p in job.model.parameters())
    of = " on this rank" if job.options.parallel == "fsdp1" else ""
    where = f"{job.ranks.size} rank(s), {job.ranks.device.type}, {job.ranks.backend or 'no process group'}"
    what = f"{job.options.precision}, {job.options.parallel}"
    print(f"{what}: {parameters / 1e6:.2f} M parameters{of}, {where}", file=sys.stderr)
    if job.options.parallel == "hsdp":
        shard = job.options.shard_size
        print(f"{job.ranks.size // shard} replica(s), each sharded over {shard} rank(s)", file=sys.stderr)
    if job.manager is not None and job.ranks.device.type == "cpu":
        print(
            f"FP8 is emulated on the CPU (backend {job.manager.settings.backend}): it is usually slower than fp32",
            file=sys.stderr,
        )


def train(job: Job, progress: Progress) -> None:
    """Run all training steps. COLLECTIVE."""
    options, during = job.options, job.watch.during
    for step in range(job.done + 1, options.last_step + 1):
        job.watch.step = step
        with job.parallel.waiting.step():
            job.injection.before_step(step)
            for group in job.optimizer.param_groups:
                group["lr"] = learning_rate_at(step, options) * job.guard.learning_rate_factor
            loss = gradients(job, step)
            try:
                with during("the loss guard"):
                    alarm = job.guard.observe(step, loss)
            except LossDiverged as error:
                progress.add(step, job.optimizer.param_groups[0]["lr"], loss)  # Record the loss that stopped the run.
                progress.tell(error.alarm)
                raise
            grad_norm = update(job, step)
        progress.add(step, job.optimizer.param_groups[0]["lr"], loss, grad_norm)
        if alarm is not None:
            progress.tell(alarm)
        if progress.due(step):
            validates = options.eval_every and step % options.eval_every == 0
            with during("sharing losses"):
                progress.flush((lambda: validation_loss(job)) if validates else None)
        with during("checking"):
            job.checks.after(step)
        with during("saving a checkpoint"):
            job.checkpoints.poll()
            if options.saves_at(step):
                job.checkpoints.save(step, job.module, job.optimizer, job.manager, job.guard.describe())
    with during("saving a checkpoint"):
        job.checkpoints.wait()


def gradients(job: Job, step: int) -> Tensor:
    """Run forward and backward of one optimizer step. Return this rank's mean loss, on the device. COLLECTIVE."""
    job.optimizer.zero_grad(set_to_none=True)
    microbatches = job.options.accumulate
    total = torch.zeros((), device=job.ranks.device)
    for microbatch in range(microbatches):
        last = microbatch == microbatches - 1
        with nullcontext() if last else job.parallel.local(job.module), job.parallel.calls():
            batch = job.injection.batch(step, microbatch, training_batch(job, step, microbatch))
            if job.buffer is not None:
                job.buffer.keep(batch, None if job.in_fp8 else step)
            total += _backward(job, *batch)
    return total


def _replay_on_events(job: Job) -> None:
    """Begin what ``--replay-on`` asks for. Local."""

    def record_replay(event: fp8dist.Event) -> None:
        if event.replay is not None and not job.in_fp8:  # With FP8 state the recorder hears of it.
            job.recorder.event(event.kind, event.step, **event.replay.fields())

    if job.buffer is not None:
        fp8dist.replay_on(
            job.module if job.manager is None else job.manager,
            job.buffer,
            lambda batch: _backward(job, *batch),
            job.options.replay_on,
            guard=job.guard.losses,
            callback=record_replay,
        )


def update(job: Job, step: int) -> Tensor:
    """Clip the gradients and step the optimizer. Return the gradient norm, on the device. COLLECTIVE."""
    with job.watch.during("clipping gradients"):
        grad_norm = job.parallel.clip(job.module, 1.0)
    job.injection.before_update(step)
    with job.watch.during("the optimizer's step"):
        job.optimizer.step()
    job.injection.after_update(step)
    return grad_norm


def _backward(job: Job, tokens: Tensor, targets: Tensor) -> Tensor:
    with job.watch.during("forward"), job.parallel.precision():
        loss = job.module(tokens, targets) / job.options.accumulate
    with job.watch.during("backward"):
        job.parallel.backward(loss)
    return loss.detach()


def calibrate(job: Job, manager: fp8dist.StateManager) -> None:
    """Give every slot an amax from high-precision passes, so that training starts with warm scales. COLLECTIVE."""
    with manager.calibrate():
        for step in range(job.options.calibrate_steps):
            with job.parallel.thrown_away(job.module):
                _backward(job, *training_batch(job, step, 0, CALIBRATION))
    job.optimizer.zero_grad(set_to_none=True)


def settle_buckets(job: Job) -> None:
    """Run a backward so that DDP orders its buckets as in an uninterrupted run. COLLECTIVE.

    The order affects the rounding of sums over three or more ranks. High precision keeps amaxes from being recorded.
    """
    with job.manager.no_fp8() if job.manager is not None else nullcontext():
        _backward(job, *training_batch(job, job.done, 0))
    job.optimizer.zero_grad(set_to_none=True)


def learning_rate_at(step: int, options: Options) -> float:
    """Return the learning rate: linear warm-up over a tenth of the run, then cosine decay to a tenth of the peak."""
    warm_up = max(1, options.steps // 10)
    if step <= warm_up:
        return options.learning_rate * step / warm_up
    progress = (step - warm_up) / max(1, options.steps - warm_up)
    return options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def training_batch(job: Job, step: int, microbatch: int, stream: int = 0) -> tuple[Tensor, Tensor]:
    """Return (tokens, targets), int64 [batch, context]: random windows of the training text.

    They depend only on seed, stream, step, rank and microbatch.
    """
    options = job.options
    random = np.random.default_rng([options.seed, stream, step, job.ranks.rank, microbatch])
    starts = random.integers(0, len(job.training) - options.context, options.batch_size)
    return _windows(job, job.training, torch.from_numpy(starts))


def _windows(job: Job, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    places = starts[:, None] + torch.arange(job.options.context + 1)
    windows = text[places].to(job.ranks.device, torch.int64)
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def validation_loss(job: Job) -> float:
    """Return the mean loss over the first windows of the held-out text, split across ranks. COLLECTIVE."""
    options, ranks = job.options, job.ranks
    last = len(job.validation) - options.context
    starts = torch.arange(0, last, options.context)[: VALIDATION_BATCHES * options.batch_size]
    sums = torch.zeros(2, device=ranks.device, dtype=torch.float64)  # losses, windows
    module = job.parallel.validates_with(job.module, job.model)
    module.eval()
    # FSDP's forward is collective, so all ranks call the module equally often. A rank without windows repeats one.
    own, rounds = starts[ranks.rank :: ranks.size], -(-len(starts) // (ranks.size * options.batch_size))
    for round_ in range(rounds):
        part = own[round_ * options.batch_size :][: options.batch_size]
        with job.parallel.precision():
            loss = module(*_windows(job, job.validation, part if len(part) else starts[:1]))
        sums += torch.stack([loss.double() * len(part), torch.tensor(len(part), device=ranks.device)])
    module.train()
    total, windows = ranks.mean(sums).tolist()
    return float(total / windows)


def summarise(job: Job, progress: Progress, spent: dict[str, float]) -> dict[str, Any]:
    """Return the contents of ``summary.json``. COLLECTIVE.

    Args:
        spent: increase of this rank's FP8 metrics over the training steps.
    """
    options, ranks, manager = job.options, job.ranks, job.manager
    collectives = spent.get("fp8/collectives", 0.0)
    steps = options.last_step - job.done  # Steps of this process: 0 if the checkpoint is of the last step.
    final = sum(progress.final_losses) / len(progress.final_losses) if progress.final_losses else None
    rate = steps * progress.tokens_per_step / progress.training_seconds if steps else 0.0
    parameters = digest_of(job.parallel.whole_parameters(job.module, job.model))
    checks, check_ms = job.checks.cost
    return {
        "precision": options.precision,
        "parallel": options.parallel,
        "ranks": ranks.size,
        "device": ranks.device.type,
        "steps": options.last_step,
        "resumed_after_step": job.done,
        "restarts": ranks.restarts,
        "final_training_loss": final,
        "validation_loss": validation_loss(job),
        "tokens_per_s": round(rate, 1),
        "fp8_slots": len(manager.slots) if manager is not None and manager.settings.enabled else 0,
        "high_precision_modules": int(manager.metrics()["fp8/high_precision_modules"]) if manager is not None else 0,
        "fallbacks": int(spent.get("fp8/fallbacks", 0.0)),
        "loss_alarms": job.guard.alarms,
        "bytes_gathered_per_step": job.parallel.gathered.total / max(1, steps),
        "fp8_collectives_per_step": collectives / max(1, steps),
        "fp8_bytes_per_sync": spent.get("fp8/sync_bytes", 0.0) / collectives if collectives else 0.0,
        "exposed_sync_ms_per_step": round(spent.get("fp8/sync_wait_ms", 0.0) / max(1, steps), 4),
        "waiting": progress.skew.summary(ranks.gather_texts(socket.gethostname())),
        "checks": checks,
        "check_ms_per_check": round(check_ms / checks, 3) if checks else 0.0,
        "divergences": job.checks.divergences,
        "fp8_state_identical": ranks.agree(digest_of_state(manager)) if manager is not None else None,
        "parameters_identical": ranks.agree(parameters),
        "parameters_sha256": parameters,
    }


_LABELS = {
    "final_training_loss": "final training loss (mean of last steps, nats per byte)",
    "validation_loss": "validation loss",
    "tokens_per_s": "tokens/s",
    "bytes_gathered_per_step": "bytes gathered per step",
    "loss_alarms": "alarms of the loss guard",
    "fp8_slots": "FP8 slots",
    "high_precision_modules": "FP8 modules in high precision at the end",
    "fallbacks": "modules that fell back to high precision",
    "fp8_collectives_per_step": "FP8 collectives per step",
    "fp8_bytes_per_sync": "bytes per sync",
    "exposed_sync_ms_per_step": "exposed sync, ms per step",
    "checks": "consistency checks",
    "check_ms_per_check": "ms per check",
    "divergences": "divergences found",
    "fp8_state_identical": "FP8 state identical on all ranks",
    "parameters_identical": "parameters identical on all ranks",
}


def _as_table(summary: dict[str, Any]) -> str:
    lines = []
    left_out: set[str] = set()
    if not summary["checks"] and not summary["divergences"]:
        left_out |= {"checks", "check_ms_per_check", "divergences"}
    only_if_any = ("bytes_gathered_per_step", "loss_alarms", "high_precision_modules", "fallbacks")
    left_out |= {name for name in only_if_any if not summary[name]}
    if not summary["fp8_slots"]:
        left_out |= {"fp8_slots", "fp8_collectives_per_step", "fp8_bytes_per_sync", "exposed_sync_ms_per_step"}
    for key, label in _LABELS.items():
        if key in left_out:
            continue
        lines.append(f"{label + ':':58}{cell(summary[key], 'none')}")
    if summary["waiting"] is not None:
        lines += lines_of(summary["waiting"])
    return "\n".join(lines)
