"""Which calls fit which phase of a manager's life, and what a user reads who calls something out of order.

A phase is how the manager is tied to its job (``Tie``), and what is under way (``Activity``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from fp8dist.errors import ConfigurationError
from fp8dist.modules.job_state import Activity, Tie

__all__ = ["require_order"]

_AFTER_STEP = "a sync is under way, which that step ends: call it after one that is not skipped"
_AGAIN = "call prepare() again"
_ATTACH_FIRST = "call attach() first, which ties the ranks that share this state"
_LEAVE = "leave it first"
_LEAVE_JOIN = "ranks without data would not come: call it outside of the context"
_OUTSIDE_GRAPH = "call it before the capture, or after it"
_REPLAYED = "each replay would do it again: call it before the capture, or after it"

_UNSHARED_ONLY = (Tie.PREPARED, Tie.DETACHED)
"""Where only a manager whose state no other rank shares may take steps."""

_REFUSED: Mapping[str, Mapping[Tie | Activity, str]] = MappingProxyType(
    {
        "attach()": {
            Tie.RESTORED: _AGAIN,
            Activity.CALIBRATING: _LEAVE,
            Activity.JOINED: _LEAVE_JOIN,
            Activity.CAPTURING: _OUTSIDE_GRAPH,
        },
        "detach()": {
            Tie.RESTORED: _AGAIN,
            Activity.IN_STEP: _AFTER_STEP,
            Activity.CALIBRATING: _LEAVE,
            Activity.JOINED: "ranks without data would wait for this one: call it outside of the context",
            Activity.CAPTURING: _OUTSIDE_GRAPH,
        },
        "restore()": {
            Tie.RESTORED: _AGAIN,
            Activity.CALIBRATING: _LEAVE,
            Activity.JOINED: "ranks without data would wait for this one: call it outside of the context",
            Activity.CAPTURING: _OUTSIDE_GRAPH,
        },
        "a step": {
            Tie.PREPARED: _ATTACH_FIRST,
            Tie.DETACHED: _ATTACH_FIRST,
            Tie.RESTORED: _AGAIN,
            Activity.CALIBRATING: "it changes no parameter: step after it",
        },
        "comm_hook": {
            Tie.PREPARED: _ATTACH_FIRST,
            Activity.JOINED: "ranks without data do not launch from it: leave the hook out",
            Activity.CAPTURING: (
                "the graph may end before the step does: leave the hook out; the sync is then in the graph with the "
                "optimizer's step"
            ),
        },
        "comm_hook(manager)": {Tie.RESTORED: _AGAIN},
        "poll()": {
            Tie.PREPARED: _ATTACH_FIRST,
            Tie.DETACHED: _ATTACH_FIRST,
            Tie.RESTORED: _AGAIN,
            Activity.CAPTURING: _OUTSIDE_GRAPH,
        },
        "check()": {
            Tie.PREPARED: _ATTACH_FIRST,
            Tie.DETACHED: _ATTACH_FIRST,
            Tie.RESTORED: _AGAIN,
            Activity.JOINED: _LEAVE_JOIN,
            Activity.CAPTURING: _OUTSIDE_GRAPH,
        },
        "calibrate()": {
            Tie.PREPARED: _ATTACH_FIRST,
            Tie.DETACHED: _ATTACH_FIRST,
            Tie.RESTORED: _AGAIN,
            Activity.CALIBRATING: "one calibration takes any number of batches",
            Activity.JOINED: _LEAVE_JOIN,
            Activity.CAPTURING: _OUTSIDE_GRAPH,
        },
        "refresh_weights()": {
            Tie.PREPARED: _ATTACH_FIRST,
            Tie.DETACHED: _ATTACH_FIRST,
            Tie.RESTORED: _AGAIN,
            Activity.JOINED: _LEAVE_JOIN,
            Activity.CAPTURING: _REPLAYED,
        },
        "watch()": {
            Tie.ATTACHED: "it comes before attach(), where ranks agree about it",
            Tie.RESTORED: _AGAIN,
        },
        "set_precision()": {Tie.RESTORED: _AGAIN, Activity.CAPTURING: _REPLAYED},
        "set_scale()": {Tie.RESTORED: _AGAIN, Activity.CAPTURING: _REPLAYED},
        "swapped_weights()": {Tie.RESTORED: _AGAIN, Activity.CAPTURING: _OUTSIDE_GRAPH},
        "loading state": {Tie.RESTORED: _AGAIN, Activity.CAPTURING: _REPLAYED},
        "saving state": {Activity.CAPTURING: _OUTSIDE_GRAPH},
    }
)
"""By call: the phases in which it is refused, and what to do instead. All else is allowed."""


def require_order(call: str, tie: Tie, activities: Iterable[Activity], shared: bool) -> None:
    """Raise ConfigurationError where a call does not fit the phase: names both, and says what to do.

    Args:
        shared: several ranks share the state. A manager whose state is its own may step without ``attach``.
    """
    refused = _REFUSED[call]
    phases: list[Tie | Activity] = [*activities]
    if shared or tie not in _UNSHARED_ONLY:
        phases.append(tie)
    for phase in phases:
        if phase in refused:
            raise ConfigurationError(f"{call} {phase.value}: {refused[phase]}")
