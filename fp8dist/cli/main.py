"""The command line: ``fp8dist …``, ``python -m fp8dist …``, ``torchrun … -m fp8dist …``."""

from __future__ import annotations

import argparse
import contextlib
import glob
import itertools
import json
import logging
import math
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from tqdm import tqdm  # type: ignore[import-untyped]

import fp8dist
from fp8dist.cli.doctor import examine
from fp8dist.cli.export import add_flags as add_export_flags
from fp8dist.cli.export import export
from fp8dist.cli.launch import launch
from fp8dist.cli.report import add_flags as add_report_flags
from fp8dist.cli.report import report as write_report
from fp8dist.cli.simulate import add_flags, simulate
from fp8dist.cli.verify import add_flags as add_verify_flags
from fp8dist.cli.verify import verify
from fp8dist.cli.watch import add_flags as add_watch_flags
from fp8dist.cli.watch import watch
from fp8dist.consistency.inventory import Holdings, ReplicaSet
from fp8dist.consistency.protocol import check_replicas
from fp8dist.consistency.report import DivergenceReport
from fp8dist.errors import CheckpointError, ConfigurationError
from fp8dist.offline.comparison import SourceContent, bytes_in, compare_sources
from fp8dist.offline.inspection import inspect_source
from fp8dist.offline.partings import compare_traces, compare_traces_of_ranks, traces_text
from fp8dist.offline.sources import open_source
from fp8dist.offline.traces import is_trace
from fp8dist.sync.groups import SyncGroup

__all__ = ["CONSISTENT", "DIVERGED", "UNREADABLE", "USAGE", "main"]

CONSISTENT, DIVERGED, USAGE, UNREADABLE = range(4)
"""Exit codes."""

_EPILOG = """exit codes: 0 consistent (doctor: healthy), 1 diverged (doctor: a check failed), 2 wrong usage or nothing
to compare, 3 input cannot be read; "fp8dist launch --help" lists those of launch

Under torchrun, each rank of "fp8dist check" reads one path, with {rank} replaced by its rank:
    torchrun --nproc-per-node=8 -m fp8dist check '/local/dump-{rank}.safetensors'
torchrun itself exits with 1 if any rank fails, whatever the exit codes of the ranks."""


class _Usage(Exception):
    """The command line is wrong. The message is one line for the terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["launch"]:  # argparse would interpret the flags of the launched program.
        return launch(words[1:])
    options = _parser().parse_args(words)
    # Errors are printed below, on one line each, so they must not be logged as well.
    logging.getLogger("fp8dist").setLevel(logging.CRITICAL)
    try:
        return int(options.run(options))
    except _Usage as error:
        print(f"fp8dist {options.command}: {error}", file=sys.stderr)
        return USAGE
    except CheckpointError as error:
        print(f"fp8dist {options.command}: {error}", file=sys.stderr)
        return UNREADABLE
    except Exception:  # A bug of ours. It must not look like the verdict DIVERGED, which is Python's usual status 1.
        traceback.print_exc()
        return UNREADABLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8dist",
        description="Compare, inspect, export and verify FP8 training state, draw and watch runs, test this machine, "
        "predict the cost of syncs, start jobs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fp8dist {fp8dist.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="compare files or checkpoints of several ranks that should be equal, or traces of a step",
        description="Compare files that should be equal: FP8 state, safetensors, torch.save files, DCP folders. Of "
        "traces, say where they first part.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument(
        "paths", nargs="+", metavar="PATH", help="file or folder; {rank} in a path expands to 0, 1, 2, …"
    )
    check.set_defaults(run=_check)
    inspect = commands.add_parser("inspect", help="print a file's slots, scales and amaxes, or tensors and digests")
    inspect.add_argument("path", metavar="PATH")
    inspect.set_defaults(run=_inspect)
    doctor = commands.add_parser("doctor", help="test this machine: FP8 casts and matmuls, Triton, an all-reduce")
    doctor.add_argument(
        "--burn",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="then repeat casts and products for so long; compare the results with the first ones, with plain torch "
        "and, under torchrun, across ranks",
    )
    doctor.set_defaults(run=_doctor)
    simulation = commands.add_parser(
        "simulate",
        help="predict the cost of syncs on many ranks, and list the assumptions",
        description="Predict the cost of the FP8 sync per step, and of two other ways to reduce amaxes.",
    )
    add_flags(simulation)
    simulation.set_defaults(run=_simulate)
    drawing = commands.add_parser(
        "report",
        help="draw a run's folder as one HTML file, or say where two runs part",
        description="Draw the folder of a run as one HTML file that loads nothing, while the job runs or afterwards.",
    )
    add_report_flags(drawing)
    drawing.set_defaults(run=_report)
    serving = commands.add_parser(
        "export",
        help="write a checkpoint's FP8 weights and scales as inference servers read them",
        description="Write the model of a DCP checkpoint with the FP8 bytes and scales that the job would multiply "
        "with in eval() after a resume on one rank. Nothing in the checkpoint is executed.",
    )
    add_export_flags(serving)
    serving.set_defaults(run=_export)
    verifying = commands.add_parser(
        "verify",
        help="compare a served model with the checkpoint or the certificate that it comes from",
        description="Compare every tensor of a served folder, and its config.json, with what fp8dist export makes of a "
        "checkpoint, or with a certificate. Nothing from either side is executed.",
    )
    add_verify_flags(verifying)
    verifying.set_defaults(run=_verify)
    live = commands.add_parser(
        "watch",
        help="show a running job: loss, soundness, slots near trouble, waits, events",
        description="Show a run from its folder, also while the job writes it. Without a terminal: lines.",
    )
    add_watch_flags(live)
    live.set_defaults(run=_watch)
    commands.add_parser("launch", help="start a training program on every rank of this node, and join other nodes")
    for command in (check, inspect, doctor, simulation, verifying):
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")


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
        raise _Usage("needs at least two paths to compare")
    if any(is_trace(path) for path in paths):
        return _check_traces(paths, options.json)
    with ExitStack() as stack:
        sources = [stack.enter_context(open_source(path)) for path in paths]
        families = {source.family: source.path for source in sources}
        if len(families) > 1:
            state, parameters = families["state"], families["parameters"]
            raise _Usage(f"{state} is FP8 state and {parameters} is a checkpoint: compare files of one kind")
        total = sum(map(bytes_in, sources))
        with _bar(total, options.json) as bar:
            report = compare_sources(sources, bar.update)
    _require_compared(report)
    _print(options.json, {**report.to_json(), "files": paths}, str(report))
    return _outcome(report)


def _check_traces(paths: list[str], as_json: bool) -> int:
    for path in paths:
        _require_trace(path)
    report = compare_traces(paths)
    _require_compared(report)
    _print(as_json, {**report.to_json(), "files": paths}, traces_text(report))
    return _outcome(report)


def _require_trace(path: str) -> None:
    """Raise _Usage if the path is a checkpoint, and CheckpointError if it is neither that nor a trace."""
    if not is_trace(path):
        open_source(path).close()
        raise _Usage(f"{path} is a checkpoint, and others are traces: compare files of one kind")


def _bar(total: int, hidden: bool) -> Any:
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
        raise _Usage("under torchrun each rank reads one path: give one PATH with {rank} in it")
    absent = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise _Usage(f"WORLD_SIZE is set but {absent[0]} is not: use torchrun, or unset WORLD_SIZE")
    dist.init_process_group("gloo")
    try:
        anchor = SyncGroup(dist.group.WORLD)  # type: ignore[arg-type]
        path = options.paths[0].replace("{rank}", str(anchor.rank))
        if any(anchor.gather(_seems_trace(path))):
            return _check_traces_across_ranks(path, anchor, options.json)
        with ExitStack() as stack:

            def build() -> Holdings:
                source = stack.enter_context(open_source(path))
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
                _print(options.json, report.to_json(), str(report))
        dist.barrier()  # A launcher kills all ranks as soon as one fails, so wait until the report is printed.
        return code
    finally:
        dist.destroy_process_group()


def _seems_trace(path: str) -> bool:
    with contextlib.suppress(CheckpointError):  # It is told later, on all ranks.
        return is_trace(path)
    return False


def _check_traces_across_ranks(path: str, group: SyncGroup, as_json: bool) -> int:
    """Compare one trace per rank. COLLECTIVE."""
    usage = ""
    try:
        _require_trace(path)
    except _Usage as error:
        usage = f"rank {group.rank}: {error}"
    except CheckpointError:  # ``compare_traces_of_ranks`` says it, on all ranks.
        pass
    found = [text for text in group.gather(usage) if text]
    if found:
        raise _Usage(found[0])
    try:
        report = compare_traces_of_ranks(path, group)
    except CheckpointError as error:
        if group.rank == 0:
            print(f"fp8dist check: {error}", file=sys.stderr)
        dist.barrier()  # As below.
        return UNREADABLE
    _require_compared(report)
    if group.rank == 0:
        _print(as_json, report.to_json(), traces_text(report))
    dist.barrier()
    return _outcome(report)


def _require_compared(report: DivergenceReport) -> None:
    """Raise _Usage if nothing was compared, so that empty files do not count as equal. Same result on all ranks."""
    if not (report.findings or any(report.compared.values())):
        raise _Usage("nothing to compare: none of the paths holds a tensor or a slot")


def _outcome(report: DivergenceReport) -> int:
    if any(f.kind == "error" for f in report.findings):
        return UNREADABLE
    return DIVERGED if report.diverged else CONSISTENT


# inspect, doctor, simulate, export, verify, watch -----------------------------------------------------


def _inspect(options: argparse.Namespace) -> int:
    with open_source(options.path) as source:
        inspection = inspect_source(source)
    _print(options.json, inspection.to_json(), str(inspection))
    return CONSISTENT


def _doctor(options: argparse.Namespace) -> int:
    examination = examine(burning=options.burn)
    if int(os.environ.get("RANK", "0")) == 0 or not examination.healthy:
        _print(options.json, examination.as_dict(), str(examination))
    return CONSISTENT if examination.healthy else DIVERGED


def _simulate(options: argparse.Namespace) -> int:
    try:
        report = simulate(options)
    except ConfigurationError as error:
        raise _Usage(str(error)) from error
    _print(options.json, report.to_json(), str(report))
    return CONSISTENT


def _report(options: argparse.Namespace) -> int:
    try:
        write_report(options)
    except ConfigurationError as error:
        raise _Usage(str(error)) from error
    return CONSISTENT


def _export(options: argparse.Namespace) -> int:
    try:
        print(export(options), flush=True)
    except ConfigurationError as error:
        raise _Usage(str(error)) from error
    return CONSISTENT


def _verify(options: argparse.Namespace) -> int:
    try:
        verification = verify(options, lambda total: _bar(total, options.json))
    except ConfigurationError as error:
        raise _Usage(str(error)) from error
    _require_compared(verification.report)
    _print(options.json, verification.to_json(), str(verification))
    return _outcome(verification.report)


def _watch(options: argparse.Namespace) -> int:
    try:
        watch(options)
    except ConfigurationError as error:
        raise _Usage(str(error)) from error
    except BrokenPipeError:  # The reader, such as "| head", closed the pipe.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (the interpreter closes it)
    return CONSISTENT
