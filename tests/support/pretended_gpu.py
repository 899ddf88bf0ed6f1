"""A pretended NVIDIA H200, so that code for a GPU runs on a machine without one.

torch.cuda answers as for one H200. Tensors on "cuda" say so (``device``, ``is_cuda``), but their data are in CPU
memory, and torch's CPU kernels compute, except for scaled products (``libtorch.py``). Triton's kernels run in its
interpreter. NCCL is gloo. PRETENDED_CAPABILITY and PRETENDED_CUDA make it another GPU, and torch another build.

What real CUDA refuses is refused here, too: operations on tensors of two devices, copies between host and device during
a capture (also of pinned memory), and use of CUDA in a process that was forked after CUDA was initialised. Not
pretended: asynchrony (each operation is done when it returns), times, memory, torch.compile, and what Triton's compiler
does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.libtorch import Stand

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


CUDA = os.environ.get("PRETENDED_CUDA", "13.0")
CAPABILITY = _version(os.environ.get("PRETENDED_CAPABILITY", "9.0"))
LIBTORCH = Stand(CAPABILITY, _version(CUDA), _version(torch.__version__))
# The attributes of torch 2.11's _CudaDeviceProperties that do not depend on its build. No others: a wrong name raises.
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=150_110_011_392,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    L2_cache_size=62_914_560,
    uuid="GPU-00000000-0000-0000-0000-000000000000",
)
ON_GPU = ("cuda", "meta")
"""The guard of ``_guard`` calls the current CUDA device "meta". So this GPU has no meta tensors beside it."""
CACHE = 1 << 26
"""Tensors with so many elements are written and read to flush a cache. There is none, so nothing is done."""
MIXES_DEVICES = ("copy_", "_to_copy", "index", "index_put_", "_index_put_impl_", "set_", "isin", "lift_fresh")
"""Operations that take tensors of two devices, beside collectives."""


class FakeTensor(Tensor):
    """A base of this name tells ``fp8dist.job.eligibility`` that a tensor is no quantised one."""


class OnGpu(FakeTensor):
    """A tensor that says it is on the GPU. ``inner``: its data, on the CPU."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGpu:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device="meta",  # Autograd runs such a tensor's backward as a CPU tensor's.
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        return GPU

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_meta(self) -> bool:
        return False

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnGpu({self.inner!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> OnGpu:
        made = OnGpu(self.inner.detach().clone()).requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            made._is_param = True  # type: ignore[attr-defined]
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OnGpu, (self.inner.detach(),)


class _OnCuda(TorchDispatchMode):
    """Handles operations without a tensor on the GPU, such as ``torch.empty(…, device="cuda")``."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _run(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the data of its tensors, and put the results where CUDA would."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (Tensor, torch.device))]
    there = {id(one.inner): one for one in given if isinstance(one, OnGpu)}
    asked = [one for one in given if isinstance(one, torch.device)]
    if not there and not any(device.type in ON_GPU for device in asked):
        return function(*args, **{**kwargs, **({"pin_memory": False} if kwargs.get("pin_memory") else {})})
    name = function._schema.name.partition("::")[2]
    if function.namespace == "fp8dist":
        return _run_ours(function, args, kwargs)
    here = [one for one in given if isinstance(one, Tensor) and not isinstance(one, OnGpu)]
    if name in ("zero_", "amax") and there and given[0].numel() >= CACHE:
        return args[0] if name == "zero_" else OnGpu(torch.zeros((), dtype=given[0].dtype))
    collective = function.namespace == "c10d"
    if any(one.device.type == "meta" for one in here):
        raise NotImplementedError(
            f"a tensor was made without a dispatch mode, such as the index of x[[0, 2]] ({function})"
        )
    if there and any(one.ndim for one in here) and name not in MIXES_DEVICES and not collective:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({function})")
    graph = Graph.recording
    moves = name == "_to_copy" and asked and (asked[-1].type in ON_GPU) != bool(there)
    if graph and (moves or name in ("_local_scalar_dense", "nonzero") or (name == "copy_" and there and here)):
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({function})")
    inner_args, inner_kwargs = tree_map(_inner, (tuple(args), dict(kwargs)))
    inner_kwargs.pop("pin_memory", None)
    if graph:
        graph.before(function, inner_args, inner_kwargs)
    function = {
        "_scaled_mm": LIBTORCH.scaled_mm,
        "_scaled_mm_v2": LIBTORCH.scaled_mm_v2,
        "_scaled_grouped_mm_v2": _grouped_scaled,
    }.get(name, function)
    result = function(*inner_args, **inner_kwargs)
    if graph:
        graph.after(function, inner_args, inner_kwargs, result)
    on_gpu = asked[-1].type in ON_GPU if asked else bool(there)
    kept = {id(one) for one in here}

    def place(one: Any) -> Any:
        if not isinstance(one, Tensor) or id(one) in kept:
            return one
        return there[id(one)] if id(one) in there else OnGpu(one) if on_gpu else one

    return tree_map(place, result)


def _grouped_scaled(
    a: Tensor, b: Tensor, scale_a: list[Tensor], _a: Any, _sa: Any, scale_b: list[Tensor], _b: Any, _sb: Any,
    offsets: Tensor, *_: Any, **__: Any,
) -> Tensor:  # fmt: skip
    """``torch.nn.functional.scaled_grouped_mm`` of [tokens, k] and [E, k, n] with a scale for each row and column."""
    product = torch.full((len(a), b.shape[2]), torch.nan, dtype=torch.bfloat16)  # The rest is not initialised.
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        rows = slice(start, end)
        product[rows] = (a[rows].float() @ b[expert].float() * scale_a[0][rows, None] * scale_b[0][expert]).bfloat16()
        start = end
    return product


def _run_ours(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op of fp8dist with the tensors as they are, so that it takes the branches for a GPU."""
    from fp8dist_kernels import grouped_ops, ops

    name = function._schema.name.partition("::")[2]
    implementation = {**ops.IMPLEMENTATIONS, **grouped_ops.IMPLEMENTATIONS}[name]
    named = function._schema.arguments[len(args) :]
    defaults = {one.name: one.default_value for one in named if one.has_default_value()}
    with _OnCuda():
        return implementation(*args, **{**defaults, **kwargs})


def _inner(one: Any) -> Any:
    if isinstance(one, OnGpu):
        return one.inner
    return CPU if isinstance(one, torch.device) else one


class Graph:
    """torch.cuda.CUDAGraph: replays the recorded operations and kernels on the same memory."""

    recording: Graph | None = None

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Record inside. A real capture runs nothing, so undo what the operations wrote."""
        Graph.recording = self
        try:
            yield
        finally:
            Graph.recording = None
            for target, content in self._saved.values():
                target.copy_(content)

    def replay(self) -> None:
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            for call in self._calls:
                call()

    def save(self, tensors: Sequence[Any]) -> None:
        """Keep the content of tensors that an operation may write to."""
        for one in tensors:
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
                self._saved.setdefault(storage.data_ptr(), (whole, whole.clone()))

    def before(self, function: Any, args: Any, kwargs: Any) -> None:
        if function._schema.is_mutable:
            self.save(tree_leaves((args, kwargs)))

    def after(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        results = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        targets = {i for i, one in enumerate(results) if one.untyped_storage().data_ptr() not in given}

        def again() -> None:
            for i, new in enumerate(one for one in tree_leaves(function(*args, **kwargs)) if isinstance(one, Tensor)):
                if i in targets:
                    results[i].copy_(new)

        self._calls.append(again)

    def launched(self, launch: Callable[[], Any], arguments: Any) -> None:
        """Record a kernel."""
        self.save(arguments)
        self._calls.append(launch)


class _Event:
    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._timed, self._at = enable_timing, 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        assert min(self._timed, end._timed), "both events need enable_timing=True"
        assert min(self._at, end._at), "both events must be recorded"
        return 1e3 * (end._at - self._at)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if Graph.recording:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def wait(self, stream: Any = None) -> None:
        pass


class _Stream:
    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device, self.cuda_stream = GPU, 0

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def wait_event(self, event: _Event) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _synchronize()


_initialised: list[int] = []
"""The process that has initialised CUDA."""


def _initialise() -> None:
    if not _initialised:
        _initialised.append(os.getpid())
    elif _initialised[0] != os.getpid():
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")


def _available() -> bool:
    if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") != "1" and not _initialised:
        _initialised.append(os.getpid())  # cuInit: a process that is forked from here on must not use CUDA.
    return True


def _synchronize(device: Any = None) -> None:
    _initialise()
    if Graph.recording:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


@contextlib.contextmanager
def _graph(graph: Graph, **_: Any) -> Iterator[None]:
    with graph.capture():
        yield


def _group(init: Callable[..., None]) -> Callable[..., None]:
    def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        init("gloo" if backend == "nccl" else backend, *args, **kwargs)

    return init_process_group


def _through_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return torch.tensor or the like: it copies to a device without asking a dispatch mode."""

    def made(*args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
        data = args[0]
        if make.__name__ == "as_tensor" and isinstance(data, OnGpu) and device == GPU and not kwargs:
            return data
        if device is None and isinstance(data, OnGpu):
            device = GPU
        tensor = make(data.cpu() if isinstance(data, OnGpu) else data, *args[1:], **kwargs)
        tensor = tensor if device is None else tensor.to(device)
        return tensor.requires_grad_() if requires_grad else tensor

    return made


def _launching(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call of Triton's interpreter, as a launch on the GPU: it takes no tensor of the CPU."""

    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        _initialise()
        values = [getattr(one, "base", one) for one in (*args, *kwargs.values())]
        tensors = [one for one in values if isinstance(one, Tensor)]
        if any(type(one) is Tensor and one.numel() > 1 for one in tensors) and any(
            isinstance(one, OnGpu) for one in tensors
        ):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        graph, Graph.recording = Graph.recording, None  # The interpreter's own operations are no part of a graph.
        try:
            if graph:
                graph.launched(lambda: call(executor, *args, **kwargs), [_inner(one) for one in tensors])
            return call(executor, *args, **kwargs)
        finally:
            Graph.recording = graph

    return launch


def _guard() -> None:
    """Register the guard of torch's "meta" device, which does nothing, for CUDA: torch's build for CPUs has none."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14
    guards[cuda] = guards[meta]


def install() -> None:
    """Pretend from now on, in this process and in those it starts."""
    os.environ["TRITON_INTERPRET"] = "1"  # Decorating a kernel reads it.
    _guard()
    answers: dict[str, Any] = {
        "is_available": _available,
        "is_initialized": lambda: bool(_initialised),
        "_lazy_init": _initialise,
        "device_count": lambda: 1,
        "current_device": lambda: (_initialise(), 0)[1],
        "set_device": lambda device: _initialise(),
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: (_initialise(), PROPERTIES)[1],
        "mem_get_info": lambda device=None: (PROPERTIES.total_memory, PROPERTIES.total_memory),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda *_, **__: True,
        "manual_seed_all": lambda seed: None,
        "synchronize": _synchronize,
        "device": lambda device: contextlib.nullcontext(),
        "Event": _Event,
        "Stream": _Stream,
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": Graph,
        "graph": _graph,
        "is_current_stream_capturing": lambda: Graph.recording is not None,
        "_sleep": lambda cycles: _initialise(),
        "get_rng_state": lambda device=None: torch.empty(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }
    for name, answer in answers.items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, answer)
    torch.version.cuda = CUDA
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # ``data`` cannot become another class.
    torch.tensor, torch.as_tensor = _through_cpu(torch.tensor), _through_cpu(torch.as_tensor)
    Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign]
    Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    dist.init_process_group = _group(dist.init_process_group)
    import triton.runtime.interpreter as upstream

    from tests.support import interpreter

    interpreter.install()
    upstream.GridExecutor.__call__ = _launching(upstream.GridExecutor.__call__)
    _OnCuda().__enter__()
    # Calls that go past the dispatcher on a GPU do so here: the mode and the class above are the GPU.
    from fp8dist_kernels import direct

    direct._TYPES = (*direct._TYPES, OnGpu)
    direct._STATES = (*direct._STATES, torch._C._dispatch_tls_local_include_set())
