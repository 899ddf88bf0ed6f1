"""Open a checkpoint of any kind by its path.

======================  ====================================================================================
fp8dist state           family "state": each slot's scale, amax, cold, counters and history, and the step;
                        an FP8 state inside a checkpoint of another kind has the same entries
safetensors             one file, or all files of a folder
torch.save              zip files and legacy files; nested names are dotted ("optimizer.param_groups.0.lr")
DCP                     a folder with ``.metadata``
======================  ====================================================================================

Nothing from a file is executed. One tensor is in memory at a time, but an FP8 state is read as a whole.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from fp8dist.errors import CheckpointError
from fp8dist.files.archives import items_of, saved_content
from fp8dist.files.dcp import METADATA, dcp_source
from fp8dist.files.entries import PARAMETERS, Source
from fp8dist.files.failures import reading
from fp8dist.files.safetensor_files import SUFFIX, is_state, safetensors_source, state_source
from fp8dist.files.slices import FileSlice
from fp8dist.files.traces import BEGIN


def open_source(path: str | os.PathLike[str]) -> Source:
    """List the entries of a checkpoint.

    Numbers, text and bytes are entries, too, as small tensors (``values.plain_tensor``).

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read. The message is one line that names the file.
    """
    name = os.fsdecode(path)
    with reading(name):
        return _open_folder(name) if os.path.isdir(name) else _open_file(name)


def _open_folder(path: str) -> Source:
    names = sorted(os.listdir(path))
    if METADATA in names:
        return dcp_source(path)
    parts = [os.path.join(path, name) for name in names if name.endswith(SUFFIX)]
    if parts:
        return safetensors_source(path, parts)
    ranks = [name for name in names if name.startswith("__") and name.endswith(METADATA)]
    if ranks:
        raise CheckpointError(
            f"has an index per rank ({ranks[0]}), expected one .metadata that all ranks wrote together"
        )
    if any(name.endswith(".distcp") for name in names):
        raise CheckpointError("has .distcp files without their .metadata: saving it was not finished")
    raise CheckpointError(f"has neither .metadata nor *{SUFFIX} in it: no checkpoint")


def _open_file(path: str) -> Source:
    file = FileSlice.of(path)
    head = file.bytes_at(0, min(512, file.length)).numpy().tobytes()
    if not head:
        raise CheckpointError("is empty")
    saved = saved_content(file)
    if saved is not None:
        value, size, locate = saved
        return Source(path, PARAMETERS, *items_of(value, size, file, locate))
    # safetensors: the length of the header in 8 bytes, then the header, a JSON object.
    framed = len(head) > 8 and struct.unpack("<Q", head[:8])[0] + 8 <= file.length and head[8:9] == b"{"
    if framed or path.endswith(SUFFIX):
        return state_source(path) if is_state(path) else safetensors_source(path, [path])
    raise CheckpointError(_strange(path, head))


def _strange(path: str, head: bytes) -> str:
    """Return an error text for a file that is not a checkpoint. ``head``: its first bytes."""
    if head.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer, not the file itself: run git lfs pull"
    if head.startswith(BEGIN):
        return "is a trace, not a checkpoint: compare it with other traces by fp8dist check"
    if head[:1] == b"\x80":
        return "is a pickle, but not one of torch.save: pickles can run code and are not opened"
    if head[257:262] == b"ustar":
        return "is a tar archive, which torch.save wrote before 0.1.10: save it again"
    if head.startswith(b"\x93NUMPY"):
        return "is a NumPy .npy file, expected safetensors, a file of torch.save or a DCP folder"
    if Path(path).suffix == ".distcp":
        return "is one piece of a DCP checkpoint: name its folder"
    kind = "text" if all(31 < byte < 127 or byte in b"\t\r\n\f" for byte in head) else "of no known kind"
    return f"is {kind} (it starts with {head[:16]!r}), expected safetensors, a file of torch.save or a DCP folder"
