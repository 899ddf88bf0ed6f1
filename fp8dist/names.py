"""Names that a caller got wrong: the nearest right one, and what other libraries' arguments are called here."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from fp8dist.errors import ConfigurationError, UnknownArgumentError

__all__ = ["check_fields", "check_keywords", "did_you_mean", "nearest", "require_choice"]

_SEARCHED = 2000
"""Full names that are compared. Longer lists are compared by their last components only, which are few."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Here(NamedTuple):
    """Where an argument of another library, or of another function of this one, lives here.

    ``of``: the function or class; "" means not offered. ``name``: the argument. ``note``: a sentence.
    """

    of: str
    name: str
    note: str = ""


_NO_ATTENTION = _Here("", "", "it is not offered: attention is computed in high precision")
_ONE_RECIPE = _Here(
    "", "", 'it is not offered: a recipe casts all operands alike; high_precision=("wgrad",) keeps single GEMMs out'
)
_AUTOMATIC = _Here("", "", "it is not needed: leave it out")
_GEMM_ACCUMULATION = _Here("", "", "it is not offered: leave it out")

_KNOWN: Mapping[str, _Here] = MappingProxyType(
    {
        # TransformerEngine: recipes.
        "amax_history_len": _Here("DelayedScaling", "history_len"),
        "amax_compute_algo": _Here("DelayedScaling", "amax_algo"),
        "fp8_format": _Here("DelayedScaling", "format", 'it is "hybrid" or "e4m3"'),
        "override_linear_precision": _Here("DelayedScaling", "high_precision", 'it names GEMMs, such as ("wgrad",)'),
        "reduce_amax": _Here("prepare", "amax_sync"),
        "interval": _Here("", "", "it is gone: scales follow each step, leave it out"),
        "scaling_factor_compute_algo": _Here(
            "", "", "it is not offered: set margin= or power_of_two=, or pass a callable as amax_algo="
        ),
        "fp8_dpa": _NO_ATTENTION,
        "fp8_mha": _NO_ATTENTION,
        "use_power_2_scales": _Here("CurrentScaling", "power_of_two"),
        "use_f32_scales": _Here(
            "BlockScaling", "power_of_two", "it is the opposite: power_of_two=False is the default"
        ),
        "x_block_scaling_dim": _Here("", "", "it is fixed: BlockScaling has blocks of 1 x 128 in inputs"),
        "w_block_scaling_dim": _Here("", "", "it is fixed: BlockScaling has blocks of 128 x 128 in weights"),
        "grad_block_scaling_dim": _Here("", "", "it is fixed: BlockScaling has blocks of 1 x 128 in gradients"),
        "fp8_quant_fwd_inp": _ONE_RECIPE,
        "fp8_quant_fwd_weight": _ONE_RECIPE,
        "fp8_quant_bwd_grad": _ONE_RECIPE,
        "fp8_gemm_fprop": _GEMM_ACCUMULATION,
        "fp8_gemm_dgrad": _GEMM_ACCUMULATION,
        "fp8_gemm_wgrad": _GEMM_ACCUMULATION,
        # TransformerEngine: fp8_autocast, fp8_model_init.
        "fp8_recipe": _Here("prepare", "recipe"),
        "fp8_group": _Here("prepare", "group"),
        "amax_reduction_group": _Here("prepare", "group"),
        "calibrating": _Here(
            "", "", "it is a context here: `with manager.calibrate():` or `with manager.recording():`"
        ),
        "preserve_high_precision_init_val": _Here("", "", "it is not needed: parameters stay in high precision"),
        # torchao.
        "module_filter_fn": _Here("prepare", "filter_fn"),
        "config": _Here("prepare", "recipe"),
        "recipe_name": _Here("prepare", "recipe"),
        "enable_fsdp_float8_all_gather": _Here("prepare", "fp8_all_gather"),
        "use_fp8_all_gather_only": _Here("prepare", "fp8_all_gather"),
        "round_scales_to_power_of_2": _Here("CurrentScaling", "power_of_two"),
        "force_recompute_fp8_weight_in_bwd": _Here(
            "", "", "it is not needed: under FSDP weights are cast again in backward"
        ),
        "precompute_float8_dynamic_scale_for_fsdp": _AUTOMATIC,
        "pad_inner_dim": _Here("", "", "it is not offered: dims must be multiples of 16; pad the Linear itself"),
        "emulate": _Here("prepare", "backend", 'use backend="reference"'),
        "cast_config_input": _ONE_RECIPE,
        "cast_config_input_for_grad_weight": _ONE_RECIPE,
        "cast_config_weight": _ONE_RECIPE,
        "cast_config_weight_for_grad_input": _ONE_RECIPE,
        "cast_config_grad_output": _ONE_RECIPE,
        "cast_config_grad_output_for_grad_weight": _ONE_RECIPE,
        "gemm_config_output": _GEMM_ACCUMULATION,
        "gemm_config_grad_input": _GEMM_ACCUMULATION,
        "gemm_config_grad_weight": _GEMM_ACCUMULATION,
        "delayed_scaling_config": _Here("prepare", "recipe", "pass recipe=DelayedScaling(…)"),
        "enable_amax_init": _Here("DelayedScaling", "warmup", 'it is "current" or "unit"'),
        "enable_pre_and_post_forward": _AUTOMATIC,
        # This library's own, passed to the wrong function.
        "history_len": _Here("DelayedScaling", "history_len"),
        "amax_algo": _Here("DelayedScaling", "amax_algo"),
        "margin": _Here("DelayedScaling", "margin"),
        "format": _Here("DelayedScaling", "format"),
        "update": _Here("DelayedScaling", "update"),
        "warmup": _Here("DelayedScaling", "warmup"),
        "power_of_two": _Here("DelayedScaling", "power_of_two"),
        "high_precision": _Here("DelayedScaling", "high_precision"),
        "recipe": _Here("prepare", "recipe"),
        "group": _Here("prepare", "group"),
        "groups": _Here("prepare", "groups"),
        "filter_fn": _Here("prepare", "filter_fn"),
        "skip": _Here("prepare", "skip"),
        "overrides": _Here("prepare", "overrides"),
        "strict": _Here("prepare", "strict"),
        "amax_sync": _Here("prepare", "amax_sync"),
        "fp8_all_gather": _Here("prepare", "fp8_all_gather"),
        "backend": _Here("prepare", "backend"),
        "optimizer": _Here("manager.attach", "optimizer"),
        "scaler": _Here("manager.attach", "scaler"),
        "boundary": _Here("manager.attach", "boundary"),
        # What people write.
        "optim": _Here("manager.attach", "optimizer"),
        "optimizers": _Here("manager.attach", "optimizer"),
        "grad_scaler": _Here("manager.attach", "scaler"),
        "process_group": _Here("prepare", "group"),
        "exclude": _Here("prepare", "skip"),
        "ignore": _Here("prepare", "skip"),
    }
)


def nearest(name: object, known: Iterable[str], most: int = 3, cutoff: float = 0.6) -> list[str]:
    """Those of ``known`` that look most like ``name``, which may be a pattern or a dotted name; the best first.

    ``cutoff``: the least similarity, 0 to 1 (``difflib.SequenceMatcher.ratio``).
    """
    wanted = str(name).lower().strip("!*?.").removesuffix(".weight")
    if not wanted:
        return []
    # "*q_porj" is to find "layers.0.attn.q_proj": suffixes of dotted names compete with the whole names.
    owner: dict[str, str] = {}
    for index, full in enumerate(known):
        parts = full.lower().split(".")
        owner.setdefault(parts[-1], full)
        if index < _SEARCHED:
            owner[full.lower()] = full
    found = difflib.get_close_matches(wanted, owner, n=most, cutoff=cutoff)
    return list(dict.fromkeys(owner[key] for key in found))


def did_you_mean(name: object, known: Iterable[str], most: int = 3, cutoff: float = 0.6) -> str:
    """``" (did you mean 'first' or 'fist'?)"``, or "" if nothing looks like ``name``."""
    found = nearest(name, known, most, cutoff)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def require_choice(name: str, value: object, choices: Sequence[str], expected: str = "", cutoff: float = 0.6) -> str:
    """``value``, which must be one of ``choices``.

    Args:
        expected: how the choices are written in the message; "" lists them.
        cutoff: of the nearest choice, see ``nearest``.

    Raises:
        ConfigurationError: it is something else; names the nearest choice.
    """
    if isinstance(value, str) and value in choices:
        return value
    said = getattr(value, "name", None) or value  # An Enum of another library.
    known = expected or f"one of {', '.join(choices)}"
    raise ConfigurationError(f"{name} must be {known}{did_you_mean(said, choices, 1, cutoff)}, got {value!r}")


def check_keywords(owner: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorator: raise ConfigurationError for keywords that the function does not have, with the right name.

    ``owner``: how messages call the function. For a dataclass, decorate the class with ``check_fields``.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        names = tuple(name for name in inspect.signature(function).parameters if name != "self")

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            strange = [name for name in kwargs if name not in names]
            if strange:
                advice = "; ".join(_advice(name, names) for name in strange)
                raise UnknownArgumentError(f"{owner}(): {advice}. It takes {', '.join(names)}")
            return function(*args, **kwargs)

        return checked

    return decorate


_C = TypeVar("_C", bound=type[Any])


def check_fields(cls: _C) -> _C:
    """Class decorator, above ``@dataclass``: unknown fields raise ConfigurationError, with the right name."""
    cls.__init__ = check_keywords(cls.__name__)(cls.__init__)
    return cls


def _advice(name: str, names: Sequence[str]) -> str:
    """What to write instead of the keyword ``name``."""
    here = _KNOWN.get(name)
    if here is not None and not here.of:
        return f"{name}: {here.note}"
    if here is not None:
        note = f": {here.note}" if here.note else ""
        if here.name in names:
            return f"{name} is called {here.name} here{note}"
        return f"{name} is an argument of another call: {here.of}({here.name}=…){note}"
    return f"there is no argument {name!r}{did_you_mean(name, names)}"
