"""An FSDP2 job in the middle of its steps, and the FP8 values of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8dist.modules.fp8_weight import FP8Weight
from fp8dist.state.arena import SATURATED
from tests.support.sharded import Job, build, fp8_linears, full
from tests.support.training import batch

FITS = 0.05
"""Share of 448s with a fitting scale: 1/28 for uniform weights, since values between 432 and 448 round to 448."""


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
        loss = self.loss()
        loss.backward()
        return self.update(loss)

    def update(self, loss: Tensor) -> float:
        """Take the optimizer's step, and return the loss."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def saturated(self) -> dict[str, float]:
        """Return the share of each weight's FP8 values at the limit, as the next forward with grad off sees them."""
        shares: dict[str, float] = {}

        def note(name: str) -> Any:
            def hook(module: nn.Module, args: Any) -> None:
                weight = module.weight
                assert isinstance(weight, FP8Weight)
                shares[name] = float((weight.rows.float().abs() == 448).float().mean())

            return hook

        handles = [m.register_forward_pre_hook(note(n)) for n, m in fp8_linears(self.model).items()]
        with torch.no_grad():
            self.called(batch(dist.get_rank(), 0)[0])
        for handle in handles:
            handle.remove()
        return shares

    def scales(self) -> dict[str, float]:
        return {name: float(self.manager.slot(name, "weight").scale) for name in fp8_linears(self.model)}

    def fitting(self) -> dict[str, float]:
        """Return the scales that the current weights would give. COLLECTIVE."""
        whole = full(self.model)
        return {n: float(torch.tensor(448.0) / whole[f"{n}.weight"].abs().max()) for n in fp8_linears(self.model)}

    @property
    def counted(self) -> int:
        """Return the number of weight amaxes beyond the scale in use so far."""
        (sync,) = self.manager._syncs
        total = self.manager.metrics()["fp8/saturated_amaxes"]  # Commits a pending sync.
        weights = [i for slot, i in sync.arena.index.items() if slot.role == "weight"]
        assert total == int(sync.arena.counters[SATURATED].sum())
        return int(sync.arena.counters[SATURATED][weights].sum())
