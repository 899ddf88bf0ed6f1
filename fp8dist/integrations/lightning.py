"""Lightning: ``Trainer(plugins=[FP8Precision()])``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.integrations.stacks import RunLog, RunTarget, install, state_of_all_ranks, world
from fp8dist.parallel.wrappers import is_sharded
from fp8dist.state.recipe import Recipe

try:
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.plugins.precision import Precision
except ImportError as error:
    raise ImportError(install("Lightning", "lightning")) from error

__all__ = ["FP8Precision"]


class FP8Precision(Precision):
    """Precision plugin that trains the LightningModule in FP8: give it to ``Trainer(plugins=[…])``.

    It converts the module before the strategy wraps it, attaches once the optimizers exist, and keeps the FP8 state in
    Lightning's checkpoints. With ModelParallelStrategy (FSDP2), which shards in ``configure_model``, call
    ``self.trainer.precision_plugin.prepare(self)`` there, before ``fully_shard``. FSDPStrategy does not accept
    precision plugins: use ModelParallelStrategy.

    Args:
        recipe, options: as for ``fp8dist.prepare``. ``group``: by default, all ranks.
        autocast: dtype of torch.autocast around the steps, as with ``precision="bf16-mixed"``. None: no autocast.
        run: the folder of the run for ``fp8dist report``, which gets what ``self.log`` logs, and the checkpoints, or a
            function that returns the Recorder of a manager. None: nothing is recorded.

    Attributes:
        manager: the manager of the model, once ``fit`` has set up the strategy.
    """

    precision = "fp8dist"

    def __init__(
        self,
        recipe: Recipe | None = None,
        *,
        autocast: torch.dtype | None = None,
        run: RunTarget | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._autocast, self._run = autocast, run
        self.manager: fp8dist.StateManager | None = None
        self._options = {"recipe": recipe, **options}
        self._prepared: nn.Module | None = None

    def prepare(self, module: nn.Module) -> nn.Module:
        """Convert the module, and return it. Local. Does nothing if it was converted before."""
        if self._prepared is not module:
            self.manager = fp8dist.prepare(module, **{"group": world(), **self._options})
            self._prepared = module
        return module

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Prepare the module, if ``configure_model`` has not done it. Local."""
        if self._prepared is not module and any(
            is_sharded(one) for one in module.modules() if isinstance(one, nn.Linear)
        ):
            raise ConfigurationError(
                "configure_model() has sharded the model before it was converted: call "
                "self.trainer.precision_plugin.prepare(self) in configure_model(), before fully_shard()"
            )
        return self.prepare(module)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of each step."""
        if self._autocast is None:
            return nullcontext()
        prepared: Any = self._prepared
        return torch.autocast(prepared.device.type, dtype=self._autocast)

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, ...]:
        """Attach, when fitting. COLLECTIVE."""
        if optimizers:
            assert self.manager is not None
            assert self._prepared is not None
            trainer: Any = self._prepared.trainer
            if self._run is not None:
                _LightningLog(RunLog(self._run, self.manager), trainer)
            # Such a strategy loads the checkpoint after this, so ranks may still start with other weights.
            loads = trainer.strategy.restore_checkpoint_after_setup and trainer.ckpt_path is not None
            self.manager.attach(model, optimizer=optimizers, start=None if loads else "raise")
        return super().connect(model, optimizers, lr_schedulers)

    def state_dict(self) -> dict[str, Any]:
        """Return the FP8 state of all ranks, for Lightning's checkpoint, which rank 0 may write alone. COLLECTIVE,
        unless all ranks share it."""
        return {} if self.manager is None else state_of_all_ranks(self.manager)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the FP8 state of a checkpoint. Local."""
        if self.manager is not None and state_dict:
            self.manager.load_state_dict(state_dict)


class _LightningLog(Logger):
    """A logger of this fit: passes on what is logged."""

    name, version = "fp8dist", ""

    def __init__(self, log: RunLog, trainer: Any) -> None:
        super().__init__()
        self._log, self._trainer = log, trainer
        trainer.loggers = [*trainer.loggers, self]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Record numbers. Local."""
        self._log.log(metrics, step or 0)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a run has no hyperparameters."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Record the checkpoint. Local."""
        self._log.saved(checkpoint_callback._last_checkpoint_saved, self._trainer.global_step)

    def finalize(self, status: str) -> None:
        """End the run, and leave the Trainer as it was. Local."""
        self._log.close()
        self._trainer.loggers = [one for one in self._trainer.loggers if one is not self]
