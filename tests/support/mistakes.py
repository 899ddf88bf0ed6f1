"""A harness for programs with a mistake: each must give the right result, or report what is wrong.

A program is a function of a ``Case``. Its result is compared with a float32 model in plain torch that shares no code
with fp8dist.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import StateManager
from fp8dist.errors import Fp8DistError
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, RanksFailed
from tests.support.scenarios import RAISED, RIGHT, SAID, WARNED, Scenario
from tests.support.sharded import full
from tests.support.training import bits

OUTPUT = 0.08
"""Allowed relative error of an output in FP8: correct programs have 3 %, wrong ones 28 % and more."""
GRADIENT = 0.30
"""For an input's gradient, after two products with E5M2 gradients: correct programs have 11 to 21 %, wrong ones 100."""
LOSS = 0.04
"""Allowed difference of the final losses of FP8 and float32 training, as a fraction of the first loss: correct programs
have 1 %, programs that train nothing 70 %."""

LR = 0.03
STEPS = 12
"""Steps of a training in which weights grow to three times their size."""

RAISES_TIMEOUT = timedelta(seconds=2)
"""Timeout of the process groups of programs that lose a rank."""
USUAL_TIMEOUT = timedelta(seconds=20)

PACKAGE = str(Path(fp8dist.__file__).parent)


class Net(nn.Module):
    """Two Linears, 32 → 64 → 32."""

    def __init__(self, dtype: torch.dtype | None = None, device: Any = None) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64, dtype=dtype, device=device)
        self.down = nn.Linear(64, 32, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def make_net(seed: int = 0, **options: Any) -> Net:
    """Return the net of this seed."""
    torch.manual_seed(seed)
    return Net(**options)


def larger(factor: float = 8.0, of: str = "weight") -> dict[str, Tensor]:
    """Return other, larger weights. ``of``: the end of their names; with "down.weight", activations keep their size."""
    return {name: p.detach() * (factor if name.endswith(of) else 1) for name, p in make_net(5).named_parameters()}


def plain(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the float32 output of a ``Net`` with these weights."""
    w = {name: value.float() for name, value in weights.items()}
    h = F.linear(x.float(), w["up.weight"], w["up.bias"])
    return F.linear(torch.relu(h), w["down.weight"], w["down.bias"])


@functools.cache
def _teacher() -> dict[str, Tensor]:
    return {name: 4 * p.detach() for name, p in make_net(7).named_parameters()}


def batch(rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Return (x, y), both [32, 32]; y comes from a larger net."""
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1000 * rank + index))
    return x, plain(_teacher(), x)


PROBE = 999


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of one batch."""
    return F.mse_loss(output.float(), target)


@functools.cache
def reference_losses(ranks: int, steps: int) -> tuple[float, float]:
    """Return the losses of a probe before and after training in float32 with the batches of this many ranks."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in make_net().named_parameters()}
    optimizer = torch.optim.AdamW(weights.values(), lr=LR)
    x, y = batch(0, PROBE)
    first = float(loss_of(plain(weights, x), y).detach())
    for index in range(steps):
        for rank in range(ranks):
            x_, y_ = batch(rank, index)
            (loss_of(plain(weights, x_), y_) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return first, float(loss_of(plain(weights, x), y).detach())


LAYOUTS = ("one", "ddp", "fsdp1", "fsdp2", "gather", "tp")
"""``gather``: FSDP2 with fp8_all_gather."""


def ranks_of(layout: str) -> int:
    return 1 if layout == "one" else 2


def clean(name: str) -> str:
    """Return a name without the prefixes of wrappers."""
    for prefix in ("_fsdp_wrapped_module.", "_orig_mod.", "module."):
        name = name.replace(prefix, "")
    return name


def weights_of(called: nn.Module) -> dict[str, Tensor]:
    """Return all parameters, unsharded. COLLECTIVE if they are sharded."""
    summon: Any = contextlib.nullcontext()
    if isinstance(called, FullyShardedDataParallel):
        summon = FullyShardedDataParallel.summon_full_params(called, writeback=False)
    with summon:
        return {clean(name): value for name, value in full(called).items()}


def load(called: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a whole state dict, as users do in each layout."""
    if isinstance(called, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(
            called, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)
        ):
            called.load_state_dict(dict(state))
        return
    model = called.module if isinstance(called, DistributedDataParallel) else called
    parts = {}
    for name, parameter in model.named_parameters():
        value = state[clean(name)].to(parameter.dtype)
        if hasattr(parameter, "placements"):
            device = parameter.device if parameter.device.type != "meta" else torch.device("cpu")
            value = distribute_tensor(value.to(device), parameter.device_mesh, parameter.placements)
        parts[name] = value
    model.load_state_dict(parts)


def adamw(called: nn.Module | Any, lr: float = LR, **options: Any) -> torch.optim.AdamW:
    """Return AdamW for a module's parameters or for parameters."""
    return torch.optim.AdamW(called.parameters() if isinstance(called, nn.Module) else called, lr=lr, **options)


@dataclass
class Seen:
    """Everything observed on one rank."""

    warnings: list[str] = field(default_factory=list)
    error: str | None = None
    origin: str = ""  # ours: what fp8dist raises; bare: Python's own from inside fp8dist; foreign: torch's
    measured: list[tuple[str, float, float]] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)
    trace: str = ""

    @property
    def wrong(self) -> list[str]:
        return [f"{what}: {100 * value:.1f} % off" for what, value, bound in self.measured if not value <= bound]


class Case:
    """The argument of a program, which builds a net, attaches and trains it, and judges what it computes.

    ``called``: what the training loop calls. ``index``: of the next batch.
    """

    called: Any
    manager: StateManager
    optimizer: Any

    def __init__(self, rank: int, ranks: int, group: Any, mesh: DeviceMesh | None, seen: Seen) -> None:
        self.rank, self.ranks, self.group, self.mesh, self.seen = rank, ranks, group, mesh, seen
        self.layout, self.index = "one", 0

    def prepare(self, model: nn.Module, *args: Any, **options: Any) -> StateManager:
        if self.ranks > 1:
            options.setdefault("group", self.group)
        if self.layout == "gather":
            options.setdefault("fp8_all_gather", True)
        self.manager = fp8dist.prepare(model, *args, **options)
        return self.manager

    def wrap(self, net: nn.Module) -> nn.Module:
        """Return what the training loop calls."""
        if self.layout == "ddp":
            return DistributedDataParallel(net, process_group=self.group)
        if self.layout == "fsdp1":
            return FullyShardedDataParallel(
                net, process_group=self.group, use_orig_params=True, device_id=torch.device("cpu")
            )
        if self.layout in ("fsdp2", "gather"):
            for part in net.children():
                fully_shard(part, mesh=self.mesh)
            return fully_shard(net, mesh=self.mesh)
        if self.layout == "tp":
            assert self.mesh is not None
            return parallelize_module(net, self.mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        assert self.layout == "one"
        return net

    def build(
        self, layout: str = "one", make: Callable[[Any], Any] = adamw, net: nn.Module | None = None, **options: Any
    ) -> Case:
        """Prepare, wrap, and make the optimizer, in the right order. ``options``: of ``prepare``."""
        self.layout = layout
        net = make_net() if net is None else net
        self.prepare(net, **options)
        self.called = self.wrap(net)
        self.optimizer = make(self.called)
        return self

    def attach(self, **options: Any) -> Case:
        if "optimizer" not in options:
            options["optimizer"] = self.optimizer
        self.manager.attach(self.called, **options)
        return self

    def attached(self, layout: str = "one", **options: Any) -> Case:
        """Be a correct program, ready to train."""
        return self.build(layout, **options).attach()

    def compile(self) -> Case:
        """Compile anew: after several compilations of one forward, Dynamo would run the next ones eagerly."""
        torch._dynamo.reset()
        self.called = torch.compile(self.called, backend="eager")
        return self

    def batch(self, index: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the next batch, or another. Ranks of tensor parallelism share the same data."""
        return batch(0 if self.layout == "tp" else self.rank, self.index if index is None else index)

    def backward(self) -> Tensor:
        x, y = self.batch()
        self.index += 1
        loss = loss_of(self.called(x), y)
        loss.backward()
        return loss.detach()

    def step(self, optimizer: Any = None) -> None:
        """Take a step. A step that raises must not have changed a parameter."""
        before = [(p, _local(p).clone()) for p in self.called.parameters() if p.device.type != "meta"]
        try:
            (optimizer or self.optimizer).step()
        except Fp8DistError:
            if any(not torch.equal(_local(p), old) for p, old in before):
                self.flaw("the step that raised has changed a parameter")
            raise

    def train(self, steps: int | None = None, optimizer: Any = None, after: Callable[[], Any] | None = None) -> Case:
        """Train for these steps, or for those that are left of ``STEPS``."""
        optimizer = optimizer or self.optimizer
        for _ in range(STEPS - self.index if steps is None else steps):
            self.backward()
            self.step(optimizer)
            optimizer.zero_grad()
            if after is not None:
                after()
        return self

    def snapshot(self) -> list[bytes]:
        """Return this rank's parameters, exactly."""
        return [bits(_local(p)) for p in self.called.parameters()]

    def flaw(self, text: str) -> None:
        self.seen.flaws.append(text)

    def expect(self, condition: bool, text: str) -> None:
        if not condition:
            self.flaw(text)

    def measure(self, what: str, actual: Tensor, expected: Tensor, bound: float = OUTPUT) -> None:
        actual, expected = actual.detach().float(), expected.detach().float()
        error = float((actual - expected).norm() / expected.norm())
        self.seen.measured.append((what, error if error == error else float("inf"), bound))

    def output(self, what: str = "output", train: bool = True, called: Any = None) -> Case:
        """Compare one forward with float32 with the same weights."""
        called = self.called if called is None else called
        x, _ = batch(0, PROBE)
        called.train(train)
        with torch.set_grad_enabled(train):
            y = called(x.to(next(called.parameters()).dtype))
        self.measure(what, y, plain(weights_of(called), x))
        called.train()
        return self

    def gradient(self, what: str = "gradient") -> None:
        """Compare the input's gradient of one backward with float32 with the same weights."""
        weights = weights_of(self.called)
        x, y = batch(0, PROBE)
        mine, theirs = (x.clone().requires_grad_() for _ in range(2))
        loss_of(self.called(mine.to(next(self.called.parameters()).dtype)), y).backward()
        self.called.zero_grad()
        loss_of(plain(weights, theirs), y).backward()
        assert mine.grad is not None
        assert theirs.grad is not None
        self.measure(what, mine.grad, theirs.grad, GRADIENT)

    def judge(self, steps: int | None = None) -> None:
        """Compare output and gradient, and with ``steps`` also the final loss with a float32 training of ``steps``
        steps."""
        self.output("eval output", train=False).output().gradient()
        if steps is not None:
            first, last = reference_losses(self.ranks, steps)
            x, y = batch(0, PROBE)
            with torch.no_grad():
                loss = float(loss_of(self.called.eval()(x), y))
            self.called.train()
            self.seen.measured.append(("final loss", abs(loss - last) / first, LOSS))


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def run_case(scenario: Scenario, rank: int = 0, group: Any = None, mesh: DeviceMesh | None = None) -> Seen:
    """Run the scenario on one rank."""
    seen = Seen()
    case = Case(rank, scenario.ranks, group, mesh, seen)
    with captured_log() as log, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scenario.program(case)
        except Exception as error:
            _note(error, seen)
    seen.warnings = [text for _, text in log]
    del case
    gc.collect(1)  # The program's objects are young; a full collection would scan all of torch.
    return seen


def _note(error: BaseException, seen: Seen) -> None:
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    ours = next((e for e in chain if isinstance(e, Fp8DistError)), None)
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and frames[-1].filename.startswith(PACKAGE)
    # For example an AttributeError with its own text.
    deliberate = inside and (frames[-1].line or "").startswith("raise ")
    seen.origin = "ours" if ours is not None or deliberate else "bare" if inside else "foreign"
    chosen = ours or error
    seen.error = f"{type(chosen).__name__}: {chosen}"
    seen.trace = "".join(traceback.format_exception(error))
    for e in chain:
        traceback.clear_frames(e.__traceback__)
        e.__traceback__ = None


_GROUPS: dict[str, tuple[int, Any, DeviceMesh]] = {}
"""By kind: (epoch, group, mesh), in this rank's process."""


def run_on_rank(module: str, name: str, epoch: int) -> Seen:
    """Run a scenario of the ``SCENARIOS`` of that module, on a rank of a pool. Does not reuse groups of an earlier
    ``epoch``."""
    import importlib

    scenario: Scenario = importlib.import_module(module).SCENARIOS[name]
    kind = "loses" if scenario.loses else "usual"
    known = _GROUPS.get(kind)
    if known is None or known[0] != epoch or scenario.loses:
        group = dist.new_group(timeout=RAISES_TIMEOUT if scenario.loses else USUAL_TIMEOUT)
        assert group is not None
        known = (epoch, group, DeviceMesh.from_group(group, "cpu", mesh_dim_names=("all",)))
        _GROUPS[kind] = known
    return run_case(scenario, dist.get_rank(), known[1], known[2])


class Bench:
    """Runs scenarios on the ranks of a pool."""

    def __init__(self, pool: RankPool, module: str) -> None:
        self._pool, self._module, self._epoch = pool, module, 0

    def run(self, scenario: Scenario) -> list[Seen]:
        """Run a scenario. Return what each rank has seen.

        Raises:
            RanksFailed: ranks hang or died.
        """
        try:
            seen: list[Seen] = self._pool.run(run_on_rank, self._module, scenario.name, self._epoch, timeout=45)
        except RanksFailed:
            self._epoch += 1
            raise
        if any(each.origin in ("bare", "foreign") or "SyncError" in (each.error or "") for each in seen) or (
            len({each.error is None for each in seen}) > 1
        ):
            self._epoch += 1
        return seen


def outcome_of(seen: list[Seen]) -> str:
    """Return raised, warned or right; or a forbidden outcome: bare (Python's own error from inside fp8dist), foreign
    (torch's error, and nothing from fp8dist), SILENT_WRONG."""
    if any(each.origin == "bare" for each in seen):
        return "bare"
    if any(each.origin == "ours" for each in seen):
        return RAISED
    if any(each.warnings for each in seen):
        return WARNED
    if any(each.origin == "foreign" for each in seen):
        return "foreign"
    return "SILENT_WRONG" if any(each.wrong for each in seen) else RIGHT


def complaints(scenario: Scenario, seen: list[Seen]) -> list[str]:
    """Return the deviations from the expectations; [] if there are none."""
    outcome = outcome_of(seen)
    found = [f"rank {rank}: {flaw}" for rank, each in enumerate(seen) for flaw in each.flaws]
    if outcome not in scenario.outcomes:
        found.append(f"{outcome}, expected {' or '.join(sorted(scenario.outcomes))}")
    if outcome == WARNED and WARNED not in scenario.outcomes and any(each.wrong for each in seen):
        found.append("and wrong")
    texts = [each.error for each in seen if each.error] if outcome == RAISED else [t for e in seen for t in e.warnings]
    expected = outcome in SAID and outcome in scenario.outcomes
    if expected and scenario.words and not any(_says(text, scenario.words) for text in texts):
        found.append(f"no text has all of {scenario.words}")
    if outcome == RAISED and scenario.errors and not any(e.error and e.error.startswith(scenario.errors) for e in seen):
        found.append(f"expected {' or '.join(scenario.errors)}")
    if not scenario.loses and any(each.error and each.error.startswith("SyncError") for each in seen):
        found.append("a rank timed out waiting for another")
    if scenario.everywhere and outcome == RAISED and not all(each.origin == "ours" for each in seen):
        found.append("not all ranks raised")
    if scenario.once and any(sum(_says(text, scenario.words) for text in each.warnings) > 1 for each in seen):
        found.append("said more than once")
    return found


def _says(text: str, words: tuple[str, ...]) -> bool:
    return all(re.search(word, text, re.IGNORECASE | re.DOTALL) for word in words)


def report(scenario: Scenario, seen: list[Seen]) -> str:
    """Return all observations, to explain a failure."""
    lines = [f"{scenario.name}: {'; '.join(complaints(scenario, seen))}"]
    for rank, each in enumerate(seen):
        lines.append(f"--- rank {rank}: {each.error or 'returned'}")
        lines += [f"    warned: {text}" for text in each.warnings]
        lines += [f"    {what}: {100 * value:.2f} %" for what, value, _ in each.measured]
        if each.origin in ("bare", "foreign"):
            lines.append(each.trace)
    return "\n".join(lines)
