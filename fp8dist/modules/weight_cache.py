"""WeightCache: the FP8 cast of a weight, for the microbatches of a step to share."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from fp8dist.modules.casters import Cast
from fp8dist.modules.job_state import JobState
from fp8dist_kernels.graphs import capturing

__all__ = ["WeightCache"]

Key = tuple[int, int, int]


class WeightCache:
    """Keeps the last cast of one weight, and returns it while the weight stays the same."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._kept: tuple[Cast, weakref.ref[Tensor], Key, bool] | None = None  # With its owner; if it was recorded.

    @property
    def empty(self) -> bool:
        """True if no cast is kept."""
        return self._kept is None

    def clear(self) -> None:
        """Drop the cast."""
        self._kept = None

    def key_of(self, weight: Tensor, parameter: Tensor) -> Key | None:
        """Return a key that stays equal while a cast can be reused. None under torch.compile (a guard on the cast would
        break), under a dispatch mode (selective checkpointing counts ops by position), during capture (the graph must
        contain the cast), for a weight made under inference_mode, whose writes torch does not count, and where torch
        swaps the contents of parameters to move them: it refuses those that have weak references, as a cast has."""
        if (
            not self._job.reuse_casts
            or torch.compiler.is_compiling()
            or torch._C._len_torch_dispatch_stack() > 0
            or capturing(weight.device)
            or parameter.is_inference()
            or torch.__future__.get_swap_module_params_on_conversion()
        ):
            return None
        return self._job.generation, weight.data_ptr(), parameter._version

    def find(self, owner: Tensor, key: Key, record: bool) -> Cast | None:
        """Return the cast that can replace a cast of the weight now. None: there is none.

        Args:
            owner: the tensor that stores the weight. Compared as an object: another tensor may have the same address,
                such as a temporary of functional_call or of a parametrization.
            record: True if the cast must have recorded the amax.
        """
        if self._kept is None:
            return None
        cast, kept_owner, kept_key, recorded = self._kept
        return cast if kept_owner() is owner and kept_key == key and (recorded or not record) else None

    def keep(self, cast: Cast, owner: Tensor, key: Key, recorded: bool) -> None:
        """Keep a cast in place of the last one. See ``find``."""
        self._kept = cast, weakref.ref(owner), key, recorded
