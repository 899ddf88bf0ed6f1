"""WeightNote: detects writes to a weight, other than by an optimizer, since its scale last followed it."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8dist.state.groups import is_dtensor, local_part

__all__ = ["SAMPLED_WEIGHTS", "Held", "NoteList", "WeightNote", "sample_of", "stored_parameters"]

SAMPLED_WEIGHTS, _SAMPLED = 4, 4096
"""Number of weights, and of elements of each, that are compared with what they were."""


def sample_of(weight: Tensor) -> Tensor:
    """Return a copy of the first elements of this rank's part of a weight, 1-d."""
    return local_part(weight).detach().flatten()[:_SAMPLED].clone()


def stored_parameters(linear: nn.Module, name: str = "weight") -> tuple[Tensor, ...]:
    """Return the tensors that store a weight of a module: its Parameter, or the originals of a parametrization."""
    weight = linear._parameters.get(name)
    if weight is not None:
        return (weight,)
    parametrizations = linear._modules.get("parametrizations")
    if parametrizations is not None and name in parametrizations:  # type: ignore[operator]
        return tuple(parametrizations[name].parameters())  # type: ignore[index]
    # Pruned, or under an old-style weight_norm: weight_orig, weight_g, weight_v.
    return tuple(p for key, p in linear._parameters.items() if p is not None and key.startswith(name))


_version_of = operator.attrgetter("_version")

_KEPT_SHARDS = 8
"""Number of local tensors, handed out by as many calls of state_dict, that are watched."""


def _shards_of(weights: Iterable[Tensor]) -> Iterator[tuple[Tensor, int]]:
    shards = (local_part(weight) for weight in weights if is_dtensor(weight))
    return ((shard, shard._version) for shard in shards if not shard.is_inference())


class WeightNote:
    """Tracks whether a Linear's weight was written to since its scale was last right for it.

    Scales follow optimizer steps, so a new note is taken after each of them. Writes that torch does not count
    (``.data``, numpy, fused optimizers) do not show here; the cast notices a weight that outgrew its scale.

    Notes are read in every forward, so the code makes few calls. They are taken in every step, for which ``NoteList``
    has those of plain parameters in arrays.
    """

    def __init__(self, name: str = "weight") -> None:
        """``name``: of the module's parameter."""
        self.name = name
        self.resharded = False
        """True if FSDP frees the weight between forward and backward. It shows gathered weights as other tensors, so
        the note keeps the parameters found at ``attach``."""
        self.awaited = True
        """True: take the note at the next forward that records. FP8 state is new or loaded, and fits its weight.
        Set by ``trust_next``."""
        self.used_at = self.idle_at = -1
        """Boundaries passed before the last forward that cast the weight to FP8, and before the last that did not."""
        self.recorded_at = self.unrecorded_at = -2
        """Boundaries passed before the last backward in FP8 that recorded amaxes, and before the last that did not,
        although the recipe needs them."""
        self.of_copy = False
        """True if the Linear was copied or unpickled, and no note was taken since."""
        self._shards: list[tuple[Tensor, int]] = []
        """Local tensors of the DTensor with their versions: its own, and those that a state_dict has handed out since
        the note was taken. The standard loader writes to the latter, which no version of the parameter shows."""
        self.stepped_at = -1
        """Number of boundaries passed before the last optimizer step that changed the weight."""
        self.skipped: Tensor | None = None
        """Non-zero (on the weight's device) if a loss scaler made that step change nothing."""
        self.stored: tuple[Tensor, ...] = ()
        """The stored parameters that the note describes; empty before the first note."""
        self._counted: tuple[Tensor, ...] = ()  # ``stored`` and local tensors of DTensors: each has a version.
        self._versions: list[int] = []
        self._address = 0  # 0: not compared, because FSDP or tensor parallelism moves the weight.
        self._arrays: _Arrays | None = None  # Has the version and the address instead, at ``_place``.
        self._place = 0
        self._plain: Tensor | None = None  # The weight, if its version, address and identity are all there is to note.
        self._home: dict[str, nn.Parameter | None] = {}  # Where its Linear has it.
        self.marked = False  # Replaced in a way that versions do not show.
        self._original_written = False  # The weight of which this one is a copy was, when the copy was made.
        self._linear: weakref.ref[nn.Module] | None = None
        self._now: list[int] | None = None  # Versions when ``written`` was last called.
        self._recorded: list[int] | None = None  # Versions at the last forward that recorded.
        self._in_backward: tuple[int, list[int]] | None = None  # (``_Arrays.takes``, versions).
        self._remembered: list[weakref.ref[Tensor]] = []

    def copied(self) -> WeightNote:
        """Return the note of a copy or pickle of the Linear, whose scale is right for its weight if this one's is.
        ``belong_to`` completes it."""
        note = WeightNote(self.name)
        note.awaited, note.of_copy = False, True
        linear = self.linear
        note._original_written = self.written_in_place or (linear is not None and self.written(linear))
        return note

    def belong_to(self, linear: nn.Module) -> None:
        """Note that ``linear`` was just copied or unpickled."""
        if self.of_copy and not self.stored:  # Otherwise copy.copy() has shared the note.
            self._look_at(linear)
            self._versions = self._read()

    def sample_before_load(self, linear: nn.Module, loads: dict[WeightNote, Tensor]) -> None:
        """Keep a sample of the weight as it is before other values are loaded into it, for ``StepWatch``. Local."""
        stored = stored_parameters(linear, self.name)
        if len(loads) < SAMPLED_WEIGHTS and stored and not stored[0].is_meta:
            loads.setdefault(self, sample_of(stored[0]))

    @property
    def linear(self) -> nn.Module | None:
        """The Linear whose weight this is; None if it is gone."""
        return None if self._linear is None else self._linear()

    def bind(self, linear: nn.Module) -> WeightNote:
        """Note whose weight this is, and return the note."""
        self._linear = weakref.ref(linear)
        return self

    def remember(self, parameters: Iterable[Tensor]) -> None:
        """Remember the parameters that store the weight: an optimizer may still hold them after others replace them.

        Not where torch swaps the contents of parameters to move them: it refuses those that have weak references.
        """
        if torch.__future__.get_swap_module_params_on_conversion():
            return
        for parameter in parameters:
            # DTensors are always swapped.
            if not is_dtensor(parameter) and all(parameter is not known() for known in self._remembered):
                self._remembered.append(weakref.ref(parameter))

    @property
    def remembered(self) -> list[Tensor]:
        """The parameters that store the weight, or once did, and still exist."""
        return [parameter for known in self._remembered if (parameter := known()) is not None]

    def take(self, linear: nn.Module, attached: bool = False) -> None:
        """Note that the scale is right for the weight as it is now.

        Args:
            attached: True if called by ``attach``, when FSDP shows its shards.
        """
        self._leave_arrays()
        weight = linear._parameters.get(self.name)
        if attached or not self.stored or not (self.resharded or weight is self.stored[0]):
            self._look_at(linear)
            self.remember(self.stored)
        self._versions = self._read()
        whole = weight is not None and not self.resharded and len(self._counted) == 1
        self._address = weight.data_ptr() if whole else 0  # type: ignore[union-attr]
        self._plain = weight if whole and not is_dtensor(weight) else None  # type: ignore[arg-type]
        self._home = linear._parameters
        self._now = self._versions
        self.awaited = self.marked = self._original_written = self.of_copy = False
        self._shards = list(_shards_of(self.stored))
        self._in_backward = None

    def hand_out(self, weights: Iterable[Tensor]) -> None:
        """Note that a state_dict hands out ``weights``. Keeps no memory alive but that of the parameter's shard."""
        self._shards += _shards_of(weights)
        del self._shards[1:-_KEPT_SHARDS]

    @property
    def written_in_place(self) -> bool:
        """True if a local tensor of the weight was written to since the note was taken: maybe on this rank alone."""
        return any(shard._version != version for shard, version in self._shards)

    def follow_shards(self) -> None:
        """Note that the scale is right for the weight as local writes have left it."""
        self._shards = [(shard, shard._version) for shard, _ in self._shards]

    def trust_next(self) -> None:
        """Note that FP8 state was loaded: the scale is right for the weight that the next forward finds."""
        self._leave_arrays()
        self.awaited = True

    def _read(self) -> list[int]:
        return [tensor._version for tensor in self._counted]

    def _look_at(self, linear: nn.Module) -> None:
        self.bind(linear)
        self.stored = parameters = stored_parameters(linear, self.name)
        locals_ = (local_part(parameter) for parameter in parameters)
        distinct = {id(tensor): tensor for tensor in (*parameters, *locals_)}
        self._counted = tuple(tensor for tensor in distinct.values() if not tensor.is_inference())

    def mark_written(self) -> None:
        """Mark the weight as replaced in a way that versions do not show, and as not recorded since."""
        self._leave_arrays()
        self.marked, self._recorded = True, None

    @property
    def marked_unrecorded(self) -> bool:
        """True if ``mark_written`` was called, and no forward has recorded the weight since."""
        return self.marked and self._recorded is None

    @property
    def copy_written(self) -> bool:
        """True if the Linear is a copy that may have been written to since it was made. Call ``written`` first."""
        return self.of_copy and (self.written_in_place or self.marked or self._noted[0] != self._now)

    def was_recorded(self) -> None:
        """Note that the forward that has just called ``written`` records the weight's amax."""
        self._recorded = self._now

    @property
    def unrecorded(self) -> bool:
        """True if no forward has recorded the weight as ``written`` has just found it, so no scale will follow."""
        return self._recorded != self._now

    def written(self, linear: nn.Module) -> bool:
        """True if the weight was written to, replaced or given other memory since the note was taken."""
        if self.awaited:
            return False
        self._now = [tensor._version for tensor in self._counted]
        versions, address = self._noted
        if self.marked or self._original_written or versions != self._now:
            return True
        if not address:
            return False
        weight = linear._parameters.get(self.name)
        if weight is not self.stored[0]:
            self._plain = None  # Its Linear may have another dict of parameters, too.
            return True
        # Under a dispatch mode, the weight may have no memory.
        return torch._C._len_torch_dispatch_stack() == 0 and weight.data_ptr() != address

    def holders(self, linear: nn.Module) -> tuple[Tensor, ...]:
        """Return the parameters that an optimizer of the weight holds."""
        return self.stored if self.resharded and self.stored else stored_parameters(linear, self.name)

    def changed_between_backwards(self) -> bool:
        """True if versions changed since the last call, without a note in between. Called in each recorded backward."""
        before, takes = self._in_backward, 0 if self._arrays is None else self._arrays.takes
        self._in_backward = takes, self._read()
        return before is not None and before[0] == takes and before != self._in_backward

    @property
    def _noted(self) -> tuple[list[int], int]:
        """The versions and the address of the weight when the note was taken."""
        if self._arrays is None:
            return self._versions, self._address
        return [self._arrays.versions[self._place]], self._arrays.addresses[self._place]

    @property
    def _ordinary(self) -> bool:
        """True if the version, the address and the identity of the weight are all that the note is about."""
        special = self.awaited or self.marked or self._original_written or self.of_copy
        return not special and self._plain is not None and self._home.get(self.name) is self._plain

    def _leave_arrays(self) -> None:
        """Have what was noted in this note itself, because it is about to change alone."""
        if self._arrays is not None:
            self._arrays.stale = True
            self._move(*self._noted, None)

    def _move(self, versions: list[int], address: int, arrays: _Arrays | None, place: int = 0) -> None:
        """Have what was noted in these arrays from now on, or in this note."""
        takes, now = (0 if each is None else each.takes for each in (self._arrays, arrays))
        seen = self._in_backward
        self._in_backward = (now, seen[1]) if seen is not None and seen[0] == takes else None
        self._versions, self._address, self._arrays, self._place = versions, address, arrays, place


class _Arrays:
    """Versions and addresses of the weights of many notes. Refers to no note, because notes refer to it."""

    def __init__(self, versions: list[int], addresses: list[int]) -> None:
        self.versions, self.addresses = versions, addresses
        self.takes = 0
        """How often all notes were taken."""
        self.stale = False
        """True if a note has left, or may come back."""


class Held(NamedTuple):
    """The notes of the weights that an optimizer holds. ``listed``: those with their values in ``arrays``, at
    ``places``; None: at all places. ``weights``: theirs. ``others``: the rest."""

    listed: list[WeightNote]
    weights: list[Tensor]
    arrays: _Arrays
    places: list[int] | None
    others: list[WeightNote]

    def changed(self, versions: list[int], addresses: list[int]) -> list[WeightNote]:
        """Return the listed notes whose weights have other versions or addresses in the arrays."""
        old = self.arrays
        if self.places is None and versions == old.versions and addresses == old.addresses:
            return []
        places = range(len(self.listed)) if self.places is None else self.places
        now = zip(self.listed, places, versions, addresses)
        return [note for note, at, *values in now if values != [old.versions[at], old.addresses[at]]]


class NoteList:
    """The notes of a model's weights, which a step compares and takes all at once.

    Ordinary notes have their versions and addresses in arrays. So a step makes no call for each of them, and writes to
    none of them. Other notes (of a DTensor, a parametrization or a replaced parameter, or marked) are looked at one by
    one. A note that changes alone leaves the arrays, and comes back once it has been taken.
    """

    def __init__(self, notes: Sequence[WeightNote], lasts: bool = True) -> None:
        """``lasts``: False for a list that is used once, for which arrays do not pay."""
        self.notes = notes
        self._lasts = lasts
        self._all = Held([], [], _Arrays([], []), None, [*notes])
        self._all.arrays.stale = lasts
        self._homes: list[dict[str, nn.Parameter | None]] = []  # Where the Linears have them, and their names.
        self._names: list[str] = []
        # The ids of an optimizer's parameters, and which listed weights these are.
        self._held: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], Held]] = weakref.WeakKeyDictionary()

    def take(self, held: Held | None = None, stepped_at: int | None = None) -> list[WeightNote]:
        """Take the notes, as ``WeightNote.take`` does one by one.

        Args:
            held: those to take, without those that are awaited. None: all.
            stepped_at: number of boundaries passed before an optimizer step that has ended. None: there was none.

        Returns:
            the notes of weights that were written to since that step; and of those that ``mark_written`` marked, and
            that no forward has recorded since.
        """
        self._sort()
        arrays, others = self._all.arrays, self._all.others
        if held is None:
            held = self._all
        else:
            others = held.others and [note for note in held.others if not note.awaited]
        if held.arrays is not arrays:  # Notes have changed alone, inside the optimizer's step.
            return _take_each([*(note for note in held.listed if not note.awaited), *others], stepped_at)
        versions, addresses = list(map(_version_of, held.weights)), list(map(Tensor.data_ptr, held.weights))
        found = [] if stepped_at is None else held.changed(versions, addresses)
        if held.places is None:
            arrays.versions, arrays.addresses = versions, addresses
            arrays.takes += 1
        else:
            for note, place, version, address in zip(held.listed, held.places, versions, addresses):
                arrays.versions[place], arrays.addresses[place] = version, address
                note._in_backward = None
        found = found and [note for note in found if note.stepped_at == stepped_at]
        if others:
            found = found + _take_each(others, stepped_at)
            arrays.stale |= any([note._plain is not None for note in others])
        return found

    def find(self, optimizer: Optimizer | None = None) -> tuple[Held, list[WeightNote]]:
        """Return the notes of the weights that an optimizer holds, or of all, and those for which ``written`` is
        True."""
        self._sort()
        held = self._all if optimizer is None else self._held_by(optimizer)
        if torch._C._len_torch_dispatch_stack():
            suspects = held.listed  # ``written`` knows what not to look at.
        else:
            suspects = held.changed(list(map(_version_of, held.weights)), list(map(Tensor.data_ptr, held.weights)))
        living = ((note, note.linear) for note in (*suspects, *held.others))
        return held, [note for note, linear in living if linear is not None and note.written(linear)]

    def _held_by(self, optimizer: Optimizer) -> Held:
        ids = list(map(id, itertools.chain.from_iterable([group["params"] for group in optimizer.param_groups])))
        known, held = self._held.get(optimizer, (None, self._all))
        if known != ids:
            listed, weights, arrays, _, _ = held = self._all
            distinct = set(ids)
            places = [place for place, weight in enumerate(weights) if id(weight) in distinct]
            if len(places) < len(weights):
                held = Held([listed[at] for at in places], [weights[at] for at in places], arrays, places, [])
            self._held[optimizer] = ids, held
        if not self._all.others:
            return held
        distinct = set(ids)
        living = ((note, note.linear) for note in self._all.others)
        stored = ((note, note.holders(linear)) for note, linear in living if linear is not None)
        return held._replace(others=[note for note, holders in stored if not distinct.isdisjoint(map(id, holders))])

    def _sort(self) -> None:
        """Put all ordinary notes into the arrays, and no others, if this may have changed."""
        same = all(map(operator.is_, map(dict.get, self._homes, self._names), self._all.weights))
        if (same and not self._all.arrays.stale) or not self._lasts:
            return
        for note in self.notes:
            note._leave_arrays()
        listed = [note for note in self.notes if note._ordinary]
        arrays = _Arrays([note._versions[0] for note in listed], [note._address for note in listed])
        others = [note for note in self.notes if not note._ordinary]
        self._all = Held(listed, [note.stored[0] for note in listed], arrays, None, others)
        self._homes, self._names = [note._home for note in listed], [note.name for note in listed]
        self._held.clear()
        for place, note in enumerate(listed):
            note._move(note._versions, note._address, arrays, place)


def _take_each(notes: Iterable[WeightNote], stepped_at: int | None) -> list[WeightNote]:
    """Do what ``NoteList.take`` does, one by one."""
    found = []
    for note in notes:
        linear = note.linear
        if linear is None:
            continue
        if (note.stepped_at == stepped_at and note.written(linear)) or note.marked_unrecorded:
            found.append(note)
        note.take(linear)
    return found
