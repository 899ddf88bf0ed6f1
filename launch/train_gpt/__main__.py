"""``python -m launch.train_gpt``: run the example job."""

from __future__ import annotations

import sys

from launch.train_gpt.job import start
from launch.train_gpt.ranks import leave

if __name__ == "__main__":
    leave(start(sys.argv[1:]))
