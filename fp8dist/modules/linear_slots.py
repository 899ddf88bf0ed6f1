"""LinearSlots: gives an FP8Linear its FP8 state, casts its weight, and computes its products.

A *slot* is the FP8 state of one tensor (input, weight or grad_output): scale, amax history, and a flag that it is cold,
without a scale. Slots lie in *arenas*, arrays over many modules. A *sync* all-reduces the amaxes of one arena; it is
*pending* until its results are committed as new scales.

A LinearSlots owns helpers for one job each: a caster (``casters.py``), the policy for written weights
(``write_policy.py``), a cache of the weight's cast (``weight_cache.py``), and a monitor of its backwards
(``loop_monitor.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8dist.errors import ConfigurationError
from fp8dist.modules.casters import Cast, Request, caster_for
from fp8dist.modules.fp8_weight import FP8Weight, is_mx
from fp8dist.modules.job_state import JobState
from fp8dist.modules.loop_monitor import LoopMonitor
from fp8dist.modules.modes import Choice, Mode, Modes
from fp8dist.modules.outgrown import Outgrown
from fp8dist.modules.unsupported import require_eager
from fp8dist.modules.weight_cache import WeightCache
from fp8dist.modules.weight_notes import WeightNote
from fp8dist.modules.write_policy import WritePolicy
from fp8dist.state.arena import SlotViews
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import local_part
from fp8dist.state.microbatches import Microbatches
from fp8dist.state.precision import Changes, Precision
from fp8dist.state.recipe import Recipe
from fp8dist.state.slots import Slot
from fp8dist_kernels import Gemm, direct, ops
from fp8dist_kernels.formats import Role
from fp8dist_kernels.graphs import capturing
from fp8dist_kernels.multipliers import ProductError

States = tuple[SlotViews, SlotViews, SlotViews]
"""The states of a module's input, weight and grad_output slots."""

Operand = tuple[Tensor, Tensor]
"""One factor of a product: (FP8 tensor, its inverse scales)."""


class LinearSlots:
    """The FP8 state of one FP8Linear: its three slots, and what decides how they are used.

    Attributes:
        sync, weight_sync: the syncs of the arenas that have the slots of (input, grad_output), and of the weight.
        slots: the module's slots by role.
        experts: the slots of each expert. Of a Linear, one entry: its own slots.
        precisions: per entry of ``experts``, which GEMMs run in high precision. ``set_precision`` changes it.
        precision: the first of these; for a Linear, the only one.
        caster: casts the module's tensors.
        note: detects writes to the weight. ``note.resharded`` is True if FSDP frees the weight between forward and
            backward. Its casts are then not cached, because they would take the memory that sharding saves.
    """

    grouped: ClassVar[bool] = False
    """True if the module is a grouped product, with a slot for each expert."""

    def __init__(
        self,
        sync: ArenaSync,
        weight_sync: ArenaSync,
        job: JobState,
        recipe: Recipe,
        slots: dict[Role, Slot],
        name: str = "weight",
        experts: tuple[dict[Role, Slot], ...] = (),
    ) -> None:
        """``name``: the name of the weight's parameter. ``experts``: the slots of each expert; empty for a Linear."""
        self.sync = sync
        self.weight_sync = weight_sync
        self.job = job
        self.recipe = recipe
        self.slots = slots
        self.experts = experts or (slots,)
        changes = Changes()
        self.precisions = tuple(Precision(each, recipe.high_precision, changes) for each in self.experts)
        self.precision = self.precisions[0]
        self.caster = caster_for(recipe, job, sync, None if self.grouped else self.precision)
        self.name = name
        self.note = WeightNote(name)
        self._begin()

    def _begin(self) -> None:
        """Create what a copy does not inherit, and the helpers that refer to the note: a copy has a note of its own."""
        self._states: States | None = None
        self._modes = Modes(self.fqn)
        self.policy = WritePolicy(self.recipe, self.job, self.note, self.weight_sync)
        self.cache = WeightCache(self.job)
        self.monitor = LoopMonitor(self.sync, self.job, self.note, self.fqn)

    def __getstate__(self) -> dict[str, Any]:
        fresh = ("_states", "_modes", "policy", "cache", "monitor", "owner", "_choice")
        kept = {name: value for name, value in self.__dict__.items() if name not in fresh}
        return {**kept, "note": self.note.copied()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def belong_to(self, owner: nn.Module) -> None:
        """Set the module that has the weight: a converted module, or a copy of one."""
        self.note.belong_to(owner)

    @property
    def fqn(self) -> str:
        """The module's fully qualified name in its model. Of a grouped product, the prefix of its experts' names."""
        return self.slots[Role.INPUT].fqn

    @property
    def fqns(self) -> tuple[str, ...]:
        """The fqns of the module's input slots: one, or one for each expert."""
        return tuple([slots[Role.INPUT].fqn for slots in self.experts])

    @property
    def weight_slots(self) -> tuple[Slot, ...]:
        """The slots of the weight: one, or one for each expert."""
        return tuple([slots[Role.WEIGHT] for slots in self.experts])

    @property
    def weight_place(self) -> int | slice:
        """The index of the weight's slot in its arena; for a grouped product, the slice of the experts' slots."""
        return self.weight_sync.arena.index[self.slots[Role.WEIGHT]]

    def weights_of(self, weight: Tensor, first: int = 0) -> Iterator[tuple[Slot, Tensor]]:
        """Iterate over (slot, part of the weight that it scales). A Linear's weight is one part.

        Args:
            weight: the weight as this rank holds it; of experts, [experts on this rank, n, k].
            first: the number of the first expert that this rank holds.
        """
        yield self.slots[Role.WEIGHT], weight

    def settle(self) -> None:
        """Commit a pending sync, before a scale is read. Local: may wait for a collective in flight, but starts none.

        Compiled code cannot commit. For it, a hook after the optimizer's step does (``StepCycle.weights_changed``).
        """
        if torch.compiler.is_compiling():
            return
        if capturing(self.sync.arena.device):
            self.job.graphed = True
        self.sync.settle()
        self.weight_sync.settle()

    def states(self, device: torch.device) -> States:
        """Return the states of (input, weight, grad_output). Commits a pending sync first, and moves the arenas to
        ``device`` on first use. Local.

        Raises:
            ConfigurationError: the backend does not run on ``device``.
        """
        self.settle()
        syncs = (self.sync, self.weight_sync, self.sync)
        for sync in syncs[:2]:
            if sync.arena.device != device or not sync.arena.placed:
                sync.arena.place(device)
        if self._states is None:
            try:
                ops.require_backend(self.job.backend, device)
            except ValueError as error:
                raise ConfigurationError(str(error)) from None
            input_, weight, grad = map(self._state_of, (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT), syncs)
            self._states = (input_, weight, grad)
        return self._states

    def _state_of(self, role: Role, sync: ArenaSync) -> SlotViews:
        return sync.arena.state_of(self.slots[role])

    def forget_views(self) -> None:
        """Drop the views of an arena whose memory was replaced, and the cached cast. The next use makes new views."""
        self._states = None
        self.cache.clear()

    def mode(self, module: nn.Module, x: Tensor, weight: Tensor, choice: Choice) -> tuple[Mode, bool]:
        """Return (how this forward of ``module`` computes, True if it records amaxes), and record that it runs. Local.

        A forward that activation checkpointing repeats inside a backward computes as it did before, whatever has
        changed since: see ``Modes``. Except in compiled code, which reads the current settings.

        Args:
            x: the input.
            weight: the module's weight parameter.
            choice: which products run in high precision now.

        Raises:
            ConfigurationError: FP8 does not support ``x``, or the transform that calls the module. Nothing is recorded.
        """
        job, training = self.job, module.training
        in_fp8, recording = job.in_fp8, job.recording
        casts = in_fp8 and not choice.all_high and (training or job.eval_precision == "fp8")
        # A compiled forward guards on what it reads here: read it late.
        observes = in_fp8 and not casts and (self.grouped or self.precision.observing)
        compiling, grad = torch.compiler.is_compiling(), torch.is_grad_enabled()
        repeated = None if compiling else self._modes.repeated(grad)
        if repeated is not None:
            casts, _, recording, training, *_ = repeated
        record = (self.sync.every_step or job.measuring) and (recording or (training and grad))
        if compiling:
            limit = self.policy.limit if training else self.policy.eval_limit
            return Mode(casts, observes, recording, training, choice, Outgrown(limit)), record
        if casts or recording or (observes and record):
            require_eager(x, weight, module, self.fqn)
        if job.microbatches is not None:
            self._count_forward(job.microbatches, record, training and repeated is None)
        if casts:
            outgrown = self.policy.limits(module, record, training)
        else:
            outgrown = Outgrown(None)
            self.note.idle_at = job.boundaries
        if repeated is not None:
            return repeated, record
        mode = Mode(casts, observes, recording, training, choice, outgrown)
        self._modes.calls.add(mode, grad)
        return mode, record

    def _count_forward(self, microbatches: Microbatches, record: bool, in_training: bool) -> None:
        if record:
            microbatches.forward(*self.fqns)
        elif in_training:
            microbatches.unrecorded_forward()

    def matmul(
        self,
        a: Operand,
        b: Operand,
        dtype: torch.dtype,
        gemm: Gemm,
        offsets: Tensor | None = None,
        bias: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Tensor | None:
        """Return the product a bᵀ + bias in FP8, with the job's backend. ``fp8dist_kernels.ops`` has the shapes. Local.

        Args:
            a, b: the factors, each row-major with inverse scales.
            dtype: the result's dtype.
            gemm: which of the three products it is. It decides the accumulation (see the recipe).
            offsets: int32[E], the ends of the experts' rows: compute one product per expert. None: a Linear's product.
            into: a buffer of the result's shape. A Linear's product is added to it, and None is returned.

        Raises:
            ConfigurationError: the device or torch cannot compute the product. (Compiled code raises ``ProductError``.)
        """
        operands = a[0], b[0], a[1], b[1]
        how: dict[str, Any] = {"fast_accumulation": gemm in self.recipe.fast_accumulation, "backend": self.job.backend}
        if self.job.tap is not None:
            how |= self.caster.tap_of(gemm)
        product: Tensor | None = None
        try:
            if into is not None:
                direct.matmul_into(*operands, into, **how)
            elif offsets is None:
                product = direct.matmul(*operands, dtype, bias=bias, **how)
            elif gemm == "wgrad":
                product = direct.matmul_grouped_columns(*operands, offsets, dtype, **how)
            else:
                product = direct.matmul_grouped(*operands, offsets, dtype, bias=bias, **how)
        except ProductError as error:
            raise refusal(self.fqn, gemm, error) from error
        return product

    def weight_scale(self) -> Tensor:
        """Return a copy of the weight's scale, float32: 0-d, or [E] for experts. NaN where a slot is cold."""
        arena, place = self.weight_sync.arena, self.weight_place
        return torch.where(arena.cold[place], torch.nan, arena.scale[place])

    @property
    def adds_in_cast(self) -> bool:
        """True if the cast of grad_output also computes its column sums, the gradient of the bias. False for experts,
        for scales by row or block, and in compiled graphs, where Inductor makes the casts: then ``bias_gradient`` reads
        grad_output once more."""
        return self.recipe.by == "tensor" and not self.grouped and not torch.compiler.is_compiling()

    def bias_gradient(self, gradient: Tensor, dtype: torch.dtype, offsets: Tensor | None) -> Tensor:
        """Return the gradient of the bias in ``dtype``: [out_features], or [E, out_features] for experts. Local.

        A Linear's sums are added in the same order on all backends, so they are equal bit for bit.

        Args:
            gradient: grad_output [tokens, out_features].
            offsets: int32[E], the ends of the experts' rows. None: of a Linear.
        """
        total: Tensor
        if offsets is None:
            total = direct.add_up(gradient, dtype, backend=self.job.backend)
        else:
            bounds = torch.cat([offsets.new_zeros(1), offsets]).long()
            total = torch.segment_reduce(gradient.float(), "sum", offsets=bounds, axis=0, unsafe=True).to(dtype)
        return total

    def weight_cast(self, weight: Tensor, parameter: Tensor, request: Request) -> Cast:
        """Return the weight in FP8: as FSDP gathered it, cast now, or cached from an earlier microbatch of this step.
        Local. The transposed copy (``columns``) is empty if ``backward_cast`` will make it.

        A cached cast is not used if FSDP frees the weight after the forward, with grad disabled (evaluation may swap
        weights without notice), or if ``WeightCache.key_of`` returns None.

        Args:
            weight: as the forward multiplies with it: [out_features, in_features] on this rank, or [E, …].
            parameter: the parameter of which ``weight`` is a view, or a part.
            request: the copies that the forward and its backward need. Changed by this call.
        """
        limits = request.limits
        if isinstance(weight, FP8Weight):
            return self._gathered_cast(weight, request.state, limits)
        for_backward = torch.is_grad_enabled() and not self.note.resharded
        owner = local_part(parameter)  # Not ``weight``: DTensor.to_local() returns a new view at each call.
        key = self.cache.key_of(weight, parameter) if for_backward else None
        copies = request.rows, request.columns and for_backward
        found = None if key is None else self.cache.find(owner, key, request.record is not False, copies)
        if found is not None:
            return found
        request.columns = copies[1]
        cast = self._cast_weight(weight, request)
        if (limits.written or limits.once) and (request.rows or request.columns):
            inv_scale = cast.rows_inv_scale if cast.rows.numel() else cast.columns_inv_scale
            inv_scale = inv_scale if cast.tensor_inv_scale is None else cast.tensor_inv_scale
            self.policy.report_cast(inv_scale, request.state, in_eval=not limits.written)
        if key is not None:
            how = limits, weight.shape, weight.stride()
            self.cache.keep(cast, owner, key, request.record is not False, copies, how)
        return cast

    def kept_casts(self, stored: Sequence[Tensor]) -> tuple[Cast, Callable[[], Cast]] | None:
        """Return the cached cast of the weight, and a function that returns the cast that the weight gives now. Local;
        records nothing. None: no cast that a forward would use is cached, or the weight is computed from others.

        Args:
            stored: the parameters that store the weight.
        """
        if len(stored) != 1 or self.cache.empty:
            return None
        parameter, weight = stored[0], local_part(stored[0])
        key = self.cache.key_of(weight, parameter)
        cast = None if key is None else self.cache.find(weight, key, False)
        if cast is None:
            return None
        state, made = self.states(weight.device)[1], (bool(cast.rows.numel()), bool(cast.columns.numel()))
        limits, shape, stride = self.cache.how

        def again() -> Cast:
            nowhere = None if self.grouped else torch.empty_like(state.scale)
            request = Request(state, Role.WEIGHT, *made, False, limits, place=nowhere, tapped=False)
            return self._cast_weight(weight.detach().as_strided(shape, stride), request)

        return cast, again

    def _gathered_cast(self, weight: FP8Weight, state: SlotViews, limits: Outgrown) -> Cast:
        """Return the weight as it was gathered in FP8."""
        if limits.written:  # The gather replaces a scale that does not fit, and clears its history: amax 0 shows that.
            self.policy.report((self.weight_sync.arena.amax[self.weight_place] == 0) & ~state.cold)
        if limits.once:
            self.policy.report_cast(weight.inv_scale, state, in_eval=True)
        nothing = weight.rows.new_empty(0)
        return Cast(weight.rows.contiguous(), weight.inv_scale.contiguous(), nothing, nothing)

    def eval_cast(self, linear: nn.Module, weight: Tensor, parameter: Tensor | None = None) -> Cast:
        """Return the row-major cast that an eval forward of ``linear`` would use now. Records nothing, and does not
        count as a forward. Commits a pending sync.

        Local, but COLLECTIVE if ``parameter`` is a sharded DTensor: see ``WritePolicy.limits_of_parts``.

        Args:
            weight: this rank's weight as the forward multiplies with it: [out_features, in_features].
            parameter: the whole weight, if it may be in parts on several ranks. None: it is not.
        """
        state = self.states(weight.device)[1]
        limits = self.policy.limits_now(linear, training=False) if self.recipe.delayed else Outgrown(None)
        if parameter is not None:
            limits = self.policy.limits_of_parts(limits, weight, parameter, state)
        return self._cast_weight(weight, Request(state, Role.WEIGHT, True, False, False, limits, tapped=False))

    def shard_cast(
        self,
        shard: Tensor,
        first: int,
        amax: Tensor,
        record: bool,
        scale: Tensor,
        tapped: bool = False,
        copies: tuple[bool, bool] = (True, False),
    ) -> Cast:
        """Return this rank's shard of the weight in FP8, with the scale that all ranks share. Local; commits a pending
        sync.

        Args:
            shard: this rank's part of the weight.
            first: the number of the first expert in the shard.
            amax: where to record the shard's amax: 0-d float32, or [E] for all experts.
            record: True if the amax is recorded.
            scale: 0-d float32, or [E] for all experts.
            tapped: True if the cast is shown to the job's tap.
            copies: which copies to make: rows and columns of the shard as it is stored.
        """
        state, limits = self.states(self.weight_sync.arena.device)[1], Outgrown(None, scale=scale)
        request = Request(state, Role.WEIGHT, *copies, record, limits, place=amax, tapped=tapped)
        return self.caster.cast(shard, request)

    def casts_in_backward(self, weight: Tensor) -> bool:
        """True if the backward makes its own FP8 copy of the weight."""
        return self.note.resharded or isinstance(weight, FP8Weight)

    def backward_cast(self, weight: Tensor, state: SlotViews, outgrown: Outgrown) -> Operand:
        """Return (FP8 [in_features, out_features], inverse scales) of a weight that FSDP gathered again for the
        backward. Local. Scales change at commits only, so the bytes are those of the forward's cast.

        Args:
            state: the state of the weight's slot.
            outgrown: the limits of the forward.
        """
        if isinstance(weight, FP8Weight):
            turned, inv_scale = weight.for_dgrad()  # Contiguous if the weights are stored as [E, in, out].
            stored = turned.mT
            for_matmul = stored.ndim == 2 and stored.is_contiguous()  # It transposes them where the device needs it.
            if not (turned.is_contiguous() or (for_matmul and not is_mx(inv_scale))):
                turned = direct.transpose(stored, backend=self.job.backend)
            return turned, inv_scale.contiguous()
        # Not the slot's own element: a compiled backward must not save a tensor that the forward has written to.
        nowhere = None if self.grouped else torch.empty_like(state.scale)
        cast = self._cast_weight(weight, Request(state, Role.WEIGHT, False, True, False, outgrown, place=nowhere))
        return cast.columns, cast.columns_inv_scale

    def _cast_weight(self, weight: Tensor, request: Request) -> Cast:
        """Cast the weight in the order in which it lies in memory, which is faster. Changes the request."""
        stored = weight.detach()
        if weight.is_contiguous() or not weight.mT.is_contiguous():
            return self.caster.cast(stored, request)
        # The rows in memory are the columns of the product's weight.
        request.rows, request.columns = request.columns, request.rows
        return self.caster.cast(stored.mT, request).transposed()


def refusal(fqn: str, gemm: Gemm, error: ProductError) -> ConfigurationError:
    """Return the error for a product of the module ``fqn`` that this machine cannot compute."""
    return ConfigurationError(f"{fqn}: {gemm}: {error}")
