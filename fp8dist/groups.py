"""Groups: who shares an arena, and how they find out that they agree."""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from fp8dist.errors import ConfigurationError, ManifestMismatchError
from fp8dist.state.manifest import first_difference, manifest_digest

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "GroupLike",
    "SyncGroup",
    "agree_on_manifests",
    "has_base",
    "is_dtensor",
    "local_part",
    "publish_manifest",
    "world_size",
]

GroupLike = dist.ProcessGroup | DeviceMesh

_AGREED = "agreed"
_ASKED, _VERDICT = "asked", "verdict"


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, without importing what takes half a second: who has one has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def has_base(thing: object, name: str) -> bool:
    """Whether a class of that name is among its classes: FSDP and ZeRO are known by name, because importing them takes
    half a second, and who has one has imported it."""
    return any(cls.__name__ == name for cls in type(thing).__mro__)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, the object itself; any other tensor as it is."""
    # Not to_local(): that of a Parameter is a new view.
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def world_size() -> int:
    """Ranks of the job; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class SyncGroup:
    """The ranks that share an arena.

    From a ProcessGroup, or from a DeviceMesh with all its axes flattened: for DP × TP × CP that is
    right for every role. A mesh of several axes gets its communicator on first use of
    ``process_group``, which is then collective.
    """

    def __init__(self, group: GroupLike) -> None:
        self.mesh: DeviceMesh | None = None
        # Weak, because a ProcessGroup that outlives destroy_process_group() may abort the interpreter's exit
        # (gloo, torch 2.13). While it is usable, torch.distributed keeps it alive.
        self._process_group: weakref.ref[dist.ProcessGroup] | None = None
        if isinstance(group, DeviceMesh):
            if group.ndim > 1 and group.mesh_dim_names is None:
                raise ConfigurationError("a DeviceMesh of several axes needs mesh_dim_names to be a group")
            self.mesh = group
            # Sorted, as those of the process group that is made for it.
            self.ranks: tuple[int, ...] = tuple(sorted(group.mesh.flatten().tolist()))
        elif isinstance(group, dist.ProcessGroup):
            self._process_group = weakref.ref(group)
            self.ranks = tuple(dist.get_process_group_ranks(group))
        else:
            raise ConfigurationError(
                f"group must be a ProcessGroup or a DeviceMesh, got {type(group).__name__}. "
                "A rank that is not in the group must not prepare or check with it"
            )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The communicator.

        Raises:
            ConfigurationError: it was destroyed.
        """
        if self._process_group is None:
            assert self.mesh is not None
            mesh = self.mesh if self.mesh.ndim == 1 else self.mesh._flatten()
            self._process_group = weakref.ref(mesh.get_group())
        group = self._process_group()
        if group is None:
            raise ConfigurationError("the process group of this FP8 state was destroyed")
        return group

    @property
    def device(self) -> torch.device:
        """Where small messages are put: the CPU where the group has a backend for it, else this process's GPU."""
        types = [device.type for device in self.process_group._device_types]
        if "cpu" in types or not types:
            return torch.device("cpu")
        return torch.device(types[0], torch.cuda.current_device())

    def gather(self, mine: Any) -> list[Any]:
        """Everyone's object, in the order of ``ranks``. COLLECTIVE."""
        group = self.process_group
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, mine, group=group)
        return self.in_order(gathered)

    def in_order(self, gathered: Sequence[Any]) -> list[Any]:
        """Results of a gather, which come in the order of group ranks, in the order of ``ranks``."""
        by_rank = dict(zip(dist.get_process_group_ranks(self.process_group), gathered))
        return [by_rank[rank] for rank in self.ranks]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return dist.get_rank()

    @property
    def identity(self) -> str:
        """The same on all members, different for other sets of ranks."""
        return hashlib.sha256(json.dumps(self.ranks).encode()).hexdigest()[:16]

    def mesh_coordinates(self) -> dict[str, int] | None:
        """This process's place on the mesh by axis name."""
        if self.mesh is None:
            return None
        place = self.mesh.get_coordinate()
        if place is None:
            return None
        names = self.mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(self.mesh.ndim))
        return dict(zip(names, place))

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncGroup:
        return self  # A communicator is not state: a copied model may sync with the same ranks.

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            "a StateManager with a process group cannot be pickled: save manager.state_dict() (or "
            "manager.save(path)) and call prepare() and load_state_dict() in the other process"
        )


@dataclass(frozen=True)
class Publication:
    """This rank's manifest as it was put into the store, waiting for the others'."""

    store: distributed_c10d.Store
    group: SyncGroup
    manifest: Mapping[str, Any]
    round: int


def publish_manifest(group: SyncGroup, manifest: Mapping[str, Any]) -> Publication:
    """Put this rank's digest into the job's store. Does not wait.

    The n-th publication of a rank meets the n-th of each other rank of the same ranks: the count is
    kept in the store, so that no process-wide state is needed.
    """
    store = distributed_c10d.PrefixStore(f"fp8dist/{group.identity}", distributed_c10d._get_default_store())
    publication = Publication(store, group, manifest, store.add(f"count/{group.rank}", 1))
    while store.check([_key(publication, _VERDICT)]):  # The others gave up on that round without this rank.
        publication = Publication(store, group, manifest, store.add(f"count/{group.rank}", 1))
    store.set(_key(publication, "digest", group.rank), f"{manifest_digest(dict(manifest))} {socket.gethostname()}")
    return publication


def agree_on_manifests(publications: Sequence[Publication], rounds: int, timeout: timedelta) -> None:
    """Wait until all ranks of these groups have published and agree. COLLECTIVE, through the store.

    In each group the lowest rank compares and the others wait for its verdict. Whoever writes a verdict
    first, the lowest rank or one that will wait no longer, has spoken for all: nobody goes on alone. Full
    manifests travel only on a mismatch. With several groups, a failure in one is passed on to the others.

    Args:
        rounds: how many groups a failure may have to pass through to reach everyone; the same on all ranks.
        timeout: how long to wait for a rank.

    Raises:
        ManifestMismatchError: on every rank; ranks differ, or one did not come in time.
    """
    failures = [text for p in publications if (text := _agree(p, timeout)) is not None]
    for round_ in range(rounds):
        for publication in publications:
            told = json.dumps(failures[:1])
            publication.store.set(_key(publication, f"failures-{round_}", publication.group.rank), told)
        for publication in publications:
            if not failures:  # One is enough to know, and those who know need not wait.
                failures += _failures_of_members(publication, f"failures-{round_}", timeout)
    if failures:
        raise ManifestMismatchError(failures[0])


def _failures_of_members(publication: Publication, what: str, timeout: timedelta) -> list[str]:
    told = (_get(publication, what, timeout * 2, rank) for rank in publication.group.ranks)
    return [text for one in told if one is not None for text in json.loads(one)]


def _agree(publication: Publication, timeout: timedelta) -> str | None:
    """What is wrong in this group, or None."""
    leader = min(publication.group.ranks)
    if publication.group.rank == leader:
        verdict = _conclude(publication, _compare(publication, timeout))
    else:
        verdict = _follow(publication, leader, timeout * 2)
    return None if verdict == _AGREED else verdict


def _follow(publication: Publication, leader: int, timeout: timedelta) -> str:
    """Wait for the leader, showing it the manifest if it asks for it."""
    asked = _get(publication, _ASKED, timeout)
    if asked is not None and publication.group.rank in json.loads(asked):
        publication.store.set(_key(publication, "manifest", publication.group.rank), json.dumps(publication.manifest))
    verdict = None if asked is None else _get(publication, _VERDICT, timeout)
    if verdict is None:
        return _conclude(publication, _absent([leader], publication.group.size, timeout))
    return verdict


def _conclude(publication: Publication, verdict: str) -> str:
    """Write the verdict, unless there is one already; the one that stands."""
    return publication.store.compare_set(_key(publication, _VERDICT), "", verdict).decode()


def _compare(publication: Publication, timeout: timedelta) -> str:
    group, store = publication.group, publication.store
    leader = group.rank
    digests: dict[int, str] = {}
    hosts: dict[int, str] = {}
    missing: list[int] = []
    for rank in group.ranks:
        text = _get(publication, "digest", timedelta(milliseconds=10) if missing else timeout, rank)
        if text is None:
            missing.append(rank)
        else:
            digests[rank], _, hosts[rank] = text.partition(" ")
    # One odd rank per distinct manifest tells all there is to know.
    odd: dict[str, list[int]] = {}
    for rank, digest in digests.items():
        if digest != digests[leader]:
            odd.setdefault(digest, []).append(rank)
    store.set(_key(publication, _ASKED), json.dumps([] if missing else [ranks[0] for ranks in odd.values()]))
    if missing:
        return _absent(missing, group.size, timeout)
    lines = []
    for ranks in odd.values():
        theirs = _get(publication, "manifest", timeout, ranks[0])
        difference = (
            "gone before it could be compared"
            if theirs is None
            else first_difference(dict(publication.manifest), json.loads(theirs))
        )
        lines.append(
            f"rank {leader} ({hosts[leader]}) against rank(s) {_ranks(ranks)} ({hosts[ranks[0]]}): {difference}"
        )
    return "ranks were prepared differently; " + "; ".join(lines) if lines else _AGREED


def _absent(ranks: list[int], size: int, timeout: timedelta) -> str:
    return (
        f"attach() was not reached within {timeout.total_seconds():.0f} s by rank(s) {_ranks(ranks)} of {size}: "
        "it is collective over the group"
    )


def _key(publication: Publication, what: str, rank: int | None = None) -> str:
    suffix = "" if rank is None else f"/{rank}"
    return f"{publication.round}/{what}{suffix}"


def _get(publication: Publication, what: str, timeout: timedelta, rank: int | None = None) -> str | None:
    """The value, or None when it does not come in time."""
    key = _key(publication, what, rank)
    try:
        publication.store.wait([key], timeout)
    except (dist.DistStoreError, RuntimeError):
        return None
    return publication.store.get(key).decode()


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
