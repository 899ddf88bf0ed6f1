"""The cost of torchao 0.9.0's delayed-scaling sync and update, with the same number of layers as ``sync.py``.

``scripts/benchmark`` starts it under torchrun, in a venv without fp8dist. Rank 0 prints a table. 224 Linears have 672
scaled tensors. History lengths are 16, torchao's default, and 1024.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torchao.float8 import (
    CastConfig,
    DelayedScalingConfig,
    Float8LinearConfig,
    ScalingType,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)

from scripts.benchmarks.markdown import table
from scripts.benchmarks.timing import in_turn, medians, run_rank

LINEARS = 224


def measure(history_len: int) -> list[str]:
    """Return a row of the table: medians of torchao's call and of a bare all-reduce of one float per tensor."""
    delayed = CastConfig(scaling_type=ScalingType.DELAYED)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(LINEARS)))
    config = Float8LinearConfig(
        cast_config_input=delayed,
        cast_config_weight=delayed,
        cast_config_grad_output=delayed,
        delayed_scaling_config=DelayedScalingConfig(history_len=history_len),
        emulate=True,
    )
    model = convert_to_float8_training(model, config=config)
    model(torch.randn(16, 16)).sum().backward()
    bare = torch.zeros(3 * LINEARS)
    sides = {
        "bare": lambda: dist.all_reduce(bare, dist.ReduceOp.MAX),
        "torchao": lambda: sync_float8_amax_and_scale_history(model),
    }
    ms = medians(in_turn(sides, 100, dist.barrier))
    return [str(history_len), f"{ms['torchao']:.2f}", f"{ms['bare']:.2f}", f"{ms['torchao'] / ms['bare']:.2f}"]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    head = ["torchao 0.9.0, 672 slots: history", "ms", "bare all-reduce, ms", "ratio"]
    run_rank(lambda: table(head, [measure(history_len) for history_len in (16, 1024)]))
