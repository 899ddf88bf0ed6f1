"""LossGuard: detects loss spikes and non-finite losses, on all ranks at the same step, and acts on them."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from statistics import median
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.common.names import is_number, require_int
from fp8dist.errors import AlarmKind, CheckpointError, ConfigurationError, LossAlarm, LossDiverged
from fp8dist.runs.guarded_steps import GuardedSteps
from fp8dist.state.groups import GroupLike, SyncGroup, is_dtensor, world_size

logger = logging.getLogger("fp8dist")

_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation (Rousseeuw and Croux, "Alternatives to
the Median Absolute Deviation", JASA 88, 1993)."""


class LossGuard:
    """Detects loss spikes and non-finite losses, and acts on them on all ranks at the same step.

    A loss is a spike if it exceeds the running median of the last good losses by more than both

    - ``factor - 1`` times the median's magnitude: for a positive loss, more than ``factor`` times the median. A
      language model's loss rarely doubles; 1.3 is stricter;
    - ``noise`` standard deviations of those losses, estimated from their median absolute deviation. Near zero, where a
      loss easily doubles, this keeps ordinary noise from counting as a spike. It works for losses of any sign.

    Spikes and non-finite losses do not enter the window. But ``min_history`` spikes in a row count as a new level: they
    replace the window, and alarms stop until the loss rises above that level.

    For consecutive alarms of one kind, the action runs once, at the first alarm, so that a spike of twenty steps lowers
    the learning rate once. ``"stop"`` and ``"skip"`` act at every alarm. Every alarm is returned and counted.

    ``"skip"`` leaves out the update of each step with an alarm, on all ranks: parameters and optimizer state stay
    bit-identical. Call ``optimizer.step()``, or ``scaler.step(optimizer)`` with a GradScaler, as usual: the update
    finds no gradients, and they are restored afterwards for ``zero_grad``. Hooks run, and the FP8 step ends there as
    usual. Its amaxes are committed: finite ones are valid however large, and non-finite ones never enter a history. A
    learning rate scheduler continues.

    The optimizer must leave parameters without a gradient unchanged, as torch's optimizers do. A step inside a CUDA
    graph is not skipped, and ``optimizer.step(closure)`` raises ConfigurationError.

    Args:
        action: ``"warn"``: one rank logs a warning. ``"stop"``: raise LossDiverged on all ranks. ``"skip"``: see above;
            one rank logs it. ``"fallback"``: the whole model runs in high precision for ``steps`` steps; one rank logs
            it. Or a callable, called with the LossAlarm on all ranks; one rank logs it.
        window: number of good losses that the median is taken over.
        factor: see above; at least 1. With 1, only ``noise`` counts.
        noise: see above; at least 0. With 0, only ``factor`` counts.
        min_history: number of good losses required before spikes are detected; at most ``window``. Non-finite losses
            are detected from the start.
        mean_over: the ranks whose local losses are averaged. None: the loss is already reduced, and the same on all
            ranks.
        manager: for ``"fallback"``: the StateManager that ``prepare`` returned.
        steps: for ``"fallback"``: number of steps after this one.
        optimizer: one or several, for ``"skip"``. With any action, it lets the guard detect an ``observe`` after the
            step. The guard keeps no optimizer alive, and works with these only: make a new guard for a new optimizer.
            Such a guard cannot be copied or pickled.

    Raises:
        ConfigurationError: an argument has a wrong type or value.
    """

    def __init__(
        self,
        action: Literal["warn", "stop", "skip", "fallback"] | Callable[[LossAlarm], object] = "warn",
        window: int = 100,
        factor: float = 2.0,
        min_history: int = 10,
        mean_over: GroupLike | None = None,
        manager: Any = None,
        steps: int = 100,
        noise: float = 6.0,
        optimizer: Any = None,
    ) -> None:
        if not callable(action) and action not in ("warn", "stop", "skip", "fallback"):
            raise ConfigurationError(f'action must be "warn", "stop", "skip", "fallback" or a callable, got {action!r}')
        if action == "skip" and optimizer is None:
            raise ConfigurationError('action="skip" needs optimizer=, the optimizer(s) whose updates are skipped')
        if action == "fallback" and manager is None:
            raise ConfigurationError('action="fallback" needs manager=, the StateManager that prepare() returned')
        for name, count in (("window", window), ("min_history", min_history), ("steps", steps)):
            require_int(name, count, 1)
        if min_history > window:
            raise ConfigurationError(f"min_history must be at most window ({window}), got {min_history}")
        for name, value, least in (("factor", factor, 1), ("noise", noise, 0)):
            if not (is_number(value) and least <= value < math.inf):
                raise ConfigurationError(f"{name} must be a finite number from {least}, got {value!r}")
        self.alarms = 0
        self._action, self._manager, self._steps = action, manager, steps
        self._factor, self._noise, self._min_history = float(factor), float(noise), min_history
        self._group = None if mean_over is None else SyncGroup(mean_over)
        self._losses: deque[float] = deque(maxlen=window)
        self._spikes: list[float] = []  # Since the last good loss.
        self._streak: tuple[AlarmKind, int] | None = None
        self._step = 0
        self._guarded = None if optimizer is None else GuardedSteps(optimizer, drops=action == "skip")
        self._warned_late = False
        self._listeners: list[Callable[[LossAlarm | None], None]] = []

    def on_observe(self, callback: Callable[[LossAlarm | None], None]) -> None:
        """Register a function that each ``observe`` calls with its alarm, or None, before it acts. Local."""
        if not callable(callback):
            raise ConfigurationError(f"callback must be a function of a LossAlarm or None, got {callback!r}")
        self._listeners.append(callback)

    @property
    def stops(self) -> bool:
        """True if an alarm ends the run."""
        return self._action == "stop"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks whose losses ``observe`` averages, which so get the same alarms; empty: not known."""
        return () if self._group is None else tuple(self._group.ranks)

    def observe(self, loss: float | Tensor, step: int | None = None) -> LossAlarm | None:
        """Check the loss of a step. Return the alarm, or None. COLLECTIVE with ``mean_over=``, else local.

        Call it once per optimizer step on all ranks, between backward and the optimizer's step: then a lower learning
        rate applies to this update, and a run that stops or skips has not made the update. A call before backward
        works, too. Waits for the device, because it reads the loss.

        With ``optimizer=``, a call after the step is detected: the optimizer has stepped since the last call, and no
        gradient was written since. It is not detected if gradients were set to zero in place in between.

        Args:
            loss: a number, or a tensor of one element: the mean over this rank's tokens, or with ``mean_over=None``
                over all ranks' tokens.
            step: the step number in the alarm. None: one more than the last.

        Raises:
            LossDiverged: on all ranks, with action "stop".
            ConfigurationError: ``loss`` is neither. With action "skip", on all ranks: the call came after the step, or
                an optimizer no longer exists.
        """
        value, late = self._reduced(loss)
        self._require_order(late)
        self._step = self._step + 1 if step is None else step
        alarm = self._judge(value)
        if self._guarded is not None:
            self._guarded.drop(self._action == "skip" and alarm is not None)
        for listener in self._listeners:
            listener(alarm)
        if alarm is None:
            self._streak = None
            return None
        self.alarms += 1
        self._streak = (alarm.kind, alarm.streak)
        if alarm.kind == "spike":
            self._spikes.append(alarm.loss)
            if len(self._spikes) >= self._min_history:
                self._begin_anew(self._spikes)
                self._streak = None
        self._act(alarm)
        return alarm

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to decide alike, as JSON values. Local, the same on all ranks."""
        return {
            "step": self._step,
            "alarms": self.alarms,
            "losses": list(self._losses),
            "spikes": list(self._spikes),
            "streak": None if self._streak is None else list(self._streak),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ``state_dict``. Of a longer window, keep the newest losses. Local: call it on all ranks alike.

        Raises:
            CheckpointError: ``state`` is not the state of a LossGuard. Nothing was changed.
        """
        try:
            step, alarms, streak = int(state["step"]), int(state["alarms"]), state["streak"]
            losses, spikes = ([float(loss) for loss in state[name]] for name in ("losses", "spikes"))
            if streak is not None:
                streak = streak[0], int(streak[1])
                if streak[0] not in get_args(AlarmKind):
                    raise ValueError(f"there is no alarm of kind {streak[0]!r}")
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"this is not the state of a LossGuard: {type(error).__name__}: {error}") from None
        if not all(map(math.isfinite, losses + spikes)):
            raise CheckpointError("this is not the state of a LossGuard: it holds a loss that is not finite")
        self._step, self.alarms, self._streak = step, alarms, streak
        self._begin_anew(losses)
        self._spikes = spikes

    def __getstate__(self) -> dict[str, Any]:
        if self._guarded is not None:
            raise ConfigurationError(
                "a LossGuard with optimizer= cannot be copied or pickled, because its hooks belong to that optimizer: "
                "save its state_dict()"
            )
        return {**self.__dict__, "_listeners": []}  # They belong to the run.

    def _begin_anew(self, losses: Iterable[float]) -> None:
        self._losses.clear()
        self._losses.extend(losses)
        self._spikes = []

    def _require_order(self, late: bool) -> None:
        skips = self._action == "skip"
        if skips and self._guarded is not None and self._guarded.gone:
            raise ConfigurationError(
                "LossGuard cannot skip the updates of an optimizer that no longer exists: make a new guard with the "
                "new optimizer=, and load this one's state_dict()"
            )
        if not late or self._warned_late:
            return
        message = (
            "observe() came after optimizer.step(): the update with this loss's gradients is made already. Call it "
            "between loss.backward() and optimizer.step()"
        )
        if skips:
            raise ConfigurationError(f"LossGuard: {message}")
        self._warned_late = True
        self._warn(f"LossGuard: {message}")

    def _reduced(self, loss: float | Tensor) -> tuple[float, bool]:
        """Return (mean loss, True if it is late on all ranks). A rank that had no gradients cannot decide alone."""
        if isinstance(loss, Tensor):
            if is_dtensor(loss):
                raise ConfigurationError("the loss is a DTensor: observe loss.full_tensor()")
            if loss.numel() != 1 or loss.is_complex():
                raise ConfigurationError(f"the loss must be one number, got a tensor {loss.dtype} {tuple(loss.shape)}")
            local = loss.detach()
        elif isinstance(loss, Real) and not isinstance(loss, bool):
            local = torch.tensor(float(loss), dtype=torch.float64)
        else:
            raise ConfigurationError(f"the loss must be a number or a tensor, got {type(loss).__name__}")
        late = self._guarded is not None and self._guarded.late(loss)
        if self._group is None or not self._group.communicates:
            return float(local), late
        # [sum of losses, with optimizers also the number of ranks where it is late]: one device read for both.
        lanes = 1 if self._guarded is None else 2
        total = torch.full((lanes,), float(late), dtype=torch.float64, device=self._group.device)
        total[0] = local.reshape(())
        dist.all_reduce(total, dist.ReduceOp.SUM, group=self._group.process_group)
        summed, *lates = total.tolist()
        return summed / self._group.size, lates == [self._group.size]

    def _judge(self, loss: float) -> LossAlarm | None:
        """Return the alarm; or add the loss to the window and return None."""
        usual = median(self._losses) if len(self._losses) >= self._min_history else None
        if not math.isfinite(loss):
            return self._alarm(loss, usual, "nonfinite")
        if usual is not None:
            deviation = _NORMAL * median(abs(past - usual) for past in self._losses)
            if loss - usual > max((self._factor - 1) * abs(usual), self._noise * deviation):
                return self._alarm(loss, usual, "spike")
        self._losses.append(loss)
        self._spikes = []
        return None

    def _alarm(self, loss: float, usual: float | None, kind: AlarmKind) -> LossAlarm:
        before = self._streak[1] if self._streak is not None and self._streak[0] == kind else 0
        return LossAlarm(self._step, loss, usual, kind, before + 1)

    def _act(self, alarm: LossAlarm) -> None:
        if self._action == "stop":
            raise LossDiverged(alarm)
        if alarm.streak > 1:
            return
        if callable(self._action):
            self._warn(f"{alarm}; {getattr(self._action, '__qualname__', type(self._action).__name__)} is called")
            self._action(alarm)
        elif self._action == "fallback":
            assert self._manager is not None
            self._warn(f"{alarm}; {self._steps} steps follow in high precision")
            self._manager.set_precision("*", "high", steps=self._steps + 1)  # Plus this step, which has not ended.
        else:
            self._warn(f"{alarm}; this step's update is skipped" if self._action == "skip" else str(alarm))

    def _warn(self, message: str) -> None:
        rank = dist.get_rank() if world_size() > 1 else 0
        if rank == (0 if self._group is None else min(self._group.ranks)):
            logger.warning("fp8dist: %s", message)
