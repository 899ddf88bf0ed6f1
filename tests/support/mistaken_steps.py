"""Mistakes with optimizers and steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import fp8dist
from tests.support.mistakes import (
    LR,
    OUTPUT,
    STEPS,
    Case,
    Net,
    adamw,
    batch,
    larger,
    load,
    loss_of,
    make_net,
    plain,
    ranks_of,
    weights_of,
)
from tests.support.scenarios import NOT_SILENT, RAISED, RIGHT, SAID, WARNED, Scenarios

SCENARIOS = Scenarios()
scenario = SCENARIOS.scenario

REMEDY = (r"attach\(.*optimizer=", r"manager\.step\(\)")
RECREATED = ("AdamW", r"\b2\b.*FP8|FP8.*\b2\b", *REMEDY)


def attached(
    case: Case, layout: str = "one", recipe: Any = None, **options: Any
) -> tuple[nn.Module, Any, torch.optim.AdamW]:
    """Return a correct program, ready to train. ``options``: of ``attach``."""
    called, manager = case.build(layout, recipe=recipe)
    optimizer = adamw(called)
    manager.attach(called, optimizer=optimizer, **options)
    return called, manager, optimizer


# No boundary comes -----------------------------------------------------------------------------------------


def _recreated(layout: str = "one", recipe: Any = None, steps: int = 3, compiled: bool = False) -> Any:
    """After ``steps`` steps there is a new optimizer, which is not attached."""

    def program(case: Case) -> None:
        called, _, optimizer = attached(case, layout, recipe)
        trained = case.compile(called) if compiled else called
        case.train(trained, optimizer, steps, layout=layout)
        case.train(trained, adamw(called), STEPS - steps, steps, layout=layout)
        case.judge(called, STEPS if layout == "one" and recipe is None else None)

    return program


CURRENT, NEXT_STEP = fp8dist.CurrentScaling(), fp8dist.DelayedScaling(update="next_step")

SCENARIOS.add("optimizer re-created after attach", _recreated(), RAISED, *RECREATED)
SCENARIOS.add("optimizer re-created before the first step", _recreated(steps=0), RAISED, *RECREATED)
SCENARIOS.add("torch.compile, then the optimizer is re-created", _recreated(compiled=True), RAISED, *RECREATED)
SCENARIOS.add("re-created, next_step", _recreated(recipe=NEXT_STEP), RAISED, *RECREATED)
SCENARIOS.add("re-created, under a recipe without histories", _recreated(recipe=CURRENT), NOT_SILENT, *RECREATED)
SCENARIOS.add(
    "re-created, CurrentScaling with an FP8 all-gather",
    _recreated("gather", CURRENT),
    NOT_SILENT,
    *RECREATED,
    ranks=2,
)
for _layout in ("ddp", "gather"):
    SCENARIOS.add(f"optimizer re-created, {_layout}", _recreated(_layout), RAISED, *RECREATED, ranks=2, everywhere=True)


@scenario("resumed: a new optimizer has loaded the old one's state, with a scheduler", RAISED, *RECREATED)
def resumed(case: Case) -> None:
    called, _, optimizer = attached(case)
    case.train(called, optimizer, 3)
    new = adamw(called)
    new.load_state_dict(optimizer.state_dict())
    scheduler = torch.optim.lr_scheduler.LambdaLR(new, lambda step: 1.0)
    case.train(called, new, STEPS - 3, 3, after=scheduler.step)
    case.judge(called, STEPS)


@scenario("a phase with an optimizer of another class", RAISED, "SGD", *RECREATED[1:])
def another_class(case: Case) -> None:
    called, _, optimizer = attached(case)
    case.train(called, optimizer, 3)
    case.train(called, torch.optim.SGD(called.parameters(), lr=0.5), 60, 3)
    case.judge(called)


def _loop(given: bool, layout: str = "one", every: int = 0, **options: Any) -> Any:
    """``given``: attach the optimizer. ``every``: call ``manager.step()`` after so many steps."""

    def program(case: Case) -> None:
        called, manager = case.build(layout)
        optimizer = adamw(called)
        manager.attach(called, optimizer=optimizer if given else None, **options)
        case.train(called, optimizer, layout=layout, after=_every(every, manager.step) if every else None)
        case.judge(called)

    return program


SCENARIOS.add("attach() without optimizer, and no manager.step()", _loop(False), RAISED, *REMEDY)
SCENARIOS.add('boundary="manual", and no manager.step()', _loop(True, boundary="manual"), RAISED, REMEDY[1])
SCENARIOS.add("manager.step() only every fourth step", _loop(True, every=4, boundary="manual"), RAISED, REMEDY[1])
SCENARIOS.add("manager.step() although an optimizer is attached", _loop(True, every=1), RAISED, 'boundary="manual"')
for _layout in ("fsdp1", "fsdp2", "tp"):
    SCENARIOS.add(f"attach(model) only, {_layout}", _loop(False, _layout), RAISED, *REMEDY, ranks=2, everywhere=True)


@scenario("manager.step() before attach on two ranks", RAISED, "attach", ranks=2, everywhere=True)
def step_before_attach(case: Case) -> None:
    called, manager = case.build("ddp")
    case.train(called, adamw(called), after=manager.step)


@scenario("never attached, one process", NOT_SILENT, "attach")
def never_attached(case: Case) -> None:
    called, _ = case.build()
    case.train(called, adamw(called))
    case.judge(called, STEPS)


@scenario("never attached, DDP", SAID, "attach", ranks=2)
def never_attached_ddp(case: Case) -> None:
    called, _ = case.build("ddp")
    case.train(called, adamw(called))


@scenario("never attached, FSDP2 with an FP8 all-gather", RAISED, r"attach\(\)", ranks=2, everywhere=True)
def never_attached_gather(case: Case) -> None:
    called, _ = case.build("gather")
    case.train(called, adamw(called))


@scenario("one rank re-creates its optimizer", RAISED, "AdamW", *REMEDY, ranks=2, loses=True, everywhere=True)
def one_rank_recreates(case: Case) -> None:
    called, manager = case.build("one")  # Not DDP, which would wait for the other rank's gradients.
    optimizer = adamw(called)
    manager.attach(called, optimizer=optimizer, timeout=timedelta(seconds=20))
    case.train(called, optimizer, 3)
    if case.rank == 1:
        optimizer = adamw(called)
    try:
        case.train(called, optimizer, STEPS - 3, 3)
    except fp8dist.errors.SyncError as error:
        quoted = str(error)
        case.expect("AdamW" in quoted and "manager.step()" in quoted, f"does not quote the other rank: {quoted}")
        case.expect("1" in quoted, f"does not name the other rank: {quoted}")
        raise
    finally:
        case.expect(case.rank == 0 or manager.steps == 3, "rank 1 went on")


# Several optimizers ----------------------------------------------------------------------------------------


@scenario("two optimizers hold FP8 weights, one is attached", WARNED, r"\bdown\b", "optimizer")
def one_of_two(case: Case) -> None:
    called, manager = case.build()
    first, second = (adamw(part) for part in called.children())
    manager.attach(called, optimizer=first)
    for index in range(STEPS):
        case.backward(called, index)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    case.judge(called, STEPS)


@scenario("two optimizers are attached, only the first steps", RAISED, "AdamW", *REMEDY)
def first_of_two(case: Case) -> None:
    called, manager = case.build()
    both = [adamw(part) for part in called.children()]
    manager.attach(called, optimizer=both)
    case.train(called, both[0])


@scenario("two optimizers are attached, the second steps every fourth step", RAISED, "AdamW", *REMEDY)
def alternating(case: Case) -> None:
    called, manager = case.build()
    first, second = (adamw(part) for part in called.children())
    manager.attach(called, optimizer=[first, second])
    case.train(called, first, after=_every(4, second.step))


@scenario("a parameter group is added later", WARNED, r"\bdown\b", "optimizer")
def added_later(case: Case) -> None:
    called, manager = case.build()
    assert isinstance(called, Net)
    optimizer = adamw(called.up)
    manager.attach(called, optimizer=optimizer)
    case.train(called, optimizer, 2)
    optimizer.add_param_group({"params": list(called.down.parameters())})
    case.train(called, optimizer, STEPS, 2)
    case.judge(called)


@scenario("optimizer.param_groups is replaced", RIGHT)
def groups_replaced(case: Case) -> None:
    called, _, optimizer = attached(case)
    case.train(called, optimizer, 3)
    optimizer.param_groups = [{**optimizer.param_groups[0], "params": list(called.parameters())}]
    case.train(called, optimizer, STEPS - 3, 3)
    case.judge(called, STEPS)


@scenario("two models with swapped managers", RAISED, "attach")
def swapped_managers(case: Case) -> None:
    (one, first), (two, second) = case.build(), case.build(seed=1)
    optimizers = adamw(one), adamw(two)
    first.attach(two, optimizer=optimizers[1])
    second.attach(one, optimizer=optimizers[0])


@scenario("two models with swapped optimizers", SAID, r"\bup\b", "optimizer")
def swapped_optimizers(case: Case) -> None:
    (one, first), (two, second) = case.build(), case.build(seed=1)
    optimizers = adamw(one), adamw(two)
    first.attach(one, optimizer=optimizers[1])
    second.attach(two, optimizer=optimizers[0])
    case.train(one, optimizers[0])
    case.train(two, optimizers[1])
    case.judge(one, STEPS)


@scenario("the optimizer of a copy is attached", SAID, r"\bup\b", "optimizer")
def of_a_copy(case: Case) -> None:
    called, manager = case.build()
    optimizer = adamw(make_net())
    manager.attach(called, optimizer=optimizer)
    case.train(called, optimizer)
    case.judge(called, STEPS)


@scenario("parameters that are not the model's", RIGHT, info=("parameter",))
def extra_parameters(case: Case) -> None:
    called, manager = case.build()
    optimizer = adamw([*called.parameters(), nn.Parameter(torch.ones(3))])
    manager.attach(called, optimizer=optimizer)
    case.train(called, optimizer)
    case.judge(called, STEPS)


# What is no optimizer with hooks -------------------------------------------------------------------------------


class Duck:
    """An optimizer by duck typing."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params), "lr": LR}]
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= LR * parameter.grad.sign()

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


class Hooked(Duck):
    """Has the methods that register hooks, but never calls the hooks."""

    def register_step_pre_hook(self, hook: Any) -> Any:
        return torch.utils.hooks.RemovableHandle({})

    register_step_post_hook = register_step_pre_hook


class Uninitialised(torch.optim.Optimizer):
    """Does not call super().__init__()."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params), "lr": LR}]
        self.state: Any = {}

    step = Duck.step  # type: ignore[assignment]
    zero_grad = Duck.zero_grad  # type: ignore[assignment]


def _of_class(kind: Callable[[Any], Any]) -> Callable[[Case], None]:
    def program(case: Case) -> None:
        called, manager = case.build()
        optimizer = kind(called.parameters())
        manager.attach(called, optimizer=optimizer)
        case.train(called, optimizer)
        case.judge(called)

    return program


SCENARIOS.add("a duck-typed optimizer", _of_class(Duck), RAISED, "Duck", r"manager\.step\(\)")
SCENARIOS.add("a duck-typed optimizer with hook methods", _of_class(Hooked), RAISED, "Hooked", r"manager\.step\(\)")
SCENARIOS.add(
    "an optimizer that never called super().__init__()",
    _of_class(Uninitialised),
    RAISED,
    "Uninitialised",
    r"manager\.step\(\)",
)


@scenario("the optimizer was made before fully_shard", RAISED, "before|former|anew", "fully_shard|shard", ranks=2)
def before_sharding(case: Case) -> None:
    net = make_net()
    manager = case.prepare(net)
    optimizer = adamw(net)
    called = case.wrap(net, "fsdp2")
    manager.attach(called, optimizer=optimizer)
    case.train(called, optimizer)
    case.judge(called, STEPS)


@scenario("the optimizer was made while FSDP2 had gathered the weights", RAISED, "gathered", "reshard", ranks=2)
def while_gathered(case: Case) -> None:
    net = make_net()
    manager = case.prepare(net)
    called = fully_shard(net, mesh=case.mesh)  # Only what the outermost module holds stays gathered after a forward.
    with torch.no_grad():
        called(batch(0, 0)[0])
    optimizer = adamw(called)
    manager.attach(called, optimizer=optimizer)
    case.train(called, optimizer)
    case.judge(called, STEPS)


@scenario("the optimizer was made before to_empty", RAISED, "before|former|anew", "optimizer")
def before_to_empty(case: Case) -> None:
    net = make_net(device="meta")
    manager = case.prepare(net)
    optimizer = adamw(net)
    net.to_empty(device="cpu")
    load(net, dict(make_net().named_parameters()))
    manager.attach(net, optimizer=optimizer)
    case.train(net, optimizer)
    case.judge(net, STEPS)


@scenario("attach, then fully_shard, then a new optimizer", SAID, ranks=2)
def shard_after_attach(case: Case) -> None:
    net = make_net()
    manager = case.prepare(net)
    manager.attach(net, optimizer=adamw(net))
    called = case.wrap(net, "fsdp2")
    case.train(called, adamw(called))
    case.judge(called, STEPS)


# Steps of other kinds -------------------------------------------------------------------------------------------


def _in_backward(called: nn.Module) -> list[torch.optim.Optimizer]:
    optimizers: list[torch.optim.Optimizer] = []
    for parameter in called.parameters():
        optimizer = adamw([parameter])

        def hook(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)
        optimizers.append(optimizer)
    return optimizers


@scenario('optimizer in backward, boundary="optimizer"', RAISED, 'boundary="manual"')
def in_backward(case: Case) -> None:
    called, manager = case.build()
    manager.attach(called, optimizer=_in_backward(called))
    for index in range(STEPS):
        case.backward(called, index)
    case.judge(called)


@scenario("optimizer in backward, not attached, no manager.step()", RAISED, "AdamW", *REMEDY)
def in_backward_forgotten(case: Case) -> None:
    called, manager = case.build()
    manager.attach(called)
    _in_backward(called)
    for index in range(STEPS):
        case.backward(called, index)


def _by_hand(data: bool, layout: str = "one") -> Callable[[Case], None]:
    def program(case: Case) -> None:
        called, manager = case.build(layout)
        manager.attach(called)
        for index in range(70 if data else STEPS):
            case.backward(called, index, layout)
            for p in called.parameters():
                if p.grad is None:  # With FSDP1 the other rank holds all of it.
                    continue
                if data:
                    p.data.add_(p.grad.sign(), alpha=-0.01)
                else:
                    with torch.no_grad():
                        p.add_(p.grad.sign(), alpha=-0.01)
                p.grad = None
        case.judge(called)

    return program


for _layout in ("one", "ddp", "fsdp1", "gather"):
    _options: dict[str, Any] = {"ranks": ranks_of(_layout), "once": True}
    SCENARIOS.add(f"p.add_(…), no manager.step(), {_layout}", _by_hand(False, _layout), WARNED, REMEDY[1], **_options)
    if _layout in ("one", "ddp"):  # 64 backwards each.
        SCENARIOS.add(
            f"p.data.add_(…), no manager.step(), {_layout}", _by_hand(True, _layout), WARNED, REMEDY[1], **_options
        )


@scenario("get_optimizer_state_dict of a re-created optimizer", RIGHT)
def state_of_new(case: Case) -> None:
    called, _, optimizer = attached(case)
    for index in range(STEPS):
        case.backward(called, index)
        optimizer.step()
        optimizer.zero_grad()
        get_optimizer_state_dict(called, adamw(called))
    case.judge(called, STEPS)


def _closures(optimizer_of: Callable[[nn.Module, Any], Any]) -> Callable[[Case], None]:
    """Steps with a closure that runs the backward, once or several times."""

    def program(case: Case) -> None:
        called, manager = case.build()
        optimizer = torch.optim.LBFGS(called.parameters(), lr=0.1, max_iter=3)
        manager.attach(called, optimizer=optimizer)
        stepping = optimizer_of(called, optimizer)
        for index in range(STEPS):

            def closure(index: int = index) -> Tensor:
                stepping.zero_grad()
                return case.backward(called, index)

            stepping.step(closure)
        case.judge(called)

    return program


SCENARIOS.add(
    "LBFGS with a closure, re-created",
    _closures(lambda model, optimizer: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)),
    RAISED,
    "LBFGS",
    *REMEDY,
)


@scenario("two optimizer steps for each backward", RIGHT)
def two_steps(case: Case) -> None:
    called, _, optimizer = attached(case)
    for index in range(STEPS):
        case.backward(called, index)
        case.step(optimizer, called)
        case.step(optimizer, called)
        optimizer.zero_grad()
    case.judge(called)


@scenario(
    "calibrate() around each training step, as TransformerEngine's calibrating=True",
    WARNED,
    "no_fp8",
    "recording",
    once=True,
)
def calibrated_steps(case: Case) -> None:
    called, manager, optimizer = attached(case)
    for index in range(3):
        with manager.calibrate():
            case.backward(called, index)
        case.step(optimizer, called)
        optimizer.zero_grad()


@scenario("zero_grad() between backward and step", WARNED, "no parameter has a gradient", "zero_grad", once=True)
def zeroed_first(case: Case) -> None:
    called, _, optimizer = attached(case)
    for index in range(3):
        case.backward(called, index)
        optimizer.zero_grad()
        case.step(optimizer, called)


@scenario("the backward is forgotten, by two optimizers", WARNED, "no parameter has a gradient", once=True)
def no_gradients(case: Case) -> None:
    called, manager = case.build()
    optimizers = [adamw(called.up), adamw(called.down)]  # type: ignore[arg-type]
    manager.attach(called, optimizer=optimizers)
    for index in range(3):
        case.backward(called, index).detach()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for optimizer in optimizers:
            case.step(optimizer, called)


@scenario("trained in eval()", WARNED, r"eval\(\)", "recording", r"\bdown, up\b", once=True)
def trained_in_eval(case: Case) -> None:
    called, _, optimizer = attached(case)
    called.eval()
    case.train(called, optimizer)


@scenario(
    "trained in eval() after some steps in train()", WARNED, r"eval\(\)", r"train\(\)", r"\bdown, up\b", once=True
)
def left_in_eval(case: Case) -> None:
    called, _, optimizer = attached(case)
    case.train(called, optimizer, 3)
    called.eval()
    case.train(called, optimizer, STEPS - 3, 3)


@scenario("a part is left in eval() after some steps", WARNED, r"eval\(\)", r"FP8 weights of up\b", once=True)
def part_left_in_eval(case: Case) -> None:
    called, _, optimizer = attached(case)
    case.train(called, optimizer, 3)
    called.up.eval()  # type: ignore[union-attr,operator]
    case.train(called, optimizer, STEPS - 3, 3)


@scenario("trained in eval(), inside recording()", RIGHT)
def recorded_in_eval(case: Case) -> None:
    called, manager, optimizer = attached(case)
    called.eval()
    with manager.recording():
        case.train(called, optimizer)
    case.expect(manager.metrics()["fp8/cold_slots"] == 0, "slots are cold")
    case.judge(called, STEPS)


@scenario("gradients in eval(): saliency, and adversarial inputs for each step", RIGHT)
def gradients_in_eval(case: Case) -> None:
    called, _, optimizer = attached(case)
    for index in range(STEPS):
        called.eval()
        x, y = case.batch(index)
        x.requires_grad_()
        loss_of(called(x), y).backward()
        optimizer.zero_grad()
        called.train()
        case.backward(called, index)
        case.step(optimizer, called)
        optimizer.zero_grad()
    called.eval()
    case.gradient(called, "saliency")
    case.judge(called, STEPS)


def _resumed(late: bool) -> Callable[[Case], None]:
    """Resumes from weights and the optimizer's state, which are loaded before or after ``attach``."""

    def program(case: Case) -> None:
        first, _, optimizer = attached(case)
        case.train(first, optimizer, 3)
        called, other = case.build()
        new = adamw(called)
        if late:
            other.attach(called, optimizer=new)
        called.load_state_dict(first.state_dict())
        new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if not late:
            other.attach(called, optimizer=new)
        case.train(called, new, STEPS - 3, 3)
        case.judge(called, STEPS)

    return program


for _late in (False, True):
    SCENARIOS.add(
        f"resumed without FP8 state, which is loaded {'after' if _late else 'before'} attach",
        _resumed(_late),
        WARNED,
        "resumes without FP8 state",
        "load_state_dict",
        "calibrate",
        once=True,
    )


@scenario("recording() and no_fp8() around steps that train", RIGHT)
def recorded_steps(case: Case) -> None:
    called, manager, optimizer = attached(case)
    with manager.no_fp8(), manager.recording():
        case.train(called, optimizer, 3)
    case.expect(manager.metrics()["fp8/cold_slots"] == 0, "slots are cold")
    case.train(called, optimizer, STEPS - 3, 3)
    case.judge(called, STEPS)


@scenario("a second backward after the step, without a new forward", NOT_SILENT)
def second_backward(case: Case) -> None:
    called, _, optimizer = attached(case)
    case.train(called, optimizer, 3)
    weights = weights_of(called)
    x, y = batch(0, 3)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = loss_of(called(mine), y)
    loss.backward(retain_graph=True)
    case.step(optimizer, called)
    mine.grad = None
    try:
        loss.backward()
    except RuntimeError as error:
        if "inplace operation" not in str(error):  # The error that nn.Linear raises too.
            raise
        return
    loss_of(plain(weights, theirs), y).backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    case.measure("gradient of the second backward", mine.grad, theirs.grad, 0.2)


@scenario("an evolution strategy: no backward at all", RIGHT)
def no_backward(case: Case) -> None:
    called, manager = case.build()
    manager.attach(called)
    with torch.no_grad():
        for index in range(8):
            for p in called.parameters():
                p.mul_(1.6)
            x, _ = batch(0, index)
            case.measure(f"output {index}", called(x), plain(weights_of(called), x), OUTPUT)


@scenario("manager.step() after forwards under no_grad", RIGHT)
def nothing_recorded(case: Case) -> None:
    called, manager = case.build()
    manager.attach(called)
    for index in range(4):
        with torch.no_grad():
            called(batch(0, index)[0])
        manager.step()
    case.judge(called)


@scenario("evaluated only: never attached, never trained", RIGHT)
def evaluated_only(case: Case) -> None:
    called, _ = case.build()
    case.output(called, "before loading", train=False)
    load(called, larger())
    case.output(called, "after loading", train=False)


# Loss scaling ------------------------------------------------------------------------------------------------


def _scaled(
    given: str, fused: bool = False, update_first: bool = False, made_late: bool = False
) -> Callable[[Case], None]:
    """The first loss scale overflows; later ones do not."""

    def program(case: Case) -> None:
        called, manager = case.build()
        optimizer = adamw(called, fused=fused)

        def scaler_of() -> Any:
            return torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60)

        used = None if made_late else scaler_of()
        options = {"no": {}, "yes": {"scaler": used}, "other": {"scaler": scaler_of()}}[given]
        manager.attach(called, optimizer=optimizer, **options)
        used = used or scaler_of()
        taken = index = 0
        while taken < STEPS:
            x, y = batch(0, index % STEPS)
            index += 1
            used.scale(1e4 * loss_of(called(x), y)).backward()
            overflow = not all(bool(p.grad.isfinite().all()) for p in called.parameters() if p.grad is not None)
            taken += not overflow
            if update_first:
                used.unscale_(optimizer)
                used.update()
            used.step(optimizer)
            if not update_first:
                used.update()
            optimizer.zero_grad()
            if index > 2 * STEPS:
                case.flaw("the scale never fits")
                return
        case.expect(index > STEPS, "nothing overflowed")
        case.output(called)
        case.output(called, "eval", train=False)

    return program


SCENARIOS.add("GradScaler is passed", _scaled("yes"), RIGHT)
for _fused in (False, True):
    SCENARIOS.add(
        f"GradScaler is not passed{', fused' if _fused else ''}",
        _scaled("no", _fused),
        frozenset({RIGHT, WARNED}),
        "scaler=",
    )
SCENARIOS.add("another GradScaler is passed", _scaled("other"), NOT_SILENT, "scaler")
SCENARIOS.add(
    "the GradScaler is made after attach", _scaled("no", made_late=True), frozenset({RIGHT, WARNED}), "scaler="
)
SCENARIOS.add(
    "GradScaler.update() before its step", _scaled("yes", update_first=True), NOT_SILENT | {"foreign"}, "scaler"
)


# Modules that change -----------------------------------------------------------------------------------------


@scenario("a copy is trained", SAID, "attach")
def trained_copy(case: Case) -> None:
    called, _, optimizer = attached(case)
    case.train(called, optimizer, 3)
    twin = copy.deepcopy(called)
    case.train(twin, adamw(twin), STEPS)
    case.judge(twin)


@scenario("a deep copy's manager is attached to the original's optimizer", SAID, "optimizer")
def copy_with_old_optimizer(case: Case) -> None:
    called, _, optimizer = attached(case)
    case.train(called, optimizer, 3)
    twin = copy.deepcopy(called)
    fp8dist.get_manager(twin).attach(twin, optimizer=optimizer)
    case.train(twin, optimizer)


@scenario("frozen at attach, trained later", frozenset({RIGHT, WARNED}), r"\bup\b")
def frozen_first(case: Case) -> None:
    called, manager = case.build()
    assert isinstance(called, Net)
    called.up.requires_grad_(False)
    optimizer = adamw(called)
    manager.attach(called, optimizer=optimizer)
    case.train(called, optimizer, 3)
    called.up.requires_grad_(True)
    case.train(called, optimizer, STEPS, 3)
    case.judge(called)


@scenario("frozen at attach, trained later by an optimizer of its own", RAISED, "AdamW", *REMEDY)
def frozen_first_own_optimizer(case: Case) -> None:
    called, manager = case.build()
    assert isinstance(called, Net)
    called.up.requires_grad_(False)
    optimizer = adamw(called.down)
    manager.attach(called, optimizer=optimizer)
    case.train(called, optimizer, 3)
    called.up.requires_grad_(True)
    called.down.requires_grad_(False)
    case.train(called, adamw(called.up), STEPS, 3)
    case.judge(called)


@scenario("trained before attach", NOT_SILENT, "attach")
def trained_before(case: Case) -> None:
    called, manager = case.build()
    optimizer = adamw(called)
    case.train(called, optimizer, 3)
    manager.attach(called, optimizer=optimizer)
    case.train(called, optimizer, STEPS - 3, 3)
    case.judge(called, STEPS)


# The loss guard ------------------------------------------------------------------------------------------------


def _guarded(action: str, late: bool, with_optimizer: bool = True) -> Callable[[Case], None]:
    def program(case: Case) -> None:
        called, _manager, optimizer = attached(case)
        options: dict[str, Any] = {"optimizer": optimizer} if with_optimizer else {}
        guard = fp8dist.LossGuard(action=action, **options)  # type: ignore[arg-type]
        for index in range(STEPS):
            loss = case.backward(called, index)
            if not late:
                guard.observe(loss)
            case.step(optimizer, called)
            if late:
                guard.observe(loss)
            optimizer.zero_grad()
        case.judge(called, STEPS)

    return program


SCENARIOS.add('LossGuard(action="skip") observes before the step', _guarded("skip", False), RIGHT)
SCENARIOS.add(
    'LossGuard(action="skip") observes after the step',
    _guarded("skip", True),
    RAISED,
    "observe",
    r"optimizer\.step\(\)",
)
SCENARIOS.add(
    'LossGuard(action="warn") observes after the step',
    _guarded("warn", True),
    WARNED,
    "observe",
    r"optimizer\.step\(\)",
)
SCENARIOS.add('LossGuard(action="skip") without optimizer', _guarded("skip", False, False), RAISED, "optimizer=")


def _every(n: int, call: Callable[[], Any]) -> Callable[[], None]:
    count = 0

    def after() -> None:
        nonlocal count
        count += 1
        if count % n == 0:
            call()

    return after
