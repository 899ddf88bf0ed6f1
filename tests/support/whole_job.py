"""A job that a program describes, on some of a pool's ranks: what it does, and what each rank saw after each action.

``run`` is what the ranks do. It records the amaxes of all tensors with hooks of its own, in high precision too: which
of them count is for the oracle to say (``tests/job/test_whole_job.py``).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling, DivergenceError, Fallback
from fp8dist.modules.fp8_linear import FP8Linear
from tests.support.oracle import Rules
from tests.support.parallel import whole
from tests.support.states import state_of

SlotName = tuple[str, str]
Amaxes = dict[SlotName, float]

RANKS = 4
WIDTH = 32
HEAD = "head"
"""The module with a recipe of its own."""


@dataclass(frozen=True)
class Pass:
    """One forward, and mostly a backward. ``exponents``: by rank, of the input's magnitude. ``skips``: by rank, whether
    the optional branch is left out."""

    kind: str  # "train", "eval", "no_grad", "no_fp8", or "recording": in eval mode, inside ``recording()``
    exponents: tuple[int, ...]
    skips: tuple[bool, ...]


@dataclass(frozen=True)
class Action:
    """``kind``: "step" (``poisoned``: a rank's input holds this value, and the update changes nothing), "drop" (no
    optimizer step follows), "calibrate", "precision", "attach", "flip" or "resume"."""

    kind: str
    passes: tuple[Pass, ...] = ()
    poison: tuple[int, float] | None = None  # (rank, value)
    pattern: str = "*"
    to: str = "high"
    steps: int | None = None
    rank: int = 0  # Of a flip.
    ranks: int = 1  # After "resume".
    history_len: int = 1  # After "resume".


@dataclass(frozen=True)
class Job:
    """A job, and all that happens to it."""

    wrapper: str  # "none", "ddp", "fsdp2", "gather" or "tp"
    ranks: int
    rules: Rules
    head_rules: Rules
    update: str
    fallback: int | None
    actions: tuple[Action, ...] = field(default=())


@dataclass
class Seen:
    """What one rank saw of one action. ``amaxes``: of passes that record where modules are not in high precision.
    ``recorded``: of passes inside ``recording()`` and ``calibrate()``, which record in any mode. ``weights``: amaxes of
    the whole weights before the action. ``told``: slots by kind and step of events. ``trouble``: the message of the
    check that followed, or None."""

    state: dict[SlotName, dict[str, Any]]
    steps: int
    amaxes: Amaxes
    recorded: Amaxes
    weights: Amaxes
    high: dict[str, bool]
    told: dict[tuple[str, int], set[SlotName]]
    trouble: str | None


class Net(nn.Module):
    """Linears: the first, an optional branch, a frozen one, two that share a weight, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 6 * WIDTH)  # Cut by 1 to 4 ranks into multiples of 16.
        self.second = nn.Linear(6 * WIDTH, WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 16)
        self.frozen.requires_grad_(False)
        self.again.weight = self.tied.weight

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        h = self.second(torch.relu(self.first(x)))
        if not skip:
            h = h + self.branch(h)
        h = self.again(torch.tanh(self.tied(torch.tanh(self.frozen(h)))))
        out: Tensor = self.head(h)
        return out


class _Recorder:
    """The amaxes of each FP8Linear on this rank, by plain torch."""

    def __init__(self, net: nn.Module) -> None:
        self.amaxes: Amaxes | None = None  # Of the current pass; None: it records none.
        self._names = {id(module): name for name, module in net.named_modules() if isinstance(module, FP8Linear)}
        for module in net.modules():
            if id(module) in self._names:
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(self._after)

    def _note(self, name: str, role: str, x: Any) -> None:
        local = x.to_local() if isinstance(x, DTensor) else x
        assert self.amaxes is not None
        amax, before = largest(local.detach()), self.amaxes.get((name, role), 0.0)
        self.amaxes[name, role] = math.nan if math.isnan(amax) or math.isnan(before) else max(amax, before)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.amaxes is not None:
            self._note(self._names[id(module)], "input", args[0])

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.amaxes is not None and output.requires_grad:
            name = self._names[id(module)]
            output.register_hook(lambda gradient: self._note(name, "grad_output", gradient))


def largest(x: Tensor) -> float:
    """Return the amax of a tensor; 0 if it has no elements."""
    return float(x.abs().max()) if x.numel() else 0.0


class _Running:
    """A job on this rank, from its start or its resumption."""

    def __init__(self, job: Job, rules: Rules, saved: Mapping[str, Any] | None) -> None:
        self.job = job
        torch.manual_seed(3)
        self.net = Net()
        if saved is not None:
            self.net.load_state_dict(saved["model"])
        fallback = None if job.fallback is None else Fallback(steps=job.fallback)
        recipe, head = (_recipe(each, job.update) for each in (rules, job.head_rules))
        self.manager = fp8dist.prepare(
            self.net, recipe, group=dist.group.WORLD, overrides={HEAD: head}, fallback=fallback, check_policy="raise",
            fp8_all_gather=job.wrapper == "gather",
        )  # fmt: skip
        if job.wrapper in ("fsdp2", "gather"):
            fully_shard(self.net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        if job.wrapper == "tp":
            plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
            parallelize_module(self.net, init_device_mesh("cpu", (dist.get_world_size(),)), plan)  # type: ignore[arg-type]
        self.recorder = _Recorder(self.net)
        self._amaxes: Amaxes = {}
        self._recorded: Amaxes = {}
        self._told: dict[tuple[str, int], set[SlotName]] = {}
        self.manager.on_event(self._tell)
        self._calibrates = False
        self.attach()
        if saved is not None:
            self.manager.load_state_dict(saved["fp8"])

    def _tell(self, event: fp8dist.Event) -> None:
        if event.kind in ("nonfinite", "fallback"):  # Each arena has its own.
            self._told.setdefault((event.kind, event.step), set()).update(map(tuple, event.slots))  # type: ignore

    def attach(self) -> None:
        """Wrap the net, and attach with a new optimizer."""
        if hasattr(self, "optimizer") and self.job.wrapper != "gather":  # detach() refuses a gather in FP8.
            self.manager.detach()
        ddp = self.job.wrapper == "ddp"
        self.called: nn.Module = DistributedDataParallel(self.net, find_unused_parameters=True) if ddp else self.net
        if self.job.wrapper in ("fsdp2", "gather"):
            self.net.reshard()
        # After a forward without a backward, the net has the weights that FSDP2 has gathered, in FP8 perhaps.
        self.parameters = dict(self.net.named_parameters(remove_duplicate=False))
        trained = {id(parameter): parameter for parameter in self.parameters.values() if parameter.requires_grad}
        self.optimizer = torch.optim.SGD(trained.values(), lr=1e-3)
        self._weights = self._amaxes_of_weights()
        self.manager.attach(self.called, optimizer=self.optimizer)

    def act(self, action: Action) -> None:
        """Do what is no "flip" and no "resume"."""
        self._weights = self._amaxes_of_weights()
        if action.kind == "calibrate":
            self._calibrates = True
            with self.manager.calibrate():
                self._run_passes(action)
            self._calibrates = False
        elif action.kind == "precision":
            self.manager.set_precision(action.pattern, action.to, steps=action.steps)  # type: ignore[arg-type]
        elif action.kind == "attach":
            self.attach()
        else:
            self._run_passes(action)
            if action.poison is not None:  # An update of nothing, like that of a loop that saw the NaN.
                for parameter in self.optimizer.param_groups[0]["params"]:
                    if parameter.grad is not None:
                        parameter.grad.zero_()
            if action.kind == "step":
                self.optimizer.step()
            self.optimizer.zero_grad()

    def _run_passes(self, action: Action) -> None:
        for index, each in enumerate(action.passes):
            # Where nothing averages gradients, all ranks get the batch of rank 0.
            alone = self.job.wrapper in ("none", "tp")
            rank = 0 if alone else dist.get_rank()
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(97 * index + rank))
            x *= 2.0 ** each.exponents[rank]
            if action.poison is not None and (alone or action.poison[0] == rank):
                x[0, 0] = action.poison[1]
            skip = each.skips[rank if self.job.wrapper == "ddp" else 0]  # FSDP2 wants the same modules on all ranks.
            with self._mode(each.kind) as trains:
                y = self.called(x, skip)
                if trains:
                    y.square().mean().backward()

    @contextlib.contextmanager
    def _mode(self, kind: str) -> Iterator[bool]:
        """Run a forward as ``kind`` says. The value: whether a backward follows."""
        trains = kind in ("train", "no_fp8", "recording")
        always = self._calibrates or kind == "recording"
        self.recorder.amaxes = self._recorded if always else self._amaxes if kind == "train" else None
        self.net.train(kind not in ("eval", "recording"))
        modes = {"no_fp8": self.manager.no_fp8, "recording": self.manager.recording}
        try:
            with modes.get(kind, contextlib.nullcontext)(), torch.set_grad_enabled(trains):
                yield trains
        finally:
            self.recorder.amaxes = None
            self.net.train()

    def check(self) -> str | None:
        """COLLECTIVE. Return what ``manager.check`` says, or None."""
        try:
            self.manager.check(self.called)
        except DivergenceError as error:
            return str(error)
        return None

    def flipped(self, action: Action) -> str | None:
        """Flip the lowest bit of an element of ``second``'s bias on one rank, check, and flip it back."""
        bias = self.net.second.bias
        part = bias.to_local() if isinstance(bias, DTensor) else bias
        word = part.detach().view(torch.int32)[1:2]
        if dist.get_rank() == action.rank:
            word ^= 1
        trouble = self.check()
        if dist.get_rank() == action.rank:
            word ^= 1
        return trouble

    def seen(self, trouble: str | None) -> Seen:
        """Return what this rank sees now, and forget the recorded amaxes and events."""
        state = state_of(self.manager)
        inputs = [slot for slot in self.manager.slots if slot.role == "input"]
        high = {slot.fqn: bool(self.manager.slot(*slot).high_precision) for slot in inputs}
        recorded = self._amaxes, self._recorded, self._weights
        seen = Seen(state, self.manager.steps, *recorded, high, self._told, trouble)
        self._amaxes, self._recorded, self._told = {}, {}, {}
        return seen

    def _amaxes_of_weights(self) -> Amaxes:
        """COLLECTIVE where weights are sharded."""
        slots = [slot for slot in self.manager.slots if slot.role == "weight"]
        return {tuple(slot): largest(whole(self.parameters[f"{slot.fqn}.weight"])) for slot in slots}  # type: ignore

    def saved(self) -> dict[str, Any]:
        """COLLECTIVE. Return the model and its FP8 state."""
        return {
            "model": {name: whole(value).clone() for name, value in self.net.state_dict().items()},
            "fp8": self.manager.state_dict(),
        }


def _recipe(rules: Rules, update: str) -> DelayedScaling:
    return DelayedScaling(
        history_len=rules.history_len,
        amax_algo=rules.amax_algo,  # type: ignore[arg-type]
        margin=rules.margin,
        power_of_two=rules.power_of_two,
        warmup=rules.warmup,  # type: ignore[arg-type]
        update=update,  # type: ignore[arg-type]
    )


def run(
    job: Job, rules: Rules, ranks: int, actions: Sequence[Action], saved: dict[str, Any] | None, store: str
) -> tuple[list[Seen], dict[str, Any]] | None:
    """Run ``actions`` on the first ``ranks`` ranks of the pool, as a job of its own. Return what this rank saw after
    the start and after each action, and what the job saves at its end; None on the other ranks.

    Args:
        saved: what an earlier job has saved. None: the job starts.
        store: path of a file that does not exist yet, for the ranks to meet.
    """
    rank = int(os.environ["RANK"])
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank >= ranks:
        return None
    os.environ["WORLD_SIZE"] = str(ranks)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    running = _Running(job, rules, saved)
    everything = [running.seen(running.check())]
    for action in actions:
        if action.kind == "flip":
            trouble = running.flipped(action)
        else:
            running.act(action)
            trouble = running.check()
        everything.append(running.seen(trouble))
    end = running.saved()
    dist.barrier()
    return everything, end
