"""Checks of arguments: unknown names with suggestions, names that other libraries use, and simple values."""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeGuard, TypeVar

from fp8dist.errors import ConfigurationError, UnknownArgumentError

_SEARCHED = 2000
"""The most full names that ``nearest`` compares. Of further names it compares only the last components ("q_proj"), of
which a model has few distinct ones."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Here(NamedTuple):
    """What this library has in place of an argument of another library, or of another of its own functions.

    ``of``: the function or class that takes it; "": none does. ``name``: the argument's name there. ``note``: a
    sentence about the difference.
    """

    of: str
    name: str
    note: str = ""


_NO_ATTENTION = _Here("", "", "it is not offered: attention is computed in high precision")
_ONE_RECIPE = _Here(
    "", "", 'it is not offered: a recipe casts all operands alike; high_precision=("wgrad",) keeps single GEMMs out'
)
_AUTOMATIC = _Here("", "", "it is not needed: leave it out")
_OF_RECIPE = "history_len amax_algo margin format update warmup power_of_two high_precision"
_OF_PREPARE = "recipe group groups filter_fn skip overrides strict amax_sync fp8_all_gather backend"
"""Arguments of this library's own recipes and of ``prepare``, for users who pass them to another call."""


def _accumulation_of(gemm: str) -> _Here:
    """Return what replaces another library's argument about the accumulation of one GEMM."""
    note = f'it names the GEMMs that accumulate fast, such as ("{gemm}",); BlockScaling does not have it'
    return _Here("DelayedScaling", "fast_accumulation", note)


_KNOWN: Mapping[str, _Here] = MappingProxyType(
    {
        # TransformerEngine: recipes.
        "amax_history_len": _Here("DelayedScaling", "history_len"),
        "amax_compute_algo": _Here("DelayedScaling", "amax_algo"),
        "fp8_format": _Here("DelayedScaling", "format", 'it is "hybrid" or "e4m3"'),
        "override_linear_precision": _Here("DelayedScaling", "high_precision", 'it names GEMMs, such as ("wgrad",)'),
        "reduce_amax": _Here("prepare", "amax_sync"),
        "interval": _Here("", "", "it is not needed: every step updates the scales, leave it out"),
        "scaling_factor_compute_algo": _Here(
            "", "", "it is not offered: set margin= or power_of_two=, or pass a callable as amax_algo="
        ),
        **dict.fromkeys(("fp8_dpa", "fp8_mha"), _NO_ATTENTION),
        "use_power_2_scales": _Here("CurrentScaling", "power_of_two"),
        "use_f32_scales": _Here(
            "BlockScaling", "power_of_two", "it is the opposite: power_of_two=False is the default"
        ),
        "x_block_scaling_dim": _Here("", "", "it is fixed: BlockScaling has blocks of 1 x 128 in inputs"),
        "w_block_scaling_dim": _Here("", "", "it is fixed: BlockScaling has blocks of 128 x 128 in weights"),
        "grad_block_scaling_dim": _Here("", "", "it is fixed: BlockScaling has blocks of 1 x 128 in gradients"),
        **{f"fp8_quant_{tensor}": _ONE_RECIPE for tensor in ("fwd_inp", "fwd_weight", "bwd_grad")},
        **{f"fp8_gemm_{gemm}": _accumulation_of(gemm) for gemm in ("fprop", "dgrad", "wgrad")},
        "use_split_accumulator": _Here("DelayedScaling", "fast_accumulation", "it is the opposite, for several GEMMs"),
        # TransformerEngine: fp8_autocast, fp8_model_init.
        "fp8_recipe": _Here("prepare", "recipe"),
        **dict.fromkeys(("fp8_group", "amax_reduction_group"), _Here("prepare", "group")),
        "calibrating": _Here(
            "",
            "",
            "it is a context manager here: `with manager.no_fp8(), manager.recording():` around steps that train",
        ),
        "preserve_high_precision_init_val": _Here("", "", "it is not needed: parameters stay in high precision"),
        # torchao.
        "module_filter_fn": _Here("prepare", "filter_fn"),
        **dict.fromkeys(("config", "recipe_name"), _Here("prepare", "recipe")),
        **dict.fromkeys(
            ("enable_fsdp_float8_all_gather", "use_fp8_all_gather_only"), _Here("prepare", "fp8_all_gather")
        ),
        "round_scales_to_power_of_2": _Here("CurrentScaling", "power_of_two"),
        "force_recompute_fp8_weight_in_bwd": _Here(
            "", "", "it is not needed: under FSDP weights are cast again in backward"
        ),
        **dict.fromkeys(("precompute_float8_dynamic_scale_for_fsdp", "enable_pre_and_post_forward"), _AUTOMATIC),
        "pad_inner_dim": _Here("", "", "it is not offered: dims must be multiples of 16; pad the Linear itself"),
        "emulate": _Here("prepare", "backend", 'use backend="reference"'),
        **{f"cast_config_{tensor}": _ONE_RECIPE for tensor in ("input", "weight", "grad_output")},
        "cast_config_input_for_grad_weight": _ONE_RECIPE,
        "cast_config_weight_for_grad_input": _ONE_RECIPE,
        "cast_config_grad_output_for_grad_weight": _ONE_RECIPE,
        "gemm_config_output": _accumulation_of("fprop"),
        "gemm_config_grad_input": _accumulation_of("dgrad"),
        "gemm_config_grad_weight": _accumulation_of("wgrad"),
        "use_fast_accum": _accumulation_of("fprop"),
        "delayed_scaling_config": _Here("prepare", "recipe", "pass recipe=DelayedScaling(…)"),
        "enable_amax_init": _Here("DelayedScaling", "warmup", 'it is "current" or "unit"'),
        # This library's own arguments, passed to the wrong function.
        **{name: _Here("DelayedScaling", name) for name in _OF_RECIPE.split()},
        "fast_accumulation": _accumulation_of("fprop"),
        **{name: _Here("prepare", name) for name in _OF_PREPARE.split()},
        **{name: _Here("manager.attach", name) for name in ("optimizer", "scaler", "boundary")},
        # Common guesses.
        **dict.fromkeys(("optim", "optimizers"), _Here("manager.attach", "optimizer")),
        "grad_scaler": _Here("manager.attach", "scaler"),
        "process_group": _Here("prepare", "group"),
        **dict.fromkeys(("exclude", "ignore"), _Here("prepare", "skip")),
    }
)


def nearest(name: object, known: Iterable[str], most: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return the names in ``known`` that are most similar to ``name``, the best first, at most ``most``.

    Args:
        name: a name, a dotted name, or an fnmatch pattern.
        cutoff: the least similarity, 0 to 1 (``difflib.SequenceMatcher.ratio``).
    """
    wanted = str(name).lower().strip("!*?.").removesuffix(".weight")
    if not wanted:
        return []
    # "*q_porj" should find "layers.0.attn.q_proj": compare last components as well as full names.
    owner: dict[str, str] = {}  # The full name, by what is compared.
    for index, full in enumerate(known):
        parts = full.lower().split(".")
        owner.setdefault(parts[-1], full)
        if index < _SEARCHED:
            owner[full.lower()] = full
    found = difflib.get_close_matches(wanted, owner, n=most, cutoff=cutoff)
    return list(dict.fromkeys(owner[key] for key in found))


def did_you_mean(name: object, known: Iterable[str], most: int = 3, cutoff: float = 0.6) -> str:
    """Return text for a message, such as ``" (did you mean 'scale' or 'scaler'?)"``; "" if no name is similar. For the
    arguments see ``nearest``."""
    found = nearest(name, known, most, cutoff)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def require_choice(name: str, value: object, choices: Sequence[str], expected: str = "", cutoff: float = 0.6) -> str:
    """Return ``value`` if it is one of ``choices``.

    Args:
        name: of the argument, for the message.
        expected: the choices in words, for the message; "": list them.
        cutoff: the least similarity of a suggestion, see ``nearest``.

    Raises:
        ConfigurationError: ``value`` is something else. The message suggests the nearest choice.
    """
    if isinstance(value, str) and value in choices:
        return value
    given = getattr(value, "name", None) or value  # ``value`` may be an Enum of another library.
    known = expected or f"one of {', '.join(choices)}"
    raise ConfigurationError(f"{name} must be {known}{did_you_mean(given, choices, 1, cutoff)}, got {value!r}")


def require_int(name: str, value: object, low: int, high: int | None = None, what: str = "an integer") -> int:
    """Return ``value`` if it is an int from ``low`` to ``high`` (None: any), and not a bool.

    Args:
        what: the noun for the message, with its unit, such as "a number of steps".

    Raises:
        ConfigurationError: ``value`` is something else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= (value if high is None else high):
        return value
    bounds = f"from {low}" if high is None else f"from {low} to {high}"
    raise ConfigurationError(f"{name} must be {what} {bounds}, got {value!r}")


def require_bool(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False.

    Raises:
        ConfigurationError: ``value`` is something else.
    """
    if isinstance(value, bool):
        return value
    raise ConfigurationError(f"{name} must be True or False, got {value!r}")


def is_number(value: object) -> TypeGuard[float]:
    """True for an int or a float, and not for a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def warn_moved(old: str, new: str, stacklevel: int = 3) -> None:
    """Emit a FutureWarning that a name has moved. Python shows it once for each line that uses the name.

    Args:
        old, new: the calls, as in a program.
        stacklevel: which line the warning shows. 3: the line that calls the caller of this function.
    """
    warnings.warn(f"{old} is now {new}; the old name goes with the next version", FutureWarning, stacklevel)


def check_keywords(
    owner: str, old: Mapping[str, tuple[str, Callable[[dict[str, Any], Any], None]]] = MappingProxyType({})
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator: the function raises UnknownArgumentError for keywords that it does not have, and suggests the
    right name.

    Args:
        owner: the function's name in messages. For a dataclass, decorate the class with ``check_fields``.
        old: keywords of an earlier version, which still work and warn. For each, the new call as text, and a function
            that gets the bound arguments by name, to change them in place, and the value of the old keyword.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)
        names = tuple(name for name in signature.parameters if name != "self")

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            strange = [name for name in kwargs if name not in names and name not in old]
            if strange:
                advice = "; ".join(_advice(name, names) for name in strange)
                raise UnknownArgumentError(f"{owner}(): {advice}. It takes {', '.join(names)}")
            if moved := [(name, kwargs.pop(name)) for name in old if name in kwargs]:  # Binding refuses old names.
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                for name, value in moved:
                    new, change = old[name]
                    warn_moved(f"{owner}({name}=…)", new)
                    change(bound.arguments, value)
                return function(*bound.args, **bound.kwargs)
            return function(*args, **kwargs)

        return checked

    return decorate


_C = TypeVar("_C", bound=type[Any])


def check_fields(cls: _C) -> _C:
    """Class decorator, to be placed above ``@dataclass``: unknown fields raise UnknownArgumentError, which suggests the
    right name."""
    cls.__init__ = check_keywords(cls.__name__)(cls.__init__)
    return cls


def _advice(name: str, names: Sequence[str]) -> str:
    """Return what to write instead of the unknown keyword ``name``. ``names``: those that the function has."""
    here = _KNOWN.get(name)
    if here is not None and not here.of:
        return f"{name}: {here.note}"
    if here is not None:
        note = f": {here.note}" if here.note else ""
        if here.name in names:
            return f"{name} is called {here.name} here{note}"
        return f"{name} is an argument of another call: {here.of}({here.name}=…){note}"
    return f"there is no argument {name!r}{did_you_mean(name, names)}"
