"""Parameters that stage 3 of DeepSpeed's ZeRO partitions. They are empty, except around their modules' own passes.

Reads attributes that DeepSpeed sets on such a parameter: ``ds_tensor`` (this rank's part, flat, with padding),
``ds_numel`` and ``ds_process_group``.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["is_partitioned", "own_part"]


def is_partitioned(parameter: Tensor) -> bool:
    """True if ZeRO's stage 3 partitions a parameter, gathered now or not."""
    return hasattr(parameter, "ds_tensor")


def own_part(parameter: Any) -> Tensor:
    """Return this rank's part of a partitioned parameter: flat, maybe empty. Local."""
    part: Tensor = parameter.ds_tensor
    begin = dist.get_rank(parameter.ds_process_group) * part.numel()
    # What lies beyond is padding, which DeepSpeed does not initialise.
    return part.flatten()[: max(0, parameter.ds_numel - begin)]
