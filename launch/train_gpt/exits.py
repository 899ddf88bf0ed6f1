"""Exit statuses of the example job, beside 0 (done)."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

__all__ = ["DIVERGED", "FAILED_COLLECTIVE", "LOSS_DIVERGED", "MISTAKE", "UNWRITTEN", "exit_with"]

MISTAKE = 2
"""Of a user's mistake in the flags, or an unusable file."""

UNWRITTEN = 3
"""Exit status of a run that stopped because a checkpoint could not be written."""

DIVERGED = 4
"""Exit status of a run that stopped because its ranks differ."""

FAILED_COLLECTIVE = 5
"""Exit status of a rank whose collective failed or timed out: another rank is gone, or hangs.

The launcher knows it by the same number, in fp8dist/launcher/interface.py."""

LOSS_DIVERGED = 6
"""Exit status of a run that ``--loss-guard stop`` stopped."""


def exit_with(error: Exception) -> NoReturn:
    """End with MISTAKE and the error on one line, told once per node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        line = " ".join(str(error).split())
        print(f"train_gpt: error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(MISTAKE)
