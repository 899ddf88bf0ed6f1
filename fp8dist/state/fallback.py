"""Fallback: the policy that sends modules to high precision automatically, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from fp8dist.common.names import check_fields, is_number, require_bool, require_int
from fp8dist.errors import ConfigurationError


@check_fields
@dataclass(frozen=True)
class Fallback:
    """A policy that sends a module to high precision when one of its tensors does not fit FP8.

    The decision uses the maximum over all ranks that share the state, so all of them switch at the same step. It is
    part of the step's sync: limits on shares add two words per slot, and one more pass over each tensor that is cast.
    Under delayed scaling, the module drops its earlier amaxes and records new ones before it comes back, so that an
    outlier does not decide its scales.

    Args:
        steps: optimizer steps in high precision. Another trigger meanwhile starts the count again.
        nonfinite: trigger on a NaN or Inf amax.
        saturated: trigger if a cast saturates more than this share of elements, in [0, 1]. None: never.
        underflow: trigger if more than this share of elements, in [0, 1], is not 0 but becomes 0 in FP8. None: never.
    """

    steps: int = 100
    nonfinite: bool = True
    saturated: float | None = None
    underflow: float | None = None

    def __post_init__(self) -> None:
        require_int("Fallback: steps", self.steps, 1)
        require_bool("Fallback: nonfinite", self.nonfinite)
        for name in ("saturated", "underflow"):
            limit = getattr(self, name)
            if limit is not None and not (is_number(limit) and 0 <= limit <= 1):
                raise ConfigurationError(f"Fallback: {name} must be a share from 0 to 1, or None, got {limit!r}")
        if not self.nonfinite and not self.measures:
            raise ConfigurationError("Fallback: it would never trigger: give nonfinite, saturated or underflow")

    @property
    def measures(self) -> bool:
        """True if every step measures the shares of elements that saturate and underflow."""
        return self.saturated is not None or self.underflow is not None
