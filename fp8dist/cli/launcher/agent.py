"""Run torchrun, and return the exit status of the first rank that failed (torchrun itself exits with 1)."""

from __future__ import annotations

import re
import signal
import sys

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.run import main

from fp8dist.cli.launcher.environment import BadVariable
from fp8dist.cli.launcher.interface import FAILED_COLLECTIVE, Unreachable

MISSED = (RendezvousClosedError, RendezvousConnectionError, RendezvousTimeoutError, DistError)
"""Exceptions of torchrun if another node is missing. The last one comes from its store."""

CONSEQUENCES = (FAILED_COLLECTIVE, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of ranks that ended because another rank had ended."""

UNCAUGHT = 1
"""Exit code of a Python program after an uncaught exception, possibly in a collective with a failed rank."""


def run(arguments: list[str]) -> int:
    """Run this node's part of the job to its end.

    Args:
        arguments: the arguments of torchrun.

    Returns:
        The exit status: 0, or that of the rank that failed first; 128 + n if signal n killed that rank or this process.

    Raises:
        BadVariable: MASTER_PORT is in use on this node.
        Unreachable: another node ended the job or did not join.
    """
    try:
        main(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        # torchrun sees these failures in one poll, so their timestamps do not reliably show which came first.
        code = min(error.failures.values(), key=_distance_from_cause).exitcode
        return code if code > 0 else 128 - code
    except SignalException as stopped:  # torchrun has ended the ranks.
        return 128 + int(stopped.sigval)
    except MISSED as error:
        cause = error.__cause__ or error
        first_line = (str(cause).splitlines() or [""])[0]  # A C++ stack trace may follow.
        if "EADDRINUSE" in first_line:  # This is node 0, which listens on MASTER_PORT.
            port = re.search(r"port: (\d+)", first_line)
            which = f"MASTER_PORT {port[1]}" if port else "MASTER_PORT"
            raise BadVariable(f"{which} is in use on this node: set another port on all nodes") from None
        why = f"{type(cause).__name__}: {first_line}".rstrip(": ")
        raise Unreachable(f"another node has ended the job, or cannot be reached: {why}") from None
    return 0


def _distance_from_cause(failure: ProcessFailure) -> tuple[int, int]:
    """Return a sort key that puts the likeliest cause first, and ranks that only missed another rank last."""
    if failure.exitcode in CONSEQUENCES:
        return 2, failure.timestamp
    return int(failure.exitcode == UNCAUGHT), failure.timestamp
