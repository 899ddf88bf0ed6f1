"""What every rank of a test imports, sooner or later: imported once, before they are forked."""

from __future__ import annotations

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

import launch.train_gpt.job

__all__ = ["launch", "torch"]
