"""Build recipes, overrides and the fallback from the flags."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

import fp8dist
from tests.support.lab.flags import HIGH
from tests.support.lab.options import Options


def recipe_of(options: Options) -> fp8dist.Recipe:
    """Return the recipe of ``--recipe`` and its scale flags."""
    return _made(options.recipe, options)


def overrides_of(options: Options, model: nn.Module) -> dict[str, fp8dist.Recipe | Literal["high"]]:
    """Return the overrides. ``--high-first`` and ``--high-last`` take precedence over ``--override``."""
    overrides: dict[str, fp8dist.Recipe | Literal["high"]] = {}
    if options.high_first or options.high_last:
        overrides.update(fp8dist.first_and_last(model, options.high_first, options.high_last))
    for pattern, recipe in options.override:
        overrides.setdefault(pattern, "high" if recipe == HIGH else _made(recipe, options))
    return overrides


def fallback_of(options: Options) -> fp8dist.Fallback | None:
    """Return the Fallback of the ``--fallback-…`` flags, or None without ``--fallback-steps``."""
    if not options.fallback_steps:
        return None
    return fp8dist.Fallback(
        options.fallback_steps, saturated=options.fallback_saturated, underflow=options.fallback_underflow
    )


def _made(kind: str, options: Options) -> fp8dist.Recipe:
    given: dict[str, Any] = {"power_of_two": options.power_of_two, "high_precision": options.high_gemms}
    if kind == "mxfp8":
        return fp8dist.MXFP8Scaling(high_precision=options.high_gemms)  # type: ignore[arg-type]
    if kind == "nvfp4":
        return fp8dist.NVFP4Scaling(high_precision=options.high_gemms)  # type: ignore[arg-type]
    if kind != "block" and options.fast_gemms is not None:
        given["fast_accumulation"] = options.fast_gemms
    of_delayed = ("history_len", "amax_algo", "margin", "update") if kind == "delayed" else ()
    for name in ("format", *of_delayed):
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    recipes: dict[str, type[fp8dist.Recipe]] = {
        "delayed": fp8dist.DelayedScaling,
        "current": fp8dist.CurrentScaling,
        "rowwise": fp8dist.RowwiseScaling,
        "block": fp8dist.BlockScaling,
    }
    return recipes[kind](**given)
