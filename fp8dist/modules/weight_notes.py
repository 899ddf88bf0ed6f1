"""WeightNote: detects that a weight was written to since its scale was last set to fit it.

A note holds what torch shows of a weight at one moment: its identity, its version counters (``Tensor._version``, which
each in-place operation increments) and its address. Later values that differ mean that somebody wrote to the weight,
for example by loading a checkpoint. A *boundary* is the end of a training step of the FP8 state: scales change there.
"""

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

SAMPLED_WEIGHTS, _SAMPLED = 4, 4096
"""How many weights are compared by value with an earlier copy, and how many elements of each."""


def sample_of(weight: Tensor) -> Tensor:
    """Return a copy of the first 4096 elements of this rank's part of a weight, 1-d."""
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
"""At most this many local tensors of one weight are watched. Each call of ``state_dict`` hands out a new one."""


def _shards_of(weights: Iterable[Tensor]) -> Iterator[tuple[Tensor, int]]:
    shards = (local_part(weight) for weight in weights if is_dtensor(weight))
    return ((shard, shard._version) for shard in shards if not shard.is_inference())


class WeightNote:
    """Tracks whether a module's weight was written to since its scale last fitted it.

    The module ("linear" below) is an FP8Linear, or an FP8Experts with one note per weight. The optimizer's writes are
    expected: scales follow them, so a new note is taken after each optimizer step. Writes that torch does not count
    (``.data``, numpy, fused optimizers) stay unnoticed here; the cast notices a weight that outgrew its scale.

    Every forward reads notes, so the code makes few Python calls. Every step takes all notes again. To make that cheap,
    ``NoteList`` keeps the values of ordinary notes in two lists for the whole model.

    Times are numbers of boundaries passed, as counted by ``JobState.boundaries``.
    """

    def __init__(self, name: str = "weight") -> None:
        """``name``: the name of the module's parameter."""
        self.name = name
        self.resharded = False
        """True if FSDP frees the gathered weight between forward and backward. FSDP then shows the module other tensors
        than the sharded parameters, so the note keeps the parameters found at ``attach``."""
        self.awaited = True
        """True while FP8 state that is new, or was just loaded, counts as right for whatever weight comes: the next
        forward that records amaxes takes the note. Set by ``trust_next``."""
        self.used_at = self.idle_at = -1
        """Time of the last forward that cast the weight to FP8, and of the last that did not."""
        self.recorded_at = self.unrecorded_at = -2
        """Time of the last backward in FP8 that recorded amaxes, and of the last that did not although the recipe needs
        them."""
        self.of_copy = False
        """True if the module was copied or unpickled, and no note was taken since."""
        self._shards: list[tuple[Tensor, int]] = []
        """For a DTensor: its local tensor, and those that ``state_dict`` has handed out since the note was taken, each
        with its version. torch's checkpoint loader writes to the latter, and no version of the parameter shows it."""
        self._lent: list[tuple[weakref.ref[Tensor], int]] = []
        """Those handed out before the note was taken, while the program keeps them: it may load into them later."""
        self.stepped_at = -1
        """Time of the last optimizer step that changed the weight."""
        self.skipped: Tensor | None = None
        """On the weight's device: non-zero if a loss scaler skipped that optimizer step. None: no scaler."""
        self.stored: tuple[Tensor, ...] = ()
        """The stored parameters that the note describes; empty before the first note."""
        self._counted: tuple[Tensor, ...] = ()  # Tensors whose versions are compared: ``stored``, and local tensors.
        self._versions: list[int] = []
        self._address = 0  # 0: not compared, because FSDP or tensor parallelism moves the weight.
        self._arrays: _Arrays | None = None  # If set, it holds the version and the address instead, at ``_place``.
        self._place = 0
        self._plain: Tensor | None = None  # The weight, if its version, address and identity are all there is to note.
        self._home: dict[str, nn.Parameter | None] = {}  # The ``_parameters`` dict of its module.
        self.marked = False  # Replaced in a way that versions do not show.
        self._original_written = False  # This note's module is a copy, and the original was written to before that.
        self._linear: weakref.ref[nn.Module] | None = None
        self._now: list[int] | None = None  # Versions when ``written`` was last called.
        self._recorded: list[int] | None = None  # Versions at the last forward that recorded.
        self._in_backward: tuple[int, list[int]] | None = None  # (``_Arrays.takes``, versions).
        self._remembered: list[weakref.ref[Tensor]] = []

    def copied(self) -> WeightNote:
        """Return a note for a copy or pickle of the module. The copy's scale fits its weight if this one's does. Call
        ``belong_to`` on the result once the copied module exists."""
        note = WeightNote(self.name)
        note.awaited, note.of_copy = False, True
        linear = self.linear
        note._original_written = self.written_in_place or (linear is not None and self.written(linear))
        return note

    def belong_to(self, linear: nn.Module) -> None:
        """Bind the note of a copy to ``linear``, which was just copied or unpickled."""
        if self.of_copy and not self.stored:  # copy.copy() shares the note with the original: leave that one alone.
            self._look_at(linear)
            self._versions = self._read()

    def sample_before_load(self, linear: nn.Module, loads: dict[WeightNote, Tensor]) -> None:
        """Add a sample of the weight to ``loads``, before other values are loaded into the weight. ``StepWatch``
        compares it at the next optimizer step. Keeps the samples of the first 4 weights only. Local."""
        stored = stored_parameters(linear, self.name)
        if len(loads) < SAMPLED_WEIGHTS and stored and not stored[0].is_meta:
            loads.setdefault(self, sample_of(stored[0]))

    @property
    def linear(self) -> nn.Module | None:
        """The module that has the weight; None if it does not exist any more."""
        return None if self._linear is None else self._linear()

    def bind(self, linear: nn.Module) -> WeightNote:
        """Set the module that has the weight, and return the note."""
        self._linear = weakref.ref(linear)
        return self

    def remember(self, parameters: Iterable[Tensor]) -> None:
        """Keep weak references to the parameters that store the weight. An optimizer may still hold a parameter that
        the module has replaced.

        Does nothing if torch swaps the contents of parameters (``set_swap_module_params_on_conversion``), because torch
        refuses to swap tensors that have weak references.
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
        """Take the note: from now on, the scale counts as right for the weight as it is at this call. Local.

        Args:
            attached: True if called by ``attach``, when the module's parameters are FSDP's shards.
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
        self._take_shards()
        self._in_backward = None

    def _take_shards(self) -> None:
        own = list(_shards_of(self.stored))
        lent = [weakref.ref(shard) for shard, _ in self._shards if all(shard is not mine for mine, _ in own)]
        self._shards = own
        self._follow_lent(lent)

    def _follow_lent(self, more: Iterable[weakref.ref[Tensor]] = ()) -> None:
        known = [*more, *(reference for reference, _ in self._lent)]
        self._lent = [(reference, shard._version) for reference in known if (shard := reference()) is not None]

    def hand_out(self, weights: Iterable[Tensor]) -> None:
        """Watch the tensors that ``state_dict`` hands out for writes. They share memory with the parameter's shard, so
        keeping them costs no memory."""
        self._shards += _shards_of(weights)
        del self._shards[1:-_KEPT_SHARDS]

    @property
    def written_in_place(self) -> bool:
        """True if a local tensor of a DTensor weight was written to since the note was taken. Ranks may differ."""
        lent = ((known(), version) for known, version in self._lent)
        return any(shard is not None and shard._version != version for shard, version in (*self._shards, *lent))

    def follow_shards(self) -> None:
        """Accept the writes to local tensors: the scale now counts as right for the weight that they left."""
        self._shards = [(shard, shard._version) for shard, _ in self._shards]
        self._follow_lent()

    def trust_next(self) -> None:
        """Let the next forward that records take the note: FP8 state was loaded, and fits the weight found there."""
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
        """Mark the weight as written to where versions do not show it. No forward has recorded its new amax yet."""
        self._leave_arrays()
        self.marked, self._recorded = True, None

    @property
    def marked_unrecorded(self) -> bool:
        """True if ``mark_written`` was called, and no forward has recorded the weight since."""
        return self.marked and self._recorded is None

    @property
    def copy_written(self) -> bool:
        """True if the module is a copy whose weight was written to since the copy was made. Call ``written`` first: it
        reads the versions that are compared here."""
        return self.of_copy and (self.written_in_place or self.marked or self._noted[0] != self._now)

    def was_recorded(self) -> None:
        """Note that this forward records the weight's amax. Call ``written`` first: it reads the weight's versions."""
        self._recorded = self._now

    @property
    def unrecorded(self) -> bool:
        """True if no forward recorded the amax of the weight as it was at the last call of ``written``. The next
        boundary then cannot derive a scale for it."""
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
            self._plain = None  # The module may have another ``_parameters`` dict, too: ``_home`` is out of date.
            return True
        # Under a dispatch mode, the weight may have no memory.
        return torch._C._len_torch_dispatch_stack() == 0 and weight.data_ptr() != address

    def holders(self, linear: nn.Module) -> tuple[Tensor, ...]:
        """Return the parameters by which an optimizer that updates this weight can be recognised."""
        return self.stored if self.resharded and self.stored else stored_parameters(linear, self.name)

    def changed_between_backwards(self) -> bool:
        """True if versions changed since the last call, and no note was taken in between. Each backward that records
        amaxes calls this once."""
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
        """Move the noted values from the arrays into this note, because only this note is about to change."""
        if self._arrays is not None:
            self._arrays.stale = True
            self._move(*self._noted, None)

    def _move(self, versions: list[int], address: int, arrays: _Arrays | None, place: int = 0) -> None:
        """Keep the noted values in ``arrays`` at ``place`` from now on; in this note if ``arrays`` is None."""
        # ``changed_between_backwards`` compares counts of takes, and each holder of the values has its own count.
        takes, now = (0 if each is None else each.takes for each in (self._arrays, arrays))
        seen = self._in_backward
        self._in_backward = (now, seen[1]) if seen is not None and seen[0] == takes else None
        self._versions, self._address, self._arrays, self._place = versions, address, arrays, place


class _Arrays:
    """Versions and addresses of the weights of many notes, by place. Has no references to notes: these would be
    cycles."""

    def __init__(self, versions: list[int], addresses: list[int]) -> None:
        self.versions, self.addresses = versions, addresses
        self.takes = 0
        """Number of times that all notes were taken at once."""
        self.stale = False
        """True if a note has left the arrays, or may be able to return to them."""


class Held(NamedTuple):
    """The notes of the weights that one optimizer holds, or of all weights of a model.

    Attributes:
        listed: the notes whose values are in ``arrays``.
        weights: their weights, in the same order.
        places: their places in ``arrays``. None: all places, in order.
        others: the notes that keep their values themselves.
    """

    listed: list[WeightNote]
    weights: list[Tensor]
    arrays: _Arrays
    places: list[int] | None
    others: list[WeightNote]

    def changed(self, versions: list[int], addresses: list[int]) -> list[WeightNote]:
        """Return the listed notes whose weights have other versions or addresses than the arrays.

        Args:
            versions, addresses: current values of ``weights``.
        """
        old = self.arrays
        if self.places is None and versions == old.versions and addresses == old.addresses:
            return []
        places = range(len(self.listed)) if self.places is None else self.places
        now = zip(self.listed, places, versions, addresses)
        return [note for note, at, *values in now if values != [old.versions[at], old.addresses[at]]]


class NoteList:
    """The notes of a model's weights. A step compares and takes all of them at once.

    Ordinary notes have their versions and addresses in arrays, so a step needs no Python call per note. Other notes (of
    a DTensor, a parametrization or a replaced parameter, or marked as written) are read one by one. A note that changes
    alone leaves the arrays, and returns to them after it was taken.
    """

    def __init__(self, notes: Sequence[WeightNote], lasts: bool = True) -> None:
        """``lasts``: False for a list that is used once: building arrays would cost more than they save."""
        self.notes = notes
        self._lasts = lasts
        self._all = Held([], [], _Arrays([], []), None, [*notes])
        self._all.arrays.stale = lasts
        self._homes: list[dict[str, nn.Parameter | None]] = []  # The ``_parameters`` dicts of the listed weights, …
        self._names: list[str] = []  # … and their names in these. With both, ``_sort`` finds replaced parameters.
        # Per optimizer: the ids of its parameters, and the notes of those that are listed weights.
        self._held: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], Held]] = weakref.WeakKeyDictionary()

    def take(self, held: Held | None = None, stepped_at: int | None = None) -> list[WeightNote]:
        """Take the notes, as ``WeightNote.take`` does one by one.

        Args:
            held: take only these, except awaited ones (``WeightNote.awaited``). None: take all.
            stepped_at: time of the optimizer step that has just ended, as a number of boundaries. None: there was none.

        Returns:
            The notes of weights that were written to after this optimizer step, and of weights marked by
            ``mark_written`` that no forward has recorded since.
        """
        self._sort()
        arrays, others = self._all.arrays, self._all.others
        if held is None:
            held = self._all
        else:
            others = held.others and [note for note in held.others if not note.awaited]
        if held.arrays is not arrays:  # Notes left the arrays inside the optimizer's step: ``held`` has old places.
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
        """Return the notes of the weights that ``optimizer`` holds (None: of all weights), and a list of those notes
        among them whose weights were written to."""
        self._sort()
        held = self._all if optimizer is None else self._held_by(optimizer)
        if torch._C._len_torch_dispatch_stack():
            suspects = held.listed  # Weights may have no memory here, so no address: ``written`` handles that.
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
        """Put all ordinary notes into new arrays if notes may have become ordinary, or ceased to be."""
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
    """Take each note by itself. For ``stepped_at`` and the result see ``NoteList.take``."""
    found = []
    for note in notes:
        linear = note.linear
        if linear is None:
            continue
        if (note.stepped_at == stepped_at and note.written(linear)) or note.marked_unrecorded:
            found.append(note)
        note.take(linear)
    return found
