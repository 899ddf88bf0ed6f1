"""An arena: the slots of one reduction group as flat arrays, in sorted slot order.

The arrays live outside the module tree. As buffers, DDP would overwrite them with rank 0's (and hide a
divergence) and ``.bfloat16()`` would cast them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist.formats import Format, Role
from fp8dist.kernels.digest import position_keys
from fp8dist.kernels.magnitude import DID_NOT_RUN, DID_NOT_RUN_BITS, INFINITY_BITS
from fp8dist.kernels.rings import RingShape, ordered_window, write, write_window
from fp8dist.kernels.update import HEADER, WORD_MANIFEST, WORD_STEP, WORDS, give_back, snapshot, withhold
from fp8dist.recipe import DelayedScaling
from fp8dist.scaling import scale_from_amax
from fp8dist.state.slots import Slot, SlotSpec, sorted_specs

__all__ = ["Arena", "SlotState"]

TAKEN, NONFINITE, SATURATED = range(3)
_CPU = torch.device("cpu")


class SlotState:
    """The place of one slot in its arena: 0-d views that stay valid while the arena lives."""

    __slots__ = ("cold", "format", "pending", "scale")

    def __init__(self, arena: Arena, index: int) -> None:
        self.format: Format = arena.specs[index].format
        self.scale: Tensor = arena.scale[index]
        self.cold: Tensor = arena.cold[index]
        self.pending: Tensor = arena.pending[index]


class Arena:
    """FP8 state of n slots.

    ========== ================ ==========================================================
    pending    float32[n]       amax since the last launch; -1: did not run on this rank
    send       int32[8 + n]     header | bits of pending; reduced in place
    scales     float32[2, n]    ``scale`` and ``inv_scale``; start at 1
    sent       float32[2, n]    scales as they were at the last launch
    history    float32[n, P]    rings of ``recipe.history_len`` entries (see kernels.rings)
    amax       float32[n]       the newest amax that the history took
    cold       bool[n]          no positive finite amax committed yet
    counters   int64[3, n]      amaxes taken, non-finite amaxes, amaxes beyond the scale in use
    words      int32[4]         header words; ``step``, boundaries committed so far, is one of them
    flags      bool[3, n]       which of the counters went up at the last commit
    shards     float32[m]       amax of this rank's part of m sharded weights (``hold_shards``)
    ========== ================ ==========================================================

    Addresses never change after ``place``: modules hold views, CUDA graphs hold pointers.
    """

    def __init__(self, specs: Sequence[SlotSpec], recipe: DelayedScaling) -> None:
        self.specs = sorted_specs(specs)
        self.recipe = recipe
        self.index: dict[Slot, int] = {spec.slot: i for i, spec in enumerate(self.specs)}
        self.ring = RingShape(recipe.history_len)
        self.placed = False
        self._allocate(_CPU)

    def __len__(self) -> int:
        return len(self.specs)

    @torch.inference_mode(False)  # The first forward may be in inference mode; these are written in training too.
    def _allocate(self, device: torch.device) -> None:
        n = len(self.specs)
        self.device = device
        self.pending = torch.full((n,), DID_NOT_RUN, dtype=torch.float32, device=device)
        self.send = torch.zeros(HEADER + n, dtype=torch.int32, device=device)
        self.scales = torch.ones(2, n, dtype=torch.float32, device=device)
        self.sent = torch.ones(2, n, dtype=torch.float32, device=device)
        self.history = torch.zeros(n, self.ring.padded, dtype=torch.float32, device=device)
        self.block_max = torch.zeros(n, self.ring.blocks, dtype=torch.float32, device=device)
        self.amax = torch.zeros(n, dtype=torch.float32, device=device)
        self.cold = torch.ones(n, dtype=torch.bool, device=device)
        self.counters = torch.zeros(3, n, dtype=torch.int64, device=device)
        self.words = torch.zeros(WORDS, dtype=torch.int32, device=device)
        self.flags = torch.zeros(3, n, dtype=torch.bool, device=device)
        self.shards = torch.empty(0, dtype=torch.float32, device=device)
        self.shard_slots = torch.empty(0, dtype=torch.int64, device=device)
        # Views, taken once.
        self.scale, self.inv_scale = self.scales
        self.step = self.words[WORD_STEP]
        self.taken = self.counters[TAKEN]
        self._flags = tuple(self.flags)
        self._pending_bits = self.pending.view(torch.int32)
        self._scale_bits = self.scales.view(-1).view(torch.int32)
        # Constants.
        self.fp8_max = torch.tensor([spec.format.max for spec in self.specs], dtype=torch.float32, device=device)
        self._rounds_to_max = torch.tensor(
            [spec.format.rounds_to_max for spec in self.specs], dtype=torch.float32, device=device
        )
        factor = 2.0 ** -(self.recipe.margin + self.recipe.power_of_two)
        self._target = self.fp8_max * factor  # What an amax times the scale that follows from it is at least.
        self._keys = position_keys(2 * n, device)
        self._row_start = torch.arange(n, device=device) * self.ring.padded

    _STATE = ("pending", "scales", "sent", "history", "block_max", "amax", "cold", "counters", "words")

    def place(self, device: torch.device) -> None:
        """Move to ``device``, once. State that was loaded before is kept.

        Raises:
            ConfigurationError: already placed elsewhere, or ``device`` is meta.
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
        """A new arena with these slots as well. State is carried over.

        Raises:
            ConfigurationError: already placed (modules hold views), or a slot exists.
        """
        if self.placed:
            raise ConfigurationError("register() must come before attach() and before the first forward")
        larger = Arena([*self.specs, *specs], self.recipe)
        places = torch.tensor([larger.index[spec.slot] for spec in self.specs], dtype=torch.int64)
        for name in self._STATE:
            mine, theirs = getattr(self, name), getattr(larger, name)
            if name == "words":
                theirs.copy_(mine)
            elif name in ("scales", "sent", "counters"):
                theirs[:, places] = mine
            else:
                theirs[places] = mine
        return larger

    def slots_of(self, role: Role) -> Iterator[tuple[Slot, int]]:
        """The slots of one role and their places."""
        return ((slot, i) for slot, i in self.index.items() if slot.role == role.value)

    @torch.inference_mode(False)
    def hold_shards(self, users: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Some weights are sharded: no rank sees all of them, and each gives the amax of its part.

        A rank gives it whether its own modules ran or not, and a commit takes it where any rank ran one of its users.
        (A rank that skips a module holds a part of its weight nevertheless.)

        Args:
            users: by place of a weight slot, the places of its users' input slots, which tell whether they ran.

        Returns:
            By place of the slot, where its amax is written: 0-d float32 views, -1 until then.
        """
        places = sorted(users)
        widest = max((len(users[place]) for place in places), default=0)
        padded = [[*users[place], *[users[place][0]] * (widest - len(users[place]))] for place in places]
        self.shards = torch.full((len(places),), DID_NOT_RUN, dtype=torch.float32, device=self.device)
        self.shard_slots = torch.tensor(places, dtype=torch.int64, device=self.device)
        self._shard_users = torch.tensor(padded, dtype=torch.int64, device=self.device)
        return {place: self.shards[i] for i, place in enumerate(places)}

    # The step ------------------------------------------------------------------------------------

    def set_manifest_word(self, word: int) -> None:
        """What the header says of the manifest: an int32."""
        self.words[WORD_MANIFEST] = word

    def snapshot(self, hold: Tensor | None = None, drop_nonfinite: bool = False) -> None:
        """What a launch sends: ``pending``, and a header from the live state. See ``kernels.update``."""
        if len(self.shards):
            self._pending_bits.index_copy_(0, self.shard_slots, self.shards.view(torch.int32))
        snapshot(self.words, self._scale_bits, self._keys, self._pending_bits, self.send)
        self.sent.copy_(self.scales)
        if hold is None:
            self.pending.fill_(DID_NOT_RUN)
        else:
            withhold(self.send, self._pending_bits, hold, drop_nonfinite)

    def give_back(self, reduced: Tensor, hold: Tensor, drop_nonfinite: bool) -> None:
        """Where ``hold`` is non-zero, amaxes of a result that must not be committed wait for the next launch."""
        give_back(reduced, self._pending_bits, hold, drop_nonfinite)

    def fits(self, amax: Tensor) -> Tensor:
        """bool[n]: whether the scales still fit tensors that have ``amax`` (float32[n]) now: they do not saturate, and
        are at least half as large as when they were seen last."""
        used = amax * self.scale
        expected = torch.where(self.amax > 0, self.amax, self._target / self.scale)
        return (used <= self._rounds_to_max) & (2 * amax >= expected)

    def commit(self, reduced: Tensor, trusted: Tensor | bool, hold: Tensor | None = None) -> Tensor:
        """History rolls, scales are recomputed, the step counter goes up.

        Args:
            reduced: int32[8 + n], ``send`` after the collective.
            trusted: bool, on the host or 0-d on the device: if False nothing is mixed in.
            hold: 0-d or None: where it is non-zero this is no step.

        Returns:
            bool: whether a slot saw a non-finite amax; 0-d, or where weights are sharded [2]: and whether one of
            those was cast beyond its scale.
        """
        bits = reduced[HEADER:]
        if len(self.shards):
            ran = bits[self._shard_users].amax(1) >= 0
            amaxes = torch.where(ran, bits[self.shard_slots], DID_NOT_RUN_BITS)
            bits = bits.index_copy(0, self.shard_slots, amaxes)
        if trusted is not True:
            bits = torch.where(torch.as_tensor(trusted, device=bits.device), bits, DID_NOT_RUN_BITS)
        amax = bits.view(torch.float32)
        taken, nonfinite, saturated = self._flags
        torch.ge(bits, INFINITY_BITS, out=nonfinite)
        torch.ge(bits, 0, out=taken).bitwise_xor_(nonfinite)
        torch.gt(amax * self.scale, self._rounds_to_max, out=saturated).bitwise_and_(taken)
        if self.recipe.warmup == "current":
            # What was cast just in time cannot exceed its own scale: saturated and not cold.
            torch.gt(saturated, self.cold, out=saturated)
        window_max = write(self.history, self.block_max, self.taken, self._row_start, self.ring, amax, taken)
        self.counters.add_(self.flags)
        torch.where(taken, amax, self.amax, out=self.amax)
        self.cold.bitwise_and_(self.amax <= 0)
        self._rescale(self._reduce_windows(window_max), taken)
        self.step.add_(1 if hold is None else hold.reshape(()) == 0)
        if len(self.shards):
            return torch.stack([nonfinite.any(), saturated[self.shard_slots].any()])
        return nonfinite.any()

    def _reduce_windows(self, window_max: Tensor) -> Tensor:
        algorithm = self.recipe.amax_algo
        if algorithm == "max":
            return window_max
        if algorithm == "most_recent":
            return self.amax
        assert callable(algorithm)
        reduced = algorithm(self.ordered_history())
        if reduced.shape != window_max.shape or reduced.dtype != torch.float32:
            raise ConfigurationError(
                f"amax_algo must return float32[{len(self)}], got {reduced.dtype} of shape {tuple(reduced.shape)}"
            )
        return reduced

    def _rescale(self, amax: Tensor, where: Tensor) -> None:
        recipe = self.recipe
        scale_from_amax(amax, self.scale, self.fp8_max, recipe.margin, recipe.power_of_two, where, out=self.scale)
        torch.reciprocal(self.scale, out=self.inv_scale)

    def derive_scales(self, amax: Tensor, where: Tensor) -> None:
        """Set scales from ``amax`` (float32[n]) alone where bool[n] says so and it is usable; those
        slots are no longer cold. No history, no step."""
        usable = where & (amax > 0) & (amax < torch.inf)
        self._rescale(amax, usable)
        self.cold.bitwise_and_(~usable)

    def forget_history(self, where: Tensor) -> None:
        """Empty the windows of the slots where bool[n] says so."""
        self.history.masked_fill_(where[:, None], 0)
        self.block_max.masked_fill_(where[:, None], 0)
        self.amax.masked_fill_(where, 0)

    def adopt_untaken_scales(self, scales: Tensor) -> None:
        """Take scale and inv_scale (float32[2, n]) for the slots that the last commit left as they were."""
        torch.where(self.flags[TAKEN], self.scales, scales, out=self.scales)

    def set_scale(self, index: int, scale: float) -> None:
        """Set one slot's scale; it is no longer cold."""
        self.scale[index] = scale
        torch.reciprocal(self.scale, out=self.inv_scale)
        self.cold[index] = False

    # Reading and writing -------------------------------------------------------------------------

    def ordered_history(self) -> Tensor:
        """float32[n, history_len] copy, oldest first."""
        return ordered_window(self.history, self.taken, self.ring)

    def window_amax(self) -> Tensor:
        """float32[n]: what the recipe's ``amax_algo`` makes of the windows as they are."""
        return self._reduce_windows(self.block_max.amax(1))

    def window(self, index: int) -> Tensor:
        """float32[history_len] copy of one slot's window, oldest first."""
        row = slice(index, index + 1)
        return ordered_window(self.history[row], self.taken[row], self.ring)[0]

    def shared_state(self) -> list[Tensor]:
        """What is equal on all ranks that share this arena, as tensors that any backend can send."""
        return [
            self.scales,
            self.history,
            self.block_max,
            self.amax,
            self.cold.view(torch.uint8),
            self.counters,
            self.words,
        ]

    def write_history(self, rows: Tensor, index: Tensor) -> None:
        """Replace the windows of the slots ``index`` (int64[m]) by ``rows`` (float32[m, history_len],
        oldest first)."""
        windows = self.ordered_history()
        windows[index] = rows
        write_window(self.history, self.block_max, self.taken, self.ring, windows)

    def reset(self) -> None:
        """Back to the state of a new arena. The manifest stays."""
        manifest = self.words[WORD_MANIFEST].clone()
        self.pending.fill_(DID_NOT_RUN)
        for tensor in (self.scales, self.sent, self.cold):
            tensor.fill_(1)
        for tensor in (self.history, self.block_max, self.amax, self.counters, self.words):
            tensor.zero_()
        self.words[WORD_MANIFEST] = manifest

    def copied_state(self) -> dict[str, Tensor]:
        """Everything that a step changes, for ``put_back``."""
        return {name: getattr(self, name).clone() for name in self._STATE}

    def put_back(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state, in place."""
        for name, value in state.items():
            getattr(self, name).copy_(value)

    # Copying and pickling: views are rebuilt, so that they are views again -------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in self._STATE}
        return {
            "specs": self.specs,
            "recipe": self.recipe,
            "device": self.device,
            "placed": self.placed,
            "state": state,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        Arena.__init__(self, saved["specs"], saved["recipe"])
        self._allocate(saved["device"])
        self.put_back(saved["state"])
        self.placed = saved["placed"]
