"""Memory-bound kernels, against a device copy that moves as many bytes; kernels that only read, against a read.

=================== ============================================== =====
kernel              reads and writes per bf16 element              bytes
=================== ============================================== =====
cast_transpose_amax reads it, writes FP8 twice                     4
amax                reads it                                       2
cast                reads it, writes FP8 once                      3
digest              reads it                                       2
cast_1x128          reads it, writes FP8 twice                     4
cast_128x128        reads it, writes FP8 twice                     4
cast_rowwise        reads it, then again, and writes FP8 twice     6
=================== ============================================== =====

Scales are not counted. The read is torch's sum.

Casts are timed as those of inputs and gradients in training: the host knows that the slot is not cold, and the slot has
recorded no amax in this step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fp8dist_kernels.reference import blocks as block_twins
from fp8dist_kernels.reference import casts as cast_twins
from fp8dist_kernels.reference.content import ContentDigest
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN
from fp8dist_kernels.triton import blocks, casts, magnitude
from scripts.benchmarks.gpu.lab import Case, Lab, by_field, poison, same_bits
from scripts.benchmarks.gpu.stopwatch import Action, compare

OURS, COPY, READ = "fp8dist", "copy", "read by torch"
READ_ONLY = ("amax", "digest")
BYTES = MappingProxyType(
    {"cast_transpose_amax": 4, "amax": 2, "cast": 3, "digest": 2, "cast_1x128": 4, "cast_128x128": 4, "cast_rowwise": 6}
)
KERNELS = tuple(BYTES)
EVERYWHERE = 3
"""The first EVERYWHERE kernels are measured at each size."""
SIZES = ((8192, 14336, 1), (16384, 4096, 1), (8192, 4096, 1), (32768, 28672, 1))
MANY = ((8192, 4096, 64), (32768, 28672, 1))
"""Shapes for digests, which cover many tensors at a time: (rows, columns, tensors)."""
SCALE = 37.3


@dataclass(frozen=True)
class Planned:
    """A kernel and the shape of its bf16 tensors."""

    kernel: str
    rows: int
    columns: int
    tensors: int = 1

    @property
    def name(self) -> str:
        """The name in a results file."""
        many = f"{self.tensors} x " if self.tensors > 1 else ""
        return f"{self.kernel} {many}{self.rows}x{self.columns}"

    @property
    def moved(self) -> int:
        """Bytes that the kernel must read and write."""
        return BYTES[self.kernel] * self.rows * self.columns * self.tensors


class Memory:
    """Casts, amax and digest."""

    def plan(self, lab: Lab) -> list[Planned]:
        """Return the kernels of delayed scaling at each size, then the others."""
        sizes, many = (((64, 48, 1), (100, 160, 1)), ((64, 48, 3),)) if lab.smoke else (SIZES, MANY)
        delayed = [Planned(kernel, *size) for size in sizes for kernel in KERNELS[:EVERYWHERE]]
        digests = [Planned("digest", *size) for size in many]
        return [*delayed, *digests, *(Planned(kernel, *sizes[0]) for kernel in KERNELS[EVERYWHERE + 1 :])]

    def measure(self, lab: Lab, planned: Planned) -> Case:
        """See ``Part``. "ratios": the time of the "reference" over ours."""
        shape = (planned.rows, planned.columns)
        tensors = [torch.randn(shape, dtype=torch.bfloat16, device=lab.device) for _ in range(planned.tensors)]
        case: Case = {"name": planned.name, **asdict(planned), "bytes": planned.moved}
        poison(shape, torch.float8_e4m3fn, lab.device)
        pending = torch.full((), DID_NOT_RUN, device=lab.device)
        action, problem = _MEASURES[planned.kernel](tensors, pending)
        if problem:
            return {**case, "problem": f"wrong: {problem}"}
        case["reference"], reference = _reference(planned, lab.device)
        actions: dict[str, Action] = {OURS: action, case["reference"]: reference}
        # As at the beginning of a step: once the amax is recorded, the kernel skips the recording.
        before = functools.partial(pending.fill_, DID_NOT_RUN)
        comparison = compare(lab.stopwatch, actions, lab.seconds, before)
        case["timings"] = comparison.timings()
        case["ratios"] = {OURS: comparison.ratio(case["reference"], OURS)}
        case["gb_per_s"] = {s: planned.moved / 1e3 / t["median_us"] for s, t in case["timings"].items()}
        return case

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """See ``Part``: by kernel, over its sizes."""
        return by_field(cases, "kernel", KERNELS, OURS)


def _reference(planned: Planned, device: torch.device) -> tuple[str, Action]:
    """Return what a kernel is compared with: a copy or a read of as many bytes as it moves."""
    if planned.kernel in READ_ONLY:
        words = torch.randint(-(1 << 61), 1 << 61, (planned.moved // 8,), device=device)
        return READ, functools.partial(torch.sum, words)
    source = torch.ones(planned.moved // 2, dtype=torch.uint8, device=device)
    return COPY, functools.partial(torch.empty_like(source).copy_, source)


Examined = tuple[Callable[[], object], str | None]
"""The action to time, and a description of the error in its result; None if the result is right."""


def _cast(tensors: Sequence[Tensor], pending: Tensor, everything: bool) -> Examined:
    (x,) = tensors
    scale = torch.tensor(SCALE, device=x.device)
    cold = torch.zeros((), dtype=torch.bool, device=x.device)
    options: dict[str, Any] = {"just_in_time": False, "margin": 0, "power_of_two": False, "rows": True}
    options |= {"record": everything, "columns": everything}
    dtype = torch.float8_e4m3fn
    action = functools.partial(casts.quantize, x, scale, cold, pending, dtype, **options)
    mine = action()
    expected = torch.full((), DID_NOT_RUN, device=x.device)
    theirs = cast_twins.quantize(x, scale, cold, expected, dtype, **options)
    names = ("row-major copy", "transposed copy", "inv_scale")
    differing = [name for name, one, other in zip(names, mine, theirs) if not same_bits(one, other)]
    if not same_bits(pending, expected):
        differing.append("amax")
    return action, f"{', '.join(differing)} differ from plain torch" if differing else None


def _amax(tensors: Sequence[Tensor], pending: Tensor) -> Examined:
    (x,) = tensors
    action = functools.partial(magnitude.observe, x, pending)
    action()
    expected = float(x.abs().max())
    return action, None if float(pending) == expected else f"amax {float(pending)}, expected {expected}"


def _digest(tensors: Sequence[Tensor], _: Tensor) -> Examined:
    action = functools.partial(ContentDigest(tensors[0].device, "triton").many_leaves, tensors)
    leaves, counts = action()
    plain = ContentDigest(torch.device("cpu"), "torch")
    right = all(torch.equal(mine.cpu(), plain.leaves(x.cpu())) for mine, x in zip(leaves.split(counts), tensors))
    return action, None if right else "the digest differs from the CPU's"


def _cast_with_many_scales(tensors: Sequence[Tensor], _: Tensor, block: tuple[int, int] | None) -> Examined:
    def action(version: Any = blocks) -> tuple[Tensor, ...]:
        options = {"power_of_two": False, "rows": True, "columns": True}
        if block is None:
            return version.quantize_rowwise(tensors[0], torch.float8_e4m3fn, **options)
        return version.quantize_blocks(tensors[0], torch.float8_e4m3fn, block=block, **options)

    right = all(same_bits(mine, theirs) for mine, theirs in zip(action(), action(block_twins)))
    return action, None if right else "copies or scales differ from plain torch"


_MEASURES: Mapping[str, Callable[[Sequence[Tensor], Tensor], Examined]] = MappingProxyType(
    {
        "cast_transpose_amax": functools.partial(_cast, everything=True),
        "amax": _amax,
        "cast": functools.partial(_cast, everything=False),
        "digest": _digest,
        "cast_1x128": functools.partial(_cast_with_many_scales, block=(1, 128)),
        "cast_128x128": functools.partial(_cast_with_many_scales, block=(128, 128)),
        "cast_rowwise": functools.partial(_cast_with_many_scales, block=None),
    }
)
"""By kernel. Arguments: tensors and a slot's pending amax."""
