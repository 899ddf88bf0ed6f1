"""Exit codes of the command line."""

from __future__ import annotations

__all__ = ["CONSISTENT", "DIVERGED", "UNREADABLE", "USAGE"]

CONSISTENT, DIVERGED, USAGE, UNREADABLE = range(4)
