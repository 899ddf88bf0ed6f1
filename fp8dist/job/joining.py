"""``Join``: ranks that run out of data early take over the other ranks' state at the end."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fp8dist.modules.precision_control import PrecisionControl
from fp8dist.state.arena import Arena
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import SyncGroup
from fp8dist.state.precision import Precisions

__all__ = ["take_furthest"]


def take_furthest(sync: ArenaSync, precisions: Precisions, control: PrecisionControl) -> None:
    """Copy the state of the rank with the highest step counter to all ranks: the arena, and which GEMMs of its modules
    run in high precision and for how long. COLLECTIVE if the sync communicates."""
    if not sync.communicates:
        return
    assert sync.group is not None
    source = _broadcast_furthest(sync.arena, sync.group)
    fqns = {slot.fqn for slot in sync.arena.index}
    described = precisions.describe()
    theirs = [{fqn: of for fqn, of in described.items() if fqn in fqns}]
    dist.broadcast_object_list(theirs, src=source, group=sync.group.process_group, device=sync.arena.device)
    precisions.restore({**{fqn: of for fqn, of in described.items() if fqn not in fqns}, **theirs[0]})
    control.announce()


def _broadcast_furthest(arena: Arena, group: SyncGroup) -> int:
    """Broadcast the arena of the rank with the highest step counter, and return that rank. COLLECTIVE."""
    me = group.ranks.index(group.rank)
    furthest = (arena.step.to(torch.int64) * group.size + me).view(1)
    dist.all_reduce(furthest, dist.ReduceOp.MAX, group=group.process_group)
    source = group.ranks[int(furthest) % group.size]
    for tensor in arena.shared_state():
        dist.broadcast(tensor, src=source, group=group.process_group)
    return source
