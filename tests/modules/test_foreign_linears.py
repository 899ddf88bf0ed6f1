"""Modules that compute what nn.Linear computes, but are of another class: subclasses, transformers' Conv1D, and
Megatron-Core's parallel Linears (on one rank; on several in tests/integrations)."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_linear import FP8Linear
from tests.support.linear import RECIPES
from tests.support.ranks import on_ranks
from tests.support.suite import crossed, few

TOKENS, IN, OUT = 32, 48, 64


class Named(nn.Linear):
    """A subclass that adds a method and state, as torchtitan's Linear does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.label = "mine"

    def doubled(self) -> Tensor:
        return 2 * self.weight

    def extra_repr(self) -> str:
        return "named"


class Conv1D(nn.Module):
    """Like transformers': y = x W + b, with a weight [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"  # fp8dist knows the class by its name.


class ColumnParallelLinear(nn.Module):
    """Like Megatron-Core's on one rank, but without the tuple that it returns."""

    gradient_accumulation_fusion = True

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor, **_: Any) -> Tensor:
        return torch.matmul(input, weight.t()) + bias

    def forward(self, input_: Tensor, weight: Tensor | None = None) -> Tensor:
        return self._forward_impl(
            input=input_, weight=self.weight if weight is None else weight, bias=self.bias,
            allreduce_dgrad=False, sequence_parallel=False, tp_group=None,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
        )  # fmt: skip


ColumnParallelLinear.__module__ = "megatron.core.tensor_parallel.layers"


class Doubling:
    def forward(self, *args: Any) -> Any:
        return 2 * super().forward(*args)


class OwnParallelLinear(ColumnParallelLinear):
    def _forward_impl(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super()._forward_impl(*args, **kwargs)


OWN = [OwnParallelLinear, *(type(f"Own{base.__name__}", (Doubling, base), {}) for base in (nn.Linear, Conv1D))]


class Calling(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return 2 * super().__call__(*args)


def _pair(name: str) -> tuple[nn.Sequential, nn.Sequential]:
    """Return a model of one module, and one of an nn.Linear that computes the same."""
    torch.manual_seed(1)
    foreign, linear = MAKE[name](), nn.Linear(IN, OUT)
    weight = foreign.weight.t() if isinstance(foreign, Conv1D) else foreign.weight
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(foreign.bias)
    return nn.Sequential(foreign), nn.Sequential(linear)


MAKE: dict[str, Callable[[], nn.Module]] = {
    "subclass": lambda: Named(IN, OUT),
    "Conv1D": lambda: Conv1D(OUT, IN),
    "parallel": lambda: ColumnParallelLinear(IN, OUT),
}


def _trained(model: nn.Module, steps: int = 5, **options: Any) -> tuple[list[Tensor], fp8dist.StateManager]:
    """Return the outputs and gradients of some steps, the weight's as [out, in]."""
    manager = fp8dist.prepare(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    manager.attach(optimizer=optimizer)
    seen = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(TOKENS, IN, generator=generator, requires_grad=True)
        y = model(x)
        (y * torch.randn(y.shape, generator=generator)).sum().backward()
        grad = model[0].weight.grad
        assert grad.is_contiguous()
        weight_grad = grad.t() if grad.shape == (IN, OUT) else grad
        seen += [y.detach().clone(), x.grad, weight_grad.clone(), model[0].bias.grad.clone()]
        optimizer.step()
        optimizer.zero_grad()
    return seen, manager


@crossed(recipe=RECIPES, name=MAKE, gemms=[(), ("fprop",), ("dgrad",), ("wgrad",)])
def test_it_computes_what_an_fp8_linear_does(name: str, recipe: Any, gemms: tuple[str, ...]) -> None:
    foreign, linear = _pair(name)
    original, shape = type(foreign[0]), foreign[0].weight.shape
    wanted, of_linear = _trained(linear, recipe=recipe)
    found, manager = _trained(foreign, recipe=recipe)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert isinstance(foreign[0], FP8Linear)
    assert isinstance(foreign[0], original)
    assert foreign[0].weight.shape == shape
    assert manager.coverage().share == 1
    if recipe.delayed:
        for slot in of_linear.slots:
            assert torch.equal(manager.slot(*slot).amax_history, of_linear.slot(*slot).amax_history)
    if gemms:
        for one in (manager, of_linear):
            one.set_precision("*", "high", gemms=gemms)
        x = torch.randn(TOKENS, IN)
        for model in (foreign, linear):
            model.zero_grad()
            model(x).square().sum().backward()
        assert torch.allclose(foreign(x), linear(x))


@pytest.mark.parametrize("name", MAKE)
def test_it_can_be_switched_off_copied_pickled_and_restored(name: str) -> None:
    model, linear = _pair(name)
    plain, x = copy.deepcopy(model), torch.randn(TOKENS, IN)
    original, keys = type(model[0]), set(vars(model[0]))
    switched_off = copy.deepcopy(model)
    fp8dist.prepare(switched_off, enabled=False)
    assert torch.equal(switched_off(x), plain(x))
    for one in (model, linear):
        _trained(one)
    copies = [copy.deepcopy(model.eval())]
    if name == "subclass":  # The others are of a test's own modules.
        copies.append(_through_pickle(model))
        assert torch.equal(model[0].doubled(), 2 * model[0].weight)
        assert (model[0].label, copies[1][0].label, repr(model[0])) == ("mine", "mine", "FP8Named(named)")
    for copied in copies:
        assert type(copied[0]) is type(model[0])
        assert torch.equal(copied(x), linear(x))
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    fp8dist.restore(model)
    assert type(model[0]) is original
    assert set(vars(model[0])) == keys


def _through_pickle(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("cls", [*OWN, Calling])
def test_a_forward_of_its_own_stays_and_is_named(cls: type[nn.Module]) -> None:
    model = nn.Sequential(cls(OUT, OUT), nn.Linear(OUT, OUT))
    row = next(iter(fp8dist.prepare(model).coverage()))
    base = next((base.__name__ for base in (Conv1D, ColumnParallelLinear) if issubclass(cls, base)), "nn.Linear")
    assert (row.fqn, row.fp8) == ("0", False)
    assert row.reason == f"it is a {cls.__name__}, not exactly {base}: it has a forward of its own"
    assert type(model[0]) is cls


def test_a_parallel_linear_refuses_the_weight_of_another_module() -> None:
    model = nn.Sequential(MAKE["parallel"]())
    fp8dist.prepare(model)
    with pytest.raises(ConfigurationError, match="0: it was called with the weight of another module"):
        model[0](torch.randn(TOKENS, IN), torch.randn(OUT, IN))


def test_features_of_a_conv1d_must_be_multiples_of_16() -> None:
    row = next(iter(fp8dist.prepare(nn.Sequential(Conv1D(40, 32), nn.Linear(32, 32))).coverage()))
    assert row.reason == "32 x 40 are not multiples of 16"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", few(["subclass", "Conv1D"], "Conv1D"))
def test_it_compiles_in_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model, _ = _pair(name)
    wanted, _ = _trained(copy.deepcopy(model))
    model.compile(fullgraph=True, backend="aot_eager")
    found, _ = _trained(model)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("gathers_fp8", [False, True])
@on_ranks(2)
def test_a_sharded_conv1d(gathers_fp8: bool) -> None:
    """Its weight is gathered in high precision, and cast to the bytes that an FP8 gather brings."""
    results = []
    for which in range(2):
        model = _pair("Conv1D")[which]
        manager = fp8dist.prepare(model, group=dist.group.WORLD, fp8_all_gather=gathers_fp8)
        fully_shard(model[0])
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        manager.attach(model, optimizer=optimizer)
        outputs = []
        for step in range(4):
            x = torch.randn(TOKENS, IN, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
            y = model(x)
            y.square().mean().backward()
            outputs.append(y.detach())
            optimizer.step()
            optimizer.zero_grad()
        weight = model[0].weight.full_tensor()
        results.append([*outputs, weight if which else weight.t()])
        results[-1] += [manager.slot(*slot).amax_history for slot in manager.slots]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
