"""``fp8dist verify``: its flags, and the comparison of a served model with a checkpoint or a certificate."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fp8dist.checks.report import DivergenceReport
from fp8dist.cli.export import add_model_flags, exported, read_config
from fp8dist.common.divergence import Finding, Participant
from fp8dist.errors import CheckpointError, ConfigurationError
from fp8dist.files.certificate_reading import CERTIFICATE, Certificate, Certified, model_digest, read_certificate
from fp8dist.files.comparison import Progress, bytes_in
from fp8dist.files.export import Export
from fp8dist.files.export_formats import FORMATS
from fp8dist.files.failures import reading
from fp8dist.files.safetensor_files import dtype_text
from fp8dist.files.served import CONFIG, Served, mismatch, served_model
from fp8dist.files.verification import CertifiedValue, compare_configs, compare_tensors, sha256_of

__all__ = ["Verification", "add_flags", "verify"]

QUANTIZATION = "quantization_config"


class Verification(NamedTuple):
    """What differs between file 0, a checkpoint or a certificate, and file 1, what is served.

    ``step``: steps of the FP8 state. ``model``: the digest over all tensors that must be served.
    """

    report: DivergenceReport
    files: tuple[str, str]
    step: int | None
    in_fp8: int
    model: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the report, and the others, as JSON values."""
        rest = {"files": self.files, "step": self.step, "in_fp8": self.in_fp8, "model": self.model}
        return {**self.report.to_json(), **rest}

    def __str__(self) -> str:
        if not self.report.consistent:
            return str(self.report)
        reference, served = self.files
        what = f"{self.report.compared['parameter']} tensors, {self.in_fp8} in FP8, after step {self.step}"
        notes = [f"note: {note}" for note in self.report.notes]
        return "\n".join([f"{served}: the same bytes as {reference}", what, f"model {self.model}", *notes])


class _Expected(NamedTuple):
    """What must be served. ``config``: keys that config.json must have; all keys if there is more than one."""

    step: int | None
    config: Mapping[str, Any]
    differing: list[Finding]
    listed: list[Certified]


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
        expected = against(options, served, shown.update)
        whole = len(expected.config) > 1
        keys = expected.config.keys() | served.config.keys() if whole else {QUANTIZATION}
        with reading(os.path.join(served.path, CONFIG)):
            configs = list(compare_configs(expected.config, served.config, keys))
    reference = options.certificate or options.paths[0]
    notes = (
        [] if whole else [f"of {CONFIG} only {QUANTIZATION} is compared: the rest of the export's config is unknown"]
    )
    findings = [*served.faults, *expected.differing, *configs]
    return Verification(
        DivergenceReport(
            tuple(finding.located([Participant(1, served.path)]) for finding in findings),
            {"parameter": len(expected.listed)},
            notes=(*notes, *([f"file 0: {reference}"] if findings else [])),
            noun="file",
        ),
        (reference, served.path),
        expected.step,
        sum(one.dtype == "F8_E4M3" for one in expected.listed),
        model_digest(expected.listed),
    )


def _by_certificate(options: argparse.Namespace, served: Served, progress: Progress) -> _Expected:
    certificate = read_certificate(options.certificate)
    differing, listed = compare_tensors(served, map(CertifiedValue, certificate.tensors.values()), {}, progress)
    return _Expected(certificate.step, certificate.config, differing, listed)


def _by_checkpoint(options: argparse.Namespace, served: Served, progress: Progress) -> _Expected:
    certificate, wrong = _certificate_inside(served)
    config, tied = (certificate.config, certificate.tied) if certificate else ({}, served.tied)
    if options.config:
        config = read_config(options.config)
    format = options.format or _format_of(served)
    try:
        found, step = exported(options.paths[0], format, options, config)
        differing, listed = compare_tensors(served, _references(found), tied, progress)
        config = {**config, QUANTIZATION: found.quantization_config()}
    except ConfigurationError as error:
        if options.format:
            raise
        differing = [mismatch("layout", "format", f"is {format}, but the checkpoint has no such export: {error}")]
        return _Expected(None, served.config, differing, [])
    if certificate and (certificate.model, certificate.step) != (model_digest(listed), step):
        text = f"is of model {certificate.model} after step {certificate.step}"
        wrong = [mismatch("certificate", CERTIFICATE, f"{text}, expected {model_digest(listed)} after step {step}")]
    return _Expected(step, config, [*differing, *wrong], listed)


def _certificate_inside(served: Served) -> tuple[Certificate | None, list[Finding]]:
    """Return (the certificate that is served, what is wrong with it)."""
    path = os.path.join(served.path, CERTIFICATE)
    if not os.path.lexists(path):
        return None, []
    try:
        return read_certificate(path), []
    except CheckpointError as error:
        return None, [mismatch("certificate", CERTIFICATE, str(error).removeprefix(f"{path}: "))]


def _references(found: Export) -> Iterator[CertifiedValue]:
    for tensor, value in found.stream():
        yield CertifiedValue(Certified(tensor.name, dtype_text(tensor.dtype), tensor.shape, sha256_of(value)), value)


def _format_of(served: Served) -> str:
    """Return the format that the names and shapes of served scales have."""
    entries = served.source.entries
    if any(entry.name.endswith(".weight_scale_inv") for entry in entries):
        return "block"
    scales = [entry for entry in entries if entry.name.endswith(".weight_scale")]
    by_row = bool(scales) and all(len(scale.shape) == 2 for scale in scales)
    return "compressed-tensors-channel" if by_row else "compressed-tensors"
