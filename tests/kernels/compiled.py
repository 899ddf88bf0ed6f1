"""Launches of the kernels, to be compiled ahead of time: a function for each file, which launches each variant once.

Shapes are those of Llama 3 8B and Mixtral. For Hopper there are more variants than for other GPUs."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from fp8dist_kernels.arrays import StateArrays, UpdateRule
from fp8dist_kernels.reference.content import BLOCK_WORDS
from fp8dist_kernels.reference.groups import blocks_bound, columns_bound
from fp8dist_kernels.reference.matmuls import FLOAT32_SCALINGS, Scaling
from fp8dist_kernels.reference.rings import RingShape
from fp8dist_kernels.triton import update as triton_update
from fp8dist_kernels.triton.blocks import quantize_blocks, quantize_rowwise
from fp8dist_kernels.triton.casts import add_up, choose_scale, quantize, transpose
from fp8dist_kernels.triton.content import many_leaves
from fp8dist_kernels.triton.grouped_casts import quantize_grouped, quantize_grouped_lines
from fp8dist_kernels.triton.grouped_matmuls import grouped_candidates, matmul_grouped, matmul_grouped_columns
from fp8dist_kernels.triton.magnitude import observe
from fp8dist_kernels.triton.matmuls import matmul_with
from fp8dist_kernels.triton.mx import multiply_mx, quantize_mx
from fp8dist_kernels.triton.scaled_grouped import clear_tail
from fp8dist_kernels.triton.shares import measure
from fp8dist_kernels.triton.tables import Tile
from fp8dist_kernels.triton.tiles import Problem, candidates
from fp8dist_kernels.triton.wire import decode, encode
from tests.support.ahead_of_time import BLACKWELL, HOPPER, Compiler

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BOTH: dict[str, Any] = {"rows": True, "columns": True}
LARGE = 1 << 30
M, N, K = 4096, 4096, 8192
"""Sizes of products."""

KINDS = [
    (scaling, fast) for scaling, fast in product(FLOAT32_SCALINGS, (True, False)) if not (scaling.in_blocks and fast)
]
"""With scales in blocks, both speeds are one kernel."""


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def short(*dtypes: torch.dtype) -> str:
    return " ".join(str(dtype).removeprefix("torch.").removeprefix("float8_") for dtype in dtypes)


# Casts -------------------------------------------------------------------------------------------------


def casts(compiler: Compiler) -> None:
    inputs = (
        ("bf16", empty(8192, 4096), E4M3),
        ("bf16 transposed", empty(14336, 8192).t(), E5M2),
        ("fp32", empty(8192, 4096, dtype=F32), E4M3),
    )
    for name, x, dtype in inputs:
        for what, options in (
            ("both, amax", {}),
            ("both, amax, just in time", {"just_in_time": True}),
            ("rows", {"columns": False, "record": False}),
            ("columns, amax", {"rows": False}),
        ):
            if compiler.capability == HOPPER or "just_in_time" in options:
                _cast(compiler, f"{name}: {what}", x, dtype, **options)
    for name, x, _ in inputs:  # Gradients of modules with a bias.
        _cast(compiler, f"{name}: both, amax, sums", x, E5M2, sums=True)
        # Of slots that may be cold, as in a CUDA graph. If x is transposed, another kernel adds up.
        for sums in (False, True)[: 1 + x.is_contiguous()]:
            case = f"{name}: both, amax, {'sums, ' * sums}one launch"
            _cast(compiler, case, x, E5M2, just_in_time=True, sums=sums, one_launch=True)
        compiler.launch(f"{name}: added up", add_up, x, x.dtype)
    for name, x, dtype in inputs:  # Weights in training, and weights that FSDP gathers again.
        _cast(compiler, f"{name}: both, amax, outgrown", x, dtype, just_in_time=True, outgrown=1.25)
    for record, just_in_time, outgrown in ((True, True, None), (True, False, 1.25), (False, False, None)):
        slot = torch.ones(()), torch.ones((), dtype=torch.bool), torch.zeros(())
        compiler.launch(
            f"{'amax, ' * record}{'just in time, ' * just_in_time}{'outgrown' * bool(outgrown)}",
            choose_scale, torch.zeros((), dtype=BF16), *slot, E4M3, record=record, just_in_time=just_in_time, margin=1,
            power_of_two=True, outgrown=outgrown,
        )  # fmt: skip
    for name, shape in (
        ("weight", (14336, 4096)),
        ("experts", (8, 4096, 1024)),
        ("far", ((1 << 19) + 128, 4096)),  # More than 2**31 bytes.
    ):
        compiler.launch(f"transpose {name}", transpose, empty(*shape, dtype=E4M3))
    if compiler.capability != HOPPER:
        return
    _cast(compiler, "bf16: columns, outgrown", inputs[0][1], E4M3, rows=False, record=False, outgrown=2.0)
    for name, x, dtype in (
        ("bf16 wide", empty(8192, 14336), E5M2),
        ("bf16 padded", empty(8192, 4096 + 64)[:, 32:-32], E4M3),
        ("fp16", empty(8192, 4096, dtype=F16), E5M2),
        ("bf16 far", empty((1 << 19) + 128, 4096), E4M3),  # More than 2**31 elements.
        ("bf16 odd", empty(1000, 1001), E4M3),
        ("bf16 one for all", empty().expand(8192, 4096), E5M2),
        ("fp32 every second", empty(8192, 8192, dtype=F32)[:, ::2], E4M3),
        ("bf16 very far", empty(3, LARGE)[:, :4096], E4M3),  # Offsets above 2**31 within a tile.
    ):
        _cast(compiler, f"{name}: both, amax, just in time", x, dtype, just_in_time=True)
        if name.endswith("far"):
            _cast(compiler, f"{name}: both, amax, one launch", x, dtype, just_in_time=True, one_launch=True)


def _cast(
    compiler: Compiler,
    case: str,
    x: Tensor,
    dtype: torch.dtype,
    *,
    sums: bool = False,
    one_launch: bool = False,
    **options: Any,
) -> None:
    options = {"record": True, "just_in_time": False, **BOTH, **options}
    options["sums"] = empty(x.shape[1]) if sums else None
    options["scratch"] = torch.zeros(4, dtype=torch.int32) if one_launch else None
    slot = torch.ones(()), torch.ones((), dtype=torch.bool), torch.zeros(())
    compiler.launch(case, quantize, x, *slot, dtype, margin=1, power_of_two=True, **options)


def slots(compiler: Compiler) -> None:
    """Three slots of an arena."""
    x = empty(8192, 4096)
    scale, cold, pending = torch.ones(3), torch.ones(3, dtype=torch.bool), torch.zeros(3)
    scratch, how = torch.zeros(3, 4, dtype=torch.int32), {"record": True, "just_in_time": True, "margin": 0}
    for slot in range(3):
        for outgrown, room in ((None, None), (1.0 + slot / 4, None), (None, scratch[slot])):
            compiler.launch(
                f"slot {slot}", quantize, x, scale[slot], cold[slot], pending[slot], E4M3, power_of_two=False,
                outgrown=outgrown, scratch=room, **how, **BOTH,
            )  # fmt: skip
        compiler.launch(f"slot {slot}", observe, x, pending[slot])


def blocks(compiler: Compiler) -> None:
    x = empty(8192, 4096)
    compiler.launch("row-wise bf16 e4m3", quantize_rowwise, x, E4M3, power_of_two=False, **BOTH)
    compiler.launch("row-wise f32 e5m2 pow2", quantize_rowwise, x.float(), E5M2, power_of_two=True, **BOTH)
    for case, given, dtype, columns in (
        ("1x128 bf16 e4m3", x, E4M3, True),
        ("1x128 bf16 transposed e5m2", empty(14336, 8192).t(), E5M2, True),
        ("1x128 bf16 e4m3 pow2, rows", x, E4M3, False),
        ("1x128 f32 e4m3", x.float(), E4M3, True),
        ("128x128 bf16 e4m3", x, E4M3, True),
        ("128x128 f32 e4m3 pow2", x.float(), E4M3, True),
    ):
        block, power_of_two = (1 if case.startswith("1x") else 128, 128), "pow2" in case
        options = {"block": block, "power_of_two": power_of_two, "rows": True, "columns": columns}
        compiler.launch(case, quantize_blocks, given, dtype, **options)


def grouped_casts(compiler: Compiler) -> None:
    """Each kind of input has the variant that does most, and one input all variants: the others leave out code."""
    tokens, n, k = 8192, 14336, 4096
    inputs = [
        ("rows of 8", empty(tokens, k), 8, E4M3),
        ("rows of 512", empty(tokens, k), 512, E5M2),
        ("weights", empty(8, n, k), 8, E4M3),
    ]
    if compiler.capability == HOPPER:
        inputs += [
            ("fp32 rows of 8", empty(tokens, k, dtype=F32), 8, E4M3),
            ("far rows of 8", empty((1 << 19) + 128, k), 8, E4M3),  # Beyond 2**31.
            ("very far rows of 8", empty(3, LARGE)[:, :k], 8, E4M3),
            ("transposed weights", empty(8, k, n).mT, 8, E4M3),
        ]
    for name, x, groups, dtype in inputs:
        offsets = None if x.ndim == 3 else torch.zeros(groups, dtype=torch.int32)
        of = torch.ones(groups), torch.ones(groups, dtype=torch.bool), torch.zeros(groups)
        for what, columns, just_in_time, outgrown in (
            ("both, just in time", True, True, None),
            ("both, outgrown", True, True, 1.25),
            ("both", True, False, None),
            ("rows", False, False, None),
        ):
            if outgrown or (compiler.capability == HOPPER and name == "rows of 8"):
                compiler.launch(
                    f"{name}: {what}", quantize_grouped, x, offsets, *of, dtype, record=True, margin=0, rows=True,
                    just_in_time=just_in_time, power_of_two=False, columns=columns, outgrown=outgrown,
                )  # fmt: skip
        for in_blocks in (False, True) if offsets is not None and len(x) == tokens else ():
            case, options = f"{name}: {'1x128' if in_blocks else 'row-wise'}", {"in_blocks": in_blocks, **BOTH}
            compiler.launch(case, quantize_grouped_lines, x, offsets, dtype, power_of_two=False, **options)


def mx(compiler: Compiler) -> None:
    for name, given, dtype, up in (
        ("bf16", empty(8192, 4096), E4M3, False),
        ("bf16 transposed up", empty(8192, 4096).t(), E5M2, True),
        ("f32 odd", empty(1000, 1001, dtype=F32), E4M3, True),
        ("far", empty((1 << 19) + 128, 4096), E4M3, False),  # More than 2**31 elements.
    ):
        compiler.launch(name, quantize_mx, given, dtype, round_up=up, **BOTH)
    a, b = empty(8191, 4096, dtype=E4M3), empty(1024, 4096, dtype=E4M3)
    scales = [empty(lines, 128, dtype=E8M0) for lines in (8191, 1024)]
    for out, bias in ((BF16, empty(1024)), (F32, None)):
        compiler.launch(f"product {short(out)}", multiply_mx, a, b, *scales, out, bias)
    case, offsets, width = "product of experts", torch.zeros(8, dtype=torch.int32), columns_bound(8191, 8, 32)
    experts, of_experts = b.expand(8, *b.shape).contiguous(), empty(8, 1024, 128, dtype=E8M0)
    compiler.launch(case, matmul_grouped, a, experts, scales[0], of_experts, offsets, BF16, False)
    sides = [empty(lines, width, dtype=E4M3) for lines in (1024, 4096)]
    of_sides = [empty(lines, width // 32, dtype=E8M0) for lines in (1024, 4096)]
    compiler.launch(case, matmul_grouped_columns, *sides, *of_sides, offsets, BF16, False)


# What only reads, and state ------------------------------------------------------------------------------


def magnitude(compiler: Compiler) -> None:
    pending = torch.zeros(())
    for dtype in (BF16, F32) if compiler.capability == HOPPER else (BF16,):
        for name, x in (
            ("wide", empty(8192, 4096, dtype=dtype)),
            ("transposed, wide", empty(8192, 4096, dtype=dtype).t()),
            ("odd, wide", empty(8191, 4095, dtype=dtype)),
            ("padded, wide", empty(8192, 4096 + 64, dtype=dtype)[:, 32:-32]),
            ("beyond 2**31, wide", empty(3 * LARGE, dtype=dtype)),
            ("every second", empty(8192, 4096, dtype=dtype)[:, ::2]),
        ):
            compiler.launch(f"{short(dtype)}: {name}", observe, x, pending)


def shares(compiler: Compiler) -> None:
    tokens, features = 8192, 4096
    places = torch.zeros(()), torch.zeros(())
    scales = (
        ("one scale", torch.empty(()), (0, 0)),
        ("row-wise", torch.empty(tokens, 1), (1, features)),
        ("1x128", torch.empty(features // 128, tokens).t(), (1, 128)),
        ("128x128", torch.empty(tokens // 128, features // 128), (128, 128)),
        ("1x32", torch.empty(tokens, features // 32), (1, 32)),
    )
    for name, x, dtype in (
        ("bf16", empty(tokens, features), E4M3),
        ("bf16 transposed", empty(features, tokens).t(), E5M2),
        ("f32", empty(tokens, features, dtype=F32), E4M3),
        ("f32 transposed", empty(features, tokens, dtype=F32).t(), E5M2),
    ):
        for kind, inv_scale, block in scales if compiler.capability == HOPPER else scales[::2]:
            compiler.launch(f"{name}: {kind}", measure, x, inv_scale, dtype, *places, block=block)
    for name, x in (
        ("bf16 odd", empty(tokens, features + 1)[:, 1:]),
        ("bf16 far", empty(3, LARGE)),
        ("fp16 every second", empty(tokens, 2 * features, dtype=F16)[:, ::2]),
    ):
        if compiler.capability == HOPPER:
            compiler.launch(f"{name}: one scale", measure, x, torch.empty(()), E4M3, *places, block=(0, 0))


def content(compiler: Compiler) -> None:
    keys = torch.empty(2, BLOCK_WORDS, dtype=torch.int64)
    compiler.launch("leaves", many_leaves, [empty(8192, 4096), empty(100, dtype=F32)[1:]], keys)


def wire(compiler: Compiler) -> None:
    """A bucket of 25 MB on 8 ranks: a cast of all of it, the sum of a shard, and the last step. Also with a number of
    blocks that is no multiple of a program's."""
    for count, dtype in product((6400, 6403), (F32, BF16)):
        case, length = f"{count} blocks, {dtype}", count * 128
        bucket = empty(8 * length - 100, dtype=dtype)
        messages = compiler.launch(case, encode, bucket, 8, length)
        compiler.launch(case, decode, messages.unsqueeze(0), length, bucket[:length], 1 / 8)
        compiler.launch(case, decode, messages.unsqueeze(1), length, bucket)


def update(compiler: Compiler) -> None:
    """Both kernels for an arena of 1000 slots: short, usual and longest windows, and once with all options on."""
    for length, shards, hold, algorithm in (
        (16, 0, False, "max"),
        (1024, 0, False, "max"),
        (1024, 5, True, "most_recent"),
        (1_000_000, 0, False, "max"),
    ):
        arrays = StateArrays.allocate([448.0] * 1000, [464.0] * 1000, RingShape(length), torch.device("cpu"))
        if shards:
            arrays = arrays.with_shards(range(shards), [[900, 901, 902]] * shards)
        held, rule = torch.zeros(1) if hold else None, UpdateRule(length, 1, True, True, algorithm)  # type: ignore[arg-type]
        case = f"history {length}, {shards} sharded, hold {hold}, {algorithm}"
        compiler.launch(case, triton_update.launch, arrays, held, drop_nonfinite=True)
        compiler.launch(case, triton_update.commit, arrays, rule, arrays.send, held)


# Sizes of 1 ----------------------------------------------------------------------------------------------


def ones(compiler: Compiler) -> None:
    """Everything with as many sizes of 1 as it may have. Triton compiles an argument of 1 as a constant."""
    x, places = empty(1, 1), (torch.zeros(()), torch.zeros(()))
    for outgrown, one_launch in ((None, True), (1.25, False)):
        _cast(compiler, "cast", x, E4M3, just_in_time=True, sums=True, one_launch=one_launch, outgrown=outgrown)
    compiler.launch("transposed", transpose, x.to(E4M3))
    compiler.launch("amax", observe, x, places[0])
    compiler.launch("row-wise", quantize_rowwise, x, E4M3, power_of_two=False, **BOTH)
    for block in ((1, 128), (128, 128)):
        compiler.launch("blocks", quantize_blocks, x, E4M3, block=block, power_of_two=False, **BOTH)
        compiler.launch("shares", measure, x, torch.empty(1, 1), E4M3, *places, block=block)
    compiler.launch("mx", quantize_mx, x, E4M3, round_up=False, **BOTH)
    message = compiler.launch("message", encode, x.view(1), 1, 128)
    compiler.launch("message", decode, message.unsqueeze(0), 128, x.view(1))
    arrays = StateArrays.allocate([448.0], [464.0], RingShape(1), torch.device("cpu")).with_shards([0], [[0]])
    compiler.launch("state", triton_update.launch, arrays, torch.zeros(1), drop_nonfinite=True)
    rule = UpdateRule(1, 0, False, True, "max")
    compiler.launch("state", triton_update.commit, arrays, rule, arrays.send, torch.zeros(1))
    compiler.launch("leaves", many_leaves, [x], torch.empty(2, BLOCK_WORDS, dtype=torch.int64))
    offsets, slots = torch.zeros(1, dtype=torch.int32), (torch.ones(1), torch.ones(1, dtype=torch.bool), torch.zeros(1))
    for given, ends in ((x, offsets), (x[None], None)):
        compiler.launch(
            "experts", quantize_grouped, given, ends, *slots, E4M3, record=True, just_in_time=True, margin=0,
            power_of_two=False, outgrown=1.25, **BOTH,
        )  # fmt: skip
    for in_blocks in (False, True):
        options = {"in_blocks": in_blocks, "power_of_two": False, **BOTH}
        compiler.launch("experts", quantize_grouped_lines, x, offsets, E4M3, **options)
    compiler.launch("tail", clear_tail, x, offsets)
    tile, a, b = Tile(64, 64, 128, 4, 4, 8), empty(1, 256, dtype=E4M3), empty(16, 256, dtype=E4M3)
    for of_a, of_b in (((), ()), ((1, 1), (16, 1)), ((1, 2), (1, 2)), ((1, 2), (16, 2))):
        compiler.launch("product", matmul_with, tile, a, b, torch.empty(of_a), torch.empty(of_b), BF16, False)
    one = torch.ones(1)
    compiler.launch("experts", matmul_grouped, a, b[None], one, one, offsets, BF16, False, tile=tile)
    compiler.launch("experts", matmul_grouped_columns, b, b, one, one, offsets, BF16, False, tile=tile)


# Products ------------------------------------------------------------------------------------------------


def tiles_of(compiler: Compiler, scaling: Scaling, fast: bool) -> tuple[Tile, ...]:
    return candidates(Problem(M, N, K, scaling, fast, E4M3, E4M3, BF16), divmod(compiler.capability, 10))


def scales_of(scaling: Scaling, m: int) -> tuple[Tensor, Tensor]:
    """Return inverse scales of [m, K] and [N, K]."""
    if scaling is Scaling.TENSORWISE:
        return torch.empty(()), torch.empty(())
    if scaling is Scaling.ROWWISE:
        return torch.empty(m, 1), torch.empty(N, 1)
    of_b = torch.empty(N // 128, K // 128) if scaling is Scaling.BLOCKWISE else torch.empty(K // 128, N).t()
    return torch.empty(K // 128, m).t(), of_b


def named(scaling: Scaling, fast: bool) -> str:
    return f"{'' if scaling.in_blocks else 'fast ' if fast else 'slow '}{scaling.value}"


def matmuls(compiler: Compiler) -> None:
    """Every candidate tile."""

    def launch(
        tile: Tile, scaling: Scaling, fast: bool, out: torch.dtype = BF16, biased: bool = False,
        pair: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3), m: int = M, sideways: bool = False,
    ) -> None:  # fmt: skip
        b = empty(K, N, dtype=pair[1]).t() if sideways else empty(N, K, dtype=pair[1])
        formats = "" if pair == (E4M3, E4M3) else f" {short(pair[0])} x {short(pair[1])}"
        case = f"{named(scaling, fast)} {tile.rows}x{tile.columns}x{tile.depth} {short(out)}{' bias' * biased}{formats}"
        case += " sideways" * sideways + " ragged" * (m != M)
        given = empty(m, K, dtype=pair[0]), b, *scales_of(scaling, m)
        compiler.launch(case, matmul_with, tile, *given, out, fast, empty(N) if biased else None)

    for scaling, fast in KINDS:
        tiles = tiles_of(compiler, scaling, fast)
        for tile in tiles:
            launch(tile, scaling, fast, biased=True)
            if compiler.capability == BLACKWELL and scaling in (Scaling.TENSORWISE, Scaling.BLOCKWISE):
                launch(tile, scaling, fast, biased=True, sideways=True)
        if compiler.capability == HOPPER:  # float32 output with the largest tile needs the most registers.
            launch(tiles[0], scaling, fast, F32)
    if compiler.capability == HOPPER:
        best = {kind: tiles_of(compiler, *kind)[0] for kind in KINDS}
        launch(best[Scaling.TENSORWISE, True], Scaling.TENSORWISE, True, F16)
        for scaling in (Scaling.BLOCKWISE, Scaling.BLOCKWISE_1D):
            launch(best[scaling, False], scaling, False, m=M - 1)
        kinds = ((Scaling.TENSORWISE, True), (Scaling.ROWWISE, False), (Scaling.BLOCKWISE_1D, False))
        for pair, kind in product(((E5M2, E4M3), (E4M3, E5M2)), kinds):
            launch(best[kind], *kind, pair=pair)


def matmuls_into(compiler: Compiler) -> None:
    """Operands as those of a wgrad, and every candidate tile."""

    def launch(tile: Tile, scaling: Scaling, fast: bool, dtype: torch.dtype, m: int = M) -> None:
        case = f"{named(scaling, fast)} {tile.rows}x{tile.columns}{' far' * (m != M)} into {short(dtype)}"
        given = empty(m, K, dtype=E5M2), empty(N, K, dtype=E4M3), *scales_of(scaling, m)
        compiler.launch(case, matmul_with, tile, *given, F32, fast, None, empty(m, N, dtype=dtype))

    for scaling, fast in KINDS:
        if scaling is Scaling.BLOCKWISE:
            continue  # Never.
        tiles = tiles_of(compiler, scaling, fast)
        for tile in tiles:
            launch(tile, scaling, fast, F32)
        if compiler.capability in (HOPPER, BLACKWELL):
            launch(tiles[0], scaling, fast, BF16)
    if compiler.capability == HOPPER:  # More than 2**31 elements.
        launch(tiles_of(compiler, Scaling.TENSORWISE, True)[0], Scaling.TENSORWISE, True, F32, (1 << 19) + 128)


def tail(compiler: Compiler) -> None:
    compiler.launch("8 experts", clear_tail, empty(8192, 14336), torch.zeros(8, dtype=torch.int32))


def grouped_matmuls(compiler: Compiler) -> None:
    """Each tile that may be chosen, for each scaling; the formats of a gradient; many experts.

    Tiles below 128 x 128 need no more registers than that one. They are launched for one scale per expert only.
    """

    def tiles(scaling: Scaling, fast: bool) -> tuple[Tile, ...]:
        problem = Problem(1 << 16, 14336, 4096, scaling, fast, E4M3, E4M3, BF16)
        return grouped_candidates(problem, divmod(compiler.capability, 10))

    for scaling, fast in KINDS:
        for tile in tiles(scaling, fast):
            if scaling is Scaling.TENSORWISE or tile.rows * tile.columns >= 128 * 128:
                _grouped_product(compiler, tile, scaling, fast)
    best = tiles(Scaling.TENSORWISE, True)[0]
    _grouped_product(compiler, best, Scaling.TENSORWISE, True, pair=(E5M2, E4M3), out=F32)
    _grouped_product(compiler, best, Scaling.TENSORWISE, True, groups=512)


def _grouped_product(
    compiler: Compiler, tile: Tile, scaling: Scaling, fast: bool, groups: int = 8,
    pair: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3), out: torch.dtype = BF16,
) -> None:  # fmt: skip
    case = f"{named(scaling, fast)} of {groups}, {tile.rows}x{tile.columns}x{tile.depth} {short(*pair, out)}"
    tokens, n, k = 8192, *((14336, 4096) if groups < 512 else (1024, 1024))  # Virtual memory, too, is limited.
    blocks, offsets, width = k // 128, torch.zeros(groups, dtype=torch.int32), columns_bound(tokens, groups)
    a, b = empty(tokens, k, dtype=pair[0]), empty(groups, n, k, dtype=pair[1])
    scales = {
        Scaling.TENSORWISE: ((groups,), (groups,)),
        Scaling.ROWWISE: ((tokens, 1), (groups, n, 1)),
        Scaling.BLOCKWISE: ((blocks, tokens), (groups, n // 128, blocks)),
        Scaling.BLOCKWISE_1D: ((blocks, tokens), (groups, blocks, n)),
    }[scaling]
    of_a, of_b = map(torch.empty, scales)
    of_a, of_b = of_a.t() if scaling.in_blocks else of_a, of_b.mT if scaling is Scaling.BLOCKWISE_1D else of_b
    compiler.launch(case, matmul_grouped, a, b, of_a, of_b, offsets, out, fast, empty(groups, n), tile=tile)
    if scaling is Scaling.BLOCKWISE:
        return  # No wgrad has such scales.
    if scaling is Scaling.BLOCKWISE_1D:
        of_lines = [torch.empty(blocks_bound(tokens, groups), size).t() for size in (n, k)]
    else:
        of_lines = [torch.empty((groups,) if scaling is Scaling.TENSORWISE else (groups, size, 1)) for size in (n, k)]
    sides = [empty(size, width, dtype=dtype) for size, dtype in zip((n, k), pair)]
    compiler.launch(case, matmul_grouped_columns, *sides, *of_lines, offsets, out, fast, tile=tile)
