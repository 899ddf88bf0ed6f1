"""Compare checkpoints that should be equal, one tensor at a time, and explain the differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fp8dist.checks.contents import FINDING_KINDS, Content, Digester, Field, Key
from fp8dist.checks.differences import first_difference, unravel
from fp8dist.checks.findings import Differing, Seen, explained, is_odd, layout_findings, named_only, reference_of
from fp8dist.checks.report import DivergenceReport, sides_of
from fp8dist.common.divergence import Finding, Participant
from fp8dist.files.entries import SavedEntry, Source

MAX_EXPLAINED = 64
"""Differing tensors whose first differing element is searched for."""

Progress = Callable[[int], None]
"""Called after each tensor with the number of bytes that were read for it."""


class SourceContent(Content):
    """The contents of a checkpoint, for the code that compares ranks. Reads one tensor at a time, and keeps none."""

    def __init__(self, source: Source, progress: Progress) -> None:
        super().__init__([Key(e.name, e.kind, e.shape, e.dtype) for e in source.entries], torch.device("cpu"))
        self._source = source
        self._progress = progress

    def digests(self, digester: Digester) -> Tensor:
        """See ``Content``."""
        result = torch.empty(len(self.keys), 2, dtype=torch.int64, device="cpu")
        seeds = self.seeds
        for i in range(len(self.keys)):
            tensor = self._source.read(i)
            leaves = digester.leaves(tensor)
            result[i] = digester.on(tensor.device).digests(leaves, [len(leaves)], seeds[i : i + 1])[0]
            self._progress(tensor.nbytes)
        return result

    def fields(self, index: int) -> list[Field]:
        """See ``Content``. Reads the tensor again."""
        entry = self._source.entries[index]
        return [field_of(entry, self._source.read(index))]


def only_of(source: Source, kind: str) -> Source:
    """Return the checkpoint with only those entries about which a finding has this ``kind``."""
    kept = (i for i, entry in enumerate(source.entries) if FINDING_KINDS.get(entry.kind, entry.kind) == kind)
    return Source(source.path, source.family, [(source.entries[i], partial(source.read, i)) for i in kept])


def bytes_in(source: Source) -> int:
    """Return the size of all tensors of a checkpoint in bytes, without reading them."""
    return sum(SourceContent(source, lambda _: None).sizes.values())


def field_of(entry: SavedEntry, tensor: Tensor) -> Field:
    """Return an entry and its tensor as a Field."""
    name = "" if entry.kind == "parameter" else entry.kind
    kind = FINDING_KINDS.get(entry.kind, entry.kind)
    return Field(name, kind, tensor, lambda place: unravel(place, entry.shape))


def compare_sources(sources: Sequence[Source], progress: Progress) -> DivergenceReport:
    """Compare the tensors of checkpoints that have the same name. In the report, a "rank" is an index into ``sources``,
    and its "host" is the path of the checkpoint.

    Raises:
        CheckpointError: a checkpoint cannot be read.
    """
    contents = [SourceContent(source, progress) for source in sources]
    digester = Digester()
    digests = [content.digests(digester) for content in contents]
    places = [{key: i for i, key in enumerate(content.keys)} for content in contents]
    by_name = [([n], {(key.name, key.kind): key for key in content.keys}) for n, content in enumerate(contents)]
    findings = layout_findings(by_name, "file")
    common = sorted(set(places[0]).intersection(*places[1:]))
    explained_count = 0
    for key in common:
        sides = sides_of({n: tuple(digests[n][places[n][key]].tolist()) for n in range(len(sources))})
        if len(sides) == 1:
            continue
        thing = Differing(places[0][key], key, sides)
        seen = _look_into(thing, sources, places, digester) if explained_count < MAX_EXPLAINED else None
        explained_count += 1
        findings += named_only(thing, "") if seen is None else seen
    participants = [Participant(n, source.path) for n, source in enumerate(sources)]
    compared = dict(sorted(Counter(key.kind for key in common).items()))
    return DivergenceReport(tuple(f.located(participants) for f in findings), compared, noun="file")


def _look_into(
    thing: Differing, sources: Sequence[Source], places: Sequence[Mapping[Key, int]], digester: Digester
) -> list[Finding]:
    """Return findings about one tensor, with the first element at which each deviating checkpoint differs from the
    reference. Holds two tensors in memory."""

    def read(n: int) -> Field:
        index = places[n][thing.key]
        return field_of(sources[n].entries[index], sources[n].read(index))

    expected = read(reference_of(thing))
    theirs = digester.leaves(expected.tensor)
    seen: dict[int, list[Seen]] = {n: [] for n in range(len(sources))}
    for n in seen:
        if is_odd(n, thing):
            mine = read(n)
            difference = first_difference(mine.tensor, expected.tensor, digester.leaves(mine.tensor), theirs)
            if difference is not None:
                seen[n].append(Seen(0, 0, mine.at(difference.place), difference, mine.name, mine.kind))
    return explained(thing, seen, "file") or named_only(thing, "")
