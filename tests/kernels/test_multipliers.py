"""The table of what torch does not multiply: each row against libtorch's refusals, and the way that a product takes."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch

from fp8dist_kernels import ops
from fp8dist_kernels.multipliers import ROWS, Detour, Machine, Product, ProductError, machine_of, reads_sideways, row_of
from fp8dist_kernels.reference import casts, torch_matmuls
from fp8dist_kernels.reference.matmuls import FLOAT32_SCALINGS, Scaling, multiply_reference, scaling_of
from fp8dist_kernels.reference.torch_matmuls import multiply_directly, multiply_torch
from fp8dist_kernels.triton.matmuls import multiply as multiply_triton
from tests.support.libtorch import CUBLAS, Stand
from tests.support.products import E4M3, E5M2, PAIRS, random_numbers, small_integers

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
HOPPER, ADA, B200, RTX = (9, 0), (8, 9), (10, 0), (12, 0)
NEW, OLD = (13, 0), (12, 8)
V211, V213, V214, LATER = (2, 11), (2, 13), (2, 14), (2, 15)
MACHINES = [
    Machine(*each)
    for each in (
        *((HOPPER, cuda, V211) for cuda in (NEW, (12, 9), OLD)),
        *((capability, NEW, V211) for capability in (ADA, B200, RTX)),
        (B200, OLD, V214),
        *((capability, OLD, LATER) for capability in (HOPPER, ADA, B200)),
    )
]
TOKENS = (1, 7, 8, 9, 16, 100)
ROUNDINGS = 2.0**-21
"""Of a float32 result, relative to the sum of the magnitudes: a few roundings, in another order."""


def _case(
    kind: str, sizes: tuple[int, int, int], capability: tuple[int, int], words: str, *, b: torch.dtype = E4M3,
    out: torch.dtype = BF16, bias: torch.dtype | None = None, cuda: tuple[int, int] = NEW,
) -> tuple[Product, Machine, str]:  # fmt: skip
    return Product(Scaling[kind], *sizes, E4M3, b, out, bias), Machine(capability, cuda, V211), words


RAGGED, WHOLE, SHORT = (13, 144, 272), (16, 144, 272), (16, 144, 64)
REFUSALS = {
    "a GPU without FP8": _case("TENSORWISE", (16, 32, 64), (8, 0), "devices with compute capability >= 9.0 or 8.9"),
    "blocks: k below one block": _case("BLOCKWISE", (13, 144, 48), HOPPER, CUBLAS),
    "blocks: not a Hopper GPU": _case("BLOCKWISE", WHOLE, B200, "scaling only supported in CUDA for SM90"),
    "blocks: torch built with CUDA before 12.9": _case(
        "BLOCKWISE_1D", WHOLE, HOPPER, "requires cublasLt >= 12.9", out=FLOAT, cuda=OLD
    ),
    "MX: not a Blackwell GPU": _case("MX", (13, 144, 288), HOPPER, CUBLAS),
    "MX: torch built with CUDA before 12.8": _case(
        "MX", (13, 144, 288), B200, "only supported for CUDA 12.8 and above", cuda=(12, 6)
    ),
    "scales of rows, CUTLASS: b in E5M2": _case("ROWWISE", SHORT, B200, "Float8_e4m3fn to be true", b=E5M2),
    "a bias of another dtype than the result, or in float32": _case(
        "TENSORWISE",
        (16, 32, 64),
        HOPPER,
        "Bias is not supported when out_dtype is set to Float32",
        out=FLOAT,
        bias=FLOAT,
    ),
    "scales of rows, CUTLASS: a result that it cannot write": _case(
        "ROWWISE", SHORT, ADA, "Only bf16 and fp16 high precision output types are supported for row-wise", out=FLOAT
    ),
    "blocks: rows not in multiples of 8": _case("BLOCKWISE", RAGGED, HOPPER, CUBLAS),
}
"""By row of the table: a product, a machine, and libtorch's words. Of a short k alone no refusal is known: nobody
is seen to multiply such blocks."""


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts a stand-in of libtorch in torch's place."""

    def place(machine: Machine) -> Stand:
        assert machine.capability is not None
        stand = Stand(machine.capability, machine.cuda, machine.torch)
        monkeypatch.setattr(torch, "_scaled_mm", stand.scaled_mm)
        monkeypatch.setattr(torch, "_scaled_mm_v2", stand.scaled_mm_v2)
        monkeypatch.setattr(torch_matmuls, "machine_of", lambda device: machine)
        monkeypatch.setattr(ops, "machine_of", lambda device: machine)
        return stand

    return place


def _given(product: Product, exact: bool = True) -> tuple[Any, ...]:
    make = small_integers if exact else random_numbers
    given = make(product.m, product.n, product.k, product.scaling, (product.a, product.b), product.bias is not None)
    bias = None if product.bias is None or given.bias is None else given.bias.to(product.bias)
    return (product.scaling, *given.operands, product.out, False, bias)


def test_each_row_has_a_refusal() -> None:
    assert list(REFUSALS) == [row.name for row in ROWS if row.detour is not Detour.ADDED_AFTER]


@pytest.mark.parametrize("name", REFUSALS)
def test_what_libtorch_refuses_goes_elsewhere(name: str, on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "auto" to Triton. With "torch" on a detour, or to an error with libtorch's reason."""
    product, machine, words = REFUSALS[name]
    stand = on(machine)
    row = row_of(product, machine)
    assert row is not None
    assert row.name == name
    arguments = _given(product)
    with pytest.raises(ProductError) as caught:
        multiply_directly(*arguments)
    assert words in str(caught.value)
    assert f"[{product.m}, {product.k}] x {product.b} [{product.n}, {product.k}]" in str(caught.value)
    assert 'use backend="triton"' in str(caught.value)
    assert stand.calls == []
    if row.detour is None:
        with pytest.raises(ProductError, match=name):
            multiply_torch(*arguments)
    else:
        assert torch.equal(multiply_torch(*arguments), multiply_reference(*arguments))
        after = {Detour.SCALES_AFTER: "tensor", Detour.SCALES_OF_ROWS: "row", Detour.PADDED_ROWS: "block"}
        assert stand.calls == [after.get(row.detour, "tensor")]
    monkeypatch.setattr(ops, "runs_fused", lambda backend, device: backend in ("auto", "triton"))
    choose, device = ops._multiplier.__wrapped__, torch.device("cpu")
    assert choose(product, False, "auto", device) is multiply_triton
    assert choose(product, False, "torch", device) is multiply_torch
    easy = product._replace(scaling=Scaling.TENSORWISE, b=E4M3, out=BF16, bias=None)
    if name != "a GPU without FP8":
        assert choose(easy, False, "torch", device) is multiply_directly


@pytest.mark.parametrize("machine", [Machine(B200, NEW, V213), Machine(B200, OLD, V214)], ids=str)
def test_torch_multiplies_mx_on_blackwell(machine: Machine, on: Any) -> None:
    """With scales in the layout that it reads, and any bias."""
    stand = on(machine)
    for m, k, out, bias in (
        (1, 32, BF16, None),
        (13, 160, HALF, HALF),
        (130, 288, FLOAT, FLOAT),
        (40, 64, BF16, FLOAT),
    ):
        arguments = _given(Product(Scaling.MX, m, 144, k, E4M3, E4M3, out, bias))
        assert torch.equal(multiply_torch(*arguments), multiply_reference(*arguments))
    assert stand.calls == ["mx"] * 4


def test_the_half_that_cutlass_writes_as_bfloat16(on: Any) -> None:
    """No refusal, but wrong numbers, up to torch 2.14: the stand-in asserts that nobody asks for them."""
    product = Product(Scaling.ROWWISE, 16, 144, 64, E4M3, E4M3, HALF)
    for machine in (Machine(ADA, NEW, V213), Machine(HOPPER, OLD, V214)):
        stand, arguments = on(machine), _given(product)
        with pytest.raises(AssertionError, match="writes bfloat16"):
            multiply_directly(*arguments)
        assert torch.equal(multiply_torch(*arguments), multiply_reference(*arguments))
        assert stand.calls == ["tensor"]
    on(Machine(ADA, NEW, LATER))
    assert torch.equal(multiply_directly(*arguments), multiply_reference(*arguments))


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_no_product_is_refused_that_torch_has(machine: Machine, on: Any) -> None:
    """All scalings, dtypes and biases, for any count of rows and for k of less and more than a block."""
    stand = on(machine)
    outs = itertools.cycle(((BF16, None), (FLOAT, None), (HALF, None), (BF16, BF16), (FLOAT, FLOAT), (BF16, FLOAT),
                            (HALF, HALF), (HALF, BF16)))  # fmt: skip
    refused = set()
    for scaling, k, m in itertools.product(FLOAT32_SCALINGS, (16, 48, 112, 128, 272), TOKENS):
        (out, bias), pair = next(outs), PAIRS[(m + k // 16) % 3]
        product = Product(scaling, m, 144, k, *pair, out, bias)
        arguments = _given(product)
        kind = scaling_of(*arguments[1:5])  # Scales of one block are scales of rows.
        row = row_of(product._replace(scaling=kind), machine)
        if row is not None and row.detour is None:
            refused.add(row.name)
            assert kind.in_blocks
            with pytest.raises(ProductError, match=row.name):
                multiply_torch(kind, *arguments[1:])
            continue
        assert torch.equal(multiply_torch(kind, *arguments[1:]), multiply_reference(*arguments)), product
    blocks = machine.capability == HOPPER and machine.cuda >= (12, 9)
    assert len(refused) == (0 if blocks else 1)
    assert set(stand.calls) == {"tensor", "row", *(["block"] if blocks else [])}


@pytest.mark.parametrize("detour", [detour for detour in Detour if detour is not Detour.ADDED_AFTER])
def test_a_detour_is_as_good_as_float32(detour: Detour, on: Any) -> None:
    """On scales of all mantissas, and with float32 results, also where a sum of bfloat16 would not do."""
    name = next(row.name for row in ROWS if row.detour is detour and "E5M2" not in row.name)
    product, machine, _ = REFUSALS[name]
    on(machine)
    for m in (1, 7, 13):
        arguments = _given(product._replace(m=m, out=FLOAT), exact=False)
        scaling, a, b, *scales = arguments[:5]
        kind = scaling_of(a, b, *scales)
        found = multiply_torch(kind, *arguments[1:])
        given = random_numbers(m, product.n, product.k, scaling, (product.a, product.b), product.bias is not None)
        error = (found.double().cpu() - given.exact()).abs()
        assert (error <= ROUNDINGS * (given.exact(magnitudes=True) + 1)).all()


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_a_weight_lies_sideways(machine: Machine, on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """[n, k] that is [k, n] in memory is transposed before the product, unless the machine reads it so."""
    stand, turned, transpose = on(machine), [], casts.transpose
    monkeypatch.setattr(casts, "transpose", lambda fp8: turned.append(fp8) or transpose(fp8))
    ops._multiplier.cache_clear()
    for scaling, pair in itertools.product(FLOAT32_SCALINGS, PAIRS):
        product = Product(scaling, 24, 144, 272, *pair, BF16)
        _, a, b, *scales = _given(product)[:5]
        sideways = b.t().contiguous().t()
        if scaling.in_blocks and (machine.capability != HOPPER or machine.cuda < (12, 9)):
            continue  # Not torch's at all.
        turned.clear()
        found = ops.matmul(a, sideways, *scales, BF16, fast_accumulation=False, backend="torch")
        assert torch.equal(found, multiply_reference(scaling, a, b, *scales, BF16, False, None))
        read = reads_sideways(scaling, machine)
        assert read == (machine.capability == B200 and scaling is Scaling.TENSORWISE)
        assert len(turned) == (not read)
        if row_of(product, machine) is None:
            with contextlib.nullcontext() if read else pytest.raises(ProductError):
                multiply_directly(scaling, a, sideways, *scales, BF16, False, None)
    assert "tensor" in stand.calls
    ops._multiplier.cache_clear()


def test_a_sum_with_a_buffer_is_tritons(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tests/modules/test_main_grad.py`` has sums of the other backends: a product and an addition."""
    product = Product(Scaling.ROWWISE, 16, 144, 64, E4M3, E4M3, FLOAT)
    monkeypatch.setattr(ops, "runs_fused", lambda backend, device: backend in ("auto", "triton"))
    on(Machine(HOPPER, NEW, V211))
    choose, device = ops._multiplier.__wrapped__, torch.device("cpu")
    assert choose(product, False, "torch", device) is multiply_directly
    assert choose(product._replace(into=True), False, "auto", device) is multiply_triton


def test_this_machine() -> None:
    machine = machine_of(torch.device("cpu"))
    assert machine.capability is None
    assert machine.torch == tuple(int(part) for part in torch.__version__.split(".")[:2])
    arguments = _given(Product(Scaling.TENSORWISE, 4, 16, 32, E4M3, E4M3, BF16))
    for backend in ("torch", "auto"):
        found = ops.matmul(*arguments[1:5], BF16, fast_accumulation=False, backend=backend)
        assert torch.equal(found, multiply_reference(*arguments))


def test_running_out_of_memory_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _given(Product(Scaling.TENSORWISE, 16, 32, 64, E4M3, E4M3, BF16))

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "_scaled_mm", fail)
    with pytest.raises(torch.OutOfMemoryError):
        multiply_directly(*arguments)
