"""Calibration: records amaxes in high precision, and leaves everything else unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fp8dist.errors import ConfigurationError
from fp8dist.job.cycle import StepCycle
from fp8dist.parallel.torch_internals import fsdp2_modules
from fp8dist.parallel.wrappers import awaits_reduction, reshard
from fp8dist.state.groups import has_base

__all__ = ["calibration"]


@contextlib.contextmanager
def calibration(cycle: StepCycle, module: nn.Module) -> Iterator[None]:
    """See ``StateManager.calibrate``. COLLECTIVE on a clean exit.

    Args:
        module: the model as the training loop calls it.
    """
    cycle.require("calibrate()")
    cycle.state.settle()
    sharded = fsdp2_modules(module)
    if any(map(awaits_reduction, sharded)):
        raise ConfigurationError(
            "calibrate(): FSDP2 holds gradients that it has not reduced yet, and would mix them with those of the "
            "calibration: calibrate between two optimizer steps, or let the last backward reduce them "
            "(set_requires_gradient_sync(True))"
        )
    if has_base(module, "DeepSpeedEngine"):
        raise ConfigurationError(
            "calibrate(): DeepSpeed would add the gradients of the calibration to those of its next step: train "
            "without it: a cold slot is cast with its tensor's own amax"
        )
    reshard(sharded)  # Otherwise, weights that an evaluation has gathered hide the parameters with gradients.
    pending = [sync.arena.pending.clone() for sync in cycle.syncs]
    untouched = Untouched(module)
    cycle.job.calibrating = True
    try:
        with cycle.job.switched(in_fp8=False, recording=True):
            yield
    except BaseException:
        for sync, before in zip(cycle.syncs, pending):
            sync.arena.pending.copy_(before)
        raise
    finally:
        cycle.job.calibrating = False
        untouched.put_back()
    cycle.boundary(calibrated=True)


class Untouched:
    """Removes gradients, and saves buffers and generator states, until ``put_back`` restores them.

    Restores gradients as the same tensors with the same values: under DDP with ``gradient_as_bucket_view`` they are
    views of buckets, which backwards inside a calibration overwrite.

    Args:
        module: the model as the training loop calls it. Saves the generators of the CPU and of the model's GPUs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._gradients: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        for parameter in module.parameters():
            gradient = parameter.grad
            self._gradients.append((parameter, gradient, None if gradient is None else gradient.detach().clone()))
            parameter.grad = None
        self._buffers = [
            (owner, name, buffer, None if buffer is None else buffer.detach().clone())
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
        ]
        devices = {parameter.device for parameter in module.parameters()}
        self._random = torch.get_rng_state()
        self._on_gpus = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore gradients, buffers and generator states."""
        for parameter, gradient, values in self._gradients:
            parameter.grad = gradient
            if gradient is not None and values is not None:
                gradient.copy_(values)
        for owner, name, buffer, values in self._buffers:
            owner._buffers[name] = buffer
            if buffer is not None and values is not None:
                buffer.copy_(values)
        torch.set_rng_state(self._random)
        for device, state in self._on_gpus.items():
            torch.cuda.set_rng_state(state, device)
