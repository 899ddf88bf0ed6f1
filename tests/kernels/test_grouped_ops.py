"""The grouped ops: what torch.compile sees of them, and that Triton's path never reads offsets on the host."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist_kernels import direct, grouped_ops, ops
from fp8dist_kernels.reference import grouped_casts as plain_casts
from fp8dist_kernels.reference import grouped_matmuls as plain_matmuls
from fp8dist_kernels.reference.groups import blocks_bound, columns_bound
from fp8dist_kernels.triton import grouped_casts, grouped_matmuls
from fp8dist_kernels.triton.groups import tiles_bound
from tests.support.casting import assert_same, hard_values
from tests.support.devices import DEVICE
from tests.support.grouped import ends

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CAST: dict[str, Any] = {"record": True, "just_in_time": True, "margin": 0, "power_of_two": True, "rows": True}
GROUPS, N, K = 3, 32, 48


def slots() -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.full((GROUPS,), 2.0, device=DEVICE),
        torch.tensor([True, False, False], device=DEVICE),
        torch.full((GROUPS,), -1.0, device=DEVICE),
    )


def experts(x: Tensor, dy: Tensor, weight: Tensor, offsets: Tensor, backend: str = "auto") -> tuple[Tensor, ...]:
    """Return the output, both gradients, and the amaxes of the experts: one layer, forward and backward."""
    state = [slots() for _ in range(3)]
    rows, columns, inv_x = direct.quantize_grouped(x, offsets, *state[0], E4M3, columns=True, backend=backend, **CAST)
    of_w, of_wt, inv_w = direct.quantize_grouped(weight, None, *state[1], E4M3, columns=True, backend=backend, **CAST)
    of_dy, of_dyt, inv_dy = direct.quantize_grouped(dy, offsets, *state[2], E5M2, columns=True, backend=backend, **CAST)
    options = {"fast_accumulation": False, "backend": backend}
    y = direct.matmul_grouped(rows, of_w, inv_x, inv_w, offsets, torch.bfloat16, bias=weight[:, :, 0], **options)
    dx = direct.matmul_grouped(of_dy, of_wt, inv_dy, inv_w, offsets, torch.bfloat16, **options)
    dw = direct.matmul_grouped_columns(of_dyt, columns, inv_dy, inv_x, offsets, torch.float32, **options)
    return y, dx, dw, torch.stack([each[2] for each in state])


def layer(counts: tuple[int, ...], beyond: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, dy, weight and offsets."""
    tokens = sum(counts) + beyond
    x, dy = (hard_values(tokens, size, seed, finite=True).bfloat16() for seed, size in enumerate((K, N)))
    return x, dy, hard_values(GROUPS * N, K, 3, finite=True).bfloat16().view(GROUPS, N, K), ends(counts)


def test_a_layer_of_experts_is_one_linear_per_expert() -> None:
    """The backward pass too: dgrad has the transposed weight, and wgrad the transposed rows."""
    counts = (20, 0, 7)
    x, dy, weight, offsets = layer(counts)
    y, dx, dw, amaxes = experts(x, dy, weight, offsets, "reference")
    start, state = 0, [slots() for _ in range(3)]
    for index, count in enumerate(counts):
        mine = slice(start, start + count)
        cast = [
            direct.quantize(part, *(values[index] for values in slot), dtype, columns=True, **CAST)
            for part, slot, dtype in zip((x[mine], weight[index], dy[mine]), state, (E4M3, E4M3, E5M2))
        ]
        (rows, columns, inv_x), (of_w, of_wt, inv_w), (of_dy, of_dyt, inv_dy) = cast

        def product(*operands: Tensor, dtype: torch.dtype = torch.bfloat16, bias: Tensor | None = None) -> Tensor:
            return direct.matmul(*operands, dtype, bias=bias, fast_accumulation=False, backend="reference").float()

        alone = (
            product(rows, of_w, inv_x, inv_w, bias=weight[index, :, 0]),
            product(of_dy, of_wt, inv_dy, inv_w),
            product(of_dyt, columns, inv_dy, inv_x, dtype=torch.float32),
        )
        assert_same((y[mine].float(), dx[mine].float(), dw[index]), alone)
        start += count
    assert torch.equal(amaxes, torch.stack([each[2] for each in state]))
    assert amaxes[0, 1] == -1, "an expert without rows records nothing"


@pytest.mark.slow
def test_triton_has_the_bits_of_the_reference_with_powers_of_two() -> None:
    """A layer, forward and backward. Sums of small integers are exact in any order."""
    *rows, weight, offsets = layer((20, 0, 7))
    given = [part.clamp(-2, 2).round() for part in (*rows, weight)]
    for part in given[:2]:
        part[27:] = torch.nan
    triton, reference = (experts(*given, offsets, backend) for backend in ("triton", "reference"))
    assert_same(tuple(out.float() for out in triton), tuple(out.float() for out in reference))
    assert reference[2].any()


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
    x, _, weight, offsets = (part.to("meta") for part in layer((20, 0, 7)))
    slot = tuple(part.to("meta") for part in slots())
    one, lines = {"columns": True, **CAST, "outgrown": 1.25}, {"power_of_two": False, "rows": True, "columns": True}

    def run(casts: Any, matmuls: Any) -> Iterator[Any]:
        yield lambda: casts.quantize_grouped(x, offsets, *slot, E4M3, **one)
        for in_blocks in (True, False):
            yield lambda: casts.quantize_grouped_lines(x, offsets, E4M3, in_blocks=in_blocks, **lines)  # noqa: B023
        a, b, wide = x.to(E4M3), weight.to(E4M3), torch.empty(N, 80, device="meta").to(E4M3)
        yield lambda: matmuls.matmul_grouped(a, b, slot[0], slot[0], offsets, torch.bfloat16, True, weight[:, :, 0])
        yield lambda: matmuls.matmul_grouped_columns(wide, wide, slot[0], slot[0], offsets, torch.bfloat16, True)

    for call in run(grouped_casts, grouped_matmuls):
        call()
    assert len(launched) == 7, "two passes for a slot, two for rows, one for blocks, two products"
    assert all(type(size) is int for grid in launched for size in grid)
    for call in run(plain_casts, plain_matmuls):
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            call()


@pytest.mark.long
def test_opcheck() -> None:
    x, _, weight, offsets = layer((20, 0, 7))
    for given in ((x, offsets), (weight, None)):
        for rows, columns in ((True, True), (False, True)):
            options = {**CAST, "rows": rows, "columns": columns}
            torch.library.opcheck(grouped_ops.quantize_grouped, (*given, *slots(), E4M3), options)
    for in_blocks in (True, False):
        options = {"in_blocks": in_blocks, "power_of_two": False, "rows": True, "columns": True}
        torch.library.opcheck(grouped_ops.quantize_grouped_lines, (x, offsets, E4M3), options)
    for block in ([1, 128], [128, 128]):
        options = {"block": block, "power_of_two": False, "rows": True, "columns": True}
        torch.library.opcheck(ops.quantize_blocks, (weight, E4M3), options)
    rows, columns, inv = direct.quantize_grouped(x, offsets, *slots(), E4M3, columns=True, **CAST)
    of_w, _, inv_w = direct.quantize_grouped(weight, None, *slots(), E4M3, columns=True, **CAST)
    product = {"fast_accumulation": False}
    without_fp8 = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # No allclose of FP8.
    torch.library.opcheck(
        grouped_ops.matmul_grouped, (rows, of_w, inv, inv_w, offsets, torch.bfloat16), product, test_utils=without_fp8
    )
    torch.library.opcheck(
        grouped_ops.matmul_grouped_columns, (columns, columns, inv, inv, offsets, torch.bfloat16), product,
        test_utils=without_fp8,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself.
def test_one_graph_serves_all_token_counts() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager", dynamic=None)
    for index, counts in enumerate(((20, 0, 7), (3, 3, 3), (0, 41, 1), (64, 0, 0), (16, 16, 16), (1, 1, 0))):
        given = layer(counts)
        if index == 0:
            for rows in given[:2]:
                torch._dynamo.mark_dynamic(rows, 0)
        assert_same(tuple(out.float() for out in compiled(*given)), tuple(out.float() for out in experts(*given)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
