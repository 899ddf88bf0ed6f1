"""Run settings: what a caller passed, else the environment variable, else the default."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fp8dist.errors import ConfigurationError

__all__ = ["Settings"]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


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
        check_every: int | None = None,
        check_policy: str | None,
        backend: str | None,
        eval_precision: str,
        environ: Mapping[str, str] = os.environ,
    ) -> Settings:
        """Resolve each argument that is None from the environment.

        ``FP8DIST_ENABLED=0`` beats an explicit ``enabled=True``: it is the switch of the person who
        runs the job, not of the one who wrote it.

        Raises:
            ConfigurationError: a value that is none of the accepted ones; names the argument or variable.
        """

        def setting(name: str, value: object, parse: Callable[[object], Any], default: Any) -> Any:
            if value is not None:
                return _parsed(name, value, parse)
            variable = f"FP8DIST_{name.upper()}"
            text = environ.get(variable, "").strip()
            if not text:
                return default
            return _parsed(variable, text, _flag if parse is _bool else parse)

        _parsed("eval_precision", eval_precision, _one_of("fp8", "high"))
        setting("check_every", check_every, _no_periodic_check, 0)
        allowed = setting("enabled", None, _bool, True)
        return cls(
            enabled=allowed and setting("enabled", enabled, _bool, True),
            amax_sync=setting("amax_sync", amax_sync, _bool, True),
            check_policy=setting("check_policy", check_policy, _one_of("raise", "warn"), "raise"),
            backend=setting("backend", backend, _one_of("auto", "torch", "reference"), "auto"),
            eval_precision=eval_precision,
        )

    def describe(self) -> dict[str, Any]:
        """Plain JSON values for the manifest."""
        return asdict(self)


def _parsed(source: str, value: object, parse: Callable[[object], Any]) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigurationError(f"{source} {error}, got {value!r}") from None


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be True or False")
    return value


def _flag(text: object) -> bool:
    lowered = str(text).lower()
    if lowered not in _TRUE | _FALSE:
        raise ValueError("must be 1 or 0")
    return lowered in _TRUE


def _one_of(*choices: str) -> Callable[[object], object]:
    def parse(value: object) -> object:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value

    return parse


def _no_periodic_check(value: object) -> int:
    if str(value) != "0":
        raise ValueError("must be 0: this version checks manifest, step and scales at every sync, no more at intervals")
    return 0
