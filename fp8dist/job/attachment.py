"""Attachment: ties a manager to a job. Places its state on a device, and hooks into optimizers, DDP and FSDP."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fp8dist.checks.audit import audits_of
from fp8dist.checks.replication import ddp_parameters, zero_groups
from fp8dist.common.optimizer_hooks import has_stepped
from fp8dist.common.text import first_few, ranks_text
from fp8dist.errors import ConfigurationError
from fp8dist.job.agreement import agree
from fp8dist.job.boundary import BoundaryHooks, CompilationWatch
from fp8dist.job.cycle import StepCycle
from fp8dist.job.joining import EarlyLauncher
from fp8dist.job.trial import try_products
from fp8dist.modules.fp8_experts import fp8_experts
from fp8dist.modules.fp8_linear import FP8Linear, fp8_linears
from fp8dist.modules.fp8_module import FP8Module, require_revertible, revert
from fp8dist.modules.parts import Part, fp8_parts
from fp8dist.parallel.ddp import JoinLink, find_ddp
from fp8dist.parallel.fsdp2 import ShardedWeights, require_whole_blocks, shard_weights
from fp8dist.parallel.partitioned import is_partitioned, own_part
from fp8dist.parallel.torch_internals import fsdp2_modules, require_checkable, unknown, warning
from fp8dist.parallel.wrappers import (
    compute_devices,
    fsdp2_cut,
    local_parts,
    managed_from_outside,
    mesh_ranks,
    multiplied_shape,
    reshard,
    resharded_modules,
)
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import is_dtensor
from fp8dist.state.manifest import WeightDescription
from fp8dist.state.settings import Start
from fp8dist.state.slots import Slot, clean_fqn
from fp8dist_kernels.formats import Role
from fp8dist_kernels.reference.blocks import BLOCK
from fp8dist_kernels.reference.matmuls import ALIGNMENT

__all__ = ["Attachment", "local_weights"]


logger = logging.getLogger("fp8dist")


class Attachment:
    """The attachment of one manager to its job. Empty until ``tie``; each ``tie`` replaces the previous one."""

    def __init__(self, cycle: StepCycle) -> None:
        self._cycle = cycle
        self._hooks: BoundaryHooks | None = None
        self._join_link: JoinLink | None = None
        self._guards: list[RemovableHandle | CompilationWatch] = []
        self._module: weakref.ref[nn.Module] | None = None
        self._warned_of_torch = False
        self._before: ShardedWeights | None = None  # Notes on weights, kept until a new tie succeeds.

    def tie(
        self,
        model: nn.Module,
        whole: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: Any,
        by_optimizer: bool,
        timeout: timedelta,
        compute: bool | None,
        start: Start | None,
    ) -> bool:
        """Place the state, agree with the other ranks, compare what they start with, derive scales of cold weights, and
        install hooks. COLLECTIVE. Return True if the ranks compare known answers next.

        Args:
            model: the prepared model.
            whole: the model as the training loop calls it.
            compute: all ranks must pass the same. None: on GPUs, if several ranks share state.
            start: all ranks must pass the same. None: the ranks do not compare what they start with.

        Raises:
            ManifestMismatchError: on all ranks, if ranks were prepared differently.
            DivergenceError: on all ranks, if ranks start with other values. The manager is not attached.
            ConfigurationError: the state does not fit the model as it is wrapped now.
        """
        cycle = self._cycle
        reshard(fsdp2_modules(whole))  # Modules may still hold weights that an evaluation has gathered.
        resharded = resharded_modules(whole)
        self._warn_of_torch(whole)
        _require_fitting(model, whole, resharded, optimizers, cycle)
        missing = _warn_of_unheld(model, whole, optimizers) if cycle.settings.enabled else []
        self._before = cycle.scales.sharded or self._before
        self.release()
        _place(model, whole, cycle)
        for sync, group in zip(cycle.syncs, cycle.groups):
            if group is not None and group.communicates:
                group.require_backend(sync.arena.device)
        if cycle.settings.enabled:
            try_products(model, resharded)
        self._module = weakref.ref(whole)
        if compute is None:
            on_gpu = any(sync.arena.device.type == "cuda" for sync in cycle.syncs)
            compute = on_gpu and cycle.job.shared and cycle.settings.enabled
        watch = None if cycle.measurement.watch is None else cycle.measurement.watch.describe()
        boundary = "optimizer" if by_optimizer else "manual"
        also = {"boundary": boundary, "watch": watch, "start": start, **({"compute": True} if compute else {})}
        self._agree(also, _described_weights(model), timeout)
        if start is not None:
            try:
                cycle.checker.compare_start(model, whole, start)
            except BaseException:  # The caller may make the ranks equal, and attach again.
                self._forget_agreement()
                self._module = None
                raise
        for part in fp8_parts(model):
            part.slots.note.resharded = part.module in resharded
        by_fqn = {part.fqn: part.slots for part in fp8_parts(model)}
        cycle.audits = audits_of(cycle.state, [by_fqn[fqn] for fqn in sorted(by_fqn)])
        cycle.begin_audit()
        _warn_of_padding(model, cycle)
        self._derive_scales(model, whole)
        cycle.job.attach(by_optimizer, scaler is not None, bool(optimizers))
        cycle.control.training_resumes(any(map(has_stepped, optimizers)))
        cycle.job.invalidate_casts()
        if cycle.scales.sharded is not None:
            cycle.scales.sharded.follow(self._before)
        self._before = None
        if cycle.steps is not None:
            cycle.steps.attached(optimizers)
            if missing:
                cycle.steps.expect_masters(missing, optimizers[-1])
        self._install_hooks(whole, optimizers, scaler, by_optimizer)
        return compute

    def _agree(self, also: Mapping[str, Any], weights: Mapping[Slot, WeightDescription], timeout: timedelta) -> None:
        """Agree with the other ranks on everything that must be equal. COLLECTIVE, through the store.

        Args:
            also: JSON values that must be equal, besides the settings.
            weights: by weight slot, the description of the whole weight: the same on all ranks, however it is sharded.
        """
        cycle, state = self._cycle, self._cycle.state
        state.settle()  # In the communicator that the last attach() made.
        self._drop_communicators()
        manifests = agree(state, also, weights, timeout)
        shares = state.settings.amax_sync and state.settings.enabled
        for place, (sync, group) in enumerate(zip(state.syncs, state.groups)):
            place = sum(of is group for of in state.groups[:place])  # Ranks may differ in their other groups.
            sync.share(group if shares else None, place)
        cycle.control.tie(manifests)
        cycle.checks.restart()
        cycle.count_from_state()

    def _forget_agreement(self) -> None:
        """Undo ``_agree``: this rank shares no state until it agrees again. Keeps the state. Local."""
        cycle = self._cycle
        for sync in cycle.syncs:
            sync.share(None)
            sync.watch(False)
        self._drop_communicators()
        cycle.control.untie()
        cycle.detached()

    def _drop_communicators(self) -> None:
        state = self._cycle.state
        captured = state.job.captured or any(sync.graphed for sync in state.syncs)
        for group in state.groups:
            if group is not None:
                group.drop_own(captured)

    def _derive_scales(self, model: nn.Module, whole: nn.Module) -> None:
        """Derive the scales of cold weights. COLLECTIVE."""
        cycle = self._cycle
        if cycle.settings.enabled:
            if cycle.settings.fp8_all_gather:
                cycle.scales.sharded = shard_weights(cycle.state.settle, cycle.scales.fit, model, whole)
            cycle.scales.derive(local_weights(model), "cold")

    def _install_hooks(
        self, whole: nn.Module, optimizers: Sequence[Optimizer], scaler: Any, by_optimizer: bool
    ) -> None:
        cycle = self._cycle
        if optimizers:
            self._hooks = BoundaryHooks(cycle, optimizers, scaler, by_optimizer)
        if any(sync.arena.recipe.update == "next_step" for sync in cycle.syncs):
            self._guards.append(CompilationWatch(cycle))
        ddp = find_ddp(whole)
        if ddp is not None:
            self._join_link = JoinLink(ddp, EarlyLauncher(cycle))

    def _warn_of_torch(self, whole: nn.Module) -> None:
        """Warn once if this torch lacks private state that fp8dist reads from the model's wrappers."""
        missing = [] if self._warned_of_torch else unknown(whole)
        if missing:
            self._warned_of_torch = True
            logger.warning(warning(missing))

    @property
    def module(self) -> nn.Module | None:
        """The model as the training loop calls it; None if not attached."""
        return None if self._module is None else self._module()

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The DDP module; None if not attached to one."""
        return None if self._join_link is None else self._join_link.ddp

    def untie(self) -> None:
        """Undo ``tie``, but keep the state. COLLECTIVE if the last sync found a difference between ranks.

        Raises:
            ConfigurationError: FSDP2 gathers weights in FP8.
            DivergenceError: with policy "raise", if the last sync proved that ranks differ. The manager stays attached.
        """
        cycle = self._cycle
        if cycle.scales.sharded is not None:
            raise ConfigurationError(
                "detach() cannot change what FSDP2 gathers: its buffers are for FP8 bytes, and no forward works "
                "without attach(). For another optimizer call attach(…) again, which replaces the hooks; to get rid of "
                "FP8 save the state_dict and build the model anew without fp8_all_gather"
            )
        cycle.state.settle()
        cycle.checker.act_on_verdicts(joins=False)
        self._untie()

    def restore(self, model: nn.Module) -> None:
        """Undo ``tie``, if attached, and convert the model's FP8Linears back. Local; waits for a sync in flight.

        Raises:
            ConfigurationError: see ``fp8dist.restore``. Nothing was changed.
        """
        cycle = self._cycle
        cycle.require("restore()")
        if cycle.scales.sharded is not None:
            raise ConfigurationError(
                "restore() cannot change what FSDP2 gathers: save the state_dict and build the model anew without "
                "fp8_all_gather"
            )
        converted = [module for module in model.modules() if isinstance(module, FP8Module)]
        for module in converted:
            require_revertible(module)
        cycle.state.settle()
        if cycle.measurement.watch is not None:
            cycle.measurement.watch.close()
        self._untie()
        cycle.job.restore()
        for module in converted:
            revert(module)
        if cycle.steps is not None:
            cycle.steps.remove()

    def _untie(self) -> None:
        self.release()
        self._module = self._before = None
        self._forget_agreement()

    def release(self) -> None:
        """Remove all hooks. Local."""
        cycle = self._cycle
        for tie in (self._hooks, self._join_link, cycle.scales.sharded, *self._guards):
            if tie is not None:
                tie.remove()
        self._hooks = self._join_link = cycle.scales.sharded = None
        self._guards = []
        cycle.job.release()


def local_weights(model: nn.Module) -> Iterator[tuple[ArenaSync, Slot, Tensor]]:
    """Iterate over (sync, slot, this rank's whole or local weight) of each FP8Linear and each expert."""
    for part in fp8_parts(model):
        weight = part.weight
        if is_partitioned(weight):
            yield part.slots.weight_sync, part.slots.slots[Role.WEIGHT], own_part(weight)
            continue
        for slot, own in local_parts(part.slots, weight):
            yield part.slots.weight_sync, slot, own


def _require_fitting(
    model: nn.Module, whole: nn.Module, resharded: set[nn.Module], optimizers: Sequence[Optimizer], cycle: StepCycle
) -> None:
    """Raise ConfigurationError if the model as it is wrapped now, or an optimizer, does not fit the state. Local."""
    settings = cycle.settings
    _require_own(model, cycle)
    if settings.check_every:
        require_checkable(whole)
    _require_products(model, whole, resharded)
    if settings.enabled and settings.fp8_all_gather:
        require_whole_blocks(model, whole)
    _require_groups(model, whole, cycle)
    _require_current(model, whole, optimizers)


def _require_own(model: nn.Module, cycle: StepCycle) -> None:
    """Raise ConfigurationError for a converted module that was copied after ``prepare``: it has slots of its own."""
    for part in fp8_parts(model):
        if part.slots.job is not cycle.job:
            fqn = next(clean_fqn(raw) for raw, module in model.named_modules() if module is part.module)
            raise ConfigurationError(
                f"{fqn} is a copy of a converted module ({part.fqn}), with FP8 state that no step would update: copy "
                "modules before prepare(), or call fp8dist.restore(model) and prepare() again"
            )


def _require_products(model: nn.Module, whole: nn.Module, resharded: set[nn.Module]) -> None:
    for linear in managed_from_outside(model, resharded, whole):
        raise ConfigurationError(
            f"{linear.fp8_slots.fqn}: fully_shard() was called on a module around the prepared model: pass it as "
            "attach(module=…)"
        )
    for linear in fp8_linears(model):
        fqn = linear.fp8_slots.slots[Role.WEIGHT].fqn
        if linear in resharded and "weight" not in linear._parameters:
            raise ConfigurationError(f"{fqn}: FSDP1 has flattened its weight: wrap with use_orig_params=True")
        shape = multiplied_shape(linear, linear in resharded)
        if len(shape) != 2 or any(size % ALIGNMENT for size in shape):
            raise ConfigurationError(
                f"{fqn}: local weight shape {shape}, expected two dims in multiples of {ALIGNMENT}"
            )
        uncut = (linear.out_features, linear.in_features)
        by_block = linear.fp8_slots.recipe.by == "block"
        if by_block and any(size != of and size % BLOCK for size, of in zip(shape, uncut)):
            raise ConfigurationError(
                f"{fqn}: local weight shape {shape} of {uncut}: tensor parallelism cuts blocks of {BLOCK} x {BLOCK}: "
                f"split it into multiples of {BLOCK}, or give it another recipe (overrides)"
            )
    for module in fp8_experts(model):
        for name, grouped in module.fp8_products.items():
            _require_experts(module, name, grouped.fqn, module in resharded)


def _require_experts(module: nn.Module, name: str, fqn: str, resharded: bool) -> None:
    """Raise ConfigurationError unless this rank multiplies with whole experts."""
    skip = f"leave them in high precision: prepare(skip={fqn.rpartition('.')[0]!r})"
    instead, weight = f"shard them with FSDP2, or {skip}", module._parameters.get(name)
    if weight is None:
        raise ConfigurationError(
            f"{fqn}: its {name} is no Parameter of the module any more, as after a parametrization: undo it, or {skip}"
        )
    if is_partitioned(weight) or (weight.ndim != 3 and not is_dtensor(weight)):
        raise ConfigurationError(
            f"{fqn}: FSDP1 or ZeRO has flattened its experts, which FP8 does not support: {instead}"
        )
    if is_dtensor(weight) and not resharded:
        raise ConfigurationError(f"{fqn}: tensor and expert parallelism are not supported for FP8 experts: {instead}")


def _require_groups(model: nn.Module, whole: nn.Module, cycle: StepCycle) -> None:
    """Raise ConfigurationError unless shards of one weight, and its replicas under DDP or DeepSpeed, share a scale."""
    replicas = {key: ddp.process_group for key, ddp in ddp_parameters(whole).items()} | zero_groups(whole)
    covered: set[tuple[int, int]] = set()  # Checked (holder, group) pairs: few, where weights are many.
    for part in fp8_parts(model):
        sync, weight = part.slots.weight_sync, part.weight
        group, holders = cycle.state.group_of(sync), replicas.get(id(weight))
        holder = holders if holders is not None else weight.device_mesh if is_dtensor(weight) else None
        if holder is None or group is None or not cycle.settings.amax_sync or (id(holder), id(group)) in covered:
            continue
        ranks = mesh_ranks(weight) if holders is None else {*dist.get_process_group_ranks(holders)}
        if not ranks <= {*group.ranks}:
            raise ConfigurationError(
                f"{part.slots.slots[Role.WEIGHT].fqn}: its weight is shared or sharded by ranks "
                f"{ranks_text(sorted(ranks))}, but its FP8 state "
                f"only by ranks {ranks_text(group.ranks)}: pass prepare(group=…) all of them (the whole mesh, or the "
                "group of DDP or DeepSpeed)"
            )
        covered.add((id(holder), id(group)))


def _described_weights(model: nn.Module) -> dict[Slot, WeightDescription]:
    """Describe the weights by slot. Shapes are those of the modules, because sharding changes the weights' shapes."""
    by_weight: dict[int, list[Part]] = {}
    for part in fp8_parts(model):
        by_weight.setdefault(id(part.stored[0]) if part.stored else id(part.module), []).append(part)
    described: dict[Slot, WeightDescription] = {}
    for parts in by_weight.values():
        first, users = parts[0], tuple(sorted(part.fqn for part in parts))
        dtype = str(first.weight.dtype).removeprefix("torch.")
        if isinstance(first.module, FP8Linear):
            shape = first.module.out_features, first.module.in_features
            described |= {part.slots.slots[Role.WEIGHT]: WeightDescription(shape, dtype, users) for part in parts}
        else:  # Experts do not share weights. FSDP2's DTensors have the whole shape.
            rows, columns = first.weight.shape[1:]
            for slot in first.slots.weight_slots:
                described[slot] = WeightDescription((rows, columns), dtype, (slot.fqn,))
    return described


def _parameters(optimizers: Sequence[Optimizer]) -> Iterator[tuple[Optimizer, Tensor]]:
    return ((optimizer, p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])


def _require_current(model: nn.Module, whole: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise ConfigurationError for an optimizer that holds former parameters of the model."""
    current = {id(p) for module in (model, whole) for p in module.parameters()}
    known = ((p, each.slots) for each in fp8_parts(model) for p in each.slots.note.remembered)
    former = {id(p): (p, slots.slots[Role.WEIGHT].fqn) for p, slots in known if id(p) not in current}
    for optimizer, parameter in _parameters(optimizers):
        if id(parameter) in former:
            _, fqn = former[id(parameter)]
            raise ConfigurationError(
                f"{type(optimizer).__name__} holds what was the weight of {fqn} before the model was sharded, "
                "materialised or given new parameters: it trains nothing that the model uses. Make the optimizer after "
                "that, then call attach(optimizer=…)"
            )


def _warn_of_padding(model: nn.Module, cycle: StepCycle) -> None:
    """Log which experts FSDP2 pads. Local."""
    if not cycle.settings.enabled or not cycle.state.speaks:
        return
    for module in fp8_experts(model):
        for name, slots in module.fp8_products.items():
            weight: Any = module._parameters[name]
            dim, ranks = fsdp2_cut(weight) if is_dtensor(weight) else (0, 1)
            if dim == 0 and ranks > len(weight):
                logger.warning(
                    "fp8dist: %s: FSDP2 shards %d experts along dim 0 over %d ranks, and gathers %d of them with "
                    "padding: shard their rows, fully_shard(shard_placement_fn=…) with Shard(1)",
                    slots.fqn,
                    len(weight),
                    ranks,
                    ranks,
                )
                return  # The others are sharded alike.


def _warn_of_unheld(model: nn.Module, whole: nn.Module, optimizers: Sequence[Optimizer]) -> list[Part]:
    """Warn about trainable FP8 weights that no optimizer holds, and return those that must have master copies. Log
    parameters that are not the model's at info level: they may be master copies, or another part of the model."""
    if not optimizers:
        return []
    strangers = _strangers(model, whole, optimizers)
    if strangers:
        logger.info("fp8dist: attach(optimizer=…): %d of its parameters are not the model's", len(strangers))
    unheld = _unheld(model, optimizers)
    shapes = {parameter.shape for parameter in strangers}
    missing = {part.fqn: weight for part, weight in unheld.items() if weight.shape not in shapes}
    # Master copies may also be one flat tensor.
    if sum(weight.numel() for weight in missing.values()) > sum(parameter.numel() for parameter in strangers):
        logger.warning(
            "fp8dist: attach(optimizer=…): %d trainable FP8 weights are in none of the optimizers: %s. If another "
            "optimizer steps them, give it to attach as well: attach(optimizer=[…])",
            len(missing),
            first_few(sorted(missing)),
        )
        return []
    return list(unheld)


def _strangers(model: nn.Module, whole: nn.Module, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return the optimizers' parameters that are not the model's."""
    own = {id(parameter) for module in (model, whole) for parameter in module.parameters()}
    held = {id(parameter): parameter for _, parameter in _parameters(optimizers)}
    return [parameter for key, parameter in held.items() if key not in own and not is_lazy(parameter)]


def _unheld(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[Part, Tensor]:
    """Return the trainable FP8 weights that no optimizer holds."""
    held = {id(parameter) for _, parameter in _parameters(optimizers)}
    stored = ((part, weight) for part in fp8_parts(model) for weight in part.stored[:1])
    return {part: weight for part, weight in stored if weight.requires_grad and id(weight) not in held}


def _place(model: nn.Module, whole: nn.Module, cycle: StepCycle) -> None:
    default = next((p.device for p in model.parameters()), torch.device("cpu"))
    device_of = compute_devices(whole)
    for part in fp8_parts(model):
        # ``states`` creates the views now: created in a compiled forward, they would be part of its graph.
        device = device_of(part.weight)
        part.slots.states(device)
    for sync in cycle.syncs:
        if not sync.arena.placed:
            sync.arena.place(default)
