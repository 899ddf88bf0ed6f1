"""Plan the launch on this node: torchrun's arguments, and environment variables for its agent and the ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8dist.cli.launcher import interface
from fp8dist.cli.launcher.environment import Job


@dataclass(frozen=True)
class Plan:
    """Arguments and environment for torchrun's agent on this node.

    Attributes:
        arguments: the arguments of torchrun, ending with the program and its arguments.
        variables: environment variables to add.
    """

    arguments: list[str]
    variables: dict[str, str]

    @classmethod
    def of(cls, job: Job, program: Sequence[str], environment: Mapping[str, str]) -> Plan:
        """Return the plan for one node of a job.

        Args:
            program: a file or ``-m`` and a module, then its arguments.
            environment: variables that the user has set. They are not overridden.

        Raises:
            BadVariable: the network interface cannot be determined from the variables.
            Unreachable: node 0's name does not resolve, or there is no route to it.
        """
        variables: dict[str, str] = {}
        if not environment.get("OMP_NUM_THREADS"):
            variables["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // job.nproc))
        arguments = ["--standalone"] if job.nnodes == 1 else _rendezvous(job, environment, variables)
        if job.logs is not None:
            arguments += ["--log-dir", f"{job.logs}/node-{job.node_rank}" if job.nnodes > 1 else job.logs, "--tee", "3"]
            # Without the template, torchrun prints the local rank.
            template = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
            variables[template] = environment.get(template, "[${rank}]: ")
        if job.max_restarts:
            # Otherwise restarted ranks find stale addresses in torchrun's store and may wait for them
            # (pytorch/pytorch issue 135712; seen with torch 2.13).
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        arguments += ["--nproc-per-node", str(job.nproc), "--max-restarts", str(job.max_restarts)]
        module = program[0] == "-m"
        # After "--" argparse does not interpret the rest, such as --help or another "--".
        arguments += ["-m", "--", *program[1:]] if module else ["--", *program]
        return cls(arguments, variables)


def _rendezvous(job: Job, environment: Mapping[str, str], variables: dict[str, str]) -> list[str]:
    """Return torchrun's rendezvous arguments. Add the network interface to ``variables``."""
    ifname, address = job.ifname, job.local_addr
    gloo, nccl = environment.get("GLOO_SOCKET_IFNAME"), environment.get("NCCL_SOCKET_IFNAME")
    if not (address and (ifname or (gloo and nccl))):
        found = interface.chosen(job.master_addr, job.join_timeout, ifname)
        ifname, address = ifname or found[0], address or found[1]
    variables["GLOO_SOCKET_IFNAME"] = gloo or str(ifname)
    variables["NCCL_SOCKET_IFNAME"] = nccl or f"={ifname}"
    arguments = ["--nnodes", str(job.nnodes), "--local-addr", address]
    if job.max_restarts == 0:
        return [
            *arguments,
            *("--node-rank", str(job.node_rank)),
            *("--master-addr", job.master_addr),
            *("--master-port", str(job.master_port)),
            *("--rdzv-conf", f"timeout={job.join_timeout}"),
        ]
    # The static rendezvous cannot reuse its ports after a restart.
    is_host = "true" if job.node_rank == 0 else "false"
    return [
        *arguments,
        *("--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"{job.master_addr}:{job.master_port}"),
        *("--rdzv-id", f"fp8dist-{job.master_port}"),
        *("--rdzv-conf", f"is_host={is_host},join_timeout={job.join_timeout},read_timeout={job.join_timeout}"),
    ]
