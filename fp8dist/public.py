"""The public names of fp8dist. ``fp8dist`` imports this module when the first of them is used."""

from __future__ import annotations

from fp8dist import ddp, errors, fsdp
from fp8dist.checkpoint.transformer_engine import ImportReport
from fp8dist.consistency.checker import Event, Replayed
from fp8dist.consistency.replay_report import ReplayFinding, ReplayReport
from fp8dist.consistency.report import DivergenceReport
from fp8dist.coverage import Coverage, CoverageRow
from fp8dist.divergence import Finding
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
from fp8dist.manager import StateManager, get_manager
from fp8dist.model_check import check
from fp8dist.model_replay import replay
from fp8dist.model_trace import trace
from fp8dist.modules.fp8_experts import FP8Experts
from fp8dist.modules.grouped_linear import grouped_linear
from fp8dist.modules.overrides import first_and_last
from fp8dist.monitoring.cause import Cause
from fp8dist.monitoring.exporter import Exporter
from fp8dist.monitoring.loss_guard import LossGuard
from fp8dist.monitoring.monitor import Monitor, ScaleJump, SlotStatistics
from fp8dist.monitoring.recorder import Recorder
from fp8dist.monitoring.watch import Observation, RankTimes
from fp8dist.preparation import prepare, restore
from fp8dist.recipe import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from fp8dist.replays.buffer import ReplayBuffer
from fp8dist.replays.triggers import replay_on
from fp8dist.state.fallback import Fallback
from fp8dist.state.slots import Slot
from fp8dist.sync.roll_call import Attendance, roll_call

__all__ = [
    "Attendance",
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
    "Exporter",
    "FP8Experts",
    "Fallback",
    "Finding",
    "Fp8DistError",
    "ImportReport",
    "LossAlarm",
    "LossDiverged",
    "LossGuard",
    "ManifestMismatchError",
    "Monitor",
    "NotAModelError",
    "Observation",
    "RankTimes",
    "Recipe",
    "Recorder",
    "ReplayBuffer",
    "ReplayFinding",
    "ReplayReport",
    "Replayed",
    "RowwiseScaling",
    "ScaleJump",
    "Slot",
    "SlotStatistics",
    "StateManager",
    "SyncError",
    "UnknownArgumentError",
    "check",
    "ddp",
    "errors",
    "first_and_last",
    "fsdp",
    "get_manager",
    "grouped_linear",
    "prepare",
    "replay",
    "replay_on",
    "restore",
    "roll_call",
    "trace",
]
