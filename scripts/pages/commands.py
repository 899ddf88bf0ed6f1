"""Commands whose output the pages show. A user types them at the top of a checkout.

A part ``command NAME`` is a block with the command line and its output. A command runs in a temporary folder with
links to everything in the checkout except ``runs``.
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

Mask = tuple[str, str]
"""(regex for text that changes from run to run, replacement)."""


class Command(NamedTuple):
    """A command whose output is shown.

    Attributes:
        words: the words of the command line. ``fp8dist`` and ``python`` are those of this checkout.
        masks: applied to the shown text and to the text of a new run before a comparison.
        first: the pattern of the first line to show; "": start at the beginning.
        in_checkout: run the command in the checkout itself, because it sets up ``.venv``.
        brief: further words for a run that only looks whether the output still has this form.
    """

    words: tuple[str, ...]
    masks: tuple[Mask, ...] = ()
    first: str = ""
    in_checkout: bool = False
    brief: tuple[str, ...] = ()


class CommandFailed(Exception):
    """A command failed, or did not print a line that the page needs."""


NUMBERS: Mask = (r" *[-+]?\d+(\.\d+)?", " #")
VERSIONS: Mask = (r"\d+\.\d+\.\d+\S*", "#")
SPACES: Mask = (r" {2,}", "  ")

_OF_JOBS = (
    *("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS", "JOIN_TIMEOUT", "LOGS", "IFNAME"),
    *("LOCAL_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TRITON_INTERPRET"),
)
"""Variables that would change the output of a command."""

_SMALL = "--layers 1 --width 32 --heads 2 --context 32 --batch-size 4 --steps 12"
_LAB = ("launch/torchrun.sh", "-m", "tests.support.lab")

COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "simulate": Command(("python", "-m", "scripts.simulation", "--ranks", "16384", "--update", "next_step")),
        "straggler": Command(
            (*_LAB, *_SMALL.split(), "--inject", "slow:1:60"), masks=(NUMBERS, SPACES), first="straggler:"
        ),
        "demo": Command(
            ("scripts/demo",),
            masks=(NUMBERS, SPACES),
            first="^ +fp32 +fp8$",
            in_checkout=True,
            brief=("--steps", "40"),
        ),
        "doctor": Command(("fp8dist", "doctor"), masks=((r"on Linux-.*", "on #"), VERSIONS, NUMBERS, SPACES)),
    }
)


def block(name: str, brief: bool = False) -> str:
    """Run the command and return its command line and output, as a Markdown block."""
    return f"```text\n$ {' '.join(COMMANDS[name].words)}\n{output_of(name, brief)}\n```"


def masked(name: str, text: str) -> str:
    """Return the text with everything that changes from run to run masked."""
    for pattern, instead in COMMANDS[name].masks:
        text = re.sub(pattern, instead, text)
    return text


def output_of(name: str, brief: bool = False) -> str:
    """Run a command and return the output to show, without names of this machine, its folders and its kernel.

    Args:
        brief: True to run it for its form only, with ``Command.brief``.

    Raises:
        CommandFailed: the command failed, or a line to show is missing.
    """
    command = COMMANDS[name]
    with tempfile.TemporaryDirectory(prefix="fp8dist-pages-") as folder:
        for path in ROOT.iterdir():
            if path.name != "runs" and not command.in_checkout:
                (Path(folder) / path.name).symlink_to(path)
        done = subprocess.run(
            _argv((*command.words, *(command.brief if brief else ()))),
            cwd=ROOT if command.in_checkout else folder,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
    line = " ".join(command.words)
    if done.returncode:
        raise CommandFailed(f"{line} ended with status {done.returncode}: {done.stdout}")
    lines = [line.rstrip() for line in done.stdout.replace(f"{folder}/", "").splitlines()]
    first = next((number for number, text in enumerate(lines) if re.search(command.first, text)), None)
    if first is None:
        raise CommandFailed(f"{line}: no line has {command.first!r}:\n{done.stdout}")
    return _anonymous("\n".join(lines[first:]).strip("\n"))


def _argv(words: Sequence[str]) -> list[str]:
    ours = {"fp8dist": (sys.executable, "-m", "fp8dist"), "python": (sys.executable,)}
    return [*ours.get(words[0], words[:1]), *words[1:]]


def _environment() -> dict[str, str]:
    """Return the environment without the caller's FP8 and job variables, and with a fixed terminal width."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FP8DIST_", "PYTEST_")) and k not in _OF_JOBS}
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    fixed = {"PYTHON": sys.executable, "PYTHONPATH": path, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    return {**kept, **fixed, "CUDA_VISIBLE_DEVICES": ""}


def _anonymous(text: str) -> str:
    """Replace the names of this machine and its kernel. Columns stay aligned."""
    host, instead = socket.gethostname(), "host0"

    def renamed(found: re.Match[str]) -> str:
        gap = len(found[1]) - len(instead) + len(host)
        return instead + " " * (max(2, gap) if found[1] else 0)

    text = re.sub(rf"\b{re.escape(host)}\b((?: {{2,}})?)", renamed, text)
    return re.sub(r"on Linux-\S+", "on Linux", text)
