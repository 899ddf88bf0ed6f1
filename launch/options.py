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

import folders
from text import BadInput, Text, read_text

__all__ = [
    "DIVERGED",
    "FAILED_COLLECTIVE",
    "SHARDED",
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

SHARDED = ("fsdp1", "fsdp2", "hsdp")
"""The kinds of ``--parallel`` where no rank holds whole parameters."""

RECIPES = ("delayed", "current", "rowwise", "block")
"""The kinds of ``--recipe``."""

DAMAGES = ("scale", "weight", "nan", "skip")
DEATHS = ("kill-forward", "kill-backward", "kill-sync", "kill-save", "hang")
FAULTS = DAMAGES + DEATHS
"""The kinds of ``--inject``: what damages a rank, and what ends one or lets it hang."""


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

    parallel: Literal["none", "ddp", "fsdp1", "fsdp2", "hsdp"]
    shard_size: int
    sharding: Literal["full", "grad_op"]
    precision: Literal["bf16", "fp32", "fp8"]
    recipe: Literal["delayed", "current", "rowwise", "block"]
    history_len: int
    amax_algo: Literal["max", "most_recent"]
    margin: int
    format: Literal["hybrid", "e4m3"] | None
    update: Literal["same_step", "next_step"]
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
    values.inject = tuple(values.inject or ())
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
    _require_gatherable(options)
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


def _require_gatherable(options: Options) -> None:
    if not options.fp8_all_gather:
        return
    if options.parallel not in ("fsdp2", "hsdp"):
        raise BadInput(f"--fp8-all-gather is for --parallel fsdp2 and hsdp, and this is {options.parallel}")
    if options.precision != "fp8":
        raise BadInput(f"--fp8-all-gather needs --precision fp8, and this is {options.precision}")
    if options.amax_sync is False:
        raise BadInput("--fp8-all-gather needs amaxes that ranks share: leave --no-amax-sync out")


def _require_possible(fault: Fault, options: Options, ranks: int) -> None:
    if fault.rank >= ranks:
        raise BadInput(f"--inject {fault}: there is no rank {fault.rank}, ranks are 0 to {ranks - 1}")
    if not 1 <= fault.step <= options.steps:
        raise BadInput(f"--inject {fault}: there is no step {fault.step}, steps are 1 to {options.steps}")
    if fault.kind in ("scale", "nan", "kill-sync") and options.precision != "fp8":
        raise BadInput(f"--inject {fault}: needs --precision fp8, and this is {options.precision}")
    if fault.kind == "kill-sync" and (options.amax_sync is False or ranks == 1):
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
            "is gone or hangs: each rank that is left says in one line where it was."
        ),
        formatter_class=_HelpWithDefaults,
        allow_abbrev=False,
    )
    _add_job_flags(parser.add_argument_group("job"))
    _add_fp8_flags(parser.add_argument_group("FP8 (with --precision fp8)"))
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
    add("--precision", choices=("bf16", "fp32", "fp8"), default="fp8", help="of the Linears (lm_head is never FP8)")
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
    add("--history-len", type=_at_least(1), metavar="N", default=1024, help="amax window in optimizer steps")
    add("--amax-algo", choices=("max", "most_recent"), default="max", help="what is taken from the window")
    add("--margin", type=int, metavar="N", default=0, help="divide scales by 2**N")
    add("--format", choices=("hybrid", "e4m3"), help="hybrid: gradients are E5M2 (default: that of the recipe)")
    add("--update", choices=("same_step", "next_step"), default="same_step", help="when a sync is waited for")
    add("--amax-sync", action=argparse.BooleanOptionalAction, help="share amaxes between ranks (default: yes)")
    add(
        "--fp8-all-gather",
        action=argparse.BooleanOptionalAction,
        help="FSDP2 gathers weights as FP8 (default: yes with fsdp2 and hsdp, where amaxes are shared)",
    )
    add(
        "--backend",
        choices=("auto", "triton", "torch", "reference"),
        help="of FP8 casts and products (default: auto, the fastest of them on this device)",
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
        "undone; a rank that really left optimizer.step() out would leave the others hanging). kill-forward, "
        "kill-backward, kill-sync, kill-save: SIGKILL in the middle of the forward, the backward, the FP8 sync or the "
        "writing of a checkpoint. hang: sleeps at the start of the step. Nothing is injected into a job that torchrun "
        "has restarted",
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
        raise argparse.ArgumentTypeError(f"expected {kind}:RANK:STEP, got {text!r}")
    return Fault(kind, int(place[0]), int(place[1]))


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
