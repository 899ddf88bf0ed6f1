"""``fp8dist.integrations.deepspeed.attach`` with real engines of all ZeRO stages, against loops by hand."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_linear import fp8_linears
from fp8dist.modules.linear_slots import LinearSlots
from tests.integrations.contract import (
    STEPS,
    WIDTH,
    Adapter,
    ByHand,
    Kept,
    Ours,
    Trainee,
    as_torchrun_starts_it,
    batch,
    diverged,
    needs,
    require_masters,
    resumed,
    same,
    undisturbed,
)
from tests.integrations.test_transformers import llama, llama_trainer
from tests.support.ranks import RankPool, on_ranks
from tests.support.recorded import die, fingerprint

pytestmark = needs("deepspeed")
integration = Ours("deepspeed")

STAGES = {
    "zero 0": {"stage": 0},
    "zero 1": {"stage": 1},
    "zero 2": {"stage": 2},
    "zero 3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero 3 of small weights": {"stage": 3},  # They stay gathered until they are stepped.
}


def _deepspeed() -> Any:
    # The process group exists: nobody connects.
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # Takes minutes to compile, and is for inference.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH), nn.GELU(), nn.Linear(WIDTH, 16))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _initialized(model: nn.Module, zero: dict[str, Any], accumulate: int = 1, **config: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": zero,
        "steps_per_print": 1 << 30,
        **config,
    }
    return _deepspeed().initialize(model=model, optimizer=_optimizer(model), config=config)[0]


def _attached(zero: dict[str, Any], accumulate: int = 1, options: dict[str, Any] | None = None, **config: Any) -> Any:
    """Return an engine with an attached manager."""
    model = _model()
    manager = fp8dist.prepare(model, **{"group": dist.group.WORLD, **(options or {})})
    engine = _initialized(model, zero, accumulate, **config)
    integration.attach(manager, engine)
    return engine


def _train(engine: Any, steps: Iterable[int], infinite: int | None = None) -> list[float]:
    """Train, and return the losses. ``infinite``: the step in which rank 1 gets infinities."""
    losses = []
    for step in steps:
        given = batch(step) * (torch.inf if step == infinite and dist.get_rank() else 1)
        loss = engine(given.to(next(engine.parameters()).dtype)).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def _parameters(engine: Any) -> list[Tensor]:
    """Return the whole parameters. On gloo, DeepSpeed's gathers sometimes return before the last bits are there: so
    wait for the ranks, and read until two readings agree on all of them."""
    dist.barrier()
    found = _gathered(engine)
    while True:
        before, found = found, _gathered(engine)
        differs = torch.tensor(not all(torch.equal(a, b) for a, b in zip(before, found, strict=True)), dtype=torch.int)
        dist.all_reduce(differs)
        if not differs:
            return found


def _gathered(engine: Any) -> list[Tensor]:
    parameters = list(engine.module.parameters())
    with _deepspeed().zero.GatheredParameters(parameters, enabled=engine.zero_optimization_partition_weights()):
        return [parameter.detach().clone() for parameter in parameters]


def _kept(engine: Any) -> Kept:
    return engine.fp8_manager.state_dict(), _parameters(engine)


def _as_by_hand(folder: str, zero: dict[str, Any], accumulate: int) -> None:
    engine = _attached(zero, accumulate)
    before = engine.fp8_manager.metrics()["fp8/collectives"]
    losses = _train(engine, range(STEPS))
    assert engine.fp8_manager.metrics()["fp8/collectives"] - before == STEPS // accumulate
    # Stages 2 and 3 reduce the gradients of each micro-batch.
    theirs = ByHand(accumulate, reduces_each=accumulate > 1 and zero["stage"] > 1, model=_model())
    assert losses == theirs.train(range(STEPS))
    assert same(_kept(engine), theirs.kept())


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@on_ranks(2)
def test_stages_are_equal_and_skipped_steps_do_not_count(kind: str) -> None:
    """With fp16, DeepSpeed skips the steps whose gradients overflow: of one batch, and while the loss scale is high."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # torch computes in fp16 on any CPU.
    fp16 = kind == "fp16"
    config = {kind: {"enabled": True, **({"initial_scale_power": 24, "hysteresis": 1} if fp16 else {})}}
    results = []
    for zero in STAGES.values():
        engine = _attached(zero, **config)
        losses = _train(engine, range(STEPS), infinite=15 if fp16 else None)
        skipped = engine.skipped_steps
        assert skipped == (0 if not fp16 else 10 if zero["stage"] else 1)  # Without ZeRO, DeepSpeed does not scale.
        assert engine.fp8_manager.steps == STEPS - skipped
        assert engine.fp8_manager.metrics()["fp8/nonfinite_amaxes"] == 0
        results.append((losses, _kept(engine)))
        if zero["stage"] in (1, 2):
            require_masters(engine.fp8_manager, engine.module[0].weight, "0")
    # Without ZeRO, DeepSpeed has another optimizer for low precision, with other arithmetic.
    for losses, kept in results[2:]:
        assert str(losses) == str(results[1][0])  # One is NaN.
        assert same(kept, results[1][1])


class Engine(Trainee):
    """An engine, as ``_attached`` makes it."""

    def __init__(self, zero: dict[str, Any], options: dict[str, Any] | None = None) -> None:
        self.model = _attached(zero, options=options)
        self.manager = self.model.fp8_manager

    def train(self, places: Iterable[int]) -> list[float]:
        return _train(self.model, places)

    def parameters(self) -> list[Tensor]:
        return _parameters(self.model)


def _resumed(folder: str, zero: dict[str, Any], options: dict[str, Any]) -> None:
    def save(trainee: Trainee) -> None:
        trainee.model.save_checkpoint(folder, client_state={"mine": 1})

    def load(trainee: Trainee) -> None:
        _, client_state = trainee.model.load_checkpoint(folder)
        assert client_state["mine"] == 1
        assert "fp8dist" not in client_state

    resumed(lambda: Engine(zero, options), save, load)


@pytest.mark.parametrize("zero", STAGES.values(), ids=STAGES.keys())
@on_ranks(2)
def test_scales_begin_anew_with_a_checkpoint_without_fp8(tmp_path: Path, zero: dict[str, Any]) -> None:
    folder = str(tmp_path)
    plain = _initialized(_model(), zero)
    for step in range(4):
        plain.backward(plain(batch(step)).square().mean())
        plain.step()
    plain.save_checkpoint(folder)
    engine = _attached(zero)
    manager = engine.fp8_manager
    _train(engine, range(2))
    assert engine.load_checkpoint(f"{folder}/none") == (None, None)
    assert manager.steps == 2
    engine.load_checkpoint(folder)
    assert manager.steps == 0
    fits = manager.slot("0", "weight").scale * _parameters(engine)[0].abs().max() / 448
    assert 0.999 < fits < 1.001
    _train(engine, range(4, 6))


def _damage_state(trainee: Trainee) -> None:
    trainee.manager.slot("2", "input").set_scale(3.0)


def _damage_parameter(trainee: Trainee) -> None:
    trainee.model.module[2].bias[3] += 1


def _diverged(folder: str, zero: dict[str, Any], damage: Callable[[Trainee], None]) -> str:
    return diverged(Engine(zero, {"check_every": 2}), damage)


def _undisturbed(folder: str, zero: dict[str, Any]) -> None:
    """Parts are not compared."""
    first = undisturbed(lambda: Engine(zero))
    assert first.manager.check().compared.get("parameter", 0) == (6 if zero["stage"] < 3 else 0)


def _casts(zero: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of casts of weights in the forwards and in the backwards of two steps."""
    engine = _attached(zero, 4)
    numbers, cast = [0, 0], LinearSlots._cast_weight

    def counted(slots: LinearSlots, *args: Any) -> Any:
        numbers[torch._C._current_graph_task_id() != -1] += 1
        return cast(slots, *args)

    LinearSlots._cast_weight = counted
    try:
        _train(engine, range(8))
    finally:
        LinearSlots._cast_weight = cast
    assert all(each.fp8_slots.cache.empty for each in fp8_linears(engine)) == (zero["stage"] == 3)
    return numbers[0], numbers[1]


def test_weights_are_cast_once_a_step_unless_they_are_partitioned(two_ranks: RankPool) -> None:
    for zero, expected in (("zero 0", (6, 0)), ("zero 2", (6, 0)), ("zero 3", (24, 16))):
        assert two_ranks.run(_casts, STAGES[zero]) == [expected] * 2, zero


def _within_accelerate(folder: str, zero: dict[str, Any], accumulate: int) -> Any:
    """Return (manager, engine, accelerator, optimizer) of a job of Accelerate that DeepSpeed trains."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import DistributedType, PartialState

    from fp8dist.integrations.accelerate import prepare

    _deepspeed()
    as_torchrun_starts_it()
    PartialState(cpu=True, backend="gloo")
    PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED  # Offered on GPUs only.
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": accumulate, "zero_optimization": zero}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(project_dir=folder, deepspeed_plugin=plugin, gradient_accumulation_steps=accumulate)
    model = _model()
    manager, engine, optimizer = prepare(accelerator, model, _optimizer(model))
    return manager, engine, accelerator, optimizer


def _train_accelerated(engine: Any, accelerator: Any, optimizer: Any, steps: Iterable[int]) -> list[float]:
    losses = []
    for step in steps:
        with accelerator.accumulate(engine):
            loss = engine(batch(step)).square().mean()
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("stage", "accumulate"), [("zero 1", 1), ("zero 2", 4), ("zero 3", 1)])
@on_ranks(2)
def test_accelerate_trains_with_it(tmp_path: Path, stage: str, accumulate: int) -> None:
    """As engines do without Accelerate; a checkpoint of Accelerate has the FP8 state."""
    folder, zero = str(tmp_path), STAGES[stage]
    manager, engine, *rest = _within_accelerate(folder, zero, accumulate)
    losses = _train_accelerated(engine, *rest, range(8))
    assert manager.steps == 8 // accumulate
    rest[0].save_state(f"{folder}/saved")
    losses += _train_accelerated(engine, *rest, range(8, STEPS))
    alone = _attached(zero, accumulate)
    assert losses == _train(alone, range(STEPS))
    assert same(_kept(engine), _kept(alone))

    manager, again, *rest = _within_accelerate(folder, zero, accumulate)
    rest[0].load_state(f"{folder}/saved")
    assert manager.steps == 8 // accumulate
    assert losses[8:] == _train_accelerated(again, *rest, range(8, STEPS))
    assert same(_kept(again), _kept(engine))


@pytest.mark.parametrize("stage", ["zero 2", "zero 3"])
@on_ranks(2)
def test_the_trainer_of_transformers_trains_with_it(tmp_path: Path, stage: str) -> None:
    """A run that is resumed from a checkpoint has the bits of a whole one, and its losses are those under DDP."""
    from fp8dist.integrations.transformers import FP8Callback

    _deepspeed()
    config = {"zero_optimization": STAGES[stage], "train_micro_batch_size_per_gpu": "auto"}
    saving = {"save_strategy": "steps", "save_steps": 6, "max_grad_norm": 0.0}
    losses, kept = [], []
    for arguments, resume in (({}, None), ({"deepspeed": config}, None), ({"deepspeed": config}, "checkpoint-12")):
        folder, callback = str(tmp_path / ("ds" if arguments else "ddp")), FP8Callback()
        trainer = llama_trainer(llama(), folder, [callback], **saving, **arguments)
        trainer.train(resume_from_checkpoint=resume and f"{folder}/{resume}")
        assert callback.manager.steps == STEPS
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
        if arguments:
            assert isinstance(trainer.model_wrapped, _deepspeed().DeepSpeedEngine)
            kept.append(_kept(trainer.model_wrapped))
    # Without FP8, too, stage 3 adds in another order than DDP.
    assert losses[0] == (pytest.approx(losses[1], rel=2**-20) if stage == "zero 3" else losses[1])
    assert losses[1] == losses[2]
    assert same(*kept)


def _misused(folder: str) -> None:
    zero = STAGES["zero 3"]
    model = _model()
    manager = fp8dist.prepare(model, group=dist.group.WORLD)
    with pytest.raises(ConfigurationError, match=r"the engine that deepspeed.initialize\(\) returns first, got Seq"):
        integration.attach(manager, model)
    engine, other = _initialized(model, zero), _attached(zero)
    other.save_checkpoint(folder)
    with pytest.raises(ConfigurationError, match="does not hold the model that was prepared"):
        integration.attach(manager, other)
    engine.load_checkpoint(folder)
    with pytest.raises(ConfigurationError, match=r"attach before engine.load_checkpoint\(\)"):
        integration.attach(manager, engine)
    with pytest.raises(ConfigurationError, match="attached already"):
        integration.attach(other.fp8_manager, other)
    other.fp8_manager.detach()
    integration.attach(other.fp8_manager, other)  # Again, for example after a change of the engine.
    _train(other, range(2))
    assert other.fp8_manager.steps == 2
    with pytest.raises(ConfigurationError, match=r"calibrate\(\): DeepSpeed"), other.fp8_manager.calibrate():
        pass
    with pytest.raises(ConfigurationError, match="managed by FSDP or ZeRO already: call prepare"):
        fp8dist.prepare(_initialized(_model(), zero).module, group=dist.group.WORLD)
    _require_refusals()


def _require_refusals() -> None:
    model = _model()
    manager = fp8dist.prepare(model, group=dist.group.WORLD)
    manager.attach(model, optimizer=_optimizer(model))
    with pytest.raises(ConfigurationError, match=r"leave out manager.attach\(\)"):
        integration.attach(manager, _initialized(model, {"stage": 1}))
    with pytest.raises(ConfigurationError, match="does not support torch_autocast in float16"):
        _attached({"stage": 0}, torch_autocast={"enabled": True, "dtype": "float16"})
    with pytest.raises(ConfigurationError, match="does not support fp8_all_gather=True"):
        _attached({"stage": 3}, options={"fp8_all_gather": True})
    whole = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": STAGES["zero 3"]}
    with _deepspeed().zero.Init(config_dict_or_path=whole):
        model = _model()
    with pytest.raises(ConfigurationError, match="managed by FSDP or ZeRO already: call prepare"):
        fp8dist.prepare(model, group=dist.group.WORLD)
    from deepspeed.pipe import PipelineModule

    model = PipelineModule(layers=list(_model()), num_stages=1, loss_fn=nn.functional.mse_loss)
    manager = fp8dist.prepare(model, group=dist.group.WORLD)
    with pytest.raises(ConfigurationError, match="does not support pipelines"):
        integration.attach(manager, _initialized(model, {"stage": 0}))
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.raises(ConfigurationError, match="the group of DDP or DeepSpeed"):
        _attached({"stage": 2}, options={"group": alone})


def _another_engine(folder: str, zero: dict[str, Any]) -> None:
    """Make another engine around the model; prepare a model that has one; call the model, not its engine."""
    engine = _attached(zero)
    manager, model = engine.fp8_manager, engine.module
    losses = _train(engine, range(STEPS))
    engine.destroy()
    engine = _initialized(model, zero)
    integration.attach(manager, engine)
    losses += _train(engine, range(STEPS))
    theirs = ByHand(model=_model())
    expected = theirs.train(range(STEPS))
    theirs.begin()
    assert losses == [*expected, *theirs.train(range(STEPS))]
    assert same(_kept(engine), theirs.kept())

    if zero["stage"] < 3:
        engine = _initialized(_model(), zero)
        integration.attach(fp8dist.prepare(engine.module, group=dist.group.WORLD), engine)
        assert _train(engine, range(STEPS)) == expected

    engine = _attached(zero)
    found = []
    for step in range(STEPS):
        loss = engine.module(batch(step)).square().mean()
        found.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert found == expected


def _forgotten(folder: str, zero: dict[str, Any]) -> None:
    engine = _attached(zero)
    again = _initialized(engine.module, zero)
    with pytest.raises(ConfigurationError, match="trained by something else than the engine"):
        _train(again, range(2))
    model = _model()
    manager = fp8dist.prepare(model, group=dist.group.WORLD)
    engine = _initialized(model, zero)
    with pytest.raises(ConfigurationError, match="attach"):
        _train(engine, range(4))
    assert manager.steps == 0  # The backward that raised leaves reductions of ZeRO under way, into freed memory.


def _recorded(folder: str, name: str, end: str) -> tuple[str, dict[int, float], int]:
    """Train 20 steps of 2 micro-batches; or until step 14, where the ranks are killed; or from step 12."""
    model = _model()
    manager = fp8dist.prepare(model, group=dist.group.WORLD)
    engine = _initialized(model, STAGES["zero 1"], accumulate=2, gradient_clipping=1.0)
    recorder = fp8dist.Recorder(f"{folder}/run-{name}", manager, every=4, resume_after="state")
    integration.attach(manager, engine)
    if end == "resumed":
        engine.load_checkpoint(f"{folder}/{name}", "12")
    losses = {}
    with recorder:
        for step in range(engine.global_steps + 1, STEPS + 1):
            losses[step] = _train(engine, range(2 * step, 2 * step + 2))[-1]
            recorder.log(step, loss=losses[step], grad_norm=engine.get_global_grad_norm())
            if step % 6 == 0:
                engine.save_checkpoint(f"{folder}/{name}", str(step))
                recorder.event("saved", step, path=f"{name}/{step}")
            if step == 14 and end == "killed":
                die()
    return fingerprint(*_kept(engine)), losses, len(manager.slots)


ADAPTER = Adapter(
    by_hand={
        **{f"{name}, {n}": (_as_by_hand, zero, n) for name, zero in STAGES.items() for n in (1, 4)},
        **{f"{name}, another engine, a direct call": (_another_engine, zero) for name, zero in STAGES.items()},
    },
    resumed={
        **{name: (_resumed, zero, {}) for name, zero in STAGES.items()},
        **{f"{name}, own state": (_resumed, STAGES[name], {"amax_sync": False}) for name in ("zero 1", "zero 3")},
    },
    diverged={
        **{f"{name}, FP8 state": ("2:input", (_diverged, zero, _damage_state)) for name, zero in STAGES.items()},
        "a parameter": ("2.bias", (_diverged, STAGES["zero 0"], _damage_parameter)),
    },
    undisturbed={name: (_undisturbed, zero) for name, zero in STAGES.items()},
    refused={"misuse": (_misused,), **{f"{name}, not attached": (_forgotten, zero) for name, zero in STAGES.items()}},
    unclean=True,  # DeepSpeed also keeps torch_autocast's loss scale for later engines of a process.
    recorded=_recorded,
    saved=(6, 12, 18),
)
