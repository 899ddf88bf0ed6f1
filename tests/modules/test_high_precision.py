"""Single GEMMs in high precision: they equal nn.Linear's bit for bit, and the other GEMMs stay as in FP8."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
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
    by = (False, True) if case is CASES["float32"] else (False,)
    for high, by_call in itertools.product(SUBSETS, by):
        got = run(prepared(case, kind, high, by_call), case)
        assert got.products == sum(gemm not in high and not (gemm == "wgrad" and case.frozen) for gemm in GEMMS), high
        assert same(got.y, plain.y if "fprop" in high else fp8.y), high
        assert same(got.dx, plain.dx if "dgrad" in high else fp8.dx), high
        assert same(got.dw, plain.dw if "wgrad" in high else fp8.dw), high
        assert same(got.db, plain.db if len(high) == len(GEMMS) else fp8.db), high  # Each adds in its own order.
        for mine, theirs in zip(got[:4], plain[:4]):
            assert (mine is None) == (theirs is None), high
            assert mine is None or (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), high


def test_what_a_gemm_in_high_precision_does_not_need_is_not_cast() -> None:
    """Each tensor gets exactly the copies (plain, transposed) that its FP8 products multiply. Slots of tensors without
    a copy stay cold; the others have the amaxes that they have without the option."""
    users = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
    sizes = {(21, 144): "input", (48, 144): "weight", (21, 48): "grad_output"}
    amaxes = {}
    for high, kind in (*zip(SUBSETS, itertools.cycle(KINDS)), *((of, KINDS[0]) for of in SUBSETS)):
        linear, seen = make(Case()), {}
        manager = fp8dist.prepare(linear, kind(high_precision=high))
        caster = linear.fp8_slots.caster
        original = caster.cast

        def casting(x: Tensor, request: Request, original: Any = original, seen: Any = seen) -> Cast:
            cast = original(x, request)
            seen[sizes[tuple(x.shape)]] = (cast.rows.numel() > 0, cast.columns.numel() > 0)
            return cast

        caster.cast = casting
        run(linear, Case())
        copies = {role: tuple(gemm not in high for gemm in gemms) for role, gemms in users.items()}
        assert seen == ({} if len(high) == 3 else copies)
        if kind is DelayedScaling:
            manager.step()
            for role in users:
                amax = float(manager.slot("", role).amax)
                assert amax == (amaxes.setdefault(role, amax) if any(copies[role]) else 0), (high, role)
    assert all(amaxes.values())
