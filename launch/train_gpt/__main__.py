"""``python -m launch.train_gpt``: run the example job."""

from __future__ import annotations

import sys

from launch.train_gpt.ranks import run
from launch.train_gpt.train import main

if __name__ == "__main__":
    run(main, sys.argv[1:])
