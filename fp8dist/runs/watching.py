"""What runs observe of a manager: the statistics of its slots, what a run's header says of it, its waits in syncs."""

from __future__ import annotations

import functools
import os
from typing import Any

from fp8dist.common.names import check_keywords, require_int
from fp8dist.job.checkpoint import with_rank
from fp8dist.job.manager import Internals, StateManager
from fp8dist.runs.monitor import Monitor
from fp8dist.state.groups import own_rank
from fp8dist.state.recipe import GEMMS
from fp8dist.state.watch import Observer, Watch
from fp8dist_kernels.formats import Role

__all__ = ["describe", "take_waits", "watch"]


@check_keywords("fp8dist.watch")
def watch(
    manager: StateManager,
    every: int,
    path: str | os.PathLike[str] | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
    jump: float | None = None,
    ranks: bool = False,
    resume_after: int | None = None,
    observer: Observer | None = None,
) -> None:
    """Write amax, scale, saturation and underflow share of each slot every ``every`` steps. Local: on all ranks
    alike, before ``attach``. Each such step has one more all-reduce per group, and one more pass over each tensor
    that is cast. Several calls, and a ``Recorder``, share them.

    One rank writes a JSON object per slot and step (see ``Monitor``). With ``amax_sync=False`` each rank writes its
    own. Steps inside ``Join`` and in CUDA graphs are left out.

    Args:
        path: file for the JSON lines. ``{rank}`` is replaced by the rank. None: no file.
        tensorboard: TensorBoard's log folder, if TensorBoard is installed. None: no TensorBoard.
        jump: a factor above 1. A scale that has changed by this factor or more since it was last written is logged,
            and an Event "jump" is sent. None: no alarm.
        ranks: also write which rank held each maximum, and in which microbatch. Doubles the bytes of the
            all-reduce, and adds 16 bytes per rank.
        resume_after: the step that the run continues from. Steps are counted from there, and lines of later steps
            are removed from ``path``. None: ``path`` is replaced.
        observer: called with each Observation, on all ranks, inside the step. It must not raise or communicate.

    Raises:
        ConfigurationError: the manager is already attached, ``every`` or ``jump`` is invalid, or an earlier watch
            writes to ``path`` or has another ``resume_after``.
    """
    require_int("every", every, 1, what="a number of steps")
    inside = Internals(manager)
    cycle = inside.cycle
    cycle.require("watch()")
    lines, folder = (None if given is None else with_rank(given) for given in (path, tensorboard))
    writes = cycle.state.speaks or not manager.settings.amax_sync
    make = functools.partial(Monitor, lines, folder, jump=jump, writes=writes, resume_after=resume_after)
    precisions = (of for part in inside.parts() for of in part.slots.precisions)
    order = {of.slots[Role.INPUT].fqn: place for place, of in enumerate(precisions)}
    shared = cycle.measurement.watch or Watch(order)
    shared.add(every, ranks, make, resume_after, observer, lines)
    cycle.measurement.watch = cycle.checker.amaxes = shared


def describe(manager: StateManager) -> dict[str, Any]:
    """Return what the header of a run's folder says about a manager, as JSON values. Local.

    The keys are ``attached``, ``writes`` (True on the lowest rank that shares the state), ``began_after``
    (``run_step`` at the last ``attach`` or load; None: FP8 is switched off), ``device``, ``fp8``, ``experts``
    (True if there are some in FP8), ``recipe``, ``modules`` and ``slots``; docs/reference/run-folder.md describes
    the last three.
    """
    inside = Internals(manager)
    cycle = inside.cycle
    modules: list[dict[str, Any]] = []
    survey = inside.survey()
    for row, highs in zip(survey.coverage(manager.settings.enabled), survey.high):
        gemms = {gemm: "fp8" if row.fp8 and not all(gemm in high for high in highs) else "high" for gemm in GEMMS}
        modules.append({"module": row.fqn, "flops": 2 * row.parameters, "gemms": gemms, "reason": row.reason})
        modules[-1] |= {"experts": row.experts} if row.experts else {}
    specs = sorted(spec for sync in cycle.syncs for spec in sync.arena.specs)
    return {
        "attached": cycle.job.attached,
        "writes": cycle.state.speaks and (any(cycle.groups) or own_rank() == 0),
        "began_after": cycle.job.began if manager.settings.enabled else None,
        "device": str(cycle.syncs[0].arena.device),
        "fp8": manager.settings.enabled,
        "experts": any(sync.experts for sync in cycle.syncs),
        "recipe": str(manager.recipe),
        "modules": modules,
        "slots": [{"slot": str(slot), "format": format.name, "max": format.max} for slot, format, _ in specs],
    }


def take_waits(manager: StateManager) -> list[float]:
    """Return how long this rank waited in syncs, in milliseconds: one number per step that ended since the last
    call, over all arenas. Local. On CUDA it waits for the device.

    A step's number covers the time between the previous boundary and its own. With ``update="next_step"`` it is the
    wait for the previous sync. On CUDA, events measure how long the stream stood still; the host's time is
    ``manager.metrics()["fp8/sync_wait_ms"]``. The rank that waits least is the one that the others wait for, unless an
    earlier collective, such as the reduction of gradients, absorbs the wait. Steps in CUDA graphs are left out.
    Only the newest 4,096 steps are kept; older ones are NaN.
    """
    return Internals(manager).cycle.measurement.waits.take()
