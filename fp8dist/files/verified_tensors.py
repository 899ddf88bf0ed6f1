"""``fp8dist.verify``: compares tensors, such as those in a running inference engine, with the certificate of an export.

Nothing about the given tensors is trusted. What is wrong with one of them is a finding. Only an iterator that cannot be
read to its end raises.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8dist.checks.report import DivergenceReport
from fp8dist.common.divergence import Finding, Participant
from fp8dist.common.names import check_keywords
from fp8dist.common.text import dtype_name, first_few, printable
from fp8dist.errors import CheckpointError, ConfigurationError
from fp8dist.files.certificate import CERTIFICATE, Certificate, Certified, model_digest, read_certificate
from fp8dist.files.safetensor_files import dtype_text
from fp8dist.files.served import ServedTensors, served_model
from fp8dist.files.verification import TensorComparison, sha256_of
from fp8dist_kernels.reference.content import as_bytes


@dataclass(frozen=True)
class Verification(DivergenceReport):
    """What differs between a reference, "file 0", and served tensors, "file 1". ``str(report)`` is a text for people.

    ``raise_if_diverged()`` raises DivergenceError if something differs. The other attributes are those of
    ``DivergenceReport``.

    Attributes:
        files: paths of the certificate or checkpoint, and of what is served ("the given tensors").
        step: steps of the exported FP8 state.
        in_fp8: number of weights in FP8.
        model: digest over all tensors that must be served.
        rescaled: names of weights with other bytes and scales than the export, but the same values. They are no
            findings.
    """

    files: tuple[str, str] = ("", "")
    step: int | None = None
    in_fp8: int = 0
    model: str = ""
    rescaled: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.consistent:
            return super().__str__()
        reference, served = self.files
        same = "the same values as" if self.rescaled else "the same bytes as"
        what = f"{self.compared['parameter']} tensors, {self.in_fp8} in FP8, after step {self.step}"
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([f"{served}: {same} {reference}", what, f"model {self.model}", *notes])


@check_keywords("fp8dist.verify")
def verify(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    certificate: str | os.PathLike[str],
    *,
    merged: Mapping[str, Sequence[str]] | None = None,
) -> Verification:
    """Compare the tensors that an inference engine serves with those of an export. Local. Each tensor is read once.

        report = fp8dist.verify(engine.state_dict(), "served", merged={"qkv_proj": ("q_proj", "k_proj", "v_proj")})
        report.raise_if_diverged()

    The report names what is missing, extra, swapped, of another shape, or different, with the first element that
    differs. If the exported files are beside the certificate, it also says how a weight in FP8 differs: by value, or
    only in bytes and scales (``rescaled``, no finding), or as after quantising again with other scales: by no more
    than the sum of both ULPs.

    Args:
        tensors: (name, tensor) in any order, or a mapping, such as a state dict, with the names, shapes and dtypes of
            the export. On any device. Scales may also be held as UE8M0.
        certificate: the exported folder, or the path of its ``fp8dist-certificate.json``.
        merged: {a part of a served name: the parts of the exported names} of tensors whose rows are stacked in that
            order.

    Raises:
        CheckpointError: the certificate cannot be read; or the iterator failed, or yielded something without a name.
        ConfigurationError: an argument has another type.
    """
    comparison, known, path = compared(tensors, certificate, merged or {})
    return verification(comparison, (path, "the given tensors"), known.step)


def compared(tensors: Any, path: str | os.PathLike[str], merged: Any) -> tuple[TensorComparison, Certificate, str]:
    """Return (comparison of all tensors, certificate, its path). For the arguments and errors see ``verify``."""
    certificate, value, file = _certified(path)
    known = certificate.tensors
    _require_names(merged)
    comparison = TensorComparison(known, value, certificate.tied, copies=not isinstance(tensors, Mapping))
    for name, tensor in _named(tensors, known):
        local = _local(name, tensor, comparison)
        if local is not None:
            for part, rows in _parts(name, local, merged, known, comparison):
                comparison.add(part, rows)
                del rows
        del tensor, local  # The iterator may free it before it makes the next one.
    return comparison, certificate, file


def verification(
    comparison: TensorComparison,
    files: tuple[str, str],
    step: int | None,
    others: Iterable[Finding] = (),
    notes: Iterable[str] = (),
) -> Verification:
    """Return the report of a comparison.

    Args:
        others: findings about other things than tensors.
    """
    tensors, listed = comparison.finish()
    findings = [*others, *tensors]
    remarks = list(notes)
    if any(f.kind == "parameter" and f.index is None for f in findings):
        remarks.append("no unchanged exported files are beside the certificate, so how values differ is not known")
    if comparison.rescaled:
        remarks.append(f"other bytes and scales, but the same values: {first_few(comparison.rescaled)}")
    if findings:
        remarks.append(f"file 0: {files[0]}")
    return Verification(
        tuple(finding.located([Participant(1, files[1])]) for finding in findings),
        {"parameter": len(listed)},
        notes=tuple(remarks),
        noun="file",
        files=files,
        step=step,
        in_fp8=sum(one.dtype == "F8_E4M3" for one in listed),
        model=model_digest(listed),
        rescaled=tuple(comparison.rescaled),
    )


def _certified(path: str | os.PathLike[str]) -> tuple[Certificate, Callable[[str], Tensor | None], str]:
    """Return (certificate, a function that reads a tensor of the exported files beside it, path of the certificate).

    The function returns None if there is no such tensor, or the certificate is of another one.

    Args:
        path: the certificate, or its folder.

    Raises:
        CheckpointError: the certificate cannot be read.
        ConfigurationError: ``path`` is no path.
    """
    try:
        file = os.fsdecode(path)
    except TypeError:
        raise ConfigurationError(f"certificate must be a path, got {type(path).__name__}") from None
    if os.path.isdir(file):
        file = os.path.join(file, CERTIFICATE)
    certificate = read_certificate(file)
    try:
        tensors = ServedTensors(served_model(os.path.dirname(file) or os.curdir).source, lambda _: None)
    except CheckpointError:  # The certificate lies alone.
        return certificate, lambda name: None, file

    def value(name: str) -> Tensor | None:
        try:
            tensor = tensors[name]
        except (KeyError, CheckpointError):
            return None
        found = Certified(name, dtype_text(tensor.dtype), tuple(tensor.shape), sha256_of(tensor))
        return tensor if found == certificate.tensors[name] else None

    return certificate, value, file


# The given tensors -----------------------------------------------------------------------------------


def _named(tensors: Any, listed: Mapping[str, Certified]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value). Of a mapping first the names of the export, in its order.

    Raises:
        CheckpointError: see ``verify``.
        ConfigurationError: this is no iterable.
    """
    if isinstance(tensors, nn.Module) or not isinstance(tensors, Iterable):
        text = "a model: pass model.state_dict()" if isinstance(tensors, nn.Module) else type(tensors).__name__
        raise ConfigurationError(f"verify(): tensors must be a mapping or an iterator of (name, tensor), got {text}")
    count = 0
    items: Iterable[Any] = tensors
    try:
        if isinstance(tensors, Mapping):
            names = [*(name for name in listed if name in tensors), *(name for name in tensors if name not in listed)]
            items = ((name, tensors[name]) for name in names)
        for item in items:
            if not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str)):
                raise CheckpointError(f"verify(): item {count} is {_text_of(item)}, expected (name, tensor)")
            yield item[0], item[1]
            del item
            count += 1
    except CheckpointError:
        raise
    except Exception as error:
        text = printable(f"{type(error).__name__}: {error}".partition("\n")[0])
        raise CheckpointError(f"verify(): the iterator of tensors failed after {count}: {text}") from error


def _text_of(item: Any) -> str:
    if isinstance(item, (tuple, list)):
        return f"({', '.join(type(each).__name__ for each in item)})"
    return f"{type(item).__name__} {item!r:.40}" if isinstance(item, (str, int, float)) else type(item).__name__


def _local(name: str, tensor: Any, comparison: TensorComparison) -> Tensor | None:
    """Return a tensor on the CPU. None, after a finding about it: it is none, or cannot be read."""
    if not isinstance(tensor, Tensor):
        comparison.fault(name, f"is of type {type(tensor).__name__}, expected a tensor")
    elif is_traceable_wrapper_subclass(tensor):
        whole = "the whole tensor itself (of a DTensor: full_tensor())"
        comparison.fault(name, f"is a {type(tensor).__name__}, expected {whole}")
    else:
        try:
            local = tensor.detach().cpu()
            as_bytes(local)  # Fails for sparse tensors, and for tensors whose memory was freed.
            return local
        except Exception as error:
            text = str(error).partition("\n")[0] or type(error).__name__
            comparison.fault(name, f"cannot be read: {printable(text)}")
    return None


def _require_names(merged: Any) -> None:
    """Raise ConfigurationError unless ``merged`` maps names to sequences of names."""
    lists = list(merged.values()) if isinstance(merged, Mapping) else [None]
    if not all(isinstance(parts, (tuple, list)) and all(isinstance(part, str) for part in parts) for parts in lists):
        raise ConfigurationError(
            'merged must map a served name to several, such as {"qkv_proj": ("q_proj", "k_proj", "v_proj")}'
        )


def _parts(
    name: str,
    tensor: Tensor,
    merged: Mapping[str, Sequence[str]],
    listed: Mapping[str, Certified],
    comparison: TensorComparison,
) -> Iterable[tuple[str, Tensor]]:
    """Return a tensor under its name; a merged one as its parts, under theirs; nothing if this is a fault."""
    words = name.split(".")
    for place, parts in ((words.index(word), parts) for word, parts in merged.items() if word in words):
        names = [".".join([*words[:place], part, *words[place + 1 :]]) for part in parts]
        if name in listed or not names or not all(part in listed for part in names):
            continue
        shapes = [listed[part].shape for part in names]
        if tensor.numel() == 1 and all(math.prod(shape) == 1 for shape in shapes):  # One scale for all.
            return [(part, tensor.reshape(shape)) for part, shape in zip(names, shapes)]
        rows = [shape[0] if shape else 1 for shape in shapes]
        if tensor.ndim and len(tensor) == sum(rows):
            return list(zip(names, tensor.split(rows)))
        look = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
        comparison.fault(name, f"is {look}, expected {sum(rows)} rows: those of {', '.join(parts)}", *names)
        return []
    return [(name, tensor)]
