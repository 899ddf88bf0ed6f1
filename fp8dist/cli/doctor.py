"""Test this machine: FP8 casts and matrix products, and an all-reduce between processes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fp8dist.cli.burn import FP8_CAPABILITY, burn, burned_across_ranks, multiplies_fp8
from fp8dist.errors import ConfigurationError
from fp8dist.files.failures import one_line
from fp8dist.integrations.stacks import TESTED
from fp8dist.state.settings import VARIABLES, Settings, unknown_variables
from fp8dist_kernels.backends import why_not_triton
from fp8dist_kernels.reference.casts import saturating_cast
from fp8dist_kernels.reference.matmuls import matmul_reference
from fp8dist_kernels.reference.torch_matmuls import matmul_torch

Outcome = Literal["ok", "failed", "absent"]

_TIMEOUT = 60.0
# Ties, both ends of the range and a value beyond it, with their expected casts to E4M3 and E5M2.
_CAST = (0.0, -0.3, 17.0, 19.0, 448.0, 1e9, float("inf"))
_E4M3 = (0.0, -0.3125, 16.0, 20.0, 448.0, 448.0, float("nan"))
_E5M2 = (0.0, -0.3125, 16.0, 20.0, 448.0, 57344.0, float("nan"))
_RANK_PROGRAM = "import sys; from fp8dist.cli.doctor import run_rank; run_rank(*sys.argv[1:])"


@dataclass(frozen=True)
class Probe:
    """One line of an examination. The outcome "absent" means that an optional feature is missing."""

    name: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class Examination:
    """The results of all checks. ``str()`` is a table."""

    observations: tuple[Probe, ...]

    @property
    def healthy(self) -> bool:
        """True if no check failed."""
        return all(line.outcome != "failed" for line in self.observations)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"healthy": self.healthy, "observations": [asdict(line) for line in self.observations]}

    def __str__(self) -> str:
        width = max((len(line.name) for line in self.observations), default=0)
        return "\n".join(f"{line.name:<{width}}  {line.outcome:<6}  {line.detail}" for line in self.observations)


def examine(environ: Mapping[str, str] = os.environ, timeout: float = _TIMEOUT, burning: float = 0.0) -> Examination:
    """Examine this machine. Never raises. COLLECTIVE under torchrun (``WORLD_SIZE`` is set).

    Without torchrun, it runs an all-reduce between two processes of this machine, and with a GPU also one over NCCL in
    a single process.

    Args:
        timeout: seconds that an all-reduce may take, including the start of its processes.
        burning: seconds for which to repeat casts and products: on all GPUs of this machine, else on the CPU; under
            torchrun on the rank's device, and then to compare them across the ranks.
    """
    checks: list[tuple[str, Callable[[], Iterable[Probe]]]] = [
        ("versions", _versions),
        ("trainers", _trainers),
        ("device", _devices),
        ("FP8 cast", _casts),
        ("FP8 matmul", _products),
        ("Triton kernels", _fused),
        ("backends", _backends),
        ("settings", lambda: _settings(environ)),
        ("all-reduce", lambda: _all_reduces(environ, timeout)),
    ]
    if burning:
        checks.append(("burn", lambda: _burned(environ, burning)))
        if "WORLD_SIZE" in environ:
            checks.append(("burn, all ranks", lambda: _burned_across_ranks(timeout)))
    return Examination(tuple(line for name, check in checks for line in _guarded(name, check)))


def _guarded(name: str, check: Callable[[], Iterable[Probe]]) -> list[Probe]:
    lines: list[Probe] = []
    try:
        for line in check():
            lines.append(Probe(line.name, line.outcome, one_line(line.detail)))
    except Exception as error:
        lines.append(Probe(name, "failed", one_line(f"{type(error).__name__}: {error}")))
    return lines


def _versions() -> Iterable[Probe]:
    yield Probe("Python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield Probe("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    if importlib.util.find_spec("triton") is None:
        yield Probe("triton", "absent", "not installed")
    else:
        yield Probe("triton", "ok", str(importlib.import_module("triton").__version__))


def _trainers() -> Iterable[Probe]:
    for package, tested in TESTED.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield Probe(package, "absent", f"tested with {tested}")
        else:
            yield Probe(package, "ok", found if found == tested else f"{found}, tested with {tested}")


def _devices() -> Iterable[Probe]:
    if not torch.cuda.is_available():
        yield Probe("GPU", "absent", "FP8 is emulated on the CPU: correct, but slow")
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        text = f"{found.name}, compute capability {found.major}.{found.minor}, {found.total_memory / 2**30:.0f} GiB"
        yield Probe(f"cuda:{index}", "ok", text)
        able = (found.major, found.minor) >= FP8_CAPABILITY
        text = "available" if able else "need compute capability 8.9 or higher"
        yield Probe(f"cuda:{index} FP8 tensor cores", "ok" if able else "absent", text)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _casts() -> Iterable[Probe]:
    yield from _tried_casts(lambda values, one, dtype: saturating_cast(values, one, dtype, True, False)[0])


def _products() -> Iterable[Probe]:
    device = _device()
    if multiplies_fp8(device):
        yield from _tried_products("torch._scaled_mm", matmul_torch)
    else:
        yield Probe("matmul", "absent", f"{device} has no FP8 tensor cores")


def _fused() -> Iterable[Probe]:
    """Test the Triton kernels. Their first use compiles them, which takes seconds."""
    reason = why_not_triton(_device())
    if reason is not None:
        yield Probe("Triton kernels", "absent", reason)
        return
    from fp8dist_kernels.triton.casts import quantize
    from fp8dist_kernels.triton.matmuls import matmul

    def cast(values: Tensor, one: Tensor, dtype: torch.dtype) -> Tensor:
        cold, pending = torch.zeros_like(one, dtype=torch.bool), torch.zeros_like(one)
        options: dict[str, Any] = {"record": True, "just_in_time": True, "margin": 0, "power_of_two": False}
        rows: Tensor = quantize(values, one, cold, pending, dtype, **options, rows=True, columns=True)[0]
        return rows

    yield from _tried_casts(cast, ", Triton")
    yield from _tried_products("Triton", matmul, ", Triton")


def _tried_casts(cast: Callable[[Tensor, Tensor, torch.dtype], Tensor], suffix: str = "") -> Iterable[Probe]:
    device = _device()
    values, one = torch.tensor([_CAST], device=device), torch.ones((), device=device)
    for dtype, expected in ((torch.float8_e4m3fn, _E4M3), (torch.float8_e5m2, _E5M2)):
        found = cast(values, one, dtype).float().cpu()
        right = torch.equal(found.nan_to_num(-1.0), torch.tensor([expected]).nan_to_num(-1.0))
        detail = f"on {device}" if right else f"on {device}: {list(_CAST)} became {found.tolist()[0]}"
        yield Probe(f"cast to {_short(dtype)}{suffix}", "ok" if right else "failed", detail)


def _tried_products(what: str, product: Callable[..., Tensor], suffix: str = "") -> Iterable[Probe]:
    """Test products of small integers. All sums are exact in bfloat16, so the result must match exactly."""
    device = _device()
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, (n, 64), generator=generator).float().to(device) for n in (32, 48))
    inv_a, inv_b = torch.tensor(0.5, device=device), torch.tensor(2.0, device=device)
    for left in (torch.float8_e4m3fn, torch.float8_e5m2):
        x, y = a.to(left), b.to(torch.float8_e4m3fn)
        found = product(x, y, inv_a, inv_b, torch.bfloat16, False).cpu()
        expected = matmul_reference(x.cpu(), y.cpu(), inv_a.cpu(), inv_b.cpu(), torch.bfloat16)
        wrong = int((found != expected).sum())
        detail = f"{what} on {device}" + (f": {wrong} of {found.numel()} are wrong" if wrong else "")
        yield Probe(f"matmul {_short(left)} x e4m3{suffix}", "failed" if wrong else "ok", detail)


def _burned(environ: Mapping[str, str], seconds: float) -> Iterable[Probe]:
    """Burn in all devices at once, each by a thread of its own: products run outside of Python's lock."""
    everywhere = torch.cuda.is_available() and "WORLD_SIZE" not in environ
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if everywhere else [_device()]
    able = [device for device in devices if multiplies_fp8(device)]
    for device in devices:
        if device not in able:
            yield Probe(f"burn on {device}", "absent", "it has no FP8 tensor cores")
    with ThreadPoolExecutor(len(devices)) as pool:
        for device, future in [(device, pool.submit(burn, device, seconds)) for device in able]:
            burned = future.result()
            for difference in burned.differences:
                yield Probe(f"burn on {device}", "failed", difference)
            yield Probe(f"burn on {device}", "failed" if burned.wrong else "ok", burned.summary)


def _burned_across_ranks(timeout: float) -> Iterable[Probe]:
    """Compare the results of all ranks. COLLECTIVE."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    try:
        report = burned_across_ranks(_device())
        detail = report.summary() if report.diverged else str(report)
        if report.consistent:
            yield Probe("burn, all ranks", "ok", detail)
        else:
            yield Probe("burn, all ranks", "failed" if report.diverged else "absent", detail)
        dist.barrier()  # A launcher kills all ranks as soon as one fails, so wait until all have the report.
    finally:
        dist.destroy_process_group()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.float8_").removesuffix("fn")


def _backends() -> Iterable[Probe]:
    gloo, nccl = dist.is_available() and dist.is_gloo_available(), dist.is_available() and dist.is_nccl_available()
    yield Probe("gloo", "ok" if gloo else "absent", "built in" if gloo else "not in this build of torch")
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl and torch.cuda.is_available() else ""
    yield Probe("nccl", "ok" if nccl else "absent", version or "not in this build of torch, or no GPU")


def _settings(environ: Mapping[str, str]) -> Iterable[Probe]:
    for variable, hint in unknown_variables(environ).items():
        expected = hint or f", expected one of {', '.join(VARIABLES)}"
        yield Probe(variable, "failed", f"is {environ[variable]!r}, but there is no such setting{expected}")
    for variable in sorted(VARIABLES & environ.keys()):
        value = environ[variable]
        try:
            Settings.resolve(environ={variable: value})
            yield Probe(variable, "ok", value)
        except ConfigurationError as error:
            yield Probe(variable, "failed", str(error))


def _all_reduces(environ: Mapping[str, str], timeout: float) -> Iterable[Probe]:
    world = environ.get("WORLD_SIZE")
    if world is not None:
        yield _all_reduce(
            f"all-reduce, {world} ranks", [("job", environ.get("RANK", "0"), world, "env://")], environ, timeout
        )
        return
    with tempfile.TemporaryDirectory(prefix="fp8dist-doctor-") as folder:
        ranks = [("gloo", str(rank), "2", f"file://{folder}/gloo") for rank in range(2)]
        yield _all_reduce("all-reduce, 2 local ranks", ranks, environ, timeout)
        if torch.cuda.is_available() and dist.is_nccl_available():
            alone = [("nccl", "0", "1", f"file://{folder}/nccl")]
            yield _all_reduce("all-reduce, 1 rank", alone, environ, timeout)


def _all_reduce(name: str, ranks: list[tuple[str, str, str, str]], environ: Mapping[str, str], timeout: float) -> Probe:
    """Run the ranks in separate processes, because a process that hangs in a collective can only be killed."""
    environment = {**environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    deadline = time.monotonic() + timeout
    with ExitStack() as resources:
        started: list[subprocess.Popen[str]] = []
        for rank in ranks:
            command, pipe = [sys.executable, "-c", _RANK_PROGRAM, *rank, str(timeout)], subprocess.PIPE
            started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
            resources.enter_context(started[-1])
            resources.callback(started[-1].kill)
        # Stop waiting as soon as a rank fails: the others would wait for it until the timeout.
        while {process.poll() for process in started} <= {0, None} and any(p.poll() is None for p in started):
            if time.monotonic() > deadline:
                return Probe(name, "failed", f"no answer within {timeout:.0f} s")
            time.sleep(0.02)
        for process in started:
            process.kill()
        return _conclusion(name, started)


def _conclusion(name: str, ended: list[subprocess.Popen[str]]) -> Probe:
    # Report ranks that failed by themselves before those that were killed.
    for process in sorted(ended, key=lambda process: process.wait(), reverse=True):
        output, errors = process.communicate()
        if process.returncode != 0:
            lines = errors.strip().splitlines() or [f"ended with exit code {process.returncode}"]
            return Probe(name, "failed", lines[-1])
        found = json.loads(output.strip().splitlines()[-1])
        if not found["right"]:
            return Probe(name, "failed", f"over {found['backend']}: wrong result {found['result']}")
    return Probe(name, "ok", f"int32 MAX over {found['backend']}, NaN kept, {found['ms']:.2f} ms")


def run_rank(kind: str, rank: str, size: str, meeting: str, timeout: str) -> None:
    """Run one rank of the all-reduce, in its own process, and print the result as JSON. COLLECTIVE.

    Args:
        kind: a backend, or "job" to choose it together with the other ranks.
        meeting: a rendezvous URL of torch.
    """
    limit = timedelta(seconds=float(timeout))
    me, ranks = int(rank), int(size)
    store: Store = next(iter(rendezvous(meeting, me, ranks, timeout=limit)))[0]
    store.set_timeout(limit)
    # The job's store outlives this process, so a second examination needs another prefix.
    store = PrefixStore(f"fp8dist-doctor/{store.add(f'fp8dist-doctor/count/{me}', 1)}", store)
    backend = _common_backend(store, me, ranks) if kind == "job" else kind
    device = _device() if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(backend, store=store, rank=me, world_size=ranks, timeout=limit)
    # Like a sync: amaxes as int32 bits, with a NaN, a slot that ran on no rank (-1), and an Inf on one rank.
    sent = torch.tensor([float(me), torch.nan if me == 0 else 1.0, -1.0, torch.inf if me == ranks - 1 else 2.0])
    expected = torch.tensor([ranks - 1.0, torch.nan, -1.0, torch.inf]).view(torch.int32).tolist()
    buffer = sent.to(device).view(torch.int32)
    start = time.perf_counter()
    dist.all_reduce(buffer, dist.ReduceOp.MAX)
    result = buffer.cpu()
    ms = 1000 * (time.perf_counter() - start)
    answer = {"backend": backend, "right": result.tolist() == expected, "ms": ms}
    print(json.dumps({**answer, "result": str(result.view(torch.float32).tolist())}), flush=True)
    dist.destroy_process_group()


def _common_backend(store: Store, rank: int, size: int) -> str:
    """Return "nccl" if every rank has its own GPU, else "gloo". COLLECTIVE."""
    mine = ""
    if torch.cuda.is_available() and dist.is_nccl_available():
        mine = f"{socket.gethostname()} {torch.cuda.get_device_properties(_device()).uuid}"
    store.set(f"gpu/{rank}", mine or "none")
    everyone = {store.get(f"gpu/{other}").decode() for other in range(size)}
    return "nccl" if len(everyone) == size and "none" not in everyone else "gloo"
