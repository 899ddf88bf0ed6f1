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
    from fp8dist.public import *  # noqa: F403  (it has __all__)
    from fp8dist.public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """Import the public names when the first is used: torch takes seconds, and ``fp8dist --help`` needs none."""
        if name != "__all__" and name.startswith("__"):  # The import system looks for some.
            raise AttributeError(f"module 'fp8dist' has no attribute {name!r}")
        public = importlib.import_module("fp8dist.public")
        globals().update({known: getattr(public, known) for known in ("__all__", *public.__all__)})
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module 'fp8dist' has no attribute {name!r}", name=name)

    def __dir__() -> list[str]:
        return [*globals(), *__getattr__("__all__")]
