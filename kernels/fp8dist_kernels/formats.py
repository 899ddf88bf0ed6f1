"""FP8 formats, NVFP4, tensor roles, and the format of each role."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


class Role(str, enum.Enum):
    """The role of a scaled tensor in its module. Compares equal to its plain string."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Format:
    """One FP8 encoding (OCP 8-bit floating point specification, revision 1.0).

    ``max`` is the largest finite magnitude; larger finite values saturate to it. Values up to ``rounds_to_max``, half a
    step above ``max``, round to ``max`` and do not count as saturated.
    """

    name: str
    dtype: torch.dtype
    max: float
    rounds_to_max: float


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, 464.0)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0, 61440.0)
NVFP4 = Format("nvfp4", torch.float8_e4m3fn, 6 * 448.0, 6 * 464.0)
"""E2M1 times an E4M3 scale per block. Emulated, so elements are stored as E4M3. ``max``: of an element times a block's
scale."""

FORMATS: Mapping[str, Format] = MappingProxyType({E4M3.name: E4M3, E5M2.name: E5M2, NVFP4.name: NVFP4})
"""All formats by name."""

_BY_RECIPE_FORMAT: Mapping[str, Mapping[Role, Format]] = MappingProxyType(
    {
        "hybrid": MappingProxyType({Role.INPUT: E4M3, Role.WEIGHT: E4M3, Role.GRAD_OUTPUT: E5M2}),
        "e4m3": MappingProxyType({Role.INPUT: E4M3, Role.WEIGHT: E4M3, Role.GRAD_OUTPUT: E4M3}),
    }
)


def formats_by_role(name: str) -> Mapping[Role, Format]:
    """Return the format of each role for ``"hybrid"`` (E4M3 forward, E5M2 gradients) or ``"e4m3"``.

    Raises:
        KeyError: ``name`` is neither.
    """
    return _BY_RECIPE_FORMAT[name]
