"""torchrun, but it exits as the first rank that failed did (torchrun itself exits with 1).

Started by torchrun.sh; the arguments are torchrun's.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

__all__ = ["launch"]


def launch(arguments: list[str]) -> int:
    """Run the job to its end; the exit status. A signal counts as shells count it."""
    try:
        main(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
