"""An error for a model that is trained by something else than the engine to which its manager is attached."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.job.manager import Internals
from fp8dist.modules.parts import fp8_parts
from fp8dist.parallel.partitioned import is_partitioned, own_part

__all__ = ["require_steps_of"]

SAMPLED = 64
"""Elements of each weight that are compared."""


def require_steps_of(engine: Any, manager: fp8dist.StateManager) -> None:
    """Make it an error if the weights change, but no FP8 step ends. Local.

    It looks, and waits for the device, in training forwards that the attached engine does not call.

    Args:
        engine: to which the manager is attached. ``fp8_calls`` is True while it calls its ``module``.
    """
    reference, seen = weakref.ref(engine), dict[int, Tensor]()

    def before(module: nn.Module, args: Any) -> None:
        inside = Internals(manager)
        job = inside.cycle.job
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled() and job.attached):
            return
        own, attached, passed = reference(), inside.attachment.module, job.boundaries
        if attached is None or (attached is own and not own.fp8_calls):
            weights = torch.cat([_sample(part.weight) for part in fp8_parts(module)])
            if not torch.equal(seen.get(passed, weights), weights):
                raise ConfigurationError(
                    "the model is trained by something else than the engine that attach() was given: call that engine. "
                    "For another engine, call manager.detach() and attach(manager, engine)"
                )
            seen.clear()
            seen[passed] = weights

    engine.module.register_forward_pre_hook(before)


def _sample(weight: Any) -> Tensor:
    stored = own_part(weight) if is_partitioned(weight) else weight.detach()
    return stored.flatten()[:SAMPLED]
