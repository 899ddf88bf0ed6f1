"""Groups: the ranks that share an arena, with their communicator. Also small questions about ranks and DTensors."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from fp8dist.common.text import ranks_text
from fp8dist.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

GroupLike = dist.ProcessGroup | DeviceMesh

_MEMBERS = "Only members prepare and check with a group: give this rank a group of its own"


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """True for a DTensor. Does not import torch.distributed.tensor, which takes half a second: if a DTensor exists, the
    module is already imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def first_local_row(weight: Any, dim: int = 0) -> int:
    """Return the index in the whole DTensor of the first row, or index of ``dim``, that this rank holds."""
    # Each mesh axis that shards the dim cuts what the axes before it have left, as torch.chunk does.
    first, size = 0, weight.shape[dim]
    for axis, placement in enumerate(weight.placements):
        if placement.is_shard(dim):
            part = -(-size // weight.device_mesh.size(axis))
            start = min(size, part * weight.device_mesh.get_local_rank(axis))
            first, size = first + start, min(part, size - start)
    return first


def has_base(thing: object, name: str) -> bool:
    """True if the object's class or one of its bases has this name. FSDP and ZeRO are recognised by name, because
    importing them takes half a second."""
    return any(cls.__name__ == name for cls in type(thing).__mro__)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor (the same object each time), or any other tensor unchanged."""
    # Not to_local(), which returns a new view of a Parameter.
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def maximum(group: SyncGroup, numbers: Sequence[int]) -> list[int]:
    """Return the maximum of each number, int64, over the ranks of a group. COLLECTIVE."""
    message = torch.tensor(numbers, dtype=torch.int64, device="cpu").to(group.device)
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group.process_group)
    return message.tolist()


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
        """The newest collective of a step, while it may be under way; at most one."""
        self.round = 0
        """How many times these ranks have agreed at ``attach``: the same number on all of them."""
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
        """This process's global rank. Kept, because torch does not know it after destroy_process_group()."""

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
        """Number of ranks."""
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
        return None if self.mesh is None else mesh_coordinates(self.mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncGroup:
        copied = SyncGroup.__new__(SyncGroup)  # A communicator is not state. A copied model attaches with its own.
        copied.__dict__.update(self.__dict__, _own=None, newest=[])
        return copied

    def __reduce__(self) -> Any:
        raise ConfigurationError(
            "a StateManager with a process group cannot be pickled: save manager.state_dict() (or "
            "manager.save(path)) and call prepare() and load_state_dict() in the other process"
        )


def group_of_this_rank(group: GroupLike) -> SyncGroup:
    """Return the SyncGroup of a group that a caller gives.

    Raises:
        ConfigurationError: it is none, or this rank is not in it. torch makes a DeviceMesh on all ranks.
    """
    made = SyncGroup(group)
    if made.rank not in made.ranks:
        raise ConfigurationError(
            f"rank {made.rank} is not in this DeviceMesh of ranks {ranks_text(made.ranks)}. {_MEMBERS}"
        )
    return made


def mesh_coordinates(mesh: DeviceMesh) -> dict[str, int] | None:
    """Return this process's place on each axis of a mesh, by the axis's name; None: it is not in the mesh."""
    place = mesh.get_coordinate()
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    return None if place is None else dict(zip(names, place))


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
        return f"The value means that this rank is not in the group that new_group() made. {_MEMBERS}"
    if isinstance(given, str):
        return f"Pass dist.group.WORLD, or an axis of a DeviceMesh: mesh[{given!r}]"
    if isinstance(given, Iterable):
        return f"Make a group of these ranks, on all ranks of the job: dist.new_group({given!r})"
    return "Pass dist.group.WORLD, a group of dist.new_group(ranks), or a DeviceMesh"


def identity_of(ranks: Sequence[int]) -> str:
    """Return a name for the group of these ranks, in the order given."""
    return hashlib.sha256(json.dumps(list(ranks)).encode()).hexdigest()[:16]


def _compact(ranks: Sequence[int]) -> Sequence[int]:
    """Return equally spaced ranks as a range, others as a tuple."""
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
