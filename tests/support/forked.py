"""Fork ranks from a process that has imported torch and the lab: they start in a tenth of a second.

``RANKS`` and ``ALONE`` stand for torchrun.sh and ``python -m tests.support.lab`` in ``tests/support/main_job.py``. They
are real ranks with torch's environment variables and a store in this process, like the store of torchrun's agent.
torchrun itself is tested separately.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]

PRELOADED = "tests.support.preloaded"


def context() -> ForkServerContext:
    """Return a fork server that has imported the modules of ``preloaded.py``."""
    made = mp.get_context("forkserver")
    made.set_forkserver_preload([PRELOADED])
    return made


def run(
    flags: Sequence[str],
    ranks: int | None,
    variables: Mapping[str, str],
    timeout: float = 120,
    main: Callable[[list[str]], int] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the lab with these flags on this many ranks; None: without torchrun's environment variables.

    The exit status is that of the first rank that failed. ``main``: a function that each rank runs instead of the lab.
    """
    from torch.distributed import TCPStore

    environments: list[dict[str, str]] = [{**os.environ, **variables}]
    if ranks is not None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        environments = [
            {**environments[0], **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
        ]
    with tempfile.TemporaryDirectory(prefix="fp8dist-job-") as folder:
        streams = [str(Path(folder, name)) for name in ("out", "err")]
        processes = [
            context().Process(target=_rank, args=(main, list(flags), environment, streams, timeout - 2), daemon=True)
            for environment in environments
        ]
        for process in processes:
            process.start()
        statuses = _statuses(processes, time.monotonic() + timeout)
        out, err = (Path(stream).read_text() if Path(stream).exists() else "" for stream in streams)
    assert None not in statuses, f"not done within {timeout:.0f} s: {statuses}\n{out}\n{err}"
    return subprocess.CompletedProcess(list(flags), next((status for status in statuses if status), 0), out, err)


def _statuses(processes: Sequence[Any], deadline: float) -> list[int | None]:
    """Return each process's exit status, the first to fail first; None: still running. When one fails, terminates the
    others, as torchrun does."""
    running, ends = list(processes), []
    while running and time.monotonic() < deadline:
        wait([process.sentinel for process in running], deadline - time.monotonic())
        ended = [process for process in running if not process.is_alive()]
        running = [process for process in running if process not in ended]
        ends += [process.exitcode for process in ended]
        if any(process.exitcode for process in ended):
            for process in running:
                process.terminate()
    for process in running:
        process.kill()
        process.join()
    return ends + [None] * len(running)


def _rank(
    main: Callable[[list[str]], int] | None,
    flags: list[str],
    environment: dict[str, str],
    streams: list[str],
    seconds: float,
) -> NoReturn:
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)  # Line-buffered: all ranks write to one file.
    tqdm.set_lock(threading.RLock())  # tqdm's default lock is a semaphore that would leak.
    faulthandler.dump_traceback_later(seconds)
    from launch.train_gpt.ranks import run
    from tests.support.lab.job import start

    sys.argv = ["train_gpt", *flags]
    run(main or start, flags)
