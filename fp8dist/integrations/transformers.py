"""The Trainer of Transformers: ``Trainer(…, callbacks=[FP8Callback()])``. Also registers "fp8dist" in its interface of
experts: ``from_pretrained(…, experts_implementation="fp8dist")``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import Tensor

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.integrations.stacks import RunLog, RunTarget, caller, install, world
from fp8dist.state.groups import has_base
from fp8dist.state.recipe import Recipe

try:
    from transformers import Trainer, TrainerCallback
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
except ImportError as error:
    raise ImportError(install("Transformers", "transformers")) from error

__all__ = ["FP8Callback", "experts_forward"]

FILE = "fp8dist-rank{rank}.safetensors"
"""The FP8 state in a checkpoint of the Trainer. Ranks that share all state write rank 0's file only."""


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts of a mixture in FP8 if they are prepared, else with Transformers' grouped products.

    ``fp8dist.prepare`` converts experts whatever their ``experts_implementation`` is. This one also avoids loops over
    experts before ``prepare``, and with ``enabled=False``.
    """
    if isinstance(module, fp8dist.FP8Experts) and module.fp8_enabled:
        return module(hidden_states, top_k_index, top_k_weights)
    return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register("fp8dist", experts_forward)


class FP8Callback(TrainerCallback):
    """Trains the Trainer's model in FP8: give it to ``Trainer(callbacks=[…])``, and change nothing else.

    The model is prepared when the Trainer is made, before it is wrapped. When training begins, the manager is attached
    to what the Trainer calls. Checkpoints of the Trainer contain the FP8 state, and ``resume_from_checkpoint`` loads
    it. The numbers of ``manager.metrics()`` are added to the Trainer's logs. A divergence ends ``train()`` with
    DivergenceError on all ranks.

    Args:
        run: the folder of the run for ``fp8dist report``, which gets the Trainer's logs and checkpoints, or a function
            that returns the Recorder of a manager. None: nothing is recorded.
        recipe, check_every, options: as for ``fp8dist.prepare``. ``group``: by default, all ranks.

    Attributes:
        manager: the manager of the model, once the Trainer is made.

    Raises:
        ConfigurationError: on use, if there are two FP8Callbacks, or if it was added after the Trainer was made.
    """

    def __init__(
        self, recipe: Recipe | None = None, *, check_every: int = 0, run: RunTarget | None = None, **options: Any
    ) -> None:
        self.manager: fp8dist.StateManager | None = None
        self._run = run
        self._log: RunLog | None = None
        self._options = {"recipe": recipe, "check_every": check_every, **options}

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Prepare the model. Local."""
        trainer, _ = caller(Trainer)
        callbacks = trainer.callback_handler.callbacks
        if sum(isinstance(one, FP8Callback) for one in callbacks) > 1:
            raise ConfigurationError("callbacks= has more than one FP8Callback: a model has one FP8 state")
        # First, so that callbacks that report logs see ours. The Trainer is in a loop over this list: what follows
        # keeps its place in it.
        callbacks.remove(self)
        callbacks.insert(0, self)
        self._prepare(trainer.model)
        make = trainer.model_init
        if make is not None:  # train() makes the model again.
            trainer.model_init = functools.wraps(make)(lambda *given: self._prepare(make(*given)))

    def _prepare(self, model: Any) -> Any:
        self.manager = fp8dist.prepare(model, **{"group": world(), **self._options})
        return model

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Load the FP8 state of the checkpoint, if there is one, and attach. COLLECTIVE."""
        if self.manager is None:
            raise ConfigurationError(
                "FP8Callback was added after the Trainer was made, which is too late to convert the model: give it to "
                "Trainer(callbacks=[…])"
            )
        trainer, here = caller(Trainer)
        folder = here.get("resume_from_checkpoint")
        if folder is not None:
            self._load(Path(folder), args.process_index)
        if self._log is not None:  # Of an earlier train().
            self._log.close()
        self._log = None if self._run is None else RunLog(self._run, self.manager)
        if has_base(trainer.model_wrapped, "DeepSpeedEngine"):
            from fp8dist.integrations import deepspeed

            self.manager.detach()  # From the engine of an earlier train().
            deepspeed.tie(self.manager, trainer.model_wrapped, loads=False)  # ``_load`` has loaded.
        else:
            scaler = getattr(trainer.accelerator, "scaler", None)
            self.manager.attach(trainer.model_wrapped, optimizer=trainer.optimizer, scaler=scaler)

    def _load(self, folder: Path, rank: int) -> None:
        assert self.manager is not None
        own, shared = (folder / FILE.format(rank=r) for r in (rank, 0))
        self.manager.load(own if own.exists() else shared)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the FP8 state beside the Trainer's own files. Local."""
        assert self.manager is not None
        trainer, here = caller(Trainer)
        folder = Path(trainer._get_output_dir(here.get("trial")), f"checkpoint-{state.global_step}")
        own = any(key.startswith("rank") for key in self.manager.state_dict())
        if not args.save_only_model and (own or args.process_index == 0):
            self.manager.save(folder / FILE.format(rank=args.process_index))
        if self._log is not None:
            self._log.saved(folder, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Record the logs, and add the metrics to those of a training step. Local; reads from the device."""
        if self._log is not None and logs is not None and "train_loss" not in logs:  # The summary at the end.
            self._log.log(logs, state.global_step)
        if self.manager is not None and logs is not None and "loss" in logs:
            metrics = self.manager.metrics()
            logs.update(metrics)
            state.log_history[-1].update(metrics)  # Where the Trainer has just put a copy.

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the run. Local."""
        if self._log is not None:
            self._log.close()
