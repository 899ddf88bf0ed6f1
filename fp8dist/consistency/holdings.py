"""What one rank brings to a check."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8dist.consistency.contents import Content, Digester, Field, Key, values_near
from fp8dist.consistency.differences import ravel
from fp8dist.consistency.replication import Membership
from fp8dist.consistency.report import this_rank
from fp8dist.divergence import Finding, Participant
from fp8dist.sync.groups import SyncGroup

__all__ = ["Holdings", "ReplicaSet", "participant"]


@dataclass(frozen=True)
class ReplicaSet:
    """What the ranks of ``group`` must hold alike. ``label`` is the same on all ranks of the job."""

    label: str
    group: SyncGroup
    contents: tuple[Content, ...]

    @property
    def keys(self) -> list[Key]:
        """Of everything in it, in order."""
        return [key for content in self.contents for key in content.keys]

    def digests(self, digester: Digester) -> Tensor:
        """int64[len(keys), 2] on the CPU."""
        parts = [content.digests(digester) for content in self.contents if content.keys]
        return torch.cat(parts) if parts else torch.zeros(0, 2, dtype=torch.int64)

    def evidence(self, finding: Finding) -> dict[str, Any] | None:
        """What this rank has of it, for a file: a slot in full, of a tensor what is near the first difference."""
        for index, key in enumerate(self.keys):
            if key.name == finding.name and key.kind in (finding.kind, "slot"):
                place = None if key.kind == "slot" else ravel(finding.index or (), key.shape)
                return {"fields": [values_near(f, place) for f in self.fields(index)]}
        return None

    def fields(self, index: int) -> list[Field]:
        """Of the thing with that place in ``keys``."""
        for content in self.contents:
            if index < len(content.keys):
                return content.fields(index)
            index -= len(content.keys)
        raise IndexError(index)


@dataclass(frozen=True)
class Holdings:
    """All that one rank brings to a check.

    The first set is that of the anchor, the ranks that call. ``memberships`` says with whom this rank is in the others.
    """

    sets: tuple[ReplicaSet, ...]
    step: int = 0
    manifest: str = ""
    last_good_step: int | None = None
    coords: dict[str, int] | None = None
    skipped: tuple[str, ...] = ()
    memberships: tuple[Membership, ...] = ()

    @property
    def layout(self) -> tuple[str, ...]:
        """Which sets there are beside the anchor's: equal on all ranks of one program."""
        return tuple(m.label for m in self.memberships)

    @property
    def compared(self) -> dict[str, int]:
        """How many things of each kind are compared with somebody."""
        return dict(sorted(Counter(key.kind for s in self.sets for key in s.keys).items()))


def participant(group: SyncGroup, mine: Holdings) -> Participant:
    """This rank, and where its tensors are. Local."""
    device = next((c.device for s in mine.sets for c in s.contents if c.keys), group.device)
    return this_rank(device, mine.coords)
