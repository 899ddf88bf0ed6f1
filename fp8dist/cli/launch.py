"""Start a training program on every rank of this node, and join the other nodes of the job.

    NPROC=2 fp8dist launch train.py --its-flags
    NPROC=2 fp8dist launch -m package.module --its-flags

PROGRAM is a Python file, relative to the current folder; MODULE runs like python -m MODULE. All further arguments go
to the program. Any program for torchrun works: RANK, WORLD_SIZE and so on are set in its environment.

Several nodes: run this on each node, with NODE_RANK from 0 to NNODES - 1:

    NNODES=4 NODE_RANK=0 MASTER_ADDR=<host of node 0> fp8dist launch train.py

Restart after failures: if a rank fails, all ranks start again, at most MAX_RESTARTS times. The program must resume
from its own checkpoint.

    MAX_RESTARTS=3 fp8dist launch train.py

Environment (an empty variable counts as unset):
    NPROC         ranks on this node     default: GPUs that a program sees here; 2 without a GPU
    NNODES        nodes of the job       default: 1
    NODE_RANK     number of this node,   required if NNODES > 1
                  from 0
    MASTER_ADDR   host of node 0         required if NNODES > 1
    MASTER_PORT   free port on node 0    default: 29500
    MAX_RESTARTS  restarts of the job    default: 0
    JOIN_TIMEOUT  seconds that nodes     default: 600. The program sets the timeout of its collectives itself
                  wait for each other
    LOGS          folder for the output  default: none. Files: */attempt_N/LOCAL_RANK/std{out,err}.log, below
                  of each rank           node-NODE_RANK if NNODES > 1. The terminal still shows all output, each line
                                         with its rank
    IFNAME        network interface      default: the interface on the route to MASTER_ADDR, if NNODES > 1
    LOCAL_ADDR    address of this node   default: the IPv4 address of IFNAME, if NNODES > 1

The launcher sets GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to IFNAME, unless they are already set (NCCL's with "=" for
an exact match). Without them, gloo uses the address of this node's host name, often 127.0.1.1, and NCCL the first
interface that is up, which may be a container bridge. LOCAL_ADDR replaces the host name that torchrun announces to the
other nodes. The defaults of IFNAME and LOCAL_ADDR work for IPv4 only; if nodes have only IPv6, set both. The launcher
also sets OMP_NUM_THREADS, if it is unset, to the cores of this node divided by its ranks.

Exit status, after the last restart: 0 if all ranks exited with 0, else the status of the rank that failed first on this
node; 128 + n if signal n killed it, or the launcher. If several ranks failed at the same time, the launcher takes the
first one that exited with another status than 1, 5 and SIGTERM. If there is none, it takes the first one that exited
with 1, an uncaught exception. Status 5 (a collective failed) and SIGTERM come last, because another failure usually
causes them. The launcher itself exits with 2 after a mistake in these variables or in the command, and with 5 if
another node ended the job, cannot be reached, or did not join within JOIN_TIMEOUT.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fp8dist.cli.launcher.environment import BadVariable, Job, refuse
from fp8dist.cli.launcher.interface import FAILED_COLLECTIVE, Unreachable
from fp8dist.cli.launcher.plan import Plan

USAGE = "fp8dist launch [-h] (PROGRAM | -m MODULE) [ARGUMENT …]"


class _BadCommand(ValueError):
    """The command line does not name a program that exists."""


def launch(words: Sequence[str]) -> int:
    """Run ``fp8dist launch WORDS…``: this node's part of a job, to its end. Return the exit status.

    Sets the environment variables of the ranks in this process as well.
    """
    if words and words[0] in ("-h", "--help"):
        print(f"usage: {USAGE}\n\n{__doc__}", end="")
        return 0
    try:
        _require_program(words)
        plan = Plan.of(Job.read(os.environ), words, os.environ)
        os.environ.update(plan.variables)
        from fp8dist.cli.launcher import agent  # Imports torchrun, which is slow and not needed by other commands.

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
        raise _BadCommand(f"no such flag: {first}; flags of the program come after its name: {USAGE}")
    elif not (first and Path(first).exists()):
        raise _BadCommand(f"no such file: {first or repr(first)}, in the current folder {Path.cwd()}")
