"""What the programs have in common: a job that runs healthy or with its bug, watched by one thing or by several.

A program is a function of a ``Job``, which each rank calls. It builds a model, gives it to ``prepare`` and ``attach``,
and ends each step with ``step``. What it must not know is whether fp8dist watches, and with what: a *watch* is an
argument or a tool, and the runs of ``outcomes.py`` turn watches on.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist.cli.main import main as command_line
from fp8dist.errors import DivergenceError, Fp8DistError
from fp8dist.state.groups import local_part
from tests.support.logs import captured_log

ARGUMENTS = ("axes=", "values=", "optimizer=", "gradients=", "buffers=", "at_rest_every=")
TOOLS = (
    "check_values",
    "check_values(distinct=True)",
    "replay",
    "audit",
    "fp8dist check",
    "fp8dist verify",
    "LossGuard",
    "exact",
)
WATCHES = (*ARGUMENTS, *TOOLS)
"""In the order in which they are tried. A further tool is a name in ``TOOLS``, and a line in ``Job`` that runs it if it
is ``on``, and raises ``FoundByTool``."""

PLAIN = "plain PyTorch"
"""A watch that leaves fp8dist out."""


@dataclass(frozen=True)
class Program:
    """``cause``: a regular expression for the subject of the first finding, or for the text of a tool. ``also``: for
    the subjects of the other findings. ``alike``: the bug does the same on all ranks. ``unseen``: why nothing finds it,
    and what would."""

    run: Callable[[Job], Any]
    ranks: int
    cause: str
    also: str
    alike: bool
    unseen: str


PROGRAMS: dict[str, Program] = {}


def program(cause: str, *, ranks: int = 3, also: str = "", alike: bool | None = None, unseen: str = "") -> Any:
    """Add the decorated program, which has the name of its bug."""

    def add(function: Callable[[Job], Any]) -> Callable[[Job], Any]:
        same = ranks == 1 if alike is None else alike
        PROGRAMS[function.__name__] = Program(function, ranks, cause, also or cause, same, unseen)
        return function

    return add


@dataclass
class Job:
    """One run on this rank. ``bug``: with the bug. ``on``: the watches that are on."""

    bug: bool
    on: frozenset[str]
    folder: Path
    log: list[tuple[int, str]]
    done: int = 0
    logged_at: int | None = None
    manager: Any = None
    seen: list[tuple[int, Any]] = field(default_factory=list)
    watched: nn.Module | None = None
    called: nn.Module | None = None
    equal_buffers: bool = True
    """False: a forward changes buffers, so that after a step they differ between healthy ranks."""
    values: Callable[[], Mapping[str, Any]] | None = None
    """What must be the same on all ranks beside the model, and what a loop knows without more collectives."""
    distinct: Callable[[], Mapping[str, Any]] | None = None
    """What each rank must have for itself."""
    replays: bool = False
    """True inside a replay."""
    alone: Any = None
    """While ``exact`` computes what one process does: the group of rank 0."""
    forward_backward: Callable[[Any], None] | None = None
    """For a replay, with the batch that ``step`` gets."""

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def prepare(
        self, model: Any, *, ddp: Mapping[str, Any] | None = MappingProxyType({}), axes: Any = None, **options: Any
    ) -> Any:
        """Prepare the model and wrap it in DDP. ``ddp``: arguments for DDP; None: no DDP. ``axes``: passed if this
        watch is on."""
        self.watched = model
        if PLAIN not in self.on:
            if dist.is_initialized():
                options.setdefault("group", dist.group.WORLD)
            if "axes=" in self.on:
                options["axes"] = axes
            if "values=" in self.on:
                options["values"] = self.values
            if "audit" in self.on and options.get("enabled", True):
                options["audit_every"] = 1
            if "at_rest_every=" in self.on:
                options["at_rest_every"] = 1
            self.manager = fp8dist.prepare(model, check_every=1, **options)
        return model if ddp is None or not dist.is_initialized() else DistributedDataParallel(model, **ddp)

    def attach(self, called: Any, *optimizers: Any, **options: Any) -> None:
        self.called = called  # For the check at the end.
        if self.manager is not None:
            self.manager.attach(called, optimizer=list(optimizers) or None, **options)

    def step(self, *optimizers: Any, loss: Any = None, batch: Any = None) -> None:
        """End a step: watch, step the optimizers, zero the gradients, watch."""
        self.done += 1
        if self.manager is not None:
            if "gradients=" in self.on and dist.is_initialized():
                self.manager.check(gradients=True)
            if "replay" in self.on and self.forward_backward is not None and batch is not None:
                self._replay(batch)
            if "LossGuard" in self.on and loss is not None:
                self._guard(loss)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if self.manager is not None:
            if "optimizer=" in self.on and dist.is_initialized():
                self.manager.check(optimizer=list(optimizers))
            if "buffers=" in self.on and self.equal_buffers and dist.is_initialized():
                self.manager.check(buffers=True)
            if "check_values" in self.on and self.values is not None:
                fp8dist.check_values(self.values(), step=self.done)
            if "check_values(distinct=True)" in self.on and self.distinct is not None:
                fp8dist.check_values(self.distinct(), distinct=True, step=self.done)
        self.note(self.watched)
        if self.logged_at is None and _warnings(self.log):
            self.logged_at = self.done

    def note(self, *results: Any) -> None:
        """Note what the run has made so far: a model, or tensors. The bug must change it."""
        tensors = [t for one in results for t in (one.parameters() if isinstance(one, nn.Module) else [one])]
        flat = [local_part(t.detach()).float().reshape(-1).numpy() for t in tensors]
        self.seen.append((self.done, np.concatenate(flat)))

    def end(self) -> None:
        """Check once more, as a job must after its last step."""
        if self.manager is not None and dist.is_initialized():
            self.manager.check()

    def equal_files(self, first: Path, second: Path) -> None:
        """State that two checkpoints are to be the same, for ``fp8dist check``."""
        self._command("fp8dist check", "check", first, second)

    def served(self, checkpoint: Path, folder: Path) -> None:
        """State that a folder is served that a checkpoint was exported to, for ``fp8dist verify``."""
        self._command("fp8dist verify", "verify", checkpoint, folder)

    def exact(
        self,
        whole: Callable[[], nn.Module],
        losses: Callable[[Any, Any], list[Tensor]],
        shards: Any,
        called: nn.Module,
        step: Callable[[], Any],
        **options: Any,
    ) -> None:
        """State what one process computes, for ``fp8dist.exact``: ``losses(whole(), shards)``. ``called``: a model like
        that of the job, which is of no further use. ``step``: forward and backward of the job with it."""
        if "exact" not in self.on:
            return
        paths = [str(self.folder / "reference")]
        if dist.is_initialized():
            self.alone = dist.new_group([0])
        if self.rank == 0:
            fp8dist.exact.record(whole(), losses, shards, paths[0])
        if dist.is_initialized():
            dist.broadcast_object_list(paths)
            if self.rank == 0:  # torch names later groups after the number of groups that a rank has.
                dist.destroy_process_group(self.alone)
        report = fp8dist.exact.compare(called, step, paths[0], **options)
        if not report.equal:
            raise FoundByTool(str(report))

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return a model in DDP, if there are several ranks."""
        return DistributedDataParallel(model) if dist.is_initialized() else model

    def _command(self, watch: str, *words: Any) -> None:
        if watch not in self.on:
            return
        with tempfile.TemporaryFile("w+") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            logger = logging.getLogger("fp8dist")
            level = logger.level
            status = command_line([str(word) for word in words])
            logger.setLevel(level)  # It has silenced the library.
            out.seek(0)
            if status:
                raise FoundByTool(out.read())

    def _replay(self, batch: Any) -> None:
        self.replays = True
        report = fp8dist.replay(self.watched, self.forward_backward, batch)
        self.replays = False
        if not report.sentence.startswith("reproducible"):
            raise FoundByTool(report.sentence)

    def _guard(self, loss: Tensor) -> None:
        if not hasattr(self, "guard"):
            self.guard = fp8dist.LossGuard(mean_over=dist.group.WORLD if dist.is_initialized() else None)
        self.guard.observe(loss.detach(), self.done)


class FoundByTool(Fp8DistError):
    """A tool's report that something is wrong."""


@dataclass(frozen=True)
class Ran:
    """What a run did on this rank. ``seen``: results, each with the steps done before it. ``rows``: subjects of the
    findings, in the report's order. ``texts``: what was raised, and logged as a warning. ``step``: the step in which it
    was, or that the last check came after."""

    seen: list[tuple[int, Any]]
    error: str
    rows: list[str]
    texts: list[str]
    step: int


@contextlib.contextmanager
def _quiet() -> Iterator[list[tuple[int, str]]]:
    with captured_log() as log, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield log


TO_BE_EXPECTED = ("no parameters are compared", "is switched off:")
"""Warnings of healthy jobs: without copies, and without FP8."""


def run(name: str, bug: bool, on: frozenset[str]) -> Ran:
    """Run a program on this rank."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, _quiet() as log:
        job = Job(bug, on, Path(folder), log)
        rows: list[str] = []
        error, texts = "", []
        try:
            PROGRAMS[name].run(job)
            job.end()
        except DivergenceError as raised:
            rows = [finding.subject for finding in raised.report.findings]
            error, texts = "DivergenceError", [str(raised)]
        except Fp8DistError as raised:
            error, texts = type(raised).__name__, [str(raised)]
    texts += _warnings(log)
    return Ran(job.seen, error, rows, texts, job.done if job.logged_at is None else job.logged_at)


def _warnings(log: list[tuple[int, str]]) -> list[str]:
    return [text for _, text in log if not any(expected in text for expected in TO_BE_EXPECTED)]
