"""An FSDP2 job in the middle of its steps, and the FP8 values of its weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fp8dist.modules.fp8_weight import FP8Weight
from fp8dist.state.arena import SATURATED
from tests.support.sharded import Job, arena_bits, build, fp8_linears, full
from tests.support.training import batch, bits


def take_steps(called: Any, optimizer: torch.optim.Optimizer, indices: Iterable[int]) -> list[float]:
    """Train with these batches of this rank. Return their losses."""
    losses = []
    for index in indices:
        x, y = batch(dist.get_rank() if dist.is_initialized() else 0, index)
        loss = nn.functional.mse_loss(called(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@dataclass
class Running:
    """A job in the middle of its steps."""

    job: Job
    index: int = 0

    def __post_init__(self) -> None:
        self.model, self.called, manager, self.optimizer = build(self.job)
        assert manager is not None
        self.manager = manager

    def loss(self) -> Tensor:
        x, y = batch(dist.get_rank(), self.index)
        self.index += 1
        return nn.functional.mse_loss(self.called(x).float(), y)

    def step(self) -> float:
        return self.finish(self.loss())

    def finish(self, loss: Tensor) -> float:
        """Run the backward, take the optimizer's step, and return the loss."""
        loss.backward()
        return self.update(loss)

    def update(self, loss: Tensor) -> float:
        """Take the optimizer's step, and return the loss."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def used(self) -> dict[str, tuple[bytes, bytes]]:
        """Return (FP8 bytes, inverse scale) of each weight, as the next forward with grad off gathers them."""
        found: dict[str, tuple[bytes, bytes]] = {}

        def note(name: str) -> Any:
            def hook(module: nn.Module, args: Any) -> None:
                weight = module.weight
                assert isinstance(weight, FP8Weight)
                # Clones: numpy pins the memory of its arrays, and FSDP could not free it.
                found[name] = (bits(weight.rows.clone()), bits(weight.inv_scale.clone()))

            return hook

        handles = [m.register_forward_pre_hook(note(n)) for n, m in fp8_linears(self.model).items()]
        with torch.no_grad():
            self.called(batch(dist.get_rank(), 0)[0])
        for handle in handles:
            handle.remove()
        return found

    def derived(self) -> dict[str, tuple[bytes, bytes]]:
        """Return what ``used`` must be if each scale is that of the whole weight now. COLLECTIVE."""
        found = {}
        for name in fp8_linears(self.model):
            weight = full(self.model)[f"{name}.weight"]
            scale = torch.tensor(448.0) / weight.abs().max()
            rows = (weight * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            found[name] = (bits(rows), bits(torch.reciprocal(scale)))
        return found

    def reshard(self) -> None:
        for module in self.called.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def windows(self) -> dict[str, list[float]]:
        """Return the amaxes in the windows of all weights."""
        return {name: self.manager.slot(name, "weight").amax_history.tolist() for name in fp8_linears(self.model)}

    def bits(self) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """Return FP8 state and parameters. COLLECTIVE."""
        return arena_bits(self.manager), {name: bits(value) for name, value in full(self.model).items()}

    @property
    def counted(self) -> int:
        """Return the number of weight amaxes beyond the scale in use so far."""
        (sync,) = self.manager._syncs
        total = self.manager.metrics()["fp8/saturated_amaxes"]  # Commits a pending sync.
        weights = [i for slot, i in sync.arena.index.items() if slot.role == "weight"]
        assert total == int(sync.arena.counters[SATURATED].sum())
        return int(sync.arena.counters[SATURATED][weights].sum())
