"""Who computes a product. The only place that knows what torch's scaled products refuse, or get wrong.

``ROWS`` is the table. A product to which no row applies is torch's: ``torch._scaled_mm``, or
``torch.nn.functional.scaled_mm`` for scales of blocks. If a row applies, Triton computes the product where it runs.
``backend="torch"``, and a machine without Triton, take the row's detour: a product that torch has, with the same result
up to rounding. A row without a detour leaves ``backend="triton"`` or another machine.

Products to which no row applies, because torch's code takes them: any number of tokens with one scale per tensor or per
row (CUTLASS rounds m up to its tiles of 64, cuBLASLt needs multiples of 16 for n and k only, which ``scaling_of``
requires); k of 16 to 112 with one scale per tensor or per row, so also each wgrad over at most 128 tokens, whose scales
of one block are scales of rows.

``reads_sideways`` is about the layout of ``b``, whoever computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import torch

from fp8dist_kernels import BLOCK
from fp8dist_kernels.backends import nvidia_capability, why_not_triton
from fp8dist_kernels.reference.matmuls import ALIGNMENT, Scaling

__all__ = [
    "ROWS",
    "ROW_MULTIPLE",
    "Detour",
    "Machine",
    "Product",
    "ProductError",
    "Row",
    "machine_of",
    "reads_sideways",
    "refused",
    "row_of",
    "torch_can_group",
]

ROW_MULTIPLE = 8
"""cuBLASLt wants rows that have a scale per 1 x 128 block in multiples of 8 (TransformerEngine's cublaslt_gemm.cu
checks it: "Caller must pad")."""

_LEAST, _HOPPER, _BLACKWELL = (8, 9), (9, 0), (10, 0)
_CUBLASLT_WITH_SCALES = (12, 9)
"""Since this version, cuBLASLt takes scales per row and per block, on Hopper."""

_CUTLASS_WITH_FLOAT32 = (2, 15)
"""torch's pull request 187569 of June 2026 lets its CUTLASS kernels return float32, and float16 without a bias. Which
release has it first was not verified. This is one that was cut after it."""

_CUBLASLT_WITH_LAYOUTS = (12, 8)
"""Since this version, cuBLASLt takes all layouts on Blackwell (issue 152150 of PyTorch). ``_scaled_gemm`` in
ScaledBlas.cpp lets them pass there: "H100 only supports row-major x column-major"."""

_MOST_GROUPS = 1023


class Machine(NamedTuple):
    """What torch's products depend on, beside the product."""

    capability: tuple[int, int] | None  # None: not an NVIDIA GPU
    cuda: tuple[int, int]  # of torch's build; (0, 0) without
    torch: tuple[int, int]


class Product(NamedTuple):
    """The product of a [m, k] and b [n, k]. Recipe and GEMM appear as the scaling and the dtypes."""

    scaling: Scaling
    m: int
    n: int
    k: int
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    bias: torch.dtype | None = None
    into: bool = False  # added to what a buffer holds


class Detour(Enum):
    """How torch gets to a product that it does not take as it is."""

    BIAS_AFTER = "the product in float32, then the bias, then the rounding"
    SCALES_AFTER = "the product of one scale per tensor in float32, then the scales of rows, the bias, and the rounding"
    SCALES_OF_ROWS = "the only block of a weight's row has the scale of the row"
    PADDED_ROWS = "rows of zeros, which are cut off"
    ADDED_AFTER = "the product in float32, then the addition"


class Row(NamedTuple):
    """A kind of product that is not torch's. ``detour``: None if torch has none."""

    name: str
    applies: Callable[[Product, Machine], bool]
    detour: Detour | None


class ProductError(RuntimeError):
    """torch refuses a product. The message begins with the shapes."""


def _without_fp8(product: Product, machine: Machine) -> bool:
    return machine.capability is not None and machine.capability < _LEAST


def _single_block(product: Product, machine: Machine) -> bool:
    # Neither libtorch's tests nor TransformerEngine ever multiply such a short block.
    return product.scaling is Scaling.BLOCKWISE and product.k < BLOCK and machine.capability is not None


def _blocks_elsewhere(product: Product, machine: Machine) -> bool:
    return product.scaling.in_blocks and (machine.capability is None or machine.capability[0] != _HOPPER[0])


def _blocks_on_old_cuda(product: Product, machine: Machine) -> bool:
    return product.scaling.in_blocks and machine.cuda < _CUBLASLT_WITH_SCALES


def _other_bias(product: Product, machine: Machine) -> bool:
    if product.bias is None:
        return False
    return machine.capability is None or product.bias != product.out or product.out.itemsize != 2


def _by_cutlass(product: Product, machine: Machine) -> bool:
    """True if torch multiplies with CUTLASS: rows have scales, and cuBLASLt does not take them."""
    if product.scaling is not Scaling.ROWWISE or machine.capability is None:
        return False
    return not (_HOPPER <= machine.capability < _BLACKWELL and machine.cuda >= _CUBLASLT_WITH_SCALES)


def _cutlass_result(product: Product, machine: Machine) -> bool:
    # Without a bias, its kernel writes bfloat16 where float16 was asked for.
    wrong = product.out == torch.float32 or (product.out == torch.float16 and product.bias is None)
    return wrong and machine.torch < _CUTLASS_WITH_FLOAT32 and _by_cutlass(product, machine)


def _cutlass_operand(product: Product, machine: Machine) -> bool:
    return product.b == torch.float8_e5m2 and _by_cutlass(product, machine)


def _odd_rows(product: Product, machine: Machine) -> bool:
    return product.scaling.in_blocks and product.m % ROW_MULTIPLE != 0


def _into_buffer(product: Product, machine: Machine) -> bool:
    return product.into  # cuBLASLt could, but torch gives it nothing to add to.


ROWS: tuple[Row, ...] = (
    Row("a GPU without FP8", _without_fp8, None),
    Row("blocks: k below one block", _single_block, Detour.SCALES_OF_ROWS),
    Row("blocks: not a Hopper GPU", _blocks_elsewhere, None),
    Row("blocks: torch built with CUDA before 12.9", _blocks_on_old_cuda, None),
    Row("scales of rows, CUTLASS: b in E5M2", _cutlass_operand, Detour.SCALES_AFTER),
    Row("a bias of another dtype than the result, or in float32", _other_bias, Detour.BIAS_AFTER),
    Row("scales of rows, CUTLASS: a result that it cannot write", _cutlass_result, Detour.SCALES_AFTER),
    Row("blocks: rows not in multiples of 8", _odd_rows, Detour.PADDED_ROWS),
    Row("a sum with what a buffer holds", _into_buffer, Detour.ADDED_AFTER),  # In ``ops.matmul_into``.
)
"""What torch does not multiply. The first row that applies counts; a detour leads to a product with fewer of them."""


@functools.lru_cache(512)
def row_of(product: Product, machine: Machine) -> Row | None:
    """Return the first row that applies, or None if torch multiplies it as it is."""
    return next((row for row in ROWS if row.applies(product, machine)), None)


def reads_sideways(scaling: Scaling, machine: Machine) -> bool:
    """True if products take ``b`` in memory as [k, n], too: both torch's and ours. Elsewhere it is transposed first.

    Tensor cores of sm_100 read FP8 in either layout (tcgen05); those of Hopper, Ada and consumer Blackwell need k last.
    Triton reads both anywhere, but on Hopper it transposes each tile in registers. torch's products with a scale for
    each row are CUTLASS there, which is compiled for k last.
    """
    if machine.capability is None or machine.capability[0] != _BLACKWELL[0]:
        return False
    return scaling in (Scaling.TENSORWISE, Scaling.BLOCKWISE) and machine.cuda >= _CUBLASLT_WITH_LAYOUTS


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """Return what is known of ``device``, and of this torch."""
    return Machine(nvidia_capability(device), _version(torch.version.cuda), _version(torch.__version__))


def _version(text: str | None) -> tuple[int, int]:
    major, minor, *_ = (text or "0.0").split(".")
    return int(major), int(minor)


def refused(product: Product, device: torch.device, why: object) -> ProductError:
    """Return the error about a product that torch does not compute on ``device``."""
    triton = why_not_triton(device) is None
    instead = 'use backend="triton"' if triton else 'use backend="reference", which emulates FP8'
    shapes = f"{product.a} [{product.m}, {product.k}] x {product.b} [{product.n}, {product.k}]"
    about = f"{product.scaling.value}, to {product.out}" + (f" with a {product.bias} bias" if product.bias else "")
    first_line = str(why).strip().partition("\n")[0]
    return ProductError(f"torch does not multiply {shapes}, {about}, on {device}: {first_line}: {instead}")


def torch_can_group(
    capability: tuple[int, int] | None,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    scaling: Scaling,
    shape: Sequence[int],
    biased: bool,
) -> bool:
    """True if torch computes such a ``matmul_grouped``: the table of grouped products, which has one row.

    torch also lets Blackwell pass, but up to 2.13 its kernel for float32 scales is compiled for Hopper only, and traps
    elsewhere (pull request 188063 of PyTorch).

    Args:
        capability: compute capability of an NVIDIA GPU. None: another device.
        dtypes: of ``a``, ``b`` and the result.
        shape: of ``b``, [E, n, k].
    """
    groups, n, k = shape
    return (
        capability == _HOPPER
        and dtypes == (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16)
        and not scaling.in_blocks
        and not biased
        and 0 < groups <= _MOST_GROUPS
        and all(size > 0 and size % ALIGNMENT == 0 for size in (n, k))
    )
