"""Exit codes of the command line."""

from __future__ import annotations

CONSISTENT, DIVERGED, USAGE, UNREADABLE = range(4)
