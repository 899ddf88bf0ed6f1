"""Compile kernels for GPUs that this machine lacks, exactly as they would be launched there.

The functions of ``fp8dist_kernels.triton`` run with CPU tensors. Instead of launching a kernel, Triton compiles it for
the requested GPU, specialised for these arguments. Nothing is executed, so untouched memory costs nothing.

Must run in a process without TRITON_INTERPRET, so tests request a report from a separate process::

    report = compiled("casts")     # a function of tests/kernels/compiled.py
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

HOPPER, BLACKWELL = 90, 100
SHARED_MEMORY_LIMIT = 232_448
"""Bytes of shared memory per block on a data centre GPU of the Hopper or Blackwell generation."""


@dataclass(frozen=True)
class Compiled:
    """One kernel for one GPU. ``case``: a name for the arguments of its launch."""

    case: str
    kernel: str
    capability: int
    registers: int
    shared: int
    stack: int
    warps: int
    ptx: str
    sass: str

    def count(self, pattern: str, of: str = "sass") -> int:
        """Return how often a regular expression occurs in the machine code or the PTX."""
        return len(re.findall(pattern, getattr(self, of)))


def compiled(launches: str, capability: int = HOPPER, timeout: float = 230.0) -> list[Compiled]:
    """Return the kernels that a function of ``tests.kernels.compiled`` launches, compiled for a capability (90: Hopper,
    100: Blackwell)."""
    if "TRITON" in os.environ and capability != HOPPER:
        # Triton 3.6 puts 40 bytes of a product on the stack of a consumer GPU; no other GPU is promised with it.
        pytest.skip("the oldest Triton is tested for Hopper only")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory(prefix="fp8dist-compiled-") as folder:
        environment["TRITON_CACHE_DIR"] = folder
        answer = Path(folder, "answer.json")
        command = [sys.executable, "-m", "tests.support.ahead_of_time", launches, str(capability), str(answer)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{launches} for sm_{capability}\n{done.stdout}\n{done.stderr}"
        return [Compiled(**one) for one in json.loads(answer.read_text())]


def table(kernels: list[Compiled]) -> str:
    """Return registers and shared memory, one line per kernel."""
    lines = [f"{'kernel':28} {'case':44} {'sm':>4} {'warps':>5} {'regs':>5} {'shared':>8} {'stack':>6}"]
    for one in kernels:
        lines.append(
            f"{one.kernel:28} {one.case:44} {one.capability:4} {one.warps:5} {one.registers:5} {one.shared:8} "
            f"{one.stack:6}"
        )
    return "\n".join(lines)


class Compiler:
    """Replaces Triton's launcher."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.case = ""
        self.kernels: list[Compiled] = []
        self._examinations: dict[bytes, tuple[str, str]] = {}  # By machine code.

    def launch(self, case: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function, and name the kernels that it launches ``case``."""
        self.case = case
        return function(*args, **options)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Compile launches inside instead of running them."""
        import triton
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = run(function, *args, grid=grid, warmup=True, **kwargs)
            self.kernels.append(self._examined(function, kernel))
            return kernel

        triton.runtime.driver.set_active(_Elsewhere(self.capability))  # type: ignore[arg-type]
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run

    def _examined(self, function: Any, kernel: Any) -> Compiled:
        usage, sass = self._examination(kernel.asm["cubin"])
        found = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
        return Compiled(
            case=self.case,
            kernel=function.fn.__name__.strip("_"),
            capability=self.capability,
            registers=found["REG"],
            shared=kernel.metadata.shared,
            stack=found["STACK"],
            warps=kernel.metadata.num_warps,
            ptx=kernel.asm["ptx"],
            sass=sass,
        )

    def _examination(self, cubin: bytes) -> tuple[str, str]:
        """Return resource usage and machine code. The disassembler takes as long to start as a small kernel takes to
        compile, so each kernel is examined once."""
        if cubin not in self._examinations:
            usage = _tool("cuobjdump", "--dump-resource-usage", cubin)
            self._examinations[cubin] = usage, _tool("cuobjdump", "--dump-sass", cubin)
        return self._examinations[cubin]


class _Elsewhere:
    """A Triton driver for a GPU that this machine lacks."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


def _tool(name: str, flag: str, cubin: bytes) -> str:
    import triton

    binary = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = os.environ["PATH"] + os.pathsep + str(binary.parent)
        return subprocess.run(
            [str(binary), flag, file.name], capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}
        ).stdout


def _main() -> None:
    import triton

    launches, capability, answer = sys.argv[1:]
    wanted = os.environ.get("TRITON", triton.__version__)  # scripts/test-long compiles with two versions.
    assert triton.__version__ == wanted, f"Triton is {triton.__version__}, expected {wanted}"
    compiler = Compiler(int(capability))
    with compiler.installed():
        getattr(importlib.import_module("tests.kernels.compiled"), launches)(compiler)
    Path(answer).write_text(json.dumps([asdict(one) for one in compiler.kernels]))


if __name__ == "__main__":
    _main()
