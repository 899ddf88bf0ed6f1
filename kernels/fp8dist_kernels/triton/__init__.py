"""The same kernels in Triton, one pass each: what runs on CUDA.

A function here has the name, arguments and result of its plain-torch version in ``fp8dist_kernels.reference``, which
is what its tests compare it with. Importing this package imports Triton; ``fp8dist_kernels.backends`` decides
whether it is used.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["version_of"]


def version_of(plain: ModuleType) -> ModuleType:
    """The module here whose functions stand for those of a module of ``fp8dist_kernels.reference``."""
    return importlib.import_module(f"{__name__}.{plain.__name__.rpartition('.')[2]}")
