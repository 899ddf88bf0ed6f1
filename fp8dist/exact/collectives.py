"""Collectives that reduce: averages and scaled sums become sums of multiplied residues.

Sums of up to 16 residues are exact in float32. The ops that read a sum reduce it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from fp8dist.errors import ConfigurationError
from fp8dist.exact.field import P, reduced, residue_of


@contextlib.contextmanager
def averages_as_sums() -> Iterator[None]:
    """Replace AVG and PREMUL_SUM in what Python asks of process groups. DDP's reducer, in C++, asks for sums."""
    with contextlib.ExitStack() as stack:
        if dist.is_available():
            for name in dir(dist.ProcessGroup):
                if "reduce" in name and not name.startswith("__"):
                    original = getattr(dist.ProcessGroup, name)
                    stack.enter_context(mock.patch.object(dist.ProcessGroup, name, _summing(name, original)))
        yield


def _summing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    inputs_at = 1 if "scatter" in name else 0

    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        options = next((a for a in (*args, *kwargs.values()) if hasattr(a, "reduceOp")), None)
        if options is None:
            return original(group, *args, **kwargs)
        operation = options.reduceOp
        scaled = operation == dist.ReduceOp.PREMUL_SUM
        factor = _factor(str(operation.op), operation.factor if scaled else None, group.size(), name)
        inputs = _multiplied(args[inputs_at], factor, group.size(), in_place=not inputs_at)
        options.reduceOp = dist.ReduceOp.SUM if factor is not None else operation
        return original(group, *args[:inputs_at], inputs, *args[inputs_at + 1 :], **kwargs)

    return call


def functional(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a functional collective: its second argument is the name of the reduction, its last that of the group."""
    if "reduce" not in func._schema.name:
        return func(*args, **kwargs)
    group = args[-1]
    group = torch._C._distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
    factor = _factor(args[1].upper(), None, group.size(), str(func))
    inputs = _multiplied(args[0], factor, group.size(), in_place=func._schema.name.endswith("_"))
    return func(inputs, args[1] if factor is None else "sum", *args[2:], **kwargs)


def _factor(operation: str, factor: Any, size: int, name: str) -> float | None:
    """Return what to multiply by before a sum; None for a reduction that compares."""
    operation = operation.rpartition(".")[2]
    if operation == "SUM":
        return 1
    if operation == "AVG":
        return residue_of(1 / size)
    if operation == "PREMUL_SUM" and factor is not None:
        return residue_of(float(factor))
    if operation in ("MAX", "MIN"):
        return None
    raise ConfigurationError(f"{name} with {operation} has no value in exact arithmetic: use SUM, AVG, MAX or MIN.")


def _multiplied(inputs: Any, factor: float | None, size: int, in_place: bool) -> Any:
    def multiply(tensor: Any) -> Any:
        if not (isinstance(tensor, Tensor) and tensor.is_floating_point()):
            return tensor
        if size * P > (2**24 if tensor.dtype == torch.float32 else 2**53):
            raise ConfigurationError(
                f"a sum over {size} ranks in {tensor.dtype} is not exact: use float32 with up to 16 ranks, or float64."
            )
        found = reduced(reduced(tensor.detach().double()) * (1 if factor is None else factor)).to(tensor.dtype)
        return tensor.detach().copy_(found) if in_place else found

    return tree_map(multiply, inputs)
