"""ShardedWeights: all weights of a manager that FSDP2 gathers in FP8, and the checks of their scales."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_experts import FP8Experts
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.modules.parts import Part, fp8_parts
from fp8dist.parallel.sharded_weight import ForwardState, ShardedWeight, in_backward
from fp8dist.parallel.torch_internals import fsdp2_groups, fsdp2_modules
from fp8dist.parallel.wrappers import (
    fsdp2_cut,
    multiplied_shape,
    reshard,
    resharded_modules,
)
from fp8dist.state import overwrites
from fp8dist.state.accord import Votes
from fp8dist.state.arena import Arena
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import is_dtensor, largest_of_parts
from fp8dist.state.slots import Slot
from fp8dist_kernels.formats import Role
from fp8dist_kernels.reference.blocks import BLOCK

__all__ = ["ShardedWeights", "require_whole_blocks", "shard_weights"]

LOOK_AHEAD = 3
"""Number of steps before whose forwards the ranks compare weights with their scales, after a weight has outgrown its
scale: a verdict comes up to two steps later."""

Settle = Callable[[], None]
Fit = Callable[[Sequence[ShardedWeight]], None]


class ShardedWeights:
    """All weights of one manager that FSDP2 gathers in FP8.

    Before a forward of the outermost FSDP module, it commits pending syncs on the compute stream, and checks whether
    anything but an optimizer has written to the weights.

    Args:
        settle: commits pending syncs. Local. A bound method, held weakly, like ``fit``.
        fit: derives scales that are cold or no longer fit. COLLECTIVE.
    """

    def __init__(
        self,
        settle: Settle,
        fit: Fit,
        weights: Sequence[ShardedWeight],
        modules: Sequence[nn.Module],
        forward: ForwardState,
    ) -> None:
        self.weights = tuple(weights)
        for weight in self.weights:
            weight.install()
        self._forward = forward
        self._modules = weakref.WeakSet(modules)
        held: dict[nn.Module | None, list[ShardedWeight]] = defaultdict(list)
        for weight in weights:
            held[weight.module()].append(weight)
        self._within = {  # By the id of the FSDP module.
            id(module): tuple(weight for inner in module.modules() for weight in held.get(inner, ()))
            for module in modules
        }
        self._settle, self._fit = weakref.WeakMethod(settle), weakref.WeakMethod(fit)
        self._outermost: int | None = None
        meshes = {id(mesh): mesh for weight in weights for mesh, _ in weight.cuts}
        ranks = {rank for mesh in meshes.values() for rank in mesh.mesh.flatten().tolist()}
        self._votes = Votes(sorted(ranks))
        self._handles: list[RemovableHandle] = []
        for module in modules:
            before = module.register_forward_pre_hook(torch.compiler.disable(self._before_forward), prepend=True)
            after = module.register_forward_hook(torch.compiler.disable(self._after_forward), always_call=True)
            self._handles += [before, after]

    def remove(self) -> None:
        """Remove all hooks and extensions."""
        for handle in self._handles:
            handle.remove()
        for weight in self.weights:
            weight.remove()

    def accept(self) -> None:
        """Note that all scales are right for the weights as they are now. Local."""
        for weight in self.weights:
            weight.accept()
            weight.forget_choice()

    def follow(self, before: ShardedWeights | None) -> None:
        """Take over the notes of an earlier attachment, to detect writes since then. Local."""
        known = {} if before is None else {weight.slot: weight for weight in before.weights}
        for weight in self.weights:
            weight.follow(known.get(weight.slot))
        self._look_ahead([weight.slots.weight_sync for weight in self.weights if weight.starts_small()])

    def before_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer is about to step. Local."""
        for weight in self._of(optimizer):
            weight.before_step()

    def after_step(self, optimizer: Optimizer, real: bool) -> None:
        """Note that an optimizer has stepped. Scales follow its writes, which need no new scales. ``real``: True if the
        step may have changed parameters. Local."""
        for weight in self._of(optimizer):
            weight.after_step(real)

    def _of(self, optimizer: Optimizer) -> list[ShardedWeight]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [weight for weight in self.weights if id(weight.parameter) in held]

    def reshard(self) -> None:
        """Make all modules free their gathered weights. Local.

        A module that does not reshard after its forward, and had no backward, still holds the weights of that forward.
        """
        reshard(self._modules)

    def state_loaded(self, slots: Collection[Slot]) -> None:
        """Note that state was loaded or reset. The scales of these slots are right for the weights that the next
        forward finds, in whatever order state and weights were loaded; some may be cold. Local."""
        loaded = [weight for weight in self.weights if any(slot in slots for slot in weight.slots.weight_slots)]
        for weight in loaded:
            weight.state_loaded()
        self._look_ahead([weight.slots.weight_sync for weight in loaded])

    @contextlib.contextmanager
    def kept_scales(self) -> Iterator[None]:
        """Restore the scales at exit. The caller undoes, inside the context, all its writes to weights. Local."""
        arenas = {id(weight.slots.weight_sync.arena): weight.slots.weight_sync.arena for weight in self.weights}
        known = [(weight, weight.changed, weight.trusted) for weight in self.weights]
        before = [(arena, arena.copied_state()) for arena in arenas.values()]
        try:
            yield
        finally:
            for arena, state in before:
                overwrites.put_back_slots(arena, state, arena.arrays.shard_slots)
            for weight, changed, trusted in known:
                weight.accept(written=changed, trusted=trusted)
                weight.forget_choice()
            self.reshard()

    def renew(self) -> None:
        """After a step of an attached optimizer, update the weight scales that are not delayed. COLLECTIVE if there are
        any: one all-reduce per arena."""
        fit = self._fit()
        stale = [weight for weight in self.weights if weight.renewed and weight.changed]
        if fit is not None and stale:
            fit(stale)
            for weight in stale:
                weight.accept()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        settle, fit = self._settle(), self._fit()
        if self._outermost is not None or settle is None or fit is None or in_backward():
            return
        settle()
        weights = self._within[id(module)]
        self._fit_scales(weights, fit)
        self._choose_scales(weights)
        self._outermost = id(module)
        self._forward.in_forward, self._forward.grad_enabled = True, torch.is_grad_enabled()
        self._forward.settled()

    def _look_ahead(self, arenas: Iterable[ArenaSync], steps: int = LOOK_AHEAD) -> None:
        """Compare the weights of these arenas with their scales before the forwards of the next steps. Local; all ranks
        of an arena call it alike."""
        concerned = {id(sync) for sync in arenas}
        for weight in self.weights:
            if id(weight.slots.weight_sync) in concerned:
                weight.look_until = max(weight.look_until, weight.slots.job.boundaries + steps)

    def _choose_scales(self, weights: Sequence[ShardedWeight]) -> None:
        """Choose what the next gathers cast with. COLLECTIVE over the ranks that shard a weight in eval mode; in
        training mode, at the first forward of a step, if weights may have outgrown their scales.

        They may after small initial values, after steps in which one did, and after anything during which weights may
        have been written to without a trace. Other steps change a weight too little.
        """
        weights = [weight for weight in weights if weight.slots.recipe.by == "tensor"]
        if not weights:
            return
        boundaries = weights[0].slots.job.boundaries
        if any((weight.chosen_in is None) == weight.training for weight in weights):
            self.reshard()  # Drops weights gathered with other scales.
        trained = [weight for weight in weights if weight.training]
        evaluated = [weight for weight in weights if not weight.training]
        self._look_ahead([weight.slots.weight_sync for weight in evaluated], 1)
        syncs = [weight.slots.weight_sync for weight in trained]
        self._look_ahead([sync for sync in syncs if sync.outgrown])
        for sync in syncs:
            sync.outgrown = False
        written = self._written_in_place(trained)
        new = [weight for weight in trained if weight.chosen_in != boundaries]
        watched = [weight for weight in new if boundaries < weight.look_until]
        # One rank alone may have written to its shards, so the others do not know.
        if written and watched != trained and self._votes.carried(str(boundaries)):
            self.reshard()
            watched = trained
        self._choose([*watched, *evaluated])
        for weight in new:
            if weight.chosen_in != boundaries:
                weight.choose(None, once=False)
        if written:
            for weight in trained:
                weight.report_growth()

    def _written_in_place(self, weights: Sequence[ShardedWeight]) -> bool:
        """True if a shard of these weights was written to in place since the last call."""
        notes = [weight.slots.note for weight in weights]
        found = any(note.written_in_place for note in notes)
        for note in notes if found else ():
            note.follow_shards()
        return found

    def _choose(self, weights: Sequence[ShardedWeight]) -> None:
        """Compare the weights with their scales, and choose what to cast them with, each in the mode of its module, as
        it is without FSDP. COLLECTIVE: one all-reduce for each axis along which weights are cut."""
        for weight, amaxes in self._measured(weights):
            once = not weight.training
            weight.choose(weight.fitting(amaxes, once), once)
            weight.slots.weight_sync.fitted |= not once

    def _measured(self, weights: Sequence[ShardedWeight]) -> Iterator[tuple[ShardedWeight, Tensor]]:
        """Iterate over (weight, ``amaxes`` of all ranks). COLLECTIVE."""
        alike: dict[Any, list[ShardedWeight]] = defaultdict(list)
        for weight in weights:
            alike[weight.cuts].append(weight)
        for cuts, group in alike.items():
            own = [weight.amaxes() for weight in group]
            whole = largest_of_parts(torch.cat(own), cuts)
            yield from zip(group, whole.split([len(each) for each in own]))

    def outgrown(self) -> list[ShardedWeight]:
        """Return the weights that have outgrown their scales now, as after a write that torch does not count. The next
        forwards cast them with others. COLLECTIVE over the ranks that shard a weight. Waits for the device."""
        self._look_ahead([weight.slots.weight_sync for weight in self.weights], 1)
        found = []
        for weight, amaxes in self._measured([weight for weight in self.weights if weight.slots.recipe.by == "tensor"]):
            weight.forget_choice()
            if weight.is_beyond(amaxes):
                found.append(weight)
        return found

    def fit_scales(self) -> None:
        """Derive the scales that a forward of all weights would derive now, from which they can then be cast.
        COLLECTIVE if there are any."""
        settle, fit = self._settle(), self._fit()
        if settle is not None and fit is not None:
            settle()
            self._fit_scales(self.weights, fit)

    def _fit_scales(self, weights: Sequence[ShardedWeight], fit: Fit) -> None:
        for weight in weights:
            weight.prepare_forward()
        # Cold weights cannot be cast with their own amax: each rank would use the amax of its own shard.
        unfit = [weight for weight in weights if weight.changed or not weight.seen_hot()]
        if unfit:
            fit(unfit)
            for weight in unfit:
                weight.accept()
                weight.forget_choice()
            self._look_ahead(weight.slots.weight_sync for weight in unfit)
            self.reshard()  # Drops weights gathered with the old scales.

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._outermost == id(module):
            self._outermost = None
            self._forward.in_forward = False
            if any(weight.interrupts_training for weight in self._within[id(module)]):
                self.reshard()  # FSDP may keep the gathered weights, and training's backward would use them.


def _gathered(model: nn.Module, whole: nn.Module) -> list[list[Part]]:
    """Return the parts whose weights FSDP2 gathers in FP8, grouped by weight.

    A weight that another kind of module uses as well, such as a tied embedding, or that a Linear stores transposed,
    stays in high precision.
    """
    resharded = resharded_modules(whole)
    users: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in whole.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users[id(parameter)].append((module, name))
    found: dict[int, list[Part]] = {}
    for part in fp8_parts(model):
        weight = part.module._parameters.get(part.slots.name)
        if weight is None or part.module not in resharded or not is_dtensor(weight):
            continue
        if isinstance(part.module, FP8Linear):
            fits = all(isinstance(user, FP8Linear) and not user.transposed for user, _ in users[id(weight)])
        else:
            fits = users[id(weight)] == [(part.module, part.slots.name)]
        if fits:
            found.setdefault(id(weight), []).append(part)
    return list(found.values())


def require_whole_blocks(model: nn.Module, whole: nn.Module) -> None:
    """Raise ConfigurationError if FSDP2 shards a weight across its blocks. Local; the same on all ranks.

    Each rank casts its shard alone, so it does not know the amax of a block that continues on another rank. Nor can
    FSDP2 gather scales along with uneven shards.
    """
    for part, *_ in _gathered(model, whole):
        if part.slots.recipe.by != "block":
            continue
        linear = part.module if isinstance(part.module, FP8Linear) else None
        shape = tuple(part.weight.shape) if linear is None else multiplied_shape(linear, True)
        dim, ranks = fsdp2_cut(part.weight)
        fqn = part.slots.slots[Role.WEIGHT].fqn
        where = f"{fqn}: its weight {shape} is sharded along dim {dim} over {ranks} ranks"
        instead = "give it another recipe (overrides), or leave fp8_all_gather out"
        if ranks > 1 and dim != 0:
            raise ConfigurationError(f"{where}: FSDP2 gathers blocks along dim 0 only: shard it there, {instead}")
        if ranks > 1 and linear is None and shape[0] % ranks:
            raise ConfigurationError(f"{where}: each rank needs as many experts as any other: {instead}")
        if ranks > 1 and linear is not None and shape[0] % (ranks * BLOCK):
            size = -(-shape[0] // ranks)
            last = max(0, shape[0] - (ranks - 1) * size)
            uneven = f", but {last} for the last" if last != size else ""
            raise ConfigurationError(
                f"{where}, {size} rows each{uneven}: each rank needs the same multiple of {BLOCK} rows, because blocks "
                f"are {BLOCK} x {BLOCK}: {instead}"
            )


def shard_weights(settle: Settle, fit: Fit, model: nn.Module, whole: nn.Module) -> ShardedWeights:
    """Make FSDP2 gather the weights of the model's FP8Linears and FP8Experts in FP8.

    Args:
        settle, fit: see ``ShardedWeights``.
        whole: the model as the training loop calls it.

    Raises:
        ConfigurationError: FSDP2 does not shard the model, or shards it in a way that excludes an FP8 gather.
    """
    fsdp_modules = fsdp2_modules(whole)
    if not fsdp_modules:
        raise ConfigurationError(
            "fp8_all_gather=True needs FSDP2, but this model is not sharded by it: call fully_shard() before attach(), "
            "or leave fp8_all_gather out"
        )
    for module in fsdp_modules:
        groups = fsdp2_groups(module, "fp8_all_gather=True", "leave fp8_all_gather out")
        if any(group.post_forward_mesh_info not in (None, group.mesh_info) for group in groups):
            raise ConfigurationError(
                "reshard_after_forward=<number> does not go with fp8_all_gather=True (FSDP2 has no all-gather "
                "extension for it): use True or False"
            )
    found = _gathered(model, whole)
    places: dict[int, tuple[Arena, dict[int, list[int]]]] = {}
    for parts in found:
        arena = parts[0].slots.weight_sync.arena
        _, of_arena = places.setdefault(id(arena), (arena, {}))
        for number, slot in enumerate(parts[0].slots.weight_slots):
            place = arena.index[slot]
            # Input slots tell which users ran. In another arena, or if cast just in time, they cannot: users count as
            # run.
            of_arena[place] = [
                arena.index[user.slots.precisions[number].slots[Role.INPUT]]
                if user.slots.sync.arena is arena and arena.recipe.delayed
                else place
                for user in parts
            ]
    orders = {}
    for key, (arena, of_arena) in places.items():
        arena.hold_shards(of_arena)
        orders[key] = {place: number for number, place in enumerate(sorted(of_arena))}
    forward = ForwardState(any(arena.device.type == "cuda" for arena, _ in places.values()))
    weights = []
    for part, *_ in found:
        arena = part.slots.weight_sync.arena
        held = [orders[id(arena)][arena.index[slot]] for slot in part.slots.weight_slots]
        of_experts = isinstance(part.module, FP8Experts)
        amax = arena.shards[held[0] :][: len(held)] if of_experts else arena.shards[held[0]]
        weights.append(ShardedWeight(part, amax, forward))
    return ShardedWeights(settle, fit, weights, fsdp_modules, forward)
