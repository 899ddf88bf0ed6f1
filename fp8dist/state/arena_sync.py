"""The one collective of a step, and the commit that follows from it.

Life of an arena's sync::

    IDLE ──launch──▶ IN_FLIGHT ──boundary──▶ DUE ──settle (any reader)──▶ IDLE
                      │    ▲
                      └────┘ launch again before the boundary: results merge

A step that is captured into a CUDA graph passes these phases once, on the host. ``poll`` reads what replays proved.

``settle`` is local: it may wait for a collective in flight, but never starts one.
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist.state.arena import Arena
from fp8dist.state.groups import SyncGroup
from fp8dist.state.lookout import Lookout
from fp8dist.state.measured_step import MeasuredStep
from fp8dist.state.precision import Precision
from fp8dist.state.received import Received
from fp8dist.state.roll_call import failing_by_name
from fp8dist.state.waits import Waits, clock_of
from fp8dist_kernels.graphs import capturing
from fp8dist_kernels.header import HEADER, WORD_MANIFEST, WORD_SCALE_HIGH, WORD_SCALE_LOW, WORD_STEP, WORDS
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN, DID_NOT_RUN_BITS, INFINITY_BITS
from fp8dist_kernels.reference.update import OUTCOME

_NEUTRAL_WORD = torch.iinfo(torch.int32).min


class Phase(enum.Enum):
    """Where an arena's sync is between two boundaries."""

    IDLE = "idle"
    IN_FLIGHT = "in flight"
    DUE = "due"


@dataclass
class SyncCounters:
    """Communication of this arena on this rank. ``wait_s``: host time in seconds."""

    collectives: int = 0
    bytes: int = 0
    wait_s: float = 0.0


class Evidence(NamedTuple):
    """What this rank sent: header words, int32[4], and scales, float32[2, n]. ``flags``, bool[3, n]: the counters that
    the commit has raised, or all commits since the last poll. ``received``: see ``Received.write_to``."""

    words: Tensor
    scales: Tensor
    flags: Tensor
    received: int = 0


class Proof(NamedTuple):
    """What one sync proved, or all syncs that were replayed since a poll.

    ``differs``: the values of "manifest", "step", "scale" on which ranks disagreed. ``nonfinite``: an amax was not
    finite. ``saturated``: a sharded weight was cast beyond its scale. ``tripped``: slots triggered a fallback.
    ``hot``: no slot is cold any more; False if that was not asked. ``replays``: number of commits replayed in CUDA
    graphs, and ``collectives`` in them; 0 for an eager step.
    """

    differs: tuple[str, ...]
    nonfinite: bool
    saturated: bool
    tripped: bool
    hot: bool
    replays: int
    collectives: int


class Verdict:
    """A Proof on its way to the host.

    On CUDA the numbers are copied without blocking and read at the next boundary. ``evidence`` is set only if a launch
    before that boundary would overwrite it in the arena. ``proves``: False if no sync made it; valid after ``read``.
    ``fitted``: see ``ArenaSync``.
    """

    proves = True
    fitted = False

    def __init__(
        self, outcome: Tensor, tripped: Tensor | None = None, cold: Tensor | None = None, cold_writes: int = 0
    ) -> None:
        """``tripped``: bool[n]; None: no fallback is configured. ``cold``: bool[n] of the arena; None: do not ask.
        ``cold_writes``: the arena's."""
        self.immediate = not outcome.is_cuda
        self.cold_writes = cold_writes
        self._asked = [flags is not None for flags in (tripped, cold)]
        if any(self._asked):
            outcome = torch.cat([outcome, *(flags.any().view(1) for flags in (tripped, cold) if flags is not None)])
        self.evidence: Evidence | None = None
        self._outcome = outcome
        if outcome.is_cuda:
            with torch.cuda.device(outcome.device):
                self._outcome = torch.empty(outcome.shape, dtype=outcome.dtype, device="cpu", pin_memory=True)
                self._outcome.copy_(outcome, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()

    def read(self) -> Proof:
        """Return the Proof. Waits until it is on the host."""
        if not self.immediate:
            self._event.synchronize()
        counts = self._outcome.tolist()
        trips, asks = self._asked
        hot = asks and counts.pop() == 0
        tripped = trips and counts.pop() > 0
        differs = (
            ("manifest", counts[WORD_MANIFEST]),
            ("step", counts[WORD_STEP]),
            ("scale", counts[WORD_SCALE_LOW] + counts[WORD_SCALE_HIGH]),
        )
        nonfinite, saturated, *replayed = counts[WORDS:]
        kinds = tuple([kind for kind, count in differs if count])
        replays, collectives = replayed if len(replayed) > 1 else (0, 0)
        self.proves &= replays > 0 or len(replayed) <= 1
        return Proof(kinds, nonfinite > 0, saturated > 0, tripped, hot, replays, collectives)


@dataclass
class ArenaSync:
    """An arena, the group that shares it, and its sync in flight.

    ``group`` None: the state is not shared, and there is no collective (one rank, or ``amax_sync=False``).
    ``patterns``: the patterns of ``prepare(groups=…)`` that select its modules; empty for the default group.
    ``owner``: name of the manager in errors. ``graphed``: a step was captured into a CUDA graph. ``replays``: commits
    in such graphs that the host has seen. ``waits``: shared by all arenas of the manager. ``experts``: the precision
    of each expert, by the fqn of a product. ``measured``: what this rank records in a step that is measured; otherwise
    None. ``fitted``: this step compared sharded weights with their scales before it cast them. ``outgrown``: a verdict
    found a sharded weight beyond its scale. ``lookout``: set by ``share`` where the wait for a sync does not block the
    host. ``received``: the gradients that came in FP8, if the group is that of DDP.
    """

    arena: Arena
    group: SyncGroup | None = None
    patterns: tuple[str, ...] = ()
    owner: str = "StateManager"
    phase: Phase = Phase.IDLE
    counters: SyncCounters = field(default_factory=SyncCounters)
    verdict: Verdict | None = None
    graphed: bool = False
    replays: int = 0
    waits: Waits = field(default_factory=Waits)
    experts: dict[str, tuple[Precision, ...]] = field(default_factory=dict)
    fitted: bool = False
    outgrown: bool = False
    lookout: Lookout | None = None
    measured: MeasuredStep | None = None
    received: Received | None = None
    _carried: int = 0  # The generation of the gradients' digests in the last launch.
    _work: dist.Work | None = None
    _launched_by: int = 0  # Id of the process that launched ``_work``.
    _merged: Tensor | None = None
    _in_graph: bool = False  # The sync in progress is being captured, or its capture failed.
    _polled: Tensor | None = None  # The arena's counters at the last poll.
    _hold: Tensor | None = None
    _drop_nonfinite: bool = False

    @property
    def communicates(self) -> bool:
        """True if a launch is a collective."""
        return self.group is not None and self.group.communicates

    def share(self, group: SyncGroup | None, place: int = 0) -> None:
        """Share the arena with these ranks from now on; None: with none. ``place``: of the arena among those of the
        group. Local."""
        if self.lookout is not None:
            self.lookout.close()
        self.group, self.lookout, self.received = group, None, None
        if group is not None and self.communicates and waits_on_the_device(self.arena.device):
            self.lookout = Lookout(self.owner, group, place)

    @property
    def logs(self) -> bool:
        """True on the one rank of the group that logs messages for all of its ranks."""
        return self.group is None or self.group.rank == min(self.group.ranks)

    @property
    def every_step(self) -> bool:
        """True if each step ends with a launch and a commit. Otherwise scales are made just in time, and amaxes are
        needed only by ``fp8dist.watch``."""
        return self.arena.recipe.delayed or self.arena.fallback is not None

    def step_alone(self, hold: Tensor | None = None) -> None:
        """End a step of an arena that has nothing to launch. Local."""
        if self.measured is not None:  # Otherwise nothing was recorded.
            self.measured.keep()
            self.arena.pending.fill_(DID_NOT_RUN)
        self.arena.step.add_(1 if hold is None else hold.reshape(()) == 0)

    def watch(self, on: bool) -> None:
        """Start to measure a step, or measure none."""
        self.measured = MeasuredStep(self.arena) if on else None
        if on and self.experts:
            self.arena.tokens.zero_()

    def kept_records(self) -> Callable[[], None]:
        """Return a function that puts back what this rank has recorded in this step so far. Local."""
        arena = self.arena
        tensors = [(tensor, tensor.clone()) for tensor in (arena.pending, arena.shares, arena.shards, arena.tokens)]
        put_back_measured = None if self.measured is None else self.measured.kept()

        def put_back() -> None:
            for tensor, value in tensors:
                tensor.copy_(value)
            if put_back_measured is not None:
                put_back_measured()

        return put_back

    def launch(self, hold: Tensor | None = None, drop_nonfinite: bool = False) -> None:
        """Snapshot the arena and start its all-reduce. COLLECTIVE if ``communicates``.

        May be called several times before a boundary: the results merge.
        """
        self.settle()
        self._collect()
        if capturing(self.arena.device):
            if self.verdict is not None and self.verdict.evidence is None:
                self._refuse_capture()
            self._in_graph = True
        elif self.verdict is not None and self.verdict.evidence is None:
            self.verdict.evidence = self.evidence()
        if self.measured is not None:
            self.measured.keep()
        self.arena.launch(hold, drop_nonfinite)
        if self.received is not None:
            self._carried = self.received.write_to(self.arena.message)
        self._reduce()

    def evidence(self) -> Evidence:
        """Return copies of what the last launch sent and the last commit flagged."""
        return Evidence(self.arena.words.clone(), self.arena.sent.clone(), self.arena.flags.clone(), self._carried)

    def launch_idle(self) -> None:
        """Take part in the launch of the other ranks with a neutral message. COLLECTIVE.

        For a rank that has run out of data. Its step counter and scales are stale, so its header words are the neutral
        element of MAX.
        """
        self.settle()
        self._collect()
        self.arena.message[:HEADER] = _NEUTRAL_WORD
        self.arena.message[HEADER:] = DID_NOT_RUN_BITS
        self._reduce()

    def _reduce(self) -> None:
        if self.communicates:
            assert self.group is not None
            in_graph = capturing(self.arena.device)
            with self.failing_by_name():
                counters = SyncCounters() if in_graph else self.counters
                self._work = all_reduce_max(self.arena.message, self.group, counters)
                self._launched_by = os.getpid()
            if self.lookout is not None and not in_graph:
                self.lookout.launched(self._work)
            if in_graph:
                self.arena.unpolled[OUTCOME].add_(1)
        self.phase = Phase.IN_FLIGHT

    def _collect(self) -> None:
        """Wait for a launched result, and merge it with earlier results of this step."""
        if self.phase is not Phase.IN_FLIGHT or self._is_of_parent():
            return
        self._wait()
        if self._merged is None:
            self._merged = self.arena.message.clone()
        else:
            torch.maximum(self._merged, self.arena.message, out=self._merged)

    def _wait(self) -> None:
        if self._work is not None:
            start = time.perf_counter()
            work, self._work = self._work, None
            device = self.arena.device
            measured = contextlib.nullcontext() if capturing(device) else self.waits.waiting(clock_of(device))
            with self.failing_by_name(), measured:
                work.wait()
            self.counters.wait_s += time.perf_counter() - start

    @contextlib.contextmanager
    def failing_by_name(self, what: str = "") -> Iterator[None]:
        """Convert an error of the collective in the block, such as a timeout, to a SyncError that names the manager.

        The launched sync is abandoned: the state stays that of the last commit.

        Args:
            what: description of the operation. Default: the sync of this step.
        """
        assert self.group is not None

        def described() -> str:
            if what:
                return what
            if capturing(self.arena.device):  # The step counter cannot be read.
                return "the captured FP8 sync"
            return f"the FP8 sync of step {int(self.arena.step) + 1}"

        try:
            with failing_by_name(self.owner, described, self.group.ranks):
                yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            self.abandon()
            raise

    def pass_boundary(self, hold: Tensor | None = None, drop_nonfinite: bool = False) -> None:
        """Mark the launched sync as due for commit. Where ``hold`` is non-zero, its amaxes wait for the next launch."""
        if self.received is not None:
            self.received.pass_boundary()
        if self.phase is Phase.IN_FLIGHT:
            self.phase = Phase.DUE
            self._hold, self._drop_nonfinite = hold, drop_nonfinite

    def settle(self) -> None:
        """Commit a sync that is due. Local. Does nothing if none is due."""
        if self._in_graph and not capturing(self.arena.device):
            self._forget_launch()
        if self.phase is not Phase.DUE or self._is_of_parent():
            return
        in_graph = capturing(self.arena.device)
        if in_graph and not self._in_graph:
            self._refuse_capture()
        self._wait()
        reduced, hold = self.arena.message, self._hold
        if self._merged is not None:
            reduced = torch.maximum(self._merged, reduced)
        self._merged = self._hold = None
        self.phase, self._in_graph = Phase.IDLE, False
        outcome = self.arena.commit(reduced, hold)
        if hold is not None:
            self.arena.give_back(reduced, hold, self._drop_nonfinite)
        if in_graph:
            self.graphed = True
            self.arena.unpolled[:OUTCOME].add_(outcome)
        else:
            asked = self.arena.cold if self.arena.recipe.delayed and not self.arena.known_hot else None
            self.verdict = Verdict(outcome, self._tripped, asked, self.arena.cold_writes)
            self.verdict.fitted, self.fitted = self.fitted, False

    @property
    def _tripped(self) -> Tensor | None:
        return None if self.arena.fallback is None else self.arena.tripped

    def take_tripped(self) -> Tensor:
        """Return the slots that triggered a fallback, bool[n], and clear them."""
        tripped = self.arena.tripped.clone()
        self.arena.tripped.zero_()
        return tripped

    def trip(self, places: Sequence[int]) -> None:
        """Mark slots that triggered a fallback before the state was saved. The mark is read at the next boundary.
        Local."""
        if places and self.arena.fallback is not None:
            self.arena.tripped.copy_(self.arena.mask(places))
            self.verdict = Verdict(torch.zeros(OUTCOME, dtype=torch.bool, device="cpu"), self.arena.tripped.cpu())
            self.verdict.proves = False

    def _refuse_capture(self) -> None:
        raise ConfigurationError(
            f"{self.owner}: a CUDA graph is captured, but the last step is not finished on the host: call "
            "manager.poll() before the capture, and after each replay"
        )

    def _is_of_parent(self) -> bool:
        """True in a forked process, such as a worker of a DataLoader, for a sync that its parent had in flight. Only
        the parent gets the result, so this process forgets the launch, and answers from what was committed."""
        inherited = self._work is not None and self._launched_by != os.getpid()
        if inherited:
            self._forget_launch()
        return inherited

    def _forget_launch(self) -> None:
        """Reset the phase after a launch whose result does not come: its capture ended in the middle of a step, or it
        is another process's."""
        self._work = self._merged = self._hold = None
        self.phase, self._in_graph = Phase.IDLE, False

    def poll(self) -> None:
        """Make what replays proved since the last poll the current verdict. Local. The previous verdict must have been
        read."""
        arena, before = self.arena, self._polled
        self._polled = arena.counters.clone()
        if self.graphed:
            seen = self._polled > (0 if before is None else before)
            self.verdict = Verdict(arena.unpolled.clone(), self._tripped)
            self.verdict.evidence = Evidence(arena.words.clone(), arena.sent.clone(), seen)
            arena.unpolled.zero_()

    def read_verdict(self) -> tuple[Proof, Evidence | None]:
        """Return what the last sync, or the replays before the last poll, proved, with the evidence if it was kept.
        Clears the verdict."""
        assert self.verdict is not None
        proof, evidence = self.verdict.read(), self.verdict.evidence
        if proof.hot and self.verdict.cold_writes == self.arena.cold_writes:
            self.arena.known_hot = True
        self.verdict = None
        self.outgrown |= proof.saturated and not proof.differs  # With other scales, ranks find other weights.
        self.replays += proof.replays
        self.counters.collectives += proof.collectives
        self.counters.bytes += proof.collectives * self.arena.message.nbytes
        return proof, evidence

    def drop_nonfinite(self) -> None:
        """Drop non-finite amaxes that wait for a boundary (a loss scaler skipped the step)."""
        for bits in self._waiting():
            bits.masked_fill_(bits >= INFINITY_BITS, DID_NOT_RUN_BITS)

    def forget(self, where: Tensor) -> None:
        """Clear history and waiting amaxes of the slots where bool[n] is True, because they describe another tensor."""
        self.arena.forget_history(where)
        self.arena.shards.masked_fill_(where[self.arena.shard_slots], DID_NOT_RUN)
        for bits in self._waiting():
            bits.masked_fill_(where, DID_NOT_RUN_BITS)

    def _waiting(self) -> list[Tensor]:
        """Return the amaxes that are not committed yet, int32[n] each, to be changed in place."""
        self._collect()
        waiting = [self.arena.pending.view(torch.int32)]
        if self._merged is not None:
            self.arena.message.copy_(self._merged)
            amaxes = slice(HEADER, self.arena.send.numel())
            waiting += [self._merged[amaxes], self.arena.message[amaxes]]
        return waiting

    def abandon(self) -> None:
        """Wait for the sync in flight, then drop it, all pending amaxes and the unread verdict."""
        if not self._is_of_parent():
            self._wait()
        self.arena.pending.fill_(DID_NOT_RUN)
        self.arena.shares.fill_(DID_NOT_RUN)
        self.arena.tripped.zero_()
        self.arena.unpolled.zero_()  # What replays have proven, and no poll has read.
        self._merged = self._hold = self.verdict = None
        if self._polled is not None:  # A load or a reset has written the counters.
            self._polled = self.arena.counters.clone()
        if self.measured is not None:
            self.measured.forget()
        self.phase, self._in_graph = Phase.IDLE, False

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        self._collect()
        state = dict(self.__dict__)
        state.update(phase=Phase.IDLE, verdict=None, graphed=False, replays=0, counters=SyncCounters())
        state.update(_work=None, _merged=None, _hold=None, _in_graph=False, _polled=None)
        state.update(waits=Waits(), lookout=None, measured=None, received=None)
        return state


def carry(syncs: Iterable[ArenaSync], received: Received, ranks: Sequence[int]) -> None:
    """Let the sync of each step of exactly these ranks, if there is one, carry what they have received. Local."""
    for sync in syncs:
        if sync.communicates and sync.every_step and sync.group is not None and [*sync.group.ranks] == [*ranks]:
            sync.received = received
            return


def waits_on_the_device(device: torch.device) -> bool:
    """True if the wait for a collective blocks the device's stream and not the host, so that no time-out is raised."""
    return device.type == "cuda"


def all_reduce_sum(tensor: Tensor, group: SyncGroup, counters: SyncCounters) -> None:
    """Add up integers over the group in place, and count it. COLLECTIVE."""
    counters.collectives += 1
    counters.bytes += tensor.numel() * tensor.element_size()
    dist.all_reduce(tensor, dist.ReduceOp.SUM, group=group.process_group)


def all_reduce_max(tensor: Tensor, group: SyncGroup, counters: SyncCounters) -> dist.Work:
    """Start an integer MAX over the group, and count it. COLLECTIVE.

    Amax bits and header words are sent as int32, because float MAX loses NaN on gloo and NCCL.
    """
    counters.collectives += 1
    counters.bytes += tensor.numel() * tensor.element_size()
    work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group.process_group, async_op=True)
    assert work is not None
    group.newest[:] = [work]
    return work
