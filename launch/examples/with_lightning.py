"""Train a LightningModule in FP8.

NPROC=2 launch/torchrun.sh launch/examples/with_lightning.py
fp8dist report runs/with-lightning --out report.html
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from fp8dist.integrations.lightning import FP8Precision

WIDTH = 128


class Copying(lightning.LightningModule):
    """Learns to copy noise through a bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def training_step(self, batch: Tensor, place: int) -> Tensor:
        """Return the loss."""
        loss = nn.functional.mse_loss(self.net(batch), batch)
        self.log("train_loss", loss)
        if place % 10 == 9 and self.global_rank == 0:
            print(f"step {place + 1}: loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", default="runs/with-lightning", help="folder of the run")
    options = parser.parse_args()
    lightning.seed_everything(0)
    on_cpu = not torch.cuda.is_available()
    fp8 = FP8Precision(autocast=None if on_cpu else torch.bfloat16, check_every=20, run=options.out)
    trainer = lightning.Trainer(
        max_steps=options.steps, accelerator="cpu" if on_cpu else "gpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo" if on_cpu else "nccl"), plugins=[fp8], logger=False,
        log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data: Any = torch.randn(100_000, WIDTH)
    trainer.fit(Copying(), torch.utils.data.DataLoader(data, batch_size=32))
    assert fp8.manager is not None
    if trainer.is_global_zero:
        print(f"FP8: {fp8.manager.coverage().summary}")


if __name__ == "__main__":
    main()
