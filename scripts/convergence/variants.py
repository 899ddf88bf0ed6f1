"""The compared variants: the fault lab's flags for each precision and recipe, and the largest allowed gap to FP32."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

REFERENCE = "fp32"
"""The variant that the others are compared with."""


class Variant(NamedTuple):
    """``goal``: the largest allowed gap of the final training loss to FP32, in percent; None: no goal. ``ranks``: with
    DDP, on the batches of one rank."""

    title: str
    flags: tuple[str, ...]
    goal: float | None = None
    ranks: int = 1


def _fp8(recipe: str, *more: str) -> tuple[str, ...]:
    return ("--precision", "fp8", "--recipe", recipe, *more)


VARIANTS = MappingProxyType(
    {
        "fp32": Variant("FP32", ("--precision", "fp32")),
        "bf16": Variant("BF16", ("--precision", "bf16")),
        "delayed": Variant("FP8, delayed", _fp8("delayed"), 0.5),
        "delayed-high-dgrad": Variant("FP8, delayed, dgrad high", _fp8("delayed", "--high-gemms", "dgrad")),
        "current": Variant("FP8, current", _fp8("current"), 0.5),
        "rowwise": Variant("FP8, row-wise", _fp8("rowwise"), 0.25),
        "block": Variant("FP8, block", _fp8("block"), 0.25),
        "mxfp8": Variant("MXFP8", _fp8("mxfp8"), 0.25),
        "nvfp4": Variant("NVFP4, emulated", _fp8("nvfp4")),
        "fp8-gradients": Variant(
            "FP32, gradients in FP8", ("--precision", "fp32", "--fp8-gradients", "--share-batch"), ranks=2
        ),
    }
)
