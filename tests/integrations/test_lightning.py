"""FP8Precision in a real Trainer of Lightning, against a loop by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fp8dist
from fp8dist.errors import ConfigurationError, DivergenceError
from fp8dist.runs.report.numbers import read_run
from tests.integrations.contract import STEPS, Adapter, ByHand, Kept, Ours, batch, kept_of, mlp, needs, play, same
from tests.support.ranks import on_ranks
from tests.support.recorded import die, fingerprint, recorder

pytestmark = needs("lightning")
integration = Ours("lightning")


class Batches(torch.utils.data.IterableDataset[Tensor]):
    """This rank's batches."""

    def __init__(self, first: int = 0, end: int = 1000) -> None:
        self.steps = range(first, end)

    def __iter__(self) -> Any:
        return map(batch, self.steps)


def _module(shards: str | None = None, damage: int | None = None) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def configure_model(self) -> None:
            if shards is None:
                return
            from torch.distributed.fsdp import fully_shard

            if shards == "right":
                self.trainer.precision_plugin.prepare(self)
            for part in (self.net[0], self.net[2], self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Tensor, place: int) -> Tensor:
            if place == damage and dist.get_rank() == 1:
                with torch.no_grad():
                    self.net[2].bias[3] += 1
            loss = self.net(batch).square().mean()
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Tensor, place: int) -> None:
            self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    return Module()


def _trainer(precision: Any, folder: str, shards: bool = False, unused: bool = False, **options: Any) -> Any:
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    class Environment(LightningEnvironment):
        """The ranks of this test: their process group exists."""

        creates_processes_externally = True

        def world_size(self) -> int:
            return dist.get_world_size()

        def global_rank(self) -> int:
            return dist.get_rank()

        def local_rank(self) -> int:
            return dist.get_rank()

    os.environ.pop("RANK", None)
    sizes: dict[str, Any] = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    kind, sizes = (ModelParallelStrategy, sizes) if shards else (DDPStrategy, {"find_unused_parameters": unused})
    strategy = kind(process_group_backend="gloo", **sizes)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
    quiet |= {"max_steps": STEPS, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    quiet["plugins"] = [precision, Environment()]
    return lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, use_distributed_sampler=False, **quiet | options
    )


def _fit(trainer: Any, module: Any, **options: Any) -> Kept:
    loaders = torch.utils.data.DataLoader(Batches(), batch_size=None)
    trainer.fit(module, loaders, **options)
    return kept_of(trainer.precision_plugin.manager, module.net)


def _by_hand(accumulate: int, optimizers: int = 1) -> Kept:
    """Train, with each of the optimizers from the first batch on."""
    theirs = ByHand(accumulate, "net")
    for turn in range(optimizers):
        if turn:
            theirs.begin()
        theirs.train(range(STEPS * accumulate))
    return theirs.kept()


def _as_by_hand(folder: str, accumulate: int) -> None:
    precision = integration.FP8Precision()
    found = _fit(_trainer(precision, folder, accumulate_grad_batches=accumulate), _module())
    assert precision.manager.metrics()["fp8/collectives"] == STEPS + 1  # One in attach().
    assert same(found, _by_hand(accumulate))


def _resumed(folder: str, shards: bool, amax_sync: bool = True) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    def run(resume: str | None) -> Kept:
        saves = ModelCheckpoint(folder, filename="at-{step}", every_n_train_steps=8, save_top_k=-1)
        options = {"enable_checkpointing": True, "callbacks": [saves]}
        precision = integration.FP8Precision(fp8_all_gather=shards, amax_sync=amax_sync)
        trainer = _trainer(precision, folder, shards, **options)
        module = _module("right" if shards else None)
        loader = torch.utils.data.DataLoader(Batches(0 if resume is None else 8), batch_size=None)
        trainer.fit(module, loader, ckpt_path=resume, weights_only=False)
        return kept_of(trainer.precision_plugin.manager, module.net)

    whole = run(None)
    dist.barrier()
    assert same(run(f"{folder}/at-step=8.ckpt"), whole)


def _diverged(folder: str) -> str:
    with pytest.raises(DivergenceError) as caught:
        _fit(_trainer(integration.FP8Precision(check_every=2), folder), _module(damage=4))
    return str(caught.value)


def _misused(folder: str) -> None:
    import lightning
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import FSDPStrategy
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    with pytest.raises(ConfigurationError, match="before fully_shard"):
        _fit(_trainer(integration.FP8Precision(), folder, True), _module("wrong"))
    with pytest.raises(TypeError, match="FSDP"):
        FSDPStrategy(precision_plugin=integration.FP8Precision())
    with pytest.raises(MisconfigurationException, match="multiple values for Precision"):
        _trainer(integration.FP8Precision(), folder, plugins=[integration.FP8Precision(), integration.FP8Precision()])
    module = _module()
    fp8dist.prepare(module, group=dist.group.WORLD)
    with pytest.raises(ConfigurationError, match=r"attach\("):
        _fit(_trainer(Precision(), folder), module)
    with pytest.raises(ConfigurationError, match="prepared already"):
        _fit(_trainer(integration.FP8Precision(), folder), module)

    class Anew(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.strategy.optimizers = [torch.optim.AdamW(pl_module.parameters(), lr=1e-3)]

    with pytest.raises(ConfigurationError, match="optimizer"):
        _fit(_trainer(integration.FP8Precision(), folder, callbacks=[Anew()]), _module())


def _validated(folder: str) -> None:
    trainer = _trainer(integration.FP8Precision(), folder, val_check_interval=5, check_val_every_n_epoch=None)
    module = _module()
    loaders = [torch.utils.data.DataLoader(Batches(0, n), batch_size=None) for n in (1000, 2)]
    trainer.fit(module, *loaders)
    assert "val_loss" in trainer.callback_metrics
    assert same(kept_of(trainer.precision_plugin.manager, module.net), _by_hand(1))


def test_autocast_is_that_of_the_modules_device(monkeypatch: pytest.MonkeyPatch) -> None:
    precision = integration.FP8Precision(autocast=torch.bfloat16)
    precision.prepare(_module())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # A trainer with accelerator="cpu" beside a GPU.
    with precision.forward_context():
        assert torch.is_autocast_enabled("cpu")


@on_ranks(2)
def test_a_second_fit_with_another_optimizer_goes_on(tmp_path: Path) -> None:
    """Each fit makes an optimizer."""
    folder = str(tmp_path)
    precision, module = integration.FP8Precision(run=recorder(f"{folder}/run")), _module()
    for _ in range(2):
        trainer = _trainer(precision, folder, log_every_n_steps=1)
        found = _fit(trainer, module)
        assert trainer.loggers == []
    assert same(found, _by_hand(1, optimizers=2))
    if dist.get_rank() == 0:
        assert read_run(Path(folder, "run")).metrics.step.tolist() == list(range(1, 2 * STEPS + 1))


def _gan_module() -> Any:
    import lightning

    class Gan(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.judge = mlp(), mlp()

        def training_step(self, batch: Tensor, place: int) -> None:
            play(self.generator, self.judge, self.optimizers(), self.manual_backward, batch, batch + 1)

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(net.parameters(), lr=1e-3) for net in (self.generator, self.judge)]

    return Gan()


def _gan(folder: str) -> None:
    module = _gan_module()
    precision = integration.FP8Precision()
    trainer = _trainer(precision, folder, unused=True, max_steps=-1, max_epochs=1, limit_train_batches=8)
    trainer.fit(module, torch.utils.data.DataLoader(Batches(), batch_size=None))
    by_hand = _gan_module()
    manager = fp8dist.prepare(by_hand, group=dist.group.WORLD)
    optimizers = by_hand.configure_optimizers()
    manager.attach(optimizer=optimizers)

    def backward(loss: Tensor) -> None:
        loss.backward()
        for parameter in by_hand.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad.div_(2))

    for given in Batches(0, 8):
        play(by_hand.generator, by_hand.judge, optimizers, backward, given, given + 1)
    assert same(kept_of(trainer.precision_plugin.manager, module), kept_of(manager, by_hand))


def _recorded(folder: str, name: str, end: str) -> tuple[str, dict[int, float], int]:
    """Train 20 steps; or until step 14, where the ranks are killed; or from step 12."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    losses = {}

    class Losses(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            losses[trainer.global_step] = trainer.logged_metrics["train_loss"].item()
            if trainer.global_step == 14 and end == "killed":
                die()

    first = 12 if end == "resumed" else 0
    saves = ModelCheckpoint(f"{folder}/{name}", filename="{step}", every_n_train_steps=6, save_top_k=-1)
    options = {"enable_checkpointing": True, "callbacks": [saves, Losses()], "log_every_n_steps": 1}
    options |= {"val_check_interval": 5, "check_val_every_n_epoch": None}
    precision, module = integration.FP8Precision(run=recorder(f"{folder}/run-{name}")), _module()
    loaders = [torch.utils.data.DataLoader(Batches(*steps), batch_size=None) for steps in ((first, 1000), (0, 2))]
    trainer = _trainer(precision, folder, **options)
    resume = f"{folder}/{name}/step=12.ckpt" if first else None
    trainer.fit(module, *loaders, ckpt_path=resume, weights_only=False)
    return fingerprint(*kept_of(precision.manager, module.net)), losses, len(precision.manager.slots)


ADAPTER = Adapter(
    by_hand={"1": (_as_by_hand, 1), "3": (_as_by_hand, 3), "a GAN": (_gan,)},
    resumed={"ddp": (_resumed, False), "fsdp2": (_resumed, True), "own state": (_resumed, False, False)},
    diverged={"a parameter": ("net.2.bias", (_diverged,))},
    undisturbed={"validation": (_validated,)},
    refused={"misuse": (_misused,)},
    recorded=_recorded,
    saved=(6, 12, 18),
    evaluated=(5, 10, 15, 20),
    checkpoint="step={step}.ckpt",
    logged=(),
)
