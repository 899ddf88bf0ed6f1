"""``python -m fp8dist``."""

from __future__ import annotations

import sys

from fp8dist.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
