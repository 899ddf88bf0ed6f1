"""``fp8dist.replay``: runs a forward and a backward again, on this rank and on the next one of its group, and finds the
first module whose results differ.

A *place* is one output of a module, or its gradient, in one call; or a gradient of a parameter. Runs are compared place
by place, in order of execution. ``unsteady`` is the first place where this rank's two runs of its own batch differ.
``differs`` is the first place where this rank's run of the next rank's batch differs from that rank's own run of it.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from dataclasses import replace as changed
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fp8dist.checks.contents import Digester, on_device
from fp8dist.checks.differences import Difference, first_difference
from fp8dist.checks.likeness import kernel_flags, likeness, unsteady_settings
from fp8dist.checks.outputs import Outputs, Place, Taken, any_nonfinite
from fp8dist.checks.random_state import RandomState, random_state, set_random_state
from fp8dist.common.optimizer_hooks import untraced
from fp8dist.errors import ConfigurationError, Fp8DistError
from fp8dist.job.manager import Internals, managers_in
from fp8dist.modules.parts import fp8_parts
from fp8dist.parallel.wrappers import compute_devices, require_replicas
from fp8dist.replays.kept_model import KeptModel, require_replayable
from fp8dist.replays.kept_state import kept_fp8_state
from fp8dist.replays.neighbours import copy_of, from_next, require_sendable
from fp8dist.replays.replay_report import RankResult, ReplayReport, judge
from fp8dist.state.accord import Accord
from fp8dist.state.groups import GroupLike, SyncGroup, is_dtensor, local_part, own_rank, world_size
from fp8dist.state.roll_call import failing_by_name
from fp8dist.state.slots import clean_fqn

Step = Callable[[Any], Any]


def replay(
    model: nn.Module,
    step: Step,
    batch: Any,
    *,
    group: GroupLike | None = None,
    random_state: RandomState | None = None,
    scaler: Any = None,
    timeout: timedelta = timedelta(minutes=10),
) -> ReplayReport:
    """Run a forward and a backward again, and name the first module whose output or gradient is not the same.
    COLLECTIVE.

    Each rank runs its own batch twice, then the next rank's batch with that rank's random numbers. Digests of each
    module's outputs, and of the gradients of outputs and parameters, are compared in order of execution. If any differ,
    up to three more runs find the first element that differs, or the op. Works on any model, prepared or not: plain, in
    DDP, FSDP2 or tensor parallel, with activation checkpointing, and with compiled blocks, each of which counts as one
    module. Other models are refused with a reason: see docs/replays.md.

    Afterwards everything is restored: gradients, buffers, FP8 state, random numbers, the scaler. Not restored is state
    that a module keeps in Python attributes. It is reported, because the second run then differs from the first. The
    call needs extra memory for one copy of the gradients and of the buffers.

    Args:
        model: as the training loop calls it.
        step: runs forward and backward on a batch, as the training loop does, without the optimizer's step. DDP does
            not reduce gradients in it, FSDP2 reduces them as always.
        batch: this rank's batch: tensors and plain values, in tuples, lists and dicts.
        group: a ProcessGroup or a DeviceMesh of the ranks that call this. Each has the whole model and its own data.
            With tensor parallelism, pass the data-parallel axis. None: all ranks of the job.
        random_state: the state that ``ReplayBuffer`` kept with the batch. None: the current state.
        scaler: a GradScaler that ``step`` uses.
        timeout: how long ranks wait for each other between the runs.

    Returns:
        The same report on all ranks of the group.

    Raises:
        ConfigurationError: on all ranks: something cannot be replayed or sent, or ``step`` called an optimizer.
        Fp8DistError: on all ranks: ``step`` raised on one of them. The message has its text.
        SyncError: a rank did not make the call. Or ``step`` raised on one rank of a model that communicates in its
            forward: the other ranks then time out there, and the message has the text of the error.
    """
    everyone = None if world_size() == 1 and group is None else SyncGroup(dist.group.WORLD if group is None else group)  # type: ignore[arg-type]
    if everyone is not None and not everyone.communicates:
        everyone = None
    return _Replay(model, step, batch, everyone, group is not None, scaler, timeout).report(random_state)


@dataclass(eq=False)
class _Replay:
    """One call of ``replay`` on one rank, with its arguments. ``_chosen``: the caller gave the group."""

    _model: nn.Module
    _step: Step
    _batch: Any
    _group: SyncGroup | None
    _chosen: bool
    _scaler: Any
    _timeout: timedelta

    def __post_init__(self) -> None:
        self._sharing = _sharing(self._model, self._group)
        groups = self._sharing if self._group is None else [self._group, *self._sharing]
        self._accords = [Accord(one, "replay()", self._timeout) for one in groups]
        self._digester = Digester()

    def report(self, given: RandomState | None) -> ReplayReport:
        self._all(self._require)
        parameter = next(self._model.parameters())
        self._device = compute_devices(self._model)(parameter)
        with on_device(self._device):
            now = random_state(self._device)
            put_back = self._kept()
            try:
                found = self._found(now if given is None else given)
            finally:
                set_random_state(now, self._device)
                put_back()
            self._all(self._held.require_unwritten)
            return found

    def _require(self) -> None:
        require_replayable(self._model)
        if self._group is not None:
            require_sendable(self._batch)
            if not self._chosen:
                require_replicas(self._model, "replay()")
        if next(self._model.parameters(), None) is None:
            raise ConfigurationError("replay(): the model has no parameters")
        for manager in managers_in(self._model):
            Internals(manager).settled().require("replay()")

    def _kept(self) -> Callable[[], None]:
        """Save everything that a run changes, and return a function that restores it."""
        self._held = KeptModel(self._model)
        cycles = [Internals(manager).settled() for manager in managers_in(self._model)]
        slots = {id(c.job): [p.slots for p in fp8_parts(self._model) if p.slots.job is c.job] for c in cycles}
        self._puts = [kept_fp8_state(cycle, slots[id(cycle.job)]) for cycle in cycles]
        if self._scaler is not None:
            self._puts.append(_kept_scaler(self._scaler))
        for cycle in cycles:
            cycle.job.replaying = True

        def put_back() -> None:
            for cycle in cycles:
                cycle.job.replaying = False
            for put in self._puts:
                put()
            self._held.put_back()

        return put_back

    def _found(self, state: RandomState) -> ReplayReport:
        group = self._group
        skipped = self._unsteady()
        run, again = self._run("the first run", self._batch, state), self._run("the second run", self._batch, state)
        first = run.taken()
        result = RankResult(own_rank(), own_rank(), compared=len(first.places))
        unsteady = first.first_difference(again.taken())
        result = changed(result, unsteady=_at(first, unsteady), nonfinite=_at(first, first.first_nonfinite))
        result = changed(result, spoilt="" if result.nonfinite is None else _spoilt(self._model))
        if group is None:
            return judge([self._with_ops(result, [result], state)])
        place = list(group.ranks).index(own_rank())
        result = changed(result, next=group.ranks[(place + 1) % group.size])
        theirs: Any = None
        if not skipped:
            theirs = from_next((self._batch, state), group, self._device)
            other = self._run(f"the run with the batch of rank {result.next}", *theirs).taken()
            expected = from_next(first._replace(marks=()), group, self._device)
            result = changed(result, differs=_at(expected, expected.first_difference(other)))
            result = changed(result, here=_here(other, result.differs))
        everyone = group.gather(result)
        result = self._with_ops(result, everyone, state)
        result = self._with_element(result, everyone, state, theirs)
        return judge(group.gather(result), skipped)

    def _with_ops(self, result: RankResult, everyone: list[RankResult], state: RandomState) -> RankResult:
        """Add the names of the non-deterministic ops before the first place where this rank's own runs differ.
        COLLECTIVE: if any rank has such a place, all ranks run the step once more."""
        if not self._any(one.unsteady is not None for one in everyone):
            return result
        with warnings.catch_warnings(record=True) as caught, _only_warning():
            warnings.simplefilter("always")
            run = self._run("the run that looks for ops", self._batch, state, mark=lambda: len(caught))
        if result.unsteady is None:
            return result
        taken, index = run.taken(), result.unsteady[0]
        window = _window(taken, index)
        if result.unsteady[1].what != "output" and not _ops(caught[window]):
            # On GPUs the backward runs in another thread, and its warnings arrive after the backward.
            window = slice(window.start, None)
        return changed(result, ops=_ops(caught[window]))

    def _with_element(
        self, result: RankResult, everyone: list[RankResult], state: RandomState, theirs: Any
    ) -> RankResult:
        """Add the first element that differs from the next rank's. COLLECTIVE: if any rank found a difference, all
        ranks run the step twice more, on their own batch and on ``theirs``, the next rank's (batch, random state)."""
        group = self._group
        assert group is not None
        if not self._any(one.differs is not None for one in everyone):
            return result
        asking = next(one for one in everyone if one.next == result.rank)
        own = self._run("the run for the elements", self._batch, state, keep=_index(asking.differs)).kept
        other = self._run("the run for the elements", theirs[0], theirs[1], keep=_index(result.differs)).kept
        expected = from_next((own, self._like()), group, self._device)
        if result.differs is None:
            return result
        found = None
        if other is not None and expected[0] is not None and result.here == result.differs[1]:
            found = _first_element(other, expected[0], self._digester)
        note = _note(result, self._like(), expected[1], _how(result, found))
        return changed(result, difference=found, note=note)

    def _any(self, ours: Iterable[bool]) -> bool:
        """True if any of ``ours`` is True, on this rank or on a rank that holds another part of the same parameters.
        These ranks must all run again, because their runs communicate. COLLECTIVE: one all-reduce per such group."""
        found = any(ours)
        for group in self._sharing:
            flag = torch.tensor(int(found), device=group.device)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group.process_group)
            found = bool(flag)
        return found

    def _like(self) -> str:
        return "; ".join([likeness(self._device), *(f"{name} {value}" for name, value in kernel_flags().items())])

    def _unsteady(self) -> list[str]:
        """Return reasons why the results of different ranks cannot be compared. Equal on all ranks. COLLECTIVE."""
        found = unsteady_settings(self._device, self._model)
        for group in (*self._sharing, self._group):
            if group is not None:
                found = [text for texts in group.gather(found) for text in texts]
        return [f"ranks with each other: {text}" for text in dict.fromkeys(found)]

    def _run(
        self,
        what: str,
        batch: Any,
        state: RandomState,
        keep: int | None = None,
        mark: Callable[[], Any] | None = None,
    ) -> Outputs:
        """Restore the saved state and run ``step`` once. COLLECTIVE: it returns on all ranks or raises on all.

        Args:
            what: name of the run, for errors.
            state: state of the random number generators to start from.
            keep: index of the place whose tensor to keep. None: keep none.
            mark: called at each place; the results are in ``Taken.marks``.
        """
        outputs = Outputs(self._model, self._digester, keep, mark, parameters=True)
        for put in self._puts:
            put()
        set_random_state(state, self._device)

        def run() -> None:
            with self._held.running(), outputs.taking(), _refusing_optimizers():
                self._step(copy_of(batch))
            outputs.taken()

        self._all(run, what)
        return outputs

    def _all(self, act: Callable[[], None], what: str = "") -> None:
        """Run ``act`` on all ranks. If it raises on one, raise on all. COLLECTIVE.

        Args:
            what: name of the run, for the message. "": ``act`` is a check, whose own message is enough.
        """
        error: Exception | None = None
        try:
            with self._failing_by_name(what):
                act()
        except Exception as raised:
            error = raised
        if error is not None and not self._accords:
            raise error
        failure = None if error is None else _as_json(error, what)
        for accord in self._accords:
            failure = accord.reach(failure)
        if failure is not None:
            raise _error(*json.loads(failure)) from error

    def _failing_by_name(self, what: str) -> contextlib.AbstractContextManager[None]:
        if self._group is None:
            return contextlib.nullcontext()
        return failing_by_name("fp8dist", lambda: f"{what} of replay()", self._group.ranks)


def _at(taken: Taken, index: int | None) -> tuple[int, Place] | None:
    """Return (index, place) of ``taken``. If the index is after its end, because the other run was longer, the place is
    the last one."""
    return None if index is None else (index, taken.places[min(index, len(taken.places) - 1)])


def _here(taken: Taken, found: tuple[int, Place] | None) -> Place | None:
    """Return this rank's place at the index that was found. None: nothing was found, or this rank's run was shorter."""
    return None if found is None or found[0] >= len(taken.places) else taken.places[found[0]]


def _sharing(model: nn.Module, group: SyncGroup | None) -> list[SyncGroup]:
    """Return the process groups over which DTensor parameters are sharded or replicated, if they have ranks outside of
    ``group``. In the same order on all ranks. Local."""
    found: dict[tuple[int, ...], Any] = {}
    for parameter in model.parameters():
        if is_dtensor(parameter):
            for axis in parameter.device_mesh.get_all_groups():
                found.setdefault(tuple(dist.get_process_group_ranks(axis)), axis)
    own = {own_rank()} if group is None else set(group.ranks)
    return [SyncGroup(axis) for ranks, axis in found.items() if not own.issuperset(ranks)]


def _index(found: tuple[int, Place] | None) -> int | None:
    return None if found is None else found[0]


def _window(taken: Taken, index: int) -> slice:
    """Return the slice of those warnings that came between the place before ``index`` and the place at ``index``."""
    start = taken.marks[index - 1] if 0 < index <= len(taken.marks) else 0
    return slice(start, taken.marks[index] if index < len(taken.marks) else None)


def _ops(caught: list[warnings.WarningMessage]) -> tuple[str, ...]:
    """Return the names of the ops that torch's deterministic mode has warned of."""
    texts = [str(warning.message) for warning in caught]
    return tuple(dict.fromkeys(text.split(" ")[0] for text in texts if "deterministic implementation" in text))


def _first_element(mine: Tensor, theirs: Tensor, digester: Digester) -> Difference | None:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return None
    return first_difference(mine, theirs, digester.leaves(mine), digester.leaves(theirs))


def _how(result: RankResult, found: Difference | None) -> str:
    """Return a note on how this rank's place differs from the next rank's, if not in an element; else ""."""
    assert result.differs is not None
    expected, here = result.differs[1], result.here
    if here is None or here[:4] != expected[:4]:
        if here is None:
            return f"the run on rank {result.rank} ends before"
        module = f"module '{here.module}'" if here.module else "the model's own forward"
        return f"rank {result.rank} has {module}, {here.what} there"
    if here != expected:
        return f"{_kind(here)} on rank {result.rank}, {_kind(expected)} on rank {result.next}"
    return "" if found is not None else "transient: repeated, both got the same"


def _kind(place: Place) -> str:
    return f"{place.dtype}{list(place.shape)}"


def _spoilt(model: nn.Module) -> str:
    """Return the name of the first parameter with a NaN or an infinity on this rank, or ""."""
    parts = ((name, local_part(parameter.detach())) for name, parameter in model.named_parameters())
    return next((clean_fqn(name) for name, part in parts if any_nonfinite(part)), "")


def _note(result: RankResult, mine: str, theirs: str, how: str) -> str:
    """Return a note on a difference: ``how`` (see ``_how``), and the settings in which the two ranks differ.

    Args:
        mine, theirs: settings of this rank and of the next, separated by "; ".
    """
    notes = [how] if how else []
    ours, others = mine.split("; "), theirs.split("; ")
    here, there = [text for text in ours if text not in others], [text for text in others if text not in ours]
    unlike = [
        f"{', '.join(texts[:3])} on rank {rank}" for texts, rank in ((here, result.rank), (there, result.next)) if texts
    ]
    if unlike:
        notes.append(f"the ranks are not alike: {' against '.join(unlike)}")
    return "; ".join(notes)


def _as_json(error: Exception, what: str) -> str:
    """Return [True if the user's call was refused, message], as text that ranks can exchange. See ``_error``."""
    rank, refused = f"rank {own_rank()}", isinstance(error, ConfigurationError) or not what
    if refused:
        return json.dumps([True, f"{error} ({rank})"])
    return json.dumps([False, f"replay(): {rank} raised in {what}: {type(error).__name__}: {error}"])


def _error(refused: bool, text: str) -> Fp8DistError:
    return ConfigurationError(text) if refused else Fp8DistError(text)


@contextlib.contextmanager
def _only_warning() -> Iterator[None]:
    """Context in which torch warns of non-deterministic ops. Inside it, ops with a deterministic version use that."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def _refusing_optimizers() -> Iterator[None]:
    def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        raise ConfigurationError(
            f"replay(): step(batch) called {type(optimizer).__name__}.step(), whose update is not put back: pass a "
            "function that runs the forward and the backward only"
        )

    handle = register_optimizer_step_pre_hook(untraced(refuse))
    try:
        yield
    finally:
        handle.remove()


def _kept_scaler(scaler: Any) -> Callable[[], None]:
    """Return a function that restores what a GradScaler stores about each optimizer. Its scale needs no restoring: only
    ``update()`` changes it, which a step without an optimizer does not call."""
    notes = {optimizer: dict(state) for optimizer, state in scaler._per_optimizer_states.items()}

    def put_back() -> None:
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update({optimizer: dict(state) for optimizer, state in notes.items()})

    return put_back
