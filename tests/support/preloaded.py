"""What every rank of a test imports, sooner or later: imported once, before they are forked."""

from __future__ import annotations

import sys

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

import fp8dist
from tests.support.forked import ROOT

sys.path.insert(0, str(ROOT / "launch"))

import train_gpt

__all__ = ["fp8dist", "torch", "train_gpt"]
