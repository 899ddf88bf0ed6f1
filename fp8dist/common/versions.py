"""Versions of installed packages."""

from __future__ import annotations

import importlib.metadata


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
