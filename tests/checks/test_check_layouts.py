"""Ranks with different contents, or that fail to read theirs: a report, and no rank hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8dist import ConfigurationError
from fp8dist.checks.contents import Digester, NamedTensor, TensorContent
from tests.support.checked import whole_world
from tests.support.logs import captured_log
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import on_ranks


def _plain(**parameters: Tensor) -> nn.Module:
    model = nn.Module()
    for name, value in parameters.items():
        model.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return model


ones = torch.ones

DIFFERENT: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], set[str]]] = {
    "one more": (lambda: _plain(a=ones(3)), lambda: _plain(a=ones(3), b=ones(2)), {"b"}),
    "one less": (lambda: _plain(a=ones(3), b=ones(2)), lambda: _plain(a=ones(3)), {"b"}),
    "none at all": (lambda: _plain(a=ones(3)), lambda: _plain(), {"a"}),
    "another name": (lambda: _plain(a=ones(3)), lambda: _plain(b=ones(3)), {"a", "b"}),
    "another dtype": (lambda: _plain(a=ones(3)), lambda: _plain(a=ones(3, dtype=torch.bfloat16)), {"a"}),
    "another shape": (lambda: _plain(a=ones(3, 2)), lambda: _plain(a=ones(2, 3)), {"a"}),
    "another size": (lambda: _plain(a=ones(3)), lambda: _plain(a=ones(4)), {"a"}),
}


@pytest.mark.parametrize(
    ("what", "odd", "also_damaged"), [(what, 3 * (i % 2), i % 4 > 1) for i, what in enumerate(DIFFERENT)]
)
@on_ranks(4, timeout=30)
def test_a_rank_that_holds_other_tensors_is_reported(what: str, odd: int, also_damaged: bool) -> None:
    reference = 1 if odd == 0 else 0
    usual, other, different = DIFFERENT[what]
    model = (other if dist.get_rank() == odd else usual)()
    model.same = nn.Parameter(torch.full((2, 2), 5.0))
    if also_damaged and dist.get_rank() == 2:
        model.same.data[1, 0] = 6.0
    start = time.monotonic()
    with captured_log():
        report = whole_world(model)
    assert time.monotonic() - start < 5
    layout = [f for f in report.findings if f.kind == "layout"]
    assert {f.name for f in layout} == different
    assert {(f.ranks, f.reference_rank) for f in layout} == {((odd,), reference)}
    assert all(f"rank {odd}: " in f.detail and f"rank {reference}: " in f.detail for f in layout)
    rest = [(f.kind, f.name, f.ranks, f.reference_rank) for f in report.findings if f.kind != "layout"]
    assert rest == ([("parameter", "same", (2,), 0)] if also_damaged else [])
    same_on_all_ranks([(f.kind, f.name, f.ranks, f.reference_rank, f.detail) for f in report.findings])


@on_ranks(4)
def test_the_order_of_parameters_does_not_matter() -> None:
    names = ["a", "b", "c"] if dist.get_rank() else ["c", "a", "b"]
    assert whole_world(_plain(**{name: torch.full((3,), float(ord(name))) for name in names})).findings == ()


class _Raises(nn.Module):
    """A model that raises when it is inspected."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("broken property")


def _uninitialised() -> nn.Module:
    model = nn.Module()
    model.a = nn.UninitializedParameter()
    return model


BROKEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "meta": (lambda: _plain(a=torch.ones(3, device="meta")), "meta device"),
    "raises": (_Raises, "broken property"),
    "uninitialised": (_uninitialised, "ninitialized"),
}


@pytest.mark.parametrize("what", BROKEN)
@on_ranks(2)
def test_the_same_mistake_on_all_ranks_is_no_divergence(what: str) -> None:
    with captured_log() as log, pytest.raises(ConfigurationError) as caught:
        whole_world(BROKEN[what][0]())
    assert log == []
    text = str(caught.value)
    assert text.startswith("check() could not read what it compares, on any rank: ")
    assert text.count(BROKEN[what][1]) == 1  # Once for all ranks.


@pytest.mark.parametrize(("what", "odd"), [("meta", [0]), ("raises", [1, 2]), ("uninitialised", [3])])
@on_ranks(4, timeout=30)
def test_a_rank_that_cannot_build_its_part_is_reported_by_all(what: str, odd: list[int]) -> None:
    model = BROKEN[what][0]() if dist.get_rank() in odd else _plain(a=ones(3))
    start = time.monotonic()
    with captured_log():
        report = whole_world(model)
    assert time.monotonic() - start < 5
    assert not report.consistent
    assert [(f.kind, f.ranks) for f in report.findings] == [("error", (rank,)) for rank in odd]
    assert all(BROKEN[what][1] in f.detail for f in report.findings)
    same_on_all_ranks([(f.kind, f.ranks, f.detail) for f in report.findings])


@pytest.mark.parametrize("damage", [True, False])
@on_ranks(4)
def test_parameters_whose_names_differ_by_a_wrapper_are_not_mixed_up(damage: bool) -> None:
    """``module`` is a name that wrappers use, and that a model may use too."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4))
    model.module = nn.Module()
    model.module.weight = nn.Parameter(torch.ones(4))
    if dist.get_rank() == 1:
        if damage:
            model.weight.data[2] = 5.0
        else:
            model.weight, model.module.weight = model.module.weight, model.weight
    with captured_log():
        report = whole_world(model)
    assert not report.consistent
    assert {(f.kind, f.ranks, f.reference_rank) for f in report.findings} == {("parameter", (1,), 0)}


def test_a_tensor_that_cannot_be_read_is_named() -> None:
    content = TensorContent("parameter", [NamedTensor("there", torch.zeros(3, device="meta"))])
    with pytest.raises(ValueError, match=r"parameter 'there': it is on the meta device"):
        content.digests(Digester())
