"""Start a training program on every rank of this node, and join the job's other nodes.

    NPROC=2 fp8dist launch train.py --its-flags
    NPROC=2 fp8dist launch -m package.module --its-flags

PROGRAM is a Python file, relative to the current folder; MODULE runs as by python -m. Everything after it goes to the
program. The program can be anything that torchrun starts: it finds RANK, WORLD_SIZE and the like in its environment.

Several nodes: on each of them, with NODE_RANK counting up from 0,

    NNODES=4 NODE_RANK=0 MASTER_ADDR=<host of node 0> fp8dist launch train.py

A job that survives its ranks: after a failure all ranks start again, MAX_RESTARTS times at most. The program must
resume from its own checkpoint.

    MAX_RESTARTS=3 fp8dist launch train.py

Environment (an empty variable counts as one that is not set):
    NPROC         ranks on this node     default: its GPUs; 2 without a GPU
    NNODES        nodes of the job       default: 1
    NODE_RANK     this node, from 0      needed when NNODES > 1
    MASTER_ADDR   host of node 0         needed when NNODES > 1
    MASTER_PORT   a free port on it      default: 29500
    MAX_RESTARTS  of the whole job       default: 0
    JOIN_TIMEOUT  seconds that nodes     default: 600. How long a collective waits is up to the program
                  wait for each other
    LOGS          a folder for what      default: none. Files: */attempt_N/LOCAL_RANK/std{out,err}.log, when NNODES > 1
                  each rank says         in its node-NODE_RANK; the terminal still has all of it, each line with its
                                         rank
    IFNAME        network interface      default: the one that leads to MASTER_ADDR, when NNODES > 1
    LOCAL_ADDR    this node's address    default: the IPv4 one of IFNAME, when NNODES > 1

IFNAME becomes GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME (there with a "=", so that no longer name matches), unless
they are set. Without them, gloo takes the address that this node's host name has on this node, often 127.0.1.1, and
NCCL the first interface that is up, which may be a bridge of containers. LOCAL_ADDR replaces the host name by which
torchrun tells other nodes of this one. Both are found for IPv4 only: where nodes have IPv6 alone, set both.
OMP_NUM_THREADS, unless it is set, becomes this node's cores divided by its ranks.

Exit status, after the last restart: 0 when all ranks have exited with 0, else that of the rank that failed first on
this node; 128 + n if signal n killed it. A rank that exits with 5 or after SIGTERM counts as missing another rank, and
so does one that exits with 1 (an uncaught exception), if another rank has failed with another status at the same time.
The launcher itself exits with 2 after a mistake in these variables or in the command, and with 5 if another node has
ended the job, cannot be reached, or did not come within JOIN_TIMEOUT.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fp8dist.launcher.environment import BadVariable, Job, refuse
from fp8dist.launcher.interface import FAILED_COLLECTIVE, Unreachable
from fp8dist.launcher.plan import Plan

__all__ = ["launch"]

USAGE = "fp8dist launch [-h] (PROGRAM | -m MODULE) [ARGUMENT …]"


class _BadCommand(ValueError):
    """The command names no program that could start."""


def launch(words: Sequence[str]) -> int:
    """``fp8dist launch WORDS…``: run this node's part of a job to its end; the exit status.

    Sets the environment variables that the ranks inherit in this process, too.
    """
    if words and words[0] in ("-h", "--help"):
        print(f"usage: {USAGE}\n\n{__doc__}", end="")
        return 0
    try:
        _require_program(words)
        plan = Plan.of(Job.read(os.environ), words, os.environ)
        os.environ.update(plan.variables)
        from fp8dist.launcher import agent  # Other commands have no use for torchrun, whose import takes a while.

        return agent.run(plan.arguments)
    except (_BadCommand, BadVariable) as mistake:
        return refuse(mistake)
    except Unreachable as unreachable:
        print(f"fp8dist launch: {unreachable}", file=sys.stderr, flush=True)
        return FAILED_COLLECTIVE


def _require_program(words: Sequence[str]) -> None:
    if not words:
        raise _BadCommand(f"name a program: {USAGE}")
    first = words[0]
    if first == "-m":
        if len(words) == 1:
            raise _BadCommand(f"name a module after -m: {USAGE}")
    elif first.startswith("-"):
        raise _BadCommand(f"no such flag: {first}; the program's own come after it: {USAGE}")
    elif not (first and Path(first).exists()):
        raise _BadCommand(f"no such file: {first or repr(first)}, seen from {Path.cwd()}")
