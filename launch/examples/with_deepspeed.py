"""A training loop with DeepSpeed's ZeRO, in FP8. The deepspeed launcher works as well.

NPROC=2 launch/torchrun.sh launch/examples/with_deepspeed.py
fp8dist report runs/with-deepspeed --out report.html
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import fp8dist
from fp8dist.integrations.deepspeed import attach

WIDTH = 128


def main() -> None:
    """Learn to copy noise through a bottleneck, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--out", default="runs/with-deepspeed", help="folder of the run")
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
    options = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
    manager = fp8dist.prepare(model, group=dist.group.WORLD, check_every=20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": options.stage},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    recorder = fp8dist.Recorder(options.out, manager, resume_after="state")
    attach(manager, engine)
    torch.manual_seed(dist.get_rank())
    for step in range(options.steps):
        for _ in range(2):
            x = torch.randn(32, WIDTH, device=engine.device)
            loss = nn.functional.mse_loss(engine(x), x)
            engine.backward(loss)
            engine.step()
        recorder.log(
            step + 1, loss=loss, grad_norm=engine.get_global_grad_norm(), tokens=2 * 32 * dist.get_world_size()
        )
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    recorder.close()
    if dist.get_rank() == 0:
        print(f"FP8: {manager.coverage().summary}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
