"""torchtitan on a CPU with gloo: stand-ins for what it takes from GPUs, NCCL and torch after 2.13.

``python -m tests.support.titan PROGRAM FLAGS…`` runs a program with them.
"""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


def with_stand_ins(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which installs the stand-ins before it imports torchtitan."""

    @functools.wraps(function)
    def inside(*args: Any) -> Any:
        _install()
        return function(*args)

    return inside


@functools.cache
def _install() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    device = {
        "current_device": lambda: 0,  # torch.cpu says "cpu", which barrier(device_ids=…) does not take.
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=2**34),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda: None,
    }
    vars(torch.cpu).update(device)
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group=None: None  # type: ignore[attr-defined]
    _reduce_sums()
    import torchtitan.models.common.config_utils as models
    import torchtitan.models.llama3 as llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    # FlexAttention has no backward on a CPU.
    for module in (models, llama3):
        module.get_attention_config = lambda backend: ScaledDotProductAttention.Config()


def _reduce_sums() -> None:
    """Make FSDP2 reduce gradients with sums: gloo has no products with a factor, not even with 1."""
    divide = FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(self: Any, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor  # type: ignore[method-assign]


if __name__ == "__main__":
    _install()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
