"""The grouped ops: what torch.compile sees of them, and that Triton's path never reads offsets on the host."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp8dist_kernels import direct, grouped_ops, ops
from fp8dist_kernels.reference import grouped_casts as plain_casts
from fp8dist_kernels.reference import grouped_matmuls as plain_matmuls
from fp8dist_kernels.reference.groups import blocks_bound, columns_bound
from fp8dist_kernels.reference.matmuls import Scaling
from fp8dist_kernels.reference.scaled_grouped import clear_tail, multiply_grouped_torch
from fp8dist_kernels.triton import grouped_casts, grouped_matmuls
from fp8dist_kernels.triton.groups import tiles_bound
from tests.support.casting import hard_values
from tests.support.devices import DEVICE
from tests.support.grouped import ends, slots_of

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
CAST: dict[str, Any] = {"record": True, "just_in_time": True, "margin": 0, "power_of_two": True}
BOTH = {"rows": True, "columns": True}
GROUPS, N, K = 3, 32, 48


def test_a_grid_has_a_tile_for_every_row() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        counts = [chance.choice((0, 0, 1, 15, 17, 128, chance.randrange(300))) for _ in range(chance.randrange(1, 9))]
        tokens, tile = sum(counts) + chance.choice((0, 1, 15, 16, 200)), chance.choice((32, 64, 128))
        of_groups = sum(-(-count // tile) for count in counts)
        tail = tokens - sum(counts)
        busy = min(tokens, len(counts))
        assert of_groups + -(-tail // tile) <= tiles_bound(tokens, busy, tile)
        taken = sum(-(-count // 16) * 16 for count in counts)
        rest = columns_bound(tokens, len(counts)) - taken
        assert rest >= 0
        assert of_groups + -(-max(tail, rest) // tile) <= tiles_bound(taken + rest, len(counts), tile)
        assert sum(-(-count // 128) for count in counts) <= blocks_bound(tokens, len(counts))


def test_nothing_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without memory, any read raises. Launches are left out, but their grids are numbers."""
    launched = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launched.append(grid)
            return lambda *args, **kwargs: None

    for module in (grouped_casts, grouped_matmuls):
        for name in dir(module):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Launch())
    x, weight = torch.empty(32, K, dtype=BF16, device="meta"), torch.empty(GROUPS, N, K, dtype=BF16, device="meta")
    slots, offsets = slots_of(GROUPS, "meta"), torch.empty(GROUPS, dtype=torch.int32, device="meta")
    a, b, wide, one = x.to(E4M3), weight.to(E4M3), torch.empty(N, 80, device="meta").to(E4M3), slots[0]

    def run(casts: Any, matmuls: Any) -> Iterator[Any]:
        yield lambda: casts.quantize_grouped(x, offsets, *slots, E4M3, outgrown=1.25, **CAST, **BOTH)
        for blocks in (True, False):
            yield lambda: casts.quantize_grouped_lines(x, offsets, E4M3, in_blocks=blocks, power_of_two=False, **BOTH)  # noqa: B023
        yield lambda: matmuls.matmul_grouped(a, b, one, one, offsets, BF16, True, weight[:, :, 0])
        yield lambda: matmuls.matmul_grouped_columns(wide, wide, one, one, offsets, BF16, True)

    for call in run(grouped_casts, grouped_matmuls):
        call()
    assert len(launched) == 7, "two passes for a slot, two for rows, one for blocks, two products"
    assert all(type(size) is int for grid in launched for size in grid)
    monkeypatch.setattr(torch, "_scaled_grouped_mm_v2", lambda a, b, *_: a.new_empty((len(a), b.shape[2]), dtype=BF16))
    for scaling, shapes in ((Scaling.TENSORWISE, ((3,), (3,))), (Scaling.ROWWISE, ((32, 1), (3, N, 1)))):
        scales = (torch.empty(shape, device="meta") for shape in shapes)
        assert multiply_grouped_torch(scaling, a, b, *scales, offsets, True, clear_tail).shape == (32, N)
    for call in run(plain_casts, plain_matmuls):
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            call()


@pytest.mark.long
def test_opcheck() -> None:
    x, offsets = hard_values(32, K, finite=True).bfloat16(), ends((20, 0, 7), DEVICE)
    weight = hard_values(GROUPS * N, K, 3, finite=True).bfloat16().view(GROUPS, N, K)
    check, lines = torch.library.opcheck, {"power_of_two": False, **BOTH}
    for given in ((x, offsets), (weight, None)):
        for rows in (True, False):
            options = {**CAST, "rows": rows, "columns": True}
            check(grouped_ops.quantize_grouped, (*given, *slots_of(GROUPS), E4M3), options)
    for in_blocks in (True, False):
        check(grouped_ops.quantize_grouped_lines, (x, offsets, E4M3), {"in_blocks": in_blocks, **lines})
    for block in ([1, 128], [128, 128]):
        check(ops.quantize_blocks, (weight, E4M3), {"block": block, **lines})
    rows_of_x, columns, inv = direct.quantize_grouped(x, offsets, *slots_of(GROUPS), E4M3, **CAST, **BOTH)
    of_w, _, inv_w = direct.quantize_grouped(weight, None, *slots_of(GROUPS), E4M3, **CAST, **BOTH)
    product: Any = {"kwargs": {"fast_accumulation": False}}
    # No allclose of FP8.
    product["test_utils"] = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    check(grouped_ops.matmul_grouped, (rows_of_x, of_w, inv, inv_w, offsets, BF16), **product)
    check(grouped_ops.matmul_grouped_columns, (columns, columns, inv, inv, offsets, BF16), **product)
