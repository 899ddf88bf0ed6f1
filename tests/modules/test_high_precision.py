"""Single GEMMs in high precision: they equal nn.Linear's bit for bit, and the other GEMMs stay as in FP8."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from fp8dist.modules.casters import Cast, Request
from fp8dist.state.recipe import GEMMS, Gemm
from tests.support.gemms import Gemms
from tests.support.training import bits

KINDS = (DelayedScaling, CurrentScaling, RowwiseScaling, BlockScaling)
SUBSETS = [subset for size in range(4) for subset in itertools.combinations(GEMMS, size)]


class Case(NamedTuple):
    """Dtypes of input and weight; autocast to bf16; a bias; a trainable weight."""

    input: torch.dtype = torch.float32
    weight: torch.dtype = torch.float32
    autocast: bool = False
    bias: bool = True
    frozen: bool = False


CASES = {
    "float32": Case(),
    "no bias": Case(bias=False),
    "bf16": Case(torch.bfloat16, torch.bfloat16),
    "bf16, no bias": Case(torch.bfloat16, torch.bfloat16, bias=False),
    "autocast": Case(autocast=True),
    "autocast, bf16 weight": Case(weight=torch.bfloat16, autocast=True),
    "frozen": Case(frozen=True),
    "frozen, autocast, no bias": Case(autocast=True, bias=False, frozen=True),
}


class Result(NamedTuple):
    """Results of a forward and a backward, and the number of FP8 products."""

    y: Tensor
    dx: Tensor
    dw: Tensor | None
    db: Tensor | None
    products: int


def make(case: Case) -> nn.Linear:
    torch.manual_seed(3)
    linear = nn.Linear(144, 48, bias=case.bias).to(case.weight)
    linear.weight.requires_grad_(not case.frozen)
    return linear


def run(linear: nn.Linear, case: Case) -> Result:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(3, 7, 144, generator=generator).to(case.input).requires_grad_()
    with Gemms() as gemms:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            y = linear(x)
        y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    assert x.grad is not None
    return Result(y.detach(), x.grad, linear.weight.grad, linear.bias.grad if case.bias else None, len(gemms.seen))


def prepared(case: Case, kind: Callable[..., Recipe], high: Sequence[Gemm] = (), by_call: bool = False) -> nn.Linear:
    """Return a Linear with these GEMMs in high precision: by its recipe, or by a call of ``set_precision``."""
    linear = make(case)
    manager = fp8dist.prepare(linear, kind(high_precision=() if by_call else high))
    if by_call and high:
        manager.set_precision("*", "high", gemms=tuple(high))
    return linear


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, DelayedScaling) for case in CASES.values()),
        *((CASES[name], kind) for name in ("float32", "autocast") for kind in KINDS[1:]),
    ],
)
def test_what_is_named_is_as_nn_linear_has_it_and_the_rest_in_fp8(case: Case, kind: Any) -> None:
    plain, fp8 = run(make(case), case), run(prepared(case, kind), case)
    assert plain.products == 0
    assert fp8.products == 3 - case.frozen
    assert not same(plain.y, fp8.y)
    assert not same(plain.dx, fp8.dx)
    if case.bias:
        assert fp8.db is not None
        assert plain.db is not None
        exact = case.input == torch.float32 and not case.autocast
        torch.testing.assert_close(fp8.db, plain.db, rtol=1e-5 if exact else 2e-2, atol=1e-5 if exact else 2e-2)
    for high, by_call in itertools.product(SUBSETS, (False, True)):
        got = run(prepared(case, kind, high, by_call), case)
        assert got.products == sum(gemm not in high and not (gemm == "wgrad" and case.frozen) for gemm in GEMMS), high
        assert same(got.y, plain.y if "fprop" in high else fp8.y), high
        assert same(got.dx, plain.dx if "dgrad" in high else fp8.dx), high
        assert same(got.dw, plain.dw if "wgrad" in high else fp8.dw), high
        assert same(got.db, plain.db if len(high) == len(GEMMS) else fp8.db), high  # Each adds in its own order.
        for mine, theirs in zip(got[:4], plain[:4]):
            assert (mine is None) == (theirs is None), high
            assert mine is None or (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), high


def test_the_formulas() -> None:
    """Does not use nn.Linear's autograd: y = x Wᵀ + b, dx = dy W, dW = dyᵀ x."""
    for kind in KINDS:
        linear = prepared(Case(), kind, GEMMS)
        x, dy = torch.randn(7, 144).requires_grad_(), torch.randn(7, 48)
        y = linear(x)
        y.backward(dy)
        assert same(y, F.linear(x, linear.weight, linear.bias))
        assert same(x.grad, dy @ linear.weight)
        assert same(linear.weight.grad, dy.t() @ x)


def copies_that_are_cast(linear: nn.Linear) -> dict[str, tuple[bool, bool]]:
    """Return, per tensor of a forward and a backward, (plain copy is cast, transposed copy is cast)."""
    caster, seen = linear.fp8_slots.caster, {}
    original = caster.cast

    def casting(x: Tensor, request: Request) -> Cast:
        role = {(21, 144): "input", (48, 144): "weight", (21, 48): "grad_output"}[tuple(x.shape)]
        cast = original(x, request)
        seen[role] = (cast.rows.numel() > 0, cast.columns.numel() > 0)
        return cast

    caster.cast = casting  # type: ignore[method-assign]
    run(linear, Case())
    return seen


def test_what_a_gemm_in_high_precision_does_not_need_is_not_cast() -> None:
    """Each tensor gets exactly the copies that its FP8 products multiply."""
    for high, kind in (*zip(SUBSETS, itertools.cycle(KINDS)), *((("fprop",), kind) for kind in KINDS)):
        linear = prepared(Case(), kind, high)
        wanted = {
            "input": ("fprop" not in high, "wgrad" not in high),
            "weight": ("fprop" not in high, "dgrad" not in high),
            "grad_output": ("dgrad" not in high, "wgrad" not in high),
        }
        seen = copies_that_are_cast(linear)
        if len(high) == 3:
            assert not seen
        else:
            assert seen == wanted


def test_training_with_delayed_scales_needs_only_what_is_cast() -> None:
    """Slots whose tensor is in no FP8 product stay cold; other slots have the same scales as without the option."""
    for high in SUBSETS:
        linears = {subset: make(Case()) for subset in ((), high)}
        managers = {
            subset: fp8dist.prepare(linear, DelayedScaling(high_precision=subset)) for subset, linear in linears.items()
        }
        for subset, linear in linears.items():
            run(linear, Case())
            managers[subset].step()
        users = {"input": {"fprop", "wgrad"}, "weight": {"fprop", "dgrad"}, "grad_output": {"dgrad", "wgrad"}}
        for role, gemms in users.items():
            in_fp8 = not gemms <= set(high)
            assert float(managers[high].slot("", role).amax) == (
                float(managers[()].slot("", role).amax) if in_fp8 else 0
            ), role
