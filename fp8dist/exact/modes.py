"""The context in which torch computes modulo a prime."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from fp8dist.errors import ConfigurationError
from fp8dist.exact.collectives import averages_as_sums, functional
from fp8dist.exact.field import are_residues, reduced, residue_of, residues
from fp8dist.exact.rules import MOVES, ORDER, RING, RULES
from fp8dist.exact.surrogates import SURROGATES

_WIDE = (torch.float32, torch.float64)
_BACKWARDS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


@contextlib.contextmanager
def arithmetic() -> Iterator[None]:
    """Within this context, every op on float tensors is computed modulo ``field.P``, in forward and backward.

    Convert the model first (``to_residues``). Parameters, activations and gradients stay float32 or float64 tensors.

    Raises:
        ConfigurationError: in the block: an op has no rule, or casts to less than float32. The message names the op
            and the module.
    """
    with averages_as_sums(), ModularOps(), ModularFunctions():
        yield


class ModularFunctions(TorchFunctionMode):
    """Replaces functions whose derivative is not found op by op, and stays on in backward: torch turns function modes
    off there, but checkpoints run modules again, and custom functions call functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

            def run(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return engine(*args, **kwargs)

            with mock.patch.object(torch.autograd, "_engine_run_backward", run):
                return func(*args, **kwargs)
        return SURROGATES.get(func, func)(*args, **kwargs)


class ModularOps(TorchDispatchMode):
    """Computes each aten op by its rule."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if any(isinstance(leaf, FakeTensor) or leaf.is_meta for leaf in leaves):
            return func(*args, **kwargs)
        if any(type(leaf) not in (Tensor, nn.Parameter, nn.Buffer) for leaf in leaves):
            return NotImplemented  # DTensors unwrap themselves, and their local tensors come here.
        return _call(func, args, kwargs, leaves)


def _call(func: Any, args: Any, kwargs: Any, leaves: list[Tensor]) -> Any:
    space, _, name = func._schema.name.partition("::")
    low = [leaf.dtype for leaf in leaves if leaf.is_floating_point() and leaf.dtype not in _WIDE]
    dtype = kwargs.get("dtype")
    low += [dtype] if dtype is not None and dtype.is_floating_point and dtype not in _WIDE else []
    if low:
        raise _refusal(func, f"{low[0]} cannot hold residues: let the job compute in float32 or float64")
    if space == "c10d":
        return func(*args, **kwargs)
    if space == "_c10d_functional":
        return functional(func, args, kwargs)
    base = name.rstrip("_") if name.endswith("_") else name
    floats = any(leaf.is_floating_point() for leaf in leaves)
    if base in MOVES or name in MOVES:
        return _move(func, base, args, kwargs)
    out = kwargs.pop("out", args[0] if name.endswith("_") else None)
    quotient = floats or base in ("div", "mean") or any(isinstance(a, float) for a in args)
    if not quotient or (kwargs.get("rounding_mode") and not floats):
        return func(*args, **kwargs, **({} if out is None or name.endswith("_") else {"out": out}))
    if base in ORDER:
        compute: Callable[..., Any] = getattr(torch.ops.aten, base)
        args, kwargs = tree_map(_canonical, (args, kwargs))
    elif base in RING:
        compute = getattr(torch.ops.aten, base)
        kwargs = {key: value for key, value in kwargs.items() if key != "dtype"}
    elif base in RULES:
        compute = RULES[base]
    else:
        raise _refusal(func, "exact arithmetic has no rule for it")
    result = _computed(func, compute, args, kwargs, scalars=base in RING or base == "div")
    kind = _dtype(leaves)
    result = tree_map(lambda x: x.to(kind) if isinstance(x, Tensor) and x.is_floating_point() else x, result)
    return result if out is None else out.copy_(result)


def _move(func: Any, base: str, args: Any, kwargs: Any) -> Any:
    """Call an op that moves elements. Numbers that it fills in become residues."""
    if base in ("full", "full_like", "fill", "masked_fill", "new_full", "scalar_tensor", "where", "constant_pad_nd"):
        args, kwargs = tree_map(lambda x: residue_of(x) if isinstance(x, float) else x, (args, kwargs))
    result = func(*args, **kwargs)
    if "empty" in base and result.is_floating_point():
        return result.zero_()  # Pipelines run modules on memory that nothing was written to, to see shapes.
    if base == "lift_fresh" and result.is_floating_point() and not are_residues(result.double()):
        numbers = [residue_of(number) for number in result.flatten().tolist()]
        result = torch.tensor(numbers, dtype=result.dtype, device=result.device).reshape(result.shape)
    if base in ("_to_copy", "copy") and result.is_floating_point():
        source = args[1] if base == "copy" else args[0]
        if not source.is_floating_point():
            return result.copy_(reduced(source.double()))
    return result


def _computed(func: Any, compute: Callable[..., Any], args: Any, kwargs: Any, scalars: bool) -> Any:
    """Return the reduced result. Tensors that hold no residues are converted at first use: a plain attribute of a
    module, or a mask."""

    def wide(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not leaf.dim() and leaf.is_floating_point() and not leaf.is_cuda:
            number = leaf.item()  # Such as 1/n that DDP multiplies by.
            return leaf.double() if number.is_integer() else torch.tensor(residue_of(number), dtype=torch.float64)
        if isinstance(leaf, Tensor) and leaf.dtype != torch.bool and (leaf.is_floating_point() or scalars):
            return leaf.double()
        return residue_of(leaf) if scalars and isinstance(leaf, float) else leaf

    def reduce(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            return leaf
        found = reduced(leaf)
        if are_residues(found):
            return found
        found = torch.where(leaf == -math.inf, leaf, found)
        valid.append(are_residues(torch.where(leaf == -math.inf, 0.0, found)))
        return found

    args, kwargs = _with_indices(func, tree_map(wide, (args, kwargs)), (args, kwargs))
    for convert in (lambda leaf: leaf, _converted):
        valid: list[bool] = []
        arguments, options = tree_map(convert, (args, kwargs))
        result = tree_map(reduce, compute(*arguments, **options))
        if all(valid):
            return result
    raise _refusal(func, "its result is no residue")


def _with_indices(func: Any, wide: Any, given: Any) -> Any:
    """Return the converted arguments, but index tensors as they were given."""
    (args, kwargs), (given_args, given_kwargs) = wide, given
    kept = [argument.name in ("index", "indices", "indices_", "mask") for argument in func._schema.arguments]
    args = tuple(old if keep else new for new, old, keep in zip(args, given_args, kept))
    return args, {key: given_kwargs[key] if key in ("index", "indices") else kwargs[key] for key in kwargs}


def _converted(leaf: Any) -> Any:
    return residues(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _canonical(leaf: Any) -> Any:
    if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
        return leaf
    return torch.where(leaf == -math.inf, leaf, reduced(leaf))


def _dtype(leaves: list[Tensor]) -> torch.dtype:
    """Return the dtype of a result, by torch's rules: that of the float tensors that have dims, if there are any."""
    floats = [leaf for leaf in leaves if leaf.is_floating_point()]
    kinds = {leaf.dtype for leaf in [leaf for leaf in floats if leaf.dim()] or floats}
    return torch.float64 if torch.float64 in kinds else torch.float32 if kinds else torch.get_default_dtype()


def _refusal(func: Any, why: str) -> ConfigurationError:
    return ConfigurationError(f"{func}{_place()}: {why}.")


def _place() -> str:
    """Return the module whose forward runs, from the stack: "" outside of modules, as in backward."""
    frame = inspect.currentframe()
    modules: list[nn.Module] = []
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module not in modules[-1:]:
            modules.append(module)
        frame = frame.f_back
    if not modules:
        return " (outside of modules, or in backward)"
    names = [name for name, module in modules[-1].named_modules() if module is modules[0]]
    return f" in {names[0] if names and names[0] else 'the model'} ({type(modules[0]).__name__})"
