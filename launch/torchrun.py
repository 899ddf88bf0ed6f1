"""torchrun, but it exits as the first rank that failed did (torchrun itself exits with 1).

Started by torchrun.sh; the arguments are torchrun's.
"""

from __future__ import annotations

import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError
from torch.distributed.run import main

from options import FAILED_COLLECTIVE

__all__ = ["launch"]

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
    except (RendezvousClosedError, RendezvousConnectionError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"torchrun.py: another node has ended the job, or cannot be reached: {why}", file=sys.stderr, flush=True)
        return FAILED_COLLECTIVE
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
