"""Imports the modules that all test ranks need, once before they are forked.

Nothing here may start a thread: a process with threads must not be forked.
"""

from __future__ import annotations

import gc

import numpy.ctypeslib
import numpy.ma
import pytest
import torch._dynamo
import torch._functorch.aot_autograd
import torch._inductor.select_algorithm
import torch.distributed.checkpoint._fsspec_filesystem
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.flop_counter
from _pytest.assertion import install_importhook
from _pytest.config import get_config

import fp8dist.runs.public
import launch.train_gpt.train
import tests.support.lab.job

__all__ = ["fp8dist", "launch", "numpy", "pytest", "tests", "torch"]

install_importhook(get_config())  # An assertion that fails on a rank shows its values, as in pytest's own process.

gc.collect()
gc.freeze()  # Otherwise a rank's first garbage collection would copy the memory of all modules.
