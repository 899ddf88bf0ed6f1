"""Inductor fuses a cast and its amax with the operations before it, without a change of bits.

Long tests import Inductor themselves: it takes a second, which each worker of scripts/test would spend.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8dist
from fp8dist_kernels import direct, ops, traced
from tests.support.casting import hard_values
from tests.support.linear import RECIPES
from tests.support.suite import few
from tests.support.training import bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo does it itself.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOKENS, WIDE, NARROW = 96, 512, 256
STORED_GELU = f"({TOKENS}, {WIDE}), ({WIDE}, 1), torch.bfloat16"
"""Inductor's allocation of a tensor like GELU's output or its gradient. Products allocate their own results."""


def slot(scale: float, cold: bool) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(scale), torch.tensor(cold), torch.tensor(-1.0)


def cast(quantize: Callable[..., Any], x: Tensor, dtype: torch.dtype, scale: float, cold: bool, **options: Any) -> Any:
    state = slot(scale, cold)
    options = {"record": True, "just_in_time": True, "margin": 0, "power_of_two": False, **options}
    return [bits(t) for t in (*quantize(x, *state, dtype, rows=True, columns=True, **options), *state)]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_traced_casts_equal_the_ops(dtype: torch.dtype) -> None:
    for tokens, finite, of in itertools.product((0, 1, 5, 16), (True, False), (torch.float32, torch.bfloat16)):
        x = hard_values(tokens, 48, finite=finite).to(of)
        for scale, cold, outgrown in itertools.product((1.0, 3e-3, 2.0**60), (True, False), (None, 1.25)):
            for margin, power_of_two, just_in_time in ((0, False, True), (-2, True, True), (1, False, False)):
                options = {
                    "outgrown": outgrown, "margin": margin, "power_of_two": power_of_two, "just_in_time": just_in_time,
                }  # fmt: skip
                case = (x, dtype, scale, cold)
                assert cast(traced.quantize, *case, **options) == cast(ops.quantize, *case, **options)
        for power_of_two, rows, columns in itertools.product((True, False), repeat=3):
            options = {"power_of_two": power_of_two, "rows": rows, "columns": columns}
            theirs = ops.quantize_rowwise(x, dtype, **options)
            mine = traced.quantize_rowwise(x, dtype, **options)
            assert [(bits(t), t.shape, t.dtype) for t in mine] == [(bits(t), t.shape, t.dtype) for t in theirs]
        mine, theirs = torch.tensor(-1.0), torch.tensor(-1.0)
        traced.observe(x, mine)
        ops.observe(x, theirs)
        assert bits(mine) == bits(theirs)


def test_every_scale_of_a_row_is_that_of_ieee_divisions() -> None:
    """Amaxes over the whole range of float32, with ties and subnormal inverses."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 0x7F800000, (1 << 16, 1), generator=generator, dtype=torch.int32).view(torch.float32)
    for dtype in (E4M3, E5M2):
        mine = traced.quantize_rowwise(rows, dtype, power_of_two=False, rows=True, columns=False)
        theirs = ops.quantize_rowwise(rows, dtype, power_of_two=False, rows=True, columns=False)
        assert bits(mine[1]) == bits(theirs[1])
        assert bits(mine[0]) == bits(theirs[0])


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(NARROW, WIDE)
        self.down = nn.Linear(WIDE, NARROW, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def chain(recipe: fp8dist.Recipe) -> Callable[[], None]:
    """Return a function that runs a compiled chain forward and backward."""
    torch._dynamo.reset()
    model = Chain().bfloat16()
    manager = fp8dist.prepare(model, recipe)
    manager.attach(model, boundary="manual")
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(TOKENS, NARROW).bfloat16()

    def run() -> None:
        compiled(x).square().sum().backward()

    return run


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.long
@pytest.mark.parametrize("recipe", few(RECIPES[:3], RECIPES[0]), ids=lambda recipe: type(recipe).__name__)
def test_the_amax_is_not_a_read_of_its_own(recipe: fp8dist.Recipe) -> None:
    """GELU's output is never stored, nor is its gradient: so nothing can read them for an amax."""
    from torch._inductor.utils import run_and_get_code

    run = chain(recipe)
    _, codes = run_and_get_code(run)
    assert len(codes) == 2
    for code in codes:
        assert "amax" in code
        assert "gelu" in code
        assert STORED_GELU not in code


@pytest.mark.filterwarnings("ignore:Could not find an active CPU backend:UserWarning")
@pytest.mark.long
def test_neither_is_it_in_triton() -> None:
    """The code of the forward that Inductor writes for Triton. A CPU cannot compile it: stop there."""
    import torch._inductor.config
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.graph import GraphLowering

    run = chain(fp8dist.DelayedScaling())
    codes: list[str] = []
    with (
        torch._inductor.config.patch(cpu_backend="triton", fx_graph_cache=False, compile_threads=1),
        mock.patch.object(TritonKernel, "inductor_meta_common", staticmethod(lambda: {"backend_hash": ""})),
        mock.patch.object(GraphLowering, "save_output_code", codes.append),
        contextlib.suppress(Exception),  # Whatever says that there is no Triton for CPUs.
    ):
        run()
    (code,) = codes
    assert STORED_GELU not in code
    kernels = re.split(r"^@triton.jit$", code, flags=re.MULTILINE)[1:]
    amaxes = [kernel for kernel in kernels if "gelu" in kernel.split("(")[0] and "amax" in kernel.split("(")[0]]
    assert amaxes
    casts = [kernel for kernel in kernels if "tl.float8e4nv" in kernel]
    both = [kernel for kernel in casts if kernel.count("tl.store(") == 2]
    assert len(both) == 2  # Of both inputs: the row-major and the transposed copy, from one read.
    for kernel in both:
        assert kernel.count("tl.load(") == 2  # The tensor and its scale.
    for kernel in casts:
        assert "maximum" not in kernel  # See triton issue 11111.
        assert "minimum" not in kernel


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.long
@pytest.mark.parametrize("dtype", few([E4M3, E5M2], E4M3))
def test_of_equal_inputs_inductor_makes_equal_bytes(dtype: torch.dtype) -> None:
    """Inductor's GELU may differ from eager's in the last bit: its own result is what both sides cast."""

    both = {"power_of_two": False, "rows": True, "columns": True}
    options = {**both, "record": True, "just_in_time": True, "margin": 0, "outgrown": 1.25}

    def casts(x: Tensor, state: Any) -> Any:
        y = F.gelu(x)
        return y, direct.quantize(y, *state, dtype, **options), direct.quantize_rowwise(y, dtype, **both)

    torch._dynamo.reset()
    compiled = torch.compile(casts, fullgraph=True)
    for seed, (scale, cold) in enumerate(((1.0, True), (7.3, False), (1e4, False))):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(41, 64, generator=generator) * 10
        if seed == 1:
            x[3, 5] = torch.inf
        mine, theirs = slot(scale, cold), slot(scale, cold)
        y, *found = compiled(x, mine)
        expected = ops.quantize(y, *theirs, dtype, **options), ops.quantize_rowwise(y, dtype, **both)
        for each, wanted in zip((*found, mine), (*expected, theirs), strict=True):
            assert [bits(t) for t in each] == [bits(t) for t in wanted]
