"""torchrun, but it exits as the first rank that failed did (torchrun itself exits with 1)."""

from __future__ import annotations

import re
import signal
import sys

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.run import main

from fp8dist.launcher.environment import BadVariable
from fp8dist.launcher.interface import FAILED_COLLECTIVE, Unreachable

__all__ = ["run"]

MISSED = (RendezvousClosedError, RendezvousConnectionError, RendezvousTimeoutError, DistError)
"""What torchrun raises when another node is missing. The last comes from its store."""

CONSEQUENCES = (FAILED_COLLECTIVE, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of ranks that ended because another had."""

UNCAUGHT = 1
"""Exit code of a Python program after an uncaught exception: perhaps a collective that missed a failed rank."""


def run(arguments: list[str]) -> int:
    """Run this node's part of the job to its end.

    Args:
        arguments: torchrun's.

    Returns:
        The exit status: 0, or that of the rank that failed first; 128 + n for a rank that signal n killed.

    Raises:
        BadVariable: MASTER_PORT is in use on this node.
        Unreachable: another node has ended the job, or did not come.
    """
    try:
        main(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        # torchrun has seen all these failures at once, so their times hardly tell which was first.
        code = min(error.failures.values(), key=_distance_from_cause).exitcode
        return code if code > 0 else 128 - code
    except MISSED as error:
        cause = error.__cause__ or error
        first_line = (str(cause).splitlines() or [""])[0]  # Frames of C++ may follow.
        if "EADDRINUSE" in first_line:  # Node 0 listens there.
            port = re.search(r"port: (\d+)", first_line)
            which = f"MASTER_PORT {port[1]}" if port else "MASTER_PORT"
            raise BadVariable(f"{which} is in use on this node: set another on all nodes") from None
        why = f"{type(cause).__name__}: {first_line}".rstrip(": ")
        raise Unreachable(f"another node has ended the job, or cannot be reached: {why}") from None
    return 0


def _distance_from_cause(failure: ProcessFailure) -> tuple[int, int]:
    """Sorts failures, the likeliest cause first: a rank that missed another has less to tell than the missed one."""
    if failure.exitcode in CONSEQUENCES:
        return 2, failure.timestamp
    return int(failure.exitcode == UNCAUGHT), failure.timestamp
