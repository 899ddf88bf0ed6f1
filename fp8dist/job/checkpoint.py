"""Save FP8 state under keys that name the ranks that share it, and load a saved state into this model."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8dist.common.text import first_few
from fp8dist.errors import CheckpointError
from fp8dist.job.cycle import StepCycle
from fp8dist.modules.expert_layouts import describe_experts
from fp8dist.state import overwrites, storage
from fp8dist.state.arena import Arena, fitted, unchanged_on_failure
from fp8dist.state.groups import SyncGroup, own_rank, world_size
from fp8dist.state.precision import Precisions
from fp8dist.state.slots import Slot, SlotSpec
from fp8dist_kernels.formats import FORMATS
from fp8dist_kernels.scaling import amax_behind_scale

logger = logging.getLogger("fp8dist")

_CONVERTIBLE = ("amax_algo", "margin", "power_of_two", "seed")
_HOW_TO_CONVERT = "convert=True (of load_state_dict and load) derives new scales by the recipe of this model"


class Checkpoint:
    """The FP8 state of one manager as checkpoints hold it.

    The value of a key is opaque bytes, because torch.distributed.checkpoint (DCP) loads tensors only into tensors of
    equal shape and does not know slots. DCP merges equal keys of several ranks, so a key names the ranks that share
    the state:

    ========================  =================================================================================
    shared                    all ranks of the job, whatever their number
    ranks<first>-<identity>   the ranks of a smaller group
    rank<r>                   this rank only (``amax_sync=False``)
    ========================  =================================================================================
    """

    def __init__(self, cycle: StepCycle, model: nn.Module | None) -> None:
        self._cycle = cycle
        self._model = model

    def state_dict(self) -> dict[str, bytes]:
        """Return this rank's state by key. Local."""
        self._cycle.require("saving state")
        self._cycle.state.settle()
        return {key: self._to_bytes(arenas) for key, arenas in self._arenas_by_key().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, convert: bool) -> None:
        """Load this rank's keys. Local.

        Raises:
            CheckpointError: a key is missing (if ``strict``) or does not fit. Nothing was changed.
        """
        self._cycle.require("loading state")
        if not isinstance(state_dict, Mapping):
            raise CheckpointError(
                f"load_state_dict() takes what manager.state_dict() returned, a dict, got a {type(state_dict).__name__}"
            )
        if "slots" in state_dict and "version" in state_dict:
            storage.validated_slots(state_dict)  # The layout of version 1: raises.
        matches = []
        for key, arenas in self._arenas_by_key().items():
            if key in state_dict:
                matches.append(_match(f"FP8 state {key!r}", arenas, _parsed(key, state_dict[key]), strict, convert))
                continue
            there = ", ".join(map(repr, sorted(map(str, state_dict)))) or "nothing"
            text = f"the checkpoint has no FP8 state {key!r}; there is {there}"
            if strict:
                raise CheckpointError(f"{text}. Keys say which ranks share state: see StateManager.state_dict")
            logger.warning("fp8dist: loading FP8 state non-strictly: %s", text)
        self._take_over(matches)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all state of this rank to one file. Local."""
        self._cycle.require("saving state")
        self._cycle.state.settle()
        storage.write_file(with_rank(path), self._to_bytes(self._arenas()))

    def load(self, path: str | os.PathLike[str], strict: bool, convert: bool) -> None:
        """Load a file that ``save`` wrote. Local.

        Raises:
            CheckpointError: the file is missing, damaged or foreign, or does not fit. Nothing was changed.
        """
        self._cycle.require("loading state")
        source = with_rank(path)
        saved, _ = storage.read_file(source)
        self._take_over([_match(source, self._arenas(), saved, strict, convert)])

    def _arenas(self) -> list[Arena]:
        return [sync.arena for sync in self._cycle.syncs]

    def _arenas_by_key(self) -> dict[str, list[Arena]]:
        arenas: dict[str, list[Arena]] = {}
        for sync, group in zip(self._cycle.syncs, self._cycle.groups):
            arenas.setdefault(_key(group if self._cycle.settings.amax_sync else None), []).append(sync.arena)
        return arenas

    def _to_bytes(self, arenas: Sequence[Arena]) -> bytes:
        state = _collected(arenas, self._cycle.precisions)
        described = {"settings": self._cycle.settings.describe(), **describe_experts(self._model)}
        return storage.to_bytes(state, described)

    def _take_over(self, matches: Sequence[_Match]) -> None:
        precisions = self._cycle.precisions
        precision = precisions.describe()
        try:
            with unchanged_on_failure(self._arenas()):  # A callable amax_algo may raise.
                for match in matches:
                    match.apply()
                # A module belongs to one arena, and thus to one match.
                loaded = {slot.fqn for match in matches for slot in match.loaded}
                kept = {fqn: of for fqn, of in precision.items() if fqn not in loaded}
                theirs = {fqn: of for match in matches for fqn, of in match.precision.items()}
                woken = precisions.restore({**kept, **theirs})
        except BaseException:
            precisions.restore(precision)
            raise
        self._cycle.control.wake(woken)
        tripped = {slot for match in matches for slot in match.tripped}
        for sync in self._cycle.syncs:
            sync.abandon()
            sync.trip([place for slot, place in sync.arena.index.items() if slot in tripped])
        self._cycle.state_loaded({slot for match in matches for slot in match.loaded})


def _key(group: SyncGroup | None) -> str:
    if world_size() == 1 or (group is not None and group.size == world_size()):
        return "shared"
    return f"rank{own_rank()}" if group is None else f"ranks{min(group.ranks)}-{group.identity}"


def with_rank(path: str | os.PathLike[str]) -> str:
    """Return the path with ``{rank}`` replaced by this rank's number."""
    return os.fspath(path).replace("{rank}", str(own_rank()))


def _parsed(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, bytes):
        raise CheckpointError(f"FP8 state {key!r} is of type {type(value).__name__}, expected bytes")
    return storage.from_bytes(value, f"FP8 state {key!r}")[0]


def _collected(arenas: Sequence[Arena], precisions: Precisions) -> dict[str, Any]:
    """Return the state of all slots as CPU tensors in slot order, with names, formats and recipes."""
    specs = [spec for arena in arenas for spec in arena.specs]
    recipes = list(dict.fromkeys(arena.recipe for arena in arenas if len(arena)) or [arenas[0].recipe])
    recipe_of = [recipes.index(arena.recipe) for arena in arenas for _ in arena.specs]
    length = max(arena.ring.length for arena in arenas)
    fqns = {spec.slot.fqn for spec in specs}
    order = sorted(range(len(specs)), key=lambda i: specs[i].slot)

    def merged(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        whole = torch.cat([t.detach().cpu() for t in tensors], dim)
        return whole.index_select(dim, torch.tensor(order, dtype=torch.int64, device="cpu"))

    return {
        "version": storage.FORMAT_VERSION,
        "slots": [list(specs[i].slot) for i in order],
        "formats": [specs[i].format.name for i in order],
        "recipes": [recipe.describe() for recipe in recipes],
        "recipe_of": [recipe_of[i] for i in order],
        "precision": {fqn: of for fqn, of in precisions.describe().items() if fqn in fqns},
        "tripped": merged([a.tripped for a in arenas]).nonzero().flatten().tolist(),
        "step": arenas[0].step.detach().cpu().to(torch.int64).clone(),
        "scale": merged([a.scale for a in arenas]),
        "amax": merged([a.amax for a in arenas]),
        "cold": merged([a.cold for a in arenas]),
        "counters": merged([a.counters for a in arenas], 1),
        "history": merged([fitted(a.ordered_history(), length) for a in arenas]),
    }


def _match(name: str, arenas: Sequence[Arena], saved: Mapping[str, Any], strict: bool, convert: bool) -> _Match:
    try:
        return _Match(arenas, saved, strict, convert)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None


class _Match:
    """A saved state and the arenas that it is loaded into, matched by names of slots.

    Raises:
        CheckpointError: the state does not fit.
    """

    def __init__(self, arenas: Sequence[Arena], saved: Mapping[str, Any], strict: bool, convert: bool) -> None:
        names = storage.validated_slots(saved)
        self._arenas = arenas
        self._saved = saved
        self.precision: Mapping[str, Any] = saved["precision"]
        """By fqn: precision of the modules that had changed it since ``prepare``."""
        self._places = {slot: i for i, slot in enumerate(names)}
        self._compare_slots(strict)
        self._changed, changes = self._compare_recipes()
        if changes and not convert:
            raise CheckpointError(f"it was saved by another recipe: {'; '.join(changes)}. {_HOW_TO_CONVERT}")
        self._stood_for = self._amaxes_behind_scales() if changes else torch.empty(0)

    @property
    def loaded(self) -> set[Slot]:
        """Slots of the arenas that the saved state contains."""
        return {slot for arena in self._arenas for slot in arena.index if slot in self._places}

    @property
    def tripped(self) -> set[Slot]:
        """Saved slots that had passed a limit of ``prepare(fallback=…)``, and whose modules had not yet fallen back."""
        return {slot for slot, place in self._places.items() if place in self._saved["tripped"]}

    def _compare_slots(self, strict: bool) -> None:
        ours = {slot for arena in self._arenas for slot in arena.index}
        missing, unexpected = sorted(ours - self._places.keys()), sorted(self._places.keys() - ours)
        if missing or unexpected:
            text = f"missing slots: {first_few(missing)}; unexpected slots: {first_few(unexpected)}"
            if strict:
                raise CheckpointError(f"the saved FP8 state is of another model. {text}")
            logger.warning("fp8dist: loading FP8 state non-strictly. %s", text)

    def _compare_recipes(self) -> tuple[set[Slot], list[str]]:
        """Return (slots whose scales follow another rule or format than when saved, texts of the changes)."""
        changed: set[Slot] = set()
        changes: dict[str, None] = {}
        odd: list[SlotSpec] = []
        for arena in self._arenas:
            mine = arena.recipe.describe()
            for spec in arena.specs:
                if spec.slot not in self._places:
                    continue
                theirs = self._recipe_of(spec.slot)
                found = _differences(theirs, mine)
                changes.update(dict.fromkeys(found))
                if arena.recipe.delayed and self._format_of(spec.slot) != spec.format.name:
                    odd.append(spec)
                elif not found:
                    continue
                changed.add(spec.slot)
        if odd:
            more = f" (and {len(odd) - 1} more slots have another format)" if len(odd) > 1 else ""
            slot, format, _ = min(odd)
            changes[f"format of {slot} is {self._format_of(slot)!r} there and {format.name!r} here{more}"] = None
        return changed, list(changes)

    def _recipe_of(self, slot: Slot) -> dict[str, Any]:
        recipe: dict[str, Any] = self._saved["recipes"][self._saved["recipe_of"][self._places[slot]]]
        return recipe

    def _format_of(self, slot: Slot) -> str:
        name: str = self._saved["formats"][self._places[slot]]
        return name

    def _amaxes_behind_scales(self) -> Tensor:
        """Return the amaxes that the saved scales stand for: float32[n] on the CPU, in the order of the saved slots.

        The margin is taken out. The rounding to a power of two cannot be undone.

        Raises:
            CheckpointError: a saved margin or format is not one of this version.
        """
        names = self._saved["formats"]
        margins = [recipe.get("margin", 0) for recipe in self._saved["recipes"]]
        for margin in margins:
            if not isinstance(margin, int) or isinstance(margin, bool) or not -64 <= margin <= 64:
                raise CheckpointError(f"its margin is {margin!r}: it cannot be converted")
        unknown = sorted({name for name in names if name not in FORMATS})
        if unknown:
            raise CheckpointError(f"it has slots of format {unknown[0]!r}, which is unknown here")
        largest = torch.tensor([FORMATS[name].max for name in names], dtype=torch.float32, device="cpu")
        factors = torch.tensor([2.0 ** margins[i] for i in self._saved["recipe_of"]], device="cpu")
        return amax_behind_scale(self._saved["scale"].cpu(), largest / factors)

    def apply(self) -> None:
        """Write the saved state to the arenas."""
        for arena in self._arenas:
            found = [(i, self._places[slot]) for slot, i in arena.index.items() if slot in self._places]
            mine = torch.tensor([i for i, _ in found], dtype=torch.int64, device=arena.device)
            theirs = torch.tensor([i for _, i in found], dtype=torch.int64, device="cpu")
            self._copy(arena, mine, theirs)
            if self._changed:
                self._convert(arena, mine, theirs)

    def _copy(self, arena: Arena, mine: Tensor, theirs: Tensor) -> None:
        def rows(name: str, dim: int = 0) -> Tensor:
            values: Tensor = self._saved[name].cpu()
            return values.index_select(dim, theirs).to(arena.device)

        arena.step.copy_(self._saved["step"])
        kinds = [self._recipe_of(slot).get("recipe") for slot in arena.index if slot in self._places]
        if not arena.recipe.delayed and any(kind != type(arena.recipe).__name__ for kind in kinds):
            return  # Just-in-time scales need no state of another recipe.
        overwrites.load_slots(
            arena, mine, rows("scale"), rows("amax"), rows("cold"), rows("counters", 1), rows("history")
        )

    def _convert(self, arena: Arena, mine: Tensor, theirs: Tensor) -> None:
        """Derive scales by this recipe. Slots that were saved by an equal recipe keep their scales."""
        stood_for = torch.zeros_like(arena.amax)
        stood_for[mine] = self._stood_for.index_select(0, theirs).to(arena.device)
        changed = torch.tensor([slot in self._changed for slot in arena.index], dtype=torch.bool, device=arena.device)
        overwrites.convert_scales(arena, changed, stood_for)


def _differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Return the differences of two recipes that change scales. Just-in-time scales fit any saved state."""
    if mine["recipe"] not in ("DelayedScaling", "NVFP4Scaling"):
        return []
    if theirs.get("recipe") != mine["recipe"]:
        return [f"recipe is {theirs.get('recipe')!r} there and {mine['recipe']!r} here"]
    return [
        f"{name} is {theirs.get(name)!r} there and {mine.get(name)!r} here"
        for name in _CONVERTIBLE
        if theirs.get(name) != mine.get(name)
    ]
