"""The names on a page: calls, flags, variables, metrics and files, and which of them do not exist."""

from __future__ import annotations

import argparse
import builtins
import copy
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint, tensor
from torch.distributed.algorithms import join
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import parallel
from torch.nn.parallel import DistributedDataParallel

import fp8dist
import fp8dist.exporters
from fp8dist.state.settings import VARIABLES
from scripts.pages.exported import of_numbers
from scripts.pages.flags import command_line, flags_of, job_parser
from tests.support.lab.options import Options
from tests.support.pages import ROOT

FOREIGN = (
    *("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--standalone", "--tee"),
    *("--max-restarts", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--log-dir", "--filename", "--upgrade"),
    *("--nodes", "--ntasks-per-node", "--cpus-per-task", "--gpus-per-node", "--account", "--partition", "--time"),
    *("--strict", "--tb", "--durations", "--lf", "--help", "--no-build-isolation", "--its-flags"),
)
"""Flags of torchrun, SLURM, kubectl, pip, pytest and MkDocs, and of nobody's program."""

THEIRS = ("train.py", "loop.py", "check.py", "launch.py", "job.py", "my_job.py", "X.py", "config.json")
"""Programs and files of a reader."""

OF_TRANSFORMER_ENGINE = ("amax_history_len", "fp8_format")
"""Arguments of TransformerEngine's recipes, whose names are those of this library."""

TOPS = ("fp8dist", "kernels", "launch", "scripts", "tests", "docs")

_FENCE = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.M | re.S)
_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(TOPS)})/[\w./*-]*\w")
_BARE = re.compile(r"[\w*-]+\.(?:py|sh|sbatch|cfg|toml|jsonl?|txt)")


_CALL = re.compile(r"(?<![\w.])((?:manager\.|fp8dist\.|)[a-zA-Z_]\w*)\(((?:[^()]|\([^()]*\))*)\)")


def code_of(text: str) -> list[str]:
    """The code blocks and code spans of a page."""
    return [*_FENCE.findall(text), *(span for _, span in _SPAN.findall(_FENCE.sub("", text)))]


def _unknown_calls(text: str) -> Iterator[str]:
    """Functions that a span of prose calls, such as ``refresh_weights()``, and that nobody has."""
    for _, span in _SPAN.findall(_FENCE.sub("", text)):
        called = re.match(r"(?:[\w.]+\.)?([a-zA-Z_]\w*)\(", span)
        if called and called[1] not in known_calls():
            yield f"{called[1]}()"


def strangers(text: str) -> list[str]:
    """What a page names that does not exist."""
    return sorted({*_unknown_calls(text), *(name for code in code_of(text) for name in _unknown(code))})


def _unknown(code: str) -> Iterator[str]:
    manager = _manager()
    for name in re.findall(r"(?<![\w./])manager\.(?!py\b)([a-zA-Z_]\w*)", code):
        if not hasattr(manager, name):
            yield f"manager.{name}"
    for names in re.findall(r"(?<![\w./-])fp8dist((?:\.[a-zA-Z_]\w*)+)(?![\w-])", code):
        if not _exists(names.split(".")[1:]) and f"`fp8dist{names}`" not in of_numbers():
            yield f"fp8dist{names}"
    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*\w", code):
        if flag not in known_flags() and flag not in FOREIGN:
            yield flag
    for error in re.findall(r"(?<![\w.])[A-Z][A-Za-z0-9]*(?:Error|Scaling|Diverged)\b", code):
        if error not in known_classes():
            yield error
    for variable in re.findall(r"(?<!\w)FP8DIST_[A-Z_]*[A-Z]", code):
        if variable not in VARIABLES:
            yield variable
    for metric in re.findall(r"(?<![\w/.-])fp8/[a-z_]*[a-z](?![\w/<])", code):
        if metric not in metrics():
            yield metric
    yield from _unknown_keywords(code)
    for path in _PATH.findall(code):
        if not any(ROOT.glob(path.rstrip("."))):
            yield path
    if _BARE.fullmatch(code) and code not in THEIRS and not _is_a_file(code):
        yield code


def _unknown_keywords(code: str) -> Iterator[str]:
    for call, words in _CALL.findall(code):
        known = _parameters(call.rpartition(".")[2])
        for word in re.findall(r"(?<![\w.])(\w+)=", re.sub(r"\([^()]*\)", "", words)):
            if known and word not in known and word not in OF_TRANSFORMER_ENGINE:
                yield f"{call}({word}=)"
        yield from _unknown_keywords(words)


def _exists(names: list[str]) -> bool:
    found: Any = fp8dist
    place = "fp8dist"
    for name in names:
        place = f"{place}.{name}"
        if hasattr(found, name):
            found = getattr(found, name)
        elif name in getattr(found, "__annotations__", ()):
            return True
        else:
            try:
                found = importlib.import_module(place)
            except ImportError:  # An integration whose trainer is not installed.
                spec = importlib.util.find_spec(place) if place.startswith("fp8dist.integrations.") else None
                rest = names[names.index(name) + 1 :]
                source = Path(spec.origin).read_text() if spec is not None and spec.origin is not None else ""
                return spec is not None and all(re.search(rf"^(class|def) {one}\b", source, re.M) for one in rest)
    return True


@functools.cache
def _manager() -> fp8dist.StateManager:
    return fp8dist.prepare(nn.Sequential(nn.Linear(16, 16)))


@functools.cache
def known_calls() -> frozenset[str]:
    """Functions and methods that pages may call without the object that has them."""
    places: list[Any] = [builtins, torch, nn, nn.Linear, torch.Tensor, dist, dist.fsdp, checkpoint, tensor, copy]
    places += [torch.optim.Optimizer, torch.amp.GradScaler, DistributedDataParallel, tensor.DTensor, join]
    places += [FSDPModule, parallel, fp8dist, fp8dist.StateManager, fp8dist.SlotState, fp8dist.LossGuard]
    places += [fp8dist.DivergenceReport, fp8dist.Recipe, fp8dist.Recorder, fp8dist.ddp, fp8dist.fsdp]
    places += [fp8dist.exporters, fp8dist.Exporter, fp8dist.ReplayBuffer, fp8dist.exact, torch.serialization]
    theirs = (
        *("convert_to_float8_training", "precompute_float8_dynamic_scale_for_fsdp", "Float8LinearConfig"),
        *("sync_float8_amax_and_scale_history", "fp8_autocast", "filter_fn", "weight", "DistributedDataParallel"),
        *("configure_model", "with_fp8", "disable_forward_pre_hook", "FP8Callback", "FP8Precision"),
        *("fit", "destroy", "end_training", "get_tracker"),
    )
    return frozenset({*theirs, *(name for place in places for name in dir(place))})


@functools.cache
def known_classes() -> frozenset[str]:
    """Names of classes that pages may use without a module."""
    foreign = (
        *("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"),
        *("ChildFailedError", "DistBackendError"),
    )
    return frozenset({*dir(builtins), *dir(fp8dist), *dir(fp8dist.errors), *foreign})


@functools.cache
def _parameters(name: str) -> frozenset[str]:
    """The keywords of a public function, class or method of the manager; none if it is no such thing, or any goes."""
    if name in ("step", "load", "save", "check", "attach") and not hasattr(fp8dist, name):
        found = [getattr(fp8dist.StateManager, name)]
    else:
        found = [getattr(place, name) for place in (fp8dist, fp8dist.StateManager) if hasattr(place, name)]
    signatures = [inspect.signature(one).parameters for one in found if callable(one)]
    return frozenset(word for parameters in signatures for word in parameters)


@functools.cache
def metrics() -> tuple[str, ...]:
    """What ``manager.metrics()`` has."""
    return tuple(_manager().metrics())


@functools.cache
def own_flags() -> frozenset[str]:
    """Those of the example job and of the command line."""
    verbs = [action.choices for action in command_line()._actions if isinstance(action.choices, dict)]
    parsers = [job_parser(), command_line(), *(parser for verb in verbs for parser in verb.values())]
    return frozenset(flag for parser in parsers for flag in flags_of(parser) if flag.startswith("--"))


def lab_parser() -> argparse.ArgumentParser:
    """Return the parser of the lab's flags."""
    return job_parser(Options)


@functools.cache
def known_flags() -> frozenset[str]:
    """Those, what the lab takes, and what the programs in ``scripts`` and ``launch`` take."""
    found = {*own_flags(), *flags_of(lab_parser())}
    for top in ("scripts", "launch", "tests/launch/programs"):
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and path.suffix in ("", ".py", ".sh", ".sbatch"):
                text = path.read_text()
                flags = re.findall(r'"(--[a-z][\w-]*)"', text)
                found.update(flags)
                if "BooleanOptionalAction" in text:
                    found.update(flag.replace("--", "--no-") for flag in flags)
                for labels in re.findall(r"^\s*((?:--[\w-]+ \| )*--[\w-]+)\)", text, re.M):
                    found.update(labels.split(" | "))
    return frozenset(found)


@functools.cache
def _files() -> tuple[str, ...]:
    return tuple(
        path.name for top in (*TOPS, ".ci") for path in (ROOT / top).rglob("*") if "__pycache__" not in path.parts
    )


def _is_a_file(name: str) -> bool:
    return (
        any(
            name in (ROOT / "docs" / page).read_text()
            for page in ("reference/files.md", "example-job.md", "design/formats.md")
        )
        or any(ROOT.glob(name))
        or any(re.fullmatch(name.replace(".", r"\.").replace("*", ".*"), one) for one in _files())
    )
