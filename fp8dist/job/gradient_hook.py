"""DDP's gradients in FP8: the communication hook, and the check that all ranks have received the same bytes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fp8dist.checks.replication import ddp_parameters
from fp8dist.common.patterns import matching
from fp8dist.errors import ConfigurationError
from fp8dist.parallel.wire import Phases, Reduced, all_reduce, all_reduce_by_nodes, travels_in_fp8, unpack
from fp8dist.state.arena_sync import ArenaSync, carry
from fp8dist.state.groups import SyncGroup
from fp8dist.state.received import Received
from fp8dist.state.roll_call import failing_by_name
from fp8dist.state.slots import clean_fqn

_OWNER = "fp8dist.ddp.comm_hook"
_ROUTER = "router"
"""In the names of parameters that travel in their own dtype as vectors do: ranks cancel, and they are small."""
_UNKNOWN = "a parameter outside of the manager's model"


@dataclass(eq=False)
class _Bucket:
    """A bucket under way. ``parts``: its memory that travels in FP8, and that which does not; ``names``: of all its
    parameters; ``first``: id of the first of them. ``work``: the collective under way."""

    whole: Tensor
    parts: tuple[list[Tensor], list[Tensor]]
    names: tuple[str, ...]
    first: int
    phases: Phases
    work: dist.Work
    future: torch.futures.Future[Tensor]


class GradientHook:
    """A DDP communication hook, ``run``, that adds up gradients in FP8 and leaves the same bits on all ranks.

    A bucket has two collectives, or four on a mesh: shards go to their owners, and their sums, cast again, to all
    ranks. All collectives start on autograd's thread, in the same order on all ranks. A collective that waited in a
    callback of another one would deadlock on gloo as soon as several buckets are under way. So each hook starts the
    next collective of all earlier buckets, and the last bucket's hook waits for all. Nothing is kept by a bucket's
    number: DDP makes other buckets after its first backward.

    Args:
        model: has the names of the parameters.
        exclude: patterns of names of parameters that travel in their own dtype, after those of vectors and routers.
        syncs: of the manager; the one of DDP's ranks carries the digests.
        known: of the manager: the digests by DDP's ranks. Hooks of the same ranks share them.
        ended: called when the last bucket is done.
    """

    def __init__(
        self,
        model: nn.Module,
        exclude: str | Iterable[str],
        syncs: Sequence[ArenaSync] = (),
        known: dict[tuple[int, ...], Received] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self.received = Received()
        self.group: SyncGroup | None = None
        self._state: Any = None
        self._senders: tuple[int, ...] = ()
        self._levels: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        self._model = weakref.ref(model)  # Weak: the garbage collector does not see that DDP's reducer holds this.
        self._names = {id(one): clean_fqn(name) for name, one in model.named_parameters()}
        named = [(self._names[id(one)], one) for one in model.parameters()]
        small = [name for name, one in named if one.ndim <= 1 or _ROUTER in name]
        given = (exclude,) if isinstance(exclude, str) else exclude
        chosen = matching("exclude", (*small, *given), set(self._names.values()))
        self._excluded = {one for one, name in self._names.items() if name in chosen}
        self._syncs, self._known, self._ended = syncs, {} if known is None else known, ended
        self._under_way: list[_Bucket] = []
        self._backwards = self._buckets = 0
        self._task = -1  # Id of autograd's task, the backward of the newest bucket.

    def run(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP wants annotations as objects, or none.
        """Start to reduce a bucket. COLLECTIVE. ``state``: the process group; None: the default one. Or a DeviceMesh
        of the same ranks, with an axis of nodes and an axis of ranks of a node."""
        if bucket.index() == 0:
            self._forget_failed(id(bucket.parameters()[0]))
            self._backwards, self._buckets = self._backwards + 1, 0
            self._prepare(state)
        assert self.group is not None
        self._buckets += 1  # Not the bucket's index: a rank that has left one out then waits for another number.
        with failing_by_name(_OWNER, self._describe, self.group.ranks):
            future = self._start(self.group.process_group, bucket)
            while bucket.is_last() and self._under_way:
                self._advance()
        if bucket.is_last() and self._ended is not None:
            self._ended()
        return future

    def _forget_failed(self, first: int) -> None:
        """Forget buckets of a backward that has failed: a DDP module begins a new one, with a bucket whose first
        parameter has the id ``first``. Keep those of other DDP modules, which may be around this one."""
        before, self._task = self._task, torch._C._current_graph_task_id()
        if self._under_way:
            model = self._model()
            ddps = {} if model is None else ddp_parameters(model)
            # Of a module that is not known, a backward shows itself by its task. -1: of a rank without data, in Join.
            same = self._task == before != -1 and first not in ddps
            self._under_way = [one for one in self._under_way if same or ddps.get(one.first) is not ddps.get(first)]

    def _describe(self) -> str:
        return f"the exchange of gradients in FP8, bucket {self._buckets} of a backward"

    def _prepare(self, state: Any) -> None:
        """Note DDP's ranks, and let the sync of the same ranks carry the digests."""
        state = dist.group.WORLD if state is None else state
        if self.group is None:
            group = SyncGroup(state)
            mesh = group.mesh
            if mesh is not None and mesh.ndim != 2:
                raise ConfigurationError(f"a mesh of nodes and their ranks has 2 axes, got {mesh.ndim}")
            self._levels = None if mesh is None else (mesh.get_group(1), mesh.get_group(0))
            self.group, self._state = group, state
            between = group.process_group if self._levels is None else self._levels[1]
            self._senders = tuple(dist.get_process_group_ranks(between))
            self.received = self._known.setdefault(tuple(group.ranks), self.received)
        elif state is not self._state:
            raise ConfigurationError(
                "gradients in FP8 cannot be reduced by a hook that was registered with another process group or mesh "
                "before. Make a hook for each DDP module"
            )
        carry(self._syncs, self.received, self.group.ranks)

    def _start(self, group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[Any]:
        whole = bucket.buffer()
        if whole.layout is not torch.strided:  # Of an nn.Embedding(sparse=True).
            self._advance()
            return allreduce_hook(group, bucket)
        parts = self._divided(bucket)
        within, between = (None, group) if self._levels is None else self._levels
        numbers = sum(part.numel() for part in parts[0]) // (1 if within is None else within.size())
        if not travels_in_fp8(numbers, whole.dtype, between):
            self._advance()
            return allreduce_hook(group, bucket)
        names = tuple(self._names.get(id(one), _UNKNOWN) for one in bucket.parameters())
        number = (self._backwards << 20) + bucket.index()
        with self._beside(whole):
            flat, exact = (_together(of, whole) for of in parts)
            if self._levels is None:
                phases = all_reduce(flat, exact, group, number)
            else:
                phases = all_reduce_by_nodes(flat, exact, *self._levels, number)
            work = next(phases)
            future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[whole.device] if whole.is_cuda else [])
        self._advance()
        self._under_way.append(_Bucket(whole, parts, names, id(bucket.parameters()[0]), phases, work, future))
        return future

    def _advance(self) -> None:
        """Wait for the collective of each bucket under way, and start its next one, or end it."""
        for bucket in tuple(self._under_way):
            with self._beside(bucket.whole):
                bucket.work.wait()
                try:
                    bucket.work = next(bucket.phases)
                except StopIteration as end:
                    self._under_way.remove(bucket)
                    self._finish(bucket, end.value)

    def _finish(self, bucket: _Bucket, reduced: Reduced) -> None:
        """Write the gradients of a bucket. Each rank decodes what it has received, its own shard too, so that all ranks
        have the same bits."""
        self.received.add(bucket.names, reduced.rows, reduced.damaged, self._senders)
        sizes = [sum(part.numel() for part in of) for of in bucket.parts]
        tensors = [of[0] if len(of) == 1 else bucket.whole.new_empty(n) for of, n in zip(bucket.parts, sizes)]
        unpack(reduced, *tensors)
        for tensor, parts in zip(tensors, bucket.parts):
            if len(parts) > 1:
                _write_back(tensor, parts)
        bucket.future.set_result(bucket.whole)

    def _divided(self, bucket: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return the memory of the bucket that travels in FP8, and the memory that does not."""
        parts: tuple[list[Tensor], list[Tensor]] = [], []
        first = 0
        for exact, run in groupby(bucket.parameters(), lambda one: id(one) in self._excluded):
            size = sum(parameter.numel() for parameter in run)  # They lie side by side.
            parts[exact].append(bucket.buffer()[first : first + size])
            first += size
        return parts

    @contextlib.contextmanager
    def _beside(self, whole: Tensor) -> Iterator[None]:
        """Run the block on a stream of its own: backward must not wait for a collective."""
        if not whole.is_cuda:
            yield
            return
        if self.received.stream is None:
            self.received.stream = torch.cuda.Stream(whole.device)
        self.received.stream.wait_stream(torch.cuda.current_stream(whole.device))
        with torch.cuda.stream(self.received.stream):
            yield


def _together(parts: list[Tensor], whole: Tensor) -> Tensor:
    """Return parts of ``whole`` as one flat tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else whole.new_empty(0)


def _write_back(flat: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy consecutive parts of ``flat`` to where they belong."""
    for part, values in zip(parts, flat.split([part.numel() for part in parts])):
        part.copy_(values)
