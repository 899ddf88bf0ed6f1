"""The public names of the core. ``fp8dist`` imports this module when the first of them is used."""

from __future__ import annotations

from fp8dist import ddp, errors, fsdp
from fp8dist.checks.axes import Axes
from fp8dist.checks.events import Event
from fp8dist.checks.random_state import random_state
from fp8dist.checks.report import DivergenceReport
from fp8dist.checks.values import check_values
from fp8dist.common.divergence import Finding
from fp8dist.errors import (
    CheckpointError,
    ConfigurationError,
    DivergenceError,
    Fp8DistError,
    LossAlarm,
    LossDiverged,
    ManifestMismatchError,
    NotAModelError,
    SyncError,
    UnknownArgumentError,
)
from fp8dist.job.coverage import Coverage, CoverageRow
from fp8dist.job.manager import StateManager, Verified, get_manager
from fp8dist.job.model_check import check
from fp8dist.job.preparation import prepare, restore
from fp8dist.job.slot_state import SlotState
from fp8dist.modules.fp8_experts import FP8Experts
from fp8dist.modules.grouped_linear import grouped_linear
from fp8dist.modules.overrides import first_and_last
from fp8dist.state.cause import Cause
from fp8dist.state.fallback import Fallback
from fp8dist.state.recipe import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    NVFP4Scaling,
    Recipe,
    RowwiseScaling,
)
from fp8dist.state.roll_call import Attendance, roll_call
from fp8dist.state.slots import Slot
from fp8dist.state.statistics import ScaleJump, SlotStatistics
from fp8dist.state.watch import Observation, RankTimes

__all__ = [
    "Attendance",
    "Axes",
    "BlockScaling",
    "Cause",
    "CheckpointError",
    "ConfigurationError",
    "Coverage",
    "CoverageRow",
    "CurrentScaling",
    "DelayedScaling",
    "DivergenceError",
    "DivergenceReport",
    "Event",
    "FP8Experts",
    "Fallback",
    "Finding",
    "Fp8DistError",
    "LossAlarm",
    "LossDiverged",
    "MXFP8Scaling",
    "ManifestMismatchError",
    "NVFP4Scaling",
    "NotAModelError",
    "Observation",
    "RankTimes",
    "Recipe",
    "RowwiseScaling",
    "ScaleJump",
    "Slot",
    "SlotState",
    "SlotStatistics",
    "StateManager",
    "SyncError",
    "UnknownArgumentError",
    "Verified",
    "check",
    "check_values",
    "ddp",
    "errors",
    "first_and_last",
    "fsdp",
    "get_manager",
    "grouped_linear",
    "prepare",
    "random_state",
    "restore",
    "roll_call",
]
