"""What a server computes with an exported model, and with weights that it quantises itself, against the training model.

    python -m scripts.benchmarks.serving [--steps N]

Trains the example job's GPT in FP8 with each recipe, exports its checkpoint, and evaluates it on held-out text: the
training model in eval(); a server with the exported bytes and scales; a server that quantises the float weights with
fresh scales, and inputs dynamically. The servers are plain torch. Writes ``scripts/results/serving.json``, and
``python -m scripts.pages`` then fills the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

import fp8dist
from fp8dist.cli.main import main as command
from launch.train_gpt.data import read_text
from launch.train_gpt.model import GPT
from scripts import results_files
from scripts.benchmarks.llama_shapes import RECIPES
from tests.support.serving import read, spread

LAYERS, WIDTH, HEADS, CONTEXT = 2, 128, 4, 64
KINDS = ("delayed", "current", "rowwise", "block")
LIMIT = 448.0


class ServedLinear(nn.Module):
    """x Wᵀ + b of an FP8 weight and its factors. ``inputs``: "static" with ``input_scale``, or the shape of a group of
    inputs that has a scale of its own: "tensor", "token" or "block" (1 x 128)."""

    def __init__(self, weight: Tensor, factors: Tensor, bias: Tensor | None, inputs: str, scale: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight.float() * factors, bias
        self._inputs, self._scale = inputs, scale

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, min(128, x.shape[-1]))) if self._inputs == "block" else x
        if self._scale is not None:
            scale = self._scale
        else:
            amax = groups.abs().amax() if self._inputs == "tensor" else groups.abs().amax(-1, keepdim=True)
            scale = torch.where(amax > 0, amax / LIMIT, torch.ones_like(amax))
        cast = (groups / scale).clamp(-LIMIT, LIMIT).to(torch.float8_e4m3fn)
        y = F.linear((cast.float() * scale).reshape(x.shape), self.weight)
        return y if self.bias is None else y + self.bias


def fresh(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return a float weight in FP8 and its factors, as a server computes them: from the weight's own amaxes."""
    if kind == "block":
        blocks = [[b.abs().amax() for b in rows.split(128, 1)] for rows in weight.split(128, 0)]
        amax = spread(torch.tensor(blocks), weight.shape)
    else:
        amax = weight.abs().amax() if kind != "rowwise" else weight.abs().amax(1, keepdim=True)
    factors = (amax / LIMIT).expand(weight.shape)
    return (weight / factors).clamp(-LIMIT, LIMIT).to(torch.float8_e4m3fn), factors


def weights_of(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, FP8 bytes, factor of each element) of the exported weights."""
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scale = tensors[f"{name}_scale" if f"{name}_scale" in tensors else f"{name}_scale_inv"]
            yield name, tensor, spread(scale, tensor.shape)


def served(tensors: dict[str, Tensor], floats: dict[str, Tensor], kind: str, again: bool) -> GPT:
    """Return the model of a server. ``again``: it quantises the float weights itself."""
    model = GPT(LAYERS, WIDTH, HEADS, CONTEXT)
    model.load_state_dict(floats)
    inputs = {"rowwise": "token", "block": "block"}.get(kind, "tensor")
    for name, weight, factors in weights_of(tensors):
        module = name.removesuffix(".weight")
        fixed = tensors.get(f"{module}.input_scale")
        if again:
            (weight, factors), fixed = fresh(floats[name], kind), None
        parent, _, last = module.rpartition(".")
        linear = ServedLinear(weight, factors, floats.get(f"{module}.bias"), inputs, fixed)
        setattr(model.get_submodule(parent), last, linear)
    return model.eval()


def evaluated(model: GPT, windows: Tensor) -> tuple[float, Tensor]:
    """Return (mean loss in nats per byte, logarithms of the probabilities of the next bytes)."""
    seen: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, y: seen.append(y.double().log_softmax(-1)))
    with torch.no_grad():
        loss = float(model(windows[:, :-1], windows[:, 1:]))
    handle.remove()
    return loss, seen[0]


def measure(kind: str, steps: int, folder: Path, power_of_two: bool = False) -> dict[str, Any]:
    """Train, export and evaluate with one recipe."""
    shape = ["--layers", LAYERS, "--width", WIDTH, "--heads", HEADS, "--context", CONTEXT]
    flags = [*shape, "--steps", steps, "--save-every", steps, "--recipe", kind, "--out", folder / "run"]
    words = [sys.executable, "-m", "tests.support.lab", *map(str, flags), *["--power-of-two"][: int(power_of_two)]]
    subprocess.run(words, cwd=results_files.ROOT, check=True, stdout=subprocess.DEVNULL)
    checkpoint = folder / "run" / "checkpoints" / f"step-{steps:08d}"
    format = "block" if kind == "block" else "compressed-tensors"
    assert command(["export", str(checkpoint), "--out", str(folder / "out"), "--format", format]) == 0
    tensors = read(folder / "out")
    model = GPT(LAYERS, WIDTH, HEADS, CONTEXT)
    manager = fp8dist.prepare(model, dataclasses.replace(RECIPES[kind], power_of_two=power_of_two))  # type: ignore[type-var]
    dcp.load({"model": model, "fp8": manager}, checkpoint_id=checkpoint)
    floats = {name: value.detach().clone() for name, value in model.state_dict().items()}
    text = torch.frombuffer(bytearray(read_text(None, CONTEXT).validation), dtype=torch.uint8).long()
    windows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    loss, logits = evaluated(model.eval(), windows)
    row: dict[str, Any] = {"recipe": kind, "steps": steps, "bytes": windows[:, 1:].numel(), "loss": loss}
    for name, again in (("exported", False), ("again", True)):
        other, theirs = evaluated(served(tensors, floats, kind, again), windows)
        divergence = float((logits.exp() * (logits - theirs)).sum(-1).mean())
        row[name] = {"loss": other, "divergence": divergence}
    changed = count = 0
    for name, tensor, own in weights_of(tensors):
        weight, factors = fresh(floats[name], kind)
        mine, theirs = tensor.float() * own, weight.float() * factors
        # A scale that differs in its last bit changes no weight by more than a rounding or two.
        changed += int(((mine - theirs).abs() > 4 * 2.0**-24 * mine.abs()).sum())
        count += tensor.numel()
    return {**row, "changed": changed / count}


def main() -> None:
    """Measure all recipes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps of training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(kind, options.steps, Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
    results_files.write(results_files.path_of("serving"), {"torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()
