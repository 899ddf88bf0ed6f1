"""The flags of the example job: each field of ``Options`` is one. Nothing here imports torch.

``python -m launch.train_gpt.options FLAGS…`` checks the flags. It prints one line and exits with 2 on a mistake.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from launch.train_gpt import flags
from launch.train_gpt.data import BadInput, read_text
from launch.train_gpt.exits import DIVERGED, exit_with
from launch.train_gpt.flags import count, flag, number

RECIPES = ("delayed", "current", "rowwise", "block", "mxfp8", "nvfp4")


_SWITCH: Any = argparse.BooleanOptionalAction


@dataclass(frozen=True)
class Options:
    """The options of one run. ``parse`` replaces None in ``parallel``."""

    parallel: str = flag(
        None,
        "ddp: each rank holds the whole model; fsdp2: fully_shard over all ranks; hsdp: fully_shard within each half "
        "of the ranks; none: one rank (default: ddp with several ranks, none with one)",
        choices=("none", "ddp", "fsdp2", "hsdp"),
    )
    precision: str = flag("fp8", "precision of the Linears of all blocks", choices=("bf16", "fp32", "fp8"))
    data: Path | None = flag(None, "text to train on (default: topics of Python's help())", type=Path, metavar="FILE")
    out: Path = flag(Path("runs/gpt"), "folder for all outputs", type=Path, metavar="DIR")
    seed: int = count(0, "seed of the initial weights and the data order", 0)
    timeout: float = number(600.0, "time limit of a collective in seconds", "positive and finite", lambda x: x > 0)

    recipe: str = flag("delayed", "how scales are computed, see docs/recipes.md", choices=RECIPES)
    update: str | None = flag(
        None,
        "with delayed: when new scales apply. same_step: optimizer.step() waits for the sync; next_step: the sync "
        "runs in the background until the next forward (default: same_step)",
        choices=("same_step", "next_step"),
    )
    amax_sync: bool | None = flag(None, "share amaxes between ranks (default: yes)", action=_SWITCH)
    fp8_all_gather: bool | None = flag(None, "gather FSDP2 weights in FP8 (default: if they can be)", action=_SWITCH)

    watch_every: int = count(0, "with FP8: write numbers of each slot to scales.jsonl every N steps; 0: never", 0)
    watch_ranks: bool = flag(False, "with --watch-every: also write who held each maximum", action="store_true")

    check_every: int | None = count(None, "compare the ranks every N steps and at the end (default: 0, never)", 0)
    check_policy: Literal["raise", "warn", "repair"] | None = flag(
        None,
        f"if ranks differ: stop with exit status {DIVERGED}, log it, or copy from the majority (default: raise)",
        choices=("raise", "warn", "repair"),
    )
    audit_every: int | None = count(None, "let another rank repeat an FP8 op every N steps (default: 0, never)", 0)

    save_every: int = count(0, "save a checkpoint every N steps and after the last one; 0: never", 0)
    keep: int = count(2, "number of checkpoints to keep, the newest ones")
    resume: str | None = flag(None, "checkpoint to resume from; auto: the newest one of --out", metavar="DIR")

    layers: int = count(4, "number of transformer blocks")
    width: int = count(192, "width of the residual stream")
    heads: int = count(4, "attention heads per block")
    context: int = count(128, "context length in bytes")
    batch_size: int = count(8, "sequences per rank and microbatch")
    accumulate: int = count(1, "microbatches per optimizer step")
    steps: int = count(200, "number of optimizer steps")
    learning_rate: float = number(2e-3, "peak; decays to a tenth of X", "positive and finite", lambda x: x > 0)

    @property
    def last_step(self) -> int:
        """The last step of this run."""
        return self.steps

    def saves_at(self, step: int) -> bool:
        """Return True if a checkpoint is saved after this step."""
        return self.save_every > 0 and (step % self.save_every == 0 or step == self.last_step)

    def require_consistent(self, ranks: int) -> None:
        """Raise BadInput if the flags do not go together, on this many ranks."""
        if self.parallel == "none" and ranks > 1:
            raise BadInput(f"--parallel none is for one rank, got {ranks} ranks: use --parallel ddp")
        if self.width % self.heads:
            raise BadInput(f"--width {self.width} is not a multiple of --heads {self.heads}")
        if self.precision == "fp8" and self.width % 16:
            raise BadInput(f"--precision fp8 needs a --width that is a multiple of 16, got {self.width}")
        if self.update is not None and self.recipe != "delayed":
            raise BadInput(f"--update is for delayed scaling, got {self.recipe}")
        if self.audit_every and self.precision != "fp8":
            raise BadInput(f"--audit-every needs --precision fp8, got {self.precision}")


Kind = TypeVar("Kind", bound=Options)


def parser(kind: type[Options] = Options) -> argparse.ArgumentParser:
    """Return the parser of the job's flags. It raises BadInput instead of exiting."""
    return flags.parser(kind, "If a flag of the checks is not given, its FP8DIST_… environment variable applies.")


def parse(arguments: Sequence[str], kind: type[Kind]) -> Kind:
    """Parse and check the flags.

    Raises:
        BadInput: an unknown flag, a value out of range, or flags that do not go together.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    values = parser(kind).parse_args(arguments)
    values.parallel = values.parallel or ("ddp" if ranks > 1 else "none")
    options = kind(**vars(values))
    options.require_consistent(ranks)
    return options


def check(arguments: Sequence[str]) -> None:
    """Exit with status 2 and one line, if the job would refuse these flags."""
    try:
        options = parse(arguments, Options)
        read_text(options.data, options.context)
    except BadInput as mistake:
        exit_with(mistake)


if __name__ == "__main__":
    check(sys.argv[1:])
