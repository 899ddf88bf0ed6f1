"""The flags of the example job: their names, values and ``--help`` texts."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from fp8dist_kernels import BACKENDS, BLOCK, GEMMS, Gemm
from launch.train_gpt.data import BadInput
from launch.train_gpt.exits import DIVERGED, FAILED_COLLECTIVE, LOSS_DIVERGED, UNWRITTEN

__all__ = [
    "BAD_DEVICE",
    "EXPORTS",
    "FAULTS",
    "HIDDEN_STATE",
    "HIGH",
    "NAN_SAMPLE",
    "NONDETERMINISM",
    "PRODUCT",
    "RANKED",
    "RECIPES",
    "REPLAYS",
    "SHARDED",
    "SLOW",
    "Export",
    "Fault",
    "Override",
    "parser",
]

SHARDED = ("fsdp1", "fsdp2", "hsdp")
"""The values of ``--parallel`` that shard parameters."""

RECIPES = ("delayed", "current", "rowwise", "block")
"""The values of ``--recipe``."""

HIGH = "high"
"""The value of ``--override`` for high precision, in place of a recipe."""

EXPORTS: Mapping[str, str | None] = MappingProxyType(
    {
        "tensorboard": "FOLDER",
        "wandb": "PROJECT",
        "mlflow": "URI",
        "opentelemetry": None,
        "prometheus": "PORT",
        "textfile": "FILE",
    }
)
"""The names of ``--export``, and what their argument is."""

NEED_ARGUMENTS = ("prometheus", "textfile")
"""Those whose argument has no default."""

REPLAYS = ("nonfinite", "jump", "spike")
"""The values of ``--replay-on``."""

NONE = "none"
"""The value of ``--fast-gemms`` for no GEMM at all."""


PRODUCT, BAD_DEVICE = "product", "bad-device"
DAMAGES = ("scale", "weight", "nan", "skip", "outlier", "spike", "gradient", PRODUCT, BAD_DEVICE)
DEATHS = ("kill-forward", "kill-backward", "kill-sync", "kill-save", "hang")
SLOW = "slow"
NONDETERMINISM, HIDDEN_STATE, NAN_SAMPLE = "nondeterminism", "hidden-state", "nan-sample"
RANKED = (NONDETERMINISM, HIDDEN_STATE)
"""The kinds of ``--inject`` that last for the whole run: they have a rank and no step."""

STOPS = ("stop-update", "stop-sync", "stop-step")
FAULTS = (*DAMAGES, *DEATHS, *STOPS, SLOW, *RANKED, NAN_SAMPLE)
"""The kinds of ``--inject``: damage the state, kill or hang a rank, stop it temporarily, or slow it down."""


class Override(NamedTuple):
    """One ``--override``: a pattern of module names, and a recipe or HIGH for these modules."""

    pattern: str
    recipe: str


class Export(NamedTuple):
    """One ``--export``: a key of EXPORTS, and its argument, "" if none was given."""

    name: str
    argument: str


def _number(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return an argparse type for a finite number that ``fits`` accepts."""

    def number(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and fits(value)):
            raise argparse.ArgumentTypeError(f"must be {expected}, got {text}")
        return value

    number.__name__ = "number"  # argparse uses the name in its messages.
    return number


_share = _number("a share from 0 to 1", lambda value: 0 <= value <= 1)
_positive = _number("positive and finite", lambda value: value > 0)


class Fault(NamedTuple):
    """One ``--inject``: the kind of fault, its rank, and its step (counted from 1). For SLOW, ``step`` is the delay of
    each forward in milliseconds, for BAD_DEVICE and RANKED it is 0. ``gemm``: of PRODUCT. ``probability``: of
    BAD_DEVICE."""

    kind: str
    rank: int
    step: int
    gemm: Gemm = "wgrad"
    probability: float = 0.01

    def __str__(self) -> str:
        if self.kind in RANKED:
            return f"{self.kind}:{self.rank}"
        last = {PRODUCT: f"{self.step}:{self.gemm}", BAD_DEVICE: f"{self.probability:g}"}
        return f"{self.kind}:{self.rank}:{last.get(self.kind, self.step)}"


def _fault(text: str) -> Fault:
    """Parse KIND:RANK:STEP, or what the kind has in place of the step. Raise ArgumentTypeError if it is malformed."""
    kind, *place = text.split(":")
    if kind not in FAULTS:
        raise argparse.ArgumentTypeError(f"KIND must be one of {', '.join(FAULTS)}, got {text!r}")
    if kind == BAD_DEVICE:
        return _bad_device(place, text)
    if kind in RANKED:
        if len(place) != 1 or not place[0].isdecimal():
            raise argparse.ArgumentTypeError(f"expected {kind}:RANK, got {text!r}")
        return Fault(kind, int(place[0]), 0)
    named = place.pop() if kind == PRODUCT and len(place) == 3 else "wgrad"
    gemm = next((gemm for gemm in GEMMS if gemm == named), None)
    if gemm is None:
        raise argparse.ArgumentTypeError(f"GEMM must be one of {', '.join(GEMMS)}, got {text!r}")
    if len(place) != 2 or not all(number.isdecimal() for number in place):
        last = {SLOW: "MILLISECONDS", PRODUCT: "STEP[:GEMM]"}.get(kind, "STEP")
        raise argparse.ArgumentTypeError(f"expected {kind}:RANK:{last}, got {text!r}")
    return Fault(kind, int(place[0]), int(place[1]), gemm)


def _bad_device(place: list[str], text: str) -> Fault:
    """Parse RANK or RANK:P."""
    if not (1 <= len(place) <= 2 and place[0].isdecimal()):
        raise argparse.ArgumentTypeError(f"expected {BAD_DEVICE}:RANK or {BAD_DEVICE}:RANK:P, got {text!r}")
    fault = Fault(BAD_DEVICE, int(place[0]), 0)
    try:
        return fault._replace(probability=_share(place[1])) if len(place) == 2 else fault
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"P must be a probability from 0 to 1, got {text!r}") from None


def _export(text: str) -> Export:
    """Parse NAME or NAME:ARGUMENT. Raise ArgumentTypeError if it is malformed."""
    name, colon, argument = text.partition(":")
    if name not in EXPORTS:
        raise argparse.ArgumentTypeError(f"NAME must be one of {', '.join(EXPORTS)}, got {text!r}")
    what = EXPORTS[name]
    if what is None and colon:
        raise argparse.ArgumentTypeError(f"{name} takes no argument, got {text!r}")
    if not argument and (colon or name in NEED_ARGUMENTS):
        raise argparse.ArgumentTypeError(f"expected {name}:{what}, got {text!r}")
    if name == "prometheus" and not (argument.isdecimal() and int(argument) < 1 << 16):
        raise argparse.ArgumentTypeError(f"PORT must be 0 to 65535, got {text!r}")
    return Export(name, argument)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInput(message)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the job's flags. It raises BadInput instead of exiting."""
    made = _Parser(
        prog="train_gpt",
        description="Train a small byte-level GPT on one or many ranks, in high precision or in FP8.",
        epilog=(
            "If --amax-sync, --backend, --check-every, --check-policy or --audit-every is not given, its FP8DIST_… "
            "environment variable applies. Exit status: 0, the run is done; 2, a mistake in the flags or an unusable "
            f"file; {UNWRITTEN}, a checkpoint could not be written, the ranks print the reason in one line; "
            f"{DIVERGED}, the run stopped because its ranks differ, or a device computes wrongly, divergence.txt and "
            f"divergence.json under --out name the ranks and tensors; {FAILED_COLLECTIVE}, a collective failed or "
            "timed out because another rank is gone or hangs, each remaining rank prints in one line where it was; "
            f"{LOSS_DIVERGED}, --loss-guard stop saw a loss that jumped or is not finite, and prints the step."
        ),
        formatter_class=_HelpWithDefaults,
        allow_abbrev=False,
    )
    _add_job_flags(made.add_argument_group("job"))
    _add_fp8_flags(made.add_argument_group("FP8 (with --precision fp8)"))
    _add_precision_flags(made.add_argument_group("high precision in place of FP8 (with --precision fp8)"))
    _add_watch_flags(made.add_argument_group("monitoring"))
    _add_check_flags(made.add_argument_group("consistency of the ranks"))
    _add_checkpoint_flags(made.add_argument_group("checkpoints (under --out, in checkpoints/step-…)"))
    _add_model_flags(made.add_argument_group("model and training"))
    return made


class _HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Appends "(default: …)" to the help of each flag whose default is not None."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _add_job_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--parallel",
        choices=("none", "ddp", *SHARDED),
        help="how ranks share the work. ddp: each rank holds the whole model; fsdp2: fully_shard over all ranks; hsdp: "
        "fully_shard within groups of ranks, replicated across the groups; fsdp1: FullyShardedDataParallel; none: "
        "single process (default: ddp with several ranks, none with one)",
    )
    add(
        "--shard-size",
        type=_at_least(1),
        metavar="N",
        help="with hsdp: ranks that share one copy of the parameters (default: half of the ranks, or all of them if "
        "their number is odd)",
    )
    add(
        "--sharding",
        choices=("full", "grad_op"),
        default="full",
        help="with fsdp1: full frees the gathered parameters after each forward, grad_op keeps them for the backward",
    )
    add(
        "--precision",
        choices=("bf16", "fp32", "fp8"),
        default="fp8",
        help="precision of the Linears; lm_head stays in high precision unless --override names it",
    )
    add("--data", type=Path, metavar="FILE", help="text to train on (default: the topics of Python's help())")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("runs/gpt"),
        help="folder for metrics.jsonl, summary.json and all other outputs",
    )
    add("--eval-every", type=_at_least(0), metavar="N", default=0, help="validate every N steps; 0: only at the end")
    add("--log-every", type=_at_least(1), metavar="N", default=10, help="read losses from the device every N steps")
    add("--seed", type=_at_least(0), metavar="N", default=0, help="seed of the initial weights and the data order")
    add(
        "--timeout",
        type=_positive,
        metavar="SECONDS",
        default=600.0,
        help=f"time limit of a collective; a rank that exceeds it exits with status {FAILED_COLLECTIVE}",
    )


def _add_fp8_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--recipe",
        choices=RECIPES,
        default="delayed",
        help="how scales are computed. delayed: from the amaxes of earlier steps; current: from the tensor's own amax; "
        "rowwise: one scale per token and per channel; block: one scale per 1x128 or 128x128 elements",
    )
    add(
        "--override",
        type=_override,
        action="append",
        metavar="PATTERN=RECIPE",
        help=f"use another recipe, or {HIGH} for high precision, in the Linears whose names match the pattern, such as "
        "'blocks.*.mlp_in=block'; may be repeated, the first matching pattern applies",
    )
    add(
        "--history-len",
        type=_at_least(1),
        metavar="N",
        help="with delayed: length of the amax history in optimizer steps (default: 1024)",
    )
    add(
        "--amax-algo",
        choices=("max", "most_recent"),
        help="with delayed: use the largest or the most recent amax of the history (default: max)",
    )
    add("--margin", type=int, metavar="N", help="with delayed: divide scales by 2**N (default: 0)")
    add(
        "--format",
        choices=("hybrid", "e4m3"),
        help="hybrid: E4M3, and E5M2 for gradients; e4m3: E4M3 for all (default: hybrid, e4m3 with rowwise and block)",
    )
    add("--power-of-two", action="store_true", help="round scales down to powers of two")
    add(
        "--update",
        choices=("same_step", "next_step"),
        help="with delayed: when new scales apply. same_step: optimizer.step() waits for the sync; next_step: the sync "
        "runs in the background until the next forward (default: same_step)",
    )
    add("--amax-sync", action=argparse.BooleanOptionalAction, help="share amaxes between ranks (default: yes)")
    add(
        "--fp8-all-gather",
        action=argparse.BooleanOptionalAction,
        help="gather FSDP2 weights in FP8 (default: yes with fsdp2 and hsdp if ranks share amaxes; no with rowwise, or "
        f"with block if --width is not a multiple of {BLOCK} times the ranks that share a weight)",
    )
    add(
        "--backend",
        choices=BACKENDS,
        help="implementation of FP8 casts and matrix products (default: auto, the fastest one on this device)",
    )
    add(
        "--calibrate-steps",
        type=_at_least(0),
        metavar="N",
        default=0,
        help="run N batches in high precision before training to collect amaxes; skipped if the run resumes from a "
        "checkpoint with FP8 state",
    )


def _add_precision_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--high-first", type=_at_least(0), metavar="N", default=0, help="run the first N blocks in high precision")
    add(
        "--high-last",
        type=_at_least(0),
        metavar="N",
        default=0,
        help="run the last N blocks in high precision; --high-first and --high-last take precedence over --override",
    )
    add(
        "--high-gemms",
        type=_gemms,
        metavar="GEMM,…",
        help="matrix products to run in high precision in all Linears: any of fprop, dgrad and wgrad, separated by "
        "commas (default: none)",
    )
    add(
        "--fast-gemms",
        type=_gemms_or_none,
        metavar="GEMM,…",
        help="with delayed, current and rowwise: matrix products that accumulate in the reduced precision of Hopper's "
        f"tensor cores, as --high-gemms names them, or {NONE} (default: fprop)",
    )
    add(
        "--fp8-start-step",
        type=_at_least(1),
        metavar="N",
        default=1,
        help="first step in FP8; earlier steps run in high precision, but weights that FSDP2 gathers in FP8 are "
        "rounded to FP8 in these steps too",
    )
    add(
        "--fallback-steps",
        type=_at_least(0),
        metavar="K",
        default=0,
        help="run a module in high precision for K steps after any rank saw a NaN or Inf amax in it; 0: never",
    )
    add(
        "--fallback-saturated",
        type=_share,
        metavar="SHARE",
        help="fall back also if the cast saturated more than this share of a tensor's elements, from 0 to 1",
    )
    add(
        "--fallback-underflow",
        type=_share,
        metavar="SHARE",
        help="fall back also if the cast turned more than this share of a tensor's elements into 0, from 0 to 1",
    )


def _add_watch_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--watch-every",
        type=_at_least(0),
        metavar="N",
        default=0,
        help="with FP8: write the amax, scale, saturated share and underflow share of each slot to scales.jsonl under "
        "--out every N steps; 0: never",
    )
    add(
        "--watch-ranks",
        action="store_true",
        help="with --watch-every: also write which rank and microbatch held each maximum, and the times of each rank",
    )
    add(
        "--scale-jump",
        type=_number("finite and above 1", lambda factor: factor > 1),
        metavar="FACTOR",
        help="with --watch-every: warn if a scale changes by this factor or more",
    )
    add(
        "--tensorboard",
        action="store_true",
        help="with --watch-every: also write TensorBoard files to tensorboard under --out",
    )
    add(
        "--export",
        type=_export,
        action="append",
        metavar="NAME[:ARGUMENT]",
        help="also pass the numbers of the run on, from rank 0; may be repeated. tensorboard[:FOLDER]: event files "
        "(default: tensorboard under --out). wandb[:PROJECT]: a new run of Weights & Biases. mlflow[:URI]: a new run "
        "on that server or in that sqlite file. opentelemetry: OpenTelemetry's global provider. prometheus:PORT: an "
        "endpoint on 127.0.0.1. textfile:FILE: a file for node_exporter, whose name ends in .prom",
    )
    add(
        "--loss-guard",
        choices=("off", "warn", "stop", "skip", "fallback", "lower-lr"),
        default="off",
        help="action, before the update, if the loss jumps or is not finite. warn: log it; stop: exit with status "
        f"{LOSS_DIVERGED}; skip: leave the update out; fallback: use high precision for --fallback-steps steps (100 if "
        "that is not given); lower-lr: halve the learning rate. Any value but off adds a collective to each step to "
        "share the loss, and waits for it",
    )
    add(
        "--replay-on",
        type=_replays,
        metavar="EVENT,…",
        help="keep the batches of the last two steps, and run one again when one of these events names it, before the "
        "update, at most every 100 steps; the log and events.jsonl tell which module was the first to differ or to be "
        "not finite. nonfinite: an amax, or the loss that --loss-guard sees; jump: needs --scale-jump; spike: needs "
        "--loss-guard. Not with fsdp1 (default: none)",
    )
    add(
        "--loss-factor",
        type=_number("finite and at least 1", lambda factor: factor >= 1),
        metavar="X",
        help="with --loss-guard: a loss jumps if it exceeds X times the running median, and the usual noise by far "
        "(default: 1.5)",
    )


def _add_check_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--check-every",
        type=_at_least(0),
        metavar="N",
        help="compare parameters and FP8 state across ranks every N steps and at the end. Each check costs one pass "
        "over them and a few small all-reduces. In an FP8 job it runs as the next step ends, and reports that step "
        "(default: 0, never)",
    )
    add(
        "--check-policy",
        choices=("raise", "warn", "repair"),
        help=f"action if ranks differ. raise: stop with exit status {DIVERGED}; warn: log it and continue; repair: "
        "copy from the majority and continue (default: raise)",
    )
    add(
        "--audit-every",
        type=_at_least(0),
        metavar="N",
        help="every N steps, let another rank repeat one FP8 cast or matrix product of each rank, bit for bit. Finds "
        "wrong results, which the gradient all-reduce gives to all ranks alike. --check-policy says what follows, but "
        "repair raises (default: 0, never)",
    )
    add(
        "--audit-bytes",
        type=_at_least(1),
        metavar="N",
        help="with --audit-every: bytes of operands that a rank sends; of larger ones, a block is audited (default: 64 "
        "MiB)",
    )
    add(
        "--inject",
        type=_fault,
        action="append",
        metavar="KIND:RANK:STEP",
        help="inject a fault on one rank, to test its detection; may be repeated. scale: double one scale just before "
        "the step's sync. weight: flip one bit of a weight after the update. nan: record one NaN amax; the ranks do "
        "not diverge, all of them count it and keep the scale. skip: undo the rank's update (a rank that left out "
        "optimizer.step() would make the others hang). outlier: set one input element of one Linear to a million "
        "times the largest. spike: multiply the input of lm_head by a thousand, which multiplies the rank's loss by "
        "about as much. gradient: flip one bit of a gradient after its all-reduce. product:RANK:STEP[:GEMM]: flip one "
        "bit of the step's first FP8 product of this GEMM (default: wgrad). bad-device:RANK[:P]: flip one bit of each "
        "FP8 product of the rank with probability P (default: 0.01), also when it repeats those of others. "
        "kill-forward, kill-backward, kill-sync, kill-save: SIGKILL in the middle of the forward, the backward, the "
        "FP8 sync or the writing of a checkpoint. hang: sleep forever at the start of the step. stop-update, "
        "stop-sync, stop-step: SIGSTOP before the FP8 sync, after it has started, or after the update; kill -CONT "
        "resumes the rank. slow:RANK:MILLISECONDS: sleep this long in each training forward. nondeterminism:RANK: an "
        "op of the middle block gives another result each time. hidden-state:RANK: the middle block counts its calls, "
        "and the count changes its output. nan-sample:RANK:STEP: one sample of the step's last microbatch has a byte "
        "that makes the embedding give NaN. A job that torchrun restarted ignores this flag",
    )


def _add_checkpoint_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--save-every",
        type=_at_least(0),
        metavar="N",
        default=0,
        help="save a checkpoint every N steps and after the last one; 0: never",
    )
    add("--keep", type=_at_least(1), metavar="N", default=2, help="number of checkpoints to keep, the newest ones")
    add("--async-save", action="store_true", help="continue training while checkpoint files are written")
    add(
        "--resume",
        metavar="DIR",
        help="resume from this checkpoint; auto: from the newest complete one, or start from scratch if there is none. "
        "A job that torchrun restarted resumes automatically if it saves checkpoints",
    )
    add(
        "--stop-after",
        type=_at_least(1),
        metavar="N",
        help="save and exit after step N; the learning rate still follows --steps",
    )


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    for flag, default, help_ in (
        ("--layers", 4, "number of transformer blocks"),
        ("--width", 192, "width of the residual stream"),
        ("--heads", 4, "attention heads per block"),
        ("--context", 128, "context length in bytes"),
        ("--batch-size", 8, "sequences per rank and microbatch"),
        ("--accumulate", 1, "microbatches per optimizer step"),
        ("--steps", 200, "number of optimizer steps"),
    ):
        add(flag, type=_at_least(1), metavar="N", default=default, help=help_)
    add(
        "--experts",
        type=_at_least(0),
        metavar="E",
        default=0,
        help="make the MLP of each block a mixture of E experts, each as wide as that MLP; 0: a plain MLP",
    )
    add("--top-k", type=_at_least(1), metavar="K", help="with --experts: experts that each token visits (default: 2)")
    add("--learning-rate", type=_positive, metavar="X", default=2e-3, help="peak; decays to a tenth of X")


def _at_least(lowest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}, got {value}")
        return value

    number.__name__ = "integer"  # argparse uses the name in its messages.
    return number


def _override(text: str) -> Override:
    pattern, _, recipe = text.rpartition("=")
    if not pattern or recipe not in (*RECIPES, HIGH):
        kinds = ", ".join((*RECIPES, HIGH))
        raise argparse.ArgumentTypeError(f"expected PATTERN=RECIPE, where RECIPE is one of {kinds}, got {text!r}")
    return Override(pattern, recipe)


def _replays(text: str) -> tuple[str, ...]:
    named = text.split(",")
    if not set(named) <= set(REPLAYS):
        raise argparse.ArgumentTypeError(f"expected any of {', '.join(REPLAYS)}, separated by commas, got {text!r}")
    return tuple(event for event in REPLAYS if event in named)


def _gemms(text: str) -> tuple[str, ...]:
    named = text.split(",")
    if not set(named) <= set(GEMMS):
        raise argparse.ArgumentTypeError(f"expected any of {', '.join(GEMMS)}, separated by commas, got {text!r}")
    return tuple(gemm for gemm in GEMMS if gemm in named)


def _gemms_or_none(text: str) -> tuple[str, ...]:
    return () if text == NONE else _gemms(text)
