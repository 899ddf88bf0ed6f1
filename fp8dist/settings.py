"""Run settings: what a caller passed, else the environment variable, else the default."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from fp8dist.errors import ConfigurationError

__all__ = ["Settings"]

T = TypeVar("T")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_BACKENDS = ("auto", "torch", "reference")
_POLICIES = ("raise", "warn")
_EVAL_PRECISIONS = ("fp8", "high")


@dataclass(frozen=True)
class Settings:
    """Resolved settings of one manager. All of them decide numbers or communication, so all of
    them are part of the manifest."""

    enabled: bool
    amax_sync: bool
    check_policy: str
    backend: str
    eval_precision: str

    @classmethod
    def resolve(
        cls,
        *,
        enabled: bool | None,
        amax_sync: bool | None,
        check_policy: str | None,
        backend: str | None,
        eval_precision: str,
        environ: Mapping[str, str] = os.environ,
    ) -> Settings:
        """Resolve each argument that is None from the environment.

        ``FP8DIST_ENABLED=0`` beats an explicit ``enabled=True``: it is the switch of the person who
        runs the job, not of the one who wrote it.

        Raises:
            ConfigurationError: a value that is none of the accepted ones; names the variable.
        """

        def setting(value: T | None, variable: str, parse: Callable[[str], T], default: T) -> T:
            if value is not None:
                return value
            text = environ.get(variable, "").strip()
            if not text:
                return default
            try:
                return parse(text)
            except ValueError as error:
                raise ConfigurationError(f"{variable}={text!r}: {error}") from None

        allowed = setting(None, "FP8DIST_ENABLED", _parse_bool, True)
        return cls(
            enabled=allowed and enabled is not False,
            amax_sync=setting(amax_sync, "FP8DIST_AMAX_SYNC", _parse_bool, True),
            check_policy=_choice(
                "check_policy", setting(check_policy, "FP8DIST_CHECK_POLICY", str, "raise"), _POLICIES
            ),
            backend=_choice("backend", setting(backend, "FP8DIST_BACKEND", str, "auto"), _BACKENDS),
            eval_precision=_choice("eval_precision", eval_precision, _EVAL_PRECISIONS),
        )

    def describe(self) -> dict[str, Any]:
        """Plain JSON values for the manifest."""
        return asdict(self)


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError("expected 1 or 0")


def _choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ConfigurationError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value
