"""Checks of names and dtypes, so that safetensors can store an export, and servers do not misread the names in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

from fp8dist.common.text import dtype_name
from fp8dist.errors import ConfigurationError
from fp8dist.files.export_tensors import ExportedTensor
from fp8dist.files.safetensor_files import DTYPES

__all__ = ["require_distinct", "require_names", "require_storable"]

_CLASSES = frozenset(base.__name__ for base in nn.Linear.__mro__)


def require_storable(tensors: Iterable[ExportedTensor]) -> None:
    """Refuse tensors that safetensors cannot hold.

    Raises:
        ConfigurationError: two tensors have one name, or a name or dtype has no place in a safetensors file.
    """
    seen = set()
    for tensor in tensors:
        why = ""
        if tensor.name in seen:
            why = "the model has a tensor of this name, which an export gives to a scale: rename yours"
        elif tensor.name == "__metadata__":
            why = "safetensors uses this name itself: rename the tensor"
        elif any("\ud800" <= letter <= "\udfff" for letter in tensor.name):  # Surrogates.
            why = "safetensors needs names in UTF-8: rename the tensor"
        elif dtype_name(tensor.dtype) not in DTYPES.values():
            why = f"safetensors has no {tensor.dtype}: convert the tensor"
        if why:
            raise ConfigurationError(f"{tensor.name!a}: {why}")
        seen.add(tensor.name)


def require_names(names: Iterable[str]) -> None:
    """Refuse module names that compressed-tensors 0.20 takes for the name of a class or for a regular expression
    (``match_class`` and ``match_name`` in ``compressed_tensors.utils.match``).

    Raises:
        ConfigurationError: there is such a name.
    """
    for name in names:
        if name in _CLASSES or name.startswith("re:"):
            kind = "a class" if name in _CLASSES else "a regular expression"
            raise ConfigurationError(f"compressed-tensors takes the name of module {name!r} for {kind}: rename it")


def require_distinct(in_fp8: Iterable[str], ignored: Sequence[str]) -> None:
    """Refuse names with which Transformers 5.23 would leave a module in FP8 unconverted, because of the list of ignored
    modules: a module's name that ends with an ignored name, or whose beginning, up to a dot, matches the ignored name
    as a regular expression (``transformers.quantizers.quantizers_utils.should_convert_module``).

    Raises:
        ConfigurationError: there is such a name, or an ignored name is no regular expression.
    """
    for other in ignored:
        try:
            pattern = re.compile(rf"(?:{other})(?:(?<=\.)|(?=\.|$))")
        except re.error as error:
            raise ConfigurationError(
                f"Transformers reads the names of ignored modules as regular expressions, and {other!r} is none "
                f"({error}): rename the module, or use compressed-tensors"
            ) from None
        for name in in_fp8:
            if name.endswith(other) or pattern.match(name):
                raise ConfigurationError(
                    f"{name} is in FP8 and {other} is not, but Transformers would ignore both in the block format: "
                    "use compressed-tensors, or put both into the same precision"
                )
