"""Torch's grouped product: when it is chosen, and that torch gets the arguments that it wants, without a GPU."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fp8dist_kernels import direct, grouped_ops
from fp8dist_kernels.multipliers import torch_can_group
from fp8dist_kernels.reference import grouped_matmuls as plain
from fp8dist_kernels.reference import scaled_grouped
from fp8dist_kernels.reference.groups import cut
from fp8dist_kernels.reference.matmuls import Scaling
from fp8dist_kernels.reference.scaled_grouped import clear_tail as plain_clear
from fp8dist_kernels.reference.scaled_grouped import multiply_grouped_torch
from fp8dist_kernels.triton import version_of
from fp8dist_kernels.triton.scaled_grouped import clear_tail as fused_clear
from tests.support.devices import DEVICE, needs_gpu
from tests.support.grouped import COUNTS, WRONG, ends
from tests.support.products import E4M3, E5M2

BF16, HOPPER = torch.bfloat16, (9, 0)
KINDS = pytest.mark.parametrize("scaling", [Scaling.TENSORWISE, Scaling.ROWWISE], ids=lambda scaling: scaling.value)


class Torch:
    """Stands for ``aten::_scaled_grouped_mm_v2``, which CUDA alone has. Computes one row after another, in float64.

    The checks are those of the older op with the same kernel, whose meta function torch has.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, ...]] = []

    def __call__(
        self, a: Tensor, b: Tensor, scale_a: list[Tensor], recipe_a: list[int], swizzle_a: list[int],
        scale_b: list[Tensor], recipe_b: list[int], swizzle_b: list[int], offs: Tensor, bias: None,
        out_dtype: torch.dtype, contraction_dim: Any, use_fast_accum: bool,
    ) -> Tensor:  # fmt: skip
        row_wise = [functional.ScalingType.RowWise.value]
        assert (recipe_a, recipe_b, swizzle_a, swizzle_b, contraction_dim) == (row_wise, row_wise, [], [], ())
        (of_a,), (of_b,) = scale_a, scale_b
        on_meta = [one.to("meta") for one in (a, b, of_a, of_b, offs)]
        for one, there in zip((a, b, of_a, of_b, offs), on_meta):
            assert one.stride() == there.stride()
        meta = torch._scaled_grouped_mm(
            *on_meta[:4], offs=on_meta[4], bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum
        )
        assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
        self.calls.append((a, b, of_a, of_b, offs))
        product = torch.full(meta.shape, torch.nan, dtype=out_dtype, device=a.device)  # Uninitialised.
        start = 0
        for expert, end in enumerate(offs.tolist()):
            assert start <= end <= len(a)
            for row in range(start, end):
                sums = a[row].double() @ b[expert].double()
                product[row] = (sums * of_a[row].double() * of_b[expert].double()).to(out_dtype)
            start = end
        return product


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    monkeypatch.setattr(torch, "_scaled_grouped_mm_v2", made)
    return made


def operands(scaling: Scaling, tokens: int, groups: int, n: int = 48, k: int = 80) -> tuple[Tensor, ...]:
    """Return small integers, and power-of-two scales of every second number in memory: all sums are exact."""
    generator = torch.Generator().manual_seed(tokens)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float().to(E4M3).to(DEVICE)

    def scales(*shape: int) -> Tensor:
        made = 2.0 ** torch.randint(-3, 3, (*shape, 2), generator=generator)
        return made.to(DEVICE)[..., 0]

    a, b = integers(tokens, k), integers(groups, n, k)
    if scaling is Scaling.TENSORWISE:
        return a, b, scales(groups), scales(groups)
    return a, b, scales(tokens, 1), scales(groups, n, 1)


CASE: dict[str, Any] = {
    "capability": HOPPER,
    "dtypes": (E4M3, E4M3, BF16),
    "scaling": Scaling.TENSORWISE,
    "shape": (8, 48, 80),
    "biased": False,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"scaling": Scaling.ROWWISE}, True),
        ({"shape": (1, 16, 16)}, True),
        ({"shape": (1023, 14336, 4096)}, True),
        ({"scaling": Scaling.BLOCKWISE}, False),
        ({"scaling": Scaling.BLOCKWISE_1D}, False),
        ({"biased": True}, False),
        ({"dtypes": (E5M2, E4M3, BF16)}, False),
        ({"dtypes": (E4M3, E5M2, BF16)}, False),
        ({"dtypes": (E4M3, E4M3, torch.float32)}, False),
        ({"dtypes": (E4M3, E4M3, torch.float16)}, False),
        ({"shape": (8, 40, 80)}, False),
        ({"shape": (8, 48, 88)}, False),
        ({"shape": (8, 0, 80)}, False),
        ({"shape": (8, 48, 0)}, False),
        ({"shape": (1024, 48, 80)}, False),
        ({"capability": None}, False),
        ({"capability": (8, 9)}, False),
        ({"capability": (10, 0)}, False),
        ({"capability": (12, 0)}, False),
    ],
    ids=str,
)
def test_when_torch_can(change: dict[str, Any], expected: bool) -> None:
    assert torch_can_group(**{**CASE, **change}) is expected


@KINDS
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_torch_gets_rows_with_a_scale_each(scaling: Scaling, counts: tuple[int, ...], stand_in: Torch) -> None:
    given, offsets = operands(scaling, sum(counts) + 3, len(counts)), ends(counts)
    given[0][sum(counts) :] = torch.nan
    got = multiply_grouped_torch(scaling, *given, offsets, True, plain_clear)
    assert torch.equal(got, plain.matmul_grouped(*given, offsets, BF16, True))
    ((_, b, of_a, of_b, _),) = stand_in.calls
    assert b.stride()[1:] == (1, b.shape[1])
    assert (of_a.shape, of_b.shape) == ((len(got),), (len(counts), 48))


@KINDS
def test_odd_addresses_and_no_rows(scaling: Scaling, stand_in: Torch) -> None:
    given, offsets = operands(scaling, 9, 2), ends((4, 5))
    shifted = [torch.cat([one.view(torch.uint8).flatten()[:1], one.view(torch.uint8).flatten()]) for one in given[:2]]
    moved = [one[1:].view(E4M3).view(like.shape) for one, like in zip(shifted, given)]
    assert all(one.data_ptr() % 16 for one in moved)
    expected = plain.matmul_grouped(*given, offsets, BF16, True)
    assert torch.equal(multiply_grouped_torch(scaling, *moved, *given[2:], offsets, False, plain_clear), expected)
    nothing = operands(scaling, 0, 2)
    assert multiply_grouped_torch(scaling, *nothing, ends((0, 0)), True, plain_clear).shape == (0, 48)
    assert len(stand_in.calls) == 1


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_offsets_are_cut(wrong: tuple[int, ...], stand_in: Torch) -> None:
    given, offsets = operands(Scaling.TENSORWISE, 50, 3), torch.tensor(wrong, dtype=torch.int32, device=DEVICE)
    expected = plain.matmul_grouped(*given, cut(offsets, 50), BF16, True)
    assert torch.equal(multiply_grouped_torch(Scaling.TENSORWISE, *given, offsets, True, fused_clear), expected)


def test_which_backend_and_product_call_torch(stand_in: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of E4M3 do, with "auto" and "torch" on Hopper. Columns of a wgrad never do."""
    monkeypatch.setattr(grouped_ops, "nvidia_capability", lambda device: HOPPER)
    offsets, (a, b, *scales) = ends((4, 0, 5)), operands(Scaling.TENSORWISE, 9, 3)
    how: dict[str, Any] = {"fast_accumulation": True}
    expected = plain.matmul_grouped(a, b, *scales, offsets, BF16, True)
    for backend, calls in (("auto", 1), ("torch", 2), ("reference", 2), ("triton", 2)):
        made = len(stand_in.calls)
        got = direct.matmul_grouped(a, b, *scales, offsets, BF16, backend=backend, **how)
        assert torch.equal(got, expected)
        of_torch = len(stand_in.calls) > made
        name = grouped_ops.multiplier_name((E4M3, E4M3, BF16), Scaling.TENSORWISE, b.shape, False, backend, DEVICE)
        assert (name == "torch.scaled_grouped_mm") is of_torch
        assert len(stand_in.calls) == calls, backend
    assert version_of(scaled_grouped).clear_tail is fused_clear
    bias = torch.ones(3, 48, device=DEVICE)
    direct.matmul_grouped(a, b, *scales, offsets, BF16, bias=bias, **how)
    direct.matmul_grouped(a, b, *scales, offsets, torch.float32, **how)
    wide = a.new_zeros(48, 64)
    direct.matmul_grouped_columns(wide, wide, *scales, offsets, BF16, **how)
    assert len(stand_in.calls) == 2


@pytest.mark.parametrize("tokens", [1, 8, 21])
@pytest.mark.parametrize("n", [16, 528])
def test_the_tail_is_cleared(tokens: int, n: int) -> None:
    for end in {0, 1, tokens // 2, tokens}:
        made = []
        for clear in (plain_clear, fused_clear):
            product = torch.full((tokens, n), torch.nan, dtype=BF16, device=DEVICE)
            clear(product, ends((end, 0)))
            made.append(product.isnan())
            assert not product[end:].any()
        assert torch.equal(*made)
        assert made[0][:end].all()


def test_the_device_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without memory, any read raises."""

    def product(a: Tensor, b: Tensor, *_: Any) -> Tensor:
        return a.new_empty((a.shape[0], b.shape[2]), dtype=BF16)

    monkeypatch.setattr(torch, "_scaled_grouped_mm_v2", product)
    for scaling in (Scaling.TENSORWISE, Scaling.ROWWISE):
        given = [one.to("meta") for one in operands(scaling, 9, 2)]
        made = multiply_grouped_torch(scaling, *given, ends((4, 5)).to("meta"), True, plain_clear)
        assert made.shape == (9, 48)


def test_torch_has_the_arguments() -> None:
    """The stand-in replaces what torch's function calls."""
    source = inspect.getsource(functional.scaled_grouped_mm)
    assert "torch._scaled_grouped_mm_v2(" in source
    names = [one.name for one in torch.ops.aten._scaled_grouped_mm_v2.default._schema.arguments]
    assert names == [
        "self", "mat2", "scale_a", "recipe_a", "swizzle_a", "scale_b", "recipe_b", "swizzle_b", "offs", "bias",
        "out_dtype", "contraction_dim", "use_fast_accum",
    ]  # fmt: skip


@needs_gpu
@KINDS
def test_on_a_gpu(scaling: Scaling) -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("torch has this product on Hopper only")
    for counts in COUNTS:
        given, offsets = operands(scaling, sum(counts) + 3, len(counts)), ends(counts)
        expected = plain.matmul_grouped(*given, offsets, BF16, True)
        for fast in (True, False):
            assert torch.equal(multiply_grouped_torch(scaling, *given, offsets, fast, fused_clear), expected)
