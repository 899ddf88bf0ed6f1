"""The private state of torch's FSDP, DDP, autograd and process groups that this package reads or replaces, with checks
that this torch has it.

torch has no public API for these queries. If a new torch drops a private name, the answer must not silently become
"no", because a check would then pass without looking. So this file names every private attribute that it reads, and
checks that it exists. ``attach`` calls ``unknown`` once and warns. Calls that depend on a missing name raise the error
of ``refusal``. All functions are local.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fp8dist.errors import ConfigurationError
from fp8dist.state.groups import has_base, is_dtensor, local_part

TESTED = ("2.11", "2.12", "2.13", "2.14")
"""The torch releases that scripts/test-versions has run."""

# The private names.
_MARK = "_is_fsdp_managed_module"
"""FSDP1 sets it on the modules inside a wrapper."""
_STATE = ("_pre_forward", "_post_forward")
"""Of FSDP2's FSDPState."""
_GROUP = ("mesh_info", "post_forward_mesh_info", "fsdp_params", "_partial_reduce_output")
"""Of FSDP2's FSDPParamGroup."""
_PARAMETER = ("unsharded_accumulated_grad", "_unsharded_param", "all_gather_outputs")
"""Of FSDP2's FSDPParam."""
_SHOWN = ("_unsharded_param", "_sharded_post_forward_param")
"""Of the same: what a module may have in place of its sharded parameter. Not every torch need have them."""
_DDP = ("_module_parameters", "_get_ddp_logging_data", "_delay_all_reduce_all_params", "_use_python_reducer")
_REDUCER = ("prepare_for_backward", "_check_reducer_finalized", "_reset_state")
"""Of DDP's reducer."""
_ENGINE = "_engine_run_backward"
"""Of torch.autograd: what ``backward`` and ``grad`` call, looked up at each call."""
_REDUCTIONS = (
    *("allreduce", "allreduce_coalesced", "reduce"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
)
"""Of a ProcessGroup: what torch.distributed calls to reduce. Newer torch has more, with "reduce" in their names."""
_RESOLVE = "_resolve_process_group"
"""Of torch._C._distributed_c10d: gets the name of a process group, and returns the group."""

_SETTERS = ("set_custom_reduce_scatter", "set_force_sum_reduction_for_comms")
"""Of an FSDPModule: public, but newer than FSDP2."""

_EXPORT = ("export() under FSDP2", "export a checkpoint with fp8dist export")
_WIRE = ("gradients in FP8 under FSDP2", "leave them in high precision")
_EXACT = ("exact arithmetic", "compare the job with one process by tolerances")
"""What is refused, and what to do instead; see ``refusal``."""


def refusal(what: str, missing: str, instead: str) -> ConfigurationError:
    """Return the error for a call that depends on a private name that this torch does not have.

    Args:
        what: the call or setting that is refused.
        missing: the private name.
        instead: what the user can do instead of installing another torch.
    """
    return ConfigurationError(
        f"{what}: torch {torch.__version__} has no {missing}, which fp8dist reads for it. Use a torch that fp8dist was "
        f"tested with ({', '.join(TESTED)}), or a newer fp8dist; or {instead}"
    )


def warning(missing: Iterable[str]) -> str:
    """Return the text with which ``attach`` warns of missing private names."""
    return (
        f"fp8dist: attach(): torch {torch.__version__} has no {', no '.join(missing)}, which fp8dist reads of FSDP. It "
        f"was tested with torch {', '.join(TESTED)}. Features that depend on it raise ConfigurationError: possibly "
        "calibrate(), fp8_all_gather=True, check() under FSDP1, or a model that is only partly under FSDP"
    )


def unknown(whole: nn.Module) -> list[str]:
    """Return the missing private names that matter for a model as it is wrapped now. Empty without FSDP.

    Looks at the objects, not at torch's version, so that a new release which kept the names passes.

    Args:
        whole: the model as the training loop calls it.
    """
    fsdp1, fsdp2 = fsdp1_modules(whole), fsdp2_modules(whole)
    found = [next(_missing_of_fsdp2(fsdp2), None)]
    if fsdp2 or any(is_dtensor(parameter) for parameter in whole.parameters()):
        found.append(missing_fsdp2_hook(whole))
    if fsdp1:
        found.append(missing_fsdp1_mark(whole))
        found += [_missing_ignored(wrapper) for wrapper in fsdp1[:1]]
    return [name for name in found if name is not None]


# FSDP2 -------------------------------------------------------------------------------------------


def fsdp2_modules(whole: nn.Module) -> list[nn.Module]:
    """Return the modules in ``whole`` that ``fully_shard`` was called on."""
    return [module for module in whole.modules() if has_base(module, "FSDPModule")]


def fsdp2_groups(module: nn.Module, what: str, instead: str) -> list[Any]:
    """Return the parameter groups of an FSDP2 module, after a check that they have all private names.

    Args:
        what, instead: see ``refusal``.

    Raises:
        ConfigurationError: a name is missing.
    """
    missing = next(_missing_of_fsdp2([module]), None)
    if missing is not None:
        raise refusal(what, missing, instead)
    return _groups(module._get_fsdp_state())  # type: ignore[operator]


def set_reduce_scatter(module: nn.Module, comm: Any) -> None:
    """Let an FSDP2 module reduce the gradients of its own parameters with ``comm``, an object as FSDP2's private class
    ``ReduceScatter`` describes it. Reductions become sums, because torch 2.11 does not show other factors.

    Raises:
        ConfigurationError: torch has no such call; or it does not know which parameters of the module ``comm`` is for.
    """
    missing = [name for name in _SETTERS if not hasattr(module, name)]
    if missing:
        raise refusal(_WIRE[0], f"FSDPModule.{missing[0]}", _WIRE[1])
    try:
        module.set_custom_reduce_scatter(comm)  # type: ignore[operator]
    except ValueError as error:
        raise ConfigurationError(f"gradients in FP8: {error} Exclude this module") from error
    module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]


class ForwardMethods:
    """Calls ``before`` and ``after`` around the methods of an FSDP2 module that ``register_fsdp_forward_method`` makes
    forwards. These run no hooks of the module, but look up two functions of its state at each call. Ends with
    ``remove``. Of modules that share a state, the last one counts.
    """

    def __init__(
        self, module: nn.Module, before: Callable[[nn.Module, Any], None], after: Callable[[nn.Module, Any, Any], None]
    ) -> None:
        self._state: Any = module._get_fsdp_state()  # type: ignore[operator]
        self._before, self._after = before, after
        self._state._pre_forward, self._state._post_forward = self._pre_forward, self._post_forward

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._before(module, args)
        return type(self._state)._pre_forward(self._state, module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        result = type(self._state)._post_forward(self._state, module, args, output)
        self._after(module, args, output)
        return result

    def remove(self) -> None:
        """Restore the state's own functions."""
        for name in _STATE:
            vars(self._state).pop(name, None)


class FSDPHome:
    """Where FSDP2 keeps a parameter: its FSDPParamGroup, and in that its FSDPParam."""

    def __init__(self, group: Any, parameter: Any) -> None:
        self._group, self._parameter = group, parameter

    @property
    def reshards(self) -> bool:
        """True if FSDP2 frees the gathered parameter after a forward. A program may change it at any time."""
        return self._group.post_forward_mesh_info is not None

    def expect(self, tensors: int) -> None:
        """Prepare for a gather that brings this number of tensors. FSDP2 makes their buffers at the first gather, and
        would keep them."""
        if len(self._parameter.all_gather_outputs) not in (0, tensors):
            self._parameter.all_gather_outputs = []


def fsdp2_reductions(module: nn.Module) -> list[tuple[int, int]]:
    """Return how many numbers the gradients of each parameter group of an FSDP2 module have, and over how many ranks
    they are cut.

    Raises:
        ConfigurationError: a name is missing; see ``refusal``.
    """
    found = []
    for group in fsdp2_groups(module, *_WIRE):
        shards = getattr(group.mesh_info, "shard_process_group", None)
        numbers = sum(one.sharded_param.numel() for one in group.fsdp_params if one.sharded_param.requires_grad)
        found.append((numbers, 1 if shards is None else shards.size()))
    return found


def fsdp2_mesh(module: nn.Module) -> DeviceMesh:
    """Return the mesh of an FSDP2 module: its shards, and with HSDP its replicas.

    Raises:
        ConfigurationError: a name is missing; see ``refusal``.
    """
    for group in fsdp2_groups(module, *_WIRE):
        if isinstance(mesh := getattr(group.mesh_info, "mesh", None), DeviceMesh):
            return mesh
    raise refusal(_WIRE[0], "FSDPMeshInfo.mesh", _WIRE[1])


def fsdp2_gathered_dtypes(whole: nn.Module) -> dict[int, torch.dtype]:
    """Return the dtype in which FSDP2 gathers a parameter, by the id of the sharded parameter, for parameters whose
    dtype a MixedPrecisionPolicy changes.

    Raises:
        ConfigurationError: a name is missing; see ``refusal``.
    """
    found: dict[int, torch.dtype] = {}
    for module in fsdp2_modules(whole):
        for group in fsdp2_groups(module, *_EXPORT):
            missing = [name for name in ("mp_policy", "fsdp_params") if not hasattr(group, name)]
            if missing:
                raise refusal(_EXPORT[0], f"FSDPParamGroup.{missing[0]}", _EXPORT[1])
            dtype = group.mp_policy.param_dtype
            parameters = [parameter.sharded_param for parameter in group.fsdp_params]
            found.update({id(each): dtype for each in parameters if dtype is not None and each.is_floating_point()})
    return found


def fsdp2_gathered(whole: nn.Module) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (parameter, its part that is this rank's shard, this shard) for each parameter that FSDP2 keeps gathered
    now. Yields none if this torch lacks a private name; ``attach`` warns of that."""
    modules = fsdp2_modules(whole)
    if next(_missing_of_fsdp2(modules), None) is not None:
        return
    for each in (one for module in modules for group in _groups(module._get_fsdp_state()) for one in group.fsdp_params):  # type: ignore[operator]
        mesh: Any = getattr(each, "mesh_info", None)
        placement = getattr(each, "fsdp_placement", None)
        gathered = getattr(getattr(each, "sharded_state", None), "name", "") == "UNSHARDED"
        if not gathered or placement is None or not hasattr(mesh, "shard_mesh_rank"):
            continue
        full, shard = local_part(each._unsharded_param).detach(), local_part(each.sharded_param)
        if hasattr(shard, "fsdp_post_all_gather"):
            continue  # The gathered weight has not the values of the shards, as with fp8_all_gather.
        rows = -(-full.size(placement.dim) // mesh.shard_mesh_size)  # As torch.chunk cuts.
        first = min(mesh.shard_mesh_rank * rows, full.size(placement.dim))
        yield each._unsharded_param, full.narrow(placement.dim, first, shard.size(placement.dim)), shard.detach()


def fsdp2_shards(whole: nn.Module) -> dict[int, Tensor]:
    """Return the sharded parameter by the id of the one that FSDP2 shows in its place, from a forward until it frees
    that: a copy that it has gathered, or a part of it (``reshard_after_forward=<number>``). Empty if this torch lacks a
    private name; ``attach`` warns of that."""
    modules = fsdp2_modules(whole)
    if next(_missing_of_fsdp2(modules), None) is not None:
        return {}
    every = [one for module in modules for group in _groups(module._get_fsdp_state()) for one in group.fsdp_params]  # type: ignore[operator]
    shown = [(getattr(one, name, None), one) for one in every for name in _SHOWN]
    return {id(copy): one.sharded_param for copy, one in shown if copy is not None}


def fsdp2_shard_groups(whole: nn.Module) -> dict[int, Any]:
    """Return the process group among whose ranks FSDP2 has cut a parameter, by the id of the parameter, for parameters
    of which each of these ranks has a part. Empty if this torch lacks a private name; ``attach`` warns of that."""
    modules = fsdp2_modules(whole)
    if next(_missing_of_fsdp2(modules), None) is not None:
        return {}
    found: dict[int, Any] = {}
    for each in (one for module in modules for group in _groups(module._get_fsdp_state()) for one in group.fsdp_params):  # type: ignore[operator]
        mesh: Any = getattr(each, "mesh_info", None)
        placement, group = getattr(each, "fsdp_placement", None), getattr(mesh, "shard_process_group", None)
        size = getattr(each, "_orig_size", None)
        if placement is None or group is None or size is None:
            continue
        length, ranks = size[placement.dim], group.size()
        if (ranks - 1) * -(-length // ranks) < length:  # As torch.chunk cuts.
            found[id(each.sharded_param)] = group
    return found


def _groups(state: Any) -> list[Any]:
    """Return the parameter groups of an FSDP2 module's state: up to torch 2.12 there is one, since then several."""
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _missing_of_fsdp2(modules: Iterable[nn.Module]) -> Iterator[str]:
    """Yield the private names that FSDP2 modules lack."""
    for module in modules:
        if not hasattr(module, "_get_fsdp_state"):
            yield "FSDPModule._get_fsdp_state"
            return
        state = module._get_fsdp_state()  # type: ignore[operator]
        if not (hasattr(state, "_fsdp_param_groups") or hasattr(state, "_fsdp_param_group")):
            yield "FSDPState._fsdp_param_groups"
            return
        yield from (f"FSDPState.{name}" for name in _STATE if not hasattr(type(state), name))
        for group in _groups(state):
            yield from (f"FSDPParamGroup.{name}" for name in _GROUP if not hasattr(group, name))
            parameters = getattr(group, "fsdp_params", ())
            yield from (f"FSDPParam.{name}" for name in _PARAMETER for each in parameters if not _declares(each, name))


def _declares(thing: object, name: str) -> bool:
    """True if ``thing`` has the attribute, or its class annotates it, as for ``_unsharded_param``, which FSDP2 sets at
    the first gather."""
    return hasattr(thing, name) or any(name in getattr(cls, "__annotations__", ()) for cls in type(thing).__mro__)


def has_fsdp2_hook(module: nn.Module) -> bool:
    """True if FSDP2 shards parameters of the module itself. FSDP2 registers a hook on each such module."""
    return bool(_fsdp2_hooks(module))


def most_fsdp2_axes(module: nn.Module) -> int:
    """Return how many axes FSDP2 may have put before those of the module's own DTensors: 2 for HSDP, 1 if it has not
    cut them (torch's ``replicate``), 0 while they are gathered."""
    owners = [cell.cell_contents for hook in _fsdp2_hooks(module) for cell in getattr(hook, "__closure__", None) or ()]
    if any(getattr(getattr(owner, "sharded_state", None), "name", "") == "UNSHARDED" for owner in owners):
        return 0
    meshes = [owner.mesh_info for owner in owners if hasattr(owner, "mesh_info")]
    return 1 if any(not hasattr(mesh, "shard_process_group") for mesh in meshes) else 2


def _fsdp2_hooks(module: nn.Module) -> list[Any]:
    hooks = module._load_state_dict_post_hooks.values()
    return [hook for hook in hooks if "FSDPParam" in getattr(hook, "__qualname__", "")]


def missing_fsdp2_hook(whole: nn.Module | None = None) -> str | None:
    """Return the name of FSDP2's hook, if this torch may not register it, so that ``has_fsdp2_hook`` does not answer.
    None if it does, and while FSDP is not imported.

    Args:
        whole: a model that may have FSDP2 modules, which show whether the hook exists. Without any, torch's code does.
    """
    name = "FSDPParam hook after load_state_dict"
    sharded = [] if whole is None else fsdp2_modules(whole)
    if any(is_dtensor(parameter) for module in sharded for parameter in module.parameters()):
        return None if any(has_fsdp2_hook(inner) for module in sharded for inner in module.modules()) else name
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    made = getattr(sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param"), "FSDPParam", None)
    return None if "register_load_state_dict_post_hook" in _names(getattr(made, "__init__", None)) else name


# FSDP1 -------------------------------------------------------------------------------------------


def fsdp1_modules(whole: nn.Module) -> list[nn.Module]:
    """Return the FullyShardedDataParallel wrappers in a model."""
    return [module for module in whole.modules() if has_base(module, "FullyShardedDataParallel")]


def has_fsdp1_mark(module: nn.Module) -> bool:
    """True if FSDP1 manages the module. FSDP1 marks each module inside it, for Dynamo."""
    return bool(module.__dict__.get(_MARK))


def missing_fsdp1_mark(whole: nn.Module | None = None) -> str | None:
    """Return the name of FSDP1's mark, if this torch may not set it, so that ``has_fsdp1_mark`` does not answer. None
    if it does, and while FSDP is not imported.

    Args:
        whole: a model that may have FSDP1 wrappers, whose modules show whether the mark exists. Without any, torch's
            code does.
    """
    wrappers = [] if whole is None else fsdp1_modules(whole)
    if wrappers:
        inside = {module for wrapper in wrappers for module in wrapper.modules()} - set(wrappers)
        return None if not inside or any(map(has_fsdp1_mark, inside)) else _MARK
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    marks = getattr(sys.modules.get("torch.distributed.fsdp._dynamo_utils"), "_annotate_modules_for_dynamo", None)
    return None if _MARK in _names(marks) else _MARK


def fsdp1_ignored(wrapper: nn.Module) -> set[int]:
    """Return the ids of the parameters that an FSDP1 wrapper was told to ignore.

    Raises:
        ConfigurationError: this torch lacks the private name; see ``refusal``.
    """
    require_checkable(wrapper)
    return set(map(id, wrapper._ignored_params))  # type: ignore[arg-type]


def fsdp1_replicas(wrapper: Any) -> Any:
    """Return the process group whose ranks hold copies of this rank's shards (HYBRID_SHARD); None: there is one copy.

    Raises:
        ConfigurationError: this torch lacks the private name; see ``refusal``.
    """
    require_checkable(wrapper)
    return wrapper._inter_node_pg if _is_hybrid(wrapper) else None


def _is_hybrid(wrapper: Any) -> bool:
    return "HYBRID" in getattr(getattr(wrapper, "sharding_strategy", None), "name", "")


def require_checkable(whole: nn.Module) -> None:
    """Check that this torch shows which parameters FSDP1 shards.

    Raises:
        ConfigurationError: it does not; see ``refusal``.
    """
    for wrapper in fsdp1_modules(whole):
        missing = _missing_ignored(wrapper)
        if missing is not None:
            raise refusal("check() under FSDP1", missing, "leave the check out (check_every=0)")


def _missing_ignored(wrapper: nn.Module) -> str | None:
    names = ("_ignored_params", *(("_inter_node_pg",) if _is_hybrid(wrapper) else ()))
    return next((f"FullyShardedDataParallel.{name}" for name in names if not hasattr(wrapper, name)), None)


# DDP ---------------------------------------------------------------------------------------------


def reduced_by_ddp(wrapper: Any) -> dict[int, nn.Parameter]:
    """Return the parameters that a DDP module knows, since it was made, by their ids. Empty: not known."""
    return {id(parameter): parameter for parameter in getattr(wrapper, "_module_parameters", ())}


def require_known_ddp(wrapper: Any, what: str, instead: str) -> None:
    """Check that this torch shows how a DDP wrapper reduces gradients.

    Args:
        what, instead: see ``refusal``.

    Raises:
        ConfigurationError: it does not.
    """
    missing = [f"DistributedDataParallel.{name}" for name in _DDP if not hasattr(wrapper, name)]
    missing += [f"Reducer.{name}" for name in _REDUCER if not hasattr(wrapper.reducer, name)]
    if missing:
        raise refusal(what, missing[0], instead)


# Autograd and process groups ---------------------------------------------------------------------

Wrapper = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Gets the name of a function, and the function. Returns what replaces it."""


def engine_replaced(wrapper: Wrapper) -> contextlib.AbstractContextManager[None]:
    """Replace the function that runs autograd's engine, in this block.

    Raises:
        ConfigurationError: this torch lacks it; see ``refusal``.
    """
    return _replaced(torch.autograd, [_ENGINE], wrapper)


def reductions_replaced(wrapper: Wrapper) -> contextlib.AbstractContextManager[None]:
    """Replace the methods of process groups that reduce, in this block. DDP's reducer, in C++, does not call them.

    Raises:
        ConfigurationError: this torch lacks one; see ``refusal``.
    """
    newer = [name for name in vars(dist.ProcessGroup) if "reduce" in name and not name.startswith("__")]
    return _replaced(dist.ProcessGroup, list(dict.fromkeys([*_REDUCTIONS, *newer])), wrapper)


@contextlib.contextmanager
def _replaced(owner: Any, names: list[str], wrapper: Wrapper) -> Iterator[None]:
    missing = [name for name in names if name not in vars(owner)]
    if missing:
        raise refusal(_EXACT[0], f"{owner.__name__}.{missing[0]}", _EXACT[1])
    originals = {name: vars(owner)[name] for name in names}  # Not by getattr, which would bind a method.
    try:
        for name in names:
            setattr(owner, name, wrapper(name, getattr(owner, name)))
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def group_named(name: str) -> dist.ProcessGroup:
    """Return the process group that functional collectives give this name.

    Raises:
        ConfigurationError: this torch has no such query; see ``refusal``.
    """
    resolve: Callable[[str], dist.ProcessGroup] | None = getattr(torch._C._distributed_c10d, _RESOLVE, None)
    if resolve is None:
        raise refusal(_EXACT[0], f"_distributed_c10d.{_RESOLVE}", _EXACT[1])
    return resolve(name)


def _names(function: Any) -> set[str]:
    """Return the names that a Python function uses; empty for anything else."""
    code = getattr(function, "__code__", None)
    return set(code.co_names) if isinstance(code, CodeType) else set()
