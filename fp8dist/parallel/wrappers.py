"""Queries about a model under FSDP, ZeRO or tensor parallelism: what manages a module, how its weight is laid out.

Under FSDP each rank stores a shard of a weight, and multiplies with the whole weight. Under tensor parallelism each
rank stores a part, and multiplies with this part. Both may hold for one weight. All functions are local.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_linear import FP8Linear, fp8_linears
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.modules.weight_notes import stored_parameters
from fp8dist.parallel.partitioned import is_partitioned
from fp8dist.parallel.torch_internals import (
    fsdp1_modules,
    fsdp2_groups,
    fsdp2_modules,
    has_fsdp1_mark,
    has_fsdp2_hook,
    missing_fsdp1_mark,
    missing_fsdp2_hook,
    most_fsdp2_axes,
    refusal,
)
from fp8dist.state.groups import first_local_row, is_dtensor, local_part
from fp8dist.state.slots import Slot


def awaits_reduction(module: nn.Module) -> bool:
    """True if an FSDP2 module holds gradients that it has not yet reduced over all its ranks, as it does between the
    microbatches of a step (``set_requires_gradient_sync(False)``, ``set_requires_all_reduce(False)``).

    Raises:
        ConfigurationError: this torch lacks the private names that show it.
    """
    groups = fsdp2_groups(module, "calibrate()", "train without it: a cold slot is cast with its tensor's own amax")
    if any(group._partial_reduce_output is not None for group in groups):
        return True
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    if any(parameter.unsharded_accumulated_grad is not None for parameter in parameters):
        return True
    # A parameter has no ``_unsharded_param`` before its first gather.
    whole = [parameter._unsharded_param for parameter in parameters if hasattr(parameter, "_unsharded_param")]
    return any(tensor.grad is not None for tensor in whole)


def reshard(modules: Iterable[nn.Module]) -> None:
    """Make FSDP2 modules free their gathered weights."""
    for module in modules:
        module.reshard()  # type: ignore[operator]


def compute_devices(whole: nn.Module) -> Callable[[Tensor], torch.device]:
    """Return a function from a parameter of ``whole`` to the device that computes with it. With CPU offload, that is
    not the parameter's own device. Walks over all modules, so call it once for all parameters."""
    fsdp1: Any = next(iter(fsdp1_modules(whole)), None)
    return partial(_compute_device, None if fsdp1 is None else fsdp1.compute_device)


def _compute_device(of_fsdp1: torch.device | None, parameter: Tensor) -> torch.device:
    """``of_fsdp1``: the compute device of the model's FSDP1 wrappers; None: it has none."""
    if not is_dtensor(parameter):
        return parameter.device if of_fsdp1 is None else of_fsdp1
    if parameter.device_mesh.device_type == parameter.device.type:
        return parameter.device
    if parameter.device.type == "meta" or parameter.device_mesh.device_type == "cpu":
        return parameter.device
    return torch.device(parameter.device_mesh.device_type, torch.cuda.current_device())


def mesh_ranks(parameter: Tensor) -> set[int]:
    """Return the ranks that hold a part of a DTensor; empty for any other tensor."""
    return set(parameter.device_mesh.mesh.flatten().tolist()) if is_dtensor(parameter) else set()


def local_parts(slots: LinearSlots, weight: Any) -> Iterator[tuple[Slot, Tensor]]:
    """Yield (slot, this rank's part) of a Linear's weight, or of each expert of which this rank has a part.

    Args:
        weight: a plain tensor or a DTensor, [out_features, in_features] or [E, …].
    """
    first = first_local_row(weight) if is_dtensor(weight) else 0
    return slots.weights_of(local_part(weight).detach(), first)


def multiplied_shape(linear: FP8Linear, axes: Mapping[int, int]) -> tuple[int, ...]:
    """Return [out_features, in_features] of the weight that this rank multiplies with: whole under FSDP, local under
    tensor parallelism.

    Args:
        axes: ``fsdp2_axes`` of the model.
    """
    weight = linear.weight
    if not is_dtensor(weight):  # Not weight.shape: FSDP1 shows a flat shard between forwards.
        return (linear.out_features, linear.in_features)
    shape = list(weight.shape)
    placements = weight.placements
    own = max((axes.get(id(parameter), 0) for parameter in stored_parameters(linear)), default=0)
    for axis in range(own, len(placements)):
        for dim in range(len(shape)):
            if placements[axis].is_shard(dim):
                shape[dim] //= weight.device_mesh.size(axis)
    return tuple(reversed(shape) if linear.transposed else shape)


def fsdp2_cut(weight: Any, axes: Mapping[int, int]) -> tuple[int, int]:
    """Return (dim along which FSDP2 shards a weight, number of shards); (0, 1) if it does not. ``axes``:
    ``fsdp2_axes`` of the model."""
    axis = axes.get(id(weight), 0) - 1
    cut = axis >= 0 and weight.placements[axis].is_shard()
    return (weight.placements[axis].dim, weight.device_mesh.size(axis)) if cut else (0, 1)


def is_tensor_parallel(whole: nn.Module) -> bool:
    """True if some parameter is sharded by more than FSDP2: its ranks compute with different parts of it."""
    axes = fsdp2_axes(whole)
    parts = (p.placements[axes.get(id(p), 0) :] for p in whole.parameters() if is_dtensor(p))
    return any(placement.is_shard() for placements in parts for placement in placements)


def require_replicas(whole: nn.Module, what: str) -> None:
    """Check that all ranks compute with the same parameters, so that their results can be compared.

    Args:
        what: the call, for the message.

    Raises:
        ConfigurationError: the model is tensor parallel.
    """
    if is_tensor_parallel(whole):
        raise ConfigurationError(
            f"{what}: the model is tensor parallel: pass group=mesh[…], the data-parallel axis, whose ranks hold the "
            "same parts and other data"
        )


def fsdp2_axes(whole: nn.Module) -> dict[int, int]:
    """Return, by the id of each DTensor that FSDP2 manages in ``whole``, how many of the first axes of its mesh are
    FSDP2's own: 1 (Shard; of torch's ``replicate``, Replicate), or with HSDP 2 (Replicate, Shard)."""
    # FSDP2 marks the modules whose parameters it shards; if several share a parameter, only one of them.
    marked = [module for module in whole.modules() if has_fsdp2_hook(module)]
    found: dict[int, int] = {}
    for module in marked or [module for wrapper in fsdp2_modules(whole) for module in wrapper.modules()]:
        most = most_fsdp2_axes(module)
        for parameter in filter(is_dtensor, module.parameters(recurse=False)):
            found[id(parameter)] = min(most, 2 if parameter.placements[0].is_replicate() else 1)
    return found


def managed_from_outside(model: nn.Module, resharded: set[nn.Module], whole: nn.Module) -> Iterator[FP8Linear]:
    """Yield the FP8Linears of ``model`` whose weights FSDP2 shards, although no FSDP2 module in ``whole`` holds them:
    ``fully_shard`` was called on a module around ``whole``.

    Args:
        resharded: ``resharded_modules(whole)``.

    Raises:
        ConfigurationError: a weight is a DTensor, and this torch does not show whether FSDP2 made it.
    """
    outside = [linear for linear in fp8_linears(model) if linear not in resharded and is_dtensor(linear.weight)]
    missing = missing_fsdp2_hook(whole) if outside else None
    if missing is not None:
        raise refusal(
            "attach() of a DTensor weight that no FSDP2 module of the model holds",
            missing,
            "if fully_shard() was called on a module around the prepared model, pass it as attach(module=…)",
        )
    return filter(has_fsdp2_hook, outside)


def is_sharded(module: nn.Module) -> bool:
    """True if FSDP1, FSDP2 or ZeRO's stage 3 manages the module's own parameters, even if the wrapper is a module
    around the model, which cannot be seen from here.

    Raises:
        ConfigurationError: the parameters are not plain, and this torch does not show whether FSDP manages them.
    """
    if has_fsdp1_mark(module) or has_fsdp2_hook(module) or any(map(is_partitioned, module.parameters(recurse=False))):
        return True
    weight = module._parameters.get("weight")
    if weight is not None and is_dtensor(weight):
        missing = missing_fsdp2_hook()
    else:
        missing = None if _is_whole(module) else missing_fsdp1_mark()
    if missing is not None:
        raise refusal("prepare() of parameters that may be FSDP's", missing, "prepare the model before it is sharded")
    return False


def _is_whole(module: nn.Module) -> bool:
    """False for a module as FSDP1 leaves it: without parameters, or with views of a flat parameter."""
    if all(parameter is None for parameter in module._parameters.values()):
        return False
    weight = module._parameters.get("weight")
    if weight is None or is_lazy(weight):
        return True
    own = weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()  # Not a view of something larger.
    if not isinstance(module, nn.Linear):  # Transformers' Conv1D does not know the shape of its weight.
        return own and weight.ndim == 2
    return own and weight.shape == (module.out_features, module.in_features)


def resharded_modules(whole: nn.Module) -> set[nn.Module]:
    """Return the modules whose weights FSDP1, FSDP2 or ZeRO's stage 3 may free between forward and backward."""
    wrappers = fsdp1_modules(whole) + fsdp2_modules(whole)
    partitioned = (module for module in whole.modules() if any(map(is_partitioned, module.parameters(recurse=False))))
    return {*partitioned, *(module for wrapper in wrappers for module in wrapper.modules())}
