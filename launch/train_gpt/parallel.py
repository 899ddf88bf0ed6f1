"""The ``--parallel`` modes: how each wraps the model, and where the training loop differs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from launch.train_gpt.measure.gathering import GatheredBytes
from launch.train_gpt.measure.waiting import Waiting
from launch.train_gpt.model import GPT, Block
from launch.train_gpt.options.options import Options
from launch.train_gpt.ranks import Ranks

__all__ = ["Parallel", "parallel_of"]


class Parallel:
    """``--parallel none``: one process, the model is not wrapped. Base class of the other modes."""

    bf16_by_autocast: ClassVar[bool] = True
    """True if autocast casts to bfloat16; False if the wrapper does, which casts whole parameters."""

    def __init__(self, options: Options, ranks: Ranks) -> None:
        self.gathered = GatheredBytes()
        self.waiting = Waiting(ranks.device)
        self.options, self.ranks = options, ranks
        fp8_on_gpu = options.precision == "fp8" and ranks.device.type == "cuda"
        self.bf16 = options.precision == "bf16" or fp8_on_gpu

    @property
    def group(self) -> dist.ProcessGroup | DeviceMesh | None:
        """The ranks that share FP8 state."""
        return None if self.options.parallel == "none" else dist.group.WORLD

    def wrap(self, model: GPT) -> nn.Module:
        """Return the module that the training loop calls. COLLECTIVE."""
        return model

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context for a forward."""
        return torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.bf16 and self.bf16_by_autocast)

    def calls(self) -> AbstractContextManager[Any]:
        """Return the context for the forward and backward of a training step."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run the backward. COLLECTIVE if ranks share gradients."""
        loss.backward()

    def local(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which a backward accumulates gradients without reducing them across ranks."""
        return nullcontext()

    def thrown_away(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for a backward whose gradients are discarded."""
        return nullcontext()

    def clip(self, module: nn.Module, max_norm: float) -> Tensor:
        """Clip the global gradient norm to ``max_norm``, and return what it was: 0-d, on the device, the same on all
        ranks. COLLECTIVE if parameters are sharded."""
        parameters = list(module.parameters())
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # The one collective: a number per shard.
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def validates_with(self, module: nn.Module, model: GPT) -> nn.Module:
        """Return the module that validation calls."""
        return model

    def whole_parameters(self, module: nn.Module, model: GPT) -> Iterator[tuple[str, Tensor]]:
        """Yield every unsharded parameter under the model's own names. COLLECTIVE if parameters are sharded."""
        return model.named_parameters()


class DDP(Parallel):
    """Every rank holds the whole model."""

    def wrap(self, model: GPT) -> nn.Module:
        device = self.ranks.device
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    def backward(self, loss: Tensor) -> None:
        self.waiting.backward(loss)

    def local(self, module: nn.Module) -> AbstractContextManager[Any]:
        assert isinstance(module, DistributedDataParallel)
        return module.no_sync()

    def thrown_away(self, module: nn.Module) -> AbstractContextManager[Any]:
        return self.local(module)


class FSDP1(Parallel):
    """FullyShardedDataParallel with one unit per block."""

    bf16_by_autocast = False

    def wrap(self, model: GPT) -> nn.Module:
        strategies = {"full": ShardingStrategy.FULL_SHARD, "grad_op": ShardingStrategy.SHARD_GRAD_OP}
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if self.bf16 else None
        return FullyShardedDataParallel(
            model,
            sharding_strategy=strategies[self.options.sharding],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=precision,
            device_id=self.ranks.device,
            use_orig_params=True,
            # With a mesh, state dicts hold DTensors like those of FSDP2.
            device_mesh=init_device_mesh(self.ranks.device.type, (self.ranks.size,), mesh_dim_names=("shard",)),
        )

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        with self.gathered.watch_calls(), self.waiting.collectives():
            yield

    def local(self, module: nn.Module) -> AbstractContextManager[Any]:
        assert isinstance(module, FullyShardedDataParallel)
        return module.no_sync()

    def clip(self, module: nn.Module, max_norm: float) -> Tensor:
        assert isinstance(module, FullyShardedDataParallel)
        return module.clip_grad_norm_(max_norm)

    def validates_with(self, module: nn.Module, model: GPT) -> nn.Module:
        return module

    def whole_parameters(self, module: nn.Module, model: GPT) -> Iterator[tuple[str, Tensor]]:
        with FullyShardedDataParallel.summon_full_params(module, writeback=False):
            for name, parameter in module.named_parameters():
                # A copy: the gathered storage must stay resizable, and a numpy view prevents that.
                yield name.replace("_fsdp_wrapped_module.", ""), parameter.detach().clone()


class FSDP2(Parallel):
    """``fully_shard`` on each block and the root, over a 1-D mesh, or 2-D for hsdp (replicate × shard). COLLECTIVE."""

    bf16_by_autocast = False

    def __init__(self, options: Options, ranks: Ranks) -> None:
        super().__init__(options, ranks)
        device, shard = ranks.device.type, options.shard_size
        if options.parallel == "hsdp":
            shape, names = (ranks.size // shard, shard), ("replicate", "shard")
            self.mesh = init_device_mesh(device, shape, mesh_dim_names=names)
        else:
            self.mesh = init_device_mesh(device, (ranks.size,), mesh_dim_names=("shard",))
        for group in self.mesh.get_all_groups():  # torch gives the groups of mesh axes their own default timeout.
            distributed_c10d._set_pg_timeout(timedelta(seconds=options.timeout), group)

    @property
    def group(self) -> dist.ProcessGroup | DeviceMesh | None:
        return self.mesh

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        with self.gathered.counting(), self.waiting.collectives():
            yield

    def wrap(self, model: GPT) -> nn.Module:
        policy = MixedPrecisionPolicy()
        if self.bf16:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model.blocks, model):
            sharded = fully_shard(module, mesh=self.mesh, mp_policy=policy)
            self.gathered.watch(sharded)
        return model

    @contextlib.contextmanager
    def local(self, module: nn.Module) -> Iterator[None]:
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)

    def whole_parameters(self, module: nn.Module, model: GPT) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def parallel_of(options: Options, ranks: Ranks) -> Parallel:
    """Return the implementation of ``--parallel``. COLLECTIVE."""
    kinds: dict[str, type[Parallel]] = {"none": Parallel, "ddp": DDP, "fsdp1": FSDP1, "fsdp2": FSDP2, "hsdp": FSDP2}
    return kinds[options.parallel](options, ranks)
