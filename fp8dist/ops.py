"""The torch.library ops that FP8 modules are made of. Each picks its backend inside.

``fp8dist::quantize``  cast to FP8 with a slot's scale, recording its amax
``fp8dist::observe``   record an amax only
``fp8dist::matmul``    scaled FP8 product, NT layout

They change a slot's place in ``pending`` and nothing else. Whether a slot is cold is read from device
memory inside the op: a flag on the host would be burnt into compiled and captured graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist.kernels.casts import TOKEN_ALIGNMENT, saturating_cast
from fp8dist.kernels.magnitude import amax_bits, record_amax
from fp8dist.kernels.matmuls import matmul_reference, matmul_torch
from fp8dist.scaling import scale_from_amax

__all__ = ["matmul", "observe", "quantize"]

_LIBRARY = torch.library.Library("fp8dist", "DEF")
_LIBRARY.define(
    "quantize(Tensor x, Tensor scale, Tensor cold, Tensor(a!) pending, ScalarType dtype, *, bool record, "
    "bool just_in_time, int margin, bool power_of_two, bool rows, bool columns) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define("observe(Tensor x, Tensor(a!) pending) -> ()")
_LIBRARY.define(
    "matmul(Tensor a, Tensor b, Tensor inv_scale_a, Tensor inv_scale_b, ScalarType out_dtype, *, "
    "bool fast_accumulation, str backend) -> Tensor"
)


def _quantize(
    x: Tensor,
    scale: Tensor,
    cold: Tensor,
    pending: Tensor,
    dtype: torch.dtype,
    *,
    record: bool,
    just_in_time: bool,
    margin: int,
    power_of_two: bool,
    rows: bool,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # On the CPU the flag can be looked at, and an eval pass over hot slots need not read x twice.
    may_be_cold = just_in_time and (x.device.type != "cpu" or bool(cold))
    used = scale
    if record or may_be_cold:
        bits = amax_bits(x)
        if record:
            record_amax(bits, pending)
        if may_be_cold:
            one = torch.ones_like(scale)
            limit = torch.full_like(scale, torch.finfo(dtype).max)
            current = scale_from_amax(bits.view(torch.float32), one, limit, margin, power_of_two)
            used = torch.where(cold, current, scale)
    row_major, transposed = saturating_cast(x, used, dtype, rows, columns)
    return row_major, transposed, torch.reciprocal(used)


def _observe(x: Tensor, pending: Tensor) -> None:
    record_amax(amax_bits(x), pending)


def _matmul(
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    out_dtype: torch.dtype,
    *,
    fast_accumulation: bool,
    backend: str,
) -> Tensor:
    kind = a.device.type
    if torch.is_autocast_enabled(kind):  # Autocast would reach into the product and change its dtype.
        with torch.autocast(kind, enabled=False):
            return _matmul(
                a, b, inv_scale_a, inv_scale_b, out_dtype, fast_accumulation=fast_accumulation, backend=backend
            )
    if backend == "auto":  # On a CPU FP8 is emulated either way; float32 products are the faster emulation.
        backend = "torch" if a.is_cuda else "reference"
    if backend == "reference":
        return matmul_reference(a, b, inv_scale_a, inv_scale_b, out_dtype)
    if backend == "torch":
        return matmul_torch(a, b, inv_scale_a, inv_scale_b, out_dtype, fast_accumulation)
    raise ConfigurationError(f"unknown backend {backend!r}")


_LIBRARY.impl("quantize", _quantize, "CompositeExplicitAutograd")
_LIBRARY.impl("observe", _observe, "CompositeExplicitAutograd")
_LIBRARY.impl("matmul", _matmul, "CompositeExplicitAutograd")


@torch.library.register_fake("fp8dist::quantize", lib=_LIBRARY)
def _quantize_fake(
    x: Tensor,
    scale: Tensor,
    cold: Tensor,
    pending: Tensor,
    dtype: torch.dtype,
    *,
    record: bool,
    just_in_time: bool,
    margin: int,
    power_of_two: bool,
    rows: bool,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, features = x.shape
    padded = (tokens + TOKEN_ALIGNMENT - 1) // TOKEN_ALIGNMENT * TOKEN_ALIGNMENT
    return (
        x.new_empty((tokens, features) if rows else (0,), dtype=dtype),
        x.new_empty((features, padded) if columns else (0,), dtype=dtype),
        torch.empty_like(scale),
    )


@torch.library.register_fake("fp8dist::observe", lib=_LIBRARY)
def _observe_fake(x: Tensor, pending: Tensor) -> None:
    return None


@torch.library.register_fake("fp8dist::matmul", lib=_LIBRARY)
def _matmul_fake(
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    out_dtype: torch.dtype,
    *,
    fast_accumulation: bool,
    backend: str,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


quantize = torch.ops.fp8dist.quantize.default
"""``(x[tokens, features], scale, cold, pending, dtype, …) -> (rows, columns, inv_scale)``.

``scale``, ``cold`` (bool) and ``pending`` are the 0-d places of one slot. With ``record`` the amax of x
goes into ``pending``. A cold slot with ``just_in_time`` is cast with its own amax (scale 1 if that is 0 or
not finite). ``inv_scale`` is a new 0-d tensor, the one these bytes were cast with: it stays right when a
later commit changes the slot's scale."""

observe = torch.ops.fp8dist.observe.default
"""``(x, pending)``: record the amax of x (any shape) in a slot's place."""

matmul = torch.ops.fp8dist.matmul.default
"""``(a[m, k], b[n, k], inv_scale_a, inv_scale_b, out_dtype, …) -> [m, n]``: ``a @ b.T``, dequantised."""
