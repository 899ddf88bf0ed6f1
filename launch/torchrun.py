"""torchrun, but it exits as the first rank that failed did (torchrun itself exits with 1).

Started by torchrun.sh; the arguments are torchrun's.
"""

from __future__ import annotations

import re
import signal
import sys

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.run import main

from launch.train_gpt.data import BadInput
from launch.train_gpt.exits import FAILED_COLLECTIVE, exit_with

__all__ = ["launch"]

MISSED = (RendezvousClosedError, RendezvousConnectionError, RendezvousTimeoutError, DistError)
"""What torchrun raises where another node is missing. The last is of its store."""

CONSEQUENCES = (FAILED_COLLECTIVE, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of ranks that ended because another had."""


def launch(arguments: list[str]) -> int:
    """Run the job to its end; the exit status. A signal counts as shells count it."""
    try:
        main(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        _, first = error.get_first_failure()
        # A rank that misses another may be seen before it, in the same second: who was missed has more to tell.
        causes = [failure.exitcode for failure in error.failures.values() if failure.exitcode not in CONSEQUENCES]
        code = causes[0] if causes and first.exitcode in CONSEQUENCES else first.exitcode
        return code if code > 0 else 128 - code
    except MISSED as error:
        cause = error.__cause__ or error
        first_line = (str(cause).splitlines() or [""])[0]  # Frames of C++ may follow.
        if "EADDRINUSE" in first_line:  # Of the store that node 0 has.
            port = re.search(r"port: (\d+)", first_line)
            which = f"MASTER_PORT {port[1]}" if port else "MASTER_PORT"
            exit_with(BadInput(f"{which} is in use on this node: set another on all nodes"))
        why = f"{type(cause).__name__}: {first_line}".rstrip(": ")
        missing = "another node has ended the job, or cannot be reached"
        print(f"torchrun.py: {missing}: {why}", file=sys.stderr, flush=True)
        return FAILED_COLLECTIVE
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
