"""Optional packages: imported when an exporter is made, and named if they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from fp8dist.errors import ConfigurationError


def imported(module: str, extra: str) -> Any:
    """Return the module of an optional package.

    Args:
        extra: the extra of fp8dist that installs it.

    Raises:
        ConfigurationError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # With an incompatible protobuf, tensorboard raises TypeError.
        reason = str(error).splitlines() or [type(error).__name__]
        raise ConfigurationError(
            f"this exporter needs {module}: pip install 'fp8dist[{extra}]' ({reason[0]})"
        ) from error
