"""Collectives that reduce: averages and scaled sums become sums of multiplied residues.

Sums of up to 16 residues are exact in float32. The ops that read a sum reduce it modulo ``P``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from fp8dist.errors import ConfigurationError
from fp8dist.exact.field import P, reduced, residue_of, residues
from fp8dist.parallel.torch_internals import group_named, reductions_replaced


def averages_as_sums() -> contextlib.AbstractContextManager[None]:
    """Replace AVG and PREMUL_SUM in what Python asks of process groups. DDP's reducer, in C++, asks for sums."""
    return reductions_replaced(_summing) if dist.is_available() else contextlib.nullcontext()


def _summing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    at = 1 if "scatter" in name else 0  # Of the inputs. The others reduce in place.

    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        options = next((a for a in (*args, *kwargs.values()) if hasattr(a, "reduceOp")), None)
        if options is None:
            raise ConfigurationError(
                f"exact arithmetic cannot compute with {name} without options, which say how to reduce."
            )
        operation = options.reduceOp
        scale = operation.factor if operation == dist.ReduceOp.PREMUL_SUM else None
        factor = _factor(str(operation.op), scale, group.size(), name)
        inputs = _multiplied(args[at], factor, in_place=not at)
        options.reduceOp = operation if factor is None else dist.ReduceOp.SUM
        return original(group, *args[:at], inputs, *args[at + 1 :], **kwargs)

    return call


def collective(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an op of ``c10d`` or ``_c10d_functional``. A functional one has the name of its reduction in its second
    argument, and its group in the last.

    Raises:
        ConfigurationError: a sum that is not exact, or a reduction that residues do not have.
    """
    if "reduce" not in func._schema.name:
        return func(*args, **kwargs)
    if func._schema.name.startswith("c10d::"):
        boxed = next(a for a in args if isinstance(a, torch.ScriptObject))
        _require_exact(args, dist.ProcessGroup.unbox(boxed).size())
        return func(*args, **kwargs)
    size = group_named(args[-1]).size()
    _require_exact(args, size)
    factor = _factor(args[1].upper(), None, size, str(func))
    inputs = _multiplied(args[0], factor, in_place=func._schema.name.endswith("_"))
    return func(inputs, args[1] if factor is None else "sum", *args[2:], **kwargs)


def _require_exact(args: Any, size: int) -> None:
    if size * P > 2**24 and any(isinstance(a, Tensor) and a.dtype == torch.float32 for a in tree_leaves(args)):
        raise ConfigurationError(
            f"exact arithmetic cannot compute with float32 over {size} ranks: use up to 16, or a model in float64."
        )


def _factor(operation: str, scale: Any, size: int, name: str) -> float | None:
    """Return what to multiply by before a sum; None for a reduction that compares."""
    operation = operation.rpartition(".")[2]
    if operation in ("MAX", "MIN"):
        return None
    if operation not in ("SUM", "AVG", "PREMUL_SUM"):
        raise ConfigurationError(
            f"exact arithmetic cannot compute with {operation} in {name}: use SUM, AVG, MAX or MIN."
        )
    return residue_of({"SUM": 1, "AVG": 1 / size, "PREMUL_SUM": scale}[operation])


def _multiplied(inputs: Any, factor: float | None, in_place: bool) -> Any:
    def multiply(tensor: Any) -> Any:
        if not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
            return tensor
        found = residues(tensor.detach())  # With MAX and MIN, of masked scores too.
        found = (found if factor is None else reduced(found * factor)).to(tensor.dtype)
        return tensor.detach().copy_(found) if in_place else found

    with _disable_current_modes():
        return tree_map(multiply, inputs)
