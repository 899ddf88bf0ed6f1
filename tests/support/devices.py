"""The device of kernel tests."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE: str = "cuda" if torch.cuda.is_available() else "cpu"
"""With a GPU, kernels run compiled; otherwise in Triton's interpreter."""

needs_gpu = pytest.mark.skipif(DEVICE == "cpu" and "GPU_TESTS_ANYWHERE" not in os.environ, reason="needs a GPU")
"""For tests that need a GPU. GPU_TESTS_ANYWHERE=1 tries them on a CPU, as far as possible."""
