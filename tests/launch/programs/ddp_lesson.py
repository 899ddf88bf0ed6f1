"""A training program without fp8dist: fit a line with DistributedDataParallel, and print the loss of each rank.

Tests start it like any user's program, with each of the launch scripts.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Join the group, train, and leave. Rank ``--fail-rank`` exits with 7 before the last step."""
    parser = argparse.ArgumentParser(prog="ddp_lesson", description="Fit a line on all ranks.")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--fail-rank", type=int, default=-1, help="this rank exits with 7 before the last step")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)  # Each rank has its own data; DDP makes the parameters equal.
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    for step in range(options.steps):
        if rank == options.fail_rank and step == options.steps - 1:
            os._exit(7)  # As below: after sys.exit gloo may abort the program, with another status.
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank} of {dist.get_world_size()}: loss {loss.item():.4f}", flush=True)
    dist.barrier()
    os._exit(0)  # gloo may abort a program that ends otherwise: docs/limits.md.


if __name__ == "__main__":
    main()
