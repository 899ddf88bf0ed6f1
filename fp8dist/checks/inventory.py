"""Collect what one rank brings to a check (model, optimizer, FP8 state), by the ranks that must hold the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8dist.checks.computations import KIND, ComputedContent, computations_of
from fp8dist.checks.contents import ArenaContent, Content, Digester, Field, Key, NamedTensor, TensorContent, values_near
from fp8dist.checks.differences import ravel
from fp8dist.checks.finite import not_finite
from fp8dist.checks.likeness import likeness
from fp8dist.checks.replication import Excuse, Home, Membership, Replication
from fp8dist.checks.report import DivergenceReport, Sender, this_rank
from fp8dist.common.divergence import Finding
from fp8dist.common.text import plural
from fp8dist.modules.parts import fp8_parts
from fp8dist.parallel.megatron import gradient_of
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import GroupLike, SyncGroup, has_base, is_dtensor, local_part
from fp8dist.state.slots import clean_fqn

__all__ = ["Holdings", "Inventory", "ReplicaSet", "Scope", "likeness_of", "not_finite_in"]

Store = Callable[[Tensor], None] | None

_ALONE = Excuse("that are shared with no other rank")


@dataclass(frozen=True)
class Scope:
    """What a check compares. ``state``: FP8 state. ``compute``: the results of known casts and products."""

    parameters: bool = True
    gradients: bool = False
    buffers: bool = False
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    state: bool = True
    compute: bool = False

    @property
    def kinds(self) -> set[str]:
        """Kinds of the findings that a check of this scope may have and repair."""
        asked = {"parameter": self.parameters, "gradient": self.gradients, "buffer": self.buffers}
        asked |= {"optimizer": bool(self.optimizers), "scale": self.state, "history": self.state}
        return {kind for kind, wanted in asked.items() if wanted}


@dataclass(frozen=True)
class ReplicaSet:
    """What the ranks of ``group`` must hold alike. ``label`` is the same on all ranks of the job."""

    label: str
    group: SyncGroup
    contents: tuple[Content, ...]

    @property
    def keys(self) -> list[Key]:
        """Keys of all things in the set, in order."""
        return [key for content in self.contents for key in content.keys]

    def digests(self, digester: Digester) -> Tensor:
        """Return int64[len(keys), 2] on the CPU."""
        parts = [content.digests(digester) for content in self.contents if content.keys]
        return torch.cat(parts) if parts else torch.zeros(0, 2, dtype=torch.int64)

    def fields(self, index: int) -> list[Field]:
        """Return the fields of the thing at ``index`` in ``keys``."""
        for content in self.contents:
            if index < len(content.keys):
                return content.fields(index)
            index -= len(content.keys)
        raise IndexError(index)


@dataclass(frozen=True)
class Holdings:
    """All that one rank brings to a check.

    The first set is that of the anchor, the ranks that call the check. ``last_good``: the last step at which things of
    a kind were compared and equal. ``alone``: the part of the report that needs no other rank: what is
    skipped, and what is not finite. ``memberships``: the ranks of the other sets. ``computed``: what this rank computes
    for the check; its label says which ranks must compute the same. None: no rank computes.
    """

    sets: tuple[ReplicaSet, ...]
    step: int = 0
    manifest: str = ""
    last_good: Mapping[str, int] = field(default_factory=dict)
    coords: dict[str, int] | None = None
    alone: DivergenceReport = field(default_factory=DivergenceReport)
    memberships: tuple[Membership, ...] = ()
    computed: ReplicaSet | None = None

    @property
    def layout(self) -> tuple[str, ...]:
        """Labels of the sets other than the anchor's. Equal on all ranks that run the same program."""
        return (*(m.label for m in self.memberships), *(() if self.computed is None else (plural(KIND),)))

    @property
    def all_sets(self) -> tuple[ReplicaSet, ...]:
        """``sets``, and ``computed``."""
        return self.sets if self.computed is None else (*self.sets, self.computed)

    @property
    def compared(self) -> dict[str, int]:
        """Number of compared things by kind."""
        return dict(sorted(Counter(key.kind for s in self.all_sets for key in s.keys).items()))

    @property
    def compared_bytes(self) -> dict[str, int]:
        """Bytes of compared things by kind, where they are known."""
        sizes: Counter[str] = Counter()
        for content in (content for s in self.all_sets for content in s.contents):
            sizes.update(content.sizes)
        return dict(sorted(sizes.items()))

    def evidence(self, finding: Finding) -> dict[str, Any] | None:
        """Return this rank's values of what a finding is about, for a file: a whole slot, or the elements near the
        first difference; None if it does not hold the thing."""
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
        """Return the values of all ranks, by rank, and what is known of these ranks. COLLECTIVE over ``group``.

        Args:
            last_good: also send the last good steps, for findings about values.
        """
        device = next((c.device for s in self.all_sets for c in s.contents if c.keys), group.device)
        good = {kind: self.last_good.get(kind) for kind in self.compared} if last_good else {}
        gathered = group.gather((Sender(this_rank(device, self.coords), self.step, good), value))
        return {of.participant.rank: theirs for of, theirs in gathered}, [of for of, _ in gathered]


def likeness_of(contents: Sequence[Content]) -> str:
    """Return a text that is equal on ranks that must compute the same results."""
    return repr([(likeness(content.device), [key.name for key in content.keys]) for content in contents])


class Inventory:
    """Collects what a check compares. For the arguments see ``Replication``; ``groups`` are its ``patterns``.

    ``at_start``: training has not begun. Leaves out tensors without memory, which ``attach`` allows, statistics of
    normalisation layers, which a resumed rank may have of its own, and buffers in DDP, which makes them equal in its
    next forward, or is not to.
    """

    def __init__(
        self,
        anchor: SyncGroup,
        vouched: bool = False,
        groups: Mapping[str, GroupLike | None] | None = None,
        at_start: bool = False,
    ) -> None:
        self._at_start = at_start
        self._replication = Replication(anchor, vouched, groups or {})
        home = self._replication.anchor
        self._homes: dict[str, Home] = {home.label: home}
        self._contents: dict[str, list[Content]] = {home.label: []}
        self._tensors: dict[tuple[str, str], list[NamedTensor]] = {}
        self._skipped: Counter[tuple[str, str]] = Counter()
        self._counted: dict[str, tuple[int, int]] = {}  # By kind: how many that count are compared, and exist.
        self._noun = "parameters"
        self._nonfinite: tuple[str, ...] = ()
        self._computed: ReplicaSet | None = None

    def holdings(self, step: int, manifest: str = "", last_good: Mapping[str, int] | None = None) -> Holdings:
        """Return all that was collected. ``manifest``: one more word that must be equal on all ranks."""
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
        return Holdings(
            sets=tuple(ReplicaSet(label, self._homes[label].group, tuple(c)) for label, c in contents.items()),
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
            computed=self._computed,
        )

    def add_arena(self, sync: ArenaSync) -> None:
        """Add the FP8 state that the ranks of the sync's group share."""
        home: Home | Excuse = Excuse("that this rank shares with no other")
        if sync.communicates and sync.group is not None:
            label = f"FP8 state of {', '.join(sync.patterns) or 'all modules'}"
            home = self._replication.of_group(label, sync.group)
        if isinstance(home, Excuse):
            self._skip("slot", home, len(sync.arena))
        else:
            self._homes[home.label] = home
            self._contents.setdefault(home.label, []).append(ArenaContent(sync.arena))

    def add_module(self, module: nn.Module, scope: Scope) -> None:
        """Add the tensors of a module and its optimizers that ``scope`` selects."""
        if scope.parameters or scope.gradients:
            self._add_parameters(module, scope.parameters, scope.gradients)
        if not self._at_start:
            self._nonfinite += not_finite_in(module, scope)
        self._add_buffers(module, scope.buffers)
        for optimizer in scope.optimizers:
            self._add_optimizer(module, optimizer)

    def add_computations(self, module: nn.Module) -> None:
        """Add what the FP8Linears and FP8Experts of a module compute. Other ranks must compute the same on equal
        hardware only."""
        contents = [
            ComputedContent(computations, device, f" (device {i} of this rank)" if i else "")
            for i, (device, computations) in enumerate(computations_of(fp8_parts(module)).items())
        ]
        self._computed = ReplicaSet(likeness_of(contents), self._replication.anchor.group, tuple(contents))
        if not contents:
            self._skip(KIND, Excuse("exist: no module computes in FP8"), 0)

    def _add_parameters(self, module: nn.Module, parameters: bool, gradients: bool) -> None:
        """Add all parameters, their current gradients, or both."""
        self._replication.learn(module)
        found = False
        trainable = any(parameter.requires_grad for parameter in module.parameters())
        if trainable and not all(parameter.requires_grad for parameter in module.parameters()):
            self._noun = "trainable parameters"
        for parameter in module.parameters():
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
            self._counted["gradient"] = (int(not trainable), 1)

    def _add_buffers(self, module: nn.Module, compare: bool) -> None:
        """Add all buffers, or count them as skipped."""
        if not compare:
            if count := sum(1 for _ in module.named_buffers()):
                self._skip("buffer", Excuse("that buffers=True would compare"), count)
            return
        parts = [part for part in module.modules() if self._at_start]
        own = [part.buffers(recurse=False) for part in parts if getattr(part, "track_running_stats", False)]
        own += [part.buffers() for part in parts if isinstance(part, DistributedDataParallel)]
        left_out = {id(buffer) for buffers in own for buffer in buffers}
        for name, buffer, home in self._replication.of_buffers(module):
            if id(buffer) not in left_out:
                self._add(name, "buffer", buffer, [home])

    def _add_optimizer(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Add the tensors and numbers of an optimizer's state, and its own copies of parameters, which are replicated
        like their parameters."""
        self._replication.learn(module)
        # By name, because importing torch.distributed.optim emits a warning.
        is_zero = has_base(optimizer, "ZeroRedundancyOptimizer")
        zero = Excuse("of a ZeroRedundancyOptimizer: each rank has its own") if is_zero else None
        for g, group in enumerate(optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                name = self._replication.names.get(id(parameter), f"group{g}.{p}")
                homes = [zero] if zero is not None else self._replication.of_parameter(parameter)
                if id(parameter) in self._replication.masters:
                    self._add(name, "optimizer", parameter, homes, ".main_param")
                state = optimizer.state.get(parameter) or {}
                for key, value in sorted(state.items()):
                    if isinstance(value, Tensor):
                        self._add(name, "optimizer", value, homes, f".{key}")
                    elif isinstance(value, (bool, int, float)):
                        number = torch.tensor(value, dtype=torch.float64, device="cpu")
                        store = partial(_write, state, key, type(value))
                        self._add(name, "optimizer", number, homes, f".{key}", store)

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
        """Add a tensor to its homes.

        Args:
            name: of its parameter or buffer.
            suffix: which tensor of a parameter.
            counts: its kind is verified only if a tensor that counts is compared.
        """
        if self._at_start and (is_lazy(tensor) or tensor.is_meta):
            self._skip(kind, Excuse("that have no memory yet"))
            return
        if is_dtensor(tensor):
            homes = self._replication.of_dtensor(tensor)
            tensor = tensor.to_local()
        homes = [_ALONE if isinstance(one, Home) and not one.group.communicates else one for one in homes]
        if counts:
            compared, held = self._counted.get(kind, (0, 0))
            self._counted[kind] = compared + any(isinstance(one, Home) for one in homes), held + 1
        for one in homes:
            if isinstance(one, Excuse):
                self._skip(kind, one)
            else:
                self._put((one.alias or name) + suffix, kind, tensor, one, store)

    def _put(self, name: str, kind: str, tensor: Tensor, home: Home, store: Store) -> None:
        self._homes[home.label] = home
        if is_lazy(tensor):
            raise ValueError(f"{kind} '{name}': it is uninitialized: run a forward first")
        for inner_name, inner in _plain_tensors(name, tensor):
            if inner.layout is not torch.strided or inner.is_quantized:
                self._skip(kind, Excuse(f"with layout {inner.layout}"))
            else:
                self._tensors.setdefault((home.label, kind), []).append(NamedTensor(inner_name, inner, store))

    def _skip(self, kind: str, excuse: Excuse, count: int = 1) -> None:
        """Count things of a kind that are not compared."""
        self._skipped[kind, excuse.reason] += count


def not_finite_in(module: nn.Module, scope: Scope) -> tuple[str, ...]:
    """Return the names of tensors that a check of parameters finds not finite on this rank. Local."""
    numbers = _numbers_of(module, scope) if scope.parameters else ()
    return not_finite(
        (inner_name, inner, infinities)
        for name, tensor, infinities in numbers
        for inner_name, inner in _plain_tensors(name, local_part(tensor))
    )


def _numbers_of(module: nn.Module, scope: Scope) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, tensor, True if infinities count) for all that a checkpoint holds and training continues with.

    Infinities do not count in buffers, such as masks, and in optimizer state, such as bounds.
    """
    parameters = [(clean_fqn(name), one) for name, one in module.named_parameters() if not is_lazy(one)]
    trainable = any(one.requires_grad for _, one in parameters)
    for name, one in parameters:
        yield name, one, one.requires_grad or not trainable
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in part._non_persistent_buffers_set and not is_lazy(buffer):
                yield clean_fqn(name), buffer, False
    names = {id(one): name for name, one in parameters}
    for optimizer in scope.optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if isinstance(value, Tensor):
                    yield f"{names.get(id(parameter), 'optimizer')}.{key}", value, False


def _write(state: dict[str, Any], key: str, kind: type[Any], number: Tensor) -> None:
    state[key] = kind(number.item())


def _plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors inside a wrapper subclass (such as a quantised weight), or the tensor itself."""
    tensor = tensor.detach()
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    inner_names: Sequence[str] = tensor.__tensor_flatten__()[0]
    for inner in inner_names:
        yield from _plain_tensors(f"{name}.{inner}", getattr(tensor, inner))
