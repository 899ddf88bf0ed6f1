"""``python -m tests.support.lab``: run the lab."""

from __future__ import annotations

import sys

from launch.train_gpt.ranks import run
from tests.support.lab.job import start

if __name__ == "__main__":
    run(start, sys.argv[1:])
