"""Each op that reads a tensor, in Triton and in plain torch: the same bits, one row per op.

What plain torch computes is compared with oracles in the ops' own files; products have small sums of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from fp8dist_kernels.reference import blocks, casts, grouped_casts, magnitude, mx, shares, wire
from fp8dist_kernels.reference.content import ContentDigest
from fp8dist_kernels.triton import version_of
from tests.support.casting import DTYPES, FORMATS, LAYOUTS, assert_same, hard_values, poison
from tests.support.devices import DEVICE
from tests.support.grouped import ends, slots_of
from tests.support.interpreter import convert_float_upstream
from tests.support.suite import NIGHTLY

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # From the interpreter's numpy.

SHAPES = ((1, 16), (33, 80), (130, 272), (17, 3), (0, 32))
FAR = (((3, 16), (2**30, 1)), ((386, 16), (2**23 - 16, 1)), ((16, 386), (1, 2**23 - 16)))
"""Shapes and strides with offsets beyond 32 bits: in a tile, and between tiles of up to 128 x 128 whose own offsets fit
in 32."""

BOTH: dict[str, Any] = {"rows": True, "columns": True}
Run = Callable[[bool, Tensor, torch.dtype, int], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Op:
    """``run(fused, x, dtype, turn)`` returns all that one version writes. ``turn`` chooses among options.

    ``make``: x, like ``hard_values``. ``strided``: False if the op takes contiguous memory only.
    """

    run: Run
    make: Callable[..., Tensor] = hard_values
    sources: tuple[torch.dtype, ...] = DTYPES
    strided: bool = True


def _version(fused: bool, of: ModuleType) -> Any:
    return version_of(of) if fused else of


def _cast(fused: bool, x: Tensor, dtype: torch.dtype, turn: int, **more: Any) -> tuple[Tensor, ...]:
    scale, cold, pending = (slot[0] for slot in slots_of(1, x.device))
    cold.fill_(turn % 2 == 0)
    options: dict[str, Any] = {"record": True, "just_in_time": turn % 4 < 2, "margin": 0, **BOTH, **more}
    options["outgrown"] = (None, 1.25)[turn % 2]
    made = _version(fused, casts).quantize(x, scale, cold, pending, dtype, power_of_two=turn % 3 == 0, **options)
    return *made, pending


def _cast_in_one_launch(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    total, scratch = torch.empty(x.shape[1], device=x.device), torch.zeros(4, dtype=torch.int32, device=x.device)
    options: dict[str, Any] = {"rows": turn % 3 != 1, "columns": turn % 3 != 2, "just_in_time": True, "sums": total}
    made = _cast(fused, x, dtype, 2 * turn, **options, **({"scratch": scratch} if fused else {}))
    assert not scratch.any(), "the next launch needs it as it was"
    return *made, total


def _cast_with_sums(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    """The cast takes them or not: it does not of a tensor that is transposed, or without a transposed copy."""
    total = torch.empty(x.shape[1], dtype=(torch.float32, torch.bfloat16)[turn % 2], device=x.device)
    made = _cast(fused, x, dtype, turn, sums=total, columns=turn % 2 == 0)
    assert_same((total,), (_version(fused, casts).add_up(x, total.dtype),))
    return *made, total


def _transposition(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    made = _version(fused, casts).transpose(x.view(dtype))
    assert made.is_contiguous()
    assert made.data_ptr() != x.data_ptr() or not x.numel()
    return (made.view(torch.uint8),)  # NaNs keep their payload.


def _any_bytes(tokens: int, features: int, seed: int = 0, finite: bool = False) -> Tensor:
    return torch.arange(tokens * features, device=DEVICE).mul(37).to(torch.int8).view(tokens, features)


def _lines(block: tuple[int, int] | None) -> Run:
    def run(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
        version, options = _version(fused, blocks), {"power_of_two": turn % 3 == 0, **BOTH}
        if block is None:
            return version.quantize_rowwise(x, dtype, **options)
        return version.quantize_blocks(x, dtype, block=block, **options)

    return run


def _experts(x: Tensor) -> Tensor:
    """Return two matrices of half of the rows each."""
    half = len(x) // 2
    return x[: 2 * half].unflatten(0, (2, half))


def _experts_in_blocks(block: tuple[int, int]) -> Run:
    """Blocks do not cross experts."""

    def run(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
        options = {"block": block, "power_of_two": turn % 3 == 0, "rows": turn % 4 != 1, "columns": turn % 4 != 3}
        return _version(fused, blocks).quantize_blocks(_experts(x), dtype, **options)

    return run


def _experts_with_slots(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    slots, options = slots_of(2, x.device), {"record": True, "just_in_time": turn % 2 == 0, "margin": 0}
    options |= {"rows": turn % 4 != 1, "columns": turn % 4 != 3, "outgrown": (None, 1.25)[turn % 2]}
    version = _version(fused, grouped_casts)
    return *version.quantize_grouped(_experts(x), None, *slots, dtype, power_of_two=False, **options), slots[2]


def _as_bytes(made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the results of an MX cast, with the scales as bytes."""
    return tuple(one.view(torch.uint8) if one.dtype is torch.float8_e8m0fnu else one for one in made)


def _mx(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    return _as_bytes(_version(fused, mx).quantize_mx(x, dtype, round_up=turn % 2 == 0, rows=turn % 3 < 2, columns=True))


def _amax(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    pending = torch.full((), -1.0, device=x.device)
    _version(fused, magnitude).observe(x, pending)
    return (pending,)


def _shares(block: tuple[int, int] | None) -> Run:
    """Of scales from 2**-10 to 2**10, which may be strided."""

    def run(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
        height, width = block or (1, max(1, x.shape[1]))
        shape = (-(-x.shape[0] // height), -(-x.shape[1] // width)) if height else ()
        inv_scale = torch.exp2(20 * torch.rand(shape, generator=torch.Generator().manual_seed(turn)) - 10).to(x.device)
        if inv_scale.ndim == 2:
            inv_scale = LAYOUTS[("contiguous", "transposed", "every second")[turn % 3]](inv_scale)
        found = torch.full((3,), -1.0, device=x.device)
        _version(fused, shares).measure(x, inv_scale, dtype, found[0], found[2], block=block or (1, x.shape[1]))
        return (found,)

    return run


def _rows_of_three(tokens: int, features: int, seed: int = 0, finite: bool = False) -> Tensor:
    """Return rows for ``_of_three``: a fifth of them belong to no expert, and are NaN."""
    x = hard_values(tokens, features, seed, finite)
    x[tokens - tokens // 5 :] = torch.nan
    return x


def _of_three(x: Tensor) -> Tensor:
    """Return the offsets of three experts, of which one has no rows."""
    mine = len(x) - len(x) // 5
    return ends((mine // 3, 0, mine - mine // 3), x.device)


def _grouped(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    slots = slots_of(3, x.device, apart=1 + turn % 3)
    made = _version(fused, grouped_casts).quantize_grouped(
        x, _of_three(x), *slots, dtype, record=True, just_in_time=turn % 2 == 0, margin=turn % 2,
        power_of_two=turn % 3 == 0, **BOTH,
    )  # fmt: skip
    return *made, slots[2]


def _grouped_lines(in_blocks: bool) -> Run:
    def run(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
        return _version(fused, grouped_casts).quantize_grouped_lines(
            x, _of_three(x), dtype, in_blocks=in_blocks, power_of_two=turn % 3 == 0, rows=turn % 7 != 2,
            columns=turn % 7 not in (2, 5),
        )  # fmt: skip

    return run


def _grouped_mx(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    options = {"round_up": turn % 2 == 0, "rows": turn % 3 != 1, "columns": turn % 3 != 2}
    return _as_bytes(_version(fused, grouped_casts).quantize_grouped_mx(x, _of_three(x), dtype, **options))


def _messages(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    """Messages of gradients and their sums. Shards are uneven, the last one may be empty."""
    flat, count = x.contiguous().view(-1), 1 + turn % 4
    length = max(1, -(-flat.numel() // count) + turn % 3)
    messages = _version(fused, wire).encode(flat, count, length)
    sums = [torch.empty_like(flat) for _ in range(2)]
    for out, summands in zip(sums, ([messages], [messages, messages.flip(0), messages])):
        _version(fused, wire).decode(torch.stack(summands, 1), length, out, 1 / 3)
    of_numbers = 128 * (messages.shape[1] // wire.BYTES)
    numbers, inv_scales = (part.contiguous() for part in (messages[:, :of_numbers], messages[:, of_numbers:]))
    return numbers.view(torch.float8_e4m3fn), inv_scales.view(torch.float32), *sums


def _leaves(fused: bool, x: Tensor, dtype: torch.dtype, turn: int) -> tuple[Tensor, ...]:
    digest = ContentDigest(x.device, "triton" if fused else "torch")
    return (digest.many_leaves([x, x[1:]])[0].view(torch.uint8),)


OPS = {
    "cast": Op(_cast),
    "cast in one launch": Op(_cast_in_one_launch),
    "cast with sums": Op(_cast_with_sums),
    "transposition": Op(_transposition, _any_bytes, (torch.int8,)),
    "cast, row-wise": Op(_lines(None)),
    "cast, 1x128": Op(_lines((1, 128))),
    "cast, 128x128": Op(_lines((128, 128))),
    "cast to MX": Op(_mx),
    "cast of experts": Op(_experts_with_slots),
    "cast of experts, 1x128": Op(_experts_in_blocks((1, 128))),
    "cast of experts, 128x128": Op(_experts_in_blocks((128, 128))),
    "amax": Op(_amax),
    "shares": Op(_shares((0, 0)), sources=(*DTYPES, torch.float64)),
    "shares, row-wise": Op(_shares(None), sources=(*DTYPES, torch.float64)),
    "shares, 1x128": Op(_shares((1, 128)), sources=(*DTYPES, torch.float64)),
    "shares, 1x32": Op(_shares((1, 32)), sources=(*DTYPES, torch.float64)),
    "shares, 128x128": Op(_shares((128, 128)), sources=(*DTYPES, torch.float64)),
    "grouped cast": Op(_grouped, _rows_of_three),
    "grouped cast, row-wise": Op(_grouped_lines(False), _rows_of_three),
    "grouped cast, 1x128": Op(_grouped_lines(True), _rows_of_three),
    "grouped cast to MX": Op(_grouped_mx, _rows_of_three),
    "messages": Op(_messages, strided=False),
    "digest": Op(_leaves),
}


def _compare(op: Op, x: Tensor, dtype: torch.dtype, turn: int) -> None:
    assert_same(op.run(True, x, dtype, turn), op.run(False, x, dtype, turn))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_triton_has_the_bits_of_its_twin(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    for turn, layout in enumerate(("contiguous", "transposed")):
        _compare(op, LAYOUTS[layout](op.make(33, 48, turn).to(op.sources[0])), FORMATS[turn % 2], turn)


EVERYTHING = [*itertools.product(SHAPES, LAYOUTS)]
LYING = [*LAYOUTS][2:]  # ``test_triton_has_the_bits_of_its_twin`` has the first two.
IN_TURN = [*zip(((130, 144), *SHAPES[3:], *SHAPES[:2], SHAPES[3]), LYING, strict=True)]


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize(
    "cases", [pytest.param(IN_TURN, marks=pytest.mark.slow), pytest.param(EVERYTHING, marks=NIGHTLY)],
    ids=["in turn", "everything"],
)  # fmt: skip
def test_all_shapes_and_strides(op: Op, cases: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Five shapes, all layouts, and the pairs of dtypes in turn."""
    poison(monkeypatch)
    types = [*itertools.product(op.sources, FORMATS)]
    for index, ((tokens, features), layout) in enumerate(cases):
        turn = index + index // len(LAYOUTS)  # Shift the pairing, so that each layout meets all types.
        source, dtype = types[turn % len(types)]
        x = LAYOUTS[layout](op.make(tokens, features, index, turn % 4 < 2).to(source))
        _compare(op, x, dtype, turn)


STRIDED = {name: op for name, op in OPS.items() if op.strided}


@pytest.mark.parametrize("op", STRIDED.values(), ids=STRIDED)
def test_offsets_beyond_32_bits(op: Op) -> None:
    kind = torch.int8 if torch.int8 in op.sources else torch.float16
    room = torch.empty(25 * 2**27, dtype=kind, device=DEVICE)  # Untouched pages take no CPU memory.
    for turn, (shape, strides) in enumerate(FAR):
        far = room.as_strided(shape, strides)
        far.copy_(op.make(*shape, turn, True))
        near = far.clone()
        assert_same(op.run(True, far, FORMATS[0], turn), op.run(False, near, FORMATS[0], turn))


def test_upstreams_interpreter_still_converts_wrongly() -> None:
    """It loses the carry of a mantissa. If this fails, Triton has fixed it: delete ``convert_float``."""
    numbers = torch.tensor([31.9, 17.0, 19.0])
    got = convert_float_upstream(numbers.numpy(), tl.float32, tl.float8e4nv, None)
    assert (got.view(np.uint8) != numbers.to(FORMATS[0]).view(torch.uint8).numpy()).any()


def test_the_inputs_are_hard() -> None:
    """Values that a cast saturates, flushes and keeps, of both signs; NaN and infinity where they are asked for."""
    for finite in (True, False):
        x = hard_values(33, 80, 1, finite)
        assert bool((x.abs() > 448).any() and ((x != 0) & (x.abs() < 2.0**-10)).any() and (x < 0).any())
        assert bool(x.isfinite().all()) == finite
        assert math.isnan(x.sum()) != finite
