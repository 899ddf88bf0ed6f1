"""The command line: ``fp8dist …``, ``python -m fp8dist …``, ``torchrun … -m fp8dist …``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import fp8dist
from fp8dist.cli.exit_codes import UNREADABLE, USAGE
from fp8dist.errors import CheckpointError, ConfigurationError

_EPILOG = """exit codes: 0 consistent (doctor: healthy), 1 diverged (doctor: a check failed / good: no checkpoint is),
2 wrong usage or nothing to compare, 3 input cannot be read; "fp8dist launch --help" lists those of launch

Under torchrun, each rank of "fp8dist check" reads one path, with {rank} replaced by its rank:
    torchrun --nproc-per-node=8 -m fp8dist check '/local/dump-{rank}.safetensors'
torchrun itself exits with 1 if any rank fails, whatever the exit codes of the ranks."""

_COMMANDS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "check": {
            "help": "compare files or checkpoints of several ranks that should be equal, or traces of a step",
            "description": "Compare files that should be equal: FP8 state, safetensors, torch.save files, DCP folders. "
            "Of traces, say where they first part.",
            "epilog": _EPILOG,
            "formatter_class": argparse.RawDescriptionHelpFormatter,
        },
        "inspect": {"help": "print a file's slots, scales and amaxes, or tensors and digests"},
        "good": {
            "help": "print the checkpoint to resume from, the newest that is known to be good",
            "description": "Print the path of the newest checkpoint that is known to be good and is still there, alone "
            "on stdout. If there is none, say why on stderr, and exit with 1.",
        },
        "doctor": {"help": "test this machine: FP8 casts and matmuls, Triton, an all-reduce"},
        "report": {
            "help": "draw a run's folder as one HTML file, or say where two runs part",
            "description": "Draw the folder of a run as one HTML file that loads nothing, while the job runs or "
            "afterwards.",
        },
        "export": {
            "help": "write a checkpoint's FP8 weights and scales as inference servers read them",
            "description": "Write the model of a DCP folder or a torch.save file with the FP8 bytes and scales that "
            "the job would multiply with in eval() after a resume on one rank. Nothing in the checkpoint is executed.",
        },
        "verify": {
            "help": "compare a served model with the checkpoint or the certificate that it comes from",
            "description": "Compare every tensor of a served folder, and its config.json, with what fp8dist export "
            "makes of a checkpoint, or with a certificate. Nothing from either side is executed.",
        },
        "watch": {
            "help": "show a running job: loss, soundness, slots near trouble, waits, events",
            "description": "Show a run from its folder, also while the job writes it. Without a terminal: lines.",
        },
        "launch": {"help": "start a training program on every rank of this node, and join other nodes"},
    }
)
"""By command, the texts of its parser."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["launch"]:  # argparse would interpret the flags of the launched program.
        from fp8dist.cli.launch import launch

        return launch(words[1:])
    options = _parser(next((word for word in words if not word.startswith("-")), "")).parse_args(words)
    # Errors are printed below, on one line each, so they must not be logged as well.
    logging.getLogger("fp8dist").setLevel(logging.CRITICAL)
    if isinstance(sys.stdout, io.TextIOWrapper):  # Where it is not UTF-8, "?" stands for other letters.
        sys.stdout.reconfigure(errors="replace")
    try:
        from fp8dist.cli.commands import run  # Imports torch, which takes seconds.

        return run(options)
    except (ConfigurationError, CheckpointError) as error:
        print(f"fp8dist {options.command}: {error}", file=sys.stderr)
        return USAGE if isinstance(error, ConfigurationError) else UNREADABLE
    except Exception:  # A bug of ours. It must not look like the verdict DIVERGED, which is Python's usual status 1.
        traceback.print_exc()
        return UNREADABLE


def _parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser. Modules with the flags of a command may import torch, so only those of ``command`` are added.
    None: those of all."""
    parser = argparse.ArgumentParser(
        prog="fp8dist",
        description="Compare, inspect, export and verify FP8 training state, draw and watch runs, test this machine, "
        "start jobs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fp8dist {fp8dist.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    its = {name: commands.add_parser(name, **words) for name, words in _COMMANDS.items()}
    add = its["check"].add_argument
    add("paths", nargs="+", metavar="PATH", help="file or folder; {rank} in a path expands to 0, 1, 2, …")
    its["inspect"].add_argument("path", metavar="PATH")
    its["doctor"].add_argument(
        "--burn",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="then repeat casts and products for so long; compare the results with the first ones, with plain torch "
        "and, under torchrun, across ranks",
    )
    for name in ("report", "export", "good", "verify", "watch"):
        if command in (None, name):
            importlib.import_module(f"fp8dist.cli.{name}").add_flags(its[name])
    add("--only", choices=("parameter", "scale", "history", "step"), help="compare things of this kind alone")
    add("--summary", action="store_true", help="print one line: counts and the first difference")
    for name in ("check", "inspect", "doctor", "verify"):
        its[name].add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
