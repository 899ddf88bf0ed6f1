"""FSDP2: weights that travel as FP8.

Under ``fully_shard`` each rank keeps a part of every weight in high precision. Before FSDP gathers one, it asks this
rank's part (``FP8Shard``) what to send: FP8 bytes, cast with the slot's scale, which all ranks hold alike. From
all ranks' bytes it makes an ``FP8Weight``, which the FP8Linear uses as it is. Each part's amax goes into the sync.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.modules.fp8_weight import FP8Weight, Gathered
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.parallel.torch_internals import fsdp2_groups, fsdp2_modules
from fp8dist.parallel.wrappers import (
    fsdp2_cut,
    multiplied_shape,
    reshard,
    resharded_modules,
)
from fp8dist.state.arena import Arena
from fp8dist.state.slots import Slot
from fp8dist.sync.arena_sync import ArenaSync
from fp8dist.sync.groups import is_dtensor, local_part
from fp8dist_kernels.formats import Role
from fp8dist_kernels.reference.blocks import BLOCK, blocks_along
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ShardedWeight", "ShardedWeights", "require_whole_blocks", "shard_weights"]

Metadata = tuple[Tensor | None, torch.Size, torch.dtype]
"""inv_scale of all bytes (None: each block has its own, and they are gathered as well), the weight's shape (local under
tensor parallelism), their FP8 dtype."""


class FP8Shard(Tensor):
    """This rank's part of a weight: the local tensor of FSDP2's DTensor, which keeps its memory and what it can do.

    FSDP2 looks for the two methods of its all-gather extension on it. An optimizer, a checkpoint and everybody else
    see a tensor in high precision.
    """

    fp8: weakref.ref[ShardedWeight]  # Weak, for it holds the parameter that this is of.

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Metadata]:
        """What this rank sends: its FP8 bytes, padded as FSDP pads uneven parts, and inverse scales of blocks."""
        weight = self.fp8()
        if weight is None:
            raise ConfigurationError("the StateManager of this model no longer exists")
        return weight.pack(self, mesh, outer_size)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Metadata, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight, over the gathered bytes themselves."""
        return unpack(gathered, metadata, param_dtype, out)

    # FSDP moves a part to the compute device, and pads one that was materialised late, by these.

    def _like(self, other: Tensor) -> Tensor:
        return other if other is self else _as_shard(other.as_subclass(Tensor), self.fp8)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._like(super().to(*args, **kwargs))

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._like(super().cpu(*args, **kwargs))

    def pin_memory(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._like(super().pin_memory(*args, **kwargs))

    def new_zeros(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._like(super().new_zeros(*args, **kwargs))

    def narrow(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._like(super().narrow(*args, **kwargs))

    # Copies and pickles are of the tensor alone.

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _as_shard(local: Tensor, weight: weakref.ref[ShardedWeight]) -> Tensor:
    """Let FSDP ask ``weight`` what to gather of this local tensor. In place: the tensor stays the object that it is."""
    local.__class__ = FP8Shard
    local.fp8 = weight  # type: ignore[attr-defined]
    return local


class ForwardState:
    """What the outermost forward of now is like, for all weights of one manager."""

    def __init__(self, on_gpu: bool) -> None:
        self.in_forward = False
        self.grad_enabled = False
        """Whether the forward has gradients: FSDP gathers without, always."""
        self._settled = torch.cuda.Event() if on_gpu else None

    def settled(self) -> None:
        """All scales were committed, on the current stream."""
        if self._settled is not None:
            self._settled.record()

    def wait(self) -> None:
        """FSDP's copy-in stream need not have waited for the last commit."""
        if self._settled is not None:
            torch.cuda.current_stream().wait_event(self._settled)


class ShardedWeight:
    """A weight that FSDP2 gathers in FP8.

    Its scale is right for the weight that was ``accept``ed. Since then it may have been written to: by an optimizer's
    step, which is what scales are made to follow, or by anybody else.
    """

    def __init__(self, linear: FP8Linear, amax: Tensor, forward: ForwardState) -> None:
        self.slots: LinearSlots = linear.fp8_slots
        self.slot = self.slots.slots[Role.WEIGHT]
        self._forward = forward
        self._linear = weakref.ref(linear)
        self._amax = amax  # 0-d float32: of this rank's part.
        self._parameter: Tensor | None = None  # Not a weak one: torch cannot move a DTensor that has weak references.
        self._version = -1
        self.trusted = False
        """State was loaded: its scale is right for the weight that the next forward finds."""
        self.maybe_cold = True
        self._written = False  # By others than an optimizer, before one stepped.
        self._step = -1  # The last one whose training forwards have gathered it.
        recipe = self.slots.recipe
        self._has_scale = recipe.by == "tensor"
        self.renewed = self._has_scale and not recipe.delayed
        """Whether its scale is derived anew from each new weight."""

    def install(self) -> None:
        """Give FSDP the extension, if it does not have it (a parameter may have been replaced)."""
        linear = self._linear()
        parameter = None if linear is None else linear._parameters["weight"]
        if parameter is None or not is_dtensor(parameter):
            return
        if parameter is self._parameter and isinstance(local_part(parameter), FP8Shard):
            return
        local = local_part(parameter)
        if isinstance(local, FP8Weight):  # It is gathered now.
            return
        if not isinstance(local, FP8Shard):
            _as_shard(local, weakref.ref(self))
        if self._parameter is not parameter:
            self._parameter, self._version = parameter, -1

    def remove(self) -> None:
        """Take the extension off."""
        local = None if self._parameter is None else local_part(self._parameter)
        if isinstance(local, FP8Shard):
            del local.fp8
            local.__class__ = Tensor  # type: ignore[assignment]

    @property
    def parameter(self) -> Tensor:
        """The sharded parameter, also while the module holds the gathered one."""
        assert self._parameter is not None
        return self._parameter

    @property
    def changed(self) -> bool:
        """Whether it was written to by others than an optimizer, as far as torch can tell, since ``accept``. DTensor
        operations run on all ranks, so all ranks see the same."""
        return self._has_scale and (self._written or self.parameter._version != self._version)

    def before_step(self) -> None:
        """An optimizer is about to write to it: what others wrote will not show in its version any more."""
        self._written = self.changed

    def after_step(self, real: bool) -> None:
        """That optimizer has stepped. A scale that is not delayed must be derived from what it has written. ``real``:
        it may have written something else than was there."""
        self._version = self.parameter._version
        self._written = self._written or (self.renewed and real)

    def follow(self, before: ShardedWeight | None) -> None:
        """Take over what an earlier attachment knew of it. None: nothing, and the scale is right."""
        if before is None:
            self.accept()
        else:
            same = before.parameter is self.parameter
            self._version, self._written = before._version, before._written or not same
            self.trusted = before.trusted

    def part(self) -> tuple[ArenaSync, Slot, Tensor]:
        """(sync, slot, this rank's part)."""
        return self.slots.weight_sync, self.slot, local_part(self.parameter)

    def seen_hot(self) -> bool:
        """Whether it has a scale, or needs none. Reads the device until it has one."""
        if self.maybe_cold and self._has_scale:
            arena = self.slots.weight_sync.arena
            self.maybe_cold = bool(arena.cold[arena.index[self.slot]])
        return not (self.maybe_cold and self._has_scale)

    def state_loaded(self) -> None:
        """Its state was loaded, or reset: it may be cold. A delayed scale is right for the weight that comes next; one
        that is not follows from that weight."""
        self.maybe_cold = True
        self.trusted = not self.renewed
        self._written = self._written or self.renewed

    def accept(self) -> None:
        """The scale is right for the weight as it is now."""
        self._version, self._written, self.trusted = self.parameter._version, False, False

    def prepare_forward(self) -> None:
        """The outermost forward begins."""
        self.install()
        if self.trusted:
            self.accept()

    def pack(self, shard: Tensor, mesh: DeviceMesh, size: torch.Size) -> tuple[tuple[Tensor, ...], Metadata]:
        """FP8 bytes (uint8 [rows, columns], padded) of this rank's part, and inverse scales where blocks have their
        own. Records its amax: the maximum over the step's training forwards, or that of the last gather, where it
        stayed gathered since."""
        slots = self.slots
        slots.settle()
        self._forward.wait()
        if self.trusted:  # Gathered by hand, before a forward.
            self.accept()
        if not self._forward.in_forward and not _in_backward() and not self.seen_hot():
            raise ConfigurationError(
                f"{self.slot.fqn}: it has no FP8 scale yet, and is gathered outside of a forward of the model: call "
                "manager.refresh_weights() first"
            )
        if self.changed:
            raise ConfigurationError(
                f"{self.slot.fqn}: the weight was changed since its FP8 scale was derived, and is gathered outside of "
                "a forward of the model: call manager.refresh_weights() first"
            )
        records = self._records()
        state = slots.states(slots.weight_sync.arena.device)[1]
        cast = slots.quantize(
            shard, state, records, rows=True, columns=False, pending=self._amax, just_in_time=False, square=True
        )
        rows = shard.shape[0]
        if shard.shape[1:] == size[1:]:  # Sharded along dim 0, where parts may be uneven.
            rows = -(-size[0] // mesh.size())
        raw = _with_rows(cast.rows.view(torch.uint8), rows)
        if self._has_scale:
            return (raw,), (cast.rows_inv_scale, size, cast.rows.dtype)
        return (raw, _with_rows(cast.rows_inv_scale, blocks_along(rows, BLOCK))), (None, size, cast.rows.dtype)

    def _records(self) -> bool:
        """Whether to record now; makes room for it."""
        if _in_backward() or not self.slots.wanted:
            return False  # The backward gathers the same weight again.
        mode, linear = self.slots.mode, self._linear()
        recorded = self._step == mode.boundaries
        if mode.calibrating or (linear is not None and linear.training and self._forward.grad_enabled):
            self._step = mode.boundaries
        elif recorded:
            return False
        if not recorded:
            self._amax.fill_(DID_NOT_RUN)
        return True


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _with_rows(part: Tensor, rows: int) -> Tensor:
    """[rows, …], filled up with zeros."""
    missing = rows - part.shape[0]
    return F.pad(part, (0, 0, 0, missing)) if missing else part


def unpack(
    gathered: tuple[Tensor, ...], metadata: Metadata, dtype: torch.dtype, out: Any
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """An FP8Weight over the gathered bytes, or new meaning for the one that lies over them already."""
    inv_scale, size, fp8_dtype = metadata
    if inv_scale is None:
        grid = torch.Size(blocks_along(length, BLOCK) for length in size)
        inv_scale = gathered[1].view(-1)[: grid.numel()].view(grid)
    elif inv_scale.is_cuda:  # Made on FSDP's copy-in stream, read on this one.
        inv_scale.record_stream(torch.cuda.current_stream())
    if inv_scale.is_inference():  # The weight may stay gathered until a forward in training.
        with torch.inference_mode(False):
            inv_scale = inv_scale.clone()
    if out is None:
        rows = gathered[0].view(-1)[: size.numel()].view(size).view(fp8_dtype)
        return FP8Weight(Gathered(rows, inv_scale), dtype), ()
    weight = local_part(out)
    if not isinstance(weight, FP8Weight):
        raise ConfigurationError("FSDP has gathered weights before attach(): attach before the first forward")
    weight.refilled(inv_scale)
    return None


Settle = Callable[[], None]
Fit = Callable[[Sequence[ShardedWeight]], None]


class ShardedWeights:
    """All weights of one manager that FSDP2 gathers in FP8.

    Before a forward of the outermost FSDP module it commits what is due, on the stream of the computation, and looks
    whether weights were written to behind the optimizer's back.

    Args:
        settle: commits what is due. Local. A bound method, held weakly, as ``fit``.
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
        self._forward = forward
        self._modules = weakref.WeakSet(modules)
        self._within: dict[int, tuple[ShardedWeight, ...]] = {}
        for module in modules:
            inside = set(module.modules())
            self._within[id(module)] = tuple(weight for weight in weights if weight._linear() in inside)
        self._settle, self._fit = weakref.WeakMethod(settle), weakref.WeakMethod(fit)
        self._outermost: int | None = None
        self._handles: list[RemovableHandle] = []
        for weight in self.weights:
            weight.install()
        for module in modules:
            before = module.register_forward_pre_hook(torch.compiler.disable(self._before_forward), prepend=True)
            after = module.register_forward_hook(torch.compiler.disable(self._after_forward), always_call=True)
            self._handles += [before, after]

    def remove(self) -> None:
        """Take all hooks and extensions off."""
        for handle in self._handles:
            handle.remove()
        for weight in self.weights:
            weight.remove()

    def accept(self) -> None:
        """All scales are right for the weights as they are now. Local."""
        for weight in self.weights:
            weight.accept()

    def follow(self, before: ShardedWeights | None) -> None:
        """Take over what an earlier attachment knew, so that what was written since then shows. Local."""
        known = {} if before is None else {weight.slot: weight for weight in before.weights}
        for weight in self.weights:
            weight.follow(known.get(weight.slot))

    def before_step(self, optimizer: Optimizer) -> None:
        """That optimizer is about to step. Local."""
        for weight in self._of(optimizer):
            weight.before_step()

    def after_step(self, optimizer: Optimizer, real: bool) -> None:
        """That optimizer has stepped: scales follow, what it wrote needs no new ones. ``real``: it may have changed
        parameters. Local."""
        for weight in self._of(optimizer):
            weight.after_step(real)

    def _of(self, optimizer: Optimizer) -> list[ShardedWeight]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [weight for weight in self.weights if id(weight.parameter) in held]

    def reshard(self) -> None:
        """Have all modules give back what they hold gathered. Local.

        One that is not resharded after its forward, and had no backward, still holds the weights of then.
        """
        reshard(self._modules)

    def state_loaded(self, slots: Collection[Slot]) -> None:
        """State was loaded, or reset: the scales of these slots are right for the weights that the next forward finds,
        whichever were loaded first; some may be cold. Local."""
        for weight in self.weights:
            if weight.slot in slots:
                weight.state_loaded()

    @contextlib.contextmanager
    def kept_scales(self) -> Iterator[None]:
        """What is written to weights inside is undone there: scales of then are right again. Local."""
        arenas = {id(weight.slots.weight_sync.arena): weight.slots.weight_sync.arena for weight in self.weights}
        known = [(weight, weight.changed, weight.trusted) for weight in self.weights]
        before = [(arena, arena.copied_state()) for arena in arenas.values()]
        try:
            yield
        finally:
            for arena, state in before:
                arena.put_back_slots(state, arena.arrays.shard_slots)
            for weight, changed, trusted in known:
                weight.accept()
                weight._written, weight.trusted = changed, trusted

    def renew(self) -> None:
        """An attached optimizer has stepped: scales of weights that are not delayed follow at once. COLLECTIVE, where
        there are any: one all-reduce per arena."""
        fit = self._fit()
        stale = [weight for weight in self.weights if weight.renewed and weight.changed]
        if fit is not None and stale:
            fit(stale)
            for weight in stale:
                weight.accept()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        settle, fit = self._settle(), self._fit()
        if self._outermost is not None or settle is None or fit is None or _in_backward():
            return
        settle()
        weights = self._within[id(module)]
        for weight in weights:
            weight.prepare_forward()
        # Cold ones cannot be cast just in time: each rank would take the scale of its own part.
        unfit = [weight for weight in weights if weight.changed or not weight.seen_hot()]
        if unfit:
            fit(unfit)
            for weight in unfit:
                weight.accept()
            self.reshard()  # What was gathered with the old scales.
        self._outermost = id(module)
        self._forward.in_forward, self._forward.grad_enabled = True, torch.is_grad_enabled()
        self._forward.settled()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._outermost == id(module):
            self._outermost = None
            self._forward.in_forward = False


def _gathered(model: nn.Module, whole: nn.Module) -> list[list[FP8Linear]]:
    """The FP8Linears whose weights FSDP2 gathers in FP8; those that share one are together.

    A weight that a module other than an FP8Linear uses as well, a tied embedding say, stays in high precision.
    """
    resharded = resharded_modules(whole)
    users: dict[int, list[nn.Module]] = defaultdict(list)
    for module in whole.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users[id(parameter)].append(module)
    found: dict[int, list[FP8Linear]] = {}
    for module in model.modules():
        if isinstance(module, FP8Linear) and module in resharded and is_dtensor(module.weight):
            key = id(module.weight)
            if all(isinstance(user, FP8Linear) for user in users[key]):
                found.setdefault(key, []).append(module)
    return list(found.values())


def require_whole_blocks(model: nn.Module, whole: nn.Module) -> None:
    """Raise ConfigurationError where FSDP2 would gather blocks that it has cut. Local; the same on all ranks.

    Each rank casts its part alone, and does not know the amax of a block that another rank has the rest of. Nor does
    FSDP2 take scales along with parts that are uneven.
    """
    for linear, *_ in _gathered(model, whole):
        slots = linear.fp8_slots
        if slots.recipe.by != "block":
            continue
        shape = multiplied_shape(linear, True)
        dim, ranks = fsdp2_cut(linear)
        fqn = slots.slots[Role.WEIGHT].fqn
        where = f"{fqn}: its weight {shape} is sharded along dim {dim} over {ranks} ranks"
        instead = "give it another recipe (overrides), or leave fp8_all_gather out"
        if ranks > 1 and dim != 0:
            raise ConfigurationError(f"{where}: FSDP2 gathers blocks along dim 0 only: shard it there, {instead}")
        if ranks > 1 and shape[0] % (ranks * BLOCK):
            part = -(-shape[0] // ranks)
            last = max(0, shape[0] - (ranks - 1) * part)
            uneven = f", but {last} for the last" if last != part else ""
            raise ConfigurationError(
                f"{where}, {part} rows each{uneven}: they must have the same multiple of {BLOCK} rows each, for blocks "
                f"are of {BLOCK} x {BLOCK}: {instead}"
            )


def shard_weights(settle: Settle, fit: Fit, model: nn.Module, whole: nn.Module) -> ShardedWeights:
    """Have FSDP2 gather the weights of the model's FP8Linears in FP8.

    Args:
        settle: see ``ShardedWeights``, as ``fit``.
        whole: the model as the loop calls it.

    Raises:
        ConfigurationError: FSDP2 shards none of the model, or in a way that it cannot gather in FP8.
    """
    fsdp_modules = fsdp2_modules(whole)
    if not fsdp_modules:
        raise ConfigurationError(
            "fp8_all_gather=True is of FSDP2, and this model is not under it: call fully_shard() before attach(), or "
            "leave fp8_all_gather out"
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
    for linears in found:
        slots = linears[0].fp8_slots
        arena = slots.weight_sync.arena
        _, of_arena = places.setdefault(id(arena), (arena, {}))
        place = arena.index[slots.slots[Role.WEIGHT]]
        # A user in another arena, or one whose input is cast just in time, cannot be asked: the weight counts as used.
        of_arena[place] = [
            arena.index[user.fp8_slots.slots[Role.INPUT]]
            if user.fp8_slots.sync.arena is arena and arena.recipe.delayed
            else place
            for user in linears
        ]
    amaxes = {key: arena.hold_shards(of_arena) for key, (arena, of_arena) in places.items()}
    forward = ForwardState(any(arena.device.type == "cuda" for arena, _ in places.values()))
    weights = []
    for linears in found:
        slots = linears[0].fp8_slots
        arena = slots.weight_sync.arena
        weights.append(ShardedWeight(linears[0], amaxes[id(arena)][arena.index[slots.slots[Role.WEIGHT]]], forward))
    return ShardedWeights(settle, fit, weights, fsdp_modules, forward)
