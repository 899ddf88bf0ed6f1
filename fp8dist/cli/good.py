"""``fp8dist good``: the checkpoint to resume from, for scripts."""

from __future__ import annotations

import argparse
import io
import os
import sys
from pathlib import Path

from fp8dist.cli.exit_codes import CONSISTENT, DIVERGED
from fp8dist.runs.report.checkpoints import GOOD, saved_checkpoints, why_none
from fp8dist.runs.report.numbers import RunNumbers, read_steps


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    parser.add_argument("path", metavar="RUN", type=Path, help="folder of the run, which fp8dist.Recorder writes")


def good(options: argparse.Namespace) -> int:
    """Print the path of the newest good checkpoint that is there, alone on stdout; else why there is none, on stderr.

    Raises:
        ConfigurationError: the folder is not that of a run.
    """
    run = read_steps(options.path)
    paths, reason = _good_paths(run)
    found = next((here for path in paths if (here := _located(options.path, path)) is not None), None)
    if found is None:
        reason = f"none that is good is there any more: {paths[0]}" if paths else reason
        print(f"fp8dist good: {options.path}: {reason}", file=sys.stderr)
        return DIVERGED
    if isinstance(sys.stdout, io.TextIOWrapper):  # Its bytes, in whatever encoding the file system has them.
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(found) + b"\n")
        sys.stdout.buffer.flush()
    else:
        print(found)
    return CONSISTENT


def _good_paths(run: RunNumbers) -> tuple[list[str], str]:
    """Return (the paths of the good checkpoints, the newest first; why there is none).

    Of checkpoints with one path only the last that was saved there counts, also if a resume has undone it: it has
    replaced the others.
    """
    saved = saved_checkpoints(run)
    last = {str(event.data.get("path")): event for event in run.events if event.kind == "saved"}
    good = [one.event for one in reversed(saved) if one.state == GOOD]
    paths = [path for event in good if isinstance(path := event.data.get("path"), str) and last[path] is event]
    lost = "of those that are good no path is recorded, or a later one was saved in their place"
    return paths, lost if good else why_none(run, saved)


def _located(run: Path, path: str) -> Path | None:
    """Return where a checkpoint is now; None: it is gone. A relative path may be relative to the run's folder, or to
    where the job ran; the run's folder may have been moved with its checkpoints."""
    parts, name = Path(path).parts, run.resolve().name
    inside = parts[len(parts) - parts[::-1].index(name) :] if name in parts else parts
    return next((one for one in (run / path, run.joinpath(*inside), Path(path)) if one.exists()), None)
