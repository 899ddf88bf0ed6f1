"""WeightCache: keeps the FP8 cast of a weight, so that the microbatches of one step cast it once."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from fp8dist.modules.casters import Cast
from fp8dist.modules.job_state import JobState
from fp8dist.modules.outgrown import Outgrown
from fp8dist_kernels.graphs import capturing

Key = tuple[int, int, int]
"""(generation of the job's casts, address of the weight, version of the parameter): equal while a cast is valid."""

How = tuple[Outgrown, tuple[int, ...], tuple[int, ...]]
"""How a cast was made: its limits, and shape and strides of the weight, which may be stored transposed."""


class WeightCache:
    """Keeps the last cast of one weight, and returns it while the weight stays the same.

    ``how``: how the kept cast was made.
    """

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._kept: tuple[Cast, weakref.ref[Tensor], Key, bool] | None = None  # (cast, owner, key, recorded)
        self._copies = (False, False)  # Which copies (rows, columns) the kept cast has.
        self.how: How = (Outgrown(None), (), ())

    @property
    def empty(self) -> bool:
        """True if no cast is kept."""
        return self._kept is None

    def clear(self) -> None:
        """Drop the cast."""
        self._kept = None

    def key_of(self, weight: Tensor, parameter: Tensor) -> Key | None:
        """Return a key that stays equal while a cast of ``weight`` can be reused. None: casts cannot be reused now.

        None is returned
        - if no hooks report weight changes;
        - under torch.compile, where a guard on the cast would fail and recompile;
        - under a dispatch mode: selective checkpointing counts ops by position, so the same ops must run each time;
        - during CUDA graph capture, because the graph must contain the cast;
        - for a parameter made under inference_mode, whose writes torch does not count;
        - if torch swaps the contents of parameters to move them: it refuses parameters that have weak references, and
          ``keep`` takes one.

        Args:
            parameter: stores the weight, which may be a view or a part of it.
        """
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

    def find(self, owner: Tensor, key: Key, record: bool, copies: tuple[bool, bool] | None = None) -> Cast | None:
        """Return the kept cast if it is that of the weight as it is now; else None.

        Args:
            owner: the tensor that stores the weight. Compared as an object: another tensor may have the same address,
                such as a temporary of functional_call or of a parametrization.
            record: True if the caller must record the amax: then only a cast that recorded it will do.
            copies: True for each copy, (rows, columns), that the cast must have, and no other: a repeated forward must
                save the tensors of its first run, in which other GEMMs may have been in high precision. None: any.
        """
        if self._kept is None or copies not in (None, self._copies):
            return None
        cast, kept_owner, kept_key, recorded = self._kept
        return cast if kept_owner() is owner and kept_key == key and (recorded or not record) else None

    def keep(self, cast: Cast, owner: Tensor, key: Key, recorded: bool, copies: tuple[bool, bool], how: How) -> None:
        """Keep a cast in place of the last one. See ``find``."""
        self._kept, self._copies, self.how = (cast, weakref.ref(owner), key, recorded), copies, how
