"""FP8 state of layers written by hand: groups, histories, recomputation, caches, a resume.

fp8dist's own layers have none of these bugs, so the programs bring their layer, and fp8dist only checks.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from tests.silent_bugs.job import Job, program
from tests.silent_bugs.models import batch, started

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

OTHER = "alike on all ranks; a comparison with another FP8 layer would find it"


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """Return the FP8 values of ``x`` times ``scale``, as float32."""
    top = torch.finfo(dtype).max
    return (x.detach() * scale).clamp(-top, top).to(dtype).float()


class Scaled(nn.Module):
    """A Linear whose input is cast with delayed scaling: the scale comes from the largest of the last amaxes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32, generator=torch.Generator().manual_seed(0)) / 6)
        self.register_buffer("history", torch.zeros(3))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("inverse", torch.ones(()), persistent=False)

    def record(self, x: Tensor) -> None:
        self.history[0] = torch.maximum(self.history[0], x.detach().abs().amax())

    def roll(self) -> None:
        """End a step: make the scale of the next one."""
        if self.history.any():
            self.scale.copy_(448 / self.history.max())
            self.inverse.copy_(1 / self.scale)
        self.history.copy_(self.history.roll(1))
        self.history[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        self.record(x)
        return F.linear(x + (cast(x, self.scale) * self.inverse - x).detach(), self.weight)


_started = partial(started, enabled=False)


def _step(job: Job, optimizer: SGD, out: Tensor, y: Tensor) -> None:
    F.mse_loss(out, y).backward()
    job.step(optimizer)


class _Gathered(Scaled):
    """Gathers the FP8 values of all ranks' tokens. ``alone``: each rank makes the scale from its own amax."""

    alone = False

    def forward(self, x: Tensor) -> Tensor:
        self.record(x)
        values = cast(x, self.scale)
        dist.all_gather(parts := [torch.empty_like(values) for _ in range(3)], values)
        if not self.alone:
            dist.all_reduce(self.history, dist.ReduceOp.MAX)
        return F.linear(torch.cat(parts) * self.inverse, self.weight)


@program("'scale'|'inverse'|'history'")
def scales_of_a_smaller_group(job: Job) -> None:
    """NVIDIA/TransformerEngine 335, 2023. The ranks gather FP8 inputs, and each divides by its own scale."""
    model = _Gathered()
    model.alone = job.bug
    called, optimizer = _started(job, model, ddp={"broadcast_buffers": False})
    for step in range(4):
        parts = [batch(step, rank) for rank in range(3)]
        _step(job, optimizer, called(parts[job.rank][0] * (1 + job.rank)), torch.cat([y for _, y in parts]))
        model.roll()


@program("history|scale", ranks=1, unseen=OTHER)
def history_rolls_for_others(job: Job) -> None:
    """NVIDIA/TransformerEngine 814, 2024. Two models train in turns. With the bug the end of a step rolls the histories
    of both, so those of the second forget the outliers of its last step."""
    models = nn.ModuleList([Scaled(), Scaled()])
    _, optimizer = _started(job, models)
    for step in range(9):
        turn = int(step % 4 == 0)
        x, y = batch(step)
        _step(job, optimizer, models[turn](x * 2 if step == 4 else x * 8), y)
        for model in models if job.bug else [models[turn]]:
            model.roll()


class _Backward(Scaled):
    """Casts the output's gradient, too, and records its amax if the forward says so."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grad_amax", torch.zeros(()))
        self.register_buffer("grad_scale", torch.ones(()))
        self.tracks: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.tracks is None:  # With the bug it keeps what the first forward found: no gradients there.
            self.tracks = torch.is_grad_enabled()
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(self._cast)
        return out

    def _cast(self, grad: Tensor) -> Tensor:
        if self.tracks:
            self.grad_amax.copy_(grad.abs().amax())
        return cast(grad, self.grad_scale, E5M2) / self.grad_scale

    def roll(self) -> None:
        super().roll()
        if self.grad_amax:
            self.grad_scale.copy_(57344 / self.grad_amax)


@program("grad_scale", ranks=1, unseen=OTHER)
def recomputed_with_other_state(job: Job) -> None:
    """NVIDIA/TransformerEngine 1190, 2024. The first forward of a checkpointed layer has no gradients, so the layer
    believes that it has no backward: the scale of its gradients stays 1."""
    model = _Backward()
    _, optimizer = _started(job, model)
    for step in range(4):
        x, y = batch(step)
        model.tracks = None if job.bug else True
        out = checkpoint(model, x.requires_grad_(), use_reentrant=True)
        (F.mse_loss(out, y) * 1e-4).backward()
        for parameter in model.parameters():
            parameter.grad *= 1e4
        job.step(optimizer)
        model.roll()


@program("cache", ranks=1, unseen=OTHER)
def cached_weight_with_wrong_scale(job: Job) -> None:
    """NVIDIA/TransformerEngine 1047, 2024. The weight is cast in the first of two microbatches. The second reads the
    same values, and a scale that was made in between."""
    model = Scaled()
    _, optimizer = _started(job, model)
    scale = torch.ones(())
    for step in range(3):
        values = cast(model.weight, scale)
        for micro in range(2):
            x, y = batch(2 * step + micro)
            read = values / scale
            F.mse_loss(F.linear(x, model.weight + (read - model.weight).detach()), y).backward()
            if job.bug or micro == 1:
                scale = 448 / model.weight.detach().abs().amax()
        job.step(optimizer)


@program("the loss .* is a spike", ranks=1)
def resume_without_inverse_scale(job: Job) -> None:
    """NVIDIA/TransformerEngine 123, 2023. A load in step 3 restores scale and history. The inverse is not in the file,
    and stays as it was made: 1."""
    model = Scaled()
    _, optimizer = _started(job, model)
    for step in range(14):
        if step == 12:
            torch.save(model.state_dict(), job.folder / "saved.pt")
            model = Scaled()
            _, optimizer = _started(job, model)
            model.load_state_dict(torch.load(job.folder / "saved.pt"))
            if not job.bug:
                model.inverse.copy_(1 / model.scale)
            torch.save(model.state_dict(), job.folder / "again.pt")
            job.equal_files(job.folder / "saved.pt", job.folder / "again.pt")
        x, y = batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        job.step(optimizer, loss=loss)
        model.roll()


class _Recomputed(Scaled):
    """Its recomputation casts with the scale that its forward has kept."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies, self.kept = copies, torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.kept = self.scale.clone() if self.copies else self.scale
            return super().forward(x)
        return F.linear(x + (cast(x, self.kept) / self.kept - x).detach(), self.weight)


@program("scale", ranks=1, unseen=OTHER)
def scale_of_the_next_step(job: Job) -> None:
    """NVIDIA/TransformerEngine 1723, 2025. Scales are updated between a forward and its recomputation, which is to cast
    with the old scale and has a reference to the new one."""
    model = _Recomputed(copies=not job.bug)
    _, optimizer = _started(job, model)
    for step in range(4):
        x, y = batch(step)
        out = checkpoint(model, x.mul(1 + 3 * step).requires_grad_(), use_reentrant=True)
        model.roll()
        _step(job, optimizer, out, y)


@program("scale", ranks=1, unseen="the tensors are right; a comparison of outputs with the trainer's would find it")
def scale_rounded_data_kept(job: Job) -> None:
    """huggingface/transformers 47030, 2026. The trained weight is served in FP8. The kernel multiplies by powers of
    two, so the scale is rounded up, and the values that were cast with another one are kept."""
    model = nn.Linear(32, 16, bias=False)
    _, optimizer = _started(job, model)
    for step in range(3):
        x, y = batch(step)
        _step(job, optimizer, model(x), y)
    scale = 448 / model.weight.detach().abs().amax()
    values, inverse = cast(model.weight, scale), 1 / scale
    job.note(F.linear(batch(3)[0], values * (inverse.log2().ceil().exp2() if job.bug else inverse)))
