"""Train a small Llama on bytes of text with the Trainer of Transformers, in FP8.

NPROC=2 launch/torchrun.sh launch/examples/with_transformers.py
fp8dist report runs/with-transformers/run --out report.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fp8dist.integrations.transformers import FP8Callback

CONTEXT = 64


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Windows of a text, one token per byte."""

    def __init__(self, path: Path) -> None:
        text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        self.windows = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[place], "labels": self.windows[place]}


def main() -> None:
    """Train, and print the last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__).resolve().parents[2] / "README.md")
    parser.add_argument("--out", default="runs/with-transformers", help="folder for checkpoints and the run")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    on_cpu = not torch.cuda.is_available()
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **size))
    arguments = TrainingArguments(
        options.out, max_steps=options.steps, learning_rate=1e-3, logging_steps=10, report_to=[], disable_tqdm=True,
        bf16=not on_cpu, use_cpu=on_cpu, ddp_backend="gloo" if on_cpu else "nccl",
    )  # fmt: skip
    fp8 = FP8Callback(check_every=20, run=f"{options.out}/run")
    Trainer(model, arguments, train_dataset=Windows(options.text), callbacks=[fp8]).train()
    assert fp8.manager is not None
    if arguments.process_index == 0:
        print(f"FP8: {fp8.manager.coverage().summary}")


if __name__ == "__main__":
    main()
