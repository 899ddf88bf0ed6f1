"""Casts as plain torch operations, for torch.compile.

Inductor cannot look into a custom op. Written as torch operations, a cast and its amax become part of the kernels that
compute ``x``: ``x`` is not read again for its amax, and often never stored. Given the same ``x``, the results equal
those of the ops in ``ops.py`` bit for bit. A GPU's float32 divisions may round differently, so they are left to
``ops.choose_scale``, or done in float64. Casts that become part of other kernels do not notify their tap (``taps.py``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8dist_kernels import ops
from fp8dist_kernels.reference.casts import padded
from fp8dist_kernels.scaling import round_down_to_power_of_two


def observe(x: Tensor, pending: Tensor, *, backend: str = "auto") -> None:
    """See ``ops.observe``."""
    ops.observe(x if _may_be_empty(x) else _amax(x), pending, backend=backend)


def quantize(
    x: Tensor,
    scale: Tensor,
    cold: Tensor,
    pending: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    site: int = -1,
    tap: Tensor | None = None,
    **how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ops.quantize``. ``how``: the arguments that ``ops.choose_scale`` has as well."""
    if _may_be_empty(x):
        return ops.quantize(x, scale, cold, pending, dtype, rows=rows, columns=columns, site=site, tap=tap, **how)
    depends = how["record"] or how["just_in_time"] or how.get("outgrown") is not None
    # Inductor may recompute torch operations in the backward, where the slot may have another scale. It keeps the
    # result of an op, so the backward has the forward's scale.
    chosen = ops.choose_scale(_amax(x) if depends else None, scale, cold, pending, dtype, **how)
    return *_copies(x, chosen[0], chosen[0], dtype, rows, columns), chosen[1]


def quantize_rowwise(
    x: Tensor, dtype: torch.dtype, *, power_of_two: bool, rows: bool, columns: bool, **how: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``ops.quantize_rowwise``. ``how``: the arguments that only the op needs."""
    if _may_be_empty(x):
        return ops.quantize_rowwise(x, dtype, power_of_two=power_of_two, rows=rows, columns=columns, **how)
    nothing = x.new_empty(0, dtype=torch.float32)
    row_scale, row_inverse = _scales(x, 1, dtype, power_of_two) if rows else (nothing, nothing)
    column_scale, column_inverse = _scales(x, 0, dtype, power_of_two) if columns else (nothing, nothing)
    row_major, transposed = _copies(x, row_scale, column_scale, dtype, rows, columns)
    return row_major, row_inverse, transposed, column_inverse.t() if columns else nothing.clone()


def _may_be_empty(x: Tensor) -> bool:
    """True if x is empty, or has a size known only at run time (such as ``x[mask]``). Then the caller must use the op:
    amax of an empty tensor raises."""
    # Imported here because it takes 0.3 seconds. A compiler has imported it already.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return bool(guard_or_true(x.numel() == 0))


def _amax(x: Tensor) -> Tensor:
    return x.abs().amax()  # NaN if x contains one, as in the ops.


def _scales(x: Tensor, dim: int, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return one scale per row (``dim`` 1) or column (``dim`` 0), and their inverses. They equal the results of
    ``scale_from_amax`` with IEEE divisions.

    A GPU's float32 division may be inexact. A quotient of float32 numbers that is computed in float64 and then rounded
    has the same bits as a correctly rounded one (Figueroa, "When is double rounding innocuous?", 1995).
    """
    amax = x.abs().amax(dim, keepdim=True).float()
    float32 = torch.finfo(torch.float32)  # With dynamic=True, Dynamo makes an input of a float that is a global.
    scale = (torch.finfo(dtype).max / amax.double()).float().clamp(float32.tiny, float32.max)
    if power_of_two:
        scale = round_down_to_power_of_two(scale)
    scale = torch.where((amax > 0) & (amax < torch.inf), scale, 1.0)
    return scale, (1.0 / scale.double()).float()


def _copies(
    x: Tensor, row_scale: Tensor, column_scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    """Return the row-major and the padded transposed copy; empty where not requested."""
    nothing = x.new_empty(0, dtype=dtype)
    tokens = x.shape[0]
    row_major = _scaled(x, row_scale, dtype).to(dtype).contiguous() if rows else nothing
    if not columns:
        return row_major, nothing.clone()
    # Pad before transposing: a tracer takes the result of a pad for contiguous, also where nothing is padded.
    padding = (0, 0, 0, padded(tokens) - tokens)
    return row_major, F.pad(_scaled(x, column_scale, dtype), padding).t().to(dtype).contiguous()


def _scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x * scale, limited to the format's range, in float32: the values of ``reference.casts.scaled``.

    Comparisons in place of ``clamp``: Triton compiles clamp to an instruction that propagates NaN, and gives wrong
    results if such an instruction is near a transposed FP8 store (triton issue 11111).
    """
    limit = torch.finfo(dtype).max
    x = x.float()
    y = x * scale
    y = torch.where(y > limit, limit, y)
    y = torch.where(y < -limit, -limit, y)
    return torch.where(x.isinf(), torch.nan, y)
