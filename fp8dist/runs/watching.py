"""What runs observe of a manager: the statistics of its slots, what a run's header says of it, its waits in syncs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fp8dist.common.names import check_keywords, require_int, warn_moved
from fp8dist.errors import ConfigurationError
from fp8dist.job.checkpoint import with_rank
from fp8dist.job.manager import Internals, StateManager
from fp8dist.runs.monitor import SlotOutputs
from fp8dist.state.groups import own_rank
from fp8dist.state.statistics import JumpAlarm
from fp8dist.state.watch import Observer, Watch
from fp8dist_kernels import GEMMS
from fp8dist_kernels.formats import Role


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
    """Collect amax, scale, saturation and underflow share of each slot every ``every`` steps. Local: on all ranks
    alike, before ``attach``. Each such step has one more all-reduce per group, and one more pass over each tensor
    that is cast. Several calls, and a ``Recorder``, which writes what is collected to a file, share them.

    Steps inside ``Join`` and in CUDA graphs are left out.

    Args:
        path: old: a ``Recorder`` writes the file. ``{rank}`` is replaced by the rank.
        tensorboard: old: a ``Recorder`` with ``fp8dist.exporters.TensorBoard(folder, slots=True)`` writes there.
        jump: a factor above 1. A scale that has changed by this factor or more since it was last observed is logged by
            one rank, and an Event "jump" is sent. None: no alarm.
        ranks: also collect which rank held each maximum, and in which microbatch. Doubles the bytes of the
            all-reduce, and adds 16 bytes per rank.
        resume_after: the step that the run continues from. Steps are counted from there.
        observer: called with each Observation, on all ranks, inside the step. It must not raise or communicate. With
            ``amax_sync=False`` each rank gets its own numbers.

    Raises:
        ConfigurationError: the manager is already attached, ``every`` or ``jump`` is invalid, or an earlier watch has
            another ``resume_after``.
    """
    require_int("every", every, 1, what="a number of steps")
    inside = Internals(manager)
    cycle = inside.cycle
    cycle.require("watch()")
    writes = cycle.state.logs or not manager.settings.amax_sync
    alarm = None if jump is None else JumpAlarm(jump, writes)
    precisions = (of for part in inside.parts() for of in part.slots.precisions)
    order = {of.slots[Role.INPUT].fqn: place for place, of in enumerate(precisions)}
    shared = cycle.measurement.watch or Watch(order)
    shared.require_fits(resume_after)
    observers = [] if observer is None else [observer]
    if path is not None:
        warn_moved("fp8dist.watch(path=…)", "fp8dist.Recorder(folder, manager), which writes scales.jsonl", 4)
    if tensorboard is not None:
        new = "fp8dist.Recorder(folder, manager, exporters=[fp8dist.exporters.TensorBoard(…, slots=True)])"
        warn_moved("fp8dist.watch(tensorboard=…)", new, 4)
    if writes and (path is not None or tensorboard is not None):
        lines, folder = (None if given is None else with_rank(given) for given in (path, tensorboard))
        earlier = [one.path for one in shared.observers if isinstance(one, SlotOutputs)]
        if lines is not None and Path(lines).absolute() in earlier:
            raise ConfigurationError(f"watch(path={str(lines)!r}): an earlier watch writes there: give another file")
        observers.insert(0, SlotOutputs(lines, folder, resume_after))
    shared.add(every, ranks, alarm, resume_after, observers)
    cycle.measurement.watch = cycle.verdicts.amaxes = shared


def describe(manager: StateManager) -> dict[str, Any]:
    """Return what the header of a run's folder says about a manager, as JSON values. Local.

    The keys are ``attached``, ``writes`` (True on the lowest rank that shares the state), ``began_after``
    (``run_step`` at the last ``attach`` or load; None: FP8 is switched off), ``device``, ``fp8``, ``experts``
    (True if there are some in FP8), ``recipe``, ``modules`` and ``slots``; docs/reference/files.md describes
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
    slots = sorted((spec.slot, spec.format, sync.arena.recipe) for sync in cycle.syncs for spec in sync.arena.specs)
    return {
        "attached": cycle.job.attached,
        "writes": cycle.state.logs and (any(cycle.groups) or own_rank() == 0),
        "began_after": cycle.job.began if manager.settings.enabled else None,
        "device": str(cycle.syncs[0].arena.device),
        "fp8": manager.settings.enabled,
        "experts": any(sync.experts for sync in cycle.syncs),
        "recipe": str(manager.recipe),
        "modules": modules,
        "slots": [
            {"slot": str(slot), "format": format.name, "max": format.max, "trouble": recipe.share_limits._asdict()}
            for slot, format, recipe in slots
        ],
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
