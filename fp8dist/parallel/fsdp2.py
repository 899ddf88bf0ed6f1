"""ShardedWeights: all weights of one manager that FSDP2 gathers in FP8, and whether their scales still fit.

Each rank casts its shard of a weight, so all ranks must cast with the same scale. Normally that is the scale of the
weight's *slot* (its FP8 state), which follows the amaxes of earlier steps. A weight *has outgrown* its scale if it is
so much larger that FP8 would cut values off. A slot is *cold* until it has a first scale. An *arena* holds the slots
that a group of ranks shares; a *boundary* is the end of a step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.modules.parts import Part, fp8_parts
from fp8dist.parallel.sharded_weight import ForwardState, ShardedWeight, in_backward
from fp8dist.parallel.torch_internals import ForwardMethods, FSDPHome, fsdp2_groups, fsdp2_modules
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
from fp8dist_kernels import BLOCK, MX_BLOCK
from fp8dist_kernels.formats import Role

LOOK_AHEAD = 3
"""After a weight has outgrown its scale, the ranks compare weights with their scales in so many steps, before the first
forward of each. A sync reports a weight beyond its scale up to two steps later, so fewer steps would leave a gap."""

Settle = Callable[[], None]
Fit = Callable[[Sequence[ShardedWeight]], None]


class ShardedWeights:
    """All weights of one manager that FSDP2 gathers in FP8.

    Before a forward of the outermost FSDP module, it commits pending syncs on the compute stream, and renews scales of
    weights that other code than an optimizer has written to.

    COLLECTIVE to create, over all ranks that hold a part of a weight.

    Args:
        settle: commits pending syncs. Local. A bound method, held weakly, like ``fit``.
        fit: derives the slots' scales from these weights. COLLECTIVE.
        weights: of the model, one for each parameter.
        modules: the FSDP modules of the model.
        forward: shared with the weights.
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
        self._within = {  # The weights of modules inside an FSDP module, by its id.
            id(module): tuple(weight for inner in module.modules() for weight in held.get(inner, ()))
            for module in modules
        }
        fsdp = {id(module) for module in modules}
        self._inner = {id(module): fsdp.intersection(map(id, module.modules())) - {id(module)} for module in modules}
        self._settle, self._fit = weakref.WeakMethod(settle), weakref.WeakMethod(fit)
        self._outermost: int | None = None  # Id of the FSDP module whose forward runs, and is inside no other.
        meshes = {id(mesh): mesh for weight in weights for mesh, _ in weight.cuts}
        ranks = {rank for mesh in meshes.values() for rank in mesh.mesh.flatten().tolist()}
        self._votes = Votes(sorted(ranks))
        self._entered: list[bool] = []  # Of each registered method that runs: True if it is the outermost forward.
        self._handles: list[RemovableHandle | ForwardMethods] = []
        for module in modules:
            before = module.register_forward_pre_hook(torch.compiler.disable(self._before_forward), prepend=True)
            after = module.register_forward_hook(torch.compiler.disable(self._after_forward), always_call=True)
            # Not as a decorator, which would load Dynamo with this file.
            around = map(torch.compiler.disable, (self._before_method, self._after_method))
            methods = ForwardMethods(module, *around)
            self._handles += [before, after, methods]

    def remove(self) -> None:
        """Remove all hooks, and make FSDP2 gather the weights in high precision. Local."""
        for handle in self._handles:
            handle.remove()
        for weight in self.weights:
            weight.remove()

    def accept(self) -> None:
        """Record that all scales are right for the weights as they are now. Local."""
        for weight in self.weights:
            weight.accept()
            weight.forget_choice()

    def follow(self, before: ShardedWeights | None) -> None:
        """Take over what an earlier attachment knew of the weights, so that writes since then are detected. Local.

        Args:
            before: of the earlier attachment; None: this is the first.
        """
        known = {} if before is None else {weight.slot: weight for weight in before.weights}
        for weight in self.weights:
            weight.follow(known.get(weight.slot))
        self._look_ahead([weight.slots.weight_sync for weight in self.weights if weight.starts_small()])

    def before_step(self, optimizer: Optimizer) -> None:
        """Record that an optimizer is about to step. Local."""
        for weight in self._of(optimizer):
            weight.before_step()

    def after_step(self, optimizer: Optimizer, real: bool) -> None:
        """Record that an optimizer has stepped. Its writes need no new delayed scale, because these follow the amaxes
        of steps. Local.

        Args:
            real: True if the step may have changed parameters.
        """
        for weight in self._of(optimizer):
            weight.after_step(real)

    def _of(self, optimizer: Optimizer) -> list[ShardedWeight]:
        """Return the weights that the optimizer updates."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [weight for weight in self.weights if id(weight.parameter) in held]

    def reshard(self) -> None:
        """Make all FSDP modules free their gathered weights, so that the next forward gathers them anew. Local.

        A module with ``reshard_after_forward=False`` keeps the weights of its forward until a backward frees them.
        """
        reshard(self._modules)

    def state_loaded(self, slots: Collection[Slot]) -> None:
        """Record that the FP8 state of these slots was loaded or reset. Local.

        A program may load state and weights in any order. So the loaded scales count as right for the weights that the
        next forward finds. Some slots may be cold.
        """
        loaded = [weight for weight in self.weights if any(slot in slots for slot in weight.slots.weight_slots)]
        for weight in loaded:
            weight.state_loaded()
        self._look_ahead([weight.slots.weight_sync for weight in loaded])

    @contextlib.contextmanager
    def kept_scales(self) -> Iterator[None]:
        """Return a context that restores all scales at its end. For callers that change weights in it, and change them
        back, also in it. Local."""
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
        """Derive those weight scales anew that follow each weight, and not the amaxes of earlier steps. Call it after a
        step of an attached optimizer. COLLECTIVE if there are any: one all-reduce per arena."""
        fit = self._fit()
        stale = [weight for weight in self.weights if weight.renewed and weight.changed]
        if fit is not None and stale:
            fit(stale)
            for weight in stale:
                weight.accept()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        """Hook before the forward of each FSDP module. Acts only for the outermost one, and not in a recomputation."""
        settle, fit = self._settle(), self._fit()
        if self._is_inside(module) or settle is None or fit is None or in_backward():
            return
        settle()
        weights = self._within[id(module)]
        self._fit_scales(weights, fit)
        self._choose_scales(weights)
        self._outermost = id(module)
        self._forward.in_forward, self._forward.grad_enabled = True, torch.is_grad_enabled()
        self._forward.settled()

    def _is_inside(self, module: nn.Module) -> bool:
        """True if the forward of an FSDP module runs inside that of another one that contains it. Others do not count:
        torch does not say when a registered method raises, so it may run no more."""
        return self._outermost is not None and id(module) in self._inner[self._outermost]

    def _look_ahead(self, arenas: Iterable[ArenaSync], steps: int = LOOK_AHEAD) -> None:
        """Make the next ``steps`` steps compare the weights of these arenas with their scales. Local, but all ranks of
        an arena must call it at the same point: the comparison is collective."""
        concerned = {id(sync) for sync in arenas}
        for weight in self.weights:
            if id(weight.slots.weight_sync) in concerned:
                weight.look_until = max(weight.look_until, weight.slots.job.boundaries + steps)

    def _choose_scales(self, weights: Sequence[ShardedWeight]) -> None:
        """Choose the scales with which the next gathers cast: that of the slot, or one from the weight's amax.

        COLLECTIVE over the ranks that shard a weight, if the weight is in eval mode and not gathered for an evaluation
        already, so that ranks may run other numbers of forwards after ``unshard``; in training mode only at the first
        forward of a step, and only if some weight may have outgrown its scale. That may be after small initial values,
        after a step in which a weight did, and after anything that may have written to weights unseen. Any other step
        changes a weight too little.
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
        # Code may have written to the shards of some ranks only. The comparison is collective, so it takes place only
        # if all ranks have seen a write, and so vote for it.
        if written and watched != trained and self._votes.carried(str(boundaries)):
            self.reshard()
            watched = trained
        uncast = [weight for weight in evaluated if weight.chosen_in is not None or not weight.is_gathered]
        self._choose([*watched, *uncast])
        for weight in new:
            if weight.chosen_in != boundaries:
                weight.choose(None, once=False)
        if written:
            for weight in trained:
                weight.report_growth()

    def _written_in_place(self, weights: Sequence[ShardedWeight]) -> bool:
        """True if code has written to this rank's shard of one of these weights since the last call. Local."""
        notes = [weight.slots.note for weight in weights]
        found = any(note.written_in_place for note in notes)
        for note in notes if found else ():
            note.follow_shards()
        return found

    def _choose(self, weights: Sequence[ShardedWeight]) -> None:
        """Compare the weights with their scales, and choose the scale of each cast: for training or for evaluation, as
        the weight's module is. COLLECTIVE: one all-reduce for each mesh axis along which weights are sharded."""
        for weight, amaxes in self._measured(weights):
            once = not weight.training
            weight.choose(weight.fitting(amaxes, once), once)
            weight.slots.weight_sync.fitted |= not once

    def _measured(self, weights: Sequence[ShardedWeight]) -> Iterator[tuple[ShardedWeight, Tensor]]:
        """Yield (weight, amax of the whole weight, float32 [1], or of each expert, [E]). COLLECTIVE."""
        alike: dict[Any, list[ShardedWeight]] = defaultdict(list)
        for weight in weights:
            alike[weight.cuts].append(weight)
        for cuts, group in alike.items():
            own = [weight.amaxes() for weight in group]
            whole = largest_of_parts(torch.cat(own), cuts)
            yield from zip(group, whole.split([len(each) for each in own]))

    def outgrown(self) -> list[ShardedWeight]:
        """Return the weights that have outgrown their scales now, for example by a write that torch does not count. The
        next forward casts them with other scales. COLLECTIVE over the ranks that shard a weight. Waits for the
        device."""
        self._look_ahead([weight.slots.weight_sync for weight in self.weights], 1)
        found = []
        for weight, amaxes in self._measured([weight for weight in self.weights if weight.slots.recipe.by == "tensor"]):
            weight.forget_choice()
            if weight.is_beyond(amaxes):
                found.append(weight)
        return found

    def fit_scales(self) -> None:
        """Derive the scales that a forward would derive before it gathers, so that all weights can be cast now.
        COLLECTIVE if there are any."""
        settle, fit = self._settle(), self._fit()
        if settle is not None and fit is not None:
            settle()
            self._fit_scales(self.weights, fit)

    def _fit_scales(self, weights: Sequence[ShardedWeight], fit: Fit) -> None:
        """Derive the scales of weights that have none, or that other code than an optimizer has written to. COLLECTIVE
        if there are any."""
        for weight in weights:
            weight.prepare_forward()
        # A tensor of a cold slot is usually cast with its own amax. Here each rank would take that of its own shard.
        unfit = [weight for weight in weights if weight.changed or not weight.seen_hot()]
        if unfit:
            fit(unfit)
            for weight in unfit:
                weight.accept()
                weight.forget_choice()
            self._look_ahead(weight.slots.weight_sync for weight in unfit)
            self.reshard()  # Drops weights gathered with the old scales.

    def _before_method(self, module: nn.Module, args: Any) -> None:
        """Act as before a forward. A method may also be called inside of one."""
        self._entered.append(not self._is_inside(module))
        self._before_forward(module, args)

    def _after_method(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._entered.pop():
            self._after_forward(module, args, output)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook after the forward of each FSDP module, also of one that raised."""
        if self._outermost == id(module):
            self._outermost = None
            self._forward.in_forward = False
            if any(weight.interrupts_training for weight in self._within[id(module)]):
                self.reshard()  # FSDP may keep the gathered weights, and training's backward would use them.


def _gathered(model: nn.Module, whole: nn.Module) -> list[list[Part]]:
    """Return the FP8 parts of ``model`` whose weights FSDP2 can gather in FP8: one list for each weight, of the parts
    that use it.

    A weight stays in high precision if a module that needs it so uses it as well (a tied embedding), or if a Linear
    stores it transposed.
    """
    resharded = resharded_modules(whole)
    users: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)  # (module, name in it) by id of the parameter.
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


def require_whole_blocks(model: nn.Module, whole: nn.Module, axes: Mapping[int, int]) -> None:
    """Check that FSDP2 shards weights between their blocks, for recipes with a scale per block. Local. ``axes``:
    ``fsdp2_axes`` of ``whole``.

    Each rank casts its shard alone, so it cannot know the amax of a block that continues on another rank. Nor can FSDP2
    gather scales along with uneven shards.

    Raises:
        ConfigurationError: on all ranks, if a shard ends inside a block, or if shards are uneven.
    """
    for part, *_ in _gathered(model, whole):
        if part.slots.recipe.by not in ("block", "mx"):
            continue
        block = BLOCK if part.slots.recipe.by == "block" else MX_BLOCK
        linear = part.module if isinstance(part.module, FP8Linear) else None
        shape = tuple(part.weight.shape) if linear is None else multiplied_shape(linear, axes)
        dim, ranks = fsdp2_cut(part.weight, axes)
        fqn = part.slots.slots[Role.WEIGHT].fqn
        where = f"{fqn}: its weight {shape} is sharded along dim {dim} over {ranks} ranks"
        instead = "give it another recipe (overrides), or leave fp8_all_gather out"
        if ranks > 1 and dim != 0:
            raise ConfigurationError(f"{where}: FSDP2 gathers blocks along dim 0 only: shard it there, {instead}")
        if ranks > 1 and linear is None and shape[0] % ranks:
            raise ConfigurationError(f"{where}: each rank needs as many experts as any other: {instead}")
        if part.slots.recipe.by == "mx" and any(size % block for size in shape[-2:]):
            raise ConfigurationError(
                f"{fqn}: its weight {shape} has a dim that is no multiple of {block}, and FSDP2 gathers only whole MX "
                f"blocks: {instead}"
            )
        if ranks > 1 and linear is not None and shape[0] % (ranks * block):
            size = -(-shape[0] // ranks)
            last = max(0, shape[0] - (ranks - 1) * size)
            uneven = f", but {last} for the last" if last != size else ""
            raise ConfigurationError(
                f"{where}, {size} rows each{uneven}: each rank needs the same multiple of {block} rows, because a "
                f"block has {block}: {instead}"
            )


def shard_weights(settle: Settle, fit: Fit, model: nn.Module, whole: nn.Module) -> ShardedWeights:
    """Make FSDP2 gather the weights of the model's FP8Linears and FP8Experts in FP8. COLLECTIVE.

    Args:
        settle, fit: see ``ShardedWeights``.
        model: the prepared model.
        whole: the model as the training loop calls it, with its FSDP modules.

    Raises:
        ConfigurationError: FSDP2 does not shard the model, or shards it in a way that excludes an FP8 gather.
    """
    fsdp_modules = fsdp2_modules(whole)
    if not fsdp_modules:
        raise ConfigurationError(
            "fp8_all_gather=True needs FSDP2, but this model is not sharded by it: call fully_shard() before attach(), "
            "or leave fp8_all_gather out"
        )
    homes: dict[int, FSDPHome] = {}  # By id of the parameter.
    replicated: set[int] = set()
    for module in fsdp_modules:
        groups = fsdp2_groups(module, "fp8_all_gather=True", "leave fp8_all_gather out")
        homes.update({id(one.sharded_param): FSDPHome(group, one) for group in groups for one in group.fsdp_params})
        whole_groups = (group for group in groups if not hasattr(group.mesh_info, "shard_process_group"))
        replicated |= {id(one.sharded_param) for group in whole_groups for one in group.fsdp_params}
        if any(group.post_forward_mesh_info not in (None, group.mesh_info) for group in groups):
            raise ConfigurationError(
                "reshard_after_forward=<number> does not go with fp8_all_gather=True (FSDP2 has no all-gather "
                "extension for it): use True or False"
            )
    found = _gathered(model, whole)
    if any(id(part.weight) in replicated for part, *_ in found):
        raise ConfigurationError(
            "fp8_all_gather=True has nothing to gather under replicate(), which leaves each rank its whole weights: "
            "leave it out, or name the modules under replicate() in prepare(skip=…)"
        )
    # By id of an arena: for each weight slot, the slots that show in a sync whether a user of the weight ran.
    places: dict[int, tuple[Arena, dict[int, list[int]]]] = {}
    for parts in found:
        arena = parts[0].slots.weight_sync.arena
        _, of_arena = places.setdefault(id(arena), (arena, {}))
        for number, slot in enumerate(parts[0].slots.weight_slots):
            place = arena.index[slot]
            # A user ran if its input slot recorded an amax. If that slot is in another arena, or records nothing in
            # most steps, the weight's own slot stands for it: the user counts as run.
            of_arena[place] = [
                arena.index[user.slots.precisions[number].slots[Role.INPUT]]
                if user.slots.sync.arena is arena and arena.recipe.delayed
                else place
                for user in parts
            ]
    orders = {}  # By id of an arena: the index of a weight slot among all weight slots that are gathered.
    for key, (arena, of_arena) in places.items():
        arena.hold_shards(of_arena)
        orders[key] = {place: number for number, place in enumerate(sorted(of_arena))}
    forward = ForwardState(any(arena.device.type == "cuda" for arena, _ in places.values()))
    weights = []
    for part, *_ in found:
        arena = part.slots.weight_sync.arena
        slots = part.slots.weight_slots  # Those of experts follow each other.
        first = orders[id(arena)][arena.index[slots[0]]]
        amax = arena.shards[first : first + len(slots)] if part.slots.grouped else arena.shards[first]
        weights.append(ShardedWeight(part, amax, forward, homes.get(id(part.weight))))
    return ShardedWeights(settle, fit, weights, fsdp_modules, forward)
