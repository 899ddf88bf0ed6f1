"""Scaled products that torch refuses or computes wrongly, and what to do instead. No other file knows them.

``ROWS`` is the table. A product to which no row applies can be torch's: ``torch._scaled_mm``, or
``torch.nn.functional.scaled_mm`` for scales of blocks. If a row applies, Triton computes the product where it runs.
``backend="torch"``, and a machine without Triton, take the row's detour: other torch operations, with the same result
up to rounding. If the row has no detour, they raise ``ProductError``.

No row is needed for these products, which torch's code takes:

- one scale per tensor or per row, with any number of tokens: CUTLASS rounds m up to its tiles of 64, and cuBLASLt needs
  multiples of 16 for n and k only, which ``scaling_of`` requires;
- one scale per tensor or per row, with k of 16 to 112. A wgrad over at most 128 tokens is one of these, also with
  scales of 1 x 128 blocks: a row has a single block, so its scales have the shape of scales per row.

``reads_sideways`` says which layouts of ``b`` products read, torch's as well as Triton's.
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

ROW_MULTIPLE = 8
"""cuBLASLt wants rows that have a scale per 1 x 128 block in multiples of 8 (TransformerEngine's cublaslt_gemm.cu
checks it: "Caller must pad")."""

_LEAST, _HOPPER, _BLACKWELL = (8, 9), (9, 0), (10, 0)  # Compute capabilities. _LEAST: the first with FP8.
_CUBLASLT_WITH_SCALES = (12, 9)
"""Since this version, cuBLASLt takes scales per row and per block, on Hopper."""

_CUBLASLT_WITH_MX = (12, 8)
"""Since this version, cuBLASLt takes E8M0 scales of 1 x 32 blocks, on Blackwell."""

_CUTLASS_WITH_FLOAT32 = (2, 15)
"""torch's pull request 187569 of June 2026 lets its CUTLASS kernels return float32, and float16 without a bias. Which
release has the change first was not verified. 2.15 was cut after the change."""

_CUBLASLT_WITH_LAYOUTS = (12, 8)
"""Since this version, cuBLASLt takes all layouts on Blackwell (issue 152150 of PyTorch). ``_scaled_gemm`` in
ScaledBlas.cpp lets them pass there: "H100 only supports row-major x column-major"."""

_MOST_GROUPS = 1023  # torch's kernel requires ``group_count < 1024``: it has a thread per group.


class Machine(NamedTuple):
    """The GPU and the versions: what decides, beside the product, if torch computes it."""

    capability: tuple[int, int] | None  # None: not an NVIDIA GPU
    cuda: tuple[int, int]  # CUDA version that torch was built with; (0, 0): none
    torch: tuple[int, int]


class Product(NamedTuple):
    """The product ``a @ b.T`` of a [m, k] and b [n, k]. ``a``, ``b``, ``out`` and ``bias`` are dtypes."""

    scaling: Scaling
    m: int
    n: int
    k: int
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    bias: torch.dtype | None = None
    into: bool = False  # The product is added to the content of a buffer.


class Detour(Enum):
    """Operations of torch that give the result of a product that torch does not take as given."""

    BIAS_AFTER = "the product in float32, then the bias, then the rounding"
    SCALES_AFTER = "the product of one scale per tensor in float32, then the scales of rows, the bias, and the rounding"
    SCALES_OF_ROWS = "the only block of a weight's row has the scale of the row"
    PADDED_ROWS = "rows of zeros, which are cut off"
    ADDED_AFTER = "the product in float32, then the addition"


class Row(NamedTuple):
    """A kind of product that torch does not take as given. ``detour``: None if torch cannot compute it at all."""

    name: str
    applies: Callable[[Product, Machine], bool]
    detour: Detour | None


class ProductError(RuntimeError):
    """torch refuses a product. The message begins with the shapes."""


def _without_fp8(product: Product, machine: Machine) -> bool:
    return machine.capability is not None and machine.capability < _LEAST


def _single_block(product: Product, machine: Machine) -> bool:
    # Avoided as untested: neither torch's tests nor TransformerEngine multiply with such a short k.
    return product.scaling is Scaling.BLOCKWISE and product.k < BLOCK and machine.capability is not None


def _blocks_elsewhere(product: Product, machine: Machine) -> bool:
    return product.scaling.in_blocks and (machine.capability is None or machine.capability[0] != _HOPPER[0])


def _blocks_on_old_cuda(product: Product, machine: Machine) -> bool:
    return product.scaling.in_blocks and machine.cuda < _CUBLASLT_WITH_SCALES


def _mx_elsewhere(product: Product, machine: Machine) -> bool:
    return product.scaling is Scaling.MX and (machine.capability is None or machine.capability[0] != _BLACKWELL[0])


def _mx_on_old_cuda(product: Product, machine: Machine) -> bool:
    return product.scaling is Scaling.MX and machine.cuda < _CUBLASLT_WITH_MX


def _other_bias(product: Product, machine: Machine) -> bool:
    if product.bias is None:
        return False
    return machine.capability is None or product.bias != product.out or product.out.itemsize != 2


def _by_cutlass(product: Product, machine: Machine) -> bool:
    """True if torch multiplies with CUTLASS: for scales per row, where cuBLASLt does not take them."""
    if product.scaling is not Scaling.ROWWISE or machine.capability is None:
        return False
    return not (_HOPPER <= machine.capability < _BLACKWELL and machine.cuda >= _CUBLASLT_WITH_SCALES)


def _cutlass_result(product: Product, machine: Machine) -> bool:
    # Without a bias, torch's CUTLASS kernel writes bfloat16 where float16 was asked for.
    wrong = product.out == torch.float32 or (product.out == torch.float16 and product.bias is None)
    return wrong and machine.torch < _CUTLASS_WITH_FLOAT32 and _by_cutlass(product, machine)


def _cutlass_operand(product: Product, machine: Machine) -> bool:
    return product.b == torch.float8_e5m2 and _by_cutlass(product, machine)


def _odd_rows(product: Product, machine: Machine) -> bool:
    return product.scaling.in_blocks and product.m % ROW_MULTIPLE != 0


def _into_buffer(product: Product, machine: Machine) -> bool:
    return product.into  # cuBLASLt could add, but torch's functions have no argument for a buffer to add to.


ROWS: tuple[Row, ...] = (
    Row("a GPU without FP8", _without_fp8, None),
    Row("blocks: k below one block", _single_block, Detour.SCALES_OF_ROWS),
    Row("blocks: not a Hopper GPU", _blocks_elsewhere, None),
    Row("blocks: torch built with CUDA before 12.9", _blocks_on_old_cuda, None),
    Row("MX: not a Blackwell GPU", _mx_elsewhere, None),
    Row("MX: torch built with CUDA before 12.8", _mx_on_old_cuda, None),
    Row("scales of rows, CUTLASS: b in E5M2", _cutlass_operand, Detour.SCALES_AFTER),
    Row("a bias of another dtype than the result, or in float32", _other_bias, Detour.BIAS_AFTER),
    Row("scales of rows, CUTLASS: a result that it cannot write", _cutlass_result, Detour.SCALES_AFTER),
    Row("blocks: rows not in multiples of 8", _odd_rows, Detour.PADDED_ROWS),
    Row("a sum with what a buffer holds", _into_buffer, Detour.ADDED_AFTER),  # In ``ops.matmul_into``.
)
"""Products that torch does not take as given. The first row that applies counts. A detour computes another product, to
which fewer rows apply, and which may take a detour in turn."""


@functools.lru_cache(512)
def row_of(product: Product, machine: Machine) -> Row | None:
    """Return the first row that applies, or None if torch takes the product as given."""
    return next((row for row in ROWS if row.applies(product, machine)), None)


def reads_sideways(scaling: Scaling, machine: Machine) -> bool:
    """True if products, torch's as well as Triton's, may read a ``b`` [n, k] that lies in memory as [k, n]. If False,
    it must be copied first, so that k is last in memory.

    Tensor cores of sm_100 read FP8 in either layout (tcgen05). Those of Hopper, Ada and consumer Blackwell need k last:
    Triton could read [k, n] there, but would transpose each tile in registers. With a scale per row, torch uses CUTLASS
    on sm_100, compiled for k last.
    """
    if machine.capability is None or machine.capability[0] != _BLACKWELL[0]:
        return False
    return scaling in (Scaling.TENSORWISE, Scaling.BLOCKWISE) and machine.cuda >= _CUBLASLT_WITH_LAYOUTS


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """Return the compute capability of ``device``, with the versions of torch and of torch's CUDA."""
    return Machine(nvidia_capability(device), _version(torch.version.cuda), _version(torch.__version__))


def _version(text: str | None) -> tuple[int, int]:
    major, minor, *_ = (text or "0.0").split(".")
    return int(major), int(minor)


def refused(product: Product, device: torch.device, why: object) -> ProductError:
    """Return the error about a product that torch does not compute on ``device``. ``why``: torch's error, of which the
    first line is quoted, or a reason."""
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
    """True if torch computes such a ``matmul_grouped``. For grouped products, this one condition replaces ``ROWS``.

    torch also accepts Blackwell, but up to 2.13 its kernel for float32 scales is compiled for Hopper only, and traps
    elsewhere (pull request 188063 of PyTorch).

    Args:
        capability: compute capability of an NVIDIA GPU. None: another device.
        dtypes: of ``a``, ``b`` and the result.
        shape: of ``b``, [E, n, k].
        biased: True if a bias is added.
    """
    groups, n, k = shape
    return (
        capability == _HOPPER
        and dtypes == (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16)
        and scaling in (Scaling.TENSORWISE, Scaling.ROWWISE)
        and not biased
        and 0 < groups <= _MOST_GROUPS
        and all(size > 0 and size % ALIGNMENT == 0 for size in (n, k))
    )
