"""What a manager is doing now: one object, which its modules, syncs, hooks and checker share.

``Tie`` and ``Activity`` together are the phase that a manager is in. ``step/order.py`` says which calls fit which.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.algorithms.join import JoinHook, _JoinConfig

from fp8dist.modules.outgrown import Growth

__all__ = ["Activity", "JobState", "Tie"]


class Tie(enum.Enum):
    """How a manager is tied to its job. The values end a sentence: "a step before attach()"."""

    PREPARED = "before attach()"
    ATTACHED = "after attach()"
    DETACHED = "after detach()"
    RESTORED = "after restore()"


class Activity(enum.Enum):
    """What is under way, beside plain training. Several may be at once."""

    IN_STEP = "between a backward and the optimizer's step"
    CALIBRATING = "inside calibrate()"
    JOINED = "inside a Join context"
    CAPTURING = "while a CUDA graph is captured"


@dataclass
class JobState:
    """Of one manager. What changes in one place only is set there; what has rules is set by a method.

    Args:
        enabled: False: FP8 is switched off for good.
        gathers: FSDP2 gathers weights in FP8.
        shared: several ranks are to share the FP8 state.
    """

    enabled: bool
    backend: str
    eval_precision: str
    gathers: bool = False
    shared: bool = False

    # The job: a copy has none of it.
    tie: Tie = Tie.PREPARED
    by_optimizer: bool = False
    """An attached optimizer's step is the boundary."""
    scaled: bool = False
    """A loss scaler is at work: non-finite amaxes of the steps that it skips are dropped."""
    launches_early: bool = False
    """A communication hook launches syncs."""
    calibrating: bool = False
    join_config: _JoinConfig = field(default_factory=_JoinConfig.construct_disabled_join_config)
    join_hook: weakref.ref[JoinHook] | None = None
    """What the Join context holds: one that ends by an exception calls nobody."""
    compiled: bool = False
    """torch.compile has begun to trace something."""
    captured: bool = False
    """A step was captured into a CUDA graph."""
    graphed: bool = False
    """A forward was captured into a CUDA graph."""
    measuring: bool = False
    """A watch wants to know what the casts of this step do."""
    stepping: bool = False
    """An optimizer's step is under way."""
    said_unbounded: bool = False
    """Steps without a boundary were warned of."""
    said_unsynced: bool = False
    """Steps without attach() were warned of."""

    # Contexts of the user.
    in_fp8: bool = True
    """False inside ``no_fp8()``."""
    recording: bool = False
    """Inside ``recording()``: amaxes are recorded whatever the mode of the modules."""

    boundaries: int = 0
    """Passed so far, as the host counts."""

    # Casts of weights.
    reuse_casts: bool = False
    """Somebody tells when weights change, so that a cast may serve several microbatches."""
    generation: int = 0
    """Counts everything after which a weight's cast must not be reused."""
    growth: Growth | None = None
    """Of weights that were written to."""

    def __getstate__(self) -> dict[str, Any]:
        kept = ("enabled", "backend", "eval_precision", "gathers", "shared", "in_fp8", "recording", "boundaries")
        fresh = JobState(*(getattr(self, name) for name in kept[:5]))
        fresh.said_unsynced = self.attached or self.said_unsynced  # Else a copied part of a model would warn.
        return {**fresh.__dict__, **{name: getattr(self, name) for name in kept}, "generation": self.generation}

    @property
    def attached(self) -> bool:
        """Whether the manager is tied to a job."""
        return self.tie is Tie.ATTACHED

    @property
    def untied(self) -> bool:
        """Whether hooks that could not be taken off must do nothing."""
        return self.tie in (Tie.DETACHED, Tie.RESTORED)

    @property
    def joined(self) -> bool:
        """Whether a Join context is open."""
        return bool(self.join_config.enable) and self.join_hook is not None and self.join_hook() is not None

    @property
    def awaits_attach(self) -> bool:
        """Whether no forward may come before ``attach``: FSDP would gather weights in high precision, and keep its
        buffers for them."""
        return self.gathers and self.tie is Tie.PREPARED

    @property
    def unsynced(self) -> bool:
        """Whether ranks that are to share state do not, and nobody was told of it."""
        return self.shared and not self.attached and not self.said_unsynced

    def attach(self, by_optimizer: bool, scaled: bool, reuse_casts: bool) -> None:
        """PREPARED, ATTACHED or DETACHED → ATTACHED."""
        assert self.tie is not Tie.RESTORED
        self.tie, self.by_optimizer, self.scaled = Tie.ATTACHED, by_optimizer, scaled
        self.reuse_casts = reuse_casts

    def release(self) -> None:
        """All hooks are off: nobody tells of steps and of changed weights. The tie stays."""
        self.by_optimizer = self.reuse_casts = False

    def detach(self) -> None:
        """ATTACHED → DETACHED; a manager that was never attached stays PREPARED."""
        if self.attached:
            self.tie = Tie.DETACHED
        self.release()
        self.scaled = self.launches_early = self.measuring = self.said_unsynced = False

    def restore(self) -> None:
        """PREPARED, ATTACHED or DETACHED → RESTORED, for good."""
        self.detach()
        self.tie = Tie.RESTORED

    @contextlib.contextmanager
    def switched(self, in_fp8: bool | None = None, recording: bool | None = None) -> Iterator[None]:
        """Change these inside. None: leave it."""
        before = self.in_fp8, self.recording
        self.in_fp8 = before[0] if in_fp8 is None else in_fp8
        self.recording = before[1] if recording is None else recording
        try:
            yield
        finally:
            self.in_fp8 = self.in_fp8 if in_fp8 is None else before[0]
            self.recording = self.recording if recording is None else before[1]

    def leave_join(self) -> None:
        """The Join context ends."""
        self.join_config = _JoinConfig.construct_disabled_join_config()

    def invalidate_casts(self) -> None:
        """Weights may have changed: forget their casts."""
        self.generation += 1
