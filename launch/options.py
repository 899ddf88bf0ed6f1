"""Flags of train_gpt.py, checked without importing torch.

``python launch/options.py FLAGS…`` says in one line what train_gpt.py would refuse and exits 2:
torchrun.sh asks it before it starts any rank.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

from text import BadInput, Text, read_text

__all__ = ["DIVERGED", "Fault", "Options", "exit_with", "parse", "prepare_input"]

DIVERGED = 4
"""Exit status of a run that stopped because its ranks differ. That of a user's mistake is 2."""

FAULTS = ("scale", "weight", "nan", "skip")
"""The kinds of ``--inject``."""


class Fault(NamedTuple):
    """One ``--inject``: what is damaged, on which rank, at which step (counted from 1)."""

    kind: str
    rank: int
    step: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.rank}:{self.step}"


@dataclass(frozen=True)
class Options:
    """What one run does; ``--help`` says what each means."""

    parallel: Literal["none", "ddp"]
    precision: Literal["bf16", "fp32", "fp8"]
    recipe: Literal["delayed"]
    history_len: int
    amax_algo: Literal["max", "most_recent"]
    margin: int
    format: Literal["hybrid", "e4m3"]
    update: Literal["same_step", "next_step"]
    amax_sync: bool | None
    backend: Literal["auto", "torch", "reference"] | None
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
    values.inject = tuple(values.inject or ())
    options = Options(**vars(values))
    if options.parallel == "none" and ranks > 1:
        raise BadInput(f"--parallel none is for one rank, and there are {ranks}: use --parallel ddp")
    if options.width % options.heads:
        raise BadInput(f"--width {options.width} is not a multiple of --heads {options.heads}")
    if options.precision == "fp8" and options.width % 16:
        raise BadInput(f"--precision fp8 needs a --width in multiples of 16, got {options.width}")
    for fault in options.inject:
        _require_possible(fault, options, ranks)
    return options


def _require_possible(fault: Fault, options: Options, ranks: int) -> None:
    if fault.rank >= ranks:
        raise BadInput(f"--inject {fault}: there is no rank {fault.rank}, ranks are 0 to {ranks - 1}")
    if not 1 <= fault.step <= options.steps:
        raise BadInput(f"--inject {fault}: there is no step {fault.step}, steps are 1 to {options.steps}")
    if fault.kind in ("scale", "nan") and options.precision != "fp8":
        raise BadInput(f"--inject {fault}: needs --precision fp8, and this is {options.precision}")


def prepare_input(options: Options) -> Text:
    """Read the text and make the output folder.

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
            f"{DIVERGED}, the run stopped because its ranks differ, and divergence.txt and divergence.json under --out "
            "say which ranks and tensors."
        ),
        formatter_class=_HelpWithDefaults,
        allow_abbrev=False,
    )
    _add_job_flags(parser.add_argument_group("job"))
    _add_fp8_flags(parser.add_argument_group("FP8 (with --precision fp8)"))
    _add_check_flags(parser.add_argument_group("consistency of the ranks"))
    _add_model_flags(parser.add_argument_group("model and training"))
    return parser


class _HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not that of a flag whose default is decided later."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _add_job_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--parallel", choices=("none", "ddp"), help="default: ddp with several ranks, none with one")
    add("--precision", choices=("bf16", "fp32", "fp8"), default="fp8", help="of the Linears (lm_head is never FP8)")
    add("--data", type=Path, metavar="FILE", help="text to learn; default: the topics of Python's help()")
    add("--out", type=Path, metavar="DIR", default=Path("runs/gpt"), help="gets metrics.jsonl and summary.json")
    add("--eval-every", type=_at_least(0), metavar="N", default=0, help="validate every N steps; 0: at the end")
    add("--log-every", type=_at_least(1), metavar="N", default=10, help="read losses from the device every N steps")
    add("--seed", type=_at_least(0), metavar="N", default=0, help="of weights and data order")


def _add_fp8_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--recipe", choices=("delayed",), default="delayed", help="how scales follow from amaxes")
    add("--history-len", type=_at_least(1), metavar="N", default=1024, help="amax window in optimizer steps")
    add("--amax-algo", choices=("max", "most_recent"), default="max", help="what is taken from the window")
    add("--margin", type=int, metavar="N", default=0, help="divide scales by 2**N")
    add("--format", choices=("hybrid", "e4m3"), default="hybrid", help="hybrid: gradients are E5M2")
    add("--update", choices=("same_step", "next_step"), default="same_step", help="when a sync is waited for")
    add("--amax-sync", action=argparse.BooleanOptionalAction, help="share amaxes between ranks (default: yes)")
    add(
        "--backend",
        choices=("auto", "torch", "reference"),
        help="of FP8 products (default: auto, which is torch on a GPU and reference on a CPU)",
    )
    add("--calibrate-steps", type=_at_least(0), metavar="N", default=0, help="observe N batches before training")


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
        "undone; a rank that really left optimizer.step() out would leave the others hanging)",
    )


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
        raise argparse.ArgumentTypeError(f"expected {kind}:RANK:STEP, got {text!r}")
    return Fault(kind, int(place[0]), int(place[1]))


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return value


if __name__ == "__main__":
    try:
        prepare_input(parse(sys.argv[1:]))
    except BadInput as refused:
        exit_with(refused)
