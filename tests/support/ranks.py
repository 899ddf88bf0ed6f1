"""Real ranks for tests: processes that stay alive between tests, connected by gloo.

``RankPool.run(function, *args)`` calls ``function(*args)`` on every rank and returns the results in rank
order. ``function`` must be a module-level function. If a rank fails, dies or the time is up, the error contains each
rank's traceback, or exit status and last words, and the pool restarts for the next test. ``on_ranks`` makes a function
whose assertions hold on each rank a test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import inspect
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from fp8dist.state.roll_call import roll_call
from tests.support.forked import ROOT, context

CONNECT_SECONDS = 60

MOST_THREADS = 96
"""Largest number of threads per rank. Each gloo group adds threads that poll as long as the process lives, and the
groups of a thousand tests keep a core busy. A pool beyond the limit restarts."""

LAST_WORDS = 20_000
"""Characters of a rank's stderr in an error."""


class RanksFailed(AssertionError):
    """One or more ranks raised, died, or timed out."""


class RankPool:
    """``world_size`` processes with an initialised default process group (gloo, file store)."""

    def __init__(self, world_size: int, does: Callable[..., None] | None = None) -> None:
        """``does``: replaces ``serve``, what a process does."""
        self.world_size = world_size
        self._does = does or serve
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._starting: list[Connection] = []  # Of ranks that may not be connected yet.
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 90.0) -> list[Any]:
        """Call ``function(*args)`` on all ranks. Return the results in rank order.

        Raises:
            RanksFailed: with every rank's traceback.
        """
        self._start()
        results: dict[int, tuple[bool, Any]] = {}
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((function.__module__, function.__qualname__, args))
            except OSError:  # Without a new pool, all later tests would fail too.
                self._fail(results, f"rank {rank} died after an earlier test")
        deadline = time.monotonic() + timeout
        while len(results) < self.world_size:
            waiting = {p: r for r, p in enumerate(self._pipes) if r not in results}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(results, f"not done within {timeout:.0f} s")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    results[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self._fail(results, f"rank {rank} died")
            failed = [rank for rank, (ok, _) in results.items() if not ok]
            if failed:  # The others may hang in a collective: wait a moment, then ask for their tracebacks.
                deadline = min(deadline, time.monotonic() + 3)
        if any(not ok for ok, _ in results.values()):
            self._fail(results, "failed")
        if any(threads_of(process.pid) > MOST_THREADS for process in self._processes):
            self.close()
        return [results[rank][1] for rank in range(self.world_size)]

    def close(self) -> None:
        """Stop the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes, self._starting = [], [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        """Start the processes, again if one ends before it is connected: gloo sometimes loses a connection there."""
        said = ""
        for _ in range(3):
            if not self._processes:
                self._start_once()
            try:
                while self._starting:
                    if not self._starting[-1].poll(CONNECT_SECONDS):
                        raise EOFError
                    self._starting[-1].recv()
                    self._starting.pop()
                return
            except (EOFError, ConnectionResetError):
                try:
                    said = "\n".join(self._said({}))
                finally:
                    self.close()
        raise RanksFailed(f"{self.world_size} ranks: their processes end before they are connected\n{said}")

    def _start_once(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fp8dist-ranks-")
        for rank in range(self.world_size):
            ours, theirs = context().Pipe()
            process = context().Process(
                target=self._does, args=(rank, self.world_size, self._folder.name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._starting = list(self._pipes)

    def _fail(self, results: dict[int, tuple[bool, Any]], what: str) -> None:
        try:
            text = "\n".join([f"{self.world_size} ranks: {what}", *self._said(results)])
        finally:  # What is left of a pool would fail all later tests.
            self.close()
        raise RanksFailed(text)

    def _said(self, results: dict[int, tuple[bool, Any]]) -> Iterator[str]:
        assert self._folder is not None
        for process in self._processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # It may end in between: it is the fork server's child.
                    os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        for rank, process in enumerate(self._processes):
            if rank in results:
                ok, value = results[rank]
                yield f"--- rank {rank}: " + ("returned" if ok else f"raised\n{value}")
            else:  # What gloo or the C++ runtime wrote before an abort is there too.
                words = Path(self._folder.name, f"stderr-{rank}")
                written = words.read_text(errors="replace")[-LAST_WORDS:] if words.exists() else ""
                status = process.exitcode
                where = "was here" if status is None else f"ended with status {status}"
                yield f"--- rank {rank}: {where}\n{written}"


@contextlib.contextmanager
def short_grace(seconds: float) -> Iterator[None]:
    """Let roll calls of this process wait ``seconds`` for ranks that notice a failure later, in place of GRACE. 0.3 s
    where only one rank calls; 1.5 s where several do, which a busy machine may delay."""
    ranks, _, *others = roll_call.__defaults__ or ()
    with mock.patch.object(roll_call, "__defaults__", (ranks, timedelta(seconds=seconds), *others)):
        yield


def run_apart(count: int, function: Callable[..., Any], *args: Any, timeout: float = 90.0) -> list[Any]:
    """Run a function on ranks of its own, as one whose connections time out: no other can use them then."""
    pool = RankPool(count)
    try:
        return pool.run(function, *args, timeout=timeout)
    finally:
        pool.close()


POOLS = {2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}
"""The fixture of the pool with so many ranks."""


def on_ranks(count: int, timeout: float = 90.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test that each of ``count`` ranks of a pool runs, with the arguments of the test. It must return
    nothing: what it asserts holds on each rank."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function)
        pool = inspect.Parameter(POOLS[count], inspect.Parameter.KEYWORD_ONLY)

        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            arguments[pool.name].run(function, *(arguments[name] for name in own.parameters), timeout=timeout)

        test.__signature__ = own.replace(parameters=[*own.parameters.values(), pool])  # type: ignore[attr-defined]
        test.on_rank = function  # type: ignore[attr-defined]
        function.__qualname__ += ".on_rank"  # Where ``serve`` finds it.
        return test

    return decorate


def threads_of(pid: int) -> int:
    """Return the number of threads of a process; 0 if unknown."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def serve(rank: int, world_size: int, folder: str, pipe: Connection, backend: str = "gloo") -> None:
    """Connect with the other ranks, and call functions until the pool closes the pipe."""
    stderr = os.open(Path(folder, f"stderr-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stderr, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    faulthandler.enable(stderr)
    faulthandler.register(signal.SIGUSR1, stderr, all_threads=True)
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    pipe.send("connected")
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        try:
            torch._dynamo.utils.counters["stats"]["unique_graphs"] = 0  # Forget compilations of earlier tests.
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
