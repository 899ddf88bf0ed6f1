"""Run settings: what a caller passed, else the environment variable, else the default."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

from fp8dist.errors import ConfigurationError
from fp8dist.names import require_bool, require_choice, require_int
from fp8dist.state.fallback import Fallback
from fp8dist_kernels.backends import BACKENDS

__all__ = ["Policy", "Settings", "report_dir"]

Policy = Literal["raise", "warn", "repair"]
"""What to do when ranks differ."""

_FLAGS: Mapping[str, bool] = MappingProxyType(
    {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}
)


@dataclass(frozen=True)
class Settings:
    """Resolved settings of one manager. All of them but ``report_dir`` decide numbers or communication, and
    are part of the manifest."""

    enabled: bool
    amax_sync: bool
    check_every: int
    check_policy: Policy
    backend: str
    eval_precision: str
    fp8_all_gather: bool = False
    fallback: Fallback | None = None
    report_dir: str | None = None

    @classmethod
    def resolve(
        cls,
        *,
        enabled: bool | None = None,
        amax_sync: bool | None = None,
        check_every: int | None = None,
        check_policy: str | None = None,
        backend: str | None = None,
        eval_precision: str = "fp8",
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

        def setting(name: str, value: object, default: Any, checked: Callable[[str, Any], Any]) -> Any:
            if value is not None:
                return checked(name, value)
            variable = f"FP8DIST_{name.upper()}"
            text = environ.get(variable, "").strip()
            return checked(variable, _from_text(variable, text, default)) if text else default

        def one_of(*choices: str) -> Callable[[str, Any], str]:
            return lambda name, value: require_choice(name, value, choices)

        require_choice("eval_precision", eval_precision, ("fp8", "high"))
        require_bool("fp8_all_gather", fp8_all_gather)
        if fallback is not None and not isinstance(fallback, Fallback):
            raise ConfigurationError(f"fallback must be a Fallback or None, got {fallback!r}")
        allowed = setting("enabled", None, True, require_bool)
        synced = setting("amax_sync", amax_sync, True, require_bool)
        if fp8_all_gather and not synced:
            raise ConfigurationError("fp8_all_gather=True needs amax_sync: all parts of a weight share a scale")
        if fp8_all_gather and eval_precision == "high":
            raise ConfigurationError(
                'fp8_all_gather=True gathers weights in FP8 in eval() as well: eval_precision="high" cannot be'
            )
        return cls(
            enabled=allowed and setting("enabled", enabled, True, require_bool),
            amax_sync=synced,
            check_every=setting(
                "check_every", check_every, 0, lambda name, value: require_int(name, value, 0, what="a number of steps")
            ),
            check_policy=setting("check_policy", check_policy, "raise", one_of("raise", "warn", "repair")),
            backend=setting("backend", backend, "auto", one_of(*BACKENDS)),
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


def _from_text(variable: str, text: str, default: object) -> object:
    """What a variable says of a setting with this default."""
    if isinstance(default, bool):
        if text.lower() not in _FLAGS:
            raise ConfigurationError(f"{variable} must be 1 or 0, got {text!r}")
        return _FLAGS[text.lower()]
    return int(text) if isinstance(default, int) and text.isdecimal() else text
