"""DDP's gradients in FP8: the communication hook, and the check that all ranks have received the same bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fp8dist.common.patterns import matching
from fp8dist.errors import ConfigurationError
from fp8dist.parallel.wire import Phases, all_reduce, all_reduce_by_nodes, decode, travels_in_fp8
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import SyncGroup
from fp8dist.state.received import Received
from fp8dist.state.roll_call import failing_by_name
from fp8dist.state.slots import clean_fqn

__all__ = ["GradientHook"]

_OWNER = "fp8dist.ddp.comm_hook"
_UNKNOWN = "a parameter outside of the manager's model"


@dataclass(eq=False)
class _Bucket:
    """A bucket under way. ``parts``: its memory that travels in FP8; ``names``: of the parameters there. ``rest``: the
    all-reduce of the other parameters, its result, and their memory. ``work``: the collective under way."""

    whole: Tensor
    parts: list[Tensor]
    names: tuple[str, ...]
    rest: tuple[dist.Work, Tensor, list[Tensor]] | None
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
        exclude: patterns of names of parameters that travel as before.
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
        self._names = {id(one): clean_fqn(name) for name, one in model.named_parameters()}
        chosen = matching("exclude", exclude, set(self._names.values()))
        self._excluded = {one for one, name in self._names.items() if name in chosen}
        self._syncs, self._known, self._ended = syncs, {} if known is None else known, ended
        self._under_way: list[_Bucket] = []

    def run(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP wants annotations as objects, or none.
        """Start to reduce a bucket. COLLECTIVE. ``state``: the process group; None: the default one. Or a DeviceMesh
        of the same ranks, with an axis of nodes and an axis of ranks of a node."""
        if bucket.index() == 0:  # Of a backward that has failed, some may be left.
            self._under_way.clear()
            self._prepare(state)
        assert self.group is not None
        with failing_by_name(_OWNER, lambda: "the exchange of gradients in FP8", self.group.ranks):
            future = self._start(self.group.process_group, bucket)
            while bucket.is_last() and self._under_way:
                self._advance()
        if bucket.is_last() and self._ended is not None:
            self._ended()
        return future

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
        for sync in self._syncs:
            of_ddp = sync.group is not None and list(sync.group.ranks) == list(self.group.ranks)
            if of_ddp and sync.communicates and sync.every_step:
                sync.received = self.received
                return

    def _start(self, group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[Any]:
        whole = bucket.buffer()
        if whole.layout is not torch.strided:  # Of an nn.Embedding(sparse=True).
            self._advance()
            return allreduce_hook(group, bucket)
        parts, rest, names = self._divided(bucket)
        within, between = (None, group) if self._levels is None else self._levels
        numbers = sum(part.numel() for part in parts) // (1 if within is None else within.size())
        if not travels_in_fp8(numbers, whole.dtype, between):
            self._advance()
            return allreduce_hook(group, bucket)
        with self._beside(whole):
            flat = torch.cat(parts) if len(parts) > 1 else parts[0]
            phases = all_reduce(flat, group) if self._levels is None else all_reduce_by_nodes(flat, *self._levels)
            work, others = next(phases), None
            if rest:
                mean = torch.cat(rest).div_(group.size())
                of_rest = dist.all_reduce(mean, group=group, async_op=True)
                assert of_rest is not None
                others = of_rest, mean, rest
            future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[whole.device] if whole.is_cuda else [])
        self._advance()
        self._under_way.append(_Bucket(whole, parts, names, others, phases, work, future))
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
                    self._finish(bucket, *end.value)

    def _finish(self, bucket: _Bucket, messages: Tensor, length: int, damaged: Tensor) -> None:
        """Write the gradients of a bucket. Each rank decodes what it has received, its own shard too, so that all ranks
        have the same bits."""
        self.received.add(bucket.names, messages, damaged, self._senders)
        flat = bucket.parts[0]
        if len(bucket.parts) > 1:
            flat = flat.new_empty(sum(part.numel() for part in bucket.parts))
        decode(messages.unsqueeze(1), length, flat)
        if len(bucket.parts) > 1:
            _write_back(flat, bucket.parts)
        if bucket.rest is not None:
            work, mean, rest = bucket.rest
            work.wait()
            _write_back(mean, rest)
        bucket.future.set_result(bucket.whole)

    def _divided(self, bucket: Any) -> tuple[list[Tensor], list[Tensor], tuple[str, ...]]:
        """Return the memory of the bucket that travels in FP8, the memory that does not, and the names of the
        parameters that do."""
        whole, parameters = bucket.buffer(), bucket.parameters()
        names = tuple(self._names.get(id(one), _UNKNOWN) for one in parameters if id(one) not in self._excluded)
        if len(names) == len(parameters):
            return [whole], [], names
        divided: tuple[list[Tensor], list[Tensor]] = [], []
        first = 0
        for parameter in parameters:  # They lie side by side.
            divided[id(parameter) in self._excluded].append(whole[first : first + parameter.numel()])
            first += parameter.numel()
        return *divided, names

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


def _write_back(flat: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy consecutive parts of ``flat`` to where they belong."""
    for part, values in zip(parts, flat.split([part.numel() for part in parts])):
        part.copy_(values)
