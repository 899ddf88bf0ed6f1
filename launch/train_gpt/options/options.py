"""The options of a run of the example job, parsed and checked without importing torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fp8dist_kernels import BLOCK
from launch.train_gpt.checkpoints import folders
from launch.train_gpt.data import BadInput, Text, read_text
from launch.train_gpt.options.flags import (
    BAD_DEVICE,
    HIGH,
    PRODUCT,
    RANKED,
    SHARDED,
    SLOW,
    Export,
    Fault,
    Override,
    parser,
)

__all__ = ["FOR_DELAYED", "Options", "parse", "prepare_input", "require_usable_checkpoints"]

FOR_DELAYED = ("history_len", "amax_algo", "margin", "update")
"""Flags that require delayed scaling."""

FOR_WATCH = ("watch_ranks", "scale_jump", "tensorboard")
"""Flags that require ``--watch-every``."""


@dataclass(frozen=True)
class Options:
    """The options of one run. ``--help`` describes each."""

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
    fast_gemms: tuple[str, ...] | None
    fp8_start_step: int
    fallback_steps: int
    fallback_saturated: float | None
    fallback_underflow: float | None
    watch_every: int
    watch_ranks: bool
    scale_jump: float | None
    tensorboard: bool
    export: tuple[Export, ...]
    loss_guard: Literal["off", "warn", "stop", "skip", "fallback", "lower-lr"]
    loss_factor: float | None
    replay_on: tuple[Literal["nonfinite", "jump", "spike"], ...]
    amax_sync: bool | None
    fp8_all_gather: bool | None
    backend: Literal["auto", "triton", "torch", "reference"] | None
    check_every: int | None
    check_policy: Literal["raise", "warn", "repair"] | None
    audit_every: int | None
    audit_bytes: int | None
    inject: tuple[Fault, ...]
    layers: int
    width: int
    heads: int
    context: int
    experts: int
    top_k: int
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
        """The last step of this run. The learning rate schedule always follows ``steps``."""
        return self.stop_after or self.steps

    @property
    def sharded(self) -> bool:
        """True if parameters are sharded, so that a forward is collective."""
        return self.parallel in SHARDED

    @property
    def recipes(self) -> set[str]:
        """The recipes in use, without HIGH."""
        return {self.recipe, *(override.recipe for override in self.override)} - {HIGH}

    @property
    def why_not_gathered(self) -> str | None:
        """The reason why FSDP2 cannot gather weights in FP8 with these flags, or None."""
        if self.parallel not in ("fsdp2", "hsdp"):
            return f"is for --parallel fsdp2 and hsdp, got {self.parallel}"
        if self.precision != "fp8":
            return f"needs --precision fp8, got {self.precision}"
        if self.amax_sync is False:
            return "needs amaxes that ranks share: remove --no-amax-sync"
        if "rowwise" in self.recipes:
            return "does not go with rowwise scaling: dgrad needs column scales, which FP8 rows do not provide"
        if "block" in self.recipes and self.shard_size > 1 and self.width % (BLOCK * self.shard_size):
            multiples = f"{BLOCK} times the {self.shard_size} ranks that share a weight"
            return f"cannot split blocks: with block scaling --width must be a multiple of {multiples}"
        return None

    def saves_at(self, step: int) -> bool:
        """Return True if a checkpoint is saved after this step."""
        return self.save_every > 0 and (step % self.save_every == 0 or step == self.last_step)


def parse(arguments: Sequence[str]) -> Options:
    """Parse and check the flags.

    Raises:
        BadInput: an unknown flag, a value out of range, or flags that do not go together.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    values = parser().parse_args(arguments)
    if values.parallel is None:
        values.parallel = "ddp" if ranks > 1 else "none"
    for several in ("export", "inject", "override", "high_gemms", "replay_on"):
        setattr(values, several, tuple(getattr(values, several) or ()))
    values.shard_size = _shard_size(values.shard_size, values.parallel, ranks)
    values.stop_after = values.stop_after or 0
    values.top_k = _top_k(values.top_k, values.experts)
    options = Options(**vars(values))
    if options.parallel == "none" and ranks > 1:
        raise BadInput(f"--parallel none is for one rank, got {ranks} ranks: use --parallel ddp")
    if options.sharding != "full" and options.parallel != "fsdp1":
        raise BadInput(f"--sharding {options.sharding} is for --parallel fsdp1, got {options.parallel}")
    if options.width % options.heads:
        raise BadInput(f"--width {options.width} is not a multiple of --heads {options.heads}")
    if options.precision == "fp8" and options.width % 16:
        raise BadInput(f"--precision fp8 needs a --width that is a multiple of 16, got {options.width}")
    if options.experts and options.precision == "fp8" and options.parallel == "fsdp1":
        raise BadInput("--experts in FP8 is not for --parallel fsdp1, which flattens 3-D parameters; use fsdp2")
    _require_consistent_recipes(options)
    _require_consistent_fp8(options)
    _require_replayable(options)
    if options.stop_after > options.steps:
        raise BadInput(f"--stop-after {options.stop_after} is beyond --steps {options.steps}")
    if options.stop_after and not options.save_every:
        raise BadInput("--stop-after needs --save-every: without a checkpoint the training would be lost")
    if options.async_save and not options.save_every:
        raise BadInput("--async-save needs --save-every")
    for fault in options.inject:
        _require_possible(fault, options, ranks)
    return options


def _shard_size(given: int | None, parallel: str, ranks: int) -> int:
    """Return the number of ranks per shard group."""
    if given is None:
        return ranks // 2 if parallel == "hsdp" and ranks % 2 == 0 else ranks
    if parallel != "hsdp":
        raise BadInput(f"--shard-size is for --parallel hsdp, got {parallel}")
    if ranks % given:
        raise BadInput(f"--shard-size {given} does not divide the {ranks} ranks")
    return given


def _top_k(given: int | None, experts: int) -> int:
    """Return the number of experts that each token visits; 0 without experts."""
    if not experts:
        if given is not None:
            raise BadInput("--top-k needs --experts")
        return 0
    if given is not None and given > experts:
        raise BadInput(f"--top-k {given} is more than the --experts {experts}")
    return given or min(2, experts)


def _require_consistent_recipes(options: Options) -> None:
    if options.fp8_all_gather and options.why_not_gathered is not None:
        raise BadInput(f"--fp8-all-gather {options.why_not_gathered}")
    if "delayed" not in options.recipes and (idle := _given(options, FOR_DELAYED)):
        raise BadInput(f"{idle[0]} is for delayed scaling, got {', '.join(sorted(options.recipes))}")
    if options.fast_gemms is not None and options.recipes == {"block"}:
        raise BadInput("--fast-gemms is for delayed, current and rowwise scaling, got block")
    patterns = [override.pattern for override in options.override]
    for pattern in patterns:
        if patterns.count(pattern) > 1:
            raise BadInput(f"--override {pattern}=… is given more than once: the first matching pattern applies")
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
        raise BadInput(f"{idle[0]} needs --fallback-steps, the number of steps in high precision")
    if not options.watch_every and (idle := _given(options, FOR_WATCH)):
        raise BadInput(f"{idle[0]} needs --watch-every")
    if options.audit_every and options.precision != "fp8":
        raise BadInput(f"--audit-every needs --precision fp8, got {options.precision}")
    if options.audit_every == 0 and options.audit_bytes is not None:
        raise BadInput("--audit-bytes needs --audit-every")
    if options.loss_guard == "off" and options.loss_factor is not None:
        raise BadInput("--loss-factor needs --loss-guard")
    if options.loss_guard == "fallback" and options.precision != "fp8":
        raise BadInput(f"--loss-guard fallback needs --precision fp8, got {options.precision}")


def _require_replayable(options: Options) -> None:
    if options.replay_on and options.parallel == "fsdp1":
        raise BadInput("--replay-on is not for --parallel fsdp1, which keeps gradients in flat parameters; use fsdp2")
    if "jump" in options.replay_on and (options.precision != "fp8" or options.scale_jump is None):
        raise BadInput("--replay-on jump needs --precision fp8, --watch-every and --scale-jump")
    if "spike" in options.replay_on and options.loss_guard == "off":
        raise BadInput("--replay-on spike needs --loss-guard")
    if "nonfinite" in options.replay_on and options.loss_guard == "off" and options.precision != "fp8":
        raise BadInput(f"--replay-on nonfinite needs --loss-guard, or --precision fp8, got {options.precision}")


def _given(options: Options, names: Sequence[str]) -> list[str]:
    """Return those of these flags that were given. They have no defaults."""
    given = [name for name in names if getattr(options, name) is not None and getattr(options, name) is not False]
    return [f"--{name.replace('_', '-')}" for name in given]


def _require_possible(fault: Fault, options: Options, ranks: int) -> None:
    if fault.rank >= ranks:
        raise BadInput(f"--inject {fault}: there is no rank {fault.rank}, ranks are 0 to {ranks - 1}")
    if fault.kind == SLOW and fault.step < 1:
        raise BadInput(f"--inject {fault}: the number of milliseconds must be at least 1")
    if fault.kind not in (SLOW, BAD_DEVICE, *RANKED) and not 1 <= fault.step <= options.steps:
        raise BadInput(f"--inject {fault}: there is no step {fault.step}, steps are 1 to {options.steps}")
    if fault.kind in ("scale", PRODUCT, BAD_DEVICE, "nan", "kill-sync", "stop-sync") and options.precision != "fp8":
        raise BadInput(f"--inject {fault}: needs --precision fp8, got {options.precision}")
    if fault.kind in ("kill-sync", "stop-sync") and (options.amax_sync is False or ranks == 1):
        raise BadInput(f"--inject {fault}: needs ranks that share amaxes")
    if fault.kind == "kill-save" and not options.saves_at(fault.step):
        raise BadInput(f"--inject {fault}: no checkpoint is saved at step {fault.step}; see --save-every")
    if fault.kind in ("weight", "gradient", "skip") and options.parallel in ("fsdp1", "fsdp2"):
        raise BadInput(f"--inject {fault}: shards have no replica to compare with; use ddp or hsdp")


def prepare_input(options: Options) -> Text:
    """Return the text, and create the output folder.

    Raises:
        BadInput: the text cannot be used, or the folder cannot be written to.
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
    """Check that the run resumes only from a checkpoint that the user asked for.

    Do not call it in a job that torchrun restarted: the checkpoints under ``--out`` are its own.

    Raises:
        BadInput: the checkpoint of ``--resume`` is not complete, or ``--out`` has checkpoints of another run.
    """
    theirs = folders.whole(folders.of(options.out))
    if options.resume not in (None, "auto"):
        given = Path(options.resume)
        if not folders.is_whole(given):
            raise BadInput(f"--resume {given}: there is no complete checkpoint (a folder step-… with a file .metadata)")
        if options.save_every and theirs and given.resolve() not in [folder.resolve() for folder in theirs]:
            raise BadInput(f"--resume {given}: --out {options.out} has checkpoints of another run; use another --out")
    if options.resume is None and options.save_every and theirs:
        raise BadInput(
            f"--out {options.out} has checkpoints, the newest is {theirs[-1].name}: "
            "resume from it with --resume auto, or use another --out"
        )
