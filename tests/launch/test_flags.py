"""The flags of the example job and of its lab: what they mean, and which ones are refused, in one line."""

from __future__ import annotations

from subprocess import CompletedProcess
from typing import Any

import pytest

import fp8dist
from launch.train_gpt import options as example
from launch.train_gpt.model import GPT
from tests.support.lab import options
from tests.support.lab.options import parse
from tests.support.lab.recipes import fallback_of, overrides_of, recipe_of
from tests.support.main_job import ROOT, assert_refused

OF_THE_EXAMPLE = {
    "--recpie delayed": "unrecognized arguments: --recpie",
    "--steps 0": "--steps: must be at least 1",
    "--learning-rate much": "--learning-rate: invalid number value",
    "--timeout 0": "--timeout: must be positive and finite",
    "--keep 0": "--keep: must be at least 1",
    "--parallel fsdp3": "--parallel: invalid choice: 'fsdp3'",
    "--parallel none": "--parallel none is for one rank, got 2",
    "--width 24 --heads 2": "a multiple of 16",
    "--heads 5": "--width 192 is not a multiple of --heads 5",
    "--recipe block --update next_step": "--update is for delayed scaling, got block",
    "--precision bf16 --audit-every 2": "--audit-every needs --precision fp8, got bf16",
    "--data /no/such/file": "--data /no/such/file: No such file or directory",
    "--data /": "--data /: Is a directory",
    "--data setup.cfg --context 5000": "--context 5000 needs at least 50011",
}
"""Flags on two ranks, and the message. The lab refuses them too."""

OF_THE_LAB = {
    "--out setup.cfg/run": "--out setup.cfg/run: Not a directory",
    "--fallback-steps 5 --fallback-saturated 1.5": "--fallback-saturated: must be a share",
    "--watch-every 1 --scale-jump 1": "--scale-jump: must be finite and above 1",
    "--loss-guard warn --loss-factor 0.5": "--loss-factor: must be finite and at least 1",
    "--share-batch --batch-size 3": "--share-batch needs a --batch-size that is a multiple of the 2 ranks",
    # Words that have another form.
    **{
        f"--{flag} {word}": f"argument --{flag}: invalid {reader} value: '{word}'"
        for flag, reader, words in (
            ("inject", "fault", "boom:1:2 weight:1 weight:1:x product:1 product:1:3:grad bad-device:1:p nan-sample:1"),
            ("inject", "fault", "hidden-state:1:3 bad-device"),
            ("override", "override", "blocks.0.*=fast current"),
            ("high-gemms", "gemms", "fprop,bprop"),
            ("fast-gemms", "gemms_or_none", "all"),
            ("replay-on", "replays", "loss"),
        )
        for word in words.split()
    },
    # Faults that cannot be planted: their rank and step, and what they need.
    "--inject weight:-1:2": "--inject weight:-1:2: there is no rank -1",
    "--inject slow:1:0": "--inject slow:1:0: the number of milliseconds must be at least 1",
    "--inject weight:2:3": "--inject weight:2:3: there is no rank 2, ranks are 0 to 1",
    "--inject bad-device:2": "--inject bad-device:2:0.01: there is no rank 2, ranks are 0 to 1",
    "--inject weight:1:3 --inject skip:5:3": "--inject skip:5:3: there is no rank 5",
    "--inject skip:1:0": "--inject skip:1:0: there is no step 0, steps are 1 to 200",
    "--inject skip:1:9 --steps 8": "--inject skip:1:9: there is no step 9, steps are 1 to 8",
    "--inject kill-sync:1:3 --no-amax-sync": "--inject kill-sync:1:3: needs ranks that share amaxes",
    "--inject kill-save:1:3": "--inject kill-save:1:3: no checkpoint is saved at step 3; see --save-every",
    "--inject weight:1:3 --parallel fsdp2": "--inject weight:1:3: shards have no replica to compare with",
    "--inject product:1:3 --precision bf16": "--inject product:1:3:wgrad: needs --precision fp8, got bf16",
    "--inject nan:1:3 --precision bf16": "--inject nan:1:3: needs --precision fp8, got bf16",
}


def test_a_mistake_is_one_line_and_exit_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for flags, message in {**OF_THE_EXAMPLE, **OF_THE_LAB}.items():
        for check in (options.check, example.check) if flags in OF_THE_EXAMPLE else (options.check,):
            with pytest.raises(SystemExit) as left:
                check(flags.split())
            said = capsys.readouterr()
            done = CompletedProcess(flags, left.value.code, said.out, said.err)  # type: ignore[arg-type]
            assert_refused(done, message)


def test_flags_of_recipes() -> None:
    names = ("DelayedScaling", "CurrentScaling", "RowwiseScaling", "BlockScaling", "MXFP8Scaling", "NVFP4Scaling")
    for kind, name in zip(example.RECIPES, names, strict=True):
        assert recipe_of(parse(["--recipe", kind])) == getattr(fp8dist, name)()  # Its defaults are the library's.
    flags = "--recipe block --power-of-two --high-gemms wgrad,fprop --margin 1 --layers 4 --high-first 1 --high-last 2"
    flags += " --format e4m3 --amax-algo most_recent"
    overrides = ["*.qkv=delayed", "blocks.2.*=current", "lm_head=high"]
    given = parse([*flags.split(), *(part for override in overrides for part in ("--override", override))])
    assert given.recipes == {"block", "delayed", "current"}
    common: dict[str, Any] = {"power_of_two": True, "high_precision": ("fprop", "wgrad"), "format": "e4m3"}
    assert recipe_of(given) == fp8dist.BlockScaling(**common)
    assert list(overrides_of(given, GPT(4, 16, 1, 8)).items()) == [
        ("blocks.0.*", "high"),
        ("blocks.2.*", "high"),
        ("blocks.3.*", "high"),
        ("*.qkv", fp8dist.DelayedScaling(margin=1, amax_algo="most_recent", **common)),
        ("lm_head", "high"),
    ]
    assert fallback_of(given) is None
    falls = parse(["--fallback-steps", "7", "--fallback-underflow", "0"])
    assert fallback_of(falls) == fp8dist.Fallback(7, underflow=0.0)
    for flag, gemms in (("none", ()), ("wgrad,fprop", ("fprop", "wgrad"))):
        assert recipe_of(parse(["--fast-gemms", flag])) == fp8dist.DelayedScaling(fast_accumulation=gemms)
    mixed = parse(["--recipe", "block", "--override", "*.qkv=rowwise", "--fast-gemms", "wgrad"])
    assert recipe_of(mixed) == fp8dist.BlockScaling()
    assert overrides_of(mixed, GPT(1, 16, 1, 8)) == {"*.qkv": fp8dist.RowwiseScaling(fast_accumulation=("wgrad",))}


def test_weights_are_gathered_as_fp8_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for flags, gathered in {
        "--recipe current": True,
        "--recipe mxfp8": False,
        "--override *.qkv=rowwise": False,
        "--recipe block --width 256": True,
        "--override *.qkv=block --width 192": False,
        "--recipe block --width 384": False,
        "--recipe block --width 384 --parallel hsdp": True,  # Whole weights: shards of one rank.
        "--parallel ddp": False,
    }.items():
        assert parse(["--parallel", "fsdp2", *flags.split()]).gathers == gathered, flags
