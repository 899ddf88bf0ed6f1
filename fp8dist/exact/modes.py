"""The context in which torch computes modulo a prime, and models whose numbers become residues."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from fp8dist.errors import ConfigurationError
from fp8dist.exact.collectives import averages_as_sums, collective
from fp8dist.exact.field import FILLED, P, are_residues, canonical, reduced, residue_of, residues
from fp8dist.exact.rules import FILLS, MOVES, ORDER, RING, RULES, complex_mul, mask_mul, mul
from fp8dist.exact.surrogates import SURROGATES
from fp8dist.parallel.torch_internals import engine_replaced

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
    with contextlib.ExitStack() as stack:
        if not any(isinstance(mode, ModularOps) for mode in _get_current_dispatch_mode_stack()):
            stack.enter_context(averages_as_sums())
            stack.enter_context(ModularOps())
        stack.enter_context(ModularFunctions({**SURROGATES, **(surrogates or {})}))
        yield


@torch.no_grad()
def to_residues(model: nn.Module) -> None:
    """Convert the parameters and float buffers of a model to residues, in place. Not collective.

    Each element's residue depends on its value alone, so a shard of a weight becomes the shard of its residues, in
    float32 and in float64. A second call changes nothing. Integers in buffers stay (a causal mask of zeros and ones).

    Raises:
        ConfigurationError: a tensor of less than float32.
    """
    for named, weights in ((model.named_parameters(), True), (model.named_buffers(), False)):
        for name, tensor in named:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local = torch.view_as_real(local) if local.is_complex() else local
            if local.is_floating_point():
                if local.dtype not in (torch.float32, torch.float64):
                    raise ConfigurationError(
                        f"exact arithmetic cannot compute with {name} in {local.dtype}: use float32 or float64."
                    )
                local.copy_(residues(local, weights))


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
        with engine_replaced(self._within):
            return func(*args, **kwargs)

    def _within(self, name: str, engine: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return engine(*args, **kwargs)

        return run


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
        target = args[0].dtype if isinstance(args[0], Tensor) else kwargs.get("dtype")
        wide = base == "where" or (target is not None and target.is_floating_point)
        args, kwargs = tree_map(lambda x: _filled(x, wide), (args, kwargs))
    result = func(*args, **kwargs)
    if not (isinstance(result, Tensor) and result.is_floating_point()):
        return result
    if "empty" in base:
        return result.zero_()  # Pipelines run modules on memory that nothing was written to, to see shapes.
    if base == "lift_fresh" and not result.dim():  # A number. Tables become residues at first use.
        return torch.full_like(result, _filled(result.item(), True))
    source = args[1] if base == "copy" else args[0] if base == "_to_copy" else result
    return result if source.is_floating_point() else result.copy_(reduced(source.double()))


def _caps(func: Any, base: str, args: Any, kwargs: Any) -> bool:
    """True for a clamp to a largest number, which a surrogate should have replaced: all residues would be that one."""
    given = dict(zip([argument.name for argument in func._schema.arguments], args)) | kwargs
    return base in ("clamp", "clamp_max") and isinstance(given.get("max"), (int, float))


def _filled(leaf: Any, wide: bool) -> Any:
    """Return a number that an op fills in as a residue, or as a mask. ``wide``: into floats."""
    if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.dim() and leaf.item() <= FILLED:
        return torch.full_like(leaf, -math.inf)
    if not isinstance(leaf, float) and not (wide and type(leaf) is int and leaf <= FILLED):
        return leaf
    return -math.inf if leaf <= FILLED else residue_of(leaf)


def _compute(func: Any, base: str, args: Any, kwargs: Any) -> Any:
    """Return what an op computes, in the dtype that the op returns. Ops on integers are computed as they are."""
    leaves = tree_leaves((args, kwargs))
    floats = [x for x in leaves if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]
    if not floats and not any(isinstance(x, float) for x in leaves):
        result = func(*args, **kwargs)
        if not any(map(_is_float, tree_leaves(result))):
            return result
    rule = _rule_of(func, base, args, kwargs, floats)
    options = {key: value for key, value in kwargs.items() if key not in ("out", "dtype")}
    result = _computed(func, rule, args, options, scalars=base in RING or base in ("mul", "div"))
    kind = _kind_of(kwargs.get("dtype"), floats)
    result = tree_map(lambda x: x.to(kind) if _is_float(x) else x, result)
    if rule is complex_mul:
        result = torch.view_as_complex(result)
    out = kwargs.get("out", args[0] if func._schema.name.endswith("_") else None)
    return result if out is None else out.copy_(result)


def _rule_of(func: Any, base: str, args: Any, kwargs: Any, floats: list[Tensor]) -> Callable[..., Any]:
    """Return the rule of an op, or refuse it. ``floats``: its arguments that are no integers."""
    rule: Callable[..., Any] | None = RULES.get(base)
    if any(x.is_complex() for x in floats):
        rule = complex_mul if base == "mul" else None
    elif base in ORDER or base in RING:
        rule = getattr(torch.ops.aten, base)
    if rule is mul and type(args[1]) in (int, float) and args[1] <= FILLED:
        rule = mask_mul
    if rule is None or (floats and _caps(func, base, args, kwargs)):
        raise _refusal(func, f"exact arithmetic has no rule for it{_advice(base)}")
    return rule


def _kind_of(asked: torch.dtype | None, floats: list[Tensor]) -> torch.dtype:
    """Return the dtype of a result: what the call asks for, else what torch makes of the arguments, of which numbers
    without dims count only if all are such."""
    if asked is not None:
        return asked
    kinds = {x.dtype.to_real() for x in [x for x in floats if x.dim()] or floats}
    return torch.float64 if torch.float64 in kinds else next(iter(kinds), torch.get_default_dtype())


def _computed(func: Any, rule: Callable[..., Any], args: Any, kwargs: Any, *, scalars: bool) -> Any:
    """Return the reduced result of a rule. ``scalars``: numbers and integers become residues. Floats that are none
    become some: sums over ranks, masks, float tables that are plain attributes of modules."""
    names = [argument.name for argument in func._schema.arguments]
    stripped = takewhile(  # Of arguments that are their defaults, torch drops the last.
        lambda each: each.has_default_value() and not each.kwarg_only and each.name not in kwargs,
        func._schema.arguments[len(args) :],
    )
    args = (*args, *(each.default_value for each in stripped))
    given = [(name in ("index", "indices", "mask", "offs"), value) for name, value in zip(names, args)]
    try:
        result = rule(
            *(value if kept else tree_map(lambda x: _wide(x, scalars), value) for kept, value in given),
            **{key: value if key == "offs" else _wide(value, scalars) for key, value in kwargs.items()},
        )
    except TypeError as error:
        raise _refusal(func, "exact arithmetic has no rule for these arguments") from error
    except ConfigurationError as error:
        raise _refusal(func, str(error).removesuffix(".")) from None
    result = tree_map(lambda x: _reduced(x) if _is_float(x) else x, result)
    if all(are_residues(x.where(x != -math.inf, 0.0)) for x in tree_leaves(result) if _is_float(x)):
        return result
    raise _refusal(func, "its result is no residue")


def _wide(leaf: Any, scalars: bool) -> Any:
    """Return a tensor in float64, its fractions as residues; a number as a residue."""
    if isinstance(leaf, Tensor):
        if leaf.is_complex():
            return leaf
        if leaf.is_floating_point():
            return canonical(leaf.double())
        return reduced(leaf.double()) if scalars and leaf.dtype != torch.bool else leaf
    number = isinstance(leaf, float) or (isinstance(leaf, int) and abs(leaf) >= P)
    return residue_of(leaf) if scalars and number else leaf


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


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
        return " (in backward)" if torch._C._current_graph_task_id() != -1 else " (outside of modules)"
    name = next((name for name, module in modules[-1].named_modules() if module is modules[0]), "")
    return f" in {name or 'the model'} ({type(modules[0]).__name__})"
