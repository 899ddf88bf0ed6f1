"""Names that a manager does not have: those of a model, and those that a manager had until version 0.1. The latter
work in this version, and warn with the call that replaces them.

The core imports no tool. Only here is one looked up by its name, when a program calls it by an old one.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from fp8dist.common.names import warn_moved
from fp8dist.errors import NotAModelError

_NOT_A_MODEL = "prepare() changes the model in place and returns its manager: keep using the model"


def _function(name: str) -> Callable[[Any], Any]:
    """Return what gives ``fp8dist.<name>`` with the manager as its first argument."""
    return lambda manager: functools.partial(getattr(importlib.import_module("fp8dist"), name), manager)


def _of_slot(name: str) -> Callable[[Any], Any]:
    """Return what gives a function of (fqn, role) that reads an attribute of the slot's state."""
    return lambda manager: lambda fqn, role: getattr(manager.slot(fqn, role), name)


def _call_of_slot(name: str) -> Callable[[Any], Any]:
    """Return what gives a function of (fqn, role, …) that calls a method of the slot's state."""
    return lambda manager: lambda fqn, role, *args, **named: getattr(manager.slot(fqn, role), name)(*args, **named)


def _recipe_of(manager: Any, fqn: str) -> Any:
    role = next((slot.role for slot in manager.slots if slot.fqn == fqn), "weight")
    return manager.slot(fqn, role).recipe


MOVED: Mapping[str, tuple[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        **{
            name: (f"fp8dist.{name}(manager, …)", _function(name))
            for name in ("describe", "export", "exported", "load_transformer_engine", "take_waits", "watch")
        },
        **{
            name: (f"manager.slot(fqn, role).{name}", _of_slot(name))
            for name in ("amax", "amax_history", "inv_scale", "scale")
        },
        **{
            name: (f"manager.slot(fqn, role).{name}({argument})", _call_of_slot(name))
            for name, argument in (("set_scale", "scale"), ("record", "x"))
        },
        "high_precision": (
            "manager.slot(fqn, role).high_precision",
            lambda manager: lambda fqn: manager.slot(fqn, "input").high_precision,
        ),
        "recipe_of": ("manager.slot(fqn, role).recipe", lambda manager: functools.partial(_recipe_of, manager)),
        **{
            name: (f"manager.verified.{name}", operator.attrgetter(f"verified.{name}"))
            for name in ("proven_step", "checked_step", "last_check")
        },
    }
)
"""By old name: the new call, and a function of the manager that returns what the old name gave."""


def _of_every_module(name: str) -> bool:
    """True if ``name`` is a public attribute of every nn.Module."""
    return not name.startswith("_") and (name in vars(nn.Module) or name in nn.Module.__annotations__)


class FormerNames:
    """Base of StateManager: what happens where a program takes a manager for its model, or uses a name of before."""

    if not TYPE_CHECKING:  # Type checkers must still report unknown attributes.

        def __getattr__(self, name: str) -> Any:
            """Return what an old name gave, and warn. Python calls this for names that a manager does not have."""
            if _of_every_module(name):
                raise NotAModelError(f"a StateManager has no {name!r}: {_NOT_A_MODEL}")
            if name not in MOVED:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            new, of = MOVED[name]
            warn_moved(f"manager.{name}", new)
            return of(self)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotAModelError: call the model, not its manager."""
        raise NotAModelError(f"a StateManager cannot be called: {_NOT_A_MODEL}")
