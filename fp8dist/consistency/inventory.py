"""What of a model is known to be replicated, and on which ranks.

A plain tensor does not say whether other ranks hold the same: FSDP1's shards, experts and ZeRO's state look like any
other and differ by design. So only this is compared: DTensors across their Replicate axes, the parameters that DDP
keeps equal, across DDP's group, and what the caller vouches for by naming a group.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8dist.consistency.contents import Content, TensorContent
from fp8dist.consistency.holdings import ReplicaSet
from fp8dist.groups import GroupLike, SyncGroup
from fp8dist.state.slots import clean_fqn

__all__ = ["Inventory"]

ANCHOR = "all ranks that check"


class Inventory:
    """Collects tensors, each with the ranks that must hold the same.

    Args:
        anchor: the ranks that check; nothing is compared with others.
        vouched: plain tensors that nothing else is known of are replicated over the anchor.
        groups: fqn patterns of plain tensors that are replicated over other ranks (a group), or over none (None). The
            first match counts.
    """

    def __init__(
        self, anchor: SyncGroup, vouched: bool = False, groups: Mapping[str, GroupLike | None] | None = None
    ) -> None:
        self.coords = anchor.mesh_coordinates()
        self._anchor = anchor
        self._vouched = vouched
        self._patterns = {pattern: None if g is None else SyncGroup(g) for pattern, g in (groups or {}).items()}
        self._groups: dict[str, SyncGroup] = {ANCHOR: anchor}
        self._tensors: dict[tuple[str, str], list[tuple[str, Tensor]]] = {}
        self._contents: dict[str, list[Content]] = {ANCHOR: []}
        self._skipped: Counter[str] = Counter()
        self._alone: set[str] = set()
        self._names: dict[int, str] = {}
        self._homes: dict[int, tuple[str, SyncGroup] | str] = {}

    @property
    def skipped(self) -> tuple[str, ...]:
        """What is not compared, and why."""
        return tuple(f"{count} {reason}" for reason, count in sorted(self._skipped.items()))

    @property
    def labels(self) -> tuple[str, ...]:
        """Which sets of ranks there are beside the anchor's: equal on all ranks of one program, also where a rank is
        alone in such a set."""
        held = {*self._contents, *(label for label, _ in self._tensors)}
        return tuple(sorted((held | self._alone) - {ANCHOR}))

    def sets(self) -> tuple[ReplicaSet, ...]:
        """The anchor's set first, then one for each other set of ranks."""
        for (label, kind), tensors in self._tensors.items():
            self._contents.setdefault(label, []).append(TensorContent(kind, tensors))
        self._tensors = {}
        return tuple(ReplicaSet(label, self._groups[label], tuple(c)) for label, c in self._contents.items())

    def add_content(self, label: str, group: SyncGroup, content: Content) -> None:
        """Something that is replicated over ``group``. ``label``: equal on all ranks of the job."""
        home = self._within_anchor(label, group)
        if isinstance(home, str):
            self._skipped[f"{content.keys[0].kind if content.keys else 'thing'}s: {home}"] += len(content.keys)
        else:
            self._groups[home[0]] = home[1]
            self._contents.setdefault(home[0], []).append(content)

    def add_parameters(self, module: nn.Module, parameters: bool = True, gradients: bool = False) -> None:
        """All parameters, their gradients as they are now, or both."""
        self._learn(module)
        for raw, parameter in module.named_parameters():
            home = self._homes[id(parameter)]
            if parameters:
                self._add(clean_fqn(raw), "parameter", parameter, home)
            if gradients and parameter.grad is not None:
                self._add(clean_fqn(raw), "gradient", parameter.grad, home)

    def add_optimizer(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Tensors and numbers of an optimizer's state, replicated as their parameters are."""
        self._learn(module)
        for g, group in enumerate(optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                name = self._names.get(id(parameter), f"group{g}.{p}")
                home = self._homes.get(id(parameter), "of parameters that are not the module's")
                if _is_zero(optimizer):
                    home = "states of a ZeroRedundancyOptimizer: each rank has its own"
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, (Tensor, bool, int, float)):
                        tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                        self._add(f"{name}.{key}", "optimizer", tensor, home)

    # Who shares what -----------------------------------------------------------------------------

    def _learn(self, module: nn.Module) -> None:
        sharded, ddp, ignored = _fsdp1_parameters(module), _ddp_parameters(module), _ignored_by_ddp(module)
        for raw, parameter in module.named_parameters():
            name = clean_fqn(raw)
            self._names[id(parameter)] = name
            self._homes[id(parameter)] = self._home(name, parameter, sharded, ddp, ignored)

    def _home(
        self, name: str, p: Tensor, sharded: dict[int, Any], ddp: dict[int, DistributedDataParallel], ignored: set[int]
    ) -> tuple[str, SyncGroup] | str:
        """The set of ranks that a plain parameter belongs to, or why it is not compared."""
        if isinstance(p, DTensor):
            return "of a DTensor, not DTensors themselves"  # Only for what hangs on it, such as a step counter.
        if id(p) in sharded:
            fsdp = sharded[id(p)]
            if fsdp.sharding_strategy is not ShardingStrategy.NO_SHARD:
                return "sharded by FSDP1: each rank has its own"
            return self._within_anchor("FSDP1", SyncGroup(fsdp.process_group))
        if id(p) in ddp:
            return self._within_anchor("DDP", SyncGroup(ddp[id(p)].process_group))
        for pattern, group in self._patterns.items():
            if fnmatch.fnmatchcase(name, pattern):
                if group is None:
                    return f"matching {pattern}: left out"
                return self._within_anchor(pattern, group)
        if id(p) in ignored:
            return "that DDP was told to ignore"
        if self._vouched:
            return ANCHOR, self._anchor
        return "not known to be replicated: name their group"

    def _within_anchor(self, label: str, group: SyncGroup) -> tuple[str, SyncGroup] | str:
        if set(group.ranks) == set(self._anchor.ranks):
            return ANCHOR, self._anchor
        if group.size == 1:
            self._alone.add(label)
            return f"shared with no other rank ({label})"
        if not set(group.ranks) <= set(self._anchor.ranks):
            return f"shared with ranks that do not take part in this check ({label})"
        return label, group

    # Adding ----------------------------------------------------------------------------------------

    def _add(self, name: str, kind: str, tensor: Tensor, home: tuple[str, SyncGroup] | str) -> None:
        if isinstance(tensor, DTensor):
            self._add_dtensor(name, kind, tensor)
        elif isinstance(home, str):
            self._skipped[f"{_plural(kind)} {home}"] += 1
        else:
            self._put(name, kind, tensor, home)

    def _add_dtensor(self, name: str, kind: str, tensor: DTensor) -> None:
        mesh = tensor.device_mesh
        if self.coords is None:
            self.coords = _coordinates(mesh)
        axes = [i for i, placement in enumerate(tensor.placements) if placement.is_replicate() and mesh.size(i) > 1]
        if any(placement.is_partial() for placement in tensor.placements):
            self._skipped[f"{_plural(kind)} that are partial sums"] += 1
            return
        if not axes:
            self._skipped[f"{_plural(kind)} that are DTensors without a Replicate axis: each rank has its own"] += 1
            return
        local = tensor.to_local().detach()
        if len(axes) == sum(mesh.size(i) > 1 for i in range(mesh.ndim)):
            home = self._within_anchor("", SyncGroup(mesh)) if set(self._anchor.ranks) == _ranks(mesh) else ""
            if not isinstance(home, str):
                self._put(name, kind, local, home)
                return
        for axis in axes:
            axis_name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else str(axis)
            label = f"axis {axis_name} of mesh {mesh.mesh.tolist()}"
            home = self._within_anchor(label, SyncGroup(mesh.get_group(axis)))
            if isinstance(home, str):
                self._skipped[f"{_plural(kind)} {home}"] += 1
            else:
                self._put(name, kind, local, home)

    def _put(self, name: str, kind: str, tensor: Tensor, home: tuple[str, SyncGroup]) -> None:
        for inner_name, inner in _plain_tensors(name, tensor):
            if inner.layout is not torch.strided or inner.is_quantized:
                self._skipped[f"{_plural(kind)} with layout {inner.layout}"] += 1
                continue
            label, group = home
            self._groups[label] = group
            self._tensors.setdefault((label, kind), []).append((inner_name, inner))


def _is_zero(optimizer: torch.optim.Optimizer) -> bool:
    # By name: importing torch.distributed.optim warns, and who has such an optimizer has imported it.
    return any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__)


def _plural(kind: str) -> str:
    return "optimizer states" if kind == "optimizer" else f"{kind}s"


def _ranks(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def _coordinates(mesh: DeviceMesh) -> dict[str, int] | None:
    place = mesh.get_coordinate()
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    return None if place is None else dict(zip(names, place))


def _plain_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors inside a wrapper subclass (a quantised weight, say), or the tensor itself."""
    tensor = tensor.detach()
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    inner_names: Sequence[str] = tensor.__tensor_flatten__()[0]
    for inner in inner_names:
        yield from _plain_tensors(f"{name}.{inner}", getattr(tensor, inner))


def _fsdp1_parameters(module: nn.Module) -> dict[int, FullyShardedDataParallel]:
    found: dict[int, FullyShardedDataParallel] = {}
    for wrapper in module.modules():
        if isinstance(wrapper, FullyShardedDataParallel):
            ignored = set(map(id, getattr(wrapper, "_ignored_params", ())))
            found |= {id(p): wrapper for p in wrapper.parameters() if id(p) not in ignored}
    return found


def _ddp_parameters(module: nn.Module) -> dict[int, DistributedDataParallel]:
    return {id(p): ddp for ddp, _, p, ignored in _seen_by_ddp(module) if not ignored}


def _ignored_by_ddp(module: nn.Module) -> set[int]:
    return {id(p) for _, _, p, ignored in _seen_by_ddp(module) if ignored}


def _seen_by_ddp(module: nn.Module) -> Iterator[tuple[DistributedDataParallel, str, Tensor, bool]]:
    for ddp in module.modules():
        if isinstance(ddp, DistributedDataParallel):
            ignored = ddp.parameters_to_ignore
            yield from ((ddp, name, p, name in ignored) for name, p in ddp.module.named_parameters())
