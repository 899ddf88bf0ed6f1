"""Shares of a cast: plain torch, Triton and, for one scale on a CPU, numpy, against counts in plain Python and against
the results of real casts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fp8dist_kernels import host_shares, ops
from fp8dist_kernels.reference import shares
from fp8dist_kernels.triton import shares as fused
from tests.support.casting import DTYPES, FORMATS, LAYOUTS, hard_values, rounded
from tests.support.devices import DEVICE
from tests.support.oracle import FLOAT32_MAX, divide, float32

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # From the interpreter's numpy.

E4M3, E5M2 = FORMATS
MOST = {E4M3: 464.0, E5M2: 61440.0}
LEAST = {E4M3: 2.0**-10, E5M2: 2.0**-17}
WHOLE = (0, 0)
NAMED: dict[str, Any] = {"plain": shares, "fused": fused, **({"host": host_shares} if DEVICE == "cpu" else {})}
VERSIONS = pytest.mark.parametrize("version", NAMED.values(), ids=NAMED)
OF_BLOCKS = pytest.mark.parametrize("version", [shares, fused], ids=["plain", "fused"])


def measured(version: Any, x: Tensor, inv_scale: Tensor, dtype: torch.dtype, block: Any, before: float = -1.0) -> Any:
    """Return both shares. The neighbours of their places must stay as they are."""
    array = torch.full((2, 7), before, device=DEVICE)
    version.measure(x, inv_scale, dtype, array[0, 3], array[1, 5], block=block)
    found = [array[0, 3].item(), array[1, 5].item()]
    array[0, 3] = array[1, 5] = before
    assert (array == before).all()
    return found


def expected(x: Tensor, scales: Sequence[Sequence[float]], dtype: torch.dtype, block: tuple[int, int]) -> list[float]:
    """Return the saturated and underflow shares, in plain Python. ``scales``: inverse scales by block."""
    cut_off = lost = 0
    for i, row in enumerate(x.float().tolist()):
        for j, value in enumerate(row):
            scale = scales[i // block[0] if block[0] else 0][j // block[1] if block[1] else 0]
            magnitude = abs(value)
            if math.isfinite(magnitude) and not math.isnan(scale):
                cut_off += magnitude > min(FLOAT32_MAX, float32(MOST[dtype] * scale))
                lost += 0 < magnitude <= float32(LEAST[dtype] * scale)
    return [divide(float32(cut_off), float32(x.numel())), divide(float32(lost), float32(x.numel()))]


@pytest.mark.slow
@VERSIONS
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_one_scale(version: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any finite one, up to the ends of float32, where a limit may be subnormal or infinite; Inf and NaN."""
    monkeypatch.setattr(host_shares, "PIECE", 37)
    scales = (1.0, 0.37, 2.0**-120, 2.0**-140, 3e-39, 2.0**-149, 2.0**-126, 2.0**110, 2.0**120, 0.0, math.inf, math.nan)
    for inv_scale, (source, layout) in zip(scales, itertools.cycle(zip((*DTYPES, torch.float64), LAYOUTS))):
        values = hard_values(9, 48) * min(1.0, inv_scale or 1.0)
        x = LAYOUTS[layout](values.to(source))
        wanted = expected(x, [[float32(inv_scale)]], dtype, WHOLE)
        for given in (torch.tensor(inv_scale, device=DEVICE), torch.tensor([[inv_scale]], device=DEVICE)):
            assert measured(version, x, given, dtype, WHOLE) == wanted, inv_scale


def test_scales_of_blocks() -> None:
    """``test_twins.py`` has those of Triton."""
    sizes = ((1, 16, E4M3), (130, 140, E5M2), (129, 48, E4M3))
    for (tokens, features, dtype), block in itertools.product(sizes, (None, (1, 128), (128, 128))):
        height, width = block or (1, features)
        shape, generator = (-(-tokens // height), -(-features // width)), torch.Generator().manual_seed(0)
        inv_scale = torch.exp2(20 * torch.rand(shape, generator=generator) - 10).to(DEVICE)
        x = hard_values(tokens, features, finite=True)
        wanted = expected(x, inv_scale.tolist(), dtype, (height, width))
        assert measured(shares, x, inv_scale, dtype, (height, width)) == wanted


@VERSIONS
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_what_is_counted_is_what_the_cast_does(version: Any, dtype: torch.dtype) -> None:
    """Power-of-two scaling is exact: ``lost`` counts values cast to zero, ``cut_off`` values too large to round. Around
    the limits themselves, too."""
    least, most = LEAST[dtype], MOST[dtype]
    near = [torch.nextafter(torch.tensor(limit), torch.tensor(to)) for limit in (least, most) for to in (0, math.inf)]
    ends = [sign * limit for limit in (least, most, *map(float, near)) for sign in (1, -1)]
    x = torch.cat([torch.tensor([ends]), hard_values(1, 300, finite=True).cpu() * 100], 1).to(DEVICE)
    for scale in (1.0, 0.25, 8.0):
        given = torch.cat([x[:, : len(ends)] / scale, x[:, len(ends) :]], 1)
        scaled = (given * scale).flatten().tolist()
        lost = sum(value != 0 and result == 0 for value, result in zip(scaled, rounded(scaled, dtype)))
        cut_off = sum(abs(value) > most for value in scaled)
        got = measured(version, given, torch.tensor(1 / scale, device=DEVICE), dtype, WHOLE)
        assert got == [float32(cut_off / len(scaled)), float32(lost / len(scaled))]


@VERSIONS
def test_special_values(version: Any) -> None:
    x = torch.tensor([[math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e6, 1e-6]], device=DEVICE)
    one = torch.ones((), device=DEVICE)
    for given, scale, wanted in (
        (x, one, [0.125, 0.125]),  # Inf and NaN are in the denominator only.
        (x[:, :6], one, [0.0, 0.0]),  # Measured, and nothing found.
        (x, one * math.inf, [0.0, 0.25]),
        (x, -one * math.nan, [0.0, 0.0]),
        (x[:0], one, [-1.0, -1.0]),
        (x[:, :0], one, [-1.0, -1.0]),
    ):
        assert measured(version, given, scale, E4M3, WHOLE) == wanted
    far = torch.tensor([[1e300, -1e300, 1e-300, 1e30]], dtype=torch.float64, device=DEVICE)
    assert measured(version, far, one, E5M2, WHOLE) == [0.25, 0.0], "read as float32"


@VERSIONS
def test_places_only_grow(version: Any) -> None:
    saturated, underflow = torch.full((2,), -1.0, device=DEVICE)
    seen = []
    for cut_off, lost in ((1, 0), (3, 1), (2, 3), (0, 0)):
        x = torch.ones(1, 8, device=DEVICE)
        x[0, :cut_off] = 1e4
        x[0, cut_off : cut_off + lost] = -1e-4
        version.measure(x, torch.ones((), device=DEVICE), E4M3, saturated, underflow, block=WHOLE)
        seen.append((saturated.item(), underflow.item()))
    assert seen == [(0.125, 0.0), (0.375, 0.125), (0.375, 0.375), (0.375, 0.375)]


@pytest.mark.slow
def test_programs_take_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_MOST_PROGRAMS", 2)
    x = hard_values(200, 272)
    for block, given in ((WHOLE, x), ((1, 128), x.t())):
        shape = () if block == WHOLE else (272, 2)
        inv_scale = torch.exp2(20 * torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 10).to(DEVICE)
        found = [measured(version, given, inv_scale, E4M3, block) for version in (shares, fused)]
        assert found[0] == found[1]


@OF_BLOCKS
def test_what_does_not_fit_is_refused(version: Any) -> None:
    one = torch.ones((), device=DEVICE)
    for block, features, scales, problem in (
        (WHOLE, 272, torch.ones(2), r"inverse scales are torch.float32 .* expected float32"),
        ((1, 128), 272, torch.ones(4, 2), "expected float32"),
        ((1, 144), 144, torch.ones(4, 2), "expected float32"),
        ((128, 128), 144, torch.ones(4, 2), "expected float32"),
        ((128, 128), 272, torch.ones(2), "expected float32"),
        ((1, 64), 16, one, "expected 0x0"),
        ((128, 1), 16, one, "expected 0x0"),
        ((0, 1), 16, one, "expected 0x0"),
        (WHOLE, 16, one.double(), r"inverse scales are torch\.float64"),
    ):
        with pytest.raises(ValueError, match=problem):
            measured(version, torch.ones(4, features, device=DEVICE), scales.to(DEVICE), E4M3, block)


@pytest.mark.parametrize("backend", ["auto", "torch", "reference", "triton"])
def test_the_op(backend: str) -> None:
    """On a CPU, numpy measures with one scale, unless the reference is asked for."""
    x = hard_values(33, 48)
    with mock.patch.object(host_shares, "measure", wraps=host_shares.measure) as called:
        for scales, block in ((torch.rand(33, 1, device=DEVICE), [1, 48]), (torch.rand(1, 1, device=DEVICE), [0, 0])):
            array = torch.full((2, 5), -1.0, device=DEVICE)
            assert ops.measure(x, scales, E4M3, array[0, 1], array[1, 3], block=block, backend=backend) is None
            wanted = expected(x, scales.tolist(), E4M3, tuple(block))
            assert array[0].tolist() == [-1.0, wanted[0], -1.0, -1.0, -1.0]
            assert array[1].tolist() == [-1.0, -1.0, -1.0, wanted[1], -1.0]
    assert called.call_count == (DEVICE == "cpu" and backend in ("auto", "torch"))


@pytest.mark.slow
def test_the_op_is_one_for_torch() -> None:
    array = torch.full((2, 5), -1.0, device=DEVICE)
    given = (hard_values(33, 48), torch.rand(33, 1, device=DEVICE), E4M3, array[0, 1], array[1, 3])
    torch.library.opcheck(ops.measure, given, {"block": [1, 48]})


def test_the_memory_of_a_tensor_that_was_measured_can_be_freed() -> None:
    """FSDP2 frees gathered weights by resizing their memory; torch refuses that once numpy has seen it."""
    x, places = torch.randn(16, 16), torch.full((2,), -1.0)
    host_shares.measure(x, torch.ones(1), E4M3, places[0], places[1], block=WHOLE)
    x.untyped_storage().resize_(0)
