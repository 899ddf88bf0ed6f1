"""Attachment: ties a manager to a job. Places its state on a device, and hooks into optimizers, DDP and FSDP."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fp8dist.checks.audit import audits_of
from fp8dist.common.optimizer_hooks import has_stepped
from fp8dist.errors import ConfigurationError
from fp8dist.job.agreement import agree
from fp8dist.job.boundary import BoundaryHooks, CompilationWatch
from fp8dist.job.cycle import StepCycle
from fp8dist.job.fitting import require_fitting, warn_of_padding, warn_of_unheld
from fp8dist.job.joining import JoinLink
from fp8dist.job.trial import try_products
from fp8dist.modules.fp8_module import FP8Module, require_revertible, revert
from fp8dist.modules.parts import fp8_parts
from fp8dist.parallel.ddp import find_ddp
from fp8dist.parallel.fsdp2 import ShardedWeights, shard_weights
from fp8dist.parallel.partitioned import is_partitioned, own_part
from fp8dist.parallel.torch_internals import fsdp2_modules, unknown, warning
from fp8dist.parallel.wrappers import compute_devices, fsdp2_axes, local_parts, reshard, resharded_modules
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.settings import Start
from fp8dist.state.slots import Slot
from fp8dist_kernels.formats import Role

logger = logging.getLogger("fp8dist")


class Attachment:
    """The attachment of one manager to its job. Empty until ``tie``; each ``tie`` replaces the previous one."""

    def __init__(self, cycle: StepCycle) -> None:
        self._cycle = cycle
        self._hooks: BoundaryHooks | None = None
        self._join_link: JoinLink | None = None
        self._compilations: CompilationWatch | None = None
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
        resharded, axes = resharded_modules(whole), fsdp2_axes(whole)
        self._warn_of_torch(whole)
        require_fitting(model, whole, resharded, axes, optimizers, cycle)
        unheld = warn_of_unheld(model, whole, optimizers) if cycle.settings.enabled else []
        self._before = cycle.scales.sharded or self._before
        cycle.state.settle()  # In the communicator that the last attach() made.
        with self._untied_if_it_fails():
            _place(model, whole, cycle)
            if cycle.settings.enabled:
                try_products(model, axes)
            self._module = weakref.ref(whole)
            if compute is None:
                on_gpu = any(sync.arena.device.type == "cuda" for sync in cycle.syncs)
                compute = on_gpu and cycle.job.shared and cycle.settings.enabled
            watch = None if cycle.measurement.watch is None else cycle.measurement.watch.describe()
            boundary = "optimizer" if by_optimizer else "manual"
            also = {"boundary": boundary, "watch": watch, "start": start, **({"compute": True} if compute else {})}
            if cycle.state.axes is not None:
                also["axes"] = cycle.state.axes.describe()
            if cycle.state.values is not None:
                also["values"] = True
            self._agree(model, also, timeout)
            cycle.checker.compare_start(model, whole, start)
            parts = {part.fqn: part for part in fp8_parts(model)}
            for part in parts.values():
                part.slots.note.resharded = part.module in resharded
            cycle.audits = audits_of(cycle.state, [parts[fqn].slots for fqn in sorted(parts)])
            cycle.begin_audit()
            warn_of_padding(model, axes, cycle)
            self._derive_scales(model, whole)
            cycle.job.attach(by_optimizer, scaler is not None, bool(optimizers))
            cycle.control.training_resumes(any(map(has_stepped, optimizers)))
            cycle.job.invalidate_casts()
            if cycle.scales.sharded is not None:
                cycle.scales.sharded.follow(self._before)
            self._before = None
            cycle.steps.attached(optimizers)
            if unheld:
                cycle.steps.expect_masters(unheld, optimizers[-1])
            self._install_hooks(whole, optimizers, scaler, by_optimizer)
            return compute

    @contextlib.contextmanager
    def _untied_if_it_fails(self) -> Iterator[None]:
        """Remove the hooks of an earlier attachment. If the block raises, this rank shares no state: the caller may
        mend the cause, and attach again. Ctrl-C may come at any time."""
        self.release()
        try:
            yield
        except BaseException:
            self.release()
            self._module = None
            self._forget_agreement()
            raise

    def _agree(self, model: nn.Module, also: Mapping[str, Any], timeout: timedelta) -> None:
        """Agree with the other ranks on everything that must be equal, and share the state with them from now on.
        COLLECTIVE, through the store. See ``agree``."""
        cycle, state = self._cycle, self._cycle.state
        self._drop_communicators()
        manifests = agree(state, model, also, timeout)
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
            self._compilations = CompilationWatch(cycle)
        ddp = find_ddp(whole)
        if ddp is not None:
            self._join_link = JoinLink(ddp, cycle)

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
        cycle.verdicts.act(joins=False)
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
        cycle.steps.remove()

    def _untie(self) -> None:
        self.release()
        self._module = self._before = None
        self._forget_agreement()

    def release(self) -> None:
        """Remove all hooks. Local."""
        cycle = self._cycle
        for tie in (self._hooks, self._join_link, cycle.scales.sharded, self._compilations):
            if tie is not None:
                tie.remove()
        self._hooks = self._join_link = cycle.scales.sharded = self._compilations = None
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


def _place(model: nn.Module, whole: nn.Module, cycle: StepCycle) -> None:
    """Place the state on the devices that compute. Local.

    Raises:
        ConfigurationError: a group has no backend for such a device.
    """
    default = next((p.device for p in model.parameters()), torch.device("cpu"))
    device_of = compute_devices(whole)
    for part in fp8_parts(model):
        # ``states`` creates the views now: created in a compiled forward, they would be part of its graph.
        device = device_of(part.weight)
        part.slots.states(device)
    for sync in cycle.syncs:
        if not sync.arena.placed:
            sync.arena.place(default)
    for sync, group in zip(cycle.syncs, cycle.groups):
        if group is not None and group.communicates:
            group.require_backend(sync.arena.device)
