"""Where ops may be called directly, and where somebody else must see them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fp8dist_kernels import direct

E4M3 = torch.float8_e4m3fn


class Sub(Tensor):
    pass


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


SEEN_BY_NOBODY = (
    *(nullcontext, torch.no_grad, torch.inference_mode),
    *(lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.device("cpu")),
)
SEEN = (Watching, FakeTensorMode, lambda: FlopCounterMode(display=False), torch.autograd.profiler.profile)


@pytest.mark.parametrize("context", [*SEEN_BY_NOBODY, *SEEN])
def test_contexts(context: Callable[[], AbstractContextManager[Any]]) -> None:
    x = torch.ones(16, 16)
    with context():
        assert direct.is_plain(x) is (context in SEEN_BY_NOBODY)
    assert direct.is_plain(x)


def test_tensors() -> None:
    x, wanted = torch.ones(2, 2), torch.ones(2, requires_grad=True)
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    for plain in (x, torch.ones(2, 4)[:, ::2].t(), frozen, wanted.detach()):
        assert direct.is_plain(plain)
    for other in (wanted, x.as_subclass(Sub), x.to("meta"), torch._neg_view(x), torch._efficientzerotensor((2,))):
        assert not direct.is_plain(other)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.func.jvp itself uses torch.jit.script.
def test_transforms_and_tracers() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(direct.is_plain(x))
        return x * 2

    x = torch.ones(3, 4)
    torch.vmap(function)(x)
    torch.func.jvp(function, (x,), (x,))
    torch.func.functionalize(function)(x)
    make_fx(function)(x)
    make_fx(function, tracing_mode="fake", pre_dispatch=True)(x)
    torch.jit.trace(function, x, check_trace=False)
    assert not any(seen)
    assert len(seen) >= 6
    function(x)
    assert seen[-1]


def test_a_lazily_negated_tensor_is_cast_with_its_sign() -> None:
    x = torch._neg_view(torch.arange(256.0).view(16, 16))
    slot = torch.tensor(1.0), torch.tensor(False), torch.tensor(-1.0)
    options: dict[str, Any] = {
        "record": True, "just_in_time": False, "margin": 0, "power_of_two": False, "rows": True, "columns": False,
    }  # fmt: skip
    rows, _, _ = direct.quantize(x, *slot, E4M3, **options)
    assert torch.equal(rows.float(), (-torch.arange(256.0)).to(E4M3).float().view(16, 16))
    assert slot[2] == 255.0
