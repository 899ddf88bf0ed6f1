"""``python -m launch.train_gpt.options FLAGS…``: check the flags. Prints one line and exits with 2 on a mistake."""

from __future__ import annotations

import os
import sys

from launch.train_gpt.data import BadInput
from launch.train_gpt.exits import exit_with
from launch.train_gpt.options.options import parse, prepare_input, require_usable_checkpoints

if __name__ == "__main__":
    try:
        given = parse(sys.argv[1:])
        prepare_input(given)
        if os.environ.get("NNODES", "1") == "1":  # With several nodes, this one may be rejoining a restarted job.
            require_usable_checkpoints(given)
    except BadInput as refused:
        exit_with(refused)
