"""Exit statuses of the lab, beside 0 (done) and those of the example job."""

from __future__ import annotations

FAILED_COLLECTIVE = 5
"""A collective failed or timed out, because another rank is gone or hangs.

The launcher knows it by the same number, in fp8dist/cli/launcher/interface.py."""

LOSS_DIVERGED = 6
"""``--loss-guard stop`` saw a loss that jumped or is not finite."""
