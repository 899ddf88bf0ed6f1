"""Faulty devices, and training with audits."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fp8dist
from fp8dist.checks.contents import Digester
from fp8dist.checks.works import Work, digest_of, repeat_work, work_of_call
from fp8dist_kernels import grouped_ops, ops

LIMITS = (1 << 26, 1 << 15, 1)
"""Whole, in blocks, in the smallest blocks."""


class Heard:
    """A prepared model whose casts and products are all taken down, and repeated at once.

    ``spoils``: also that a wrong bit in one result gives another digest.
    """

    spoils = True

    def __init__(self, model: nn.Module, recipe: Any = None, limits: tuple[int, ...] = LIMITS, **options: Any) -> None:
        self.model = model
        self.manager = fp8dist.prepare(model, recipe, audit_every=1, check_policy="raise", **options)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.manager.attach(model, optimizer=self.optimizer)
        self.digester, self.limits = Digester(), limits
        self.sites: list[int] = []
        self.ops: set[str] = set()
        self.works: list[Work] = []
        self.wrong: list[str] = []
        self.shares: Counter[bool] = Counter()
        tap = self.manager._job.tap
        self._own, tap.listener = tap.listener, self.hear  # type: ignore[union-attr]

    def hear(self, op: str, site: int, args: Any, options: Any, results: Any) -> None:
        self.sites.append(site)
        self.ops.add(op)
        for limit in self.limits:
            work = work_of_call(op, site, args, options, results, limit, len(self.sites), self.digester)
            if work is None:
                assert 0 in args[0].shape
                continue
            self.works.append(work)
            self.shares[work.share < 1] += 1
            repeated = repeat_work(work.message)
            if not torch.equal(digest_of(repeated, self.digester), work.digest):
                self.wrong.append(f"{work.what}, share {work.share}")
            for name, result in repeated.items() if self.spoils else ():
                places = (~result.float().isnan()).contiguous().view(-1).nonzero().view(-1).tolist()
                if not places:
                    continue  # All NaNs count as equal.
                spoiled = {**repeated, name: result.clone().contiguous()}
                flip(spoiled[name], random.Random(name).choice(places))
                if torch.equal(digest_of(spoiled, self.digester), work.digest):
                    self.wrong.append(f"{work.what}, share {work.share}: a wrong bit in {name} is not seen")
        self._own(op, site, args, options, results)

    def step(self, *inputs: Tensor, calls: int = 1) -> None:
        for x in inputs:
            sum(self.model(x).square().mean() for _ in range(calls)).backward()  # type: ignore[union-attr]
        self.optimizer.step()
        self.optimizer.zero_grad()


RECIPES = {
    "delayed": fp8dist.DelayedScaling(history_len=4),
    "unit": fp8dist.DelayedScaling(warmup="unit", power_of_two=True),
    "current": fp8dist.CurrentScaling(power_of_two=True),
    "row": fp8dist.RowwiseScaling(power_of_two=True),
    "block": fp8dist.BlockScaling(),
}


def flip(tensor: Tensor, place: int) -> None:
    """Change one bit of one element."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    flat[place % tensor.numel() * tensor.element_size()] ^= 1 << 3


@contextlib.contextmanager
def bad_products(steady: bool = True) -> Iterator[None]:
    """A device whose products have a wrong bit, repeated ones included. ``steady``: always in the same element; False:
    in any."""
    chance, original = random.Random(0), ops._product

    def product(*args: Any, **options: Any) -> Tensor:
        result = original(*args, **options)
        if result.numel():
            flip(result, 5 if steady else chance.randrange(result.numel()))
        return result

    with mock.patch.object(ops, "_product", product):
        yield


def bad_casts() -> contextlib.AbstractContextManager[None]:
    """A device whose casts have a wrong bit."""
    names = ("quantize", "quantize_rowwise", "quantize_blocks", "quantize_grouped", "quantize_grouped_lines")
    return _spoiled(ops, names)


def bad_grouped_products(place: int = 5) -> contextlib.AbstractContextManager[None]:
    """A device whose grouped products have a wrong bit in one element."""
    return _spoiled(grouped_ops, ("matmul_grouped", "matmul_grouped_columns"), place)


@contextlib.contextmanager
def _spoiled(module: Any, names: tuple[str, ...], place: int = 7) -> Iterator[None]:
    """Flip a bit of the first result of each of these functions, which ``module`` gets from a backend."""
    original = module.version_of_backend

    def version(backend: str, device: torch.device, of: Any) -> Any:
        real = original(backend, device, of)

        def spoiled(name: str) -> Any:
            def compute(*args: Any, **options: Any) -> Any:
                results = getattr(real, name)(*args, **options)
                every = results if isinstance(results, tuple) else (results,)
                flip(next(result for result in every if result.numel()), place)
                return results

            return compute

        return mock.Mock(wraps=real, **{name: spoiled(name) for name in names if hasattr(real, name)})

    with mock.patch.object(module, "version_of_backend", version):
        yield
