"""The public names of this room."""

from __future__ import annotations

from fp8dist.replays.buffer import ReplayBuffer
from fp8dist.replays.model_replay import replay
from fp8dist.replays.replay_report import Replayed, ReplayFinding, ReplayReport
from fp8dist.replays.triggers import replay_on

__all__ = ["ReplayBuffer", "ReplayFinding", "ReplayReport", "Replayed", "replay", "replay_on"]
