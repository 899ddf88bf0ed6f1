"""The errors that fp8dist raises.

Exception
└── Fp8DistError
    ├── ConfigurationError      (also a ValueError) the arguments or the set-up are invalid
    │   ├── UnknownArgumentError    (also a TypeError) the call has no such argument
    │   └── NotAModelError          (also an AttributeError) the manager was used as the model
    ├── ManifestMismatchError   ranks that must share FP8 state were prepared differently
    ├── DivergenceError         FP8 state differs between ranks; carries the report
    ├── LossDiverged            a loss guard with action "stop" saw a spike or a non-finite loss
    ├── SyncError               (also a RuntimeError) a sync failed: timeout, or a rank is gone
    └── CheckpointError         a state file or state dict cannot be used
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fp8dist.common.divergence import Divergence

__all__ = [
    "AlarmKind",
    "CheckpointError",
    "ConfigurationError",
    "DivergenceError",
    "Fp8DistError",
    "LossAlarm",
    "LossDiverged",
    "ManifestMismatchError",
    "NotAModelError",
    "SyncError",
    "UnknownArgumentError",
]


AlarmKind = Literal["spike", "nonfinite"]


class Fp8DistError(Exception):
    """Base of all errors raised by this library."""


class ConfigurationError(Fp8DistError, ValueError):
    """Invalid arguments or an invalid set-up. The message says what to do instead."""


class UnknownArgumentError(ConfigurationError, TypeError):
    """An unknown keyword argument. The message suggests the right one. It is a TypeError, as in plain Python."""


class NotAModelError(ConfigurationError, AttributeError):
    """The manager that ``prepare`` returned was used as the model. It is an AttributeError, so ``hasattr`` is False."""


class ManifestMismatchError(Fp8DistError):
    """Ranks of one group were prepared differently (model, recipe or settings).

    Every rank of the group raises it with the same text, which names the ranks, and the first slot or setting that
    differs.
    """


class DivergenceError(Fp8DistError):
    """FP8 state, or other compared data, differs between ranks that must hold the same.

    Raised on every rank of the group at the same point of the program. The message names the first differences.
    ``report`` has all of them, and one rank has logged it as a table.
    """

    def __init__(self, report: Divergence) -> None:
        super().__init__(report.summary())
        self.report = report

    def __reduce__(self) -> tuple[type[DivergenceError], tuple[Divergence]]:
        return type(self), (self.report,)


@dataclass(frozen=True)
class LossAlarm:
    """A loss that triggered a loss guard (``fp8dist.LossGuard``).

    ``median``: the running median of earlier losses; None: there were too few. ``kind``: "spike" or "nonfinite".
    ``streak``: number of consecutive alarms of this kind, including this one.
    """

    step: int
    loss: float
    median: float | None
    kind: AlarmKind
    streak: int = 1

    def __str__(self) -> str:
        usual = "" if self.median is None else f", the running median is {self.median:.6g}"
        what = "is a spike" if self.kind == "spike" else "is not finite"
        return f"step {self.step}: the loss {self.loss:.6g} {what}{usual}"


class LossDiverged(Fp8DistError):
    """The loss jumped far above its running median, or is not finite. ``alarm`` has the numbers.

    Raised on all ranks at the same step.
    """

    def __init__(self, alarm: LossAlarm) -> None:
        super().__init__(str(alarm))
        self.alarm = alarm

    def __reduce__(self) -> tuple[type[LossDiverged], tuple[LossAlarm]]:
        return type(self), (self.alarm,)


class SyncError(Fp8DistError, RuntimeError):
    """The collective of a step or of a check failed or timed out.

    The message names the manager, the step, the ranks that took part, and the missing ranks as far as the job's store
    knows them. ``__cause__`` is the error of the communication library. The process group can no longer be used.
    """


class CheckpointError(Fp8DistError):
    """A state file or state dict is unreadable, damaged, or does not fit this model."""
