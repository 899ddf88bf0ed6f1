"""Exporter: what a run calls to pass its numbers on to another tool."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from fp8dist.state.statistics import SlotStatistics

logger = logging.getLogger("fp8dist")


@runtime_checkable
class Exporter(Protocol):
    """Passes the numbers and events of a run on to another tool. ``fp8dist.exporters`` has six of them.

    Any object with these three methods is one; it need not derive from this class. One rank makes all calls, one at a
    time and in the order of the run; after a resume, steps may repeat. Calls are local, and the training waits for
    them: return fast, and buffer what is slow to send. An exporter that raises does not end the training: it is named
    in one warning, and called no more.

    An exporter may be made on every rank. So make nothing that only one rank may have, such as a file or a port, before
    the first call.
    """

    def write(self, step: int, numbers: Mapping[str, float], slots: Sequence[SlotStatistics]) -> None:
        """Take the numbers of a step.

        Args:
            step: number of the optimizer step.
            numbers: numbers of the step by name, as in metrics.jsonl. NaN and infinities occur. May be empty.
            slots: the statistics of all slots in this step, if they were observed. Otherwise empty.
        """

    def event(self, event: Mapping[str, Any]) -> None:
        """Take an event: ``step``, ``time`` (unix seconds), ``kind`` and the fields of this kind.

        Kinds may be added. Leave out those that you do not know.
        """

    def close(self) -> None:
        """Send what is buffered, and release files and ports. No call follows. May be the only call."""


class Exporters:
    """Calls several exporters, one after the other. One that raises is named in a warning, and called no more."""

    def __init__(self, exporters: Sequence[Exporter]) -> None:
        self._exporters = list(exporters)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a method of each."""
        for exporter in tuple(self._exporters):
            try:
                getattr(exporter, name)(*arguments)
            except Exception as error:  # It may raise anything, and must not end the training.
                self._exporters.remove(exporter)
                what = f"{type(exporter).__name__}.{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                logger.warning("fp8dist: an exporter is left out from now on: %s", what)

    def close(self) -> None:
        """Close each, and call none any more."""
        self.call("close")
        self._exporters.clear()
