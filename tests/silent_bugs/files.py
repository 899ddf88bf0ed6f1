"""Checkpoints, merged adapters, exports, served weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import fp8dist
from tests.silent_bugs.job import Job, program
from tests.silent_bugs.models import batch, mlp, mse, started, train
from tests.silent_bugs.optimizers import Masters


def _save_state(job: Job, name: str, state: dict[str, Any]) -> None:
    """Save a checkpoint. One that is saved "again" after a resume is to be the same."""
    torch.save(state, job.folder / name)
    if name == "again.pt":
        job.equal_files(job.folder / "saved.pt", job.folder / name)


@program("master", ranks=1, unseen="not in the file; a run without the resume would show it")
def masters_from_rounded_weights(job: Job) -> None:
    """TensorAuto/OpenTau 185, 2026. A checkpoint of bf16 weights lacks the masters, and a resume makes them from it."""
    model = mlp().bfloat16()
    _, optimizer = started(job, model, Masters, lr=0.01, enabled=False)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), **({} if job.bug else {"masters": optimizer.masters})}

    train(job, model, optimizer, steps=12, dtype=torch.bfloat16)
    _save_state(job, "saved.pt", state())
    optimizer.refresh()
    if not job.bug:
        optimizer.put(torch.load(job.folder / "saved.pt")["masters"])
    _save_state(job, "again.pt", state())
    train(job, model, optimizer, steps=2, dtype=torch.bfloat16)


class _Words(nn.Module):
    """An embedding, and a head that has its weight, as the configuration says, in the form of Transformers."""

    config = SimpleNamespace(tie_word_embeddings=True)

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 32), nn.Linear(32, 48, bias=False)
        nn.init.normal_(self.embed.weight, std=0.3, generator=torch.Generator().manual_seed(0))
        if tied:
            self.head.weight = self.embed.weight
        else:
            self.head.load_state_dict(self.embed.state_dict())

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(words))
        return out


@program("head.weight", ranks=1)
def tie_that_was_lost(job: Job) -> None:
    """NVIDIA-NeMo/Automodel 2511, 2026. The tie was lost when the model was made, and the head trains alone. The save
    leaves it out, because it should be tied, and the load puts the embedding there."""
    model = _Words(tied=not job.bug)
    _, optimizer = started(job, model, lr=2.0, enabled=False)
    job.watched = model.embed
    for step in range(14):
        if step == 12:
            saved = {"embed.weight": model.embed.weight.detach()}
            save_file(saved, job.folder / "saved.safetensors")
            loaded = load_file(job.folder / "saved.safetensors")["embed.weight"]
            model.load_state_dict({"embed.weight": loaded, "head.weight": loaded})
            save_file({"embed.weight": model.embed.weight.detach()}, job.folder / "again.safetensors")
            job.equal_files(job.folder / "saved.safetensors", job.folder / "again.safetensors")
        words = torch.arange(48).roll(step % 3)
        loss = F.cross_entropy(model(words), (words * 7 + 5) % 48)
        loss.backward()
        job.step(optimizer, loss=loss)


@program("exp_avg", ranks=1)
def moments_dropped(job: Job) -> None:
    """KempnerInstitute/KempnerForge 115, 2026. The resume asks the new optimizer what there is to load: it has no
    moments yet."""
    model = mlp()
    _, optimizer = started(job, model, AdamW, lr=0.01, enabled=False)
    train(job, model, optimizer, steps=12)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, job.folder / "saved.pt")
    optimizer = AdamW(model.parameters(), lr=0.01)
    state = torch.load(job.folder / "saved.pt")
    wanted = optimizer.state_dict()["state"] if job.bug else state["optimizer"]["state"]
    state["optimizer"]["state"] = {key: state["optimizer"]["state"][key] for key in wanted}
    optimizer.load_state_dict(state["optimizer"])
    job.attach(model, optimizer)
    _save_state(job, "again.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(job, model, optimizer, steps=2)


@program(
    "merged", ranks=1, unseen="nothing holds what the base was; a comparison of outputs before and after would find it"
)
def merged_twice(job: Job) -> None:
    """huggingface/peft 1355, 2024. An evaluation merges the adapter into the base weight, and the export merges it
    again."""
    model = nn.Linear(32, 16)
    model.weight.requires_grad_(False)
    model.register_parameter("lora_a", nn.Parameter(torch.full((4, 32), 0.1)))
    model.register_parameter("lora_b", nn.Parameter(torch.full((16, 4), 0.1)))
    _, optimizer = started(job, model, lambda _, lr: SGD([model.lora_a, model.lora_b], lr=lr), enabled=False)
    for step in range(3):
        x, y = batch(step)
        F.mse_loss(model(x) + x @ model.lora_a.t() @ model.lora_b.t(), y).backward()
        job.step(optimizer)
    with torch.no_grad():
        for _ in range(2 if job.bug else 1):
            model.weight += model.lora_b @ model.lora_a
    job.note(model.weight)


class _Norms(nn.Sequential):
    """Two norms between Linears, and after them."""

    def __init__(self) -> None:
        first, _, last = mlp()
        super().__init__(first, nn.LayerNorm(64), last, nn.LayerNorm(16))


def _export(job: Job, model: nn.Module, folder: Path) -> None:
    """Export what the job has now."""
    if job.manager is not None:
        fp8dist.export(job.manager, folder, model)
    else:
        folder.mkdir()
        save_file(model.state_dict(), folder / "model.safetensors")


def _serve(job: Job, model: nn.Module, wrong: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Save and export the model. With the bug the export has the ``wrong`` tensors."""
    state = {"model": model, **({} if job.manager is None else {"fp8": job.manager})}
    dcp.save(state, checkpoint_id=job.folder / "checkpoint", no_dist=True)
    _export(job, model, served := job.folder / "served")
    (file,) = served.glob("*.safetensors")
    tensors = load_file(file)
    if job.bug:
        tensors |= wrong(tensors)
        save_file(tensors, file)
    job.note(*(tensor for _, tensor in sorted(tensors.items())))
    job.served(job.folder / "checkpoint", served)


def _trained(job: Job) -> tuple[nn.Module, SGD]:
    model, optimizer = started(job, _Norms())
    train(job, model, optimizer, steps=3)
    return model, optimizer


@program("'1.bias'|'3.bias'", ranks=1, also="'[13].(weight|bias)'")
def exported_under_another_name(job: Job) -> None:
    """NVIDIA-NeMo/Speech 11951, 2025. The table of names gives the biases of two norms to each other's place."""
    model, _ = _trained(job)
    _serve(job, model, lambda tensors: {"1.bias": tensors["3.bias"].repeat(4)})


@program("weight", ranks=1)
def old_weights_served(job: Job) -> None:
    """huggingface/trl 5312, 2026. The engine gets the weights of step 5, sleeps, and wakes with those of step 3."""
    model, optimizer = _trained(job)
    _export(job, model, old := job.folder / "old")
    train(job, model, optimizer, steps=2)
    _serve(job, model, lambda _: load_file(next(old.glob("*.safetensors"))))


class _Embedded(nn.Module):
    """An embedding and two Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.embed_tokens = mlp(), nn.Embedding(48, 32)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.layers(self.embed_tokens(words))
        return out


@program("'embed_tokens.weight'", ranks=1)
def embedding_left_out(job: Job) -> None:
    """lightseekorg/TorchSpec 39, 2026. The export builds a model, and gives it the tensors of the checkpoint, but those
    with "embed" in their names: its own random embedding is saved."""
    model = _Embedded()
    _, optimizer = started(job, model)
    for step in range(3):
        words = torch.arange(48).roll(step)
        mse(model, words, torch.ones(48, 16)).backward()
        job.step(optimizer)
    _serve(job, model, lambda of: {name: torch.randn_like(value) for name, value in of.items() if "embed" in name})


@program("average", ranks=1)
def average_dropped_at_resume(job: Job) -> None:
    """hao-ai-lab/FastVideo 1441, 2026. The average begins after some steps. A resume in step 13 loads the saved one if
    there is one to load it into, and with the bug there is none yet."""
    model = mlp()
    _, optimizer = started(job, model, enabled=False)
    average: dict[str, Tensor] = {}
    for step in range(15):
        if step == 12:
            torch.save({"model": model.state_dict(), "average": average}, job.folder / "saved.pt")
            average = {} if job.bug else torch.load(job.folder / "saved.pt")["average"]
            _save_state(job, "again.pt", {"model": model.state_dict(), "average": average})
        train(job, model, optimizer, steps=1)
        if step >= 2:
            average = average or {name: value.clone() for name, value in model.state_dict().items()}
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 0.1)
            job.note(*average.values())


@program("weight|bias", ranks=1)
def masters_gone_after_resume(job: Job) -> None:
    """NVIDIA/Model-Optimizer 2322, 2026. Parameters are float32, for a compute type of bf16. A resume in step 13 makes
    the model with bf16 parameters, and does not make them float32 again."""
    model: nn.Module = _Norms()
    _, optimizer = started(job, model, AdamW, lr=0.001, enabled=False)
    for step in range(14):
        if step == 12:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, job.folder / "saved.pt")
            if job.bug:
                model.bfloat16()
            optimizer = AdamW(model.parameters(), lr=0.001)
            optimizer.load_state_dict(torch.load(job.folder / "saved.pt")["optimizer"])
            job.attach(model, optimizer)
            _save_state(job, "again.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        x, y = batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = mse(model, x, y)
        loss.backward()
        job.step(optimizer, loss=loss)
