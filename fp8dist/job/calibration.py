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
    cycle.job.calibrating = True
    try:
        with _untouched(module), cycle.job.switched(in_fp8=False, recording=True):
            yield
    except BaseException:
        for sync, before in zip(cycle.syncs, pending):
            sync.arena.pending.copy_(before)
        raise
    finally:
        cycle.job.calibrating = False
    cycle.boundary(calibrated=True)


@contextlib.contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Remove the gradients inside the context. Restore at exit gradients, buffers, and torch's random number generators
    of the CPU and of the model's GPUs.

    Gradients are restored as the same tensors with the same values: under DDP with ``gradient_as_bucket_view`` they are
    views of buckets, which backwards inside the context overwrite.
    """
    gradients = [(parameter, parameter.grad, _copy(parameter.grad)) for parameter in module.parameters()]
    buffers = [
        (owner, name, buffer, _copy(buffer)) for owner in module.modules() for name, buffer in owner._buffers.items()
    ]
    devices = {parameter.device for parameter, _, _ in gradients}
    for parameter, _, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            yield
    finally:
        for parameter, gradient, values in gradients:
            parameter.grad = gradient
            _put_back(gradient, values)
        for owner, name, buffer, values in buffers:
            owner._buffers[name] = buffer
            _put_back(buffer, values)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


@torch.no_grad()
def _put_back(tensor: Tensor | None, values: Tensor | None) -> None:
    if tensor is not None and values is not None:
        tensor.copy_(values)
