"""launch/trainjob.yaml: Kubeflow Trainer's own models accept it, and its command starts the right program."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from fp8dist.cli.launcher.environment import Job
from fp8dist.cli.launcher.plan import Plan
from launch.train_gpt.options import Options, parse
from tests.support.main_job import ROOT

RECORDER = """#!/bin/sh
# Python, but what ``fp8dist launch`` is to start is written down.
[ "$1 $2 $3" = "-m fp8dist launch" ] || exec {python} "$@"
shift 3
exec {python} -c 'import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))' "$@"
"""


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "launch/trainjob.yaml").read_text()))


def lost(document: dict[str, Any]) -> list[str]:
    """Return the paths of fields that the model lacks or reads differently. The models ignore unknown fields."""
    from kubeflow_trainer_api import models  # It takes a second, which each worker would spend to collect this file.

    assert (document["apiVersion"], document["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    model = models.TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(document))
    read = json.loads(model.to_json())  # type: ignore[union-attr]
    return list(_differences(document, read, ""))


def _differences(given: Any, read: Any, path: str) -> list[str]:
    if isinstance(given, dict) and isinstance(read, dict):
        return [line for key in given for line in _differences(given[key], read.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        pairs = zip(given, read, strict=True)
        return [line for at, (one, other) in enumerate(pairs) for line in _differences(one, other, f"{path}[{at}]")]
    return [] if given == read else [path]


def test_every_field_is_known_to_the_models() -> None:
    (job,) = documents()
    assert lost(job) == []
    unknown = {**job["spec"]["trainer"], "nodes": 4}
    assert lost({**job, "spec": {**job["spec"], "trainer": unknown}}) == [".spec.trainer.nodes"]


def test_four_nodes_with_flags_that_the_job_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = documents()
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == 4
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == str(trainer["numProcPerNode"])
    monkeypatch.setenv("WORLD_SIZE", str(trainer["numNodes"] * trainer["numProcPerNode"]))
    options = parse(trainer["args"], Options)
    assert (options.parallel, options.precision, options.resume) == ("fsdp2", "fp8", "auto")
    (patch,) = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = patch["template"]["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert str(options.out).startswith(mounts["runs"] + "/")
    assert sorted(mounts) == sorted(volume["name"] for volume in pod["volumes"])


def started_by_trainer(folder: Path, *args: str) -> tuple[list[str], str, dict[str, str]]:
    """Run the pod's command with ``args``. Return the arguments, folder and environment of ``fp8dist launch``."""
    (job,) = documents()
    trainer = job["spec"]["trainer"]
    python = folder / "python"
    python.write_text(RECORDER.format(python=sys.executable))
    python.chmod(0o755)
    own = {variable["name"]: variable["value"] for variable in trainer["env"]}
    here = {"REPOSITORY": str(ROOT), "PYTHON": str(python)}
    assert set(here) <= set(own)
    # Set by Trainer's torch plugin (kubeflow/trainer pull request 1840).
    set_by_trainer = {
        "PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": "29400",
    }  # fmt: skip
    environment = {**os.environ, **own, **set_by_trainer, **here}
    command = [*trainer["command"], *args]
    done = subprocess.run(
        command, env=environment, cwd=folder, timeout=120, check=True, stdout=subprocess.PIPE, text=True
    )
    words, where, variables = json.loads(done.stdout)
    return words, where, variables


def test_its_command_starts_torchrun_with_what_trainer_sets(tmp_path: Path) -> None:
    (job,) = documents()
    flags = [*job["spec"]["trainer"]["args"][:-1], str(tmp_path)]  # The job creates the folder of --out.
    if sys.version_info >= (3, 11):  # Older Pythons would import it instead of our package.
        (tmp_path / "launch.py").write_text("raise SystemExit(9)\n")
    words, _, environment = started_by_trainer(tmp_path, *flags)
    arguments = get_args_parser().parse_args(Plan.of(Job.read(environment), words, environment).arguments)
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.max_restarts) == ("4", "8", 3)
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint) == ("c10d", "localhost:29400")
    assert arguments.rdzv_conf == "is_host=false,join_timeout=600,read_timeout=600"
    assert (arguments.module, arguments.training_script) == (True, "launch.train_gpt")
    assert arguments.training_script_args == flags


def test_its_args_may_be_a_program_of_the_working_directory(tmp_path: Path) -> None:
    words, folder, _ = started_by_trainer(tmp_path, "train.py", "--help")
    assert (words, folder) == (["train.py", "--help"], str(tmp_path))
