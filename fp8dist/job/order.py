"""The calls that each phase of a manager refuses, and the error messages for calls out of order.

A phase is the manager's tie to its job (``Tie``), plus the activities in progress (``Activity``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from fp8dist.errors import ConfigurationError
from fp8dist.modules.job_state import Activity, Tie

_AFTER_STEP = "a sync is in flight until a step that is not skipped: call it after that step"
_AGAIN = "call prepare() again"
_ATTACH_FIRST = "call attach() first, which connects the ranks that share this state"
_LEAVE = "leave it first"
_LEAVE_JOIN = "ranks without data would not take part: call it outside of the context"
_LEAVE_JOIN_TOO = "ranks without data would wait for this one: call it outside of the context"
_OUTSIDE_GRAPH = "call it before the capture, or after it"
_REPLAYED = "each replay would do it again: call it before the capture, or after it"
_IN_REPLAY = "what it changes could not be put back: the replayed step(batch) runs a forward and a backward only"

_UNSHARED_ONLY = (Tie.PREPARED, Tie.DETACHED)
"""Phases in which a manager may take steps only if no other rank shares its state."""

_Refused = Mapping[Tie | Activity, str]
"""By phase that refuses a call: what to do instead."""


def _also(*tables: _Refused) -> _Refused:
    return MappingProxyType({phase: advice for table in tables for phase, advice in table.items()})


_RESTORED = _also({Tie.RESTORED: _AGAIN})
_UNTIED = _also({Tie.PREPARED: _ATTACH_FIRST, Tie.DETACHED: _ATTACH_FIRST}, _RESTORED)
_CALIBRATING = _also({Activity.CALIBRATING: _LEAVE})
_JOINED = _also({Activity.JOINED: _LEAVE_JOIN})
_EAGER_ONLY = _also({Activity.CAPTURING: _OUTSIDE_GRAPH, Activity.REPLAYING: _IN_REPLAY})
_ONCE = _also({Activity.CAPTURING: _REPLAYED, Activity.REPLAYING: _IN_REPLAY})
_UNDONE = _also(_RESTORED, _CALIBRATING, {Activity.JOINED: _LEAVE_JOIN_TOO}, _EAGER_ONLY)
"""What undoes ``attach`` or ``prepare`` is refused there."""

_REFUSED: Mapping[str, _Refused] = MappingProxyType(
    {
        "attach()": _also(_RESTORED, _CALIBRATING, _JOINED, _EAGER_ONLY),
        "detach()": _also(_UNDONE, {Activity.IN_STEP: _AFTER_STEP}),
        "restore()": _UNDONE,
        "a step": _also(
            _UNTIED,
            {
                Activity.CALIBRATING: "a calibration changes no parameter: step after it",
                Activity.REPLAYING: _IN_REPLAY,
            },
        ),
        "comm_hook": {
            Tie.PREPARED: _ATTACH_FIRST,
            Activity.JOINED: "ranks without data do not launch from it: leave the hook out",
            Activity.CAPTURING: (
                "the graph may end before the step does: leave the hook out; the sync is then in the graph with the "
                "optimizer's step"
            ),
            Activity.REPLAYING: _IN_REPLAY,
        },
        "comm_hook(manager)": _RESTORED,
        "poll()": _also(_UNTIED, _EAGER_ONLY),
        "check()": _also(_UNTIED, _JOINED, _EAGER_ONLY),
        "calibrate()": _also(
            _UNTIED, {Activity.CALIBRATING: "one calibration takes any number of batches"}, _JOINED, _EAGER_ONLY
        ),
        "replay()": _also(_UNTIED, _CALIBRATING, _JOINED, _EAGER_ONLY),
        "refresh_weights()": _also(_UNTIED, _JOINED, _ONCE),
        "export()": _also({Tie.PREPARED: _ATTACH_FIRST}, _RESTORED, _CALIBRATING, _JOINED, _EAGER_ONLY),
        "watch()": _also({Tie.ATTACHED: "call it, or make the Recorder, before attach()"}, _RESTORED),
        "set_precision()": _also(_RESTORED, _ONCE),
        "set_scale()": _also(_RESTORED, _ONCE),
        "swapped_weights()": _also(_RESTORED, _EAGER_ONLY),
        "loading state": _also(_RESTORED, _ONCE),
        "saving state": {Activity.CAPTURING: _OUTSIDE_GRAPH},
    }
)
"""The phases that refuse each call, and what to do instead. All other phases allow it."""


def require_order(call: str, tie: Tie, activities: Iterable[Activity], shared: bool) -> None:
    """Raise ConfigurationError if the phase refuses a call. The message names both, and says what to do.

    Args:
        shared: True if several ranks share the state. Otherwise, the manager may step without ``attach``.
    """
    refused = _REFUSED[call]
    phases: list[Tie | Activity] = [*activities]
    if shared or tie not in _UNSHARED_ONLY:
        phases.append(tie)
    for phase in phases:
        if phase in refused:
            raise ConfigurationError(f"{call} {phase.value}: {refused[phase]}")
