"""Read the folder of an exported model, as a server would: config.json, the index, and the tensors of its files.

Nothing in the folder is trusted. A name that occurs twice, and an index that names files outside of the folder, are
errors, because different servers may read different tensors from such a folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fp8dist.common.divergence import Finding
from fp8dist.common.text import printable
from fp8dist.errors import CheckpointError
from fp8dist.files.comparison import Progress
from fp8dist.files.entries import Source
from fp8dist.files.failures import reading
from fp8dist.files.json_files import json_object, read_text
from fp8dist.files.safetensor_files import SUFFIX, SafetensorsHeader, header_of, safetensors_source

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_SINGLE = "model.safetensors"
_ABSENT = object()


@dataclass(frozen=True)
class Served:
    """The folder of an exported model.

    Attributes:
        path: the folder.
        config: the content of config.json.
        source: the tensors of the files that the index names.
        tied: {name of a tensor that the files leave out: name of the tensor that is the same}, from the files'
            metadata.
        faults: findings about contradictions within the folder, such as a missing file.
    """

    path: str
    config: dict[str, Any]
    source: Source
    tied: Mapping[str, Any]
    faults: tuple[Finding, ...]


class ServedTensors(Mapping[str, Tensor]):
    """The tensors of a source by name, read when they are asked for.

    Args:
        progress: called with the number of bytes of each tensor that was read.
    """

    def __init__(self, source: Source, progress: Progress) -> None:
        self._source = source
        self._progress = progress
        self._places = {entry.name: place for place, entry in enumerate(source.entries)}

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._source.read(self._places[name])
        self._progress(tensor.nbytes)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def mismatch(kind: str, name: str, detail: str, **fields: Any) -> Finding:
    """Return a finding about a difference between "rank" 0, the reference, and "rank" 1, the served model.

    Args:
        kind: kind of the finding.
        name: the tensor or file concerned, with which the finding's sentence begins.
        detail: the rest of the sentence.
        fields: other fields of ``Finding``.
    """
    return Finding(0, kind, name, (1,), 0, detail=detail, sides=((0,), (1,)), **fields)


def served_model(path: str) -> Served:
    """List the tensors of a folder by its index, without reading their bytes. A folder without an index may have one
    file, model.safetensors.

    Raises:
        CheckpointError: config.json is missing, or both the index and model.safetensors; a file cannot be read; or two
            files have a tensor of the same name. The message names the file.
    """
    config = os.path.join(path, CONFIG)
    content = json_object(read_text(config), config)
    with reading(path):
        files = {name: os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(SUFFIX)}
    places = _weight_map(path, files)
    headers = {name: header_of(file) for name, file in files.items() if name in places.values()}
    tied = {alias: owner for header in headers.values() for alias, owner in header.metadata.items()}
    source = safetensors_source(path, [files[name] for name in headers])
    return Served(path, content, source, tied, tuple(_faults(places, headers, files)))


def _weight_map(path: str, files: Mapping[str, str]) -> dict[str, str]:
    """Return {name of a tensor: name of its file} from the index, or from model.safetensors if there is no index."""
    index = os.path.join(path, INDEX)
    if not os.path.lexists(index) and _SINGLE in files:
        return dict.fromkeys(header_of(files[_SINGLE]).tensors, _SINGLE)
    places = json_object(read_text(index), index).get("weight_map")
    with reading(index):
        if not isinstance(places, dict):
            raise CheckpointError("has no weight_map")
        for name in places.values():
            if not isinstance(name, str) or os.path.basename(name) != name or "\\" in name or not name.endswith(SUFFIX):
                raise CheckpointError(f"names {name!r}, expected a {SUFFIX} file in the folder")
        return places


def _faults(
    places: Mapping[str, str], headers: Mapping[str, SafetensorsHeader], files: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield findings about files and tensors that only the index or only the folder has, or that are in another file.

    Args:
        places: the file of each tensor, by the index.
        headers: by name, the files that the index names and the folder has.
        files: paths of all safetensors files in the folder, by name.
    """
    for name in sorted(set(places.values()) - files.keys()):
        yield mismatch("file", name, f"is missing, with {sum(home == name for home in places.values())} tensors")
    for name in sorted(files.keys() - headers.keys()):
        yield mismatch("file", name, f"is in the folder, but not in {INDEX}")
    homes = {tensor: name for name, header in headers.items() for tensor in header.tensors}
    for tensor in sorted(places.keys() | homes.keys()):
        there, listed = homes.get(tensor), places.get(tensor)
        if there != listed and (listed is None or listed in files):
            where = "in no file" if there is None else f"in {there!r}"
            yield mismatch("file", tensor, f"is {where}, and {INDEX} says {listed!r}")


def compare_configs(expected: Mapping[str, Any], served: Mapping[str, Any], keys: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding for each value that differs below ``keys`` of two config.json. A finding's name is the path of
    keys, joined by dots."""
    for key in sorted(keys):
        yield from _values(key, expected.get(key, _ABSENT), served.get(key, _ABSENT))


def _values(path: str, expected: Any, found: Any) -> Iterator[Finding]:
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys()):
            yield from _values(f"{path}.{key}", expected.get(key, _ABSENT), found.get(key, _ABSENT))
    elif (is_there := _text(found)) != (wanted := _text(expected)):
        yield mismatch("config", path, f"{CONFIG} has {printable(is_there)}, expected {printable(wanted)}")


def _text(value: Any) -> str:
    return "nothing" if value is _ABSENT else json.dumps(value, sort_keys=True)
