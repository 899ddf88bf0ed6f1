"""``fp8dist.integrations.torchtitan.with_fp8`` in a real Trainer of torchtitan, against a loop by hand."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist.errors import ConfigurationError, DivergenceError
from fp8dist.state.groups import local_part
from tests.integrations.contract import STEPS, Adapter, Kept, kept_of, needs, same
from tests.support.ranks import on_ranks
from tests.support.recorded import die, fingerprint, recorder
from tests.support.titan import with_stand_ins

pytestmark = needs("torchtitan")

LENGTH, VOCABULARY = 32, 2048


def _batch(place: int, rank: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(10 * place + rank)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=made)
    return tokens[:, :-1], tokens[:, 1:]


def _parts() -> tuple[Any, Any]:
    """The configurations of a tokenizer and of the data of one rank."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            pass

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    class Data(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            infinite: bool = True

        def __init__(self, config: Any, *, dp_rank: int, **_: Any) -> None:
            self.rank, self.place = dp_rank, 0

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                inputs, labels = _batch(self.place, self.rank)
                self.place += 1
                yield {"input": inputs}, labels

        def state_dict(self) -> dict[str, Any]:
            return {"place": self.place}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.place = state_dict["place"]

    return Tokenizer.Config(), Data.Config()


def _spec() -> Any:
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    del spec.model.layers[2:]
    return spec


def _config(spec: Any, folder: str = ".", accumulate: int = 1, tensor: int = 1, **options: Any) -> Any:
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.trainer import Trainer

    tokenizer, data = _parts()
    ranks = dist.get_world_size() // tensor
    given = {
        "loss": CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        "optimizer": default_adamw(lr=1e-3, fused=False),
        # The rate stays as it is.
        "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        "training": TrainingConfig(
            local_batch_size=2, global_batch_size=2 * ranks * accumulate, seq_len=LENGTH, steps=STEPS,
            disable_cuda_graphs=True,
        ),
        "parallelism": ParallelismConfig(spmd_backend="partial_dtensor", tensor_parallel_degree=tensor),
        "checkpoint": CheckpointManager.Config(interval=8, last_save_model_only=False),
        "debug": DebugConfig(seed=3, enable_structured_logging=False),
    }  # fmt: skip
    return Trainer.Config(
        model_spec=spec, tokenizer=tokenizer, dataloader=data, dump_folder=folder, **{**given, **options}
    )


def _built(config: Any) -> Any:
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(dist.get_world_size()))
    try:
        return config.build()
    finally:
        gc.enable()  # torchtitan collects garbage at steps of its own.


def _fp8(**options: Any) -> Any:
    spec = _spec()
    from fp8dist.integrations.torchtitan import with_fp8

    return with_fp8(spec, **options)


def _train(trainer: Any) -> Kept:
    torch.distributed.barrier()
    trainer.train()
    return _kept(trainer)


def _steps(trainer: Any, count: int) -> None:
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(count):
        trainer.step += 1
        trainer.train_step(batches)


def _kept(trainer: Any) -> Kept:
    model = trainer.model_parts[0]
    return kept_of(fp8dist.get_manager(model), model)


def _by_hand(config: Any, weights: list[Tensor], accumulate: int, options: dict[str, Any]) -> tuple[Kept, list[float]]:
    """Train the model with torchtitan's shards, and nothing else of it but the loss's function."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.llama3 import parallelize_llama

    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    with torch.device("meta"):
        model = config.model_spec.model.build()
    manager = fp8dist.prepare(model, group=dist.group.WORLD, **options)
    parallelize_llama(
        model, parallel_dims=dims, training=config.training, parallelism=config.parallelism,
        compile_config=config.compile, ac_config=config.activation_checkpoint, dump_folder=config.dump_folder,
    )  # fmt: skip
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            local_part(parameter).copy_(weight)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=True
    )
    manager.attach(model, optimizer=optimizer)
    data, losses = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0, []
    tokens = torch.tensor(2 * LENGTH * accumulate * (dims.dp_shard * dims.dp_replicate))
    for step in range(STEPS):
        optimizer.zero_grad()
        whole = torch.zeros(())
        for i in range(accumulate):
            inputs, labels = _batch(step * accumulate + i, data)
            loss = cross_entropy_loss(model(inputs), labels, global_vocab_size=VOCABULARY) / tokens
            loss.backward()
            whole += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        if dims.dp_enabled:
            dist.all_reduce(whole)
        losses.append(whole.item())
    return kept_of(manager, model), losses


@with_stand_ins
def _as_by_hand(folder: str, accumulate: int, tensor: int, options: dict[str, Any]) -> None:
    config = _config(_fp8(**options), folder, accumulate, tensor)
    trainer = _built(config)
    from torchtitan.models.common.linear import Linear

    converted = trainer.model_parts[0].layers["0"].feed_forward.w1
    assert isinstance(converted, Linear)  # And so of torchtitan's Module protocol.
    assert isinstance(converted, fp8dist.modules.fp8_linear.FP8Linear)
    weights = _kept(trainer)[1]
    losses: list[float] = []
    log = trainer.metrics_processor.log
    trainer.metrics_processor.log = lambda step, loss, *a, **k: (losses.append(loss), log(step, loss, *a, **k))
    trainer.metrics_processor.should_log = lambda step: True
    manager = fp8dist.get_manager(trainer.model_parts[0])
    before = manager.metrics()["fp8/collectives"]
    found = _train(trainer)
    assert manager.metrics()["fp8/collectives"] - before == STEPS
    expected, theirs = _by_hand(config, weights, accumulate, options)
    assert losses == theirs
    assert same(found, expected)


@with_stand_ins
def _resumed(folder: str, options: dict[str, Any]) -> None:
    from torchtitan.components.checkpointer import CheckpointManager

    def run(**start: Any) -> Kept:
        checkpoint = CheckpointManager.Config(enable=True, interval=8, last_save_model_only=False, **start)
        trainer = _built(_config(_fp8(**options), folder, checkpoint=checkpoint))
        kept = _train(trainer)
        assert trainer.step == STEPS
        trainer.close()
        return kept

    whole = run()
    assert same(run(load_step=8), whole)


@with_stand_ins
def _diverged(folder: str) -> str:
    from torchtitan.config import ParallelismConfig

    # Parameters are compared where ranks hold the same ones.
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor", data_parallel_replicate_degree=2, data_parallel_shard_degree=1
    )
    trainer = _built(_config(_fp8(check_every=2), folder, parallelism=parallelism))
    train_step = trainer.train_step

    def damaged(batches: Any) -> None:
        if trainer.step == 5 and dist.get_rank() == 1:
            with torch.no_grad():
                local_part(trainer.model_parts[0].norm.weight)[3] += 1
        train_step(batches)

    trainer.train_step = damaged
    with pytest.raises(DivergenceError) as caught:
        trainer.train()
    assert trainer.step < 8
    return str(caught.value)


def _refused(spec: Any, match: str, parallelism: dict[str, Any], **training: Any) -> None:
    from torchtitan.config import ParallelismConfig

    config = _config(spec)
    config.training = replace(config.training, **training)
    config.parallelism = ParallelismConfig(**{"spmd_backend": "partial_dtensor", **parallelism})
    with pytest.raises(ConfigurationError, match=match):
        _built(config)


@with_stand_ins
def _misused(folder: str) -> None:
    spec = _fp8()
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.models.llama3 import model_registry, parallelize_llama

    from fp8dist.integrations.torchtitan import with_fp8

    _refused(with_fp8(spec), "prepared already", {})
    _refused(replace(spec, parallelize_fn=parallelize_llama), "replace it before with_fp8", {})
    _refused(spec, 'found "spmd_types"', {"spmd_backend": "spmd_types"})
    _refused(spec, "pipeline_parallel_degree=1", {"pipeline_parallel_degree": 2}, global_batch_size=4)
    _refused(spec, "disable_cuda_graphs=True", {}, disable_cuda_graphs=False)
    with pytest.raises(ConfigurationError, match="expected a ModelSpec"):
        with_fp8(_config(spec))
    theirs = model_registry("debugmodel", converters=[Float8LinearConverter.Config(emulate=True)])
    with pytest.raises(ConfigurationError, match="quantization converters"):
        with_fp8(theirs)
    _require_one_way()


def _require_one_way() -> None:
    """Prepare by hand and forget the rest; prepare what is sharded; make optimizers again."""
    spec = _spec()

    def parallelize(model: nn.Module, **given: Any) -> nn.Module:
        fp8dist.prepare(model, group=dist.group.WORLD)
        return spec.parallelize_fn(model, **given)

    with pytest.raises(ConfigurationError, match="attach"):
        _steps(_built(_config(replace(spec, parallelize_fn=parallelize))), 3)
    with pytest.raises(ConfigurationError, match=r"call prepare\(model\) with the plain model first"):
        fp8dist.prepare(_built(_config(_spec())).model_parts[0], group=dist.group.WORLD)
    trainer = _built(_config(_fp8()))
    _steps(trainer, 2)
    trainer.optimizers = trainer.config.optimizer.build(model_parts=trainer.model_parts)
    with pytest.raises(ConfigurationError, match=r"call attach\(optimizer=…\) again"):
        _steps(trainer, 3)


@with_stand_ins
def _validated(folder: str) -> None:
    from torchtitan.components.validate import Validator

    _, data = _parts()
    # Not after the last step: a forward without a backward leaves the head gathered.
    validator = Validator.Config(enable=True, freq=8, steps=2, dataloader=data)
    kept = [
        _train(_built(_config(_fp8(), folder, validator=one)))
        for one in (validator, Validator.Config(enable=False))
    ]  # fmt: skip
    assert same(*kept)


@on_ranks(2)
@with_stand_ins
def test_recomputation_changes_no_bit(tmp_path: Path) -> None:
    """With a head in FP8 that is called once for each chunk of the tokens."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.distributed.activation_checkpoint import FullAC

    spec = _fp8(fp8_all_gather=True, skip="!*lm_head")
    loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY), num_chunks=4)
    kept = []
    for recomputed in (None, FullAC.Config()):
        trainer = _built(_config(spec, str(tmp_path), loss=loss, activation_checkpoint=recomputed))
        _steps(trainer, 6)
        head = fp8dist.get_manager(trainer.model_parts[0]).coverage()
        assert [row.fp8 for row in head if row.fqn == "lm_head"] == [True]
        kept.append(_kept(trainer))
    assert same(*kept)


@pytest.mark.parametrize("recomputed", [None, "FullAC", "SelectiveAC"])
@on_ranks(2)
@with_stand_ins
def test_compiled_blocks_change_no_bit(tmp_path: Path, recomputed: str | None) -> None:
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import activation_checkpoint

    kept = []
    for enable in (False, True):
        compile = CompileConfig(enable=enable, components=["model"], backend="aot_eager")
        chosen = getattr(activation_checkpoint, recomputed).Config() if enable and recomputed else None
        config = _config(_fp8(fp8_all_gather=True), str(tmp_path), compile=compile, activation_checkpoint=chosen)
        trainer = _built(config)
        _steps(trainer, 3)
        kept.append(_kept(trainer))
    assert same(*kept)


@with_stand_ins
def _recorded(folder: str, name: str, end: str) -> tuple[str, dict[int, float], int]:
    """Train 20 steps; or until step 14, where the ranks are killed; or from step 8."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.metrics import MetricsProcessor

    config = _config(
        _fp8(run=recorder(f"{folder}/run-{name}")),
        f"{folder}/{name}",
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=8, last_save_model_only=False),
    )
    trainer = _built(config)
    losses = {}
    log = trainer.metrics_processor.log

    def logged(step: int, loss: float, *given: Any, **named: Any) -> None:
        losses[step] = loss
        log(step, loss, *given, **named)
        if step == 14 and end == "killed":
            die()

    trainer.metrics_processor.log = logged
    kept = _train(trainer)
    trainer.close()
    return fingerprint(*kept), losses, len(fp8dist.get_manager(trainer.model_parts[0]).slots)


GATHER = {"fp8_all_gather": True}

ADAPTER = Adapter(
    by_hand={
        "fsdp2": (_as_by_hand, 1, 1, {}),
        "accumulated": (_as_by_hand, 3, 1, {}),
        "fp8 gather": (_as_by_hand, 2, 1, GATHER),
        "tp": (_as_by_hand, 1, 2, {}),
        "tp and fp8 gather": (_as_by_hand, 1, 2, GATHER),
    },
    resumed={
        "fsdp2": (_resumed, {}),
        "fp8 gather": (_resumed, GATHER),
        "without a sync": (_resumed, {"amax_sync": False}),
    },
    diverged={"a parameter": ("norm.weight", (_diverged,))},
    undisturbed={"validation": (_validated,)},
    refused={"misuse": (_misused,)},
    recorded=_recorded,
    columns={"tokens": [2 * 2 * LENGTH] * STEPS},
    through=("-m", "tests.support.titan"),
)
