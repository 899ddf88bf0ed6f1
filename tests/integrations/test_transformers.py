"""FP8Callback in a real Trainer of Transformers, against a hand-written loop over the same model and batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist.errors import ConfigurationError, DivergenceError
from tests.integrations.contract import STEPS, Adapter, Kept, Ours, as_torchrun_starts_it, kept_of, needs, same
from tests.support.ranks import RankPool, on_ranks
from tests.support.recorded import die, fingerprint, recorder, require_run

pytestmark = needs("transformers")
integration = Ours("transformers")

BATCH, TOKENS, VOCABULARY = 2, 16, 64
FSDP2 = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**size, vocab_size=VOCABULARY, max_position_embeddings=TOKENS))


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens."""

    def __init__(self, count: int) -> None:
        self._tokens = torch.randint(0, VOCABULARY, (count, TOKENS), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[place], "labels": self._tokens[place]}


class Pictures(Samples):
    """Random pictures of 8 by 8 pixels."""

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        pixels = self._tokens[place].float().repeat(12).view(3, 8, 8)
        return {"pixel_values": pixels / VOCABULARY, "labels": self._tokens[place, 0] % 16}


def llama_trainer(model: nn.Module, folder: str, callbacks: list[Any], **arguments: Any) -> Any:
    from accelerate.state import DistributedType, PartialState
    from transformers import Trainer, TrainingArguments

    as_torchrun_starts_it()
    given = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",  # Not the fused one, which rounds differently.
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "ddp_backend": "gloo",
        "disable_tqdm": True,
        "average_tokens_across_devices": False,
    }
    options = TrainingArguments(folder, **given | copy.deepcopy(arguments))
    if options.fsdp:  # Accelerate offers FSDP on GPUs only.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Trainer(model, options, train_dataset=Samples(400), eval_dataset=Samples(8), callbacks=callbacks)


def _by_hand(folder: str, accumulate: int, optimizers: int = 1) -> tuple[list[float], Kept]:
    """Train, with each of the optimizers from the first batch on."""
    model = llama()
    manager = fp8dist.prepare(model, group=dist.group.WORLD)
    wrapped = nn.parallel.DistributedDataParallel(model)
    losses = []
    for step in range(STEPS * optimizers):
        if step % STEPS == 0:
            loader = iter(llama_trainer(llama(), folder, []).get_train_dataloader())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
            manager.attach(wrapped, optimizer=optimizer)
        batches = [next(loader) for _ in range(accumulate)]
        tokens = sum(batch["labels"][:, 1:].numel() for batch in batches)
        total = torch.zeros(())
        for i, batch in enumerate(batches):
            wrapped.require_backward_grad_sync = i == accumulate - 1
            loss = wrapped(**batch, num_items_in_batch=torch.tensor(tokens)).loss
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses, kept_of(manager, model)


def _losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def _as_by_hand(folder: str, accumulate: int) -> None:
    callback = integration.FP8Callback()
    trainer = llama_trainer(llama(), folder, [callback], gradient_accumulation_steps=accumulate)
    model = trainer.model
    trainer.train()
    losses, kept = _by_hand(folder, accumulate)
    assert _losses(trainer) == losses
    assert same(kept_of(callback.manager, model), kept)
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["fp8/step"] for line in logged] == list(range(1, STEPS + 1))
    assert callback.manager.metrics()["fp8/collectives"] == STEPS + 1  # One in attach().


def _resumed(folder: str, options: dict[str, Any], arguments: dict[str, Any]) -> None:
    saving = {"save_strategy": "steps", "save_steps": 6, **arguments}
    runs = []
    for name, resume in (("whole", None), ("whole", "whole/checkpoint-12")):
        callback = integration.FP8Callback(**options)
        trainer = llama_trainer(llama(), f"{folder}/{name}", [callback], **saving)
        trainer.train(resume_from_checkpoint=None if resume is None else f"{folder}/{resume}")
        runs.append(kept_of(callback.manager, trainer.model))
    assert same(*runs)
    dist.barrier()
    ranks = ["0", "1"] if options.get("amax_sync") is False else ["0"]
    files = sorted(path.name for path in Path(folder, "whole", "checkpoint-12").glob("fp8dist-*"))
    assert files == [f"fp8dist-rank{rank}.safetensors" for rank in ranks]


def _diverged(folder: str) -> str:
    from transformers import TrainerCallback

    class Damage(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 5 and dist.get_rank() == 1:
                with torch.no_grad():
                    model.model.norm.weight[3] += 1

    trainer = llama_trainer(llama(), folder, [integration.FP8Callback(check_every=2), Damage()])
    with pytest.raises(DivergenceError) as caught:
        trainer.train()
    assert trainer.state.global_step in (5, 6)
    return str(caught.value)


def _zoo(name: str) -> tuple[nn.Module, dict[str, Any], float]:
    """Return a small model, options of the Trainer, and the share of its matmul weights in FP8."""
    import transformers as hf

    torch.manual_seed(0)
    common = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**common, "vocab_size": VOCABULARY}
    if name == "gpt2":
        config = hf.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=VOCABULARY, n_positions=TOKENS)
        return hf.GPT2LMHeadModel(config), {}, 12288 / 14336
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**text)), {}, 0.8
    if name == "t5":
        config = hf.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        return hf.T5ForConditionalGeneration(config), {}, 0.8
    if name == "vit":
        common |= {"image_size": 8, "patch_size": 4, "num_labels": 16}
        return hf.ViTForImageClassification(hf.ViTConfig(**common)), {}, 0.8
    if name == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**text, num_local_experts=4, num_key_value_heads=2)), {}, 0.0
    model = llama()
    if name == "lora":
        import peft

        lora = peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(model, lora), {}, 0.5
    if name == "checkpointing":
        return model, {"gradient_checkpointing": True}, 0.8
    return model, {"torch_compile": True, "torch_compile_backend": "aot_eager"}, 0.8


def _trained_in(name: str, folder: str) -> float:
    model, options, share = _zoo(name)
    callback = integration.FP8Callback(check_every=2)
    trainer = llama_trainer(model, folder, [callback], max_steps=6, **options)
    if name == "vit":
        trainer.train_dataset = Pictures(40)
    trainer.train()
    assert callback.manager.metrics()["fp8/collectives"] >= 6
    assert callback.manager.metrics()["fp8/checks"] >= 2
    assert callback.manager.coverage().share >= share
    losses = _losses(trainer)
    assert len(losses) == 6
    assert all(loss == loss for loss in losses)
    return float(callback.manager.coverage().share)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vit", "mixtral", "lora", "checkpointing", "compiled"])
def test_models_and_options_train(two_ranks: RankPool, tmp_path: Path, name: str) -> None:
    assert len(set(two_ranks.run(_trained_in, name, str(tmp_path)))) == 1


@on_ranks(2)
def test_fsdp2_of_accelerate(tmp_path: Path) -> None:
    folder = str(tmp_path)
    callback = integration.FP8Callback(check_every=5)
    trainer = llama_trainer(llama(), folder, [callback], **FSDP2)
    trainer.train()
    losses, _ = _by_hand(folder, 1)
    assert _losses(trainer) == pytest.approx(losses, rel=1e-3)
    assert all(hasattr(p, "full_tensor") for p in trainer.model.parameters())
    assert callback.manager.metrics()["fp8/checks"] >= 3


def _misused(folder: str) -> None:
    with pytest.raises(ConfigurationError, match="more than one FP8Callback"):
        llama_trainer(llama(), folder, [integration.FP8Callback(), integration.FP8Callback()])
    late = llama_trainer(llama(), folder, [])
    late.add_callback(integration.FP8Callback())
    with pytest.raises(ConfigurationError, match="added after the Trainer was made"):
        late.train()
    wrapped = nn.parallel.DistributedDataParallel(llama())
    with pytest.raises(ConfigurationError, match="prepare"):
        llama_trainer(wrapped, folder, [integration.FP8Callback()])
    with pytest.raises(ConfigurationError, match="must be called by a transformers Trainer"):
        integration.FP8Callback().on_init_end(None, None, None)
    shared, model = integration.FP8Callback(), llama()
    first, _ = (llama_trainer(one, folder, [shared]) for one in (model, llama()))
    with pytest.raises(ConfigurationError, match="does not hold the model that was prepared"):
        first.train()
    with pytest.raises(ConfigurationError, match="prepared already"):
        llama_trainer(model, folder, [integration.FP8Callback()])
    with pytest.raises(ConfigurationError, match="attach"):
        llama_trainer(model, folder, []).train()
    _require_attached_optimizer(folder)


def _require_attached_optimizer(folder: str) -> None:
    from transformers import TrainerCallback

    class Anew(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3)

    trainer = llama_trainer(llama(), folder, [integration.FP8Callback(), Anew()])
    with pytest.raises(ConfigurationError, match="optimizer"):
        trainer.train()


@on_ranks(2)
def test_a_second_training_with_another_optimizer_goes_on(tmp_path: Path) -> None:
    folder = str(tmp_path)
    callback = integration.FP8Callback(run=recorder(f"{folder}/run"))
    trainer = llama_trainer(llama(), folder, [callback])
    losses = []
    for _ in range(2):
        trainer.optimizer = None  # The Trainer keeps it otherwise.
        trainer.train()
        losses += _losses(trainer)
    expected, kept = _by_hand(folder, 1, optimizers=2)
    assert losses == expected
    assert same(kept_of(callback.manager, trainer.model), kept)
    if dist.get_rank() == 0:
        require_run(Path(folder, "run"), dict(enumerate(losses, 1)), len(callback.manager.slots))


def _recorded(folder: str, name: str, end: str) -> tuple[str, dict[int, float], int]:
    """Train 20 steps; or until step 14, where the ranks are killed; or from there."""
    from transformers import TrainerCallback

    class Killed(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if end == "killed" and state.global_step == 14:
                die()

    callback = integration.FP8Callback(run=recorder(f"{folder}/run-{name}"))
    options = {"save_strategy": "steps", "save_steps": 6, "eval_strategy": "steps", "eval_steps": 5}
    options |= {"include_num_input_tokens_seen": "all"}
    trainer = llama_trainer(llama(), f"{folder}/{name}", [callback, Killed()], **options)
    trainer.train(resume_from_checkpoint=end == "resumed")
    losses = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    slots = len(callback.manager.slots)
    return fingerprint(callback.manager.state_dict(), trainer.model.parameters()), losses, slots


def _with_evaluations(folder: str) -> None:
    """The Trainer makes the models: it does so twice, when it is made and when training begins."""
    from transformers import Trainer

    def made(callback: Any) -> Any:
        data = {"train_dataset": Samples(400), "eval_dataset": Samples(8)}
        return Trainer(model_init=llama, args=llama_trainer(llama(), folder, []).args, callbacks=[callback], **data)

    plain, busy = integration.FP8Callback(), integration.FP8Callback()
    first, second = made(plain), made(busy)
    first.train()
    llama_trainer(llama(), folder, [integration.FP8Callback()], max_steps=3).train()  # Another model.
    second.args.eval_strategy, second.args.eval_steps = "steps", 5
    second.train()
    assert sum("eval_loss" in line for line in second.state.log_history) == STEPS // 5
    assert same(kept_of(plain.manager, first.model), kept_of(busy.manager, second.model))


ADAPTER = Adapter(
    by_hand={"1": (_as_by_hand, 1), "2": (_as_by_hand, 2)},
    resumed={
        "shared": (_resumed, {}, {}),
        "own": (_resumed, {"amax_sync": False}, {}),
        "fsdp2": (_resumed, {}, FSDP2),
        "fp8 gather": (_resumed, {"fp8_all_gather": True}, FSDP2),
    },
    diverged={"a parameter": ("model.norm.weight", (_diverged,))},
    undisturbed={"evaluations": (_with_evaluations,)},
    refused={"misuse": (_misused,)},
    recorded=_recorded,
    saved=(6, 12, 18, 20),
    evaluated=(5, 10, 15, 20),
    checkpoint="checkpoint-{step}",
    columns={"tokens": [2 * BATCH * TOKENS] * STEPS},
    steps=20,
    run="run",
    lines=2,  # It logs every 10 steps.
)
