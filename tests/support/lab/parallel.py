"""The ``--parallel`` modes of the lab: those of the example job, measured, and FSDP1."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from launch.train_gpt.model import GPT, Block
from launch.train_gpt.parallel import DDP, FSDP2, Parallel
from launch.train_gpt.ranks import Ranks
from tests.support.lab.gathering import GatheredBytes
from tests.support.lab.options import Options
from tests.support.lab.waiting import Waiting


class Measured(Parallel):
    """``--parallel none``, and base class of the other modes."""

    options: Options

    def __init__(self, options: Options, ranks: Ranks) -> None:
        super().__init__(options, ranks)
        self.gathered = GatheredBytes()
        self.waiting = Waiting(ranks.device)

    def calls(self) -> AbstractContextManager[Any]:
        """Return the context for the forward and backward of a training step."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run the backward. COLLECTIVE if ranks share gradients."""
        loss.backward()

    def thrown_away(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for a backward whose gradients are discarded."""
        return nullcontext()

    def clip(self, module: nn.Module, max_norm: float) -> Tensor:
        """Clip the global gradient norm to ``max_norm``, and return what it was: 0-d, on the device, the same on all
        ranks. COLLECTIVE if parameters are sharded."""
        norm = nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def validates_with(self, module: Any, model: Any) -> Any:
        """Return the module that validation calls."""
        return model

    def whole_parameters(self, module: nn.Module, model: GPT) -> Iterator[tuple[str, Tensor]]:
        """Yield every unsharded parameter under the model's own names. COLLECTIVE if parameters are sharded."""
        for name, parameter in model.named_parameters():
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


class MeasuredDDP(Measured, DDP):
    """Every rank holds the whole model."""

    def wrap(self, model: GPT) -> nn.Module:
        module = super().wrap(model)
        if self.options.fp8_gradients:
            assert isinstance(module, DistributedDataParallel)
            prepared = fp8dist.get_manager(model) if self.options.precision == "fp8" else model
            hook = fp8dist.ddp.comm_hook(prepared, gradients="fp8")
            module.register_comm_hook(None, hook)
        return module

    def backward(self, loss: Tensor) -> None:
        self.waiting.backward(loss)

    def thrown_away(self, module: nn.Module) -> AbstractContextManager[Any]:
        return self.local(module)


class FSDP1(Measured):
    """FullyShardedDataParallel with one unit per block."""

    bf16_by_autocast = False

    def wrap(self, model: GPT) -> nn.Module:
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if self.bf16 else None
        return FullyShardedDataParallel(
            model,
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

    def validates_with(self, module: Any, model: Any) -> Any:
        return module

    def whole_parameters(self, module: nn.Module, model: GPT) -> Iterator[tuple[str, Tensor]]:
        with FullyShardedDataParallel.summon_full_params(module, writeback=False):
            for name, parameter in module.named_parameters():
                # A copy: the gathered storage must stay resizable, and a numpy view prevents that.
                yield name.replace("_fsdp_wrapped_module.", ""), parameter.detach().clone()


class MeasuredFSDP2(Measured, FSDP2):
    """``fully_shard``, whose gathers are counted."""

    def __init__(self, options: Options, ranks: Ranks) -> None:
        super().__init__(options, ranks)
        for group in self.mesh.get_all_groups():  # torch gives the groups of mesh axes their own default timeout.
            distributed_c10d._set_pg_timeout(timedelta(seconds=options.timeout), group)

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        with self.gathered.counting(), self.waiting.collectives():
            yield

    def wrap(self, model: GPT) -> nn.Module:
        wrapped = super().wrap(model)
        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                self.gathered.watch(module)
        return wrapped


def parallel_of(options: Options, ranks: Ranks) -> Measured:
    """Return the implementation of ``--parallel``. COLLECTIVE."""
    fsdp2 = dict.fromkeys(("fsdp2", "hsdp"), MeasuredFSDP2)
    kinds: dict[str, type[Measured]] = {"none": Measured, "ddp": MeasuredDDP, "fsdp1": FSDP1, **fsdp2}
    return kinds[options.parallel](options, ranks)
