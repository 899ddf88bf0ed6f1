"""The cost of the consistency checker when all ranks agree.

``scripts/benchmark`` starts it under torchrun. Rank 0 first measures the digest alone, while the others wait in a
barrier; then all ranks measure whole checks. Rank 0 prints one JSON object.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist_kernels.header import HEADER, WORDS
from fp8dist_kernels.reference.content import ContentDigest
from fp8dist_kernels.reference.digest import digest_words
from scripts.benchmarks.sync import manager_of, timed

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
    runs: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(REPEATS):
        for name, action in sides.items():
            runs[name].append(timed(action))
    return {name: statistics.median(times) for name, times in runs.items()}


def check_of(tensors: int) -> dict[str, float]:
    """Return collectives, their bytes and ms of a clean ``fp8dist.check`` of ``tensors`` parameters. COLLECTIVE."""
    model = nn.ParameterList([torch.ones(100) for _ in range(tensors)])
    reduced: list[int] = []
    original = dist.all_reduce

    def counting(tensor: Tensor, *args: object, **kwargs: object) -> object:
        reduced.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    times = []
    dist.all_reduce = counting
    for _ in range(REPEATS):
        dist.barrier()
        times.append(timed(lambda: fp8dist.check(model, group=dist.group.WORLD)))
    dist.all_reduce = original
    return {
        "tensors": tensors,
        "ms": statistics.median(times),
        "collectives": len(reduced) / REPEATS,
        "bytes": sum(reduced) / REPEATS,
    }


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


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    logging.getLogger("fp8dist").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    alone = digests() if dist.get_rank() == 0 else {}
    dist.barrier()
    checks = [check_of(10), check_of(10_000)]
    header = {slots: header_ms(slots) for slots in (48, 672)}
    if dist.get_rank() == 0:
        print(json.dumps({**alone, "checks": checks, "header_ms": header}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
