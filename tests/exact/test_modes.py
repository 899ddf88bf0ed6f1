"""Whole models under exact arithmetic: sums of shards, what is refused, and what is converted at first use."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.exact import arithmetic, to_residues
from fp8dist.exact.field import P, are_residues, reduced
from tests.support.decoder import Decoder


def gradients(model: nn.Module, tokens: Tensor, scale: float = 1.0, **options: Any) -> list[Tensor]:
    """Return the loss and all gradients of next-token prediction."""
    model.zero_grad()
    with arithmetic(**options):
        logits = model(tokens)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) * scale
        loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    assert all(are_residues(tensor.double()) for tensor in found)
    return found


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(3)
    model = Decoder(**options)
    to_residues(model)
    return model


TOKENS = torch.randint(0, 36, (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_shards_add_up_exactly_and_alike_in_float32_and_float64() -> None:
    tokens, wholes = torch.randint(0, 36, (6, 8)), []
    for dtype in (torch.float32, torch.float64):
        model = decoder().to(dtype)
        whole = gradients(model, tokens)
        parts = [gradients(model, tokens[2 * n : 2 * n + 2], 1 / 3) for n in range(3)]
        for expected, *shares in zip(whole, *parts):
            assert expected.dtype == dtype
            assert torch.equal(reduced(sum(share.double() for share in shares)), expected.double())
        assert sum(bool(grad.any()) for grad in whole) == len(whole)
        wholes.append(whole)
    assert all(torch.equal(a.double(), b) for a, b in zip(*wholes))


def test_masks_of_all_kinds_give_weight_zero_and_dropout_is_off() -> None:
    """RoPE's tables are plain attributes of the model: they become residues at first use."""
    expected = gradients(decoder(attention="causal"), TOKENS)
    for attention in ("mask", "float mask", "by hand", "where"):
        assert all(map(torch.equal, gradients(decoder(attention=attention), TOKENS), expected)), attention
    for chance in (0.3, 0.5):  # torch drops arguments that equal their defaults.
        assert all(map(torch.equal, gradients(decoder(dropout=chance), TOKENS), expected))


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_modules_that_a_checkpoint_runs_again_compute_the_same(reentrant: bool) -> None:
    """In backward, functions must still be replaced."""
    model = decoder()
    expected = gradients(model, TOKENS)
    for block in model.blocks:
        block.forward = lambda x, run=block.forward: checkpoint(run, x, use_reentrant=reentrant)  # type: ignore[method-assign]
    assert all(map(torch.equal, gradients(model, TOKENS), expected))


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.autograd, "_engine_run_backward"),
        (dist.ProcessGroup, "allreduce"),
        (dist.ProcessGroup, "_reduce_scatter_base"),
        (torch._C._distributed_c10d, "_resolve_process_group"),
    ],
)
def test_a_torch_without_a_private_name_is_refused(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In silence, averages would be those of integers, and checkpoints would compute with real functions."""

    def step() -> None:
        with arithmetic():
            torch.ones(2, requires_grad=True).sum().backward()
            torch.ops._c10d_functional.all_reduce.default(torch.ones(2), "avg", "a group")

    monkeypatch.delattr(owner, name)
    refused = rf"^exact arithmetic: torch .* has no .*{name}, which fp8dist reads .* by tolerances$"
    with pytest.raises(ConfigurationError, match=refused):
        step()


class Entropies(torch.autograd.Function):
    """Calls a replaced function in backward, without autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * F.log_softmax(ctx.saved_tensors[0], -1)


def test_functions_are_replaced_in_backward_too() -> None:
    cotangent = torch.randint(2, P, (3, 4)).float()
    for how in ("tensor", "backward", "grad"):
        x = torch.randint(2, P, (3, 4)).float().requires_grad_()
        with arithmetic():
            expected = cotangent * F.log_softmax(x.detach(), -1)
            y = Entropies.apply(x)
            if how == "tensor":
                y.backward(cotangent)
            elif how == "backward":
                torch.autograd.backward([y], [cotangent])
            else:
                (x.grad,) = torch.autograd.grad(y, x, cotangent)
        assert torch.equal(x.grad, expected)


def test_a_step_of_sgd_is_exact() -> None:
    model = decoder()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False)
    grads = gradients(model, TOKENS)[1:]
    with arithmetic():
        optimizer.step()
        expected = [p - 0.1 * (g + 0.01 * p) for p, g in zip(before, grads)]
    assert all(map(torch.equal, model.parameters(), expected))


def test_what_a_loop_must_not_do_is_refused() -> None:
    """Steps of other optimizers, clipping, ops without a rule, casts to less than float32."""
    model = decoder()
    gradients(model, TOKENS)
    for name, foreach in (("AdamW", None), ("SGD", True)):
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, foreach=foreach)
        with arithmetic(), pytest.raises(ConfigurationError, match="has is SGD with foreach=False"):
            optimizer.step()
    for each in (False, True):
        with arithmetic(), pytest.raises(ConfigurationError, match=r"norm.* has no rule .* Do not clip gradients"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=each)
    for activation, words in (
        (F.elu, r"aten\.elu\.default in blocks\.0 \(Block\): .* has no rule"),
        (lambda x: F.gelu(x.bfloat16()).float(), r"_to_copy\.default in blocks\.0 .*bfloat16 cannot hold residues"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            gradients(decoder(activation=activation), TOKENS)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigurationError, match="bfloat16 cannot hold"):
        gradients(decoder(), TOKENS)
    with pytest.raises(ConfigurationError, match=r"weight in torch\.bfloat16"):
        to_residues(nn.Linear(4, 4).bfloat16())


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x * torch.randn(8), r"randn.* has no rule"),
        (torch.bernoulli, "no rule for these arguments"),
        (lambda x: F.batch_norm(x.expand(2, 8), x, x, training=True), "batch_norm.* Give `surrogates`"),
        (lambda x: x + math.inf, "with inf"),
        (lambda x: x + torch.full((8,), math.nan), "with nan"),
        (lambda x: x / 2 // 3, "floor_divide.* no rule|that are rounded"),
        (lambda x: x**0.3, r"pow\..* \(outside of modules\): .*powers of 3/10"),
        (lambda x: 10000.0 ** (x / 2), "pow.* tensors as exponents"),
    ],
)
def test_what_has_no_residue_is_refused(function: Any, words: str) -> None:
    with arithmetic(), pytest.raises(ConfigurationError, match=words):
        function(torch.ones(8))


def test_a_user_adds_a_surrogate() -> None:
    """The replaced function's gradient is that of the replacement."""
    found = gradients(decoder(activation=F.elu), TOKENS, surrogates={F.elu: lambda x, **_: F.silu(x)})
    assert all(map(torch.equal, found, gradients(decoder(activation=F.silu), TOKENS)))
    x = torch.tensor([5.0])
    with arithmetic():
        expected = F.silu(x)
        with arithmetic({F.elu: lambda x, **_: F.silu(x)}):  # A context within the context adds to it.
            assert torch.equal(F.elu(x), expected)
        assert torch.equal(F.silu(x), expected)


def test_numbers_and_integer_tensors_are_residues() -> None:
    x = torch.tensor([0.0, 1.0, P - 1.0])
    count = torch.tensor([3, -1, 2**40])
    with arithmetic():
        assert (x * count).tolist() == [0, P - 1, -pow(2, 40, P) % P]
        assert (x * 10**12).tolist() == [0, 10**12 % P, -(10**12) % P]
        assert (count / 3)[0] == 1
        assert (count * 0.5)[0] * 2 == 3
        assert count.float().tolist() == [3, P - 1, pow(2, 40, P)]
        assert torch.tensor([0.1, -0.1]).sum() == 0
        assert torch.tensor(0.1).expand(2).sum() * 5 == 1
        assert torch.full((2,), 0.1).add_(0.9).tolist() == [1, 1]
        assert (x - 1)[0] == P - 1
        assert torch.add(x, x, alpha=-0.5).tolist() == [x / 2 for x in (0, P + 1, P - 1)]
        assert torch.tensor([2.0, 3.0]).cumsum(0, dtype=torch.int32).tolist() == [2, 5]
        assert x.sum(dtype=torch.float64).dtype == torch.float64
        assert (count // 2).tolist() == [1, -1, 2**39]


def test_a_number_in_a_table_does_not_depend_on_the_others() -> None:
    """Weights of tokens are read as a whole by one process, and in shards by ranks."""
    x, weights = torch.tensor([784350.0, 1.0, 3.0]), torch.tensor([0.5, 1.0, 0.3])
    with arithmetic():
        whole = x * weights
        for place in range(3):
            part = slice(place, place + 1)
            assert torch.equal(x[part] * weights[part], whole[part])
            assert x[place] * weights[place] == whole[place]
            assert x[place] * weights[place].item() == whole[place]
        assert torch.tensor(1 / 11) * 11 == 1


def test_numbers_that_masks_are_made_of() -> None:
    hidden, table, x = torch.tensor([True, False]), torch.tensor([-1e9, 0.0]), torch.ones(2)
    for number in (-1e4, -1e9, -50000):
        with arithmetic():
            masks = [
                torch.zeros(2).masked_fill(hidden, number),
                torch.zeros(2).masked_fill(hidden, torch.tensor(float(number))),
                torch.where(hidden, number, x * 0),
                torch.where(hidden, torch.full((2,), float(number)), x * 0),
                hidden.float() * number,
                (1 - (~hidden).long()) * float(number),
                x * 0 + table,
            ]
            assert [mask.tolist() for mask in masks] == [[-math.inf, 0]] * len(masks)
            assert torch.zeros(2, dtype=torch.int64).masked_fill(hidden, int(number)).tolist() == [number, 0]


def test_a_number_that_caps_changes_nothing() -> None:
    """Clipped queries and capped logits: else all residues would be the cap, and all gradients zero."""
    x = torch.tensor([5.0, 9.0], requires_grad=True)
    with arithmetic():
        for capped in (x.clamp(-8, 8), torch.clamp(x, max=8), x.clamp_max(8.0), torch.clip(x, min=-8, max=8)):
            assert torch.equal(capped, x)
            assert torch.autograd.grad(capped.sum(), x)[0].tolist() == [1, 1]
        assert torch.tensor([0, 9]).clamp(1, 8).tolist() == [1, 8]
        assert torch.tensor([0.0, 9.0]).clamp(min=1).tolist() == [1, 9]
        with pytest.raises(ConfigurationError, match=r"clamp_\.default \(outside of modules\): .* has no rule"):
            torch.ones(2).clamp_(-8, 8)


def test_nothing_is_left_behind() -> None:
    with arithmetic():
        pass
    assert float(torch.ones(2).mul(0.5)[0]) == 0.5
    assert "exact" not in fp8dist.__all__
    assert fp8dist.exact.arithmetic is arithmetic
