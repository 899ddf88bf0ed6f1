"""Run settings: argument, then environment variable, then default; errors name each bad value."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import fp8dist
from fp8dist import RowwiseScaling
from fp8dist.errors import ConfigurationError
from fp8dist.state.settings import Settings

NOTHING: dict[str, Any] = {
    "enabled": None,
    "amax_sync": None,
    "check_every": None,
    "check_policy": None,
    "backend": None,
    "eval_precision": "fp8",
}


def _resolve(environ: dict[str, str] | None = None, **arguments: Any) -> Settings:
    return Settings.resolve(**{**NOTHING, **arguments}, environ=environ or {})


def test_values_from_the_environment() -> None:
    for texts, value in ((("1", "true", "YES", " on ", "True"), True), (("0", "false", "No", "OFF ", "FALSE"), False)):
        for text in texts:
            assert _resolve({"FP8DIST_ENABLED": text}) == _resolve(enabled=value)
            assert _resolve({"FP8DIST_AMAX_SYNC": text}) == _resolve(amax_sync=value)
    environ = {"FP8DIST_CHECK_POLICY": "repair", "FP8DIST_BACKEND": "reference", "FP8DIST_CHECK_EVERY": " 50 "}
    assert _resolve(environ) == _resolve(check_policy="repair", backend="reference", check_every=50)
    for name in ("ENABLED", "AMAX_SYNC", "CHECK_EVERY", "CHECK_POLICY", "BACKEND", "REPORT_DIR"):
        for text in ("", "  "):  # An empty variable is unset.
            assert _resolve({f"FP8DIST_{name}": text}) == _resolve()


def test_arguments_beat_the_environment() -> None:
    environ = {"FP8DIST_AMAX_SYNC": "0", "FP8DIST_CHECK_POLICY": "warn", "FP8DIST_BACKEND": "reference"}
    settings = _resolve(environ, amax_sync=True, check_policy="raise", backend="torch")
    assert (settings.amax_sync, settings.check_policy, settings.backend) == (True, "raise", "torch")
    assert _resolve({"FP8DIST_AMAX_SYNC": "1"}, amax_sync=False).amax_sync is False
    assert _resolve({"FP8DIST_CHECK_EVERY": "5"}, check_every=0).check_every == 0


def test_enabled_by_the_argument_and_the_environment() -> None:
    """FP8DIST_ENABLED=0 overrides everything; =1 does not enable what the program disabled."""
    for argument in [None, True, False]:
        for text in [None, "0", "1"]:
            environ = {} if text is None else {"FP8DIST_ENABLED": text}
            assert _resolve(environ, enabled=argument).enabled is (text != "0" and argument is not False)


def test_a_bad_variable_is_named() -> None:
    """The user set a variable, so no argument is named. Who asks for checks must not silently get none."""
    for name, texts, choices in (
        ("ENABLED", ("2", "ja", "-1", "None", "01", "of"), ""),
        ("AMAX_SYNC", ("2", "ja"), ""),
        ("CHECK_EVERY", ("often", "-1", "1.5", "10 steps"), ""),
        ("CHECK_POLICY", ("shout", "Repair"), "raise, warn, repair"),
        ("BACKEND", ("cuda", "Torch"), "auto, triton, torch, reference"),
    ):
        for text in texts:
            with pytest.raises(ConfigurationError, match=f"^FP8DIST_{name} must be .*{choices}.*'{text}'"):
                _resolve({f"FP8DIST_{name}": text}, **({"enabled": True} if name == "ENABLED" else {}))


def test_a_bad_argument_is_named() -> None:
    for argument, values in {
        "check_policy": ("shout", True),
        "check_every": (-1, True, 1.0, "10"),
        "backend": ("cuda", 0),
        "eval_precision": ("fp16", None),
        "enabled": ("0", 1),
        "amax_sync": ("0", 0),
        "audit_every": (-1, True),
        "audit_bytes": (0,),
    }.items():
        for value in values:
            with pytest.raises(ConfigurationError, match=f"{argument} must be .*{value!r}"):
                _resolve(**{argument: value})


def test_defaults_and_descriptions() -> None:
    """All settings are part of what ranks agree on, but for the folder of reports."""
    defaults = {"enabled": True, "amax_sync": True, "check_every": 0, "check_policy": "raise", "backend": "auto"}
    defaults |= {"eval_precision": "fp8", "fp8_all_gather": False, "fallback": None, "audit_every": 0}
    defaults |= {"audit_bytes": 1 << 26, "max_repairs": None, "share_group": False}
    assert _resolve().describe() == defaults
    settings = _resolve({"FP8DIST_REPORT_DIR": "/evidence"}, eval_precision="high", backend="torch")
    assert settings.report_dir == "/evidence"
    assert settings.describe() == {**defaults, "eval_precision": "high", "backend": "torch"}


def test_prepare_reads_the_environment_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8DIST_BACKEND", "reference")
    monkeypatch.setenv("FP8DIST_AMAX_SYNC", "0")
    monkeypatch.setenv("FP8DIST_CHECK_POLICY", "warn")
    manager = fp8dist.prepare(nn.Sequential(nn.Linear(16, 16)))
    assert manager.settings == Settings(True, False, 0, "warn", "reference", "fp8")
    monkeypatch.setenv("FP8DIST_BACKEND", "nonsense")
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(ConfigurationError, match="nonsense"):
        fp8dist.prepare(model)
    assert type(model[0]) is nn.Linear  # Nothing was changed.


def test_what_cannot_go_with_an_fp8_all_gather_is_refused() -> None:
    for arguments, text in [
        ({"amax_sync": False}, "fp8_all_gather=True needs amax_sync"),
        ({"eval_precision": "high"}, "fp8_all_gather=True gathers weights in FP8 in eval"),
        ({"fp8_all_gather": "yes"}, "fp8_all_gather must be True or False"),
        ({"overrides": {"0": RowwiseScaling()}}, "0: fp8_all_gather=True does not work with RowwiseScaling"),
    ]:
        model = nn.Sequential(nn.Linear(16, 16))
        with pytest.raises(ConfigurationError, match=text):
            fp8dist.prepare(model, **{"fp8_all_gather": True, **arguments})
        assert type(model[0]) is nn.Linear


def test_a_misspelt_variable_is_one_warning_of_prepare(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("FP8DIST_CHEK_EVERY", "FP8DIST_COLOUR", "FP8DIST_REPORT_DIR"):
        monkeypatch.setenv(name, "5")
    fp8dist.prepare(nn.Linear(32, 32))
    assert caplog.messages == [
        "fp8dist: environment: there is no setting FP8DIST_CHEK_EVERY (did you mean 'FP8DIST_CHECK_EVERY'?), "
        "FP8DIST_COLOUR"
    ]
