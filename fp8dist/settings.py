"""Run settings: what a caller passed, else the environment variable, else the default."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

from fp8dist.errors import ConfigurationError
from fp8dist.names import did_you_mean
from fp8dist.state.fallback import Fallback
from fp8dist_kernels.backends import BACKENDS

__all__ = ["Settings", "report_dir"]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class Settings:
    """Resolved settings of one manager. All of them but ``report_dir`` decide numbers or communication, and
    are part of the manifest."""

    enabled: bool
    amax_sync: bool
    check_every: int
    check_policy: Literal["raise", "warn", "repair"]
    backend: str
    eval_precision: str
    fp8_all_gather: bool = False
    fallback: Fallback | None = None
    report_dir: str | None = None

    @classmethod
    def resolve(
        cls,
        *,
        enabled: bool | None,
        amax_sync: bool | None,
        check_every: int | None,
        check_policy: str | None,
        backend: str | None,
        eval_precision: str,
        fp8_all_gather: bool = False,
        fallback: Fallback | None = None,
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
            return _parsed(variable, text, _READ_FROM_TEXT.get(parse, parse))

        _parsed("eval_precision", eval_precision, _one_of("fp8", "high"))
        _parsed("fp8_all_gather", fp8_all_gather, _bool)
        if fallback is not None and not isinstance(fallback, Fallback):
            raise ConfigurationError(f"fallback must be a Fallback or None, got {fallback!r}")
        allowed = setting("enabled", None, _bool, True)
        synced = setting("amax_sync", amax_sync, _bool, True)
        if fp8_all_gather and not synced:
            raise ConfigurationError("fp8_all_gather=True needs amax_sync: all parts of a weight share a scale")
        if fp8_all_gather and eval_precision == "high":
            raise ConfigurationError(
                'fp8_all_gather=True gathers weights in FP8 in eval() as well: eval_precision="high" cannot be'
            )
        return cls(
            enabled=allowed and setting("enabled", enabled, _bool, True),
            amax_sync=synced,
            check_every=setting("check_every", check_every, _count, 0),
            check_policy=setting("check_policy", check_policy, _one_of("raise", "warn", "repair"), "raise"),
            backend=setting("backend", backend, _one_of(*BACKENDS), "auto"),
            eval_precision=eval_precision,
            fp8_all_gather=fp8_all_gather,
            fallback=fallback,
            report_dir=report_dir(environ),
        )

    def describe(self) -> dict[str, Any]:
        """Plain JSON values for the manifest."""
        described = asdict(self)
        del described["report_dir"]  # Every host may have its own.
        return described


def report_dir(environ: Mapping[str, str] = os.environ) -> str | None:
    """Where evidence of a divergence is written: ``FP8DIST_REPORT_DIR``."""
    return environ.get("FP8DIST_REPORT_DIR", "").strip() or None


def _parsed(source: str, value: object, parse: Callable[[object], Any]) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        text, *choices = error.args
        raise ConfigurationError(f"{source} {text}{did_you_mean(value, choices)}, got {value!r}") from None


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
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}", *choices)
        return value

    return parse


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("must be a number of steps, or 0")
    return value


def _count_text(text: object) -> int:
    return _count(int(str(text)) if str(text).isdecimal() else text)


_READ_FROM_TEXT: Mapping[Callable[[object], Any], Callable[[object], Any]] = MappingProxyType(
    {_bool: _flag, _count: _count_text}
)
