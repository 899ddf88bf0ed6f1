"""What the commands of the command line do. ``main`` imports this module, and so torch, when a command runs."""

from __future__ import annotations

import argparse
import contextlib
import glob
import itertools
import json
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from tqdm import tqdm  # type: ignore[import-untyped]

from fp8dist.checks.inventory import Holdings, ReplicaSet
from fp8dist.checks.protocol import check_replicas
from fp8dist.checks.report import DivergenceReport
from fp8dist.cli.doctor import examine
from fp8dist.cli.exit_codes import CONSISTENT, DIVERGED, UNREADABLE
from fp8dist.cli.export import export
from fp8dist.cli.good import good
from fp8dist.cli.report import report as write_report
from fp8dist.cli.verify import verify
from fp8dist.cli.watch import watch
from fp8dist.errors import CheckpointError, ConfigurationError
from fp8dist.files.comparison import SourceContent, bytes_in, compare_sources, only_of
from fp8dist.files.entries import Source
from fp8dist.files.inspection import inspect_source
from fp8dist.files.partings import compare_traces, compare_traces_of_ranks, traces_text
from fp8dist.files.sources import open_source
from fp8dist.files.traces import is_trace
from fp8dist.state.groups import SyncGroup


def run(options: argparse.Namespace) -> int:
    """Run the command of a parsed command line, and return the exit code.

    Raises:
        ConfigurationError: the command line is wrong. The message is one line for the terminal.
        CheckpointError: a file cannot be read. The message is one line.
    """
    return _COMMANDS[options.command](options) or CONSISTENT


def _print(as_json: bool, plain: Any, text: str) -> None:
    try:
        print(json.dumps(plain, indent=1, allow_nan=False) if as_json else text, flush=True)
    except BrokenPipeError:  # The reader, such as "| head", closed the pipe.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (the interpreter closes it)


# check ------------------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _check_across_ranks(options)
    paths = [path for given in options.paths for path in _expanded(given)]
    if len(paths) < 2:
        raise ConfigurationError("needs at least two paths to compare")
    if any(is_trace(path) for path in paths):
        return _check_traces(paths, options)
    sources = [_opened(path, options) for path in paths]
    families = {source.family: source.path for source in sources}
    if len(families) > 1:
        state, parameters = families["state"], families["parameters"]
        raise ConfigurationError(f"{state} is FP8 state and {parameters} is a checkpoint: compare files of one kind")
    with _bar(sum(map(bytes_in, sources)), options.json) as bar:
        report = compare_sources(sources, bar.update)
    _require_compared(report)
    _print(options.json, {**report.to_json(), "files": paths}, _text(report, options))
    return _outcome(report)


def _opened(path: str, options: argparse.Namespace) -> Source:
    """Open a checkpoint, of which ``--only`` may leave a part out."""
    source = open_source(path)
    return source if options.only is None else only_of(source, options.only)


def _text(report: DivergenceReport, options: argparse.Namespace) -> str:
    """Return a report; with ``--summary`` as one line: the number of findings by kind, and the first one."""
    if not options.summary:
        return str(report)
    counts = Counter(finding.kind for finding in report.findings)
    first = replace(report, findings=report.findings[:1]).summary().partition("\n")[0]
    return f"{', '.join(f'{count} {kind}' for kind, count in counts.items())}; first: {first}" if counts else first


def _traces_text(report: DivergenceReport, options: argparse.Namespace) -> str:
    text = traces_text(report)
    return text.partition("\n")[0] if options.summary else text


def _require_no_kind(options: argparse.Namespace) -> None:
    if options.only is not None:
        raise ConfigurationError("--only is for checkpoints: a trace has no such kinds")


def _check_traces(paths: list[str], options: argparse.Namespace) -> int:
    _require_no_kind(options)
    for path in paths:
        _require_trace(path)
    report = compare_traces(paths)
    _require_compared(report)
    _print(options.json, {**report.to_json(), "files": paths}, _traces_text(report, options))
    return _outcome(report)


def _require_trace(path: str) -> None:
    """Raise ConfigurationError if the path is a checkpoint, and CheckpointError if it is neither that nor a trace."""
    if not is_trace(path):
        open_source(path)
        raise ConfigurationError(f"{path} is a checkpoint, and others are traces: compare files of one kind")


def _bar(total: int, hidden: bool) -> Any:
    hidden = hidden or sys.stderr is None  # Closed, by "2>&-".
    return tqdm(total=total, unit="B", unit_scale=True, desc="reading", disable=True if hidden else None, leave=False)


def _expanded(path: str) -> list[str]:
    """Return the paths that a path with {rank} expands to, in rank order.

    Raises:
        CheckpointError: no file matches, or the file of a rank below the highest is missing.
    """
    if "{rank}" not in path:
        return [path]
    before, *rest = map(re.escape, path.split("{rank}"))
    pattern = re.compile(f"{before}(?P<rank>[0-9]+)" + "(?P=rank)".join(rest))
    found = glob.glob("[0-9]*".join(map(glob.escape, path.split("{rank}"))))
    by_rank = {int(match["rank"]): match[0] for match in map(pattern.fullmatch, found) if match}
    gap = next(rank for rank in itertools.count() if rank not in by_rank)
    if gap == 0 or gap < max(by_rank):
        raise CheckpointError(f"{path.replace('{rank}', str(gap))}: no such file or directory")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _check_across_ranks(options: argparse.Namespace) -> int:
    """Compare one path per rank. COLLECTIVE."""
    if len(options.paths) != 1:
        raise ConfigurationError("under torchrun each rank reads one path: give one PATH with {rank} in it")
    absent = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise ConfigurationError(f"WORLD_SIZE is set but {absent[0]} is not: use torchrun, or unset WORLD_SIZE")
    dist.init_process_group("gloo")
    try:
        anchor = SyncGroup(dist.group.WORLD)  # type: ignore[arg-type]
        path = options.paths[0].replace("{rank}", str(anchor.rank))
        if any(itertools.starmap(_are_one, itertools.combinations(filter(None, anchor.gather(_identity(path))), 2))):
            raise ConfigurationError("several ranks read the same file or folder: PATH must give each rank its own")
        if any(anchor.gather(_seems_trace(path))):
            return _check_traces_across_ranks(path, anchor, options)
        with ExitStack() as stack:

            def build() -> Holdings:
                source = _opened(path, options)
                hidden = options.json or anchor.rank > 0
                bar = stack.enter_context(_bar(bytes_in(source), hidden))
                return Holdings((ReplicaSet("", anchor, (SourceContent(source, bar.update),)),))

            report = check_replicas(anchor, build).report
        _require_compared(report)
        code = _outcome(report)
        if anchor.rank == (report.reporting_rank if report.findings else 0):
            if code == UNREADABLE:
                for finding in report.findings:
                    print(f"fp8dist check: rank {finding.ranks[0]}: {finding.detail}", file=sys.stderr)
            else:
                _print(options.json, report.to_json(), _text(report, options))
        dist.barrier()  # A launcher kills all ranks as soon as one fails, so wait until the report is printed.
        return code
    finally:
        dist.destroy_process_group()


def _identity(path: str) -> tuple[int, int, str, int] | None:
    """Return a file's inode, the time at which that changed in ns, its host and device; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        found = os.stat(path)
        return found.st_ino, found.st_ctime_ns, socket.gethostname(), found.st_dev
    return None


def _are_one(one: tuple[int, int, str, int], other: tuple[int, int, str, int]) -> bool:
    """True if two ranks read one file. A file that hosts share has other device numbers on each. A copy has another
    time, which no program can set."""
    return one[:2] == other[:2] and (one[2] != other[2] or one[3] == other[3])


def _seems_trace(path: str) -> bool:
    with contextlib.suppress(CheckpointError):  # It is told later, on all ranks.
        return is_trace(path)
    return False


def _check_traces_across_ranks(path: str, group: SyncGroup, options: argparse.Namespace) -> int:
    """Compare one trace per rank. COLLECTIVE."""
    _require_no_kind(options)
    usage = ""
    try:
        _require_trace(path)
    except ConfigurationError as error:
        usage = f"rank {group.rank}: {error}"
    except CheckpointError:  # ``compare_traces_of_ranks`` says it, on all ranks.
        pass
    found = [text for text in group.gather(usage) if text]
    if found:
        raise ConfigurationError(found[0])
    try:
        report = compare_traces_of_ranks(path, group)
    except CheckpointError as error:
        if group.rank == 0:
            print(f"fp8dist check: {error}", file=sys.stderr)
        dist.barrier()  # As below.
        return UNREADABLE
    _require_compared(report)
    if group.rank == 0:
        _print(options.json, report.to_json(), _traces_text(report, options))
    dist.barrier()
    return _outcome(report)


def _require_compared(report: DivergenceReport) -> None:
    """Raise ConfigurationError if nothing was compared: empty files do not count as equal. The same on all ranks."""
    if not (report.findings or any(report.compared.values())):
        raise ConfigurationError("nothing to compare: none of the paths holds a tensor or a slot")


def _outcome(report: DivergenceReport) -> int:
    if any(f.kind == "error" for f in report.findings):
        return UNREADABLE
    return DIVERGED if report.diverged else CONSISTENT


# The other commands -------------------------------------------------------------------------------------


def _inspect(options: argparse.Namespace) -> int:
    inspection = inspect_source(open_source(options.path))
    _print(options.json, inspection.to_json(), str(inspection))
    return CONSISTENT


def _doctor(options: argparse.Namespace) -> int:
    examination = examine(burning=options.burn)
    if int(os.environ.get("RANK", "0")) == 0 or not examination.healthy:
        _print(options.json, examination.as_dict(), str(examination))
    return CONSISTENT if examination.healthy else DIVERGED


def _verify(options: argparse.Namespace) -> int:
    verification = verify(options, lambda total: _bar(total, options.json))
    _require_compared(verification)
    _print(options.json, verification.to_json(), str(verification))
    return _outcome(verification)


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int | None]] = MappingProxyType(
    {
        "check": _check,
        "inspect": _inspect,
        "doctor": _doctor,
        "report": write_report,
        "export": lambda options: _print(False, None, export(options)),
        "good": good,
        "verify": _verify,
        "watch": watch,
    }
)
"""By command: a function that returns the exit code. None: CONSISTENT."""
