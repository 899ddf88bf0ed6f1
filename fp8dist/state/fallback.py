"""Fallback: when a module goes to high precision by itself, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from fp8dist.errors import ConfigurationError
from fp8dist.names import check_fields, is_number, require_bool, require_int

__all__ = ["Fallback"]


@check_fields
@dataclass(frozen=True)
class Fallback:
    """A policy that sends a module to high precision when one of its tensors does not fit FP8.

    What decides is the maximum over all ranks that share the state, so all of them do it at the same step. It rides in
    the sync of the step: limits on shares add two words per slot, and one more pass over each tensor that is cast.
    Under delayed scaling the amaxes of before are forgotten, and observed again until the module comes back: an outlier
    does not decide its scales then.

    Args:
        steps: optimizer steps that it stays there. Trouble that is seen meanwhile starts them anew.
        nonfinite: whether a NaN or Inf amax counts.
        saturated: limit of the share of elements, in [0, 1], that a cast cuts off; more is trouble. None: none.
        underflow: limit of the share of elements, in [0, 1], that are not 0 and become 0 in FP8. None: none.
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
            raise ConfigurationError("Fallback: nothing would ever count: give nonfinite, saturated or underflow")

    @property
    def measures(self) -> bool:
        """Whether shares of saturated elements and of underflows are wanted at every step."""
        return self.saturated is not None or self.underflow is not None
