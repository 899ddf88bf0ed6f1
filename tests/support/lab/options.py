"""The options of a run of the lab: those of the example job, and many more. Nothing here imports torch."""

from __future__ import annotations

import os
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


def _share(help: str) -> Any:
    return number(None, help, "a share from 0 to 1", lambda value: 0 <= value <= 1)


def _on(help: str) -> Any:
    return flag(False, help, action="store_true")


@dataclass(frozen=True)
class Options(example.Options):
    """The options of one run. Several values of one flag are a tuple."""

    parallel: str = flag(None, "that of the example job, or fsdp1", choices=("none", "ddp", "fsdp1", "fsdp2", "hsdp"))
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
        """Fill in what depends on other flags."""
        for several in ("inject", "override", "high_gemms", "replay_on"):
            self._set(several, tuple(getattr(self, several) or ()))
        self._set("stop_after", self.stop_after or 0)
        self._set("top_k", self.top_k or min(2, self.experts))

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
        """Raise BadInput for what the example job refuses, and for faults that would not be planted."""
        super().require_consistent(ranks)
        if self.share_batch and self.batch_size % ranks:
            raise BadInput(f"--share-batch needs a --batch-size that is a multiple of the {ranks} ranks")
        for fault in self.inject:
            _require_possible(fault, self, ranks)


def parse(arguments: Sequence[str]) -> Options:
    """Parse and check the flags. Raise BadInput for an unknown one, a value out of range, or flags that do not go
    together."""
    return example.parse(arguments, Options)


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
