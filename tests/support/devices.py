"""Where tests of kernels run."""

from __future__ import annotations

import os

import pytest
import torch

__all__ = ["DEVICE", "needs_gpu"]

DEVICE: str = "cuda" if torch.cuda.is_available() else "cpu"
"""On a GPU as compiled code; else under Triton's interpreter."""

needs_gpu = pytest.mark.skipif(DEVICE == "cpu" and "GPU_TESTS_ANYWHERE" not in os.environ, reason="needs a GPU")
"""For tests of what only a GPU does. GPU_TESTS_ANYWHERE=1 tries the tests themselves on a CPU, as far as that goes."""
