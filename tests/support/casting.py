"""Helpers for tests of casts: difficult values, strides of all kinds, poisoned memory, reference FP8 rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tests.support.devices import DEVICE
from tests.support.fp8_oracle import E4M3, E5M2

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
FORMAT_OF = MappingProxyType(dict(zip(FORMATS, (E4M3, E5M2))))
"""The oracle's formats."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

NONFINITE = (math.nan, math.inf, -math.inf)
SPECIAL = (-0.0, 0.0, 1e-7, -1e-7, 6e4, -6e4, 448.0, 464.0, 465.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10)


def hard_values(tokens: int, features: int, seed: int = 0, finite: bool = False) -> Tensor:
    """Return float32 [tokens, features]: magnitudes from far below to far above FP8's range, with special values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, features, generator=generator) * torch.exp2(
        torch.randint(-24, 12, (tokens, features), generator=generator).float()
    )
    special = SPECIAL if finite else NONFINITE + SPECIAL
    places = torch.randperm(x.numel(), generator=generator)[: max(1, x.numel() // 16)].tolist()
    for index, place in enumerate(places):
        x.view(-1)[place] = special[index % len(special)]
    if not finite and places:
        x.view(torch.int32).view(-1)[places[-1]] = -1  # A negative NaN.
    return x.to(DEVICE)


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def _every_second(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)[:, ::2]


def _padded(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (16, 16))[:, 16:-16]


def _shifted(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (3, 2))[:, 3:-2]


def _transposed_padded(x: Tensor) -> Tensor:
    return _padded(x.t()).t()


def _one_for_all(x: Tensor) -> Tensor:
    return torch.full((), 3.7, dtype=x.dtype, device=x.device).expand(x.shape)


def _one_for_each_row(x: Tensor) -> Tensor:
    return x[:, :1].expand(x.shape)


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "contiguous": Tensor.contiguous,
        "transposed": _transposed,
        "every second": _every_second,
        "padded": _padded,
        "shifted": _shifted,
        "transposed, padded": _transposed_padded,
        "one for all": _one_for_all,
        "one for each row": _one_for_each_row,
    }
)


def codes(fp8: Tensor) -> Tensor:
    """Return the bytes, with all NaN alike: compiled code has one NaN, but the interpreter and torch keep signs."""
    if fp8.dtype.itemsize > 1:
        return torch.where(fp8.isnan(), 0x7FC00000, fp8.float().view(torch.int32))
    return torch.where(fp8.float().isnan(), 0xFF, fp8.view(torch.uint8).int())


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Compare bitwise, except for the kind of NaN; shapes, dtypes and strides too."""
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), index
        if a.numel() > max(a.shape, default=1):  # Strides mean nothing for other shapes.
            assert a.stride() == b.stride(), index
        if not torch.equal(codes(a), codes(b)):
            place = (codes(a) != codes(b)).nonzero()[0].tolist()
            raise AssertionError(f"output {index} differs at {place}: {a[tuple(place)]} for {b[tuple(place)]}")


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN or -1, so that elements that are never written show."""
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def filled(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            tensor.untyped_storage().fill_(0xFF)
            return tensor

        return filled

    monkeypatch.setattr(torch, "empty", poisoned(empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(empty_like))


def rounded(values: Any, dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """Round numbers to FP8: to nearest, ties to even codes, saturating; Inf and NaN become NaN."""
    x, format = np.asarray(values, dtype=np.float64), FORMAT_OF[dtype]
    finite = np.isfinite(x)
    return np.where(finite, format.decoded(format.encode(np.where(finite, x, 0.0))), np.nan)
