"""Import of TransformerEngine's FP8 state: every layout, the order of histories, names, and malicious pickles."""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import random
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.errors import CheckpointError, ConfigurationError
from fp8dist.files.extra_states import read_extra_state
from fp8dist.state.slots import Slot
from fp8dist_kernels.formats import Role
from tests.support.oracle import FP8_MAX, bits_of, scale_for
from tests.support.pickles import bombs
from tests.support.states import state_of
from tests.support.training import batch, make_net, state_bits
from tests.support.transformer_engine import RECIPES, VERSIONS, Module, as_bytes, entry_of, recipe_of, stand_ins

ROLES = ("input", "weight", "grad_output")
Key = tuple[int, str]


def foreign(*names: str, **recipe: Any) -> StateManager:
    """Return a manager whose slots, of fc or of ``names``, record the amaxes that the test chooses."""
    model = nn.Sequential(nn.Linear(16, 16))
    manager = fp8dist.prepare(model, DelayedScaling(**{"history_len": 5, **recipe}))
    for name in names or ("fc",):
        for role in ROLES:
            manager.register(name, role, "e5m2" if role == "grad_output" else "e4m3")
    return manager


def imported(module: Module, version: str = "2.x", **recipe: Any) -> tuple[StateManager, Any]:
    """Return a manager that has loaded a module's state as fc, and the report."""
    manager = foreign(**recipe)
    return manager, fp8dist.load_transformer_engine(manager, {"fc._extra_state": entry_of(module, version)})


def scale(manager: StateManager, role: str, fqn: str = "fc") -> float:
    return float(manager.slot(fqn, role).scale)


def history(manager: StateManager, role: str, fqn: str = "fc") -> list[float]:
    found: list[float] = manager.slot(fqn, role).amax_history.tolist()
    return found


def read_one(entry: Any) -> Any:
    """Return what is read of a module with one GEMM, by role."""
    (found,) = read_extra_state("fc._extra_state", entry)  # type: ignore[misc]
    return found


def amaxes(rng: random.Random, gemms: int = 1) -> dict[Key, float]:
    return {
        (g, role): struct.unpack("<f", struct.pack("<f", rng.lognormvariate(0, 2)))[0]
        for g in range(gemms)
        for role in ROLES
    }


def trained(steps: int, gemms: int = 1, due: bool = False, seed: int = 0, **options: Any) -> Module:
    """Return a module after ``steps`` steps. ``due``: the last step's amax has not updated the scale yet."""
    module, rng = Module(gemms, **options), random.Random(seed)
    for step in range(steps):
        module.record(amaxes(rng, gemms))
        if not (due and step == steps - 1):
            module.update()
    return module


def fitted(history: list[float], length: int) -> list[float]:
    return ([0.0] * length + history)[-length:]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_layout_says_the_same(version: str) -> None:
    for due, protocol in ((False, 2), (True, 5)):
        module = trained(7, due=due, margin=1)
        state = read_one(entry_of(module, version, protocol))
        assert "transformer_engine" not in sys.modules
        for role in ROLES:
            slot, scaled = state[Role(role)], module.of(0, role)
            assert slot.margin == (1 if version.startswith("2") else None)
            assert slot.scale == scaled.scale
            # One of the five rows belongs to the current step. It is empty after the scale update.
            assert slot.history.tolist() == fitted(scaled.seen[-5 if due else -4 :], 5)
            assert slot.due == due
            assert slot.fp8_max == (None if version.startswith("0") else scaled.fp8_max)


def test_formats_by_name() -> None:
    """Some Pythons pickle the members of an enum as getattr(Format, "E4M3")."""
    with stand_ins() as classes:
        recipe = recipe_of(Module(), classes.DelayedScaling, classes)
        classes.Format.__reduce_ex__ = lambda self, protocol: (getattr, (classes.Format, self.name))
        recipe.fp8_format = classes.Format["E4M3"]
        entry = as_bytes({"recipe": recipe, **trained(2).tensors(), "extra_fp8_variables": {}})
        unpickled = pickle.loads(bytes(entry.tolist()))  # Somebody has done so.
        assert read_one(unpickled)[Role.GRAD_OUTPUT].fp8_max == 448
    assert read_one(entry)[Role.GRAD_OUTPUT].fp8_max == 448


# GRAD_OUTPUT1, GRAD_INPUT1, GRAD_OUTPUT2, GRAD_INPUT2: LayerNormMLP's first and second GEMM.
@pytest.mark.parametrize(
    ("version", "gradients"), [("0.3", (2, 0)), ("1.x file", (2, 0)), ("2.x", (1, 0)), ("2.x Megatron", (0, 2))]
)
def test_two_gemms(version: str, gradients: tuple[int, int]) -> None:
    module = trained(4, gemms=2, gradients=gradients)
    manager = foreign("fc1", "fc2")
    entries = {"mlp._extra_state": entry_of(module, version)}
    report = fp8dist.load_transformer_engine(manager, entries, {"fc1": "mlp", "fc2": ("mlp", 1)})
    for gemm, fqn in enumerate(("fc1", "fc2")):
        for role in ROLES:
            assert history(manager, role, fqn) == fitted(module.of(gemm, role).seen, 5), (fqn, role)
            assert scale(manager, role, fqn) == module.of(gemm, role).scale
    assert report.matched[0] == (Slot("fc1", "grad_output"), "mlp (GEMM 0)")
    assert report.matched[-1] == (Slot("fc2", "weight"), "mlp (GEMM 1)")


def test_modules_and_recipes_without_state() -> None:
    with stand_ins() as classes:
        recipe = recipe_of(Module(), classes.Float8CurrentScaling, classes)
        current = as_bytes({"recipe": recipe, "extra_fp8_variables": {"num_gemms": 1}})
    empty = (None, torch.empty(0, dtype=torch.uint8), io.BytesIO(), b"", as_bytes(None), {}, as_bytes({}))
    for value in (*empty, current):
        assert read_extra_state("fc", value) is None


@pytest.mark.parametrize("due", [False, True])
def test_histories_keep_their_age(due: bool) -> None:
    for length, steps in ((1, 2), (3, 1), (3, 4), (3, 13), (5, 1), (5, 4), (5, 5), (5, 6), (8, 4), (8, 13)):
        module = trained(steps, due=due)
        manager, _ = imported(module, history_len=length)
        expected = {role: fitted(module.of(0, role).seen[-5 if due else -4 :], length) for role in ROLES}
        for role in ROLES:
            assert history(manager, role) == expected[role]
            assert float(manager.slot("fc", role).amax) == module.of(0, role).seen[-1]
            # One more entry replaces the oldest one in the ring.
            manager.slot("fc", role).record(torch.tensor([0.75]))
        manager.step()
        for role in ROLES:
            assert history(manager, role) == [*expected[role][1:], 0.75]


@pytest.mark.parametrize(
    ("steps", "margin", "version", "due"),
    [(1, 0, "1.x", True), (3, 0, "2.x", False), (5, 2, "2.x", True), (5, 2, "2.x", False), (12, 0, "0.3", True)],
)
def test_training_goes_on_with_the_same_scales(steps: int, margin: int, version: str, due: bool) -> None:
    """Scales are bitwise equal for the same amaxes. Amaxes become smaller, so that large ones leave the window."""
    module = trained(steps, due=due, margin=margin)
    manager, report = imported(module, version, margin=margin)
    assert len(report.converted) == (3 if due else 0)
    if due:  # The next step starts with the pending update.
        module.update()
    rng = random.Random(1)
    for step in range(8):
        for role in ROLES:
            theirs = module.of(0, role).scale
            assert bits_of(scale(manager, role)) == bits_of(theirs), (step, role)
            assert bits_of(float(manager.slot("fc", role).inv_scale)) == bits_of(float(1 / torch.tensor(theirs)))
        new = {key: amax * 0.5**step for key, amax in amaxes(rng).items()}
        module.record(new)
        module.update()
        for (_, role), amax in new.items():
            manager.slot("fc", role).record(torch.tensor([-amax, 0.0]))
        manager.step()


def test_a_scale_of_an_unknown_format_is_kept_for_the_usual_format_only() -> None:
    """Entries of TransformerEngine 0.x do not say that their gradients are in E5M2."""
    module = trained(3)
    manager = fp8dist.prepare(nn.Sequential(nn.Linear(16, 16)), DelayedScaling(history_len=5, format="e4m3"))
    report = fp8dist.load_transformer_engine(manager, {"0._extra_state": entry_of(module, "0.3")})
    assert [slot.role for slot, _ in report.converted] == ["grad_output"]
    assert scale(manager, "grad_output", "0") == pytest.approx(448 / max(module.of(0, "grad_output").seen))
    assert scale(manager, "input", "0") == module.of(0, "input").scale


def test_what_was_never_seen_stays_cold() -> None:
    """And an amax that waits here is thrown away."""
    module = Module()
    module.of(0, "input").record(3.0)
    module.of(0, "weight").scale = 16.0  # Its amaxes have left the window.
    manager = foreign()
    manager.slot("fc", "grad_output").set_scale(8.0)
    manager.slot("fc", "input").record(torch.tensor([1e9]))
    report = fp8dist.load_transformer_engine(manager, {"fc._extra_state": entry_of(module, "1.x")})
    state = {role: state_of(manager)["fc", role] for role in ROLES}
    assert [state[role]["cold"] for role in ROLES] == [False, False, True]
    assert (scale(manager, "grad_output"), scale(manager, "weight")) == (1, 16)
    assert (len(report.matched), [slot for slot, _ in report.converted]) == (3, [Slot("fc", "input")])
    assert (state["input"]["counters"], state["weight"]["counters"]) == ([1, 0], [0, 0])
    manager.step()
    assert state_of(manager)["fc", "input"] == state["input"]
    other = foreign()  # Imported state is saved and loaded like any other.
    other.load_state_dict(manager.state_dict())
    assert state_bits(other) == state_bits(manager)


def test_zeros_do_not_hide_the_newest_amax() -> None:
    """TransformerEngine also rolls the histories of modules that did not run."""
    module = trained(2)
    for _ in range(2):
        module.update()
    manager, _ = imported(module)
    for role in ROLES:
        seen = module.of(0, role).seen
        assert history(manager, role) == [0.0, *seen, 0.0, 0.0]
        assert float(manager.slot("fc", role).amax) == seen[-1]


@pytest.mark.parametrize("amax", [math.inf, math.nan])
@pytest.mark.parametrize("due", [False, True])
def test_amaxes_that_were_not_finite_are_dropped(amax: float, due: bool) -> None:
    """TransformerEngine keeps them in its histories, and the scale as it was. So does a commit here."""
    module = trained(2)
    tensor = module.of(0, "input")
    tensor.rows[0] = amax
    if not due:
        tensor.rows = [0.0, *tensor.rows[2:], amax]
    manager, report = imported(module)
    assert report.converted == ()
    assert scale(manager, "input") == tensor.scale
    assert [one for one in history(manager, "input") if one] == tensor.seen
    assert history(manager, "input")[-1] == (tensor.seen[-1] if due else 0)
    assert float(manager.slot("fc", "input").amax) == tensor.seen[-1]


FORMAT = "its format goes up to 448 there and 57344 here"


@pytest.mark.parametrize(
    ("theirs", "version", "recipe", "why"),
    [
        ({"margin": 3}, "2.x", {"margin": 1}, dict.fromkeys(ROLES, "margin is 3 there and 1 here")),
        ({"format": "E4M3"}, "1.x", {}, {"grad_output": FORMAT}),
        ({"format": "E4M3"}, "2.x", {}, {"grad_output": FORMAT}),
        ({}, "2.x", {"power_of_two": True}, dict.fromkeys(ROLES, "scales are powers of two here")),
    ],
)
def test_another_recipe_derives_scales_from_the_window(
    theirs: dict[str, Any], version: str, recipe: dict[str, Any], why: dict[str, str]
) -> None:
    module = trained(3, **theirs)
    manager, report = imported(module, version, **recipe)
    assert dict(report.converted) == {Slot("fc", role): reason for role, reason in why.items()}
    for role in ROLES:
        largest = FP8_MAX["e5m2" if role == "grad_output" else "e4m3"]
        assert scale(manager, role) == scale_for(max(module.of(0, role).seen), 0, largest, **recipe)


@pytest.mark.parametrize("format", ["HYBRID", "E4M3"])
def test_scales_without_a_window(format: str) -> None:
    """The new scales follow from the amax that the old scale implies."""
    module = Module(margin=2, format=format)
    for role in ROLES:
        module.of(0, role).scale = module.of(0, role).fp8_max / 4 / 0.5
    manager, report = imported(module)
    assert len(report.converted) == 3
    assert [scale(manager, role) for role in ROLES] == [448 / 0.5, 448 / 0.5, 57344 / 0.5]


def test_names_as_they_are() -> None:
    """A real model: wrapper prefixes are ignored, other entries are skipped, and training continues."""
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=5))
    first, last = trained(3, seed=1), trained(4, seed=2)
    entries = {
        "module.first.weight": torch.zeros(3),
        "module.first._extra_state": entry_of(first, "2.x"),
        "module._orig_mod.last._extra_state": entry_of(last, "1.x file"),
        "module.attention._extra_state": b"not read, so not refused",
    }
    report = fp8dist.load_transformer_engine(manager, entries)
    assert (report.missing, report.unused, report.stateless) == (("branch",), ("attention",), ())
    assert report.matched == tuple((Slot(fqn, role), fqn) for fqn in ("first", "last") for role in sorted(ROLES))
    for fqn, module in (("first", first), ("last", last)):
        assert [scale(manager, role, fqn) for role in ROLES] == [module.of(0, role).scale for role in ROLES]
    assert state_of(manager)["branch", "input"]["cold"]
    x, y = batch(0, 0)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    manager.attach(optimizer=optimizer)
    (net(x) - y).square().mean().backward()
    optimizer.step()
    assert history(manager, "input", "first")[-2:] == [first.of(0, "input").seen[-1], float(x.abs().max())]
    assert not state_of(manager)["branch", "input"]["cold"]


@pytest.mark.parametrize(
    "name_map",
    [
        {"a": "layers.0.fc1", "b": ("layers.0.fc2", 0)},
        {"module.a": "module.layers.0.fc1", "b": "layers.0.fc2", "c": None},
        lambda fqn: {"a": "layers.0.fc1", "b": ("layers.0.fc2", 0)}.get(fqn),
        {"a": "layers.0.fc1", "b": "layers.0.fc2", "c": "layers.0.fc1"},
    ],
)
def test_name_maps(name_map: Any) -> None:
    manager = foreign("a", "b", "c")
    entries = {f"layers.0.fc{i}._extra_state": entry_of(trained(3, seed=i), "2.x") for i in (1, 2)}
    report = fp8dist.load_transformer_engine(manager, {**entries, "layers.0.attention._extra_state": None}, name_map)
    twice = {"c": "layers.0.fc1"} if isinstance(name_map, dict) and name_map.get("c") else {}
    assert {slot.fqn: name for slot, name in report.matched} == {"a": "layers.0.fc1", "b": "layers.0.fc2", **twice}
    assert scale(manager, "input", "b") == trained(3, seed=2).of(0, "input").scale
    assert (report.missing, report.unused) == (("0",) if twice else ("0", "c"), ("layers.0.attention",))


@pytest.mark.parametrize(
    ("name_map", "text"),
    [
        ({"fc": "nowhere"}, "no _extra_state of nowhere; there are fc, mlp"),
        ({"nobody": "fc"}, "this model has no FP8 modules called nobody"),
        (lambda fqn: "nowhere", "no _extra_state of nowhere"),
        ({"fc": ("mlp", 2)}, "mlp has 2 GEMMs, and fc asks for number 2"),
        ({"fc": ("fc", -1)}, "fc has 1 GEMMs, and fc asks for number -1"),
        ({"fc": 3}, "fc is mapped to 3, expected a name"),
        ({"fc": ("mlp", True)}, "expected a name"),
        (["fc"], "must be a mapping or a function, got list"),
    ],
)
def test_name_maps_that_cannot_be(name_map: Any, text: str) -> None:
    entries = {f"{name}._extra_state": entry_of(trained(2, gemms), "2.x") for name, gemms in (("fc", 1), ("mlp", 2))}
    manager = foreign()
    before = state_bits(manager)
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        fp8dist.load_transformer_engine(manager, entries, name_map)
    with pytest.raises(CheckpointError, match=r"two entries are called fc\._extra_state"):
        fp8dist.load_transformer_engine(manager, {"fc._extra_state": None, "module.fc._extra_state": None})
    assert state_bits(manager) == before


def test_the_report_can_be_read() -> None:
    manager = foreign(*"abcdef", margin=1)
    entry = entry_of(trained(2), "2.x")
    entries = {f"{name}._extra_state": entry for name in "abcdex"} | {"f._extra_state": None}
    assert str(fp8dist.load_transformer_engine(manager, entries)).splitlines() == [
        "FP8 state of TransformerEngine: 15 slots",
        "  matched: 5 modules: a from a, b from b, c from c, d from d and 1 more",
        "  missing there: 2 modules: 0, f",
        "  unused from there: 1 entries: x",
        "  without FP8 state: 1 entries: f",
        "  scales derived anew, because margin is 0 there and 1 here: 15: "
        "a:grad_output, a:input, a:weight, b:grad_output and 11 more",
    ]


@pytest.mark.parametrize("kind", ["os.system", "argument", "inside a recipe"])
def test_pickles_are_never_executed(kind: str, tmp_path: Path) -> None:
    """test_sources.py and test_source_fuzz.py give worse ones to the same reader of pickles."""
    marker, manager = tmp_path / "marker", foreign()
    before, kinds = state_bits(manager), bombs(marker)
    bomb = {"recipe": [kinds["os.system"]], **Module().tensors()} if kind == "inside a recipe" else kinds[kind]
    file, old = io.BytesIO(), io.BytesIO()
    for stream, zipped in ((file, True), (old, False)):
        torch.save({"x": bomb}, stream, _use_new_zipfile_serialization=zipped)
    for entry in (as_bytes({**Module().tensors(), "x": bomb}), pickle.dumps(bomb), file, old):
        entries = {"0._extra_state": entry_of(trained(3), "2.x"), "fc._extra_state": entry}
        with pytest.raises(CheckpointError, match=r"^fc\._extra_state: ") as caught:
            fp8dist.load_transformer_engine(manager, entries)
        assert "\n" not in str(caught.value)
        assert state_bits(manager) == before
    assert not marker.exists()


def test_damage_raises_nothing_else() -> None:
    """A pickle has no checksum."""
    entries = [entry_of(trained(2), version) for version in ("1.x bytes", "2.x", "1.x file", "1.x old file")]
    whole = [entries[0], entries[1].numpy().tobytes(), *(entry.getvalue() for entry in entries[2:])]
    for data in whole:
        for end in (*range(1, len(data) - 1, 13), len(data) - 1):
            with pytest.raises(CheckpointError):
                read_extra_state("fc", data[:end])
    rng = random.Random(0)
    for _ in range(200):
        damaged = bytearray(whole[1])
        for _ in range(3):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        with contextlib.suppress(CheckpointError):
            read_extra_state("fc", bytes(damaged))


def test_names_of_classes_are_no_licence() -> None:
    """Allowed are only getattr on the format class, and the listed names of the recipe module."""
    for text, pickled in {
        "attribute": b"\x80\x02c__builtin__\ngetattr\ncos\nsystem\nX\x01\x00\x00\x00a\x86R.",
        "os.system": b"\x80\x02cos\nsystem\n.",
        "asks for an attribute": b"\x80\x02c__builtin__\ngetattr\nX\x02\x00\x00\x00osX\x06\x00\x00\x00system\x86R.",
        "not a format": b"\x80\x02c__builtin__\ngetattr\nc_codecs\nencode\nX\x01\x00\x00\x00a\x86R.",
        f"{RECIPES}.os": b"\x80\x02ctransformer_engine.common.recipe\nos\n.",
        "sys": b"\x80\x04\x8c\x03sys\x8c\x07modules\x93.",
    }.items():
        with pytest.raises(CheckpointError, match=text if text != "attribute" else "names os.system"):
            read_extra_state("fc", pickled)


def changed(**changes: Any) -> dict[str, Any]:
    content = {**trained(2).tensors(), "extra_fp8_variables": {"num_gemms": 1}, **changes}
    return {key: value for key, value in content.items() if value is not None}


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (changed(scale_fwd=torch.tensor([1.0, 0.0, 1.0])), "a scale that is not positive and finite"),
        (changed(scale_bwd=torch.tensor([1.0, torch.inf])), "a scale that is not positive and finite"),
        (changed(scale_bwd=torch.tensor([1.0, torch.nan])), "a scale that is not positive and finite"),
        (changed(scale_bwd=torch.tensor([1.0, 1e-45])), "a scale that is not positive and finite"),
        (changed(amax_history_fwd=torch.full((5, 3), -1.0)), "amax_history_fwd holds a negative amax"),
        (changed(amax_history_bwd=torch.full((5, 2), -torch.inf)), "amax_history_bwd holds a negative amax"),
        (changed(amax_history_bwd=torch.zeros(5, 3)), "scale_bwd has shape (2,) and amax_history_bwd (5, 3)"),
        (changed(amax_history_bwd=torch.zeros(0, 2)), "expected [n] and [rows, n]"),
        (changed(scale_fwd=torch.ones(3, dtype=torch.float64)), "scale_fwd is of torch.float64, expected a float32"),
        (changed(scale_fwd=[1.0, 1.0, 1.0]), "scale_fwd is of list, expected a float32 tensor"),
        (changed(scale_bwd=torch.ones(3), amax_history_bwd=torch.zeros(5, 3)), "fits no number of GEMMs"),
        (changed(extra_fp8_variables={"num_gemms": 2}), "says that it has 2 GEMMs, but its scales are those of 1"),
        (changed(scale_bwd=None), "lacks scale_bwd"),
        ({"input": {}, "param": {}, "grad_output": {}}, "not the state of a module such as te.Linear"),
        (torch.zeros(4), "is a tensor of torch.float32, expected uint8"),
        ("text", "is of type str"),
        (as_bytes("text"), "holds a str, expected a dict"),
        (entry_of(trained(1, gemms=4, gradients=(0, 2, 4, 6)), "1.x"), "has 4 GEMMs, as only a GroupedLinear has"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_state(entry: Any, text: str) -> None:
    manager, good = foreign(), entry_of(trained(2), "2.x")
    before = state_bits(manager)
    for value in (entry, as_bytes(entry)) if isinstance(entry, dict) else (entry,):
        with pytest.raises(CheckpointError, match=re.escape(text)) as caught:
            fp8dist.load_transformer_engine(manager, {"0._extra_state": good, "fc._extra_state": value})
        assert str(caught.value).startswith("fc._extra_state: ")
        assert state_bits(manager) == before


def test_nothing_is_changed_when_an_algorithm_fails() -> None:
    def failing(windows: Tensor) -> Tensor:
        raise ZeroDivisionError("of the user")

    manager = foreign(margin=1, amax_algo=failing)
    before = state_bits(manager)
    with pytest.raises(ZeroDivisionError):
        fp8dist.load_transformer_engine(manager, {"fc._extra_state": entry_of(trained(3), "2.x")})
    assert state_bits(manager) == before
