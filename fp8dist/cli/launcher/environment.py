"""The launcher's environment variables on one node.

Imports the standard library only. ``python fp8dist/cli/launcher/environment.py`` prints the number of ranks of the job.
launch/torchrun.sh uses it to check the example job's flags before torch is imported.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

MISTAKE = 2
"""Exit status after a mistake of the user."""

DEFAULT_PORT = 29500
DEFAULT_PATIENCE = 600


class BadVariable(ValueError):
    """An environment variable of the launcher has an unusable value. The message is one line for the terminal."""


def refuse(mistake: Exception) -> int:
    """Print the mistake on one line and return its exit status."""
    print(f"fp8dist launch: error: {' '.join(str(mistake).split())}", file=sys.stderr, flush=True)
    return MISTAKE


@dataclass(frozen=True)
class Job:
    """One node's part of a job. ``fp8dist launch --help`` describes each variable."""

    nproc: int  # Ranks on this node.
    nnodes: int
    node_rank: int
    master_addr: str  # May be empty if nnodes is 1.
    master_port: int
    max_restarts: int
    join_timeout: int  # Seconds.
    logs: str | None
    ifname: str | None
    local_addr: str | None

    @property
    def ranks(self) -> int:
        """Ranks of the whole job. All nodes have the same number of ranks."""
        return self.nnodes * self.nproc

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Job:
        """Return the job that these variables describe. An empty variable counts as unset.

        Raises:
            BadVariable: a variable is missing, or is not a number in its range.
        """
        nnodes = _number(environment, "NNODES", 1, least=1)
        if nnodes > 1:
            for name, what in (("NODE_RANK", "the number of this node, from 0"), ("MASTER_ADDR", "the host of node 0")):
                if not environment.get(name):
                    raise BadVariable(f"NNODES is {nnodes}: set {name} to {what}")
        node_rank = _number(environment, "NODE_RANK", 0, least=0)
        if nnodes > 1 and node_rank >= nnodes:
            raise BadVariable(f"NODE_RANK must be below NNODES, which is {nnodes}, got {node_rank}")
        nproc = _number(environment, "NPROC", 0, least=1) or _gpus(environment) or 2
        return cls(
            nproc=nproc,
            nnodes=nnodes,
            node_rank=node_rank,
            master_addr=environment.get("MASTER_ADDR", ""),
            master_port=_number(environment, "MASTER_PORT", DEFAULT_PORT, least=1, most=65535),
            max_restarts=_number(environment, "MAX_RESTARTS", 0, least=0),
            join_timeout=_number(environment, "JOIN_TIMEOUT", DEFAULT_PATIENCE, least=1),
            logs=environment.get("LOGS") or None,
            ifname=environment.get("IFNAME") or None,
            local_addr=environment.get("LOCAL_ADDR") or None,
        )


def _number(environment: Mapping[str, str], name: str, default: int, least: int, most: int | None = None) -> int:
    text = environment.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise BadVariable(f"{name} must be a whole number of at least {least}, got {text}")
    if most is not None and int(text) > most:
        raise BadVariable(f"{name} must be at most {most}, got {text}")
    return int(text)


def _gpus(environment: Mapping[str, str]) -> int:
    """Return how many of this node's GPUs a program sees, without importing torch."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    found = sum(line.startswith("GPU") for line in listed.stdout.splitlines())  # Lines of MIG instances are indented.
    visible = environment.get("CUDA_VISIBLE_DEVICES")  # nvidia-smi lists all. CUDA ends at the first that is none.
    if visible is None:
        return found
    return min(found, len([*itertools.takewhile(lambda one: one.strip() not in ("", "-1"), visible.split(","))]))


if __name__ == "__main__":
    try:
        print(Job.read(os.environ).ranks)
    except BadVariable as mistake:
        sys.exit(refuse(mistake))
