"""The flags of the example job: their names, what each takes, and what ``--help`` says of them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from fp8dist_kernels import BACKENDS, BLOCK, GEMMS
from launch.train_gpt.data import BadInput
from launch.train_gpt.exits import DIVERGED, FAILED_COLLECTIVE, LOSS_DIVERGED, UNWRITTEN

__all__ = ["FAULTS", "HIGH", "RECIPES", "SHARDED", "SLOW", "Fault", "Override", "parser"]

SHARDED = ("fsdp1", "fsdp2", "hsdp")
"""The kinds of ``--parallel`` where no rank holds whole parameters."""

RECIPES = ("delayed", "current", "rowwise", "block")
"""The kinds of ``--recipe``."""

HIGH = "high"
"""What ``--override`` calls high precision, beside the recipes."""


DAMAGES = ("scale", "weight", "nan", "skip", "outlier", "spike")
DEATHS = ("kill-forward", "kill-backward", "kill-sync", "kill-save", "hang")
SLOW = "slow"
STOPS = ("stop-update", "stop-sync", "stop-step")
FAULTS = (*DAMAGES, *DEATHS, *STOPS, SLOW)
"""The kinds of ``--inject``: what damages a rank, ends one or lets it hang, stops one for a while, and slows one."""


class Override(NamedTuple):
    """One ``--override``: which modules, by a pattern of their names, and their recipe or HIGH."""

    pattern: str
    recipe: str


def _number(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """A finite number that fits."""

    def number(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and fits(value)):
            raise argparse.ArgumentTypeError(f"must be {expected}, got {text}")
        return value

    number.__name__ = "number"  # argparse puts it into its messages.
    return number


_share = _number("a share from 0 to 1", lambda value: 0 <= value <= 1)
_positive = _number("positive and finite", lambda value: value > 0)


class Fault(NamedTuple):
    """One ``--inject``: what is damaged, on which rank, at which step (counted from 1). In place of the step SLOW has
    the milliseconds that it costs in each forward."""

    kind: str
    rank: int
    step: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.rank}:{self.step}"


def _fault(text: str) -> Fault:
    """The fault that a flag names; argparse's error, if there is none."""
    kind, *place = text.split(":")
    if kind not in FAULTS:
        raise argparse.ArgumentTypeError(f"kinds are {', '.join(FAULTS)}, got {text!r}")
    if len(place) != 2 or not all(number.isdecimal() for number in place):
        last = "MILLISECONDS" if kind == SLOW else "STEP"
        raise argparse.ArgumentTypeError(f"expected {kind}:RANK:{last}, got {text!r}")
    return Fault(kind, int(place[0]), int(place[1]))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(message)


def parser() -> argparse.ArgumentParser:
    """It raises BadInput where argparse would end the process."""
    made = _Parser(
        prog="train_gpt",
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
    _add_job_flags(made.add_argument_group("job"))
    _add_fp8_flags(made.add_argument_group("FP8 (with --precision fp8)"))
    _add_precision_flags(made.add_argument_group("when to leave FP8 (with --precision fp8)"))
    _add_watch_flags(made.add_argument_group("what is watched"))
    _add_check_flags(made.add_argument_group("consistency of the ranks"))
    _add_checkpoint_flags(made.add_argument_group("checkpoints (under --out, in checkpoints/step-…)"))
    _add_model_flags(made.add_argument_group("model and training"))
    return made


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
        type=_positive,
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
    add(
        "--scale-jump",
        type=_number("finite and above 1", lambda factor: factor > 1),
        metavar="FACTOR",
        help="say so when a scale has changed by this or more",
    )
    add("--tensorboard", action="store_true", help="write the same for TensorBoard, into tensorboard under --out")
    add(
        "--loss-guard",
        choices=("off", "warn", "stop", "skip", "fallback", "lower-lr"),
        default="off",
        help="what to do when the loss jumps or is not finite, before the update is made: say so; stop with exit "
        f"status {LOSS_DIVERGED}; leave the update out; go to high precision for --fallback-steps steps (100 without "
        "it); halve the learning rate from then on. Each step then shares its loss, and waits for it",
    )
    add(
        "--loss-factor",
        type=_number("finite and at least 1", lambda factor: factor >= 1),
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
    add("--learning-rate", type=_positive, metavar="X", default=2e-3, help="its peak; decays to a tenth")


def _at_least(lowest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}, got {value}")
        return value

    number.__name__ = "integer"  # argparse puts it into its messages.
    return number


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
