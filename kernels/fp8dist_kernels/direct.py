"""Calls the ops of ``ops`` and ``grouped_ops`` without PyTorch's dispatcher where only the backend would see the call.

A dispatch of an op that is written in Python costs tens of microseconds on the host, several times per Linear. In plain
eager execution, the functions here call the op's implementation directly, with the same result. Everywhere else, they
call the op: while compiling or tracing, under a dispatch mode (fake tensors, FLOP counting, selective checkpointing),
inside a functorch transform, while profiling, and for tensor subclasses. A TorchFunctionMode does not count as such a
mode: it sees the torch operations of the implementation, not the op. Nothing here communicates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from fp8dist_kernels import grouped_ops, host, ops, traced
from fp8dist_kernels.arrays import StateArrays, UpdateRule

_EAGER = DispatchKeySet(DispatchKey.BackendSelect)
_STATES = (_EAGER | DispatchKeySet(DispatchKey.ADInplaceOrView), _EAGER)
"""The keys that the dispatcher adds to those of the arguments, in plain execution and in inference mode. Modes, tracers
and transforms add others."""

_TYPES = (Tensor, torch.nn.Parameter)
_DEVICES = ("cuda", "cpu")


def is_eager() -> bool:
    """True if code runs eagerly: it is not compiled or traced, and no mode or transform is active."""
    # While compiling, ``and`` skips the private call, which Dynamo must not trace.
    return not torch.compiler.is_compiling() and torch._C._dispatch_tls_local_include_set() in _STATES


def is_plain(x: Tensor) -> bool:
    """True if nothing but the backend would see an op on ``x``."""
    return (
        is_eager()
        and type(x) in _TYPES
        and not torch._C._autograd._profiler_enabled()
        and x.device.type in _DEVICES
        # A kernel would read memory that is not negated yet, or the missing memory of a zero tensor.
        and not (x.is_neg() or x._is_zerotensor())
        # Autograd does not look into an op. In a direct call, it would record the torch operations of the backend.
        and not (x.requires_grad and torch.is_grad_enabled())
    )


def _directly(op: torch._ops.OpOverload, compiled: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function that calls the implementation of ``op`` if its first argument ``is_plain``, else ``op``.
    ``compiled``: the function that torch.compile traces in place of ``op``, if any."""
    implementation = {**ops.IMPLEMENTATIONS, **grouped_ops.IMPLEMENTATIONS}[op._opname]

    @functools.wraps(implementation)
    def call(x: Tensor, *rest: Any, **options: Any) -> Any:
        if compiled is not None and torch.compiler.is_compiling():
            return compiled(x, *rest, **options)
        return (implementation if is_plain(x) else op)(x, *rest, **options)

    return call


quantize = _directly(ops.quantize, traced.quantize)
quantize_rowwise = _directly(ops.quantize_rowwise, traced.quantize_rowwise)
quantize_blocks = _directly(ops.quantize_blocks)
quantize_mx = _directly(ops.quantize_mx)
quantize_nvfp4 = _directly(ops.quantize_nvfp4)
add_up = _directly(ops.add_up)
transpose = _directly(ops.transpose)
observe = _directly(ops.observe, traced.observe)
measure = _directly(ops.measure)
matmul = _directly(ops.matmul)
matmul_into = _directly(ops.matmul_into)
quantize_grouped = _directly(grouped_ops.quantize_grouped)
quantize_grouped_lines = _directly(grouped_ops.quantize_grouped_lines)
quantize_grouped_mx = _directly(grouped_ops.quantize_grouped_mx)
matmul_grouped = _directly(grouped_ops.matmul_grouped)
matmul_grouped_columns = _directly(grouped_ops.matmul_grouped_columns)


class StateUpdates:
    """The two updates of an arena (the slots of one recipe and one group of ranks) in a step, on its ``arrays``.

    On a CPU, the backends "auto" and "torch" run numpy on the same memory (``host.py``). "reference" runs plain torch,
    so that a job can be compared with it.
    """

    def __init__(self, arrays: StateArrays, rule: UpdateRule, backend: str) -> None:
        self._arrays, self._rule, self._backend = arrays, rule, backend
        # A subclass of Tensor, such as a FakeTensor, may have no memory.
        on_cpu = all(type(tensor) is Tensor and tensor.device.type == "cpu" for tensor in arrays)
        self._views = host.HostArrays(arrays) if on_cpu and backend in ("auto", "torch") else None

    def launch(self, hold: Tensor | None, drop_nonfinite: bool) -> None:
        """Write the message to all-reduce into ``send``. See ``launch`` in ``reference/update.py``."""
        plain = is_plain(self._arrays.pending)
        if plain and self._views is not None:
            host.launch(self._views, hold, drop_nonfinite)
        else:
            launch = ops.IMPLEMENTATIONS["launch"] if plain else ops.launch
            launch(list(self._arrays), hold, drop_nonfinite=drop_nonfinite, backend=self._backend)

    def commit(self, reduced: Tensor, hold: Tensor | None) -> Tensor:
        """Take the all-reduced message ``reduced``, int32; elements after the message are ignored. See ``commit`` in
        ``reference/update.py``, also for the result, bool[7]."""
        plain = is_plain(reduced)
        if plain and self._views is not None:
            return host.commit(self._views, self._rule, reduced, hold)
        commit = ops.IMPLEMENTATIONS["commit"] if plain else ops.commit
        message = reduced[: self._arrays.send.numel()]
        outcome: Tensor = commit(list(self._arrays), message, hold, **self._rule._asdict(), backend=self._backend)
        return outcome
