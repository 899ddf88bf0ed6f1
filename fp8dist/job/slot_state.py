"""SlotState: the state of one slot, to read and to set by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist.job.cycle import StepCycle
from fp8dist.state import overwrites
from fp8dist.state.arena import Arena
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.recipe import Recipe
from fp8dist.state.slots import Slot
from fp8dist_kernels import Gemm, ops


class SlotState:
    """The state of one slot of a manager, now. ``manager.slot(fqn, role)`` returns it. All its calls are local.

    ``slot``: the slot; modules that share a weight share its slot. ``fqn``: the module that was asked for.

    What it reads first commits a pending sync, which may wait for a collective in flight.
    """

    def __init__(self, cycle: StepCycle, sync: ArenaSync, slot: Slot, fqn: str) -> None:
        self._cycle, self._sync = cycle, sync
        self.slot, self.fqn = slot, fqn

    def _settled(self) -> tuple[Arena, int]:
        """Return the arena, with any pending sync committed, and the slot's row."""
        self._sync.settle()
        return self._sync.arena, self._sync.arena.index[self.slot]

    @property
    def amax(self) -> Tensor:
        """The newest amax in the history: 0-d float32 view into the state."""
        arena, row = self._settled()
        return arena.amax[row]

    @property
    def scale(self) -> Tensor:
        """The factor by which the slot's tensor is multiplied before the cast: 0-d float32 view.

        1 until a scale is committed. A cold slot is cast with its own amax instead, unless ``warmup="unit"``. Only
        delayed scaling uses these scales, and ``CurrentScaling`` for weights that are gathered in FP8.
        """
        arena, row = self._settled()
        return arena.scale[row]

    @property
    def inv_scale(self) -> Tensor:
        """1 / scale: 0-d float32 view."""
        arena, row = self._settled()
        return arena.inv_scale[row]

    @property
    def amax_history(self) -> Tensor:
        """A copy of the history: float32[history_len], oldest first, zeros where not filled."""
        arena, row = self._settled()
        return arena.window(row)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the slot's module."""
        return self._sync.arena.recipe

    @property
    def high_precision(self) -> tuple[Gemm, ...]:
        """The GEMMs of the slot's module that are in high precision now."""
        precision = self._cycle.precisions.by_fqn.get(self.fqn)
        return () if precision is None else precision.high

    def set_scale(self, scale: float) -> None:
        """Set the scale by hand, on all ranks alike. The slot is no longer cold.

        Raises:
            ConfigurationError: the recipe keeps no scales, or the scale or its inverse is not positive and finite in
                float32.
        """
        self._cycle.require("set_scale()")
        try:
            rounded = torch.tensor(float(scale), dtype=torch.float64).float()
        except (TypeError, ValueError, OverflowError):
            raise ConfigurationError(f"scale must be a number, got {scale!r}") from None
        if not (rounded > 0 and rounded.reciprocal().isfinite() and rounded.isfinite()):
            raise ConfigurationError(f"a scale and its inverse must be positive and finite in float32, got {scale!r}")
        arena, row = self._settled()
        if not arena.recipe.delayed:
            raise ConfigurationError(
                f"{self.fqn}: set_scale() is for delayed scaling; {type(arena.recipe).__name__} computes a scale from "
                "each tensor"
            )
        overwrites.set_scale(arena, row, scale)
        self._cycle.job.invalidate_casts()

    def record(self, x: Tensor) -> None:
        """Record the amax of ``x`` (any shape), for a slot of ``manager.register``. It counts at the next boundary.

        Records at every call, in training and in evaluation. Cast ``x`` with ``scale``.
        """
        if not isinstance(x, Tensor):
            raise ConfigurationError(f"expected a tensor to record, got {x!r}")
        arena, row = self._settled()
        if self._cycle.job.enabled:
            arena.place(x.device)
            ops.observe(x.detach(), arena.pending[row], backend=self._cycle.settings.backend)
