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
from fp8dist_kernels.backends import BACKENDS

__all__ = ["AUDIT_BYTES", "VARIABLES", "Policy", "Settings", "Start", "report_dir", "unknown_variables"]

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


@dataclass(frozen=True)
class Settings:
    """Resolved settings of one manager. All of them except ``report_dir`` affect numerics or communication, and are
    part of the manifest."""

    enabled: bool
    amax_sync: bool
    check_every: int
    check_policy: Policy
    backend: str
    eval_precision: str
    fp8_all_gather: bool = False
    fallback: Fallback | None = None
    audit_every: int = 0
    audit_bytes: int = AUDIT_BYTES
    max_repairs: int | None = None
    share_group: bool = False
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
        audit_every: int | None = None,
        audit_bytes: int = AUDIT_BYTES,
        max_repairs: int | None = None,
        share_group: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> Settings:
        """Return settings in which each None is replaced by the environment variable, or by the default.

        ``FP8DIST_ENABLED=0`` overrides ``enabled=True``: whoever runs the job can switch FP8 off without changing its
        code.

        Raises:
            ConfigurationError: a value is not accepted. The message names the argument or variable.
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
        require_bool("share_group", share_group)
        if fallback is not None and not isinstance(fallback, Fallback):
            raise ConfigurationError(f"fallback must be a Fallback or None, got {fallback!r}")
        require_int("audit_bytes", audit_bytes, 1, what="a number of bytes")
        if max_repairs is not None:
            require_int("max_repairs", max_repairs, 1, what="None or a number of checks")

        def steps(name: str, value: Any) -> int:
            return require_int(name, value, 0, what="a number of steps")

        allowed = setting("enabled", None, True, require_bool)
        synced = setting("amax_sync", amax_sync, True, require_bool)
        if fp8_all_gather and not synced:
            raise ConfigurationError("fp8_all_gather=True needs amax_sync, because all parts of a weight share a scale")
        if fp8_all_gather and eval_precision == "high":
            raise ConfigurationError(
                'fp8_all_gather=True gathers weights in FP8 in eval() as well, so eval_precision="high" is not possible'
            )
        return cls(
            enabled=allowed and setting("enabled", enabled, True, require_bool),
            amax_sync=synced,
            check_every=setting("check_every", check_every, 0, steps),
            check_policy=setting("check_policy", check_policy, "raise", one_of("raise", "warn", "repair")),
            backend=setting("backend", backend, "auto", one_of(*BACKENDS)),
            eval_precision=eval_precision,
            fp8_all_gather=fp8_all_gather,
            fallback=fallback,
            audit_every=setting("audit_every", audit_every, 0, steps),
            audit_bytes=audit_bytes,
            max_repairs=max_repairs,
            share_group=share_group,
            report_dir=report_dir(environ),
        )

    def describe(self) -> dict[str, Any]:
        """Return plain JSON values for the manifest."""
        described = asdict(self)
        del described["report_dir"]  # It may differ between hosts.
        return described


def report_dir(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the folder for evidence of a divergence (``FP8DIST_REPORT_DIR``), or None."""
    return environ.get("FP8DIST_REPORT_DIR", "").strip() or None


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that begin with FP8DIST_ and are no settings, each with a hint such as "(did you mean …?)",
    or ""."""
    strangers = sorted(name for name in environ if name.startswith("FP8DIST_") and name not in VARIABLES)
    return {name: did_you_mean(name, VARIABLES, 1, 0.8) for name in strangers}


def _from_text(variable: str, text: str, default: object) -> object:
    """Return the value of a variable, converted to the type of ``default``."""
    if isinstance(default, bool):
        if text.lower() not in _FLAGS:
            raise ConfigurationError(f"{variable} must be 1 or 0, got {text!r}")
        return _FLAGS[text.lower()]
    return int(text) if isinstance(default, int) and text.isdecimal() else text
