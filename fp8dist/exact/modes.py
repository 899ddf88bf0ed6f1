"""The context in which torch computes modulo a prime."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fp8dist.errors import ConfigurationError
from fp8dist.exact.collectives import averages_as_sums, collective
from fp8dist.exact.field import P, are_residues, reduced, residue_of, residues
from fp8dist.exact.rules import FILLS, MOVES, ORDER, RING, RULES, complex_mul
from fp8dist.exact.surrogates import SURROGATES

_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_BACKWARDS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


@contextlib.contextmanager
def arithmetic(surrogates: Mapping[Callable[..., Any], Callable[..., Any]] | None = None) -> Iterator[None]:
    """Within this context, every op on float tensors is computed modulo ``field.P``, in forward and backward.

    Convert the model first (``to_residues``). Parameters, activations and gradients stay float32 or float64 tensors;
    gradients and what collectives return may be sums that are not reduced yet.

    ``surrogates``: functions that replace functions of torch, or ops such as ``torch.ops.mine.scan.default``. Write
    them with ops that have rules: autograd then finds the backward.

    Raises:
        ConfigurationError: in the block: an op has no rule, or casts to less than float32. The message names the op
            and the module.
    """
    with averages_as_sums(), ModularOps(), ModularFunctions({**SURROGATES, **(surrogates or {})}):
        yield


class ModularFunctions(TorchFunctionMode):
    """Replaces functions whose derivative is not found op by op. It stays on in backward, where torch turns function
    modes off: checkpoints run modules again there, and custom functions call functions."""

    def __init__(self, surrogates: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._surrogates = surrogates

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _BACKWARDS:
            return self._surrogates.get(func, func)(*args, **kwargs)
        engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return engine(*args, **kwargs)

        with mock.patch.object(torch.autograd, "_engine_run_backward", run):
            return func(*args, **kwargs)


class ModularOps(TorchDispatchMode):
    """Computes each aten op by its rule."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(leaf, FakeTensor) or leaf.is_meta for leaf in leaves):
            return func(*args, **kwargs)
        if any(type(leaf) not in (Tensor, nn.Parameter, nn.Buffer) for leaf in leaves):
            return NotImplemented  # DTensors unwrap themselves, and their local tensors come here.
        with torch._C.DisableTorchFunction():  # In backward the other mode would see each call of a rule.
            return _call(func, args, kwargs, [leaf.dtype for leaf in leaves])


def _call(func: Any, args: Any, kwargs: Any, dtypes: list[torch.dtype]) -> Any:
    _require_wide(func, [*dtypes, kwargs.get("dtype")])
    space, _, name = func._schema.name.partition("::")
    if "c10d" in space:
        return collective(func, args, kwargs)
    base = name.removesuffix("_") if space in ("aten", "fsdp") else func._schema.name
    return (_move if base in MOVES else _compute)(func, base, args, kwargs)


def _require_wide(func: Any, dtypes: list[torch.dtype | None]) -> None:
    for dtype in dtypes:
        if dtype is not None and (dtype.is_floating_point or dtype.is_complex) and dtype not in _WIDE:
            raise _refusal(func, f"{dtype} cannot hold residues. Let the job compute in float32 or float64")


def _move(func: Any, base: str, args: Any, kwargs: Any) -> Any:
    """Call an op that moves elements. Numbers that it fills in become residues."""
    if "reduce" in kwargs:
        raise _refusal(func, "exact arithmetic has no rule for it with reduce")
    if base in FILLS:
        args, kwargs = tree_map(lambda x: residue_of(x) if isinstance(x, float) else x, (args, kwargs))
    result = func(*args, **kwargs)
    if not (isinstance(result, Tensor) and result.is_floating_point()):
        return result
    if "empty" in base:
        return result.zero_()  # Pipelines run modules on memory that nothing was written to, to see shapes.
    if base == "lift_fresh" and not result.dim():  # A number. Tables become residues at first use.
        return torch.full_like(result, residue_of(result.item()))
    source = args[1] if base == "copy" else args[0] if base == "_to_copy" else result
    return result if source.is_floating_point() else result.copy_(reduced(source.double()))


def _compute(func: Any, base: str, args: Any, kwargs: Any) -> Any:
    """Return what an op computes, in the dtype that the op returns. Ops on integers are computed as they are."""
    leaves = tree_leaves((args, kwargs))
    floats = [x for x in leaves if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]
    if not floats and not any(isinstance(x, float) for x in leaves):
        result = func(*args, **kwargs)
        if not any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(result)):
            return result
    in_place = func._schema.name.endswith("_")
    out = kwargs.get("out", args[0] if in_place else None)
    options = {key: value for key, value in kwargs.items() if key not in ("out", "dtype")}
    if any(x.is_complex() for x in floats):
        rule: Callable[..., Any] | None = complex_mul if base == "mul" else None
    elif base in ORDER or base in RING:
        rule = getattr(torch.ops.aten, base)
    else:
        rule = RULES.get(base)
    if rule is None:
        raise _refusal(func, f"exact arithmetic has no rule for it{_advice(base)}")
    result = _computed(func, rule, args, options, scalars=base in RING or base in ("mul", "div"), ordered=base in ORDER)
    asked = kwargs.get("dtype")
    kinds = {asked} if asked is not None else {x.dtype.to_real() for x in [x for x in floats if x.dim()] or floats}
    kind = torch.float64 if torch.float64 in kinds else next(iter(kinds), torch.get_default_dtype())
    result = tree_map(lambda x: x.to(kind) if isinstance(x, Tensor) and x.is_floating_point() else x, result)
    if rule is complex_mul:
        result = torch.view_as_complex(result)
    return result if out is None else out.copy_(result)


def _computed(func: Any, rule: Callable[..., Any], args: Any, kwargs: Any, *, scalars: bool, ordered: bool) -> Any:
    """Return the reduced result of a rule. ``scalars``: numbers and integers become residues. ``ordered``: the rule
    needs residues; others are tried first with what there is. Arguments that are none become some: sums over ranks,
    masks, float tables that are plain attributes of modules."""
    names = [argument.name for argument in func._schema.arguments]
    kept = ("index", "indices", "mask", "offs")
    wide = tuple(
        argument if name in kept else tree_map(lambda x: _wide(x, scalars), argument)
        for name, argument in zip(names, args)
    )
    options = {key: value if key in kept else _wide(value, scalars) for key, value in kwargs.items()}
    for convert in ordered, True:
        if convert:
            wide, options = tree_map(_canonical, (wide, options))
        try:
            result = rule(*wide, **options)
        except TypeError as error:
            raise _refusal(func, "exact arithmetic has no rule for these arguments") from error
        result = tree_map(lambda x: _reduced(x) if _is_float(x) else x, result)
        parts = [x for x in tree_leaves(result) if _is_float(x)]
        if all(are_residues(x if not convert else torch.where(x == -math.inf, 0.0, x)) for x in parts):
            return result
    raise _refusal(func, "its result is no residue")


def _wide(leaf: Any, scalars: bool) -> Any:
    """Return a tensor in float64; a number, or a float tensor without dims, as a residue."""
    if isinstance(leaf, Tensor):
        if leaf.is_floating_point() and not leaf.dim() and not leaf.is_cuda and not float(leaf.item()).is_integer():
            return torch.tensor(residue_of(leaf.item()), dtype=torch.float64)  # Such as 1/n that DDP multiplies by.
        if leaf.is_floating_point() or leaf.is_complex():
            return leaf.double() if leaf.is_floating_point() else leaf
        return reduced(leaf.double()) if scalars and leaf.dtype != torch.bool else leaf
    number = isinstance(leaf, float) or (isinstance(leaf, int) and abs(leaf) >= P)
    return residue_of(leaf) if scalars and number else leaf


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _canonical(leaf: Any) -> Any:
    return residues(leaf) if _is_float(leaf) and not are_residues(leaf) else leaf


def _reduced(values: Tensor) -> Tensor:
    """Return values modulo P; ``-inf`` stays, and what is too large to be exact becomes ``nan``."""
    found = reduced(values)
    if values.numel() and not all(bool(bound.abs() < 2**53) for bound in values.aminmax()):
        found = torch.where(values.abs() < 2**53, found, torch.where(values == -math.inf, values, math.nan))
    return found


def _advice(base: str) -> str:
    if base in ("norm", "linalg_vector_norm", "_foreach_norm"):
        return ". Do not clip gradients"
    if "foreach" in base or base in ("lerp", "addcdiv", "addcmul"):
        return ". The optimizer that it has is SGD with foreach=False"
    return ". Give `surrogates` for the function that calls it"


def _refusal(func: Any, why: str) -> ConfigurationError:
    return ConfigurationError(f"{func}{_place()}: {why}.")


def _place() -> str:
    """Return the module whose forward runs, from the stack: none in backward."""
    frame = inspect.currentframe()
    modules: list[nn.Module] = []
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            modules.append(module)
        frame = frame.f_back
    if not modules:
        return " (in backward, or outside of modules)"
    name = next((name for name, module in modules[-1].named_modules() if module is modules[0]), "")
    return f" in {name or 'the model'} ({type(modules[0]).__name__})"
