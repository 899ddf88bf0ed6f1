"""``fp8dist watch``: a running job on the terminal, or as lines."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8dist.errors import ConfigurationError
from fp8dist.runs.report.live import LiveRun
from fp8dist.runs.report.screen import one_line, screen, stuck
from fp8dist.runs.run_format import HEADER, METRICS

_NO_RICH = "fp8dist watch: for a screen in place of lines: pip install 'fp8dist[live]'"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("path", metavar="RUN", help="folder of the run, which fp8dist.Recorder writes")
    parser.add_argument("--once", action="store_true", help="print the present state, and end")
    parser.add_argument("--wait", action="store_true", help="wait for a run that has not started yet")
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="SECONDS", help="seconds between updates (default: 2)"
    )


def watch(options: argparse.Namespace) -> None:
    """Show the run until Ctrl-C or SIGTERM; without a terminal until its end. ``--once``: show it once.

    Raises:
        ConfigurationError: the folder holds no run, or a flag has no valid value.
    """
    if not 0.05 <= options.every <= 86_400:
        raise ConfigurationError(f"--every is {options.every:g}: must be from 0.05 to 86400 seconds")
    path, rich = Path(options.path), importlib.util.find_spec("rich") is not None
    try:
        with _ended_by_sigterm():
            run = _opened(path, options)
            if not rich and sys.stdout.isatty():
                print(_NO_RICH, file=sys.stderr)
            if options.once:
                _print_once(run, rich)
            elif rich and sys.stdout.isatty():
                _show(run, options.every)
            else:
                _print_lines(run, options.every)
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # The reader, such as "| head", closed the pipe.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (the interpreter closes it)


def _opened(path: Path, options: argparse.Namespace) -> LiveRun:
    while options.wait and not options.once and not ((path / HEADER).exists() or (path / METRICS).exists()):
        time.sleep(min(1.0, options.every))
    run = LiveRun(path)
    run.read()
    return run


def _print_once(run: LiveRun, rich: bool) -> None:
    if not rich:
        print(one_line(run), flush=True)
        return
    from rich.console import Console

    console = Console(highlight=False)
    # The height of a terminal does not matter to what scrolls.
    for line in screen(run, console.width, 60)[:-1]:
        console.print(line, soft_wrap=True)


def _show(run: LiveRun, every: float) -> None:
    """Show the run on the whole terminal. Always restores it."""
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False)

    def view() -> Any:
        size = shutil.get_terminal_size()
        return Group(*screen(run, size.columns, size.lines))

    with Live(console=console, screen=True, auto_refresh=False, get_renderable=view) as live:
        while True:
            live.refresh()
            time.sleep(every)
            run.read()


def _print_lines(run: LiveRun, every: float) -> None:
    """Print one line per update, if anything is new, until the run ends."""
    lines, events, stood = -1, 0, False
    while True:
        if run.line_count != lines or bool(stuck(run)) != stood:
            print(one_line(run, events), flush=True)
            lines, events, stood = run.line_count, run.event_count, bool(stuck(run))
        if run.ended:
            return
        time.sleep(every)
        run.read()


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End by SIGTERM and SIGHUP as by Ctrl-C, so that the terminal is restored."""

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]  # Not with nohup.
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
