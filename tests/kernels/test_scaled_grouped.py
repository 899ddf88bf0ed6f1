"""Torch's grouped product: when it is chosen, and that torch gets the arguments that it wants, without a GPU."""

from __future__ import annotations

import inspect
import itertools
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
from tests.kernels.test_grouped_matmuls import BEYOND, Case
from tests.support.devices import DEVICE, needs_gpu
from tests.support.grouped import COUNTS, WRONG
from tests.support.products import E4M3, E5M2

BF16, HOPPER = torch.bfloat16, (9, 0)
KINDS = pytest.mark.parametrize("scaling", [Scaling.TENSORWISE, Scaling.ROWWISE], ids=lambda scaling: scaling.value)


class Torch:
    """Stands for ``aten::_scaled_grouped_mm_v2``, which CUDA alone has. Computes in float64.

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
            rows, start = slice(start, end), end
            sums = a[rows].double() @ b[expert].double()
            product[rows] = (sums * of_a[rows, None].double() * of_b[expert].double()).to(out_dtype)
        return product


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    monkeypatch.setattr(torch, "_scaled_grouped_mm_v2", made)
    return made


def multiply(case: Case, clear: Any = fused_clear, fast: bool = True) -> Tensor:
    """Return torch's product. Of the scales, every second number in memory is one."""
    scales = (scale.repeat_interleave(2, 0)[::2] for scale in case.scales)
    return multiply_grouped_torch(case.scaling, case.a, case.b, *scales, case.offsets, fast, clear)


def wanted(case: Case) -> Tensor:
    return case.rows(plain, BF16, bias=False)


def test_when_torch_can() -> None:
    case = {"capability": HOPPER, "dtypes": (E4M3, E4M3, BF16), "scaling": Scaling.TENSORWISE, "shape": (8, 48, 80)}
    can = ({}, {"scaling": Scaling.ROWWISE}, {"shape": (1, 16, 16)}, {"shape": (1023, 14336, 4096)})
    cannot = (
        *({"scaling": scaling} for scaling in (Scaling.BLOCKWISE, Scaling.BLOCKWISE_1D, Scaling.MX)),
        *({"dtypes": dtypes} for dtypes in ((E5M2, E4M3, BF16), (E4M3, E5M2, BF16))),
        *({"dtypes": (E4M3, E4M3, out)} for out in (torch.float32, torch.float16)),
        *({"shape": shape} for shape in ((8, 40, 80), (8, 48, 88), (8, 0, 80), (8, 48, 0), (1024, 48, 80))),
        *({"capability": capability} for capability in (None, (8, 9), (10, 0), (12, 0))),
        {"biased": True},
    )
    for expected, changes in ((True, can), (False, cannot)):
        for change in changes:
            assert torch_can_group(**{**case, "biased": False, **change}) is expected, change


@KINDS
def test_torch_gets_rows_with_a_scale_each(scaling: Scaling, stand_in: Torch) -> None:
    """And rows of no expert are set to 0."""
    for counts, n, clear in zip(COUNTS, (48, 528) * 3, (plain_clear, *[fused_clear] * 5)):
        case = Case(counts, scaling, n=n, k=80)
        got = multiply(case, clear)
        assert torch.equal(got, wanted(case))
        _, b, of_a, of_b, _ = stand_in.calls[-1]
        assert b.stride()[1:] == (1, b.shape[1])
        assert (of_a.shape, of_b.shape) == ((len(got),), (len(counts), n))


@KINDS
def test_odd_addresses_wrong_offsets_and_no_rows(scaling: Scaling, stand_in: Torch) -> None:
    case = Case((4, 5), scaling, n=48, k=80)
    expected, given = wanted(case), (case.a, case.b)
    shifted = [torch.cat([one.view(torch.uint8).flatten()[:1], one.view(torch.uint8).flatten()])[1:] for one in given]
    case.a, case.b = (one.view(E4M3).view(like.shape) for one, like in zip(shifted, given))
    assert all(one.data_ptr() % 16 for one in (case.a, case.b))
    assert torch.equal(multiply(case, plain_clear, fast=False), expected)
    for given_offsets in WRONG:  # They are cut.
        offsets = torch.tensor(given_offsets, dtype=torch.int32, device=DEVICE)
        case = Case((16, 16, 18 - BEYOND), scaling, n=48, k=80, offsets=cut(offsets, 50))
        expected, case.offsets = wanted(case), offsets
        assert torch.equal(multiply(case), expected)
    calls, case.a = len(stand_in.calls), case.a[:0]
    assert multiply(case).shape == (0, 48)
    assert len(stand_in.calls) == calls


def test_which_backend_and_product_call_torch(stand_in: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of E4M3 do, with "auto" and "torch" on Hopper. Columns of a wgrad never do."""
    monkeypatch.setattr(grouped_ops, "nvidia_capability", lambda device: HOPPER)
    case, how = Case((4, 0, 5), Scaling.TENSORWISE, n=48, k=80), {"fast_accumulation": True}
    a, b, scales, offsets = case.a, case.b, case.scales, case.offsets
    for backend, calls in (("auto", 1), ("torch", 2), ("reference", 2), ("triton", 2)):
        made = len(stand_in.calls)
        got = direct.matmul_grouped(a, b, *scales, offsets, BF16, backend=backend, **how)
        assert torch.equal(got, wanted(case))
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
    for counts, fast in itertools.product(COUNTS, (True, False)):
        case = Case(counts, scaling, n=48, k=80)
        assert torch.equal(multiply(case, fast=fast), wanted(case))
