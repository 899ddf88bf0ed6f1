"""KeptModel: undoes the effects of a forward and a backward on a model: on gradients, buffers, and DDP's and FSDP2's
own state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from fp8dist.errors import ConfigurationError
from fp8dist.parallel.ddp import in_join
from fp8dist.parallel.partitioned import is_partitioned
from fp8dist.parallel.torch_internals import fsdp1_modules, fsdp2_groups, fsdp2_modules, require_known_ddp
from fp8dist.state.groups import has_base
from fp8dist_kernels.graphs import capturing

_REPLAY = "replay()"
_INSTEAD = "replay the model before it is sharded"


class KeptModel:
    """Keeps the gradients, buffers and modes (train or eval) that a model has now. Run the model any number of times
    inside ``running``, then call ``put_back`` and ``require_unwritten``. Local.

    Gradients are taken out of the model while it runs, not copied. Buffers are copied. A parameter that a run replaces
    by another tensor is put back. Writes to the values of a parameter are detected, not undone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._gradients: list[tuple[Any, str, Any]] = []
        for holder, name in _holders(model):
            self._gradients.append((holder, name, getattr(holder, name)))
        # Without inference tensors: torch counts no writes to them, and nothing outside of inference mode can write.
        self._versions = [(name, p, p._version) for name, p in model.named_parameters() if not p.is_inference()]
        self._modes = [(module, module.training) for module in model.modules()]
        self._registries: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._memory: list[tuple[Tensor, Tensor]] = []  # (a parameter or buffer, a view of its memory)
        sharded = bool(fsdp2_modules(model))
        for module in model.modules():
            if has_base(module, "ScriptModule"):  # TorchScript does not let a run replace the module's tensors.
                continue
            self._registries.append((module._buffers, dict(module._buffers)))
            self._memory += [(buffer, buffer.detach()) for buffer in module._buffers.values() if _is_plain(buffer)]
            if not sharded:  # FSDP2 replaces parameters by gathered ones and back; it keeps track of them itself.
                self._registries.append((module._parameters, dict(module._parameters)))
                self._memory += [(p, p.detach()) for p in module._parameters.values() if _is_plain(p)]
        written = [buffer for buffer in model.buffers() if not buffer.is_inference()]
        self._values = [(once, once.clone()) for once in map(_each_once, written)]
        self._of_buffers = torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(written))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context for a forward and a backward, which start from the kept buffers and without gradients. DDP does not
        communicate in it; FSDP2 does. Discards the run's gradients, if nothing is raised; ``put_back`` always does."""
        self._clear()
        with contextlib.ExitStack() as stack:
            for wrapper in _ddp_modules(self._model):
                stack.enter_context(_unsynced(wrapper))
            yield
        self._clear()

    def _clear(self) -> None:
        """Put back all that is kept but the gradients, and drop the gradients that the model has."""
        for module, mode in self._modes:
            module.training = mode
        self._put_back_tensors()
        for holder, name in _holders(self._model):  # Listed again: a run may have made more holders.
            setattr(holder, name, None)

    def put_back(self) -> None:
        """Put gradients, buffers, modes and replaced parameters back."""
        self._clear()
        for holder, name, gradient in self._gradients:
            setattr(holder, name, gradient)

    def require_unwritten(self) -> None:
        """Raise ConfigurationError if a parameter was written to."""
        for name, parameter, version in self._versions:
            if parameter._version != version:
                raise ConfigurationError(
                    f"{_REPLAY}: step(batch) wrote to the parameter {name}, which is not put back: it may run a "
                    "forward and a backward only"
                )

    @torch.no_grad()
    def _put_back_tensors(self) -> None:
        """Put back which parameters and buffers the modules have, their memory, and the values of buffers."""
        for registry, tensors in self._registries:
            registry.clear()  # Drops tensors that a run has registered.
            registry.update(tensors)
        for tensor, memory in self._memory:
            if not tensor.is_set_to(memory):  # A run has resized it, or assigned its .data.
                tensor.data = memory
        # Keep version counters: an autograd graph from before the replay may have saved buffers, and its backward
        # raises if their versions have changed.
        with self._of_buffers:
            for buffer, value in self._values:
                buffer.copy_(value)


def _is_plain(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _each_once(tensor: Tensor) -> Tensor:
    """Return a view of the tensor in which no dim repeats memory: torch refuses writes to an expanded tensor."""
    if tensor.layout is not torch.strided:
        return tensor.detach()
    return tensor.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _holders(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield (object, name of its attribute that may hold a gradient): of parameters, and of FSDP2's own objects, which
    hold gradients that are not reduced yet."""
    seen = set()
    for module in fsdp2_modules(model):
        for group in fsdp2_groups(module, _REPLAY, _INSTEAD):
            yield group, "_partial_reduce_output"
            for sharded in group.fsdp_params:
                yield sharded, "unsharded_accumulated_grad"
                for parameter in (sharded.sharded_param, getattr(sharded, "_unsharded_param", None)):
                    if parameter is not None:
                        seen.add(id(parameter))
                        yield parameter, "grad"
    for parameter in model.parameters():
        if id(parameter) not in seen:
            yield parameter, "grad"


def _ddp_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if has_base(module, "DistributedDataParallel")]


@contextlib.contextmanager
def _unsynced(wrapper: Any) -> Iterator[None]:
    """Context in which DDP communicates neither gradients nor buffers."""
    before = wrapper.require_forward_param_sync
    wrapper.require_forward_param_sync = False
    try:
        with wrapper.no_sync():
            yield
    finally:
        wrapper.require_forward_param_sync = before


def require_replayable(model: nn.Module) -> None:
    """Raise ConfigurationError if the effects of a forward and a backward on the model cannot be undone. Local."""
    if in_join(model):
        raise ConfigurationError(f"{_REPLAY} inside a Join context: ranks without data do not reach it")
    for parameter in model.parameters():
        _require_plain_gradient(parameter)
    if any(has_base(module, "DeepSpeedEngine") for module in model.modules()):
        raise ConfigurationError(f"{_REPLAY}: DeepSpeed keeps gradients in buffers of its own: pass the model in it")
    if fsdp1_modules(model):
        raise ConfigurationError(f"{_REPLAY}: FSDP1 keeps gradients in flat parameters. Use FSDP2 (fully_shard)")
    for wrapper in _ddp_modules(model):
        _require_settled(wrapper)
    for module in fsdp2_modules(model):
        for group in fsdp2_groups(module, _REPLAY, _INSTEAD):
            if getattr(group, "_all_reduce_hook", None) is not None:
                raise ConfigurationError(
                    f"{_REPLAY}: FSDP2 would call the hook of set_all_reduce_hook(), whose state is not put back"
                )


def _require_settled(wrapper: Any) -> None:
    """Raise ConfigurationError if a backward under ``no_sync`` would change how DDP reduces later gradients."""
    require_known_ddp(wrapper, _REPLAY, "replay the model before it is wrapped")
    if wrapper.find_unused_parameters and not wrapper.static_graph:
        raise ConfigurationError(
            f"{_REPLAY}: DDP(find_unused_parameters=True) would take the parameters that a replay uses for used ones"
        )
    # Since torch 2.13 there is an attribute. The logging data of earlier versions show the value a step later.
    rebuilt = getattr(wrapper, "_has_rebuilt_buckets", None)
    if not (wrapper._get_ddp_logging_data().get("has_rebuilt_buckets", 0) if rebuilt is None else rebuilt):
        raise ConfigurationError(
            f"{_REPLAY}: DDP arranges its buckets in the first step, and would arrange them by the replay: call it "
            "after the second backward"
        )
    if wrapper._delay_all_reduce_all_params or wrapper._use_python_reducer:
        raise ConfigurationError(
            f"{_REPLAY}: this DDP reduces in any backward, also under no_sync(): use neither the Python reducer nor "
            "delay_all_reduce_named_params"
        )
    if _awaits_backward(wrapper):
        raise ConfigurationError(
            f"{_REPLAY} between a forward of DDP and its backward would reduce the gradients of the replay in place of "
            "those of the step: call it before the forward, or after the backward"
        )


def _awaits_backward(wrapper: Any) -> bool:
    """True between a forward and the backward that reduces its gradients. False also if this cannot be tested: with
    mixed precision in DDP, or without a small parameter.

    DDP has no call for this. So run the backward of one small parameter, and test if DDP's reducer has counted the
    gradient; if so, reset the reducer to the state after the forward. The parameter's gradient is put back. Local: DDP
    sends a bucket only when all of its gradients are ready.
    """
    parameter = None if wrapper.mixed_precision is not None else _small_parameter(wrapper)
    if parameter is None:
        return False
    gradient = parameter.grad
    kept = None if gradient is None else gradient.detach().clone()
    with torch.enable_grad():
        parameter.view_as(parameter).backward(torch.zeros_like(parameter))
    try:
        wrapper.reducer._check_reducer_finalized()
        found = False
    except RuntimeError:
        wrapper.reducer._reset_state()
        wrapper.reducer.prepare_for_backward([])
        found = True
    parameter.grad = gradient
    if gradient is not None and kept is not None:
        gradient.detach().copy_(kept)
    return found


def _small_parameter(wrapper: Any) -> Tensor | None:
    """Return a parameter of at most one dim without hooks, if possible one that shares its bucket: DDP would send a
    bucket of this parameter alone. None if there is no such parameter, or it is the model's only one."""
    learning = [p for p in wrapper._module_parameters if p.requires_grad]  # As DDP numbers them.
    buckets = wrapper._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "").split(",")
    sharing = {int(index) for bucket in buckets if len(bucket.split()) > 1 for index in bucket.split()}
    unhooked = [not p._backward_hooks and not p._post_accumulate_grad_hooks for p in learning]
    small = [index for index, p in enumerate(learning) if p.dim() < 2 and unhooked[index]]
    if not small or len(learning) < 2:
        return None
    return learning[min(small, key=lambda index: index not in sharing)]


def _require_plain_gradient(parameter: Tensor) -> None:
    """Raise ConfigurationError unless the parameter has values, and its gradient is in ``grad`` alone."""
    if nn.parameter.is_lazy(parameter):
        raise ConfigurationError(f"{_REPLAY}: the model has lazy parameters: run a forward first")
    if parameter.device.type == "meta":
        raise ConfigurationError(f"{_REPLAY}: the model is on the meta device: materialise it first")
    if capturing(parameter.device):
        raise ConfigurationError(f"{_REPLAY} while a CUDA graph is captured: call it before the capture, or after")
    if is_partitioned(parameter):
        raise ConfigurationError(f"{_REPLAY}: DeepSpeed's ZeRO keeps gradients in buffers of its own: {_INSTEAD}")
    if hasattr(parameter, "main_grad"):
        raise ConfigurationError(
            f"{_REPLAY}: Megatron-Core adds gradients to buffers of its own (main_grad), which are not put back"
        )
