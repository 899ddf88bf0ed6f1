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

import fp8dist
from fp8dist import DelayedScaling
from launch.train_gpt.data import read_text
from launch.train_gpt.model import GPT
from tests.parallel.test_wire import everything_in_fp8, in_fp8
from tests.support.collectives import counted_collectives
from tests.support.lab.mixture import MixtureGPT
from tests.support.ranks import RankPool, on_ranks
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
@pytest.mark.parametrize("kind", few(MODELS, "main job"))
def test_few_gradients_are_lost(two_ranks: RankPool, kind: str) -> None:
    for norm, worst, _ in two_ranks.run(errors, kind, 0, 8, 4):
        assert norm <= NORM
        assert worst <= WORST


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "seed"),
    [("main job", 0), ("main job", 1), ("main job", 2), ("mixture", 0)],  # Others: not run.
)
def test_few_gradients_are_lost_in_300_steps(
    four_ranks: RankPool, kind: str, seed: int, record_property: Callable[[str, object], None]
) -> None:
    for norm, worst, name in four_ranks.run(errors, kind, seed, 300, 150, timeout=900):
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


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2)
def test_options_of_ddp(name: str) -> None:
    """Gradients are those of plain DDP, but for what FP8 loses, and have the same bits on all ranks."""
    program, options = OPTIONS[name]
    found = []
    for quantised in (False, True):
        model = make_net()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.004, **options)
        if quantised:
            ddp.register_comm_hook(None, hook := fp8dist.ddp.comm_hook(model, gradients="fp8"))
        with everything_in_fp8():
            program(ddp)
        found.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    expected, got = found
    casts = 3 if program is accumulated else 1  # DDP sends again what it has accumulated.
    assert 0 < float((got - expected).norm()) <= casts * NORM * float(expected.norm())
    assert _same_on_all_ranks(got)
    fp8dist.ddp.check_gradients(hook)


def _same_on_all_ranks(tensor: Tensor) -> bool:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, bits(tensor))
    return len(set(gathered)) == 1


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
            assert _same_on_all_ranks(model.first.weight)


@on_ranks(3)
def test_join() -> None:
    """A rank without data receives and sends as the others do."""
    models = make_net(), make_net()
    for quantised, model in enumerate(models):
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.004)
        if quantised:
            ddp.register_comm_hook(None, hook := fp8dist.ddp.comm_hook(model, gradients="fp8"))
        optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
        with everything_in_fp8(), Join([ddp]):
            for step in range(2 + 2 * dist.get_rank()):
                _backward(ddp, step)
                optimizer.step()
                optimizer.zero_grad()
    fp8dist.ddp.check_gradients(hook)
    assert _same_on_all_ranks(torch.cat([p.view(-1) for p in models[1].parameters()]))
    for one, other in zip(models[0].parameters(), models[1].parameters()):
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
            assert _same_on_all_ranks(model.first.weight.grad)
    fp8dist.ddp.check_gradients(hook)


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)], ids=str)
@on_ranks(4)
def test_nodes(shape: tuple[int, int]) -> None:
    """On a mesh bf16 travels within nodes; FP8 between them, or nothing if there is one. All ranks have the same
    bits."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "gpu"))
    found = []
    for quantised in (False, True):
        model = make_net()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.004)
        if quantised:
            ddp.register_comm_hook(mesh, hook := fp8dist.ddp.comm_hook(model, gradients="fp8", exclude="last.bias"))
        with everything_in_fp8(), counted_collectives() as calls:
            several(ddp)
        found.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    expected, got = found
    if shape[0] == 1:
        assert "all_to_all_single" not in calls.names
        assert torch.allclose(expected, got)
    else:
        assert 0 < float((got - expected).norm()) <= NORM * float(expected.norm())
    assert _same_on_all_ranks(got)
    fp8dist.ddp.check_gradients(hook)
