"""Report files of a run that stops because its ranks differ."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from fp8dist.errors import DivergenceError, LossDiverged
from tests.support.lab.failures import CheckpointFailed, CollectiveFailed

__all__ = ["ErrorFile", "forget_report"]


def forget_report(folder: Path) -> None:
    """Remove the report of an earlier run."""
    for name in ("divergence.txt", "divergence.json"):
        (folder / name).unlink(missing_ok=True)


class ErrorFile(ErrorHandler):
    """Writes torchelastic's error file. Its message is the full report of a divergence, or one line for other errors.

    torchrun prints the "py_callstack" of every rank. A traceback is useless here, because all ranks raise at the same
    boundary, and the report was already logged. So "py_callstack" is one short sentence.
    """

    def record_exception(self, e: BaseException) -> None:
        """Write the file, if torchrun requested one."""
        if not isinstance(e, (DivergenceError, LossDiverged, CollectiveFailed, CheckpointFailed)):
            super().record_exception(e)
            return
        said = str(e.report) if isinstance(e, DivergenceError) else str(e)
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path:
            extra = {"py_callstack": f"{type(e).__name__}: {e}", "timestamp": str(int(time.time()))}
            message = {"message": {"message": said, "extraInfo": extra}}
            Path(path).write_text(json.dumps(message), encoding="utf-8")
