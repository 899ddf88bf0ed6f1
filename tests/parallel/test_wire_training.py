"""Training with gradients in FP8: how exact they are, and that DDP's options work as without."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import DelayedScaling
from launch.train_gpt.data import read_text
from launch.train_gpt.model import GPT
from tests.parallel.test_wire import everything_in_fp8, in_fp8
from tests.support.collectives import counted_collectives
from tests.support.lab.mixture import MixtureGPT
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import POOLS, RankPool, on_ranks
from tests.support.suite import few
from tests.support.training import batch, bits, make_net

NORM, WORST = 0.04, 0.06
"""The largest error that is promised: of all gradients, and of the gradient of a parameter, as shares of their norms.
"""

MODELS: dict[str, Callable[[], nn.Module]] = {
    "main job": lambda: GPT(2, 64, 4, 64),
    "mixture": lambda: MixtureGPT(2, 64, 4, 64, 4, 2),
}


@everything_in_fp8()
def errors(kind: str, seed: int, steps: int, jump: int) -> tuple[float, float, str]:
    """Train with all buckets in FP8, and return the largest error of the reduced gradients in any step, as a share of
    their norm, and that of any parameter, with its name. In step ``jump`` the loss is 100 times as large."""
    torch.manual_seed(seed)
    model = MODELS[kind]()
    manager = fp8dist.prepare(model, DelayedScaling(), group=dist.group.WORLD)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.3)
    hook = fp8dist.ddp.comm_hook(manager, gradients="fp8")
    exact: dict[int, Tensor] = {}

    def measuring(state, bucket):  # type: ignore[no-untyped-def]
        mean = bucket.buffer() / dist.get_world_size()
        dist.all_reduce(mean)
        parameters = bucket.parameters()
        exact.update(zip(map(id, parameters), mean.split([one.numel() for one in parameters])))
        return hook(state, bucket)

    ddp.register_comm_hook(None, measuring)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    manager.attach(ddp, optimizer=optimizer)
    text = torch.frombuffer(bytearray(read_text(None, 64).training), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    norm, worst = 0.0, (0.0, "")
    for step in range(steps):
        starts = torch.randint(len(text) - 65, (8,), generator=generator)
        windows = torch.stack([text[start : start + 65] for start in starts.tolist()]).long()
        with torch.autocast("cpu", torch.bfloat16):
            loss = ddp(windows[:, :-1], windows[:, 1:])
        (loss * (100 if step == jump else 1)).backward()
        lost = [float((p.grad.view(-1) - exact[id(p)]).norm()) for p in model.parameters()]
        means = [float(exact[id(p)].norm()) for p in model.parameters()]
        norm = max(norm, math.hypot(*lost) / math.hypot(*means))
        names = [name for name, _ in model.named_parameters()]
        worst = max(worst, *((a / b, name) for name, a, b in zip(names, lost, means) if a))
        optimizer.step()
        optimizer.zero_grad()
    fp8dist.ddp.check_gradients(hook)
    manager.check()
    manager.detach()
    return norm, *worst


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "kind", "steps"),
    few([(2, "main job", 4), (4, "main job", 300), (4, "mixture", 300)], (2, "main job", 4)),
)
def test_few_gradients_are_lost(
    request: pytest.FixtureRequest,
    ranks: int,
    kind: str,
    steps: int,
    record_property: Callable[[str, object], None],
) -> None:
    pool: RankPool = request.getfixturevalue(POOLS[ranks])
    for norm, worst, name in pool.run(errors, kind, 0, steps, steps // 2, timeout=900):
        record_property("errors", (norm, worst, name))
        assert norm <= NORM
        assert worst <= WORST


def _backward(ddp: nn.Module, index: int, **options: Any) -> None:
    x, y = batch(dist.get_rank(), index)
    (ddp(x, **options) - y).square().mean().backward()


def no_sync(ddp: Any) -> None:
    with ddp.no_sync():
        _backward(ddp, 0)
    _backward(ddp, 1)


def accumulated(ddp: nn.Module) -> None:
    for index in range(3):
        _backward(ddp, index)


def unused(ddp: nn.Module) -> None:
    _backward(ddp, 0, skip=dist.get_rank() == 0)


def several(ddp: nn.Module) -> None:
    for index in range(3):
        ddp.zero_grad()
        _backward(ddp, index)


def clipped(ddp: nn.Module) -> None:
    _backward(ddp, 0)
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)


OPTIONS: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
    "no_sync": (no_sync, {}),
    "accumulation": (accumulated, {}),
    "unused parameters": (unused, {"find_unused_parameters": True}),
    "static graph": (several, {"static_graph": True}),
    "bucket views": (several, {"gradient_as_bucket_view": True}),
    "clipping": (clipped, {}),
}


def _errors_of(program: Callable[[Any], None], state: Any = None, exclude: Any = (), **options: Any) -> float:
    """Return the error of the gradients, as a share of their norm under plain DDP. They must have the same bits on all
    ranks."""
    plain, model = make_net(), make_net()
    program(DistributedDataParallel(plain, bucket_cap_mb=0.004, **options))
    ddp, hook = in_fp8(model, state=state, exclude=exclude, bucket_cap_mb=0.004, **options)
    with everything_in_fp8():
        program(ddp)
    fp8dist.ddp.check_gradients(hook)
    expected, got = (torch.cat([p.grad.reshape(-1) for p in each.parameters()]) for each in (plain, model))
    same_on_all_ranks(bits(got))
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2)
def test_options_of_ddp(name: str) -> None:
    program, options = OPTIONS[name]
    casts = 3 if program is accumulated else 1  # DDP sends again what it has accumulated.
    assert 0 < _errors_of(program, **options) <= casts * NORM


@on_ranks(2)
def test_a_scaler_skips_on_all_ranks() -> None:
    model = make_net()
    ddp, _ = in_fp8(model, bucket_cap_mb=0.004)
    optimizer, scaler = torch.optim.SGD(ddp.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    with everything_in_fp8():
        for step in range(3):
            before = bits(model.first.weight)
            x, y = batch(dist.get_rank(), step)
            loss = (ddp(x) - y).square().mean() * (torch.inf if step == 1 and dist.get_rank() == 1 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert (bits(model.first.weight) == before) == (step == 1)
            assert scaler.get_scale() == (8 if step == 0 else 4)
            same_on_all_ranks(bits(model.first.weight))


@on_ranks(3)
def test_join() -> None:
    """A rank without data receives and sends as the others do."""
    plain, model = make_net(), make_net()
    wrapped, hook = in_fp8(model, bucket_cap_mb=0.004)
    for ddp in (DistributedDataParallel(plain, bucket_cap_mb=0.004), wrapped):
        optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
        with everything_in_fp8(), Join([ddp]):
            for step in range(2 + 2 * dist.get_rank()):
                _backward(ddp, step)
                optimizer.step()
                optimizer.zero_grad()
    fp8dist.ddp.check_gradients(hook)
    same_on_all_ranks([bits(p) for p in model.parameters()])
    for one, other in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(one, other, rtol=0, atol=0.02)


@on_ranks(2)
def test_after_a_backward_that_failed() -> None:
    """Buckets that were under way are dropped."""
    model = make_net()
    ddp, hook = in_fp8(model, bucket_cap_mb=0.004)

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    with everything_in_fp8():
        _backward(ddp, 0)
        _backward(ddp, 0)
        handle = model.first.bias.register_hook(fail)
        with pytest.raises(ArithmeticError):
            _backward(ddp, 0)
        handle.remove()
        with contextlib.suppress(RuntimeError):  # DDP's own reducer may refuse the next forward.
            ddp.zero_grad()
            _backward(ddp, 1)
            same_on_all_ranks(bits(model.first.weight.grad))
    fp8dist.ddp.check_gradients(hook)


class _Repeated(nn.Module):
    """A module in a reentrant checkpoint."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)  # type: ignore[no-any-return]


def _in_ddp(hook_of: Callable[[nn.Module], Any] | None, repeated: bool) -> nn.Module:
    """Return Linears in DDP, two of them in a DDP module inside of it. Both have the hook."""
    torch.manual_seed(0)
    inner = DistributedDataParallel(nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48)), bucket_cap_mb=0.004)
    part = _Repeated(inner) if repeated else inner
    model = nn.Sequential(nn.Linear(32, 48), part, nn.Linear(48, 48), nn.Linear(48, 16))
    ignored = [name for name, _ in model.named_parameters() if name.startswith("1.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    outer = DistributedDataParallel(model, bucket_cap_mb=0.004)
    if hook_of is not None:
        hook = hook_of(model)
        outer.register_comm_hook(None, hook)
        inner.register_comm_hook(None, hook)
    return outer


@pytest.mark.parametrize("repeated", [False, True], ids=["", "in a reentrant checkpoint"])
@on_ranks(2)
def test_a_hook_for_a_ddp_module_inside_of_another(repeated: bool) -> None:
    """In a backward, the buckets of the inner one come between those of the outer one."""
    hooks = (None, lambda model: fp8dist.ddp.comm_hook(model, gradients="fp8"))
    plain, ddp = (_in_ddp(of, repeated) for of in hooks)
    with everything_in_fp8():
        several(plain)
        several(ddp)
    expected, got = (torch.cat([p.grad.reshape(-1) for p in each.parameters()]) for each in (plain, ddp))
    same_on_all_ranks(bits(got))
    assert 0 < float((got - expected).norm() / expected.norm()) <= NORM


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)], ids=str)
@on_ranks(4)
def test_nodes(shape: tuple[int, int]) -> None:
    """On a mesh bf16 travels within nodes; FP8 between them, or nothing if there is one. All ranks have the same
    bits."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "gpu"))
    with counted_collectives() as calls:
        error = _errors_of(several, mesh, "last.bias")
    assert ("all_to_all_single" in calls.names) is (shape[0] > 1)
    assert 0 < error <= NORM if shape[0] > 1 else error < 1e-6
