"""Replication: which ranks must hold the same values of a tensor. These ranks are the tensor's *home*. A tensor that
cannot be compared has an *excuse* instead.

A plain tensor does not show if it is replicated: FSDP1's shards, experts and ZeRO's state look like any other tensor
and differ by design. So a tensor counts as replicated only if something shows it:

- a DTensor, across its Replicate axes;
- a parameter that DDP, DeepSpeed or FSDP1 keeps equal, across the wrapper's group;
- a parameter of Megatron-Core, by Megatron's own marks;
- a parameter that was equal along an axis that the caller names (see ``Axes``);
- a tensor for which the caller names a group.

The *anchor* is the ranks that call the check. All other sets of ranks are parts of it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fp8dist.checks.axes import Adopted
from fp8dist.common.text import ranks_text
from fp8dist.errors import ConfigurationError
from fp8dist.modules.parts import fp8_parts
from fp8dist.parallel import megatron
from fp8dist.parallel.partitioned import is_partitioned
from fp8dist.parallel.torch_internals import (
    fsdp1_ignored,
    fsdp1_modules,
    fsdp1_replicas,
    fsdp2_shard_groups,
    fsdp2_shards,
    reduced_by_ddp,
)
from fp8dist.state.groups import (
    GroupLike,
    SyncGroup,
    group_of_this_rank,
    has_base,
    is_dtensor,
    local_part,
    mesh_coordinates,
)
from fp8dist.state.slots import clean_fqn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ANCHOR = "all ranks that check"
"""Label of the anchor's home."""

_MARKS = ("_ddp_params_and_buffers_to_ignore", "_hf_tp_plan")
"""Attributes of modules that hold tensors which ranks do not replicate: the first lists what DDP ignores, the second is
Transformers' plan of tensor parallelism."""

_PLAIN = (nn.Parameter, nn.UninitializedParameter)
"""Types of parameters without a tensor subclass."""

_SHOWN_IN_FULL = 64
"""Largest mesh whose ranks are all shown when ranks disagree about it."""


@dataclass(frozen=True)
class Home:
    """The ranks that must hold the same values of a tensor, this rank included.

    ``label``: name of these ranks, the same on all ranks of the job. ``alias``: name of the tensor in reports, if the
    ranks of this home name it differently; "": the tensor's own name. ``some``: True if only some of these
    ranks hold it.
    """

    label: str
    group: SyncGroup
    alias: str = ""
    some: bool = False


@dataclass(frozen=True)
class Excuse:
    """Why a tensor is not compared, in words that follow a count and a kind: "3 parameters sharded by FSDP1". ``open``:
    True if it may have copies along a named axis."""

    reason: str
    open: bool = False


_UNKNOWN = Excuse("not known to be replicated: name their group or axes, as in fp8dist.check(model, group=…)", True)
_IGNORED = Excuse("that DDP was told to ignore", True)


@dataclass(frozen=True)
class Membership:
    """A set of ranks, this rank included, that may have something to compare.

    ``label``: see ``Home``. ``view``: a text of the mesh that the set is an axis of, for a report if ranks disagree
    about the mesh; "": it is not of a mesh.
    """

    label: str
    ranks: Sequence[int]
    view: str


class Replication:
    """Finds the homes of tensors. Call ``learn`` with a module before asking for its parameters. All calls are local.

    Args:
        anchor: the ranks that check. Nothing is compared with other ranks.
        vouched: True if the caller says that plain tensors without any other sign are replicated over the anchor.
        patterns: the group whose ranks replicate a plain tensor, by fqn pattern; None as a group: do not compare it.
            The first match counts, and takes precedence over all other signs.
        adopted: what is known to be copies along axes; None: the caller names no axes.
    """

    def __init__(
        self,
        anchor: SyncGroup,
        vouched: bool,
        patterns: Mapping[str, GroupLike | None],
        adopted: Adopted | None = None,
    ) -> None:
        self.coords = anchor.mesh_coordinates()
        """This rank's place on each axis of the mesh, for reports; None: no mesh is known."""
        self.names: dict[int, str] = {}
        """Fqns by the id of a parameter, without the prefixes of wrappers where these are unique."""
        self.masters: set[int] = set()
        """Ids of float32 copies of parameters that an optimizer updates in place of the parameters."""
        self.anchor = Home(ANCHOR, anchor)
        """Home of tensors that all checking ranks hold alike."""
        self._vouched = vouched
        self._patterns = {pattern: None if g is None else group_of_this_rank(g) for pattern, g in patterns.items()}
        self._anchor_ranks = frozenset(anchor.ranks)
        self._memberships: dict[str, Membership] = {}
        self._known: dict[Any, Home | Excuse] = {}  # By what they come from: a mesh axis, a wrapper, a group.
        self._in_mesh: dict[int, frozenset[int]] = {}  # By id of a mesh: its ranks.
        self._of_parameter: dict[int, list[Home | Excuse]] = {}  # By id of a parameter.
        self._of_gradient: dict[int, list[Home | Excuse]] = {}  # The same, where the gradient has other homes.
        self._counting: dict[int, Any] = {}  # By id of a DTensor: the group among which FSDP2 has cut it, or None.
        self._shards: dict[int, Tensor] = {}  # By id of a gathered copy.
        self._kept: list[Any] = []  # Keeps objects alive whose ids are keys: else another object could get the id.
        self.adopted = adopted
        self.axes: dict[str, Home] = {}
        """Homes of copies along the named axes of several ranks that all take part in the check, by axis."""
        self._learn_axes()

    @property
    def memberships(self) -> tuple[Membership, ...]:
        """Sets of ranks other than the anchor, sorted by label. Includes sets of this rank alone, and sets with ranks
        outside of the anchor."""
        return tuple(self._memberships[label] for label in sorted(self._memberships))

    def of_group(self, label: str, group: SyncGroup, view: str = "") -> Home | Excuse:
        """Return the home of tensors that the ranks of ``group`` replicate, or the excuse if they cannot be compared.

        Args:
            label: name of the group, the same on all ranks of the job. A label that another set has gets a number.
            view: see ``Membership``.
        """
        if self._anchor_ranks.issubset(group.ranks):
            return self.anchor
        label = self._unique(label, group.ranks)
        self._memberships[label] = Membership(label, group.ranks, view)
        if not group.communicates:
            return Excuse(f"that are shared with no other rank ({label})", True)
        if not self._anchor_ranks.issuperset(group.ranks):
            return Excuse(f"that are shared with ranks that do not take part in this check ({label})", True)
        return Home(label, group)

    def _learn_axes(self) -> None:
        """Record the homes of copies along the named axes, and of ``copies``. All ranks have these, whatever they
        hold."""
        if self.adopted is None:
            return
        for axis, group in self.adopted.groups.items():
            if not self._anchor_ranks.issuperset(group.ranks):
                raise ConfigurationError(
                    f"axis {axis} has ranks that do not take part: all ranks of an axis must check. Pass a group that "
                    "has them, such as the whole mesh"
                )
            home = self.of_group(f"axis {axis}", group)
            if isinstance(home, Home) and group.communicates:
                self.axes[axis] = home
            for original in sorted(set(self.adopted.axes.copies.values())):
                label = _tied(axis, original)
                self._memberships[label] = Membership(label, group.ranks, "")
        if self.coords is None:
            self.coords = {axis: list(group.ranks).index(group.rank) for axis, group in self.adopted.groups.items()}

    def open_axes(self, name: str, tensor: Tensor, homes: Sequence[Home | Excuse]) -> list[str]:
        """Return the named axes along which nothing shows if ranks hold copies of a tensor or parts. ``homes``: of the
        tensor, without axes."""
        if self.adopted is None or self.adopted.is_distinct(name) or self._named(name) is not None:
            return []
        if is_dtensor(tensor):
            known = self._ranks_of(tensor.device_mesh)
            return [axis for axis, home in self.axes.items() if len(known.intersection(home.group.ranks)) == 1]
        if any(isinstance(one, Excuse) and not one.open for one in homes):
            return []  # It is known why ranks hold other values.
        covering = [frozenset(one.group.ranks) for one in homes if isinstance(one, Home)]
        return [axis for axis, home in self.axes.items() if not any(of.issuperset(home.group.ranks) for of in covering)]

    def with_axes(self, name: str, homes: Sequence[Home | Excuse]) -> Sequence[Home | Excuse]:
        """Return the homes of a tensor, with those along named axes."""
        if self.adopted is None:
            return homes
        along = [home for axis, home in self.axes.items() if self.adopted.is_copy(name, axis)]
        original = self.adopted.axes.copies.get(name, name)
        along += [tie for tie in self.ties if tie.alias == original]
        if along:
            return [*(one for one in homes if isinstance(one, Home)), *along]
        apart = Excuse(f"not known to be copies along axis {' or '.join(self.axes)}") if self.axes else _UNKNOWN
        return [apart if one == _UNKNOWN else one for one in homes]

    def axis_of(self, home: Home) -> str:
        """Return the named axis along which ``with_axes`` has found a home."""
        return next(axis for axis, of in self.axes.items() if of.group is home.group)

    @property
    def ties(self) -> list[Home]:
        """The homes of ``copies`` along each axis on which ranks hold them under both names."""
        if self.adopted is None:
            return []
        held = [(axis, home, of) for axis, home in self.axes.items() for of in sorted(self.adopted.found(axis).shared)]
        return [Home(_tied(axis, of), home.group, of, some=True) for axis, home, of in held]

    def _unique(self, label: str, ranks: Sequence[int]) -> str:
        """Return the label, with a number if a set of other ranks has it already, as with two DDP modules. Ranks run
        the same program, so they number alike."""
        candidate, number = label, 1
        while candidate in self._memberships and self._memberships[candidate].ranks != ranks:
            number += 1
            candidate = f"{label} #{number}"
        return candidate

    def learn(self, module: nn.Module) -> None:
        """Record the homes of all parameters of a module. Signs are tried in order of precedence: patterns, DTensors,
        FSDP1, ZeRO's stage 3, DeepSpeed, Megatron, DDP."""
        everything = around(module)
        sharded, wrapping, zero = _fsdp1_parameters(everything), _ddp_of(everything), zero_groups(everything)
        copies, cut = self._learn_megatron(module), fsdp2_shard_groups(everything)
        self._shards = fsdp2_shards(everything)
        for name, parameter in _clean_names([(name, self.stored(one)) for name, one in named_parameters(module)]):
            self._kept.append(parameter)
            self.names[id(parameter)] = name
            home = self._named(name)
            if home is None and is_dtensor(parameter):
                # ``of_dtensor`` is asked for the parameter itself, ``of_count`` for its step count, and this for its
                # other plain optimizer state.
                home = Excuse("that are not DTensors, of parameters that are")
                self._counting[id(parameter)] = cut.get(id(parameter))
            if home is None and id(parameter) in sharded:
                home = self._of_fsdp1(sharded[id(parameter)])
            if home is None and is_partitioned(parameter):
                home = Excuse("partitioned by ZeRO: each rank has its own")
            if home is None and id(parameter) in zero:
                home = self._cached(("ZeRO", id(zero[id(parameter)])), "DeepSpeed", zero[id(parameter)])
            if home is None and id(parameter) in copies:
                self._learn_copies(name, parameter, copies[id(parameter)])
            else:
                self._of_parameter[id(parameter)] = [home or self._wrapped(parameter, wrapping)]

    def stored(self, parameter: Tensor) -> Tensor:
        """Return what is trained and saved: the parameter, or its shard while FSDP2 shows a gathered copy, which is
        equal on ranks that hold different shards. Call ``learn`` with the parameter's module before."""
        return self._shards.get(id(parameter), parameter)

    def _learn_megatron(self, module: nn.Module) -> Mapping[int, megatron.Copies]:
        """Record Megatron's groups, and return where copies of each parameter are, by its id; empty for a model that is
        not Megatron's."""
        if not megatron.is_megatron(module):
            return {}
        self.coords = self.coords or megatron.coordinates()
        for label, group in megatron.groups().items():
            if group is None:  # This rank is in no such group. But ranks must agree on the labels: a set of one.
                here = dist.get_rank()
                self._memberships[label] = Membership(label, (here,), "")
            elif ("Megatron", label) not in self._known:
                home = self.of_group(label, SyncGroup(group))
                if label == megatron.TIED and isinstance(home, Home):
                    # The first stage calls it a word embedding, the last one an output layer.
                    home = replace(home, alias=megatron.TIED)
                self._known["Megatron", label] = home
        return megatron.copies_of(module)

    def _learn_copies(self, name: str, parameter: Any, copies: megatron.Copies) -> None:
        """Record the homes of a Megatron parameter, of its gradient and of its float32 copy."""
        # A label without a home: a rank may hold a tied embedding without being in the group that reduces it
        # (get_embedding_ranks).
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
        """Yield (name, buffer, home) of all buffers of a module. No ``learn`` is needed."""
        wrapping = _ddp_of(around(module))
        self._learn_megatron(module)
        stage = self._known.get(("Megatron", megatron.STAGE))
        local = megatron.local_buffers(module) if stage is not None else ()
        for name, buffer in _clean_names(list(module.named_buffers())):
            home = self._named(name)
            if home is None and stage is not None:
                home = Excuse(megatron.NOT_SAVED) if id(buffer) in local else stage
            yield name, buffer, home or self._wrapped(buffer, wrapping)

    def _wrapped(self, tensor: Tensor, wrapping: Mapping[int, tuple[DistributedDataParallel, bool]]) -> Home | Excuse:
        """Return the home of a plain tensor with no other sign than DDP. ``wrapping``: see ``_ddp_of``."""
        wrapper, ignored = wrapping.get(id(tensor), (None, False))
        if wrapper is not None and not ignored:
            return self._cached(("DDP", id(wrapper)), "DDP", wrapper.process_group)
        if wrapper is not None:
            return _IGNORED
        return self.anchor if self._vouched else _UNKNOWN

    def of_parameter(self, parameter: Tensor) -> list[Home | Excuse]:
        """Return the homes of a plain parameter, or of its plain optimizer state. For DTensors see ``of_dtensor``."""
        return self._of_parameter.get(id(parameter), [Excuse("of parameters that are not the module's")])

    def of_count(self, parameter: Any) -> list[Home | Excuse]:
        """Return the homes of the number of steps that an optimizer has done with a parameter: those of the parameter,
        and of a DTensor also the ranks among which FSDP2 has cut it, because these get its gradient together. Not the
        ranks of other shards: an expert without tokens has no gradient."""
        if id(parameter) not in self._counting:
            return self.of_parameter(parameter)
        homes, group = self.of_dtensor(parameter), self._counting[id(parameter)]
        if group is not None:
            mesh = parameter.device_mesh
            copies = [mesh.size(axis) for axis, of in enumerate(parameter.placements) if of.is_replicate()]
            if math.prod(copies) * group.size() == mesh.size() and self._spans_anchor(mesh):
                return [self.anchor]
            homes.append(self._cached(("FSDP2", id(group)), "shards of FSDP2", group))
        return [one for one in homes if isinstance(one, Home)] or self.of_parameter(parameter)

    def of_gradient(self, parameter: Tensor) -> list[Home | Excuse]:
        """Return the homes of a plain parameter's gradient: those of the parameter, except under Megatron."""
        return self._of_gradient.get(id(parameter)) or self.of_parameter(parameter)

    def of_dtensor(self, tensor: DTensor) -> list[Home | Excuse]:
        """Return the homes of a DTensor's local tensor: the anchor, if all its ranks replicate it, else the ranks along
        each Replicate axis."""
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        if self.coords is None:
            self.coords = mesh_coordinates(mesh)
        if any(placement.is_partial() for placement in placements):
            return [Excuse("that are partial sums")]
        wide = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]  # An axis of one rank replicates nothing.
        axes = [axis for axis in wide if placements[axis].is_replicate()]
        if not axes:
            return [Excuse("that are DTensors without a Replicate axis: each rank has its own")]
        if axes == wide and self._spans_anchor(mesh):
            return [self.anchor]
        return [self._of_axis(mesh, axis) for axis in axes]

    def _spans_anchor(self, mesh: DeviceMesh) -> bool:
        """True if all ranks that check are in the mesh."""
        return self._anchor_ranks.issubset(self._ranks_of(mesh))

    def _ranks_of(self, mesh: DeviceMesh) -> frozenset[int]:
        """Return the ranks of a mesh. Reads them once."""
        if id(mesh) not in self._in_mesh:
            self._kept.append(mesh)
            self._in_mesh[id(mesh)] = frozenset(mesh.mesh.flatten().tolist())
        return self._in_mesh[id(mesh)]

    def _of_axis(self, mesh: DeviceMesh, axis: int) -> Home | Excuse:
        """Return the home of tensors that are replicated along one axis of a mesh."""
        key = ("axis", id(mesh), axis)
        if key not in self._known:
            name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else str(axis)
            self._kept.append(mesh)
            group = SyncGroup(mesh.get_group(axis))
            self._known[key] = self.of_group(f"mesh axis {name}", group, _view(mesh))
        return self._known[key]

    def _of_fsdp1(self, wrapper: Any) -> Home | Excuse:
        """Return the home of the parameters of an FSDP1 wrapper, or of this rank's shards."""
        if wrapper.sharding_strategy.name == "NO_SHARD":
            return self._cached(("FSDP1", id(wrapper)), "FSDP1", wrapper.process_group)
        if (replicas := fsdp1_replicas(wrapper)) is not None:
            return self._cached(("FSDP1", id(replicas)), "replicas of FSDP1", replicas)
        return Excuse("sharded by FSDP1: each rank has its own")

    def _named(self, name: str) -> Home | Excuse | None:
        """Return the home that the caller's patterns give this name; None: no pattern matches."""
        for pattern, group in self._patterns.items():
            if fnmatch.fnmatchcase(name, pattern):
                return Excuse(f"matching {pattern}: left out") if group is None else self.of_group(pattern, group)
        return None

    def _cached(self, key: Any, label: str, group: Any) -> Home | Excuse:
        """Return ``of_group`` for a ProcessGroup. Looks it up once per ``key``, which is unique for the group."""
        if key not in self._known:
            self._known[key] = self.of_group(label, SyncGroup(group))
        return self._known[key]


def _tied(axis: str, original: str) -> str:
    """Return the label of the ranks of an axis that hold copies of a parameter under other names."""
    return f"axis {axis}: {original}"


def _view(mesh: DeviceMesh) -> str:
    """Return a text that is equal for equal meshes. Reports show it if ranks disagree, so it is short even for a large
    mesh."""
    if mesh.size() <= _SHOWN_IN_FULL:
        return f"mesh {mesh.mesh.tolist()}"
    ranks = mesh.mesh.flatten().tolist()
    digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    return f"mesh {tuple(mesh.mesh.shape)} of ranks {ranks_text(ranks)} (digest {digest})"


def around(module: nn.Module) -> nn.Module:
    """Return a module that holds ``module`` and all wrappers around it that are known.

    Wrappers show how parameters are replicated, but a caller may pass the model inside them. FP8 modules know the model
    that was given to ``attach``, as the training loop calls it.
    """
    jobs = {id(part.slots.job): part.slots.job for part in fp8_parts(module)}
    return nn.ModuleList([module, *(whole for job in jobs.values() if (whole := job.whole) is not None)])


def _fsdp1_parameters(module: nn.Module) -> dict[int, Any]:
    """Return the innermost FSDP1 wrapper of each parameter, by its id, without those that wrappers ignore."""
    found: dict[int, Any] = {}
    for wrapper in fsdp1_modules(module):
        ignored = fsdp1_ignored(wrapper)
        found |= {id(p): wrapper for p in wrapper.parameters() if id(p) not in ignored}
    return found


def _clean_names(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor). Names are without the components of wrappers ("_fsdp_wrapped_module"), unless two tensors
    would have the same."""
    count = Counter(clean_fqn(name) for name, _ in named)
    for name, tensor in named:
        yield name if count[clean_fqn(name)] > 1 else clean_fqn(name), tensor


def _ddp_of(module: nn.Module) -> dict[int, tuple[DistributedDataParallel, bool]]:
    """Return for each parameter and buffer in DDP modules, by its id: (DDP, True if this DDP ignores the tensor).

    If several DDP modules hold the tensor, one that keeps it equal comes before one that ignores it.
    """
    seen = [
        (id(tensor), (ddp, name in ddp.parameters_to_ignore))
        for ddp in module.modules()
        if isinstance(ddp, DistributedDataParallel)
        for name, tensor in chain(ddp.module.named_parameters(), ddp.module.named_buffers(), _behind_dtensors(ddp))
    ]
    # Later entries replace earlier ones: those that ignore come first.
    return dict(sorted(seen, key=lambda one: -one[1][1]))


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of a module, as it does itself, then those that its DDP modules train behind DTensors."""
    yield from module.named_parameters()
    for prefix, ddp in module.named_modules():
        if isinstance(ddp, DistributedDataParallel):
            yield from ((f"{prefix}.module.{name}".lstrip("."), one) for name, one in _behind_dtensors(ddp))


def _behind_dtensors(ddp: DistributedDataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of what a DDP module trains and its modules do not have any more: with ``device_mesh=``
    and tensor parallelism, the first forward replaces such parameters by DTensors on the same memory."""
    held = {id(parameter) for parameter in ddp.parameters()}
    gone = {one.data_ptr(): one for key, one in reduced_by_ddp(ddp).items() if key not in held and one.numel()}
    for prefix, part in ddp.module.named_modules() if gone else ():
        for name, value in vars(part).items():
            if is_dtensor(value) and (one := gone.pop(local_part(value).data_ptr(), None)) is not None:
                yield f"{prefix}.{name}".lstrip("."), one


def ddp_parameters(module: nn.Module) -> dict[int, DistributedDataParallel]:
    """Return the DDP module that keeps a parameter or buffer equal on its ranks, by its id, of those in ``module``."""
    return {key: ddp for key, (ddp, ignored) in _ddp_of(module).items() if not ignored}


def late_for_ddp(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the trainable parameters in DDP modules that these do not reduce, because they were made before them."""
    for ddp in (part for part in module.modules() if isinstance(part, DistributedDataParallel)):
        known = reduced_by_ddp(ddp)
        for name, parameter in ddp.module.named_parameters():
            ignored = name in ddp.parameters_to_ignore or not parameter.requires_grad
            if known and not ignored and id(parameter) not in known:
                yield parameter


def is_plain(module: nn.Module) -> bool:
    """True if nothing shows that ranks hold different parameters: there is no wrapper, no tensor subclass, and no mark
    of a shard or of an expert."""
    return not (
        any(isinstance(part, DistributedDataParallel) for part in module.modules())
        or any(hasattr(part, mark) for part in module.modules() for mark in _MARKS)
        or fsdp1_modules(module)
        or zero_groups(module)
        or megatron.is_megatron(module)
        or any(type(p) not in _PLAIN or is_partitioned(p) or _is_marked(p) for p in module.parameters())
    )


def _is_marked(parameter: Tensor) -> bool:
    """True for a parameter that FSDP1 has flattened, or that has a mark of Megatron or DeepSpeed."""
    marks = ("_fsdp_flattened", "tensor_model_parallel", "shared_embedding")
    return any(getattr(parameter, mark, False) for mark in marks) or not getattr(parameter, "allreduce", True)


def zero_groups(module: nn.Module) -> dict[int, Any]:
    """Return the process group whose ranks hold copies or parts of a parameter, by its id, for parameters in
    DeepSpeed's engines. Without experts (``allreduce`` is False), which the ranks of other groups hold."""
    engines = [engine for engine in module.modules() if has_base(engine, "DeepSpeedEngine")]
    return {
        id(parameter): engine.seq_data_parallel_group
        for engine in engines
        for parameter in engine.parameters()
        if getattr(parameter, "allreduce", True)
    }
