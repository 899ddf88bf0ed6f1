"""Fused Triton kernels that CUDA devices use in place of the functions of ``fp8dist_kernels.reference``.

Each function has the name, arguments and result of its plain-torch version, and tests compare the two. Importing a
module of this package imports Triton; ``fp8dist_kernels.backends`` decides whether the package is used.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["version_of"]


def version_of(plain: ModuleType) -> ModuleType:
    """Return the module here that replaces ``plain``, a module of ``fp8dist_kernels.reference``."""
    return importlib.import_module(f"{__name__}.{plain.__name__.rpartition('.')[2]}")
