"""The torch.library ops on rows that are sorted by expert. See ``reference/groups.py`` for ``offsets``.

``fp8dist::quantize_grouped``        cast each expert's rows, or its weight, with the expert's slot; record the amaxes
``fp8dist::quantize_grouped_lines``  cast with one scale per row, or per 1 x 128 block
``fp8dist::quantize_grouped_mx``     cast to MX, with blocks that have rows of one expert each
``fp8dist::matmul_grouped``          products of each expert's rows with its weight: forward and dgrad
``fp8dist::matmul_grouped_columns``  products of transposed copies over each expert's rows: wgrad

Backends, taps and mutated arguments are as in ``ops``. On Hopper, with "auto" and "torch", torch's own kernel computes
those ``matmul_grouped`` that it can (``torch_can_group`` in ``multipliers.py``). This kernel and Triton's do not need
the values of ``offsets`` on the host: offsets that decrease or lie beyond the rows are cut on the device (``cut`` in
``reference/groups.py``). All other backends use the plain-torch versions, which wait for the values, loop over the
experts, and raise ValueError for such offsets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fp8dist_kernels import BLOCK
from fp8dist_kernels.backends import nvidia_capability
from fp8dist_kernels.multipliers import Product, refused, torch_can_group
from fp8dist_kernels.ops import cast, copies_fake, implementer, mx_copies_fake, version_of_backend
from fp8dist_kernels.reference import grouped_casts, grouped_matmuls, scaled_grouped
from fp8dist_kernels.reference.groups import blocks_bound, columns_bound
from fp8dist_kernels.reference.matmuls import Scaling
from fp8dist_kernels.taps import notify

_LIBRARY = torch.library.Library("fp8dist", "FRAGMENT")
_LIBRARY.define(
    "quantize_grouped(Tensor x, Tensor? offsets, Tensor scale, Tensor cold, Tensor(a!) pending, ScalarType dtype, *, "
    "bool record, bool just_in_time, int margin, bool power_of_two, bool rows, bool columns, float? outgrown=None, "
    "str backend='auto', int site=-1, Tensor? tap=None) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "quantize_grouped_lines(Tensor x, Tensor offsets, ScalarType dtype, *, bool in_blocks, bool power_of_two, "
    "bool rows, bool columns, str backend='auto', int site=-1, Tensor? tap=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "quantize_grouped_mx(Tensor x, Tensor offsets, ScalarType dtype, *, bool round_up, bool rows, bool columns, "
    "str backend='auto', int site=-1, Tensor? tap=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "matmul_grouped(Tensor a, Tensor b, Tensor inv_scale_a, Tensor inv_scale_b, Tensor offsets, ScalarType out_dtype, "
    "*, Tensor? bias=None, bool fast_accumulation, str backend='auto', int site=-1, Tensor? tap=None) -> Tensor"
)
_LIBRARY.define(
    "matmul_grouped_columns(Tensor a, Tensor b, Tensor inv_scale_a, Tensor inv_scale_b, Tensor offsets, "
    "ScalarType out_dtype, *, bool fast_accumulation, str backend='auto', int site=-1, Tensor? tap=None) -> Tensor"
)


@functools.cache
def register_flops() -> None:
    """Let FlopCounterMode count grouped products. Rows of no expert count too, because the counter does not know the
    values of ``offsets``."""
    from torch.utils.flop_counter import register_flop_formula  # Late, as in ``ops``.

    def of_rows(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    def of_columns(
        a: Sequence[int], b: Sequence[int], _a: Any, _b: Any, offsets: Sequence[int], *_: Any, **__: Any
    ) -> int:
        # The number of rows follows from the length of the transposed copies: exactly if it is a multiple of 16, else
        # with an error of at most 15; of MX, which pads more, with one of at most 17 for each expert.
        return 2 * a[0] * b[0] * max(0, a[1] - columns_bound(0, offsets[0]))

    register_flop_formula(torch.ops.fp8dist.matmul_grouped)(of_rows)
    register_flop_formula(torch.ops.fp8dist.matmul_grouped_columns)(of_columns)


def _multiply(
    name: str, a: Tensor, *rest: Any, backend: str = "auto", site: int = -1, tap: Tensor | None = None, **options: Any
) -> Tensor:
    """Call function ``name`` of the backend, and notify the tap, if there is one."""
    if name == "matmul_grouped":
        multiply = functools.partial(_matmul_grouped, backend)
    else:
        multiply = getattr(version_of_backend(backend, a.device, grouped_matmuls), name)
    kind = a.device.type
    if torch.is_autocast_enabled(kind):  # Autocast would change the product's dtype.
        with torch.autocast(kind, enabled=False):
            product: Tensor = multiply(a, *rest, **options)
    else:
        product = multiply(a, *rest, **options)
    if tap is not None:
        notify(tap, name, site, (a, *rest), {**options, "backend": backend}, product)
    return product


def _matmul_grouped(
    backend: str,
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast_accumulation: bool,
) -> Tensor:
    if _may_be_torchs(backend, a.device):
        scaling = grouped_matmuls.grouped_scaling_of(a, b, inv_scale_a, inv_scale_b, offsets, bias)
        dtypes, biased = (a.dtype, b.dtype, out_dtype), bias is not None
        if torch_can_group(nvidia_capability(a.device), dtypes, scaling, b.shape, biased):
            clear = version_of_backend(backend, a.device, scaled_grouped).clear_tail
            try:
                return scaled_grouped.multiply_grouped_torch(
                    scaling, a, b, inv_scale_a, inv_scale_b, offsets, fast_accumulation, clear
                )
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except (RuntimeError, ValueError) as error:
                of_one = Product(scaling, a.shape[0], b.shape[1], b.shape[2], *dtypes)
                raise refused(of_one, a.device, f"grouped: {error}") from error
    multiply = version_of_backend(backend, a.device, grouped_matmuls).matmul_grouped
    product: Tensor = multiply(a, b, inv_scale_a, inv_scale_b, offsets, out_dtype, fast_accumulation, bias)
    return product


def _may_be_torchs(backend: str, device: torch.device) -> bool:
    return backend in ("auto", "torch") and nvidia_capability(device) is not None


def multiplier_name(
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    scaling: Scaling,
    shape: Sequence[int],
    biased: bool,
    backend: str,
    device: torch.device,
) -> str:
    """Return what computes a ``matmul_grouped``: "torch.scaled_grouped_mm", "Triton" or "torch" (a loop over experts).

    ``dtypes``, ``scaling``, ``shape`` and ``biased`` are as in ``torch_can_group``.
    """
    if _may_be_torchs(backend, device) and torch_can_group(nvidia_capability(device), dtypes, scaling, shape, biased):
        return "torch.scaled_grouped_mm"
    return implementer(backend, device)


def _quantize_grouped_fake(
    x: Tensor,
    offsets: Tensor | None,
    scale: Tensor,
    cold: Tensor,
    pending: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool,
    columns: bool,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = scale.shape[0]
    return (*copies_fake(x, dtype, rows, columns, groups), scale.new_empty(groups))


def _quantize_grouped_lines_fake(
    x: Tensor, offsets: Tensor, dtype: torch.dtype, *, in_blocks: bool, rows: bool, columns: bool, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (tokens, features), groups = x.shape, offsets.shape[0]
    row_major, transposed = copies_fake(x, dtype, rows, columns, groups)

    def scales(wanted: bool, *shape: Any) -> Tensor:
        return x.new_empty(shape if wanted else (0,), dtype=torch.float32)

    if in_blocks:
        across = -(-features // BLOCK)
        of_rows = scales(rows, across, tokens)
        of_columns = scales(columns, blocks_bound(tokens, groups), features)
        return row_major, of_rows.t() if rows else of_rows, transposed, of_columns.t() if columns else of_columns
    return row_major, scales(rows, tokens, 1), transposed, scales(columns, groups, features, 1)


def _quantize_grouped_mx_fake(
    x: Tensor, offsets: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return mx_copies_fake(x, dtype, rows, columns, offsets.shape[0])


def _matmul_grouped_fake(
    a: Tensor, b: Tensor, inv_scale_a: Tensor, inv_scale_b: Tensor, offsets: Tensor, out_dtype: torch.dtype, **_: Any
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _matmul_grouped_columns_fake(
    a: Tensor, b: Tensor, inv_scale_a: Tensor, inv_scale_b: Tensor, offsets: Tensor, out_dtype: torch.dtype, **_: Any
) -> Tensor:
    return a.new_empty((offsets.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype)


_OPS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {
        "quantize_grouped": (functools.partial(cast, grouped_casts, "quantize_grouped"), _quantize_grouped_fake),
        "quantize_grouped_lines": (
            functools.partial(cast, grouped_casts, "quantize_grouped_lines"),
            _quantize_grouped_lines_fake,
        ),
        "quantize_grouped_mx": (
            functools.partial(cast, grouped_casts, "quantize_grouped_mx"),
            _quantize_grouped_mx_fake,
        ),
        "matmul_grouped": (functools.partial(_multiply, "matmul_grouped"), _matmul_grouped_fake),
        "matmul_grouped_columns": (
            functools.partial(_multiply, "matmul_grouped_columns"),
            _matmul_grouped_columns_fake,
        ),
    }
)
"""By name of an op: the function that selects the backend and calls it, and the one for fake tensors (shapes only)."""

IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType({name: made for name, (made, _) in _OPS.items()})
"""By name of an op, the function that selects the backend and calls it."""

for _name, (_implementation, _fake) in _OPS.items():
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8dist::{_name}", _fake, lib=_LIBRARY)

quantize_grouped = torch.ops.fp8dist.quantize_grouped.default
"""``(x[tokens, features], offsets[E], scale[E], cold[E], pending[E], dtype, …) -> (rows, columns, inv_scale[E])``, or
``(weight[E, n, k], None, …)``: ``ops.quantize`` for each expert, with its slot."""

quantize_grouped_lines = torch.ops.fp8dist.quantize_grouped_lines.default
"""``(x[tokens, features], offsets[E], dtype, in_blocks=…, …) -> (rows, inv_scale, columns, inv_scale)``: for each
expert, ``ops.quantize_rowwise``, or ``ops.quantize_blocks`` with blocks of 1 x 128."""

quantize_grouped_mx = torch.ops.fp8dist.quantize_grouped_mx.default
"""``(x[tokens, features], offsets[E], dtype, round_up=…, …) -> (rows, inv_scale, columns, inv_scale)``:
``ops.quantize_mx`` for each expert."""

matmul_grouped = torch.ops.fp8dist.matmul_grouped.default
"""``(a[tokens, k], b[E, n, k], inv_scale_a, inv_scale_b, offsets[E], out_dtype, …) -> [tokens, n]``: for each expert,
``a @ b[e].T + bias[e]`` of its rows, dequantised. Rows of no expert are 0. ``reference/grouped_matmuls.py`` gives the
shapes of the scales and the errors. ``multipliers.ProductError`` if torch's own kernel refuses the product."""

matmul_grouped_columns = torch.ops.fp8dist.matmul_grouped_columns.default
"""``(a[n, columns], b[k, columns], inv_scale_a, inv_scale_b, offsets[E], out_dtype, …) -> [E, n, k]``: for each expert,
``a @ b.T`` over the expert's columns, dequantised. ``a`` and ``b`` are transposed copies of grouped casts, so a column
is a token. 0 for an expert without rows. ``reference/grouped_matmuls.py`` gives the shapes of the scales, and the
errors."""
