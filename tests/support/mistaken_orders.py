"""prepare, wrap, materialise, load and attach in every possible order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from tests.support.mistakes import LAYOUTS, Case, adamw, larger, load, make_net, ranks_of
from tests.support.scenarios import NOT_SILENT, Scenarios

SCENARIOS = Scenarios()

BEFORE = (("prepare", "attach"), ("materialise", "load"), ("wrap", "materialise"))
"""(a, b): a must come before b. DDP and FSDP1 materialise what they wrap on their own."""

GARBAGE = 1e10
"""Uninitialised memory after to_empty, made deterministic."""


def orders(*what: str) -> list[tuple[str, ...]]:
    """Return all permutations that ``BEFORE`` allows."""
    return [
        order
        for order in itertools.permutations(what)
        if all(order.index(a) < order.index(b) for a, b in BEFORE if a in order and b in order)
    ]


def _program(order: Sequence[str], layout: str, meta: bool, early_optimizer: bool = False) -> Callable[[Case], None]:
    """Load weights eight times as large as before, so that an outdated scale shows at once."""

    def program(case: Case) -> None:
        net = make_net(device="meta" if meta else None)
        called, manager = net, None
        optimizer = adamw(net)
        for operation in order:
            if operation == "prepare":
                manager = case.prepare(net, layout=layout)
            elif operation == "wrap":
                called = case.wrap(net, layout)
            elif operation == "materialise":
                called.to_empty(device="cpu")
                with torch.no_grad():
                    for p in called.parameters():
                        p.fill_(GARBAGE)
            elif operation == "load":
                load(called, larger())
            elif operation == "attach":
                assert manager is not None
                if not early_optimizer:
                    optimizer = adamw(called)
                manager.attach(called, optimizer=optimizer)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not early_optimizer and any(id(p) not in held for p in called.parameters()):
            optimizer = adamw(called)
        case.output(called, "first training forward")
        case.output(called, "first eval forward", train=False)
        called.zero_grad()
        before = case.snapshot(called)
        case.train(called, optimizer, 4, layout=layout)
        case.judge(called)
        case.expect(case.snapshot(called) != before, "trains nothing, and says nothing")

    return program


MOST_TELLING = (
    ("prepare", "wrap", "attach", "load"),
    ("prepare", "attach", "wrap", "load"),
    ("load", "prepare", "wrap", "attach"),
    ("wrap", "prepare", "load", "attach"),
)
"""Loading last, attaching early, loading first, preparing late. An FP8 gather depends on all four calls, so it is
tested in every order."""

for _layout in LAYOUTS:
    _operations = ["prepare", "load", "attach"] + ["wrap"] * (_layout != "one")
    for _order in orders(*_operations) if _layout in ("one", "gather") else MOST_TELLING:
        SCENARIOS.add(
            f"{_layout}: {', '.join(_order)}", _program(_order, _layout, False), NOT_SILENT, ranks=ranks_of(_layout)
        )
    if _layout in ("one", "ddp", "fsdp2"):
        _usual = tuple(name for name in ("prepare", "wrap", "load", "attach") if name in _operations)
        SCENARIOS.add(
            f"{_layout}: optimizer, {', '.join(_usual)}",
            _program(_usual, _layout, False, True),
            NOT_SILENT,
            ranks=ranks_of(_layout),
        )

for _layout in ("one", "fsdp2"):
    _operations = ["prepare", "materialise", "load", "attach"] + ["wrap"] * (_layout != "one")
    for _order in orders(*_operations) if _layout == "one" else orders(*_operations)[::2]:
        SCENARIOS.add(
            f"{_layout}, meta: {', '.join(_order)}",
            _program(_order, _layout, True),
            NOT_SILENT | {"foreign"},
            ranks=ranks_of(_layout),
        )
