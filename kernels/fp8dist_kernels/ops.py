"""The torch.library ops that FP8 modules and arenas call. Each op picks its backend inside.

``fp8dist::quantize``          cast to FP8 with a slot's scale and record the amax
``fp8dist::choose_scale``      record a given amax, and return the scale for a cast and its inverse
``fp8dist::quantize_rowwise``  cast with one scale per row
``fp8dist::quantize_blocks``   cast with one scale per block
``fp8dist::quantize_mx``       cast to MX: one power of two per 1 x 32 block
``fp8dist::quantize_nvfp4``    cast to NVFP4, emulated: no GPU path
``fp8dist::add_up``            add up columns: the gradient of a bias
``fp8dist::transpose``         transpose FP8 into contiguous memory
``fp8dist::observe``           record the amax only
``fp8dist::measure``           record the shares of elements that a cast saturates and flushes to zero
``fp8dist::matmul``            scaled FP8 product ``a @ b.T``; the contracted dim is the last of both
``fp8dist::matmul_into``       the same, added to the content of a buffer
``fp8dist::launch``            write an arena's state into the message of its collective
``fp8dist::commit``            update the arena from the collective's result

A *slot* is the FP8 state of one tensor, an *arena* the slots of one recipe and one group of ranks (``arrays.py``).
Casts and products take a ``tap``, whose listener gets their arguments and results, and the ``site`` of the call
(``taps.py``).

No op communicates. Each mutates only the arguments that its schema marks. Whether a slot is cold, and whether ranks
agree, is read from device memory inside the op: a flag on the host would be baked into compiled and captured graphs.

``backend``: "triton", "torch" (``torch._scaled_mm`` and eager operations), "reference" (float32 products), or "auto".
On GPUs with FP8, "auto" casts with Triton. A product that torch takes (``multipliers.py``) is torch's, unless the
device's shipped table shows that Triton is faster (``triton/tables.py``). On a CPU, "auto" multiplies with "reference",
which is faster there than ``torch._scaled_mm``. ``StateUpdates`` in ``direct.py`` chooses between the ops and numpy for
a launch and a commit. A backend that the device does not have raises ValueError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fp8dist_kernels import MX_BLOCK, NVFP4_BLOCK, host_shares
from fp8dist_kernels.arrays import StateArrays, UpdateRule
from fp8dist_kernels.backends import runs_fused, why_not_triton
from fp8dist_kernels.multipliers import Product, machine_of, reads_sideways, row_of
from fp8dist_kernels.reference import blocks, casts, magnitude, matmuls, mx, nvfp4, shares, torch_matmuls, update
from fp8dist_kernels.reference.groups import columns_bound
from fp8dist_kernels.reference.matmuls import Scaling
from fp8dist_kernels.taps import notify

_LIBRARY = torch.library.Library("fp8dist", "DEF")
_LIBRARY.define(
    "quantize(Tensor x, Tensor scale, Tensor cold, Tensor(a!) pending, ScalarType dtype, *, bool record, "
    "bool just_in_time, int margin, bool power_of_two, bool rows, bool columns, float? outgrown=None, "
    "Tensor(b!)? sums=None, Tensor(c!)? scratch=None, str backend='auto', int site=-1, Tensor? tap=None) "
    "-> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "choose_scale(Tensor? amax, Tensor scale, Tensor cold, Tensor(a!) pending, ScalarType dtype, *, bool record, "
    "bool just_in_time, int margin, bool power_of_two, float? outgrown=None, str backend='auto') -> Tensor"
)
_LIBRARY.define(
    "quantize_rowwise(Tensor x, ScalarType dtype, *, bool power_of_two, bool rows, bool columns, str backend='auto', "
    "int site=-1, Tensor? tap=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "quantize_blocks(Tensor x, ScalarType dtype, *, int[2] block, bool power_of_two, bool rows, bool columns, "
    "str backend='auto', int site=-1, Tensor? tap=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "quantize_mx(Tensor x, ScalarType dtype, *, bool round_up, bool rows, bool columns, str backend='auto', "
    "int site=-1, Tensor? tap=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "quantize_nvfp4(Tensor x, Tensor encode, Tensor draw, ScalarType dtype, *, int key, bool square, bool hadamard, "
    "bool stochastic, bool rows, bool columns, str backend='auto', int site=-1, Tensor? tap=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define("add_up(Tensor x, ScalarType dtype, *, str backend='auto') -> Tensor")
_LIBRARY.define("transpose(Tensor fp8, *, str backend='auto') -> Tensor")
_LIBRARY.define("observe(Tensor x, Tensor(a!) pending, *, str backend='auto') -> ()")
_LIBRARY.define(
    "measure(Tensor x, Tensor inv_scale, ScalarType dtype, Tensor(a!) saturated, Tensor(b!) underflow, *, "
    "int[2] block, str backend='auto') -> ()"
)
_LIBRARY.define(
    "matmul(Tensor a, Tensor b, Tensor inv_scale_a, Tensor inv_scale_b, ScalarType out_dtype, *, Tensor? bias=None, "
    "bool fast_accumulation, str backend='auto', int site=-1, Tensor? tap=None) -> Tensor"
)
_LIBRARY.define(
    "matmul_into(Tensor a, Tensor b, Tensor inv_scale_a, Tensor inv_scale_b, Tensor(a!) total, *, "
    "bool fast_accumulation, str backend='auto', int site=-1, Tensor? tap=None) -> ()"
)
_LIBRARY.define("launch(Tensor(a!)[] arrays, Tensor? hold, *, bool drop_nonfinite, str backend='auto') -> ()")
_LIBRARY.define(
    "commit(Tensor(a!)[] arrays, Tensor reduced, Tensor? hold, *, int length, int margin, bool power_of_two, "
    "bool just_in_time, str algorithm, str backend='auto') -> Tensor"
)


@functools.cache
def register_flops() -> None:
    """Let FlopCounterMode count FP8 products as it counts torch's: 2 m n k each."""
    # Imported here because this module imports Triton, which takes a tenth of a second.
    from torch.utils.flop_counter import register_flop_formula

    def flops(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
        return 2 * a[0] * a[1] * b[0]

    register_flop_formula([torch.ops.fp8dist.matmul, torch.ops.fp8dist.matmul_into])(flops)


def require_backend(backend: str, device: torch.device) -> None:
    """Raise ValueError if ``backend`` is not available on ``device``."""
    if backend == "triton" and why_not_triton(device) is not None:
        raise ValueError(f'backend="triton" is not available on {device}: {why_not_triton(device)}')


@functools.cache
def version_of_backend(backend: str, device: torch.device, of: Any) -> Any:
    """Return the module with this backend's version of the functions in ``of``, a module of ``reference``. Raise
    ValueError if the backend is not available on ``device``."""
    if not runs_fused(backend, device):
        return of
    require_backend(backend, device)
    # Imported here because Triton is optional.
    from fp8dist_kernels import triton as fused

    return fused.version_of(of)


def cast(
    of: Any,
    name: str,
    x: Tensor,
    *rest: Any,
    backend: str = "auto",
    site: int = -1,
    tap: Tensor | None = None,
    **options: Any,
) -> Any:
    """Call function ``name`` of the backend's version of module ``of``, and notify the tap, if there is one."""
    if "block" in options:  # The dispatcher passes a list.
        options["block"] = tuple(options["block"])
    results = getattr(version_of_backend(backend, x.device, of), name)(x, *rest, **options)
    if tap is not None:
        # Not ``sums`` and ``scratch``, which the cast only writes to: a listener that repeats it needs neither.
        shown = {key: value for key, value in options.items() if key not in ("sums", "scratch")}
        notify(tap, name, site, (x, *rest), {**shown, "backend": backend}, *results)
    return results


def _quantize_nvfp4(x: Tensor, *rest: Any, backend: str = "auto", **options: Any) -> Any:
    return cast(nvfp4, "quantize_nvfp4", x, *rest, backend="reference", **options)  # There is no other.


def _choose_scale(amax: Tensor | None, scale: Tensor, *slot: Any, backend: str = "auto", **options: Any) -> Tensor:
    chosen: Tensor = version_of_backend(backend, scale.device, casts).choose_scale(amax, scale, *slot, **options)
    return chosen


def _measure(
    x: Tensor,
    inv_scale: Tensor,
    dtype: torch.dtype,
    saturated: Tensor,
    underflow: Tensor,
    *,
    block: Sequence[int],
    backend: str = "auto",
) -> None:
    version = version_of_backend(backend, x.device, shares)
    if version is shares and backend != "reference" and x.device.type == "cpu" and tuple(block) == shares.WHOLE:
        version = host_shares
    version.measure(x, inv_scale, dtype, saturated, underflow, block=tuple(block))


def _matmul(a: Tensor, *rest: Any, site: int = -1, tap: Tensor | None = None, **options: Any) -> Tensor:
    kind = a.device.type
    if torch.is_autocast_enabled(kind):  # Autocast would change the product's dtype.
        with torch.autocast(kind, enabled=False):
            product = _product(a, *rest, **options)
    else:
        product = _product(a, *rest, **options)
    if tap is not None:
        notify(tap, "matmul", site, (a, *rest), options, product)
    return product


def _matmul_into(
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    total: Tensor,
    *,
    fast_accumulation: bool,
    backend: str = "auto",
    site: int = -1,
    tap: Tensor | None = None,
) -> None:
    scaling = matmuls.scaling_of(a, b, inv_scale_a, inv_scale_b)
    (m, k), n = a.shape, b.shape[0]
    if total.shape != (m, n):
        raise ValueError(f"a product [{m}, {n}] cannot be added to a total of shape {tuple(total.shape)}")
    product = Product(scaling, m, n, k, a.dtype, b.dtype, torch.float32, into=True)
    if multiplier_name(product, fast_accumulation, backend, a.device) == "Triton":
        if tap is None:
            from fp8dist_kernels.triton import matmuls as fused_matmuls

            if not b.is_contiguous():
                b = _readable(b, scaling, backend)
            fused_matmuls.multiply_into(scaling, a, b, inv_scale_a, inv_scale_b, fast_accumulation, total)
            return
        # The tap needs the product by itself. Triton's has the bits that ``multiply_into`` adds.
        backend = "triton"
    options = {"fast_accumulation": fast_accumulation, "backend": backend}
    total.add_(_matmul(a, b, inv_scale_a, inv_scale_b, torch.float32, site=site, tap=tap, **options))


def _product(
    a: Tensor,
    b: Tensor,
    inv_scale_a: Tensor,
    inv_scale_b: Tensor,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast_accumulation: bool,
    backend: str = "auto",
) -> Tensor:
    scaling = matmuls.scaling_of(a, b, inv_scale_a, inv_scale_b, bias)
    of_bias = None if bias is None else bias.dtype
    (m, k), n = a.shape, b.shape[0]
    if not b.is_contiguous():
        b = _readable(b, scaling, backend)
    product = Product(scaling, m, n, k, a.dtype, b.dtype, out_dtype, of_bias)
    multiply = _multiplier(product, fast_accumulation, backend, a.device)
    return multiply(scaling, a, b, inv_scale_a, inv_scale_b, out_dtype, fast_accumulation, bias)


def _readable(b: Tensor, scaling: Scaling, backend: str) -> Tensor:
    """Return ``b``, a transposed view of contiguous memory; a contiguous copy if the device's products need one (see
    ``reads_sideways``)."""
    if reads_sideways(scaling, machine_of(b.device)):
        return b
    transposed: Tensor = version_of_backend(backend, b.device, casts).transpose(b.t())
    return transposed


@functools.lru_cache(512)
def _multiplier(product: Product, fast_accumulation: bool, backend: str, device: torch.device) -> Callable[..., Tensor]:
    """Return the function that computes a product. Raise ValueError if ``backend`` is unknown or not available."""
    if product.scaling is Scaling.NVFP4:
        return matmuls.multiply_reference
    row = row_of(product, machine_of(device))
    if runs_fused(backend, device):
        require_backend(backend, device)
        from fp8dist_kernels.triton import matmuls as fused_matmuls
        from fp8dist_kernels.triton import tiles

        problem = tiles.Problem(
            product.m, product.n, product.k, product.scaling, fast_accumulation, product.a, product.b, product.out
        )
        if backend == "triton" or row is not None or tiles.faster_than_torch(problem, device):
            return fused_matmuls.multiply
    if backend == "torch" or (backend == "auto" and device.type == "cuda"):
        return torch_matmuls.multiply_directly if row is None else torch_matmuls.multiply_torch
    if backend in ("auto", "reference"):
        return matmuls.multiply_reference
    raise ValueError(f"unknown backend {backend!r}")


def implementer(backend: str, device: torch.device) -> str:
    """Return what computes casts on ``device``: "Triton" or "torch"."""
    return "Triton" if runs_fused(backend, device) else "torch"


def multiplier_name(product: Product, fast_accumulation: bool, backend: str, device: torch.device) -> str:
    """Return what computes a product: "Triton", "torch._scaled_mm" (also for torch's scaled_mm) or "reference". Raise
    ValueError if ``backend`` is unknown or not available on ``device``."""
    multiply = _multiplier(product, fast_accumulation, backend, device)
    of_torch = torch_matmuls.multiply_directly, torch_matmuls.multiply_torch
    names = {**dict.fromkeys(of_torch, "torch._scaled_mm"), matmuls.multiply_reference: "reference"}
    return names.get(multiply, "Triton")


def _launch(arrays: Sequence[Tensor], hold: Tensor | None, *, drop_nonfinite: bool, backend: str = "auto") -> None:
    state = StateArrays(*arrays)
    version_of_backend(backend, state.pending.device, update).launch(state, hold, drop_nonfinite)


def _commit(
    arrays: Sequence[Tensor], reduced: Tensor, hold: Tensor | None, *, backend: str = "auto", **rule: Any
) -> Tensor:
    version = version_of_backend(backend, reduced.device, update)
    return version.commit(StateArrays(*arrays), UpdateRule(**rule), reduced, hold)


def copies_fake(x: Tensor, dtype: torch.dtype, rows: bool, columns: bool, groups: Any = 1) -> tuple[Tensor, Tensor]:
    """Return empty FP8 tensors of the shapes of a cast's row-major and transposed copy; (0,) for one not requested.

    ``x``: [tokens, features], whose rows belong to ``groups`` experts, or the weights of experts [E, n, k]. Sizes may
    be symbolic.
    """
    *experts, tokens, features = x.shape
    length = columns_bound(tokens, 1 if experts else groups)
    return (
        x.new_empty(x.shape if rows else (0,), dtype=dtype),
        x.new_empty((*experts, features, length) if columns else (0,), dtype=dtype),
    )


def _quantize_fake(
    x: Tensor, scale: Tensor, cold: Tensor, pending: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return *copies_fake(x, dtype, rows, columns), torch.empty_like(scale)


def _choose_scale_fake(amax: Tensor | None, scale: Tensor, *_: Any, **__: Any) -> Tensor:
    return scale.new_empty(2)


def _quantize_rowwise_fake(
    x: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (tokens, features), (row_major, transposed) = x.shape, copies_fake(x, dtype, rows, columns)
    of_rows = x.new_empty((tokens, 1) if rows else (0,), dtype=torch.float32)
    return row_major, of_rows, transposed, x.new_empty((features, 1) if columns else (0,), dtype=torch.float32)


def _quantize_blocks_fake(
    x: Tensor, dtype: torch.dtype, *, block: Sequence[int], rows: bool, columns: bool, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def inverse(wanted: bool, lines: Any, length: Any) -> Tensor:
        height, width = block
        down, across = -(-lines // height), -(-length // width)
        if not wanted:
            return x.new_empty(0, dtype=torch.float32)
        if height > 1:
            return x.new_empty((*experts, down, across), dtype=torch.float32)
        # Scales of 1 x 128 blocks are a transposed view, as products want them.
        return x.new_empty((*experts, across, down), dtype=torch.float32).mT

    *experts, tokens, features = x.shape
    row_major, transposed = copies_fake(x, dtype, rows, columns)
    return row_major, inverse(rows, tokens, features), transposed, inverse(columns, features, tokens)


def mx_copies_fake(
    x: Tensor, dtype: torch.dtype, rows: bool, columns: bool, groups: Any = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty copies and scales of an MX cast of x [tokens, features], whose rows belong to ``groups`` experts."""
    (tokens, features), scale = x.shape, torch.float8_e8m0fnu
    down, across = columns_bound(tokens, groups, MX_BLOCK) // MX_BLOCK, -(-features // MX_BLOCK)
    return (
        x.new_empty((tokens, across * MX_BLOCK) if rows else (0,), dtype=dtype),
        x.new_empty((tokens, across) if rows else (0,), dtype=scale),
        x.new_empty((features, down * MX_BLOCK) if columns else (0,), dtype=dtype),
        x.new_empty((features, down) if columns else (0,), dtype=scale),
    )


def _quantize_mx_fake(
    x: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return mx_copies_fake(x, dtype, rows, columns)


def _quantize_nvfp4_fake(
    x: Tensor, encode: Tensor, draw: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def copy(lines: Any, length: Any, wanted: bool) -> tuple[Tensor, Tensor]:
        blocks = -(-length // NVFP4_BLOCK)
        shapes = ((lines, blocks * NVFP4_BLOCK), (lines, blocks)) if wanted else ((0,), (0,))
        return x.new_empty(shapes[0], dtype=dtype), x.new_empty(shapes[1], dtype=torch.float32)

    tokens, features = x.shape
    return *copy(tokens, features, rows), *copy(features, tokens, columns)


def _add_up_fake(x: Tensor, dtype: torch.dtype, **_: Any) -> Tensor:
    return x.new_empty(x.shape[1], dtype=dtype)


def _transpose_fake(fp8: Tensor, **_: Any) -> Tensor:
    *leading, tokens, features = fp8.shape
    return fp8.new_empty((*leading, features, tokens))


def _nothing_fake(*_: Any, **__: Any) -> None:
    return None


def _matmul_fake(
    a: Tensor, b: Tensor, inv_scale_a: Tensor, inv_scale_b: Tensor, out_dtype: torch.dtype, **_: Any
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _commit_fake(arrays: Sequence[Tensor], reduced: Tensor, hold: Tensor | None, **_: Any) -> Tensor:
    return reduced.new_empty(update.OUTCOME, dtype=torch.bool)


_OPS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {
        "quantize": (functools.partial(cast, casts, "quantize"), _quantize_fake),
        "choose_scale": (_choose_scale, _choose_scale_fake),
        "quantize_rowwise": (functools.partial(cast, blocks, "quantize_rowwise"), _quantize_rowwise_fake),
        "quantize_blocks": (functools.partial(cast, blocks, "quantize_blocks"), _quantize_blocks_fake),
        "quantize_mx": (functools.partial(cast, mx, "quantize_mx"), _quantize_mx_fake),
        "quantize_nvfp4": (_quantize_nvfp4, _quantize_nvfp4_fake),
        "add_up": (functools.partial(cast, casts, "add_up"), _add_up_fake),
        "transpose": (functools.partial(cast, casts, "transpose"), _transpose_fake),
        "observe": (functools.partial(cast, magnitude, "observe"), _nothing_fake),
        "measure": (_measure, _nothing_fake),
        "matmul": (_matmul, _matmul_fake),
        "matmul_into": (_matmul_into, _nothing_fake),
        "launch": (_launch, _nothing_fake),
        "commit": (_commit, _commit_fake),
    }
)
"""By name of an op: the function that selects the backend and calls it, and the one for fake tensors (shapes only)."""

IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType({name: made for name, (made, _) in _OPS.items()})
"""By name of an op, the function that selects the backend and calls it."""

for _name, (_implementation, _fake) in _OPS.items():
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8dist::{_name}", _fake, lib=_LIBRARY)

quantize = torch.ops.fp8dist.quantize.default
"""``(x[tokens, features], scale, cold, pending, dtype, …) -> (rows, columns, inv_scale)``.

``rows`` is the FP8 copy [tokens, features]. ``columns`` is its transpose, whose rows are padded with zeros to a
multiple of 16 tokens. A copy that is not requested is empty, of shape [0].

``scale``, ``cold`` (bool) and ``pending`` are 0-d views of one slot. With ``record``, ``pending`` becomes the maximum
of itself and the amax of x. With ``just_in_time``, x of a cold slot is cast with the scale of its own amax (1 if the
amax is 0 or not finite). With ``outgrown`` (a number above 0), so is x of a slot that is not cold, if x has outgrown
the scale: the amax is finite, and ``amax * scale > outgrown * fp8_max`` in float32. The slot's own scale and ``cold``
do not change.

``inv_scale`` is a new 0-d tensor, the inverse of the scale of this cast. It stays valid after a later commit changes
the slot's scale. ``sums`` ([features]) gets the result of ``add_up``. ``scratch`` (int32[4], zeros) saves a launch
for slots that are hardly ever cold: see ``reference/casts.py``.
"""

choose_scale = torch.ops.fp8dist.choose_scale.default
"""``(amax, scale, cold, pending, dtype, …) -> float32[2]``: the scale of a cast, and its inverse. See ``choose_scale``
in ``reference/casts.py``. Compiled graphs use it: Inductor fuses the rest of ``quantize`` with other operations."""

quantize_rowwise = torch.ops.fp8dist.quantize_rowwise.default
"""``(x[tokens, features], dtype, …) -> (rows, inv_scale[tokens, 1], columns, inv_scale[features, 1])``: cast with one
scale per row of each copy, from the row's own amax."""

quantize_blocks = torch.ops.fp8dist.quantize_blocks.default
"""``(x[tokens, features], dtype, block=(1, 128) or (128, 128), …) -> (rows, inv_scale, columns, inv_scale)``: cast with
one scale per block of each copy, from the block's own amax. The weights of experts [E, n, k] are cast as E matrices, on
a GPU in one launch. ``reference/blocks.py`` gives the shapes of the scales."""

quantize_mx = torch.ops.fp8dist.quantize_mx.default
"""``(x[tokens, features], dtype, round_up=…, …) -> (rows, inv_scale, columns, inv_scale)``: cast to MX, with one E8M0
scale per 1 x 32 block of each copy. Rows of both copies are padded to whole blocks. See ``reference/mx.py``."""

quantize_nvfp4 = torch.ops.fp8dist.quantize_nvfp4.default
"""``(x[tokens, features], encode, draw, dtype, key=…, …) -> (rows, inv_scale, columns, inv_scale)``: cast to NVFP4,
with a float32 scale per 1 x 16 block of each copy. Emulated: no GPU path; plain torch with every backend. See
``reference/nvfp4.py``."""

add_up = torch.ops.fp8dist.add_up.default
"""``(x[tokens, features], dtype) -> [features]``: sums of columns, in an order that is the same on all backends. See
``reference/casts.py``. ``quantize`` gives the same sums."""

transpose = torch.ops.fp8dist.transpose.default
"""``(fp8[..., tokens, features]) -> [..., features, tokens]``, contiguous, for weights that were gathered in FP8."""

observe = torch.ops.fp8dist.observe.default
"""``(x, pending)``: record the amax of x (any shape) in ``pending``, a 0-d view of a slot."""

measure = torch.ops.fp8dist.measure.default
"""``(x[tokens, features], inv_scale, dtype, saturated, underflow, block=…)``: record, in two 0-d tensors, the shares of
``x`` that a cast with these scales saturates and flushes to zero. See ``reference/shares.py``."""

matmul = torch.ops.fp8dist.matmul.default
"""``(a[m, k], b[n, k], inv_scale_a, inv_scale_b, out_dtype, …) -> [m, n]``: ``a @ b.T + bias``, dequantised. The shapes
and dtypes of the inverse scales select the kind of scaling: see ``Scaling`` in ``reference/matmuls.py``. ``b`` may be a
transposed view of contiguous memory. It is copied if the device's products need k last in memory: see
``reads_sideways``. n and k are multiples of 16. Raises ValueError for operands or scales that do not fit,
``multipliers.ProductError`` if torch has to compute the product and cannot."""

matmul_into = torch.ops.fp8dist.matmul_into.default
"""``(a[m, k], b[n, k], inv_scale_a, inv_scale_b, total[m, n], …)``: add ``a @ b.T`` to ``total``, which has any float
dtype and strides. The product is computed and added in float32, and the sum is rounded once. Triton's kernel of the
product adds, if TMA can write to ``total``; otherwise the addition is a second kernel. A tap gets the product as from a
``matmul``. Errors as there, and ValueError if ``total`` has another shape."""

launch = torch.ops.fp8dist.launch.default
"""``(arrays, hold, …)``: see ``launch`` in ``reference/update.py``. ``arrays``: the fields of a ``StateArrays``."""

commit = torch.ops.fp8dist.commit.default
"""``(arrays, reduced, hold, …) -> bool[7]``: see ``commit`` in ``reference/update.py``. Keywords: fields of an
``UpdateRule``."""
