"""Emulates CUDA graphs without CUDA: records tensor operations, and replays them on the same memory.

As with real graphs, Python runs only during the capture. A replay repeats each operation with its original inputs and
writes the results to its original outputs, so decisions of a step on the host show as differences. Unlike real graphs,
operations also run during the capture: the caller must restore state afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_LOOKING = ("casters", "linear_slots", "loop_monitor", "weight_cache", "write_policy")
"""Files of ``fp8dist.modules`` that ask whether a graph is captured."""


class EmulatedGraph(TorchDispatchMode):
    """Records inside ``capture()``; ``replay()`` may run any number of times."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self._inside = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default, "a tensor was read on the host"
        self._inside = True
        try:
            result = function(*args, **(kwargs or {}))
        finally:
            self._inside = False
        self._calls.append((function, args, kwargs or {}, tree_leaves(result)))
        return result

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record inside. The library sees a capture."""
        with ExitStack() as stack:
            stack.enter_context(mock.patch("fp8dist.state.arena_sync.all_reduce_max", self._all_reduce_max))
            for module in ("state.arena_sync", "modules.model_state", *(f"modules.{name}" for name in _LOOKING)):
                stack.enter_context(mock.patch(f"fp8dist.{module}.capturing", return_value=True))
            stack.enter_context(mock.patch.object(Tensor, "tolist", self._tolist(Tensor.tolist)))
            stack.enter_context(self)
            yield

    def _all_reduce_max(self, tensor: Tensor, group: Any, counters: Any) -> Any:
        """Record a collective without running it, because other ranks may capture at another time."""

        def reduce(given: Tensor) -> Tensor:
            dist.all_reduce(given, dist.ReduceOp.MAX, group=group.process_group)
            return given

        self._calls.append((reduce, (tensor,), {}, [tensor]))
        counters.collectives += 1
        return mock.Mock()

    def replay(self) -> None:
        """Replay all recorded operations."""
        with torch.no_grad():
            for function, args, kwargs, results in self._calls:
                given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
                for old, new in zip(results, tree_leaves(function(*args, **kwargs))):
                    if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in given:
                        old.copy_(new)

    def _tolist(self, original: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Let operations read CPU memory, as a kernel would on a GPU, but reject reads by their callers."""

        def tolist(tensor: Tensor) -> Any:
            assert self._inside, "a tensor was read on the host"
            return original(tensor)

        return tolist
