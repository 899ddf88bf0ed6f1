"""Exit codes of the command line, and its error for wrong usage."""

from __future__ import annotations

__all__ = ["CONSISTENT", "DIVERGED", "UNREADABLE", "USAGE", "Usage"]

CONSISTENT, DIVERGED, USAGE, UNREADABLE = range(4)


class Usage(Exception):
    """The command line is wrong. The message is one line for the terminal."""
