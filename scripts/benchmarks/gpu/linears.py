"""Forward and backward of one Linear, including casts: FP8Linear, as ``fp8dist.prepare`` makes it, against bf16.

Each run is the first of a step: its slots have recorded nothing yet, so each cast updates its slot's amax. Also finds
the number of tokens from which on FP8 is faster in eager mode; with fewer, the time of the host decides.
"""

from __future__ import annotations

import bisect
import copy
import importlib.util
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fp8dist
from fp8dist.state.recipe import Recipe
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN
from scripts.benchmarks.gpu.lab import Case, Lab, by_field, by_recipe
from scripts.benchmarks.gpu.stopwatch import Action, Comparison, compare, compare_in_a_row, repeated
from scripts.benchmarks.llama_shapes import LINEARS, RECIPES, Layer, fast_everywhere

OURS, FAST, TRITON, BF16, TORCHAO = "fp8dist", "fp8dist, fast", "fp8dist, triton", "bf16", "torchao"
REUSED = "fp8dist, weight reused"
"""Backend "auto"; the same with fast accumulation in all GEMMs; backend "triton"; "auto" in a later microbatch of a
step, in which an attached manager reuses the weight's cast."""

LIKE_TORCHAO = MappingProxyType(
    {"tensorwise": fp8dist.CurrentScaling(), "rowwise": fp8dist.RowwiseScaling(power_of_two=True)}
)
"""By name of a recipe of torchao, the recipe of fp8dist with the same numerics."""

WIDTHS = (1024, 2048, 4096, 8192)
TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Widths and numbers of tokens at which the crossover is searched, in ascending order."""

FURTHEST = 0.15
"""Largest relative error against bf16. Rounding to E4M3 causes about 3 %, to E5M2 5 %; a wrong product over 100 %."""

IN_A_ROW = 5


class Planned(NamedTuple):
    """A layer in training."""

    layer: Layer
    tokens: int
    recipe: str

    @property
    def name(self) -> str:
        """The name in a results file."""
        return f"{self.layer.name}, {self.tokens} tokens, {self.recipe}"


@dataclass(frozen=True)
class Bench:
    """The data of a Linear, or of a mixture: input and output gradient."""

    x: Tensor
    gradient: Tensor

    @staticmethod
    def random(planned: Planned, device: torch.device) -> Bench:
        """Return random bf16 data, with gradients of the magnitude of a real step's."""
        layer = planned.layer
        return Bench.of((planned.tokens, layer.in_features), (planned.tokens, layer.out_features), device)

    @staticmethod
    def of(inputs: tuple[int, int], outputs: tuple[int, int], device: torch.device) -> Bench:
        """Return random bf16 data of these shapes."""
        x, gradient = (torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in (inputs, outputs))
        return Bench(x.requires_grad_(), gradient.mul_(1e-3))

    def both_ways(self, model: nn.Module) -> tuple[Tensor, ...]:
        """Run forward and backward. Return (output, gradient of x, gradients of the weights)."""
        output = model(self.x)
        return (output.detach(), *torch.autograd.grad(output, (self.x, *model.parameters()), self.gradient))


@dataclass(frozen=True)
class Prepared:
    """An FP8 model, or a model to compare it with. ``pending``: the amaxes that its slots recorded."""

    model: nn.Module
    pending: Sequence[Tensor] = ()

    def forget(self) -> None:
        """Drop recorded amaxes, as at the end of a step."""
        for pending in self.pending:
            pending.fill_(DID_NOT_RUN)


class Linears:
    """FP8Linear with each recipe against nn.Linear."""

    def plan(self, lab: Lab) -> list[Planned]:
        """See ``Part``: the layers of Llama 3 8B. The recipe that has a goal in ``tables.GOALS`` comes first."""
        if lab.smoke:
            return [Planned(Layer("smoke", 64, 48), 32, recipe) for recipe in ("delayed", "block")]
        return [Planned(layer, 8192, recipe) for recipe in RECIPES for layer in LINEARS if layer.name.startswith("8B")]

    def measure(self, lab: Lab, planned: Planned) -> Case:
        """See ``Part``. "ratios": the time of bf16 over each side's, on the device; "…, eager": by the host's clock."""
        recipe = RECIPES[planned.recipe]
        fast = fast_everywhere(recipe)
        sides = {OURS: (recipe, "auto"), **({FAST: (fast, "auto")} if fast else {}), TRITON: (recipe, "triton")}
        bench, plain = Bench.random(planned, lab.device), _linear(planned.layer, lab.device)
        models = {side: prepared(plain, bench, *how) for side, how in sides.items()}
        models[REUSED] = prepared(plain, bench, recipe, "auto", True)
        return measured(lab, planned, bench, models, {BF16: plain})

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """See ``Part``: by recipe and side."""
        keys = [key for side in (OURS, FAST, REUSED, TRITON) for key in (side, f"{side}, eager")]
        return by_recipe(cases, RECIPES, keys)


class Torchao:
    """FP8Linear and torchao's dynamic scaling (compiled, as torchao recommends) against nn.Linear."""

    def plan(self, lab: Lab) -> list[Planned]:
        """Return few layers, because each is compiled."""
        if importlib.util.find_spec("torchao") is None:
            return []
        layers = [Layer("smoke", 64, 48)] if lab.smoke else [LINEARS[2], LINEARS[0]]
        return [Planned(layer, 32 if lab.smoke else 8192, recipe) for layer in layers for recipe in LIKE_TORCHAO]

    def measure(self, lab: Lab, planned: Planned) -> Case:
        """See ``Part``. "ratios": torchao's time over ours, and bf16's over torchao's."""
        bench, plain = Bench.random(planned, lab.device), _linear(planned.layer, lab.device)
        theirs = _torchao(plain, planned.recipe, compiled=not lab.smoke)
        models = {OURS: prepared(plain, bench, LIKE_TORCHAO[planned.recipe], "auto")}
        return measured(lab, planned, bench, models, {TORCHAO: theirs, BF16: plain})

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """See ``Part``: by recipe."""
        return by_field(cases, "recipe", LIKE_TORCHAO, OURS)


class Crossover:
    """The number of tokens from which on an eager FP8Linear beats nn.Linear, by width."""

    def plan(self, lab: Lab) -> list[Planned]:
        """Return square layers, each with the largest number of tokens that is tried."""
        widths, most = ((32,), 64) if lab.smoke else (WIDTHS, TOKENS[-1])
        return [Planned(Layer(f"{width} x {width}", width, width), most, "delayed") for width in widths]

    def measure(self, lab: Lab, planned: Planned) -> Case:
        """See ``Part``. "crossover": tokens; None if FP8 is faster at none. "timings" are by the number of tokens."""
        case: Case = {"name": planned.layer.name, "timings": {}, "ratios": {}, "crossover": None}
        counts = [16, 64] if lab.smoke else list(TOKENS)
        probes = len(counts).bit_length()

        def beats(tokens: int) -> bool:
            bench = Bench.random(planned._replace(tokens=tokens), lab.device)
            plain = _linear(planned.layer, lab.device)
            models = {BF16: Prepared(plain), OURS: prepared(plain, bench, RECIPES[planned.recipe], "auto")}
            comparison = _eagerly(lab, bench, models, lab.seconds / probes)
            case["timings"] |= {f"{side}, {tokens}": timing for side, timing in comparison.timings().items()}
            case["ratios"][str(tokens)] = ratio = comparison.ratio(BF16, OURS)
            return ratio.low > 1.0

        place = bisect.bisect_left(counts, True, key=beats)  # From the crossover on it always beats.
        case["crossover"] = counts[place] if place < len(counts) else None
        found = f"FP8 is faster from {case['crossover']} tokens on" if case["crossover"] else "bf16 is always faster"
        print(f"    {case['name']}, eager, forward + backward: {found}", flush=True)
        return case

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """See ``Part``: tokens by layer."""
        return {case["name"]: case["crossover"] for case in cases if "crossover" in case}


def _linear(layer: Layer, device: torch.device) -> nn.Module:
    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device=device, dtype=torch.bfloat16)
    return nn.Sequential(linear)


def prepared(plain: nn.Module, bench: Bench, recipe: Recipe, backend: str, attached: bool = False) -> Prepared:
    """Return the model in FP8 after a few steps, so that no slot is cold and the host knows this. ``attached``: attach
    its manager to an optimizer, so that further forwards are microbatches of one step."""
    model = copy.deepcopy(plain)
    manager = fp8dist.prepare(model, recipe, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # A step with a rate of 0 is no boundary.
    if attached:
        manager.attach(model, optimizer=optimizer)
    for _ in range(3):
        bench.both_ways(model)
        if attached:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        else:
            manager.step()
    return Prepared(model, [sync.arena.pending for sync in manager._syncs])


def _torchao(plain: nn.Module, recipe: str, compiled: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    if not compiled:  # This is a smoke run, perhaps without a GPU.
        object.__setattr__(config, "emulate", True)
    model = convert_to_float8_training(copy.deepcopy(plain), config=config)
    # Other layers were compiled before: without dynamic=False the kernels would be for sizes that vary.
    return torch.compile(model, dynamic=False) if compiled else model  # type: ignore[return-value]


def _wrong(bench: Bench, model: nn.Module, plain: nn.Module) -> str | None:
    """Return a description of the first result that is too far from bf16's; None if all are close."""
    weights = (f"gradient of {name}" for name, _ in plain.named_parameters())
    names = ("output", "gradient of the input", *weights)
    for name, mine, expected in zip(names, bench.both_ways(model), bench.both_ways(plain)):
        error = float((mine.float() - expected.float()).norm() / expected.float().norm())
        if not error <= FURTHEST:
            return f"wrong: the {name} is off by {error:.3g}"
    return None


def measured(
    lab: Lab, planned: Any, bench: Bench, ours: Mapping[str, Prepared], others: Mapping[str, nn.Module]
) -> Case:
    """Return the case of ``planned``, which has a name, a recipe and tokens. "ratios" are against the first of
    ``others``. Results are checked against bf16."""
    case: Case = {"name": planned.name, "recipe": planned.recipe, "tokens": planned.tokens}
    against, *_ = others
    for name, model in ours.items():
        problem = _wrong(bench, model.model, others[BF16])
        if problem:
            return {**case, "problem": f"{name}: {problem}"}
    models = {**ours, **{name: Prepared(model) for name, model in others.items()}}
    actions: dict[str, Action] = {name: _action(bench, one) for name, one in models.items()}

    def forget() -> None:
        for one in models.values():
            one.forget()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        comparison = compare(lab.stopwatch, actions, lab.seconds / 2, forget)
        eager = _eagerly(lab, bench, models, lab.seconds / 2)
    ratios = {name: comparison.ratio(against, name) for name in models if name != against}
    return {
        **case,
        "timings": {**comparison.timings(), **{f"{name}, eager": one for name, one in eager.timings().items()}},
        "ratios": {**ratios, **{f"{name}, eager": eager.ratio(against, name) for name in ratios}},
        "issue_us": comparison.issue_us,
    }


def _eagerly(lab: Lab, bench: Bench, models: Mapping[str, Prepared], seconds: float) -> Comparison:
    # The host's clock runs through all repetitions, so the times of FP8 models include ``forget``.
    repeats = 1 if lab.smoke else IN_A_ROW
    steps = {name: repeated(_action(bench, one, forget=True), repeats) for name, one in models.items()}
    return compare_in_a_row(lab.stopwatch, steps, seconds, repeats)


def _action(bench: Bench, one: Prepared, forget: bool = False) -> Action:
    def action() -> None:
        if forget:
            one.forget()
        bench.both_ways(one.model)

    return action
