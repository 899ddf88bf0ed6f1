"""Find the ranks that must hold the same values, for each tensor.

A plain tensor does not show if it is replicated: FSDP1's shards, experts and ZeRO's state look like any other tensor
and differ by design. So these count as replicated: DTensors across their Replicate axes, parameters that DDP or
DeepSpeed keeps equal, across its group, those of Megatron-Core by its own marks, and tensors for which the caller names
a group.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fp8dist.common.text import ranks_text
from fp8dist.modules.parts import fp8_parts
from fp8dist.parallel import megatron
from fp8dist.parallel.partitioned import is_partitioned
from fp8dist.parallel.torch_internals import fsdp1_ignored, fsdp1_modules, fsdp1_replicas
from fp8dist.state.groups import GroupLike, SyncGroup, has_base, is_dtensor
from fp8dist.state.slots import clean_fqn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Excuse", "Home", "Membership", "Replication", "ddp_parameters", "is_plain", "zero_groups"]

ANCHOR = "all ranks that check"

_MARKS = ("_ddp_params_and_buffers_to_ignore", "_hf_tp_plan")
"""Attributes of modules that say what DDP must not keep equal, and how Transformers shards a weight."""

_PLAIN = (nn.Parameter, nn.UninitializedParameter)

_SHOWN_IN_FULL = 64
"""Largest mesh whose ranks are all shown when ranks disagree about it."""


@dataclass(frozen=True)
class Home:
    """A set of ranks that must hold the same values. ``label``: its name, the same on all ranks of the job.

    ``alias``: name of its tensor, where ranks have other names for it.
    """

    label: str
    group: SyncGroup
    alias: str = ""


@dataclass(frozen=True)
class Excuse:
    """Why a tensor is not compared, in words that follow its kind ("3 parameters …")."""

    reason: str


@dataclass(frozen=True)
class Membership:
    """The ranks of the set ``label``, this rank included. ``view``: text of the mesh that it comes from, or ""."""

    label: str
    ranks: Sequence[int]
    view: str


class Replication:
    """Finds the homes of tensors.

    Args:
        anchor: the ranks that check. Nothing is compared with other ranks.
        vouched: plain tensors without any other sign of replication are replicated over the anchor.
        patterns: group by fqn pattern, for plain tensors that are replicated over other ranks; None: do not compare.
            The first match counts, and takes precedence over all other signs.
    """

    def __init__(self, anchor: SyncGroup, vouched: bool, patterns: Mapping[str, GroupLike | None]) -> None:
        self.coords = anchor.mesh_coordinates()
        self.names: dict[int, str] = {}
        self.masters: set[int] = set()
        """Ids of copies of parameters that an optimizer updates in their place."""
        self.anchor = Home(ANCHOR, anchor)
        """Home of tensors that all checking ranks hold alike."""
        self._vouched = vouched
        self._patterns = {pattern: None if g is None else SyncGroup(g) for pattern, g in patterns.items()}
        self._anchor_ranks = frozenset(anchor.ranks)
        self._memberships: dict[str, Membership] = {}
        self._known: dict[Any, Home | Excuse] = {}
        self._spanning: dict[int, bool] = {}
        self._of_parameter: dict[int, list[Home | Excuse]] = {}
        self._of_gradient: dict[int, list[Home | Excuse]] = {}
        self._kept: list[Any] = []  # Keeps objects alive whose ids are keys.

    @property
    def memberships(self) -> tuple[Membership, ...]:
        """Sets of ranks other than the anchor, sorted by label. Includes sets of this rank alone, and sets with ranks
        outside of the anchor."""
        return tuple(self._memberships[label] for label in sorted(self._memberships))

    def of_group(self, label: str, group: SyncGroup, view: str = "") -> Home | Excuse:
        """Return the home of tensors that ``group`` holds alike. ``label``: the same on all ranks of the job, and
        distinct for each group."""
        if self._anchor_ranks.issubset(group.ranks):
            return self.anchor
        label = self._unique(label, group.ranks)
        self._memberships[label] = Membership(label, group.ranks, view)
        if not group.communicates:
            return Excuse(f"that are shared with no other rank ({label})")
        if not self._anchor_ranks.issuperset(group.ranks):
            return Excuse(f"that are shared with ranks that do not take part in this check ({label})")
        return Home(label, group)

    def _unique(self, label: str, ranks: Sequence[int]) -> str:
        """Number a label that other ranks have, too (two DDP modules). All ranks meet the sets in the same order."""
        candidate, number = label, 1
        while candidate in self._memberships and self._memberships[candidate].ranks != ranks:
            number += 1
            candidate = f"{label} #{number}"
        return candidate

    def learn(self, module: nn.Module) -> None:
        """Record how the parameters of a module are wrapped."""
        around = _around(module)
        sharded, wrapping, zero = _fsdp1_parameters(around), _ddp_of(around), zero_groups(around)
        copies = self._learn_megatron(module)
        for name, parameter in _clean_names(list(module.named_parameters())):
            self._kept.append(parameter)
            self.names[id(parameter)] = name
            home = self._named(name)
            if home is None and is_dtensor(parameter):
                # For its plain optimizer state, such as a step counter.
                home = Excuse("that are not DTensors, of parameters that are")
            if home is None and id(parameter) in sharded:
                home = self._of_fsdp1(sharded[id(parameter)])
            if home is None and is_partitioned(parameter):
                home = Excuse("partitioned by ZeRO: each rank has its own")
            if home is None and id(parameter) in zero:
                home = self._cached(("ZeRO", id(zero[id(parameter)])), "DeepSpeed", zero[id(parameter)])
            if home is None and id(parameter) in copies:
                self._know_copies(name, parameter, copies[id(parameter)])
            else:
                self._of_parameter[id(parameter)] = [home or self._wrapped(parameter, wrapping)]

    def _learn_megatron(self, module: nn.Module) -> Mapping[int, megatron.Copies]:
        if not megatron.is_megatron(module):
            return {}
        self.coords = self.coords or megatron.coordinates()
        for label, group in megatron.groups().items():
            if group is None:  # Each label must occur on all ranks.
                here = dist.get_rank()
                self._memberships[label] = Membership(label, (here,), "")
            elif ("Megatron", label) not in self._known:
                home = self.of_group(label, SyncGroup(group))
                if label == megatron.TIED and isinstance(home, Home):
                    home = replace(home, alias=megatron.TIED)
                self._known["Megatron", label] = home
        return megatron.copies_of(module)

    def _know_copies(self, name: str, parameter: Any, copies: megatron.Copies) -> None:
        # A rank may hold a tied embedding without being in the group that reduces it (get_embedding_ranks).
        homes, reduced = (
            [self._known["Megatron", label] for label in labels if ("Megatron", label) in self._known]
            for labels in (copies.parameter, copies.gradient)
        )
        self._of_parameter[id(parameter)] = [Excuse(megatron.NOT_GATHERED)] if copies.gathers else homes
        self._of_gradient[id(parameter)] = reduced or [Excuse(megatron.REDUCED_IN_PARTS)]
        if copies.master is not None:
            self._kept.append(copies.master)
            self.names[id(copies.master)] = name
            self.masters.add(id(copies.master))
            self._of_parameter[id(copies.master)] = homes

    def of_buffers(self, module: nn.Module) -> Iterator[tuple[str, Tensor, Home | Excuse]]:
        """Yield (name, buffer, home) of all buffers of a module."""
        wrapping = _ddp_of(_around(module))
        self._learn_megatron(module)
        stage = self._known.get(("Megatron", megatron.STAGE))
        local = megatron.local_buffers(module) if stage is not None else ()
        for name, buffer in _clean_names(list(module.named_buffers())):
            home = self._named(name)
            if home is None and stage is not None:
                home = Excuse(megatron.NOT_SAVED) if id(buffer) in local else stage
            yield name, buffer, home or self._wrapped(buffer, wrapping)

    def _wrapped(self, tensor: Tensor, wrapping: Mapping[int, tuple[DistributedDataParallel, bool]]) -> Home | Excuse:
        """Return the home of a plain tensor without other signs than DDP. ``wrapping``: see ``_ddp_of``."""
        wrapper, ignored = wrapping.get(id(tensor), (None, False))
        if wrapper is not None and not ignored:
            return self._cached(("DDP", id(wrapper)), "DDP", wrapper.process_group)
        if wrapper is not None:
            return Excuse("that DDP was told to ignore")
        return (
            self.anchor
            if self._vouched
            else Excuse("not known to be replicated: name their group, as in fp8dist.check(model, group=…)")
        )

    def of_parameter(self, parameter: Tensor) -> list[Home | Excuse]:
        """Return the homes of a plain parameter, or of plain tensors that belong to it."""
        return self._of_parameter.get(id(parameter), [Excuse("of parameters that are not the module's")])

    def of_gradient(self, parameter: Tensor) -> list[Home | Excuse]:
        """Return the homes of a plain parameter's gradient."""
        return self._of_gradient.get(id(parameter)) or self.of_parameter(parameter)

    def of_dtensor(self, tensor: DTensor) -> list[Home | Excuse]:
        """Return the homes of a DTensor's local tensor: one, or one per Replicate axis."""
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        if self.coords is None:
            self.coords = _coordinates(mesh)
        if any(placement.is_partial() for placement in placements):
            return [Excuse("that are partial sums")]
        wide = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        axes = [axis for axis in wide if placements[axis].is_replicate()]
        if not axes:
            return [Excuse("that are DTensors without a Replicate axis: each rank has its own")]
        if axes == wide and self._spans_anchor(mesh):
            return [self.anchor]
        return [self._of_axis(mesh, axis) for axis in axes]

    def _spans_anchor(self, mesh: DeviceMesh) -> bool:
        if id(mesh) not in self._spanning:
            self._kept.append(mesh)
            self._spanning[id(mesh)] = self._anchor_ranks.issubset(mesh.mesh.flatten().tolist())
        return self._spanning[id(mesh)]

    def _of_axis(self, mesh: DeviceMesh, axis: int) -> Home | Excuse:
        key = ("axis", id(mesh), axis)
        if key not in self._known:
            name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else str(axis)
            self._kept.append(mesh)
            group = SyncGroup(mesh.get_group(axis))
            self._known[key] = self.of_group(f"mesh axis {name}", group, _view(mesh))
        return self._known[key]

    def _of_fsdp1(self, wrapper: Any) -> Home | Excuse:
        if wrapper.sharding_strategy.name == "NO_SHARD":
            return self._cached(("FSDP1", id(wrapper)), "FSDP1", wrapper.process_group)
        if (replicas := fsdp1_replicas(wrapper)) is not None:
            return self._cached(("FSDP1", id(replicas)), "replicas of FSDP1", replicas)
        return Excuse("sharded by FSDP1: each rank has its own")

    def _named(self, name: str) -> Home | Excuse | None:
        for pattern, group in self._patterns.items():
            if fnmatch.fnmatchcase(name, pattern):
                return Excuse(f"matching {pattern}: left out") if group is None else self.of_group(pattern, group)
        return None

    def _cached(self, key: Any, label: str, group: Any) -> Home | Excuse:
        if key not in self._known:
            self._known[key] = self.of_group(label, SyncGroup(group))
        return self._known[key]


def _view(mesh: DeviceMesh) -> str:
    """Return a text that is equal for equal meshes. Ranks that disagree show it, so it is short for all meshes."""
    if mesh.size() <= _SHOWN_IN_FULL:
        return f"mesh {mesh.mesh.tolist()}"
    ranks = mesh.mesh.flatten().tolist()
    digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    return f"mesh {tuple(mesh.mesh.shape)} of ranks {ranks_text(ranks)} (digest {digest})"


def _coordinates(mesh: DeviceMesh) -> dict[str, int] | None:
    place = mesh.get_coordinate()
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    return None if place is None else dict(zip(names, place))


def _around(module: nn.Module) -> nn.Module:
    """Return a module that holds ``module``, and the attached models, as the training loop calls them, whose FP8 parts
    it has: their wrappers show how its parameters are replicated."""
    jobs = {id(part.slots.job): part.slots.job for part in fp8_parts(module)}
    return nn.ModuleList([module, *(whole for job in jobs.values() if (whole := job.whole) is not None)])


def _fsdp1_parameters(module: nn.Module) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for wrapper in fsdp1_modules(module):
        ignored = fsdp1_ignored(wrapper)
        found |= {id(p): wrapper for p in wrapper.parameters() if id(p) not in ignored}
    return found


def _clean_names(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with their names without the components of wrappers, if these are unique."""
    count = Counter(clean_fqn(name) for name, _ in named)
    for name, tensor in named:
        yield name if count[clean_fqn(name)] > 1 else clean_fqn(name), tensor


def _ddp_of(module: nn.Module) -> dict[int, tuple[DistributedDataParallel, bool]]:
    """Return for parameters and buffers in DDP modules, by id: (DDP, True if it ignores the tensor). If a DDP keeps a
    tensor equal, it counts before others that ignore it."""
    seen = list(_seen_by_ddp(module))
    return {id(t): (ddp, ignored) for ddp, t, ignored in sorted(seen, key=lambda one: -one[2])}


def ddp_parameters(module: nn.Module) -> dict[int, DistributedDataParallel]:
    """Return the parameters that DDP modules in ``module`` keep equal: DDP by id of the parameter."""
    return {id(t): ddp for ddp, t, ignored in _seen_by_ddp(module) if isinstance(t, nn.Parameter) and not ignored}


def is_plain(module: nn.Module) -> bool:
    """True if nothing shows that ranks hold other parameters: no wrapper, no tensor subclass, no mark of a shard or of
    an expert."""
    return not (
        any(isinstance(part, DistributedDataParallel) for part in module.modules())
        or any(hasattr(part, mark) for part in module.modules() for mark in _MARKS)
        or fsdp1_modules(module)
        or zero_groups(module)
        or megatron.is_megatron(module)
        or any(type(p) not in _PLAIN or is_partitioned(p) or _is_marked(p) for p in module.parameters())
    )


def _is_marked(parameter: Tensor) -> bool:
    """True for a parameter that FSDP1 has flattened, or that is marked as Megatron and DeepSpeed mark theirs."""
    marks = ("_fsdp_flattened", "tensor_model_parallel", "shared_embedding")
    return any(getattr(parameter, mark, False) for mark in marks) or not getattr(parameter, "allreduce", True)


def zero_groups(module: nn.Module) -> dict[int, Any]:
    """Return the groups whose ranks hold copies or parts of parameters in DeepSpeed's engines, by id of the parameter.
    Experts (``allreduce`` is False) are left out, because other groups hold them."""
    engines = [engine for engine in module.modules() if has_base(engine, "DeepSpeedEngine")]
    return {
        id(parameter): engine.seq_data_parallel_group
        for engine in engines
        for parameter in engine.parameters()
        if getattr(parameter, "allreduce", True)
    }


def _seen_by_ddp(module: nn.Module) -> Iterator[tuple[DistributedDataParallel, Tensor, bool]]:
    for ddp in module.modules():
        if isinstance(ddp, DistributedDataParallel):
            for name, tensor in chain(ddp.module.named_parameters(), ddp.module.named_buffers()):
                yield ddp, tensor, name in ddp.parameters_to_ignore
