"""Early launches of a manager's syncs, for the hooks of ``fp8dist.ddp`` and ``fp8dist.fsdp``."""

from __future__ import annotations

import functools
from collections.abc import Callable

from fp8dist.errors import ConfigurationError
from fp8dist.job.joining import launch_from_hook
from fp8dist.job.manager import Internals, StateManager
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
    return functools.partial(launch_from_hook, inside.cycle)
