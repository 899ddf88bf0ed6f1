"""PrecisionControl: changes the precision of modules, and updates everything that depends on it."""

from __future__ import annotations

import logging
from collections.abc import Collection

from fp8dist.modules.model_state import ModelState
from fp8dist.state import overwrites
from fp8dist.state.manifest import digest_word, manifest_digest
from fp8dist.state.slots import Slot
from fp8dist_kernels import Gemm
from fp8dist_kernels.formats import Role
from fp8dist_kernels.header import WORD_MANIFEST

logger = logging.getLogger("fp8dist")


class PrecisionControl:
    """Controls the precisions of one manager's modules, and the arenas, casts and manifests that depend on them."""

    def __init__(self, state: ModelState) -> None:
        self.precisions = state.precisions
        self._manifests: dict[int, str] = {}
        self._resumed = False
        self._state = state

    def tie(self, manifests: dict[int, str]) -> None:
        """Set the digests of the manifests that ranks have agreed on, by id of the arena's sync. Local."""
        self._manifests = manifests
        self.announce()

    def untie(self) -> None:
        """Forget the manifests: this rank no longer shares state. Local."""
        self._manifests, self._resumed = {}, False

    def training_resumes(self, resumed: bool) -> None:
        """Set whether training resumes: True if the optimizer had made steps before this job's first step. Local."""
        self._resumed = resumed

    def change(self, pattern: str, gemms: tuple[Gemm, ...], to_high: bool, steps: int | None) -> list[str]:
        """See ``StateManager.set_precision``. The caller commits pending syncs first. Local, but all ranks must make
        the same call: the next sync compares their precisions."""
        fqns = self.precisions.matching(pattern)
        self._state.job.invalidate_casts()
        cold = self.wake(self.precisions.change(fqns, gemms, to_high, steps))
        if cold and self._state.logs:
            logger.warning(
                "fp8dist: %d slots have no scale yet, and are cast with their own amaxes in the next step: "
                "manager.calibrate() over a few batches gives them scales",
                cold,
            )
        return fqns

    def announce(self) -> None:
        """Put the modules in high precision into the syncs' manifest words, which every sync compares across ranks."""
        for listener in self._state.job.listeners:
            listener()
        high = [(fqn, precision) for fqn, precision in self.precisions.by_fqn.items() if precision.high]
        for sync, group in zip(self._state.syncs, self._state.groups):
            if id(sync) not in self._manifests:
                continue
            # Only modules of this group: an expert may fall back on its own ranks only.
            same = [other.arena.index for other, of in zip(self._state.syncs, self._state.groups) if of is group]
            here = {fqn: each.high for fqn, each in high if any(each.slots[Role.INPUT] in index for index in same)}
            digest = manifest_digest({"manifest": self._manifests[id(sync)], "high": here})
            sync.arena.words[WORD_MANIFEST] = digest_word(digest)

    def wake(self, slots: Collection[Slot]) -> int:
        """Apply a change of precisions, and return how many slots became cold. ``slots`` are cast to FP8 again but have
        no recent amax, so they become cold: they lose their scales. Local, the same on all ranks.

        Weights that are gathered in FP8 do not become cold: every gather takes their amax.
        """
        self.announce()
        cold = 0
        for sync in self._state.syncs:
            arena = sync.arena
            gathered = set(arena.arrays.shard_slots.tolist()) if len(arena.shards) else set()
            places = [arena.index[slot] for slot in slots if slot in arena.index]
            places = [place for place in places if place not in gathered]
            if places and arena.recipe.delayed:
                overwrites.make_cold(arena, places)
                cold += len(places)
        self._state.job.invalidate_casts()
        return cold

    def fall_back(self, slots: Collection[Slot]) -> list[str]:
        """Switch the modules that cast these slots to high precision for a limited time, and return their fqns. Local,
        the same on all ranks."""
        fallback = self._state.settings.fallback
        assert fallback is not None
        fallen = self.precisions.fall_back(slots, fallback.steps)
        # Amaxes that caused the fallback must not set the scales after it. Modules are observed again before it ends.
        theirs = self.precisions.slots_of(fallen)
        for sync in self._state.syncs:
            places = [sync.arena.index[slot] for slot in theirs if slot in sync.arena.index]
            sync.arena.forget_history(sync.arena.mask(places))
        self.wake(())
        return fallen

    def end_step(self) -> None:
        """End time-limited overrides that expire with this training step. Called before the step's sync. Local."""
        self._warn_of_cold_start()
        before = self.precisions.version
        woken = self.precisions.end_step()
        if woken or self.precisions.version != before:
            self.wake(woken)

    def _warn_of_cold_start(self) -> None:
        """Warn once after ``attach`` if training resumes, but slots have no amax: FP8 state was not loaded, or the run
        was in high precision before."""
        if not self._resumed or self.precisions.idle:
            return
        self._resumed = False
        cast = self.precisions.cast
        arenas = [sync.arena for sync in self._state.syncs if sync.arena.recipe.delayed]
        cold = sum(flag for arena in arenas for slot, flag in zip(arena.index, arena.cold.tolist()) if slot in cast)
        slots = sum(len(sync.arena) for sync in self._state.syncs)
        if cold and self._state.logs:
            logger.warning(
                "fp8dist: training resumes without FP8 state: %d of %d slots had no amax in the first step. If this "
                "continues a run in FP8, load its FP8 state before that step, too (manager.load_state_dict or "
                "manager.load). From high precision, call manager.calibrate() over a few batches first, or "
                "set_precision('*', 'high', steps=…)",
                cold,
                slots,
            )
