"""FP8 training state that is synchronised, isolated and checked across ranks.

    manager = fp8dist.prepare(model, fp8dist.DelayedScaling(), group=dist.group.WORLD)
    model = DistributedDataParallel(model)
    manager.attach(model, optimizer=optimizer)

The manual is in docs/ and starts at docs/quickstart.md. ARCHITECTURE.md describes the implementation.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fp8dist import exact as exact
    from fp8dist.files.public import *  # noqa: F403  (these have __all__)
    from fp8dist.job.public import *  # noqa: F403
    from fp8dist.replays.public import *  # noqa: F403
    from fp8dist.runs.public import *  # noqa: F403
else:
    _ROOMS = ("job", "runs", "replays", "files")
    """Rooms that have public names: the core, then the tools."""

    def __getattr__(name: str) -> Any:
        """Import public names when they are used: torch takes seconds, and ``fp8dist --help`` needs none; a job that
        uses no tool loads none."""
        if name == "__all__":
            return sorted(public for room in _ROOMS for public in _names_of(room).__all__)
        if name == "exact":  # A room of its own names: importing it makes it an attribute.
            return importlib.import_module("fp8dist.exact")
        rooms = () if name.startswith("__") else _ROOMS  # The import system looks for names with underscores.
        for public in map(_names_of, rooms):
            if name in public.__all__:
                globals()[name] = getattr(public, name)
                return globals()[name]
        advice = ""
        if rooms:
            from fp8dist.common.foreign_names import advice_on

            advice = advice_on(name, __getattr__("__all__"))
        raise AttributeError(f"module 'fp8dist' has no attribute {name!r}{advice}", name=name)

    def _names_of(room: str) -> Any:
        return importlib.import_module(f"fp8dist.{room}.public")

    def __dir__() -> list[str]:
        return [*globals(), *__getattr__("__all__")]
