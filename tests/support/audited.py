"""Faulty devices, and training with audits."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fp8dist_kernels import ops

__all__ = ["bad_casts", "bad_products", "flip"]


def flip(tensor: Tensor, place: int, bit: int = 3) -> None:
    """Change one bit of one element."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    flat[place % tensor.numel() * tensor.element_size()] ^= 1 << bit


@contextlib.contextmanager
def bad_products(share: float = 1.0, seed: int = 0, steady: bool = True) -> Iterator[list[int]]:
    """A device whose products have a wrong bit: each of this share of them, repeated ones included.

    Args:
        steady: always the same element. False: any.

    Yields:
        a list with one number, that of the wrong products so far.
    """
    chance, original, count = random.Random(seed), ops._product, [0]

    def product(*args: Any, **options: Any) -> Tensor:
        result = original(*args, **options)
        if result.numel() and chance.random() < share:
            flip(result, 5 if steady else chance.randrange(result.numel()))
            count[0] += 1
        return result

    with mock.patch.object(ops, "_product", product):
        yield count


@contextlib.contextmanager
def bad_casts() -> Iterator[None]:
    """A device whose casts have a wrong bit."""
    original = ops.version_of_backend

    def version(backend: str, device: torch.device, of: Any) -> Any:
        real = original(backend, device, of)
        names = [name for name in ("quantize", "quantize_rowwise", "quantize_blocks") if hasattr(real, name)]

        def spoiled(name: str) -> Any:
            def cast(*args: Any, **options: Any) -> Any:
                results = getattr(real, name)(*args, **options)
                flip(next(result for result in results if result.numel()), 7)
                return results

            return cast

        return mock.Mock(wraps=real, **{name: spoiled(name) for name in names})

    with mock.patch.object(ops, "version_of_backend", version):
        yield
