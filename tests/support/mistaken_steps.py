"""Mistakes with optimizers and steps, and unusual steps that are right.

A manual boundary that is forgotten is in ``tests/job/test_step_watch.py``.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import fp8dist
from tests.support.logs import captured_log
from tests.support.mistakes import LR, STEPS, Case, adamw, batch, larger, load, loss_of, make_net, plain, weights_of
from tests.support.scenarios import NOT_SILENT, RAISED, RIGHT, SAID, WARNED, Scenarios

SCENARIOS = Scenarios()
scenario, add = SCENARIOS.scenario, SCENARIOS.add

REMEDY = (r"attach\(.*optimizer=", r"manager\.step\(\)")
RECREATED = ("AdamW", r"is about to step 2 FP8 weights \(down, up\) a second time", *REMEDY)
TWO: dict[str, Any] = {"ranks": 2, "everywhere": True}


def _recreated(layout: str = "one", recipe: Any = None) -> Any:
    """After three steps there is a new optimizer, which is not attached."""

    def program(case: Case) -> None:
        net = case.attached(layout, recipe=recipe).called
        case.train(3).train(optimizer=adamw(net)).judge(STEPS if layout == "one" and recipe is None else None)

    return program


add("optimizer re-created after attach", _recreated(), RAISED, *RECREATED)
_NEXT_STEP = _recreated(recipe=fp8dist.DelayedScaling(update="next_step"))
add("re-created, next_step", _NEXT_STEP, RAISED, *RECREATED)
_CURRENT = _recreated(recipe=fp8dist.CurrentScaling())
add("re-created, under a recipe without histories", _CURRENT, NOT_SILENT, *RECREATED)
for _layout in ("ddp", "gather"):
    add(f"optimizer re-created, {_layout}", _recreated(_layout), RAISED, *RECREATED, **TWO)


@scenario("resumed: a new optimizer has loaded the old one's state, with a scheduler", RAISED, *RECREATED)
def resumed(case: Case) -> None:
    old = case.attached().train(3).optimizer
    case.optimizer = adamw(case.called)
    case.optimizer.load_state_dict(old.state_dict())
    case.train(after=torch.optim.lr_scheduler.LambdaLR(case.optimizer, lambda step: 1.0).step)


@scenario("attach(model) only, fsdp2", RAISED, *REMEDY, **TWO)
def forgotten(case: Case) -> None:
    case.build("fsdp2").attach(optimizer=None).train()


@scenario("manager.step() although an optimizer is attached", RAISED, 'boundary="manual"')
def twice_each(case: Case) -> None:
    case.attached().train(after=case.manager.step)


@scenario("never attached, one process", NOT_SILENT, "attach")
def never_attached(case: Case) -> None:
    case.build().train().judge(STEPS)


@scenario("one rank re-creates its optimizer", RAISED, "AdamW", *REMEDY, loses=True, **TWO)
def one_rank_recreates(case: Case) -> None:
    """Not under DDP, which would wait for the other rank's gradients."""
    case.build().attach(timeout=timedelta(seconds=20)).train(3)
    if case.rank == 1:
        case.optimizer = adamw(case.called)
    try:
        case.train()
    except fp8dist.errors.SyncError as error:
        quoted = str(error)
        case.expect("AdamW" in quoted and "manager.step()" in quoted, f"does not quote the other rank: {quoted}")
        case.expect("1" in quoted, f"does not name the other rank: {quoted}")
        raise
    finally:
        case.expect(case.rank == 0 or case.manager.steps == 3, "rank 1 went on")


@scenario("two optimizers are attached, only the first steps", RAISED, "AdamW", *REMEDY)
def one_of_two(case: Case) -> None:
    first, second = (adamw(part) for part in case.build().called.children())
    case.attach(optimizer=[first, second]).train(optimizer=first)


@scenario("load_state_dict(assign=True) after attach", WARNED, r"assign=True", "make the optimizer anew", once=True)
def parameters_replaced(case: Case) -> None:
    called = case.attached().train(2).called
    called.load_state_dict({name: value.clone() for name, value in called.state_dict().items()}, assign=True)
    case.train(3)


@scenario("optimizer.param_groups is replaced", RIGHT)
def groups_replaced(case: Case) -> None:
    optimizer = case.attached().train(3).optimizer
    optimizer.param_groups = [{**optimizer.param_groups[0], "params": list(case.called.parameters())}]
    case.train().judge(STEPS)


@scenario("two models with swapped optimizers", SAID, r"\bup\b", "optimizer")
def swapped_optimizers(case: Case) -> None:
    one, two = copy.copy(case.build()), case.build()
    one.attach(optimizer=two.optimizer)
    two.attach(optimizer=one.optimizer)
    one.train()
    two.train()


@scenario("parameters that are not the model's", RIGHT)
def extra_parameters(case: Case) -> None:
    more = nn.Parameter(torch.ones(3))
    with captured_log(logging.INFO) as log:
        case.attached(make=lambda net: adamw([*net.parameters(), more]))
    case.expect(any("1 of its parameters are not the model's" in text for _, text in log), "is not told at INFO")
    case.train().judge(STEPS)


class Duck:
    """An optimizer by duck typing."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params), "lr": LR}]
        self.state: dict[Any, Any] = {}

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


class Hooked(Duck):
    """Has the methods that register hooks, but never calls the hooks."""

    def register_step_pre_hook(self, hook: Any) -> Any:
        return torch.utils.hooks.RemovableHandle({})

    register_step_post_hook = register_step_pre_hook


class Uninitialised(torch.optim.SGD):
    """Does not call super().__init__(). torch has hooked the step that it inherits."""

    def __init__(self, params: Any) -> None:
        self.param_groups = torch.optim.SGD(params, lr=LR).param_groups
        self.state: Any = {}


for _class in (Duck, Hooked, Uninitialised):
    scenario(f"an optimizer without torch's hooks: {_class.__name__}", RAISED, _class.__name__, REMEDY[1])(
        lambda case, kind=_class: case.attached(make=lambda net: kind(net.parameters()))
    )


@scenario("the optimizer was made before fully_shard", RAISED, "before|former|anew", "fully_shard|shard", ranks=2)
def before_sharding(case: Case) -> None:
    net = make_net()
    optimizer = adamw(net)
    case.build("fsdp2", net=net).attach(optimizer=optimizer)


@scenario("the optimizer was made while FSDP2 had gathered the weights", RAISED, "gathered", "reshard", ranks=2)
def while_gathered(case: Case) -> None:
    net = make_net()
    case.prepare(net)
    case.called = fully_shard(net, mesh=case.mesh)  # Only what the root holds stays gathered after a forward.
    with torch.no_grad():
        case.called(batch(0, 0)[0])
    case.attach(optimizer=adamw(case.called))


@scenario("the optimizer was made before to_empty", RAISED, "before|former|anew", "optimizer")
def before_to_empty(case: Case) -> None:
    case.build(net=make_net(device="meta")).called.to_empty(device="cpu")
    load(case.called, dict(make_net().named_parameters()))
    case.attach()


@scenario("attach, then fully_shard, then a new optimizer", SAID, ranks=2)
def shard_after_attach(case: Case) -> None:
    case.attached().layout = "fsdp2"
    case.called = case.wrap(case.called)
    case.train(optimizer=adamw(case.called))


@scenario("optimizer in backward, not attached, no manager.step()", RAISED, "AdamW", *REMEDY)
def in_backward_forgotten(case: Case) -> None:
    for parameter in case.build().attach(optimizer=None).called.parameters():
        own = adamw([parameter])
        parameter.register_post_accumulate_grad_hook(lambda p, own=own: own.step())
    for _ in range(STEPS):
        case.backward()


def _by_hand(layout: str) -> Callable[[Case], None]:
    def program(case: Case) -> None:
        case.build(layout).attach(optimizer=None)
        for _ in range(STEPS):
            case.backward()
            for p in case.called.parameters():
                with torch.no_grad():
                    p.add_(p.grad.sign(), alpha=-0.01)
                p.grad = None

    return program


for _layout in ("ddp", "gather"):
    add(f"p.add_(…), no manager.step(), {_layout}", _by_hand(_layout), WARNED, REMEDY[1], ranks=2, once=True)


@scenario("get_optimizer_state_dict of a re-created optimizer", RIGHT)
def state_of_new(case: Case) -> None:
    case.attached().train(after=lambda: get_optimizer_state_dict(case.called, adamw(case.called))).judge(STEPS)


@scenario("two optimizer steps for each backward", RIGHT)
def two_steps(case: Case) -> None:
    case.attached()
    for _ in range(STEPS):
        case.backward()
        case.step()
        case.step()
        case.optimizer.zero_grad()
    case.judge()


CALIBRATED = "calibrate() around each training step, as TransformerEngine's calibrating=True"


@scenario(CALIBRATED, WARNED, "no_fp8", "recording", once=True)
def calibrated_steps(case: Case) -> None:
    case.attached()
    for _ in range(3):
        with case.manager.calibrate():
            case.backward()
        case.step()
        case.optimizer.zero_grad()


ZEROED = "zero_grad() between backward and step, with two optimizers"


@scenario(ZEROED, WARNED, "no parameter has a gradient", "zero_grad", once=True)
def zeroed_first(case: Case) -> None:
    optimizers = [adamw(part) for part in case.build().called.children()]
    case.attach(optimizer=optimizers)
    for _ in range(3):
        case.backward()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for optimizer in optimizers:
            case.step(optimizer)


def _in_eval(steps: int, of: Callable[[Any], nn.Module]) -> Callable[[Case], None]:
    """After ``steps`` steps, the model or a part of it is in eval()."""

    def program(case: Case) -> None:
        of(case.attached().train(steps).called).eval()
        case.train()

    return program


LEFT = "trained in eval() after some steps in train()"
PART = "a part is left in eval() after some steps"
add("trained in eval()", _in_eval(0, lambda net: net), WARNED, r"eval\(\)", "recording", r"\bdown, up\b", once=True)
add(LEFT, _in_eval(3, lambda net: net), WARNED, r"eval\(\)", r"train\(\)", r"\bdown, up\b", once=True)
add(PART, _in_eval(3, lambda net: net.up), WARNED, r"eval\(\)", r"FP8 weights of up\b", once=True)


@scenario("trained in eval(), inside recording()", RIGHT)
def recorded_in_eval(case: Case) -> None:
    case.attached().called.eval()
    with case.manager.recording():
        case.train()
    case.expect(case.manager.metrics()["fp8/cold_slots"] == 0, "slots are cold")
    case.judge(STEPS)


@scenario("gradients in eval(): saliency, and adversarial inputs for each step", RIGHT)
def gradients_in_eval(case: Case) -> None:
    case.attached()
    for _ in range(STEPS):
        case.called.eval()
        x, y = case.batch()
        loss_of(case.called(x.requires_grad_()), y).backward()
        case.optimizer.zero_grad()
        case.called.train()
        case.train(1)
    case.called.eval()
    case.gradient("saliency")
    case.judge(STEPS)


def _resumed(late: bool) -> Callable[[Case], None]:
    """Resumes from weights and the optimizer's state, which are loaded before or after ``attach``."""

    def program(case: Case) -> None:
        first = copy.copy(case.attached().train(3))
        case.build()
        if late:
            case.attach()
        case.called.load_state_dict(first.called.state_dict())
        case.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        if not late:
            case.attach()
        case.train()

    return program


UNSEEN = ("resumes without FP8 state", "load_state_dict", "calibrate")
add("resumed without FP8 state, before attach", _resumed(late=False), WARNED, *UNSEEN, once=True)
add("resumed without FP8 state, after attach", _resumed(late=True), WARNED, *UNSEEN, once=True)


@scenario("recording() and no_fp8() around steps that train", RIGHT)
def recorded_steps(case: Case) -> None:
    manager = case.attached().manager
    with manager.no_fp8(), manager.recording():
        case.train(3)
    case.expect(manager.metrics()["fp8/cold_slots"] == 0, "slots are cold")
    case.train().judge(STEPS)


@scenario("a second backward after the step, without a new forward", NOT_SILENT)
def second_backward(case: Case) -> None:
    weights = weights_of(case.attached().train(3).called)
    x, y = batch(0, 3)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = loss_of(case.called(mine), y)
    loss.backward(retain_graph=True)
    case.step()
    mine.grad = None
    try:
        loss.backward()
    except RuntimeError as error:
        if "inplace operation" not in str(error):  # The error that nn.Linear raises too.
            raise
        return
    (expected,) = torch.autograd.grad(loss_of(plain(weights, theirs), y), theirs)
    case.measure("gradient of the second backward", mine.grad, expected, 0.2)


@scenario("an evolution strategy: no backward at all", RIGHT)
def no_backward(case: Case) -> None:
    case.build().attach(optimizer=None)
    with torch.no_grad():
        for index in range(8):
            for p in case.called.parameters():
                p.mul_(1.6)
            x, _ = batch(0, index)
            case.measure(f"output {index}", case.called(x), plain(weights_of(case.called), x))
            if index % 2:
                case.manager.step()


@scenario("evaluated only: never attached, never trained", RIGHT)
def evaluated_only(case: Case) -> None:
    case.build().output("before loading", train=False)
    load(case.called, larger())
    case.output("after loading", train=False)


def _scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60)


def _scaled(given: Callable[[Any], Any], late: bool = False, update_first: bool = False) -> Callable[[Case], None]:
    """The first loss scale overflows; later ones do not.

    ``given``: makes the scaler that is passed of the one that is used. ``late``: that one is made after ``attach``.
    """

    def program(case: Case) -> None:
        used = None if late else _scaler()
        case.build().attach(scaler=given(used))
        used = used or _scaler()
        taken = index = 0
        while taken < STEPS:
            x, y = batch(0, index % STEPS)
            index += 1
            used.scale(1e4 * loss_of(case.called(x), y)).backward()
            taken += all(bool(p.grad.isfinite().all()) for p in case.called.parameters() if p.grad is not None)
            if update_first:
                used.unscale_(case.optimizer)
                used.update()
            used.step(case.optimizer)
            if not update_first:
                used.update()
            case.optimizer.zero_grad()
            if index > 2 * STEPS:
                case.flaw("the scale never fits")
                return
        case.expect(index > STEPS, "nothing overflowed")
        case.output().output("eval", train=False)

    return program


LATE, EARLY = "the GradScaler is made after attach", "GradScaler.update() before its step"
add("another GradScaler is passed", _scaled(lambda used: _scaler()), NOT_SILENT, "scaler")
add(LATE, _scaled(lambda used: None, late=True), frozenset({RIGHT, WARNED}), "scaler=")
add(EARLY, _scaled(lambda used: used, update_first=True), NOT_SILENT | {"foreign"}, "scaler")


@scenario("a copy is trained", SAID, "attach")
def trained_copy(case: Case) -> None:
    case.called = copy.deepcopy(case.attached().train(3).called)
    case.train(optimizer=adamw(case.called))


@scenario("frozen at attach, trained later", frozenset({RIGHT, WARNED}), r"\bup\b")
def frozen_first(case: Case) -> None:
    case.build().called.up.requires_grad_(False)
    case.attach().train(3).called.up.requires_grad_(True)
    case.train(STEPS).judge()


@scenario("trained before attach", NOT_SILENT, "attach")
def trained_before(case: Case) -> None:
    case.build().train(3).attach().train().judge(STEPS)


@scenario("a deep copy's manager is attached to the original's optimizer", SAID, "optimizer")
def copy_with_old_optimizer(case: Case) -> None:
    case.called = copy.deepcopy(case.attached().train(3).called)
    case.manager = fp8dist.get_manager(case.called)
    case.attach().train()


def every(n: int, call: Callable[[], Any]) -> Callable[[], None]:
    """Return a function whose every n-th call calls ``call``."""
    count = itertools.count(1)
    return lambda: call() if next(count) % n == 0 else None


@scenario("frozen at attach, trained later by an optimizer of its own", RAISED, "AdamW", *REMEDY)
def frozen_first_own_optimizer(case: Case) -> None:
    net = case.build(make=lambda net: adamw(net.down)).called
    net.up.requires_grad_(False)
    case.attach().train(3)
    net.up.requires_grad_(True)
    net.down.requires_grad_(False)
    case.train(optimizer=adamw(net.up))


@scenario("LBFGS with a closure, re-created", RAISED, "LBFGS", *REMEDY)
def lbfgs_recreated(case: Case) -> None:
    def lbfgs(net: nn.Module) -> torch.optim.LBFGS:
        return torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)

    new = lbfgs(case.attached(make=lbfgs).called)

    def closure() -> Tensor:
        new.zero_grad()
        return case.backward()

    for _ in range(STEPS):
        new.step(closure)  # type: ignore[arg-type]


@scenario("two optimizers are attached, the second steps every fourth step", RAISED, "AdamW", *REMEDY)
def second_of_two_every_fourth(case: Case) -> None:
    first, second = (adamw(part) for part in case.build().called.children())
    case.attach(optimizer=[first, second]).train(optimizer=first, after=every(4, second.step))
