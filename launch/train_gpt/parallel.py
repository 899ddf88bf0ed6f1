"""The ``--parallel`` modes: how each wraps the model, and where the training loop differs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from launch.train_gpt.model import GPT
from launch.train_gpt.options import Options
from launch.train_gpt.ranks import Ranks


class Parallel:
    """``--parallel none``: one rank, the model is not wrapped. Base class of the other modes."""

    bf16_by_autocast = True
    """True if autocast casts to bfloat16; False if the wrapper does, which casts whole parameters."""

    def __init__(self, options: Options, ranks: Ranks) -> None:
        self.options, self.ranks = options, ranks
        fp8_on_gpu = options.precision == "fp8" and ranks.device.type == "cuda"
        self.bf16 = options.precision == "bf16" or fp8_on_gpu
        self.group: dist.ProcessGroup | DeviceMesh | None = dist.group.WORLD
        """The ranks that share FP8 state."""

    @property
    def gathered_in(self) -> str | None:
        """The dtype in which FSDP gathers weights, if not in their own: ``fp8dist export`` must know it."""
        return "bfloat16" if self.bf16 and not self.bf16_by_autocast else None

    def wrap(self, model: GPT) -> nn.Module:
        """Return the module that the training loop calls. COLLECTIVE."""
        return model

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context for a forward."""
        return torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.bf16 and self.bf16_by_autocast)

    def local(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which a backward accumulates gradients without reducing them across ranks."""
        return nullcontext()


class DDP(Parallel):
    """Every rank holds the whole model."""

    def wrap(self, model: GPT) -> nn.Module:
        device = self.ranks.device
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    def local(self, module: nn.Module) -> AbstractContextManager[Any]:
        assert isinstance(module, DistributedDataParallel)
        return module.no_sync()


class FSDP2(Parallel):
    """``fully_shard`` on each block and the root, over a 1-D mesh, or 2-D for hsdp (replicate × shard). COLLECTIVE."""

    bf16_by_autocast = False

    def __init__(self, options: Options, ranks: Ranks) -> None:
        super().__init__(options, ranks)
        axes = self.axes()
        self.mesh = init_device_mesh(ranks.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        self.group = self.mesh

    def axes(self) -> dict[str, int]:
        """Return the axes of the mesh and their sizes."""
        size = self.ranks.size
        replicas = 2 if size % 2 == 0 else 1
        hsdp = {"replicate": replicas, "shard": size // replicas}
        return hsdp if self.options.parallel == "hsdp" else {"shard": size}

    def wrap(self, model: GPT) -> nn.Module:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.bf16 else MixedPrecisionPolicy()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=self.mesh, mp_policy=policy)
        return model

    @contextlib.contextmanager
    def local(self, module: nn.Module) -> Iterator[None]:
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)
