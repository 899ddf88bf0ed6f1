"""From flags to recipes."""

from __future__ import annotations

from typing import Any

import fp8dist
from options import Options

__all__ = ["recipe_of"]


def recipe_of(options: Options) -> fp8dist.Recipe:
    """What ``--recipe`` and the flags of its scales say."""
    common: dict[str, Any] = {} if options.format is None else {"format": options.format}
    if options.recipe == "delayed":
        return fp8dist.DelayedScaling(
            history_len=options.history_len,
            amax_algo=options.amax_algo,
            margin=options.margin,
            update=options.update,
            **common,
        )
    recipes = {"current": fp8dist.CurrentScaling, "rowwise": fp8dist.RowwiseScaling, "block": fp8dist.BlockScaling}
    return recipes[options.recipe](**common)
