"""Exit statuses of the example job, beside 0 (done)."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

MISTAKE = 2
"""A mistake in the flags, or an unusable file."""

DIVERGED = 4
"""The ranks differ, or a device computes wrongly: ``divergence.txt`` and ``divergence.json`` under ``--out``
say which ranks and tensors."""


def exit_with(error: Exception) -> NoReturn:
    """Exit with MISTAKE. Local rank 0 prints the error on one line."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        line = " ".join(str(error).split())
        print(f"train_gpt: error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(MISTAKE)
