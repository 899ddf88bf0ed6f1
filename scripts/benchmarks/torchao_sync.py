"""The cost of torchao 0.9.0's delayed-scaling sync and update, with the same number of layers as ``sync.py``.

``scripts/benchmark`` starts it under torchrun, in a venv without fp8dist. Rank 0 prints one JSON object. 224
Linears have 672 scaled tensors. History lengths are 16, torchao's default, and 1024.
"""

from __future__ import annotations

import json
import statistics
import time
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

LINEARS = 224


def measure(history_len: int) -> dict[str, float]:
    """Return medians in ms of torchao's call and of a bare all-reduce of one float per tensor."""
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
    ours, theirs = [], []
    for _ in range(100):
        for action, times in (
            (lambda: dist.all_reduce(bare, dist.ReduceOp.MAX), theirs),
            (lambda: sync_float8_amax_and_scale_history(model), ours),
        ):
            dist.barrier()
            start = time.perf_counter()
            action()
            times.append(1e3 * (time.perf_counter() - start))
    return {
        "history": history_len,
        "bare_ms": statistics.median(theirs),
        "torchao_ms": statistics.median(ours),
        "ratio": statistics.median(ours) / statistics.median(theirs),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rows = [measure(history_len) for history_len in (16, 1024)]
    if dist.get_rank() == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
