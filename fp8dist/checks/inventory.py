"""Inventory: collects what one rank brings to a check, sorted by the ranks that must hold the same.

A *thing* is what gets one digest: a parameter, a gradient, a buffer, a tensor of optimizer state, or a slot of FP8
state. All things that the same ranks replicate form one ``ReplicaSet``. The *anchor* is the ranks that call the check;
its set comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8dist.checks.axes import Adopted, OpenTensor
from fp8dist.checks.coherence import Asked, Inside, inside_of
from fp8dist.checks.computations import KIND, ComputedContent, computations_of
from fp8dist.checks.contents import (
    ArenaContent,
    Content,
    Digester,
    Field,
    Key,
    NamedTensor,
    TensorContent,
    values_near,
)
from fp8dist.checks.differences import ravel
from fp8dist.checks.finite import not_finite
from fp8dist.checks.likeness import likeness
from fp8dist.checks.replication import Excuse, Home, Membership, Replication, late_for_ddp, named_parameters
from fp8dist.checks.report import DivergenceReport, Sender, this_rank
from fp8dist.common.divergence import COHERENCE, Finding
from fp8dist.common.text import plural
from fp8dist.parallel.megatron import gradient_of
from fp8dist.parallel.torch_internals import fsdp2_shards
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import GroupLike, SyncGroup, has_base, is_dtensor, local_part
from fp8dist.state.slots import clean_fqn

Store = Callable[[Tensor], None] | None
"""Writes a repaired value back to where it came from; None: the tensor is a view of that memory."""

_ALONE = Excuse("that are shared with no other rank")
_GONE = Excuse("can be found: the module that attach() was given is gone. Keep it, or call attach() with another one")


@dataclass(frozen=True)
class Scope:
    """What a check compares. ``state``: FP8 state. ``compute``: results of casts and products with known operands,
    which each rank computes for the check. ``coherence``: tensors of one rank with one another. ``also``: bytes of this
    rank that are compared outside the check, by way."""

    parameters: bool = True
    gradients: bool = False
    buffers: bool = False
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    state: bool = True
    compute: bool = False
    coherence: Asked | None = None
    also: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def kinds(self) -> set[str]:
        """The kinds of findings that a check of this scope may have, of those that a copy can repair."""
        asked = {"parameter": self.parameters, "gradient": self.gradients, "buffer": self.buffers}
        asked |= {"optimizer": bool(self.optimizers), "scale": self.state, "history": self.state}
        return {kind for kind, wanted in asked.items() if wanted}


@dataclass(frozen=True)
class ReplicaSet:
    """What this rank holds, and the other ranks of ``group`` must hold alike. ``label``: name of the set, the same on
    all ranks of the job. ``some``: True if only some ranks of the group hold it; others have no contents."""

    label: str
    group: SyncGroup
    contents: tuple[Content, ...]
    some: bool = False

    @property
    def keys(self) -> list[Key]:
        """Keys of all things in the set, in order."""
        return [key for content in self.contents for key in content.keys]

    def digests(self, digester: Digester) -> Tensor:
        """Return the digest of each thing: int64[len(keys), 2] on the CPU."""
        parts = [content.digests(digester) for content in self.contents if content.keys]
        return torch.cat(parts) if parts else torch.zeros(0, 2, dtype=torch.int64)

    def fields(self, index: int) -> list[Field]:
        """Return the tensors of the thing at ``index`` in ``keys``."""
        for content in self.contents:
            if index < len(content.keys):
                return content.fields(index)
            index -= len(content.keys)
        raise IndexError(index)


@dataclass(frozen=True)
class Holdings:
    """All that one rank brings to a check.

    Attributes:
        sets: the anchor's set, then those of other ranks.
        step: number of the step in progress, or of the last one. ``manifest``: a text. Both must be equal on all ranks.
        last_good: the newest step at which the things of a scope were compared and equal, see ``scopes``.
        coords: this rank's place on each axis of the mesh.
        alone: the part of the report that needs no other rank: what is skipped, and what is not finite.
        memberships: the ranks of all sets but the anchor's, also of those in which this rank has nothing.
        computed: results of casts and products that this rank computes for the check; equal labels mean equal hardware,
            versions and casts. None: no rank computes.
        pending: named axes along which tensors were not compared before.
        inside: what was compared inside this rank; None: nothing.
        ways: see ``DivergenceReport.compared_by``.
        late: see ``Sender``.
    """

    sets: tuple[ReplicaSet, ...]
    step: int = 0
    manifest: str = ""
    last_good: Mapping[tuple[str, int], int] = field(default_factory=dict)
    coords: dict[str, int] | None = None
    alone: DivergenceReport = field(default_factory=DivergenceReport)
    memberships: tuple[Membership, ...] = ()
    computed: ReplicaSet | None = None
    pending: tuple[str, ...] = ()
    inside: Inside | None = None
    ways: Mapping[str, int] = field(default_factory=dict)
    late: tuple[str, ...] = ()

    @property
    def layout(self) -> tuple[str, ...]:
        """Labels of the sets other than the anchor's, and ``asked``: they decide on collectives."""
        return (*(m.label for m in self.memberships), *self.asked)

    @property
    def asked(self) -> tuple[str, ...]:
        """What must be equal on all ranks, beside the anchor's set: it decides on collectives, and whether there is
        anything to compare."""
        first = (f"axis {axis}, compared for the first time" for axis in self.pending)
        computed = () if self.computed is None else (plural(KIND),)
        inside = (COHERENCE,) if self.inside is not None and self.inside.suffices else ()
        return (*computed, *inside, *first)

    @property
    def inside_findings(self) -> list[Finding]:
        """What was found inside this rank, with its host and device."""
        me = this_rank(self._device(torch.device("cpu")), self.coords)
        return [] if self.inside is None else [finding.located([me]) for finding in self.inside.findings]

    def _device(self, otherwise: torch.device) -> torch.device:
        """Return the device of what is compared with other ranks."""
        return next((c.device for s in self.all_sets for c in s.contents if c.keys), otherwise)

    @property
    def all_sets(self) -> tuple[ReplicaSet, ...]:
        """``sets``, and ``computed``."""
        return self.sets if self.computed is None else (*self.sets, self.computed)

    @property
    def compared(self) -> dict[str, int]:
        """Number of compared things by kind. One that has copies along several axes counts once."""
        return dict(sorted(Counter(kind for _, kind in self.things).items()))

    @property
    def things(self) -> set[tuple[str, str]]:
        """(name, kind) of all compared things."""
        return {key[:2] for s in self.all_sets for key in s.keys}

    @property
    def scopes(self) -> dict[str, tuple[str, int]]:
        """By kind of what is compared, a key that only checks of the same things between the same ranks have: another
        may have left out what differs, or who."""
        parts: dict[str, set[tuple[str, str]]] = {}
        for held in self.all_sets:
            for name, kind, *_ in held.keys:
                parts.setdefault(kind, set()).add((held.group.identity, name))
        return {kind: (kind, hash(frozenset(of))) for kind, of in parts.items()}

    @property
    def compared_bytes(self) -> dict[str, int]:
        """Bytes of compared things by kind, where they are known."""
        contents = [content for s in self.all_sets for content in s.contents]
        sizes: Counter[str] = Counter()
        for (kind, _), size in {of: size for content in contents for of, size in content.sizes.items()}.items():
            sizes[kind] += size
        return dict(sorted(sizes.items()))

    def evidence(self, finding: Finding) -> dict[str, Any] | None:
        """Return what this rank holds of the thing in a finding, as JSON values for a file: a whole slot, or the
        elements near the first difference. None: this rank does not hold the thing."""
        for s in self.all_sets:
            for index, key in enumerate(s.keys):
                if key.name == finding.name and key.kind in (finding.kind, "slot"):
                    fields = s.fields(index)
                    if key.kind == "slot":
                        return {"fields": [values_near(f, None) for f in fields]}
                    at = finding.index or ()
                    shown = [f for f in fields if f.name == finding.field]
                    return {"fields": [values_near(f, ravel(at, tuple(f.tensor.shape))) for f in shown]}
        return None

    def gather(self, group: SyncGroup, value: Any, last_good: bool = True) -> tuple[dict[int, Any], list[Sender]]:
        """Exchange ``value`` with the ranks of ``group``. COLLECTIVE.

        Args:
            last_good: send the last good steps, too, for findings about values.

        Returns:
            The values by rank, and the ranks with their hosts, devices, steps and last good steps.
        """
        device = self._device(group.device)
        good = {kind: self.last_good.get(of) for kind, of in self.scopes.items()} if last_good else {}
        gathered = group.gather((Sender(this_rank(device, self.coords), self.step, good, self.late), value))
        return {of.participant.rank: theirs for of, theirs in gathered}, [of for of, _ in gathered]


def likeness_of(contents: Sequence[Content]) -> str:
    """Return a text that is equal on ranks that must compute the same results: devices, versions, settings, and names
    of the computations."""
    return repr([(likeness(content.device), [key.name for key in content.keys]) for content in contents])


class Inventory:
    """Collects what a check compares: call the ``add`` methods, then ``holdings``. All calls are local.

    Args:
        anchor: the ranks that check.
        vouched: True if the caller says that plain tensors are replicated over the anchor.
        groups: the group whose ranks replicate a plain tensor, by fqn pattern; None as a group: do not compare it.
        at_start: True before training. Leaves out what may rightly differ then: tensors without memory; statistics of
            normalisation layers, of which a resumed rank may have its own; and buffers in DDP, which broadcasts them in
            the next forward unless the user has switched that off.
        adopted: what is known to be copies along axes; None: the caller names no axes.
    """

    def __init__(
        self,
        anchor: SyncGroup,
        vouched: bool = False,
        groups: Mapping[str, GroupLike | None] | None = None,
        at_start: bool = False,
        adopted: Adopted | None = None,
    ) -> None:
        self._at_start = at_start
        self._replication = Replication(anchor, vouched, groups or {}, adopted)
        home = self._replication.anchor
        self._homes: dict[str, Home] = {home.label: home}
        self._contents: dict[str, list[Content]] = {home.label: []}
        self._tensors: dict[tuple[str, str], list[NamedTensor]] = {}  # By label of the set, and kind.
        self._named: Counter[tuple[str, str, str]] = Counter()  # By label, kind and name.
        self._skipped: Counter[tuple[str, str]] = Counter()  # By kind, and reason.
        self._counted: dict[str, tuple[int, int]] = {}  # By kind: (compared, existing), see ``counts`` of ``_add``.
        self._noun = "parameters"  # Or "trainable parameters", if only these count.
        self._nonfinite: tuple[str, ...] = ()
        self._computed: ReplicaSet | None = None
        self._still_pending: tuple[str, ...] = ()
        self._inside: Inside | None = None
        self._ways: Counter[str] = Counter()
        self._late: tuple[str, ...] = ()

    def holdings(
        self, step: int, manifest: str = "", last_good: Mapping[tuple[str, int], int] | None = None
    ) -> Holdings:
        """Return all that was collected. For the arguments see ``Holdings``."""
        contents = {label: list(parts) for label, parts in self._contents.items()}
        skipped = [
            (kind, f"{count} {plural(kind)} {reason}")
            for (kind, reason), count in sorted(self._skipped.items(), key=lambda one: (plural(one[0][0]), one[0][1]))
        ]
        unverified = {
            kind: "; ".join(text for of, text in skipped if of == kind)
            for kind, (compared, _) in sorted(self._counted.items())
            if not compared
        }
        compared, held = self._counted.get("parameter", (0, 0))
        for (label, kind), tensors in self._tensors.items():
            contents.setdefault(label, []).append(TensorContent(kind, tensors))
        homes = {**self._homes, **{home.label: home for home in self._replication.ties}}
        parts = {label: tuple(contents.get(label, ())) for label in homes}
        return Holdings(
            sets=tuple(ReplicaSet(label, homes[label].group, of, homes[label].some) for label, of in parts.items()),
            step=step,
            manifest=manifest,
            last_good=last_good or {},
            coords=self._replication.coords,
            alone=DivergenceReport(
                skipped=tuple(text for _, text in skipped),
                unverified=unverified,
                partial={"parameter": f"{compared} of {held} {self._noun}"} if 0 < compared < held else {},
                nonfinite=self._nonfinite,
            ),
            memberships=self._replication.memberships,
            late=self._late,
            computed=self._computed,
            pending=self._still_pending,
            inside=self._inside,
            ways={way: self._ways[way] for way in sorted(self._ways, key=order_of_ways) if self._ways[way]},
        )

    def adopt(self, module: nn.Module) -> None:
        """Let named axes find out which tensors of a module are copies along them, if they do not know. COLLECTIVE over
        each axis that does not: call it after a check in which ranks agreed on these (``Holdings.pending``). A rank
        that cannot read its tensors takes part, and its next check says so."""
        if self._replication.adopted is None:
            return
        tensors: list[OpenTensor] | None
        try:
            found = list(self._open_tensors(module))
            digests = TensorContent("parameter", [one for one, _ in found]).digests(Digester()) if found else ()
            tensors = [OpenTensor(one.name, int(of[0]), axes) for (one, axes), of in zip(found, digests)]
            self._replication.adopted.error = None
        except Exception as raised:
            tensors, self._replication.adopted.error = None, raised
        self._replication.adopted.adopt(self._pending(module), tensors, _all_names(module))

    def _pending(self, module: nn.Module) -> list[str]:
        """Return the axes along which the tensors of a module were not compared before."""
        if self._replication.adopted is None:
            return []
        buffers = {clean_fqn(name) for name, _ in module.named_buffers()}  # Along an axis they may be the only copies.
        return self._replication.adopted.pending(_all_names(module) | buffers)

    def await_axes(self, module: nn.Module) -> None:
        """Note which axes wait for their first comparison, for ranks to agree on. ``add_module`` does so, too."""
        self._still_pending = tuple(self._pending(module))

    def _open_tensors(self, module: nn.Module) -> Iterator[tuple[NamedTensor, Sequence[str]]]:
        """Yield the local parts of parameters and buffers that may be copies along axes, with these axes.

        Raises:
            ValueError: a parameter has no values yet.
        """
        replication = self._replication
        replication.learn(module)
        own = {id(b) for part in module.modules() for b in part.buffers(False) if _has_statistics(part)}
        named: list[tuple[str, Tensor, Sequence[Home | Excuse]]]
        parameters = map(replication.stored, module.parameters())
        named = [(replication.names[id(one)], one, replication.of_parameter(one)) for one in parameters]
        named += [(name, one, [home]) for name, one, home in replication.of_buffers(module) if id(one) not in own]
        for name, tensor, homes in named:
            along = replication.open_axes(name, tensor, homes)
            if not along or is_traceable_wrapper_subclass(local := local_part(tensor)):
                continue
            if is_lazy(local) or local.is_meta:
                if isinstance(tensor, nn.Parameter):
                    raise ValueError(f"parameter '{name}' has no values yet")
            elif local.layout is torch.strided and not local.is_quantized:
                yield NamedTensor(name, local.detach()), along

    def add_arena(self, sync: ArenaSync, within: str = "") -> None:
        """Add the FP8 state of one arena, all of whose slots the ranks of the sync's group share. ``within``: what
        their names begin with."""
        home: Home | Excuse = Excuse("that this rank shares with no other")
        if sync.communicates and sync.group is not None:
            label = f"FP8 state of {', '.join(sync.patterns) or 'all modules'}"
            home = self._replication.of_group(label, sync.group)
        if isinstance(home, Excuse):
            self._skip("slot", home, len(sync.arena))
        else:
            self._homes[home.label] = home
            self._contents.setdefault(home.label, []).append(content := ArenaContent(sync.arena, within))
            self._ways["copies"] += sum(content.sizes.values())

    def add_module(self, module: nn.Module, scope: Scope) -> None:
        """Add the tensors of a module, and of the optimizers in ``scope``, that ``scope`` selects. Also looks for
        values that are not finite, except before training."""
        self._ways.update(scope.also)
        if scope.parameters or scope.gradients:
            self._add_parameters(module, scope.parameters, scope.gradients)
            self._late = tuple(self._replication.names[id(parameter)] for parameter in late_for_ddp(module))
        if not self._at_start:
            self._nonfinite += not_finite_in(module, scope)
        self._add_buffers(module, scope.buffers)
        for optimizer in scope.optimizers:
            self._add_optimizer(module, optimizer)

    def add_gone(self, scope: Scope) -> None:
        """Note that nothing of a module is compared, because it no longer exists."""
        for kind in sorted(scope.kinds - {"scale", "history"}):
            self._counted[kind] = (0, 0)
            self._skip(kind, _GONE, 0)

    def add_inside(self, module: nn.Module, asked: Asked, step: int) -> None:
        """Compare tensors of this rank with one another. For the arguments see ``inside_of``."""
        self._inside = inside_of(module, asked, step)
        self._ways["inside the rank"] += self._inside.size
        for text in self._inside.unread:
            self._skip(COHERENCE, Excuse(text), 0)

    def add_computations(self, module: nn.Module) -> None:
        """Add casts and products with known operands, those that the FP8Linears and FP8Experts of a module do. They run
        when digests are computed. Ranks are compared only with ranks of equal hardware and versions."""
        contents = [
            ComputedContent(computations, device, f" (device {i} of this rank)" if i else "")
            for i, (device, computations) in enumerate(computations_of(module).items())
        ]
        self._computed = ReplicaSet(likeness_of(contents), self._replication.anchor.group, tuple(contents))
        if not contents:
            self._skip(KIND, Excuse("exist: no module computes in FP8"), 0)

    def _add_parameters(self, module: nn.Module, parameters: bool, gradients: bool) -> None:
        """Add all parameters, their current gradients, or both."""
        self._replication.learn(module)
        self.await_axes(module)
        if self._replication.adopted is not None and self._replication.adopted.error is not None and not self._at_start:
            raise self._replication.adopted.error
        if self._replication.adopted is not None and not self._still_pending:
            self._replication.adopted.require_copies(_all_names(module))
        found = False
        everything = [parameter for _, parameter in named_parameters(module)]
        trainable = any(parameter.requires_grad for parameter in everything)
        if trainable and not all(parameter.requires_grad for parameter in everything):
            self._noun = "trainable parameters"
        for parameter in map(self._replication.stored, everything):
            name = self._replication.names[id(parameter)]
            counts = parameter.requires_grad or not trainable
            if parameters:
                self._add(name, "parameter", parameter, self._replication.of_parameter(parameter), counts=counts)
            gradient = gradient_of(parameter) if gradients else None
            if gradient is not None:
                found = True
                self._add(name, "gradient", gradient, self._replication.of_gradient(parameter))
        if gradients and not found:
            self._skip("gradient", Excuse("exist now (there are none between zero_grad() and backward)"), 0)
            self._counted["gradient"] = (int(not trainable), 1)  # Not verified, unless nothing is trained.

    def _add_buffers(self, module: nn.Module, compare: bool) -> None:
        """Add all buffers, or count them as skipped."""
        if not compare:
            if count := sum(1 for _ in module.named_buffers()):
                self._skip("buffer", Excuse("that buffers=True would compare"), count)
            return
        parts = [part for part in module.modules() if self._at_start]
        own = [part.buffers(recurse=False) for part in parts if _has_statistics(part)]
        own += [part.buffers() for part in parts if isinstance(part, DistributedDataParallel)]
        left_out = {id(buffer) for buffers in own for buffer in buffers}
        for name, buffer, home in self._replication.of_buffers(module):
            if id(buffer) not in left_out:
                self._add(name, "buffer", buffer, [home])

    def _add_optimizer(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Add the tensors and numbers of an optimizer's state, and its float32 copies of parameters. They have the
        homes of their parameters."""
        self._replication.learn(module)
        states, is_zero = states_of(optimizer)
        zero = Excuse("of a ZeroRedundancyOptimizer: each rank has its own") if is_zero else None
        for g, group in enumerate(optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                name = self._replication.names.get(id(parameter), f"group{g}.{p}")
                homes = [zero] if zero is not None else self._replication.of_parameter(parameter)
                # Asked for without a count, too: ranks must agree on the sets, whatever their state is.
                counting = homes if zero is not None else self._replication.of_count(parameter)
                if id(parameter) in self._replication.masters:
                    self._add(name, "optimizer", parameter, homes, ".main_param")
                for key, value, store in values_in(states.get(parameter)):
                    if isinstance(value, (bool, int, float)):
                        value = torch.tensor(value, dtype=torch.float64, device="cpu")
                    if isinstance(value, Tensor):
                        # Equal counts do not show that the moments beside them are: these must stay "not verified".
                        of, counts = (counting, counting is homes) if key == "step" else (homes, True)
                        self._add(name, "optimizer", value, of, f".{key}", store, counts)
                    elif value is not None:
                        self._skip("optimizer", Excuse(f"of type {type(value).__name__}"))

    def _add(
        self,
        name: str,
        kind: str,
        tensor: Tensor,
        homes: Sequence[Home | Excuse],
        suffix: str = "",
        store: Store = None,
        counts: bool = True,
    ) -> None:
        """Add a tensor to the sets of its homes, and count its excuses.

        Args:
            name: fqn of the parameter or buffer that it is, or belongs to.
            homes: of a plain tensor. A DTensor has its own.
            suffix: which tensor of a parameter, such as ".exp_avg"; appended to the name.
            counts: True if the report must say so if no tensor of this kind can be compared. False for frozen
                parameters beside trainable ones.
        """
        if self._at_start and (is_lazy(tensor) or tensor.is_meta):
            self._skip(kind, Excuse("that have no memory yet"))
            return
        if is_dtensor(tensor):
            homes = self._replication.of_dtensor(tensor)
            tensor = tensor.to_local()
        declared = any(isinstance(one, Home) and one.group.communicates for one in homes)
        homes = self._replication.with_axes(name, homes)
        homes = [_ALONE if isinstance(one, Home) and not one.group.communicates else one for one in homes]
        put = False
        for one in homes:
            if isinstance(one, Excuse):
                self._skip(kind, one)
            else:
                put |= self._put((one.alias or name) + suffix, kind, tensor, one, store)
        if counts:
            compared, held = self._counted.get(kind, (0, 0))
            self._counted[kind] = compared + put, held + 1
        along = [self._replication.axis_of(one) for one in homes if isinstance(one, Home) and not declared]
        way = "not compared" if not put else "copies" if declared else f"axis {along[0]}"
        self._ways[way] += 0 if is_lazy(tensor) else tensor.numel() * tensor.element_size()

    def _put(self, name: str, kind: str, tensor: Tensor, home: Home, store: Store) -> bool:
        """Add a local tensor to the set of one home. Return True if it can be read.

        Raises:
            ValueError: it has no values yet.
        """
        self._homes[home.label] = home
        if is_lazy(tensor):
            raise ValueError(f"{kind} '{name}': it is uninitialized: run a forward first")
        put = False
        for inner_name, inner in plain_tensors(name, tensor):
            if inner.layout is not torch.strided or inner.is_quantized:
                self._skip(kind, Excuse(f"with layout {inner.layout}"))
            else:
                key = home.label, kind, inner_name
                self._named[key] += 1  # Two optimizers may hold the same parameter.
                called = inner_name if self._named[key] == 1 else f"{inner_name} #{self._named[key]}"
                self._tensors.setdefault((home.label, kind), []).append(NamedTensor(called, inner, store))
                put = True
        return put

    def _skip(self, kind: str, excuse: Excuse, count: int = 1) -> None:
        """Count things of a kind that are not compared. With a ``count`` of 0, the reason stands in the report, too."""
        self._skipped[kind, excuse.reason] += count


def order_of_ways(way: str) -> tuple[int, str]:
    """Return a key that sorts the names of ways: copies first, what is not compared last."""
    return {"copies": 0, "inferred": 2, "inside the rank": 3, "at rest": 4, "not compared": 5}.get(way, 1), way


def _all_names(module: nn.Module) -> frozenset[str]:
    """Return the names of all parameters of a module. A tied parameter has several."""
    return frozenset(clean_fqn(name) for name, _ in module.named_parameters(remove_duplicate=False))


def _has_statistics(module: nn.Module) -> bool:
    """True for a normalisation layer with statistics of what its own rank has seen."""
    return bool(getattr(module, "track_running_stats", False))


def not_finite_in(module: nn.Module, scope: Scope) -> tuple[str, ...]:
    """Return the names of tensors with NaN or infinity that this rank holds, if ``scope`` has parameters. Local; waits
    for the device."""
    numbers = _numbers_of(module, scope) if scope.parameters else ()
    return not_finite(
        (inner_name, inner, infinities)
        for name, tensor, infinities in numbers
        for inner_name, inner in plain_tensors(name, local_part(tensor))
    )


def _numbers_of(module: nn.Module, scope: Scope) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, tensor, True if an infinity is wrong there, too) for all that a checkpoint holds.

    Infinities are allowed in buffers (masks), in optimizer state (bounds), and in frozen parameters beside trainable
    ones.
    """
    named, shards = named_parameters(module), fsdp2_shards(module)
    parameters = [(clean_fqn(name), shards.get(id(one), one)) for name, one in named if not is_lazy(one)]
    trainable = any(one.requires_grad for _, one in parameters)
    for name, one in parameters:
        yield name, one, one.requires_grad or not trainable
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in part._non_persistent_buffers_set and not is_lazy(buffer):
                yield clean_fqn(name), buffer, False
    names = {id(one): name for name, one in parameters}
    for optimizer in scope.optimizers:
        for parameter, state in states_of(optimizer)[0].items():
            for key, value, _ in values_in(state):
                if isinstance(value, Tensor):
                    yield f"{names.get(id(parameter), 'optimizer')}.{key}", value, False


def states_of(optimizer: torch.optim.Optimizer) -> tuple[Mapping[Tensor, Any], bool]:
    """Return what an optimizer holds for each parameter, and True if it is a ZeroRedundancyOptimizer, whose states are
    in the optimizer inside: its own mapping is empty until a checkpoint is loaded."""
    # By name, because importing torch.distributed.optim emits a warning.
    is_zero = has_base(optimizer, "ZeroRedundancyOptimizer")
    return getattr(optimizer, "optim", optimizer).state if is_zero else optimizer.state, is_zero


def values_in(state: Any, within: str = "") -> Iterator[tuple[str, Any, Store]]:
    """Yield (key, value, store) of what an optimizer holds for a parameter, also in lists and mappings: "Q.0"."""
    if isinstance(state, (list, tuple)):
        items: Iterable[tuple[Any, Any]] = enumerate(state)
    else:
        items = state.items() if isinstance(state, Mapping) else ()
    for key, value in sorted(items, key=lambda item: str(item[0])):
        if isinstance(value, (list, tuple, Mapping)):
            yield from values_in(value, f"{within}{key}.")
        else:
            number = isinstance(value, (bool, int, float))
            yield f"{within}{key}", value, partial(_write, state, key, type(value)) if number else None


def _write(state: Any, key: Any, kind: type[Any], number: Tensor) -> None:
    """Write a repaired number, 0-d, back to an optimizer's state, with its old type."""
    state[key] = kind(number.item())


def plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors inside a wrapper subclass (such as a quantised weight), or the tensor itself."""
    tensor = tensor.detach()
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    inner_names: Sequence[str] = tensor.__tensor_flatten__()[0]
    for inner in inner_names:
        yield from plain_tensors(f"{name}.{inner}", getattr(tensor, inner))
