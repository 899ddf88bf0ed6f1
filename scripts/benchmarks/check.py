"""The cost of the consistency checker when all ranks agree.

``scripts/benchmark`` starts it under torchrun. Rank 0 first measures the digest alone, while the others wait in a
barrier; then all ranks measure whole checks. Rank 0 prints two tables.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist_kernels.header import HEADER, WORDS
from fp8dist_kernels.reference.content import ContentDigest
from fp8dist_kernels.reference.digest import digest_words
from scripts.benchmarks.markdown import table
from scripts.benchmarks.sync import manager_of
from scripts.benchmarks.timing import in_turn, medians, run_rank, timed

REPEATS = 7
BYTES = 256 << 20
SHA1 = "SHA-1 over the float32 copy (Megatron-LM's way)"


def sha1_of_float32(tensor: Tensor) -> bytes:
    """Megatron-LM's way (``check_param_hashes_across_dp_replicas``): SHA-1 over the float32 copy on the CPU."""
    return hashlib.sha1(tensor.data.to("cpu").float().numpy(force=True)).digest()


def digests() -> list[list[str]]:
    """Return a row for each side: the median of interleaved runs, on one core, for 256 MiB of bfloat16."""
    tensor = torch.randn(BYTES // 2).to(torch.bfloat16)
    words = tensor.view(torch.int64)
    digest = ContentDigest(tensor.device)
    sides: dict[str, Callable[[], object]] = {
        "fp8dist": lambda: digest.leaves(tensor),
        SHA1: lambda: sha1_of_float32(tensor),
        "a plain read of the memory (torch.sum over int64)": words.sum,
    }
    found = medians(in_turn(sides, REPEATS))
    speeds = ((side, ms, BYTES / 1e6 / ms, found[SHA1] / ms) for side, ms in found.items())
    return [[side, f"{ms:.0f}", f"{speed:.1f}", f"{times:.1f} times"] for side, ms, speed, times in speeds]


def check_of(tensors: int) -> list[str]:
    """Return a row: collectives, their bytes and ms of a clean check of ``tensors`` parameters. COLLECTIVE."""
    model = nn.ParameterList([torch.ones(100) for _ in range(tensors)])
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        check = {"check": lambda: fp8dist.check(model, group=dist.group.WORLD)}
        (ms,) = medians(in_turn(check, REPEATS, dist.barrier)).values()
    sizes = [call.args[0].nbytes for call in reduce.call_args_list]
    counts = (f"{count / REPEATS:g}" for count in (len(sizes), sum(sizes)))
    return [f"{tensors:,} tensors of 100 elements", *counts, f"{ms:.1f}"]


def header_ms(slots: int) -> float:
    """Return the ms that the header adds to a step: digest, message words, kept scales, reading it back."""
    sync = manager_of(slots, amax_sync=False)._syncs[0]
    arena = sync.arena

    def header() -> None:
        digest_words(arena.scales.view(-1).view(torch.int32), arena.arrays.keys, arena.words.view(torch.int64)[1:])
        arena.send[:WORDS].copy_(arena.words)
        torch.bitwise_not(arena.words, out=arena.send[WORDS:HEADER])
        arena.sent.copy_(arena.scales)
        numbers = arena.send[:HEADER].tolist()
        all(word == ~complement for word, complement in zip(numbers[:WORDS], numbers[WORDS:]))

    return statistics.median(timed(header) for _ in range(500))


def measure() -> str:
    """Return the tables of digests, which rank 0 measures alone, and of checks, and the header. COLLECTIVE."""
    alone = digests() if dist.get_rank() == 0 else []
    dist.barrier()
    digest = table(["digest of 256 MiB of bfloat16, one core", "ms", "GB/s", "against SHA-1"], alone)
    checks = [check_of(10), check_of(10_000)]
    check = table(["clean `fp8dist.check`, 2 ranks", "collectives", "bytes", "ms"], checks)
    header = ", ".join(f"{header_ms(slots):.3f} ms of a step with {slots} slots" for slots in (48, 672))
    return f"{digest}\n{check}\nThe header: {header}."


if __name__ == "__main__":
    run_rank(measure)
