"""DeepSpeed: ``attach`` ties a manager to the engine that ``deepspeed.initialize`` returns."""

from __future__ import annotations

from typing import Any

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.integrations.calls import require_steps_of
from fp8dist.integrations.stacks import FP8Steps, install, state_of_all_ranks
from fp8dist.job.manager import Internals
from fp8dist.state.groups import has_base

try:
    from deepspeed import DeepSpeedEngine
except ImportError as error:
    raise ImportError(install("DeepSpeed", "deepspeed")) from error

__all__ = ["attach"]

KEY = "fp8dist"
"""The FP8 state in the client state of a checkpoint."""


def attach(manager: fp8dist.StateManager, engine: Any) -> None:
    """Tie the manager of a prepared model to the engine that trains it. COLLECTIVE.

    From now on an FP8 step ends with each ``engine.step()`` that updates parameters. Steps that DeepSpeed skips because
    gradients overflow do not count. ``engine.save_checkpoint`` and ``load_checkpoint`` include the FP8 state.

    Args:
        manager: of ``fp8dist.prepare(model, group=…)``, called before ``deepspeed.initialize``.
        engine: what ``deepspeed.initialize`` returned first. ZeRO stages 0 to 3, without pipelines.

    Raises:
        ConfigurationError: the engine holds another model, something is attached or loaded already, or DeepSpeed is
            used in a way that is not supported.
        ManifestMismatchError: see ``StateManager.attach``.
    """
    tie(manager, engine, loads=True)


def tie(manager: fp8dist.StateManager, engine: Any, loads: bool) -> None:
    """See ``attach``. ``loads``: False for a caller that loads the FP8 state itself: then the engine may have loaded a
    checkpoint. COLLECTIVE."""
    _require_engine(engine, manager)
    if Internals(manager).cycle.job.attached:
        raise ConfigurationError(
            "the manager is attached already: leave out manager.attach(), and attach an engine once"
        )
    if loads and not isinstance(engine, _EngineSteps) and engine.loaded_checkpoint_dp_world_size is not None:
        raise ConfigurationError("attach before engine.load_checkpoint(), which then loads the FP8 state, too")
    manager.attach(engine, boundary="manual")
    Internals(manager).cycle.reuse_casts(True)  # Nothing but the engine's step and its load_checkpoint changes weights.
    engine.fp8_calls = False
    require_steps_of(engine, manager)
    _EngineSteps.add_to(engine, manager)


class _EngineSteps(FP8Steps):
    """Added to an engine's class. ``fp8_calls``: True while it calls the model."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self.fp8_calls = True
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.fp8_calls = False

    def destroy(self: Any) -> None:
        """Destroy the engine, and detach from it: the model may get another one. COLLECTIVE."""
        manager = self.fp8_manager
        if Internals(manager).attachment.module is self:  # Not so when the engine is collected as garbage.
            manager.detach()
        super().destroy()  # type: ignore[misc]

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        """Take a step, and end the FP8 step if parameters were due. COLLECTIVE."""
        due = self.is_gradient_accumulation_boundary()  # Counts micro-batches, so the answer is another one afterwards.
        super().step(*args, **kwargs)  # type: ignore[misc]
        if due:
            self.end_fp8_step(self.was_step_applied())

    def save_checkpoint(self: Any, save_dir: Any, tag: Any = None, client_state: Any = None, **options: Any) -> Any:
        """Save, with the FP8 state in the client state. COLLECTIVE."""
        state = state_of_all_ranks(self.fp8_manager)
        return super().save_checkpoint(save_dir, tag, {**(client_state or {}), KEY: state}, **options)  # type: ignore[misc]

    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Load, and take the FP8 state out of the client state. COLLECTIVE."""
        path, client_state = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        if path is not None:
            self.load_fp8(client_state.pop(KEY, None), path)
        return path, client_state


def _require_engine(engine: Any, manager: fp8dist.StateManager) -> None:
    """Raise ConfigurationError for what cannot be attached to."""
    if not isinstance(engine, DeepSpeedEngine):
        raise ConfigurationError(
            "attach(manager, engine) needs the engine that deepspeed.initialize() returns first, "
            f"got {type(engine).__name__}"
        )
    offload = engine.zero_offload_param()
    unsupported = {
        "pipelines": has_base(engine, "PipelineEngine"),
        "the hybrid engine": has_base(engine, "DeepSpeedHybridEngine"),
        "ZenFlow": engine.zenflow,
        "MiCS": engine.mics_shard_size() > 0,
        "AutoTP": engine.autotp_size() > 0,
        "parameters on NVMe": offload is not None and offload.device == "nvme",
        # Scalers that do not tell the engine which steps they skip.
        "Apex's AMP": engine.amp_enabled(),
        "torch_autocast in float16 without ZeRO": engine.torch_autocast_z0_gradscaler is not None,
        "fp8_all_gather=True": manager.settings.fp8_all_gather,
    }
    found = [what for what, used in unsupported.items() if used]
    if found:
        raise ConfigurationError(f"fp8dist does not support {found[0]} with DeepSpeed: leave it out")
