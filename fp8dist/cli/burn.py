"""Repeat casts and products of fixed shapes, and compare each result with the first one and with a plain reference."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.checks.computations import ComputedContent, casts_and_products
from fp8dist.checks.contents import on_device
from fp8dist.checks.differences import compare_block, unravel
from fp8dist.checks.inventory import Holdings, ReplicaSet, likeness_of
from fp8dist.checks.known_calls import CastOf, Computation, ProductOf
from fp8dist.checks.protocol import check_replicas
from fp8dist.checks.report import DivergenceReport
from fp8dist.state.groups import SyncGroup
from fp8dist.state.recipe import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, RowwiseScaling
from fp8dist_kernels.reference.content import ContentDigest, as_bytes

FP8_CAPABILITY = (8, 9)
_SHAPE_ON_CPU, _SHAPE_ON_GPU = (384, 256), (4096, 2048)
_RECIPES = (DelayedScaling(), CurrentScaling(format="e4m3"), RowwiseScaling(), BlockScaling(), MXFP8Scaling())
_CPU = torch.device("cpu")


@dataclass
class Burned:
    """The outcome on one device. ``differences``: a text for each computation that was wrong, about the first time."""

    device: torch.device
    kinds: int
    repetitions: int = 0
    seconds: float = 0.0
    wrong: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        """How much was computed, and how much of it was wrong."""
        rate = self.repetitions / self.seconds if self.seconds else 0.0
        counted = f"{self.repetitions:,} casts and products of {self.kinds} kinds in {self.seconds:.1f} s"
        return f"{counted}, {rate:,.0f} per s, {f'{self.wrong:,}' if self.wrong else 'none'} wrong"


def multiplies_fp8(device: torch.device) -> bool:
    """True if products of FP8 tensors run on ``device``."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def computations_on(device: torch.device) -> list[Computation]:
    """Return the casts and products of a Linear under each recipe, and such products whose sums are exact; none on a
    GPU without FP8."""
    if not multiplies_fp8(device):
        return []
    shape = _SHAPE_ON_GPU if device.type == "cuda" else _SHAPE_ON_CPU
    dtype = torch.bfloat16
    found = [one for recipe in _RECIPES for one in casts_and_products(shape, recipe, dtype, dtype)]
    exact = [one._replace(exact=True) for one in found if isinstance(one, ProductOf)]
    return list(dict.fromkeys([*found, *exact]))


@torch.no_grad()
def burn(device: torch.device, seconds: float) -> Burned:
    """Compute on one device, in turn and at least twice each, for some seconds. Local.

    A cast, and a product whose sums are exact, is first compared with plain torch on the CPU. Every repetition is
    compared with the first result. The time counts from the first results on: the first use compiles kernels.
    """
    with on_device(device):
        computations = computations_on(device)
        burned = Burned(device, len(computations))
        digest = ContentDigest(device)
        repeats = [_Repeat(computation, device, digest) for computation in computations]
        for repeat in repeats:
            _note(burned, repeat.first_difference(repeat.expected(), repeat.first), repeat, "from plain torch", 1)
        start, rounds = time.perf_counter(), 1
        while burned.seconds < seconds or rounds < 2:
            rounds += 1
            for repeat in repeats:
                _note(burned, repeat.again(), repeat, "from the first time", rounds)
            burned.seconds = time.perf_counter() - start
        burned.repetitions = (rounds - 1) * len(repeats)
        return burned


def burned_across_ranks(device: torch.device) -> DivergenceReport:
    """Compare the same casts and products across ranks of equal hardware and versions. COLLECTIVE over the job."""
    anchor = SyncGroup(dist.group.WORLD)  # type: ignore[arg-type]

    def build() -> Holdings:
        contents = (ComputedContent(computations_on(device), device),)
        return Holdings((ReplicaSet("", anchor, ()),), computed=ReplicaSet(likeness_of(contents), anchor, contents))

    with on_device(device):
        return check_replicas(anchor, build).report


class _Repeat:
    """A computation, its first results (on the CPU) and their leaves."""

    def __init__(self, computation: Computation, device: torch.device, digest: ContentDigest) -> None:
        self.name = computation.name(device)
        self.reported = False
        self._computation, self._digest = computation, digest
        self._compute = computation.prepared(device)
        results = self._compute()
        self._leaves = self._leaves_of(results)
        self.first = {name: tensor.cpu() for name, tensor in results.items()}

    def expected(self) -> dict[str, Tensor]:
        """Return what plain torch computes on the CPU; the first results, if other kernels may differ from it."""
        if isinstance(self._computation, CastOf) or getattr(self._computation, "exact", False):
            return self._computation._replace(backend="reference").prepared(_CPU)()
        return self.first

    def again(self) -> str:
        """Compute again, and return how the results differ from the first ones; "" if they do not."""
        results = self._compute()
        if torch.equal(self._leaves_of(results), self._leaves):
            return ""
        return self.first_difference(self.first, {name: tensor.cpu() for name, tensor in results.items()})

    def first_difference(self, expected: dict[str, Tensor], found: dict[str, Tensor]) -> str:
        """Return the first element that differs, with both bit patterns, as text; "" if there is none."""
        for name, tensor in found.items():
            mine, theirs = as_bytes(tensor), as_bytes(expected[name])
            difference = compare_block(mine, theirs, tensor.dtype, 0, 1, 1)
            if difference is not None:
                index = list(unravel(difference.place, tuple(tensor.shape)))
                return (
                    f"{name or 'result'} at {index}: {difference.value!r} ({difference.bits[0]}) instead of "
                    f"{difference.expected!r} ({difference.bits[1]}), {difference.extent()}"
                )
        return ""

    def _leaves_of(self, results: dict[str, Tensor]) -> Tensor:
        leaves: Tensor = self._digest.many_leaves(list(results.values()))[0]
        return leaves


def _note(burned: Burned, difference: str, repeat: _Repeat, than: str, round_: int) -> None:
    if difference:
        burned.wrong += 1
        if not repeat.reported:
            burned.differences.append(f"{repeat.name} differs {than}, repetition {round_}: {difference}")
        repeat.reported = True
