"""What every rank of a test imports, sooner or later: imported once, before they are forked.

Nothing here may start a thread: a process that has some must not be forked.
"""

from __future__ import annotations

import gc

import pytest
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

import launch.train_gpt.job

__all__ = ["launch", "pytest", "torch"]

gc.collect()
gc.freeze()  # Else a rank's first garbage collection would copy the memory of all modules.
