"""An arena: the FP8 state of the slots of one reduction group as flat arrays, in sorted slot order.

The arrays are not part of the module tree. If they were buffers, DDP would overwrite them with rank 0's (and hide a
divergence), and ``.bfloat16()`` would cast them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist.state.fallback import Fallback
from fp8dist.state.recipe import Recipe
from fp8dist.state.slots import Slot, SlotSpec, sorted_specs
from fp8dist_kernels import direct
from fp8dist_kernels.arrays import NONFINITE, SATURATED, TAKEN, StateArrays, UpdateRule
from fp8dist_kernels.formats import Format
from fp8dist_kernels.header import HEADER, WORD_MANIFEST, WORD_STEP
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN
from fp8dist_kernels.reference.rings import RingShape, ordered_window
from fp8dist_kernels.reference.update import give_back
from fp8dist_kernels.scaling import scale_from_amax

SHARES = 2
"""Number of shares per cast: of elements that saturate, and of elements that become 0."""

_SCRATCHES = 1024
"""More than any number of casts that run at the same time, on all streams."""

_CPU = torch.device("cpu")


@contextmanager
def unchanged_on_failure(arenas: Sequence[Arena]) -> Iterator[None]:
    """Restore the state of the arenas if the block raises."""
    before = [(arena, arena.copied_state()) for arena in arenas]
    try:
        yield
    except BaseException:
        for arena, state in before:
            arena.put_back(state)
        raise


def fitted(history: Tensor, length: int) -> Tensor:
    """Return windows (float32[n, any length], oldest first) as float32[n, length]: the newest, or zeros in front."""
    missing = length - history.shape[1]
    return history[:, -length:] if missing <= 0 else torch.nn.functional.pad(history, (missing, 0))


class SlotViews:
    """The state of one slot: 0-d views into its arena, valid while the arena lives. Of a run of E slots with
    one format: views [E]."""

    __slots__ = (
        *("__weakref__", "always", "arena", "cold", "format"),
        *("pending", "saturated", "scale", "tokens", "underflow"),
    )

    def __init__(self, arena: Arena, index: int | slice) -> None:
        """Call ``Arena.state_of`` instead: a compiled graph takes two views of one slot for memory that overlaps."""
        self.arena = arena
        first = index.start if isinstance(index, slice) else index
        self.format: Format = arena.specs[first].format
        self.scale: Tensor = arena.scale[index]
        self.cold: Tensor = arena.cold[index]
        # Through .data each has a version counter of its own: a compiled block with activation checkpointing saves what
        # its recomputation records to, and autograd must not take other slots' amaxes for a change of it.
        self.pending: Tensor = arena.pending[index].data
        self.saturated: Tensor = arena.shares[0, index].data
        self.underflow: Tensor = arena.shares[1, index].data
        self.tokens: Tensor = arena.tokens[index].data
        self.always: Tensor = torch.ones_like(arena.cold[index]) if isinstance(index, slice) else arena.always


class Arena:
    """FP8 state of n slots under a recipe: ``arrays`` (see ``StateArrays``) and the slots' names.

    Addresses never change after ``place``: modules hold views, CUDA graphs hold pointers.

    - ``step``: 0-d int32, boundaries committed so far.
    - ``shares``: float32[2, n], shares of elements that this rank's casts saturated, and flushed to 0; -1: not
      measured.
    - ``tokens``: int64[n], tokens of this rank in a measured step, at the ``grad_output`` slots of experts.
    - ``message``: int32[8 + n], or int32[8 + 3n] if a ``fallback`` limits shares: ``send``, then the shares.
    - ``tripped``: bool[n], slots that triggered the fallback since ``tripped`` was last cleared.
    - ``always``: 0-d bool, True.
    - ``known_hot``: True if the host knows that no slot is cold. Slots only get hot, except by calls that write
      ``cold`` from the host: these call ``cold_written``.
    - ``cold_writes``: how often ``cold`` was written so.
    - ``scratches``: int32[1024, 4], 0 between casts: see ``scratch``.
    """

    def __init__(
        self, specs: Sequence[SlotSpec], recipe: Recipe, backend: str = "auto", fallback: Fallback | None = None
    ) -> None:
        self.specs = sorted_specs(specs)
        self.recipe = recipe
        self.backend = backend
        self.fallback = fallback
        self.lanes = SHARES if fallback is not None and fallback.measures else 0
        self.index: dict[Slot, int] = {spec.slot: i for i, spec in enumerate(self.specs)}
        self.ring = RingShape(recipe.history_len)
        self.rule = UpdateRule(
            recipe.history_len,
            recipe.margin,
            recipe.power_of_two,
            recipe.warmup == "current",
            "none" if callable(recipe.amax_algo) or not recipe.delayed else recipe.amax_algo,
        )
        self.placed = self.known_hot = False
        self.cold_writes = 0
        self._allocate(_CPU)

    def __len__(self) -> int:
        return len(self.specs)

    @torch.inference_mode(False)  # The first forward may run in inference mode; training writes these tensors too.
    def _allocate(self, device: torch.device) -> None:
        formats = [spec.format for spec in self.specs]
        self.device = device
        self._states: weakref.WeakValueDictionary[object, SlotViews] = weakref.WeakValueDictionary()
        arrays = StateArrays.allocate([f.max for f in formats], [f.rounds_to_max for f in formats], self.ring, device)
        n = len(formats)
        self.message = torch.zeros(HEADER + (1 + self.lanes) * n, dtype=torch.int32, device=device)
        self.shares = torch.full((SHARES, n), DID_NOT_RUN, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(n, dtype=torch.int64, device=device)
        self.tripped = torch.zeros(n, dtype=torch.bool, device=device)
        self.always = torch.ones((), dtype=torch.bool, device=device)
        self.scratches = torch.zeros(_SCRATCHES, 4, dtype=torch.int32, device=device)
        self._scratch = 0
        self._use(arrays._replace(send=self.message[: HEADER + n]))
        factor = 2.0 ** -(self.recipe.margin + self.recipe.power_of_two)
        self._target = self.fp8_max * factor  # Lower bound of an amax times the scale computed from it.

    def _use(self, arrays: StateArrays) -> None:
        """Set ``arrays``, and cache views of its fields."""
        self.arrays = arrays
        self._updates = direct.StateUpdates(arrays, self.rule, self.backend)
        self.pending, self.send, self.scales, self.sent = arrays.pending, arrays.send, arrays.scales, arrays.sent
        self.history, self.block_max, self.amax = arrays.history, arrays.block_max, arrays.amax
        self.cold, self.counters, self.flags = arrays.cold, arrays.counters, arrays.flags
        self.words, self.fp8_max = arrays.words, arrays.fp8_max
        self.shards, self.shard_slots = arrays.shards, arrays.shard_slots
        self.unpolled = arrays.unpolled
        self.scale, self.inv_scale = arrays.scales
        self.step = arrays.words[WORD_STEP]
        self.taken = arrays.counters[TAKEN]
        self._pending_bits = arrays.pending.view(torch.int32)

    _STATE = ("pending", "scales", "sent", "history", "block_max", "amax", "cold", "counters", "words", "tripped")

    def place(self, device: torch.device) -> None:
        """Move the state to ``device``, once. State that was loaded before is kept.

        Raises:
            ConfigurationError: the state is already placed elsewhere, or ``device`` is meta.
        """
        if device.type == "meta":
            raise ConfigurationError(
                "FP8 state cannot be placed on the meta device: materialise the model before attach()"
            )
        if self.placed:
            if device != self.device:
                raise ConfigurationError(
                    f"the model moved from {self.device} to {device} after its FP8 state was placed; "
                    "move the model first, then call attach() (or run the first forward)"
                )
            return
        if device != self.device:
            kept = {name: getattr(self, name) for name in self._STATE}
            self._allocate(device)
            self.put_back(kept)
        self.placed = True

    def extended(self, specs: Sequence[SlotSpec]) -> Arena:
        """Return a new arena that also has these slots. State is carried over.

        Raises:
            ConfigurationError: the arena is already placed (modules hold views), or a slot exists.
        """
        if self.placed:
            raise ConfigurationError("register() must come before attach() and before the first forward")
        larger = Arena([*self.specs, *specs], self.recipe, self.backend, self.fallback)
        places = torch.tensor([larger.index[spec.slot] for spec in self.specs], dtype=torch.int64)
        for name in self._STATE:
            mine, theirs = getattr(self, name), getattr(larger, name)
            if name == "words":
                theirs.copy_(mine)
            elif name in ("scales", "sent", "counters"):
                theirs[:, places] = mine
            else:
                theirs[places] = mine
        larger.cold_writes = self.cold_writes + 1
        return larger

    @torch.inference_mode(False)
    def hold_shards(self, users: Mapping[int, Sequence[int]]) -> None:
        """Mark weights as sharded: no rank sees a whole weight, and each rank reports the amax of its part.

        A rank reports the amax even if its own modules did not run, because it still holds a part of the weight. A
        commit takes the amax if any rank ran one of the weight's users.

        ``shards`` has a place for the amax of each such slot, in the order of ``shard_slots``; -1 until written.

        Args:
            users: by index of a weight slot, the indices of its users' input slots, which show if the users ran.
        """
        places = sorted(users)
        widest = max((len(users[place]) for place in places), default=0)
        padded = [[*users[place], *[users[place][0]] * (widest - len(users[place]))] for place in places]
        self._use(self.arrays.with_shards(places, padded))

    # The step ------------------------------------------------------------------------------------

    def launch(self, hold: Tensor | None = None, drop_nonfinite: bool = False) -> None:
        """Fill ``message`` with this rank's live state: the header, ``pending`` and the shares. See ``ops.launch``."""
        self._updates.launch(hold, drop_nonfinite)
        if self.lanes:
            self.message[self.send.numel() :].copy_(self.shares.view(-1).view(torch.int32))
            self.shares.fill_(DID_NOT_RUN)

    def give_back(self, reduced: Tensor, hold: Tensor, drop_nonfinite: bool) -> None:
        """Where ``hold`` is non-zero, merge the amaxes of an uncommitted result back into ``pending``."""
        give_back(reduced[: self.send.numel()], self._pending_bits, hold, drop_nonfinite)

    def fits(self, amax: Tensor) -> Tensor:
        """Return bool[n]: True where a slot's scale still fits a tensor with ``amax`` (float32[n]). The tensor does not
        saturate, and its amax is at least half of the last amax taken."""
        used = amax * self.scale
        expected = torch.where(self.amax > 0, self.amax, self._target / self.scale)
        return (used <= self.arrays.rounds_to_max) & (2 * amax >= expected)

    def commit(self, reduced: Tensor, hold: Tensor | None = None) -> Tensor:
        """Roll the history, recompute the scales and increment the step counter. See ``ops.commit``.

        Args:
            reduced: ``message`` after the collective.
            hold: 0-d or None. If non-zero, no amax is taken and the step counter stays.

        Returns:
            bool[7]: what the sync proved.
        """
        outcome = self._updates.commit(reduced, hold)
        if callable(self.recipe.amax_algo):
            self.rescale(self.window_amax(), self.flags[TAKEN])
        if self.fallback is not None:
            self._trip(self.fallback, reduced, hold)
        return outcome

    @property
    def saturated_amaxes(self) -> int:
        """Number of amaxes beyond the scale of their cast. Reads the device.

        A tensor cast just in time never exceeds its scale. So without delayed scaling, only sharded weights count:
        their parts share a scale.
        """
        counts = self.counters[SATURATED]
        return int((counts if self.recipe.delayed else counts[self.shard_slots]).sum())

    def _trip(self, fallback: Fallback, reduced: Tensor, hold: Tensor | None) -> None:
        """Mark the slots that triggered the fallback on any rank."""
        if fallback.nonfinite:
            self.tripped.logical_or_(self.flags[NONFINITE])
        if self.lanes:
            shares = reduced[self.send.numel() :].view(torch.float32).view(SHARES, -1)
            for share, limit in zip(shares, (fallback.saturated, fallback.underflow)):
                if limit is not None:
                    over = share > limit
                    self.tripped.logical_or_(over if hold is None else over & (hold.reshape(()) == 0))

    def rescale(self, amax: Tensor, where: Tensor) -> None:
        """Recompute the scales from ``amax`` (float32[n]), where ``where`` (bool[n]) is True and the amax positive and
        finite."""
        recipe = self.recipe
        scale_from_amax(amax, self.scale, self.fp8_max, recipe.margin, recipe.power_of_two, where, out=self.scale)
        torch.reciprocal(self.scale, out=self.inv_scale)

    def forget_history(self, where: Tensor) -> None:
        """Empty the windows of the slots where ``where`` (bool[n]) is True."""
        self.history.masked_fill_(where[:, None], 0)
        self.block_max.masked_fill_(where[:, None], 0)
        self.amax.masked_fill_(where, 0)

    def mask(self, places: Sequence[int]) -> Tensor:
        """Return bool[n], True at these indices."""
        where = torch.zeros(len(self), dtype=torch.bool, device=self.device)
        where[torch.tensor(places, dtype=torch.int64, device=self.device)] = True
        return where

    def cold_written(self) -> None:
        """Note that slots may be cold again, whatever a sync in flight will show."""
        self.known_hot = False
        self.cold_writes += 1

    def scratch(self) -> Tensor:
        """Return int32[4] for a cast that may find its slot cold (see ``ops.quantize``).

        Casts take turns. A captured cast keeps its own for all replays, so two streams of a graph do not share one.
        """
        self._scratch = (self._scratch + 1) % _SCRATCHES
        return self.scratches[self._scratch]

    # Reading and writing -------------------------------------------------------------------------

    def ordered_history(self) -> Tensor:
        """Return a float32[n, history_len] copy of the windows, oldest first."""
        return ordered_window(self.history, self.taken, self.ring)

    def window_amax(self) -> Tensor:
        """Return float32[n]: the recipe's ``amax_algo`` applied to the current windows."""
        algorithm = self.recipe.amax_algo
        if not callable(algorithm):
            return self.block_max.amax(1) if algorithm == "max" else self.amax
        reduced = algorithm(self.ordered_history())
        if reduced.shape != self.amax.shape or reduced.dtype != torch.float32:
            raise ConfigurationError(
                f"amax_algo must return float32[{len(self)}], got {reduced.dtype} of shape {tuple(reduced.shape)}"
            )
        return reduced

    def window(self, index: int) -> Tensor:
        """Return a float32[history_len] copy of one slot's window, oldest first."""
        row = slice(index, index + 1)
        return ordered_window(self.history[row], self.taken[row], self.ring)[0]

    def shared_state(self) -> list[Tensor]:
        """Return the state that is equal on all ranks of this arena, as tensors that any backend can send, or receive
        into."""
        self.cold_written()
        cold = self.cold.view(torch.uint8)
        return [self.scales, self.history, self.block_max, self.amax, cold, self.counters, self.words]

    def reset(self) -> None:
        """Reset the arena to its initial state. The manifest stays."""
        self.cold_written()
        manifest = self.words[WORD_MANIFEST].clone()
        self.pending.fill_(DID_NOT_RUN)
        for tensor in (self.scales, self.sent, self.cold):
            tensor.fill_(1)
        self.shares.fill_(DID_NOT_RUN)
        for tensor in (self.history, self.block_max, self.amax, self.counters, self.words, self.unpolled, self.tripped):
            tensor.zero_()
        self.words[WORD_MANIFEST] = manifest

    def copied_state(self) -> dict[str, Tensor]:
        """Return a copy of everything that a step changes, for ``put_back``."""
        return {name: getattr(self, name).clone() for name in self._STATE}

    def put_back(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state, in place."""
        for name, value in state.items():
            getattr(self, name).copy_(value)
        self.cold_written()

    # Copying and pickling rebuild the views ---------------------------------------------------------

    def state_of(self, slot: Slot) -> SlotViews:
        """Return the state of a slot: the same object to all who hold it, such as modules that share a weight."""
        index = self.index[slot]
        state = self._states.get(index)
        if state is None:
            state = self._states[index] = SlotViews(self, index)
        return state

    def run_of(self, slots: Sequence[Slot]) -> slice:
        """Return the places of the slots of all experts of a grouped product, one role of each, in their order."""
        first = self.index[slots[0]]
        assert all(self.index[slot] == first + expert for expert, slot in enumerate(slots))
        return slice(first, first + len(slots))

    def state_of_run(self, slots: Sequence[Slot]) -> SlotViews:
        """Return the state of several experts' slots, one role of all of them: see ``run_of``."""
        run = self.run_of(slots)
        key = run.start, run.stop
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = SlotViews(self, run)
        return state

    def __getstate__(self) -> dict[str, Any]:
        kept = ("specs", "recipe", "backend", "fallback", "device", "placed")
        state = {name: getattr(self, name) for name in self._STATE}
        return {**{name: getattr(self, name) for name in kept}, "state": state}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        Arena.__init__(self, saved["specs"], saved["recipe"], saved["backend"], saved["fallback"])
        self._allocate(saved["device"])
        self.put_back(saved["state"])
        self.placed = saved["placed"]
