"""Agreement at ``attach``, through the store: all ranks of a group must have equal manifests before they train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch import nn

from fp8dist.common.text import dtype_name
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.modules.model_state import ModelState
from fp8dist.modules.parts import Part, fp8_parts
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import SyncGroup, world_size
from fp8dist.state.manifest import build_manifest, manifest_digest
from fp8dist.state.publications import agree_on_manifests, publish_manifest
from fp8dist.state.roll_call import enrol, failing_by_name
from fp8dist.state.settings import Settings
from fp8dist.state.slots import Slot
from fp8dist_kernels.formats import Role


def require_groups(settings: Settings, groups: Sequence[SyncGroup | None]) -> None:
    """Raise ConfigurationError if there are several ranks, but no group was given."""
    if settings.amax_sync and None in groups and world_size() > 1:
        raise ConfigurationError(
            f"{world_size()} ranks and no group: pass prepare(group=…) the ranks that share activations and "
            "weights (torch.distributed.group.WORLD for plain data parallelism, the whole DeviceMesh for DP x TP), "
            "or amax_sync=False"
        )


def agree(state: ModelState, model: nn.Module, also: Mapping[str, Any], timeout: timedelta) -> dict[int, str]:
    """Publish the manifest of each group, compare it with those of the other ranks, and make the communicators that
    steps need. COLLECTIVE: through the store, and one all-reduce for each new communicator of GPUs.

    Args:
        model: the prepared model, sharded or not. Its weights are part of the manifests.
        also: JSON values that must be equal on all ranks, besides the settings.
        timeout: how long to wait for the other ranks.

    Returns:
        The digest of each agreed manifest, by id of an arena's sync.

    Raises:
        ManifestMismatchError: on all ranks, if the manifests differ.
    """
    settings, syncs, groups = state.settings, state.syncs, state.groups
    weights = _described_weights(model)
    distinct = {id(group): group for group in groups}
    agreed = {**settings.describe(), **also, "groups": len(distinct)}
    publications = []
    shared = [group for group in distinct.values() if group is not None and group.communicates]
    ranks = sorted({rank for group in shared for rank in group.ranks})
    with failing_by_name(syncs[0].owner, lambda: "attach()", ranks):  # The store may be gone.
        for group in shared:  # One manifest per group: ranks may differ in their number of arenas.
            arenas = [sync.arena for sync, of in zip(syncs, groups) if of is group]
            publications.append(publish_manifest(group, build_manifest(arenas, weights, agreed)))
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
    return {id(sync): manifest_digest(build_manifest([sync.arena], weights, agreed)) for sync in syncs}


def _reduces(settings: Settings, syncs: Sequence[ArenaSync]) -> bool:
    """True if a group with these arenas has collectives while it trains, and they need a communicator of their own."""
    at_steps = settings.fp8_all_gather or settings.check_every or settings.audit_every
    shares = settings.enabled and settings.amax_sync and not settings.share_group
    return shares and bool(at_steps or any(sync.every_step for sync in syncs))


def _described_weights(model: nn.Module) -> dict[Slot, dict[str, Any]]:
    """Describe the whole weights by slot, as ``build_manifest`` takes them: the same on all ranks, however weights are
    sharded. So the shapes of Linears are those of the modules."""
    by_weight: dict[int, list[Part]] = {}
    for part in fp8_parts(model):
        by_weight.setdefault(id(part.stored[0]) if part.stored else id(part.module), []).append(part)
    described: dict[Slot, dict[str, Any]] = {}
    for parts in by_weight.values():
        first, users = parts[0], sorted(part.fqn for part in parts)
        dtype = dtype_name(first.weight.dtype)
        if isinstance(first.module, FP8Linear):
            shape = [first.module.out_features, first.module.in_features]
            same = {"shape": shape, "dtype": dtype, "users": users}
            described |= {part.slots.slots[Role.WEIGHT]: same for part in parts}
        else:  # Experts do not share weights. FSDP2's DTensors have the whole shape.
            shape = list(first.weight.shape[1:])
            for slot in first.slots.weight_slots:
                described[slot] = {"shape": shape, "dtype": dtype, "users": [slot.fqn]}
    return described
