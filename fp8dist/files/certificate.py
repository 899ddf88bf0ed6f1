"""The certificate of an export: a JSON file with the digests of its tensors, their recipes, and facts about the job.

docs/design/formats.md specifies the digests, with examples, for programs that compute them without this library.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fp8dist.common.versions import version_of
from fp8dist.errors import CheckpointError
from fp8dist.files.export_formats import ExportedTensor
from fp8dist.files.failures import reading
from fp8dist.files.json_files import json_object, read_text
from fp8dist.files.safetensor_files import dtype_text
from fp8dist.state.manifest import NUMERICS_VERSION
from fp8dist.state.recipe import Recipe

CERTIFICATE = "fp8dist-certificate.json"
FORMAT, VERSION = "fp8dist certificate", 1
_SHA256 = re.compile("[0-9a-f]{64}")
_SEAL = re.compile(rb'"digest": "([0-9a-f]{64})"\n}\n\Z')
_UNSEALED = "0" * 64


class Origin(NamedTuple):
    """The job and the step that an export comes from. None: not known.

    Attributes:
        step: number of optimizer steps that the FP8 state has been through.
        run: the user's name for the run.
        ranks: number of ranks of the job.
        proven, checked: ``proven_step`` and ``checked_step`` of ``manager.verified``.
        last_check: the last check that found no difference: its step, and the fields of its result.
    """

    step: int
    run: str | None = None
    ranks: int | None = None
    proven: int | None = None
    checked: int | None = None
    last_check: Mapping[str, Any] | None = None


class Certified(NamedTuple):
    """A tensor in a certificate. ``dtype``: its name in safetensors files, such as "F8_E4M3". ``sha256``: hexadecimal
    digest of the tensor's bytes, row by row, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


class Certificate(NamedTuple):
    """A certificate that was read. docs/design/formats.md describes the fields."""

    step: int
    tensors: dict[str, Certified]
    tied: dict[str, Any]
    config: dict[str, Any]
    model: str


def certificate_of(
    layout: tuple[str, str],
    tensors: Sequence[ExportedTensor],
    recipes: Mapping[str, Recipe],
    tied: Mapping[str, str],
    config: Mapping[str, Any],
    origin: Origin,
    digests: Mapping[str, str],
) -> bytes:
    """Return the bytes of ``fp8dist-certificate.json``. docs/design/formats.md describes its fields.

    Args:
        layout: (the export's format, a key of ``FORMATS`` in ``export_formats.py``; "power_of_two" if all scales of
            weights are, else "float32").
        tensors: the exported tensors, in any order.
        recipes: the recipes of the modules whose weights are in FP8, by the module's name.
        tied: see ``Export.tied``.
        config: the content of config.json.
        origin: the job and the step.
        digests: the hexadecimal SHA-256 of each tensor's bytes, by the tensor's name.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    certified = [Certified(t.name, dtype_text(t.dtype), t.shape, digests[t.name]) for t in ordered]
    kinds = list(dict.fromkeys(recipe for _, recipe in sorted(recipes.items(), key=lambda item: item[0])))
    roles = [
        {"role": t.role, **({"recipe": kinds.index(recipes[t.module])} if t.role == "weight" else {})} for t in ordered
    ]
    return sealed(
        {
            "format": FORMAT,
            "version": VERSION,
            "export": layout[0],
            "scales": layout[1],
            **origin._asdict(),
            "versions": {
                "fp8dist": version_of("fp8dist"),
                "torch": torch.__version__,
                "numerics": NUMERICS_VERSION,
            },
            "recipes": [recipe.describe() for recipe in kinds],
            "config": dict(config),
            "tied": dict(tied),
            "tensors": [{**one._asdict(), **role} for one, role in zip(certified, roles, strict=True)],
            "model": model_digest(certified),
        }
    )


def model_digest(tensors: Iterable[Certified]) -> str:
    """Return the digest over the names, dtypes, shapes and bytes of all tensors: hexadecimal SHA-256."""
    digest = hashlib.sha256(b"fp8dist model 1\n")
    named = {tensor.name.encode("utf-8", "surrogatepass"): tensor for tensor in tensors}
    for name in sorted(named):
        tensor = named[name]
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        digest.update(b"%d %b %b\n" % (len(name), name, f"{tensor.dtype} {shape} {tensor.sha256}".encode()))
    return digest.hexdigest()


def sealed(content: Mapping[str, Any]) -> bytes:
    """Return a certificate as the bytes of its file: JSON with one field per line, one line per item of a list, and the
    digest of the file as the last field."""
    lines = [f"{json.dumps(key)}: {_text(value)}" for key, value in {**content, "digest": _UNSEALED}.items()]
    text = ("{\n" + ",\n".join(lines) + "\n}\n").encode("ascii")
    return _with_digest(text, _seal_of(text))


def _text(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)


def _with_digest(data: bytes, digest: str) -> bytes:
    return _SEAL.sub(f'"digest": "{digest}"\n}}\n'.encode(), data)


def _seal_of(data: bytes) -> str:
    """Return the digest of a certificate's file: SHA-256 of its bytes with zeros in place of the digest."""
    return hashlib.sha256(_with_digest(data, _UNSEALED)).hexdigest()


def read_certificate(path: str) -> Certificate:
    """Read and verify a certificate.

    Raises:
        CheckpointError: the file cannot be read, was changed after it was written, has another version, or its fields
            contradict each other. The message names the file.
    """
    data = read_text(path)
    content = json_object(data, path)
    with reading(path):
        if content.get("format") != FORMAT:
            raise CheckpointError("is not a certificate of an export")
        if content.get("version") != VERSION:
            raise CheckpointError(f"has version {content.get('version')!r}, this library reads version {VERSION} only")
        seal = _SEAL.search(data)
        if seal is None or seal[1].decode() != _seal_of(data):
            raise CheckpointError("was changed after it was written: its digest does not match")
        kinds = {"step": int, "tensors": list, "tied": dict, "config": dict}
        wrong = [name for name, kind in kinds.items() if type(content.get(name)) is not kind]
        if wrong:
            raise CheckpointError(f"has a malformed field {wrong[0]!r}")
        step, listed, tied, config = (content[name] for name in kinds)
        tensors = [_certified(item) for item in listed]
        by_name = {tensor.name: tensor for tensor in tensors}
        if len(by_name) < len(tensors) or model_digest(tensors) != content.get("model"):
            raise CheckpointError("contradicts itself: the digest of the model is not that of its tensors")
        return Certificate(step, by_name, tied, config, content["model"])


def _certified(item: Any) -> Certified:
    """Return a tensor from the JSON of a certificate. Raise CheckpointError if a field is missing or malformed."""
    if isinstance(item, dict):
        name, dtype, shape, sha256 = (item.get(field) for field in Certified._fields)
        texts = all(isinstance(text, str) for text in (name, dtype, sha256))
        sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
        if texts and sizes and _SHA256.fullmatch(str(sha256)):
            return Certified(str(name), str(dtype), tuple(shape or ()), str(sha256))
    raise CheckpointError(f"has a malformed tensor: {json.dumps(item)[:100]}")
