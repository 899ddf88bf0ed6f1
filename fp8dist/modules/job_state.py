"""JobState: the current state of one manager. Its modules, syncs, hooks and checker share it.

``Tie`` and ``Activity`` together are a manager's phase. ``job/order.py`` lists the calls that each phase refuses.

A *boundary* is the end of a training step of the FP8 state: amaxes are synchronised and scales change there.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook, _JoinConfig

from fp8dist.modules.outgrown import Growth
from fp8dist.modules.weight_notes import WeightNote
from fp8dist.state.microbatches import Microbatches
from fp8dist.state.received import Received


class Tie(enum.Enum):
    """Whether a manager is attached to a training job. Error messages contain the values: "a step before attach()"."""

    PREPARED = "before attach()"
    ATTACHED = "after attach()"
    DETACHED = "after detach()"
    RESTORED = "after restore()"


class Activity(enum.Enum):
    """Activities besides plain training. Several can be in progress at once."""

    IN_STEP = "between a backward and the optimizer's step"
    CALIBRATING = "inside calibrate()"
    JOINED = "inside a Join context"
    CAPTURING = "while a CUDA graph is captured"
    REPLAYING = "inside replay()"


@dataclass
class JobState:
    """The current state of one manager. Fields that must change together are set by methods, others directly.

    Args:
        enabled: False if FP8 is switched off permanently.
        backend: name of the kernels' backend, as ``fp8dist_kernels`` takes it.
        eval_precision: ``"fp8"`` if modules in eval mode compute in FP8; otherwise they do not.
        gathers: True if FSDP2 gathers weights in FP8.
        shared: True if several ranks are meant to share the FP8 state.
    """

    enabled: bool
    backend: str
    eval_precision: str
    gathers: bool = False
    shared: bool = False

    # Job-specific state. Not copied or pickled.
    tie: Tie = Tie.PREPARED
    by_optimizer: bool = False
    """True if an attached optimizer's step is the boundary."""
    scaled: bool = False
    """True if a loss scaler is in use: non-finite amaxes of steps that it skips are dropped."""
    received: dict[tuple[int, ...], Received] = field(default_factory=dict)
    """Digests of the gradients that came in FP8, by DDP's ranks."""
    launches_early: bool = False
    """True if a DDP communication hook launches syncs, before the optimizer's step."""
    calibrating: bool = False
    replaying: bool = False
    join_config: _JoinConfig = field(default_factory=_JoinConfig.construct_disabled_join_config)
    join_hook: weakref.ref[JoinHook] | None = None
    """The hook of the open Join context. A weak reference, because a context that ends with an exception does not call
    the hook, but drops it."""
    compiled: bool = False
    """True once torch.compile has begun to trace."""
    captured: bool = False
    """True once a step was captured into a CUDA graph."""
    graphed: bool = False
    """True once a forward was captured into a CUDA graph."""
    measuring: bool = False
    """True if a watch collects statistics of this step's casts."""
    microbatches: Microbatches | None = None
    """Counts the microbatches of this step if it is measured."""
    tap: Tensor | None = None
    """Buffer in which casts and products record what they compute; see ``fp8dist_kernels.taps``. None: no tap."""
    step: int = 0
    """Number of training steps that have ended, with those before the checkpoint that the run resumed from."""
    called: weakref.ref[nn.Module] | None = None
    """The model as the training loop calls it, such as the DDP wrapper: shows how parameters are replicated."""
    began: int = 0
    """Value of ``step`` at the last ``attach`` or load."""
    stepping: bool = False
    """True while an optimizer's step runs."""
    warned_unbounded: bool = False
    """True once the warning about steps without a boundary was logged."""
    warned_unsynced: bool = False
    """True once the warning about steps without attach() was logged."""

    # Set by contexts that the user enters.
    in_fp8: bool = True
    """False inside ``no_fp8()``."""
    recording: bool = False
    """True inside ``recording()``: amaxes are recorded in training and eval mode."""

    data_rank: int = 0
    """Number of this rank among those with other data: random roundings differ by it."""
    boundaries: int = 0
    """Number of boundaries passed so far, as counted on the host."""
    unrecorded_at: int = -2
    """The largest ``WeightNote.unrecorded_at`` of the model."""

    # Casts of weights.
    reuse_casts: bool = False
    """True if hooks report weight changes, so that several microbatches may share a cast."""
    generation: int = 0
    """Incremented by every event after which cached weight casts must not be reused."""
    listeners: tuple[Callable[[], Any], ...] = ()
    """Called after the precision of a module has changed, outside of compiled code."""
    loads: dict[WeightNote, Tensor] = field(default_factory=dict)
    """Samples of weights, taken just before other values were loaded into them. Of the first weights loaded since the
    last step of an attached optimizer."""
    growth: Growth | None = None
    """Whether written weights have outgrown their scales since the last boundary. None: no report."""
    eval_growth: Growth | None = None
    """The same as eval forwards found it. Kept apart, so that an evaluation does not change training."""

    def __getstate__(self) -> dict[str, Any]:
        kept = ("enabled", "backend", "eval_precision", "gathers", "shared", "boundaries", "generation")
        fresh = JobState(*(getattr(self, name) for name in kept[:5]))
        fresh.warned_unsynced = self.attached or self.warned_unsynced  # Otherwise a copied part of a model would warn.
        return {**fresh.__dict__, **{name: getattr(self, name) for name in kept}}

    @property
    def whole(self) -> nn.Module | None:
        """The module of ``called``, if it still exists."""
        return None if self.called is None else self.called()

    @property
    def attached(self) -> bool:
        """True if the manager is attached to a job."""
        return self.tie is Tie.ATTACHED

    @property
    def untied(self) -> bool:
        """True if hooks that could not be removed must do nothing."""
        return self.tie in (Tie.DETACHED, Tie.RESTORED)

    @property
    def joined(self) -> bool:
        """True while a Join context is open."""
        return bool(self.join_config.enable) and self.join_hook is not None and self.join_hook() is not None

    @property
    def awaits_attach(self) -> bool:
        """True if a forward must wait for ``attach``. FSDP allocates its gather buffers at the first forward: before
        ``attach`` they would be in high precision, and stay so."""
        return self.gathers and self.tie is Tie.PREPARED

    @property
    def unsynced(self) -> bool:
        """True if ranks should share FP8 state, but ``attach`` is missing and no warning was logged yet."""
        return self.shared and not self.attached and not self.warned_unsynced

    def attach(self, by_optimizer: bool, scaled: bool, reuse_casts: bool) -> None:
        """PREPARED, ATTACHED or DETACHED → ATTACHED."""
        assert self.tie is not Tie.RESTORED
        self.tie, self.by_optimizer, self.scaled = Tie.ATTACHED, by_optimizer, scaled
        self.reuse_casts = reuse_casts

    def release(self) -> None:
        """Record that all hooks were removed: nothing reports steps and weight changes any more. ``tie`` stays."""
        self.by_optimizer = self.reuse_casts = False

    def detach(self) -> None:
        """ATTACHED → DETACHED; a manager that was never attached stays PREPARED."""
        if self.attached:
            self.tie = Tie.DETACHED
        self.release()
        self.scaled = self.launches_early = self.measuring = self.warned_unsynced = False
        self.microbatches = self.tap = None

    def restore(self) -> None:
        """PREPARED, ATTACHED or DETACHED → RESTORED, permanently."""
        self.detach()
        self.tie = Tie.RESTORED

    @contextlib.contextmanager
    def switched(self, in_fp8: bool | None = None, recording: bool | None = None) -> Iterator[None]:
        """Set these fields inside the context. None: leave the field as it is."""
        before = self.in_fp8, self.recording
        self.in_fp8 = before[0] if in_fp8 is None else in_fp8
        self.recording = before[1] if recording is None else recording
        try:
            yield
        finally:
            self.in_fp8 = self.in_fp8 if in_fp8 is None else before[0]
            self.recording = self.recording if recording is None else before[1]

    def leave_join(self) -> None:
        """Record that the Join context has ended."""
        self.join_config = _JoinConfig.construct_disabled_join_config()

    def invalidate_casts(self) -> None:
        """Invalidate cached weight casts, because weights may have changed."""
        self.generation += 1
