"""How a trainer keeps the contract of ``test_contract.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Adapter", "Job", "Kept", "same"]

Kept = tuple[dict[str, bytes], list[Tensor]]
"""FP8 state and this rank's parameters."""


def same(a: Kept, b: Kept) -> bool:
    """Return True if all bits are equal."""
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


Job = tuple[Any, ...]
"""A function that each rank of a pool calls with a folder, the same on all, and its other arguments."""

Jobs = Mapping[str, Job]


@dataclass(frozen=True)
class Adapter:
    """The jobs of one trainer, and what its runs and its example write.

    Args:
        by_hand: train with the trainer and with a loop by hand, and compare all bits.
        resumed: compare a run with one that was resumed.
        diverged: by case, the name of a tensor that a rank damages, and a job that returns the error.
        undisturbed: compare a run with one beside which there are evaluations or other models.
        refused: mistakes, which raise.
        unclean: jobs of ``refused`` leave something behind in their processes.
        recorded: called with the folder, the run's name, and "whole", "killed" or "resumed"; returns what
            ``require_resumed`` wants.
        resumes: ``recorded`` can be killed and resumed.
        ends_group: ``recorded`` destroys the process group.
        saved, checkpoint: the steps after which ``recorded`` saves, and the names of the checkpoints.
        evaluated: the steps after which ``recorded`` evaluates.
        columns: numbers of each step that the run must have.
        logged: names of other numbers that a resumed run must have, too.
        steps, prints, through, run, lines: of the example: its ``--steps``, a part of what it prints, the start of the
            command, the folder of the run in that of ``--out``, and the number of its lines; 0: it has no ``--out``.
    """

    by_hand: Jobs
    resumed: Jobs
    diverged: Mapping[str, tuple[str, Job]]
    undisturbed: Jobs
    refused: Jobs
    recorded: Callable[..., Any]
    unclean: bool = False
    resumes: bool = True
    ends_group: bool = False
    saved: tuple[int, ...] = ()
    checkpoint: str = "{step}"
    evaluated: tuple[int, ...] = ()
    columns: Mapping[str, list[float]] = field(default_factory=dict)
    logged: tuple[str, ...] = ("grad_norm",)
    steps: int = 4
    prints: str = "FP8: "
    through: tuple[str, ...] = ()
    run: str = "."
    lines: int = 4
