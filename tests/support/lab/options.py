"""The options of a run of the lab: those of the example job, and many more. Nothing here imports torch.

``python -m tests.support.lab.options FLAGS…`` checks the flags. It prints one line and exits with 2 on a mistake.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fp8dist_kernels import BACKENDS, BLOCK
from launch.train_gpt import options as example
from launch.train_gpt.data import BadInput, Text, read_text
from launch.train_gpt.exits import exit_with
from launch.train_gpt.flags import count, flag, number
from tests.support.lab import flags
from tests.support.lab.flags import BAD_DEVICE, HIGH, PRODUCT, RANKED, SLOW, Fault, Override

SHARDED = ("fsdp1", "fsdp2", "hsdp")
"""The values of ``--parallel`` that shard parameters."""

FOR_DELAYED = ("history_len", "amax_algo", "margin", "update")
"""Flags that require delayed scaling."""

FOR_WATCH = ("watch_ranks", "scale_jump", "tensorboard")
"""Flags that require ``--watch-every``."""


def _share(help: str) -> Any:
    return number(None, help, "a share from 0 to 1", lambda value: 0 <= value <= 1)


def _on(help: str) -> Any:
    return flag(False, help, action="store_true")


@dataclass(frozen=True)
class Options(example.Options):
    """The options of one run. Several values of one flag are a tuple."""

    parallel: str = flag(None, "that of the example job, or fsdp1", choices=("none", "ddp", *SHARDED))
    fp8_gradients: bool = _on("with ddp: add up gradients in FP8")
    share_batch: bool = _on("divide the batch of one rank among all ranks, for the same training as on one")
    eval_every: int = count(0, "validate every N steps; 0: only at the end", 0)
    log_every: int = count(10, "read losses from the device every N steps")
    stop_after: int = count(None, "save and exit after step N; the learning rate still follows --steps")
    experts: int = count(0, "make the MLP of each block a mixture of N experts, each as wide as that MLP", 0)
    top_k: int = count(None, "with --experts: experts that each token visits (default: 2)")

    override: tuple[Override, ...] = flag(
        None,
        f"use another recipe, or {HIGH} for high precision, in the Linears whose names match the pattern, such as "
        "'blocks.*.mlp_in=block'; may be repeated, the first matching pattern applies",
        type=flags.override,
        action="append",
        metavar="PATTERN=RECIPE",
    )
    history_len: int | None = count(None, "with delayed: length of the amax history in steps (default: 1024)")
    amax_algo: Literal["max", "most_recent"] | None = flag(
        None, "with delayed: which amax of the history to use (default: max)", choices=("max", "most_recent")
    )
    margin: int | None = flag(None, "with delayed: divide scales by 2**N (default: 0)", type=int, metavar="N")
    format: Literal["hybrid", "e4m3"] | None = flag(
        None, "FP8 formats (default: hybrid, e4m3 with rowwise and block)", choices=("hybrid", "e4m3")
    )
    power_of_two: bool = _on("round scales down to powers of two")
    no_hadamard: bool = _on("with nvfp4: no Hadamard transform")
    to_nearest: bool = _on("with nvfp4: round gradients to nearest, not at random")
    backend: Literal["auto", "triton", "torch", "reference"] | None = flag(
        None, "implementation of FP8 casts and matrix products (default: auto)", choices=BACKENDS
    )
    calibrate_steps: int = count(0, "run N batches in high precision before training to collect amaxes", 0)
    high_first: int = count(0, "run the first N blocks in high precision", 0)
    high_last: int = count(0, "run the last N blocks in high precision", 0)
    high_gemms: tuple[str, ...] = flag(
        None, "matrix products to run in high precision in all Linears", type=flags.gemms, metavar="GEMM,…"
    )
    fast_gemms: tuple[str, ...] | None = flag(
        None, "matrix products that accumulate fast, or none", type=flags.gemms_or_none, metavar="GEMM,…"
    )
    fp8_start_step: int = count(1, "first step in FP8; earlier steps run in high precision")
    fallback_steps: int = count(0, "run a module in high precision for N steps after a NaN or Inf amax in it", 0)
    fallback_saturated: float | None = _share("fall back also if more than this share of a tensor saturated")
    fallback_underflow: float | None = _share("fall back also if more than this share of a tensor became 0")

    scale_jump: float | None = number(
        None, "with --watch-every: warn if a scale changes by X", "finite and above 1", lambda value: value > 1
    )
    tensorboard: bool = _on("with --watch-every: also write TensorBoard files to tensorboard under --out")
    prometheus: int | None = count(None, "also serve the numbers of the run to Prometheus, on port N")
    loss_guard: Literal["off", "warn", "stop", "skip", "fallback"] = flag(
        "off",
        "action, before the update, if the loss jumps or is not finite",
        choices=("off", "warn", "stop", "skip", "fallback"),
    )
    loss_factor: float | None = number(
        None, "a loss jumps above X times the median (default: 1.5)", "finite and at least 1", lambda value: value >= 1
    )
    replay_on: tuple[Literal["nonfinite", "jump", "spike"], ...] = flag(
        None, "run a kept batch again when one of these events names it", type=flags.replays, metavar="EVENT,…"
    )
    audit_bytes: int | None = count(None, "with --audit-every: bytes of operands that a rank sends (default: 64 MiB)")
    inject: tuple[Fault, ...] = flag(
        None,
        "plant a fault on one rank; may be repeated. A job that torchrun restarted ignores it. "
        "docs/fault-lab.md has all kinds",
        type=flags.fault,
        action="append",
        metavar="KIND:RANK:STEP",
    )

    def __post_init__(self) -> None:
        """Fill in what depends on other flags. Raise BadInput if that cannot be."""
        for several in ("inject", "override", "high_gemms", "replay_on"):
            self._set(several, tuple(getattr(self, several) or ()))
        self._set("stop_after", self.stop_after or 0)
        self._set("top_k", _top_k(self.top_k, self.experts))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # The dataclass is frozen.

    @property
    def last_step(self) -> int:
        """The last step of this run. The learning rate schedule always follows ``steps``."""
        return self.stop_after or self.steps

    @property
    def shards(self) -> int:
        """The number of ranks that share one copy of the parameters."""
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        return ranks // 2 if self.parallel == "hsdp" and ranks % 2 == 0 else ranks

    @property
    def recipes(self) -> set[str]:
        """The recipes in use, without HIGH."""
        return {self.recipe, *(override.recipe for override in self.override)} - {HIGH}

    @property
    def gathers(self) -> bool:
        """True if FSDP2 can gather weights in FP8 with these flags."""
        whole_blocks = self.shards == 1 or self.width % (BLOCK * self.shards) == 0
        return (
            self.parallel in ("fsdp2", "hsdp")
            and self.precision == "fp8"
            and not self.recipes & {"rowwise", "mxfp8", "nvfp4"}
            and ("block" not in self.recipes or whole_blocks)
        )

    def require_consistent(self, ranks: int) -> None:
        if self.parallel == "none" and ranks > 1:
            raise BadInput(f"--parallel none is for one rank, got {ranks} ranks: use --parallel ddp")
        if self.fp8_gradients and self.parallel != "ddp":
            raise BadInput(f"--fp8-gradients is for --parallel ddp, got {self.parallel}")
        if self.share_batch and self.batch_size % ranks:
            raise BadInput(f"--share-batch needs a --batch-size that is a multiple of the {ranks} ranks")
        if self.width % self.heads:
            raise BadInput(f"--width {self.width} is not a multiple of --heads {self.heads}")
        if self.precision == "fp8" and self.width % 16:
            raise BadInput(f"--precision fp8 needs a --width that is a multiple of 16, got {self.width}")
        if self.experts and self.precision == "fp8" and self.parallel == "fsdp1":
            raise BadInput("--experts in FP8 is not for --parallel fsdp1, which flattens 3-D parameters; use fsdp2")
        _require_consistent_recipes(self)
        _require_consistent_fp8(self)
        _require_replayable(self)
        if self.stop_after > self.steps:
            raise BadInput(f"--stop-after {self.stop_after} is beyond --steps {self.steps}")
        if self.stop_after and not self.save_every:
            raise BadInput("--stop-after needs --save-every: without a checkpoint the training would be lost")
        for fault in self.inject:
            _require_possible(fault, self, ranks)


def parse(arguments: Sequence[str]) -> Options:
    """Parse and check the flags. Raise BadInput for an unknown one, a value out of range, or flags that do not go
    together."""
    return example.parse(arguments, Options)


def _top_k(given: int | None, experts: int) -> int:
    """Return the number of experts that each token visits; 0 without experts."""
    if not experts:
        if given:  # 0 is what this returned: dataclasses.replace() passes it in again.
            raise BadInput("--top-k needs --experts")
        return 0
    if given is not None and given > experts:
        raise BadInput(f"--top-k {given} is more than the --experts {experts}")
    return given or min(2, experts)


def _require_consistent_recipes(options: Options) -> None:
    if "delayed" not in options.recipes and (idle := _given(options, FOR_DELAYED)):
        raise BadInput(f"{idle[0]} is for delayed scaling, got {', '.join(sorted(options.recipes))}")
    if options.fast_gemms is not None and options.recipes <= {"block", "mxfp8", "nvfp4"}:
        raise BadInput(f"--fast-gemms is for delayed, current and rowwise scaling, got {', '.join(options.recipes)}")
    if "mxfp8" in options.recipes and (options.power_of_two or options.format):
        raise BadInput("--power-of-two and --format are not for mxfp8, whose scales and formats are fixed")
    if "nvfp4" not in options.recipes and (options.no_hadamard or options.to_nearest):
        raise BadInput(f"--no-hadamard and --to-nearest are for nvfp4, got {', '.join(sorted(options.recipes))}")
    if "nvfp4" in options.recipes and (options.power_of_two or options.format):
        raise BadInput("--power-of-two and --format are not for nvfp4, whose scales and formats are fixed")
    if options.recipe == "nvfp4" and options.experts:
        raise BadInput("--recipe nvfp4 is not for --experts")
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
    if not 0 <= fault.rank < ranks:
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
    """Return the text, and create the output folder. Raise BadInput if one cannot be used."""
    text = read_text(options.data, options.context)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {options.out}: {error.strerror or error}") from None
    if not os.access(options.out, os.W_OK):
        raise BadInput(f"--out {options.out}: the folder cannot be written to")
    return text


def check(arguments: Sequence[str]) -> None:
    """Exit with status 2 and one line, if the lab would refuse these flags."""
    try:
        prepare_input(parse(arguments))
    except BadInput as mistake:
        exit_with(mistake)


if __name__ == "__main__":
    check(sys.argv[1:])
