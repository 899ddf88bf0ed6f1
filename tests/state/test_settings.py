"""Run settings: argument, then environment variable, then default; errors name each bad value."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_linear import FP8Linear
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


def test_defaults() -> None:
    assert _resolve() == Settings(
        enabled=True, amax_sync=True, check_every=0, check_policy="raise", backend="auto", eval_precision="fp8"
    )


def test_booleans_from_the_environment() -> None:
    for text, value in [(t, True) for t in ("1", "true", "YES", " on ", "True")] + [
        (t, False) for t in ("0", "false", "No", "OFF ", "FALSE")
    ]:
        assert _resolve({"FP8DIST_ENABLED": text}).enabled is value
        assert _resolve({"FP8DIST_AMAX_SYNC": text}).amax_sync is value
        # Each variable controls one setting.
        assert _resolve({"FP8DIST_ENABLED": text}).amax_sync is True
        assert _resolve({"FP8DIST_AMAX_SYNC": text}).enabled is True


def test_choices_from_the_environment() -> None:
    settings = _resolve(
        {"FP8DIST_CHECK_POLICY": "repair", "FP8DIST_BACKEND": "reference", "FP8DIST_CHECK_EVERY": " 50 "}
    )
    assert settings.check_policy == "repair"
    assert settings.check_every == 50
    assert settings.backend == "reference"
    assert _resolve({"FP8DIST_BACKEND": "torch"}).backend == "torch"
    assert _resolve({"FP8DIST_CHECK_EVERY": "5"}, check_every=0).check_every == 0


def test_an_empty_variable_is_unset() -> None:
    for name in ["ENABLED", "AMAX_SYNC", "CHECK_EVERY", "CHECK_POLICY", "BACKEND", "REPORT_DIR"]:
        for text in ["", "  "]:
            assert _resolve({f"FP8DIST_{name}": text}) == _resolve()


def test_arguments_beat_the_environment() -> None:
    environ = {"FP8DIST_AMAX_SYNC": "0", "FP8DIST_CHECK_POLICY": "warn", "FP8DIST_BACKEND": "reference"}
    settings = _resolve(environ, amax_sync=True, check_policy="raise", backend="torch")
    assert (settings.amax_sync, settings.check_policy, settings.backend) == (True, "raise", "torch")
    assert _resolve({"FP8DIST_AMAX_SYNC": "1"}, amax_sync=False).amax_sync is False


def test_enabled_by_the_argument_and_the_environment() -> None:
    """FP8DIST_ENABLED=0 overrides everything; =1 does not enable what the program disabled."""
    for argument in [None, True, False]:
        for text in [None, "0", "1"]:
            environ = {} if text is None else {"FP8DIST_ENABLED": text}
            assert _resolve(environ, enabled=argument).enabled is (text != "0" and argument is not False)


def test_a_bad_variable_is_named() -> None:
    """The user set a variable, so no argument is named. Who asks for checks must not silently get none."""
    bad = [(name, text, "") for name in ("ENABLED", "AMAX_SYNC") for text in ("2", "ja", "-1", "None", "01")]
    bad += [("CHECK_EVERY", text, "") for text in ("often", "-1", "1.5", "10 steps")]
    bad += [("CHECK_POLICY", text, "raise, warn, repair") for text in ("shout", "Repair")]
    bad += [("BACKEND", text, "auto, triton, torch, reference") for text in ("cuda", "Torch")]
    for name, text, choices in bad:
        with pytest.raises(ConfigurationError, match=f"^FP8DIST_{name} must be .*{choices}.*'{text}'"):
            _resolve({f"FP8DIST_{name}": text})
    # FP8DIST_ENABLED overrides the argument, so a typo in its value must raise.
    with pytest.raises(ConfigurationError, match=r"FP8DIST_ENABLED must be .*'of'"):
        _resolve({"FP8DIST_ENABLED": "of"}, enabled=True)


def test_a_bad_argument_is_named() -> None:
    for argument, value in [
        ("check_policy", "shout"),
        ("check_policy", True),
        ("check_every", -1),
        ("check_every", True),
        ("check_every", 1.0),
        ("check_every", "10"),
        ("backend", "cuda"),
        ("backend", 0),
        ("eval_precision", "fp16"),
        ("eval_precision", None),
        ("enabled", "0"),
        ("enabled", 1),
        ("amax_sync", "0"),
        ("amax_sync", 0),
    ]:
        with pytest.raises(ConfigurationError, match=f"{argument} must be .*{value!r}"):
            _resolve(**{argument: value})


def test_all_settings_are_described() -> None:
    assert _resolve(eval_precision="high", backend="torch").describe() == {
        "enabled": True,
        "amax_sync": True,
        "check_every": 0,
        "check_policy": "raise",
        "backend": "torch",
        "eval_precision": "high",
        "fp8_all_gather": False,
        "fallback": None,
        "audit_every": 0,
        "audit_bytes": 1 << 26,
        "max_repairs": None,
        "share_group": False,
    }


def test_the_report_folder_is_not_part_of_the_agreement() -> None:
    settings = _resolve({"FP8DIST_REPORT_DIR": "/evidence"})
    assert settings.report_dir == "/evidence"
    assert settings.describe() == _resolve().describe()


def test_prepare_reads_the_environment_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8DIST_BACKEND", "reference")
    monkeypatch.setenv("FP8DIST_AMAX_SYNC", "0")
    monkeypatch.setenv("FP8DIST_CHECK_POLICY", "warn")
    manager = fp8dist.prepare(nn.Sequential(nn.Linear(16, 16)))
    assert manager.settings == Settings(True, False, 0, "warn", "reference", "fp8")
    monkeypatch.setenv("FP8DIST_ENABLED", "0")
    model = nn.Sequential(nn.Linear(16, 16))
    manager = fp8dist.prepare(model, enabled=True)
    assert not manager.settings.enabled
    assert isinstance(model[0], FP8Linear)
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
