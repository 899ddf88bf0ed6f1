"""Teach torchtitan's smallest Llama to count, in FP8. On GPUs: docs/trainers.md says with which torch.

NPROC=2 launch/torchrun.sh launch/examples/with_torchtitan.py
fp8dist report runs/with-torchtitan --out report.html
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

import fp8dist
from fp8dist.integrations.torchtitan import with_fp8

VOCABULARY, LENGTH = 2048, 64


class NoTokenizer(BaseTokenizer):
    """In the place of one: the data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Has no settings."""

    def __init__(self, config: Config, **_: Any) -> None:
        pass

    def encode(self, *_: Any, **__: Any) -> list[int]:
        """Return no tokens."""
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        """Return no text."""
        return ""

    def get_vocab_size(self) -> int:
        """Return the number of tokens."""
        return VOCABULARY


class Counting(BaseDataLoader):
    """Each token is the one before it, plus one."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Has no settings of its own."""

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.random = torch.Generator().manual_seed(dp_rank)
        self.batch = local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        places = torch.arange(LENGTH).expand(self.batch, LENGTH)
        while True:
            first = torch.randint(VOCABULARY, (self.batch, 1), generator=self.random)
            tokens = (first + places) % VOCABULARY
            yield {"input": tokens, "positions": places.to(torch.int32)}, (tokens + 1) % VOCABULARY

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random numbers."""
        return {"random": self.random.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it."""
        self.random.set_state(state_dict["random"])


def main() -> None:
    """Train; torchtitan prints the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", default="runs/with-torchtitan", help="folder of the run")
    options = parser.parse_args()
    init_logger()
    spec = with_fp8(model_registry("debugmodel"), check_every=20, fp8_all_gather=True, run=options.out)
    config = Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)),
        optimizer=default_adamw(lr=1e-3, fused=torch.cuda.is_available()),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        tokenizer=NoTokenizer.Config(),
        dataloader=Counting.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        training=TrainingConfig(
            local_batch_size=8, seq_len=LENGTH, steps=options.steps, disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
    )  # fmt: skip
    trainer = config.build()
    trainer.train()
    if dist.get_rank() == 0:
        print(f"FP8: {fp8dist.get_manager(trainer.model_parts[0]).coverage().summary}")
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
