"""Groups: the ranks that share an arena, and how they agree on their manifests."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from fp8dist.common.text import ranks_text
from fp8dist.errors import ConfigurationError, ManifestMismatchError
from fp8dist.state.manifest import first_difference, manifest_digest

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "GroupLike",
    "SyncGroup",
    "absent",
    "agree_on_manifests",
    "has_base",
    "identity_of",
    "is_dtensor",
    "largest_of_parts",
    "local_part",
    "publish_manifest",
    "world_size",
]

GroupLike = dist.ProcessGroup | DeviceMesh

_AGREED = "agreed"
_COMPLETE, _ASKED, _VERDICT = "complete", "asked", "verdict"

_SHOWN_MANIFESTS = 8
"""Number of manifests whose difference is reported. For further manifests only the ranks are named."""


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """True for a DTensor. Does not import torch.distributed.tensor, which takes half a second: if a DTensor exists, the
    module is already imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def has_base(thing: object, name: str) -> bool:
    """True if the object's class or one of its bases has this name. FSDP and ZeRO are recognised by name, because
    importing them takes half a second."""
    return any(cls.__name__ == name for cls in type(thing).__mro__)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor (the same object each time), or any other tensor unchanged."""
    # Not to_local(), which returns a new view of a Parameter.
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def largest_of_parts(amaxes: Tensor, cuts: Iterable[tuple[DeviceMesh, int]]) -> Tensor:
    """Return the amaxes, float32, of whole tensors from those of this rank's parts. COLLECTIVE over the ranks that hold
    parts, once per cut. ``cuts``: the axes of meshes along which the tensors are cut."""
    bits = amaxes.view(torch.int32).clone()
    for mesh, axis in cuts:
        if mesh.size(axis) > 1:
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return bits.view(torch.float32)


def world_size() -> int:
    """Return the number of ranks of the job; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    """Return this process's rank in the job; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class SyncGroup:
    """The ranks that share an arena.

    Made from a ProcessGroup, or from a DeviceMesh with all its axes flattened. For DP × TP × CP the whole mesh is right
    for every role. Collectives use the given communicator, or one of their own, from ``make_own`` to ``drop_own``.

    ``ranks`` are a range if they are equally spaced, as on the axes of a mesh. A range needs no memory per rank.
    """

    def __init__(self, group: GroupLike) -> None:
        self.mesh: DeviceMesh | None = None
        # Weak, because a ProcessGroup that outlives destroy_process_group() may abort the interpreter's exit
        # (gloo, torch 2.13). While it is usable, torch.distributed keeps it alive.
        self._given: weakref.ref[dist.ProcessGroup] | None = None
        self._own: weakref.ref[dist.ProcessGroup] | None = None
        self._made_by = 0  # Id of the process that made it.
        self.newest: list[dist.Work] = []
        """The newest collective of a step."""
        self.round = 0
        """Number of the agreement of these ranks at ``attach``, the same on all of them."""
        if isinstance(group, DeviceMesh):
            if group.ndim > 1 and group.mesh_dim_names is None:
                raise ConfigurationError("a DeviceMesh of several axes needs mesh_dim_names to be a group")
            self.mesh = group
            # Sorted, like the ranks of the process group that is made for the mesh.
            self.ranks: Sequence[int] = _compact(sorted(group.mesh.flatten().tolist()))
        elif isinstance(group, dist.ProcessGroup):
            self._given = weakref.ref(group)
            self.ranks = _compact(dist.get_process_group_ranks(group))
        else:
            raise ConfigurationError(
                f"group must be a ProcessGroup or a DeviceMesh, got {type(group).__name__} {group!r}. {_instead(group)}"
            )
        self.rank = dist.get_rank()
        """This process's global rank. Known also after destroy_process_group(), when torch no longer says it."""

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The communicator: this group's own, if it has one, else the given one.

        Raises:
            ConfigurationError: the process group was destroyed.
        """
        return self.given if self._own is None else _alive(self._own)

    @property
    def given(self) -> dist.ProcessGroup:
        """The communicator that was given. A mesh of several axes gets one on first use, which is COLLECTIVE.

        Raises:
            ConfigurationError: the process group was destroyed.
        """
        if self._given is None:
            assert self.mesh is not None
            mesh = self.mesh if self.mesh.ndim == 1 else self.mesh._flatten()
            self._given = weakref.ref(mesh.get_group())
        return _alive(self._given)

    def make_own(self, name: str, device: torch.device) -> None:
        """Make a communicator for these ranks alone, with the backend and the time-out of the given one. COLLECTIVE.

        A rank that leaves out a collective, or makes one too many, is then missed in this communicator. In a shared one
        its next collective, such as a bucket of DDP, would be taken for it. A backend that cannot make one for a part
        of the job keeps the given one.

        Args:
            name: the same on all ranks, and new in this job.
            device: of what is reduced. On a GPU one element is reduced, so that a CUDA graph need not connect.
        """
        assert self._own is None
        given, helper = self._source, cast(Any, distributed_c10d._new_process_group_helper)
        default, ranks = distributed_c10d._get_default_group(), list(self.ranks)
        if self.backend == dist.Backend.MPI:
            return
        own: Any
        if default.bound_device_id is not None and self.size < dist.get_world_size():
            # torch splits new groups from the default one, and waits for all ranks of that. The parent's ranks suffice.
            if not given._get_backend(default.bound_device_id).supports_splitting:
                return
            own = dist.split_group(self.given, [list(range(self.size))], timeout=self.timeout, group_desc=name)
        else:
            # Not dist.new_group(): it waits for all ranks of the job, or takes a name from the number of this
            # rank's groups, which ranks need not have in common.
            own, _ = helper(
                self.size, ranks.index(self.rank), ranks, self.backend, distributed_c10d._get_default_store(), name,
                timeout=self.timeout, device_id=default.bound_device_id, group_desc=name,
            )  # fmt: skip
            # torch keeps 100 bytes per rank of each group. Groups of the same ranks can share them.
            known, places = distributed_c10d._world.pg_group_ranks, {rank: place for place, rank in enumerate(ranks)}
            known[own] = next((others for others in known.values() if others == places), places)
        self._own, self._made_by = weakref.ref(own), os.getpid()
        if device.type == "cpu":
            # Nor may later groups get other names on ranks that have fewer communicators of this kind.
            distributed_c10d._world.pg_names.pop(own)
            # Not for NCCL: ranks collect garbage at other times, and it may wait for the others.
            weakref.finalize(self, _destroy, self._own, self._made_by, self.newest).atexit = False
        else:
            dist.all_reduce(torch.zeros(1, dtype=torch.int32, device=device), group=own)

    def drop_own(self, captured: bool = False) -> None:
        """Destroy this group's own communicator, if it has one. On all ranks: with NCCL it may wait for the others.

        Args:
            captured: a CUDA graph may use it, which NCCL would wait for. It then stays until the job's groups go.
        """
        if self._own is not None and not captured:
            self.newest.clear()
            _destroy(self._own, self._made_by, self.newest)
        self._own = None

    @property
    def backend(self) -> str:
        """Name of the backend. Local."""
        return dist.get_backend(self._source)

    @property
    def timeout(self) -> timedelta:
        """How long a collective of this group waits for late ranks."""
        devices = self._source._device_types
        options = self._source._get_backend(devices[-1]).options if devices else None
        return getattr(options, "_timeout", None) or distributed_c10d._get_default_timeout(dist.Backend(self.backend))

    @property
    def _source(self) -> dist.ProcessGroup:
        """A given communicator that has the backend and the time-out. Local."""
        return self.given if self.mesh is None or self.mesh.ndim == 1 else self.mesh.get_group(0)

    def require_backend(self, device: torch.device) -> None:
        """Raise ConfigurationError if the group has no backend for ``device``, where the FP8 state lies. Local."""
        types = sorted(each.type for each in self._source._device_types)
        if types and device.type not in types:
            raise ConfigurationError(
                f"the FP8 state is on {device}, but its group has backends for {' and '.join(types)} only: move the "
                f'model, or use init_process_group("cpu:gloo,cuda:nccl")'
            )

    @property
    def device(self) -> torch.device:
        """Device of small messages: the CPU if the group has a backend for it, else this process's GPU."""
        types = [device.type for device in (self._source if self._own is None else self.process_group)._device_types]
        if "cpu" in types or not types:
            return torch.device("cpu")
        return torch.device(types[0], torch.cuda.current_device())

    def gather(self, mine: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of ``ranks``. COLLECTIVE."""
        group = self.process_group
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, mine, group=group)
        return self.in_order(gathered)

    def in_order(self, gathered: Sequence[Any]) -> list[Any]:
        """Return results of a gather, which are in the order of group ranks, in the order of ``ranks``."""
        by_rank = dict(zip(dist.get_process_group_ranks(self.process_group), gathered))
        return [by_rank[rank] for rank in self.ranks]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def communicates(self) -> bool:
        """True if collectives of this group are sent. Not if it is this rank alone: only tests change that, so that one
        GPU calls NCCL."""
        return self.size > 1

    @functools.cached_property
    def identity(self) -> str:
        """A name that is the same on all members, and differs between sets of ranks."""
        return identity_of(self.ranks)

    def mesh_coordinates(self) -> dict[str, int] | None:
        """Return this process's coordinates on the mesh by axis name, or None."""
        if self.mesh is None:
            return None
        place = self.mesh.get_coordinate()
        if place is None:
            return None
        names = self.mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(self.mesh.ndim))
        return dict(zip(names, place))

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncGroup:
        copied = SyncGroup.__new__(SyncGroup)  # A communicator is not state. A copied model attaches with its own.
        copied.__dict__.update(self.__dict__, _own=None, newest=[])
        return copied

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            "a StateManager with a process group cannot be pickled: save manager.state_dict() (or "
            "manager.save(path)) and call prepare() and load_state_dict() in the other process"
        )


def _alive(group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    found = group()
    if found is None:
        raise ConfigurationError("the process group of this FP8 state was destroyed")
    return found


def _destroy(group: weakref.ref[dist.ProcessGroup], process: int, newest: Sequence[dist.Work]) -> None:
    """Destroy a communicator that this process has made, unless the job's groups are destroyed, or a collective is
    under way, which gloo would wait for."""
    found, world = group(), distributed_c10d._world
    if found is None or os.getpid() != process or not dist.is_initialized() or found not in world.pg_map:
        return
    if all(work.is_completed() for work in newest):
        world.pg_names.setdefault(found, found.group_name)  # torch deletes it.
        dist.destroy_process_group(found)


def _instead(given: object) -> str:
    """Return a hint on what to pass as a group instead."""
    if isinstance(given, int) and given == dist.GroupMember.NON_GROUP_MEMBER:
        return (
            "The value means that this rank is not in the group that new_group() made. Only members prepare and check "
            "with a group: give this rank a group of its own"
        )
    if isinstance(given, str):
        return f"Pass dist.group.WORLD, or an axis of a DeviceMesh: mesh[{given!r}]"
    if isinstance(given, Iterable):
        return f"Make a group of these ranks, on all ranks of the job: dist.new_group({given!r})"
    return "Pass dist.group.WORLD, a group of dist.new_group(ranks), or a DeviceMesh"


def identity_of(ranks: Sequence[int]) -> str:
    """Return a name for the group of these ranks, in the order given."""
    return hashlib.sha256(json.dumps(list(ranks)).encode()).hexdigest()[:16]


def _compact(ranks: Sequence[int]) -> Sequence[int]:
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    spaced = range(ranks[0], ranks[0] + step * len(ranks), step)
    return spaced if list(spaced) == list(ranks) else tuple(ranks)


def absent(store: Any, ranks: Sequence[int], key_of: Callable[[int], str], most: int | None = None) -> list[int]:
    """Return the ranks whose key is not in the store, in order, and ``most`` of them at most.

    Searches by halves, because few are absent: one query is enough if all keys are there.
    """
    found: list[int] = []
    parts = [ranks]
    while parts and (most is None or len(found) < most):
        part = parts.pop()
        if store.check([key_of(rank) for rank in part]):
            continue
        if len(part) == 1:
            found += part
        else:
            half = len(part) // 2
            parts += [part[half:], part[:half]]
    return found


@dataclass(frozen=True)
class Publication:
    """This rank's manifest as published in the store, before the ranks have agreed."""

    store: distributed_c10d.Store
    group: SyncGroup
    manifest: Mapping[str, Any]
    round: int


def publish_manifest(group: SyncGroup, manifest: Mapping[str, Any]) -> Publication:
    """Put the digest of this rank's manifest into the job's store. Does not wait.

    The n-th publication of a rank belongs to the n-th of every other rank of the group. The store counts them, so no
    process-wide state is needed.
    """
    store = distributed_c10d.PrefixStore(f"fp8dist/{group.identity}", distributed_c10d._get_default_store())
    publication = Publication(store, group, manifest, store.add(f"count/{group.rank}", 1))
    while store.check([_key(publication, _VERDICT)]):  # The others ended that round without this rank.
        publication = Publication(store, group, manifest, store.add(f"count/{group.rank}", 1))
    digest = manifest_digest(dict(manifest))
    store.set(_key(publication, "digest", group.rank), f"{digest} {socket.gethostname()}")
    store.add(_key(publication, f"same/{digest}"), 1)
    if store.add(_key(publication, "came"), 1) == group.size:
        store.set(_key(publication, _COMPLETE), "")
    return publication


def agree_on_manifests(publications: Sequence[Publication], rounds: int, timeout: timedelta) -> None:
    """Wait until all ranks of these groups have published and agree. COLLECTIVE, through the store.

    In each group the lowest rank compares, and the others wait for its verdict. The first verdict in the store is final
    for all ranks, so no rank continues alone. The lowest rank writes it, or a rank whose wait has timed out. With
    several groups, a failure in one is passed on to the others.

    If all agree, each rank needs about ten store operations per group, whatever the number of ranks: equal digests are
    counted, not read. Only after a failure does the lowest rank read single digests and ask for full manifests.

    Args:
        rounds: the number of groups that a failure may have to pass through to reach all ranks. The same on all ranks.
        timeout: how long to wait for the other ranks, for all groups together. Verdicts may take twice as long.

    Raises:
        ManifestMismatchError: on every rank, if ranks differ or one did not come in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    # Groups that this rank leads come first, so that their members need not wait for its other groups.
    in_order = sorted(publications, key=lambda p: min(p.group.ranks) != p.group.rank)
    failures = [text for p in in_order if (text := _agree(p, timeout, deadline)) is not None]
    for round_ in range(rounds):
        for publication in publications:
            _publish_outcome(publication, round_, failures)
        for publication in publications:
            if not failures:  # One failure is enough.
                failures += _read_outcome(publication, round_, timeout * 3)
    if failures:
        raise ManifestMismatchError(failures[0])


def _publish_outcome(publication: Publication, round_: int, failures: Sequence[str]) -> None:
    """Publish a failure to the group, or that this rank knows of none. The last rank without a failure writes that all
    agree."""
    if failures:
        _write_once(publication, f"outcome-{round_}", failures[0])
    elif publication.store.add(_key(publication, f"well-{round_}"), 1) == publication.group.size:
        _write_once(publication, f"outcome-{round_}", _AGREED)


def _read_outcome(publication: Publication, round_: int, timeout: timedelta) -> list[str]:
    outcome = _get(publication, f"outcome-{round_}", timeout)
    if outcome is None:
        size, seconds = publication.group.size, timeout.total_seconds()
        gone = f"the end of attach() was not reached within {seconds:.0f} s by all of {size} ranks"
        outcome = _write_once(publication, f"outcome-{round_}", gone)
    return [] if outcome == _AGREED else [outcome]


def _agree(publication: Publication, timeout: timedelta, deadline: float) -> str | None:
    """Return what is wrong in this group, or None. Members must come before the deadline. After it, the leader has up
    to the same time again to find out what differs."""
    leader, patience = min(publication.group.ranks), timeout.total_seconds()
    if publication.group.rank == leader:
        verdict = _write_once(publication, _VERDICT, _compare(publication, timeout, deadline, deadline + patience / 2))
    else:
        verdict = _follow(publication, leader, timeout * 2, deadline + patience)
    return None if verdict == _AGREED else verdict


def _follow(publication: Publication, leader: int, timeout: timedelta, deadline: float) -> str:
    """Wait for the leader's verdict, and show it this rank's manifest on request."""
    asked = _get(publication, _ASKED, _until(deadline))
    if asked is not None and publication.group.rank in json.loads(asked):
        publication.store.set(_key(publication, "manifest", publication.group.rank), json.dumps(publication.manifest))
    verdict = None if asked is None else _get(publication, _VERDICT, _until(deadline))
    if verdict is None:
        return _write_once(publication, _VERDICT, _absent([leader], publication.group.size, timeout))
    return verdict


def _compare(publication: Publication, timeout: timedelta, deadline: float, later: float) -> str:
    """Return the leader's verdict. ``deadline``: for the other ranks to come. ``later``: for them to show their
    manifests."""
    group, store = publication.group, publication.store
    complete = _get(publication, _COMPLETE, _until(deadline)) is not None
    mine = manifest_digest(dict(publication.manifest))
    if complete and store.add(_key(publication, f"same/{mine}"), 0) == group.size:
        store.set(_key(publication, _ASKED), "[]")
        return _AGREED
    missing = [] if complete else absent(store, group.ranks, lambda rank: _key(publication, "digest", rank))
    if missing:
        store.set(_key(publication, _ASKED), "[]")
        return _absent(missing, group.size, timeout)
    return _differences(publication, mine, later)


def _differences(publication: Publication, mine: str, deadline: float) -> str:
    """Return which ranks differ from this one, and in what, after all have published."""
    group, store = publication.group, publication.store
    published = store.multi_get([_key(publication, "digest", rank) for rank in group.ranks])
    hosts: dict[int, str] = {}
    odd: dict[str, list[int]] = {}
    for rank, text in zip(group.ranks, published):
        digest, _, hosts[rank] = text.decode().partition(" ")
        if digest != mine:
            odd.setdefault(digest, []).append(rank)
    # One rank per distinct manifest is enough.
    shown = list(odd.values())[:_SHOWN_MANIFESTS]
    store.set(_key(publication, _ASKED), json.dumps([ranks[0] for ranks in shown]))
    lines = []
    for ranks in shown:
        theirs = _get(publication, "manifest", _until(deadline), ranks[0])
        difference = (
            "gone before it could be compared"
            if theirs is None
            else first_difference(dict(publication.manifest), json.loads(theirs))
        )
        sides = f"rank {group.rank} ({hosts[group.rank]}) against rank(s) {ranks_text(ranks)} ({hosts[ranks[0]]})"
        lines.append(f"{sides}: {difference}")
    if len(odd) > len(shown):
        others = [rank for ranks in list(odd.values())[len(shown) :] for rank in ranks]
        lines.append(f"rank(s) {ranks_text(others)} have {len(odd) - len(shown)} other manifests")
    return "ranks were prepared differently; " + "; ".join(lines) if lines else _AGREED


def _absent(ranks: list[int], size: int, timeout: timedelta) -> str:
    return (
        f"attach() was not reached within {timeout.total_seconds():.0f} s by rank(s) {ranks_text(ranks)} of {size}: "
        "it is collective over the group"
    )


def _key(publication: Publication, what: str, rank: int | None = None) -> str:
    suffix = "" if rank is None else f"/{rank}"
    return f"{publication.round}/{what}{suffix}"


def _write_once(publication: Publication, what: str, text: str) -> str:
    """Write the text unless there is one, and return the text that is stored."""
    return publication.store.compare_set(_key(publication, what), "", text).decode()


def _until(deadline: float) -> timedelta:
    """Return the time left, at least 0.1 s, so that a value that is already there is seen."""
    return timedelta(seconds=max(0.1, deadline - time.monotonic()))


def _get(publication: Publication, what: str, timeout: timedelta, rank: int | None = None) -> str | None:
    """Return the value, or None if it does not come in time."""
    key = _key(publication, what, rank)
    try:
        publication.store.wait([key], timeout)
    except (dist.DistStoreError, RuntimeError):
        return None
    return publication.store.get(key).decode()
