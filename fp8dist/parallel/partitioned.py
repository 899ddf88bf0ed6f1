"""Parameters that stage 3 of DeepSpeed's ZeRO partitions: each rank keeps a part, and ``parameter.data`` is empty.

DeepSpeed gathers the whole parameter for its module's forward and backward only. It sets attributes on a partitioned
parameter, which this file reads: ``ds_tensor`` (this rank's part, flat, with padding at the end), ``ds_numel`` (of the
whole) and ``ds_process_group``.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def is_partitioned(parameter: Tensor) -> bool:
    """True if ZeRO's stage 3 partitions the parameter, whether it is gathered now or not."""
    return hasattr(parameter, "ds_tensor")


def own_part(parameter: Any) -> Tensor:
    """Return this rank's part of a partitioned parameter, [n] without padding; n may be 0. Local."""
    part: Tensor = parameter.ds_tensor
    begin = dist.get_rank(parameter.ds_process_group) * part.numel()
    # DeepSpeed does not initialise the padding.
    return part.flatten()[: max(0, parameter.ds_numel - begin)]
