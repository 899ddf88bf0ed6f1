"""``fp8dist verify``: its flags, and the comparison of a served model with a checkpoint or a certificate."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fp8dist.cli.export import add_model_flags, exported, read_config
from fp8dist.common.divergence import Finding
from fp8dist.errors import CheckpointError, ConfigurationError
from fp8dist.files.certificate import CERTIFICATE, Certificate, Certified, model_digest, read_certificate
from fp8dist.files.comparison import bytes_in
from fp8dist.files.export_formats import FORMATS
from fp8dist.files.failures import reading
from fp8dist.files.safetensor_files import dtype_text
from fp8dist.files.served import CONFIG, Served, ServedTensors, compare_configs, mismatch, served_model
from fp8dist.files.value_comparison import is_power_of_two
from fp8dist.files.verification import TensorComparison, sha256_of
from fp8dist.files.verified_tensors import Verification, compared, verification

QUANTIZATION = "quantization_config"


class _Expected(NamedTuple):
    """What must be served. ``config``: keys that config.json must have; all keys if there is more than one.
    ``others``: findings about other things than tensors."""

    comparison: TensorComparison
    step: int | None
    config: Mapping[str, Any]
    others: Sequence[Finding] = ()


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
    parser.add_argument("--format", choices=tuple(FORMATS), help="format of the export; default: as served")
    parser.add_argument("--config", metavar="FILE", type=Path, help="the config.json that was given to the export")
    add_model_flags(parser)


def verify(options: argparse.Namespace, bar: Callable[[int], Any]) -> Verification:
    """Return what differs.

    Args:
        bar: returns a context manager with ``update``, from the number of bytes to read.

    Raises:
        CheckpointError: one of the sides cannot be read.
        ConfigurationError: wrong usage, or the checkpoint cannot be exported.
    """
    if len(options.paths) != (2 if options.certificate is None else 1):
        raise ConfigurationError("expected CHECKPOINT and SERVED_DIR, or --certificate FILE and SERVED_DIR")
    served = served_model(options.paths[-1])
    with bar(bytes_in(served.source)) as shown:
        against = _by_checkpoint if options.certificate is None else _by_certificate
        expected = against(options, served, ServedTensors(served.source, shown.update))
        whole = len(expected.config) > 1
        keys = expected.config.keys() | served.config.keys() if whole else {QUANTIZATION}
        with reading(os.path.join(served.path, CONFIG)):
            configs = list(compare_configs(expected.config, served.config, keys))
    notes = (
        [] if whole else [f"of {CONFIG} only {QUANTIZATION} is compared: the rest of the export's config is unknown"]
    )
    files = (options.certificate or options.paths[0], served.path)
    return verification(expected.comparison, files, expected.step, [*served.faults, *expected.others, *configs], notes)


def _by_certificate(options: argparse.Namespace, served: Served, tensors: ServedTensors) -> _Expected:
    comparison, certificate, _ = compared(tensors, options.certificate, {})
    return _Expected(comparison, certificate.step, certificate.config)


def _by_checkpoint(options: argparse.Namespace, served: Served, tensors: ServedTensors) -> _Expected:
    certificate, wrong = _certificate_inside(served)
    config, tied = (certificate.config, certificate.tied) if certificate else ({}, served.tied)
    if options.config:
        config = read_config(options.config)
    format = options.format or _format_of(served)
    certified: dict[str, Certified] = {}
    values: dict[str, Tensor] = {}  # Of one module.
    powers_of_two = True
    comparison = TensorComparison(certified, values.get, tied)
    try:
        found, step = exported(options.paths[0], format, options, config)
        for tensor, value in found.stream():
            if tensor.role in ("weight", "high"):
                values.clear()
            values[tensor.name] = value
            powers_of_two &= tensor.role != "weight_scale" or is_power_of_two(value)
            certified[tensor.name] = Certified(tensor.name, dtype_text(tensor.dtype), tensor.shape, sha256_of(value))
            if tensor.name in tensors:
                comparison.add(tensor.name, tensors[tensor.name])
    except ConfigurationError as error:
        if options.format:
            raise
        other = mismatch("layout", "format", f"is {format}, but the checkpoint has no such export: {error}")
        return _Expected(comparison, None, served.config, [other])
    for name in tensors:
        if name not in certified:
            comparison.add(name, tensors[name])
    model = model_digest(comparison.finish()[1])
    if certificate and (certificate.model, certificate.step) != (model, step):
        text = f"is of model {certificate.model} after step {certificate.step}"
        wrong = [mismatch("certificate", CERTIFICATE, f"{text}, expected {model} after step {step}")]
    return _Expected(comparison, step, {**config, QUANTIZATION: found.quantization_config(powers_of_two)}, wrong)


def _certificate_inside(served: Served) -> tuple[Certificate | None, list[Finding]]:
    """Return (the certificate that is served, what is wrong with it)."""
    path = os.path.join(served.path, CERTIFICATE)
    if not os.path.lexists(path):
        return None, []
    try:
        return read_certificate(path), []
    except CheckpointError as error:
        return None, [mismatch("certificate", CERTIFICATE, str(error).removeprefix(f"{path}: "))]


def _format_of(served: Served) -> str:
    """Return the format that the names and shapes of served scales have."""
    entries = served.source.entries
    if any(entry.name.endswith(".weight_scale_inv") for entry in entries):
        return "block"
    scales = [entry for entry in entries if entry.name.endswith(".weight_scale")]
    if scales and all(scale.dtype == "uint8" for scale in scales):
        return "compressed-tensors-mxfp8"
    by_row = bool(scales) and all(len(scale.shape) == 2 for scale in scales)
    return "compressed-tensors-channel" if by_row else "compressed-tensors"
