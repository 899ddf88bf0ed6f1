"""Launches of small kernels, each variant once, to be compiled ahead of time: a function for each of their files."""

from __future__ import annotations

import itertools

import torch

from fp8dist_kernels.arrays import StateArrays, UpdateRule
from fp8dist_kernels.reference.content import BLOCK_WORDS
from fp8dist_kernels.reference.groups import columns_bound
from fp8dist_kernels.reference.rings import RingShape
from fp8dist_kernels.triton import update as triton_update
from fp8dist_kernels.triton.blocks import quantize_blocks, quantize_rowwise
from fp8dist_kernels.triton.casts import quantize
from fp8dist_kernels.triton.content import many_leaves
from fp8dist_kernels.triton.grouped_matmuls import matmul_grouped, matmul_grouped_columns
from fp8dist_kernels.triton.magnitude import observe
from fp8dist_kernels.triton.mx import multiply_mx, quantize_mx
from fp8dist_kernels.triton.scaled_grouped import clear_tail
from fp8dist_kernels.triton.shares import measure
from fp8dist_kernels.triton.wire import decode, encode
from tests.support.ahead_of_time import HOPPER, Compiler

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def blocks(compiler: Compiler) -> None:
    both = {"rows": True, "columns": True}
    x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    with compiler.naming("row-wise bf16 e4m3"):
        quantize_rowwise(x, E4M3, power_of_two=False, **both)
    with compiler.naming("row-wise f32 e5m2 pow2"):
        quantize_rowwise(x.float(), E5M2, power_of_two=True, **both)
    with compiler.naming("1x128 bf16 e4m3"):
        quantize_blocks(x, E4M3, block=(1, 128), power_of_two=False, **both)
    with compiler.naming("1x128 bf16 transposed e5m2"):
        on_its_side = torch.empty(14336, 8192, dtype=torch.bfloat16).t()
        quantize_blocks(on_its_side, E5M2, block=(1, 128), power_of_two=False, **both)
    with compiler.naming("1x128 bf16 e4m3 pow2, rows"):
        quantize_blocks(x, E4M3, block=(1, 128), power_of_two=True, rows=True, columns=False)
    with compiler.naming("1x128 f32 e4m3"):
        quantize_blocks(x.float(), E4M3, block=(1, 128), power_of_two=False, **both)
    with compiler.naming("128x128 bf16 e4m3"):
        quantize_blocks(x, E4M3, block=(128, 128), power_of_two=False, **both)
    with compiler.naming("128x128 f32 e4m3 pow2"):
        quantize_blocks(x.float(), E4M3, block=(128, 128), power_of_two=True, **both)


def content(compiler: Compiler) -> None:
    keys = torch.empty(2, BLOCK_WORDS, dtype=torch.int64)
    with compiler.naming("leaves"):
        many_leaves([torch.empty(8192, 4096, dtype=torch.bfloat16), torch.empty(100)[1:]], keys)


def magnitude(compiler: Compiler) -> None:
    pending = torch.zeros(())
    for dtype in (torch.bfloat16, torch.float32) if compiler.capability == HOPPER else (torch.bfloat16,):
        for name, x in (
            ("wide", torch.empty(8192, 4096, dtype=dtype)),
            ("transposed, wide", torch.empty(8192, 4096, dtype=dtype).t()),
            ("odd, wide", torch.empty(8191, 4095, dtype=dtype)),
            ("padded, wide", torch.empty(8192, 4096 + 64, dtype=dtype)[:, 32:-32]),
            ("beyond 2**31, wide", torch.empty(3 << 30, dtype=dtype)),
            ("every second", torch.empty(8192, 4096, dtype=dtype)[:, ::2]),
        ):
            with compiler.naming(f"{str(dtype).removeprefix('torch.')}: {name}"):
                observe(x, pending)


def tail(compiler: Compiler) -> None:
    """Launch it with a shape of Mixtral."""
    with compiler.naming("8 experts"):
        clear_tail(torch.empty(8192, 14336, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int32))


def shares(compiler: Compiler) -> None:
    tokens, features = 8192, 4096
    saturated, underflow = torch.zeros(()), torch.zeros(())
    scales = (
        ("one scale", torch.empty(()), (0, 0)),
        ("row-wise", torch.empty(tokens, 1), (1, features)),
        ("1x128", torch.empty(features // 128, tokens).t(), (1, 128)),
        ("128x128", torch.empty(tokens // 128, features // 128), (128, 128)),
    )
    bf16, f32 = torch.bfloat16, torch.float32
    for name, x, dtype in (
        ("bf16", torch.empty(tokens, features, dtype=bf16), E4M3),
        ("bf16 transposed", torch.empty(features, tokens, dtype=bf16).t(), E5M2),
        ("f32", torch.empty(tokens, features, dtype=f32), E4M3),
        ("f32 transposed", torch.empty(features, tokens, dtype=f32).t(), E5M2),
    ):
        for kind, inv_scale, block in scales if compiler.capability == HOPPER else scales[::2]:
            with compiler.naming(f"{name}: {kind}"):
                measure(x, inv_scale, dtype, saturated, underflow, block=block)
    if compiler.capability != HOPPER:
        return
    for name, x in (
        ("bf16 odd", torch.empty(tokens, features + 1, dtype=bf16)[:, 1:]),
        ("bf16 far", torch.empty(3, 1 << 30, dtype=bf16).expand(3, 1 << 30)),
        ("fp16 every second", torch.empty(tokens, 2 * features, dtype=torch.float16)[:, ::2]),
    ):
        with compiler.naming(f"{name}: one scale"):
            measure(x, torch.empty(()), E4M3, saturated, underflow, block=(0, 0))


def slots(compiler: Compiler) -> None:
    x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    scale, cold, pending = torch.ones(3), torch.ones(3, dtype=torch.bool), torch.zeros(3)
    scratch = torch.zeros(3, 4, dtype=torch.int32)
    for slot in range(3):
        with compiler.naming(f"slot {slot}"):
            for outgrown, room in ((None, None), (1.0 + slot / 4, None), (None, scratch[slot])):
                quantize(
                    x, scale[slot], cold[slot], pending[slot], E4M3, record=True, just_in_time=True,
                    margin=0, power_of_two=False, rows=True, columns=True, outgrown=outgrown, scratch=room,
                )  # fmt: skip
            observe(x, pending[slot])


def _both(compiler: Compiler, length: int, shards: int, hold: bool, algorithm: str) -> None:
    """Launch both kernels for an arena of 1000 slots."""
    arrays = StateArrays.allocate([448.0] * 1000, [464.0] * 1000, RingShape(length), torch.device("cpu"))
    if shards:
        arrays = arrays.with_shards(range(shards), [[900, 901, 902]] * shards)
    held = torch.zeros(1) if hold else None
    rule = UpdateRule(length, 1, True, True, algorithm)  # type: ignore[arg-type]
    with compiler.naming(f"history {length}, {shards} sharded, hold {hold}, {algorithm}"):
        triton_update.launch(arrays, held, drop_nonfinite=True)
        triton_update.commit(arrays, rule, arrays.send, held)


def update(compiler: Compiler) -> None:
    """Launch both kernels for short, usual and longest windows, and once with all options on."""
    _both(compiler, 16, 0, False, "max")
    _both(compiler, 1024, 0, False, "max")
    _both(compiler, 1024, 5, True, "most_recent")
    _both(compiler, 1_000_000, 0, False, "max")


def mx(compiler: Compiler) -> None:
    x, both = torch.empty(8192, 4096, dtype=torch.bfloat16), {"rows": True, "columns": True}
    for name, given, dtype, up in (
        ("bf16", x, E4M3, False),
        ("bf16 transposed up", x.t(), E5M2, True),
        ("f32 odd", torch.empty(1000, 1001), E4M3, True),
        ("far", torch.empty((1 << 19) + 128, 4096, dtype=torch.bfloat16), E4M3, False),  # More than 2**31 elements.
    ):
        with compiler.naming(name):
            quantize_mx(given, dtype, round_up=up, **both)
    a, b = torch.empty(8191, 4096, dtype=E4M3), torch.empty(1024, 4096, dtype=E4M3)
    scales = [torch.empty(lines, 128, dtype=torch.float8_e8m0fnu) for lines in (8191, 1024)]
    for out_dtype, bias in ((torch.bfloat16, torch.empty(1024, dtype=torch.bfloat16)), (torch.float32, None)):
        with compiler.naming(f"product {str(out_dtype).removeprefix('torch.')}"):
            multiply_mx(a, b, *scales, out_dtype, bias)
    offsets, width = torch.zeros(8, dtype=torch.int32), columns_bound(8191, 8, 32)
    with compiler.naming("product of experts"):
        of_b = torch.empty(8, 1024, 128, dtype=torch.float8_e8m0fnu)
        matmul_grouped(a, b.expand(8, *b.shape).contiguous(), scales[0], of_b, offsets, torch.bfloat16, False)
        sides = [torch.empty(lines, width, dtype=E4M3) for lines in (1024, 4096)]
        of_sides = [torch.empty(lines, width // 32, dtype=torch.float8_e8m0fnu) for lines in (1024, 4096)]
        matmul_grouped_columns(*sides, *of_sides, offsets, torch.bfloat16, False)


def wire(compiler: Compiler) -> None:
    """Launch them for a bucket of 25 MB on 8 ranks: a cast of all of it, the sum of a shard, and the last step. Also
    with a number of blocks that is no multiple of a program's."""
    for blocks, dtype in itertools.product((6400, 6403), (torch.float32, torch.bfloat16)):
        length = blocks * 128
        bucket = torch.empty(8 * length - 100, dtype=dtype)
        with compiler.naming(f"{blocks} blocks, {dtype}"):
            messages = encode(bucket, 8, length)
            decode(messages.unsqueeze(0), length, bucket[:length], 1 / 8)
            decode(messages.unsqueeze(1), length, bucket)
