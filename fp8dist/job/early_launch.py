"""Early launches of a manager's syncs, for the hooks of ``fp8dist.ddp`` and ``fp8dist.fsdp``."""

from __future__ import annotations

import functools
from collections.abc import Callable

from fp8dist.checks.replication import ddp_parameters
from fp8dist.errors import ConfigurationError
from fp8dist.job.joining import launch_from_hook
from fp8dist.job.manager import Internals, StateManager
from fp8dist.modules.job_state import JobState
from fp8dist.modules.parts import fp8_parts
from fp8dist_kernels.formats import Role


def early_launcher(manager: StateManager, frozen_weights: bool = False) -> Callable[[], None]:
    """Return a function that launches syncs before the boundary, for the hooks of DDP and FSDP1. Local; the function is
    COLLECTIVE.

    Args:
        frozen_weights: True if weights may be frozen, because the hook launches after the gradient amaxes of their
            layers are recorded.

    Raises:
        ConfigurationError: a converted weight is frozen, and ``frozen_weights`` is False.
    """
    inside = Internals(manager)
    inside.cycle.require("comm_hook(manager)")
    for part in fp8_parts(inside.model):
        if not part.weight.requires_grad and not frozen_weights:
            raise ConfigurationError(
                f"{part.slots.slots[Role.WEIGHT].fqn}.weight is frozen: its gradient amax comes after DDP's "
                "last bucket. Leave fp8dist.ddp.comm_hook out; the sync then runs at the optimizer's step"
            )
    inside.cycle.job.launches_early = True
    launch = functools.partial(launch_from_hook, inside.cycle)
    return launch if frozen_weights else _after_last_bucket(inside.cycle.job, launch)


def _after_last_bucket(job: JobState, launch: Callable[[], None]) -> Callable[[], None]:
    """Return a function that launches from DDP's last bucket, unless DDP ignores a converted weight: its gradient amax
    may come later, even after the end of this backward, which may be a checkpoint's own."""
    called, ignores = None, False

    def launch_in_time() -> None:
        nonlocal called, ignores
        if called is not job.called:
            called, ignores = job.called, _ignores_some(job)
        if not ignores:
            launch()

    return launch_in_time


def _ignores_some(job: JobState) -> bool:
    """True if the model is in DDP, which ignores a converted weight."""
    if (whole := job.whole) is None or not (known := ddp_parameters(whole)):
        return False
    return any(id(weight) not in known for part in fp8_parts(whole) if part.slots.job is job for weight in part.stored)
