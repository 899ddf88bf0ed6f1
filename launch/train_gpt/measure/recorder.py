"""Progress bar, ``metrics.jsonl`` and training time of a run."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from fp8dist import StateManager
from fp8dist.monitoring.monitor import keep_lines
from launch.train_gpt.measure.skew import Skew
from launch.train_gpt.measure.waiting import Waiting
from launch.train_gpt.options.options import Options
from launch.train_gpt.ranks import Ranks, mean_of

__all__ = ["Recorder"]

FINAL_STEPS = 10
"""The final training loss is the mean over this many steps."""

PLAIN_LINES = 5
"""Number of progress lines of a run whose stderr is not a terminal."""


class Recorder:
    """Collects losses on the device and reads them every ``--log-every`` steps.

    ``flush`` makes one all_gather, of the losses and the waits of each rank since the last flush. Between flushes
    nothing is read from the device and nothing is communicated. Rates and FP8 metrics are means over that interval.
    """

    def __init__(
        self, options: Options, ranks: Ranks, manager: StateManager | None, waits: Waiting, done: int = 0
    ) -> None:
        """
        Args:
            waits: the measured waits of this rank.
            done: steps of the run that this one resumes from. Their lines stay, lines of later steps are dropped.
        """
        self.training_seconds = 0.0
        self.final_losses: deque[float] = deque(maxlen=FINAL_STEPS)
        self.skew = Skew(ranks.size)
        self._options, self._ranks, self._manager, self._waits = options, ranks, manager, waits
        self._waiting: list[tuple[int, float, Tensor]] = []  # step, learning rate, loss [] on the device
        self._file: TextIO | None = None
        if ranks.first:
            path = options.out / "metrics.jsonl"
            keep_lines(path, done, lambda line: "loss" in line)
            self._file = path.open("a", encoding="utf-8")
            self.final_losses.extend(_losses(path))
        disable = None if ranks.first else True
        self._bar = tqdm(total=options.last_step, initial=done, desc=options.precision, unit="step", disable=disable)
        self._sync_ms = self._metrics().get("fp8/sync_wait_ms", 0.0)
        self._start = time.perf_counter()

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all ranks and microbatches."""
        options = self._options
        return options.batch_size * options.context * options.accumulate * self._ranks.size

    def add(self, step: int, learning_rate: float, loss: Tensor) -> None:
        """Record a step. Local; does not wait for the device."""
        self._waiting.append((step, learning_rate, loss))
        self._bar.update()

    def due(self, step: int) -> bool:
        """Return True if ``flush`` is due after this step, counted from 1."""
        options = self._options
        validates = options.eval_every and step % options.eval_every == 0
        # Flush before saving: a run that resumes from the checkpoint keeps these lines and cannot recompute them.
        saves = options.saves_at(step)
        return step % options.log_every == 0 or step == options.last_step or bool(validates) or saves

    def flush(self, validate: Callable[[], float] | None = None) -> None:
        """Write the steps since the last flush. COLLECTIVE.

        Args:
            validate: returns a validation loss for the last step's line. Its time is not measured.
        """
        own = torch.stack([loss for _, _, loss in self._waiting])
        waits = self._waits.take(self._manager, len(own)).to(own.device)
        everyones = torch.stack(self._ranks.gather(torch.cat([own[None], waits]))).cpu()
        losses = mean_of(everyones[:, 0].unbind()).tolist()
        seconds = time.perf_counter() - self._start
        self.training_seconds += seconds
        self.final_losses.extend(losses)
        validation = {} if validate is None else {"validation_loss": validate()}
        if self._file is not None:
            self._write(self._file, losses, seconds, self.skew.add(everyones[:, 1:].double().numpy()), validation)
            self._report_progress(losses[-1])
        self._waiting.clear()
        self._start = time.perf_counter()

    def save_own(self) -> None:
        """Write the steps since the last flush with this rank's loss only, if collectives are impossible. Local."""
        if self._file is not None:
            for step, learning_rate, loss in self._waiting:
                line = {"step": step, "loss_of_rank_0": loss.item(), "learning_rate": learning_rate}
                self._file.write(json.dumps(line) + "\n")
            self._waiting.clear()

    def close(self) -> None:
        """Close the progress bar and the file."""
        self._bar.close()
        if self._file is not None:
            self._file.close()

    def _write(
        self,
        file: TextIO,
        losses: list[float],
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
        for (step, learning_rate, _), loss, waited in zip(self._waiting, losses, waits, strict=True):
            line = {"step": step, "loss": loss, "learning_rate": learning_rate, **interval, **waited}
            if step == self._waiting[-1][0]:
                line.update(validation)
            file.write(json.dumps(line) + "\n")
        file.flush()

    def _metrics(self) -> dict[str, float]:
        """Return the FP8 metrics on rank 0, else {}. Local; waits for the device."""
        return self._manager.metrics() if self._manager is not None and self._ranks.first else {}

    def _report_progress(self, loss: float) -> None:
        self._bar.set_postfix(loss=f"{loss:.3f}")
        done, steps = self._waiting[-1][0], self._options.last_step
        before = done - len(self._waiting)
        if self._bar.disable and done * PLAIN_LINES // steps > before * PLAIN_LINES // steps:
            print(f"{self._options.precision}: step {done} of {steps}, loss {loss:.3f}", file=sys.stderr, flush=True)


def _losses(path: Path) -> Iterator[float]:
    with path.open(encoding="utf-8") as lines:
        for text in lines:
            yield json.loads(text)["loss"]
