"""What FSDP and tensor parallelism have made of a model: which of its modules they hold, and how its weights lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.sync.groups import has_base, is_dtensor

__all__ = [
    "awaits_reduction",
    "compute_device",
    "fsdp2_cut",
    "fsdp2_modules",
    "is_sharded",
    "managed_from_outside",
    "mesh_ranks",
    "multiplied_shape",
    "reshard",
    "resharded_modules",
    "reshards_in_part",
]


def fsdp2_modules(whole: nn.Module) -> list[nn.Module]:
    """The modules that ``fully_shard`` was called on."""
    return [module for module in whole.modules() if has_base(module, "FSDPModule")]


def reshards_in_part(module: nn.Module) -> bool:
    """Whether it goes back to fewer ranks than it is sharded over: seen in FSDP2's own state, as far as that is as in
    torch 2.11 to 2.13."""
    try:
        return any(group.post_forward_mesh_info not in (None, group.mesh_info) for group in _fsdp2_groups(module))
    except AttributeError:
        return False


def awaits_reduction(module: nn.Module) -> bool:
    """Whether an FSDP2 module holds gradients of backwards without a reduction (``set_requires_gradient_sync(False)``):
    seen as in ``reshards_in_part``."""
    try:
        parameters = [parameter for group in _fsdp2_groups(module) for parameter in group.fsdp_params]
        if any(parameter.unsharded_accumulated_grad is not None for parameter in parameters):
            return True
        whole = [parameter._unsharded_param for parameter in parameters if hasattr(parameter, "_unsharded_param")]
        return any(tensor.grad is not None for tensor in whole)
    except AttributeError:
        return False


def _fsdp2_groups(module: nn.Module) -> list[Any]:
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def reshard(modules: Iterable[nn.Module]) -> None:
    """Have FSDP2 modules give back what they hold gathered. Local."""
    for module in modules:
        module.reshard()  # type: ignore[operator]


def compute_device(parameter: Tensor, whole: nn.Module) -> torch.device:
    """Where a parameter of ``whole`` is used: under CPU offload that is not where it is kept."""
    if not is_dtensor(parameter):
        fsdp1 = next((m for m in whole.modules() if has_base(m, "FullyShardedDataParallel")), None)
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


def managed_from_outside(linear: FP8Linear, resharded: set[nn.Module]) -> bool:
    """Whether FSDP2 shards its weight, though no FSDP2 module of those that are known holds it."""
    if linear in resharded or not is_dtensor(linear.weight):
        return False
    return _has_fsdp2_hook(linear)


def is_sharded(module: nn.Module) -> bool:
    """True if FSDP1 or FSDP2 manages the module's own parameters, also where the wrapper is outside of what we see."""
    # FSDP1 marks each module inside it, for Dynamo.
    return bool(module.__dict__.get("_is_fsdp_managed_module")) or _has_fsdp2_hook(module)


def _has_fsdp2_hook(module: nn.Module) -> bool:
    # FSDP2 leaves a hook on each module whose parameters it shards.
    return any("FSDPParam" in getattr(hook, "__qualname__", "") for hook in module._load_state_dict_post_hooks.values())


def resharded_modules(whole: nn.Module) -> set[nn.Module]:
    """The modules whose weights FSDP, either one, frees after their forward."""
    wrappers = [m for m in whole.modules() if has_base(m, "FSDPModule") or has_base(m, "FullyShardedDataParallel")]
    return {module for wrapper in wrappers for module in wrapper.modules()}
