"""Validation of what a program passes to ``prepare`` as model and groups, to ``attach`` as module, optimizer, scaler
and timeout, and to a manager's calls as names of modules. All functions are local. A message says what was expected,
what came, and often where it belongs."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fp8dist.common.names import did_you_mean, is_number
from fp8dist.common.optimizer_hooks import hooked_optimizers
from fp8dist.common.patterns import require_patterns, unmatched
from fp8dist.errors import ConfigurationError
from fp8dist.job.coverage import Coverage
from fp8dist.state.groups import has_base
from fp8dist.state.precision import Precisions
from fp8dist.state.slots import Slot, clean_fqn
from fp8dist_kernels.formats import Role

_WRAPPERS: Mapping[str, str] = MappingProxyType(
    {
        "DistributedDataParallel": "model = DistributedDataParallel(model)",
        "DataParallel": "model = DataParallel(model)",
        "FullyShardedDataParallel": "model = FullyShardedDataParallel(model, use_orig_params=True)",
        "FSDPModule": "fully_shard(model)",
        "OptimizedModule": "model = torch.compile(model)",
        "DeepSpeedEngine": "the engine",
    }
)
"""Class name of a wrapper, and how to create it after prepare()."""


def require_model(model: object) -> None:
    """Raise ConfigurationError unless ``model`` is an nn.Module that is not wrapped yet."""
    if isinstance(model, type):
        raise ConfigurationError(f"prepare() takes a model, got the class {model.__name__}: pass an instance of it")
    if not isinstance(model, nn.Module):
        instead = ""
        if _holds_parameters(model):
            instead = ": pass the model itself, not its parameters"
        elif isinstance(model, (list, tuple, dict)):
            instead = ": put several models into an nn.ModuleList, or prepare each"
        raise ConfigurationError(f"prepare() takes a model (an nn.Module), got {_shown(model)}{instead}")
    wrapper = next((name for name in _WRAPPERS if has_base(model, name)), None)
    if wrapper is not None:
        raise ConfigurationError(
            f"prepare() comes before the model is wrapped, and got {wrapper}: call prepare(model) with the plain "
            f"model first, then {_WRAPPERS[wrapper]}, then manager.attach(…)"
        )


def require_mapping_of_groups(groups: object) -> None:
    """Raise ConfigurationError unless ``groups`` is a mapping of patterns."""
    if not isinstance(groups, Mapping):
        raise ConfigurationError(
            f'groups must be a mapping of patterns to groups, such as {{"*.experts.*": group}}, got {_shown(groups)}'
        )
    require_patterns("groups", groups)


def require_attachable(module: object, optimizer: object, scaler: object, timeout: object) -> None:
    """Raise ConfigurationError if ``attach`` cannot use an argument. The message says where it belongs."""
    _require_module(module)
    if optimizer is not None:
        for one in optimizer if isinstance(optimizer, Sequence) and not isinstance(optimizer, str) else [optimizer]:
            _require_optimizer(one)
    _require_scaler(scaler)
    if not isinstance(timeout, timedelta):
        instead = f": write datetime.timedelta(seconds={timeout})" if is_number(timeout) else ""
        raise ConfigurationError(f"timeout must be a datetime.timedelta, got {_shown(timeout)}{instead}")


def _require_module(module: object) -> None:
    if module is None or isinstance(module, nn.Module):
        return
    instead = ""
    if isinstance(module, Optimizer) or hasattr(module, "param_groups") or _is_scheduler(module):
        instead = ": pass the optimizer by name, attach(optimizer=…)"
    elif _is_scaler(module):
        instead = ": pass the scaler by name, attach(scaler=…)"
    elif _holds_parameters(module):
        instead = ": pass the model itself, not its parameters"
    raise ConfigurationError(
        f"attach(module) must be the model as the loop calls it, or None, got {_shown(module)}{instead}"
    )


def _require_optimizer(optimizer: object) -> None:
    instead = None
    if isinstance(optimizer, type):
        instead = f"make one: {optimizer.__name__}(model.parameters(), …)"
    elif isinstance(optimizer, nn.Module):
        instead = "the model is the first argument: attach(model, optimizer=…)"
    elif _is_scheduler(optimizer):  # A scheduler has an attribute `optimizer`, but no step hooks.
        instead = "pass the optimizer that the scheduler is for"
    elif isinstance(optimizer, Tensor) or _holds_parameters(optimizer):
        instead = "pass the optimizer that trains these parameters"
    elif _is_scaler(optimizer):
        instead = "pass the scaler by name, attach(scaler=…)"
    elif isinstance(optimizer, (str, bool, int, float)):
        instead = "pass the optimizer itself"
    elif isinstance(optimizer, Mapping):
        instead = "pass a list of optimizers"
    elif isinstance(optimizer, Iterable) and not hasattr(optimizer, "param_groups"):
        instead = "pass one optimizer, or a list of them"
    if instead is not None:
        raise ConfigurationError(
            f"attach(optimizer=…) takes a torch optimizer, or a list of them, got {_shown(optimizer)}: {instead}"
        )


def _require_scaler(scaler: object) -> None:
    if scaler is None or (_is_scaler(scaler) and not isinstance(scaler, type)):
        return
    raise ConfigurationError(f"attach(scaler=…) takes a GradScaler, or None, got {_shown(scaler)}")


def _is_scheduler(value: object) -> bool:
    return isinstance(value, LRScheduler) or has_base(value, "AcceleratedScheduler")


def _is_scaler(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("scale", "step", "update"))


def _holds_parameters(value: object) -> bool:
    """True for the result of model.parameters(), a list of it, or model.state_dict(). Does not consume a generator."""
    if isinstance(value, Iterable) and type(value).__name__ == "generator":
        return True
    items: list[Any] = list(value.values()) if isinstance(value, Mapping) else []
    if isinstance(value, (list, tuple)):
        items = list(value)
    return bool(items) and all(isinstance(item, Tensor) for item in items)


def _shown(value: object) -> str:
    """Return a value for a message, or only its class if the value is long."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (str, bool, int, float)):
        return repr(value)
    return f"{type(value).__name__}"


def hooked(optimizer: Any, enabled: bool) -> list[Optimizer]:
    """Return the torch optimizers of ``attach(optimizer=…)``. With FP8 switched off, no boundary is needed: those
    without step hooks are then left out.

    Raises:
        ConfigurationError: an optimizer has no step hooks.
    """
    if optimizer is None:
        return []
    try:
        return hooked_optimizers(optimizer)
    except ConfigurationError:
        if enabled:
            raise
        return []


def require_match(pattern: object, precisions: Precisions, coverage: Callable[[], Coverage]) -> None:
    """Raise ConfigurationError unless ``pattern`` matches an FP8Linear, or an expert of a mixture. ``coverage``: called
    only for the message."""
    if not isinstance(pattern, str):
        raise ConfigurationError(f'pattern must be a string such as "blocks.0.*", got {pattern!r}')
    if precisions.matching(pattern):
        return
    other = next((row for row in coverage() if fnmatch.fnmatchcase(row.fqn, pattern)), None)
    if other is None:
        fqns = list(precisions.by_fqn)
        raise ConfigurationError(
            f"no FP8Linear matches {unmatched([pattern], fqns)[0]}; there are {len(fqns)} FP8Linears"
        )
    if other.fp8:  # A mixture.
        first = precisions.within(other.fqn)[0].slots[Role.INPUT].fqn
        raise ConfigurationError(
            f"no FP8Linear or expert matches {pattern!r}: patterns match single experts, such as {first!r}"
        )
    raise ConfigurationError(f"no FP8Linear matches {pattern!r}: {other.fqn} stays in high precision, {other.reason}")


def meant(fqn: object, slots: Sequence[Slot], coverage: Callable[[], Coverage]) -> str:
    """Return a hint for the message that a slot is missing: the roles of this module, why it is not in FP8, or similar
    names."""
    known = sorted({slot.fqn for slot in slots})
    clean = clean_fqn(str(fqn))
    if fqn in known:
        return f" (of {fqn!r} there is {', '.join(slot.role for slot in slots if slot.fqn == fqn)})"
    reason = next((row.reason for row in coverage() if row.fqn == fqn), "")
    if reason:
        return f" ({reason})"
    return f" (did you mean {clean!r}?)" if clean in known else did_you_mean(clean, known)
