"""The contents of a checkpoint by name, read one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from fp8dist.common.text import dtype_name
from fp8dist.errors import CheckpointError
from fp8dist.files.failures import reading

STATE, PARAMETERS = "state", "parameters"
"""The two families of checkpoints: files of FP8 state alone, and all others."""


@dataclass(frozen=True, order=True)
class SavedEntry:
    """One tensor of a checkpoint. Sorts by name, then kind.

    Attributes:
        name: the tensor's name; for FP8 state, the name of its slot. If FP8 state is a value inside another checkpoint,
            its key comes first: "fp8.shared.layers.0.fc:input".
        kind: "parameter", or for FP8 state "scale", "amax", "cold", "counters", "history" or "step".
        dtype: torch's name without "torch.", such as "float32".
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str


Item = tuple[SavedEntry, Callable[[], Tensor]]
"""An entry, and the function that reads its tensor, on the CPU."""

States = dict[str, tuple[dict[str, Any], dict[str, Any]]]
"""By key, (FP8 state, values saved with it), as ``from_bytes`` in ``fp8dist/state/storage.py`` returns them."""


class Source:
    """A checkpoint. Its entries are sorted and unique. Files are open only while a tensor is read. The tensors of
    entries are not kept; FP8 states are.

    Attributes:
        path: the file or folder.
        family: "state" (an fp8dist state file) or "parameters" (any other checkpoint).
        entries: all tensors of the checkpoint.
        states: the FP8 states in the checkpoint by key; a state file has one, with the key "". Their tensors are among
            the entries, too.

    Raises:
        CheckpointError: two tensors have one name and kind.
    """

    def __init__(self, path: str, family: str, items: Iterable[Item], states: States | None = None) -> None:
        ordered = sorted(items, key=lambda item: item[0])
        self.path = path
        self.family = family
        # In the order of the entries: each state has one that is called "KEY.step".
        self.states = dict(sorted((states or {}).items(), key=lambda item: f"{item[0]}.step"))
        self.entries: tuple[SavedEntry, ...] = tuple(entry for entry, _ in ordered)
        self._loaders = [load for _, load in ordered]
        for first, second in pairwise(self.entries):
            if (first.name, first.kind) == (second.name, second.kind):
                raise CheckpointError(f"two tensors in it are called {first.name}")

    def read(self, index: int) -> Tensor:
        """Return the tensor of ``entries[index]``, on the CPU.

        Raises:
            CheckpointError: the tensor cannot be read. The message names the file.
        """
        entry = self.entries[index]
        with reading(self.path):
            tensor = self._loaders[index]().detach()
            if tuple(tensor.shape) != entry.shape or dtype_name(tensor.dtype) != entry.dtype:
                raise CheckpointError(
                    f"{entry.name} is {dtype_name(tensor.dtype)} {tuple(tensor.shape)}, "
                    f"but {entry.dtype} {entry.shape} when the file was opened"
                )
            return tensor
