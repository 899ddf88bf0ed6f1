"""A backward in two halves, as pipelines without bubbles run it: inputs first, weights later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import fp8dist
from fp8dist import DelayedScaling, NVFP4Scaling
from fp8dist_kernels import direct
from tests.support.experts import Experts, Mixture, routes
from tests.support.training import bits, gradient_bits, state_bits

COUNTED = ("quantize", "matmul", "quantize_grouped", "matmul_grouped", "matmul_grouped_columns")


def _dense() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32, bias=False))
    return model, (torch.randn(16, 32).requires_grad_(),)


def _experts() -> tuple[nn.Module, tuple[Tensor, ...]]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return Mixture(Experts()), (x, *routes(16, 2, (0, 1, 3), seed=1))


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count products, and the copies that casts of two dims make."""
    spies = {name: mock.Mock(wraps=getattr(direct, name)) for name in COUNTED}
    counter: Counter[str] = Counter()
    with mock.patch.multiple(direct, **spies):
        yield counter
    for name, spy in spies.items():
        counter[name] = sum(
            call.kwargs["rows"] + call.kwargs["columns"] if "quantize" in name else 1 for call in spy.mock_calls
        )


def _trained(made: tuple[nn.Module, tuple[Tensor, ...]], split: bool, recipe: Any) -> tuple[Any, ...]:
    """Run three steps. Return all results, and what the last backward computed."""
    model, inputs = made
    manager = fp8dist.prepare(model, recipe)
    manager.attach(model)
    x, seen = inputs[0], []
    for step in range(3):
        model.zero_grad()
        x.grad = None
        output = model(*inputs)
        gradient = torch.full_like(output, 1e-2 * (step + 1))
        with _counted() as counter:
            if split:
                (x.grad, *_), groups = stage_backward_input([output], [gradient], [x], model.parameters())
                assert all(parameter.grad is None for parameter in model.parameters())
                stage_backward_weight(model.parameters(), groups)
            else:
                output.backward(gradient)
        assert x.grad is not None
        seen.append((bits(output), bits(x.grad), gradient_bits(model)))
        manager.step()
    return seen, state_bits(manager), counter


@pytest.mark.parametrize(
    ("made", "recipe"),
    [(_dense, DelayedScaling(history_len=4)), (_experts, DelayedScaling(history_len=4)), (_dense, NVFP4Scaling())],
    ids=["linears", "experts", "nvfp4"],
)
def test_each_half_computes_its_own_gradients(made: Any, recipe: Any) -> None:
    """Same bits and state as in one backward, each product once, no copy of a cast twice."""
    (seen, state, whole), (split_seen, split_state, halves) = (_trained(made(), on, recipe) for on in (False, True))
    assert split_seen == seen
    assert split_state == state
    assert whole.total() > 0
    assert halves == whole
