"""Commands whose output pages show, as they are typed at the top of a checkout.

A part ``command NAME`` is a block with the command line and what it prints. A command runs in a folder of its own,
which has everything of the checkout but its ``runs``.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from scripts.pages.filling import ROOT

__all__ = ["COMMANDS", "Command", "CommandFailed", "block", "masked", "output_of"]

Mask = tuple[str, str]
"""A pattern of what changes from run to run, and what stands for it."""


class Command(NamedTuple):
    """A command whose output is shown.

    Attributes:
        words: as they are typed. ``fp8dist`` is this checkout's.
        environment: typed in front of them.
        masks: applied to the shown text and to that of another run, before the two are compared.
        status: the exit status that it ends with.
        first: the pattern of the first line that is shown; "": all from the beginning.
        last: the pattern of the last line that is shown; "": all to the end.
        in_checkout: run it in the checkout itself, because it sets up ``.venv``.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str] = MappingProxyType({})
    masks: tuple[Mask, ...] = ()
    status: int = 0
    first: str = ""
    last: str = ""
    in_checkout: bool = False

    @property
    def line(self) -> str:
        """The command line."""
        return " ".join((*(f"{name}={value}" for name, value in self.environment.items()), *self.words))


class CommandFailed(Exception):
    """A command ended with another exit status than it should, or printed no line that is to be shown."""


NUMBERS: Mask = (r" *[-+]?\d+(\.\d+)?", " #")
VERSIONS: Mask = (r"\d+\.\d+\.\d+\S*", "#")
SPACES: Mask = (r" {2,}", "  ")

_OF_JOBS = (
    *("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS", "JOIN_TIMEOUT", "LOGS", "IFNAME"),
    *("LOCAL_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TRITON_INTERPRET"),
)
"""Variables that would change what a command prints."""

_SMALL = "--layers 1 --width 32 --heads 2 --context 32 --batch-size 4 --steps 12"
_STRAGGLER = Command(
    ("launch/torchrun.sh", *_SMALL.split(), "--inject", "slow:1:60"), masks=(NUMBERS, SPACES), first="straggler:"
)

COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "simulate": Command(("fp8dist", "simulate", "--ranks", "16384", "--update", "next_step")),
        "damaged": Command(
            ("launch/torchrun.sh", "--inject", "scale:1:5", "--out", "runs/damaged"),
            MappingProxyType({"NPROC": "3"}),
            masks=(NUMBERS, SPACES),
            status=4,
            first=r"\[rank 1\] --inject",
            last=r"train_gpt: stopped",
        ),
        "straggler": _STRAGGLER,
        "example-job-straggler": _STRAGGLER,
        "demo": Command(("scripts/demo",), masks=(NUMBERS, SPACES), first="^ +fp32 +fp8$", in_checkout=True),
        "doctor": Command(("fp8dist", "doctor"), masks=((r"on Linux-.*", "on #"), VERSIONS, NUMBERS, SPACES)),
        "check-help": Command(("fp8dist", "check", "--help")),
        "launch-help": Command(("fp8dist", "launch", "--help")),
    }
)


def block(name: str) -> str:
    """The command line and what it prints, as a block of Markdown. Runs it."""
    return f"```text\n$ {COMMANDS[name].line}\n{output_of(name)}\n```"


def masked(name: str, text: str) -> str:
    """A shown text without what changes from run to run."""
    for pattern, instead in COMMANDS[name].masks:
        text = re.sub(pattern, instead, text)
    return text


def output_of(name: str) -> str:
    """What a command prints, as it is shown: without names of this machine, its folders and its kernel.

    Raises:
        CommandFailed: it does not end as it should.
    """
    command = COMMANDS[name]
    with tempfile.TemporaryDirectory(prefix="fp8dist-pages-") as folder:
        for path in ROOT.iterdir():
            if path.name != "runs" and not command.in_checkout:
                (Path(folder) / path.name).symlink_to(path)
        done = subprocess.run(
            _argv(command.words),
            cwd=ROOT if command.in_checkout else folder,
            env=_environment(command.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
    if done.returncode != command.status:
        raise CommandFailed(f"{command.line} ended with status {done.returncode}: {done.stdout}")
    lines = _shown(command, [line.rstrip() for line in done.stdout.replace(f"{folder}/", "").splitlines()])
    return _anonymous("\n".join(lines).strip("\n"))


def _argv(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", *words] if words[0] == "fp8dist" else list(words)


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Without what the caller's shell says of FP8 and of jobs, and with a terminal of a known width."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FP8DIST_", "PYTEST_")) and k not in _OF_JOBS}
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    fixed = {"PYTHON": sys.executable, "PYTHONPATH": path, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    return {**kept, **fixed, "CUDA_VISIBLE_DEVICES": "", **given}


def _shown(command: Command, lines: Sequence[str]) -> list[str]:
    def place(pattern: str, whole: int) -> int:
        if not pattern:
            return whole
        found = [number for number, line in enumerate(lines) if re.search(pattern, line)]
        if not found:
            raise CommandFailed(f"{command.line}: no line has {pattern!r}:\n" + "\n".join(lines))
        return found[0]

    first, last = place(command.first, 0), place(command.last, len(lines) - 1)
    return [*lines[first : last + 1], *(["…"] if last < len(lines) - 1 else [])]


def _anonymous(text: str) -> str:
    """Without the names of this machine and of its kernel. Columns stay where they are."""
    host, instead = socket.gethostname(), "host0"

    def renamed(found: re.Match[str]) -> str:
        gap = len(found[1]) - len(instead) + len(host)
        return instead + " " * (max(2, gap) if found[1] else 0)

    text = re.sub(rf"\b{re.escape(host)}\b((?: {{2,}})?)", renamed, text)
    return re.sub(r"on Linux-\S+", "on Linux", text)
