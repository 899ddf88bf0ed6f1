"""A training loop with Accelerate, in FP8. accelerate launch works as well.

NPROC=2 launch/torchrun.sh launch/examples/with_accelerate.py
fp8dist report runs/with-accelerate --out report.html
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn

from fp8dist.integrations.accelerate import prepare

WIDTH = 128


def main() -> None:
    """Learn to copy noise through a bottleneck, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", default="runs/with-accelerate", help="folder of the run")
    options = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager, model, optimizer = prepare(accelerator, model, optimizer, check_every=20, run=options.out)
    torch.manual_seed(accelerator.process_index)
    for step in range(options.steps):
        for _ in range(2):
            with accelerator.accumulate(model):
                x = torch.randn(32, WIDTH, device=accelerator.device)
                loss = nn.functional.mse_loss(model(x), x)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.log({"loss": loss.item(), "tokens": 2 * 32 * accelerator.num_processes}, step=step + 1)
        if step % 10 == 9:
            accelerator.print(f"step {step + 1}: loss {loss.item():.3f}")
    accelerator.print(f"FP8: {manager.coverage().summary}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
