"""Progress of a run: the losses of all ranks, and its training time."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fp8dist
from fp8dist.runs.run_format import METRICS
from tests.support.lab.options import Options
from tests.support.lab.ranks import Ranks, mean_of
from tests.support.lab.skew import Skew
from tests.support.lab.waiting import Waiting

FINAL_STEPS = 10
"""The final training loss is the mean over this many steps."""


class Step(NamedTuple):
    """What is recorded of a step before its loss is read. ``loss``, ``grad_norm``: 0-d, on the device; the loss is this
    rank's. ``known``: fields of its line."""

    number: int
    loss: Tensor
    grad_norm: Tensor | None
    known: dict[str, Any]


class Progress:
    """Collects losses on the device, and every ``--log-every`` steps gives them to the run's recorder.

    ``flush`` makes one all_gather, of the losses and the waits of each rank since the last flush. Between flushes
    nothing is read from the device and nothing is communicated, except what the recorder's watch does. Rates and FP8
    metrics are means over that interval.
    """

    def __init__(
        self,
        options: Options,
        ranks: Ranks,
        recorder: fp8dist.Recorder,
        manager: fp8dist.StateManager | None,
        waits: Waiting,
        done: int = 0,
    ) -> None:
        """``waits``: the measured waits of this rank. ``done``: steps of the run that this one resumes from."""
        self.training_seconds = 0.0
        self.final_losses: deque[float] = deque(maxlen=FINAL_STEPS)
        self.skew = Skew(ranks.size)
        self._options, self._ranks, self._manager, self._waits = options, ranks, manager, waits
        self._recorder = recorder
        self._waiting: list[Step] = []
        if ranks.first and done:
            self.final_losses.extend(_losses(options.out / METRICS))
        self._sync_ms = self._metrics().get("fp8/sync_wait_ms", 0.0)
        self._start = time.perf_counter()

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all ranks and microbatches."""
        options = self._options
        batches = 1 if options.share_batch else self._ranks.size
        return options.batch_size * options.context * options.accumulate * batches

    def add(self, step: int, learning_rate: float, loss: Tensor, grad_norm: Tensor | None = None) -> None:
        """Record a step. Local; does not wait for the device."""
        known: dict[str, Any] = {"time": time.time(), "learning_rate": learning_rate, "tokens": self.tokens_per_step}
        if self._manager is not None:
            known |= {"proven": self._manager.verified.proven_step, "checked": self._manager.verified.checked_step}
        self._waiting.append(Step(step, loss, grad_norm, known))

    def tell(self, alarm: fp8dist.LossAlarm) -> None:
        """Record an alarm of the loss guard. Local."""
        kind = "spike" if alarm.kind == "spike" else "nonfinite_loss"
        self._recorder.event(kind, alarm.step, loss=alarm.loss, median=alarm.median)

    def due(self, step: int) -> bool:
        """Return True if ``flush`` is due after this step, counted from 1."""
        options = self._options
        validates = options.eval_every and step % options.eval_every == 0
        # Flush before saving: a run that resumes from the checkpoint keeps these lines and cannot recompute them.
        saves = options.saves_at(step)
        return step % options.log_every == 0 or step == options.last_step or bool(validates) or saves

    def flush(self, validate: Callable[[], float] | None = None) -> None:
        """Give the steps since the last flush to the recorder. ``validate``: returns a validation loss for the last
        step's line; its time is not measured. COLLECTIVE."""
        own = torch.stack([step.loss for step in self._waiting])
        waits = self._waits.take(self._manager, len(own)).to(own.device)
        everyones = torch.stack(self._ranks.gather(torch.cat([own[None], waits]))).cpu()
        losses = mean_of(everyones[:, 0].unbind()).tolist()
        seconds = time.perf_counter() - self._start
        self.training_seconds += seconds
        self.final_losses.extend(losses)
        validation = {} if validate is None else {"validation_loss": validate()}
        if self._ranks.first:
            measured = everyones[:, 1:].double().numpy()
            self._write(losses, waits[2].tolist(), seconds, self.skew.add(measured), validation)
        self._waiting.clear()
        self._start = time.perf_counter()

    def save_own(self) -> None:
        """Write the steps since the last flush with this rank's loss only, if collectives are impossible. Local."""
        for step in self._waiting if self._ranks.first else ():
            self._recorder.log(step.number, loss_of_rank_0=step.loss, **step.known)
        self._waiting.clear()

    def _write(
        self,
        losses: list[float],
        times: list[float],
        seconds: float,
        waits: list[dict[str, Any]],
        validation: dict[str, float],
    ) -> None:
        count = len(losses)
        interval: dict[str, Any] = {"tokens_per_s": round(count * self.tokens_per_step / seconds, 1)}
        metrics = self._metrics()
        if metrics:
            before, self._sync_ms = self._sync_ms, metrics["fp8/sync_wait_ms"]
            interval["sync_ms"] = round((self._sync_ms - before) / count, 4)
            interval["cold_slots"] = int(metrics["fp8/cold_slots"])
            for name in ("nonfinite_amaxes", "high_precision_modules", "fallbacks"):
                interval[name] = int(metrics[f"fp8/{name}"])
        for step, loss, ms, waited in zip(self._waiting, losses, times, waits, strict=True):
            line = {**step.known, **interval, **waited, "step_ms": None if math.isnan(ms) else round(ms, 4)}
            if step is self._waiting[-1]:
                line.update(validation)
            self._recorder.log(step.number, loss=loss, grad_norm=step.grad_norm, **line)

    def _metrics(self) -> dict[str, float]:
        """Return the FP8 metrics on rank 0, else {}. Local; waits for the device."""
        return self._manager.metrics() if self._manager is not None and self._ranks.first else {}


def _losses(path: Path) -> Iterator[float]:
    with path.open(encoding="utf-8") as lines:
        for text in lines:
            line = json.loads(text)
            if "loss" in line:
                yield float(line["loss"])
