"""The shares on a CPU: host_shares against its twin reference/shares.py, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from fp8dist_kernels import host_shares, ops
from fp8dist_kernels.reference import shares

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[:, ::2],
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "float64": lambda x: x.double(),
}


def both(x: Tensor, inv_scale: float, dtype: torch.dtype) -> list[list[int]]:
    found = []
    for version in (host_shares, shares):
        places = torch.full((2,), -1.0)
        version.measure(x, torch.tensor([inv_scale]), dtype, places[0], places[1], block=(0, 0))
        found.append(places.view(torch.int32).tolist())
    return found


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_bits_are_the_twins(dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_shares, "PIECE", 37)
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(24, 26, generator=generator) * 10.0 ** torch.randint(-8, 6, (24, 26), generator=generator)
    values[0, :6] = torch.tensor([0.0, -0.0, torch.nan, -torch.nan, torch.inf, -torch.inf])
    for exponent in (-149, -130, -20, 0, 30, 118, 127):
        host, reference = both(LAYOUTS[layout](values), 2.0**exponent, dtype)
        assert host == reference, exponent


@pytest.mark.parametrize("inv_scale", [torch.nan, torch.inf, 0.0])
def test_limits_that_are_not_numbers(inv_scale: float) -> None:
    values = torch.tensor([[0.0, 1.0, -1e30, torch.nan, torch.inf]])
    host, reference = both(values, inv_scale, E4M3)
    assert host == reference


def test_limits_themselves_and_their_neighbours() -> None:
    most, least = (torch.tensor(limit, dtype=torch.float32) for limit in shares.limits(E4M3))
    around = [torch.nextafter(x, torch.tensor(to)) for x in (most, least) for to in (0.0, torch.inf)]
    host, reference = both(torch.stack([most, least, *around])[None], 1.0, E4M3)
    assert host == reference


def test_the_op_calls_it_for_one_scale_on_a_cpu() -> None:
    place = torch.full((2,), -1.0)
    with mock.patch.object(host_shares, "measure", wraps=host_shares.measure) as called:
        for block, scales in (([0, 0], torch.ones(1)), ([1, 4], torch.ones(2, 1))):
            ops.measure(torch.ones(2, 4), scales, E4M3, place[0], place[1], block=block, backend="auto")
    assert called.call_count == 1


def test_the_memory_of_a_tensor_that_was_measured_can_be_freed() -> None:
    """FSDP2 frees gathered weights by resizing their memory; torch refuses that once numpy has seen it."""
    x, places = torch.randn(16, 16), torch.full((2,), -1.0)
    host_shares.measure(x, torch.ones(1), E4M3, places[0], places[1], block=(0, 0))
    x.untyped_storage().resize_(0)
