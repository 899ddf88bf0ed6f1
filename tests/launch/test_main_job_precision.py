"""The example job's recipes, switches to high precision, log of scales, and loss guard."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8dist
from fp8dist.errors import CheckpointError
from launch.train_gpt.model import GPT
from launch.train_gpt.options import RECIPES
from tests.support.lab.guard import Guard
from tests.support.lab.options import parse
from tests.support.lab.ranks import Ranks
from tests.support.lab.recipes import fallback_of, overrides_of, recipe_of
from tests.support.main_job import ALONE, CHECK, RANKS, STEPS, Run, assert_refused, finish, metrics, start

# Tests share cached runs, so they must run in the same worker process.
pytestmark = pytest.mark.xdist_group("main_job_precision")

TWO_BLOCKS = f"--layers 2 --width 64 --heads 2 --context 32 --batch-size 4 --steps {STEPS} --log-every 1".split()
MODULES = [f"blocks.{block}.{name}" for block in (0, 1) for name in ("attention_out", "mlp_in", "mlp_out", "qkv")]
SLOTS = sorted(f"{module}:{role}" for module in MODULES for role in ("input", "weight", "grad_output"))
PLANTED = "blocks.1.mlp_in:input"
"""The slot whose tensor gets the outlier of ``--inject outlier``."""

COLD = "slots had no amax in the first step"
"""Part of the library's message when FP8 starts without scales."""

Runner = Callable[..., Run]


@pytest.fixture(scope="module")
def single_run(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Return a function that makes a run of one process, once per combination of flags."""
    made: dict[tuple[str, ...], Run] = {}

    def run(*flags: str) -> Run:
        if flags not in made:
            made[flags] = finish(tmp_path_factory.mktemp("run"), ALONE, *TWO_BLOCKS, *flags)
        return made[flags]

    return run


# Flags -------------------------------------------------------------------------------------------

BLOCKS_CUT = ["--fp8-all-gather", "--parallel", "fsdp2", "--recipe", "block"]
MISTAKES = {
    "gather of rows": (
        ["--fp8-all-gather", "--parallel", "fsdp2", "--recipe", "rowwise"],
        "--fp8-all-gather does not go with rowwise",
    ),
    "gather of one module's rows": (
        ["--fp8-all-gather", "--parallel", "fsdp2", "--override", "*.qkv=rowwise"],
        "--fp8-all-gather does not go with rowwise",
    ),
    "gather of cut blocks": (BLOCKS_CUT, "--width must be a multiple of 128 times the 2 ranks"),
    "history of current": (["--recipe", "current", "--history-len", "16"], "--history-len is for delayed scaling"),
    "margin of block": (["--recipe", "block", "--margin", "0"], "--margin is for delayed scaling, got block"),
    "update of rowwise": (["--recipe", "rowwise", "--update", "next_step"], "--update is for delayed scaling"),
    "no recipe": (
        ["--override", "blocks.0.*=fast"],
        "--override: expected PATTERN=RECIPE, where RECIPE is one of delayed",
    ),
    "no pattern": (["--override", "current"], "--override: expected PATTERN=RECIPE"),
    "a pattern twice": (["--override", "a=current", "--override", "a=block"], "--override a=… is given more than once"),
    "nothing left": (["--layers", "3", "--high-first", "2", "--high-last", "1"], "leave none of the --layers 3 in FP8"),
    "no GEMM": (["--high-gemms", "fprop,bprop"], "--high-gemms: expected any of fprop, dgrad, wgrad"),
    "no fast GEMM": (["--fast-gemms", "all"], "--fast-gemms: expected any of fprop, dgrad, wgrad"),
    "fast blocks": (
        ["--recipe", "block", "--fast-gemms", "fprop"],
        "--fast-gemms is for delayed, current and rowwise scaling, got block",
    ),
    "late start": (["--steps", "9", "--fp8-start-step", "10"], "--fp8-start-step 10 is beyond --steps 9"),
    "share": (["--fallback-steps", "5", "--fallback-saturated", "1.5"], "--fallback-saturated: must be a share"),
    "share alone": (["--fallback-underflow", "0"], "--fallback-underflow needs --fallback-steps"),
    "jump alone": (["--scale-jump", "8"], "--scale-jump needs --watch-every"),
    "no jump": (["--watch-every", "1", "--scale-jump", "1"], "--scale-jump: must be finite and above 1"),
    "TensorBoard alone": (["--tensorboard"], "--tensorboard needs --watch-every"),
    "ranks alone": (["--watch-ranks"], "--watch-ranks needs --watch-every"),
    "factor alone": (["--loss-factor", "2"], "--loss-factor needs --loss-guard"),
    "no factor": (["--loss-guard", "warn", "--loss-factor", "0.5"], "--loss-factor: must be finite and at least 1"),
    "guard of fp32": (
        ["--loss-guard", "fallback", "--precision", "fp32"],
        "--loss-guard fallback needs --precision fp8",
    ),
    "no rank": (["--inject", "outlier:2:1"], "--inject outlier:2:1: there is no rank 2"),
}


def test_a_mistake_is_one_line_and_exit_2() -> None:
    for flags, message in MISTAKES.values():
        assert_refused(start(CHECK, *flags), message)


def test_flags_say_what_the_library_says() -> None:
    kinds = {
        "delayed": "DelayedScaling",
        "current": "CurrentScaling",
        "rowwise": "RowwiseScaling",
        "block": "BlockScaling",
    }
    assert tuple(kinds) == RECIPES
    for kind, name in kinds.items():
        recipe = recipe_of(parse(["--recipe", kind]))
        assert recipe == getattr(fp8dist, name)()  # Its defaults are the library's.


def test_flags_of_recipes() -> None:
    flags = "--recipe block --power-of-two --high-gemms wgrad,fprop --margin 1 --layers 4 --high-first 1 --high-last 2"
    overrides = ["*.qkv=delayed", "blocks.2.*=current", "lm_head=high"]
    given = parse([*flags.split(), *(part for override in overrides for part in ("--override", override))])
    assert given.recipes == {"block", "delayed", "current"}
    common: dict[str, Any] = {"power_of_two": True, "high_precision": ("fprop", "wgrad")}
    assert recipe_of(given) == fp8dist.BlockScaling(**common)
    assert list(overrides_of(given, GPT(4, 16, 1, 8)).items()) == [
        ("blocks.0.*", "high"),
        ("blocks.2.*", "high"),
        ("blocks.3.*", "high"),
        ("*.qkv", fp8dist.DelayedScaling(margin=1, **common)),
        ("lm_head", "high"),
    ]
    assert fallback_of(given) is None
    falls = parse(["--fallback-steps", "7", "--fallback-underflow", "0"])
    assert fallback_of(falls) == fp8dist.Fallback(7, underflow=0.0)


def test_gemms_with_fast_accumulation() -> None:
    for recipe, kind in (
        ("delayed", fp8dist.DelayedScaling),
        ("current", fp8dist.CurrentScaling),
        ("rowwise", fp8dist.RowwiseScaling),
    ):
        for flag, gemms in (("none", ()), ("wgrad,fprop", ("fprop", "wgrad")), ("dgrad", ("dgrad",))):
            given = parse(["--recipe", recipe, "--fast-gemms", flag])
            assert recipe_of(given) == kind(fast_accumulation=gemms)
    mixed = parse(["--recipe", "block", "--override", "*.qkv=current", "--fast-gemms", "wgrad"])
    assert recipe_of(mixed) == fp8dist.BlockScaling()
    assert overrides_of(mixed, GPT(1, 16, 1, 8)) == {"*.qkv": fp8dist.CurrentScaling(fast_accumulation=("wgrad",))}


def test_weights_are_gathered_as_fp8_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, gathered in [
        (["--recipe", "current"], True),
        (["--recipe", "rowwise"], False),
        (["--override", "*.qkv=rowwise"], False),
        (["--recipe", "block", "--width", "256"], True),
        (["--recipe", "block", "--width", "384"], False),
        (["--recipe", "block", "--width", "384", "--parallel", "hsdp"], True),  # Whole weights: shards of one rank.
        (["--override", "*.qkv=block", "--width", "192"], False),
        (["--parallel", "ddp"], False),
    ]:
        monkeypatch.setenv("WORLD_SIZE", "2")
        options = parse(["--parallel", "fsdp2", *flags])
        assert (options.why_not_gathered is None) == gathered


# Recipes -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "parallel"),
    [
        ("current", "ddp"),
        ("rowwise", "fsdp2"),
        pytest.param("delayed", "fsdp2", marks=pytest.mark.long),
        pytest.param("block", "ddp", marks=pytest.mark.long),
    ],
)
def test_each_recipe_learns_and_leaves_ranks_alike(
    tmp_path: Path, single_run: Runner, recipe: str, parallel: str
) -> None:
    run = finish(tmp_path, RANKS, *TWO_BLOCKS, "--recipe", recipe, "--parallel", parallel, "--check-every", "5")
    assert run.summary["fp8_slots"] == len(SLOTS)
    assert run.summary["fp8_state_identical"] is run.summary["parameters_identical"] is True
    # Half of the data is that of the FP32 run on one process, so the losses are close but not equal.
    fp32 = single_run("--precision", "fp32")
    assert run.losses[-1] == pytest.approx(fp32.losses[-1], rel=0.03)
    assert run.losses[-1] < run.losses[0] - 0.5
    assert [line["high_precision_modules"] for line in run.lines] == [0] * STEPS


@pytest.mark.slow
def test_recipes_and_single_modules_differ(single_run: Runner) -> None:
    kinds = [["--recipe", kind] for kind in ("delayed", "current", "rowwise", "block")]
    kinds += [["--override", "blocks.0.mlp_in=rowwise"], ["--high-first", "1"], ["--high-gemms", "wgrad"]]
    kinds += [["--precision", "fp32"]]
    runs = [single_run(*flags, "--steps", "3") for flags in kinds]
    assert len({run.losses[-1] for run in runs}) == len(runs)
    assert runs[5].summary["fp8_slots"] == len(SLOTS) // 2
    assert runs[6].summary["high_precision_modules"] == len(MODULES)
    assert f"FP8 modules in high precision at the end:                 {len(MODULES)}" in runs[6].output


@pytest.mark.long
def test_whole_blocks_are_gathered_as_fp8(tmp_path: Path) -> None:
    flags = ["--layers", "1", "--width", "256", "--context", "16", "--batch-size", "2", "--steps", "3"]
    runs = [
        finish(tmp_path / name, RANKS, *flags, "--recipe", "block", "--parallel", "fsdp2", *more)
        for name, more in (("fp8", []), ("fp32", ["--no-fp8-all-gather"]))
    ]
    assert runs[0].losses == runs[1].losses
    saved = runs[1].summary["bytes_gathered_per_step"] - runs[0].summary["bytes_gathered_per_step"]
    weights = 12 * 256 * 256  # The block's four Linears.
    scales = 4 * weights // 128**2
    assert saved == 2 * (3 * weights - scales) // 2  # Forward and backward; half comes from the other rank.


# Resuming ----------------------------------------------------------------------------------------


def assert_resumes(folder: Path, command: tuple[str, ...], *flags: str, at: int = 6) -> tuple[Run, Run]:
    """Assert that an interrupted run ends like an uninterrupted one. Return (uninterrupted run, resumed run)."""
    straight = finish(folder / "straight", command, *TWO_BLOCKS, *flags)
    save = ["--save-every", str(at)]
    finish(folder / "parts", command, *TWO_BLOCKS, *flags, *save, "--stop-after", str(at))
    second = finish(folder / "parts", command, *TWO_BLOCKS, *flags, *save, "--resume", "auto")
    assert second.summary["resumed_after_step"] == at
    assert second.losses == straight.losses
    assert second.summary["parameters_sha256"] == straight.summary["parameters_sha256"]
    return straight, second


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["delayed", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("current", "rowwise"))]
)
def test_a_resumed_run_is_the_same_run(tmp_path: Path, recipe: str) -> None:
    """The interruption comes during the steps in high precision."""
    straight, second = assert_resumes(tmp_path, ALONE, "--recipe", recipe, "--fp8-start-step", "9")
    for run in (straight, second):
        # Counted at the end of a step: step 8 has already switched to FP8.
        assert [line["high_precision_modules"] for line in run.lines] == [len(MODULES)] * 7 + [0] * 5


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "parallel"), [("current", "ddp"), ("block", "fsdp2")])
def test_a_resumed_run_of_two_ranks_is_the_same_run(tmp_path: Path, recipe: str, parallel: str) -> None:
    assert_resumes(tmp_path, RANKS, "--recipe", recipe, "--parallel", parallel, "--fp8-start-step", "4")


@pytest.mark.slow
def test_steps_before_the_first_in_fp8_are_in_high_precision(single_run: Runner) -> None:
    fp32, fp8 = single_run("--precision", "fp32"), single_run("--fp8-start-step", "5", "--calibrate-steps", "1")
    assert fp8.losses[:4] == fp32.losses[:4]
    assert all(one != other for one, other in zip(fp8.losses[4:], fp32.losses[4:], strict=True))


@pytest.fixture(scope="module")
def fp32_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("fp32")
    finish(out, ALONE, *TWO_BLOCKS, "--precision", "fp32", "--save-every", "6", "--stop-after", "6")
    return str(out / "checkpoints/step-00000006")


@pytest.mark.slow
def test_fp8_goes_on_from_fp32_with_scales_of_a_calibration(tmp_path: Path, fp32_checkpoint: str) -> None:
    flags = [*TWO_BLOCKS, "--precision", "fp8", "--resume", fp32_checkpoint]
    cold = finish(tmp_path / "cold", ALONE, *flags)
    assert f"16 of {len(SLOTS)} {COLD}" in cold.output  # Slots of weights have scales.
    warm = finish(tmp_path / "warm", ALONE, *flags, "--calibrate-steps", "4", "--save-every", "3")
    assert COLD not in warm.output
    assert "has no FP8 state: scales come from --calibrate-steps" in warm.output
    assert warm.losses != cold.losses
    # This run's checkpoint has FP8 state, which a calibration must not change.
    again = ["--calibrate-steps", "4", "--resume", str(tmp_path / "warm/checkpoints/step-00000009")]
    assert finish(tmp_path / "again", ALONE, *TWO_BLOCKS, *again).losses == warm.losses[3:]


@pytest.mark.slow
def test_fp8_goes_on_from_fp32_at_a_later_step(tmp_path: Path, fp32_checkpoint: str, single_run: Runner) -> None:
    flags = [*TWO_BLOCKS, "--precision", "fp8", "--resume", fp32_checkpoint, "--loss-guard", "warn"]
    late = finish(tmp_path / "late", ALONE, *flags, "--fp8-start-step", "9")
    assert late.losses[:2] == single_run("--precision", "fp32").losses[6:8]
    assert late.losses[2] != single_run("--precision", "fp32").losses[8]
    assert [line["high_precision_modules"] for line in late.lines] == [8, 0, 0, 0, 0, 0]
    assert COLD not in late.output
    passed = finish(tmp_path / "passed", ALONE, *flags, "--fp8-start-step", "7")
    assert COLD in passed.output


# Falling back, and what is watched ---------------------------------------------------------------


@pytest.mark.slow
def test_an_outlier_on_one_rank_sends_all_to_high_precision_for_a_while(tmp_path: Path) -> None:
    flags = ["--recipe", "current", "--fallback-steps", "3", "--fallback-underflow", "0.5", "--inject", "outlier:1:5"]
    watched = ["--watch-every", "5", "--watch-ranks", "--tensorboard", "--check-every", "2"]
    run = finish(tmp_path, RANKS, *TWO_BLOCKS, *flags, *watched)
    assert "[rank 1] --inject outlier:1:5: the input of blocks.1.mlp_in has " in run.output
    # Rank 0's metrics: its own tensors have no outlier.
    high = [line["high_precision_modules"] for line in run.lines]
    assert high[:4] == [0] * 4
    assert all(high[4:7])
    assert high[7:] == [0] * 5
    assert [line["fallbacks"] for line in run.lines] == [0] * 4 + [high[4]] * 8
    assert run.summary["fallbacks"] == high[4]
    assert "modules that fell back to high precision:" in run.output
    assert run.summary["fp8_state_identical"] is run.summary["parameters_identical"] is True
    lines = scales(tmp_path)
    assert [(line["step"], line["slot"]) for line in lines] == [(step, slot) for step in (5, 10) for slot in SLOTS]
    planted = {line["step"]: line for line in lines if line["slot"] == PLANTED}
    assert planted[5]["amax"] > 1e5
    assert planted[5]["underflow"] > 0.5
    assert planted[5]["amax_rank"] == planted[5]["underflow_rank"] == 1
    assert 0 < planted[10]["amax"] < 100
    assert planted[10]["underflow"] < 0.5


def scales(out: Path) -> list[dict[str, Any]]:
    """Return the lines of scales.jsonl. Each must be strict JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return [json.loads(line, parse_constant=refuse) for line in (out / "scales.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_what_is_written_of_scales_goes_on_after_a_resume(tmp_path: Path) -> None:
    flags = ["--watch-every", "3", "--calibrate-steps", "1", "--scale-jump", "4"]
    assert_resumes(tmp_path, ALONE, *flags, at=5)
    straight, parts = (scales(tmp_path / name) for name in ("straight", "parts"))
    assert sorted({line["step"] for line in straight}) == [3, 6, 9, 12]
    assert parts == straight


# The loss guard ----------------------------------------------------------------------------------

SPIKE = ["--inject", "spike:0:11"]


@pytest.mark.slow
def test_a_loss_that_jumps_stops_all_ranks_with_exit_6(tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ["--loss-guard", "stop", "--inject", "spike:1:11", "--log-every", "4", "--save-every", "8", "--async-save"]
    done = start(RANKS, *TWO_BLOCKS, *flags, "--out", str(out))
    assert done.returncode == 6, done.stdout + done.stderr
    assert done.stderr.count("train_gpt: stopped by --loss-guard: step 11: the loss ") == 1
    assert "Traceback" not in done.stderr
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(1, 12))
    assert lines[-1]["loss"] > 10 * lines[-2]["loss"]  # The mean: only rank 1's loss jumped.
    assert not (out / "summary.json").exists()
    assert (out / "checkpoints/step-00000008/.metadata").exists()


@pytest.mark.slow
def test_a_warning_changes_nothing(tmp_path: Path) -> None:
    flags = [*TWO_BLOCKS, *SPIKE]
    warned = finish(tmp_path / "warned", ALONE, *flags, "--loss-guard", "warn")
    assert "step 11: the loss " in warned.output
    assert warned.summary["loss_alarms"] == 1
    unwatched = finish(tmp_path / "unwatched", ALONE, *flags)
    assert warned.losses == unwatched.losses
    assert unwatched.summary["loss_alarms"] == 0
    deaf = finish(tmp_path / "deaf", ALONE, *flags, "--loss-guard", "warn", "--loss-factor", "1000")
    assert deaf.summary["loss_alarms"] == 0


@pytest.mark.long
def test_a_guard_remembers_across_a_resume(tmp_path: Path, single_run: Runner) -> None:
    """The guard's window of ten losses starts before the checkpoint, and the halved learning rate stays."""
    straight, _ = assert_resumes(tmp_path / "before", ALONE, "--loss-guard", "lower-lr", *SPIKE)
    rates = [line["learning_rate"] for line in straight.lines]
    usual = [line["learning_rate"] for line in single_run().lines]
    assert rates == [*usual[:10], *(rate / 2 for rate in usual[10:])]
    _, second = assert_resumes(tmp_path / "after", ALONE, "--loss-guard", "lower-lr", *SPIKE, at=11)
    assert [line["learning_rate"] for line in second.lines] == rates
    assert second.summary["loss_alarms"] == 1


@pytest.mark.slow
def test_a_loss_that_jumps_sends_all_to_high_precision(single_run: Runner) -> None:
    run = single_run("--loss-guard", "fallback", *SPIKE)
    high = [line["high_precision_modules"] for line in run.lines]
    assert high == [0] * 10 + [len(MODULES)] * 2
    assert run.summary["fallbacks"] == 0  # Counts only modules that fall back by themselves.


@pytest.mark.slow
def test_a_loss_that_jumps_skips_the_update_on_all_ranks(tmp_path: Path) -> None:
    """After step 11 the model equals that of step 10, although only rank 1 had the spike. Then training continues."""
    flags = [*TWO_BLOCKS, "--precision", "fp8", "--loss-guard", "skip", "--save-every", "100"]
    spike = ["--inject", "spike:1:11"]
    before = finish(tmp_path / "before", RANKS, *flags, "--stop-after", "10")
    skipped = finish(tmp_path / "skipped", RANKS, *flags, *spike, "--stop-after", "11")
    after = finish(tmp_path / "after", RANKS, *flags, *spike)
    assert [run.summary["loss_alarms"] for run in (before, skipped, after)] == [0, 1, 1]
    digests = [run.summary["parameters_sha256"] for run in (before, skipped, after)]
    assert digests[0] == digests[1] != digests[2]
    assert skipped.output.count("; this step's update is skipped") == 1
    assert after.lines[-1]["loss"] < 1.1 * before.lines[-1]["loss"]


def test_a_guard_refuses_what_is_no_state() -> None:
    alone = Ranks(0, 1, torch.device("cpu"), None)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    made = Guard(parse(["--loss-guard", "warn"]), alone, optimizer, None)
    before = made.describe()
    for text in ("no JSON", "[]", "{}", '{"learning_rate_factor": 0.5}', '{"learning_rate_factor": 1, "losses": {}}'):
        with pytest.raises(CheckpointError):
            made.restore(text)
        assert made.describe() == before
    off = Guard(parse([]), alone, optimizer, None)
    assert off.describe() is None
    off.restore(before)
    assert off.learning_rate_factor == 1
