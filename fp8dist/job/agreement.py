"""Agreement at ``attach``, through the store: all ranks of a group must have equal manifests before they train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from fp8dist.errors import ConfigurationError
from fp8dist.modules.model_state import ModelState
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import SyncGroup, agree_on_manifests, publish_manifest, world_size
from fp8dist.state.manifest import ArenaDescription, WeightDescription, build_manifest, manifest_digest
from fp8dist.state.roll_call import enrol, failing_by_name
from fp8dist.state.settings import Settings
from fp8dist.state.slots import Slot

__all__ = ["agree", "require_groups"]


def require_groups(settings: Settings, groups: Sequence[SyncGroup | None]) -> None:
    """Raise ConfigurationError if there are several ranks, but no group was given."""
    if settings.amax_sync and None in groups and world_size() > 1:
        raise ConfigurationError(
            f"{world_size()} ranks and no group: pass prepare(group=…) the ranks that share activations and "
            "weights (torch.distributed.group.WORLD for plain data parallelism, the whole DeviceMesh for DP x TP), "
            "or amax_sync=False"
        )


def agree(
    state: ModelState, also: Mapping[str, Any], weights: Mapping[Slot, WeightDescription], timeout: timedelta
) -> dict[int, str]:
    """Publish all manifests, compare them with the other ranks', and make the communicators. COLLECTIVE.

    Args:
        also: JSON values that must be equal on all ranks, besides the settings.
        weights: by weight slot, the description of the whole weight: the same on all ranks, however it is sharded.

    Returns:
        The digest of each agreed manifest, by id of an arena's sync.

    Raises:
        ManifestMismatchError: on all ranks, if the manifests differ.
    """
    settings, syncs, groups = state.settings, state.syncs, state.groups
    distinct = {id(group): group for group in groups}
    agreed = {**settings.describe(), **also, "groups": len(distinct)}
    publications = []
    for group in distinct.values():  # One manifest per group: ranks may differ in their number of arenas.
        arenas = [_described(sync, weights) for sync, of in zip(syncs, groups) if of is group]
        if group is not None and group.communicates:
            publications.append(publish_manifest(group, build_manifest(arenas, agreed)))
    if publications:
        enrol()
    agree_on_manifests(publications, len(distinct) - 1, timeout)
    for publication in sorted(publications, key=lambda p: sorted(p.group.ranks)):  # Or ranks wait in a circle.
        group = publication.group
        group.round = publication.round
        own = [sync for sync, of in zip(syncs, groups) if of is group]
        if _reduces(settings, own):
            with failing_by_name(own[0].owner, lambda: "the connection at attach()", group.ranks):
                group.make_own(f"fp8dist/{group.identity}/{group.round}", own[0].arena.device)
    return {id(sync): manifest_digest(build_manifest([_described(sync, weights)], agreed)) for sync in syncs}


def _reduces(settings: Settings, syncs: Sequence[ArenaSync]) -> bool:
    """True if a group with these arenas has collectives while it trains, and they need a communicator of their own."""
    at_steps = settings.fp8_all_gather or settings.check_every or settings.audit_every
    shares = settings.enabled and settings.amax_sync and not settings.share_group
    return shares and bool(at_steps or any(sync.every_step for sync in syncs))


def _described(sync: ArenaSync, weights: Mapping[Slot, WeightDescription]) -> ArenaDescription:
    arena = sync.arena
    return ArenaDescription(
        arena.specs, arena.recipe.describe(), {s: w for s, w in weights.items() if s in arena.index}
    )
