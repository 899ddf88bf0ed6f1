"""Run settings. An argument of the caller comes first, then the environment variable, then the default."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

from fp8dist.common.names import did_you_mean, require_bool, require_choice, require_int
from fp8dist.errors import ConfigurationError
from fp8dist.state.fallback import Fallback
from fp8dist_kernels import BACKENDS

Policy = Literal["raise", "warn", "repair"]
"""What to do when ranks differ."""

Start = Literal["raise", "warn"]
"""What to do when ranks differ at ``attach``."""

AUDIT_BYTES = 1 << 26
"""Default of ``audit_bytes``."""

VARIABLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "FP8DIST_ENABLED": ("on", "`0` keeps the model in high precision. It overrides `enabled=True`."),
        "FP8DIST_AMAX_SYNC": ("on", "`0` lets each rank keep its own amaxes, without a collective."),
        "FP8DIST_CHECK_EVERY": ("0: never", "Compare FP8 state and parameters between ranks every so many steps."),
        "FP8DIST_CHECK_POLICY": ("`raise`", "What these checks do when ranks differ: `raise`, `warn` or `repair`."),
        "FP8DIST_AUDIT_EVERY": ("0: never", "Let another rank repeat a cast or product every so many steps."),
        "FP8DIST_AT_REST_EVERY": ("0: never", "Look for tensors that change between two steps, every so many steps."),
        "FP8DIST_BACKEND": (
            "`auto`",
            f"What computes FP8 casts and products: {', '.join(f'`{backend}`' for backend in BACKENDS)}.",
        ),
        "FP8DIST_REPORT_DIR": ("none", "A folder. When ranks differ, each rank involved writes its evidence there."),
    }
)
"""The environment variables: (default, meaning) of each, in Markdown."""

_FLAGS: Mapping[str, bool] = MappingProxyType(
    {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}
)


def _one_of(*choices: str) -> Callable[[str, Any], str]:
    return lambda name, value: require_choice(name, value, choices)


def _steps(name: str, value: Any) -> int:
    return require_int(name, value, 0, what="a number of steps")


def _fallback(name: str, value: Any) -> Fallback | None:
    if value is None or isinstance(value, Fallback):
        return value
    raise ConfigurationError(f"{name} must be a Fallback or None, got {value!r}")


def _repairs(name: str, value: Any) -> int | None:
    return None if value is None else require_int(name, value, 1, what="None or a number of checks")


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = MappingProxyType(
    {
        "enabled": require_bool,
        "amax_sync": require_bool,
        "check_every": _steps,
        "check_policy": _one_of("raise", "warn", "repair"),
        "backend": _one_of(*BACKENDS),
        "eval_precision": _one_of("fp8", "high"),
        "fp8_all_gather": require_bool,
        "fallback": _fallback,
        "audit_every": _steps,
        "at_rest_every": _steps,
        "audit_bytes": lambda name, value: require_int(name, value, 1, what="a number of bytes"),
        "max_repairs": _repairs,
        "share_group": require_bool,
    }
)
"""By setting: the function of (name for the message, value) that returns the value, or raises ConfigurationError."""


@dataclass(frozen=True)
class Settings:
    """Resolved settings of one manager, as ``prepare`` describes them. All of them except ``report_dir`` and
    ``at_rest_every`` affect numerics or communication, and are part of the manifest."""

    enabled: bool = True
    amax_sync: bool = True
    check_every: int = 0
    check_policy: Policy = "raise"
    backend: str = "auto"
    eval_precision: str = "fp8"
    fp8_all_gather: bool = False
    fallback: Fallback | None = None
    audit_every: int = 0
    at_rest_every: int = 0
    audit_bytes: int = AUDIT_BYTES
    max_repairs: int | None = None
    share_group: bool = False
    report_dir: str | None = None

    @classmethod
    def resolve(cls, environ: Mapping[str, str] = os.environ, **given: Any) -> Settings:
        """Return the settings that a caller has given, by name. One that is missing, or None and has an environment
        variable, comes from its variable, else from the default. Local.

        ``FP8DIST_ENABLED=0`` overrides ``enabled=True``: whoever runs the job can switch FP8 off without changing its
        code.

        Raises:
            ConfigurationError: a value is not accepted. The message names the argument or variable.
        """
        values = {name: _resolved(name, given, environ) for name in _CHECKS}
        values["enabled"] &= _resolved("enabled", {}, environ)
        if values["fp8_all_gather"] and not values["amax_sync"]:
            raise ConfigurationError("fp8_all_gather=True needs amax_sync, because all parts of a weight share a scale")
        if values["fp8_all_gather"] and values["eval_precision"] == "high":
            raise ConfigurationError(
                'fp8_all_gather=True gathers weights in FP8 in eval() as well, so eval_precision="high" is not possible'
            )
        return cls(**{**given, **values}, report_dir=report_dir(environ))

    def describe(self) -> dict[str, Any]:
        """Return plain JSON values for the manifest."""
        described = asdict(self)
        del described["report_dir"], described["at_rest_every"]  # They may differ between hosts.
        return described


def report_dir(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the folder for evidence of a divergence (``FP8DIST_REPORT_DIR``), or None."""
    return environ.get("FP8DIST_REPORT_DIR", "").strip() or None


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that begin with FP8DIST_ and are no settings, each with a hint such as "(did you mean …?)",
    or ""."""
    strangers = sorted(name for name in environ if name.startswith("FP8DIST_") and name not in VARIABLES)
    return {name: did_you_mean(name, VARIABLES, 1, 0.8) for name in strangers}


def _resolved(name: str, given: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
    """Return one setting: as given, else from its environment variable, else the default."""
    variable, check, default = f"FP8DIST_{name.upper()}", _CHECKS[name], getattr(Settings, name)
    value = given.get(name, None if variable in VARIABLES else default)
    if value is not None or variable not in VARIABLES:
        return check(name, value)
    text = environ.get(variable, "").strip()
    return check(variable, _from_text(variable, text, default)) if text else default


def _from_text(variable: str, text: str, default: object) -> object:
    """Return the value of a variable, converted to the type of ``default``."""
    if isinstance(default, bool):
        if text.lower() not in _FLAGS:
            raise ConfigurationError(f"{variable} must be 1 or 0, got {text!r}")
        return _FLAGS[text.lower()]
    return int(text) if isinstance(default, int) and text.isdecimal() else text
