"""ShardedWeight: one weight that FSDP2 gathers in FP8, from this rank's shard to the gathered weight.

Under ``fully_shard``, each rank keeps a shard of every weight in high precision. Before FSDP gathers a weight, it asks
this rank's shard (``FP8Shard``) what to send: FP8 bytes, cast with a scale that is the same on all ranks. From the
bytes of all ranks FSDP makes an ``FP8Weight``, with which FP8Linear multiplies.

The FP8 state of a weight is its *slot*: a scale, and the amaxes that it follows. The all-reduce of a step (its *sync*)
gives all ranks the maximum of the amaxes of all shards. A slot is *cold* until it has a scale. A weight is cast with
its slot's scale; if the ranks find that the weight has outgrown it, with a scale from the whole weight's amax
(``ShardedWeight.choose``).

Experts' weights, [E, out_features, in_features], have a slot for each expert. A shard of them holds whole experts, or
rows of all of them. The job counts *boundaries*, the ends of steps.
"""

from __future__ import annotations

import copy
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_weight import FP8Weight, Gathered
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.modules.outgrown import OUTGROWN, amax_of, scale_for
from fp8dist.modules.parts import Part
from fp8dist.parallel.torch_internals import FSDPHome
from fp8dist.parallel.wrappers import local_parts
from fp8dist.state.arena import SlotViews
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import first_local_row, is_dtensor, largest_of_parts, local_part
from fp8dist.state.slots import Slot
from fp8dist_kernels.formats import Role
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SMALL = 0.25
"""Weights are small if their amax is below this divided by sqrt(in_features). torch initialises a Linear's weights to
values up to 1 / sqrt(in_features)."""

Metadata = tuple[tuple[Tensor, ...], torch.Size, torch.dtype]
"""(tensors that follow the gathered ones and are equal on all ranks, such as the inverse scale of the whole weight;
shape of the gathered weight, local under tensor parallelism; FP8 dtype)."""


class FP8Shard(Tensor):
    """This rank's shard of a weight: the local tensor of FSDP2's DTensor, with its memory and operations unchanged.

    FSDP2 calls the two methods ``fsdp_…`` if a local tensor has them: they are its all-gather extension. To optimizers,
    checkpoints and all other code this is a tensor in high precision.
    """

    fp8: weakref.ref[ShardedWeight]  # Weak: ShardedWeight holds the parameter of this shard.

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Metadata]:
        """Return what this rank sends, and what ``fsdp_post_all_gather`` needs to know. Local. FSDP2 calls it before a
        gather.

        Args:
            mesh: the ranks that shard the weight, 1-D also with HSDP.
            outer_size: shape of the gathered weight.

        Returns:
            (FP8 bytes,), padded as FSDP pads uneven shards, or with a scale per block (FP8 bytes, inverse scales), or
            two such pairs; and the metadata.

        Raises:
            ConfigurationError: the manager is gone, or the weight has no scale that fits.
        """
        weight = self.fp8()
        if weight is None:
            raise ConfigurationError("the StateManager of this model no longer exists")
        return weight.pack(self, mesh, outer_size)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Metadata, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight, an ``FP8Weight`` over the gathered bytes. Local. FSDP2 calls it after a gather.

        Args:
            out: the ``FP8Weight`` of the last gather, whose memory FSDP2 has refilled; None: this is the first gather.
                With ``out``, returns None.
        """
        return unpack(gathered, metadata, param_dtype, out)

    # FSDP calls these to move a shard to the compute device, and to pad a shard that was materialised late. torch would
    # return plain tensors.

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

    # Copies and pickles contain a plain tensor: they belong to no manager.

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _as_shard(local: Tensor, weight: weakref.ref[ShardedWeight]) -> Tensor:
    """Turn a local tensor into an ``FP8Shard`` of ``weight``. In place: FSDP and optimizers hold this very object."""
    local.__class__ = FP8Shard
    local.fp8 = weight  # type: ignore[attr-defined]
    return local


class ForwardState:
    """The forward that runs now, of the outermost FSDP module. Shared by all weights of one manager."""

    def __init__(self, on_gpu: bool) -> None:
        self.in_forward = False
        self.grad_enabled = False
        """True if the forward runs with grad enabled. Inside a gather, FSDP has switched grad off."""
        self._settled = torch.cuda.Event() if on_gpu else None

    def settled(self) -> None:
        """Record that all scales were committed on the current stream."""
        if self._settled is not None:
            self._settled.record()

    def wait(self) -> None:
        """Make the current stream wait for the last commit. FSDP gathers on a stream of its own, which may be ahead."""
        if self._settled is not None:
            torch.cuda.current_stream().wait_event(self._settled)


class ShardedWeight:
    """A weight that FSDP2 gathers in FP8.

    At ``accept``, its scale is right for the weight as it is. Writes after that are of two kinds: those of an
    optimizer's step, after which the amax of the next forward corrects the scale, and those of other code, after which
    the scale must be derived anew.
    """

    def __init__(self, part: Part, amax: Tensor, forward: ForwardState, home: FSDPHome | None) -> None:
        """
        Args:
            part: the FP8Linear, or the grouped product of FP8Experts, that multiplies with the weight.
            amax: where gathers record the amax, a view into the arena: 0-d, or [E].
            forward: shared by the weights of the manager.
            home: where FSDP2 keeps the parameter. None: not known yet, as after ``load_state_dict(assign=True)``.
        """
        self.slots: LinearSlots = part.slots
        self.slot = self.slots.slots[Role.WEIGHT]
        self._forward, self._home = forward, home
        self.module = weakref.ref(part.module)
        # float32, 0-d: amax of this rank's shard; [E]: of its part of each expert, -1 where it has none.
        self._amax = amax
        self._parameter: Tensor | None = None  # Not weak: torch cannot move a DTensor that has weak references.
        self._version = -1  # Of the parameter, at ``accept`` or after an optimizer's step.
        self.trusted = False
        """True after state was loaded: its scale is right for the weight that the next forward finds."""
        self.maybe_cold = True
        """False once the slot is known to have a scale."""
        self._written = False  # Other code than an optimizer has written; ``_version`` no longer shows it.
        self._step = -1  # Boundaries passed at the last gather of a training forward.
        recipe = self.slots.recipe
        self._has_scale = recipe.by == "tensor"
        self.renewed = self._has_scale and not recipe.delayed
        """True if each new weight gets a scale from its own amax (``CurrentScaling``)."""
        self.chosen_in: int | None = -1
        """Which step the chosen scale is for: number of boundaries passed at the choice. None: for an evaluation. -1:
        no choice holds, because the weight or its slot's scale may have changed since. The same on all ranks, because
        it decides about collectives."""
        self.look_until = -1
        """Training forwards compare the weight with its scale while fewer boundaries than this have passed. The same on
        all ranks of its arena."""
        self._chosen: Tensor | None = None  # The chosen scale, 0-d or [E]. None: the slot's.
        self._of_backward: Tensor | None = None  # The same, of the forward that gathers in backward repeat.
        self._trained_in = -1  # Boundaries passed when a scale for training forwards was last chosen.

    def install(self) -> None:
        """Install the all-gather extension on this rank's shard, unless it is there. Before each forward, because a
        program may replace the parameter. Local."""
        module = self.module()
        parameter = None if module is None else module._parameters[self.slots.name]
        if parameter is None or not is_dtensor(parameter):
            return
        if parameter is self._parameter and isinstance(local_part(parameter), FP8Shard):
            return
        local = local_part(parameter)
        if isinstance(local, FP8Weight):  # Currently gathered.
            return
        if not isinstance(local, FP8Shard):
            _as_shard(local, weakref.ref(self))
        if self._parameter is not parameter:
            self._parameter, self._version = parameter, -1

    def remove(self) -> None:
        """Remove the extension: FSDP2 gathers the weight in high precision. Local."""
        local = None if self._parameter is None else local_part(self._parameter)
        if isinstance(local, FP8Shard):
            del local.fp8
            local.__class__ = Tensor  # type: ignore[assignment]

    @property
    def training(self) -> bool:
        """True if the weight's own module is in training mode. The same on all ranks."""
        module = self.module()
        return module is not None and module.training

    @property
    def is_gathered(self) -> bool:
        """True while the module holds the gathered weight, in FP8. The same on all ranks that shard it."""
        module = self.module()
        shown = None if module is None else module._parameters[self.slots.name]
        return shown is not None and isinstance(local_part(shown), FP8Weight)

    @property
    def parameter(self) -> Tensor:
        """The sharded parameter, a DTensor, also while the module holds the gathered weight."""
        assert self._parameter is not None
        return self._parameter

    @property
    def changed(self) -> bool:
        """True if other code than an optimizer has written to the weight since ``accept``, as far as torch counts
        writes. A DTensor operation runs on all ranks, so all ranks see the same."""
        return self._has_scale and (self._written or self.parameter._version != self._version)

    def before_step(self) -> None:
        """Record that an optimizer is about to step. Its writes raise the version, too, so earlier writes of other code
        are recorded now."""
        self._written = self.changed

    def after_step(self, real: bool) -> None:
        """Record that the optimizer has stepped. A scale that is not delayed must be derived from the new weight.

        Args:
            real: True if the step may have changed the weight.
        """
        self._version = self.parameter._version
        self._written = self._written or (self.renewed and real)
        self.forget_choice()

    def follow(self, before: ShardedWeight | None) -> None:
        """Take over what an earlier attachment recorded of the weight. None: there was none, and the scale is right."""
        if before is None:
            self.accept()
        else:
            same = before.parameter is self.parameter
            self._version, self._written = before._version, before._written or not same
            self.trusted = before.trusted

    def parts(self) -> list[tuple[ArenaSync, Slot, Tensor]]:
        """Return (sync, slot, this rank's part) of the weight, or of each expert of which this rank has a part."""
        return [(self.slots.weight_sync, slot, part) for slot, part in local_parts(self.slots, self.parameter)]

    @property
    def cuts(self) -> tuple[tuple[DeviceMesh, int], ...]:
        """(mesh, axis) of each axis along which the weight is sharded, by FSDP2 or tensor parallelism."""
        weight: Any = self.parameter
        return tuple(
            (weight.device_mesh, axis) for axis, each in enumerate(weight.placements) if not each.is_replicate()
        )

    def amaxes(self) -> Tensor:
        """Return the amax of this rank's part, float32 [1], or of its part of each expert, [E], -1 where it has none.
        Local."""
        places = {slot: place for place, slot in enumerate(self.slots.weight_slots)}
        found = torch.full((len(places),), DID_NOT_RUN, dtype=torch.float32, device=self.slots.weight_sync.arena.device)
        for _, slot, part in self.parts():
            found[places[slot]] = amax_of(part)
        return found

    def fitting(self, amaxes: Tensor, once: bool) -> Tensor | None:
        """Return the scale to cast with, 0-d or [E]: the slot's, if the weight fits it, else one from its amax. None:
        the recipe has a scale per block or row. Local.

        Args:
            amaxes: of the whole weight, [1], or of each expert, [E]: the maximum of ``amaxes()`` over its ranks.
            once: True for an evaluation or an export, which is stricter, because no later step corrects a cast.
        """
        if not self._has_scale:
            return None
        state, policy = self._state, self.slots.policy
        limit = policy.eval_limit if once else policy.limit
        return scale_for(amaxes.view_as(state.scale), state, self.slots.recipe, limit)

    def starts_small(self) -> bool:
        """True if the weights are so small (``SMALL``) that the first optimizer step may enlarge them many times, far
        beyond their scale. Waits for the device."""
        if not self._has_scale or self.renewed:
            return False
        state, least = self._state, SMALL / math.sqrt(self.parameter.shape[-1])
        return bool((state.scale * 2.0**self.slots.recipe.margin * least > state.format.max).any())

    def is_beyond(self, amaxes: Tensor) -> bool:
        """True if the weight has outgrown its scale by more than a step of training may. Waits for the device.
        ``amaxes``: see ``fitting``."""
        state, limit = self._state, self.slots.policy.limit or OUTGROWN
        return bool((scale_for(amaxes.view_as(state.scale), state, self.slots.recipe, limit) < state.scale).any())

    def choose(self, scale: Tensor | None, once: bool) -> None:
        """Set the scale of the next casts. All ranks that shard the weight must choose alike.

        Args:
            scale: None: the slot's.
            once: False: it holds for training forwards up to the next boundary, and for their backwards. True: it holds
                for an evaluation, until the next choice. Backwards of training forwards, which may still come in this
                step, keep their scale.
        """
        boundaries = self.slots.job.boundaries
        self._chosen, self.chosen_in = scale, None if once else boundaries
        if not once:
            self._trained_in = boundaries
        if not self.interrupts_training:
            self._of_backward = scale

    @property
    def interrupts_training(self) -> bool:
        """True if the scale was chosen for an evaluation, and a backward of a training forward may follow."""
        return self.chosen_in is None and self._trained_in == self.slots.job.boundaries

    def report_growth(self) -> None:
        """If another scale than the slot's was chosen, report to the policy for unseen writes whether the weight has
        outgrown its slot's scale. Local."""
        slots = self.slots
        if self._chosen is not None:
            slots.policy.report_new_scale(slots.weight_scale(), self._chosen)

    def forget_choice(self) -> None:
        """Record that no choice holds, because the weight or its slot's scale may have changed."""
        self._chosen, self.chosen_in = None, -1

    def seen_hot(self) -> bool:
        """True if the slot has a scale, or needs none. Waits for the device, until the answer was True once."""
        if self.maybe_cold and self._has_scale:
            self.maybe_cold = bool(self.slots.weight_sync.arena.cold[self.slots.weight_place].any())
        return not (self.maybe_cold and self._has_scale)

    def state_loaded(self) -> None:
        """Record that the state was loaded or reset, so the slot may be cold. A delayed scale counts as right for the
        weight that the next forward finds; any other scale must be derived from that weight."""
        self.maybe_cold = True
        self.forget_choice()
        self.trusted = not self.renewed
        self._written = self._written or self.renewed

    def accept(self, written: bool = False, trusted: bool = False) -> None:
        """Record that the scale is right for the weight as it is now. A caller that has changed the weight and changed
        it back passes the earlier values of ``changed`` and ``trusted``."""
        self._version, self._written, self.trusted = self.parameter._version, written, trusted

    def prepare_forward(self) -> None:
        """Prepare for a forward of the outermost FSDP module. Local."""
        self.install()
        if self.trusted:
            self.accept()

    def pack(self, shard: Tensor, mesh: DeviceMesh, size: torch.Size) -> tuple[tuple[Tensor, ...], Metadata]:
        """Cast this rank's shard for a gather; see ``FP8Shard.fsdp_pre_all_gather``. Commits a pending sync.

        Records the shard's amax, if a training forward gathers: the maximum over the step's forwards. If the weight
        stays gathered, and no forward of a step gathers it, the amax of the last gather counts.

        Args:
            size: shape of the gathered weight.

        Raises:
            ConfigurationError: outside of a forward of the model, if the slot is cold or other code has written to the
                weight.
        """
        slots = self.slots
        slots.settle()
        self._forward.wait()
        if self.trusted:  # Gathered by an explicit unshard(), before a forward.
            self.accept()
        if not self._forward.in_forward and not in_backward() and not self.seen_hot():
            raise ConfigurationError(
                f"{self.slot.fqn}: it has no FP8 scale yet, and is gathered outside of a forward of the model: call "
                "manager.refresh_weights() first"
            )
        if self.changed:
            raise ConfigurationError(
                f"{self.slot.fqn}: the weight was changed since its FP8 scale was derived, and is gathered outside of "
                "a forward of the model: call manager.refresh_weights() first"
            )
        # A forward whose weights are freed after it does without the copy for dgrad. A backward needs both: activation
        # checkpointing repeats the forward in it.
        home = self._home
        one = home is not None and home.reshards and self._forward.in_forward and not in_backward()
        copies = self._copies(shard, self._records(), tapped=True, both=not one)
        parts = [part for pair in copies for part in pair]
        dtype, raw = parts[0].dtype, parts[0].view(torch.uint8)
        if shard.shape[1:] == size[1:]:  # Sharded along dim 0, where shards may be uneven.
            raw = _with_rows(raw, -(-size[0] // mesh.size()))  # Of experts [E, …], rows are experts.
        # If a single rank holds the weight, FSDP2 copies the first tensor only. Then the others go as metadata.
        sent = 1 if self._has_scale or mesh.size() == 1 else len(parts)
        if home is not None:
            home.expect(sent)
        more = (part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in parts[1:sent])
        return (raw, *more), (tuple(parts[sent:]), size, dtype)

    def _copies(self, shard: Tensor, records: bool, tapped: bool, both: bool) -> list[tuple[Tensor, ...]]:
        """Return this rank's shard in FP8, cast with the scale that all ranks have chosen: (bytes as the shard is
        stored, inverse scales) of the copy for fprop, and of MX with ``both`` of that for dgrad. Local; commits a
        pending sync.

        Args:
            records: True if the cast records the amax.
            tapped: True if the cast notifies the job's tap, through which audits and replays record casts.
        """
        scale = self._of_backward if in_backward() else self._chosen
        if scale is None or not (in_backward() or self.chosen_in in (None, self.slots.job.boundaries)):
            scale = self._state.scale
        return self._cast(shard, records, scale, tapped, both)

    def _cast(
        self, shard: Tensor, records: bool, scale: Tensor, tapped: bool = False, both: bool = False
    ) -> list[tuple[Tensor, ...]]:
        """See ``_copies``. ``scale``: 0-d, or [E]; empty: the recipe derives its own."""
        first = first_local_row(self.parameter) if shard.ndim == 3 else 0
        if self.slots.recipe.by != "mx":
            return [self.slots.shard_cast(shard, first, self._amax, records, scale, tapped)[:2]]
        # Experts' weights may be stored as [E, in_features, out_features]. Then fprop sums over rows of the shard.
        turned = bool(getattr(self.module(), "is_transposed", False))
        copies = not turned or both, turned or both
        cast = self.slots.shard_cast(shard, first, self._amax, records, scale, tapped, copies)
        columns = tuple(part.mT.contiguous() if part.ndim > 1 else part for part in cast[2:4])
        fprop, dgrad = (columns, cast[:2]) if turned else (cast[:2], columns)
        return [fprop, dgrad] if both else [fprop]

    @property
    def _state(self) -> SlotViews:
        """The state of the weight's slot, or of all experts' slots, after a pending sync was committed."""
        return self.slots.states(self.slots.weight_sync.arena.device)[1]

    def eval_cast(self, shard: Tensor) -> tuple[Tensor, ...]:
        """Return (FP8 bytes as the shard is stored, inverse scales) as an evaluation would gather it now. COLLECTIVE
        over the ranks that shard the weight; commits a pending sync."""
        self.slots.settle()
        scale = self.fitting(largest_of_parts(self.amaxes(), self.cuts), once=True) if self._has_scale else None
        return self._cast(shard, False, shard.new_empty(0) if scale is None else scale)[0]

    def _records(self) -> bool:
        """Return True if this gather records the amax. The first such gather of a step clears the recorded amax."""
        job = self.slots.job
        # A backward gathers the same weight again. If no step needs the amax, nothing records it.
        if in_backward() or not (self.slots.sync.every_step or job.measuring):
            return False
        recorded = self._step == job.boundaries
        if job.recording or (self.training and self._forward.grad_enabled):
            self._step = job.boundaries
        elif recorded:
            return False
        if not recorded:
            self._amax.fill_(DID_NOT_RUN)
        return True


def in_backward() -> bool:
    """True if autograd runs a backward on this thread, also in a recomputation (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1


def _with_rows(part: Tensor, rows: int) -> Tensor:
    """Return the tensor, padded with zeros to [rows, …]."""
    missing = rows - part.shape[0]
    return F.pad(part, (*(0, 0) * (part.ndim - 1), 0, missing)) if missing else part


def unpack(
    gathered: tuple[Tensor, ...], metadata: Metadata, dtype: torch.dtype, out: Any
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """See ``FP8Shard.fsdp_post_all_gather``."""
    rest, size, fp8_dtype = metadata
    for part in rest:
        if part.is_cuda:  # Allocated on FSDP's copy-in stream, and read on this one.
            part.record_stream(torch.cuda.current_stream())
    raw, *others = (*gathered, *rest)
    for place, part in enumerate(others):  # Inverse scales; of MX also the copy for dgrad, and its inverse scales.
        if part.dtype == torch.uint8:
            others[place] = part.view(fp8_dtype if place == 1 else torch.float8_e8m0fnu)
        if part.is_inference():  # The weight may stay gathered until a training forward.
            with torch.inference_mode(False):
                others[place] = others[place].clone()
    rows = raw.view(-1)[: size.numel()].view(size).view(fp8_dtype)
    now = Gathered(rows, *others)
    if out is None:
        return FP8Weight(now, dtype), ()
    weight = local_part(out)
    if not isinstance(weight, FP8Weight):
        raise ConfigurationError("FSDP has gathered weights before attach(): attach before the first forward")
    weight.refilled(now)
    return None
