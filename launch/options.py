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
from typing import Literal, NoReturn

from text import BadInput, Text, read_text

__all__ = ["Options", "exit_with", "parse", "prepare_input"]


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
    check_policy: Literal["raise", "warn"] | None
    backend: Literal["auto", "torch", "reference"] | None
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
    options = Options(**vars(values))
    if options.parallel == "none" and ranks > 1:
        raise BadInput(f"--parallel none is for one rank, and there are {ranks}: use --parallel ddp")
    if options.width % options.heads:
        raise BadInput(f"--width {options.width} is not a multiple of --heads {options.heads}")
    if options.precision == "fp8" and options.width % 16:
        raise BadInput(f"--precision fp8 needs a --width in multiples of 16, got {options.width}")
    return options


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
        epilog="Flags that are left out of the FP8 group follow their FP8DIST_… environment variable, if it has one.",
        formatter_class=_HelpWithDefaults,
        allow_abbrev=False,
    )
    _add_job_flags(parser.add_argument_group("job"))
    _add_fp8_flags(parser.add_argument_group("FP8 (with --precision fp8)"))
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
    add("--check-policy", choices=("raise", "warn"), help="what to do when ranks differ (default: raise)")
    add(
        "--backend",
        choices=("auto", "torch", "reference"),
        help="of FP8 products (default: auto, which is torch on a GPU and reference on a CPU)",
    )
    add("--calibrate-steps", type=_at_least(0), metavar="N", default=0, help="observe N batches before training")


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
