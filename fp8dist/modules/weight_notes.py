"""WeightNote: detects writes to a weight, other than by an optimizer, since its scale last followed it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from fp8dist.state.groups import is_dtensor, local_part

__all__ = ["SAMPLED_WEIGHTS", "WeightNote", "find", "sample_of", "stored_parameters", "take_all"]

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


_KEPT_SHARDS = 8
"""Number of local tensors, handed out by as many calls of state_dict, that are watched."""


def _shards_of(weights: Iterable[Tensor]) -> Iterator[tuple[Tensor, int]]:
    shards = (local_part(weight) for weight in weights if is_dtensor(weight))
    return ((shard, shard._version) for shard in shards if not shard.is_inference())


class WeightNote:
    """Tracks whether a Linear's weight was written to since its scale was last right for it.

    Scales follow optimizer steps, so a new note is taken after each of them. Writes that torch does not count
    (``.data``, numpy, fused optimizers) do not show here; the cast notices a weight that outgrew its scale.

    Notes are read in every forward and taken in every step, so the code makes few calls: ``take_all`` and ``find``
    make none of Python for a weight that is a plain parameter.
    """

    def __init__(self, name: str = "weight") -> None:
        """``name``: of the module's parameter."""
        self.name = name
        self.resharded = False
        """True if FSDP frees the weight between forward and backward. It shows gathered weights as other tensors, so
        the note keeps the parameters found at ``attach``."""
        self.awaited = True
        """True: take the note at the next forward that records. FP8 state is new or loaded, and fits its weight."""
        self.used_at = self.idle_at = -1
        """Boundaries passed before the last forward that cast the weight to FP8, and before the last that did not."""
        self.backward_at = self.recorded_at = -2
        """Boundaries passed before the last backward in FP8, if the recipe needs amaxes, and before the last that
        recorded them."""
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
        self._plain: Tensor | None = None  # The weight, if its version, address and identity are all there is to note.
        self._home: Mapping[str, Tensor | None] = {}  # Where its Linear has it.
        self.marked = False  # Replaced in a way that versions do not show.
        self._original_written = False  # The weight of which this one is a copy was, when the copy was made.
        self._linear: weakref.ref[nn.Module] | None = None
        self._now: list[int] | None = None  # Versions when ``written`` was last called.
        self._recorded: list[int] | None = None  # Versions at the last forward that recorded.
        self._in_backward: list[int] | None = None
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
        self.awaited = True

    def cast_at(self, boundaries: int) -> None:
        """Note a forward that casts the weight to FP8. ``boundaries``: number passed so far."""
        self.used_at = boundaries

    def idle_in(self, boundaries: int) -> None:
        """Note a forward that does not cast the weight. ``boundaries``: number passed so far."""
        self.idle_at = boundaries

    def forget_steps(self) -> None:
        """Forget optimizer steps before ``attach``."""
        self.stepped_at, self.skipped = -1, None

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
        self.marked, self._recorded = True, None

    @property
    def marked_unrecorded(self) -> bool:
        """True if ``mark_written`` was called, and no forward has recorded the weight since."""
        return self.marked and self._recorded is None

    @property
    def copy_written(self) -> bool:
        """True if the Linear is a copy that may have been written to since it was made. Call ``written`` first."""
        return self.of_copy and (self.written_in_place or self.marked or self._versions != self._now)

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
        self._now = self._read()
        if self.marked or self._original_written or self._versions != self._now:
            return True
        if not self._address:
            return False
        weight = linear._parameters.get(self.name)
        if weight is not self.stored[0]:
            self._plain = None  # Its Linear may have another dict of parameters, too.
            return True
        # Under a dispatch mode, the weight may have no memory.
        return torch._C._len_torch_dispatch_stack() == 0 and weight.data_ptr() != self._address

    def holders(self, linear: nn.Module) -> tuple[Tensor, ...]:
        """Return the parameters that an optimizer of the weight holds."""
        return self.stored if self.resharded and self.stored else stored_parameters(linear, self.name)

    def held_in(self, parameters: Collection[int], linear: nn.Module) -> bool:
        """True if one of the parameters with these ids stores the weight."""
        return any(id(holder) in parameters for holder in self.holders(linear))

    def changed_between_backwards(self) -> bool:
        """True if versions changed since the last call, without a note in between. Called in each recorded backward."""
        before, self._in_backward = self._in_backward, self._read()
        return before is not None and before != self._in_backward


def take_all(notes: Iterable[WeightNote], stepped_at: int | None = None) -> list[WeightNote]:
    """Take these notes, as ``WeightNote.take`` does one by one.

    Args:
        stepped_at: number of boundaries passed before an optimizer step that has ended. None: there was none.

    Returns:
        the notes of weights that were written to since that step; and of those that ``mark_written`` marked, and that
        no forward has recorded since.
    """
    found = []
    for note in notes:
        weight = note._plain
        plain = weight is not None and note._home.get(note.name) is weight
        if plain:
            versions, address = [weight._version], weight.data_ptr()  # type: ignore[union-attr]
        stepped = note.stepped_at == stepped_at
        if not plain or note.marked or (stepped and (versions != note._versions or address != note._address)):
            linear = note.linear
            if linear is None:
                continue
            if (stepped and note.written(linear)) or note.marked_unrecorded:
                found.append(note)
            if not plain:
                note.take(linear)
                continue
        note._versions = versions
        note._address = address
        note.awaited = note.marked = note._original_written = note.of_copy = False
        note._in_backward = None
    return found


def find(notes: Iterable[WeightNote], held: Collection[int] | None = None) -> tuple[list[WeightNote], list[WeightNote]]:
    """Find the weights that an optimizer holds, and those that were written to, in one walk.

    Args:
        held: ids of the optimizer's parameters. None: look at all weights.

    Returns:
        the notes of the weights that it holds; and those of them for which ``written`` is True.
    """
    found, written = [], []
    in_mode = torch._C._len_torch_dispatch_stack() > 0
    for note in notes:
        weight = note._plain
        plain = weight is not None and note._home.get(note.name) is weight
        if plain and held is not None and id(weight) not in held:
            continue
        if (
            plain
            and weight._version == note._versions[0]  # type: ignore[union-attr]
            and not (note.marked or note._original_written or in_mode)
            and weight.data_ptr() == note._address  # type: ignore[union-attr]
        ):
            found.append(note)
            continue
        linear = note.linear
        if linear is None or not (plain or held is None or note.held_in(held, linear)):
            continue
        found.append(note)
        if note.written(linear):
            written.append(note)
    return found, written
