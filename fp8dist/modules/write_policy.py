"""WritePolicy: decides when a module's tensors are cast with their own amaxes, because a weight was written to.

With delayed scaling, a tensor is cast with a scale from the amaxes of earlier steps. If somebody writes to a weight,
that scale may be far too large, and the cast would saturate. The weight has then *outgrown* its scale. Its cast, and
the casts of tensors computed from it, use the tensors' current amaxes instead.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8dist.modules.fp8_weight import FP8Weight
from fp8dist.modules.job_state import JobState
from fp8dist.modules.outgrown import OUTGROWN, Growth, Outgrown, amax_of, either, limits_of, scale_for
from fp8dist.modules.weight_notes import WeightNote
from fp8dist.state.arena import SlotViews
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import is_dtensor, largest_of_parts
from fp8dist.state.recipe import Recipe
from fp8dist_kernels.graphs import capturing


class WritePolicy:
    """Chooses the limits for the casts of one module, and reports to other modules that its weight outgrew its scale.

    ``limit``, ``eval_limit``: overflow ratios (amax * scale / largest number of the format) above which the weight is
    cast with its own amax, in training and in eval mode; see ``limits_of``.
    """

    def __init__(self, recipe: Recipe, job: JobState, note: WeightNote, sync: ArenaSync) -> None:
        """``note``: the note of the weight. ``sync``: the sync of the arena that has the weight's slot."""
        self._recipe, self._job, self._note, self._sync = recipe, job, note, sync
        self.limit, self.eval_limit = limits_of(recipe)

    def limits(self, module: nn.Module, record: bool, training: bool) -> Outgrown:
        """Return the limits for a forward of ``module``, and update the weight's note: it is used now. Local.

        Ranks with shards of one weight get the same result as one rank with the whole weight. During CUDA graph capture
        the weight's versions are not read, because the graph cannot read them again. (Compiled forwards do not call
        this: a version counter would become a constant of the graph, or a guard.)

        Args:
            record: True if this forward records amaxes. Loaded FP8 state is right for the weight that such a
                forward finds. A reentrant checkpoint records when it repeats its forward.
            training: False in eval mode.
        """
        if not self._recipe.delayed or capturing(self._sync.arena.device):
            return Outgrown(self.limit if training else self.eval_limit)
        note = self._note
        note.used_at = self._job.boundaries
        if record and note.awaited:
            note.take(module)
        limits = self.limits_now(module, training)
        if record:
            note.was_recorded()
        return limits

    def limits_now(self, module: nn.Module, training: bool) -> Outgrown:
        """Return the limits for a forward of ``module`` without recording that one runs. For delayed scaling only."""
        limit, note = self.limit, self._note
        # An EMA by ``.data`` shows in no version, and a copy has no boundaries at which its scales could follow.
        written = note.written(module) or note.written_in_place or (training and note.of_copy)
        others = limit if written and note.copy_written else None
        upstream = self._upstream(not training)
        return Outgrown(limit if training else self.eval_limit, others, written, upstream, not training)

    def limits_in_backward(self, limits: Outgrown, record: bool) -> Outgrown:
        """Return the limits for the output gradient: the forward's, with ``upstream`` read again. The gradient comes
        from later modules, whose weights were cast after this module's forward.

        Args:
            record: False if the gradient's amax is not recorded. In eval mode its scale is then that of training, whose
                loss may be far smaller, so a gradient beyond it is cast with its own amax.
        """
        if not self._recipe.delayed or torch.compiler.is_compiling():
            return limits
        if limits.once and not record:
            limits = limits._replace(others=self.eval_limit)
        upstream = self._upstream(limits.once)
        return limits if upstream is limits.upstream else limits._replace(upstream=upstream)

    def limits_of_parts(self, limits: Outgrown, weight: Tensor, parameter: Tensor, state: SlotViews) -> Outgrown:
        """Return limits with the scale of the whole weight, for an eval forward of a weight in parts (tensor
        parallelism). So all ranks cast their parts with one scale, as an export does. Otherwise return ``limits``.

        COLLECTIVE in eval mode for a sharded DTensor: one all-reduce (max) per sharded mesh axis, over the ranks that
        have the parts. All of them run this forward.

        Args:
            weight: this rank's part.
            parameter: the whole weight; a DTensor if it has parts.
            state: the state of the weight's slot.
        """
        if not (limits.once and is_dtensor(parameter)) or isinstance(weight, FP8Weight):
            return limits
        cuts = [(parameter.device_mesh, axis) for axis, each in enumerate(parameter.placements) if each.is_shard()]
        if not cuts:
            return limits
        amax = largest_of_parts(amax_of(weight), cuts)
        return limits._replace(scale=scale_for(amax, state, self._recipe, limits.weight))

    def _upstream(self, in_eval: bool) -> Tensor | None:
        """Return 0-d bool on the device: True if another module's weight has outgrown its scale since the last
        boundary. None: no other module has reported. Reports of eval forwards count for eval forwards only, so that an
        evaluation does not change training."""
        found: Tensor | None = None
        for growth in (self._job.growth, self._job.eval_growth if in_eval else None):
            if growth is not None and growth.boundaries == self._job.boundaries:
                of_others = growth.of_others(id(self))
                found = found if of_others is None else either(found, of_others)
        return found

    def report_new_scale(self, before: Tensor, scale: Tensor) -> None:
        """Report to other modules whether the weight outgrew its scale ``before``, and so got this smaller one: whether
        ``before`` is more than 1.25 times ``scale``. Both float32, 0-d or [E]."""
        if self._recipe.delayed:
            self.report(before > OUTGROWN * scale)

    def report_cast(self, inv_scale: Tensor, state: SlotViews, in_eval: bool) -> None:
        """Report to other modules whether the weight outgrew its scale: whether it was cast with an inverse scale more
        than 1.25 times the slot's. A cold slot has no scale to outgrow."""
        self.report((inv_scale * state.scale > OUTGROWN) & ~state.cold, in_eval)

    def report(self, grown: Tensor, in_eval: bool = False) -> None:
        """Report to the other modules, until the next boundary, that this module's weight outgrew its scale.

        Args:
            grown: bool on the device, 0-d, or [E] for experts.
            in_eval: True: report to eval forwards only.
        """
        job, grown = self._job, grown.any() if grown.ndim else grown
        growth = job.eval_growth if in_eval else job.growth
        if growth is None or growth.boundaries != job.boundaries:
            growth = Growth(job.boundaries)
            if in_eval:
                job.eval_growth = growth
            else:
                job.growth = growth
        growth.add(id(self), grown)
