"""The cost of the consistency checker when all ranks agree.

``scripts/benchmark`` starts it under torchrun. Rank 0 first measures the digest alone, while the others wait in a
barrier; then all ranks measure whole checks. Rank 0 prints one JSON object.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist_kernels.header import HEADER, WORDS
from fp8dist_kernels.reference.content import ContentDigest
from fp8dist_kernels.reference.digest import digest_words
from scripts.benchmarks.sync import manager_of
from scripts.benchmarks.timing import in_turn, medians, run_rank, timed

REPEATS = 7
BYTES = 256 << 20


def sha1_of_float32(tensor: Tensor) -> bytes:
    """Megatron-LM's way (``check_param_hashes_across_dp_replicas``): SHA-1 over the float32 copy on the CPU."""
    return hashlib.sha1(tensor.data.to("cpu").float().numpy(force=True)).digest()


def digests() -> dict[str, float]:
    """Return medians of interleaved runs in ms, on one core, for 256 MB of bfloat16."""
    tensor = torch.randn(BYTES // 2).to(torch.bfloat16)
    words = tensor.view(torch.int64)
    digest = ContentDigest(tensor.device)
    sides: dict[str, Callable[[], object]] = {
        "digest_ms": lambda: digest.leaves(tensor),
        "sha1_ms": lambda: sha1_of_float32(tensor),
        "read_ms": words.sum,
    }
    return medians(in_turn(sides, REPEATS))


def check_of(tensors: int) -> dict[str, float]:
    """Return collectives, their bytes and ms of a clean ``fp8dist.check`` of ``tensors`` parameters. COLLECTIVE."""
    model = nn.ParameterList([torch.ones(100) for _ in range(tensors)])
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        check = {"ms": lambda: fp8dist.check(model, group=dist.group.WORLD)}
        found = medians(in_turn(check, REPEATS, dist.barrier))
    sizes = [call.args[0].nbytes for call in reduce.call_args_list]
    return {"tensors": tensors, **found, "collectives": len(sizes) / REPEATS, "bytes": sum(sizes) / REPEATS}


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


def measure() -> dict[str, Any]:
    """Return the digests, which rank 0 measures alone, the checks and the header. COLLECTIVE."""
    alone = digests() if dist.get_rank() == 0 else {}
    dist.barrier()
    checks = [check_of(10), check_of(10_000)]
    return {**alone, "checks": checks, "header_ms": {slots: header_ms(slots) for slots in (48, 672)}}


if __name__ == "__main__":
    run_rank(measure)
