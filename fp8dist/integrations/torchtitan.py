"""torchtitan: ``with_fp8`` around the ModelSpec of a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.integrations.stacks import RunLog, RunTarget, caller, install, world
from fp8dist.state.recipe import Recipe

try:
    from torchtitan.components.metrics import BaseLogger
    from torchtitan.components.quantization.utils import has_quantization
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise ImportError(install("torchtitan", "torchtitan")) from error

__all__ = ["with_fp8"]

BACKEND = "partial_dtensor"
"""The one of torchtitan's SPMD backends that was tested."""

PREFIX = "fp8dist."
"""Of the keys of the FP8 state in the optimizers' part of a checkpoint."""


def with_fp8(spec: ModelSpec, recipe: Recipe | None = None, run: RunTarget | None = None, **options: Any) -> ModelSpec:
    """Return the spec of the same model in FP8: give it to ``Trainer.Config(model_spec=…)``. Local.

    The model is prepared before torchtitan parallelizes it, and attached once its optimizers exist. Checkpoints of
    torchtitan contain the FP8 state, next to that of the optimizers, and a run that resumes loads it. A divergence ends
    ``Trainer.train()`` with DivergenceError on all ranks. ``fp8dist.get_manager(trainer.model_parts[0])`` is the
    manager.

    Args:
        recipe, options: as for ``fp8dist.prepare``. ``group``: by default, all ranks.
        run: the folder of the run for ``fp8dist report``, which gets what torchtitan logs until ``Trainer.close()``, or
            a function that returns the Recorder of a manager. None: nothing is recorded.

    Raises:
        ConfigurationError: ``spec`` is no ModelSpec, or has another FP8 library. As the Trainer is made: pipeline
            parallelism, another SPMD backend than "partial_dtensor", CUDA graphs, or ``with_fp8`` twice.
    """
    if not isinstance(spec, ModelSpec):
        raise ConfigurationError(
            f"with_fp8: expected a ModelSpec, such as config.model_spec; got {type(spec).__name__}"
        )
    if has_quantization(spec.model):
        raise ConfigurationError("with_fp8: the spec has one of torchtitan's own quantization converters: leave it out")

    def parallelize(model: nn.Module, **given: Any) -> nn.Module:
        _require_supported(**given)
        fp8dist.prepare(model, recipe, **{"group": world(), **options})
        parallelized: nn.Module = spec.parallelize_fn(model, **given)
        return parallelized

    def attach(optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
        if spec.post_optimizer_build_fn is not None:
            spec.post_optimizer_build_fn(optimizers, model_parts, parallel_dims)
        manager = _manager_of(model_parts[0])
        if run is not None:
            trainer, _ = caller(Trainer)  # Its hook is not given what logs.
            trainer.metrics_processor.logger = _TitanLog(RunLog(run, manager), trainer.metrics_processor.logger)
        # Without the comparison of what ranks start with: torchtitan loads its checkpoint later.
        manager.attach(model_parts[0], optimizer=list(optimizers), start=None)
        optimizers.state_dict = _saving(optimizers.state_dict, manager)
        optimizers.load_state_dict = _loading(optimizers.load_state_dict, manager)

    return dataclasses.replace(spec, parallelize_fn=parallelize, post_optimizer_build_fn=attach)


def _require_supported(parallel_dims: Any, training: Any, **_: Any) -> None:
    if parallel_dims.pp_enabled:
        raise ConfigurationError(
            "with_fp8: torchtitan's pipeline runs each stage once on uninitialised memory, whose amaxes would be "
            "recorded: set parallelism.pipeline_parallel_degree=1"
        )
    if parallel_dims.spmd_backend != BACKEND:
        raise ConfigurationError(
            f'with_fp8: expected parallelism.spmd_backend="{BACKEND}", found "{parallel_dims.spmd_backend}"'
        )
    if not training.disable_cuda_graphs:
        raise ConfigurationError(
            "with_fp8: torchtitan captures CUDA graphs without manager.poll(): set training.disable_cuda_graphs=True"
        )


def _manager_of(model: nn.Module) -> fp8dist.StateManager:
    try:
        return fp8dist.get_manager(model)
    except ConfigurationError as error:
        raise ConfigurationError(
            "with_fp8: the spec's parallelize_fn was not called, or was replaced: replace it before with_fp8, and make "
            "seed checkpoints from the spec without with_fp8"
        ) from error


class _TitanLog(BaseLogger):
    """Passes on what is logged, to the logger that was there as well."""

    def __init__(self, log: RunLog, other: BaseLogger) -> None:
        self._log, self._other = log, other

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Record numbers. Local."""
        self._log.log(metrics, step)
        self._other.log(metrics, step)

    def close(self) -> None:
        """End the run. Local."""
        self._log.close()
        self._other.close()


def _saving(state_dict: Callable[[], dict[str, Any]], manager: fp8dist.StateManager) -> Callable[[], dict[str, Any]]:
    def both() -> dict[str, Any]:
        return {**state_dict(), **{PREFIX + key: state for key, state in manager.state_dict().items()}}

    return both


def _loading(load: Callable[[dict[str, Any]], None], manager: fp8dist.StateManager) -> Callable[[dict[str, Any]], None]:
    def both(state_dict: dict[str, Any]) -> None:
        load(state_dict)
        ours = {key.removeprefix(PREFIX): state for key, state in state_dict.items() if key.startswith(PREFIX)}
        manager.load_state_dict(ours)

    return both
