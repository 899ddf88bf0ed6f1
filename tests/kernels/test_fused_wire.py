"""Triton's messages of gradients against plain torch's, bitwise, and what a message must keep."""

from __future__ import annotations

import pytest
import torch

from fp8dist_kernels.reference import wire as plain
from fp8dist_kernels.triton import wire as fused
from tests.support.casting import assert_same, hard_values, poison
from tests.support.devices import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # From the interpreter's numpy.

SHAPES = ((1, 1, 1), (2, 128, 200), (3, 100, 250), (2, 2048, 4096), (4, 384, 385), (3, 2300, 6900))
"""Messages, the length of one, and numbers in all: shards that are empty, uneven, and of more than one program."""


def _parts(messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the FP8 numbers, and the inverse scales."""
    blocks = messages.shape[1] // plain.BYTES
    return messages[:, : 128 * blocks].view(torch.float8_e4m3fn), messages[:, 128 * blocks :].view(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_messages_and_sums(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    for turn, (count, length, numel) in enumerate(SHAPES):
        summands = []
        for seed in range(3):
            x = hard_values(1, numel, 3 * turn + seed, finite=turn % 2 == 0).view(-1).to(dtype)
            messages = fused.encode(x, count, length)
            assert_same(_parts(messages), _parts(plain.encode(x, count, length)))
            assert messages.shape == (count, plain.message_bytes(length))
            summands.append(messages)
        for messages in (torch.stack(summands, 1), summands[0].unsqueeze(1)):
            outs = [torch.empty(numel, dtype=dtype, device=DEVICE) for _ in range(2)]
            for version, out in zip((fused, plain), outs):
                version.decode(messages.clone(), length, out, 1 / 3)
            assert_same((outs[0],), (outs[1],))


def test_a_block_keeps_its_scale_and_what_is_not_finite() -> None:
    """A block that is a million times larger costs its neighbour nothing; NaN and Inf of one block stay there."""
    x = torch.linspace(-1, 1, 512, device=DEVICE)
    x[128:256] *= 1e6
    x[256], x[384] = torch.inf, torch.nan
    out = torch.empty_like(x)
    plain.decode(plain.encode(x, 1, 512).unsqueeze(1), 512, out)
    assert float((out - x)[:128].abs().max()) <= 1 / 16
    assert float(((out - x) / x)[128:256].abs().max()) <= 1 / 16
    assert (~out.isfinite()).nonzero().view(-1).tolist() == [256, 384]
