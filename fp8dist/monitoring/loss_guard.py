"""The loss guard: sees a loss that jumps or is not finite, on all ranks at the same step, and acts."""

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

from fp8dist.errors import AlarmKind, CheckpointError, ConfigurationError, LossAlarm, LossDiverged
from fp8dist.monitoring.guarded_steps import GuardedSteps
from fp8dist.names import is_number, require_int
from fp8dist.sync.groups import GroupLike, SyncGroup, is_dtensor, world_size

__all__ = ["LossGuard"]

logger = logging.getLogger("fp8dist")

_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation (Rousseeuw and Croux, "Alternatives to
the Median Absolute Deviation", JASA 88, 1993)."""


class LossGuard:
    """Watches the loss of each step.

    A loss is a spike if it lies above the running median of the last good losses by more than both

    - ``factor - 1`` times the median's magnitude: for a positive loss, more than ``factor`` times the median. A
      language model's loss rarely doubles; 1.3 is stricter;
    - ``noise`` standard deviations of those losses, estimated from their median absolute deviation. Near zero, where a
      loss soon doubles, this is what keeps usual noise from being called a spike. It makes sense for any sign.

    Spikes and non-finite losses do not enter the window. But ``min_history`` spikes in a row are a new level: they
    replace the window, and there are no more alarms until the loss rises above them.

    The action is taken once for alarms of one kind in a row, at the first, so that a spike that lasts for twenty steps
    lowers the learning rate once; ``"stop"`` and ``"skip"`` act each time. Every alarm is returned and counted.

    ``"skip"`` leaves out the update of each step with an alarm, on all ranks: parameters and the optimizer's state
    stay as they are, bit for bit. The loop still calls ``optimizer.step()``, or ``scaler.step(optimizer)`` with a
    GradScaler: the update then finds no gradients, and afterwards they are back for ``zero_grad``. So hooks run and the
    FP8 step ends there as usual. The amaxes that it recorded are committed: finite ones are valid however large, and
    others are never taken into a history. A learning rate scheduler goes on.

    An optimizer must leave parameters without a gradient alone, as those of torch do. A step that is part of a CUDA
    graph is not skipped, and ``optimizer.step(closure)`` is an error.

    Args:
        action: ``"warn"``: one rank logs a warning. ``"stop"``: LossDiverged on all ranks. ``"skip"``: see above, and
            one rank logs it. ``"fallback"``: all of the model goes to high precision for ``steps`` steps, and one rank
            logs it. Or a callable, called with the LossAlarm on all ranks, and one rank logs it.
        window: how many good losses the median is of.
        factor: see above; at least 1. With 1, only ``noise`` counts.
        noise: see above; at least 0. With 0, only ``factor`` counts.
        min_history: how many good losses there must be before a spike is seen; at most ``window``. Non-finite losses
            are seen from the first.
        mean_over: the ranks whose local losses are averaged. None: the losses are reduced already, and all ranks have
            the same.
        manager: for ``"fallback"``: what ``prepare`` returned.
        steps: for ``"fallback"``: how many steps after this one.
        optimizer: one or several, for ``"skip"``. With any action, an ``observe`` that comes after the step is noticed
            then. The guard keeps no optimizer alive, and belongs to these: make a new guard for a new optimizer. It
            cannot be copied or pickled.

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
            raise ConfigurationError('action="skip" needs optimizer=, one or several: whose updates are skipped')
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
        self._told_late = False

    def observe(self, loss: float | Tensor, step: int | None = None) -> LossAlarm | None:
        """Judge the loss of a step; the alarm, if it is one. COLLECTIVE with ``mean_over=``, else local.

        Once per optimizer step on all ranks, between backward and the optimizer's step: then a lower learning rate
        holds for this update, and a run that stops or skips has not made it. Before backward will do as well. Reads the
        loss from the device, so it waits for it.

        With ``optimizer=``, a call after the step is noticed: the optimizer has stepped since the last call, and no
        gradient was written since. It is not noticed where gradients were set to zero meanwhile in place.

        Args:
            loss: a number, or a tensor of one element: the mean over this rank's tokens, or with ``mean_over=None``
                over all ranks'.
            step: what the alarm calls it. None: one more than the last.

        Raises:
            LossDiverged: on all ranks, with action "stop".
            ConfigurationError: ``loss`` is something else; with action "skip", on all ranks: the call came after the
                step, or an optimizer no longer exists.
        """
        value, late = self._reduced(loss)
        self._require_order(late)
        self._step = self._step + 1 if step is None else step
        alarm = self._judge(value)
        if self._guarded is not None:
            self._guarded.drop(self._action == "skip" and alarm is not None)
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
        """What a resumed run needs to decide as this one would, as JSON values. Local, the same on all ranks."""
        return {
            "step": self._step,
            "alarms": self.alarms,
            "losses": list(self._losses),
            "spikes": list(self._spikes),
            "streak": None if self._streak is None else list(self._streak),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``. Of a longer window, the newest losses. Local: do it on all ranks alike.

        Raises:
            CheckpointError: it is none; nothing has changed.
        """
        try:
            step, alarms, streak = int(state["step"]), int(state["alarms"]), state["streak"]
            losses, spikes = ([float(loss) for loss in state[name]] for name in ("losses", "spikes"))
            if streak is not None:
                streak = streak[0], int(streak[1])
                if streak[0] not in get_args(AlarmKind):
                    raise ValueError(f"there is no alarm of kind {streak[0]!r}")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CheckpointError(f"this is no state of a LossGuard: {type(error).__name__}: {error}") from None
        if not all(map(math.isfinite, losses + spikes)):
            raise CheckpointError("this is no state of a LossGuard: it holds a loss that is not finite")
        self._step, self.alarms, self._streak = step, alarms, streak
        self._begin_anew(losses)
        self._spikes = spikes

    def __getstate__(self) -> dict[str, Any]:
        if self._guarded is not None:
            raise ConfigurationError(
                "a LossGuard with optimizer= cannot be copied or pickled, because its hooks belong to that optimizer: "
                "save its state_dict()"
            )
        return self.__dict__

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
        if not late or self._told_late:
            return
        message = (
            "observe() came after optimizer.step(): the update with this loss's gradients is made already. Call it "
            "between loss.backward() and optimizer.step()"
        )
        if skips:
            raise ConfigurationError(f"LossGuard: {message}")
        self._told_late = True
        self._warn(f"LossGuard: {message}")

    def _reduced(self, loss: float | Tensor) -> tuple[float, bool]:
        """The mean loss, and whether it is late on all ranks: one that had no gradients cannot tell."""
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
        if self._group is None or self._group.size == 1:
            return float(local), late
        # [sum of losses], and with optimizers […, number of ranks where it is late]: one read for both.
        lanes = 1 if self._guarded is None else 2
        total = torch.full((lanes,), float(late), dtype=torch.float64, device=self._group.device)
        total[0] = local.reshape(())
        dist.all_reduce(total, dist.ReduceOp.SUM, group=self._group.process_group)
        summed, *lates = total.tolist()
        return summed / self._group.size, lates == [self._group.size]

    def _judge(self, loss: float) -> LossAlarm | None:
        """The alarm, or None and the loss is in the window."""
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
            self._manager.set_precision("*", "high", steps=self._steps + 1)  # This step is still to end.
        else:
            self._warn(f"{alarm}; this step's update is skipped" if self._action == "skip" else str(alarm))

    def _warn(self, message: str) -> None:
        rank = dist.get_rank() if world_size() > 1 else 0
        if rank == (0 if self._group is None else min(self._group.ranks)):
            logger.warning("fp8dist: %s", message)
