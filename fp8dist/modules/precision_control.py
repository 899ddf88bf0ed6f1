"""PrecisionControl: changes what modules compute in, and lets all that depends on it know."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from fp8dist.modules.job_state import JobState
from fp8dist.recipe import Gemm
from fp8dist.settings import Settings
from fp8dist.state.manifest import digest_word, manifest_digest
from fp8dist.state.precision import Precisions
from fp8dist.state.slots import Slot
from fp8dist.sync.arena_sync import ArenaSync
from fp8dist.sync.groups import SyncGroup
from fp8dist_kernels.formats import Role

__all__ = ["PrecisionControl"]

logger = logging.getLogger("fp8dist")


class PrecisionControl:
    """Of one manager: its modules' precisions, and the arenas, casts and manifests that follow from them."""

    def __init__(
        self,
        precisions: Precisions,
        settings: Settings,
        job: JobState,
        syncs: Sequence[ArenaSync],
        groups: Sequence[SyncGroup | None],
    ) -> None:
        self.precisions = precisions
        self._manifests: dict[int, str] = {}
        self._resumed = False
        self._settings, self._job = settings, job
        self._syncs, self._groups = syncs, groups

    def tie(self, manifests: dict[int, str]) -> None:
        """Ranks have agreed on manifests: digests, by id of an arena's sync. Local."""
        self._manifests = manifests
        self.announce()

    def untie(self) -> None:
        """They share nothing any more. Local."""
        self._manifests, self._resumed = {}, False

    def training_resumes(self, resumed: bool) -> None:
        """Whether the optimizer has been at work before ``attach``. Local."""
        self._resumed = resumed

    def change(self, pattern: str, gemms: tuple[Gemm, ...], to_high: bool, steps: int | None) -> list[str]:
        """See ``StateManager.set_precision``; what is due must be committed. Local: on all ranks alike."""
        fqns = self.precisions.matching(pattern)
        self._job.invalidate_casts()
        cold = self.wake(self.precisions.change(fqns, gemms, to_high, steps))
        if cold and self.speaks:
            logger.warning(
                "fp8dist: %d slots have no scale yet, and are cast with their own amaxes in the next step: "
                "manager.calibrate() over a few batches gives them scales",
                cold,
            )
        return fqns

    def announce(self) -> None:
        """Every sync proves that its ranks have the same modules in high precision: it is in the manifest's word."""
        high = [(fqn, precision) for fqn, precision in self.precisions.by_fqn.items() if precision.high]
        for sync, group in zip(self._syncs, self._groups):
            if id(sync) not in self._manifests:
                continue
            # Only modules of this group: an expert may fall back on the ranks that have it.
            same = [other.arena.index for other, of in zip(self._syncs, self._groups) if of is group]
            here = {fqn: each.high for fqn, each in high if any(each.slots[Role.INPUT] in index for index in same)}
            digest = manifest_digest({"manifest": self._manifests[id(sync)], "high": here})
            sync.arena.set_manifest_word(digest_word(digest))

    def wake(self, slots: Collection[Slot]) -> int:
        """Modules compute in another precision from now on. ``slots`` are cast again, and nobody has looked at them
        lately: they are cold; how many are. Local, the same on all ranks.

        Not so weights that are gathered in FP8, which are looked at whenever they are gathered.
        """
        self.announce()
        cold = 0
        for sync in self._syncs:
            arena = sync.arena
            gathered = set(arena.arrays.shard_slots.tolist()) if len(arena.shards) else set()
            places = [arena.index[slot] for slot in slots if slot in arena.index]
            places = [place for place in places if place not in gathered]
            if places and arena.recipe.delayed:
                arena.make_cold(places)
                cold += len(places)
        self._job.invalidate_casts()
        return cold

    def fall_back(self, slots: Collection[Slot]) -> list[str]:
        """The modules that cast these go to high precision for a while; which ones do. Local, the same on all ranks."""
        fallback = self._settings.fallback
        assert fallback is not None
        fallen = self.precisions.fall_back(slots, fallback.steps)
        # What sent them there must not decide their scales when they come back: they are observed until then.
        theirs = self.precisions.slots_of(fallen)
        for sync in self._syncs:
            places = [sync.arena.index[slot] for slot in theirs if slot in sync.arena.index]
            sync.arena.forget_history(sync.arena.mask(places))
        self.wake(())
        return fallen

    def end_step(self) -> None:
        """A step of training is about to be synchronised: what was for a number of steps may end. Local."""
        self._warn_of_cold_start()
        before = self.precisions.version
        woken = self.precisions.end_step()
        if woken or self.precisions.version != before:
            self.wake(woken)

    def _warn_of_cold_start(self) -> None:
        """Once after ``attach``, where the optimizer has been at work before: training in FP8 goes on from high
        precision, and nothing is known of its tensors."""
        if not self._resumed or self.precisions.idle:
            return
        self._resumed = False
        cast = self.precisions.cast
        arenas = [sync.arena for sync in self._syncs if sync.arena.recipe.delayed]
        cold = sum(flag for arena in arenas for slot, flag in zip(arena.index, arena.cold.tolist()) if slot in cast)
        slots = sum(len(sync.arena) for sync in self._syncs)
        if cold and self.speaks:
            logger.warning(
                "fp8dist: FP8 goes on from a state that knew no FP8: %d of %d slots had no amax yet in its first step. "
                "manager.calibrate() over a few batches before it, or set_precision('*', 'high', steps=…), gives them",
                cold,
                slots,
            )

    @property
    def speaks(self) -> bool:
        """Whether this rank says what all of them see."""
        group = next((group for group in self._groups if group is not None), None)
        return group is None or group.rank == min(group.ranks)
