"""``fp8dist verify``: its flags, and the comparison of a served model with a checkpoint or a certificate."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fp8dist.checkpoint.export import Export
from fp8dist.checkpoint.export_formats import FORMATS
from fp8dist.cli.export import add_model_flags, exported, read_config
from fp8dist.errors import CheckpointError, ConfigurationError
from fp8dist.offline.certificates import CERTIFICATE, Certified, model_digest, read_certificate
from fp8dist.offline.safetensor_files import dtype_text
from fp8dist.offline.served import Mismatch, Served, served_model
from fp8dist.offline.verification import QUANTIZATION, Reference, Verification, compare_configs, compare_tensors

__all__ = ["add_flags", "verify"]

Progress = Callable[[int], None]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="folder of the checkpoint, and folder that is served; with --certificate only the served one",
    )
    parser.add_argument(
        "--certificate", metavar="FILE", help="compare with this certificate of an export; needs no checkpoint"
    )
    parser.add_argument(
        "--format", choices=tuple(FORMATS), help="format of the export; default: that of the served tensors"
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="the config.json that was given to the export")
    add_model_flags(parser)


def verify(options: argparse.Namespace, bar: Callable[[int], Any]) -> Verification:
    """Return what differs.

    Args:
        bar: returns a context manager with ``update``, from the number of bytes to read.

    Raises:
        CheckpointError: one of the sides cannot be read.
        ConfigurationError: wrong usage.
    """
    if len(options.paths) != (2 if options.certificate is None else 1):
        raise ConfigurationError("needs CHECKPOINT and SERVED_DIR, or --certificate FILE and SERVED_DIR")
    served = served_model(options.paths[-1])
    with bar(served.nbytes) as shown:
        if options.certificate is not None:
            return _against_certificate(options.certificate, served, shown.update)
        config = None if options.config is None else read_config(options.config)
        return _against_checkpoint(options, served, config, shown.update)


def _against_certificate(path: str, served: Served, progress: Progress) -> Verification:
    certificate = read_certificate(path)
    mismatches, listed = compare_tensors(served, map(Reference, certificate.tensors.values()), progress)
    configs, notes = _configs(certificate.config, served)
    return _verification(path, served, certificate.content.get("step"), listed, [*mismatches, *configs], notes)


def _against_checkpoint(
    options: argparse.Namespace, served: Served, config: Mapping[str, Any] | None, progress: Progress
) -> Verification:
    path = options.paths[0]
    format = options.format or _format_of(served)
    try:
        with exported(path, format, options.model, options.gathered_in) as (found, step):
            mismatches, listed = compare_tensors(served, _references(found), progress)
            expected = {**(config or {}), QUANTIZATION: found.quantization_config()}
    except ConfigurationError as error:  # Such a folder cannot be an export of this checkpoint.
        return _verification(path, served, None, [], [Mismatch("layout", f"format {format}", str(error))], ())
    configs, notes = _configs(expected, served)
    certified, model_config = _certificate_inside(served, model_digest(listed), step)
    if config is None and model_config is not None:
        notes = ()
        configs = [*configs, *(m for m in model_config if m not in configs)]
    return _verification(path, served, step, listed, [*mismatches, *configs, *certified], notes)


def _verification(
    path: str,
    served: Served,
    step: int | None,
    listed: Iterable[Certified],
    mismatches: Iterable[Mismatch],
    notes: tuple[str, ...],
) -> Verification:
    tensors = list(listed)
    in_fp8 = sum(tensor.dtype == "F8_E4M3" for tensor in tensors)
    found = (*served.faults, *mismatches)
    return Verification(path, served.path, step, len(tensors), in_fp8, model_digest(tensors), found, notes)


def _references(found: Export) -> Iterator[Reference]:
    for tensor, value in found.stream():
        data = value.detach().contiguous().reshape(-1).view(torch.uint8)
        digest = hashlib.sha256(data.numpy().data).hexdigest()
        yield Reference(Certified(tensor.name, dtype_text(tensor.dtype), tensor.shape, digest), data)


def _format_of(served: Served) -> str:
    """Return the format that the names and shapes of served scales have."""
    if any(name.endswith(".weight_scale_inv") for name in served.tensors):
        return "block"
    scales = [tensor for name, tensor in served.tensors.items() if name.endswith(".weight_scale")]
    rows_only = bool(scales) and all(len(scale.shape) == 2 for scale in scales)
    return "compressed-tensors-channel" if rows_only else "compressed-tensors"


def _configs(expected: Mapping[str, Any], served: Served) -> tuple[list[Mismatch], tuple[str, ...]]:
    """Return (what differs in config.json, notes). An export without a config knows quantization_config only."""
    whole = len(expected) > 1
    keys = expected.keys() | served.config.keys() if whole else expected.keys()
    note = f"of config.json, only {QUANTIZATION} is compared: the export had no config of the model"
    return list(compare_configs(expected, served.config, keys)), () if whole else (note,)


def _certificate_inside(served: Served, model: str, step: int) -> tuple[list[Mismatch], list[Mismatch] | None]:
    """Return (what is wrong with the certificate that is served, what differs from its config, if it has one)."""
    path = os.path.join(served.path, CERTIFICATE)
    if not os.path.lexists(path):
        return [], None
    try:
        certificate = read_certificate(path)
    except CheckpointError as error:
        return [Mismatch("certificate", CERTIFICATE, str(error).removeprefix(f"{path}: "))], None
    wrong = []
    if certificate.model != model:
        wrong.append(
            Mismatch("certificate", CERTIFICATE, f"is of another model: {certificate.model}, expected {model}")
        )
    if certificate.content.get("step") != step:
        text = f"is of step {certificate.content.get('step')}, and the checkpoint of step {step}"
        wrong.append(Mismatch("certificate", CERTIFICATE, text))
    configs, notes = _configs(certificate.config, served)
    return wrong, None if notes else configs
