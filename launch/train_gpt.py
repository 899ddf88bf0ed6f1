"""Train a small byte-level GPT on real text, on one rank or many, in high precision or in FP8.

    python launch/train_gpt.py --precision fp8                       one process
    NPROC=2 launch/torchrun.sh --precision fp8 --update next_step    two ranks

CUDA and nccl where there are GPUs, the CPU and gloo where there are none. FP8 runs over
torch.autocast(bfloat16) on CUDA. On a CPU it is emulated, and 1.7 times slower than float32 in place of faster:
there it runs over plain float32, within a tenth of the fastest choice and comparable with --precision fp32.

Writes ``metrics.jsonl`` (a JSON object per step) and ``summary.json`` into ``--out``. The data that a rank sees
depends on seed, step and rank only, so two runs with one seed give the same bits.

Exit status: 0, the run is done; 2, a mistake in the flags or an unusable file, told in one line; 4, the run stopped
because its ranks differ (``--check-policy``). Then ``divergence.txt`` and ``divergence.json`` in ``--out`` have the
report, and so has torchelastic's error file; ``metrics.jsonl`` ends with the last step that was done, and
``summary.json`` is not written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from checks import Checks
from divergence import ErrorFile, forget_report, write_report
from fp8dist.errors import ConfigurationError, DivergenceError, ManifestMismatchError
from gpt import GPT
from injection import Injection
from options import DIVERGED, Options, exit_with, parse, prepare_input
from ranks import Ranks, digest_of, joined_ranks, leave, meet_at_the_end
from recorder import Recorder
from text import BadInput, Text

VALIDATION_BATCHES = 8
"""Size of a validation, in batches of all ranks together."""

CALIBRATION = 1
"""Marks the random stream of ``--calibrate-steps``: other windows than those of training (0)."""


@dataclass(frozen=True)
class Job:
    """Everything that a step needs."""

    options: Options
    ranks: Ranks
    model: GPT
    module: nn.Module  # What the loop calls: the model, or DDP around it.
    optimizer: torch.optim.Optimizer
    manager: fp8dist.StateManager | None
    checks: Checks
    injection: Injection
    training: Tensor  # uint8 [bytes], on the CPU
    validation: Tensor  # uint8 [bytes], on the CPU

    def autocast(self) -> torch.autocast:
        """What the forward runs under."""
        device = self.ranks.device.type
        bf16 = self.options.precision == "bf16" or (self.options.precision == "fp8" and device == "cuda")
        return torch.autocast(device, torch.bfloat16, enabled=bf16)


def start(arguments: list[str]) -> int:
    """Run the job, with torchelastic's error file; the exit status."""
    try:
        record(main, ErrorFile())(arguments)
    except DivergenceError:  # Logged and written.
        meet_at_the_end()
        return DIVERGED
    return 0


def main(arguments: list[str]) -> None:
    """Run the job; a mistake of the caller's is one line and exit status 2.

    Raises:
        DivergenceError: on all ranks, after the report was written.
    """
    try:
        options = parse(arguments)
        text = prepare_input(options)
        with joined_ranks(options.parallel) as ranks:
            logging.basicConfig(format=f"[rank {ranks.rank}] %(message)s")
            try:
                run(build(options, ranks, text))
            except DivergenceError as error:
                write_report(error.report, options.out, ranks)
                raise
    except (BadInput, ConfigurationError, ManifestMismatchError) as error:
        exit_with(error)


def build(options: Options, ranks: Ranks, text: Text) -> Job:
    """Model, optimizer and, for FP8, the manager of its state. COLLECTIVE."""
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.width, options.heads, options.context)
    manager = _prepare_fp8(model, options, ranks) if options.precision == "fp8" else None
    model.to(ranks.device)
    module: nn.Module = model
    if options.parallel == "ddp":
        module = DistributedDataParallel(model, device_ids=[ranks.device] if ranks.device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    if manager is not None:
        manager.attach(module, optimizer=optimizer)
    checks = Checks(options, ranks, module, manager)
    injection = Injection(options, ranks, model, manager)
    data = _bytes(text.training), _bytes(text.validation)
    return Job(options, ranks, model, module, optimizer, manager, checks, injection, *data)


def _prepare_fp8(model: GPT, options: Options, ranks: Ranks) -> fp8dist.StateManager:
    recipe = fp8dist.DelayedScaling(
        history_len=options.history_len,
        amax_algo=options.amax_algo,
        margin=options.margin,
        format=options.format,
        update=options.update,
    )
    return fp8dist.prepare(
        model,
        recipe,
        group=dist.group.WORLD if options.parallel == "ddp" else None,
        amax_sync=options.amax_sync,
        check_every=options.check_every,
        check_policy=options.check_policy,
        backend=options.backend,
    )


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def run(job: Job) -> None:
    """Calibrate, train, validate, sum up. COLLECTIVE."""
    _forget_earlier_run(job.options.out)
    _announce(job)
    if job.manager is not None and job.options.calibrate_steps:
        calibrate(job, job.manager)
    before = job.manager.metrics() if job.manager is not None else {}
    recorder = Recorder(job.options, job.ranks, job.manager)
    try:
        train(job, recorder)
        job.checks.at_the_end(job.options.steps)
    except DivergenceError:
        recorder.save_own()
        raise
    finally:
        recorder.close()
    after = job.manager.metrics() if job.manager is not None else {}
    spent = {name: after[name] - before[name] for name in after}
    summary = summarise(job, recorder, spent)
    if job.ranks.first:
        (job.options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        print(_as_table(summary), flush=True)


def _forget_earlier_run(folder: Path) -> None:
    """Its results must not lie beside those of a run that stopped."""
    (folder / "summary.json").unlink(missing_ok=True)
    forget_report(folder)


def _announce(job: Job) -> None:
    if not job.ranks.first:
        return
    parameters = sum(p.numel() for p in job.model.parameters())
    where = f"{job.ranks.size} rank(s), {job.ranks.device.type}, {job.ranks.backend or 'no process group'}"
    print(f"{job.options.precision}: {parameters / 1e6:.2f} M parameters, {where}", file=sys.stderr)
    if job.manager is not None and job.ranks.device.type == "cpu":
        print(f"FP8 is emulated on a CPU (backend {job.manager.settings.backend}): it is slower here", file=sys.stderr)


def train(job: Job, recorder: Recorder) -> None:
    """All steps. COLLECTIVE."""
    options = job.options
    for step in range(1, options.steps + 1):
        learning_rate = learning_rate_at(step, options)
        for group in job.optimizer.param_groups:
            group["lr"] = learning_rate
        recorder.add(step, learning_rate, train_step(job, step))
        if recorder.due(step):
            validates = options.eval_every and step % options.eval_every == 0
            recorder.flush((lambda: validation_loss(job)) if validates else None)
        job.checks.after(step)


def train_step(job: Job, step: int) -> Tensor:
    """One optimizer step; this rank's mean loss, on the device. COLLECTIVE."""
    job.optimizer.zero_grad(set_to_none=True)
    microbatches = job.options.accumulate
    total = torch.zeros((), device=job.ranks.device)
    for microbatch in range(microbatches):
        with _gradients_stay_local(job, microbatch < microbatches - 1):
            total += _backward(job, *training_batch(job, step, microbatch))
    torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
    job.injection.before_update(step)
    job.optimizer.step()
    job.injection.after_update(step)
    return total


def _backward(job: Job, tokens: Tensor, targets: Tensor) -> Tensor:
    with job.autocast():
        loss = job.module(tokens, targets) / job.options.accumulate
    loss.backward()
    return loss.detach()


@contextlib.contextmanager
def _gradients_stay_local(job: Job, wanted: bool) -> Iterator[None]:
    if wanted and isinstance(job.module, DistributedDataParallel):
        with job.module.no_sync():
            yield
    else:
        yield


def calibrate(job: Job, manager: fp8dist.StateManager) -> None:
    """Give every slot an amax from high-precision passes, so that training starts warm. COLLECTIVE."""
    with manager.calibrate():
        for step in range(job.options.calibrate_steps):
            with _gradients_stay_local(job, True):
                _backward(job, *training_batch(job, step, 0, CALIBRATION))
    job.optimizer.zero_grad(set_to_none=True)


def learning_rate_at(step: int, options: Options) -> float:
    """Linear warm-up over a tenth of the run, then a cosine down to a tenth of the peak."""
    warm_up = max(1, options.steps // 10)
    if step <= warm_up:
        return options.learning_rate * step / warm_up
    progress = (step - warm_up) / max(1, options.steps - warm_up)
    return options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def training_batch(job: Job, step: int, microbatch: int, stream: int = 0) -> tuple[Tensor, Tensor]:
    """Random windows; which ones depends on seed, stream, step, rank and microbatch only."""
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
    """Mean loss over the first windows of the held-out text, dealt out to the ranks. COLLECTIVE."""
    options, ranks = job.options, job.ranks
    last = len(job.validation) - options.context
    starts = torch.arange(0, last, options.context)[: VALIDATION_BATCHES * options.batch_size]
    sums = torch.zeros(2, device=ranks.device, dtype=torch.float64)  # losses, windows
    job.model.eval()
    for part in starts[ranks.rank :: ranks.size].split(options.batch_size):
        if len(part):
            with job.autocast():
                loss = job.model(*_windows(job, job.validation, part))
            sums += torch.stack([loss.double() * len(part), torch.tensor(len(part), device=ranks.device)])
    job.model.train()
    total, windows = ranks.mean(sums).tolist()
    return float(total / windows)


def summarise(job: Job, recorder: Recorder, spent: dict[str, float]) -> dict[str, object]:
    """What the run came to. ``spent``: FP8 counters of this rank over the training steps. COLLECTIVE."""
    options, ranks, manager = job.options, job.ranks, job.manager
    collectives = spent.get("fp8/collectives", 0.0)
    final = sum(recorder.final_losses) / len(recorder.final_losses)
    rate = options.steps * recorder.tokens_per_step / recorder.training_seconds
    parameters = digest_of(job.model.named_parameters())
    checks, check_ms = job.checks.cost
    return {
        "precision": options.precision,
        "ranks": ranks.size,
        "device": ranks.device.type,
        "steps": options.steps,
        "final_training_loss": final,
        "validation_loss": validation_loss(job),
        "tokens_per_s": round(rate, 1),
        "fp8_slots": len(manager.slots) if manager is not None and manager.settings.enabled else 0,
        "fp8_collectives_per_step": collectives / options.steps,
        "fp8_bytes_per_sync": spent.get("fp8/sync_bytes", 0.0) / collectives if collectives else 0.0,
        "exposed_sync_ms_per_step": round(spent.get("fp8/sync_wait_ms", 0.0) / options.steps, 4),
        "checks": checks,
        "check_ms_per_check": round(check_ms / checks, 3) if checks else 0.0,
        "divergences": job.checks.divergences,
        "fp8_state_identical": ranks.agree(_state_digest(manager)) if manager is not None else None,
        "parameters_identical": ranks.agree(parameters),
        "parameters_sha256": parameters,
    }


def _state_digest(manager: fp8dist.StateManager) -> str:
    state = manager.state_dict()
    state = state.get(f"rank{dist.get_rank()}", state) if dist.is_initialized() else state
    return digest_of((name, value) for name, value in state.items() if isinstance(value, Tensor))


_LABELS = {
    "final_training_loss": "final training loss (mean of last steps, nats per byte)",
    "validation_loss": "validation loss",
    "tokens_per_s": "tokens/s",
    "fp8_slots": "FP8 slots",
    "fp8_collectives_per_step": "FP8 collectives per step",
    "fp8_bytes_per_sync": "bytes per sync",
    "exposed_sync_ms_per_step": "exposed sync, ms per step",
    "checks": "consistency checks",
    "check_ms_per_check": "ms per check",
    "divergences": "divergences found",
    "fp8_state_identical": "FP8 state identical on all ranks",
    "parameters_identical": "parameters identical on all ranks",
}


def _as_table(summary: dict[str, object]) -> str:
    words = {True: "yes", False: "no", None: "no FP8 state"}
    lines = []
    checked = summary["checks"] or summary["divergences"]
    for key, label in _LABELS.items():
        if key in ("checks", "check_ms_per_check", "divergences") and not checked:
            continue
        value = summary[key]
        text = words[value] if value is None or isinstance(value, bool) else f"{value:.10g}"
        lines.append(f"{label + ':':58}{text}")
    return "\n".join(lines)


if __name__ == "__main__":
    leave(start(sys.argv[1:]))
