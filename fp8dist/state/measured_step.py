"""MeasuredStep: what this rank records in one measured step, and which microbatch held each maximum."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fp8dist.state.arena import Arena
from fp8dist.state.slots import Slot
from fp8dist_kernels.graphs import capturing
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN


class MeasuredStep:
    """The amaxes and shares that this rank's casts recorded in one measured step. Everything here is local.

    The arena keeps one maximum per slot. So it is read at the end of each microbatch: a value that has risen since the
    last reading was recorded in that microbatch. ``microbatch``: number of the current one, from 0.
    """

    def __init__(self, arena: Arena) -> None:
        self.microbatch = 0
        self._arena = arena
        self._values: Tensor | None = None  # float32[3, n]: amaxes, shares of saturated elements, of underflows.
        self._held: Tensor | None = None  # int32[3, n], with ``_values``: the first microbatch that saw the value.

    def end_microbatch(self) -> None:
        """Count what is recorded from now on as the next microbatch's."""
        if not capturing(self._arena.device):  # A captured step is not watched.
            self._look()
            self.microbatch += 1

    def keep(self) -> None:
        """Merge what was recorded so far, because a launch is about to clear it."""
        self._look()
        if not self._arena.lanes:  # With lanes, the launch sends and clears them.
            self._arena.shares.fill_(DID_NOT_RUN)

    def _look(self) -> None:
        """Read the arena, and assign what has risen to the current microbatch."""
        amaxes = self._arena.pending
        if len(self._arena.shards):
            amaxes = amaxes.index_copy(0, self._arena.shard_slots, self._arena.shards)
        values = torch.cat([amaxes[None], self._arena.shares])
        if self._values is None or self._held is None:
            self._values, self._held = values, torch.full_like(values, self.microbatch, dtype=torch.int32)
        else:
            self._held.masked_fill_(values.view(torch.int32) > self._values.view(torch.int32), self.microbatch)
            self._values = _larger(self._values, values)

    def kept(self) -> Callable[[], None]:
        """Return a function that restores what was seen up to this call. It may be called several times."""
        before = self.microbatch, self._values, None if self._held is None else self._held.clone()

        def put_back() -> None:
            self.microbatch, self._values, held = before
            self._held = None if held is None else held.clone()

        return put_back

    def recorded(self) -> Iterator[Slot]:
        """Iterate over the slots that this rank recorded an amax for. Reads the device."""
        amaxes = [] if self._values is None else self._values[0].tolist()
        return (spec.slot for spec, amax in zip(self._arena.specs, amaxes) if amax != DID_NOT_RUN)

    def take(self) -> tuple[Tensor, Tensor]:
        """Return what this rank saw in the step that ends, and forget it. Call ``keep`` first.

        Returns:
            float32[3, n] of amaxes, shares of saturated elements, and shares of underflows, -1 where nothing was seen;
            and int32[3, n]: the first microbatch that saw the value.
        """
        values, held = self._values, self._held
        assert values is not None
        assert held is not None
        self.forget()
        return values, held

    def forget(self) -> None:
        """Forget what was seen, but not the number of the microbatch."""
        self._values = self._held = None


def _larger(a: Tensor, b: Tensor) -> Tensor:
    """Return the elementwise maximum of amaxes or shares in float32. NaN is the largest."""
    return torch.maximum(a.view(torch.int32), b.view(torch.int32)).view(torch.float32)
