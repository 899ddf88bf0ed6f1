"""Flags of train_gpt.py, checked without importing torch.

``python launch/options.py FLAGS…`` says in one line what train_gpt.py would refuse and exits 2:
torchrun.sh asks it before it starts any rank.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import folders
from text import BadInput, Text, read_text

__all__ = [
    "DIVERGED",
    "FAILED_COLLECTIVE",
    "LOSS_DIVERGED",
    "SHARDED",
    "SLOW",
    "UNWRITTEN",
    "Fault",
    "Options",
    "exit_with",
    "parse",
    "prepare_input",
    "require_usable_checkpoints",
]

UNWRITTEN = 3
"""Exit status of a run that stopped because a checkpoint could not be written."""

DIVERGED = 4
"""Exit status of a run that stopped because its ranks differ. That of a user's mistake is 2."""

FAILED_COLLECTIVE = 5
"""Exit status of a rank whose collective failed or timed out: another rank is gone, or hangs."""

LOSS_DIVERGED = 6
"""Exit status of a run that ``--loss-guard stop`` stopped."""

SHARDED = ("fsdp1", "fsdp2", "hsdp")
"""The kinds of ``--parallel`` where no rank holds whole parameters."""

RECIPES = ("delayed", "current", "rowwise", "block")
"""The kinds of ``--recipe``."""

HIGH = "high"
"""What ``--override`` calls high precision, beside the recipes."""

GEMMS = ("fprop", "dgrad", "wgrad")
"""What ``--high-gemms`` takes."""

BACKENDS = ("auto", "triton", "torch", "reference")
"""The kinds of ``--backend``. These three are the library's, which cannot be asked without importing torch."""

BLOCK = 128
"""Rows of a weight that share a scale under the block recipe."""

FOR_DELAYED = ("history_len", "amax_algo", "margin", "update")
"""Flags that mean nothing where no recipe is delayed."""

FOR_WATCH = ("watch_ranks", "scale_jump", "tensorboard")
"""Flags that mean nothing without ``--watch-every``."""

DAMAGES = ("scale", "weight", "nan", "skip", "outlier", "spike")
DEATHS = ("kill-forward", "kill-backward", "kill-sync", "kill-save", "hang")
SLOW = "slow"
STOPS = ("stop-update", "stop-sync", "stop-step")
FAULTS = (*DAMAGES, *DEATHS, *STOPS, SLOW)
"""The kinds of ``--inject``: what damages a rank, ends one or lets it hang, stops one for a while, and slows one."""


class Fault(NamedTuple):
    """One ``--inject``: what is damaged, on which rank, at which step (counted from 1). In place of the step SLOW has
    the milliseconds that it costs in each forward."""

    kind: str
    rank: int
    step: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.rank}:{self.step}"


class Override(NamedTuple):
    """One ``--override``: which modules, by a pattern of their names, and their recipe or HIGH."""

    pattern: str
    recipe: str


@dataclass(frozen=True)
class Options:
    """What one run does; ``--help`` says what each means."""

    parallel: Literal["none", "ddp", "fsdp1", "fsdp2", "hsdp"]
    shard_size: int
    sharding: Literal["full", "grad_op"]
    precision: Literal["bf16", "fp32", "fp8"]
    recipe: Literal["delayed", "current", "rowwise", "block"]
    history_len: int | None
    amax_algo: Literal["max", "most_recent"] | None
    margin: int | None
    format: Literal["hybrid", "e4m3"] | None
    power_of_two: bool
    update: Literal["same_step", "next_step"] | None
    override: tuple[Override, ...]
    high_first: int
    high_last: int
    high_gemms: tuple[str, ...]
    fp8_start_step: int
    fallback_steps: int
    fallback_saturated: float | None
    fallback_underflow: float | None
    watch_every: int
    watch_ranks: bool
    scale_jump: float | None
    tensorboard: bool
    loss_guard: Literal["off", "warn", "stop", "fallback", "lower-lr"]
    loss_factor: float | None
    amax_sync: bool | None
    fp8_all_gather: bool | None
    backend: Literal["auto", "triton", "torch", "reference"] | None
    check_every: int | None
    check_policy: Literal["raise", "warn", "repair"] | None
    inject: tuple[Fault, ...]
    layers: int
    width: int
    heads: int
    context: int
    batch_size: int
    accumulate: int
    steps: int
    calibrate_steps: int
    learning_rate: float
    seed: int
    data: Path | None
    out: Path
    eval_every: int
    log_every: int
    save_every: int
    keep: int
    async_save: bool
    resume: str | None
    stop_after: int
    timeout: float

    @property
    def last_step(self) -> int:
        """Where this run ends. The learning rate follows ``steps``, whatever this is."""
        return self.stop_after or self.steps

    @property
    def sharded(self) -> bool:
        """Whether no rank holds whole parameters, so that a forward is collective."""
        return self.parallel in SHARDED

    @property
    def recipes(self) -> set[str]:
        """The recipes of all modules in FP8."""
        return {self.recipe, *(override.recipe for override in self.override)} - {HIGH}

    @property
    def why_not_gathered(self) -> str | None:
        """Why FSDP2 cannot gather weights as FP8, with these flags; None if it can."""
        if self.parallel not in ("fsdp2", "hsdp"):
            return f"is for --parallel fsdp2 and hsdp, and this is {self.parallel}"
        if self.precision != "fp8":
            return f"needs --precision fp8, and this is {self.precision}"
        if self.amax_sync is False:
            return "needs amaxes that ranks share: leave --no-amax-sync out"
        if "rowwise" in self.recipes:
            return "does not go with rowwise scaling: dgrad wants scales by columns, which no rank can make of FP8 rows"
        if "block" in self.recipes and self.shard_size > 1 and self.width % (BLOCK * self.shard_size):
            multiples = f"{BLOCK} times the {self.shard_size} ranks that share a weight"
            return f"cannot cut blocks: with block scaling --width must be a multiple of {multiples}"
        return None

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint follows on this step."""
        return self.save_every > 0 and (step % self.save_every == 0 or step == self.last_step)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(message)


def parse(arguments: Sequence[str]) -> Options:
    """Flags to Options.

    Raises:
        BadInput: an unknown flag, a value out of range, or flags that do not go together.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    values = _parser().parse_args(arguments)
    if values.parallel is None:
        values.parallel = "ddp" if ranks > 1 else "none"
    for several in ("inject", "override", "high_gemms"):
        setattr(values, several, tuple(getattr(values, several) or ()))
    values.shard_size = _shard_size(values.shard_size, values.parallel, ranks)
    values.stop_after = values.stop_after or 0
    options = Options(**vars(values))
    if options.parallel == "none" and ranks > 1:
        raise BadInput(f"--parallel none is for one rank, and there are {ranks}: use --parallel ddp")
    if options.sharding != "full" and options.parallel != "fsdp1":
        raise BadInput(f"--sharding {options.sharding} is for --parallel fsdp1, and this is {options.parallel}")
    if options.width % options.heads:
        raise BadInput(f"--width {options.width} is not a multiple of --heads {options.heads}")
    if options.precision == "fp8" and options.width % 16:
        raise BadInput(f"--precision fp8 needs a --width in multiples of 16, got {options.width}")
    _require_consistent_recipes(options)
    _require_consistent_fp8(options)
    if options.stop_after > options.steps:
        raise BadInput(f"--stop-after {options.stop_after} is beyond --steps {options.steps}")
    if options.stop_after and not options.save_every:
        raise BadInput("--stop-after needs --save-every: what was learned would be lost")
    if options.async_save and not options.save_every:
        raise BadInput("--async-save needs --save-every")
    for fault in options.inject:
        _require_possible(fault, options, ranks)
    return options


def _shard_size(given: int | None, parallel: str, ranks: int) -> int:
    """Ranks per shard group."""
    if given is None:
        return ranks // 2 if parallel == "hsdp" and ranks % 2 == 0 else ranks
    if parallel != "hsdp":
        raise BadInput(f"--shard-size is for --parallel hsdp, and this is {parallel}")
    if ranks % given:
        raise BadInput(f"--shard-size {given} does not divide the {ranks} ranks")
    return given


def _require_consistent_recipes(options: Options) -> None:
    if options.fp8_all_gather and options.why_not_gathered is not None:
        raise BadInput(f"--fp8-all-gather {options.why_not_gathered}")
    if "delayed" not in options.recipes and (idle := _given(options, FOR_DELAYED)):
        raise BadInput(f"{idle[0]} is for delayed scaling, and this is {', '.join(sorted(options.recipes))}")
    patterns = [override.pattern for override in options.override]
    for pattern in patterns:
        if patterns.count(pattern) > 1:
            raise BadInput(f"--override {pattern}=… is given more than once: the first pattern that matches counts")
    high = options.high_first + options.high_last
    if high and options.precision == "fp8" and high >= options.layers:
        raise BadInput(
            f"--high-first {options.high_first} and --high-last {options.high_last} leave none of the --layers "
            f"{options.layers} in FP8"
        )


def _require_consistent_fp8(options: Options) -> None:
    if options.fp8_start_step > options.steps:
        raise BadInput(f"--fp8-start-step {options.fp8_start_step} is beyond --steps {options.steps}")
    if not options.fallback_steps and (idle := _given(options, ("fallback_saturated", "fallback_underflow"))):
        raise BadInput(f"{idle[0]} needs --fallback-steps: how long a module stays in high precision")
    if not options.watch_every and (idle := _given(options, FOR_WATCH)):
        raise BadInput(f"{idle[0]} needs --watch-every")
    if options.loss_guard == "off" and options.loss_factor is not None:
        raise BadInput("--loss-factor needs --loss-guard")
    if options.loss_guard == "fallback" and options.precision != "fp8":
        raise BadInput(f"--loss-guard fallback needs --precision fp8, and this is {options.precision}")


def _given(options: Options, names: Sequence[str]) -> list[str]:
    """Of flags without a default, those that were given."""
    given = [name for name in names if getattr(options, name) is not None and getattr(options, name) is not False]
    return [f"--{name.replace('_', '-')}" for name in given]


def _require_possible(fault: Fault, options: Options, ranks: int) -> None:
    if fault.rank >= ranks:
        raise BadInput(f"--inject {fault}: there is no rank {fault.rank}, ranks are 0 to {ranks - 1}")
    if fault.kind == SLOW and fault.step < 1:
        raise BadInput(f"--inject {fault}: the number of milliseconds must be at least 1")
    if fault.kind != SLOW and not 1 <= fault.step <= options.steps:
        raise BadInput(f"--inject {fault}: there is no step {fault.step}, steps are 1 to {options.steps}")
    if fault.kind in ("scale", "nan", "kill-sync", "stop-sync") and options.precision != "fp8":
        raise BadInput(f"--inject {fault}: needs --precision fp8, and this is {options.precision}")
    if fault.kind in ("kill-sync", "stop-sync") and (options.amax_sync is False or ranks == 1):
        raise BadInput(f"--inject {fault}: needs ranks that share amaxes")
    if fault.kind == "kill-save" and not options.saves_at(fault.step):
        raise BadInput(f"--inject {fault}: no checkpoint is saved at step {fault.step}; see --save-every")
    if fault.kind in ("weight", "skip") and options.parallel in ("fsdp1", "fsdp2"):
        raise BadInput(f"--inject {fault}: shards have no replica that could tell; use ddp or hsdp")


def prepare_input(options: Options) -> Text:
    """Read the text, make the output folder.

    Raises:
        BadInput: one of the two is impossible.
    """
    text = read_text(options.data, options.context)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {options.out}: {error.strerror or error}") from None
    if not os.access(options.out, os.W_OK):
        raise BadInput(f"--out {options.out}: the folder cannot be written to")
    return text


def require_usable_checkpoints(options: Options) -> None:
    """A job must never go on, or restart, from another job's checkpoint unasked.

    Not for a job that torchrun has restarted: what lies there is its own.

    Raises:
        BadInput: it would.
    """
    theirs = folders.whole(folders.of(options.out))
    if options.resume not in (None, "auto"):
        given = Path(options.resume)
        if not folders.is_whole(given):
            raise BadInput(f"--resume {given}: there is no whole checkpoint (a folder named step-… with a .metadata)")
        if options.save_every and theirs and given.resolve() not in [folder.resolve() for folder in theirs]:
            raise BadInput(f"--resume {given}: --out {options.out} has checkpoints of its own; use another --out")
    if options.resume is None and options.save_every and theirs:
        raise BadInput(
            f"--out {options.out} has checkpoints, the newest is {theirs[-1].name}: "
            "go on from it with --resume auto, or use another --out"
        )


def exit_with(error: Exception) -> NoReturn:
    """Exit 2 with the error on one line, told once per node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        line = " ".join(str(error).split())
        print(f"train_gpt.py: error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train_gpt.py",
        description="Train a small byte-level GPT on one or many ranks, in high precision or in FP8.",
        epilog=(
            "--amax-sync, --backend, --check-every and --check-policy, when left out, follow their FP8DIST_… "
            "environment variable. Exit status: 0, the run is done; 2, a mistake in the flags or an unusable file; "
            f"{UNWRITTEN}, a checkpoint could not be written, and the ranks say in one line why; "
            f"{DIVERGED}, the run stopped because its ranks differ, and divergence.txt and divergence.json under --out "
            f"say which ranks and tensors; {FAILED_COLLECTIVE}, a collective failed or timed out, because another rank "
            "is gone or hangs: each rank that is left says in one line where it was; "
            f"{LOSS_DIVERGED}, --loss-guard stop saw a loss that jumped or is not finite, and says at which step."
        ),
        formatter_class=_HelpWithDefaults,
        allow_abbrev=False,
    )
    _add_job_flags(parser.add_argument_group("job"))
    _add_fp8_flags(parser.add_argument_group("FP8 (with --precision fp8)"))
    _add_precision_flags(parser.add_argument_group("when to leave FP8 (with --precision fp8)"))
    _add_watch_flags(parser.add_argument_group("what is watched"))
    _add_check_flags(parser.add_argument_group("consistency of the ranks"))
    _add_checkpoint_flags(parser.add_argument_group("checkpoints (under --out, in checkpoints/step-…)"))
    _add_model_flags(parser.add_argument_group("model and training"))
    return parser


class _HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not that of a flag whose default is decided later."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _add_job_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--parallel",
        choices=("none", "ddp", *SHARDED),
        help="fsdp2: fully_shard over all ranks; hsdp: the same, replicated over groups of ranks; fsdp1: "
        "FullyShardedDataParallel (default: ddp with several ranks, none with one)",
    )
    add(
        "--shard-size",
        type=_at_least(1),
        metavar="N",
        help="hsdp: ranks that share one copy of the parameters (default: half of the ranks, all if they are odd)",
    )
    add("--sharding", choices=("full", "grad_op"), default="full", help="fsdp1: whether parameters are freed too")
    add("--precision", choices=("bf16", "fp32", "fp8"), default="fp8", help="of the Linears (lm_head by --override)")
    add("--data", type=Path, metavar="FILE", help="text to learn; default: the topics of Python's help()")
    add("--out", type=Path, metavar="DIR", default=Path("runs/gpt"), help="gets metrics.jsonl and summary.json")
    add("--eval-every", type=_at_least(0), metavar="N", default=0, help="validate every N steps; 0: at the end")
    add("--log-every", type=_at_least(1), metavar="N", default=10, help="read losses from the device every N steps")
    add("--seed", type=_at_least(0), metavar="N", default=0, help="of weights and data order")
    add(
        "--timeout",
        type=_positive_float,
        metavar="SECONDS",
        default=600.0,
        help=f"how long a collective may take, before the rank gives up with exit status {FAILED_COLLECTIVE}",
    )


def _add_fp8_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--recipe",
        choices=RECIPES,
        default="delayed",
        help="delayed: scales of earlier steps' amaxes; current: a scale per tensor, of its own amax; rowwise: one per "
        "token and channel; block: one per 1x128 or 128x128 elements",
    )
    add(
        "--override",
        type=_override,
        action="append",
        metavar="PATTERN=RECIPE",
        help=f"another recipe, or {HIGH} for high precision, for the Linears whose names match, such as "
        "'blocks.*.mlp_in=block'; may be given several times, the first that matches counts",
    )
    add("--history-len", type=_at_least(1), metavar="N", help="delayed: amax window in optimizer steps (default: 1024)")
    add("--amax-algo", choices=("max", "most_recent"), help="delayed: what is taken from the window (default: max)")
    add("--margin", type=int, metavar="N", help="delayed: divide scales by 2**N (default: 0)")
    add("--format", choices=("hybrid", "e4m3"), help="hybrid: gradients are E5M2 (default: that of the recipe)")
    add("--power-of-two", action="store_true", help="round scales down to powers of two")
    add(
        "--update",
        choices=("same_step", "next_step"),
        help="delayed: when a sync is waited for (default: same_step)",
    )
    add("--amax-sync", action=argparse.BooleanOptionalAction, help="share amaxes between ranks (default: yes)")
    add(
        "--fp8-all-gather",
        action=argparse.BooleanOptionalAction,
        help="FSDP2 gathers weights as FP8 (default: yes with fsdp2 and hsdp, where amaxes are shared; not with "
        f"rowwise, nor with block where --width is no multiple of {BLOCK} times the ranks that share a weight)",
    )
    add(
        "--backend",
        choices=BACKENDS,
        help="of FP8 casts and products (default: auto, the fastest of them on this device)",
    )
    add(
        "--calibrate-steps",
        type=_at_least(0),
        metavar="N",
        default=0,
        help="observe N batches before training, unless it goes on from a checkpoint that has FP8 state",
    )


def _add_precision_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--high-first", type=_at_least(0), metavar="N", default=0, help="first blocks in high precision")
    add("--high-last", type=_at_least(0), metavar="N", default=0, help="last blocks; both beat --override")
    add(
        "--high-gemms",
        type=_gemms,
        metavar="GEMM,…",
        help="products that are in high precision in all Linears, of fprop, dgrad and wgrad, with commas between them "
        "(default: none)",
    )
    add(
        "--fp8-start-step",
        type=_at_least(1),
        metavar="N",
        default=1,
        help="steps before N are in high precision; weights that FSDP2 gathers as FP8 are rounded nevertheless",
    )
    add(
        "--fallback-steps",
        type=_at_least(0),
        metavar="K",
        default=0,
        help="a module goes to high precision for K steps when a NaN or Inf amax is seen on any rank; 0: never",
    )
    add(
        "--fallback-saturated",
        type=_share,
        metavar="SHARE",
        help="and when a larger share of a tensor's elements, 0 to 1, was cut off by its cast",
    )
    add(
        "--fallback-underflow",
        type=_share,
        metavar="SHARE",
        help="and when a larger share of a tensor's elements, 0 to 1, became 0 by its cast",
    )


def _add_watch_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--watch-every",
        type=_at_least(0),
        metavar="N",
        default=0,
        help="FP8: write each slot's amax, scale, saturation and underflow share into scales.jsonl under --out every N "
        "steps; 0: never",
    )
    add("--watch-ranks", action="store_true", help="and which rank held each maximum")
    add("--scale-jump", type=_number(above=1), metavar="FACTOR", help="say so when a scale has changed by this or more")
    add("--tensorboard", action="store_true", help="write the same for TensorBoard, into tensorboard under --out")
    add(
        "--loss-guard",
        choices=("off", "warn", "stop", "fallback", "lower-lr"),
        default="off",
        help="what to do when the loss jumps or is not finite, before the update is made: say so; stop with exit "
        f"status {LOSS_DIVERGED}; go to high precision for --fallback-steps steps (100 without it); halve the learning "
        "rate from then on. Each step then shares its loss, and waits for it",
    )
    add(
        "--loss-factor",
        type=_number(at_least=1),
        metavar="X",
        help="a jump is above X times the running median, and well above the usual noise (default: 1.5)",
    )


def _add_check_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--check-every",
        type=_at_least(0),
        metavar="N",
        help="compare parameters and FP8 state of all ranks every N steps and at the end (default: 0, never)",
    )
    add(
        "--check-policy",
        choices=("raise", "warn", "repair"),
        help=f"what to do when ranks differ: stop with exit status {DIVERGED}, say so and go on, or copy from the "
        "majority and go on (default: raise)",
    )
    add(
        "--inject",
        type=_fault,
        action="append",
        metavar="KIND:RANK:STEP",
        help="damage something on one rank, to see it found; may be given several times. scale: one scale is doubled "
        "just before the step's sync. weight: one bit of a weight is flipped after the update. nan: one NaN amax is "
        "recorded; no divergence, all ranks count it and keep the scale. skip: the rank loses the update (it is "
        "undone; a rank that really left optimizer.step() out would leave the others hanging). outlier: in the input "
        "of one Linear one element becomes a million times the largest. spike: what enters lm_head is a thousand times "
        "too large, and so, about, is the rank's loss. kill-forward, kill-backward, kill-sync, kill-save: SIGKILL in "
        "the middle of the forward, the backward, the FP8 sync or the writing of a checkpoint. hang: sleeps at the "
        "start of the step. stop-update, stop-sync, stop-step: SIGSTOP before the FP8 sync, once it has started, or "
        "after the update; kill -CONT lets the rank go on. slow:RANK:MILLISECONDS: sleeps so long in each training "
        "forward. Nothing is injected into a job that torchrun has restarted",
    )


def _add_checkpoint_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--save-every", type=_at_least(0), metavar="N", default=0, help="steps; and after the last one. 0: never")
    add("--keep", type=_at_least(1), metavar="N", default=2, help="how many of the newest are kept")
    add("--async-save", action="store_true", help="go on training while files are written")
    add(
        "--resume",
        metavar="DIR",
        help="go on from this checkpoint; auto: from the newest whole one, from the start if there is none. A job that "
        "torchrun has restarted does so by itself, if it saves",
    )
    add("--stop-after", type=_at_least(1), metavar="N", help="save and end after step N of the --steps")


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    for flag, default, help_ in (
        ("--layers", 4, "blocks"),
        ("--width", 192, "of the residual stream"),
        ("--heads", 4, "of attention"),
        ("--context", 128, "bytes per window"),
        ("--batch-size", 8, "windows per rank and microbatch"),
        ("--accumulate", 1, "microbatches per step"),
        ("--steps", 200, "optimizer steps"),
    ):
        add(flag, type=_at_least(1), metavar="N", default=default, help=help_)
    add("--learning-rate", type=_positive_float, metavar="X", default=2e-3, help="its peak; decays to a tenth")


def _at_least(lowest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}, got {value}")
        return value

    number.__name__ = "integer"  # argparse puts it into its messages.
    return number


def _fault(text: str) -> Fault:
    kind, *place = text.split(":")
    if kind not in FAULTS:
        raise argparse.ArgumentTypeError(f"kinds are {', '.join(FAULTS)}, got {text!r}")
    if len(place) != 2 or not all(number.isdecimal() for number in place):
        last = "MILLISECONDS" if kind == SLOW else "STEP"
        raise argparse.ArgumentTypeError(f"expected {kind}:RANK:{last}, got {text!r}")
    return Fault(kind, int(place[0]), int(place[1]))


def _override(text: str) -> Override:
    pattern, _, recipe = text.rpartition("=")
    if not pattern or recipe not in (*RECIPES, HIGH):
        kinds = ", ".join((*RECIPES, HIGH))
        raise argparse.ArgumentTypeError(f"expected PATTERN=RECIPE, with one of {kinds}, got {text!r}")
    return Override(pattern, recipe)


def _gemms(text: str) -> tuple[str, ...]:
    named = text.split(",")
    if not set(named) <= set(GEMMS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(GEMMS)}, with commas between them, got {text!r}")
    return tuple(gemm for gemm in GEMMS if gemm in named)


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a share from 0 to 1, got {text}")
    return value


def _number(above: float = -math.inf, at_least: float = -math.inf) -> Callable[[str], float]:
    """A finite number within limits."""

    def number(text: str) -> float:
        value = float(text)
        if not (above < value < math.inf and value >= at_least):
            least = f"above {above:g}" if above > -math.inf else f"at least {at_least:g}"
            raise argparse.ArgumentTypeError(f"must be finite and {least}, got {text}")
        return value

    return number


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return value


if __name__ == "__main__":
    try:
        given = parse(sys.argv[1:])
        prepare_input(given)
        if os.environ.get("NNODES", "1") == "1":  # One of several nodes may be coming back into a restarted job.
            require_usable_checkpoints(given)
    except BadInput as refused:
        exit_with(refused)
