"""What FSDP and tensor parallelism have made of a model: which of its modules they hold, and how its weights lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.parallel.torch_internals import (
    fsdp1_modules,
    fsdp2_groups,
    fsdp2_modules,
    has_fsdp1_mark,
    has_fsdp2_hook,
    missing_fsdp1_mark,
    missing_fsdp2_hook,
    refusal,
)
from fp8dist.sync.groups import is_dtensor

__all__ = [
    "awaits_reduction",
    "compute_device",
    "fsdp2_cut",
    "is_sharded",
    "managed_from_outside",
    "mesh_ranks",
    "multiplied_shape",
    "reshard",
    "resharded_modules",
]


def awaits_reduction(module: nn.Module) -> bool:
    """True if an FSDP2 module holds gradients that it has not reduced over all its ranks
    (``set_requires_gradient_sync(False)``, ``set_requires_all_reduce(False)``).

    Raises:
        ConfigurationError: this torch does not tell.
    """
    groups = fsdp2_groups(module, "calibrate()", "train without it: a cold slot is cast with its tensor's own amax")
    if any(group._partial_reduce_output is not None for group in groups):
        return True
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    if any(parameter.unsharded_accumulated_grad is not None for parameter in parameters):
        return True
    # Set at the first gather only.
    whole = [parameter._unsharded_param for parameter in parameters if hasattr(parameter, "_unsharded_param")]
    return any(tensor.grad is not None for tensor in whole)


def reshard(modules: Iterable[nn.Module]) -> None:
    """Have FSDP2 modules give back what they hold gathered. Local."""
    for module in modules:
        module.reshard()  # type: ignore[operator]


def compute_device(parameter: Tensor, whole: nn.Module) -> torch.device:
    """Where a parameter of ``whole`` is used: under CPU offload that is not where it is kept."""
    if not is_dtensor(parameter):
        fsdp1 = next(iter(fsdp1_modules(whole)), None)
        device: torch.device = parameter.device if fsdp1 is None else fsdp1.compute_device  # type: ignore[assignment]
        return device
    if parameter.device_mesh.device_type == parameter.device.type:
        return parameter.device
    if parameter.device.type == "meta" or parameter.device_mesh.device_type == "cpu":
        return parameter.device
    return torch.device(parameter.device_mesh.device_type, torch.cuda.current_device())


def mesh_ranks(parameter: Tensor) -> set[int]:
    """The ranks that hold a DTensor; none for any other tensor."""
    return set(parameter.device_mesh.mesh.flatten().tolist()) if is_dtensor(parameter) else set()


def multiplied_shape(linear: FP8Linear, resharded: bool) -> tuple[int, ...]:
    """The shape of the weight that this rank multiplies with: whole under FSDP, a part under tensor parallelism.

    ``resharded``: it is one of ``resharded_modules``.
    """
    weight = linear.weight
    if not is_dtensor(weight):  # FSDP1 shows a flat part between forwards.
        return (linear.out_features, linear.in_features)
    shape = list(weight.shape)
    placements = weight.placements
    own = _fsdp2_axes(weight) if resharded else 0
    for axis in range(own, len(placements)):
        for dim in range(len(shape)):
            if placements[axis].is_shard(dim):
                shape[dim] //= weight.device_mesh.size(axis)
    return tuple(shape)


def fsdp2_cut(linear: FP8Linear) -> tuple[int, int]:
    """Along which dim FSDP2 cuts a weight that it shards, and into how many parts."""
    weight: Any = linear.weight
    axis = _fsdp2_axes(weight) - 1
    return weight.placements[axis].dim, weight.device_mesh.size(axis)


def _fsdp2_axes(weight: Any) -> int:
    """FSDP2 puts its own axes first: Shard, or Replicate and Shard."""
    return 2 if weight.placements[0].is_replicate() else 1


def managed_from_outside(linear: FP8Linear, resharded: set[nn.Module], whole: nn.Module) -> bool:
    """True if FSDP2 shards its weight, but none of the FSDP2 modules in ``whole`` holds it.

    Raises:
        ConfigurationError: its weight is a DTensor, and this torch does not tell whose.
    """
    if linear in resharded or not is_dtensor(linear.weight):
        return False
    missing = missing_fsdp2_hook(whole)
    if missing is not None:
        raise refusal(
            "attach() of a DTensor weight that no FSDP2 module of the model holds",
            missing,
            "if fully_shard() was called on a module around the prepared model, pass it as attach(module=…)",
        )
    return has_fsdp2_hook(linear)


def is_sharded(module: nn.Linear) -> bool:
    """True if FSDP1 or FSDP2 manages the module's own parameters, also where the wrapper is outside of what we see.

    Raises:
        ConfigurationError: its parameters are not plain ones of its own, and this torch does not tell whose they are.
    """
    if has_fsdp1_mark(module) or has_fsdp2_hook(module):
        return True
    weight = module._parameters.get("weight")
    if weight is not None and is_dtensor(weight):
        missing = missing_fsdp2_hook()
    else:
        missing = None if _is_whole(module) else missing_fsdp1_mark()
    if missing is not None:
        raise refusal("prepare() of parameters that may be FSDP's", missing, "prepare the model before it is sharded")
    return False


def _is_whole(module: nn.Linear) -> bool:
    """False for what FSDP1 leaves of a Linear: no parameters, or parts of a flat one."""
    if all(parameter is None for parameter in module._parameters.values()):
        return False
    weight = module._parameters.get("weight")
    if weight is None or is_lazy(weight):
        return True
    own = weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
    return own and weight.shape == (module.out_features, module.in_features)


def resharded_modules(whole: nn.Module) -> set[nn.Module]:
    """The modules whose weights FSDP, either one, frees after their forward."""
    wrappers = fsdp1_modules(whole) + fsdp2_modules(whole)
    return {module for wrapper in wrappers for module in wrapper.modules()}
